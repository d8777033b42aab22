"""Discrete Gaussian noise: the law of the draws, exact arithmetic, runs, refusals.

OpenDP takes no seed, so that statistics here are bounds that fail less than once in 10^8 times.
"""

import json
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi import privacy
from numpyro_dppvi.privacy import noise_laws
from tests.dry import dry_rounds

opendp = pytest.importorskip("opendp.prelude", reason="needs the extra: numpyro-dppvi[exact]")

NOISE = dppvi.privacy.DiscreteGaussian()
BUDGET = dppvi.PrivacyBudget(1.0, 1e-5)
METHODS = [
    dppvi.methods.ParameterPerturbation(noise=NOISE, num_local_steps=2),
    dppvi.methods.LocalAveraging(4, noise=NOISE, num_local_steps=2),
    dppvi.VirtualClients(4, noise=NOISE, num_local_steps=2),
]
RNG = np.random.default_rng(0)
DATA = [
    {"X": (X := RNG.normal(size=(size, 2)).astype(np.float32)), "y": (X[:, 0] > 0).astype(int)}
    for size in (30, 20, 10)
]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)


def logistic(X, y):
    with numpyro.plate("features", X.shape[1]):
        w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def run(method=METHODS[2], **arguments):
    arguments = {"budget": BUDGET, "num_rounds": 2, "progress_bar": False, **arguments}
    return dppvi.fit(logistic, None, DATA, rng_key=jax.random.key(0), method=method, **arguments)


def step_noise(integers, step):
    """One visit's noise, of integers that were drawn elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_laws, "integers", lambda scale, count: np.asarray(integers, np.int64))
        drawn = noise_laws.drawn([1.0], [step], np.array([0]), len(integers))
    return jax.tree.map(lambda leaf: leaf[0], drawn)


@pytest.fixture
def draws(monkeypatch):
    """All that is drawn, with what was asked for."""
    seen = []

    def watched(scale, count, draw=noise_laws.integers):
        seen.append((scale, draw(scale, count)))
        return seen[-1][1]

    monkeypatch.setattr(noise_laws, "integers", watched)
    return seen


class TestLaw:
    @pytest.mark.slow
    def test_many_steps_are_a_gaussian_of_the_right_size(self):
        count, scale = 20_000, 1e7
        noise = noise_laws.integers(scale, count) / scale
        assert abs(noise.mean()) < 6 / count**0.5
        assert abs(noise.var() - 1) < 6 * (2 / count) ** 0.5  # a twentieth too little would show
        assert stats.kstest(noise, "norm").pvalue > 1e-9
        pairs = np.mean(noise[:-1] * noise[1:])
        assert abs(pairs) < 6 / count**0.5

    @pytest.mark.slow
    def test_few_steps_have_the_probabilities_of_the_discrete_law(self):
        values = np.arange(-4, 5)
        expected = np.exp(-(values**2) / 2)
        expected *= 20_000 / np.exp(-(np.arange(-30, 31) ** 2) / 2).sum()
        noise = noise_laws.integers(1.0, 20_000)
        counts = np.array([np.sum(noise == value) for value in values])
        statistic = np.sum((counts - expected) ** 2 / expected)
        assert stats.chi2(len(values)).sf(statistic) > 1e-9
        assert noise.dtype == np.int64

    @pytest.mark.parametrize("noise", [0.7, 5.0, 100.0])
    def test_opendp_proves_what_is_charged(self, noise):
        mechanism = privacy.GaussianShardSum(0.3, noise, 5, 50, noise=NOISE)
        step = noise_laws.grid_step(0.3)
        space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
        opendp.enable_features("contrib")
        scale = noise_laws.std_in_steps(mechanism.unweighted_std, 0.3)
        theirs = opendp.m.make_gaussian(*space, scale).map(
            mechanism.sensitivity("replace_one") / step
        )
        assert theirs == pytest.approx(mechanism.dp_event.rho, rel=1e-12)

    @pytest.mark.parametrize("weight", [1.0, 0.125])
    def test_what_is_released_has_the_plans_standard_deviation(self, weight):
        mechanism = privacy.GaussianShardSum(0.3, 4.0, 8, 80, weight, contributions=2, noise=NOISE)
        noise = privacy.draw_noise([mechanism], np.array([0]), 20_000)
        mine = jax.tree.map(lambda leaf: leaf[0], noise)
        zeros = jnp.zeros((3, 20_000))
        found = noise_laws.released(zeros, mine, jnp.asarray(weight), like=zeros[0])
        assert found.dtype == zeros.dtype
        share = float(jnp.var(found)) / mechanism.noise_std**2
        assert abs(share - 1) < 6 * (2 / 20_000) ** 0.5

    def test_more_than_64_bits_hold_is_refused(self):
        loud = privacy.GaussianShardSum(0.3, 1e8, 5, 50, noise=NOISE)
        with pytest.raises(ValueError, match="noise must be at most"):
            loud.check(BUDGET)
        privacy.GaussianShardSum(0.3, 1e7, 5, 50, noise=NOISE).check(BUDGET)


class TestArithmetic:
    @given(st.floats(1e-6, 1e6))
    def test_a_step_is_a_power_of_two_and_a_millionth_of_the_norm_at_most(self, clip_norm):
        step = noise_laws.grid_step(clip_norm)
        assert np.frexp(step)[0] == 0.5
        assert 2**-21 * clip_norm < step <= 2**-20 * clip_norm
        assert np.float32(step) == step

    @settings(max_examples=30)
    @given(st.integers(0, 2**31), st.floats(1e-4, 100.0), st.sampled_from([1, 3, 40, 1000]))
    def test_the_norm_is_within_the_bound_in_exact_arithmetic(self, seed, clip_norm, size):
        rng = np.random.default_rng(seed)
        vectors = rng.normal(size=(4, size)) * clip_norm * 10.0 ** rng.integers(-2, 4, (4, 1))
        step = noise_laws.grid_step(clip_norm)
        mask = np.array([True, True, True, False])
        found = privacy.clipped_in_steps(
            jnp.asarray(vectors), mask, jnp.asarray(clip_norm), jnp.asarray(step)
        )
        found = np.asarray(found)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, np.round(found))
        assert not found[3].any()
        for row in found:
            squared = sum(int(entry) ** 2 for entry in row)
            assert squared * Fraction(step) ** 2 <= Fraction(clip_norm) ** 2

    def test_a_vector_that_is_short_is_rounded_and_one_that_is_none_is_zero(self):
        step = noise_laws.grid_step(1.0)
        vectors = {"a": jnp.array([[0.25, 0.0], [np.nan, 0.1], [np.inf, 0.0]])}
        found = privacy.clipped_in_steps(vectors, np.ones(3, bool), 1.0, jnp.asarray(step))["a"]
        np.testing.assert_array_equal(np.asarray(found) * step, [[0.25, 0], [0, 0], [0, 0]])

    @pytest.mark.parametrize("x64", [False, True])
    def test_sums_are_those_of_integers_and_noise_arrives_to_the_last_bit(self, x64):
        rng = np.random.default_rng(1)
        steps = rng.integers(-(2**21), 2**21, (1000, 6))
        integers = np.array([0, -1, 2**26, -(2**26) - 1, 2**50 + 3, -(2**51) - 5])
        with jax.enable_x64(True):
            tree = {"a": jnp.asarray(steps[:, :2], float), "b": jnp.asarray(steps[:, 2:], float)}
        with jax.enable_x64(x64):
            noise = step_noise(integers, 2.0**-30)
            # By a power of two, which moves no bit of a sum.
            whole = jnp.asarray(2.0**30)
            found = jax.jit(noise_laws.released)(tree, noise, whole, tree)
        total = steps.sum(axis=0) + integers
        assert np.asarray(found["a"]).tolist() == total[:2].tolist()
        assert np.asarray(found["b"]).tolist() == total[2:].tolist()

    @pytest.mark.parametrize("weight", [1.0, 0.25])
    def test_releases_are_exact_multiples_of_the_weighted_step(self, weight):
        rng = np.random.default_rng(2)
        vectors = rng.normal(size=(7, 5))
        mechanism = privacy.GaussianShardSum(0.7, 3.0, 7, 70, weight, noise=NOISE)
        step = noise_laws.grid_step(0.7)
        with jax.enable_x64(True):
            noise = jax.tree.map(
                lambda leaf: leaf[0], privacy.draw_noise([mechanism], np.array([0]), 5)
            )
            steps = privacy.clipped_in_steps(vectors, np.ones(7, bool), 0.7, jnp.asarray(step))
            found = noise_laws.released(steps, noise, jnp.asarray(weight), like=jnp.zeros(5))
            kept = np.asarray(noise_laws.from_steps(steps, noise.step, like=steps))
        multiples = (np.asarray(found) - weight * kept.sum(axis=0)) / (weight * step)
        np.testing.assert_array_equal(multiples, np.round(multiples))
        high, low = (np.asarray(word).astype(np.int64) for word in noise[:2])
        np.testing.assert_array_equal(multiples, high * 2**26 + low)


class TestRuns:
    @each_method
    def test_every_visit_has_fresh_noise_of_the_plans_size(self, method, draws):
        result = run(method)
        assert len(draws) == 2 * 3
        entries = np.array([noise for _, noise in draws])
        assert entries.shape == (6, 4)
        assert len(np.unique(entries)) == entries.size  # 10^-7 that any two agree
        for (scale, _), client in zip(draws, result.plan.clients * 2, strict=True):
            steps = noise_laws.grid_step(client.mechanism.clip_norm)
            weighed = scale * steps * client.mechanism.weight
            assert weighed == pytest.approx(client.mechanism.noise_std, rel=1e-12)
        spent = result.ledger.spent()
        assert np.all((spent <= 1) & (spent >= 0.995))
        assert np.all(np.isfinite(result.posterior.mean["w"]))
        assert result.status.rounds == 2

    @pytest.mark.slow
    def test_nothing_but_noise_differs_between_runs(self, monkeypatch):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise_laws, "integers", lambda scale, count: np.arange(count))
            first, again = run(), run()
        np.testing.assert_array_equal(first.posterior.mean["w"], again.posterior.mean["w"])
        assert not np.array_equal(run().posterior.mean["w"], first.posterior.mean["w"])

    @pytest.mark.slow
    def test_what_a_client_sends_is_a_whole_number_of_steps(self):
        with jax.enable_x64(True):
            result = run(num_rounds=1, damping=1.0, budget=dppvi.PrivacyBudget(1000.0, 0.1))
            step = noise_laws.grid_step(0.005)
            for leaf in jax.tree.leaves(result.state.factors):
                multiples = np.asarray(leaf) / step
                assert leaf.dtype == np.float64
                assert np.any(multiples)
                np.testing.assert_array_equal(multiples, np.round(multiples))

    def test_without_a_bound_on_epsilon_noise_is_nothing(self, draws):
        result = run(budget=dppvi.PrivacyBudget(np.inf, 1e-5))
        assert not np.any([noise for _, noise in draws])
        assert result.ledger.spent().tolist() == [np.inf] * 3

    @pytest.mark.parametrize(
        "schedule",
        [
            dppvi.synchronous,
            lambda number, num_clients: np.array([[0], [2]] if number == 0 else [[1]]),
            dppvi.random_subset(2, seed=1),
            dppvi.Asynchronous((1, 2, 3)),
        ],
        ids=["synchronous", "late and gone", "subset", "asynchronous"],
    )
    def test_clients_may_join_late_or_drop_out(self, schedule, draws):
        budgets = [dppvi.PrivacyBudget(epsilon, 1e-5) for epsilon in (0.5, 1.0, 2.0)]
        with dry_rounds():
            result = run(schedule=schedule, budget=budgets)
        visits = sum(entry.num_releases for entry in result.ledger.entries)
        assert len(draws) == visits
        assert np.all(result.ledger.spent() <= [0.5, 1.0, 2.0])

    def test_nothing_is_drawn_when_a_budget_is_spent(self, tmp_path, draws):
        with dry_rounds():
            run(ledger_file=tmp_path / "ledger.jsonl")
        assert len(draws) == 6
        with pytest.raises(dppvi.BudgetExceededError):
            run(ledger_file=tmp_path / "ledger.jsonl")
        assert len(draws) == 6

    @pytest.mark.slow
    def test_a_checkpoint_knows_the_noise(self, tmp_path, draws):
        first = run(checkpoint=tmp_path / "run.npz")
        again = run(checkpoint=tmp_path / "run.npz")
        assert len(draws) == 6
        np.testing.assert_array_equal(first.posterior.mean["w"], again.posterior.mean["w"])
        gaussian = dppvi.VirtualClients(4, num_local_steps=2)
        with pytest.raises(ValueError, match="another method"):
            run(gaussian, checkpoint=tmp_path / "run.npz")


class TestWords:
    def test_plan_statement_and_citation_say_so(self):
        with dry_rounds():
            result = run()
            usual = run(dppvi.VirtualClients(4, num_local_steps=2)).privacy_statement()
        statement = result.privacy_statement()
        for text in (str(statement), statement.to_markdown()):
            assert "discrete Gaussian noise, drawn exactly, on a sum of clipped changes" in text
            assert "concentrated differential privacy" in text
            assert "drawn exactly by OpenDP" in text
            assert "floating-point" not in text
        facts = json.loads(statement.to_json())
        assert facts["versions"]["opendp"]
        assert facts["max_epsilon"] <= 1
        assert "canonne2020discrete" in dppvi.citation(result).keys
        assert "floating-point" in str(usual)
        assert "discrete Gaussian" not in str(usual)

    def test_a_plan_of_other_noise_is_refused(self):
        sizes = [30, 20, 10]
        plan = dppvi.plan_privacy(dppvi.VirtualClients(4), BUDGET, num_rounds=2, client_sizes=sizes)
        with pytest.raises(ValueError, match=r"noise is Gaussian\(\) for client 0 in the plan"):
            dppvi.pvi(
                logistic,
                None,
                DATA[0],
                method=dppvi.VirtualClients(4, noise=NOISE),
                client_sizes=sizes,
                plan=plan,
            )


class TestRefusals:
    @each_method
    def test_a_trusted_aggregator(self, method):
        sentence = "trusted_aggregator must be left out with noise=DiscreteGaussian"
        with pytest.raises(ValueError, match=sentence):
            run(method, trusted_aggregator=True, schedule=dppvi.synchronous)
        with pytest.raises(ValueError, match=sentence):
            dppvi.plan_privacy(
                method, BUDGET, num_rounds=1, client_sizes=[9, 9], trusted_aggregator=True
            )
        with pytest.raises(ValueError, match=sentence):
            dppvi.pvi(
                logistic, None, DATA[0], method=method, client_sizes=[9], trusted_aggregator=True
            )

    def test_shares_of_noise(self):
        shared = privacy.GaussianShardSum(0.3, 4.0, 5, 50, num_shares=3, noise=NOISE)
        with pytest.raises(ValueError, match="3 clients each add a share"):
            shared.check(BUDGET)

    def test_a_seed(self, draws):
        with pytest.raises(ValueError, match="insecure_noise_seed must be left out"):
            run(insecure_noise_seed=1)
        assert not draws

    def test_opendp_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "opendp.prelude", None)
        with pytest.raises(ImportError, match=r"pip install numpyro-dppvi\[exact\]"):
            run()
        plan = dppvi.plan_privacy(METHODS[0], BUDGET, num_rounds=1, client_sizes=[9])
        assert plan.epsilons[0] <= 1

    @pytest.mark.parametrize("noise", ["discrete", None, dppvi.privacy.DiscreteGaussian])
    def test_what_is_no_noise(self, noise):
        with pytest.raises(TypeError, match="noise must be a Gaussian or DiscreteGaussian"):
            dppvi.VirtualClients(4, noise=noise)

    def test_adding_or_removing_a_record(self):
        budget = dppvi.PrivacyBudget(1.0, 1e-5, relation="add_or_remove_one")
        with pytest.raises(ValueError, match="replace_one"):
            run(budget=budget)


def test_noise_that_is_drawn_elsewhere_is_not_left_out_in_silence():
    shards = privacy.GaussianShardSum(0.3, 4.0, 8, 80, noise=NOISE)
    records = privacy.GaussianSum(1.0, 4.0, 80, privacy.FullBatch(), 80)
    with pytest.raises(TypeError, match="mechanisms must all be GaussianShardSum"):
        privacy.draw_noise([records, shards], np.array([1]), 5)
