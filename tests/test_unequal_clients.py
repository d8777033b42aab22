"""Clients with promises of their own, that join late or drop out when their budget is spent."""

import math

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from benchmarks.audit import taken
from numpyro_dppvi.protocol import rounds, server
from tests.dry import dry_rounds
from tests.grids import grid
from tests.programs import forget_programs

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
        secret_keys=dppvi.privacy.SecretKeys(0),  # so that no merge is refused by chance
    )
    return plan, pvi


@pytest.fixture(scope="module")
def shards():
    return dppvi.records.stack_clients(DATA)


def test_every_client_has_its_own_promise_kept():
    with dry_rounds():
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_who_has_spent_all_is_refused_and_the_others_go_on(shards, monkeypatch):
    def without_the_first(round_number, num_clients):
        # Two rounds as planned, then one too many for client 0, then without it.
        groups = [[0], [1], [2]] if round_number < 2 else [[1], [2]]
        return np.array(groups[:num_clients])

    budgets = (BUDGETS[0], *(dppvi.PrivacyBudget(50.0),) * 2)
    plan, pvi = algorithm(2, dppvi.sequential, budgets)
    state = pvi.init(jax.random.key(0))
    with dry_rounds():
        for _ in range(2):
            state, _ = pvi.step(jax.random.key(0), state, shards)
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "run_round", lambda *_: pytest.fail("a record was touched"))
        with pytest.raises(dppvi.BudgetExceededError, match="client 0's budget is used up"):
            pvi.step(jax.random.key(0), state, shards)
    # A new plan with what the others have left goes on from the same state.
    ledger = dppvi.privacy.Ledger(
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


# ---------------------------------------------------------------------------------------------
# Clips and samples of a client's own.

CLIPS = (0.5, 1.0, 4.0)
PROBS = (0.2, 0.5, 0.8)
RATE = 1e-6
SGD = optax.sgd(RATE)
UNLIMITED = dppvi.PrivacyBudget(math.inf)


def one_step(sampler, budget, value=1e6, clips=CLIPS):
    """One noisy step at every client, as a function of the secret key.

    Every record's gradient points along the location alone and is as long as ``value``: a step is
    the sum of so many of a client's clips, over its probability of drawing a record.
    """
    method = dppvi.DPOptimization(clips, 1, SGD, sampler)
    setting = {"client_sizes": SIZES, "schedule": dppvi.synchronous}
    plan = dppvi.plan_privacy(method, budget, num_rounds=1, **setting)
    data = [{"y": np.full(size, value, np.float32)} for size in SIZES]
    pvi = dppvi.pvi(normal_mean, None, data[0], method=method, plan=plan, damping=1.0, **setting)
    program = taken(pvi, dppvi.records.stack_clients(data), rounds, "run_round")

    def steps(secret_key):
        """The sums that clients sent, in units of what their locations moved by."""
        problem, params, before, shards, groups, (key, _), _ = program
        end, _ = rounds.run_round(problem, params, before, shards, groups, (key, secret_key))
        one_by_one = jax.tree.map(lambda leaf: leaf[:, None], end.server.factors)
        q = jax.vmap(server.approximation, (None, 0))(end.server.prior, one_by_one)
        return problem.family.coordinates(q)["mu"].loc / RATE

    return plan, steps


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def test_every_sum_is_bounded_by_its_clients_own_clip(x64):
    _, steps = one_step(dppvi.FullBatch(), UNLIMITED)
    found = steps(dppvi.privacy.SecretKeys(0).round_key(0))
    np.testing.assert_allclose(found, np.multiply(CLIPS, SIZES), rtol=2e-5)
    # The joint norm of this gradient is 1.25, above some of the clips: (.75, 1) by mean and spread.
    _, steps = one_step(dppvi.FullBatch(), UNLIMITED, value=0.75)
    found = steps(dppvi.privacy.SecretKeys(0).round_key(0))
    shortened = np.minimum(1, np.array(CLIPS) / 1.25)
    np.testing.assert_allclose(found, 0.75 * shortened * SIZES, rtol=2e-5)


@pytest.mark.slow
def test_every_batch_is_drawn_and_divided_by_its_clients_own_probability(x64):
    _, steps = one_step(dppvi.PoissonSampling(PROBS), UNLIMITED)
    num_draws = 500
    keys = jax.random.split(dppvi.privacy.SecretKeys(0).round_key(0), num_draws)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(steps, keys, batch_size=100))(keys))
    counts = found * np.array(PROBS) / np.array(CLIPS)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-2)
    mean = np.multiply(SIZES, PROBS)
    error = np.sqrt(mean * (1 - np.array(PROBS)) / num_draws)
    assert (np.abs(counts.mean(axis=0) - mean) < 5 * error).all()  # fails once in 5 * 10^5
    # The size of a batch differs from draw to draw by as much as its own coins do.
    np.testing.assert_allclose(counts.std(axis=0), error * num_draws**0.5, rtol=0.2)


@pytest.mark.slow
def test_noise_follows_its_clients_own_clip_and_probability(x64):
    budgets = (dppvi.PrivacyBudget(0.5), dppvi.PrivacyBudget(1.0), dppvi.PrivacyBudget(8.0, 1e-4))
    plan, steps = one_step(dppvi.PoissonSampling(PROBS), budgets, value=0.0)
    keys = jax.random.split(dppvi.privacy.SecretKeys(0).round_key(0), 4000)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(steps, keys, batch_size=500))(keys))
    # 4000 draws: 5 standard errors are 5.6 %.
    np.testing.assert_allclose(found.std(axis=0), plan.noise_std / PROBS, rtol=0.056)
    assert np.abs(np.corrcoef(found.T)[~np.eye(3, dtype=bool)]).max() < 5 / 4000**0.5
    # Each client's plan is the plan that it would make alone.
    for number, mine in enumerate(plan.clients):
        method = dppvi.DPOptimization(
            CLIPS[number], 1, sampler=dppvi.PoissonSampling(PROBS[number])
        )
        alone = dppvi.plan_privacy(
            method, budgets[number], num_rounds=1, client_sizes=[SIZES[number]]
        )
        assert mine.mechanism.sampler == method.sampler
        assert mine.mechanism.sensitivity("replace_one") == 2 * CLIPS[number]
        assert mine.epsilon == pytest.approx(alone.clients[0].epsilon, rel=5e-3)
        assert mine.mechanism.noise_std == pytest.approx(
            alone.clients[0].mechanism.noise_std, rel=2e-3
        )
        assert 0.995 * mine.budget.epsilon <= mine.epsilon <= mine.budget.epsilon


@pytest.mark.slow
@grid("kind", [dppvi.methods.LocalAveraging, dppvi.VirtualClients], quick=[1])
def test_changes_are_clipped_to_their_clients_own_clip(x64, kind):
    clips = (0.005, 0.01, 0.04)  # of changes that would be twice as long
    method = kind((3, 2, 4), clips, num_local_steps=3)
    setting = {"client_sizes": SIZES, "schedule": dppvi.synchronous}
    plan = dppvi.plan_privacy(method, UNLIMITED, num_rounds=1, **setting)
    data = [{"y": np.full(size, 1e6, np.float32)} for size in SIZES]
    pvi = dppvi.pvi(normal_mean, None, data[0], method=method, plan=plan, damping=1.0, **setting)
    end, _ = rounds.run_round(*taken(pvi, dppvi.records.stack_clients(data), rounds, "run_round"))
    sent = np.stack([np.ravel(leaf) for leaf in end.server.factors["mu"]])
    weight = 1 if kind is dppvi.methods.LocalAveraging else np.array([3, 2, 4])
    # Equal shards: the mean is as long as one of them, and the sum as all.
    np.testing.assert_allclose(np.linalg.norm(sent, axis=0), weight * np.array(clips), rtol=1e-4)


@pytest.mark.slow
def test_the_truncation_is_that_of_the_clients_own_batch():
    """One padded size serves all: clients that draw less are cut less, and charged for that."""
    sizes, probs = (2000, 2000, 300), (0.1, 0.01, 0.5)
    method = dppvi.DPOptimization(CLIPS, sampler=dppvi.PoissonSampling(probs))
    plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(1.0), num_rounds=2, client_sizes=sizes)
    alone = [dppvi.PoissonSampling(q).physical_size([n]) for n, q in zip(sizes, probs, strict=True)]
    assert plan.physical_size == max(alone)
    for mine, size, prob in zip(plan.clients, sizes, probs, strict=True):
        event = mine.mechanism.dp_event
        assert event.sampling_probability == prob
        assert event.truncated_batch_size == max(alone)
        assert event.dataset_size == size


@pytest.mark.slow
def test_other_numbers_need_no_other_program(monkeypatch):
    traced, one_round = [], rounds.one_round
    monkeypatch.setattr(rounds, "one_round", lambda *a: traced.append(a) or one_round(*a))
    forget_programs()
    for clips, probs in (((1.0, 2.0, 3.0), (0.1, 0.2, 0.5)), ((5.0, 1.0, 9.0), (0.3, 0.1, 0.5))):
        _, steps = one_step(dppvi.PoissonSampling(probs), UNLIMITED, clips=clips)
        steps(dppvi.privacy.SecretKeys(0).round_key(0))
    assert len(traced) == 1


def test_the_statement_says_each_clients_own():
    with dry_rounds():
        result = dppvi.fit(
            normal_mean,
            None,
            DATA,
            rng_key=jax.random.key(0),
            method=dppvi.DPOptimization(CLIPS, sampler=dppvi.PoissonSampling(PROBS)),
            budget=dppvi.PrivacyBudget(1.0),
            num_rounds=2,
            progress_bar=False,
        )
    clients = result.privacy_statement().as_dict()["clients"]
    assert [mine["clip_norm"] for mine in clients] == list(CLIPS)
    assert [mine["sensitivity"] for mine in clients] == [2 * clip for clip in CLIPS]
    for mine, prob in zip(clients, PROBS, strict=True):
        assert f"Poisson q={prob:g} " in mine["batch"]
        assert mine["epsilon_spent"] <= 1.0
