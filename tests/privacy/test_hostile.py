"""Hostile records in hostile layouts: what one record can move, for every method, round by round.

A release is compared with the accounted sensitivity, and what stays at a client is compared bit by
bit wherever the record must not reach. Nothing is averaged: one wild record is enough to fail.

A client's records differ only where the record lies; from the second round on the runs share what
was released before, as the guarantee has it, and each keeps private factors of its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods import tails
from numpyro_dppvi.protocol import rounds, server
from numpyro_dppvi.records.shards import end_to_end
from tests.grids import grid
from tests.programs import forget_programs

# ---------------------------------------------------------------------------------------------
# Hostile layouts. Sizes that no number of shards divides, a client at the arrays' capacity, one
# whose shards are smaller than another's, a client of one record.

SIZES = (25, 13, 13, 1)
SHARDS = (4, 13, 2, 1)
CAPACITY = max(SIZES)

# Places: the first record, one in the middle, the last, which rows past the end would repeat.
PLACES = [(0, 0), (0, 11), (0, 24), (1, 12), (2, 0), (2, 12), (3, 0)]


def counts(x, y):
    """Its rate overflows: the derivative of exp is infinite where a record is not even large."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def sizes(x, y):
    """Its likelihood is infinite at zero, which padding is made of; and it needs draws."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.LogNormal(x @ w, noise), obs=y)


def records(size, seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, 2)).astype(np.float32),
        "y": (1.0 + rng.poisson(2.0, size)).astype(np.float32),
    }


MAX = float(np.finfo(np.float32).max)
# What a record may be; all but the last three pass every check of the data.
HOSTILE = {
    "zero": ([0.0, 0.0], 0.0),
    "large": ([1000.0, -1000.0], 3.0),
    "other side": ([-1000.0, 1000.0], 1.0),
    "far": ([30.0, 30.0], 50.0),
    "huge": ([1e20, 1e20], 1.0),
    "largest": ([MAX, -MAX], MAX),
    "tiny": ([1e-30, -1e-30], 1e-30),
    "denormal": ([1e-40, 1e-45], 1e-40),
    "impossible": ([1.0, 1.0], -1.0),
    "huge outcome": ([1.0, -1.0], 1e30),
    "infinite": ([np.inf, 1.0], 1.0),
    "no number": ([np.nan, np.nan], np.nan),
    "infinite outcome": ([1.0, 1.0], np.inf),
}


def shards_of(changed=(), padding=None):
    """All clients' records, some of them replaced: ``changed`` holds (client, place, record).

    They lie end to end, so that others' stand behind a client's own; with ``padding``, that does.
    """
    num_rows = np.array(SIZES)
    num_blocks, starts = end_to_end(num_rows, CAPACITY)
    if padding is not None:
        num_blocks, starts = len(SIZES), np.arange(len(SIZES)) * CAPACITY
    # Behind all records, too, stands what must not be read.
    x = np.full((num_blocks * CAPACITY, 2), np.nan if padding is None else padding, np.float32)
    y = x[:, 0].copy()
    for client, (start, size) in enumerate(zip(starts, num_rows, strict=True)):
        mine = records(size, client)
        x[start : start + size], y[start : start + size] = mine["x"], mine["y"]
    for client, place, (features, outcome) in changed:
        x[starts[client] + place], y[starts[client] + place] = features, outcome
    rows = {"x": x.reshape(num_blocks, CAPACITY, 2), "y": y.reshape(num_blocks, CAPACITY)}
    first = None if padding is not None else jnp.asarray(starts, jnp.int32)
    return dppvi.records.Shards(
        jax.tree.map(jnp.asarray, rows), jnp.asarray(num_rows, jnp.int32), first
    )


# ---------------------------------------------------------------------------------------------
# Every method, sampler, unit and noise law. Gradients: one plain step a visit, so that what is
# released can be read off the coordinates.

RATE = 1e-3
STEP = optax.sgd(RATE)
NATURAL = dppvi.NaturalGradient()
ONE_STEP = {"num_local_steps": 1, "optimizer": STEP}
TWO_STEPS = {"num_local_steps": 2, "optimizer": optax.adam(0.05)}
WHITE = {"num_local_steps": 1, "optimizer": NATURAL}
RECORD = dppvi.PrivacyBudget(40.0)
PERSON = dppvi.PrivacyBudget(40.0, max_records_per_person=3)
CLIENT = dppvi.PrivacyBudget(40.0, unit="client")
ADDED = dppvi.PrivacyBudget(40.0, relation="add_or_remove_one")


@dataclasses.dataclass(frozen=True)
class Seen(dppvi.FisherScoring):
    """One whose server keeps what each client sent last, beside what it remembers of it."""

    num_replicates: int = 2

    def memory(self, space, family, q, num_factors):
        known = super().memory(space, family, q, num_factors)
        size = known.loc.size
        parts = {
            "score": (size,),
            "information": (size * (size + 1) // 2,),
            "clipped": (len(tails.ROOTS),),
            "scales": known.counts.shape,
            "votes": known.search.votes.shape,
        }
        sent = {name: jnp.zeros((num_factors, *shape)) for name, shape in parts.items()}
        return known, sent

    def told(self, memory, place):
        return super().told(memory[0], place)

    def take(self, received, releases, memory, places):
        changes, known = super().take(received, releases, memory[0], places)
        sent = jax.tree.map(lambda all_, some: all_.at[places].set(some), memory[1], releases)
        return changes, (known, sent)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: what it releases is held against its own plan."""

    method: Any
    trusted: bool = False
    budget: dppvi.PrivacyBudget = RECORD
    model: Callable[..., None] = counts


CASES = {
    "gradients": Case(dppvi.DPOptimization(0.5, **ONE_STEP)),
    "gradients by draws": Case(
        dppvi.DPOptimization(0.5, **ONE_STEP, expectation=dppvi.MonteCarlo(2)), model=sizes
    ),
    "Poisson batches": Case(
        dppvi.DPOptimization(0.5, **ONE_STEP, sampler=dppvi.PoissonSampling(0.7))
    ),
    "batches of one size": Case(
        dppvi.DPOptimization(0.5, **ONE_STEP, sampler=dppvi.FixedSizeSampling(1))
    ),
    "gradients of a person": Case(dppvi.DPOptimization(0.5, **ONE_STEP), budget=PERSON),
    "gradients, one more or less": Case(dppvi.DPOptimization(0.5, **ONE_STEP), budget=ADDED),
    "committee": Case(dppvi.BayesianCommitteeMachine(local=dppvi.DPOptimization(0.5, **ONE_STEP))),
    "split committee": Case(
        dppvi.BayesianCommitteeMachine("split", dppvi.DPOptimization(0.5, **ONE_STEP))
    ),
    "global": Case(dppvi.GlobalVI(0.5, STEP), trusted=True),
    "global, Poisson batches": Case(
        dppvi.GlobalVI(0.5, STEP, dppvi.PoissonSampling(0.7)), trusted=True
    ),
    "perturbed": Case(dppvi.methods.ParameterPerturbation(0.3, **TWO_STEPS)),
    "averaging": Case(dppvi.methods.LocalAveraging(SHARDS, 0.3, **TWO_STEPS)),
    "averaging, aggregated": Case(
        dppvi.methods.LocalAveraging(SHARDS, 0.3, **TWO_STEPS), trusted=True
    ),
    "averaging, natural gradients": Case(
        dppvi.methods.LocalAveraging(SHARDS, (0.3, 0.6, 0.2, 0.4), **WHITE), trusted=True
    ),
    "virtual": Case(dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS)),
    "virtual by draws": Case(
        dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS, expectation=dppvi.MonteCarlo(2)),
        model=sizes,
    ),
    "virtual, aggregated": Case(dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS), trusted=True),
    "virtual, natural gradients": Case(dppvi.VirtualClients(SHARDS, 0.3, **WHITE)),
    "virtual, natural gradients, aggregated": Case(
        dppvi.VirtualClients(SHARDS, 0.3, **WHITE), trusted=True
    ),
    "virtual, shards of one record": Case(dppvi.VirtualClients(SIZES, 0.3, **WHITE), model=sizes),
    "virtual, whole noise": Case(
        dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS, noise=dppvi.privacy.DiscreteGaussian())
    ),
    "averaging, whole noise": Case(
        dppvi.methods.LocalAveraging(SHARDS, 0.3, **WHITE, noise=dppvi.privacy.DiscreteGaussian())
    ),
    "virtual, a person": Case(dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS), budget=PERSON),
    "averaging, a person": Case(dppvi.methods.LocalAveraging(SHARDS, 0.3, **WHITE), budget=PERSON),
    "virtual, a whole client": Case(dppvi.VirtualClients(SHARDS, 0.3, **TWO_STEPS), budget=CLIENT),
    "scores": Case(Seen()),
    "scores of sizes": Case(Seen(), model=sizes),
    "scores, aggregated": Case(Seen(), trusted=True),
    "scores of a person": Case(Seen(), budget=PERSON),
    "scores, one more or less": Case(Seen(), budget=ADDED),
}
# One of each kind answers at once; `make slow` runs them all, and averages, too, whose shards are
# bounded in test_methods.py.
QUICK = {
    "Poisson batches",
    "virtual",
    "scores",
}


# ---------------------------------------------------------------------------------------------
# Runs whose every round can be started again from any state.


def _plain_merge(family, prior, client_factors, totals, clients, changes, *, damping, **rest):
    """What clients sent, multiplied in: what the server does to it afterwards is no release."""
    damped = factors.power(changes, damping)
    merged = jax.tree.map(lambda leaf, c: leaf.at[clients].add(c), client_factors, damped)
    info = server.MergeInfo(jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    return merged, factors.block_totals(merged), info


class StopError(Exception):
    """Ends a step as soon as it is known what it would run."""


class Run:
    """A case's rounds as functions of records and state; compiled once."""

    def __init__(self, case):
        self.case = case
        arrays = records(sum(SIZES), 9)
        options = {"clients": dppvi.Partition(_pooled()), "num_rounds": 3, "damping": 1.0}
        caught = {}

        def spy(name):
            def run(*arguments):
                caught[name] = arguments
                raise StopError

            return run

        with pytest.MonkeyPatch.context() as patch:
            self.of_all = isinstance(case.method, dppvi.GlobalVI)
            self.program = rounds.run_round
            patch.setattr(rounds, "run_round", spy("run"))
            with pytest.raises(StopError):
                dppvi.fit(
                    case.model,
                    None,
                    arrays,
                    rng_key=jax.random.key(0),
                    method=case.method,
                    budget=case.budget,
                    schedule=dppvi.synchronous,
                    trusted_aggregator=case.trusted,
                    insecure_noise_seed=None if _whole(case.method) else 5,
                    progress_bar=False,
                    **options,
                )
        self.arguments = caught["run"]
        self.problem, self.params, self.first = self.arguments[:3]
        self.plan = dppvi.plan_privacy(
            case.method,
            case.budget,
            num_rounds=3,
            client_sizes=SIZES,
            schedule=dppvi.synchronous,
            trusted_aggregator=case.trusted,
        )
        self.family = self.problem.family

    def step(self, shards, state):
        """One round: the state after it."""
        return self.program(self.problem, self.params, state, shards, *self.arguments[4:])[0]

    def released(self, before, after):
        """What each client sent, in the units in which it is clipped; leading axis clients."""
        if isinstance(self.problem.method, Seen):
            return _flat(after.server.memory[1], axes=1)
        server = before.server
        return _flat(self._units(server.prior, server.factors, after.server.factors), axes=1)

    @functools.cached_property
    def _units(self):
        rule = getattr(self.problem.method, "optimizer", None)
        gradients = self.problem.method.releases == "gradients"

        @jax.jit
        def units(prior, before, after):
            q = server.approximation(prior, before)

            def of_client(change):
                if rule is NATURAL:
                    return rule.measured(self.family, q, change)
                if gradients:
                    begin = self.family.coordinates(q)
                    end = self.family.coordinates(factors.multiply(q, change))
                    return factors.power(factors.divide(end, begin), 1 / RATE)
                return change

            return jax.vmap(of_client)(factors.divide(after, before))

        return units

    def shared(self, base, own):
        """A state with what was released in one run, and what clients keep to themselves."""
        return base._replace(clients=own.clients)


def _whole(method):
    return isinstance(getattr(method, "noise", None), dppvi.privacy.DiscreteGaussian)


def _pooled():
    ends = np.cumsum(SIZES)
    return tuple(np.arange(end - size, end) for size, end in zip(SIZES, ends, strict=True))


def _flat(tree, axes=0):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(*leaf.shape[:axes], -1) for leaf in leaves], axis=axes)


@pytest.fixture(scope="module", autouse=True)
def _messages_are_seen():
    """The server's repairs and refusals are functions of releases; here they would hide them."""
    forget_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "merge", _plain_merge)
        yield
    forget_programs()


@functools.cache
def run_of(name):
    return Run(CASES[name])


def changed_of(budget, client, place, record):
    """The unit of protection: one record, those of a person, or all of a client."""
    size = SIZES[client]
    count = {"person": 3, "client": size}.get(_unit(budget), 1)
    places = [(place + k) % size for k in range(min(count, size))]
    return [(client, p, record) for p in places]


def _unit(budget):
    if budget.unit == "client":
        return "client"
    return "person" if budget.max_records_per_person > 1 else "record"


def neighbours(case):
    """Every hostile record at every place."""
    for (client, place), name in itertools.product(PLACES, HOSTILE):
        yield f"{name} at {client}, {place}", changed_of(case.budget, client, place, HOSTILE[name])


# A fifth of the neighbours has every record, and all places.
@pytest.mark.parametrize(
    ("name", "every"),
    [pytest.param(name, 5, id=name) for name in CASES if name in QUICK]
    + [pytest.param(name, 1, id=f"{name}, all", marks=pytest.mark.slow) for name in CASES],
)
def test_no_record_moves_a_release_by_more_than_its_sensitivity(name, every):
    case, run = CASES[name], run_of(name)
    shards, relation = shards_of(), case.budget.relation
    # Between wild records the way is twice as far as from a tame one.
    wild = [shards_of([(c, p, HOSTILE["other side"])]) for c, p in PLACES]
    base = [run.first]
    for _ in range(3):
        base.append(run.step(shards, base[-1]))
    furthest = 0.0
    for number, (label, changed) in itertools.islice(enumerate(neighbours(case)), 0, None, every):
        client = changed[0][0]
        hostile, own = shards_of(changed), run.first
        against = wild[number // len(HOSTILE)] if number % 2 and len(changed) == 1 else None
        other = run.first
        for before, after in itertools.pairwise(base):
            own = run.step(hostile, start := run.shared(before, own))
            twin = run.shared(before, other)
            other = run.step(against, twin) if against else after
            moved = run.released(start, own) - run.released(twin, other)
            furthest = max(furthest, _check_release(run, moved, client, relation, label))
            if not run.of_all:
                _check_private(run, own, other, changed, label)
    assert furthest > 0.4, "nothing was hostile enough to come near the bound"


def _check_release(run, moved, client, relation, label):
    """How far the release moved, as a share of what is accounted for one record of the client."""
    assert np.isfinite(moved).all(), label
    sensitivity = run.plan.clients[client].mechanism.sensitivity("replace_one")
    prob = float(run.params.clients.inclusion_prob[client])
    length = np.linalg.norm(moved.sum(axis=0)) * prob
    # Noise is the same in both; what comes out is rounded to its grid, and to 32 bits.
    std = run.plan.noise_std[client] * prob
    slack = std * 2**-9 * moved.shape[1] ** 0.5 + 2e-3 * sensitivity
    assert length <= sensitivity + slack, (label, length / sensitivity)
    if moved.shape[0] > 1:
        rest = np.arange(len(SIZES)) != client
        assert not moved[rest].any(), f"{label}: another client's release moved"
    return length / sensitivity


def _check_private(run, own, other, changed, label):
    """What stays at clients differs in the touched shards alone, bit by bit."""
    if own.clients.private is None:
        return
    layout = np.asarray(run.params.clients.num_shards)
    leaves = (jax.tree.leaves(jax.device_get(state.clients)) for state in (own, other))
    for a, b in zip(*leaves, strict=True):
        assert np.isfinite(a).all(), label
        untouched = np.ones(a.shape[:2], bool)
        for client, place, _ in changed:
            untouched[client, place % layout[client]] = False
        if len(changed) == 1:  # the run it is compared with may have a wild record there, too
            np.testing.assert_array_equal(a[untouched], b[untouched], err_msg=label)
        absent = np.arange(a.shape[1])[None, :] >= layout[:, None]
        assert not a[absent].any(), f"{label}: a shard that does not exist has a factor"


@grid("name", CASES, quick=[list(CASES).index("scores")])
def test_padding_reaches_nothing(name):
    """Nor do others' records that lie end to end with a client's: all is the same bit by bit."""
    run = run_of(name)
    ends = []
    for shards in (shards_of(), shards_of(padding=np.nan), shards_of(padding=1e30)):
        state = run.first
        for _ in range(2):
            state = run.step(shards, state)
        ends.append(state)
    for a, *others in zip(*map(jax.tree.leaves, ends), strict=True):
        for b in others:
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gradients, one more or less",
        pytest.param("scores, one more or less", marks=pytest.mark.slow),
    ],
)
def test_removing_a_record_moves_a_release_by_no_more_than_its_sensitivity(name):
    case, run = CASES[name], run_of(name)
    second = run.step(shards_of(), run.first)
    for client, label in itertools.product((0, 1, 2), HOSTILE):
        full = shards_of([(client, SIZES[client] - 1, HOSTILE[label])])
        fewer = full._replace(num_records=full.num_records.at[client].add(-1))
        mechanism = run.plan.clients[client].mechanism
        for start in (run.first, second):
            ends = [run.released(start, run.step(shards, start)) for shards in (full, fewer)]
            length = np.linalg.norm((ends[0] - ends[1]).sum(axis=0))
            assert length <= mechanism.sensitivity(case.budget.relation) * (1 + 5e-3), label


# ---------------------------------------------------------------------------------------------
# The two findings as they were met.


def poisson_regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x * w)), obs=y)


@pytest.mark.slow
def test_one_record_in_a_hundred_shards_moves_one_of_them():
    """101 Poisson records, 100 shards: the last one used to reach them all."""
    ends = []
    for last in (0.5, 1000.0):
        x = np.append(np.linspace(-1, 1, 100), last)
        result = dppvi.fit(
            poisson_regression,
            None,
            [{"x": x, "y": np.ones(101)}],
            rng_key=jax.random.key(0),
            method=dppvi.VirtualClients(100, 0.01, 2),
            budget=dppvi.PrivacyBudget(float("inf")),
            num_rounds=1,
            damping=1.0,
            progress_bar=False,
        )
        ends.append(result.posterior.natural)
    assert np.linalg.norm(_flat(ends[0]) - _flat(ends[1])) <= 2 * 0.01 * (1 + 1e-3)


def log_normal(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.LogNormal(mean, 1), obs=y)


@grid(
    "method",
    [dppvi.NonPrivate(2), dppvi.VirtualClients(3, 1.0, 2), dppvi.methods.LocalAveraging(3, 1.0)],
    quick=[],
)
def test_zero_padding_erases_no_client(method):
    """log(0) in a row that does not count used to end the smaller client's solve."""
    data = [{"y": np.exp(np.linspace(0, 2, size))} for size in (10, 7)]
    private = not isinstance(method, dppvi.NonPrivate)
    result = dppvi.fit(
        log_normal,
        None,
        data,
        rng_key=jax.random.key(0),
        method=method,
        budget=dppvi.PrivacyBudget(float("inf")) if private else None,
        num_rounds=1,
        progress_bar=False,
    )
    for leaf in jax.tree.leaves(result.state.factors):
        assert np.asarray(leaf).astype(bool).all(), "a client's factor is 1"
    assert "no finite numbers" not in str(result.status)
