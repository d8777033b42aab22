"""Exponential families: the protocol, and the mean-field product of several of them.

A family has two parameterisations. ``Natural`` parameters are what factors multiply in, and may
be improper. ``Coordinates`` are unconstrained numbers of a proper distribution, such as (location,
log standard deviation): what an optimiser moves, because Adam on natural parameters does not
converge in any reasonable time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi import factors
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey, PyTree


class ExponentialFamily(Protocol):
    """Densities exp(<natural, T(x)> - A(natural)) over arrays of one shape."""

    @property
    def size(self) -> int:
        """Number of entries of one draw."""
        ...

    def standard(self) -> Coordinates:
        """Coordinates of a proper distribution to start from where nothing is known."""
        ...

    def unit(self) -> Natural:
        """The factor 1."""
        ...

    def of_distribution(self, distribution: dist.Distribution | None) -> Natural | None:
        """Natural parameters of a NumPyro distribution, ``None`` if it is not of the family."""
        ...

    def natural(self, coordinates: Coordinates) -> Natural:
        """Natural parameters of a proper distribution."""
        ...

    def coordinates(self, natural: Natural) -> Coordinates:
        """Inverse of :meth:`natural`; meaningless outside the domain."""
        ...

    def statistics(self, coordinates: Coordinates) -> PyTree:
        """Expected sufficient statistics E[T(x)], shaped like the natural parameters."""
        ...

    def entropy(self, coordinates: Coordinates) -> Array:
        """Differential entropy in nats, a scalar."""
        ...

    def log_partition(self, natural: Natural) -> Array:
        """A(natural), a scalar; its gradient is the expected statistics."""
        ...

    def in_domain(self, natural: Natural) -> Array:
        """Whether the natural parameters describe a proper distribution, a scalar boolean."""
        ...

    def project(self, natural: Natural) -> Natural:
        """The nearest factor that multiplies any proper distribution into a proper one."""
        ...

    def draws(self, rng_key: PRNGKey, coordinates: Coordinates, num_draws: int) -> Array:
        """Draws for an expectation, differentiable in the coordinates.

        Returns:
            Shape ``(num_draws, *shape)``; each is distributed as the family says, but they
            need not be independent of each other (pairs may mirror each other).
        """
        ...

    def sigma_points(self, coordinates: Coordinates, offset: int, dimension: int) -> Array:
        """Points of the spherical cubature rule in ``dimension`` joint dimensions.

        ``offset`` says where this family's entries stand in the joint vector. The shape is
        ``(2 * dimension, *shape)``. Families without such a rule raise ``TypeError``.
        """
        ...

    def distribution(self, coordinates: Coordinates) -> dist.Distribution:
        """The NumPyro distribution."""
        ...


@dataclass(frozen=True)
class MeanField:
    """A product of independent families, one a latent; itself an exponential family.

    Natural parameters, coordinates, statistics and draws are dicts by latent.

    Args:
        members: Pairs of latent name and family (a tuple, so that the value can be hashed).
    """

    members: tuple[tuple[str, Any], ...]

    def standard(self) -> Coordinates:
        """Coordinates of every latent's standard distribution."""
        return {name: family.standard() for name, family in self.members}

    def natural(self, coordinates: Coordinates) -> Natural:
        """Natural parameters by latent."""
        return {name: family.natural(coordinates[name]) for name, family in self.members}

    def coordinates(self, natural: Natural) -> Coordinates:
        """Coordinates by latent."""
        return {name: family.coordinates(natural[name]) for name, family in self.members}

    def statistics(self, coordinates: Coordinates) -> PyTree:
        """Expected statistics by latent."""
        return {name: family.statistics(coordinates[name]) for name, family in self.members}

    def entropy(self, coordinates: Coordinates) -> Array:
        """The sum of the entropies."""
        return jnp.sum(jnp.stack([f.entropy(coordinates[name]) for name, f in self.members]))

    def log_partition(self, natural: Natural) -> Array:
        """The sum of the log partitions."""
        return jnp.sum(jnp.stack([f.log_partition(natural[name]) for name, f in self.members]))

    def jeffreys(self, p: Natural, q: Natural) -> Array:
        """KL(p || q) + KL(q || p) in nats: <eta_p - eta_q, E_p[T] - E_q[T]>."""
        means = [self.statistics(self.coordinates(natural)) for natural in (p, q)]
        return factors.inner(factors.divide(p, q), factors.divide(*means))

    def in_domain(self, natural: Natural) -> Array:
        """Whether every latent's distribution is proper."""
        return jnp.all(jnp.stack([f.in_domain(natural[name]) for name, f in self.members]))

    def project(self, natural: Natural) -> Natural:
        """Projects latent by latent."""
        return {name: family.project(natural[name]) for name, family in self.members}

    def draws(self, rng_key: PRNGKey, coordinates: Coordinates, num_draws: int) -> dict[str, Array]:
        """Draws by latent, with independent keys."""
        keys = jax.random.split(rng_key, len(self.members))
        return {
            name: family.draws(key, coordinates[name], num_draws)
            for key, (name, family) in zip(keys, self.members, strict=True)
        }

    def sigma_points(self, coordinates: Coordinates) -> dict[str, Array]:
        """The joint rule's points by latent, shape ``(2 * dimension, *shape)``."""
        sizes = [family.size for _, family in self.members]
        points = {}
        offset = 0
        for size, (name, family) in zip(sizes, self.members, strict=True):
            points[name] = family.sigma_points(coordinates[name], offset, sum(sizes))
            offset += size
        return points

    @property
    def is_normal(self) -> bool:
        """Whether linear functions of the latents are normal under every member."""
        return all(hasattr(family, "linear_variance") for _, family in self.members)

    def location(self, coordinates: Coordinates) -> dict[str, Array]:
        """Means by latent, of normal families."""
        return {name: family.location(coordinates[name]) for name, family in self.members}

    def linear_variance(self, coordinates: Coordinates, slope: Mapping[str, Array]) -> Array:
        """Variance of <slope, x>, a scalar, of normal families."""
        terms = [f.linear_variance(coordinates[name], slope[name]) for name, f in self.members]
        return jnp.sum(jnp.stack(terms))

    def distribution(self, coordinates: Coordinates) -> Mapping[str, dist.Distribution]:
        """NumPyro distributions by latent, in the base space."""
        return {name: family.distribution(coordinates[name]) for name, family in self.members}
