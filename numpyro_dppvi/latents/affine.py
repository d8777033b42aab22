"""Effects as affine functions of latents, and back."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array


class Effect(NamedTuple):
    """What stands in the place of a latent: ``effect = mean + scale * latent``."""

    # Gives the two from values of all latents, as the model has them. The scale is one number an
    # entry, or a matrix of shape ``(..., k, k)`` that mixes entries.
    mean_and_scale: Callable[[Mapping[str, Array]], tuple[Array, Array]]
    # The axis of the latent along which entries are mixed, from the end; or ``None``.
    axis: int | None

    def apart(self, values: Mapping[str, Array], effect: Array) -> tuple[Array, Array]:
        """The latent, and the logarithm of the scale's determinant."""
        mean, scale = self.mean_and_scale(values)
        if self.axis is None:
            return (effect - mean) / scale, jnp.sum(jnp.log(scale))
        latent, pivots = solved(scale, jnp.moveaxis(effect - mean, self.axis, -1))
        return jnp.moveaxis(latent, -1, self.axis), jnp.sum(jnp.log(pivots))

    def together(self, values: Mapping[str, Array], latent: Array) -> tuple[Array, Array]:
        """The effect, and the logarithm of the scale's determinant."""
        mean, scale = self.mean_and_scale(values)
        if self.axis is None:
            return mean + scale * latent, jnp.sum(jnp.log(scale))
        latent = jnp.moveaxis(latent, self.axis, -1)
        mixed, pivots = (scale @ latent[..., None])[..., 0], solved(scale, latent)[1]
        return mean + jnp.moveaxis(mixed, -1, self.axis), jnp.sum(jnp.log(pivots))


def solved(matrices: Array, vectors: Array) -> tuple[Array, Array]:
    """Solves ``(..., k, k)`` systems by elimination; returns solutions and pivots, ``(..., k)``."""
    # Without pivoting: exact for triangular ones, and the pivots' product is the determinant. JAX's
    # own solver searches for pivots. What is linear in the vectors could not be told from the
    # traced program then, in which ``methods.hierarchies`` looks for it.
    size = matrices.shape[-1]
    rows = [matrices[..., n, :] for n in range(size)]
    rest = [vectors[..., n] for n in range(size)]
    for n in range(size):
        for below in range(n + 1, size):
            part = rows[below][..., n] / rows[n][..., n]
            rows[below] = rows[below] - part[..., None] * rows[n]
            rest[below] = rest[below] - part * rest[n]
    found: list[Array] = []
    for n in reversed(range(size)):
        known = sum(rows[n][..., n + 1 + m] * each for m, each in enumerate(found))
        found.insert(0, (rest[n] - known) / rows[n][..., n])
    return jnp.stack(found, -1), jnp.stack([rows[n][..., n] for n in range(size)], -1)
