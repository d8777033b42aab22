"""Exact sums and noise on a fixed grid, in 64 bits whatever the precision of the program.

Floating-point rounding can break a privacy guarantee in two ways. A 32-bit sum can move by more
than its sensitivity: removing one of 10^5 equal vectors moves it by 1.0014 times their norm. And a
32-bit normal draw has only 2^23 values, so a noisy sum reveals which true sums are impossible
(Mironov 2012). Therefore everything between clipping and release is computed in 64 bits, and
releases are rounded to a grid that does not depend on any record.

These functions enable 64-bit mode only while they are traced. The compiled code keeps the 64-bit
operations under ``jit``, ``vmap``, ``scan`` and ``lax.map``; the caller's precision is unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import (
    Array,
    Hits,
    LayerProduct,
    LowerProduct,
    PRNGKey,
    Product,
    PyTree,
    RowProduct,
)

# Clipped entries are rounded to steps of about 2^-20 of the clipping norm: to integers of at most
# 1.5 * 2^20 in units of a step. Eight of them add up to less than 2^24, which 32-bit floats hold
# exactly, and 2^32 of them to less than 2^53, which 64-bit floats do.
_ENTRY_BITS = 20
ROWS_PER_BLOCK = 8
# Released entries are rounded to steps of 2^-10 of the noise's standard deviation. That is coarse
# enough that every grid point within nine standard deviations can be drawn, and fine enough to add
# only a ten-millionth (2^-20 / 12) to the noise's variance. 32-bit floats hold the grid exactly up
# to 2^14 standard deviations.
_RELEASE_BITS = 10
_ROWS_AT_ONCE = 16  # of a running sum, on an accelerator


@jax.custom_batching.custom_vmap
def anyone(flag: Array) -> Array:
    """A public flag and, where visits are mapped, whether it is true for any of them."""
    # A ``lax.cond`` on it runs one of its branches; on a flag of each visit's own, mapped, both.
    return flag


@anyone.def_vmap
def _of_all(axis_size: int, in_batched: list[bool], flags: Array) -> tuple[Array, bool]:
    return jnp.any(flags), False


def power_of_two(number: Array | float, dtype: jnp.dtype) -> Array:
    """The power of two nearest to a positive number (2/3 to 4/3 of it); 0 for 0."""
    # Rounding the significand to zero bits leaves the exponent.
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return jax.lax.reduce_precision(jnp.asarray(number, dtype), info.nexp, 0)


def rounding_norm(num_entries: int) -> float:
    """The most that rounding to a grid can lengthen a vector, in units of the clipping norm."""
    # Each of d entries moves by at most half a step, so the vector moves by sqrt(d) / 2 steps. A
    # step is at most 4/3 * 2^-20 of the clipping norm (see power_of_two).
    return float(num_entries**0.5 * (4 / 3) * 2.0 ** -(_ENTRY_BITS + 1))


def squared_norms(leaves: Sequence[Array | Product], dtype: jnp.dtype) -> Array:
    """Joint squared norms of vectors, given with one leading axis, added up in 64 bits."""
    # In 32 bits the compiler may add up some rows' squares in another order than others', so that a
    # vector's rounding depended on its place. In 64 bits, where the squares are exact, the order
    # changes a sum by 10^-16, which hardly ever shows once it is rounded.
    with jax.enable_x64(True):

        def of_leaf(leaf: Array | Product) -> Array:
            if isinstance(leaf, RowProduct):
                return squared_norms_of_rows(leaf, dtype)
            if isinstance(leaf, LowerProduct):
                return squared_norms_of_products(leaf, dtype)
            if isinstance(leaf, LayerProduct):
                return squared_norms_of_layers(leaf, dtype)
            if isinstance(leaf, Hits):
                return squared_norms_of_hits(leaf, dtype)
            return _sums_of_squares(leaf)

        return functools.reduce(jnp.add, map(of_leaf, leaves)).astype(dtype)


def _sums_of_squares(rows: Array) -> Array:
    """Of every row, in 64 bits."""
    # As of eighths of rows in total_of_rounded, here of quarters of columns.
    flat = rows.reshape(len(rows), -1)
    width = flat.shape[1] // 4
    quarters = [flat[:, k * width : (k + 1) * width].astype(jnp.float64) ** 2 for k in range(4)]
    sums = _product(functools.reduce(jnp.add, quarters), jnp.ones(width, jnp.float64))
    return sums + jnp.sum(flat[:, 4 * width :].astype(jnp.float64) ** 2, axis=1)


def _product(left: Array, right: Array) -> Array:
    """The product of two matrices or vectors of 64 bits."""
    # ``@`` would be rounded to 32 bits where JAX traces it again with 64 bits off.
    dimensions = ((left.ndim - 1,), (0,)), ((), ())
    return jax.lax.dot_general(left, right, dimensions, precision=jax.lax.Precision.HIGHEST)


def _in_range(squares: Sequence[Array], dtype: jnp.dtype) -> Array:
    """Whether the sums of squares of all sides of a product are in range of its dtype."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(side.astype(dtype)) for side in squares])


def squared_norms_of_rows(products: RowProduct, dtype: jnp.dtype) -> Array:
    """Squared norms of products with one leading axis, without laying them out; in 64 bits.

    Infinite where the square of either side is out of the dtype's range.
    """
    sides = products.weights.astype(jnp.float64) ** 2, _sums_of_squares(products.rows)
    return jnp.where(_in_range(sides, dtype), sides[0] * sides[1], jnp.inf)


def squared_norms_of_products(products: LowerProduct, dtype: jnp.dtype) -> Array:
    """Squared norms of products with one leading axis, without laying them out; in 64 bits.

    Infinite where the square of either side is out of the dtype's range, so that what is multiplied
    later is in range, too.
    """
    # Row i adds left_i^2 (right_1^2 + ... + right_{i-1}^2). Terms are added up and never taken
    # away, which would lose small ones.
    left, right = (jnp.moveaxis(leaf.astype(jnp.float64) ** 2, -1, 0) for leaf in products)

    def add(carry: tuple[Array, Array], row: tuple[Array, Array]) -> Any:
        before, total = carry
        return (before + row[1], total + row[0] * before), None

    zeros = jnp.zeros_like(left[0])
    unroll = 1 if on_cpu() else _ROWS_AT_ONCE
    (_, total), _ = jax.lax.scan(add, (zeros, zeros), (left, right), unroll=unroll)
    sides = jnp.sum(left, axis=0), jnp.sum(right, axis=0)
    total = jnp.where(_in_range(sides, dtype), total, jnp.inf)
    return jnp.sum(total.reshape(total.shape[0], -1), axis=1)


def squared_norms_of_layers(products: LayerProduct, dtype: jnp.dtype) -> Array:
    """Squared norms of products with one leading axis, without laying them out; in 64 bits.

    Infinite where the square of either side is out of the dtype's range.
    """
    left, right, weights = products
    squares = left.astype(jnp.float64) ** 2
    sides = jnp.sum(squares, axis=1), _sums_of_squares(right)
    if weights is None:
        norms = sides[0] * sides[1]
    else:
        total = _squared_norms_of_weighted(left, right, weights)
        # An entry is a sum of m products. When it is computed anew, rounded otherwise, it moves by
        # up to m + 3 roundings of left_i w_i sum_m |right_mj|, with w_i the largest of its weights,
        # which is far more than the entry where they cancel. The square of that sum is at most m
        # times the sum of squares.
        most = jnp.max(jnp.abs(weights), axis=(0, 2)).astype(jnp.float64)
        eps = float(jnp.finfo(right.dtype).eps)  # type: ignore[no-untyped-call]
        spread = right.shape[1] * _product(squares, most**2) * sides[1]
        moved = (right.shape[1] + 3) * eps * jnp.sqrt(spread)
        # Eight squares were added up in the dtype itself.
        norms = (1 + (ROWS_PER_BLOCK + 1) * eps) * (jnp.sqrt(total) + moved) ** 2
    return jnp.where(_in_range(sides, dtype), norms, jnp.inf)


def _squared_norms_of_weighted(left: Array, right: Array, weights: Array) -> Array:
    # Eight rows of entries after eight, so that a core's vector holds records. Nothing is carried
    # along, and each array is one of its own: of such loops the compiler makes fast ones.
    rights = jax.lax.optimization_barrier([right[:, m].T for m in range(right.shape[1])])
    rows = _in_eights(left.T), [_in_eights(weight[:, :, None]) for weight in weights]

    def of_eight(eight: Any) -> Array:
        mine, weights = jax.lax.optimization_barrier(eight)
        entries = [
            mine[k] * _weighted([weight[k] for weight in weights], rights)
            for k in range(ROWS_PER_BLOCK)
        ]
        return functools.reduce(jnp.add, [each**2 for each in entries])

    squares = _of_each(of_eight, jax.lax.optimization_barrier(rows))
    return _column_sums(squares.reshape(-1, len(left)))


def _weighted(weights: Sequence[Array], rights: Sequence[Array]) -> Array:
    """The sum of rows of k numbers for each record, each multiplied by k weights."""
    terms = [weight * right for weight, right in zip(weights, rights, strict=True)]
    return functools.reduce(jnp.add, terms)


def squared_norms_of_hits(hits: Hits, dtype: jnp.dtype) -> Array:
    """Squared norms of hits with one leading axis, in 64 bits.

    Infinite where the square of a weight is out of the dtype's range.
    """
    somewhere = (hits.places >= 0) & (hits.places < hits.bins.shape[-1])
    number = jnp.sum(somewhere & (hits.asked > 0)[:, None], axis=1, dtype=jnp.float64)
    squares = hits.weights.astype(jnp.float64) ** 2
    return jnp.where(_in_range([squares], dtype), number * squares, jnp.inf)


class Grid(NamedTuple):
    """A grid for the entries of clipped vectors: multiples of a power of two, the unit."""

    norm: Array  # the clipping norm in units
    # The number 1 in units; infinite below clipping norms of 10^-20, where all vectors that are not
    # set to zero are longer than the norm.
    one: Array
    unit: Array  # in 64 bits


def grid(clip_norm: Array | float, rounded: Array | bool, dtype: jnp.dtype) -> Grid:
    """A grid of about ``clip_norm * 2**-20``, or one so fine that rounding changes nothing."""
    # Whole numbers of units are rounded fastest. Neither unit nor 1 / unit may be out of range of
    # the dtype, so that lengths are given in units of the power of two next to the norm.
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    # norm / size is between 3/4 and 3/2, in range for whatever clipping norm; the unit itself may
    # be far below the smallest 32-bit float, and is kept in 64 bits.
    norm = jnp.asarray(clip_norm, dtype)
    size = power_of_two(norm, dtype)
    finest = 2.0 ** (2 ** (info.nexp - 2) - 4)  # 2^60, or 2^508 in 64 bits
    units = jnp.where(rounded, 2.0**_ENTRY_BITS, finest).astype(dtype)
    with jax.enable_x64(True):
        unit = size.astype(jnp.float64) / units.astype(jnp.float64)
    return Grid(norm / size * units, units / size, unit)


def from_grid(entries: Array, grid: Grid, dtype: jnp.dtype) -> Array:
    """Values of numbers of a grid's units."""
    with jax.enable_x64(True):
        return (entries.astype(jnp.float64) * grid.unit).astype(dtype)


def total_of_rounded(entries: Array, grid: Grid) -> Array:
    """The exact 64-bit sum over rows of whole numbers of a grid's units."""
    # Blocks of eight rows are summed in 32 bits, where that is exact, and the blocks in 64 bits.
    return _total_of_blocks(functools.reduce(jnp.add, _in_eights(entries)), grid)


def _total_of_blocks(blocks: Array, grid: Grid) -> Array:
    with jax.enable_x64(True):
        total = _column_sums(blocks.reshape(len(blocks), -1))
        return grid.unit * total.reshape(blocks.shape[1:])


def _column_sums(rows: Array) -> Array:
    """In 64 bits."""
    wide = rows.astype(jnp.float64)
    # A processor's compiler makes rows while it multiplies them, an accelerator's while it adds.
    if on_cpu():
        return _product(jnp.ones(len(wide), jnp.float64), wide)
    return jnp.sum(wide, axis=0)


def _of_each(function: Callable[[Any], Array], rows: Any) -> Array:
    """Of every row: one after the other on a processor, where each stays in a core's cache."""
    if not on_cpu():
        return jax.vmap(function)(rows)
    return jax.lax.scan(lambda _, row: (None, function(row)), None, rows)[1]


def total_of_rounded_products(products: LowerProduct, grid: Grid) -> Array:
    """The exact 64-bit sum over rows of products in units of a grid, each rounded to whole units.

    Entries below the diagonal must be within the clipping norm; others are not used.
    """
    shape, size = products.left.shape[1:-1], products.left.shape[-1]
    left, right = (leaf.reshape(leaf.shape[0], -1, size) for leaf in products)
    matrices = jax.vmap(functools.partial(_matrix_of_products, grid), (1, 1))(left, right)
    rows, columns = np.tril_indices(size, -1)
    return matrices[:, rows, columns].reshape(*shape, len(rows))


def _matrix_of_products(grid: Grid, left: Array, right: Array) -> Array:
    # As total_of_rounded, row by row of the matrix: a row of products of eight records is made and
    # added up without being written down.
    padding = [(0, -left.shape[0] % ROWS_PER_BLOCK), (0, 0)]
    left, right = jnp.pad(left, padding), jnp.pad(right, padding)
    blocks = right.reshape(-1, ROWS_PER_BLOCK, right.shape[1])

    def of_row(mine: Array) -> Array:
        mine = mine.reshape(-1, ROWS_PER_BLOCK)
        each = [jnp.round(mine[:, k, None] * blocks[:, k]) for k in range(ROWS_PER_BLOCK)]
        return weighted_total(functools.reduce(jnp.add, each), grid.unit)

    return _of_each(of_row, left.T)


def total_of_rounded_layers(products: LayerProduct, grid: Grid) -> Array:
    """The exact 64-bit sum over rows of products in units of a grid, each rounded to whole units.

    Entries must be within the clipping norm.
    """
    # As total_of_rounded, eight records after eight: their products are made and added up without
    # being written down.
    left, right, weights = products
    if weights is None:
        weights = jnp.ones((1, left.shape[1], right.shape[2]), left.dtype)
    eights = [_in_eights(left), *(_in_eights(right[:, m]) for m in range(right.shape[1]))]
    every = jax.lax.optimization_barrier(list(weights))

    def of_eight(eight: list[list[Array]]) -> Array:
        lefts, *rights = jax.lax.optimization_barrier(eight)
        each = [
            jnp.round(lefts[k][:, None] * _weighted(every, [right[k] for right in rights]))
            for k in range(ROWS_PER_BLOCK)
        ]
        return functools.reduce(jnp.add, each)

    return _total_of_blocks(_of_each(of_eight, eights), grid)


def total_of_rounded_hits(hits: Hits, grid: Grid) -> Array:
    """The exact 64-bit sum over rows of hits whose weights are whole numbers of a grid's units."""
    rows, shape = len(hits.weights), (hits.places.shape[1], hits.bins.shape[1])

    def laid_out() -> Array:
        entries = hits.laid_out().reshape(rows, -1)
        return total_of_rounded(entries, grid).reshape(shape)

    with jax.enable_x64(True):
        nothing = jnp.zeros(shape, jnp.float64)
        return jax.lax.cond(anyone(jnp.any(hits.asked > 0)), laid_out, lambda: nothing)


def _in_eights(rows: Array) -> list[Array]:
    """Every eighth row, from each of the first eight on; zeros behind the last."""
    padded = jnp.pad(rows, [(0, -len(rows) % ROWS_PER_BLOCK), *[(0, 0)] * (rows.ndim - 1)])
    return [padded[k::ROWS_PER_BLOCK] for k in range(ROWS_PER_BLOCK)]


def weighted_total(stacked: PyTree, weight: Array | float) -> PyTree:
    """The sum over the leading axis, multiplied by a number, in 64 bits."""
    with jax.enable_x64(True):
        # One multiplication after the sum: weighting before it would round every vector.
        wide = jnp.asarray(weight).astype(jnp.float64)
        return jax.tree.map(lambda leaf: wide * jnp.sum(leaf.astype(jnp.float64), axis=0), stacked)


def add(one: PyTree, other: PyTree) -> PyTree:
    """The sum of two trees of 64-bit numbers."""
    with jax.enable_x64(True):
        return jax.tree.map(jnp.add, one, other)


def zeros(shapes: PyTree) -> PyTree:
    """A tree of 64-bit zeros with the given shapes."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), shapes)


def released(draws: Array, value: Array, noise_std: Array | float, dtype: jnp.dtype) -> Array:
    """Adds Gaussian noise in 64 bits, rounds to a fixed grid, and returns to ``dtype``.

    ``draws`` are standard normal, of the value's shape. The step of the grid is a power of two near
    ``noise_std * 2**-10``, whatever the value. So rounding is post-processing, and it removes the
    low bits, which would reveal something about the value. A standard deviation of 0 leaves the
    value as it is.
    """
    with jax.enable_x64(True):
        std = jnp.asarray(noise_std).astype(jnp.float64)
        # Noise first and the grid afterwards: a value that is rounded before it gets noise could
        # move by a step more than its sensitivity.
        noisy = value.astype(jnp.float64) + std * draws
        step = power_of_two(std, jnp.float64) * 2.0**-_RELEASE_BITS
        # Without noise nothing is rounded; 1.0 is there only so that nothing is divided by 0.
        divisor = jnp.where(step > 0, step, 1.0)
        on_grid = jnp.round(noisy / divisor) * divisor
        return jnp.where(step > 0, on_grid, noisy).astype(dtype)


def random_words(rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """The random words that :func:`normal` needs for draws of a given shape."""
    # 64-bit words would be truncated to 32 bits when JAX traces the program again (under vmap).
    return jax.random.bits(rng_key, (2, *shape), jnp.uint32)


def normal(words: Array) -> Array:
    """Standard normal draws from pairs of random words, by inverting the distribution function."""
    # Draws reach 9 standard deviations, whose tail probability is about 2^-64.
    with jax.enable_x64(True):
        # One bit is the sign; the other 63 are a tail probability u in (0, 1/2). Floats are dense
        # near 0, so ndtri(u) keeps its relative precision far into the tail, where ndtri(1 - u)
        # would lose it.
        high, low = (half.astype(jnp.float64) for half in (words[0], words[1] >> 1))
        # Never 0: the half keeps ndtri away from -infinity.
        tail = (high + (low + 0.5) * 2.0**-31) * 2.0**-33  # in (0, 1/2)
        return jnp.where(words[1] & 1, -1.0, 1.0) * ndtri(tail)
