"""Calibrates noise to a budget; always on the side of too much noise."""

import dataclasses
import functools
import math
from collections.abc import Callable

import dp_accounting as dpa

from numpyro_dppvi.privacy import accounting, units
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget, Relation, unit_sensitivity
from numpyro_dppvi.privacy.noise_laws import DiscreteGaussian
from numpyro_dppvi.privacy.sampling import FixedSizeSampling, FullBatch, Sampler

# The search stops when at least this share of the target epsilon is spent.
_ENOUGH = 0.999
# The search does not go below this noise: epsilon is in the thousands there, unless delta already
# covers the probability of being sampled, in which case no noise is needed.
_LEAST_NOISE = 0.02
# The precision of the rough search (accounting.tightest's settled_at).
_ROUGHLY_SETTLED = 3e-2
# Differences of log epsilon are clamped to this: far from the target only the sign is reliable.
FAR = 2.0

_NOTHING: Composition = frozenset()


def is_used_up(budget: PrivacyBudget, before: Composition) -> bool:
    """Whether too little of a budget is left for any further release."""
    if math.isinf(budget.epsilon):
        return False
    return accounting.epsilon(before, budget.delta, budget.relation) >= _ENOUGH * budget.epsilon


@functools.lru_cache(maxsize=1024)
def noise_multiplier(
    budget: PrivacyBudget,
    *,
    num_releases: int,
    sampler: Sampler = FullBatch(),
    num_records: int = 1,
    physical_size: int = 1,
    before: Composition = _NOTHING,
) -> float:
    """The noise multiplier that spends between 0.999 and 1 of a budget's epsilon.

    That is the noise's standard deviation over the norm that one unit of protection contributes; 0
    for an infinite epsilon. Some noise is added even where sampling alone would satisfy the budget,
    which must also cover what was released ``before``. A delta that is too small for the accountant
    is refused, and a sampler that does not fit.
    """
    sampler.check([num_records], budget.relation)
    units.check_sampler(budget, sampler)
    if math.isinf(budget.epsilon):
        return 0.0
    event_of = functools.partial(
        sampler.dp_event, num_records=num_records, physical_size=physical_size
    )
    spends, event = _spends(budget, event_of, num_releases, before), event_of(1.0)
    one_release = dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    if accounting.is_gaussian(accounting.compose([*before, (event, num_releases)])):
        # Squared distances add up over Gaussian releases. The budget allows a distance of
        # 1 / one_release in all, so a share ``left`` of its square remains for the new releases:
        # num_releases * (sensitivity / noise)^2 = left / one_release^2.
        distance = accounting.gaussian_mu(before, budget.relation) or 0.0
        # Above 0, because plans refuse clients that have spent .999 of their epsilon (is_used_up).
        left = 1 - (distance * one_release) ** 2
        noise = unit_sensitivity(budget.relation) * math.sqrt(num_releases) * one_release
        noise /= math.sqrt(left)
        while spends(noise) > budget.epsilon:  # the closed forms are inverses up to rounding
            noise *= 1 + 1e-9 / left
        return noise
    rough_size = num_records
    # A client's exact number of records enters its event only through truncation.
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        # Truncation costs almost nothing, so the rough search leaves it out. Its (cached) result
        # then serves clients of all sizes.
        rough_size = physical_size
    left_over = _left_over(budget, before)
    guess = _rough_noise(left_over, num_releases, sampler, rough_size, physical_size)
    if math.isinf(spends(guess)):
        raise ValueError(
            f"delta must be larger for {num_releases} sampled releases, got {budget.delta:g}: the "
            "accountant cannot resolve so small a probability. Write delta=1e-10, say, or "
            "sampler=FullBatch()."
        )
    return _least_sufficient(spends, budget.epsilon, guess)


@functools.lru_cache(maxsize=1024)
def discrete_noise_multiplier(
    budget: PrivacyBudget, num_releases: int, before: Composition = _NOTHING
) -> float:
    """Like :func:`noise_multiplier`, for discrete Gaussian noise under ``"replace_one"``."""
    if math.isinf(budget.epsilon):
        return 0.0
    spends = _spends(budget, DiscreteGaussian().dp_event, num_releases, before)
    one_release = dpa.get_sigma_gaussian(_left_over(budget, before).epsilon, budget.delta)
    guess = unit_sensitivity(budget.relation) * math.sqrt(num_releases) * one_release
    return _least_sufficient(spends, budget.epsilon, guess)


def _left_over(budget: PrivacyBudget, before: Composition) -> PrivacyBudget:
    """Roughly the budget left after earlier releases: a starting point for the search."""
    if not before:
        return budget
    epsilon = accounting.epsilon(before, budget.delta, budget.relation)
    # Treats both epsilons as those of Gaussians and subtracts their squared distances.
    of_all = dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    of_spent = dpa.get_sigma_gaussian(epsilon, budget.delta)
    left = math.sqrt(max(of_all**-2 - of_spent**-2, 1e-6 * of_all**-2))
    rest = float(dpa.get_epsilon_gaussian(1 / left, budget.delta))
    return dataclasses.replace(budget, epsilon=max(rest, 1e-3 * budget.epsilon))


@functools.lru_cache(maxsize=1024)
def _rough_noise(
    budget: PrivacyBudget, num_releases: int, sampler: Sampler, num_records: int, physical_size: int
) -> float:
    """Noise that keeps the budget, found on coarser grids: the start of the fine search."""
    event_of = functools.partial(
        sampler.dp_event, num_records=num_records, physical_size=physical_size
    )
    spends = _spends(budget, event_of, num_releases, _NOTHING, roughly=True)
    one_release = dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    guess = _likely_noise(sampler, num_records, budget.relation, num_releases * one_release**2)
    guess = max(guess, _LEAST_NOISE)
    return guess if math.isinf(spends(guess)) else _least_sufficient(spends, budget.epsilon, guess)


def _spends(
    budget: PrivacyBudget,
    event_of: Callable[[float], dpa.DpEvent],
    num_releases: int,
    before: Composition,
    roughly: bool = False,
) -> Callable[[float], float]:
    """Epsilon as a function of the noise, of which one release is ``event_of``."""

    def spends(noise: float) -> float:
        composition = accounting.compose([*before, (event_of(noise), num_releases)])
        return spent(composition, budget, roughly)

    return spends


def spent(composition: Composition, budget: PrivacyBudget, roughly: bool) -> float:
    """An upper bound on epsilon for a search, ``roughly`` to within a thousandth."""
    # Bounds that far below the target steer the search alike, whatever they are exactly.
    enough = math.exp(-FAR) * budget.epsilon
    precision = (_ROUGHLY_SETTLED,) if roughly else ()
    return accounting.epsilon(composition, budget.delta, budget.relation, enough, *precision)


# Starting points for the searches. By the central limit theorem for privacy losses (Dong, Roth and
# Su 2022), many sampled releases act like one Gaussian at distance mu, with mu^2 the sum of the
# chi-squared divergences of the single releases; these are in closed form.


def _likely_noise(sampler: Sampler, num_records: int, relation: Relation, releases: float) -> float:
    """A guess at the noise; ``releases`` is their number over mu^2, the budget's distance."""
    # Chi-squared divergences at noise s and inclusion probability q are q^2 (exp(k / s^2) - 1),
    # with k = 4 for fixed-size batches and k = 1 for Poisson under add-or-remove; under replace-one
    # Poisson has 4 q^2 sinh(1 / s^2). Each is set to mu^2 / releases and solved for s.
    each = 1 / (releases * float(sampler.inclusion_prob(num_records)) ** 2)
    if isinstance(sampler, FixedSizeSampling):
        return unit_sensitivity("replace_one") * math.log1p(each) ** -0.5
    if relation == "replace_one":
        return math.asinh(each / 4) ** -0.5
    return math.log1p(each) ** -0.5


def likely_releases(
    noise: float, sampler: Sampler, num_records: int, budget: PrivacyBudget
) -> float:
    """A guess at the number of releases: the inverse of :func:`_likely_noise`."""
    prob = float(sampler.inclusion_prob(num_records))
    one_release = dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    # Clamped so that nothing overflows: a guess may be off, the search that follows is not.
    exponent = min(noise**-2, 300.0)
    if prob == 1:
        each = unit_sensitivity(budget.relation) ** 2 * exponent
    elif isinstance(sampler, FixedSizeSampling):
        each = math.expm1(unit_sensitivity("replace_one") ** 2 * min(exponent, 100.0))
    elif budget.relation == "replace_one":
        each = 4 * math.sinh(exponent)
    else:
        each = math.expm1(exponent)
    share = each * (prob * one_release) ** 2
    return 1 / share if share else math.inf


def _least_sufficient(spends: Callable[[float], float], target: float, guess: float) -> float:
    """Noise with ``_ENOUGH * target <= spends(noise) <= target``, or ``_LEAST_NOISE`` if larger."""
    # ``spends``, epsilon as a decreasing function of the noise, is expensive. In logarithms it is
    # nearly linear, so secant steps converge fast; a bracket keeps them from going astray.
    aim = math.log(0.5 * (_ENOUGH + 1) * target)
    low, high = 0.0, math.inf  # too little noise, enough noise
    noise = guess
    slope = -1.0  # log epsilon falls about as fast as log noise rises
    last: tuple[float, float] | None = None
    while high > (1 + 1e-9) * low:
        epsilon = spends(noise)
        if epsilon <= target:
            high = noise
        else:
            low = noise
        if _ENOUGH * target <= epsilon <= target or high <= _LEAST_NOISE:
            break
        # Far from the target epsilon may be 0 or enormous: clamp it and keep only its sign.
        x, y = math.log(noise), min(max(math.log(epsilon or 1e-300), aim - FAR), aim + FAR)
        if last is not None:
            slope = min((y - last[1]) / (x - last[0]), -0.5)
        last = x, y
        step = min(max((aim - y) / slope, -math.log(2)), math.log(2))
        noise = max(noise * math.exp(step), _LEAST_NOISE)
        if not low < noise < high:
            noise = math.sqrt(low * high)
    return high
