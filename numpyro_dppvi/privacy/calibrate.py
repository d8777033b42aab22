"""From a budget to the noise that keeps it, conservatively."""

import functools
import math
from collections.abc import Callable

import dp_accounting as dpa

from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.budget import PrivacyBudget, unit_sensitivity
from numpyro_dppvi.privacy.sampling import FullBatch, Sampler

# Relative width at which the search stops: spends at least .999 of the target.
_TOLERANCE = 1e-4


@functools.lru_cache(maxsize=1024)
def noise_multiplier(
    budget: PrivacyBudget, num_releases: int, sampler: Sampler, num_records: int, physical_size: int
) -> float:
    """The least noise (up to one part in 10^4) whose epsilon does not exceed the budget.

    Args:
        budget: What may be spent.
        num_releases: How many noisy sums are released in all.
        sampler: How each batch is drawn.
        num_records: Records of the client.
        physical_size: Most rows a batch can have.

    Returns:
        Noise standard deviation over clipping norm; 0 for an infinite epsilon.
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
    guess = _poisson_guess(budget, num_releases, sampler.sampling_prob, 1 / one_release)
    return _least_sufficient(spends, budget.epsilon, guess)


def _poisson_guess(budget: PrivacyBudget, steps: int, prob: float, mu: float) -> float:
    """Central-limit noise for Poisson sampling: matches the total chi-squared divergence."""
    ratio = mu**2 / (prob**2 * steps)
    if budget.relation == "replace_one":
        return math.asinh(ratio / 4) ** -0.5
    return math.log1p(ratio) ** -0.5


def _least_sufficient(spends: Callable[[float], float], target: float, guess: float) -> float:
    """Bisects for the least noise with ``spends(noise) <= target``; returns the safe end."""
    low, high = 0.97 * guess, 1.05 * guess
    while spends(high) > target:
        low, high = high, high * 1.3
    while spends(low) <= target:
        low, high = low / 1.3, low
    while high - low > _TOLERANCE * low:
        middle = 0.5 * (low + high)
        if spends(middle) <= target:
            high = middle
        else:
            low = middle
    return high
