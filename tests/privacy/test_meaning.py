"""What an epsilon means: exact for Gaussians, an upper bound for sampled batches."""

import math
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from numpyro_dppvi.privacy import (
    PoissonSampling,
    PrivacyBudget,
    accounting,
    best_attack,
    noise_from_epsilon,
)
from numpyro_dppvi.privacy.words import percent
from tests.grids import grid

RELATIONS = ["replace_one", "add_or_remove_one"]


def composed(event, count=1):
    return accounting.compose([(event, count)])


def gaussian(noise):
    return dpa.GaussianDpEvent(noise)


def sampled(prob, noise):
    return dpa.PoissonSampledDpEvent(prob, gaussian(noise))


def fixed_size(noise):
    return dpa.SampledWithoutReplacementDpEvent(1000, 300, gaussian(noise))


def likelihood_ratio_test(p, q, noise, rate):
    """Advantage and true-positive rate of the best test between two densities, by quadrature."""
    x = np.linspace(-12 * noise - 2, 12 * noise + 2, 400_001)
    one, other = p(x) * (x[1] - x[0]), q(x) * (x[1] - x[0])
    order = np.argsort(-one / other)
    caught, alarms = np.cumsum(one[order]), np.cumsum(other[order])
    return np.max(caught - alarms), np.interp(rate, alarms, caught)


class TestGaussians:
    @pytest.mark.parametrize(
        ("relation", "distance"), [("replace_one", 2), ("add_or_remove_one", 1)]
    )
    @pytest.mark.parametrize("rate", [1e-4, 0.01, 0.5])
    def test_is_the_closed_form(self, relation, distance, rate):
        # Ten releases at distance 2 (or 1) and noise 9 are one at this many deviations.
        mu = distance * math.sqrt(10) / 9
        attack = best_attack(composed(gaussian(9.0), 10), relation, rate)
        assert attack.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-12)
        assert attack.false_positive_rate == rate
        power = stats.norm.sf(stats.norm.isf(rate) - mu)
        assert attack.true_positive_rate == pytest.approx(power, rel=1e-9)

    def test_is_what_an_attacker_reaches(self):
        # 2e5 simulated sums of either data set: five standard errors of a share are 0.6 %.
        rng = np.random.default_rng(0)
        noise = 1.5
        there, not_there = rng.normal(1, noise, 200_000), rng.normal(-1, noise, 200_000)
        attack = best_attack(composed(gaussian(noise)), "replace_one", 0.05)
        threshold = np.quantile(not_there, 0.95)
        assert np.mean(there > threshold) == pytest.approx(attack.true_positive_rate, abs=0.006)
        reached = np.mean(there > 0) - np.mean(not_there > 0)
        assert reached == pytest.approx(attack.advantage, abs=0.006)


class TestSampledBatches:
    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [0.001, 0.01, 0.2])
    @pytest.mark.parametrize(("prob", "noise"), [(0.3, 0.8), (0.1, 1.5)])
    def test_one_release_is_the_best_test_of_its_worst_pair(self, prob, noise, rate):
        def mixture(shift):
            return lambda x: (
                (1 - prob) * stats.norm.pdf(x, 0, noise) + prob * stats.norm.pdf(x, shift, noise)
            )

        pairs = {
            "replace_one": [(mixture(1), mixture(-1))],
            "add_or_remove_one": [(mixture(1), mixture(0)), (mixture(0), mixture(1))],
        }
        for relation, densities in pairs.items():
            best = np.max([likelihood_ratio_test(*pq, noise, rate) for pq in densities], axis=0)
            attack = best_attack(composed(sampled(prob, noise)), relation, rate)
            for exact, found in zip(
                best, (attack.advantage, attack.true_positive_rate), strict=True
            ):
                # Under add-or-remove one bound serves either direction, each of which is smaller.
                slack = 2e-3 if relation == "replace_one" else 2e-2
                assert exact * (1 - 1e-5) <= found <= exact * (1 + slack)

    @grid(("count", "noise"), [(30, 10.0), (1000, 80.0), (9, 1.3)], quick=[1])
    def test_sampling_everyone_gives_away_what_no_sampling_does(self, count, noise):
        exact = best_attack(composed(gaussian(noise), count), "replace_one")
        found = best_attack(composed(sampled(1.0, noise), count), "replace_one")
        assert exact.advantage * (1 - 1e-9) <= found.advantage <= exact.advantage * 1.002
        power = exact.true_positive_rate
        assert power * (1 - 1e-9) <= found.true_positive_rate <= power * 1.002

    @pytest.mark.slow
    @settings(max_examples=4)
    @given(
        st.sampled_from(RELATIONS),
        st.floats(0.5, 20),
        st.integers(1, 50),
        st.floats(1e-4, 0.5),
        st.sampled_from(["poisson", "fixed size"]),
    )
    @example("replace_one", 11.0, 1, 1e-4, "poisson")
    @example("replace_one", 19.0, 1, 1e-4, "poisson")
    @example("add_or_remove_one", 19.278873232423212, 1, 1e-4, "poisson")
    @example("add_or_remove_one", 9.0, 1, 0.125, "poisson")
    def test_lies_within_the_guarantee(self, relation, noise, count, rate, kind):
        # (epsilon, delta) caps every test: e^epsilon times the false alarms, and delta.
        event = sampled(0.3, noise)
        if kind == "fixed size":
            event, relation = fixed_size(noise), "replace_one"
        composition = composed(event, count)
        attack = best_attack(composition, relation, rate)
        for delta in (1e-6, 1e-3, 0.05):
            cap = math.exp(accounting.epsilon(composition, delta, relation)) * rate + delta
            # It is a bound, whose grid is refined until what exceeds guessing changes by 3 %. In
            # the examples losses are small beside coarse grids and the distances of slopes.
            assert attack.true_positive_rate <= rate + (cap - rate) * 1.03
        assert rate <= attack.true_positive_rate <= rate + attack.advantage + 2e-3
        assert 0 <= attack.advantage <= 1

    @pytest.mark.slow
    def test_less_noise_more_releases_and_larger_batches_give_away_more(self):
        base = best_attack(composed(sampled(0.1, 4.0), 50), "replace_one")
        for worse in (
            composed(sampled(0.1, 3.0), 50),
            composed(sampled(0.1, 4.0), 80),
            composed(sampled(0.15, 4.0), 50),
            composed(dpa.SampledWithoutReplacementDpEvent(100, 10, gaussian(4.0)), 50),
            composed(gaussian(4.0), 50),
        ):
            attack = best_attack(worse, "replace_one")
            assert attack.advantage > base.advantage
            assert attack.true_positive_rate > base.true_positive_rate


class TestLimits:
    @pytest.mark.parametrize("relation", RELATIONS)
    def test_nothing_released_gives_nothing_away(self, relation):
        assert best_attack(accounting.compose([]), relation, 0.1) == (0, 0.1, 0.1)

    @pytest.mark.parametrize("event", [gaussian(0.0), sampled(0.1, 0.0), gaussian(math.nan)])
    def test_no_noise_gives_all_away(self, event):
        assert best_attack(composed(event), "replace_one") == (1, 0.01, 1)

    @pytest.mark.slow
    def test_hardly_any_noise_gives_nearly_all_away(self):
        for event in (gaussian(0.05), sampled(0.999, 0.05)):
            attack = best_attack(composed(event, 10), "replace_one")
            assert 0.999 < attack.advantage <= 1
            assert 0.999 < attack.true_positive_rate <= 1

    @pytest.mark.slow
    def test_a_truncated_batch_is_covered(self):
        event = PoissonSampling(0.1).dp_event(4.0, 100, 20)
        assert isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent)
        attack = best_attack(composed(event, 50), "replace_one")
        uncut = best_attack(composed(sampled(0.1, 4.0), 50), "replace_one")
        assert uncut.advantage < attack.advantage < 1.1 * uncut.advantage


@pytest.mark.parametrize(
    ("epsilon", "right", "detected"),
    [(0.1, 50.7, 1.1), (1, 55.4, 2.0), (2, 60.0, 3.5), (4, 67.9, 8.1), (8, 79.8, 25.5)],
)
def test_the_table_of_the_documentation(epsilon, right, detected):
    noise = noise_from_epsilon(PrivacyBudget(epsilon), 10)
    attack = best_attack(composed(gaussian(noise), 10), "replace_one")
    assert percent((1 + attack.advantage) / 2) == f"{right} %"
    assert percent(attack.true_positive_rate) == f"{detected} %"
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert f"| {epsilon} | {right} % | {detected} % |" in page
