"""Exponential families: the protocol that each of them follows.

A family has two parameterisations. ``Natural`` parameters are what factors multiply in, and may
be improper. ``Coordinates`` are unconstrained numbers of a proper distribution, such as (location,
log standard deviation): what an optimiser moves, because Adam on natural parameters does not
converge in any reasonable time.
"""

from typing import Protocol, runtime_checkable

import numpyro.distributions as dist

from numpyro_dppvi._typing import Array, MemberCoordinates, MemberNatural, PRNGKey, PyTree


class ExponentialFamily(Protocol):
    """Densities exp(<natural, T(x)> - A(natural)) over arrays of one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one draw."""
        ...

    def standard(self) -> MemberCoordinates:
        """Coordinates of a proper distribution to start from where nothing is known."""
        ...

    def of_distribution(self, distribution: dist.Distribution | None) -> MemberNatural | None:
        """Natural parameters of a NumPyro distribution, ``None`` if it is not of the family."""
        ...

    def natural(self, coordinates: MemberCoordinates) -> MemberNatural:
        """Natural parameters of a proper distribution."""
        ...

    def coordinates(self, natural: MemberNatural) -> MemberCoordinates:
        """Inverse of :meth:`natural`; meaningless outside the domain."""
        ...

    def statistics(self, coordinates: MemberCoordinates) -> PyTree:
        """Expected sufficient statistics E[T(x)], shaped like the natural parameters."""
        ...

    def entropy(self, coordinates: MemberCoordinates) -> Array:
        """Entropy in nats, differential unless the family is discrete; a scalar."""
        ...

    def log_partition(self, natural: MemberNatural) -> Array:
        """A(natural), a scalar; its gradient is the expected statistics."""
        ...

    def in_domain(self, natural: MemberNatural) -> Array:
        """Whether the natural parameters describe a proper distribution, a scalar boolean."""
        ...

    def project(self, natural: MemberNatural) -> MemberNatural:
        """The nearest factor that multiplies any proper distribution into a proper one."""
        ...

    def draws(self, rng_key: PRNGKey, coordinates: MemberCoordinates, num_draws: int) -> Array:
        """Draws for an expectation, differentiable in the coordinates unless they are discrete.

        Returns:
            Shape ``(num_draws, *shape)``; each is distributed as the family says, but they
            need not be independent of each other (pairs may mirror each other).
        """
        ...

    def distribution(self, coordinates: MemberCoordinates) -> dist.Distribution:
        """The NumPyro distribution, with no batch dimensions."""
        ...


@runtime_checkable
class LocatedFamily(Protocol):
    """What families have besides whose factors say where apart from how surely."""

    def project_whole(self, natural: MemberNatural) -> MemberNatural:
        """Like ``project``, but what had to be repaired becomes the factor 1.

        Where a factor's precision was below zero, it then has no location, either.
        """
        ...


@runtime_checkable
class NormalFamily(Protocol):
    """What normal families have besides: rules of integration other than draws."""

    @property
    def size(self) -> int:
        """Number of entries of one draw."""
        ...

    def sigma_points(self, coordinates: MemberCoordinates, offset: int, dimension: int) -> Array:
        """Points of the spherical cubature rule in ``dimension`` joint dimensions.

        ``offset`` says where this family's entries stand in the joint vector. The shape is
        ``(2 * dimension, *shape)``.
        """
        ...

    def location(self, coordinates: MemberCoordinates) -> Array:
        """The mean."""
        ...

    def linear_variance(self, coordinates: MemberCoordinates, slope: Array) -> Array:
        """Variance of <slope, x>, a scalar."""
        ...


@runtime_checkable
class DiscreteFamily(ExponentialFamily, Protocol):
    """What families of integers have besides: expectations under them are sums over all values."""

    @property
    def num_values(self) -> int:
        """Number of values of one entry, which are 0, ..., ``num_values - 1``."""
        ...


@runtime_checkable
class WhiteFamily(Protocol):
    """What families have whose information has a root in closed form (``families.whitening``).

    Natural parameters of theirs are a pair: a linear part and a quadratic one.
    """

    def whitened(self, coordinates: MemberCoordinates, change: MemberNatural) -> MemberNatural:
        """The white coordinates of a change; the first part moves the location alone."""
        ...

    def unwhitened(self, coordinates: MemberCoordinates, white: MemberNatural) -> MemberNatural:
        """Inverse of :meth:`whitened`."""
        ...

    def axis_variances(self, coordinates: MemberCoordinates) -> Array:
        """The distribution's variance along the axis of each entry of the first part."""
        ...
