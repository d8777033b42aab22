"""The sampler that runs is the sampler that is accounted.

The laws are tested with fixed seeds. Each test of a law has a p-value above `ALPHA` with
probability 1 - `ALPHA` for a right sampler on a fresh seed; planted wrong samplers must fail.
"""

import itertools
import math
from fractions import Fraction

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from numpyro_dppvi.privacy import Batch, FullBatch, PoissonSampling

ALPHA = 1e-6
WORD = 2**30  # words of 30 random bits

seeds = st.integers(0, 2**32 - 1)


def inclusion(draw, num_draws, num_records, seed=0):
    """Which records are in each draw: booleans of shape (num_draws, num_records)."""

    def one(rng_key):
        batch = draw(rng_key)
        return jnp.zeros(num_records, bool).at[batch.rows].max(batch.mask)

    keys = jax.random.split(jax.random.key(seed), num_draws)
    return np.asarray(jax.jit(jax.vmap(one))(keys))


def two_sided(distribution, value):
    """P-value of a statistic that may be too small as well as too large."""
    return 2 * min(distribution.cdf(value), distribution.sf(value))


def products_p_value(left, right, prob):
    """P-value for independence of columns that are in pairs: normal law, Bonferroni."""
    correlation = np.mean((left - prob) * (right - prob), axis=0) / (prob * (1 - prob))
    z = np.abs(correlation).max() * math.sqrt(len(left))
    return min(1, 2 * correlation.size * stats.norm.sf(z))


def law_p_values(steps, prob):
    """P-values for everything that Poisson sampling is, from (runs, steps, records)."""
    num_records = steps.shape[-1]
    draws = steps.reshape(-1, num_records).astype(float)
    variance = len(draws) * prob * (1 - prob)
    chi_squared = np.sum((draws.sum(axis=0) - len(draws) * prob) ** 2) / variance
    one, other = np.array(list(itertools.combinations(range(num_records), 2))).T
    sizes = np.bincount(draws.sum(axis=1).astype(int), minlength=num_records + 1)
    expected = len(draws) * stats.binom.pmf(np.arange(num_records + 1), num_records, prob)
    return {
        "inclusion of each record": two_sided(stats.chi2(num_records), chi_squared),
        "size of the batch": chi_squared_p_value(sizes, expected),
        "pairs of records": products_p_value(draws[:, one], draws[:, other], prob),
        "one record in consecutive steps": products_p_value(
            steps[:, :-1].reshape(-1, num_records), steps[:, 1:].reshape(-1, num_records), prob
        ),
    }


def chi_squared_p_value(counts, expected):
    """Pearson's test, rare cells lumped together."""
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:
        counts, expected = counts[:-1], expected[:-1]
    statistic = np.sum((counts - expected) ** 2 / expected)
    return stats.chi2(len(counts) - 1).sf(statistic)


def poisson_steps(prob, num_records, physical_size, runs=4000, num_steps=5):
    sampler = PoissonSampling(prob)

    def draw(rng_key):
        return sampler.draw(rng_key, jnp.asarray(num_records), num_records, physical_size)

    draws = inclusion(draw, runs * num_steps, num_records)
    return draws.reshape(runs, num_steps, num_records)


class TestPoissonLaw:
    @pytest.mark.parametrize(("prob", "num_records"), [(0.2, 30), (0.05, 40), (0.7, 15)])
    def test_is_an_independent_coin_for_every_record_and_step(self, prob, num_records):
        # Without truncation: 12 p-values, so that a right sampler fails with probability 2e-5.
        p_values = law_p_values(poisson_steps(prob, num_records, num_records), prob)
        assert min(p_values.values()) > ALPHA, p_values

    def test_the_padded_size_leaves_the_law_alone(self):
        sampler = PoissonSampling(0.2)
        size = sampler.physical_size([60])
        assert size < 60
        p_values = law_p_values(poisson_steps(0.2, 60, size), 0.2)
        assert min(p_values.values()) > ALPHA, p_values

    def test_slices_of_a_shuffled_epoch_are_something_else(self):
        # The negative control, and the best-known bug of the field: every record comes once in
        # five steps, and every batch has six rows.
        def epoch(rng_key):
            order = jax.random.permutation(rng_key, 30).reshape(5, 6)
            return jnp.zeros((5, 30), bool).at[jnp.arange(5)[:, None], order].set(True)

        steps = np.asarray(jax.vmap(epoch)(jax.random.split(jax.random.key(0), 4000)))
        p_values = law_p_values(steps, 0.2)
        assert p_values["one record in consecutive steps"] < ALPHA
        assert p_values["size of the batch"] < ALPHA
        assert p_values["inclusion of each record"] < ALPHA  # far too even

    def test_batches_of_one_size_are_something_else(self):
        def fixed_size(rng_key):
            return Batch(jax.random.permutation(rng_key, 30)[:6], jnp.ones(6, bool))

        steps = inclusion(fixed_size, 20_000, 30).reshape(4000, 5, 30)
        p_values = law_p_values(steps, 0.2)
        assert p_values["one record in consecutive steps"] > ALPHA
        assert p_values["size of the batch"] < ALPHA
        assert p_values["pairs of records"] < ALPHA

    def test_a_biased_coin_is_found(self):
        p_values = law_p_values(poisson_steps(0.21, 30, 30), 0.2)
        assert p_values["inclusion of each record"] < ALPHA
        assert p_values["size of the batch"] < ALPHA


def truncation_p_value(draws, prob, physical_size):
    """Tests the whole law of a truncated Poisson batch, subset by subset."""
    num_records = draws.shape[1]
    codes = np.bincount(draws @ 2 ** np.arange(num_records), minlength=2**num_records)
    sizes = np.array([code.bit_count() for code in range(2**num_records)])
    probs = np.where(sizes < physical_size, prob**sizes * (1 - prob) ** (num_records - sizes), 0.0)
    # Cut or just full: all subsets of that size are equally likely.
    full = stats.binom.sf(physical_size - 1, num_records, prob)
    probs[sizes == physical_size] = full / math.comb(num_records, physical_size)
    assert math.isclose(probs.sum(), 1, rel_tol=1e-9)
    assert codes[sizes > physical_size].sum() == 0
    return chi_squared_p_value(codes[probs > 0], len(draws) * probs[probs > 0])


class TestTruncation:
    # 8 records of which at most 3 are kept: 93 subsets, cut in 41 % of the draws.
    PROB, RECORDS, SIZE, DRAWS = 0.4, 8, 3, 60_000

    def test_keeps_a_uniformly_random_subset(self):
        sampler = PoissonSampling(self.PROB)
        draws = inclusion(
            lambda key: sampler.draw(key, jnp.asarray(8), 8, self.SIZE), self.DRAWS, self.RECORDS
        )
        assert truncation_p_value(draws, self.PROB, self.SIZE) > ALPHA

    def test_keeping_the_first_rows_is_something_else(self):
        def first_rows(rng_key):
            up = jax.random.bernoulli(rng_key, self.PROB, (self.RECORDS,))
            return Batch(jnp.arange(self.RECORDS), up & (jnp.cumsum(up) <= self.SIZE))

        draws = inclusion(first_rows, self.DRAWS, self.RECORDS)
        assert truncation_p_value(draws, self.PROB, self.SIZE) < ALPHA


class TestPoissonBatch:
    @settings(deadline=None, max_examples=50)
    @given(seeds, st.integers(0, 12), st.sampled_from([0.05, 0.5, 0.99]), st.data())
    def test_never_holds_padding_nor_a_row_twice(self, seed, num_records, prob, data):
        physical_size = data.draw(st.integers(1, 12))
        batch = PoissonSampling(prob).draw(
            jax.random.key(seed), jnp.asarray(num_records), 12, physical_size
        )
        rows, mask = np.asarray(batch.rows), np.asarray(batch.mask)
        assert rows.shape == mask.shape == (physical_size,)
        assert len(set(rows.tolist())) == physical_size
        assert np.all((rows >= 0) & (rows < 12))
        assert np.all(rows[mask] < num_records)

    def test_is_a_function_of_the_key(self):
        sampler = PoissonSampling(0.5)
        first, again, other = (
            sampler.draw(jax.random.key(seed), jnp.asarray(50), 50, 50) for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first.rows, again.rows)
        np.testing.assert_array_equal(first.mask, again.mask)
        assert np.any(np.asarray(first.rows) != np.asarray(other.rows))

    @pytest.mark.parametrize("prob", [0.1, 1 / 3, 0.25, 0.5, 2**-30, 1e-12, 0.999, 1 - 2**-53])
    def test_the_true_probability_is_never_above_the_accounted_one(self, prob, monkeypatch):
        # Exactly those words count that are below the threshold; how many there are is the
        # probability in units of 2^-30.
        threshold = math.floor(Fraction(prob) * WORD)
        assert Fraction(threshold, WORD) <= Fraction(prob)
        assert Fraction(prob) - Fraction(threshold, WORD) < Fraction(1, WORD)
        words = sorted(
            {0, max(0, threshold - 1), threshold, min(threshold + 1, WORD - 1), WORD - 1}
        )
        present = included_words(monkeypatch, prob, words)
        assert present == {word for word in words if word < threshold}

    @settings(deadline=None)
    @given(
        st.lists(
            st.integers(0, 20) | st.integers(0, WORD - 1), min_size=1, max_size=8, unique=True
        ),
        st.data(),
    )
    def test_the_smallest_words_stay(self, words, data):
        # Random words in any order: what is kept does not depend on where a record stands.
        physical_size = data.draw(st.integers(1, len(words)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            present = included_words(monkeypatch, 1 - 2**-53, words, physical_size)
        assert present == set(sorted(words)[:physical_size]) - {WORD - 1}

    @pytest.mark.parametrize("prob", [0, 1, 1.0, -0.1, math.nan, "half", True])
    def test_refuses_what_is_no_probability(self, prob):
        with pytest.raises(
            ValueError, match="sampling_prob must lie strictly between 0 and 1, got"
        ):
            PoissonSampling(prob)


def included_words(monkeypatch, prob, words, physical_size=None):
    """The words whose records are in the batch, when the generator gives these words."""
    # The generator gives 32 bits; the two that are thrown away are set, and must not matter.
    given_bits = jnp.asarray([(word << 2) | 3 for word in words], jnp.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda *arguments: given_bits)
    size = len(words) if physical_size is None else physical_size
    batch = PoissonSampling(prob).draw(jax.random.key(0), jnp.asarray(len(words)), len(words), size)
    return {words[row] for row, there in zip(*map(np.asarray, batch), strict=True) if there}


class TestPhysicalSize:
    @given(st.floats(1e-6, 0.999), st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
    def test_is_hardly_ever_exceeded_and_not_wasteful(self, prob, sizes):
        size, largest = PoissonSampling(prob).physical_size(sizes), max(sizes)
        assert 1 <= size <= largest
        assert stats.binom.sf(size, largest, prob) < 1 / 3e6
        mean, deviation = largest * prob, math.sqrt(largest * prob * (1 - prob))
        assert size == largest or size < mean + 5 * deviation + 5

    def test_is_the_largest_client_for_full_batches(self):
        assert FullBatch().physical_size([3, 9, 4]) == 9


class TestEvents:
    def test_poisson_that_cannot_be_cut_is_plain(self):
        event = PoissonSampling(0.1).dp_event(2.0, num_records=50, physical_size=50)
        assert event == dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(2.0))
        # A smaller client in the same run.
        assert PoissonSampling(0.1).dp_event(2.0, 10, 50) == event

    def test_poisson_that_can_be_cut_says_so(self):
        event = PoissonSampling(0.1).dp_event(2.0, num_records=51, physical_size=50)
        assert event == dpa.TruncatedSubsampledGaussianDpEvent(51, 0.1, 50, 2.0)

    def test_a_full_batch_is_a_plain_gaussian(self):
        assert FullBatch().dp_event(2.0, 51, 60) == dpa.GaussianDpEvent(2.0)

    def test_samplers_are_values(self):
        assert PoissonSampling(0.1) == PoissonSampling(0.1) != PoissonSampling(0.2)
        assert len({PoissonSampling(0.1), PoissonSampling(0.1), FullBatch(), FullBatch()}) == 2
        assert (FullBatch().sampling_prob, PoissonSampling(0.1).sampling_prob) == (1.0, 0.1)


def test_a_full_batch_is_every_record_and_no_padding():
    batch = FullBatch().draw(jax.random.key(0), jnp.asarray(3), 5, 5)
    assert batch.rows is None
    np.testing.assert_array_equal(batch.mask, [True, True, True, False, False])
