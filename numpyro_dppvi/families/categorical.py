"""Independent entries of 0, ..., K - 1: log odds against 0, statistics (x = 1, ..., x = K - 1)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_dppvi import factors
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families.reading import log_odds


@dataclass(frozen=True)
class Categorical:
    """Categorical distributions over arrays of ``shape``; entries are independent.

    Log odds of all values but the first, against the first, are what factors add up in and what an
    optimiser moves, too: arrays of ``(*shape, num_values - 1)``. All finite ones are proper.
    """

    shape: tuple[int, ...]
    num_values: int

    def standard(self) -> Array:
        """Even odds."""
        return jnp.zeros((*self.shape, self.num_values - 1))

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of any distribution of independent entries on {0, ..., K - 1}."""
        return log_odds(distribution, self.num_values, self.shape)

    def natural(self, coordinates: Array) -> Array:
        """Log odds against 0."""
        return coordinates

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`."""
        return natural

    def statistics(self, coordinates: Array) -> Array:
        """The probabilities of 1, ..., K - 1."""
        return jax.nn.softmax(_logits(coordinates), axis=-1)[..., 1:]

    def entropy(self, coordinates: Array) -> Array:
        """The log partition less the natural parameters times the statistics."""
        linear = factors.inner(coordinates, self.statistics(coordinates))
        return self.log_partition(coordinates) - linear

    def log_partition(self, natural: Array) -> Array:
        """Sum of log(1 + sum of exp(log odds))."""
        return jnp.sum(logsumexp(_logits(natural), axis=-1))

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
        """``Categorical(logits).to_event()``."""
        return dist.CategoricalLogits(_logits(coordinates)).to_event(len(self.shape))


def _logits(coordinates: Array) -> Array:
    """Logarithms of all probabilities, up to a constant."""
    return jnp.pad(coordinates, [(0, 0)] * (coordinates.ndim - 1) + [(1, 0)])
