"""From a budget to the noise that keeps it, conservatively."""

import functools
import math
from collections.abc import Callable

import dp_accounting as dpa

from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.budget import PrivacyBudget, unit_sensitivity
from numpyro_dppvi.privacy.sampling import FullBatch, Sampler

# The search stops where at least this share of the target is spent.
_ENOUGH = 0.999
# Less noise than this is not looked for: epsilon is in the thousands there, unless delta alone
# covers the chance of being sampled, which needs no noise at all.
_LEAST_NOISE = 0.02


@functools.lru_cache(maxsize=1024)
def noise_multiplier(
    budget: PrivacyBudget, num_releases: int, sampler: Sampler, num_records: int, physical_size: int
) -> float:
    """Noise whose epsilon does not exceed the budget, and is at least .999 of it.

    Where sampling alone keeps the budget, some noise is added all the same.

    Args:
        budget: What may be spent.
        num_releases: How many noisy sums are released in all.
        sampler: How each batch is drawn.
        num_records: Records of the client.
        physical_size: Most rows a batch can have.

    Returns:
        Noise standard deviation over clipping norm; 0 for an infinite epsilon.

    Raises:
        ValueError: If delta is too small for the accountant.
    """
    if math.isinf(budget.epsilon):
        return 0.0

    def spends(noise: float) -> float:
        event = sampler.dp_event(noise, num_records, physical_size)
        composition = accounting.compose([(event, num_releases)])
        return accounting.epsilon(composition, budget.delta, budget.relation)

    one_release = dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    if isinstance(sampler, FullBatch):
        noise = unit_sensitivity(budget.relation) * math.sqrt(num_releases) * one_release
        while spends(noise) > budget.epsilon:  # the closed forms are inverse up to rounding
            noise *= 1 + 1e-9
        return noise
    if physical_size < num_records:
        # Truncation hardly costs anything, so that what does without it is nearly there; and it
        # is the same for clients of all sizes.
        guess = noise_multiplier(budget, num_releases, sampler, physical_size, physical_size)
    else:
        guess = _poisson_guess(budget, num_releases, sampler.sampling_prob, 1 / one_release)
    guess = max(guess, _LEAST_NOISE)
    if math.isinf(spends(guess)):
        raise ValueError(
            f"delta must be larger for {num_releases} sampled releases, got {budget.delta:g}: the "
            "accountant cannot show so small a probability. Write delta=1e-10, say, or sample "
            "with FullBatch()."
        )
    return _least_sufficient(spends, budget.epsilon, guess)


def _poisson_guess(budget: PrivacyBudget, steps: int, prob: float, mu: float) -> float:
    """Central-limit noise for Poisson sampling: matches the total chi-squared divergence."""
    ratio = mu**2 / (prob**2 * steps)
    if budget.relation == "replace_one":
        return math.asinh(ratio / 4) ** -0.5
    return math.log1p(ratio) ** -0.5


def _least_sufficient(spends: Callable[[float], float], target: float, guess: float) -> float:
    """Searches for noise that spends nearly the target: secant steps, kept inside a bracket.

    Args:
        spends: Epsilon as a decreasing function of the noise; expensive.
        target: Epsilon that must not be exceeded.
        guess: Where to start.

    Returns:
        Noise with ``_ENOUGH * target <= spends(noise) <= target``, or ``_LEAST_NOISE`` where that
        is more.
    """
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
        # Epsilon may be 0 or enormous far from the target, where only its side matters.
        x, y = math.log(noise), min(max(math.log(epsilon or 1e-300), aim - 2), aim + 2)
        if last is not None:
            slope = min((y - last[1]) / (x - last[0]), -0.5)
        last = x, y
        step = min(max((aim - y) / slope, -math.log(2)), math.log(2))
        noise = max(noise * math.exp(step), _LEAST_NOISE)
        if not low < noise < high:
            noise = math.sqrt(low * high)
    return high
