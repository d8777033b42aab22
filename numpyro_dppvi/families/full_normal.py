"""Normal vectors with full covariance: natural parameters (P m, -P / 2), statistics (x, x x').

Symmetric matrices are packed: the lower triangle row by row, with off-diagonal entries multiplied
by sqrt(2). So every free parameter occurs once, noise can be added to each entry, and the packed
vector has the matrix's Frobenius norm, which makes clipping and noise invariant to rotations.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.distributions.transforms import ReshapeTransform
from numpyro.distributions.util import cholesky_of_inverse

from numpyro_dppvi._typing import Array, LowerProduct, RowProduct
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.diagonal_normal import AnyNormal, NormalNatural
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.families.reading import full, plain

# By default, accelerators multiply matrices with 11-bit significands or fewer. Errors would
# accumulate in natural parameters, which are added up over rounds.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class FullNormalCoordinates(NamedTuple):
    """Coordinates of normal vectors, with L the Cholesky factor of the covariance.

    Attributes:
        loc: Mean.
        log_scale: Logarithm of the diagonal of L.
        lower: Entries of L below the diagonal, row by row, divided by the row's diagonal entry.
    """

    loc: Array
    log_scale: Array
    lower: Array


@dataclass(frozen=True)
class FullNormal(AnyNormal):
    """Multivariate normals along the last axis of ``shape``, independent over the others."""

    def standard(self) -> FullNormalCoordinates:
        """The standard normal."""
        lower = jnp.zeros((*self.shape[:-1], math.comb(self.shape[-1], 2)))
        return FullNormalCoordinates(jnp.zeros(self.shape), jnp.zeros(self.shape), lower)

    def of_distribution(self, distribution: dist.Distribution | None) -> NormalNatural | None:
        """Of ``MultivariateNormal`` and of ``Normal``."""
        distribution = plain(distribution)
        # A prior of independent normals is exact in this family, too, with a diagonal precision.
        if isinstance(distribution, dist.Normal):
            return _of_independent(self, distribution.loc, distribution.scale)
        if not isinstance(distribution, dist.MultivariateNormal):
            return None
        return _of_joint(self, distribution.loc, distribution.precision_matrix)

    def natural(self, coordinates: FullNormalCoordinates) -> NormalNatural:
        """(P m, -P / 2), with P the precision matrix."""
        tril = scale_tril(coordinates)  # P = (L L')^-1 = L^-T L^-1
        inverse = solve_triangular(tril, full(jnp.eye(self.shape[-1]), tril.shape), lower=True)
        precision = _einsum("...ki,...kj", inverse, inverse)
        linear = _einsum("...ij,...j", precision, coordinates.loc)
        return NormalNatural(linear, pack(-0.5 * precision))

    def coordinates(self, natural: NormalNatural) -> FullNormalCoordinates:
        """Inverse of :meth:`natural`; NaN where the precision is not positive definite."""
        # With covariance P^-1 = L L', the mean is P^-1 (P m) = L L' (P m).
        tril = cholesky_of_inverse(-2 * unpack(natural.quadratic))
        loc = _einsum("...ij,...kj,...k", tril, tril, natural.linear)
        return of_tril(loc, tril)

    def statistics(self, coordinates: FullNormalCoordinates) -> NormalNatural:
        """(E[x], E[x x'])."""
        tril = scale_tril(coordinates)
        loc = coordinates.loc
        second = _einsum("...ik,...jk", tril, tril) + loc[..., :, None] * loc[..., None, :]
        return NormalNatural(loc, pack(second))

    def log_partition(self, natural: NormalNatural) -> Array:
        """Half of m' P m - log det(P), plus log(2 pi) / 2 per entry."""
        # With P = C C' and eta = P m: m' P m = eta' P^-1 eta = |C^-1 eta|^2.
        tril = jnp.linalg.cholesky(-2 * unpack(natural.quadratic))
        white = solve_triangular(tril, natural.linear[..., None], lower=True)
        log_det = jnp.sum(jnp.log(jnp.diagonal(tril, axis1=-2, axis2=-1)))
        return 0.5 * jnp.sum(white**2) - log_det + 0.5 * self.size * math.log(2 * math.pi)

    def in_domain(self, natural: NormalNatural) -> Array:
        """Whether all are finite and the precision is positive definite."""
        # Cholesky returns NaN for a matrix that is not positive definite. Near that, rounding
        # decides, and differently in coordinates, which begin at the last entry.
        tril = jnp.linalg.cholesky(-2 * unpack(natural.quadratic))
        return factors.is_finite((natural, tril, self.coordinates(natural)))

    def project(self, natural: NormalNatural) -> NormalNatural:
        """Raises negative eigenvalues of the precision to zero; keeps the linear part."""
        # This is the nearest positive semi-definite matrix in Frobenius norm. Positive eigenvalues
        # of -P / 2 are negative ones of P.
        values, vectors = jnp.linalg.eigh(unpack(natural.quadratic))
        excess = _einsum("...ik,...k,...jk->...ij", vectors, jnp.maximum(values, 0), vectors)
        return natural._replace(quadratic=natural.quadratic - pack(excess))

    def project_whole(self, natural: NormalNatural) -> NormalNatural:
        """The same, and removes the linear part along those eigenvectors."""
        values, vectors = jnp.linalg.eigh(unpack(natural.quadratic))
        white = jnp.where(values > 0, _einsum("...ik,...i->...k", vectors, natural.linear), 0)
        unsure = _einsum("...ik,...k->...i", vectors, white)
        return self.project(natural)._replace(linear=natural.linear - unsure)

    def from_white(self, coordinates: FullNormalCoordinates, noise: Array) -> Array:
        """M + L z."""
        return coordinates.loc + _einsum("...ij,...j", scale_tril(coordinates), noise)

    def composed(
        self, coordinates: FullNormalCoordinates, inner: FullNormalCoordinates
    ) -> FullNormalCoordinates:
        """(m + L loc, L times the Cholesky factor of ``inner``)."""
        loc = self.from_white(coordinates, inner.loc)
        return of_tril(loc, _einsum("...ij,...jk", scale_tril(coordinates), scale_tril(inner)))

    def white_slope(self, coordinates: FullNormalCoordinates, slope: Array) -> Array:
        """L' slope."""
        return _einsum("...ij,...i->...j", scale_tril(coordinates), slope)

    def linear_gradient(
        self, coordinates: FullNormalCoordinates, slope: Array, along: Array, across: RowProduct
    ) -> FullNormalCoordinates:
        """That in L, slope across', in terms of L = diag(scale) (I + lower)."""
        loc: Any = RowProduct(along, slope)
        rows = slope * _einsum("...ij,...j->...i", scale_tril(coordinates), across.rows)
        log_scale: Any = RowProduct(across.weights, rows)
        left = jnp.exp(coordinates.log_scale) * slope
        lower: Any = LowerProduct(left, across.laid_out())
        return FullNormalCoordinates(loc, log_scale, lower)

    def whitened(self, coordinates: FullNormalCoordinates, change: NormalNatural) -> NormalNatural:
        """(L' (d_1 + 2 D_2 m), sqrt(2) L' D_2 L)."""
        # As for DiagonalNormal, with x = m + L z: d_1'x + x'D_2 x has the linear part
        # z'L'(d_1 + 2 D_2 m) and the quadratic part z'(L'D_2 L)z, whose variance is twice the
        # squared Frobenius norm of L'D_2 L.
        tril, matrix = scale_tril(coordinates), unpack(change.quadratic)
        centred = change.linear + 2 * _einsum("...ij,...j", matrix, coordinates.loc)
        linear = _einsum("...ij,...i->...j", tril, centred)
        quadratic = _einsum("...ki,...kl,...lj->...ij", tril, matrix, tril)
        return NormalNatural(linear, pack(math.sqrt(2) * quadratic))

    def unwhitened(self, coordinates: FullNormalCoordinates, white: NormalNatural) -> NormalNatural:
        """Inverse of :meth:`whitened`."""
        tril = scale_tril(coordinates)
        inverse = solve_triangular(tril, full(jnp.eye(self.shape[-1]), tril.shape), lower=True)
        half = unpack(white.quadratic) / math.sqrt(2)
        matrix = _einsum("...ki,...kl,...lj->...ij", inverse, half, inverse)
        centred = _einsum("...ij,...i->...j", inverse, white.linear)
        linear = centred - 2 * _einsum("...ij,...j", matrix, coordinates.loc)
        return NormalNatural(linear, pack(matrix))

    def axis_variances(self, coordinates: FullNormalCoordinates) -> Array:
        """Squared lengths of the columns of L."""
        return jnp.sum(scale_tril(coordinates) ** 2, axis=-2)

    def distribution(self, coordinates: FullNormalCoordinates) -> dist.Distribution:
        """``MultivariateNormal(loc, scale_tril=...).to_event()``."""
        normal = dist.MultivariateNormal(coordinates.loc, scale_tril=scale_tril(coordinates))
        return normal.to_event(len(self.shape) - 1)


# As one program each: small ones take a first fit 20 ms, and there would be twenty.
@compiled("family", quick=True)
def _of_independent(family: FullNormal, loc: Array, scale: Array) -> NormalNatural:
    precision = full(scale, family.shape) ** -2.0
    matrix = precision[..., None] * jnp.eye(family.shape[-1])
    return NormalNatural(full(loc, family.shape) * precision, pack(-0.5 * matrix))


@compiled("family", quick=True)
def _of_joint(family: FullNormal, loc: Array, precision: Array) -> NormalNatural:
    precision = full(precision, (*family.shape, family.shape[-1]))
    linear = _einsum("...ij,...j", precision, full(loc, family.shape))
    return NormalNatural(linear, pack(-0.5 * precision))


def scale_tril(coordinates: FullNormalCoordinates) -> Array:
    """The Cholesky factor L of the covariance."""
    # L = diag(scale) (I + lower): rows are scaled, so that ``lower`` has no units.
    size = coordinates.loc.shape[-1]
    rows, columns = np.tril_indices(size, -1)
    unit = full(jnp.eye(size), (*coordinates.loc.shape, size))
    unit = unit.at[..., rows, columns].set(coordinates.lower)
    return jnp.exp(coordinates.log_scale)[..., None] * unit


def of_tril(loc: Array, tril: Array) -> FullNormalCoordinates:
    """The coordinates with this mean and Cholesky factor."""
    diagonal = jnp.diagonal(tril, axis1=-2, axis2=-1)
    rows, columns = np.tril_indices(loc.shape[-1], -1)
    lower = (tril / diagonal[..., None])[..., rows, columns]
    return FullNormalCoordinates(loc, jnp.log(diagonal), lower)


@in_own_precision
def pack(matrix: Array) -> Array:
    """Packs symmetric matrices, shape ``(..., n, n)`` to ``(..., n (n + 1) / 2)``."""
    rows, columns, weight = _triangle(matrix.shape[-1])
    return matrix[..., rows, columns] * weight.astype(matrix.dtype)


@in_own_precision
def unpack(packed: Array) -> Array:
    """Inverse of :func:`pack`."""
    size = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    rows, columns, weight = _triangle(size)
    entries = packed / weight.astype(packed.dtype)
    place = np.zeros((size, size), np.int32)
    place[rows, columns] = place[columns, rows] = np.arange(rows.size)
    return entries[..., place]


def _triangle(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # |M|^2 = sum of M_ii^2 + 2 sum over i > j of M_ij^2, hence the weight sqrt(2) off the diagonal.
    rows, columns = np.tril_indices(size)
    return rows, columns, np.where(rows == columns, 1.0, math.sqrt(2))


# Several latents in one normal vector: factors and marginals of a part of the vector.


@in_own_precision
def embedded(natural: NormalNatural, entries: Sequence[int], whole: FullNormal) -> NormalNatural:
    """A factor of some entries of a vector as a factor of the whole vector."""
    size, dtype, block = whole.size, natural.linear.dtype, np.ix_(entries, entries)
    # Zeros elsewhere: a factor of some entries says nothing about the others.
    linear = jnp.zeros(size, dtype).at[np.asarray(entries)].set(natural.linear)
    matrix = jnp.zeros((size, size), dtype).at[block].set(unpack(natural.quadratic))
    return NormalNatural(linear, pack(matrix))


@in_own_precision
def block(natural: NormalNatural, entries: Sequence[int]) -> NormalNatural:
    """Inverse of :func:`embedded`, for factors that say nothing about other entries."""
    matrix = unpack(natural.quadratic)[np.ix_(entries, entries)]
    return NormalNatural(natural.linear[np.asarray(entries)], pack(matrix))


@in_own_precision
def marginal_of(coordinates: FullNormalCoordinates, entries: Sequence[int]) -> NormalNatural:
    """The natural parameters of the marginal of some entries of a vector."""
    tril = _factor(scale_tril(coordinates)[np.asarray(entries)])
    part = FullNormal((len(entries),))
    return part.natural(of_tril(coordinates.loc[np.asarray(entries)], tril))


def _factor(rows: Array) -> Array:
    """The Cholesky factor of the covariance of some entries, from their rows of L."""
    # With R these rows the covariance is R R', and R' = Q U gives U'U: its factor without the
    # squares of R, which would take half of the digits.
    upper = jnp.linalg.qr(rows.T, mode="r")
    return (upper * jnp.sign(jnp.diagonal(upper))[:, None]).T


def marginal(
    coordinates: FullNormalCoordinates, entries: range, shape: tuple[int, ...]
) -> dist.Distribution:
    """The marginal distribution of some entries of a normal vector, in a given shape."""
    mine = slice(entries.start, entries.stop)
    rows, loc = scale_tril(coordinates)[mine], coordinates.loc[mine]
    if not shape:
        return dist.Normal(loc[0], jnp.linalg.norm(rows))
    # Rows are no triangle: a block below the first has entries left of its own columns.
    normal = dist.MultivariateNormal(loc, scale_tril=_factor(rows))
    if len(shape) == 1:
        return normal
    return dist.TransformedDistribution(normal, ReshapeTransform(shape, (len(entries),)))
