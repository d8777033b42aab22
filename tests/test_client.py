"""The seam between the server and its clients: one client at a time is the compiled round."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.privacy import LedgerFile
from numpyro_dppvi.protocol import algorithm, client, server
from numpyro_dppvi.protocol.messages import Release
from tests.alone import client_of

SIZES = (12, 9, 15)
KEY = jax.random.key(5)
NUM_ROUNDS = 3
QUICK = {"num_local_steps": 2}
take = compiled("problem")(server.take)
begin_round = compiled("problem")(server.begin_round)
request = compiled("problem")(server.request)


def logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def shrinkage(X, y):
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@functools.cache
def data():
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(size, 2)).astype(np.float32) for size in SIZES]
    y = [(rng.random(len(x)) < 1 / (1 + np.exp(-x.sum(1)))).astype(np.int32) for x in X]
    return [{"X": a, "y": b} for a, b in zip(X, y, strict=True)]


RUNS = {
    "full batches": {"method": dppvi.DPOptimization(**QUICK)},
    "Poisson batches": {
        "method": dppvi.DPOptimization(sampler=dppvi.PoissonSampling(0.4), **QUICK),
        "schedule": dppvi.synchronous,
    },
    "virtual": {"method": dppvi.VirtualClients((2, 3, 4), 0.1, **QUICK)},
    "averaging": {
        "method": dppvi.methods.LocalAveraging((2, 3, 4), 0.1, **QUICK),
        "schedule": dppvi.synchronous,
    },
    "a sum of virtual clients'": {
        "method": dppvi.VirtualClients(3, 0.1, **QUICK),
        "schedule": dppvi.synchronous,
        "trusted_aggregator": True,
    },
    "at their own pace": {
        "method": dppvi.DPOptimization(**QUICK),
        "schedule": dppvi.Asynchronous((1.0, 1.5, 2.5)),
    },
    "virtual, at their own pace": {
        "method": dppvi.VirtualClients(3, 0.1, **QUICK),
        "schedule": dppvi.Asynchronous((1.0, 1.5, 2.5)),
    },
    "central": {
        "method": dppvi.GlobalVI(),
        "schedule": dppvi.synchronous,
        "trusted_aggregator": True,
    },
    "a hierarchy": {"method": dppvi.DPOptimization(**QUICK), "model": shrinkage},
    "from a public start": {
        "method": dppvi.VirtualClients(3, 0.1, **QUICK),
        "init_scale": 0.1,
    },
    "without privacy": {"method": dppvi.NonPrivate(**QUICK)},
    "scores": {"method": dppvi.FisherScoring(2)},
    "a sum of scores": {
        "method": dppvi.FisherScoring(2),
        "schedule": dppvi.synchronous,
        "trusted_aggregator": True,
    },
    "scores, at their own pace": {
        "method": dppvi.FisherScoring(2),
        "schedule": dppvi.Asynchronous((1.0, 1.5, 2.5)),
    },
}


def prepared(
    method,
    model=logistic,
    schedule=dppvi.sequential,
    trusted_aggregator=False,
    init_scale=None,
    insecure_noise_seed=7,
):
    """What ``pvi`` finds out, and the algorithm that it makes of that."""
    public = {"schedule": schedule, "client_sizes": SIZES}
    plan = None
    if method.releases != "nothing":
        aggregator = {"trusted_aggregator": trusted_aggregator}
        budget = dppvi.PrivacyBudget(4.0)
        plan = dppvi.plan_privacy(method, budget, num_rounds=NUM_ROUNDS, **public, **aggregator)
    shapes = {
        name: jax.ShapeDtypeStruct((sum(SIZES), *leaf.shape[1:]), leaf.dtype)
        for name, leaf in data()[0].items()
    }
    setup = algorithm.Setup(
        model,
        None,
        shapes,
        model_kwargs={},
        method=method,
        plan=plan,
        damping=0.4,
        secret_keys=dppvi.privacy.SecretKeys(insecure_noise_seed),
        trusted=server.aggregator(trusted_aggregator),
        init_scale=init_scale,
        **public,
    )
    return algorithm.prepare(setup), algorithm.assemble(setup)


@functools.cache
def named(name):
    """One of the runs above, prepared once: tests that ask for it share what is compiled."""
    with jax.enable_x64(True):
        return prepared(**RUNS[name])


@functools.cache
def together(name):
    """The state after all rounds, as one program."""
    _, steps = named(name)
    with jax.enable_x64(True):
        shards = dppvi.records.stack_clients(data())
        state = steps.init(KEY)
        for _ in range(NUM_ROUNDS):
            state, _ = steps.step(KEY, state, shards)
    return state


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def one_at_a_time(assembly, shards):
    """A run in which every client is a value of its own, and the server sees messages alone."""
    problem, params = assembly.problem, assembly.params
    first = assembly.first_state(KEY)
    known = first.server
    clients = [client_of(assembly, m, first, shards) for m in range(len(SIZES))]
    for number in range(NUM_ROUNDS):
        known, key = begin_round(problem, params, known, jax.random.fold_in(KEY, number))
        for index, group in enumerate(assembly.groups(number)):
            shared, q = server.public_key(problem, key, index), known.natural
            released = []
            for m in group:
                asked = request(problem, params, known, q, int(m), shared)
                asked = asked._replace(round=number, group=index)
                clients[m], release = clients[m].respond(asked)
                released.append(release)
            assert all(type(release) is Release for release in released)
            releases = jax.tree.map(lambda *leaves: jnp.stack(leaves), *released)
            known, answer, _ = take(problem, params, known, jnp.asarray(group), q, releases, shared)
            for m in group:
                clients[m] = clients[m].settle(answer)
    return known, clients


# In turn and at their own pace; `make slow` runs them all.
QUICKLY = ("full batches", "at their own pace")
ALL = [name if name in QUICKLY else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name", ALL)
def test_one_client_at_a_time_is_the_compiled_round(name):
    """What the server knows and what every client keeps.

    To the bit as users compile, where clients are visited in turn and keep nothing to themselves,
    and the server remembers nothing. Else to the last of 53 bits: clients side by side are solved
    for in one batch, whose sums XLA orders otherwise; ``private + share * kept`` is rounded once or
    twice as it happens to be compiled, and so are the matrices that a server makes of memory.
    """
    assembly, state = named(name)[0], together(name)
    with jax.enable_x64(True):
        known, clients = one_at_a_time(assembly, dppvi.records.stack_clients(data()))
        apart = [factors.picked(state.clients, m) for m in range(len(SIZES))]
    in_haste = "optimization_level=0" in os.environ.get("XLA_FLAGS", "")
    in_turn = assembly.groups(0).shape[1] == 1 and not assembly.problem.layout.private
    exact = in_turn and not in_haste and not jax.tree.leaves(state.server.memory)
    found = (known, [each.state for each in clients])
    for a, b in zip(*map(jax.tree.leaves, (found, (state.server, apart))), strict=True):
        # Scores released beside a look are what is left of noise that is many times as large.
        slack = 0 if exact else 3e-14 * np.max(np.abs(b), initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=slack)
    for m, each in enumerate(clients if state.ledger.budgets else ()):
        assert each.ledger.composition(0) == state.ledger.composition(m)


@pytest.mark.slow
def test_the_server_knows_nothing_of_what_clients_keep():
    """Neither their private factors nor a secret key is in what it holds or is sent."""
    state = together("virtual")
    private = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.clients.private)])
    known = jax.tree.leaves(state.server)
    assert not any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in known)
    assert np.count_nonzero(private) > 20
    assert not np.isin(np.concatenate([np.ravel(x) for x in known]), private[private != 0]).any()
    assert state.server._fields == ("prior", "factors", "memory", "begin")
    assert Release._fields == ("value", "failed")


def first_client(assembly):
    """The first client of a run, and a request to it."""
    first = assembly.first_state(KEY)
    mine = client_of(assembly, 0, first, dppvi.records.stack_clients(data()))
    asked = request(assembly.problem, assembly.params, first.server, first.server.natural, 0, KEY)
    return mine, asked


def test_a_client_is_charged_before_it_computes(x64, monkeypatch, tmp_path):
    mine, asked = first_client(named("full batches")[0])
    file, seen = LedgerFile(tmp_path / "ledger.jsonl"), []
    mine = dataclasses.replace(mine, ledger=file.open(mine.ledger), ledger_file=file)

    def respond(*arguments):
        seen.append(len(file.open(mine.ledger).entries))
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_respond", respond)
    with pytest.raises(KeyboardInterrupt):
        mine.respond(asked)
    assert seen == [1]
    assert not mine.ledger.entries  # a value: what it was is what it is


def test_a_client_refuses_what_its_budget_does_not_cover(x64, monkeypatch):
    mine, asked = first_client(named("full batches")[0])
    for number in range(NUM_ROUNDS):
        mine, _ = mine.respond(asked._replace(round=number))
    assert mine.ledger.spent()[0] == pytest.approx(4.0, rel=0.01)
    monkeypatch.setattr(client, "_respond", lambda *_: pytest.fail("a record was touched"))
    with pytest.raises(dppvi.BudgetExceededError, match="nothing was computed"):
        mine.respond(asked._replace(round=NUM_ROUNDS))


@pytest.mark.slow
def test_without_a_seed_no_two_responses_have_the_same_noise():
    """In 32 bits, unlike the tests that share what was compiled in 64."""
    method = RUNS["full batches"]["method"]
    mine, asked = first_client(prepared(method, insecure_noise_seed=None)[0])
    one, other = (mine.respond(asked)[1].value["w"].linear for _ in range(2))
    assert np.all(np.isfinite([one, other]))
    assert np.all(one != other)


@pytest.mark.slow
def test_a_refused_change_did_not_happen_at_the_client(x64):
    mine, asked = first_client(named("virtual")[0])
    after, release = mine.respond(asked)
    refused = after.settle(server.Answer(jnp.asarray(0.0), asked.q))
    for a, b in zip(*map(jax.tree.leaves, (refused.state, mine.state)), strict=True):
        np.testing.assert_array_equal(a, b)
    taken = after.settle(server.Answer(jnp.asarray(1.0), asked.q))
    assert np.any(taken.state.private["w"].linear)
    assert refused.unanswered is taken.unanswered is None
    assert np.all(np.isfinite(release.value["w"].linear))


def test_a_client_says_nothing_of_its_records_or_keys_when_it_is_printed(x64):
    mine, _ = first_client(named("full batches")[0])
    shown = repr(mine)
    assert "secret" not in shown
    assert "records" not in shown.replace("num_records", "").replace("max_records_per_person", "")


def test_discrete_noise_is_drawn_by_the_client():
    pytest.importorskip("opendp")
    method = dppvi.VirtualClients(3, 0.1, noise=dppvi.privacy.DiscreteGaussian(), **QUICK)
    mine, asked = first_client(prepared(method, insecure_noise_seed=None)[0])
    (_, one), (_, other) = mine.respond(asked), mine.respond(asked)
    one, other = one.value["w"].linear, other.value["w"].linear
    assert one.shape == asked.q["w"].linear.shape
    assert np.all(np.isfinite([one, other]))
    assert np.all(one != other)
