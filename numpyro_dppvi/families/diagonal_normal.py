"""Independent normal entries: natural parameters (m / s^2, -1 / (2 s^2)), statistics (x, x^2)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi._typing import Array, PRNGKey, RowProduct
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.reading import full, one_of


class NormalNatural(NamedTuple):
    """Natural parameters; also used for the statistics (x, x^2).

    Attributes:
        linear: Location over variance.
        quadratic: Minus half the precision.
    """

    linear: Array
    quadratic: Array


class NormalCoordinates(NamedTuple):
    """Coordinates of normal distributions.

    Attributes:
        loc: Mean.
        log_scale: Logarithm of the standard deviation.
    """

    loc: Array
    log_scale: Array


@dataclass(frozen=True)
class AnyNormal:
    """What normal families do alike: x = m + L z."""

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def entropy(self, coordinates: Any) -> Array:
        """The sum of logarithms of the diagonal of L, plus (1 + log 2 pi) / 2 per entry."""
        scales: Array = jnp.sum(coordinates.log_scale)
        return scales + 0.5 * self.size * (1 + math.log(2 * math.pi))

    def location(self, coordinates: Any) -> Array:
        """The mean."""
        return coordinates.loc

    def draws(self: Any, rng_key: PRNGKey, coordinates: Any, num_draws: int) -> Array:
        """Antithetic draws: every second one is the one before it, reflected in the mean."""
        # A pair's mean is exact for every odd function of the noise, so that linear terms have no
        # Monte Carlo error. An odd number of draws leaves the last one without its mirror image.
        half, like = (num_draws + 1) // 2, coordinates.loc
        noise = jax.random.normal(rng_key, (half, *like.shape), like.dtype)
        pairs = jnp.stack([noise, -noise], axis=1).reshape(2 * half, *like.shape)
        return self.from_white(coordinates, pairs[:num_draws])

    def sigma_points(self: Any, coordinates: Any, offset: int, dimension: int) -> Array:
        """Mean plus and minus sqrt(dimension) columns of L."""
        # Axes of other families' entries do not move this one: their rows are zero here.
        axes = math.sqrt(dimension) * jnp.eye(dimension, dtype=coordinates.loc.dtype)
        mine = axes[:, offset : offset + self.size].reshape(dimension, *self.shape)
        return self.from_white(coordinates, jnp.concatenate([mine, -mine]))


@dataclass(frozen=True)
class DiagonalNormal(AnyNormal):
    """Normal distributions with diagonal covariance over arrays of ``shape``."""

    # -(x - m)^2 / (2 s^2) = (m / s^2) x - x^2 / (2 s^2) + const, hence the natural parameters
    # (m / s^2, -1 / (2 s^2)) of the statistics (x, x^2).

    def standard(self) -> NormalCoordinates:
        """The standard normal."""
        return NormalCoordinates(jnp.zeros(self.shape), jnp.zeros(self.shape))

    def of_distribution(self, distribution: dist.Distribution | None) -> NormalNatural | None:
        """Of ``Normal``."""
        found = one_of(distribution, dist.Normal)
        return None if found is None else _of_normal(self, found.loc, found.scale)

    def natural(self, coordinates: NormalCoordinates) -> NormalNatural:
        """(loc, log scale) -> (loc / scale^2, -1 / (2 scale^2))."""
        precision = jnp.exp(-2 * coordinates.log_scale)
        return NormalNatural(coordinates.loc * precision, -0.5 * precision)

    def coordinates(self, natural: NormalNatural) -> NormalCoordinates:
        """Inverse of :meth:`natural`; NaN where the precision is not above zero."""
        precision = -2 * natural.quadratic
        return NormalCoordinates(natural.linear / precision, -0.5 * jnp.log(precision))

    def statistics(self, coordinates: NormalCoordinates) -> NormalNatural:
        """(E[x], E[x^2])."""
        second = coordinates.loc**2 + jnp.exp(2 * coordinates.log_scale)
        return NormalNatural(coordinates.loc, second)

    def log_partition(self, natural: NormalNatural) -> Array:
        """The sum of m^2 / (2 s^2) + log s + log(2 pi) / 2."""
        # m^2 / (2 s^2) = -linear^2 / (4 quadratic), and s^-2 = -2 quadratic.
        terms = -(natural.linear**2) / (4 * natural.quadratic) - 0.5 * jnp.log(
            -2 * natural.quadratic
        )
        return jnp.sum(terms) + 0.5 * self.size * math.log(2 * math.pi)

    def in_domain(self, natural: NormalNatural) -> Array:
        """Whether all are finite and every precision is positive."""
        return factors.all_of(natural.quadratic < 0, *map(jnp.isfinite, natural))

    def project(self, natural: NormalNatural) -> NormalNatural:
        """Raises negative precisions to zero and keeps the linear part."""
        # A factor of precision zero and a linear part is exp(l x): improper alone, and proper times
        # any normal. So the linear part may stay.
        return natural._replace(quadratic=jnp.minimum(natural.quadratic, 0))

    def project_whole(self, natural: NormalNatural) -> NormalNatural:
        """Sets negative precisions and the linear part of these entries to zero."""
        linear = jnp.where(natural.quadratic > 0, 0, natural.linear)
        return self.project(natural)._replace(linear=linear)

    def from_white(self, coordinates: NormalCoordinates, noise: Array) -> Array:
        """M + s z."""
        return coordinates.loc + jnp.exp(coordinates.log_scale) * noise

    def composed(
        self, coordinates: NormalCoordinates, inner: NormalCoordinates
    ) -> NormalCoordinates:
        """(m + s loc, s scale)."""
        loc = coordinates.loc + jnp.exp(coordinates.log_scale) * inner.loc
        return NormalCoordinates(loc, coordinates.log_scale + inner.log_scale)

    def white_slope(self, coordinates: NormalCoordinates, slope: Array) -> Array:
        """The slope, times standard deviations."""
        return jnp.exp(coordinates.log_scale) * slope

    def linear_gradient(
        self, coordinates: NormalCoordinates, slope: Array, along: Array, across: RowProduct
    ) -> NormalCoordinates:
        """(along slope, s slope across)."""
        loc: Any = RowProduct(along, slope)
        rows = self.white_slope(coordinates, slope) * across.rows
        log_scale: Any = RowProduct(across.weights, rows)
        return NormalCoordinates(loc, log_scale)

    def whitened(self, coordinates: NormalCoordinates, change: NormalNatural) -> NormalNatural:
        """(s (d_1 + 2 m d_2), sqrt(2) s^2 d_2)."""
        # With x = m + s z, d_1 x + d_2 x^2 = s (d_1 + 2 m d_2) z + s^2 d_2 z^2 + const. Under q,
        # z and (z^2 - 1) / sqrt(2) are uncorrelated and have variance 1, so their coefficients are
        # coordinates in which the Fisher information is the identity.
        scale = jnp.exp(coordinates.log_scale)
        linear = scale * (change.linear + 2 * coordinates.loc * change.quadratic)
        return NormalNatural(linear, math.sqrt(2) * scale**2 * change.quadratic)

    def unwhitened(self, coordinates: NormalCoordinates, white: NormalNatural) -> NormalNatural:
        """Inverse of :meth:`whitened`."""
        scale = jnp.exp(coordinates.log_scale)
        quadratic = white.quadratic / (math.sqrt(2) * scale**2)
        return NormalNatural(white.linear / scale - 2 * coordinates.loc * quadratic, quadratic)

    def axis_variances(self, coordinates: NormalCoordinates) -> Array:
        """s^2."""
        return jnp.exp(2 * coordinates.log_scale)

    def distribution(self, coordinates: NormalCoordinates) -> dist.Distribution:
        """``Normal(loc, scale).to_event()``."""
        normal = dist.Normal(coordinates.loc, jnp.exp(coordinates.log_scale))
        return normal.to_event(len(self.shape))


@compiled("family", quick=True)
def _of_normal(family: DiagonalNormal, loc: Array, scale: Array) -> NormalNatural:
    """Natural parameters from a prior's, in one program: each small one takes a first fit 50 ms."""
    log_scale = jnp.log(full(scale, family.shape))
    return family.natural(NormalCoordinates(full(loc, family.shape), log_scale))
