"""The sampler that runs is the sampler that is accounted.

The laws are tested with fixed seeds. Each test of a law has a p-value above `ALPHA` with
probability 1 - `ALPHA` for a right sampler on a fresh seed; planted wrong samplers must fail.
"""

import functools
import itertools
import math
from fractions import Fraction

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import Batch, FixedSizeSampling, FullBatch, PoissonSampling, sampling
from tests.grids import grid

ALPHA = 1e-6
WORD = 2**30  # words of 30 random bits

seeds = st.integers(0, 2**32 - 1)


def drawn(sampler, rng_key, num_records, capacity, physical_size):
    """A batch, drawn as a client draws it."""
    prob = sampler.inclusion_prob(num_records)
    return sampler.draw(rng_key, jnp.asarray(num_records), prob, capacity, physical_size)


drawn_at_once = jax.jit(drawn, static_argnums=(0, 3, 4))


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
        return drawn(sampler, rng_key, num_records, num_records, physical_size)

    draws = inclusion(draw, runs * num_steps, num_records)
    return draws.reshape(runs, num_steps, num_records)


class TestPoissonLaw:
    @pytest.mark.slow
    @grid(("prob", "num_records"), [(0.2, 30), (0.05, 40), (0.7, 15)], quick=[2])
    def test_is_an_independent_coin_for_every_record_and_step(self, prob, num_records):
        # Without truncation: 12 p-values, so that a right sampler fails with probability 2e-5.
        p_values = law_p_values(poisson_steps(prob, num_records, num_records), prob)
        assert min(p_values.values()) > ALPHA, p_values

    @pytest.mark.slow
    def test_the_padded_size_leaves_the_law_alone(self):
        sampler = PoissonSampling(0.2)
        size = sampler.physical_size([60])
        assert size < 60
        p_values = law_p_values(poisson_steps(0.2, 60, size), 0.2)
        assert min(p_values.values()) > ALPHA, p_values

    @pytest.mark.slow
    def test_slices_of_a_shuffled_epoch_are_something_else(self):
        # The negative control, and the best-known bug of the field: every record comes once in
        # five steps, and every batch has six rows.
        p_values = law_p_values(epoch_steps(30, num_steps=5), 0.2)
        assert p_values["one record in consecutive steps"] < ALPHA
        assert p_values["size of the batch"] < ALPHA
        assert p_values["inclusion of each record"] < ALPHA  # far too even

    @pytest.mark.slow
    def test_batches_of_one_size_are_something_else(self):
        def fixed_size(rng_key):
            return Batch(jax.random.permutation(rng_key, 30)[:6], jnp.ones(6, bool))

        steps = inclusion(fixed_size, 20_000, 30).reshape(4000, 5, 30)
        p_values = law_p_values(steps, 0.2)
        assert p_values["one record in consecutive steps"] > ALPHA
        assert p_values["size of the batch"] < ALPHA
        assert p_values["pairs of records"] < ALPHA

    @pytest.mark.slow
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

    @pytest.mark.slow
    def test_keeps_a_uniformly_random_subset(self):
        sampler = PoissonSampling(self.PROB)
        draws = inclusion(
            lambda key: drawn(sampler, key, 8, 8, self.SIZE), self.DRAWS, self.RECORDS
        )
        assert truncation_p_value(draws, self.PROB, self.SIZE) > ALPHA

    @pytest.mark.slow
    def test_keeping_the_first_rows_is_something_else(self):
        def first_rows(rng_key):
            up = jax.random.bernoulli(rng_key, self.PROB, (self.RECORDS,))
            return Batch(jnp.arange(self.RECORDS), up & (jnp.cumsum(up) <= self.SIZE))

        draws = inclusion(first_rows, self.DRAWS, self.RECORDS)
        assert truncation_p_value(draws, self.PROB, self.SIZE) < ALPHA


def fixed_size_p_values(steps, batch_size):
    """P-values for everything that fixed-size sampling is, from (runs, steps, records)."""
    num_records = steps.shape[-1]
    prob = batch_size / num_records
    draws = steps.reshape(-1, num_records)
    assert np.all(draws.sum(axis=1) == batch_size)
    # Counts of records add up to a fixed number, hence one degree of freedom less.
    variance = len(draws) * prob * (1 - prob) * num_records / (num_records - 1)
    chi_squared = np.sum((draws.sum(axis=0) - len(draws) * prob) ** 2) / variance
    codes = np.bincount(draws @ 2 ** np.arange(num_records), minlength=2**num_records)
    codes = codes[[code.bit_count() == batch_size for code in range(2**num_records)]]
    later = {
        f"one record {lag} steps later": products_p_value(
            steps[:, :-lag].reshape(-1, num_records), steps[:, lag:].reshape(-1, num_records), prob
        )
        for lag in range(1, steps.shape[1])
    }
    return {
        "inclusion of each record": two_sided(stats.chi2(num_records - 1), chi_squared),
        "every subset": chi_squared_p_value(codes, np.full(len(codes), len(draws) / len(codes))),
        **later,
    }


def fixed_size_steps(batch_size, num_records, capacity, runs=4000, num_steps=4):
    sampler = FixedSizeSampling(batch_size)

    def draw(rng_key):
        return drawn(sampler, rng_key, num_records, capacity, batch_size)

    draws = inclusion(draw, runs * num_steps, capacity)
    assert not draws[:, num_records:].any()
    return draws[:, :num_records].reshape(runs, num_steps, num_records)


def epoch_steps(num_records, num_steps, runs=4000):
    """What a shuffled epoch gives, cut into consecutive slices."""

    def epoch(rng_key):
        order = jax.random.permutation(rng_key, num_records).reshape(num_steps, -1)
        drawn = jnp.zeros((num_steps, num_records), bool)
        return drawn.at[jnp.arange(num_steps)[:, None], order].set(True)

    return np.asarray(jax.jit(jax.vmap(epoch))(jax.random.split(jax.random.key(0), runs)))


class TestFixedSizeLaw:
    # 12 p-values of right samplers here, which fail with probability 2e-5 on fresh seeds.
    @pytest.mark.parametrize(("batch_size", "num_records", "capacity"), [(3, 12, 12), (4, 9, 14)])
    def test_is_a_uniformly_random_subset_drawn_afresh(self, batch_size, num_records, capacity):
        steps = fixed_size_steps(batch_size, num_records, capacity)
        p_values = fixed_size_p_values(steps, batch_size)
        assert min(p_values.values()) > ALPHA, p_values

    def test_slices_of_a_shuffled_epoch_are_something_else(self):
        # The negative control: each slice by itself has the right law, and yet they are not
        # drawn afresh, so that neither this sampler's nor Poisson's accounting covers them.
        p_values = fixed_size_p_values(epoch_steps(12, num_steps=4), batch_size=3)
        assert p_values["every subset"] > ALPHA
        for lag in (1, 2, 3):
            assert p_values[f"one record {lag} steps later"] < ALPHA

    def test_a_preference_for_early_rows_is_found(self):
        # As of a sampler that breaks ties by place: 8 different words for 12 records.
        def tied(rng_key):
            words = jax.random.bits(rng_key, (12,), jnp.uint32) >> 29
            return Batch(jnp.argsort(words, stable=True)[:3], jnp.ones(3, bool))

        steps = inclusion(tied, 16_000, 12).reshape(4000, 4, 12)
        p_values = fixed_size_p_values(steps, 3)
        assert p_values["inclusion of each record"] < ALPHA
        assert p_values["every subset"] < ALPHA

    def test_equal_words_prefer_nobody(self, monkeypatch):
        # With words of 3 bits most draws have ties; up to 9 records may share a word.
        monkeypatch.setattr(sampling, "_BITS", 3)
        monkeypatch.setattr(sampling, "_MOST_EQUALS", 9)
        p_values = fixed_size_p_values(fixed_size_steps(3, 12, 12), 3)
        assert min(p_values.values()) > ALPHA, p_values

    @settings(max_examples=30)
    @given(seeds, st.integers(0, 9), st.sampled_from([1, 3, 12]))
    def test_every_row_is_a_record_and_none_comes_twice(self, seed, more, batch_size):
        num_records = min(batch_size + more, 12)
        batch = drawn_at_once(
            FixedSizeSampling(batch_size), jax.random.key(seed), num_records, 12, batch_size
        )
        rows, mask = np.asarray(batch.rows), np.asarray(batch.mask)
        assert rows.shape == mask.shape == (batch_size,)
        assert mask.all()
        assert len(set(rows.tolist())) == batch_size
        assert np.all((rows >= 0) & (rows < num_records))


class TestWhatClientsRun:
    """The batches of a fit, read off what it releases: law and independence end to end."""

    CLIENTS, STEPS, RECORDS = 400, 4, 12

    def batches(self, sampler):
        """Which record is in which step of which client: (clients, steps, records)."""

        def model(x, y):
            theta = numpyro.sample("theta", dist.Normal(0, 1).expand([self.RECORDS]).to_event(1))
            with numpyro.plate("records", y.shape[0]):
                numpyro.sample("y", dist.Normal(x @ theta, 1), obs=y)

        # A far outlier each, so that every record's clipped gradient is its own unit vector. The
        # learning rates are powers of two: what a client moved says which records came when.
        one = {
            "x": np.eye(self.RECORDS, dtype=np.float32),
            "y": np.full(self.RECORDS, 1e6, np.float32),
        }
        rate = 1e-4
        steps = optax.sgd(lambda step: rate * 2.0**step)
        result = dppvi.fit(
            model,
            None,
            [one] * self.CLIENTS,
            rng_key=jax.random.key(0),
            method=dppvi.DPOptimization(1.0, self.STEPS, steps, sampler),
            budget=dppvi.PrivacyBudget(math.inf),
            schedule=dppvi.synchronous,
            num_rounds=1,
            damping=1.0,
            progress_bar=False,
            insecure_noise_seed=0,
        )
        moved = np.asarray(result.state.factors["theta"].linear)
        prob = sampler.inclusion_prob(self.RECORDS)
        codes = np.rint(moved * prob / rate).astype(int)
        np.testing.assert_allclose(moved * prob / rate, codes, atol=0.1)
        assert codes.min() >= 0
        assert codes.max() < 2**self.STEPS
        return np.stack([codes >> step & 1 for step in range(self.STEPS)], axis=1)

    @pytest.mark.slow
    def test_of_fixed_size(self):
        steps = self.batches(FixedSizeSampling(3))
        p_values = fixed_size_p_values(steps, 3)
        assert min(p_values.values()) > ALPHA, p_values
        # No two clients drew alike, nor did one client in two steps.
        across = steps.reshape(self.CLIENTS // 2, 2, self.STEPS, self.RECORDS)
        assert products_p_value(across[:, 0], across[:, 1], 3 / 12) > ALPHA

    @pytest.mark.slow
    def test_of_coins(self):
        steps = self.batches(PoissonSampling(0.25))
        p_values = law_p_values(steps, 0.25)
        assert min(p_values.values()) > ALPHA, p_values
        across = steps.reshape(self.CLIENTS // 2, 2, self.STEPS, self.RECORDS)
        assert products_p_value(across[:, 0], across[:, 1], 0.25) > ALPHA

    @pytest.mark.slow
    def test_of_full_batches(self):
        assert self.batches(FullBatch()).all()


class TestPoissonBatch:
    @settings(max_examples=50)
    @given(
        seeds,
        st.integers(0, 12),
        st.sampled_from([0.05, 0.5, 0.99]),
        st.sampled_from([1, 5, 12]),  # each is compiled
    )
    def test_never_holds_padding_nor_a_row_twice(self, seed, num_records, prob, physical_size):
        batch = drawn_at_once(
            PoissonSampling(prob), jax.random.key(seed), num_records, 12, physical_size
        )
        rows, mask = np.asarray(batch.rows), np.asarray(batch.mask)
        assert rows.shape == mask.shape == (physical_size,)
        assert len(set(rows[mask].tolist())) == mask.sum()
        assert np.all((rows >= 0) & (rows < 12))
        assert np.all(rows[mask] < num_records)

    def test_is_a_function_of_the_key(self):
        sampler = PoissonSampling(0.5)
        first, again, other = (
            drawn_at_once(sampler, jax.random.key(seed), 50, 50, 50) for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first.rows, again.rows)
        np.testing.assert_array_equal(first.mask, again.mask)
        assert np.any(np.asarray(first.rows) != np.asarray(other.rows))

    @pytest.mark.parametrize("prob", [0.1, 1 / 3, 0.25, 0.5, 1e-8, 0.999, 1 - 2**-53])
    def test_the_true_probability_is_never_above_the_accounted_one(self, prob):
        # The words that count are those below a threshold; how many there are is the probability
        # in units of 2^-30. The program knows the probability to 32 bits, or to 64.
        most = math.floor(Fraction(prob) * WORD)
        for x64, bits in ((False, 22), (True, 50)):
            least = math.floor(Fraction(prob) * (1 - Fraction(1, 2**bits)) * WORD) - 1
            words = sorted({0, max(0, least - 1), most, min(most + 1, WORD - 1), WORD - 1})
            with jax.enable_x64(x64):
                present = included_words(prob, words)
            assert present <= {word for word in words if word < most}
            assert present >= {word for word in words if word < least}

    @given(
        st.lists(
            st.integers(0, 20) | st.integers(0, WORD - 100), min_size=6, max_size=6, unique=True
        ),
        st.sampled_from([1, 4, 6]),  # each is compiled
    )
    def test_the_smallest_words_stay(self, words, physical_size):
        # Random words in any order: what is kept does not depend on where a record stands.
        present = included_words(1 - 2**-53, words, physical_size)
        assert present == set(sorted(words)[:physical_size])

    @pytest.mark.parametrize("prob", [0, 1, 1.0, -0.1, math.nan, "half", True])
    def test_refuses_what_is_no_probability(self, prob):
        with pytest.raises(
            ValueError, match="sampling_prob must lie strictly between 0 and 1, got"
        ):
            PoissonSampling(prob)


@functools.partial(jax.jit, static_argnums=(0, 2))
def drawn_by(sampler, bits, physical_size):
    """A batch, when the generator gives these bits."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(jax.random, "bits", lambda *arguments: bits)
        return drawn(sampler, jax.random.key(0), len(bits), len(bits), physical_size)


def included_words(prob, words, physical_size=None):
    """The words whose records are in the batch, when the generator gives these words."""
    # The generator gives 32 bits; the two that are thrown away are set, and must not matter.
    bits = np.array([(word << 2) | 3 for word in words], np.uint32)
    size = len(words) if physical_size is None else physical_size
    batch = drawn_by(PoissonSampling(prob), bits, size)
    return {words[row] for row, there in zip(*map(np.asarray, batch), strict=True) if there}


class TestPhysicalSize:
    @pytest.mark.slow
    @given(st.floats(1e-6, 0.999), st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
    def test_is_hardly_ever_exceeded_and_not_wasteful(self, prob, sizes):
        size, largest = PoissonSampling(prob).physical_size(sizes), max(sizes)
        assert 1 <= size <= largest
        assert stats.binom.sf(size, largest, prob) < 1 / 3e6
        mean, deviation = largest * prob, math.sqrt(largest * prob * (1 - prob))
        assert size == largest or size < mean + 5 * deviation + 5

    def test_is_the_largest_client_for_full_batches(self):
        assert FullBatch().physical_size([3, 9, 4]) == 9

    def test_is_the_batch_for_batches_of_fixed_size(self):
        assert FixedSizeSampling(3).physical_size([3, 9, 4]) == 3


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

    def test_a_batch_of_fixed_size_is_a_share_of_the_clients_records(self):
        event = FixedSizeSampling(10).dp_event(2.0, num_records=50, physical_size=10)
        assert event == dpa.SampledWithoutReplacementDpEvent(50, 10, dpa.GaussianDpEvent(2.0))

    def test_samplers_are_values(self):
        assert PoissonSampling(0.1) == PoissonSampling(0.1) != PoissonSampling(0.2)
        assert FixedSizeSampling(3) == FixedSizeSampling(np.int64(3)) != FixedSizeSampling(4)
        samplers = [PoissonSampling(0.1), FullBatch(), FixedSizeSampling(3)]
        assert len(set(samplers + [type(s)(**vars(s)) for s in samplers])) == 3

    def test_the_probability_is_that_of_a_record(self):
        assert FullBatch().inclusion_prob(8) == 1.0
        assert PoissonSampling(0.1).inclusion_prob(8) == 0.1
        assert FixedSizeSampling(3).inclusion_prob(8) == 3 / 8
        of_clients = FixedSizeSampling(3).inclusion_prob(jnp.array([3, 8]))
        np.testing.assert_allclose(of_clients, [1, 3 / 8])


class TestRefusals:
    def test_a_batch_is_not_larger_than_a_client(self):
        sampler = FixedSizeSampling(10)
        sampler.check([10, 11], "replace_one")
        sentence = r"batch_size must be at most .* got 10 for client 1's 9 records.*Sampling\(9\)"
        with pytest.raises(ValueError, match=sentence):
            sampler.check([10, 9], "replace_one")
        with pytest.raises(ValueError, match="batch_size must be at most a client's records"):
            sampler.dp_event(1.0, 9, 10)

    @pytest.mark.parametrize("sizes", [[10], [10, 30]])
    def test_fixed_size_goes_with_replaced_records_alone(self, sizes):
        # Even where the batch is everything: a neighbour would have one record more.
        with pytest.raises(ValueError, match=r"fixed size .*replace_one.* got .*add_or_rem"):
            FixedSizeSampling(10).check(sizes, "add_or_remove_one")
        for other in (FullBatch(), PoissonSampling(0.1)):
            other.check(sizes, "add_or_remove_one")

    @pytest.mark.parametrize("batch_size", [0, -1, 2.0, "3", True, None])
    def test_a_batch_size_is_a_whole_number(self, batch_size):
        with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
            FixedSizeSampling(batch_size)


def test_a_full_batch_is_every_record_and_no_padding():
    batch = drawn(FullBatch(), jax.random.key(0), 3, 5, 5)
    assert batch.rows is None
    np.testing.assert_array_equal(batch.mask, [True, True, True, False, False])
