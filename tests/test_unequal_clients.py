"""Clients with promises of their own, that join late or drop out when their budget is spent."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import rounds

SIZES = (30, 20, 40)
BUDGETS = (
    dppvi.PrivacyBudget(0.5, 1e-6),
    dppvi.PrivacyBudget(4.0, 1e-4, relation="add_or_remove_one"),
    dppvi.PrivacyBudget(2.0, 1e-5, max_records_per_person=2),
)
METHOD = dppvi.DPOptimization(num_local_steps=2)


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


DATA = [{"y": np.linspace(-1, 1, size).astype(np.float32)} for size in SIZES]


def late(round_number, num_clients):
    """Clients 0 and 1 from the start, client 2 from round 3 on."""
    del num_clients
    return np.array([[0], [1]] if round_number < 3 else [[0], [1], [2]])


def algorithm(num_rounds, schedule, budgets=BUDGETS):
    plan = dppvi.plan_privacy(
        METHOD, budgets, num_rounds=num_rounds, client_sizes=SIZES, schedule=schedule
    )
    pvi = dppvi.pvi(
        normal_mean,
        None,
        DATA[0],
        method=METHOD,
        client_sizes=SIZES,
        plan=plan,
        schedule=schedule,
    )
    return plan, pvi


@pytest.fixture(scope="module")
def shards():
    return dppvi.stack_clients(DATA)


def test_every_client_has_its_own_promise_kept():
    result = dppvi.fit(
        normal_mean,
        None,
        DATA,
        rng_key=jax.random.key(0),
        method=METHOD,
        budget=BUDGETS,
        num_rounds=3,
        progress_bar=False,
    )
    spent = result.ledger.spent()
    for epsilon, budget in zip(spent, BUDGETS, strict=True):
        assert 0.995 * budget.epsilon <= epsilon <= budget.epsilon
    # Less budget, more noise; two records of a person, twice the noise of one.
    stds = result.plan.noise_std
    assert stds[0] > stds[2] > stds[1]
    facts = result.privacy_statement().as_dict()
    for row, budget in zip(facts["clients"], BUDGETS, strict=True):
        assert (row["epsilon_budget"], row["delta"]) == (budget.epsilon, budget.delta)
        assert row["relation"] == budget.relation
        assert row["contributions"] == budget.max_records_per_person
    assert facts["max_epsilon"] == spent.max()
    assert facts["max_delta"] == 1e-4
    # The whole is protected by the worst of each.
    assert "at delta = 0.0001" in str(result.privacy_statement())


def test_a_client_may_join_late(shards):
    plan, pvi = algorithm(6, late)
    assert [client.num_visits for client in plan.clients] == [6, 6, 3]
    state = pvi.init(jax.random.key(0))
    for round_number in range(6):
        nothing_yet = round_number <= 2
        state, _ = pvi.step(jax.random.key(0), state, shards)
        assert (state.ledger.spent()[2] == 0) == nothing_yet
        untouched = all(not np.any(leaf[2]) for leaf in jax.tree.leaves(state.factors))
        assert untouched == nothing_yet
    np.testing.assert_array_equal(state.ledger.spent(), plan.epsilons)
    # Its noise fits the three rounds that it takes part in, not all six.
    always, _ = algorithm(6, dppvi.sequential)
    assert plan.noise_std[2] == pytest.approx(always.noise_std[2] / np.sqrt(2), rel=1e-6)
    assert plan.noise_std[0] == always.noise_std[0]


def test_who_has_spent_all_is_refused_and_the_others_go_on(shards, monkeypatch):
    def without_the_first(round_number, num_clients):
        # Two rounds as planned, then one too many for client 0, then without it.
        groups = [[0], [1], [2]] if round_number < 2 else [[1], [2]]
        return np.array(groups[:num_clients])

    budgets = (BUDGETS[0], *(dppvi.PrivacyBudget(50.0),) * 2)
    plan, pvi = algorithm(2, dppvi.sequential, budgets)
    state = pvi.init(jax.random.key(0))
    for _ in range(2):
        state, _ = pvi.step(jax.random.key(0), state, shards)
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "run", lambda *_: pytest.fail("a record was touched"))
        with pytest.raises(dppvi.BudgetExceededError, match="client 0's budget is used up"):
            pvi.step(jax.random.key(0), state, shards)
    # A new plan with what the others have left goes on from the same state.
    ledger = dppvi.Ledger(
        budgets=(budgets[0], *(dppvi.PrivacyBudget(80.0),) * 2), entries=state.ledger.entries
    )
    _, others = algorithm(2, without_the_first, budgets)
    after, _ = others.step(jax.random.key(0), state._replace(ledger=ledger), shards)
    spent = after.ledger.spent()
    assert spent[0] == plan.epsilons[0]
    assert (spent[1:] > plan.epsilons[1:]).all()
    for before, now in zip(
        jax.tree.leaves(state.factors), jax.tree.leaves(after.factors), strict=True
    ):
        np.testing.assert_array_equal(before[0], now[0])
        assert not np.array_equal(before[1:], now[1:])
