"""Sums without rounding and releases on a grid; what 32-bit numbers would show instead."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from numpyro_dppvi._typing import LowerProduct, RowProduct
from numpyro_dppvi.privacy import add_noise, arithmetic, clipped, clipped_sum
from tests.grids import grid

NOISE_STD = 4.0
STEP = 2.0**-8  # four times 2^-10


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------------------------------------
# Sums.


def equal_rows(count, seed=0):
    row = np.random.default_rng(seed).normal(size=7).astype(np.float32)
    return jnp.asarray(np.tile(row / np.linalg.norm(row), (count, 1)))


def plain_sum(rows, mask, clip_norm):
    """What the exact sum replaces."""
    return jnp.sum(clipped(rows, mask, clip_norm), axis=0)


def moved_by_removing_one(sum_of, rows):
    mask = jnp.ones(len(rows), bool)
    both = [sum_of(rows, m, 1.0) for m in (mask, mask.at[len(rows) // 2].set(False))]
    return float(np.linalg.norm(np.subtract(*(np.asarray(s, np.float64) for s in both))))


def products_sum(rows, mask, clip_norm):
    """The sum of rows that are the first column below the diagonal of products."""
    first = jnp.zeros((len(rows), 1 + rows.shape[1]), rows.dtype).at[:, 0].set(1.0)
    products = LowerProduct(jnp.pad(rows, ((0, 0), (1, 0))), first)
    return clipped_sum(products, mask, clip_norm)


def weighted_sum(rows, mask, clip_norm):
    """The sum of rows that are products with a number."""
    weights = jnp.full(len(rows), 3.0, rows.dtype)
    return clipped_sum(RowProduct(weights, rows / 3), mask, clip_norm)


@pytest.mark.parametrize("product", [products_sum, weighted_sum])
@grid("count", [9, 100_000], quick=[1])
def test_removing_one_of_many_equal_products_moves_the_sum_by_no_more_than_the_norm(count, product):
    def for_two_clients(rows, mask, clip_norm):
        both = jax.lax.map(
            jax.vmap(lambda _: product(rows, mask, clip_norm)),
            jnp.zeros((1, 2)),
        )
        assert both.dtype == np.float64
        return both[0, 1]

    for sum_of in (product, for_two_clients):
        units = 2.0**20 * np.asarray(jax.jit(sum_of)(equal_rows(count), jnp.ones(count, bool), 1.0))
        np.testing.assert_array_equal(units, np.round(units))
        moved = moved_by_removing_one(jax.jit(sum_of), equal_rows(count))
        assert 1 - 3e-5 <= moved <= 1


@pytest.mark.parametrize("count", [1, 9, 244, 2442, 100_000])
def test_removing_one_of_many_equal_vectors_moves_the_sum_by_no_more_than_the_norm(count):
    rows = equal_rows(count)
    assert 1 - 3e-5 <= moved_by_removing_one(jax.jit(clipped_sum), rows) <= 1


@pytest.mark.slow
def test_a_32_bit_sum_would_fail_that_test():
    worst = max(moved_by_removing_one(jax.jit(plain_sum), equal_rows(100_000, s)) for s in range(5))
    assert worst > 1.0001


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 70))
@example(seed=256, count=6)  # a vector was rounded by its place
def test_the_sum_does_not_depend_on_the_order_of_the_rows(seed, count):
    """Every bit of it: sums of rounded entries have no error that could."""
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(70, 5)) * 10.0 ** rng.integers(-6, 3, (70, 1))).astype(np.float32)
    mask = np.arange(70) < count
    order = rng.permutation(70)
    clip = jax.jit(clipped_sum)
    np.testing.assert_array_equal(clip(rows, mask, 2.5), clip(rows[order], mask[order], 2.5))


def test_entries_are_multiples_of_a_step_that_the_clipping_norm_alone_decides():
    rows = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    for clip_norm, step in ((1.0, 2.0**-20), (2.5, 2.0**-19), (2.9, 2.0**-19), (3.1, 2.0**-18)):
        total = np.asarray(clipped_sum(rows, np.ones(40, bool), clip_norm))
        np.testing.assert_array_equal(total, np.round(total / step) * step)
        longer = np.asarray(clipped_sum(rows, np.ones(40, bool), clip_norm, rounded=False))
        assert np.any(longer != np.round(longer / step) * step)
        np.testing.assert_allclose(total, longer, atol=40 * step)


@pytest.mark.parametrize("rounded", [False, jnp.array(False)])
def test_without_rounding_entries_far_below_the_clipping_norm_survive(rounded):
    rows = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    total = clipped_sum(rows, np.ones(40, bool), 1e9, rounded=rounded)
    np.testing.assert_allclose(total, rows.sum(0), rtol=1e-5)
    assert not np.any(np.asarray(clipped_sum(rows, np.ones(40, bool), 1e9)))


# ---------------------------------------------------------------------------------------------
# Noise in 64 bits, on a grid.

add_noise_at_once, normal = jax.jit(add_noise), jax.jit(arithmetic.normal)


def noisy(rng_key, value, count):
    return np.asarray(add_noise_at_once(rng_key, jnp.full(count, value, jnp.float32), NOISE_STD))


def noisy_32(rng_key, value, count):
    """What it replaces."""
    return np.asarray(value + jnp.float32(NOISE_STD) * jax.random.normal(rng_key, (count,)))


def all_32_bit_normals():
    """Every value that ``jax.random.normal`` can take in 32 bits."""
    bits = np.arange(2**23, dtype=np.uint32) | np.float32(1).view(np.uint32)
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = np.maximum(low, (bits.view(np.float32) - np.float32(1)) * (1 - low) + low)
    return np.unique(np.asarray(np.float32(np.sqrt(2)) * jax.lax.erf_inv(uniform)))


@pytest.mark.slow
def test_32_bit_noise_shows_which_sums_are_impossible():
    values = all_32_bit_normals()
    assert len(values) <= 2**23
    assert values.max() < 5.5
    possible = np.float32(NOISE_STD) * values  # outputs that a sum of 0 can have
    if_zero, if_one = (noisy_32(jax.random.key(1), value, 10_000) for value in (0.0, 1.0))
    assert np.isin(if_zero, possible).all()
    assert np.isin(if_one, possible).mean() < 0.2  # the others betray the record


def words_for(draws):
    """The random words that make a given normal draw, as nearly as 64 bits can."""
    tail = special.ndtr(-np.abs(draws)) * 2.0**33
    high = np.floor(np.minimum(tail, 2**32 - 1)).astype(np.uint32)
    low = np.clip(np.round((tail - high) * 2.0**31 - 0.5), 0, 2**31 - 1).astype(np.uint32)
    return jnp.asarray(np.stack([high, (low << 1) | (np.asarray(draws) > 0)]).astype(np.uint32))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.3, 1234.567])
def test_every_point_of_the_grid_is_possible_whatever_the_sum(value):
    release = jax.jit(
        lambda words, x: arithmetic.released(arithmetic.normal(words), x, NOISE_STD, jnp.float32)
    )
    rng = np.random.default_rng(0)
    centre = np.round(value / STEP)
    places = np.concatenate([rng.integers(-8000, 8000, 20_000), np.arange(-300, 300)])
    points = ((centre + places) * STEP).astype(np.float32)
    value = np.float32(value)
    made = release(
        words_for((points - np.float64(value)) / NOISE_STD), jnp.full(len(points), value)
    )
    np.testing.assert_array_equal(made, points)


def test_nothing_but_the_grid_is_possible():
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32) * 100
    for seed, total in enumerate([values, np.zeros_like(values)]):
        released = np.asarray(add_noise_at_once(jax.random.key(seed), total, NOISE_STD), np.float64)
        np.testing.assert_array_equal(released, np.round(released / STEP) * STEP)


@grid("noise_std", [1e-20, 0.3, 4.0, 5.9, 6.1, 1e6], quick=[2, 3, 4, 5])
def test_the_step_is_a_power_of_two_that_the_noise_alone_decides(noise_std):
    step = min((2.0**k for k in range(-90, 30)), key=lambda p: abs(p - noise_std)) / 1024
    released = np.asarray(
        add_noise_at_once(jax.random.key(0), np.zeros(1000, np.float32), noise_std), np.float64
    )
    np.testing.assert_array_equal(released, np.round(released / step) * step)
    assert np.any(np.round(released / (2 * step)) * 2 * step != released)
    assert abs(released.std() / noise_std - 1) < 0.12  # five standard errors


@pytest.mark.slow
def test_no_noise_means_no_grid():
    total = np.random.default_rng(0).normal(size=50).astype(np.float32)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(add_noise_at_once(jax.random.key(0), total, 0.0), total)


@pytest.mark.slow
def test_extreme_words_give_finite_draws():
    ends = np.array([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    words = np.stack([a.ravel() for a in np.meshgrid(ends, ends)])
    draws = np.asarray(normal(words))
    assert draws.dtype == np.float64
    assert np.isfinite(draws).all()
    assert 9.0 < np.abs(draws).max() < 9.2
    assert set(np.sign(draws)) <= {-1.0, 0.0, 1.0}


def test_draws_are_right_to_the_last_bits():
    """An error of 10^-14 shifts the ends of a grid point's interval by 10^-11 of its width."""
    words = np.random.default_rng(4).integers(0, 2**32, (2, 100_000), np.uint32)
    words[0, ::2] >>= np.random.default_rng(5).integers(0, 32, 50_000, np.uint32)
    tail = (words[0] + ((words[1] >> 1) + 0.5) * 2.0**-31) * 2.0**-33
    expected = np.where(words[1] & 1, -1, 1) * special.ndtri(tail)
    draws = np.asarray(normal(words))
    np.testing.assert_allclose(draws, expected, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_draws_are_normal_far_into_the_tails():
    words = np.random.default_rng(3).integers(0, 2**32, (2, 400_000), np.uint32)
    draws = np.asarray(normal(words))
    assert stats.kstest(draws, "norm").pvalue > 1e-6
    # Words that only one of 2^20 draws has: the law given that.
    words[0] >>= 20
    tails = np.asarray(normal(words))
    assert stats.kstest(stats.norm.sf(np.abs(tails)) * 2**21, "uniform").pvalue > 1e-6
    assert abs(np.mean(tails > 0) - 0.5) < 5 * 0.5 / 400_000**0.5


# ---------------------------------------------------------------------------------------------
# 64 bits within a program of 32.


def release(rng_key, rows):
    """A clipped, noisy sum as a client makes it, in chunks, with 32-bit neighbours."""

    def body(total, chunk):
        return arithmetic.add(total, clipped_sum(chunk, jnp.ones(len(chunk), bool), 1.0)), jnp.sum(
            chunk
        )

    chunks = rows.reshape(3, -1, rows.shape[1])
    total, sums = jax.lax.scan(body, arithmetic.zeros(rows[0]), chunks)
    assert sums.dtype == rows.dtype
    out = add_noise(rng_key, total, 1.0, like=rows)
    assert out.dtype == rows.dtype
    return 2 * out


def steps(rng_key, rows):
    """Several releases in a scan."""

    def step(carry, key):
        return carry + release(key, rows), None

    return jax.lax.scan(step, jnp.zeros(rows.shape[1:], rows.dtype), jax.random.split(rng_key, 4))[
        0
    ]


WAYS = {
    "jit of vmap": jax.jit(jax.vmap(steps)),
    "map in batches": jax.jit(
        lambda keys, data: jax.lax.map(lambda kx: steps(*kx), (keys, data), batch_size=2)
    ),
    "scan": jax.jit(
        lambda keys, data: jax.lax.scan(lambda c, kx: (c, steps(*kx)), 0.0, (keys, data))[1]
    ),
    "vmap twice": jax.jit(
        lambda keys, data: (
            jnp.diagonal(jax.vmap(lambda key: jax.vmap(steps, (None, 0))(key, data))(keys)).T
        )
    ),
}


def inputs():
    data = np.random.default_rng(0).normal(size=(5, 24, 6)).astype(np.float32)
    return jax.random.split(jax.random.key(0), 5), jnp.asarray(data)


@grid("way", WAYS, quick=[])
def test_it_is_the_same_program_under_every_transformation(way):
    keys, data = inputs()
    expected = jnp.stack([steps(k, x) for k, x in zip(keys, data, strict=True)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns where it cuts 64 bits to 32
        out = WAYS[way](keys, data)
    assert out.dtype == expected.dtype == jnp.float32
    np.testing.assert_array_equal(out, expected)
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3.0).dtype == jnp.float32


@pytest.mark.slow
def test_it_draws_the_same_noise_whatever_the_precision_of_the_program(x64):
    with jax.enable_x64(False):
        keys, data = inputs()
        narrow = jax.jit(jax.vmap(steps))(keys, data)
    wide = jax.jit(jax.vmap(steps))(keys, data)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, wide)
    widest = jax.jit(jax.vmap(steps))(keys, data.astype(jnp.float64))
    assert widest.dtype == jnp.float64
    np.testing.assert_allclose(widest, wide, atol=0.02)
