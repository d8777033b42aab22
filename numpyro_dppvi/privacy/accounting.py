"""From what was released to epsilon: exact for plain Gaussians, else dp-accounting's PLD or RDP."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import dp_accounting as dpa
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import concentrated, loss_distributions
from numpyro_dppvi.privacy.budget import Relation, unit_sensitivity

Composition: TypeAlias = frozenset[tuple[dpa.DpEvent, int]]
"""Events with how often each occurred; noise is in units of the clipping norm throughout."""

# Grids for the values of the privacy loss, tried from the coarsest until epsilon has settled.
_GRIDS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
# An answer counts as settled when the last grid changed it by no more than this share. Its error
# falls with the square of the grid, so that about a hundredth of the change remains: epsilon is
# then too large by some 3 parts in 10^5 at most.
_SETTLED = 3e-3
# As above, of the epsilon that is told beside the one that is promised: a tenth of the precision.
_SETTLED_BESIDE = 3e-2
# The finest grid takes ten times as long as all others together. It is left out where it promises
# no more than this share, judged by how the last two grids changed the answer.
_NOT_WORTH_IT = 1e-3
# Fourier transforms lose probability to rounding, at most some 4e-17 a composed event
# (tests/privacy/test_accounting.py), which would make epsilon too small where delta is tiny.
_ROUNDING_PER_EVENT = 1e-16


def check_composition(composition: Composition) -> None:
    """Refuses what is no composition.

    Raises:
        TypeError: In that case.
    """
    if not isinstance(composition, frozenset) or not all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], dpa.DpEvent)
        for pair in composition
    ):
        raise TypeError(
            f"composition must be a frozenset of events and counts, got "
            f"{_validate.shown(composition)}: write composition=ledger.composition(0), say."
        )


def compose(events: Iterable[tuple[dpa.DpEvent, int]]) -> Composition:
    """Collects events and counts, adding the counts of equal events."""
    counts: dict[dpa.DpEvent, int] = {}
    for event, count in events:
        counts[event] = counts.get(event, 0) + count
    return frozenset((event, count) for event, count in counts.items() if count > 0)


@functools.lru_cache(maxsize=4096)
def epsilon(
    composition: Composition,
    delta: float,
    relation: Relation,
    enough: float = 0.0,
    settled_at: float = _SETTLED,
) -> float:
    """The epsilon that a composition costs at ``delta``; never below the true one.

    Plain Gaussian events compose to one Gaussian, whose epsilon is the closed form of Balle and
    Wang (2018). Everything else goes to privacy loss distributions, whose pair of distributions
    for Poisson sampling under replace-one is tight. Where discrete Gaussian noise is among it, all
    is accounted as concentrated differential privacy.

    Args:
        composition: What was released, with noise multipliers in units of the clipping norm.
        delta: In (0, 1).
        relation: The neighbouring relation.
        enough: An upper bound that is no larger is not made any tighter, which saves time.
        settled_at: As of :func:`tightest`; a larger share is faster, and never below what the
            usual one gives.

    Returns:
        Epsilon; 0 for nothing released and infinity where an event has no noise.

    Raises:
        TypeError: If no accountant is proven for an event.
        ValueError: If none is proven for it under this relation.
    """
    rho = concentrated.total_rho(composition, relation)
    if rho is not None:
        return concentrated.epsilon(rho, delta)
    mu = gaussian_mu(composition, relation)
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return math.inf
    if mu is not None:
        with np.errstate(divide="ignore"):  # it tries epsilons whose delta rounds to 0
            return float(dpa.get_epsilon_gaussian(1 / mu, delta))
    safe_delta = delta - rounding_error(composition)
    if safe_delta <= 0:
        return math.inf

    def bound(grid: float) -> float:
        return _bound(composition, safe_delta, relation, grid)

    return tightest(bound, settled_at, enough)


def epsilon_to_participant(
    composition: Composition, delta: float, relation: Relation, num_shares: int
) -> float:
    """What a composition costs against another client whose noise is a share of it.

    Where clients' noise adds up to that of a sum, each of them can take its own share away again.
    The least that a sum holds is ``num_shares`` shares, one of them the client's own that is to be
    protected; so there are ``num_shares - 1`` left, and one at least.

    Args:
        composition: What was released; all of it counts as shared alike, releases of other runs
            on the same ledger file, too, because a ledger does not say how they were.
        delta: In (0, 1).
        relation: The neighbouring relation.
        num_shares: The least number of clients whose noise makes up that of a sum; 1 where each
            client adds all of it, and nobody sees less.

    Returns:
        Epsilon; never below the true one, nor below :func:`epsilon`.
    """
    promised = epsilon(composition, delta, relation)
    if num_shares == 1:
        return promised
    left = math.sqrt((num_shares - 1) / num_shares)
    known = compose(
        (loss_distributions.with_noise(event, left), count) for event, count in composition
    )
    return max(promised, epsilon(known, delta, relation, settled_at=_SETTLED_BESIDE))


@functools.lru_cache(maxsize=16384)
def _bound(composition: Composition, delta: float, relation: Relation, grid: float) -> float:
    distribution = loss_distributions.of_composition(composition, relation, grid)
    return float(distribution.get_epsilon_for_delta(delta))


def gaussian_mu(composition: Composition, relation: Relation) -> float | None:
    """How many standard deviations lie between neighbours, if all of it is one large Gaussian.

    Args:
        composition: What was released.
        relation: The neighbouring relation.

    Returns:
        0 for nothing released, infinity where an event has no noise, and ``None`` where batches
        were sampled or noise is discrete.

    Raises:
        TypeError: If no accountant is proven for an event.
        ValueError: If none is proven for it under this relation.
    """
    for event, _ in composition:
        loss_distributions.check_relation(event, relation)
    if is_concentrated(composition):
        return None
    noise = [(loss_distributions.noise_multiplier(event), count) for event, count in composition]
    if not all(multiplier > 0 for multiplier, _ in noise):  # a NaN, too
        return math.inf
    if not is_gaussian(composition):
        return None
    unit = unit_sensitivity(relation)
    return math.sqrt(sum(count * (unit / multiplier) ** 2 for multiplier, count in noise))


def renyi_distance(composition: Composition, relation: Relation) -> float | None:
    """How far apart two Gaussians are whose Rényi divergences bound those of what was released.

    As :func:`gaussian_mu` but for discrete Gaussian noise, which has such a bound.
    """
    rho = concentrated.total_rho(composition, relation)
    return gaussian_mu(composition, relation) if rho is None else math.sqrt(2 * rho)


def tightest(
    bound: Callable[[float], float], settled_at: float = _SETTLED, enough: float = -math.inf
) -> float:
    """The least of the upper bounds that ever finer grids give, until they settle.

    Args:
        bound: A function of the grid.
        settled_at: The share of itself by which the last bound may still have fallen.
        enough: A bound that is no larger is returned as it is.

    Returns:
        An upper bound, too large by about a hundredth of that share, or by a thousandth where the
        finest grid is left out.
    """
    best = before = math.inf
    for grid in _GRIDS:
        found = bound(grid)
        change = best - found
        settled = math.isinf(found) or change <= settled_at * found
        best = min(best, found)
        if settled or best <= enough:
            break
        if grid == _GRIDS[-2] and change**2 <= _NOT_WORTH_IT * found * before:
            break
        before = change
    return best


def rounding_error(composition: Composition) -> float:
    """The probability that Fourier transforms may lose to rounding."""
    return _ROUNDING_PER_EVENT * sum(count for _, count in composition)


def is_gaussian(composition: Composition) -> bool:
    """Whether everything that was released is a plain Gaussian: no record is ever left out."""
    return all(loss_distributions.takes_all_records(event) for event, _ in composition)


def is_concentrated(composition: Composition) -> bool:
    """Whether discrete Gaussian noise is among what was released."""
    return any(isinstance(event, dpa.ZCDpEvent) for event, _ in composition)


def describe(composition: Composition) -> str:
    """The accountant that :func:`epsilon` uses for a composition, for people."""
    if is_concentrated(composition):
        return "concentrated differential privacy (Canonne et al. 2020), by Rényi divergences"
    if is_gaussian(composition):
        return "exact Gaussian composition (Balle and Wang 2018)"
    if any(isinstance(event, dpa.SampledWithoutReplacementDpEvent) for event, _ in composition):
        return "privacy loss distribution of a dominating pair (Zhu et al. 2022), rounded up"
    return "privacy loss distribution, rounded up"
