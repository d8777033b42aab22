"""Several latents in one normal vector: factors and marginals of a part of the vector."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.transforms import ReshapeTransform

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import (
    FullNormal,
    FullNormalCoordinates,
    of_tril,
    pack,
    scale_tril,
    unpack,
)
from numpyro_dppvi.families.precision import in_own_precision


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
