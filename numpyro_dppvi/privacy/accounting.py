"""From what was released to epsilon: exact for plain Gaussians, else dp-accounting's PLD."""

import functools
import math
from collections.abc import Iterable
from typing import TypeAlias

import dp_accounting as dpa
import numpy as np
from dp_accounting import pld

from numpyro_dppvi.privacy.budget import Relation, neighboring_relation, unit_sensitivity

Composition: TypeAlias = frozenset[tuple[dpa.DpEvent, int]]
"""Events with how often each occurred; noise is in units of the clipping norm throughout."""

# Grids for the values of the privacy loss, tried from the coarsest until epsilon has settled.
_GRIDS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
# An answer counts as settled when the last grid changed it by no more than this share. Its error
# falls with the square of the grid, so that about a hundredth of the change remains: epsilon is
# then too large by some 3 parts in 10^5 at most.
_SETTLED = 3e-3
# Fourier transforms lose probability to rounding, at most some 4e-17 a composed event
# (tests/privacy/test_accounting.py), which would make epsilon too small where delta is tiny.
_ROUNDING_PER_EVENT = 1e-16


def compose(events: Iterable[tuple[dpa.DpEvent, int]]) -> Composition:
    """Collects events and counts, adding the counts of equal events."""
    counts: dict[dpa.DpEvent, int] = {}
    for event, count in events:
        counts[event] = counts.get(event, 0) + count
    return frozenset((event, count) for event, count in counts.items() if count > 0)


@functools.lru_cache(maxsize=4096)
def epsilon(composition: Composition, delta: float, relation: Relation) -> float:
    """The epsilon that a composition costs at ``delta``; never below the true one.

    Plain Gaussian events compose to one Gaussian, whose epsilon is the closed form of Balle and
    Wang (2018). Everything else goes to the PLD accountant, whose pair of distributions for
    Poisson sampling under replace-one is tight.

    Args:
        composition: What was released, with noise multipliers in units of the clipping norm.
        delta: In (0, 1).
        relation: The neighbouring relation.

    Returns:
        Epsilon; 0 for nothing released and infinity where an event has no noise.
    """
    if not composition:
        return 0.0
    noise = [_noise_multiplier(event) for event, _ in composition]
    if not all(multiplier > 0 for multiplier in noise):  # a NaN, too
        return math.inf
    if all(isinstance(event, dpa.GaussianDpEvent) for event, _ in composition):
        squared = sum(
            count * (unit_sensitivity(relation) / _noise_multiplier(event)) ** 2
            for event, count in composition
        )
        with np.errstate(divide="ignore"):  # it tries epsilons whose delta rounds to 0
            return float(dpa.get_epsilon_gaussian(1 / math.sqrt(squared), delta))
    safe_delta = delta - _ROUNDING_PER_EVENT * sum(count for _, count in composition)
    if safe_delta <= 0:
        return math.inf
    best = math.inf
    for grid in _GRIDS:
        bound = _pld_epsilon(composition, safe_delta, relation, grid)
        settled = math.isinf(bound) or best - bound <= _SETTLED * bound
        best = min(best, bound)  # an upper bound on every grid
        if settled:
            break
    return best


def describe(composition: Composition) -> str:
    """The accountant that :func:`epsilon` uses for a composition, for people."""
    if all(isinstance(event, dpa.GaussianDpEvent) for event, _ in composition):
        return "exact Gaussian composition (Balle and Wang 2018)"
    return "privacy loss distribution, rounded up"


def _pld_epsilon(composition: Composition, delta: float, relation: Relation, grid: float) -> float:
    # The PLD accountant doubles a Gaussian's sensitivity under REPLACE_ONE by itself: it wants
    # noise in units of the clipping norm, and so it gets it. (The RDP accountant does not.)
    accountant = pld.PLDAccountant(
        neighboring_relation(relation), value_discretization_interval=grid
    )
    for event, count in sorted(composition, key=repr):
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _noise_multiplier(event: dpa.DpEvent) -> float:
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return _noise_multiplier(event.event)
    if isinstance(event, (dpa.GaussianDpEvent, dpa.TruncatedSubsampledGaussianDpEvent)):
        return float(event.noise_multiplier)
    raise TypeError(f"no accountant is proven for {type(event).__name__}.")
