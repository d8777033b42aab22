"""The noise that is drawn is the noise that is accounted, and its keys are secret.

Laws are tested with fixed seeds; each p-value is above `ALPHA` with probability 1 - `ALPHA` for
right noise on a fresh seed. Planted mistakes must be found.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import (
    FullBatch,
    GaussianShardSum,
    GaussianSum,
    PoissonSampling,
    SecretKeys,
    add_noise,
    by_purpose,
)
from tests.grids import grid

ALPHA = 1e-6
DRAWS = 20_000
# Leaves of equal shape, so that noise shared between them would show.
TOTAL = {
    "loc": np.array([1.0, -2.0], np.float32),
    "log_scale": np.array([0.5, 0.0], np.float32),
    "more": {"a": np.zeros((1, 2), np.float32), "b": np.float32(3.0)},
}


def draws(noisy, num_draws=DRAWS, seed=0):
    """Noise on every entry, shape (num_draws, num_entries)."""

    def one(rng_key):
        noise = jax.tree.map(jnp.subtract, noisy(rng_key, TOTAL), TOTAL)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noise)])

    keys = jax.random.split(jax.random.key(seed), num_draws)
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


@functools.cache
def unit_noise():
    return draws(lambda key, total: add_noise(key, total, 1.0))


def largest_correlation_p_value(noise):
    """P-value for independence of entries: normal law of correlations, Bonferroni."""
    num_draws, num_entries = noise.shape
    correlation = np.corrcoef(noise.T)[np.triu_indices(num_entries, 1)]
    z = np.abs(correlation).max() * np.sqrt(num_draws)
    return min(1.0, 2 * correlation.size * stats.norm.sf(z))


class TestLaw:
    @pytest.mark.slow
    @grid("noise_std", [0.3, 25.0], quick=[0])
    def test_has_the_standard_deviation_it_is_given(self, noise_std):
        # The standard error is 0.2 % of it, so that 1 % is 5 standard errors.
        noise = draws(lambda key, total: add_noise(key, total, noise_std))
        assert abs(noise.std() / noise_std - 1) < 0.01
        assert abs(noise.mean()) < 5 * noise_std / np.sqrt(noise.size)
        # Every entry by itself: 7 standard errors, 7 entries.
        np.testing.assert_allclose(noise.std(axis=0), noise_std, rtol=0.035)

    @pytest.mark.slow
    def test_is_normal_in_every_entry(self):
        assert min(stats.kstest(entry, "norm").pvalue for entry in unit_noise().T) > ALPHA

    def test_is_independent_between_leaves_and_entries(self):
        assert largest_correlation_p_value(unit_noise()) > ALPHA

    @pytest.mark.slow
    def test_is_independent_between_keys(self):
        consecutive = np.concatenate([unit_noise()[:-1], unit_noise()[1:]], axis=1)
        assert largest_correlation_p_value(consecutive) > ALPHA

    @pytest.mark.slow
    def test_shared_or_weak_noise_is_found(self):
        # Negative controls: one key for all leaves; noise of another law; noise 2 % too small.
        def one_key(rng_key, total):
            return jax.tree.map(lambda leaf: leaf + jax.random.normal(rng_key, leaf.shape), total)

        def uniform(rng_key, total):
            width = 12**0.5
            return jax.tree.map(
                lambda leaf: leaf + width * (jax.random.uniform(rng_key, leaf.shape) - 0.5), total
            )

        assert largest_correlation_p_value(draws(one_key)) < ALPHA
        assert stats.kstest(draws(uniform)[:, 0], "norm").pvalue < ALPHA
        weak = draws(lambda key, total: add_noise(key, total, 0.98))
        assert abs(weak.std() - 1) > 0.01


class TestAddNoise:
    @pytest.mark.slow
    def test_keeps_structure_and_precision(self):
        with jax.enable_x64(True):
            total = {"a": jnp.zeros((2, 3), jnp.float32), "b": [jnp.zeros((), jnp.float64)]}
            noisy = jax.jit(add_noise)(jax.random.key(0), total, 1.0)
        assert jax.tree.structure(noisy) == jax.tree.structure(total)
        assert noisy["a"].shape == (2, 3)
        assert noisy["a"].dtype == jnp.float32
        assert noisy["b"][0].dtype == jnp.float64

    @pytest.mark.slow
    def test_the_same_key_gives_the_same_noise_and_another_key_other_noise(self):
        noisy = jax.jit(add_noise)
        first, again, other = (noisy(jax.random.key(seed), TOTAL, 1.0)["loc"] for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert np.all(np.asarray(first) != np.asarray(other))

    def test_what_is_asked_for_at_times_has_the_noise_of_all_else(self):
        """And is zero where it is not asked for, whoever else is asked at the same time."""

        def noisy(rng_key, asked):
            flags = {"loc": None, "log_scale": asked, "more": {"a": asked, "b": None}}
            return add_noise(rng_key, TOTAL, 1.0, asked=flags)

        keys, asked = jax.random.split(jax.random.key(0), 2), np.array([True, False])
        expected = jax.jit(jax.vmap(lambda key: add_noise(key, TOTAL, 1.0)))(keys)
        expected["log_scale"] = expected["log_scale"].at[1].set(0)
        expected["more"]["a"] = expected["more"]["a"].at[1].set(0)
        together = jax.jit(jax.vmap(noisy))(keys, asked)
        jax.tree.map(np.testing.assert_array_equal, together, expected)
        for number in range(2):
            alone = jax.jit(noisy)(keys[number], asked[number])
            mine = jax.tree.map(lambda leaf: leaf[number], expected)  # noqa: B023
            jax.tree.map(np.testing.assert_array_equal, alone, mine)

    @pytest.mark.slow
    def test_no_noise_changes_nothing(self):
        noisy = jax.jit(add_noise)(jax.random.key(0), TOTAL, 0.0)
        jax.tree.map(np.testing.assert_array_equal, noisy, TOTAL)


class TestMechanisms:
    """What is drawn, what is accounted and how far a sum moves come from one value."""

    @pytest.mark.parametrize("sampler", [FullBatch(), PoissonSampling(0.1)])
    def test_sums_of_records(self, sampler):
        mechanism = GaussianSum(2.5, 4.0, sampler, num_records=100, physical_size=30)
        assert mechanism.noise_std == 10.0
        assert mechanism.sensitivity("replace_one") == 5.0
        assert mechanism.sensitivity("add_or_remove_one") == 2.5
        assert mechanism.dp_event == sampler.dp_event(4.0, 100, 30)

    def test_shares_of_several_clients_add_up(self):
        alone = GaussianSum(2.5, 4.0, FullBatch(), 100, 100)
        shared = GaussianSum(2.5, 4.0, FullBatch(), 100, 100, num_shares=9)
        assert alone.share_std == alone.noise_std
        assert np.sqrt(9) * shared.share_std == pytest.approx(shared.noise_std, rel=1e-12)
        assert shared.dp_event == alone.dp_event

    @pytest.mark.parametrize("weight", [1.0, 1 / 7])
    def test_sums_of_shards_cost_noise_per_sensitivity(self, weight):
        mechanism = GaussianShardSum(2.5, 4.0, 7, 100, weight)
        assert mechanism.noise_std == pytest.approx(10 * weight)
        assert mechanism.sensitivity("replace_one") == pytest.approx(5 * weight)
        ratio = mechanism.noise_std / mechanism.sensitivity("replace_one")
        assert mechanism.dp_event.noise_multiplier == pytest.approx(2 * ratio, rel=1e-12)


def words(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


class TestSecretKeys:
    def test_comes_from_the_operating_system_unless_a_seed_is_given(self, monkeypatch):
        keys = SecretKeys()
        assert len({words(keys.round_key(0)) for _ in range(50)}) == 50
        asked = []

        def token_bytes(count):
            asked.append(count)
            return bytes(range(count))

        monkeypatch.setattr("secrets.token_bytes", token_bytes)
        key = keys.round_key(3)
        assert asked == [32]
        assert np.asarray(jax.random.key_data(key)).tobytes() == bytes(range(32))
        shorter = SecretKeys(generator="threefry2x32").round_key(3)
        assert asked == [32, 8]
        assert np.asarray(jax.random.key_data(shorter)).tobytes() == bytes(range(8))

    def test_a_seed_makes_it_a_function_of_the_round(self):
        first, again, other = SecretKeys(5), SecretKeys(5), SecretKeys(6)
        rounds = range(100)
        assert [words(first.round_key(r)) for r in rounds] == [
            words(again.round_key(r)) for r in rounds
        ]
        everything = {words(keys.round_key(r)) for keys in (first, other) for r in rounds}
        assert len(everything) == 200

    def test_all_of_a_seed_counts(self):
        # Without 64-bit mode jax.random.key keeps the lowest 32 bits, or makes the seed 0.
        seeds = [0, 1, -1, 2**31, 2**32, 2**32 + 1, 2**40, 2**64, 2**100]
        assert len({words(SecretKeys(seed).round_key(0)) for seed in seeds}) == len(seeds)

    def test_seed_and_round_are_not_run_together(self):
        assert words(SecretKeys(1).round_key(11)) != words(SecretKeys(11).round_key(1))

    @pytest.mark.parametrize("seed", [1.0, "1", True, jax.random.key(0)])
    def test_refuses_what_is_no_seed(self, seed):
        with pytest.raises(ValueError, match="insecure_noise_seed must be a whole number, got"):
            SecretKeys(seed)

    @pytest.mark.parametrize("generator", [None, "chacha20", "threefry2x32"])
    def test_gives_keys_that_jax_takes(self, generator):
        key = SecretKeys(0, generator).round_key(0)
        assert key.shape == ()
        assert jax.random.normal(key, (3,)).shape == (3,)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)

    def test_refuses_other_generators(self):
        with pytest.raises(ValueError, match="generator must be 'chacha20' or 'threefry2x32', got"):
            SecretKeys(generator="rbg")

    def test_purposes_have_keys_of_their_own(self):
        key = SecretKeys(0).round_key(0)
        purposes = by_purpose(key)
        assert len({words(key), words(purposes.noise), words(purposes.batch)}) == 3


# Adam's first step would show nothing but a sign.
ONE_STEP = dppvi.DPOptimization(num_local_steps=1, optimizer=optax.sgd(0.01))


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def released(rng_seed, **options):
    """Mean and width after one round whose release is nearly all noise.

    Noise lies on a grid of about a thousand steps a standard deviation: two draws agree in one
    number once in 3 600 times, in both once in 10^7.
    """
    result = dppvi.fit(
        normal_mean,
        None,
        {"y": np.linspace(-1, 1, 20)},
        rng_key=jax.random.key(rng_seed),
        clients=1,
        method=ONE_STEP,
        budget=dppvi.PrivacyBudget(0.5),
        num_rounds=1,
        progress_bar=False,
        **options,
    )
    return float(result.posterior.mean["mu"]), float(result.posterior.stddev["mu"])


def test_the_noise_of_a_fit_does_not_derive_from_its_rng_key():
    assert list(inspect.signature(SecretKeys.round_key).parameters) == ["self", "round_number"]
    # The key is published and the noise must not be computable from it.
    assert len({released(0) for _ in range(3)}) == 3
    # With a seed, everything is a function of the seed and the key.
    assert released(0, insecure_noise_seed=1) == released(0, insecure_noise_seed=1)
    assert released(0, insecure_noise_seed=1) != released(0, insecure_noise_seed=2)
