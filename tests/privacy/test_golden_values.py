"""Accounting against exact and published values, and calibration against its promise."""

import itertools
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import pld, rdp

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import FullBatch, PoissonSampling, PrivacyBudget, accounting, calibrate

# Full batch, replace-one: (releases, noise / clip, delta) -> epsilon, Balle and Wang's closed form.
CLOSED_FORM = {
    (1, 10, 1e-5): 0.72552175,
    (10, 10, 1e-5): 2.59438338,
    (15, 10, 1e-5): 3.26454999,
    (20, 10, 1e-5): 3.84861028,
    (10, 10, 1e-6): 2.92160059,
    (20, 10, 1e-6): 4.30584111,
    (10, 25, 1e-5): 0.93846984,
    (20, 40, 1e-5): 0.81972833,
}
# Poisson: (q, releases, noise / clip, delta) -> epsilon under replace-one and add-or-remove-one.
# Computed on a grid of 1e-4, which is up to 3e-5 too much; the replace-one values equal the
# Fourier accountant's to 1e-5.
POISSON = {
    (0.01, 1000, 2, 1e-5): (1.2052096, 0.6220485),
    (0.02, 2000, 4, 1e-5): (1.7595886, 0.8426517),
    (0.1, 100, 4, 1e-6): (2.2513625, 1.1319204),
    (0.1, 1000, 8, 1e-5): (3.3389007, 1.5513739),
    (0.1, 1000, 16, 1e-5): (1.5344024, 0.7192770),
    (0.2, 20, 2, 1e-5): (3.8521942, 2.2196921),
    (0.5, 10, 5, 1e-5): (2.5799826, 1.2784794),
}


def gaussian(noise):
    return dpa.GaussianDpEvent(noise)


def poisson(prob, noise):
    return dpa.PoissonSampledDpEvent(prob, gaussian(noise))


def epsilon(event, count, delta=1e-5, relation="replace_one"):
    return accounting.epsilon(accounting.compose([(event, count)]), delta, relation)


@pytest.mark.parametrize(("case", "expected"), CLOSED_FORM.items())
def test_full_batches_cost_the_closed_form(case, expected):
    count, noise, delta = case
    assert epsilon(gaussian(noise), count, delta) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("case", "expected"), POISSON.items())
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_poisson_batches_cost_the_published_values(case, expected, relation):
    prob, count, noise, delta = case
    golden = expected[relation == "add_or_remove_one"]
    found = epsilon(poisson(prob, noise), count, delta, relation)
    assert golden - 4e-5 <= found <= golden + 2e-4


def test_mixed_releases_compose():
    events = [(poisson(0.1, 8.0), 500), (poisson(0.2, 16.0), 200), (gaussian(40.0), 10)]
    found = accounting.epsilon(accounting.compose(events), 1e-5, "replace_one")
    assert found == pytest.approx(2.814434, abs=2e-4)


def test_the_accountants_conventions_are_what_we_take_them_for():
    """Under replace-one the PLD accountant doubles a Gaussian's sensitivity; RDP does not."""
    relation = dpa.NeighboringRelation.REPLACE_ONE
    by_pld = pld.PLDAccountant(relation).compose(gaussian(4.0)).get_epsilon(1e-5)
    assert by_pld == pytest.approx(epsilon(gaussian(4.0), 1), abs=1e-4)
    by_rdp = rdp.RdpAccountant(neighboring_relation=relation).compose(gaussian(4.0))
    assert by_rdp.get_epsilon(1e-5) < 0.6 * by_pld  # as if the sensitivity were 1
    by_rdp = rdp.RdpAccountant(neighboring_relation=relation).compose(gaussian(2.0))
    assert by_pld <= by_rdp.get_epsilon(1e-5) <= 1.1 * by_pld


def test_truncation_is_charged_and_costs_next_to_nothing():
    sampler = PoissonSampling(0.1)
    size = sampler.physical_size([2000])
    event = sampler.dp_event(8.0, 2000, size)
    assert isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent)
    plain, truncated = epsilon(poisson(0.1, 8.0), 1000), epsilon(event, 1000)
    assert plain - 1e-6 <= truncated <= plain * (1 + 5e-4)
    # A batch padded to its mean only would cost a lot: the event does see the size.
    assert epsilon(sampler.dp_event(8.0, 2000, 200), 1000) > 1.2 * plain


def test_order_and_limits_hold():
    costs = [epsilon(poisson(q, 8.0), 100) for q in (0.05, 0.1, 0.3, 0.9)]
    assert costs == sorted(costs)
    assert costs[-1] <= epsilon(gaussian(8.0), 100)
    assert epsilon(gaussian(8.0), 100, relation="add_or_remove_one") < epsilon(gaussian(8.0), 100)
    assert accounting.epsilon(accounting.compose([]), 1e-5, "replace_one") == 0.0
    assert epsilon(gaussian(0.0), 1) == math.inf


def test_events_without_a_proven_pair_are_refused():
    event = dpa.SampledWithoutReplacementDpEvent(100, 10, gaussian(1.0))
    with pytest.raises(TypeError, match="SampledWithoutReplacement"):
        epsilon(event, 1)


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("sampler", [FullBatch(), PoissonSampling(0.1)], ids=["full", "poisson"])
def test_calibrated_noise_keeps_the_budget_and_uses_it(sampler, relation, target):
    budget = PrivacyBudget(target, 1e-5, relation)
    size = sampler.physical_size([500])
    noise = calibrate.noise_multiplier(budget, 40, sampler, 500, size)
    spent = epsilon(sampler.dp_event(noise, 500, size), 40, 1e-5, relation)
    assert 0.995 * target <= spent <= target


def test_full_batch_noise_is_the_closed_form():
    budget = PrivacyBudget(1.0, 1e-5)
    noise = calibrate.noise_multiplier(budget, 30, FullBatch(), 100, 100)
    assert noise == pytest.approx(2 * math.sqrt(30) * 3.73063163, rel=1e-6)
    assert calibrate.noise_multiplier(PrivacyBudget(math.inf), 30, FullBatch(), 1, 1) == 0.0


def test_a_statements_numbers_are_the_runs_numbers():
    method = dppvi.DPOptimization(clip_norm=2.0, num_local_steps=4)
    budgets = [PrivacyBudget(1.0), PrivacyBudget(2.0), PrivacyBudget(2.0)]
    plan = dppvi.plan_privacy(method, budgets, num_rounds=5, client_sizes=[100, 200, 200])
    ledger = plan.ledger()
    for number, visits in enumerate((5, 2, 5)):
        event = plan.clients[number].mechanism.dp_event
        ledger = ledger.charge([dppvi.privacy.Entry(0, number, event, 4 * visits)])
    statement = dppvi.PrivacyStatement("DPOptimization", plan, ledger, insecure_seed=False)
    facts = json.loads(statement.to_json())
    spent = ledger.spent()
    np.testing.assert_allclose([c["epsilon_spent"] for c in facts["clients"]], spent)
    assert [c["releases"] for c in facts["clients"]] == [20, 8, 20]
    assert facts["max_epsilon"] == pytest.approx(spent.max())
    for client, row in zip(plan.clients, facts["clients"], strict=True):
        assert row["noise_std"] == pytest.approx(client.mechanism.noise_std)
        assert row["sensitivity"] == 2 * 2.0
    text = str(statement)
    assert all(f"{value:.4f}" in text for value in spent)
    assert "operating system" in text
    seeded = dppvi.PrivacyStatement("DPOptimization", plan, ledger, insecure_seed=True)
    assert "can remove the noise" in str(seeded)


def test_a_ledger_refuses_before_it_charges():
    budget = PrivacyBudget(1.0)
    method = dppvi.DPOptimization(num_local_steps=1)
    plan = dppvi.plan_privacy(method, budget, num_rounds=3, client_sizes=[50, 50])
    ledger, event = plan.ledger(), plan.clients[0].mechanism.dp_event
    entries = [dppvi.privacy.Entry(r, 0, event, 1) for r in range(3)]
    for order in itertools.permutations(entries):
        full = ledger
        for entry in order:
            full = full.charge([entry])
        np.testing.assert_allclose(full.spent(), [plan.epsilons[0], 0.0])
    with pytest.raises(dppvi.BudgetExceededError, match=r"client 0's budget.*of 1 at delta"):
        full.charge([dppvi.privacy.Entry(3, 0, event, 1)])
    assert len(full.entries) == 3
    assert len(ledger.entries) == 0
