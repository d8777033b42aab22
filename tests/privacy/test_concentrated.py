"""Accounting of discrete Gaussian noise as concentrated differential privacy; needs no OpenDP."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from numpyro_dppvi import privacy
from numpyro_dppvi.privacy import accounting, calibrate, concentrated
from numpyro_dppvi.privacy.sampling import FullBatch

BUDGET = privacy.PrivacyBudget(1.0, 1e-5)
NOISE = privacy.DiscreteGaussian()


def of(noise, count):
    return accounting.compose([(NOISE.dp_event(noise), count)])


def least_epsilon(rho, delta):
    """The same bound at the best real order (Canonne, Kamath and Steinke 2020, Proposition 12)."""

    def at(log_order):
        order = 1 + math.exp(log_order)
        return rho * order + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    return min(
        optimize.minimize_scalar(at, (start, start + 1)).fun for start in (-2.0, 1.0, 4.0, 7.0)
    )


class TestEpsilon:
    def test_a_release_satisfies_what_the_theorem_says(self):
        assert NOISE.dp_event(4.0) == dpa.ZCDpEvent(2.0**2 / (2 * 4.0**2))

    @pytest.mark.parametrize("rho", [1e-5, 1e-4, 1e-2, 0.1, 1.0, 10.0])
    @pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
    def test_it_is_the_bound_at_the_best_order_and_never_below(self, rho, delta):
        found, least = concentrated.epsilon(rho, delta), least_epsilon(rho, delta)
        assert least * (1 - 1e-9) <= found <= least * (1 + 1e-3)

    @given(st.floats(0.5, 1000.0), st.integers(1, 1000), st.floats(1e-10, 1e-2))
    def test_it_is_never_below_the_continuous_gaussian(self, noise, count, delta):
        gaussian = accounting.compose([(dpa.GaussianDpEvent(noise), count)])
        discrete = accounting.epsilon(of(noise, count), delta, "replace_one")
        assert discrete >= accounting.epsilon(gaussian, delta, "replace_one")

    def test_rhos_add_up_and_gaussians_have_one_too(self):
        together = [(NOISE.dp_event(5.0), 3), (dpa.GaussianDpEvent(5.0), 2)]
        mixed = accounting.compose(together)
        assert concentrated.total_rho(mixed, "replace_one") == pytest.approx(5 * 2 / 25)
        found = accounting.epsilon(mixed, 1e-5, "replace_one")
        assert found == pytest.approx(accounting.epsilon(of(5.0, 5), 1e-5, "replace_one"))

    def test_no_noise_costs_everything(self):
        assert accounting.epsilon(of(0.0, 1), 1e-5, "replace_one") == math.inf
        mixed = accounting.compose([(NOISE.dp_event(1.0), 1), (dpa.GaussianDpEvent(0.0), 1)])
        assert accounting.epsilon(mixed, 1e-5, "replace_one") == math.inf

    def test_what_is_not_proven_is_refused(self):
        with pytest.raises(ValueError, match='relation="replace_one" only, got'):
            accounting.epsilon(of(1.0, 1), 1e-5, "add_or_remove_one")
        sampled = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0))
        mixed = accounting.compose([(NOISE.dp_event(1.0), 1), (sampled, 1)])
        with pytest.raises(ValueError, match="on all records, got a PoissonSampledDpEvent"):
            accounting.epsilon(mixed, 1e-5, "replace_one")

    def test_it_is_no_gaussian_for_those_who_ask(self):
        assert not accounting.is_gaussian(of(4.0, 2))
        assert accounting.gaussian_mu(of(4.0, 2), "replace_one") is None
        assert accounting.renyi_distance(of(4.0, 2), "replace_one") == pytest.approx(0.5 * 2**0.5)
        assert "concentrated" in accounting.describe(of(4.0, 2))


class TestCalibration:
    @pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 2.0, 4.0, 16.0])
    @pytest.mark.parametrize("count", [1, 30])
    def test_nearly_all_of_the_budget_and_no_more(self, epsilon, count):
        budget = privacy.PrivacyBudget(epsilon, 1e-5)
        noise = calibrate.discrete_noise_multiplier(budget, count)
        found = accounting.epsilon(of(noise, count), 1e-5, "replace_one")
        assert 0.999 * epsilon <= found <= epsilon

    @pytest.mark.parametrize(("epsilon", "more"), [(0.5, 1.09), (1.0, 1.08), (4.0, 1.07)])
    def test_what_the_proof_costs(self, epsilon, more):
        budget = privacy.PrivacyBudget(epsilon, 1e-5)
        gaussian = calibrate.noise_multiplier(
            budget, num_releases=10, sampler=FullBatch(), num_records=100, physical_size=100
        )
        found = calibrate.discrete_noise_multiplier(budget, 10) / gaussian
        assert found == pytest.approx(more, abs=0.006)

    def test_no_bound_on_epsilon_needs_no_noise(self):
        budget = privacy.PrivacyBudget(math.inf, 1e-5)
        assert calibrate.discrete_noise_multiplier(budget, 10) == 0


class TestAttack:
    @pytest.mark.parametrize("noise", [0.5, 2.0, 20.0, 200.0])
    def test_it_is_above_what_is_possible_against_the_continuous_gaussian(self, noise):
        found = privacy.best_attack(of(noise, 1), "replace_one")
        gaussian = accounting.compose([(dpa.GaussianDpEvent(noise), 1)])
        possible = privacy.best_attack(gaussian, "replace_one")
        assert possible.advantage <= found.advantage <= min(1, 1.35 * possible.advantage)
        assert possible.true_positive_rate <= found.true_positive_rate
        assert found.true_positive_rate <= min(1, 1.5 * possible.true_positive_rate)

    def test_it_is_the_most_that_the_divergences_allow(self):
        rate = concentrated.detected(0.1, 0.01)
        orders = np.geomspace(1.01, 1000, 500)

        def excess(one, other):
            heads = orders * np.log(one) + (1 - orders) * np.log(other)
            tails = orders * np.log1p(-one) + (1 - orders) * np.log1p(-other)
            return np.max(np.logaddexp(heads, tails) / (orders - 1) - 0.1 * orders)

        assert max(excess(0.999 * rate, 0.01), excess(0.01, 0.999 * rate)) < 0
        assert max(excess(1.01 * rate, 0.01), excess(0.01, 1.01 * rate)) > 0

    def test_limits(self):
        assert privacy.best_attack(of(0.0, 1), "replace_one") == (1.0, 0.01, 1.0)
        quiet = privacy.best_attack(of(1e9, 1), "replace_one")
        np.testing.assert_allclose(quiet, (0, 0.01, 0.01), atol=1e-8)


def test_a_ledger_file_keeps_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = privacy.Ledger((BUDGET,))
    entry = privacy.Entry(0, 0, NOISE.dp_event(20.0), 3)
    charged = privacy.LedgerFile(path).charge(ledger, [entry])
    again = privacy.LedgerFile(path).open(ledger)
    assert again.entries == charged.entries == (entry,)
    np.testing.assert_array_equal(again.spent(), charged.spent())
    with pytest.raises(privacy.BudgetExceededError):
        privacy.LedgerFile(path).charge(ledger, [entry._replace(num_releases=10**6)])
