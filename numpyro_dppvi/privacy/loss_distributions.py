"""Privacy loss distributions of events and compositions.

They come from ``dp_accounting``, except the one of sampling without replacement, which it lacks and
which is built here from its primitives. Noise multipliers are in units of the clipping norm.
"""

import math
from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from numpyro_dppvi.privacy.budget import Relation, unit_sensitivity


def noise_multiplier(event: dpa.DpEvent) -> float:
    """The noise of an event, in units of the clipping norm."""
    if isinstance(event, (dpa.PoissonSampledDpEvent, dpa.SampledWithoutReplacementDpEvent)):
        return noise_multiplier(event.event)
    if isinstance(event, (dpa.GaussianDpEvent, dpa.TruncatedSubsampledGaussianDpEvent)):
        return float(event.noise_multiplier)
    raise TypeError(f"no accountant is proven for {type(event).__name__}.")


def with_noise(event: dpa.DpEvent, factor: float) -> dpa.DpEvent:
    """The same event with its Gaussian noise multiplied by a factor."""
    if isinstance(event, dpa.ZCDpEvent):  # discrete noise is never shared between clients
        return event
    noise, fields = factor * noise_multiplier(event), fields_of(event)
    # A sampled event holds the one that it is a sample of.
    changed = (
        {"event": dpa.GaussianDpEvent(noise)} if "event" in fields else {"noise_multiplier": noise}
    )
    return type(event)(**{**fields, **changed})


def fields_of(event: dpa.DpEvent) -> dict[str, Any]:
    """An event's fields by name."""
    return {field.name: getattr(event, field.name) for field in type(event).__attrs_attrs__}


def check_relation(event: dpa.DpEvent, relation: Relation) -> None:
    """Refuses events for which nothing is proven under a relation."""
    # The event of discrete noise holds the rho of replacing a contribution. With a record more or
    # less, a batch of fixed size would be another fraction of the records.
    if isinstance(event, dpa.ZCDpEvent) and relation != "replace_one":
        raise ValueError(
            'discrete Gaussian noise is accounted for relation="replace_one" only, got '
            f'relation={relation!r}: write relation="replace_one".'
        )
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent) and relation != "replace_one":
        raise ValueError(
            'batches of a fixed size are accounted for relation="replace_one" only, got '
            f'relation={relation!r}: write relation="replace_one", or '
            "sampler=PoissonSampling(...)."
        )


def takes_all_records(event: dpa.DpEvent) -> bool:
    """Whether an event is a Gaussian on all records, without sampling."""
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return bool(event.sample_size == event.source_dataset_size)
    return isinstance(event, dpa.GaussianDpEvent)


def of_composition(
    composition: Iterable[tuple[dpa.DpEvent, int]], relation: Relation, grid: float
) -> pld.PrivacyLossDistribution:
    """The loss distribution of a composition of noisy events, whose deltas are upper bounds."""
    total = pld.identity(value_discretization_interval=grid)
    # In a fixed order: a set's own would change the rounding from one process to the next.
    for event, count in sorted(composition, key=repr):
        total = total.compose(_of_event(event, count, relation, grid))
    return total


def _of_event(
    event: dpa.DpEvent, count: int, relation: Relation, grid: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of ``count`` equal events."""
    # These factories double a Gaussian's sensitivity under replace-one themselves, so they take
    # noise in units of the clipping norm. (The RDP accountant does not; it takes noise in units of
    # the sensitivity.)
    setting: dict[str, Any] = {
        "value_discretization_interval": grid,
        "neighboring_relation": dpa.NeighboringRelation[relation.upper()],
    }
    if isinstance(event, dpa.GaussianDpEvent):
        # n releases at noise s are one release at noise s / sqrt(n); no convolution is needed.
        return pld.from_gaussian_mechanism(event.noise_multiplier / math.sqrt(count), **setting)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        one = pld.from_gaussian_mechanism(
            noise_multiplier(event), sampling_prob=event.sampling_probability, **setting
        )
    elif isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        one = pld.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size,
            event.sampling_probability,
            event.truncated_batch_size,
            event.noise_multiplier,
            **setting,
        )
    elif isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        check_relation(event, relation)
        prob = event.sample_size / event.source_dataset_size
        one = _of_fixed_size(noise_multiplier(event), prob, grid)
    else:
        raise TypeError(f"no accountant is proven for {type(event).__name__}.")
    return one.self_compose(count)


def _of_fixed_size(noise: float, prob: float, grid: float) -> pld.PrivacyLossDistribution:
    """The privacy loss of a Gaussian sum over a batch of fixed size, under replace-one."""
    # Let P and Q be Gaussians whose means differ by the sensitivity, and q (``prob``) the fraction
    # of records in a batch. The privacy profile is H((1-q) Q + q P || Q) for epsilon >= 0 (Balle,
    # Barthe and Gaboardi 2018) and H(P || (1-q) P + q Q) for epsilon < 0 (Zhu, Dong and Wang 2022).
    # No single pair of data sets attains both branches, but together they are the profile of one
    # dominating pair, which can be composed. Composing each branch by itself gives no bound
    # (Lebeda, Regehr, Kamath and Steinke 2024).
    upper_branch = GaussianPrivacyLoss(
        noise,
        sensitivity=unit_sensitivity("replace_one"),
        sampling_prob=prob,
        adjacency_type=AdjacencyType.REMOVE,
    )
    # Beyond the last epsilon the mechanism's own bounds say that delta is negligible, and the
    # pessimistic estimate puts what is left at infinity.
    last = max(1, math.ceil(upper_branch.connect_dots_bounds().epsilon_upper / grid))
    epsilons = grid * np.arange(last + 1)
    above = upper_branch.get_delta_for_epsilon(epsilons)
    # The lower branch follows from the upper one with P and Q exchanged, by the identity
    # H_a(A || B) = 1 - a + a H_{1/a}(B || A), here with a = exp(-epsilon).
    below = -np.expm1(-epsilons) + np.exp(-epsilons) * above
    profile = np.concatenate([below[:0:-1], above])
    return pld.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -last, last, profile)
    )
