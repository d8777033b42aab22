"""What only an exact comparison sees: one line changed, and a record shows in what it should not.

Each test here was written because a sabotage lived without it (`tests/mutants`).
"""

import functools
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from benchmarks.audit import taken
from numpyro_dppvi import guides, latents
from numpyro_dppvi.analysis import selection
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods import visits
from numpyro_dppvi.privacy import (
    NegativeBinomialRuns,
    add_noise,
    arithmetic,
    by_purpose,
    clipped,
    clipped_sum,
    noise_laws,
    plan_selection,
)
from numpyro_dppvi.protocol import client, rounds
from numpyro_dppvi.protocol.messages import Request
from numpyro_dppvi.protocol.problem import Problem
from tests.grids import grid

CLIP, DAMPING = 0.3, 0.5
NATURAL = {"num_local_steps": 1, "optimizer": dppvi.NaturalGradient()}
METHODS = {
    "averaging": dppvi.methods.LocalAveraging(4, CLIP, num_local_steps=3),
    "virtual": dppvi.VirtualClients(4, CLIP, num_local_steps=3),
    "averaging, natural": dppvi.methods.LocalAveraging(4, CLIP, **NATURAL),
    "virtual, natural": dppvi.VirtualClients(4, CLIP, **NATURAL),
}
each_method = pytest.mark.parametrize("name", METHODS)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def records(size, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(size, 3)).astype(np.float32)
    X[::3] *= 30  # shards with room below the clip, and shards that it cuts
    return {"X": X, "y": (rng.uniform(size=size) < 0.5).astype(np.int32)}


def weight_of(method):
    return 1 / method.num_shards if isinstance(method, dppvi.methods.LocalAveraging) else 1.0


def length(method, family, q, change):
    """The norm in the units in which the method clips."""
    if isinstance(method.optimizer, dppvi.NaturalGradient):
        change = method.optimizer.measured(family, q, change)
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=float)) for x in jax.tree.leaves(change))))


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ---------------------------------------------------------------------------------------------
# Margins below the clip: norms that round down, and entries that all round up.


def test_norms_that_round_down_do_not_break_the_bound():
    """Vectors that are not rounded to a grid have no margin but that of the norm."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 7))
    rows *= (1 + 1e-7 * rng.normal(size=(2000, 1))) / np.linalg.norm(rows, axis=1, keepdims=True)
    found = clipped(rows.astype(np.float32), np.ones(2000, bool), 1.0)
    norms = np.linalg.norm(np.asarray(found, np.float64), axis=1)
    assert 1 - 2e-5 <= norms.min() <= norms.max() <= 1


@pytest.mark.parametrize("size", [60_000, 299_900])
def test_entries_that_all_round_up_do_not_break_the_bound(size):
    """Half a step in every entry of a long vector is more than the margin of its norm."""
    step = 2.0**-20
    entry = np.floor(1 / (size**0.5 * step) - 0.51) + 0.5 + 1 / 64
    row = np.full((1, size), entry * step, np.float32)
    before = np.linalg.norm(row.astype(np.float64))
    rounded_up = np.ceil(entry) * step * size**0.5
    assert before < 1 - 1e-5
    assert rounded_up > 1
    assert np.linalg.norm(clipped_sum(row, np.ones(1, bool), 1.0)) <= 1


# ---------------------------------------------------------------------------------------------
# One visit: clip, sum, noise.


@functools.cache
def visit(method, clip_norm=CLIP, shard=None):
    """One visit of a client of four shards, which have private factors, at a q that is no prior.

    Or of a client that holds nothing but one of these shards, and its factor.
    """
    data = {name: jnp.asarray(leaf) for name, leaf in records(12).items()}
    space = latents.from_model(logistic, data)
    family = guides.family_of(None, logistic, space)
    q = factors.power(guides.prior_factor(family, space).exact, 2.0)
    rng = np.random.default_rng(1)
    own = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, (4, *leaf.shape))), q)
    own = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), own, q)
    size, num_shards = 12, 4
    if shard is not None:
        data = {name: leaf[shard::4] for name, leaf in data.items()}
        own, size, num_shards = jax.tree.map(lambda leaf: leaf[shard], own), 3, 1
    layout = visits.Layout(0, num_shards, 3, private=shard is None)
    problem = Problem(space, family, method, layout)

    @jax.jit
    def run(noise_std, secret_key, drawn=None):
        numbers = (noise_std, num_shards, weight_of(method), clip_norm, 1.0, 1.0)
        params = visits.ClientParams(*(jnp.asarray(number) for number in numbers))
        request = Request(q, own, jax.random.key(0), jnp.asarray(0.05))
        none, count = client.ClientState(), jnp.asarray(size)
        return client.respond(problem, params, none, request, data, count, secret_key, drawn)

    return run, family, q


def kept_lengths(name, message):
    _, family, q = visit(METHODS[name])
    return [
        length(METHODS[name], family, q, jax.tree.map(lambda leaf, k=k: leaf[k], message.kept))
        for k in range(4)
    ]


@each_method
def test_no_kept_change_is_longer_than_the_clip(name):
    run, *_ = visit(METHODS[name])
    key = dppvi.privacy.SecretKeys(0).round_key(0)
    step = noise_laws.grid_step(CLIP)
    integers = np.zeros(6, np.int32)
    drawn = noise_laws.StepNoise(jnp.asarray(integers), jnp.asarray(integers), jnp.asarray(step))
    for message in (run(0.0, key), run(0.0, key, drawn)):
        found = kept_lengths(name, message)
        assert max(found) <= CLIP * (1 + 1e-5)
        assert max(found) >= CLIP * (1 - 1e-4)  # cut, and no further than it must be


@grid("name", ["virtual", "virtual, natural"], quick=[1])
def test_a_change_within_the_clip_is_what_the_solve_found(name):
    """Each shard's, from q and its own cavity, as of a client without privacy."""
    method, key = METHODS[name], dppvi.privacy.SecretKeys(0).round_key(0)
    kept = visit(method, clip_norm=1e6)[0](0.0, key).kept
    # Named, because without a name it would take Newton's steps.
    optimizer = method.optimizer or optax.adam(0.05)
    alone = dppvi.NonPrivate(method.num_local_steps, optimizer, method.expectation)
    for shard in range(4):
        found = visit(alone, shard=shard)[0](0.0, key).release
        for one, all_ in zip(*map(jax.tree.leaves, (found, kept)), strict=True):
            np.testing.assert_allclose(all_[shard], one, rtol=1e-4, atol=1e-5)


@each_method
def test_a_release_is_the_weighted_sum_and_its_noise(name):
    """To the last bit where natural parameters are what is clipped; else to rounding."""
    run, family, q = visit(METHODS[name])
    key, std, method = dppvi.privacy.SecretKeys(0).round_key(0), 0.7, METHODS[name]
    message = run(std, key)
    rule = method.optimizer
    if rule is None:
        each, sent, compare = message.kept, message.release, assert_equal
    else:
        measured = functools.partial(rule.measured, family, q)
        each, sent = jax.vmap(measured)(message.kept), measured(message.release)
        compare = functools.partial(
            jax.tree.map, functools.partial(np.testing.assert_allclose, atol=1e-3)
        )
    total = arithmetic.weighted_total(each, weight_of(method))
    compare(sent, add_noise(by_purpose(key).noise, total, std, like=each))


@each_method
def test_private_factors_do_not_see_the_noise(name):
    run, *_ = visit(METHODS[name])
    first, second = (dppvi.privacy.SecretKeys(0).round_key(number) for number in range(2))
    quiet = run(0.0, first).kept
    assert_equal(run(2.0, first).kept, quiet)
    assert_equal(run(2.0, second).kept, quiet)


def test_sums_that_get_noise_are_exact(monkeypatch):
    """Multiples of the clip's grid, whatever the order of the rows and however they are cut."""
    size = 201
    data = records(size)
    # Gradients that all point one way: their sum needs more bits than 32-bit numbers have.
    data = {"X": np.abs(data["X"]), "y": np.ones(size, np.int32)}
    space = latents.from_model(logistic, data)
    family = guides.family_of(None, logistic, space)
    method = dppvi.DPOptimization(CLIP, expectation=dppvi.MonteCarlo(2))
    sums = []

    def watched(rng_key, total, noise_std, like=None):
        del rng_key, noise_std
        sums.append(jax.tree.map(np.asarray, total))
        return like

    monkeypatch.setattr(visits, "add_noise", watched)
    monkeypatch.setattr(visits, "_FLOATS_PER_CHUNK", 1)
    layout = visits.Layout(size, 1, size)
    for order in (np.arange(size), np.random.default_rng(2).permutation(size)):
        held = {name: jnp.asarray(leaf[order]) for name, leaf in data.items()}
        params = visits.ClientParams(*(jnp.asarray(x) for x in (1.0, 1, 1.0, CLIP, 1.0, size)))
        keys = (jax.random.key(0), by_purpose(dppvi.privacy.SecretKeys(0).round_key(0)))
        likelihood = visits.OfRecords(
            space, family, method.expectation, layout, held, jnp.asarray(size), params
        )
        likelihood.released(method.sampler, keys, family.standard())
    assert_equal(*sums)
    step = float(arithmetic.power_of_two(CLIP, jnp.float32)) * 2.0**-20
    for leaf in jax.tree.leaves(sums[0]):
        assert leaf.dtype == np.float64
        assert np.any(leaf)
        np.testing.assert_array_equal(leaf, np.round(leaf / step) * step)


def test_a_solve_that_fails_sends_nothing():
    """No NaN, which the server would have to refuse, and all others' changes with it."""
    method = dppvi.DPOptimization(CLIP, 1, optax.sgd(3e38), expectation=dppvi.MonteCarlo(2))
    run, *_ = visit(method, shard=0)
    message = run(100.0, dppvi.privacy.SecretKeys(0).round_key(0))
    assert message.failed
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(message.release))


# ---------------------------------------------------------------------------------------------
# Rounds: what clients keep shows through a shard's own clipped change, and through nothing else.

SIZES = (12, 7)  # the second client's shards are of unequal sizes
TOUCHED = (0, 1)  # a client and its shard
RUNS = {
    "virtual": ("virtual", False),
    "virtual, natural": ("virtual, natural", False),
    "averaging, natural, joint": ("averaging, natural", True),
}
each_run = pytest.mark.parametrize("run", RUNS)


class Rounds:
    """Rounds of two clients without noise, from any state."""

    def __init__(self, run):
        name, trusted = RUNS[run]
        self.method, self.trusted = METHODS[name], trusted
        self.data = [records(size, seed) for seed, size in enumerate(SIZES)]
        setting = {
            "client_sizes": SIZES,
            "schedule": dppvi.synchronous,
            "trusted_aggregator": trusted,
        }
        budget = dppvi.PrivacyBudget(math.inf)
        self.plan = dppvi.plan_privacy(self.method, budget, num_rounds=1, **setting)
        shapes = {
            name: jax.ShapeDtypeStruct((sum(SIZES), *leaf.shape[1:]), leaf.dtype)
            for name, leaf in self.data[0].items()
        }
        self.algorithm = dppvi.pvi(
            logistic, None, shapes, method=self.method, plan=self.plan, damping=DAMPING, **setting
        )
        self.shards = dppvi.records.stack_clients(self.data)
        found = taken(self.algorithm, self.shards, rounds, "run_round")
        self.problem, self.params, self.first, _, self.groups, self.keys, _ = found

    def after(self, start, shards=None, params=None, keys=None):
        """A round that starts from these factors."""
        return rounds.run_round(
            self.problem,
            params or self.params,
            start,
            self.shards if shards is None else shards,
            self.groups,
            keys or self.keys,
        )

    def some_rounds_later(self, num_rounds=3):
        """Factors of which no private one is 1."""
        now = self.first
        for _ in range(num_rounds):
            now, info = self.after(now)
            assert info.rejected == info.projected == 0
        assert min(np.min(np.abs(leaf)) for leaf in jax.tree.leaves(now.clients.private)) > 0
        return now

    def q(self, start):
        return start.server.natural

    def kept(self, before, after):
        """The touched shard's change, as its private factor shows it."""
        return jax.tree.map(
            lambda b, a: (a[TOUCHED] - b[TOUCHED]) / DAMPING,
            before.clients.private,
            after.clients.private,
        )

    def check(self, before, after, other_before, other_after):
        """Two rounds from equal released factors, which differ in one shard's private state."""
        untouched = np.ones((2, 4), bool)
        untouched[TOUCHED] = False
        q, family = self.q(before), self.problem.family
        assert_equal(before.server, other_before.server)
        for one, other in zip(
            *map(jax.tree.leaves, (after.clients, other_after.clients)), strict=True
        ):
            np.testing.assert_array_equal(one[untouched], other[untouched])
        mine, theirs = self.kept(before, after), self.kept(other_before, other_after)
        for change in (mine, theirs):
            assert length(self.method, family, q, change) <= CLIP * (1 + 1e-3)
        shown = factors.divide(
            factors.total(other_after.server.factors), factors.total(after.server.factors)
        )
        explained = factors.power(factors.divide(theirs, mine), DAMPING * weight_of(self.method))
        left = length(self.method, family, q, factors.divide(shown, explained))
        assert left <= 1e-3 * CLIP * weight_of(self.method)


@functools.cache
def prepared(run):
    return Rounds(run)


@each_run
@pytest.mark.parametrize("told", [0.0, -1e3, 100.0], ids=["nothing", "much less", "far more"])
def test_a_shard_shows_nothing_but_its_own_clipped_change(run, told):
    """Whatever a shard has kept to itself, improper factors among it."""
    mine = prepared(run)
    start = mine.some_rounds_later()
    other = start._replace(
        clients=jax.tree.map(lambda leaf: leaf.at[TOUCHED].set(told * leaf[TOUCHED]), start.clients)
    )
    (after, info), (other_after, other_info) = mine.after(start), mine.after(other)
    assert info.rejected == other_info.rejected == info.projected == other_info.projected == 0
    mine.check(start, after, other, other_after)


@each_run
def test_a_record_shows_nothing_but_its_shards_clipped_change_in_any_round(run):
    """Its private factor is no longer 1, and follows other records than its neighbour's."""
    mine = prepared(run)
    data = [{name: leaf.copy() for name, leaf in part.items()} for part in mine.data]
    data[0]["X"][TOUCHED[1] + 4] = [40.0, -40.0, 3.0]
    data[0]["y"][TOUCHED[1] + 4] ^= 1
    shards = dppvi.records.stack_clients(data)
    now = other = mine.first
    for number in range(4):
        after, other_after = mine.after(now)[0], mine.after(other, shards)[0]
        mine.check(now, after, other, other_after)
        moved = length(
            mine.method,
            mine.problem.family,
            mine.q(now),
            factors.divide(mine.kept(now, after), mine.kept(other, other_after)),
        )
        assert moved > 1e-2 * CLIP or number == 0  # the record does reach its own shard's factor
        # What was released is the same in both from here; what was kept is not.
        now, other = after, other_after._replace(server=after.server)


@each_run
def test_a_shard_that_fails_is_not_told(run):
    """Its change is zero before noise, and nothing says so."""
    mine = prepared(run)
    # Infinity, which a client's own checks would refuse, makes every gradient of the shard NaN.
    X = mine.shards.records["X"].at[0, TOUCHED[1]].set(jnp.inf)
    shards = mine.shards._replace(records=mine.shards.records | {"X": X})
    start = mine.some_rounds_later()
    after, info = mine.after(start, shards)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(mine.kept(start, after)))
    assert info.failed == info.rejected == info.projected == 0


@each_run
def test_a_refused_merge_happened_nowhere(run):
    """At the domain's edge, where noise decides: neither at the server nor at a client."""
    mine = prepared(run)
    start = mine.some_rounds_later()
    # A prior's factor that is improper by itself, and q hardly proper.
    edge = jax.tree.map(
        lambda leaf: leaf._replace(quadratic=-leaf.quadratic - 1e-4),
        factors.total(start.server.factors),
        is_leaf=lambda leaf: hasattr(leaf, "quadratic"),
    )
    start = start._replace(server=start.server._replace(prior=edge))
    # White coordinates are in units of q, which is very wide there.
    white = mine.method.optimizer is not None
    noise_std = jnp.full(2, 8.0 if white else 0.2)
    params = mine.params._replace(clients=mine.params.clients._replace(noise_std=noise_std))
    outcomes = set()
    for seed in range(12):
        keys = (mine.keys[0], dppvi.privacy.SecretKeys(seed).round_key(0))
        after, info = mine.after(start, params=params, keys=keys)
        outcomes.add(int(info.rejected))
        if info.rejected:
            assert_equal(after, start)
        else:
            kept = jax.tree.leaves(factors.divide(after.clients.private, start.clients.private))
            assert all(np.any(leaf) for leaf in kept)
            assert np.any(factors.total(after.server.factors)["w"].linear)
    assert outcomes == {0, 1}


# ---------------------------------------------------------------------------------------------
# Plans of a sum over clients.


def cost(noise_std, sensitivity, count, delta):
    return dpa.get_epsilon_gaussian(noise_std / sensitivity / math.sqrt(count), delta)


@pytest.mark.parametrize(
    "method",
    [dppvi.methods.LocalAveraging(4, 2.0), dppvi.GlobalVI(2.0)],
    ids=["changes", "gradients"],
)
def test_joint_noise_keeps_the_smallest_budget(method):
    """And covers the largest unit: all shares together, by the closed form, for each client."""
    num_rounds, sizes = 5, [40, 60, 80]
    budgets = [
        dppvi.PrivacyBudget(4.0),
        dppvi.PrivacyBudget(0.5, 1e-6),
        dppvi.PrivacyBudget(2.0, max_records_per_person=3),
    ]
    plan = dppvi.plan_privacy(
        method,
        budgets,
        num_rounds=num_rounds,
        client_sizes=sizes,
        schedule=dppvi.synchronous,
        trusted_aggregator=True,
    )
    together = math.sqrt(np.sum(plan.noise_std**2))
    weight = weight_of(method) if isinstance(method, dppvi.methods.LocalAveraging) else 1.0
    # In one sum the noise covers any unit: the strictest promise holds for three records, too.
    assert cost(together, 3 * 2 * 2.0 * weight, num_rounds, 1e-6) <= 0.5 * (1 + 1e-9)
    np.testing.assert_allclose(plan.noise_std, together / math.sqrt(3), rtol=1e-12)
    for mine in plan.clients:
        assert mine.epsilon <= mine.budget.epsilon


# ---------------------------------------------------------------------------------------------
# The best of several runs.


def test_the_score_that_is_compared_and_shown_has_noise(monkeypatch):
    """Scores that are all zero come out as noise, as large as was planned for it."""
    monkeypatch.setattr(selection, "_check", lambda run, plan: None)
    plan = plan_selection(
        dppvi.PrivacyBudget(1.0), NegativeBinomialRuns(1.01), client_sizes=[50], score_bound=4.0
    )
    found = [
        dppvi.select([0], lambda *_: None, lambda _: [np.zeros(50)], plan=plan, insecure_seed=seed)
        for seed in range(30)
    ]
    scores = np.array([best.score for best in found]) * 50 / plan.mechanisms[0].noise_std
    assert np.unique(scores).size == 30
    # The sum of 30 squares of standard normals; outside with probability 10^-6 on fresh seeds.
    assert 4 < np.sum(scores**2) < 87
