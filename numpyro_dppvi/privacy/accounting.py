"""Computes epsilon from a list of releases: in closed form for Gaussians, else by PLD or RDP."""

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
"""Events with their counts. Noise multipliers are in units of the clipping norm throughout."""

# Spacings of the grid on which privacy losses are discretised, tried from the coarsest to the
# finest. Every one of them gives an upper bound, because losses are rounded up.
_GRIDS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
COARSEST = _GRIDS[0]
# The search stops when the last grid changed epsilon by at most this relative amount. The error
# falls with the square of the spacing, so about a hundredth of that change remains: epsilon is
# then too large by at most about 3 parts in 10^5.
_SETTLED = 3e-3
# The same for the epsilon against a participant, which is reported but not promised.
_SETTLED_BESIDE = 3e-2
# The finest grid takes ten times as long as all others together. It is skipped if extrapolating
# from the last two grids promises an improvement of no more than this relative amount.
_NOT_WORTH_IT = 1e-3
# Fourier transforms lose up to about 4e-17 of probability to rounding per composed event
# (tests/privacy/test_accounting.py). That would make epsilon too small at tiny deltas, so twice as
# much is taken off delta.
_ROUNDING_PER_EVENT = 1e-16


def check_composition(composition: Composition) -> None:
    """Raises a TypeError unless the value is a composition."""
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
    # Without order, so that equal releases in another order are one entry of every cache below.
    return frozenset((event, count) for event, count in counts.items() if count > 0)


@functools.lru_cache(maxsize=4096)
def epsilon(
    composition: Composition,
    delta: float,
    relation: Relation,
    enough: float = 0.0,
    settled_at: float = _SETTLED,
) -> float:
    """The epsilon of a composition at ``delta``; an upper bound on the true one.

    Gaussian events on all records compose to one Gaussian, whose epsilon has a closed form (Balle
    and Wang 2018). With sampled batches, privacy loss distributions are composed; the dominating
    pair used for Poisson sampling under replace-one is tight. If any noise is discrete Gaussian,
    everything is accounted as concentrated differential privacy.

    It is 0 if nothing was released, and infinite if an event has no noise. To save time, a bound of
    ``enough`` or less is not refined further; ``settled_at`` is as of :func:`tightest`. Events and
    relations for which nothing is proven are refused.
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
        with np.errstate(divide="ignore"):  # its search tries epsilons whose delta rounds to 0
            return float(dpa.get_epsilon_gaussian(1 / mu, delta))
    # What rounding may have swallowed is granted to the attacker beforehand.
    safe_delta = delta - rounding_error(composition)
    if safe_delta <= 0:
        return math.inf
    bound = functools.partial(_bound, composition, safe_delta, relation)
    return tightest(bound, settled_at, enough)


def epsilon_to_participant(
    composition: Composition, delta: float, relation: Relation, num_shares: int
) -> float:
    """The epsilon against another client that contributed a share of the noise.

    When the noise of a sum is the sum of ``num_shares`` clients' shares, each client can subtract
    its own. All that was released is treated as shared, including releases of other runs on the
    same ledger file, because the ledger does not record whether they were. So this is an upper
    bound, and at least :func:`epsilon`.
    """
    promised = epsilon(composition, delta, relation)
    if num_shares == 1:
        return promised
    # A sum has n independent shares of variance s^2 / n. Without the attacker's own, variance
    # s^2 (n - 1) / n remains.
    left = math.sqrt((num_shares - 1) / num_shares)
    known = compose(
        (loss_distributions.with_noise(event, left), count) for event, count in composition
    )
    # Never below what is promised: the two bounds come from grids of different precision.
    return max(promised, epsilon(known, delta, relation, settled_at=_SETTLED_BESIDE))


@functools.lru_cache(maxsize=16384)
def _bound(composition: Composition, delta: float, relation: Relation, grid: float) -> float:
    distribution = loss_distributions.of_composition(composition, relation, grid)
    return float(distribution.get_epsilon_for_delta(delta))


def gaussian_mu(composition: Composition, relation: Relation) -> float | None:
    """The distance between neighbours in standard deviations, if all releases are Gaussian.

    It is 0 if nothing was released, infinite if an event has no noise, and ``None`` if batches were
    sampled or noise is discrete.
    """
    # First of all events, so that nothing is computed of a composition that no theorem covers.
    for event, _ in composition:
        loss_distributions.check_relation(event, relation)
    if is_concentrated(composition):
        return None
    noise = [(loss_distributions.noise_multiplier(event), count) for event, count in composition]
    # One release without noise, and everything is known: epsilon is infinite whatever the others
    # are.
    if not all(multiplier > 0 for multiplier, _ in noise):  # also catches NaN
        return math.inf
    if not is_gaussian(composition):
        return None
    unit = unit_sensitivity(relation)
    # Independent Gaussian releases at distances mu_i are as hard to tell apart as one Gaussian at
    # distance sqrt(sum of mu_i^2): project onto the line between the two means.
    return math.sqrt(sum(count * (unit / multiplier) ** 2 for multiplier, count in noise))


def renyi_distance(composition: Composition, relation: Relation) -> float | None:
    """The distance of two Gaussians whose Rényi divergences bound those of the releases.

    Like :func:`gaussian_mu`, but also defined for discrete Gaussian noise.
    """
    # Gaussians at distance mu have Rényi divergence order * mu^2 / 2, that is rho = mu^2 / 2.
    rho = concentrated.total_rho(composition, relation)
    return gaussian_mu(composition, relation) if rho is None else math.sqrt(2 * rho)


def tightest(
    bound: Callable[[float], float],
    settled_at: float = _SETTLED,
    enough: float = -math.inf,
    coarsest: float = COARSEST,
) -> float:
    """The smallest upper bound over ever finer grids, until it settles.

    ``bound`` is a function of the grid's spacing. The search stops when a finer grid lowered it by
    at most ``settled_at`` of itself, or it is ``enough``. Its relative error is then about a
    hundredth of ``settled_at``, or a thousandth if the finest grid was skipped. Grids coarser than
    ``coarsest`` are skipped, all but the finest: a bound that all coarse grids share would seem to
    have settled.
    """
    best = before = math.inf
    for grid in _GRIDS:
        if grid > max(coarsest, _GRIDS[-1]):
            continue
        found = bound(grid)
        change = best - found
        # An infinite bound would stay so on finer grids.
        settled = math.isinf(found) or change <= settled_at * found
        best = min(best, found)
        if settled or best <= enough:
            break
        # The error is about c grid^2, so each finer grid changes it by a hundredth of the change
        # before: what is left to gain is about change^2 / before.
        if grid == _GRIDS[-2] and change**2 <= _NOT_WORTH_IT * found * before:
            break
        before = change
    return best


def rounding_error(composition: Composition) -> float:
    """An upper bound on the probability that Fourier transforms lose to rounding."""
    return _ROUNDING_PER_EVENT * sum(count for _, count in composition)


def is_gaussian(composition: Composition) -> bool:
    """Whether every event is a Gaussian on all records, without sampling."""
    return all(loss_distributions.takes_all_records(event) for event, _ in composition)


def is_concentrated(composition: Composition) -> bool:
    """Whether any event has discrete Gaussian noise."""
    return any(isinstance(event, dpa.ZCDpEvent) for event, _ in composition)


def describe(composition: Composition) -> str:
    """A description of the accountant that :func:`epsilon` uses for a composition."""
    if is_concentrated(composition):
        return "concentrated differential privacy (Canonne et al. 2020), by Rényi divergences"
    if is_gaussian(composition):
        return "exact Gaussian composition (Balle and Wang 2018)"
    if any(isinstance(event, dpa.SampledWithoutReplacementDpEvent) for event, _ in composition):
        return "privacy loss distribution of a dominating pair (Zhu et al. 2022), rounded up"
    return "privacy loss distribution, rounded up"
