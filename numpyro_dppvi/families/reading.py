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
    mine, my_kinds = jax.tree.flatten(elementary(transforms))
    theirs, their_kinds = jax.tree.flatten(elementary(others))
    if my_kinds != their_kinds:
        return False
    return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def full(value: Array | float, shape: tuple[int, ...]) -> Array:
    """A parameter as an array of floats of the given shape."""
    return jnp.broadcast_to(jnp.asarray(value, float), shape)


def pushed(base: dist.Distribution, transform: Transform) -> dist.Distribution:
    """A distribution pushed through a bijection; itself if the bijection does nothing."""
    if not elementary([transform]):
        return base
    return dist.TransformedDistribution(base, transform)
