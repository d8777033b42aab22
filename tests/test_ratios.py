"""Columns far from zero: histograms of ratios, what is found in them, and what it is good for."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from benchmarks import believe
from numpyro_dppvi import FisherScoring
from numpyro_dppvi.methods import ratios
from numpyro_dppvi.methods.ratios import BINS, Look
from numpyro_dppvi.methods.shapes import raised
from numpyro_dppvi.methods.white import coordinates

MEANS, SPREADS = np.array([1.0, 37.0, 7.4, -140.0]), np.array([0.0, 0.7, 0.1, 4.0])


with_found, shape_of = jax.jit(ratios.with_found), jax.jit(ratios.shape)
look_first, look_again = jax.jit(ratios.first), jax.jit(ratios.second)


def look(centre=0.0, step=0.1, unit=None):
    unit = np.sqrt(MEANS**2 + SPREADS**2) if unit is None else unit
    ones = np.ones(len(unit))
    return Look(
        *(jnp.asarray(leaf, jnp.float32) for leaf in (ones, unit, centre * ones, step * ones))
    )


def scores(num_records, seed=0, outcomes=3):
    """Of a model with one predictor: residuals of drawn outcomes times a record's columns."""
    rng = np.random.default_rng(seed)
    x = MEANS + SPREADS * rng.normal(size=(num_records, len(MEANS)))
    return (rng.normal(size=(num_records, outcomes, 1)) * x[:, None]).astype(np.float32), x


def counted(asked, records):
    bins = np.asarray(jax.jit(jax.vmap(ratios.place, (None, 0)))(asked, jnp.asarray(records)))
    return (bins[:, :, None] == np.arange(BINS)).sum(axis=0).astype(float)


def known(asked, counts, std, counted, stage=1):
    empty = ratios.nothing(len(counts))
    seen = empty._replace(
        stage=jnp.asarray(float(stage)),
        look=asked,
        counts=jnp.asarray(counts, jnp.float32),
        counts_var=jnp.asarray(std**2, jnp.float32),
        counted=jnp.asarray(float(counted)),
    )
    return with_found(seen)


@pytest.mark.slow
def test_a_ratio_depends_on_the_columns_and_not_on_the_outcome():
    made, x = scores(50)
    asked = look()
    one = counted(asked, made)
    other = counted(asked, -7 * made[:, ::-1])
    assert np.array_equal(one, other)
    assert np.all(one.sum(axis=1) == 50)  # each record is in one bin of each histogram
    # What is divided by is the median of the others, worked out by hand for one record.
    lengths = x[0] / np.asarray(asked.unit)
    others = [np.median(np.abs(np.delete(lengths, i))) for i in range(len(MEANS))]
    expected = np.floor(lengths / others / 0.1) + BINS // 2
    assert np.array_equal(np.asarray(ratios.place(asked, jnp.asarray(made[0]))), expected)


@pytest.mark.parametrize(
    "row",
    [np.zeros(4), np.full(4, np.inf), np.full(4, np.nan), [0, 1, np.inf, -np.inf], [1e38] * 4],
)
def test_a_hostile_record_is_in_one_bin_of_a_histogram_at_most(row):
    hits = counted(look(), np.asarray(row, np.float32)[None, None])
    assert np.all(hits.sum(axis=1) <= 1)


@pytest.mark.slow
def test_latents_that_are_not_looked_at_are_in_no_bin():
    made, _ = scores(5)
    asked = look()
    asked = asked._replace(step=asked.step.at[1].set(0))
    hits = counted(asked, made).sum(axis=1)
    assert hits[1] == 0
    assert np.all(np.delete(hits, 1) == 5)


@pytest.mark.slow
def test_what_is_found_without_noise_are_means_and_spreads():
    made, x = scores(4000)
    asked = look()
    first = known(asked, counted(asked, made), 0.0, 4000)
    mean = first.found.mean
    second = look_again(first)
    assert np.all(second.step > 0)
    counts = counted(second, made)
    empty = known(second, counts, 0.0, 4000, stage=2)
    finer, own, constant = with_found(empty._replace(earlier=first.found)).found
    lengths = x / np.asarray(asked.unit)
    others = np.stack(
        [np.median(np.abs(np.delete(lengths, i, axis=1)), axis=1) for i in range(4)], axis=1
    )
    truth = lengths / others
    # To half a bin of the first look, a quarter of one of the second, and half a step between the
    # spreads that are looked for, which are 1.4 times apart.
    np.testing.assert_allclose(mean, truth.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(finer, truth.mean(axis=0), atol=0.00125)
    np.testing.assert_allclose(np.sqrt(own), truth.std(axis=0), rtol=0.19)
    assert not np.any(constant)


@pytest.mark.slow
def test_noise_alone_is_not_taken_for_a_column():
    """All records in one place fit worse than none by some 5 deviations: under one in a hundred."""
    rng = np.random.default_rng(0)
    found = [
        np.isfinite(known(look(), 30 * rng.normal(size=(4, BINS)), 30.0, 500).found.var)
        for _ in range(50)
    ]
    assert np.mean(found) < 0.03


@pytest.mark.slow
def test_columns_are_found_in_noise_that_hides_some_of_their_bins():
    """A thousand records, epsilon 3: noise of 60 a bin beside 150 records in the fullest one."""
    rng = np.random.default_rng(0)
    means, spreads = np.array([1.0, 1.25, 0.8, -1.1]), np.array([0.1, 0.25, 0.2, 0.2])
    edges = (np.arange(BINS + 1) - BINS // 2) * 0.1
    found, ratio = [], []
    for _ in range(50):
        ratios_of = means[:, None] + spreads[:, None] * rng.normal(size=(4, 1000))
        counts = np.stack([np.histogram(row, edges)[0] for row in ratios_of])
        noisy = counts + 60 * rng.normal(size=counts.shape)
        mean, var, _ = known(look(), noisy, 60.0, 1000).found
        found.append(np.isfinite(var))
        ratio.append(np.where(found[-1], mean / means, np.nan))
    # All but one in twenty, where .80 were found by single bins' deviations and the mass in them.
    assert np.mean(found) > 0.95
    assert np.nanmax(np.abs(np.array(ratio) - 1)) < 0.3


@pytest.mark.slow
def test_in_more_noise_wider_bins_find_columns():
    """A thousand records, epsilon 1, two visits of five clients: noise of 90 a bin.

    Ratios are about .7 to 1.9: medians of other columns are further from their own mean in places.
    """
    rng = np.random.default_rng(0)
    means, spreads = np.array([1.0, 1.9, 0.7, -1.1]), np.array([0.2, 0.5, 0.2, 0.3])
    wide = look_first(jnp.ones(4), jnp.ones(4), jnp.asarray(1000 / 90)).step
    np.testing.assert_allclose(wide, 0.4)  # no wider than that, however much noise there is
    assert np.allclose(look_first(jnp.ones(4), jnp.ones(4), jnp.asarray(1000 / 9)).step, 0.1)
    found = {0.1: [], 0.4: []}
    for step, mine in found.items():
        edges = (np.arange(BINS + 1) - BINS // 2) * step
        for _ in range(50):
            ratios_of = means[:, None] + spreads[:, None] * rng.normal(size=(4, 1000))
            counts = np.stack([np.histogram(row, edges)[0] for row in ratios_of])
            noisy = counts + 90 * rng.normal(size=counts.shape)
            mine.append(np.isfinite(known(look(step=step), noisy, 90.0, 1000).found.var))
    assert np.mean(found[0.4]) > 0.9 > 0.75 > np.mean(found[0.1]), found


@pytest.mark.slow
def test_records_on_both_sides_of_zero_are_no_column_far_from_it():
    """A column of ones and minus ones, or one about zero whose scales happen to be alike."""
    rng = np.random.default_rng(0)
    edges = (np.arange(BINS + 1) - BINS // 2) * 0.1
    found = []
    for _ in range(50):
        sides = np.sign(rng.normal(size=(2, 1000)))
        spread = rng.normal(size=(2, 1000))
        counts = [np.histogram(row, edges)[0] for row in [*(sides + 0.1 * spread), *spread]]
        noisy = np.stack(counts) + 60 * rng.normal(size=(4, BINS))
        found.append(np.isfinite(known(look(), noisy, 60.0, 1000).found.var))
    assert np.mean(found) < 0.03


@pytest.mark.slow
def test_noise_does_not_keep_a_narrow_column_from_being_looked_at():
    """Two octaves hold nine tenths of a column whose spread is three tenths of its mean."""
    rng = np.random.default_rng(0)
    edges = np.arange(BINS + 1)
    values = np.concatenate([1 + 0.3 * rng.normal(size=(3, 1000)), rng.normal(size=(3, 1000))])
    octaves = np.log2(np.abs(values)) + 20.5
    counts = np.stack([np.histogram(row, edges)[0] for row in octaves])
    chosen = [
        ratios.narrow(
            jnp.asarray(counts + 60 * rng.normal(size=counts.shape), jnp.float32),
            jnp.asarray(60.0**2),
            jnp.asarray(1000.0),
            jnp.ones(()),
        )
        for _ in range(50)
    ]
    # With no allowance for noise, down to .86 of them were looked at.
    assert np.mean(chosen, axis=0)[:3].min() > 0.95


@pytest.mark.slow
def test_columns_about_zero_are_not_looked_at():
    """Two octaves hold .58 of a normal column; a column of ones alone has no ratio."""
    rng = np.random.default_rng(0)
    octaves = np.clip(np.floor(np.log2(np.abs(rng.normal(size=(3, 2000))))) + 20, 0, BINS - 1)
    counts = (octaves[:, :, None] == np.arange(BINS)).sum(axis=1).astype(np.float32)
    ones = np.where(np.arange(BINS) == 20, 2000.0, 0)

    def looked_at(counts):
        exactly = jnp.zeros(()), jnp.asarray(2000.0), jnp.ones(())
        alike = ratios.narrow(jnp.asarray(counts), *exactly)
        return np.asarray(look_first(jnp.ones(4), alike, jnp.asarray(100.0)).step) > 0

    assert not np.any(looked_at(np.vstack([ones, counts])))
    assert looked_at(np.vstack([ones, counts[:2], ones])).tolist() == [True, False, False, True]


@pytest.mark.slow
def test_the_shape_is_what_is_shared_and_what_is_a_columns_own():
    made, x = scores(4000)
    asked = look()
    found = known(asked, counted(asked, made), 0.0, 4000)
    lengths = x / np.asarray(asked.unit)
    none = jnp.zeros(4)

    def relative(*args):
        return np.asarray(shape_of(*args)) / np.outer(asked.unit, asked.unit)

    shape = relative(asked.unit**2, none, 0.0, found)
    mean, var, _ = map(np.asarray, found.found)
    np.testing.assert_allclose(shape, np.outer(mean, mean) + np.diag(var), rtol=1e-5)
    np.testing.assert_allclose(shape, lengths.T @ lengths / 4000, atol=0.1)
    # Before anything is found it is the scales.
    scales = jnp.arange(1.0, 5.0)
    assert np.array_equal(shape_of(scales, none, 0.0, ratios.nothing(4)), np.diag(scales))
    # What lies further out than looks see is a column's own, too.
    further = relative(asked.unit**2, 3 * asked.unit**2, 0.0, found)
    np.testing.assert_allclose(further, shape + 3 * np.eye(4), rtol=1e-5)
    # And a column of which nothing is seen to vary may be any.
    constant = found._replace(found=found.found._replace(constant=jnp.ones(4)))
    usual = 9 * jnp.min(asked.unit) ** 2
    own = np.maximum(var, usual / asked.unit**2)
    found_own = relative(asked.unit**2, none, usual, constant)
    np.testing.assert_allclose(found_own, np.outer(mean, mean) + np.diag(own), rtol=1e-5)


@pytest.mark.slow
def test_intervals_cover_with_seven_columns_twenty_spreads_off_zero():
    """90 % intervals covered .66 of 60 weights before there were looks, and cover .8 and more."""
    cell = believe.Cell("logistic", (1000,) * 10, 3.0, "far", 15)
    errors = []
    for seed in range(100, 104):  # seeds that no constant was chosen on
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, FisherScoring(), seed)
        errors.append(np.abs(mean - made.truth) / std)
    assert np.mean(np.concatenate(errors) < 1.645) > 0.75


@pytest.mark.slow
def test_what_stands_far_above_a_shape_raises_it():
    """What looks have found holds in all other directions, and what is smaller says nothing."""
    size, rng = 6, np.random.default_rng(0)
    way = np.ones(size) / np.sqrt(size)
    prior = np.diag(4.0 ** np.arange(size))  # the old shape, whatever its units
    axes = coordinates(jnp.asarray(prior, jnp.float32))
    known = 10 * jnp.eye(size)  # noise's eigenvalues end at 2 sqrt(6) / 10
    noise = rng.normal(size=(size, size)) / 10
    noise = (noise + noise.T) / np.sqrt(2)
    quiet, loud = 0.3 * np.eye(size) + noise, np.eye(size) + noise + 9 * np.outer(way, way)
    for seen, expected in ((quiet, np.eye(size)), (loud, np.eye(size) + 9 * np.outer(way, way))):
        shape = axes.information(raised(axes, jnp.asarray(seen, jnp.float32), known))
        np.testing.assert_allclose(shape, expected, atol=0.5)
    assert np.array_equal(raised(axes, jnp.asarray(quiet, jnp.float32), known) > 0, prior > 0)


def rates(x, y, widths):
    w = numpyro.sample("w", dist.Normal(0, widths).to_event(1))
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 6])
def test_looks_forget_no_information_that_has_grown(seed):
    """Raw columns, counts far more dispersed than Poisson's: two of eight runs were thrown.

    Rates grow on the way, and a tenfold information with them. It was forgotten at each visit that
    looked for columns far from zero.
    """
    rng = np.random.RandomState(seed)
    size = 15_000
    columns = [
        np.ones(size),
        rng.randint(1984, 1989, size),
        rng.uniform(25, 64, size),
        11.5 + 2.2 * rng.normal(size=size),
        np.exp(1.1 + 0.5 * rng.normal(size=size)),
        *(rng.rand(5, size) < np.array([0.3, 0.45, 0.75, 0.4, 0.8])[:, None]),
    ]
    x = np.column_stack(columns).astype(float)
    mean, std = x[:, 1:].mean(axis=0), x[:, 1:].std(axis=0)
    weights = 0.15 * rng.normal(size=x.shape[1])
    predictor = 0.9 + (x[:, 1:] - mean) / std @ weights[1:]
    y = rng.poisson(np.exp(predictor) * rng.gamma(0.5, 2, size))
    widths = np.append(np.sqrt(9 + np.sum((mean / std) ** 2)), 1 / std).astype(np.float32)
    result = dppvi.fit(
        rates,
        None,
        [{"x": x[i::10].astype(np.float32), "y": y[i::10].astype(np.int32)} for i in range(10)],
        rng_key=jax.random.key(seed),
        method=FisherScoring(),
        budget=dppvi.PrivacyBudget(10.0, 1e-5),
        model_kwargs={"widths": widths},
        progress_bar=False,
        insecure_noise_seed=seed,
    )
    found = x @ np.asarray(result.posterior.mean["w"], float)

    def score(predictor):
        return np.mean(y * predictor - np.exp(predictor))

    # Before: -76 000 and -1.7 million.
    assert score(found) - score(predictor) > -0.05
