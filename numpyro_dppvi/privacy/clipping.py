"""Clipping vectors to a joint norm, and exact sums of clipped vectors."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import (
    Array,
    Hits,
    LayerProduct,
    LowerProduct,
    Product,
    PyTree,
    RowProduct,
    is_product,
    laid_out,
)
from numpyro_dppvi.privacy import arithmetic, noise_laws

# Factors and products are rounded to 32 bits, and the compiler may compute an entry anew where it
# is used, one part in 10^7 off. Clipping to slightly less keeps norms within the bound in exact
# arithmetic, with room to spare.
_ROUNDING_MARGIN = 1e-5

_Product = TypeVar("_Product", LowerProduct, LayerProduct)


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
    contributions = _written_down(contributions)
    grid = arithmetic.grid(clip_norm, False, _dtype(contributions))
    factor = _factors(contributions, mask, grid.norm, grid.one)

    def alone(leaf: Array) -> Array:
        return arithmetic.from_grid(_scaled(factor, leaf), grid, leaf.dtype).reshape(leaf.shape)

    return jax.tree.map(alone, contributions)


def clipped_sum(
    contributions: PyTree, mask: Array, clip_norm: Array | float, *, rounded: Array | bool = True
) -> PyTree:
    """The exact sum of vectors, each clipped as by :func:`clipped` and rounded to a grid.

    Args:
        contributions: Tree of arrays of shape ``(num_vectors, ...)``, or of products of such.
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
    contributions = _written_down(contributions)
    grid = arithmetic.grid(clip_norm, rounded, _dtype(contributions))
    # |round(v)| <= |v| + rounding_norm C <= C.
    bound = (1 - arithmetic.rounding_norm(_num_entries(contributions))) * grid.norm
    factor = _factors(contributions, mask, bound, grid.one)

    def total(leaf: Array | Product) -> Array:
        if isinstance(leaf, RowProduct):
            entries = jnp.round(_scaled_rows(factor, leaf))
            return arithmetic.total_of_rounded(entries, grid).reshape(leaf.rows.shape[1:])
        if isinstance(leaf, LayerProduct):
            return arithmetic.total_of_rounded_layers(_scaled_product(factor, leaf), grid)
        if isinstance(leaf, LowerProduct):
            return arithmetic.total_of_rounded_products(_scaled_product(factor, leaf), grid)
        if isinstance(leaf, Hits):
            weights = jnp.round(_scaled(factor, leaf.weights)[:, 0])
            return arithmetic.total_of_rounded_hits(leaf._replace(weights=weights), grid)
        entries = jnp.round(_scaled(factor, leaf))
        return arithmetic.total_of_rounded(entries, grid).reshape(leaf.shape[1:])

    return jax.tree.map(total, contributions, is_leaf=is_product)


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
    contributions = _written_down(contributions)
    bound = (1 - arithmetic.rounding_norm(_num_entries(contributions))) * clip_norm
    factor = _factors(contributions, mask, bound)
    return jax.tree.map(
        lambda leaf: noise_laws.in_steps(_scaled(factor, leaf), step).reshape(leaf.shape),
        contributions,
    )


def _written_down(contributions: PyTree) -> PyTree:
    """Vectors whose norms and sums are made of the same numbers."""
    # An accelerator's compiler may make an entry in several kernels, and contracts products and
    # sums in each as it likes. Where terms of an entry cancel, that moves it by far more than the
    # margin.
    return contributions if on_cpu() else jax.lax.optimization_barrier(contributions)


def _factors(
    contributions: PyTree, mask: Array, clip_norm: Array | float, one: Array | float = 1.0
) -> Array:
    """The factor that clips each vector, at most ``one``; 0 or NaN for what becomes zero."""
    leaves = jax.tree.leaves(contributions, is_leaf=is_product)
    squared = arithmetic.squared_norms(leaves, _dtype(leaves))
    # min(1, C / |v|), in grid units. NaN or infinite entries make the norm so, and the factor NaN
    # or 0: one hostile record can then do no more than leave itself out.
    factor = jnp.minimum(one, (1 - _ROUNDING_MARGIN) * clip_norm / jnp.sqrt(squared))
    # If squares overflow, the norm is infinite and the factor 0. If they underflow, the computed
    # norm is too small and the factor too large, so such vectors are set to zero.
    return jnp.where(mask & (squared > _least_square(leaves)), factor, 0.0)


def _scaled(factor: Array, leaf: Array) -> Array:
    """Vectors as rows, multiplied by what clips them."""
    # jnp.where and not a product alone, because 0 * NaN is NaN. What has a factor above 0 has a
    # finite norm, and so finite entries.
    rows = factor[:, None] * leaf.reshape(len(factor), -1)
    return jnp.where(factor[:, None] > 0, rows, 0)


def _scaled_rows(factor: Array, leaf: RowProduct) -> Array:
    """As :func:`_scaled`; rows whose weights are out of range are left out."""
    weights = factor * leaf.weights
    weights = jnp.where((factor > 0) & jnp.isfinite(weights), weights, 0)
    # Or the compiler would compute them anew for every entry.
    weights = jax.lax.optimization_barrier(weights)[:, None]
    rows = weights * leaf.rows.reshape(len(factor), -1)
    return jnp.where(weights != 0, rows, 0)


def _scaled_product(factor: Array, leaf: _Product) -> _Product:
    """Products, multiplied by what clips them; what is out of range is left out."""
    left, right = _scaled(factor, leaf.left), _scaled(jnp.sign(factor), leaf.right)
    left = jnp.where(jnp.isfinite(left), left, 0).reshape(leaf.left.shape)
    return leaf._replace(left=left, right=right.reshape(leaf.right.shape))


def _num_entries(contributions: PyTree) -> int:
    """The length of one vector."""
    shapes = jax.eval_shape(laid_out, contributions)
    return sum(math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(shapes))


def _dtype(contributions: PyTree) -> jnp.dtype:
    return jnp.result_type(*jax.tree.leaves(contributions))


def _least_square(contributions: PyTree) -> float:
    """A sum of squares above this has lost no more than a rounding error to underflow."""
    # A square below tiny / eps has lost digits, or all of them; so has a sum of d such squares
    # below d times that.
    leaves = jax.tree.leaves(contributions)
    limits = [jnp.finfo(leaf.dtype) for leaf in leaves]  # type: ignore[no-untyped-call]
    return _num_entries(contributions) * max(
        float(limit.tiny) / float(limit.eps) for limit in limits
    )
