"""Independent beta entries: natural parameters (a - 1, b - 1), statistics (log x, log(1 - x))."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.base import dual_entropy
from numpyro_dppvi.families.reading import full, plain


class BetaNatural(NamedTuple):
    """Coefficients of log x and of log(1 - x); also the shape in which these statistics come."""

    log: Array
    log_complement: Array


class BetaCoordinates(NamedTuple):
    """Logit of the mean, and logarithm of a + b."""

    logit_mean: Array
    log_concentration: Array


@dataclass(frozen=True)
class Beta:
    """Beta distributions over arrays of ``shape``; entries are independent."""

    # p(x) = exp((a - 1) log x + (b - 1) log(1 - x) - log B(a, b)) with respect to dx. The uniform
    # distribution is the factor 1.
    shape: tuple[int, ...]

    def standard(self) -> BetaCoordinates:
        """The uniform distribution."""
        # a = b = 1 has mean 1/2 and a + b = 2.
        return BetaCoordinates(jnp.zeros(self.shape), full(jnp.log(2.0), self.shape))

    def of_distribution(self, distribution: dist.Distribution | None) -> BetaNatural | None:
        """Of ``Beta`` and ``Uniform(0, 1)``, which is ``Beta(1, 1)``."""
        distribution = plain(distribution)
        if isinstance(distribution, dist.Uniform):
            unit = jnp.all(distribution.low == 0) & jnp.all(distribution.high == 1)
            return BetaNatural(*jnp.zeros((2, *self.shape))) if unit else None
        if not isinstance(distribution, dist.Beta):
            return None
        a, b = distribution.concentration1, distribution.concentration0
        return BetaNatural(full(a, self.shape) - 1, full(b, self.shape) - 1)

    def natural(self, coordinates: BetaCoordinates) -> BetaNatural:
        """(a - 1, b - 1)."""
        a, b = _concentrations(coordinates)
        return BetaNatural(a - 1, b - 1)

    def coordinates(self, natural: BetaNatural) -> BetaCoordinates:
        """Inverse of :meth:`natural`; NaN outside the domain."""
        # The mean is a / (a + b), so its logit is log a - log b.
        a, b = natural.log + 1, natural.log_complement + 1
        return BetaCoordinates(jnp.log(a) - jnp.log(b), jnp.log(a + b))

    def statistics(self, coordinates: BetaCoordinates) -> BetaNatural:
        """(digamma(a) - digamma(a + b), digamma(b) - digamma(a + b))."""
        a, b = _concentrations(coordinates)
        return BetaNatural(digamma(a) - digamma(a + b), digamma(b) - digamma(a + b))

    entropy = dual_entropy

    def log_partition(self, natural: BetaNatural) -> Array:
        """Sum of log B(a, b)."""
        a, b = natural.log + 1, natural.log_complement + 1
        return jnp.sum(gammaln(a) + gammaln(b) - gammaln(a + b))

    def in_domain(self, natural: BetaNatural) -> Array:
        """Whether all are finite, and a and b positive."""
        proper = jnp.all(natural.log > -1) & jnp.all(natural.log_complement > -1)
        return proper & factors.is_finite(natural)

    # Noise may take a factor below zero. Its product with a narrow q may still be proper, but not
    # with every q: only factors that add to both counts are safe with all of them.
    def project(self, natural: BetaNatural) -> BetaNatural:
        """Raises negative parts to zero, so that a factor never lowers a or b."""
        return BetaNatural(*(jnp.maximum(leaf, 0) for leaf in natural))

    def draws(self, rng_key: PRNGKey, coordinates: BetaCoordinates, num_draws: int) -> Array:
        """Independent draws as ratios of gamma draws, kept away from 0 and 1."""
        # X / (X + Y) with X ~ Gamma(a), Y ~ Gamma(b); in logarithms, so that small concentrations
        # do not underflow.
        concentrations = jnp.stack(_concentrations(coordinates))
        shape = (num_draws, 2, *self.shape)
        log_x, log_y = jnp.moveaxis(jax.random.loggamma(rng_key, concentrations, shape), 1, 0)
        # The statistics log x and log(1 - x) are infinite at 0 and 1. Rounding puts draws there
        # once a or b is small, and one of them would make the whole gradient NaN.
        limits = np.finfo(log_x.dtype)
        return jnp.clip(jax.nn.sigmoid(log_x - log_y), limits.tiny, 1 - limits.epsneg)

    def distribution(self, coordinates: BetaCoordinates) -> dist.Distribution:
        """``Beta(a, b).to_event()``."""
        return dist.Beta(*_concentrations(coordinates)).to_event(len(self.shape))


def _concentrations(coordinates: BetaCoordinates) -> tuple[Array, Array]:
    # a = (a + b) * mean and b = (a + b) * (1 - mean), in logarithms: log_sigmoid keeps the smaller
    # one's digits where the mean is next to 0 or 1.
    logit, log_concentration = coordinates
    log_a = log_concentration + jax.nn.log_sigmoid(logit)
    log_b = log_concentration + jax.nn.log_sigmoid(-logit)
    return jnp.exp(log_a), jnp.exp(log_b)
