"""ChaCha20 (RFC 8439) as a JAX random number generator with 256-bit keys.

Every output is a block of the cipher under the key, at a nonce that names its purpose (random bits
or derived keys) and a counter. Two outputs of one key never share a block.
"""

import functools
import importlib
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array

KEY_WORDS = 8
_WORDS_PER_BLOCK = 16
_DOUBLE_ROUNDS = 10
_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4")

# The first word of the nonce separates random bits, split keys and folded keys.
_BITS, _SPLIT, _FOLD = 1, 2, 3


@functools.cache
def implementation() -> Hashable:
    """The value for ``impl`` in ``jax.random.wrap_key_data``."""
    try:
        # A semi-public function of JAX, so it is imported only when needed.
        return importlib.import_module("jax.extend.random").define_prng_impl(
            key_shape=(KEY_WORDS,),
            seed=_seed,
            split=_split,
            random_bits=_random_bits,
            fold_in=_fold_in,
            name="numpyro_dppvi_chacha20",
            tag="chacha20",
        )
    except (AttributeError, ImportError, TypeError) as error:
        raise RuntimeError(
            f"JAX {jax.__version__} does not accept custom random number generators, so ChaCha20 "
            'cannot be used: write SecretKeys(generator="threefry2x32"), whose keys have 64 bits, '
            "or install a JAX version that this library was tested with."
        ) from error


@jax.jit
def blocks(key: Array, counters: Array, nonce: Array) -> Array:
    """Blocks of the key stream, ``(num_blocks, 16)`` words; key and nonce are of 8 and 3 words."""
    # The state of a block is a 4 x 4 matrix of words: constants, key (two rows), counter and nonce.
    # All blocks are computed at once, along the last axis. Rows lie end to end: as an array of
    # three axes, or one for each row, they take longer to compile and to compute.
    num_blocks = counters.shape[0]
    fixed = jnp.concatenate([jnp.asarray(_CONSTANTS), key])
    start = jnp.concatenate(
        [
            jnp.broadcast_to(fixed[:, None], (12, num_blocks)),
            counters[None],
            jnp.broadcast_to(nonce[:, None], (3, num_blocks)),
        ]
    )
    # The last addition of the start makes the permutation one-way: without it, anybody could run
    # the rounds backwards from a block to the key.
    return (_after_all_rounds(start) + start).T


def _after_all_rounds(state: Array) -> Array:
    if on_cpu():
        return jax.lax.fori_loop(0, _DOUBLE_ROUNDS, lambda _, now: _double_round(now), state)
    # An accelerator takes 13 to 23 microseconds for a turn of a loop, and 4 for the work. Without
    # barriers the compiler makes words anew, again and again, for a minute.
    for _ in range(_DOUBLE_ROUNDS):
        state = jax.lax.optimization_barrier(_double_round(state))
    return state


def _double_round(state: Array) -> Array:
    """A quarter round on each column, then one on each diagonal."""
    # Rotating row i by i places turns diagonals into columns, and rotating it back undoes that.
    row, column = np.divmod(np.arange(_WORDS_PER_BLOCK), 4)
    for places in (1, -1):
        columns = _quarter_rounds(*state.reshape(4, 4, -1))
        state = jnp.concatenate(columns)[4 * row + (column + places * row) % 4]
    return state


def _quarter_rounds(a: Array, b: Array, c: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """The quarter round on all four columns of every block at once."""
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


def _rotated(words: Array, bits: int) -> Array:
    return (words << jnp.uint32(bits)) | (words >> jnp.uint32(32 - bits))


def _nonce(purpose: int) -> Array:
    return jnp.array([purpose, 0, 0], jnp.uint32)


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    # The block counter has 32 bits, which limits the bits that one key can give.
    count = math.prod(shape)
    num_blocks = -(-count * bit_width // (32 * _WORDS_PER_BLOCK))
    if num_blocks >= 2**32:
        raise ValueError(
            f"shape must need at most 2**38 bytes, got {shape}: split the key and draw in parts."
        )
    # Counters from 0, and a nonce for each use: no two calls under one key share a block, unless
    # they do the same.
    words = blocks(key, jnp.arange(num_blocks, dtype=jnp.uint32), _nonce(_BITS)).ravel()
    dtype = jnp.dtype(f"uint{bit_width}")
    if bit_width > 32:
        words = words.reshape(-1, bit_width // 32)
    return jax.lax.bitcast_convert_type(words, dtype).ravel()[:count].reshape(shape)


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    # One block a key, of whose sixteen words a key takes half.
    count = math.prod(shape)
    keys = blocks(key, jnp.arange(count, dtype=jnp.uint32), _nonce(_SPLIT))
    return keys[:, :KEY_WORDS].reshape(*shape, KEY_WORDS)


def _fold_in(key: Array, data: Array | int) -> Array:
    # What is folded in is the counter, so that different numbers give different blocks.
    counter = jnp.asarray(data).astype(jnp.uint32).reshape(1)
    return blocks(key, counter, _nonce(_FOLD))[0, :KEY_WORDS]


def _seed(seed: Any) -> Array:
    raise TypeError(
        "a seed has too few bits for a secret key: write SecretKeys(), which draws 256 bits from "
        "the operating system."
    )
