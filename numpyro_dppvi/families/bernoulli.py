"""Independent entries of 0 or 1: natural parameter log(p / (1 - p)), statistic x."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.base import LogOdds
from numpyro_dppvi.families.reading import log_odds


@dataclass(frozen=True)
class Bernoulli(LogOdds):
    """Bernoulli distributions over arrays of ``shape``; entries are independent.

    Natural parameters are log odds; all finite ones are proper. Coordinates are half the log odds.
    """

    # p(x) = exp(eta x - log(1 + e^eta)). At even odds, d mean / d eta = p (1 - p) = 1/4, so moving
    # eta / 2 by one moves the mean by 1/2, one standard deviation, as a normal's location does. An
    # optimiser under noise does much better with that than with eta, whose gradients are half as
    # large.

    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """Always 2."""
        return 2

    def standard(self) -> Array:
        """Even odds."""
        return jnp.zeros(self.shape)

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of any distribution of independent entries on {0, 1}."""
        found = log_odds(distribution, self.num_values, self.shape)
        return None if found is None else found[..., 0]

    def natural(self, coordinates: Array) -> Array:
        """Log odds."""
        return 2 * coordinates

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`."""
        return natural / 2

    def statistics(self, coordinates: Array) -> Array:
        """The probability of 1."""
        return jax.nn.sigmoid(self.natural(coordinates))

    def log_partition(self, natural: Array) -> Array:
        """Sum of log(1 + exp(log odds))."""
        return jnp.sum(jax.nn.softplus(natural))

    def distribution(self, coordinates: Array) -> dist.Distribution:
        """``Bernoulli(logits).to_event()``."""
        return dist.BernoulliLogits(self.natural(coordinates)).to_event(len(self.shape))
