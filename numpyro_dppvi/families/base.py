"""The protocols of exponential families.

A family has two parameterisations. Factors multiply by adding ``Natural`` parameters, which need
not describe a proper distribution. ``Coordinates`` are unconstrained parameters of a proper
distribution, such as (location, log standard deviation). Optimisers move coordinates, because Adam
on natural parameters converges far too slowly.
"""

from typing import Any, Protocol, runtime_checkable

import numpyro.distributions as dist

from numpyro_dppvi._typing import (
    Array,
    MemberCoordinates,
    MemberNatural,
    PRNGKey,
    PyTree,
    RowProduct,
)
from numpyro_dppvi.families import factors


class ExponentialFamily(Protocol):
    """Densities exp(<natural, T(x)> - A(natural)) over arrays of one shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one draw."""

    def standard(self) -> MemberCoordinates:
        """Coordinates of a default proper distribution."""

    def of_distribution(self, distribution: dist.Distribution | None) -> MemberNatural | None:
        """Natural parameters of a NumPyro distribution; ``None`` if it is not in the family."""

    def natural(self, coordinates: MemberCoordinates) -> MemberNatural:
        """Natural parameters of a proper distribution."""

    def coordinates(self, natural: MemberNatural) -> MemberCoordinates:
        """Inverse of :meth:`natural`; undefined outside the domain."""

    def statistics(self, coordinates: MemberCoordinates) -> PyTree:
        """Expected sufficient statistics E[T(x)], shaped like the natural parameters."""

    def entropy(self, coordinates: MemberCoordinates) -> Array:
        """Entropy in nats, a scalar; differential entropy if the family is continuous."""

    def log_partition(self, natural: MemberNatural) -> Array:
        """A(natural), a scalar; its gradient is the expected statistics."""

    def in_domain(self, natural: MemberNatural) -> Array:
        """Whether the natural parameters describe a proper distribution, a scalar boolean."""

    def project(self, natural: MemberNatural) -> MemberNatural:
        """The nearest factor whose product with any proper distribution is proper."""

    # The gradient of E_q[f] is taken through the draws (x = m + L z with z fixed). A discrete draw
    # has no such derivative: see families.enumeration.
    def draws(self, rng_key: PRNGKey, coordinates: MemberCoordinates, num_draws: int) -> Array:
        """Draws for an expectation, differentiable in the coordinates unless they are discrete.

        Returns:
            Shape ``(num_draws, *shape)``. Each draw has the family's distribution, but draws need
            not be independent of each other (they may come in antithetic pairs).
        """

    def distribution(self, coordinates: MemberCoordinates) -> dist.Distribution:
        """The NumPyro distribution, with no batch dimensions."""


@runtime_checkable
class LocatedFamily(Protocol):
    """Families whose natural parameters separate location from precision."""

    # Without precision, a location says nothing, but through a refined prior it would still move q:
    # see "Noise and the domain" in docs/decisions.md.
    def project_whole(self, natural: MemberNatural) -> MemberNatural:
        """Like ``project``, but replaces what it has to repair by the factor 1.

        Where a factor has negative precision, its location is dropped, too.
        """


@runtime_checkable
class NormalFamily(Protocol):
    """Normal families, which allow integration rules other than random draws."""

    @property
    def size(self) -> int:
        """Number of entries of one draw."""

    def sigma_points(self, coordinates: MemberCoordinates, offset: int, dimension: int) -> Array:
        """Points of the spherical cubature rule in ``dimension`` joint dimensions.

        ``offset`` is the position of this family's entries in the joint vector. The shape of the
        result is ``(2 * dimension, *shape)``.
        """

    def location(self, coordinates: MemberCoordinates) -> Array:
        """The mean."""

    def from_white(self, coordinates: MemberCoordinates, noise: Array) -> Array:
        """Points m + L z, of white noise z with one leading axis."""

    def white_slope(self, coordinates: MemberCoordinates, slope: Array) -> Array:
        """L' slope if x = m + L z with z standard normal; its square is <slope, x>'s variance."""

    def linear_gradient(
        self, coordinates: MemberCoordinates, slope: Array, along: Array, across: RowProduct
    ) -> MemberCoordinates:
        """The gradient in the coordinates that is ``along * slope`` in m and slope across' in L.

        It may hold products in the place of arrays, and without a leading axis.
        """


@runtime_checkable
class DiscreteFamily(ExponentialFamily, Protocol):
    """Families of integers, under which expectations are sums over all values."""

    @property
    def num_values(self) -> int:
        """Number of values of one entry, which are 0, ..., ``num_values - 1``."""


@runtime_checkable
class LocationScaleFamily(Protocol):
    """Families of m + L x, in which a distribution is a place to measure others from."""

    def composed(
        self, coordinates: MemberCoordinates, inner: MemberCoordinates
    ) -> MemberCoordinates:
        """The distribution of m + L x, with m and L of ``coordinates`` and ``inner`` that of x."""


@runtime_checkable
class WhiteFamily(Protocol):
    """Families whose Fisher information has a root in closed form (see ``families.whitening``).

    Their natural parameters are pairs of a linear and a quadratic part.
    """

    def whitened(self, coordinates: MemberCoordinates, change: MemberNatural) -> MemberNatural:
        """The white coordinates of a change; the first part moves only the location."""

    def unwhitened(self, coordinates: MemberCoordinates, white: MemberNatural) -> MemberNatural:
        """Inverse of :meth:`whitened`."""

    def axis_variances(self, coordinates: MemberCoordinates) -> Array:
        """The variance along the axis of each entry of the first part."""


def dual_entropy(self: Any, coordinates: Any) -> Array:
    """A(eta) - <eta, E[T]>, for families to take into their class body as ``entropy``."""
    # H[q] = -E[log q(x)] with log q(x) = <eta, T(x)> - A(eta), and no base measure.
    natural = self.natural(coordinates)
    return self.log_partition(natural) - factors.inner(natural, self.statistics(coordinates))


class LogOdds:
    """What families of integers do alike, whose natural parameters are log odds."""

    entropy = dual_entropy

    def in_domain(self, natural: Array) -> Array:
        """Whether all are finite."""
        return factors.is_finite(natural)

    def project(self, natural: Array) -> Array:
        """Every factor, unchanged."""
        return natural

    def draws(self: Any, rng_key: PRNGKey, coordinates: Array, num_draws: int) -> Array:
        """Independent draws. They have no derivative; expectations are sums instead."""
        return self.distribution(coordinates).sample(rng_key, (num_draws,))
