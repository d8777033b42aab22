"""Independent entries of 0 or 1: natural parameter log(p / (1 - p)), statistic x, itself."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi import factors
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families.reading import log_odds


@dataclass(frozen=True)
class Bernoulli:
    """Bernoulli distributions over arrays of ``shape``; entries are independent.

    Log odds are what factors add up in, and what an optimiser moves. All finite ones are proper.
    """

    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """How many values an entry has, which is 2."""
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
        return coordinates

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`."""
        return natural

    def statistics(self, coordinates: Array) -> Array:
        """The probability of 1."""
        return jax.nn.sigmoid(coordinates)

    def entropy(self, coordinates: Array) -> Array:
        """The log partition less the natural parameters times the statistics."""
        return jnp.sum(jax.nn.softplus(coordinates) - coordinates * jax.nn.sigmoid(coordinates))

    def log_partition(self, natural: Array) -> Array:
        """Sum of log(1 + exp(log odds))."""
        return jnp.sum(jax.nn.softplus(natural))

    def in_domain(self, natural: Array) -> Array:
        """All finite."""
        return factors.is_finite(natural)

    def project(self, natural: Array) -> Array:
        """Leaves every factor as it is."""
        return natural

    def draws(self, rng_key: PRNGKey, coordinates: Array, num_draws: int) -> Array:
        """Independent draws, which have no derivative: expectations are summed instead."""
        return self.distribution(coordinates).sample(rng_key, (num_draws,))

    def distribution(self, coordinates: Array) -> dist.Distribution:
        """``Bernoulli(logits).to_event()``."""
        return dist.BernoulliLogits(coordinates).to_event(len(self.shape))
