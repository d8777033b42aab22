"""Independent entries of 0, ..., K - 1: log odds against 0, statistics (x = 1, ..., x = K - 1)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.base import LogOdds
from numpyro_dppvi.families.reading import log_odds


@dataclass(frozen=True)
class Categorical(LogOdds):
    """Categorical distributions over arrays of ``shape``; entries are independent.

    Natural parameters are the log odds of all values but the first against the first, of shape
    ``(*shape, num_values - 1)``; all finite ones are proper. Coordinates are the log odds divided
    by a constant, as for :class:`Bernoulli`.
    """

    shape: tuple[int, ...]
    num_values: int

    def standard(self) -> Array:
        """Even odds."""
        return jnp.zeros((*self.shape, self.num_values - 1))

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of any distribution of independent entries on {0, ..., K - 1}."""
        # The first value's log odds are 0 and left out. With all K of them, every constant added to
        # all would be the same distribution, and noise on that direction would be paid for in vain.
        return log_odds(distribution, self.num_values, self.shape)

    def natural(self, coordinates: Array) -> Array:
        """Log odds against 0."""
        return self._unit * coordinates

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`."""
        return natural / self._unit

    def statistics(self, coordinates: Array) -> Array:
        """The probabilities of 1, ..., K - 1."""
        return jax.nn.softmax(_logits(self.natural(coordinates)), axis=-1)[..., 1:]

    def log_partition(self, natural: Array) -> Array:
        """Sum of log(1 + sum of exp(log odds))."""
        return jnp.sum(logsumexp(_logits(natural), axis=-1))

    def distribution(self, coordinates: Array) -> dist.Distribution:
        """``Categorical(logits).to_event()``."""
        logits = _logits(self.natural(coordinates))
        return dist.CategoricalLogits(logits).to_event(len(self.shape))

    @property
    def _unit(self) -> float:
        """One over the standard deviation of a statistic at even odds."""
        # A statistic (x = k) has variance p (1 - p) = (K - 1) / K^2 at p = 1 / K.
        return self.num_values / math.sqrt(max(1, self.num_values - 1))


def _logits(natural: Array) -> Array:
    """Log probabilities up to a constant: log odds with a 0 for the first value."""
    return jnp.pad(natural, [(0, 0)] * (natural.ndim - 1) + [(1, 0)])
