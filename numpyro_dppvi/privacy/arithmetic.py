"""Exact sums, and noise on a fixed grid: 64-bit numbers inside a program of any precision.

A sum in 32 bits is off by more than the clipping allows for (removing one of 10^5 equal vectors
moves it by 1.0014 times their norm), and a 32-bit normal draw takes 2^23 values only, so that a
noisy sum shows which sums are impossible (Mironov 2012). Both are mended by 64-bit numbers
between clipping and release, and by rounding what is released to a grid that no record can move.

Functions here switch JAX to 64 bits for as long as they are traced; what is compiled keeps it,
under ``jit``, ``vmap``, ``scan`` and ``lax.map``, and the caller's precision stays as it was.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from numpyro_dppvi._typing import Array, PRNGKey, PyTree

# Clipped entries are rounded to the clipping norm times 2^-20. Eight rows of them add up without
# error in 32 bits, and 2^32 rows in 64 bits.
_ENTRY_BITS = 20
ROWS_PER_BLOCK = 8
# Released entries are rounded to the noise's standard deviation times 2^-10: coarse enough that
# every point of the grid within nine standard deviations is some draw's, and fine enough to add a
# ten-millionth to the noise's variance. In 32 bits the grid is exact up to 2^14 deviations.
_RELEASE_BITS = 10


def power_of_two(number: Array | float, dtype: jnp.dtype) -> Array:
    """The power of two that is nearest to a positive number (at most a third below it); 0 for 0."""
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return jax.lax.reduce_precision(jnp.asarray(number, dtype), info.nexp, 0)


def rounding_norm(num_entries: int) -> float:
    """The most that :func:`to_grid` lengthens a vector, in units of the clipping norm."""
    # Half a step in every entry; a step is at most 4 / 3 of the clipping norm's share.
    return float(num_entries**0.5 * (4 / 3) * 2.0 ** -(_ENTRY_BITS + 1))


def to_grid(entries: Array, clip_norm: Array | float, rounded: Array | bool) -> Array:
    """Rounds entries of clipped vectors to multiples of about ``clip_norm * 2**-20``.

    A number of the right size, added and taken away again, pushes the last bits out: faster than
    a division, and zero leaves the entries as they are.
    """
    bits = jnp.finfo(entries.dtype).nmant  # type: ignore[no-untyped-call]
    push = 1.5 * 2.0 ** (bits - _ENTRY_BITS) * power_of_two(clip_norm, entries.dtype)
    push = jnp.where(rounded, push, 0)
    return (entries + push) - push


def total_of_rounded(entries: Array) -> Array:
    """Adds up rows of entries from :func:`to_grid` without any error, in 64 bits."""
    padding = [(0, -entries.shape[0] % ROWS_PER_BLOCK), (0, 0)]
    blocks = jnp.pad(entries, padding).reshape(-1, ROWS_PER_BLOCK, entries.shape[1])
    return total(jnp.sum(blocks, axis=1))


def total(stacked: PyTree) -> PyTree:
    """The sum over the leading axis, in 64 bits."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jnp.sum(leaf.astype(jnp.float64), axis=0), stacked)


def weighted_total(stacked: PyTree, weight: Array | float) -> PyTree:
    """The sum over the leading axis times a number, in 64 bits."""
    with jax.enable_x64(True):
        wide = jnp.asarray(weight).astype(jnp.float64)
        return jax.tree.map(lambda leaf: wide * leaf, total(stacked))


def add(one: PyTree, other: PyTree) -> PyTree:
    """The sum of two trees of 64-bit numbers."""
    with jax.enable_x64(True):
        return jax.tree.map(jnp.add, one, other)


def zeros(shapes: PyTree) -> PyTree:
    """A tree of 64-bit zeros, shaped like another."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float64), shapes)


def released(words: Array, value: Array, noise_std: Array | float, dtype: jnp.dtype) -> Array:
    """Adds Gaussian noise in 64 bits, rounds to a fixed grid, and returns to ``dtype``.

    The grid is a power of two near ``noise_std * 2**-10``, the same for every value: rounding to
    it is post-processing, and takes away what low bits would tell about the value.

    Args:
        words: Random 32-bit words, shape ``(2, *value.shape)``.
        value: What to add noise to.
        noise_std: Standard deviation, a scalar; 0 leaves the value as it is.
        dtype: Of the result.
    """
    with jax.enable_x64(True):
        std = jnp.asarray(noise_std).astype(jnp.float64)
        noisy = value.astype(jnp.float64) + std * normal(words)
        step = power_of_two(std, jnp.float64) * 2.0**-_RELEASE_BITS
        divisor = jnp.where(step > 0, step, 1.0)
        on_grid = jnp.round(noisy / divisor) * divisor
        return jnp.where(step > 0, on_grid, noisy).astype(dtype)


def random_words(rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """What :func:`normal` makes draws of that shape from."""
    # Words of 64 bits would be cut to 32 wherever JAX traces the program a second time.
    return jax.random.bits(rng_key, (2, *shape), jnp.uint32)


def normal(words: Array) -> Array:
    """Standard normal draws from pairs of random words, by the inverse of the distribution.

    One bit is the sign and 63 are the tail's probability, whose precision is relative: draws go
    out to 9 standard deviations, where half a unit of 2^-63 lies.
    """
    with jax.enable_x64(True):
        high, low = (half.astype(jnp.float64) for half in (words[0], words[1] >> 1))
        tail = (high + (low + 0.5) * 2.0**-31) * 2.0**-33  # in (0, 1/2)
        return jnp.where(words[1] & 1, -1.0, 1.0) * ndtri(tail)
