"""Takes NumPyro distributions apart: base distributions, bijections and parameters."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.transforms import (
    ComposeTransform,
    IdentityTransform,
    IndependentTransform,
    Transform,
)
from scipy.linalg import block_diag

from numpyro_dppvi._typing import Array


def plain(distribution: dist.Distribution | None) -> dist.Distribution | None:
    """A distribution without wrappers that only set its shape (``to_event``, ``expand``)."""
    while isinstance(distribution, (dist.Independent, dist.ExpandedDistribution)):
        distribution = distribution.base_dist
    return distribution


def one_of(distribution: dist.Distribution | None, *kinds: type[dist.Distribution]) -> Any:
    """The :func:`plain` distribution, if it is of one of these kinds; else ``None``."""
    found = plain(distribution)
    return found if isinstance(found, kinds) else None


def in_a_row(
    distribution: dist.Distribution | None, shape: tuple[int, ...]
) -> dist.Distribution | None:
    """The distribution of all entries in one row, if it is normal; others as they are."""
    # Its parameters may only broadcast to the latent's shape.
    found, size = plain(distribution), math.prod(shape)
    if isinstance(found, dist.Normal):
        loc, scale = (np.broadcast_to(x, shape).reshape(size) for x in (found.loc, found.scale))
        return dist.Normal(loc, scale)
    if isinstance(found, dist.MultivariateNormal) and len(shape) > 1:
        # Along the last axis they are dependent, over the others they are not: blocks.
        blocks = np.broadcast_to(found.precision_matrix, (*shape, shape[-1]))
        blocks = blocks.reshape(-1, *blocks.shape[-2:])
        loc = np.broadcast_to(found.loc, shape).reshape(size)
        return dist.MultivariateNormal(loc, precision_matrix=block_diag(*blocks))
    return found


def split(distribution: dist.Distribution) -> tuple[dist.Distribution, tuple[Transform, ...]]:
    """The base distribution of a transformed one, and its bijections."""
    # ``LogNormal`` is a transformed ``Normal``, for example, and ``InverseGamma`` a ``Gamma``.
    transforms: tuple[Transform, ...] = ()
    base = plain(distribution)
    while isinstance(base, dist.TransformedDistribution):
        # The innermost bijection comes first, in the order of application.
        transforms = (*base.transforms, *transforms)
        base = plain(base.base_dist)
    return base, transforms


def elementary(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """A chain of bijections with compositions expanded and identities removed."""
    found: tuple[Transform, ...] = ()
    for transform in transforms:
        while isinstance(transform, IndependentTransform):
            transform = transform.base_transform  # noqa: PLW2901
        if isinstance(transform, ComposeTransform):
            found += elementary(transform.parts)
        elif not isinstance(transform, IdentityTransform):
            found += (transform,)
    return found


def same(transforms: Sequence[Transform], others: Sequence[Transform]) -> bool:
    """Whether two chains consist of equal bijections."""
    # Bijections are JAX trees: their types are the structure and their parameters the leaves.
    mine, theirs = (list(elementary(chain)) for chain in (transforms, others))
    if jax.tree.structure(mine) != jax.tree.structure(theirs):  # type: ignore[operator]
        return False
    leaves = zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def full(value: Array | float, shape: tuple[int, ...]) -> Array:
    """A parameter as an array of floats of the given shape."""
    return jnp.broadcast_to(jnp.asarray(value, float), shape)


def pushed(base: dist.Distribution, transform: Transform) -> dist.Distribution:
    """The distribution of a transformed variable; the same one if the bijection is the identity."""
    if not elementary([transform]):
        return base
    return dist.TransformedDistribution(base, transform)


def log_odds(
    distribution: dist.Distribution | None, num_values: int, shape: tuple[int, ...]
) -> Array | None:
    """Log odds of 1, ..., ``num_values - 1`` against 0; ``None`` for a continuous distribution.

    The support must be 0, ..., ``num_values - 1``; the shape is ``(*shape, num_values - 1)``.
    """
    distribution = plain(distribution)
    if distribution is None or not distribution.support.is_discrete:
        return None
    # One value for all entries at a time: entries are independent, and log_prob gives one number
    # for each of them.
    values = jnp.arange(num_values).reshape(num_values, *[1] * len(shape))
    log_probs = full(distribution.log_prob(values), (num_values, *shape))
    # Log odds must be finite, or the factor could not be divided out again. So impossible values
    # get the smallest positive probability, as in NumPyro.
    log_probs = jnp.maximum(log_probs, np.log(np.finfo(log_probs.dtype).tiny))
    return jnp.moveaxis(log_probs[1:] - log_probs[0], 0, -1)
