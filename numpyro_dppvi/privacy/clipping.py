"""Clipping vectors to a joint norm, and exact sums of clipped vectors."""

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.privacy import arithmetic, noise_laws

# A float32 norm is off by a few parts in 10^6 at worst (XLA sums in tiles, so the error does not
# grow with the length). Clipping to slightly less keeps norms within the bound in exact arithmetic.
_ROUNDING_MARGIN = 1e-5


def clipped(contributions: PyTree, mask: Array, clip_norm: Array | float) -> PyTree:
    """Clips vectors, each to joint L2 norm ``clip_norm`` over the whole tree.

    =========================================  ==========================================
    a vector that                              becomes
    =========================================  ==========================================
    has norm <= ``clip_norm``                  itself (less one part in 10^5 at the bound)
    has a larger norm                          the same direction at norm ``clip_norm``
    holds a NaN or an infinity                 zero
    has a norm whose square is out of range    zero (in float32, beyond 10^19 or 10^-15)
    is masked out (padding, or not sampled)    zero, whatever it holds
    =========================================  ==========================================

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; vectors at false entries are left out.
        clip_norm: The bound, a scalar.

    Returns:
        The clipped vectors, in the shapes of the input.
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
    """The exact sum of vectors, each clipped as by :func:`clipped` and rounded to a grid.

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; vectors at false entries are left out.
        clip_norm: The bound, a scalar.
        rounded: Whether entries are rounded to multiples of about ``clip_norm * 2**-20``, which
            makes the sum exact. ``False`` is for runs without noise, which have nothing to
            protect.

    Returns:
        Tree of 64-bit arrays without the leading axis. Replacing one vector moves it by at most
        ``2 * clip_norm``; adding or removing one by at most ``clip_norm``.

    Example:
        >>> vectors, mask = jnp.array([[3.0, 4.0], [0.0, 0.5]]), jnp.array([True, True])
        >>> clipped_sum(vectors, mask, 1.0).round(4).tolist()  # the first has norm 5
        [0.6, 1.3]
    """
    # Sensitivity: each rounded vector has norm <= clip_norm, because clipping leaves room for what
    # rounding may add. The sum is exact, so replacing one vector moves it by |-a + b| <=
    # 2 clip_norm with no slack for summation error.
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
    """Vectors clipped as by :func:`clipped`, then rounded to integer numbers of steps.

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``.
        mask: Booleans of shape ``(num_vectors,)``; vectors at false entries are left out.
        clip_norm: The bound, a scalar.
        step: The step of the grid, from ``noise_laws.grid_step``.

    Returns:
        Integers as 64-bit floats, in the shapes of the input; a vector's norm is at most
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
    """The factor that clips each vector, and the vectors as rows, with zeros for those left out."""
    leaves = jax.tree.leaves(contributions)
    rows = mask.shape[0]
    finite = mask
    for leaf in leaves:
        finite = finite & jnp.all(jnp.isfinite(leaf.reshape(rows, -1)), axis=1)
    # jnp.where and not a product, because NaN * 0 is NaN.
    kept = jax.tree.map(
        lambda leaf: jnp.where(finite[:, None], leaf.reshape(rows, -1), 0), contributions
    )
    squared = sum(jnp.sum(leaf**2, axis=1) for leaf in jax.tree.leaves(kept))
    factor = jnp.minimum(1.0, (1 - _ROUNDING_MARGIN) * clip_norm / jnp.sqrt(squared))
    # If squares overflow, the norm is infinite and the factor 0. If they underflow, the computed
    # norm is too small and the factor too large, so such vectors are set to zero.
    return jnp.where(squared > _least_square(leaves), factor, 0.0), kept


def _least_square(leaves: list[Array]) -> float:
    """A sum of squares above this has lost no more than a rounding error to underflow."""
    limits = [jnp.finfo(leaf.dtype) for leaf in leaves]  # type: ignore[no-untyped-call]
    floats_per_record = sum(leaf[0].size for leaf in leaves)
    return floats_per_record * max(float(limit.tiny) / float(limit.eps) for limit in limits)
