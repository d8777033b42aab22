"""Independent gamma entries: natural parameters (a - 1, -b), statistics (log x, x)."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.reading import full, one_of


class GammaNatural(NamedTuple):
    """Coefficients of log x and of x; also used for these statistics."""

    log: Array
    linear: Array


class GammaCoordinates(NamedTuple):
    """Logarithms of the mean and of the concentration."""

    log_mean: Array
    log_concentration: Array


@dataclass(frozen=True)
class Gamma:
    """Gamma distributions over arrays of ``shape``; entries are independent."""

    # p(x) = exp((a - 1) log x - b x + a log b - log Gamma(a)). Coordinates are (log mean, log a)
    # with b = a / mean, because the mean and a have uncorrelated estimates: the Fisher information
    # in these coordinates is diagonal.
    shape: tuple[int, ...]

    def standard(self) -> GammaCoordinates:
        """The exponential distribution of mean 1."""
        return GammaCoordinates(jnp.zeros(self.shape), jnp.zeros(self.shape))

    def of_distribution(self, distribution: dist.Distribution | None) -> GammaNatural | None:
        """Of ``Gamma``, and of ``Exponential``, which has concentration 1."""
        found = one_of(distribution, dist.Gamma, dist.Exponential)
        if found is None:
            return None
        concentration = getattr(found, "concentration", 1.0)
        return GammaNatural(full(concentration, self.shape) - 1, -full(found.rate, self.shape))

    def natural(self, coordinates: GammaCoordinates) -> GammaNatural:
        """(concentration - 1, -rate), where the rate is concentration / mean."""
        # expm1, and log1p below, keep the digits of a - 1 next to the exponential's a = 1.
        log_rate = coordinates.log_concentration - coordinates.log_mean
        return GammaNatural(jnp.expm1(coordinates.log_concentration), -jnp.exp(log_rate))

    def coordinates(self, natural: GammaNatural) -> GammaCoordinates:
        """Inverse of :meth:`natural`; NaN outside the domain."""
        log_concentration = jnp.log1p(natural.log)
        return GammaCoordinates(log_concentration - jnp.log(-natural.linear), log_concentration)

    def statistics(self, coordinates: GammaCoordinates) -> GammaNatural:
        """(digamma(concentration) - log rate, mean)."""
        log_mean, log_a = coordinates
        return GammaNatural(log_mean + (digamma(jnp.exp(log_a)) - log_a), jnp.exp(log_mean))

    def entropy(self, coordinates: GammaCoordinates) -> Array:
        """The sum of a - log b + log Gamma(a) + (1 - a) digamma(a)."""
        log_mean, log_a = coordinates
        a = jnp.exp(log_a)
        return jnp.sum(a + log_mean - log_a + gammaln(a) + (1 - a) * digamma(a))

    def log_partition(self, natural: GammaNatural) -> Array:
        """The sum of log Gamma(a) - a log b."""
        a = natural.log + 1
        return jnp.sum(gammaln(a) - a * jnp.log(-natural.linear))

    def in_domain(self, natural: GammaNatural) -> Array:
        """Whether all are finite and every concentration and rate is positive."""
        proper = jnp.all(natural.log > -1) & jnp.all(natural.linear < 0)
        return proper & factors.is_finite(natural)

    def project(self, natural: GammaNatural) -> GammaNatural:
        """Clips both parts, so that a factor never lowers the concentration or the rate."""
        return GammaNatural(jnp.maximum(natural.log, 0), jnp.minimum(natural.linear, 0))

    def project_whole(self, natural: GammaNatural) -> GammaNatural:
        """Keeps entries that lower neither parameter; the others become the factor 1."""
        kept = (natural.log >= 0) & (natural.linear <= 0)
        return GammaNatural(*(jnp.where(kept, leaf, 0) for leaf in natural))

    def draws(self, rng_key: PRNGKey, coordinates: GammaCoordinates, num_draws: int) -> Array:
        """Independent draws, in logarithms so that small concentrations do not underflow to 0."""
        log_mean, log_a = coordinates
        log_x = jax.random.loggamma(rng_key, jnp.exp(log_a), (num_draws, *self.shape), log_a.dtype)
        return jnp.maximum(jnp.exp(log_x + (log_mean - log_a)), np.finfo(log_a.dtype).tiny)

    def distribution(self, coordinates: GammaCoordinates) -> dist.Distribution:
        """``Gamma(concentration, rate).to_event()``."""
        log_mean, log_a = coordinates
        gamma = dist.Gamma(jnp.exp(log_a), jnp.exp(log_a - log_mean))
        return gamma.to_event(len(self.shape))
