"""What an epsilon means: how well the best attack tells two neighbouring data sets apart.

The attacker knows the model, all other records and everything that was released, and has to say
which of the two data sets it came from. No test does better than the trade-off curve of the same
distributions that the accountant composes (Dong, Roth and Su 2022).
"""

import functools
import math
from statistics import NormalDist
from typing import NamedTuple, get_args

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting, concentrated, loss_distributions
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import Relation

FALSE_POSITIVE_RATE = 0.01
"""The rate of false alarms at which attacks are reported, unless another is asked for."""

# Slopes of the trade-off curve that are tried, as logarithms: any of them gives a valid bound.
_LEAST_SLOPE = -8.0
_NUM_SLOPES = 401
_SETTLED = 3e-2


class Attack(NamedTuple):
    """The best attack on one client's releases; exact for full batches, else an upper bound.

    Attributes:
        advantage: True-positive rate less false-positive rate, at most, whatever the latter: 0 is
            guessing, 1 is certainty. The attacker is right in (1 + advantage) / 2 of all cases if
            both data sets are as likely beforehand.
        false_positive_rate: A rate of false alarms.
        true_positive_rate: How often the attack is right about the presence of a record, at most,
            at this rate of false alarms; guessing has equal rates.
    """

    advantage: float
    false_positive_rate: float
    true_positive_rate: float


def best_attack(
    composition: Composition, relation: Relation, false_positive_rate: float = FALSE_POSITIVE_RATE
) -> Attack:
    """The best attack on what was released.

    Args:
        composition: What was released, with noise multipliers in units of the clipping norm.
        relation: The neighbouring relation.
        false_positive_rate: In (0, 1).

    Returns:
        The attack: from the closed form for Gaussians, else from privacy loss distributions that
        are rounded up, or for discrete Gaussian noise from its Rényi divergences.

    Raises:
        ValueError: If a rate is outside (0, 1) or there is no such relation.
        TypeError: If the composition is none.
    """
    accounting.check_composition(composition)
    _validate.choice("relation", relation, get_args(Relation))
    rate = _validate.open_unit("false_positive_rate", false_positive_rate, "0.01", 1e-100)
    return _best_attack(composition, relation, rate)


@functools.lru_cache(maxsize=4096)
def _best_attack(composition: Composition, relation: Relation, rate: float) -> Attack:
    """What :func:`best_attack` returns."""
    rho = concentrated.total_rho(composition, relation)
    if rho is not None:
        return Attack(concentrated.advantage(rho), rate, concentrated.detected(rho, rate))
    mu = accounting.gaussian_mu(composition, relation)
    if mu == 0:
        return Attack(0.0, rate, rate)
    if mu == math.inf:
        return Attack(1.0, rate, 1.0)
    if mu is not None:
        normal = NormalDist()
        caught = normal.cdf(normal.inv_cdf(rate) + mu)
        return Attack(math.erf(mu / math.sqrt(8)), rate, caught)
    slopes = np.linspace(_LEAST_SLOPE, -math.log(rate), _NUM_SLOPES)
    rounding = accounting.rounding_error(composition)
    advantages = []

    def surplus(grid: float) -> float:
        # Whatever is decided, P(caught) - e^slope P(false alarm) is at most delta(slope).
        distribution = loss_distributions.of_composition(composition, relation, grid)
        advantages.append(float(distribution.get_delta_for_epsilon(0.0)) + rounding)
        deltas = distribution.get_delta_for_epsilon(slopes) + rounding
        return float(np.min(np.exp(slopes) * rate + deltas)) - rate

    caught = rate + accounting.tightest(surplus, _SETTLED)
    return Attack(min(1.0, *advantages), rate, min(1.0, caught))
