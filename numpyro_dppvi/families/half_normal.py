"""Independent half-normal entries: natural parameter -1 / (2 s^2), statistic x^2."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.reading import full, one_of


@dataclass(frozen=True)
class HalfNormal:
    """Half-normal distributions over arrays of ``shape``; the coordinate is the log scale."""

    # Scale and precision are those of the normal that is folded at 0.
    # p(x) = 2 Normal(x | 0, s) for x >= 0, that is exp(-x^2 / (2 s^2) - log s - log(pi / 2) / 2).
    shape: tuple[int, ...]

    def standard(self) -> Array:
        """Scale 1."""
        return jnp.zeros(self.shape)

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of ``HalfNormal``."""
        found = one_of(distribution, dist.HalfNormal)
        return None if found is None else self.natural(jnp.log(full(found.scale, self.shape)))

    def natural(self, coordinates: Array) -> Array:
        """-1 / (2 scale^2)."""
        return -0.5 * jnp.exp(-2 * coordinates)

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`; NaN outside the domain."""
        return -0.5 * jnp.log(-2 * natural)

    def statistics(self, coordinates: Array) -> Array:
        """scale^2."""
        return jnp.exp(2 * coordinates)

    def entropy(self, coordinates: Array) -> Array:
        """The sum of log scale + (1 + log(pi / 2)) / 2."""
        return jnp.sum(coordinates + 0.5 * (1 + math.log(math.pi / 2)))

    def log_partition(self, natural: Array) -> Array:
        """The sum of log(pi / 2) / 2 + log scale."""
        return 0.5 * jnp.sum(math.log(math.pi / 2) - jnp.log(-2 * natural))

    def in_domain(self, natural: Array) -> Array:
        """Whether all are finite and negative."""
        return jnp.all(natural < 0) & factors.is_finite(natural)

    def project(self, natural: Array) -> Array:
        """Sets factors that would widen the distribution to 1.

        So under privacy it cannot become wider than the prior; ``Gamma`` or ``LogNormal`` can.
        """
        return jnp.minimum(natural, 0)

    def draws(self, rng_key: PRNGKey, coordinates: Array, num_draws: int) -> Array:
        """Antithetic draws, at the quantiles u and 1 - u."""
        # The quantile function is ndtri((1 + u) / 2); at 1 - u that is ndtri(1 - u / 2).
        half = (num_draws + 1) // 2
        # From eps on, and not from 0: at u = 0 the first of the pair is ndtri(1), which is
        # infinite.
        limits = np.finfo(coordinates.dtype)
        u = jax.random.uniform(rng_key, (half, *self.shape), coordinates.dtype, limits.eps)
        pairs = jnp.stack(
            [jax.scipy.special.ndtri(1 - u / 2), jax.scipy.special.ndtri(0.5 + u / 2)], axis=1
        )
        unit = pairs.reshape(2 * half, *self.shape)[:num_draws]
        return jnp.exp(coordinates) * jnp.maximum(unit, limits.tiny)

    def distribution(self, coordinates: Array) -> dist.Distribution:
        """``HalfNormal(scale).to_event()``."""
        return dist.HalfNormal(jnp.exp(coordinates)).to_event(len(self.shape))
