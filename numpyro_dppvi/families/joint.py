"""Several latents in one normal vector: factors and marginals of a part of the vector."""

import math

import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions.transforms import ReshapeTransform

from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import (
    FullNormal,
    FullNormalCoordinates,
    pack,
    scale_tril,
    unpack,
)


def embedded(natural: NormalNatural, offset: int, whole: FullNormal) -> NormalNatural:
    """A factor of some entries of a vector as a factor of the whole vector."""
    size, end = whole.size, offset + natural.linear.shape[-1]
    # Zeros elsewhere: a factor of some entries says nothing about the others.
    linear = jnp.zeros(size).at[offset:end].set(natural.linear)
    matrix = jnp.zeros((size, size)).at[offset:end, offset:end].set(unpack(natural.quadratic))
    return NormalNatural(linear, pack(matrix))


def marginal(
    coordinates: FullNormalCoordinates, offset: int, shape: tuple[int, ...]
) -> dist.Distribution:
    """The marginal distribution of some entries of a normal vector, in a given shape."""
    # Rows of the Cholesky factor give the marginal covariance: (L L')[i, j] = L[i] . L[j].
    size = math.prod(shape)
    rows = scale_tril(coordinates)[offset : offset + size]
    loc = coordinates.loc[offset : offset + size]
    if not shape:
        return dist.Normal(loc[0], jnp.linalg.norm(rows))
    # From the covariance and not from rows, which are no triangle: a block below the first has
    # entries left of its own columns.
    normal = dist.MultivariateNormal(loc, rows @ rows.T)
    if len(shape) == 1:
        return normal
    return dist.TransformedDistribution(normal, ReshapeTransform(shape, (size,)))
