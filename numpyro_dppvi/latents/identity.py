"""Compares the latents of two models: names, shapes and bijections, but not priors."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.space import LatentSpace

_TOLERANCE = 1e-4


class Identity(NamedTuple):
    """What two latents must have in common for a factor of one to be a factor of the other."""

    shape: tuple[int, ...]  # shape of a value
    base_shape: tuple[int, ...]  # shape of its unconstrained counterpart
    # The value at a fixed unconstrained point. Bijections cannot be compared, but this can, even
    # between processes and versions of JAX. For a discrete latent, the number of values of an
    # entry.
    probe: np.ndarray
    as_effect: bool = False  # whether a factor is of ``mean + scale * value``


def identities(space: LatentSpace) -> dict[str, Identity]:
    """The identities of all latents, by name."""
    found = {}
    for latent in space.latents:
        values = integers(latent.support)
        if values is not None:
            # Two ranges of as many integers are the same to factors, which live on log odds.
            probe = np.full(latent.shape, float(len(values)))
        else:
            # A fixed point with distinct entries, so that permuted bijections give other values.
            size = math.prod(latent.base_shape)
            point = jnp.linspace(-0.7, 0.9, size + 2)[1:-1].reshape(latent.base_shape)
            probe = np.asarray(latent.transform(point))
        found[latent.name] = Identity(
            latent.shape, latent.base_shape, probe, latent.name in space.effects
        )
    return found


def difference(mine: Mapping[str, Identity], other: Mapping[str, Identity]) -> str | None:
    """The first difference in words, the other model's latents first; ``None`` if equal."""
    if set(mine) != set(other):
        return f"latents {', '.join(sorted(other))}, not {', '.join(sorted(mine))}"
    for name, latent in mine.items():
        theirs = other[name]
        if latent.shape != theirs.shape:
            return f"a latent {name!r} of shape {theirs.shape}, not {latent.shape}"
        if latent.base_shape != theirs.base_shape or not np.allclose(
            latent.probe, theirs.probe, rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            return f"a latent {name!r} on another support"
        if latent.as_effect != theirs.as_effect:
            ways = (f"mean + scale * {name}", "it is written")
            first, second = ways if theirs.as_effect else ways[::-1]
            return f"a latent {name!r} fitted as {first}, not as {second}"
    return None
