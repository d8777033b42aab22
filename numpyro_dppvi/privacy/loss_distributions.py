"""Privacy loss distributions: of one event, and of everything that was released.

All come from ``dp_accounting``'s factories but that of sampling without replacement, which it does
not have and which is put together here from its primitives. Noise multipliers are standard
deviations in units of the clipping norm throughout.
"""

import math
from collections.abc import Iterable

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from numpyro_dppvi.privacy.budget import Relation, neighboring_relation, unit_sensitivity


def noise_multiplier(event: dpa.DpEvent) -> float:
    """The noise of an event, in units of the clipping norm.

    Raises:
        TypeError: If no pair of distributions is proven for such events.
    """
    if isinstance(event, (dpa.PoissonSampledDpEvent, dpa.SampledWithoutReplacementDpEvent)):
        return noise_multiplier(event.event)
    if isinstance(event, (dpa.GaussianDpEvent, dpa.TruncatedSubsampledGaussianDpEvent)):
        return float(event.noise_multiplier)
    raise TypeError(f"no accountant is proven for {type(event).__name__}.")


def with_noise(event: dpa.DpEvent, factor: float) -> dpa.DpEvent:
    """The same event with so many times its Gaussian noise; discrete noise is nobody's share.

    Raises:
        TypeError: If no pair of distributions is proven for such events.
    """
    if isinstance(event, dpa.ZCDpEvent):
        return event
    noise = factor * noise_multiplier(event)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(noise))
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return dpa.SampledWithoutReplacementDpEvent(
            event.source_dataset_size, event.sample_size, dpa.GaussianDpEvent(noise)
        )
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return dpa.TruncatedSubsampledGaussianDpEvent(
            event.dataset_size, event.sampling_probability, event.truncated_batch_size, noise
        )
    return dpa.GaussianDpEvent(noise)


def check_relation(event: dpa.DpEvent, relation: Relation) -> None:
    """Refuses events that nothing is proven about under a relation.

    Raises:
        ValueError: For batches of fixed size under add-or-remove: a neighbour has another number
            of records, so that the batch is another share of them. For discrete Gaussian noise:
            its event says what replacing a contribution costs.
    """
    if isinstance(event, dpa.ZCDpEvent) and relation != "replace_one":
        raise ValueError(
            'discrete Gaussian noise is accounted for relation="replace_one" alone, got '
            f'relation={relation!r}: write relation="replace_one".'
        )
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent) and relation != "replace_one":
        raise ValueError(
            'batches of a fixed size are accounted for relation="replace_one" alone, got '
            f'relation={relation!r}: write relation="replace_one", or sample with '
            "PoissonSampling(...)."
        )


def takes_all_records(event: dpa.DpEvent) -> bool:
    """Whether an event is a plain Gaussian: no record is ever left out."""
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return bool(event.sample_size == event.source_dataset_size)
    return isinstance(event, dpa.GaussianDpEvent)


def of_composition(
    composition: Iterable[tuple[dpa.DpEvent, int]], relation: Relation, grid: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of everything together, rounded up.

    Args:
        composition: Events with how often each occurred; all with noise above 0.
        relation: The neighbouring relation.
        grid: Distance of neighbouring values of the loss.

    Returns:
        A distribution whose deltas are upper bounds.
    """
    total = pld.identity(value_discretization_interval=grid)
    for event, count in sorted(composition, key=repr):
        total = total.compose(_of_event(event, count, relation, grid))
    return total


def _of_event(
    event: dpa.DpEvent, count: int, relation: Relation, grid: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of ``count`` equal events."""
    # The factories double a Gaussian's sensitivity under replace-one by themselves: they want
    # noise in units of the clipping norm, and so they get it. (The RDP accountant does not.)
    neighbours = neighboring_relation(relation)
    if isinstance(event, dpa.GaussianDpEvent):
        return pld.from_gaussian_mechanism(
            event.noise_multiplier / math.sqrt(count),
            value_discretization_interval=grid,
            neighboring_relation=neighbours,
        )
    if isinstance(event, dpa.PoissonSampledDpEvent):
        one = pld.from_gaussian_mechanism(
            noise_multiplier(event),
            value_discretization_interval=grid,
            sampling_prob=event.sampling_probability,
            neighboring_relation=neighbours,
        )
    elif isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        one = pld.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size,
            event.sampling_probability,
            event.truncated_batch_size,
            event.noise_multiplier,
            value_discretization_interval=grid,
            neighboring_relation=neighbours,
        )
    elif isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        check_relation(event, relation)
        prob = event.sample_size / event.source_dataset_size
        one = _of_fixed_size(noise_multiplier(event), prob, grid)
    else:
        raise TypeError(f"no accountant is proven for {type(event).__name__}.")
    return one.self_compose(count)


def _of_fixed_size(noise: float, prob: float, grid: float) -> pld.PrivacyLossDistribution:
    """The privacy loss of a Gaussian sum over a batch of fixed size, under replace-one.

    Let P and Q be Gaussians at the distance that a record moves the sum when it is replaced. The
    privacy profile is H((1-q) Q + q P || Q) for epsilon >= 0 (Balle, Barthe and Gaboardi 2018) and
    H(P || (1-q) P + q Q) below (Zhu, Dong and Wang 2022). No single pair of data sets is worst on
    both branches. Together they are the profile of one dominating pair, which may be composed;
    composing each branch by itself gives no bound (Lebeda, Regehr, Kamath and Steinke 2024).

    Args:
        noise: Standard deviation in units of the clipping norm.
        prob: Share q of the records that is in a batch; 1 is the plain Gaussian.
        grid: Distance of neighbouring values of the loss.

    Returns:
        A symmetric distribution.
    """
    upper_branch = GaussianPrivacyLoss(
        noise,
        sensitivity=unit_sensitivity("replace_one"),
        sampling_prob=prob,
        adjacency_type=AdjacencyType.REMOVE,
    )
    last = max(1, math.ceil(upper_branch.connect_dots_bounds().epsilon_upper / grid))
    epsilons = grid * np.arange(last + 1)
    above = upper_branch.get_delta_for_epsilon(epsilons)
    # The lower branch is the upper one seen from the other side, where P and Q change places:
    # H_a(A || B) = 1 - a + a H_{1/a}(B || A).
    below = -np.expm1(-epsilons) + np.exp(-epsilons) * above
    profile = np.concatenate([below[:0:-1], above])
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -last, last, profile)
    )
