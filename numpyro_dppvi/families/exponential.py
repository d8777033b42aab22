"""Independent exponential entries: natural parameter -rate, statistic x, coordinate log mean."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.reading import full, one_of


@dataclass(frozen=True)
class Exponential:
    """Exponential distributions over arrays of ``shape``; entries are independent."""

    # p(x) = exp(-r x + log r). The log of the mean is the log rate up to its sign; steps in it are
    # relative, whatever the unit of x.
    shape: tuple[int, ...]

    def standard(self) -> Array:
        """Mean 1."""
        return jnp.zeros(self.shape)

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of ``Exponential``."""
        found = one_of(distribution, dist.Exponential)
        return None if found is None else -full(found.rate, self.shape)

    def natural(self, coordinates: Array) -> Array:
        """-1 / mean."""
        return -jnp.exp(-coordinates)

    def coordinates(self, natural: Array) -> Array:
        """Inverse of :meth:`natural`; NaN outside the domain."""
        return -jnp.log(-natural)

    def statistics(self, coordinates: Array) -> Array:
        """The mean."""
        return jnp.exp(coordinates)

    def entropy(self, coordinates: Array) -> Array:
        """The sum of 1 + log mean."""
        return jnp.sum(1 + coordinates)

    def log_partition(self, natural: Array) -> Array:
        """The sum of -log rate."""
        return -jnp.sum(jnp.log(-natural))

    def in_domain(self, natural: Array) -> Array:
        """Whether all are finite and every rate is positive."""
        return jnp.all(natural < 0) & factors.is_finite(natural)

    def project(self, natural: Array) -> Array:
        """Sets factors that would lower the rate to 1.

        So under privacy the mean cannot exceed the prior's; with ``Gamma`` it can.
        """
        # A factor exp(+r x) has no proper product with an exponential of a smaller rate. There is
        # no second parameter that could take up what is cut off, unlike in Gamma.
        return jnp.minimum(natural, 0)

    def draws(self, rng_key: PRNGKey, coordinates: Array, num_draws: int) -> Array:
        """Antithetic draws, at the quantiles u and 1 - u."""
        half = (num_draws + 1) // 2
        # -log(1 - u) is the quantile function. u and 1 - u give a short and a long draw, whose
        # errors cancel in part.
        tiny = np.finfo(coordinates.dtype).tiny
        u = jax.random.uniform(rng_key, (half, *self.shape), coordinates.dtype, minval=tiny)
        pairs = jnp.stack([-jnp.log(u), -jnp.log1p(-u)], axis=1)
        unit = pairs.reshape(2 * half, *self.shape)[:num_draws]
        return jnp.exp(coordinates) * jnp.maximum(unit, tiny)

    def distribution(self, coordinates: Array) -> dist.Distribution:
        """``Exponential(rate).to_event()``."""
        return dist.Exponential(jnp.exp(-coordinates)).to_event(len(self.shape))
