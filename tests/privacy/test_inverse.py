"""Noise, rounds and epsilon: each from the other two, and back again."""

import math

import dp_accounting as dpa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import (
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyBudget,
    calibrate,
    epsilon_from_noise,
    inverse,
    noise_from_epsilon,
    rounds_from_epsilon,
)

SAMPLERS = [FullBatch(), PoissonSampling(0.1), FixedSizeSampling(20)]
samplers = pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)


@pytest.mark.slow
@samplers
def test_they_undo_each_other(sampler):
    setting = {"sampler": sampler, "num_records": 200}
    budget = PrivacyBudget(2.0)
    noise = noise_from_epsilon(budget, 40, **setting)
    epsilon = epsilon_from_noise(noise, 40, **setting)
    assert 0.995 * 2 <= epsilon <= 2
    rounds = rounds_from_epsilon(budget, noise, **setting)
    assert rounds == 40
    assert epsilon_from_noise(noise, rounds + 1, **setting) > 2
    # Four releases a round: a quarter of the rounds.
    assert rounds_from_epsilon(budget, noise, releases_per_round=4, **setting) == 10
    assert rounds_from_epsilon(budget, noise, releases_per_round=7, **setting) == 5
    assert rounds_from_epsilon(budget, noise, releases_per_round=41, **setting) == 0


@pytest.mark.slow
@samplers
def test_they_are_the_plans(sampler):
    method = dppvi.DPOptimization(num_local_steps=3, sampler=sampler)
    budget = PrivacyBudget(1.0)
    plan = dppvi.plan_privacy(method, budget, num_rounds=7, client_sizes=[200])
    setting = {"sampler": sampler, "num_records": 200}
    noise = noise_from_epsilon(budget, 21, **setting)
    assert plan.clients[0].mechanism.noise_multiplier == noise
    assert plan.epsilons[0] == epsilon_from_noise(noise, 21, **setting)
    assert rounds_from_epsilon(budget, noise, releases_per_round=3, **setting) == 7


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.floats(0.05, 20), st.floats(0.5, 500), st.sampled_from(["replace_one", "add_or_remove_one"])
)
def test_full_batches_last_as_long_as_the_closed_form_says(epsilon, noise, relation):
    budget = PrivacyBudget(epsilon, 1e-5, relation)
    rounds = rounds_from_epsilon(budget, noise)
    unit = 2 if relation == "replace_one" else 1
    exact = (noise / (unit * dpa.get_sigma_gaussian(epsilon, 1e-5))) ** 2
    assert rounds == math.floor(exact) or abs(exact - round(exact)) < 1e-6 * exact


@pytest.mark.slow
def test_the_published_number():
    assert epsilon_from_noise(10.0, 10) == pytest.approx(2.59438338, abs=1e-6)
    found = epsilon_from_noise(8.0, 1000, sampler=PoissonSampling(0.1), num_records=10)
    assert found == pytest.approx(3.33890, abs=3e-4)
    assert epsilon_from_noise(5.0, 10, relation="add_or_remove_one") == pytest.approx(2.59438338)


@given(
    st.integers(0, 10**6),
    st.floats(0.3, 3.0),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_the_last_round_is_found_from_any_start(last, power, guess, step):
    """For epsilon as any power of the rounds, and with jumps as another grid would make them."""
    asked = []

    def fits(rounds):
        asked.append(rounds)
        return (rounds / (last + 0.5)) ** power * (1 + step * (rounds > last)) <= 1

    assert inverse._most_rounds(fits, guess * (last + 1), 10**9) == last
    assert len(asked) <= 60
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("sampler", [PoissonSampling(0.1), FixedSizeSampling(20), FullBatch()])
def test_the_guess_at_the_rounds_is_near(relation, sampler):
    if relation == "add_or_remove_one" and isinstance(sampler, FixedSizeSampling):
        return
    budget = PrivacyBudget(1.0, 1e-5, relation)
    noise = noise_from_epsilon(budget, 500, sampler=sampler, num_records=200)
    likely = calibrate.likely_releases(noise, sampler, 200, budget)
    assert likely == pytest.approx(500, rel=0.1)


def test_limits():
    assert rounds_from_epsilon(PrivacyBudget(1.0), 0.01) == 0
    assert rounds_from_epsilon(PrivacyBudget(1.0), 1e7) == 10**9
    assert noise_from_epsilon(PrivacyBudget(math.inf), 5) == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "call"),
        [
            ("noise_multiplier must be a number above 0", lambda: epsilon_from_noise(0.0, 5)),
            ("num_releases must be a whole number", lambda: epsilon_from_noise(1.0, 0)),
            ("delta must lie strictly between", lambda: epsilon_from_noise(1.0, 5, delta=0.0)),
            ("relation must be", lambda: epsilon_from_noise(1.0, 5, relation="swap")),
            (
                "num_records must be given with PoissonSampling, got None",
                lambda: epsilon_from_noise(1.0, 5, sampler=PoissonSampling(0.1)),
            ),
            (
                "batch_size must be at most",
                lambda: epsilon_from_noise(1.0, 5, sampler=FixedSizeSampling(10), num_records=9),
            ),
            (
                "fixed size",
                lambda: epsilon_from_noise(
                    1.0,
                    5,
                    relation="add_or_remove_one",
                    sampler=FixedSizeSampling(10),
                    num_records=90,
                ),
            ),
            (
                "epsilon must be finite, got inf",
                lambda: rounds_from_epsilon(PrivacyBudget(math.inf), 1.0),
            ),
            (
                "releases_per_round must be a whole number",
                lambda: rounds_from_epsilon(PrivacyBudget(1.0), 1.0, releases_per_round=0),
            ),
            ("num_releases must be", lambda: noise_from_epsilon(PrivacyBudget(1.0), -1)),
        ],
    )
    def test_are_sentences(self, words, call):
        with pytest.raises(ValueError, match=words) as refusal:
            call()
        assert "\n" not in str(refusal.value)
