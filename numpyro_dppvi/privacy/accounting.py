"""From what was released to epsilon: exact for plain Gaussians, else dp-accounting's PLD."""

import functools
import math
from collections.abc import Iterable
from typing import TypeAlias

import dp_accounting as dpa
from dp_accounting import pld

from numpyro_dppvi.privacy.budget import Relation, neighboring_relation, unit_sensitivity

Composition: TypeAlias = frozenset[tuple[dpa.DpEvent, int]]
"""Events with how often each occurred; noise is in units of the clipping norm throughout."""

# Finer grids cost time and, far below this, rounding errors raise the answer again.
_DISCRETIZATION = 1e-4


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
    if any(_noise_multiplier(event) == 0 for event, _ in composition):
        return math.inf
    if all(isinstance(event, dpa.GaussianDpEvent) for event, _ in composition):
        squared = sum(
            count * (unit_sensitivity(relation) / _noise_multiplier(event)) ** 2
            for event, count in composition
        )
        return float(dpa.get_epsilon_gaussian(1 / math.sqrt(squared), delta))
    # The PLD accountant doubles a Gaussian's sensitivity under REPLACE_ONE by itself: it wants
    # noise in units of the clipping norm, and so it gets it. (The RDP accountant does not.)
    accountant = pld.PLDAccountant(
        neighboring_relation(relation), value_discretization_interval=_DISCRETIZATION
    )
    for event, count in sorted(composition, key=repr):
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def describe(composition: Composition) -> str:
    """The accountant that :func:`epsilon` uses for a composition, for people."""
    if all(isinstance(event, dpa.GaussianDpEvent) for event, _ in composition):
        return "exact Gaussian composition (Balle and Wang 2018)"
    return f"privacy loss distribution, dp-accounting, grid {_DISCRETIZATION:g}"


def _noise_multiplier(event: dpa.DpEvent) -> float:
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return _noise_multiplier(event.event)
    if isinstance(event, (dpa.GaussianDpEvent, dpa.TruncatedSubsampledGaussianDpEvent)):
        return float(event.noise_multiplier)
    raise TypeError(f"no accountant is proven for {type(event).__name__}.")
