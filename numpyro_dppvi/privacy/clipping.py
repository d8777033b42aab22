"""Bounded contributions: every record's vector is clipped to one joint norm, then summed."""

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, PyTree

# A float32 norm is off by a few parts in 10^6 at worst (XLA adds in tiles, whatever the length):
# clip a hair below the bound, so that what is released is within it in exact arithmetic.
_ROUNDING_MARGIN = 1e-5


def clipped_sum(contributions: PyTree, mask: Array, clip_norm: Array | float) -> PyTree:
    """Sums vectors, each clipped to joint L2 norm ``clip_norm`` over the whole tree.

    =========================================  ==========================================
    a record whose vector                      contributes
    =========================================  ==========================================
    has norm <= ``clip_norm``                  itself (less one part in 10^5 at the bound)
    has a larger norm                          the same direction at norm ``clip_norm``
    holds a NaN or an infinity                 zero
    is too long or too short to be squared     zero (in float32, beyond 10^19 or 10^-15)
    is masked out (padding, or not sampled)    zero, whatever it holds
    =========================================  ==========================================

    Args:
        contributions: Tree of arrays of shape ``(num_records, ...)``.
        mask: Booleans of shape ``(num_records,)``; false rows count for nothing.
        clip_norm: The bound, a scalar.

    Returns:
        Tree of arrays without the leading axis. Replacing one record moves it by at most
        ``2 * clip_norm``; adding or removing one by at most ``clip_norm``.
    """
    leaves = jax.tree.leaves(contributions)
    rows = mask.shape[0]
    finite = mask
    for leaf in leaves:
        finite = finite & jnp.all(jnp.isfinite(leaf.reshape(rows, -1)), axis=1)

    def kept(leaf: Array) -> Array:
        # where, not a product: NaN * 0 is NaN
        return jnp.where(finite[:, None], leaf.reshape(rows, -1), 0)

    squared = sum(jnp.sum(kept(leaf) ** 2, axis=1) for leaf in leaves)
    factor = jnp.minimum(1.0, (1 - _ROUNDING_MARGIN) * clip_norm / jnp.sqrt(squared))
    # Squares that overflow make the factor 0. Squares that vanish make the norm too short.
    factor = jnp.where(squared > _least_square(leaves), factor, 0.0)

    def total(leaf: Array) -> Array:
        # Matrix units of an accelerator would round to 11 bits or fewer by default.
        product = jnp.matmul(factor, kept(leaf), precision=jax.lax.Precision.HIGHEST)
        return product.astype(leaf.dtype).reshape(leaf.shape[1:])

    return jax.tree.map(total, contributions)


def _least_square(leaves: list[Array]) -> float:
    """Below this, the squares that were lost to underflow count beside a sum of squares."""
    limits = [jnp.finfo(leaf.dtype) for leaf in leaves]  # type: ignore[no-untyped-call]
    floats_per_record = sum(leaf[0].size for leaf in leaves)
    return floats_per_record * max(float(limit.tiny) / float(limit.eps) for limit in limits)
