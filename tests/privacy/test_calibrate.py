"""Calibrated noise keeps the budget, always, and wastes next to nothing of it."""

import itertools
import math

import dp_accounting as dpa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dppvi.privacy import (
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyBudget,
    accounting,
    calibrate,
)
from tests.grids import grid

RELATIONS = ["replace_one", "add_or_remove_one"]
EPSILONS = [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 50.0]


def spent(budget, noise, num_releases, sampler, num_records, physical_size):
    event = sampler.dp_event(noise, num_records, physical_size)
    composition = accounting.compose([(event, num_releases)])
    return accounting.epsilon(composition, budget.delta, budget.relation)


def check_share_spent(budget, num_releases, sampler, num_records):
    """The promise: at most the budget, and at least .995 of it."""
    setting = {
        "num_releases": num_releases,
        "sampler": sampler,
        "num_records": num_records,
        "physical_size": sampler.physical_size([num_records]),
    }
    noise = calibrate.noise_multiplier(budget, **setting)
    share = spent(budget, noise, **setting) / budget.epsilon
    assert 0.995 <= share <= 1, (budget, setting, share)


class TestFullBatch:
    @pytest.mark.parametrize("num_releases", [1, 30, 1000])
    @pytest.mark.parametrize("relation", RELATIONS)
    @pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9, 1e-15])
    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_keeps_the_budget_and_uses_it(self, epsilon, delta, relation, num_releases):
        check_share_spent(PrivacyBudget(epsilon, delta, relation), num_releases, FullBatch(), 100)

    @pytest.mark.parametrize(
        ("relation", "sensitivity"), [("replace_one", 2), ("add_or_remove_one", 1)]
    )
    @pytest.mark.parametrize("epsilon", EPSILONS)
    def test_is_the_closed_form(self, epsilon, relation, sensitivity):
        budget = PrivacyBudget(epsilon, 1e-5, relation)
        noise = calibrate.noise_multiplier(
            budget, num_releases=30, sampler=FullBatch(), num_records=100, physical_size=100
        )
        exact = sensitivity * math.sqrt(30) * dpa.get_sigma_gaussian(epsilon, 1e-5)
        assert noise == pytest.approx(exact, rel=1e-8)

    def test_is_the_published_number(self):
        noise = calibrate.noise_multiplier(
            PrivacyBudget(1.0, 1e-5),
            num_releases=1,
            sampler=FullBatch(),
            num_records=100,
            physical_size=100,
        )
        assert noise == pytest.approx(2 * 3.73063163, rel=1e-8)

    @pytest.mark.slow
    @settings(max_examples=100)
    @given(
        st.floats(1e-6, 1e6),
        st.floats(1e-15, 0.5),
        st.integers(1, 10**5),
        st.sampled_from(RELATIONS),
    )
    def test_never_exceeds_any_budget(self, epsilon, delta, num_releases, relation):
        budget = PrivacyBudget(epsilon, delta, relation)
        noise = calibrate.noise_multiplier(
            budget,
            num_releases=num_releases,
            sampler=FullBatch(),
            num_records=100,
            physical_size=100,
        )
        assert 0 < noise < math.inf
        assert spent(budget, noise, num_releases, FullBatch(), 100, 100) <= epsilon


# One of each epsilon, with everything else varied along.
FEW_POISSON = [
    (0.1, 1e-5, "replace_one", 0.1, 30),
    (0.5, 1e-6, "add_or_remove_one", 0.1, 30),
    (1.0, 1e-5, "replace_one", 0.02, 500),
    (1.0, 1e-5, "replace_one", 0.9, 1),
    (2.0, 1e-3, "add_or_remove_one", 0.5, 10),
    (4.0, 1e-9, "replace_one", 0.1, 1000),
    (8.0, 1e-5, "add_or_remove_one", 0.01, 10),
    (50.0, 1e-5, "replace_one", 0.1, 30),
    (50.0, 1e-5, "replace_one", 0.9, 30),
]
MANY_POISSON = list(
    itertools.product(EPSILONS, [1e-3, 1e-5, 1e-9], RELATIONS, [0.01, 0.1, 0.9], [1, 30, 1000])
)
EXTREMES = [
    (1e-6, 1e-5, "replace_one", 0.1, 100),  # epsilon hardly counts beside delta
    (1e-3, 1e-5, "replace_one", 0.1, 100),
    (1.0, 1e-6, "replace_one", 0.01, 100_000),
    (1000.0, 1e-6, "replace_one", 0.01, 10),
    (50.0, 0.5, "add_or_remove_one", 0.999, 1),
]


class TestPoisson:
    @grid(("epsilon", "delta", "relation", "prob", "steps"), FEW_POISSON, quick=[3])
    def test_keeps_the_budget_and_uses_it(self, epsilon, delta, relation, prob, steps):
        budget = PrivacyBudget(epsilon, delta, relation)
        check_share_spent(budget, steps, PoissonSampling(prob), 2442)

    @pytest.mark.slow
    @grid(("epsilon", "delta", "relation", "prob", "steps"), EXTREMES, quick=[0, 1, 3, 4])
    def test_keeps_and_uses_extreme_budgets(self, epsilon, delta, relation, prob, steps):
        budget = PrivacyBudget(epsilon, delta, relation)
        check_share_spent(budget, steps, PoissonSampling(prob), 10)

    @pytest.mark.slow
    @pytest.mark.parametrize(("epsilon", "delta", "relation", "prob", "steps"), MANY_POISSON)
    def test_keeps_every_budget_and_uses_it(self, epsilon, delta, relation, prob, steps):
        budget = PrivacyBudget(epsilon, delta, relation)
        sampler = PoissonSampling(prob)
        noise = calibrate.noise_multiplier(
            budget, num_releases=steps, sampler=sampler, num_records=50, physical_size=50
        )
        least = noise == calibrate._LEAST_NOISE
        share = spent(budget, noise, steps, sampler, 50, 50) / epsilon
        assert share <= 1
        assert share >= 0.995 or least

    @pytest.mark.slow
    def test_needs_less_noise_than_full_batches(self):
        budget = PrivacyBudget(1.0, 1e-5)
        sampled = calibrate.noise_multiplier(
            budget, num_releases=30, sampler=PoissonSampling(0.1), num_records=50, physical_size=50
        )
        assert sampled < 0.3 * calibrate.noise_multiplier(
            budget, num_releases=30, sampler=FullBatch(), num_records=50, physical_size=50
        )

    def test_adds_some_noise_where_none_is_needed(self):
        # A record is in the batch with probability 1e-6, and delta allows a thousand times that.
        budget = PrivacyBudget(0.1, 1e-3)
        noise = calibrate.noise_multiplier(
            budget, num_releases=1, sampler=PoissonSampling(1e-6), num_records=50, physical_size=50
        )
        assert noise > 0
        assert spent(budget, noise, 1, PoissonSampling(1e-6), 50, 50) == 0

    def test_refuses_a_delta_that_the_accountant_cannot_show(self):
        with pytest.raises(ValueError, match=r"delta must be larger for 100 .* got 1e-16.*delta="):
            calibrate.noise_multiplier(
                PrivacyBudget(1.0, 1e-16),
                num_releases=100,
                sampler=PoissonSampling(0.1),
                num_records=50,
                physical_size=50,
            )


# (epsilon, delta, batch size, records, releases): one of each epsilon, and extremes.
FIXED_SIZE = [
    (0.1, 1e-5, 100, 1000, 30),
    (0.5, 1e-6, 50, 1000, 200),
    (1.0, 1e-5, 244, 2442, 1000),
    (1.0, 1e-5, 900, 1000, 1),
    (2.0, 1e-3, 5, 10, 10),
    (4.0, 1e-9, 100, 1000, 1000),
    (8.0, 1e-5, 100, 1000, 10),
    (50.0, 1e-5, 100, 1000, 30),
    (1e-3, 1e-5, 10, 100, 100),
    (1000.0, 1e-6, 10, 1000, 10),
    (5000.0, 1e-5, 244, 2442, 1000),
    (50.0, 0.5, 999, 1000, 1),
    (1.0, 1e-5, 10, 10, 30),
]


class TestFixedSize:
    @grid(("epsilon", "delta", "batch_size", "size", "steps"), FIXED_SIZE, quick=[3, 4, 6, 11, 12])
    def test_keeps_the_budget_and_uses_it(self, epsilon, delta, batch_size, size, steps):
        budget = PrivacyBudget(epsilon, delta)
        check_share_spent(budget, steps, FixedSizeSampling(batch_size), size)

    @pytest.mark.slow
    @pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
    @pytest.mark.parametrize("epsilon", EPSILONS)
    @pytest.mark.parametrize("steps", [1, 30, 1000])
    @pytest.mark.parametrize("batch_size", [10, 100, 900])
    def test_keeps_every_budget_and_uses_it(self, epsilon, delta, batch_size, steps):
        budget, sampler = PrivacyBudget(epsilon, delta), FixedSizeSampling(batch_size)
        noise = calibrate.noise_multiplier(
            budget, num_releases=steps, sampler=sampler, num_records=1000, physical_size=batch_size
        )
        share = spent(budget, noise, steps, sampler, 1000, batch_size) / epsilon
        assert share <= 1
        assert share >= 0.995 or noise == calibrate._LEAST_NOISE

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("epsilon", "published", "for_poisson"),
        [(0.5, 45.196, 44.474), (1.0, 24.316, 23.593), (8.0, 4.508, 3.786)],
    )
    def test_is_the_published_number(self, epsilon, published, for_poisson):
        budget = PrivacyBudget(epsilon, 1e-5)
        noise = calibrate.noise_multiplier(
            budget,
            num_releases=1000,
            sampler=FixedSizeSampling(100),
            num_records=1000,
            physical_size=100,
        )
        assert published * (1 - 1e-3) <= noise <= published * (1 + 1e-3)
        # More than coins need.
        noise = calibrate.noise_multiplier(
            budget,
            num_releases=1000,
            sampler=PoissonSampling(0.1),
            num_records=100,
            physical_size=100,
        )
        assert noise == pytest.approx(for_poisson, rel=1e-3)

    def test_a_batch_of_all_records_is_a_full_batch(self):
        budget = PrivacyBudget(1.0, 1e-5)
        all_records = calibrate.noise_multiplier(
            budget, num_releases=30, sampler=FixedSizeSampling(50), num_records=50, physical_size=50
        )
        assert all_records == calibrate.noise_multiplier(
            budget, num_releases=30, sampler=FullBatch(), num_records=50, physical_size=50
        )

    @pytest.mark.slow
    def test_larger_clients_need_less_noise(self):
        budget, sampler = PrivacyBudget(1.0, 1e-5), FixedSizeSampling(50)
        noises = [
            calibrate.noise_multiplier(
                budget, num_releases=30, sampler=sampler, num_records=n, physical_size=50
            )
            for n in (50, 80, 500)
        ]
        assert noises == sorted(noises, reverse=True)
        assert noises[0] > 5 * noises[-1]

    @pytest.mark.parametrize("epsilon", [1.0, math.inf])
    def test_refuses_what_is_not_accounted(self, epsilon):
        budget = PrivacyBudget(epsilon, 1e-5, "add_or_remove_one")
        with pytest.raises(ValueError, match="fixed size"):
            calibrate.noise_multiplier(
                budget,
                num_releases=30,
                sampler=FixedSizeSampling(50),
                num_records=80,
                physical_size=50,
            )
        with pytest.raises(ValueError, match="batch_size must be at most"):
            calibrate.noise_multiplier(
                PrivacyBudget(epsilon, 1e-5),
                num_releases=30,
                sampler=FixedSizeSampling(50),
                num_records=49,
                physical_size=50,
            )


def test_an_infinite_budget_needs_no_noise():
    for sampler in (FullBatch(), PoissonSampling(0.1), FixedSizeSampling(20)):
        noise = calibrate.noise_multiplier(
            PrivacyBudget(math.inf),
            num_releases=10,
            sampler=sampler,
            num_records=50,
            physical_size=20,
        )
        assert noise == 0.0


@pytest.fixture
def evaluations(monkeypatch):
    """The different questions that the accountant was asked since the test began."""
    calibrate.noise_multiplier.cache_clear()
    calibrate._rough_noise.cache_clear()
    asked, epsilon = set(), accounting.epsilon

    def recorded(*arguments):
        asked.add(arguments)
        return epsilon(*arguments)

    monkeypatch.setattr(accounting, "epsilon", recorded)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [PoissonSampling(0.1), FixedSizeSampling(5)])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_few_evaluations_are_enough(epsilon, sampler, evaluations):
    # Each may take a second.
    budget = PrivacyBudget(epsilon, 1e-5)
    calibrate.noise_multiplier(
        budget, num_releases=30, sampler=sampler, num_records=50, physical_size=50
    )
    assert 1 < len(evaluations) <= 6


@pytest.mark.slow
def test_clients_of_other_sizes_need_one_evaluation_each(evaluations):
    budget, sampler = PrivacyBudget(1.0, 1e-5), PoissonSampling(0.1)
    sizes = [900, 930, 960, 990, 1000]
    physical_size = sampler.physical_size(sizes)
    calibrate.noise_multiplier(
        budget, num_releases=30, sampler=sampler, num_records=sizes[0], physical_size=physical_size
    )
    first = len(evaluations)
    for size in sizes[1:]:
        calibrate.noise_multiplier(
            budget, num_releases=30, sampler=sampler, num_records=size, physical_size=physical_size
        )
    assert len(evaluations) - first == len(sizes[1:])
