"""``select``: the best of a random number of runs, each within its share of the budget."""

import dataclasses
import json
import math

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import selection
from numpyro_dppvi.privacy import NegativeBinomialRuns, plan_selection
from tests.dry import dry_rounds

SIZES = (40, 60)
DATA = [{"y": np.full(size, 2.0, np.float32)} for size in SIZES]
SETTINGS = ({"num_local_steps": 1}, {"num_local_steps": 4})


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def fit_one(setting, budgets, rng_key, **changes):
    arguments = {
        "rng_key": rng_key,
        "method": dppvi.DPOptimization(**setting),
        "budget": budgets,
        "num_rounds": 2,
        "progress_bar": False,
        **changes,
    }
    return dppvi.fit(normal_mean, None, DATA, **arguments)


def score(run):
    """Minus the squared distance of each record from the posterior mean, moved to zero."""
    return [1 - (part["y"] - run.posterior.mean["mu"]) ** 2 for part in DATA]


def plan(runs=None):
    runs = runs or NegativeBinomialRuns(3.0)
    return plan_selection(dppvi.PrivacyBudget(4.0), runs, client_sizes=SIZES, score_bound=4.0)


@pytest.fixture(scope="module")
def selected():
    """A selection, and all its runs with the scores that they got."""
    seen = []

    def recorded(setting, budgets, rng_key):
        seen.append((setting, fit_one(setting, budgets, rng_key)))
        return seen[-1][1]

    found = dppvi.select(SETTINGS, recorded, score, plan=plan(), insecure_seed=2)
    return found, seen


@pytest.mark.slow
def test_the_best_run_is_returned(selected):
    found, seen = selected
    assert len(seen) > 1  # or there is nothing to see with this seed
    settings = [setting for setting, run in seen if run is found.run]
    assert settings == [found.setting]
    # Its noisy score is close to the true one: ten standard deviations of the noise.
    true = np.concatenate([np.asarray(s) for s in score(found.run)]).clip(-4, 4).mean()
    noise = math.hypot(*(m.noise_std for m in found.plan.mechanisms)) / sum(SIZES)
    assert abs(found.score - true) < 10 * noise


@pytest.mark.slow
def test_every_run_keeps_to_its_share_of_the_budget(selected):
    found, seen = selected
    for _, run in seen:
        for spent, one, total in zip(
            run.ledger.spent(), found.plan.run_budgets, found.plan.budgets, strict=True
        ):
            assert 0.99 * one.epsilon <= spent <= one.epsilon < total.epsilon


def test_the_statement_tells_the_total(selected):
    found, _ = selected
    statement = found.privacy_statement()
    facts = json.loads(statement.to_json(), parse_constant=pytest.fail)
    for row, total, one in zip(
        facts["clients"], found.plan.epsilons, found.plan.run_budgets, strict=True
    ):
        assert row["epsilon_spent"] == total <= row["epsilon_budget"] == 4.0
        assert row["epsilon_of_one_fit"] == one.epsilon
        assert row["unit"] == "one record"
    text = " ".join(str(statement).split())
    assert "the best of 2 settings" in text
    assert "truncated negative binomial with mean 3" in text
    assert f"epsilon = {max(found.plan.epsilons):.4f}"[:-1] in text
    assert "whoever ran the selection" in text
    # And what is exported with the draws is the total, too.
    assert found.posterior.attrs["max_epsilon"] == max(found.plan.epsilons)
    assert found.run.posterior.attrs["max_epsilon"] < max(found.plan.epsilons)
    assert found.posterior.attrs["privacy_statement"] == str(statement)
    method = type(found.run.method).__name__
    assert found.posterior.attrs["method"] == f"{method}, the best of 2 settings"
    assert found.posterior.attrs["max_delta"] == max(b.delta for b in found.plan.budgets)


def test_the_number_of_runs_settings_and_keys_are_secret(monkeypatch):
    """Drawn anew at every call, from the operating system."""
    calls = []

    def nothing(setting, budgets, rng_key):
        calls.append((setting, np.asarray(jax.random.key_data(rng_key)).tobytes()))

    monkeypatch.setattr(selection, "_check", lambda run, plan: None)
    flat = [np.zeros(size) for size in SIZES]
    counts, planned = [], plan()
    for _ in range(30):
        before = len(calls)
        dppvi.select(range(5), nothing, lambda run: flat, plan=planned)
        counts.append(len(calls) - before)
    # The same in all of them has probability (1/3)^30; equal keys have less.
    assert len(set(counts)) > 1
    assert min(counts) >= 1
    assert len({key for _, key in calls}) == len(calls)
    assert {setting for setting, _ in calls} == set(range(5))


class TestScores:
    # One client, no noise: the scores themselves.
    def value(self, scores, bound=1.0):
        mechanisms = plan_selection(
            dppvi.PrivacyBudget(math.inf),
            NegativeBinomialRuns(2),
            client_sizes=[len(scores)],
            score_bound=bound,
        ).mechanisms
        return selection._noisy_score([np.array(scores)], mechanisms, jax.random.key(0))

    @pytest.mark.slow
    def test_are_clipped_means(self):
        assert self.value([0.5, -0.25, 3.0, -9.0]) == pytest.approx(0.25 / 4, abs=1e-4)

    @pytest.mark.slow
    def test_what_is_not_finite_is_the_worst(self):
        # A run that diverged must not win: clipping alone would make it zero.
        for bad in (math.nan, math.inf, -math.inf):
            assert self.value([bad, bad]) == pytest.approx(-1, abs=1e-4)

    def test_one_record_moves_them_by_no_more_than_the_sensitivity(self):
        rng = np.random.default_rng(0)
        for _ in range(20):
            scores = rng.standard_cauchy(6)
            other = scores.copy()
            other[rng.integers(6)] = rng.choice([math.nan, -1e9, 1e9, 0.3])
            assert abs(self.value(scores) - self.value(other)) <= 2.0 / 6

    def test_have_the_noise_that_is_planned(self):
        mechanisms = plan().mechanisms
        flat = [np.zeros(size) for size in SIZES]
        values = [
            selection._noisy_score(flat, mechanisms, jax.random.key(seed)) for seed in range(150)
        ]
        std = math.hypot(*(m.noise_std for m in mechanisms)) / sum(SIZES)
        # 150 draws: five standard errors of their standard deviation are 29 %.
        assert np.std(values) == pytest.approx(std, rel=0.29)


class TestRefusals:
    def refuse(self, error, words, settings=SETTINGS, fit=fit_one, scores=score, runs=None):
        with dry_rounds(), pytest.raises(error, match=words):
            dppvi.select(settings, fit, scores, plan=plan(runs), insecure_seed=0)

    def test_no_settings(self):
        self.refuse(ValueError, "settings must not be empty", settings=[])

    def test_a_run_with_a_larger_budget(self):
        def greedy(setting, budgets, rng_key):
            return fit_one(setting, [dataclasses.replace(b, epsilon=4.0) for b in budgets], rng_key)

        self.refuse(ValueError, "fit_one must keep to the budgets", fit=greedy)

    def test_a_run_for_another_relation(self):
        def other(setting, budgets, rng_key):
            changed = [dataclasses.replace(b, relation="add_or_remove_one") for b in budgets]
            return fit_one(setting, changed, rng_key)

        self.refuse(ValueError, "fit_one must keep to the budgets", fit=other)

    def test_a_run_without_privacy(self):
        def open_hearted(setting, budgets, rng_key):
            return fit_one(setting, None, rng_key, method=dppvi.NonPrivate(1))

        self.refuse(ValueError, "must fit with privacy", fit=open_hearted)

    @pytest.mark.slow
    def test_a_run_on_sampled_batches(self):
        def sampled(setting, budgets, rng_key):
            return fit_one({"sampler": dppvi.PoissonSampling(0.5)}, budgets, rng_key)

        self.refuse(ValueError, "must be FullBatch", fit=sampled)

    def test_what_is_no_result(self):
        self.refuse(TypeError, "must return the result of fit, got None", fit=lambda *_: None)

    def test_scores_that_do_not_fit(self):
        self.refuse(ValueError, "one array per client, got 1", scores=lambda run: [np.zeros(40)])
        wrong = [np.zeros(40), np.zeros(59)]
        self.refuse(
            ValueError, r"one number per record, got shape \(59,\)", scores=lambda run: wrong
        )
