"""What the best of several runs costs: against exact answers, and its laws."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from numpyro_dppvi.privacy import (
    NegativeBinomialRuns,
    PrivacyBudget,
    plan_selection,
)
from numpyro_dppvi.privacy.selection import check_run, selection_epsilon
from tests.grids import grid

RUNS = [
    NegativeBinomialRuns(10),
    NegativeBinomialRuns(3, 0.5),
    NegativeBinomialRuns(10, 0),
    NegativeBinomialRuns(1.5, 4),
]
every_kind = pytest.mark.parametrize("runs", RUNS, ids=lambda runs: runs.name)


def probabilities(runs, most):
    """P(K = k) for k up to ``most``, from the definitions in the paper."""
    k = np.arange(most + 1)
    gamma, shape = runs._gamma(), runs.shape
    if shape == 0:
        return np.where(k == 0, 0.0, stats.logser.pmf(np.maximum(k, 1), 1 - gamma))
    at_least_one = -math.expm1(shape * math.log(gamma))
    return np.where(k == 0, 0.0, stats.nbinom.pmf(k, shape, gamma) / at_least_one)


class TestNumberOfRuns:
    @every_kind
    def test_has_its_mean(self, runs):
        probs = probabilities(runs, 5000)
        assert probs.sum() == pytest.approx(1, abs=1e-9)
        assert np.sum(np.arange(5001) * probs) == pytest.approx(runs.mean, rel=1e-6)

    @every_kind
    def test_is_the_quantile_of_its_law(self, runs):
        bounds = np.cumsum(probabilities(runs, 60))
        for k, bound in enumerate(bounds):
            if bound - (bounds[k - 1] if k else 0) < 1e-9:
                continue
            assert runs.count(max(0, bound - 1e-10)) == k
            if bound < 1 - 1e-9:
                assert runs.count(bound + 1e-10) == k + 1

    @every_kind
    def test_ends_for_every_number(self, runs):
        assert runs.count(0.0) == 1
        assert runs.count(1 - 2**-53) < 10_000

    @pytest.mark.parametrize(
        ("words", "make"),
        [
            ("mean must be above 1, got 0.5", lambda: NegativeBinomialRuns(0.5)),
            ("mean must be a number above 0", lambda: NegativeBinomialRuns(-1)),
            ("mean must be a number above 0", lambda: NegativeBinomialRuns(math.inf)),
            ("mean must be above 1, got 1", lambda: NegativeBinomialRuns(1)),
            ("shape must be a number between 0 and .* got -1", lambda: NegativeBinomialRuns(5, -1)),
            (
                "shape must be a number between 0 and .* got nan",
                lambda: NegativeBinomialRuns(5, math.nan),
            ),
        ],
    )
    def test_refuses_what_is_out_of_range(self, words, make):
        with pytest.raises(ValueError, match=words):
            make()


def best_of(runs, mu):
    """Densities of the largest of K normal numbers around 0, or around mu, on a fine grid."""
    x = np.linspace(-12, 12 + mu, 20_001)
    probs = probabilities(runs, 800)[1:]
    k = np.arange(1, 801)
    densities = []
    for shift in (0, mu):
        below = stats.norm.cdf(x, shift)
        # The derivative of the generating function at P(one number lies below x).
        slope = np.polynomial.polynomial.polyval(below, k * probs)
        densities.append(slope * stats.norm.pdf(x, shift) * (x[1] - x[0]))
    return densities


def exact_delta(runs, mu, epsilon):
    one, other = best_of(runs, mu)
    return max(
        np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((one, other), (other, one))
    )


class TestCost:
    @every_kind
    @pytest.mark.parametrize("mu", [0.2, 1.0])
    @pytest.mark.parametrize("delta", [1e-2, 1e-5])
    def test_covers_the_best_of_normal_numbers(self, runs, mu, delta):
        # The worst that a run can do is to show its score: the best score is a maximum, whose law
        # is known exactly.
        claimed = selection_epsilon(mu, runs, delta)
        assert exact_delta(runs, mu, claimed) <= delta

    def test_one_runs_cost_would_be_too_little(self):
        # The negative control, and what is commonly reported.
        runs, mu, delta = NegativeBinomialRuns(10), 1.0, 1e-2
        single = dpa.get_epsilon_gaussian(1 / mu, delta)
        assert exact_delta(runs, mu, single) > 1.5 * delta
        for runs in RUNS:
            assert selection_epsilon(mu, runs, 1e-5) > dpa.get_epsilon_gaussian(1 / mu, 1e-5)

    def test_is_the_theorem(self):
        # Theorem 2 for the geometric distribution and Gaussian runs, written out.
        mu, mean, delta = 0.7, 10.0, 1e-5
        orders = 1 + np.exp(np.linspace(-3, 8, 4000))
        least = np.min((1 - 1 / orders) * orders * mu**2 / 2 + np.log(mean) / orders)
        renyi = orders * mu**2 / 2 + 2 * least + np.log(mean) / (orders - 1)
        epsilon = np.min(renyi + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
        found = selection_epsilon(mu, NegativeBinomialRuns(mean), delta)
        assert epsilon * (1 - 1e-6) <= found <= epsilon * 1.01

    def test_costs_less_than_all_runs_together(self):
        # What composition would charge for as many runs as there are on average.
        for mean in (10, 30):
            together = dpa.get_epsilon_gaussian(1 / (0.3 * math.sqrt(mean)), 1e-5)
            assert selection_epsilon(0.3, NegativeBinomialRuns(mean), 1e-5) < together

    def test_rises_with_runs_and_distance(self):
        by_mean = [
            selection_epsilon(0.5, NegativeBinomialRuns(mean), 1e-5) for mean in (1.5, 3, 10, 100)
        ]
        by_mu = [selection_epsilon(mu, RUNS[0], 1e-5) for mu in (0.0, 0.1, 0.5, 2.0, math.inf)]
        assert by_mean == sorted(by_mean)
        assert by_mu == sorted(by_mu)
        assert (by_mu[0], by_mu[-1]) == (0, math.inf)


class TestPlan:
    @every_kind
    @grid("epsilon", [0.1, 1.0, 8.0], quick=[1])
    def test_keeps_the_budget_and_uses_it(self, runs, epsilon):
        budget = PrivacyBudget(epsilon, 1e-6)
        plan = plan_selection(budget, runs, client_sizes=[50, 80], score_bound=2.0)
        for total, one, mechanism in zip(
            plan.epsilons, plan.run_budgets, plan.mechanisms, strict=True
        ):
            assert 0.995 * epsilon <= total <= epsilon
            assert one.epsilon < epsilon
            # Fit and score of one run, together, are the distance that is repeated.
            fit = 1 / dpa.get_sigma_gaussian(one.epsilon, 1e-6)
            score = mechanism.sensitivity("replace_one") / mechanism.noise_std
            assert math.hypot(fit, score) == pytest.approx(plan.mus[0], rel=1e-6)
            assert score**2 == pytest.approx(0.1 * plan.mus[0] ** 2, rel=1e-9)

    @pytest.mark.slow
    def test_each_client_has_its_own(self):
        budgets = [
            PrivacyBudget(1.0, 1e-5, "add_or_remove_one"),
            PrivacyBudget(2.0, max_records_per_person=3),
        ]
        plan = plan_selection(budgets, RUNS[0], client_sizes=[50, 80], score_bound=2.0)
        first, second = plan.run_budgets
        assert (first.relation, second.max_records_per_person) == ("add_or_remove_one", 3)
        assert first.epsilon < second.epsilon
        assert plan.mechanisms[0].sensitivity("add_or_remove_one") == 2.0
        assert plan.mechanisms[1].sensitivity("replace_one") == 12.0
        assert all(e <= b.epsilon for e, b in zip(plan.epsilons, budgets, strict=True))

    def test_an_unlimited_budget_adds_no_noise(self):
        plan = plan_selection(PrivacyBudget(math.inf), RUNS[0], client_sizes=[50], score_bound=1.0)
        assert plan.run_budgets[0].epsilon == plan.epsilons[0] == math.inf
        assert plan.mechanisms[0].noise_std == 0

    @pytest.mark.parametrize(
        ("words", "changes"),
        [
            ("unit must be 'record'", {"budget": PrivacyBudget(1.0, unit="client")}),
            ("2 budgets for 1 clients", {"budget": [PrivacyBudget(1.0)] * 2}),
            ("score_bound must be a number above 0", {"score_bound": 0.0}),
            ("score_share must lie strictly", {"score_share": 1.0}),
        ],
    )
    def test_refuses_what_makes_no_sense(self, words, changes):
        arguments = {"budget": PrivacyBudget(1.0), "score_bound": 1.0, **changes}
        with pytest.raises(ValueError, match=words):
            plan_selection(runs=RUNS[0], client_sizes=[50], **arguments)

    def test_refuses_a_fixed_number_of_runs(self):
        # A number that is known in advance has another, larger cost.
        with pytest.raises(TypeError, match="runs must be a NegativeBinomialRuns, got 10"):
            plan_selection(PrivacyBudget(1.0), 10, client_sizes=[50], score_bound=1.0)

    def test_refuses_runs_beyond_it(self):
        plan = plan_selection(PrivacyBudget(1.0), RUNS[0], client_sizes=[50], score_bound=1.0)
        check_run(plan, [plan.fit_mus[0]])
        for mus, words in [
            ([1.01 * plan.fit_mus[0]], "released more for client 0"),
            ([math.nan], "released more for client 0"),
            ([None], "must be FullBatch\\(\\)"),
            ([0.0, 0.0], "the 1 clients of the plan, got 2"),
        ]:
            with pytest.raises(ValueError, match=words):
                check_run(plan, mus)
