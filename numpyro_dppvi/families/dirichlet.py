"""Dirichlet vectors along the last axis: natural parameters a - 1, statistics log x."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln, logsumexp

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.base import dual_entropy
from numpyro_dppvi.families.reading import full, one_of


class DirichletCoordinates(NamedTuple):
    """Coordinates of Dirichlet distributions.

    Attributes:
        logits: Logarithms of the mean's entries up to a constant; :meth:`Dirichlet.coordinates`
            returns logits that sum to 0.
        log_concentration: Logarithm of the sum of the entries of a, without the last axis.
    """

    logits: Array
    log_concentration: Array


@dataclass(frozen=True)
class Dirichlet:
    """Dirichlet distributions; the last axis of ``shape`` is the simplex."""

    # p(x) = exp(sum of (a_k - 1) log x_k - log B(a)) on the simplex; the uniform distribution is
    # the factor 1.
    shape: tuple[int, ...]

    def standard(self) -> DirichletCoordinates:
        """The uniform distribution."""
        return self.coordinates(jnp.zeros(self.shape))

    def of_distribution(self, distribution: dist.Distribution | None) -> Array | None:
        """Of ``Dirichlet``."""
        found = one_of(distribution, dist.Dirichlet)
        return None if found is None else full(found.concentration, self.shape) - 1

    def natural(self, coordinates: DirichletCoordinates) -> Array:
        """Concentrations a, minus 1."""
        return _concentration(coordinates) - 1

    def coordinates(self, natural: Array) -> DirichletCoordinates:
        """Inverse of :meth:`natural`, up to a constant in the logits; NaN outside the domain."""
        # The mean is a / sum(a), so log a is the logits up to a constant, which centring removes.
        logits = jnp.log(natural + 1)
        centred = logits - jnp.mean(logits, axis=-1, keepdims=True)
        return DirichletCoordinates(centred, logsumexp(logits, axis=-1))

    def statistics(self, coordinates: DirichletCoordinates) -> Array:
        """digamma(a) - digamma(sum of a)."""
        a = _concentration(coordinates)
        return digamma(a) - digamma(jnp.sum(a, axis=-1, keepdims=True))

    entropy = dual_entropy

    def log_partition(self, natural: Array) -> Array:
        """The sum of log Gamma(a), minus log Gamma(sum of a)."""
        a = natural + 1
        return jnp.sum(jnp.sum(gammaln(a), axis=-1) - gammaln(jnp.sum(a, axis=-1)))

    def in_domain(self, natural: Array) -> Array:
        """Whether all are finite and a is positive."""
        return jnp.all(natural > -1) & factors.is_finite(natural)

    # As for Beta: what lowers no count is proper times every proper q.
    def project(self, natural: Array) -> Array:
        """Raises negative parts to zero, so that a factor never lowers a."""
        return jnp.maximum(natural, 0)

    def draws(self, rng_key: PRNGKey, coordinates: DirichletCoordinates, num_draws: int) -> Array:
        """Independent draws: normalised gamma draws, kept away from 0."""
        shape = (num_draws, *self.shape)
        # x_k = g_k / sum of g with g_k ~ Gamma(a_k). In logarithms, because a gamma draw with a =
        # .01 is below the smallest float in most cases, and 0 / 0 would follow.
        log_x = jax.random.loggamma(rng_key, _concentration(coordinates), shape)
        return jnp.maximum(jax.nn.softmax(log_x, axis=-1), np.finfo(log_x.dtype).tiny)

    def distribution(self, coordinates: DirichletCoordinates) -> dist.Distribution:
        """``Dirichlet(a).to_event()``."""
        return dist.Dirichlet(_concentration(coordinates)).to_event(len(self.shape) - 1)


def _concentration(coordinates: DirichletCoordinates) -> Array:
    log_mean = jax.nn.log_softmax(coordinates.logits, axis=-1)
    return jnp.exp(coordinates.log_concentration[..., None] + log_mean)
