"""Bounded contributions: every record's vector is clipped to one joint norm, then summed."""

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, PyTree

# A float32 norm is off by a few parts in 10^7: clip a hair below the bound, so that what is
# released is within it in exact arithmetic.
_ROUNDING_MARGIN = 1e-5


def clipped_sum(contributions: PyTree, mask: Array, clip_norm: Array | float) -> PyTree:
    """Sums vectors, each clipped to joint L2 norm ``clip_norm`` over the whole tree.

    =========================================  ==========================================
    a record whose vector                      contributes
    =========================================  ==========================================
    has norm <= ``clip_norm``                  itself (less one part in 10^5 at the bound)
    has a larger norm                          the same direction at norm ``clip_norm``
    holds a NaN or an infinity                 zero
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
    factor = (1 - _ROUNDING_MARGIN) * clip_norm / jnp.sqrt(squared)
    factor = jnp.where(squared > 0, jnp.minimum(1.0, factor), 0.0)
    return jax.tree.map(lambda leaf: (factor @ kept(leaf)).reshape(leaf.shape[1:]), contributions)
