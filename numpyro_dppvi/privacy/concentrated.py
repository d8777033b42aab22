"""Zero-concentrated differential privacy (zCDP), the guarantee of discrete Gaussian noise.

A release satisfies rho-zCDP if its Rényi divergences between neighbours, at every order above 1
and in both directions, are at most ``rho * order``. The rhos of several releases add up (Bun and
Steinke 2016). Gaussian noise satisfies zCDP, too, so both kinds of noise compose.
"""

import math

import dp_accounting as dpa
import numpy as np
from dp_accounting.rdp import RdpAccountant

from numpyro_dppvi.privacy import loss_distributions
from numpyro_dppvi.privacy.budget import Relation, unit_sensitivity

# Every order gives a valid bound. These are dense enough that the best of them is within one part
# in ten thousand of the best over all orders.
_ORDERS = 1 + np.geomspace(0.02, 1e7, 800)


def total_rho(composition: frozenset[tuple[dpa.DpEvent, int]], relation: Relation) -> float | None:
    """The total rho of a composition; ``None`` if it has no discrete Gaussian event."""
    if not any(isinstance(event, dpa.ZCDpEvent) for event, _ in composition):
        return None
    # Rhos add up, also where a release was chosen after the ones before it were seen (Bun and
    # Steinke 2016).
    return math.fsum(count * _rho(event, relation) for event, count in composition)


def _rho(event: dpa.DpEvent, relation: Relation) -> float:
    loss_distributions.check_relation(event, relation)
    if isinstance(event, dpa.ZCDpEvent):
        return float(event.rho) if event.xi == 0 else math.inf
    noise = loss_distributions.noise_multiplier(event)
    if not loss_distributions.takes_all_records(event):
        raise ValueError(
            "discrete Gaussian noise can only be accounted together with releases on all records, "
            f"got a {type(event).__name__} of the same client: write noise=Gaussian(), or give the "
            "sampled batches their own budget and ledger."
        )
    # Gaussians at distance mu have Rényi divergence order * mu^2 / 2.
    return 0.5 * (unit_sensitivity(relation) / noise) ** 2 if noise > 0 else math.inf


def epsilon(rho: float, delta: float) -> float:
    """An epsilon that rho-zCDP implies at ``delta``, by dp-accounting's RDP accountant."""
    if math.isinf(rho):
        return math.inf
    accountant = RdpAccountant(orders=_ORDERS)
    accountant.compose(dpa.ZCDpEvent(rho))
    return float(accountant.get_epsilon(delta))


def advantage(rho: float) -> float:
    """A bound on the total variation distance between neighbours' releases."""
    # The Kullback-Leibler divergence, the Rényi divergence of order 1, is at most rho. Then Pinsker
    # gives sqrt(rho / 2), which is better for small rho, and Bretagnolle-Huber the other.
    return min(math.sqrt(rho / 2), math.sqrt(-math.expm1(-rho)))


def detected(rho: float, false_positive_rate: float) -> float:
    """The largest true-positive rate that rho-zCDP allows at a false-positive rate."""
    if math.isinf(rho):
        return 1.0
    # A test's answer is post-processing: a coin that shows heads with the one rate or the other.
    # Data processing bounds its Rényi divergences, at every order and in both directions, and they
    # grow with the distance of the rates, so the largest allowed rate is found by bisection.
    allowed = rho * _ORDERS
    low, high = false_positive_rate, 1.0
    while high - low > 1e-12:
        rate = 0.5 * (low + high)
        # log sum of p^a q^(1 - a) over the coin's two sides, over a - 1: in both directions.
        apart = np.maximum(_between(rate, false_positive_rate), _between(false_positive_rate, rate))
        if np.all(apart <= allowed):
            low = rate
        else:
            high = rate
    return high


def _between(one: float, other: float) -> np.ndarray:
    """Rényi divergences between coins with these probabilities of heads, at every order."""
    heads = _ORDERS * math.log(one) + (1 - _ORDERS) * math.log(other)
    tails = _ORDERS * math.log1p(-one) + (1 - _ORDERS) * math.log1p(-other)
    return np.logaddexp(heads, tails) / (_ORDERS - 1)
