"""Concentrated differential privacy: what is proven of a discrete Gaussian in many dimensions.

A release that satisfies rho-zCDP has Rényi divergences of at most ``rho * order`` between
neighbours, at every order above 1 and in both directions, and the rhos of several releases add up
(Bun and Steinke 2016). A Gaussian satisfies it, too, so that both kinds of noise compose.
"""

import math

import dp_accounting as dpa
import numpy as np
from dp_accounting.rdp import RdpAccountant

from numpyro_dppvi.privacy import loss_distributions
from numpyro_dppvi.privacy.budget import Relation, unit_sensitivity

# Any order gives a valid bound; these lie so close that the best of them is the best there is, to
# one part in ten thousand.
_ORDERS = 1 + np.geomspace(0.02, 1e7, 800)


def total_rho(composition: frozenset[tuple[dpa.DpEvent, int]], relation: Relation) -> float | None:
    """The rho of everything together; ``None`` if no event speaks of concentrated privacy.

    Raises:
        ValueError: If sampled batches are among it, or an event is not proven for the relation.
        TypeError: If no accountant is proven for an event.
    """
    if not any(isinstance(event, dpa.ZCDpEvent) for event, _ in composition):
        return None
    return math.fsum(count * _rho(event, relation) for event, count in composition)


def _rho(event: dpa.DpEvent, relation: Relation) -> float:
    loss_distributions.check_relation(event, relation)
    if isinstance(event, dpa.ZCDpEvent):
        return float(event.rho) if event.xi == 0 else math.inf
    noise = loss_distributions.noise_multiplier(event)
    if not loss_distributions.takes_all_records(event):
        raise ValueError(
            "discrete Gaussian noise is accounted together with releases on all records alone, got "
            f"a {type(event).__name__} of the same client: write noise=Gaussian(), or keep the "
            "sampled batches to budgets and ledgers of their own."
        )
    return 0.5 * (unit_sensitivity(relation) / noise) ** 2 if noise > 0 else math.inf


def epsilon(rho: float, delta: float) -> float:
    """An epsilon that rho-zCDP implies at ``delta``: dp-accounting's RDP accountant."""
    if math.isinf(rho):
        return math.inf
    accountant = RdpAccountant(orders=_ORDERS)
    accountant.compose(dpa.ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def advantage(rho: float) -> float:
    """A bound on how far apart neighbours' distributions are in total variation.

    Their Kullback-Leibler divergence is at most rho (Pinsker; Bretagnolle and Huber).
    """
    return min(math.sqrt(rho / 2), math.sqrt(-math.expm1(-rho)))


def detected(rho: float, false_positive_rate: float) -> float:
    """The largest rate of true alarms at a rate of false ones: more would be too far apart.

    What a test says is a coin, whose Rényi divergences between neighbours are no larger than those
    of what it was made from, in both directions.
    """
    if math.isinf(rho):
        return 1.0
    allowed = rho * _ORDERS
    low, high = false_positive_rate, 1.0
    while high - low > 1e-12:
        rate = 0.5 * (low + high)
        apart = np.maximum(_between(rate, false_positive_rate), _between(false_positive_rate, rate))
        if np.all(apart <= allowed):
            low = rate
        else:
            high = rate
    return high


def _between(one: float, other: float) -> np.ndarray:
    """Rényi divergence of one coin from another, at every order."""
    heads = _ORDERS * math.log(one) + (1 - _ORDERS) * math.log(other)
    tails = _ORDERS * math.log1p(-one) + (1 - _ORDERS) * math.log1p(-other)
    return np.logaddexp(heads, tails) / (_ORDERS - 1)
