"""Bounded contributions: every vector is clipped to one joint norm, and then, mostly, summed."""

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.privacy import arithmetic, noise_laws

# A float32 norm is off by a few parts in 10^6 at worst (XLA adds in tiles, whatever the length):
# clip a hair below the bound, so that what is released is within it in exact arithmetic.
_ROUNDING_MARGIN = 1e-5


def clipped(contributions: PyTree, mask: Array, clip_norm: Array | float) -> PyTree:
    """Clips vectors, each to joint L2 norm ``clip_norm`` over the whole tree.

    =========================================  ==========================================
    a vector that                              becomes
    =========================================  ==========================================
    has norm <= ``clip_norm``                  itself (less one part in 10^5 at the bound)
    has a larger norm                          the same direction at norm ``clip_norm``
    holds a NaN or an infinity                 zero
    is too long or too short to be squared     zero (in float32, beyond 10^19 or 10^-15)
    is masked out (padding, or not sampled)    zero, whatever it holds
    =========================================  ==========================================

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; false ones count for nothing.
        clip_norm: The bound, a scalar.

    Returns:
        The clipped vectors, shaped as they came.
    """
    factor, kept = _factors(contributions, mask, clip_norm)
    return jax.tree.map(
        lambda leaf, whole: (factor[:, None] * leaf).astype(whole.dtype).reshape(whole.shape),
        kept,
        contributions,
    )


def clipped_sum(
    contributions: PyTree,
    mask: Array,
    clip_norm: Array | float,
    *,
    rounded: Array | bool = True,
) -> PyTree:
    """The exact sum of vectors that are clipped as by :func:`clipped`, and rounded to a grid.

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; false ones count for nothing.
        clip_norm: The bound, a scalar.
        rounded: Whether entries are rounded to multiples of about ``clip_norm * 2**-20``, so that
            their sum has no error; vectors at the bound are clipped by as much more. Without
            noise there is nothing to protect, and ``False`` leaves entries as they are.

    Returns:
        Tree of 64-bit arrays without the leading axis. Replacing one vector moves it by at most
        ``2 * clip_norm``; adding or removing one by at most ``clip_norm``.

    Example:
        >>> vectors, mask = jnp.array([[3.0, 4.0], [0.0, 0.5]]), jnp.array([True, True])
        >>> clipped_sum(vectors, mask, 1.0).round(4).tolist()  # the first has norm 5
        [0.6, 1.3]
    """
    num_entries = sum(leaf[0].size for leaf in jax.tree.leaves(contributions))
    bound = (1 - arithmetic.rounding_norm(num_entries)) * clip_norm
    factor, kept = _factors(contributions, mask, bound)

    def total(leaf: Array, whole: Array) -> Array:
        entries = arithmetic.to_grid(factor[:, None] * leaf, clip_norm, rounded)
        return arithmetic.total_of_rounded(entries).reshape(whole.shape[1:])

    return jax.tree.map(total, kept, contributions)


def clipped_in_steps(
    contributions: PyTree, mask: Array, clip_norm: Array | float, step: Array
) -> PyTree:
    """Vectors clipped as by :func:`clipped`, in whole numbers of steps.

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; false ones count for nothing.
        clip_norm: The bound, a scalar.
        step: From ``privacy.discrete.grid_step``.

    Returns:
        Whole numbers as 64-bit arrays, shaped as the contributions; a vector's norm is at most
        ``clip_norm / step`` in exact arithmetic.
    """
    num_entries = sum(leaf[0].size for leaf in jax.tree.leaves(contributions))
    bound = (1 - arithmetic.rounding_norm(num_entries)) * clip_norm
    factor, kept = _factors(contributions, mask, bound)
    return jax.tree.map(
        lambda leaf, whole: noise_laws.in_steps(factor[:, None] * leaf, step).reshape(whole.shape),
        kept,
        contributions,
    )


def _factors(contributions: PyTree, mask: Array, clip_norm: Array | float) -> tuple[Array, PyTree]:
    """What to multiply each vector by, and the vectors as rows, zero where they do not count."""
    leaves = jax.tree.leaves(contributions)
    rows = mask.shape[0]
    finite = mask
    for leaf in leaves:
        finite = finite & jnp.all(jnp.isfinite(leaf.reshape(rows, -1)), axis=1)
    # where, not a product: NaN * 0 is NaN
    kept = jax.tree.map(
        lambda leaf: jnp.where(finite[:, None], leaf.reshape(rows, -1), 0), contributions
    )
    squared = sum(jnp.sum(leaf**2, axis=1) for leaf in jax.tree.leaves(kept))
    factor = jnp.minimum(1.0, (1 - _ROUNDING_MARGIN) * clip_norm / jnp.sqrt(squared))
    # Squares that overflow make the factor 0. Squares that vanish make the norm too short.
    return jnp.where(squared > _least_square(leaves), factor, 0.0), kept


def _least_square(leaves: list[Array]) -> float:
    """Below this, the squares that were lost to underflow count beside a sum of squares."""
    limits = [jnp.finfo(leaf.dtype) for leaf in leaves]  # type: ignore[no-untyped-call]
    floats_per_record = sum(leaf[0].size for leaf in leaves)
    return floats_per_record * max(float(limit.tiny) / float(limit.eps) for limit in limits)
