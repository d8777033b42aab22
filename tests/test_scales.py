"""Scales from noisy histograms, against the mean squares of columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi.methods import scales

RECORDS = 20_000
of = jax.jit(scales.of)


def said(columns, noise_std=1.0, *, seed=0, are_columns=1.0):
    """What histograms of columns say, each with noise of this standard deviation in a bin."""
    rng = np.random.default_rng(seed)
    with np.errstate(divide="ignore"):
        octaves = np.floor(np.log2(np.abs(columns))) - scales.LOWEST
    counts = np.stack([np.histogram(row, np.arange(scales.BINS + 1))[0] for row in octaves])
    noisy = jnp.asarray(counts + noise_std * rng.normal(size=counts.shape), float)
    are = jnp.broadcast_to(are_columns, len(counts))
    return of(noisy, jnp.asarray(noise_std**2), jnp.asarray(1.0 * RECORDS), jnp.ones(()), are)


def amounts(rng, share):
    """Of which most are nothing, centred and scaled."""
    amount = np.where(rng.random(RECORDS) < share, np.exp(rng.normal(3, 1, RECORDS)), 0)
    return (amount - amount.mean()) / amount.std()


def columns(rng):
    """About zero, far from it, all above it, noughts and ones, and amounts."""
    return np.stack(
        [
            3 * rng.normal(size=RECORDS),
            0.01 * rng.normal(size=RECORDS),
            37 + 0.7 * rng.normal(size=RECORDS),
            rng.uniform(20, 90, RECORDS),
            1.0 * (rng.random(RECORDS) < 0.3),
            amounts(rng, 0.08),
            amounts(rng, 0.3),
        ]
    )


@pytest.mark.parametrize("noise_std", [1.0, 50.0])
def test_information_is_the_mean_square(noise_std):
    rows = columns(np.random.default_rng(1))
    found = said(rows, noise_std)
    ratio = (found.most + found.beyond) / np.mean(rows**2, axis=1)
    assert found.found.all()
    assert np.all((ratio > 0.3) & (ratio < 3)), ratio
    # Noughts and ones are all in one octave: in its middle there is twice as much as at its end.
    assert 1.7 < ratio[4] < 2.3
    # Without what lies beyond most records, steps would be sixteen and four times too long.
    assert np.all(found.most[-2:] < np.array([0.07, 0.26]))
    # Of a normal column a few records are beyond, and of one far from zero none: looks tell how far
    # it spreads.
    assert np.all(found.beyond[:2] < 0.3 * found.most[:2])
    assert not found.beyond[2:5].any()


@pytest.mark.slow
def test_a_column_that_noise_hides_is_expected_among_the_others():
    """Or below, if it must be rare: most of its records would show."""
    rng = np.random.default_rng(2)
    rare = 1.0 * (rng.random(RECORDS) < 0.002)
    far = 1000 + rng.normal(size=RECORDS)
    found = said(np.stack([3 * rng.normal(size=RECORDS), far, rare]), 50.0)
    assert found.found.tolist() == [True, True, False]
    assert np.mean(rare**2) < found.most[2] < found.most[1]


def test_what_hardly_stands_out_is_expected_where_it_does():
    """Raw columns in noise that hides one in ten: expected by a factor of 1.3, once by 1.9.

    An average of the columns that were found is 26 times its scale, and its weight would be taken
    for known as soon as that is released.
    """
    rng, errors, hidden = np.random.default_rng(0), [], []
    means, spreads = (
        np.array([[1.0], [60], [120], [0], [20]]),
        np.array([[0.0], [15], [20], [1], [5]]),
    )
    for seed in range(40):
        rows = means + spreads * rng.normal(size=(5, RECORDS))
        found = said(rows, 2200.0, seed=seed)
        hidden.append(not found.found[3])
        errors.append(0.5 * np.log2(found.most[3] / np.mean(rows[3] ** 2)))
    errors = np.array(errors)[hidden]
    assert len(errors) >= 5
    assert np.mean(np.abs(errors)) < 1


def peaks(*bins):
    """Histograms without noise, of a column that is seen for certain and of one with these bins."""
    counts = jnp.zeros((2, scales.BINS)).at[0, 20].set(26.0)
    for number, count in bins:
        counts = counts.at[1, number].set(count)
    ones = jnp.ones(())
    return of(counts, ones, 26 * ones, ones, jnp.ones(2))


@pytest.mark.slow
def test_noise_far_from_other_columns_is_no_scale():
    """What stands out by 4.6 deviations, once in a thousand runs, threw one of head injuries."""
    noise = peaks((29, 2.7), (30, 3.4), (31, 1.0))
    assert noise.found.tolist() == [True, False]
    near = peaks((19, 2.7), (20, 3.4), (21, 1.0))
    assert near.found.tolist() == [True, True]


@pytest.mark.slow
def test_an_indicator_is_seen_by_its_one_bin():
    """A template would find two thirds of it, and think it noise."""
    found = peaks((19, 5.2))
    assert found.found.tolist() == [True, True]
    # All records in one bin are left to the template, and a fifth are in the middle of theirs.
    np.testing.assert_allclose(found.most[0], 4.0, rtol=1e-5)
    np.testing.assert_allclose(found.most[1], 2 * 0.2 / 4, rtol=1e-5)


@pytest.mark.slow
def test_a_constant_column_may_be_what_rare_values_were_centred_by():
    """A learnt spread, whose records are all of one scale too, has what it shows."""
    rng = np.random.default_rng(5)
    rows = np.stack([3 * rng.normal(size=RECORDS), *np.full((2, RECORDS), 0.1)])
    found = said(rows, 50.0, are_columns=np.array([1.0, 1.0, 0.0]))
    # A column far from zero has the scale of its mean, which says little of others.
    np.testing.assert_allclose(found.centred, [0, found.most[0], 0], rtol=1e-6)


@pytest.mark.slow
def test_noise_puts_no_records_beyond_a_column():
    """In a thousand columns: a scale that is a thousand times too large hides its column."""
    rows = np.random.default_rng(3).normal(size=(1, RECORDS))
    assert said(rows, 0.0).beyond[0] < 0.01
    found = said(np.repeat(rows, 1000, axis=0), 300.0, seed=4)
    assert np.mean(found.beyond > 0) < 0.001


@pytest.mark.slow
def test_outcomes_that_cannot_be_drawn_scatter_scales_of_their_own():
    counts = jnp.zeros((2, scales.BINS)).at[:, 20].set(0.9 * RECORDS).at[0, 30].set(0.1 * RECORDS)
    found = of(counts, jnp.ones(()), jnp.asarray(1.0 * RECORDS), jnp.zeros(()), jnp.ones(2))
    assert not found.beyond.any()


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [True, False])
def test_empty_histograms_say_nothing(drawn):
    empty = jnp.zeros((3, scales.BINS)), jnp.zeros(()), jnp.zeros(())
    found = scales.of(*empty, jnp.asarray(1.0 * drawn), jnp.ones(3))
    jax.tree.map(np.testing.assert_array_equal, found, scales.nothing(3, drawn))
