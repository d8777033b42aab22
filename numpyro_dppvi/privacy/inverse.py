"""Computes noise, number of rounds or epsilon from the other two, without any data.

``plan_privacy`` does this for a whole run; these functions are for exploring a design.
"""

import bisect
import functools
import math
from collections.abc import Callable

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting, calibrate, units
from numpyro_dppvi.privacy.budget import PrivacyBudget, Relation
from numpyro_dppvi.privacy.sampling import FullBatch, PoissonSampling, Sampler, check_kind

# Limits beyond which accountants lose all digits.
_MOST_RELEASES = 10**9
_MOST_NOISE = 1e9


def epsilon_from_noise(
    noise_multiplier: float,
    num_releases: int,
    *,
    delta: float = 1e-5,
    relation: Relation = "replace_one",
    sampler: Sampler = FullBatch(),
    num_records: int | None = None,
) -> float:
    """The epsilon of a number of noisy sums.

    Args:
        noise_multiplier: The noise's standard deviation over the norm that one unit of protection
            contributes (the clipping norm, if the unit is a record).
        num_releases: How many noisy sums: rounds times ``num_local_steps`` with
            ``DPOptimization``, rounds with methods that release changes.
        delta: In (0, 1).
        relation: The neighbouring relation.
        sampler: How batches are drawn.
        num_records: Records of the client; needed where batches are sampled.

    Returns:
        Epsilon, an upper bound; infinity if the accountant cannot resolve ``delta``.

    Raises:
        ValueError: If a number is out of range, or the sampler does not support the relation.

    Example:
        >>> round(epsilon_from_noise(40.87, 30), 2)  # 10 rounds of 3 steps
        1.0
        >>> from numpyro_dppvi.privacy import PoissonSampling
        >>> sampler = PoissonSampling(0.1)
        >>> epsilon_from_noise(4.0, 1000, sampler=sampler, num_records=5000) < 8
        True
    """
    noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier, most=_MOST_NOISE)
    num_releases = _validate.positive_int("num_releases", num_releases, _MOST_RELEASES)
    delta = PrivacyBudget(1.0, delta, relation).delta
    sampler, size, physical_size = _one_client(sampler, num_records, relation)
    event = sampler.dp_event(noise_multiplier, size, physical_size)
    return accounting.epsilon(accounting.compose([(event, num_releases)]), delta, relation)


def paper_epsilon(
    noise_multiplier: float, sampling_prob: float, num_releases: int, *, delta: float = 1e-5
) -> float:
    """The epsilon of the paper's Fourier accountant; not a guarantee for the paper's batches.

    The paper describes batches drawn without replacement, its code slices shuffled epochs, and its
    accountant (``get_epsilon_S`` of ``fourier-accountant``; Koskela, Jälkö and Honkela 2020)
    composes the dominating pair of Poisson sampling. The result is correct for
    :class:`~numpyro_dppvi.privacy.sampling.PoissonSampling` under replace-one and too small for
    the other two: at noise 4, a tenth of the records and 1000 steps it is 7.489, where batches of
    fixed size cost between 8.279 and 9.522. Ledgers, plans and statements never use it.

    Args:
        noise_multiplier: The noise's standard deviation over the clipping norm.
        sampling_prob: The fraction of the records in a batch, in (0, 1).
        num_releases: How many noisy sums.
        delta: In (0, 1).

    Returns:
        Epsilon under replace-one, as the paper would state it.

    Raises:
        ValueError: If a number is out of range.
    """
    prob = _validate.open_unit("sampling_prob", sampling_prob, "0.1", 1e-8)
    sampler = PoissonSampling(prob)
    # Of a single record, no batch is ever too large: nothing is truncated.
    return epsilon_from_noise(
        noise_multiplier, num_releases, delta=delta, sampler=sampler, num_records=1
    )


def noise_from_epsilon(
    budget: PrivacyBudget,
    num_releases: int,
    *,
    sampler: Sampler = FullBatch(),
    num_records: int | None = None,
) -> float:
    """The noise multiplier at which a number of noisy sums spends a budget.

    Args:
        budget: What may be spent; between 0.999 and 1 of its epsilon will be.
        num_releases: See :func:`epsilon_from_noise`.
        sampler: How batches are drawn.
        num_records: Records of the client; needed where batches are sampled.

    Returns:
        The noise's standard deviation over the norm that one unit of protection contributes.

    Raises:
        ValueError: If a number is out of range, or delta is too small for the accountant.

    Example:
        >>> noise = noise_from_epsilon(PrivacyBudget(epsilon=1.0, delta=1e-5), 30)
        >>> round(noise, 1), epsilon_from_noise(noise, 30) <= 1
        (40.9, True)
    """
    _validate.instance("budget", budget, PrivacyBudget, "PrivacyBudget(epsilon=1.0)")
    num_releases = _validate.positive_int("num_releases", num_releases, _MOST_RELEASES)
    sampler, size, physical_size = _one_client(sampler, num_records, budget.relation)
    return calibrate.noise_multiplier(
        budget,
        num_releases=num_releases,
        sampler=sampler,
        num_records=size,
        physical_size=physical_size,
    )


def rounds_from_epsilon(
    budget: PrivacyBudget,
    noise_multiplier: float,
    *,
    releases_per_round: int = 1,
    sampler: Sampler = FullBatch(),
    num_records: int | None = None,
) -> int:
    """How many rounds a budget lasts at a noise multiplier.

    Args:
        budget: What may be spent; its epsilon must be finite.
        noise_multiplier: See :func:`epsilon_from_noise`.
        releases_per_round: Noisy sums per client and round: ``num_local_steps`` with
            ``DPOptimization``, 1 with methods that release changes.
        sampler: How batches are drawn.
        num_records: Records of the client; needed where batches are sampled.

    Returns:
        The largest number of rounds within the budget, possibly 0; at most 10^9 releases in all.

    Raises:
        ValueError: If a number is out of range or epsilon is infinite.

    Example:
        >>> budget = PrivacyBudget(epsilon=1.0, delta=1e-5)
        >>> rounds_from_epsilon(budget, 41.0, releases_per_round=3)
        10
    """
    _validate.instance("budget", budget, PrivacyBudget, "PrivacyBudget(epsilon=1.0)")
    noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier, most=_MOST_NOISE)
    releases_per_round = _validate.positive_int(
        "releases_per_round", releases_per_round, _MOST_RELEASES
    )
    if math.isinf(budget.epsilon):
        raise ValueError(
            "epsilon must be finite, got inf: write PrivacyBudget(epsilon=1.0), say, because an "
            "unlimited budget lasts for any number of rounds."
        )
    sampler, size, physical_size = _one_client(sampler, num_records, budget.relation)
    units.check_sampler(budget, sampler)
    event = sampler.dp_event(noise_multiplier, size, physical_size)

    def fits(rounds: int, roughly: bool = False) -> bool:
        composition = accounting.compose([(event, rounds * releases_per_round)])
        return calibrate.spent(composition, budget, roughly) <= budget.epsilon

    likely = calibrate.likely_releases(noise_multiplier, sampler, size, budget)
    most = _MOST_RELEASES // releases_per_round
    # Coarse grids first: the fine ones are asked only near the answer.
    near = _most_rounds(functools.partial(fits, roughly=True), likely / releases_per_round, most)
    return _most_rounds(fits, near, most)


def _most_rounds(fits: Callable[[int], bool], guess: float, most: int) -> int:
    """The largest number of rounds in [0, most] that fits; any number below it does, too."""
    # ``fits`` is slow to tell: steps that double lead from a good guess to where it changes.
    low = int(min(max(guess, 1), most))
    high, step = low + 1, max(1, low // 64)
    if fits(low):
        while high <= most and fits(high):
            low, high, step = high, min(high + step, most + 1), 2 * step
    else:
        low, high = low - 1, low
        while low and not fits(low):
            low, high, step = max(low - step, 0), low, 2 * step
    between = range(low + 1, high)
    return low + bisect.bisect_left(between, x=True, key=lambda rounds: not fits(rounds))


def _one_client(
    sampler: Sampler, num_records: int | None, relation: Relation
) -> tuple[Sampler, int, int]:
    """One client's sampler, number of records and rows of a batch."""
    check_kind(sampler)
    if num_records is None:
        if not isinstance(sampler, FullBatch):
            raise ValueError(
                f"num_records must be given with {type(sampler).__name__}, got None: write "
                "num_records=1000, say."
            )
        # Of a full batch the number of records does not enter epsilon.
        num_records = 1
    num_records = _validate.positive_int("num_records", num_records)
    sampler.check([num_records], relation)
    return sampler.of_client(0), num_records, sampler.physical_size([num_records])
