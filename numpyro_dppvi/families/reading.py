"""Reads a NumPyro distribution: what it is made of beneath its shape and its bijections."""

from collections.abc import Sequence

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

from numpyro_dppvi._typing import Array


def plain(distribution: dist.Distribution | None) -> dist.Distribution | None:
    """A distribution without what only gives it a shape (``to_event``, ``expand``)."""
    while isinstance(distribution, (dist.Independent, dist.ExpandedDistribution)):
        distribution = distribution.base_dist
    return distribution


def split(distribution: dist.Distribution) -> tuple[dist.Distribution, tuple[Transform, ...]]:
    """The distribution that another is pushed forward from, and by which bijections.

    ``LogNormal`` is ``Normal`` and an exponential, ``InverseGamma`` is ``Gamma`` and a power.
    """
    transforms: tuple[Transform, ...] = ()
    base = plain(distribution)
    while isinstance(base, dist.TransformedDistribution):
        transforms = (*base.transforms, *transforms)
        base = plain(base.base_dist)
    return base, transforms


def elementary(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Bijections one by one, without those that do nothing."""
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
    """Whether two chains of bijections are made of the same kinds and numbers."""
    mine, theirs = (list(elementary(chain)) for chain in (transforms, others))
    if jax.tree.structure(mine) != jax.tree.structure(theirs):  # type: ignore[operator]
        return False
    leaves = zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def full(value: Array | float, shape: tuple[int, ...]) -> Array:
    """A parameter as an array of floats of the given shape."""
    return jnp.broadcast_to(jnp.asarray(value, float), shape)


def pushed(base: dist.Distribution, transform: Transform) -> dist.Distribution:
    """A distribution pushed through a bijection; itself if the bijection does nothing."""
    if not elementary([transform]):
        return base
    return dist.TransformedDistribution(base, transform)


def log_odds(
    distribution: dist.Distribution | None, num_values: int, shape: tuple[int, ...]
) -> Array | None:
    """Log odds of 1, ..., ``num_values - 1`` against 0; ``None`` if it is not over integers.

    The support has been compared before. A value without any probability gets the least that a
    float can hold, as in NumPyro, because a factor without it could not be taken back.

    Returns:
        Shape ``(*shape, num_values - 1)``.
    """
    distribution = plain(distribution)
    if distribution is None or not distribution.support.is_discrete:
        return None
    values = jnp.arange(num_values).reshape(num_values, *[1] * len(shape))
    log_probs = full(distribution.log_prob(values), (num_values, *shape))
    log_probs = jnp.maximum(log_probs, np.log(np.finfo(log_probs.dtype).tiny))
    return jnp.moveaxis(log_probs[1:] - log_probs[0], 0, -1)
