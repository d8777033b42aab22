"""What an epsilon means: how well the best attack tells neighbouring data sets apart.

The attacker knows the model, all other records and everything that was released, and must decide
which of two neighbouring data sets it came from. No test can beat the trade-off curve of the
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
"""The false-positive rate at which attacks are reported by default."""

# The logarithm of the least slope at which the trade-off curve is bounded; every slope gives a
# valid bound. The best one is looked for among so many, and so often among those about it: where
# much noise makes all privacy losses small, it lies close to others that are far worse.
_LEAST_SLOPE = -8.0
_NUM_SLOPES, _LOOKS = 101, 3
_SETTLED = 3e-2


class Attack(NamedTuple):
    """The best attack on one client's releases; exact for full batches, else an upper bound.

    Attributes:
        advantage: The largest true-positive rate minus false-positive rate: 0 is guessing, 1 is
            certainty. If both data sets are equally likely beforehand, the attacker is right with
            probability (1 + advantage) / 2.
        false_positive_rate: A false-positive rate.
        true_positive_rate: The largest true-positive rate at that false-positive rate; for
            guessing the two are equal.
    """

    advantage: float
    false_positive_rate: float
    true_positive_rate: float


def best_attack(
    composition: Composition, relation: Relation, false_positive_rate: float = FALSE_POSITIVE_RATE
) -> Attack:
    """The best attack on a composition of releases.

    It comes from a closed form for Gaussian releases, from Rényi divergences for discrete Gaussian
    noise, and from privacy loss distributions otherwise.

    Args:
        composition: What was released, with noise multipliers in units of the clipping norm.
        relation: The neighbouring relation.
        false_positive_rate: In (0, 1).

    Raises:
        ValueError: If the rate is outside (0, 1) or the relation is unknown.
        TypeError: If the composition is not a composition.
    """
    accounting.check_composition(composition)
    _validate.choice("relation", relation, get_args(Relation))
    rate = _validate.open_unit("false_positive_rate", false_positive_rate, "0.01", 1e-100)
    return _best_attack(composition, relation, rate)


@functools.lru_cache(maxsize=4096)
def _best_attack(composition: Composition, relation: Relation, rate: float) -> Attack:
    rho = concentrated.total_rho(composition, relation)
    if rho is not None:
        return Attack(concentrated.advantage(rho), rate, concentrated.detected(rho, rate))
    mu = accounting.gaussian_mu(composition, relation)
    if mu == 0:
        return Attack(0.0, rate, rate)
    if mu == math.inf:
        return Attack(1.0, rate, 1.0)
    if mu is not None:
        # Neyman-Pearson for N(0, 1) against N(mu, 1): the best test rejects above a threshold.
        normal = NormalDist()
        caught = normal.cdf(normal.inv_cdf(rate) + mu)
        return Attack(math.erf(mu / math.sqrt(8)), rate, caught)
    rounding = accounting.rounding_error(composition)
    advantages = []

    def surplus(grid: float) -> float:
        # By the definition of delta, P(true positive) - e^slope P(false positive) <= delta(slope)
        # for any test, so the smallest e^slope * rate + delta(slope) bounds the true-positive rate.
        distribution = loss_distributions.of_composition(composition, relation, grid)
        # The advantage is the total variation distance, which is delta at epsilon 0.
        advantages.append(float(distribution.get_delta_for_epsilon(0.0)) + rounding)
        low, high = _LEAST_SLOPE, -math.log(rate)
        for _ in range(_LOOKS):
            slopes = np.linspace(low, high, _NUM_SLOPES)
            bounds = np.exp(slopes) * rate + distribution.get_delta_for_epsilon(slopes) + rounding
            # Convex in e^slope, so that the best of all lies between the neighbours of the best.
            best = int(np.argmin(bounds))
            low, high = slopes[max(best - 1, 0)], slopes[min(best + 1, _NUM_SLOPES - 1)]
        return float(np.min(bounds)) - rate

    # The surplus over guessing is what settles: relative to it, and not to the rate itself. Grids
    # that are coarser than the losses, which are about as large as the advantage, tell no more than
    # that the surplus is at most the advantage.
    surplus(accounting.COARSEST)
    caught = rate + accounting.tightest(surplus, _SETTLED, coarsest=advantages[0])
    return Attack(min(1.0, *advantages), rate, min(1.0, caught))
