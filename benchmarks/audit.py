"""Audits of what the library releases: whole rounds, run many times on two neighbouring data sets.

    python -m benchmarks audit

A canary record is as harmful as clipping lets it be, the other records are what makes it worst.
Programs are the ones that ``fit`` compiles; only the secret keys differ between runs.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import accounting, audit
from numpyro_dppvi.protocol import rounds, server

# A total cost at which a few thousand runs tell a fifth too little noise from enough of it.
BUDGET = dppvi.PrivacyBudget(9.0)
HUGE = 1e4
RUNS_AT_ONCE = 2000


class Case(NamedTuple):
    """A mechanism and two neighbouring data sets.

    Attributes:
        claim: From a delta to the epsilon that the ledger claims.
        score: From a secret key and shards to a number that is larger on the first data set.
        worlds: The shards of the two data sets.
    """

    claim: audit.Claim
    score: Callable[[jax.Array, dppvi.records.Shards], jax.Array]
    worlds: tuple[dppvi.records.Shards, dppvi.records.Shards]


class _Taken(Exception):  # noqa: N818, no error
    """Carries the arguments of a compiled round out of a step."""


def taken(
    algorithm: dppvi.protocol.Algorithm, shards: dppvi.records.Shards, module: Any, name: str
) -> Any:
    """What ``step`` hands to its compiled program, and the ledger after it."""
    real = getattr(module, name)

    def take(*arguments: Any) -> None:
        raise _Taken(arguments)

    setattr(module, name, take)
    try:
        algorithm.step(jax.random.key(0), algorithm.init(jax.random.key(0)), shards)
    except _Taken as out:
        return out.args[0]
    finally:
        setattr(module, name, real)


def report(case: Case, num_runs: int, seed: int = 0) -> audit.Report:
    """Runs both worlds ``num_runs`` times."""
    many = jax.jit(
        lambda keys, shards: jax.lax.map(
            lambda key: case.score(key, shards), keys, batch_size=RUNS_AT_ONCE
        )
    )
    scores = []
    for world, shards in enumerate(case.worlds):
        keys = jax.random.split(dppvi.privacy.SecretKeys(seed).round_key(world), num_runs)
        scores.append(np.asarray(many(keys, shards)))
    return audit.audit(case.claim, *scores)


def _claim(plan: dppvi.privacy.PrivacyPlan) -> audit.Claim:
    client = plan.clients[-1]
    return lambda delta: accounting.epsilon(client.composition, delta, client.budget.relation)


# ---------------------------------------------------------------------------------------------
# Noisy gradients: one visit of many local steps, whose sum the last location shows.


def gradients(
    sampler: Any = None,
    relation: str = "replace_one",
    num_steps: int = 10,
    others: float = 0.0,
    clip_norm: float | tuple[float, ...] = 1.0,
) -> Case:
    """``DPOptimization`` on ten records; the last one (of the last client) is the canary.

    Args:
        sampler: How batches are drawn; all records if not given.
        relation: What makes the data sets neighbours.
        num_steps: Local steps of the one visit.
        others: What the other records pull at, as a share of the canary's pull.
        clip_norm: One number for a single client, or one for each of several.
    """
    num_records, rate = 10, 1e-4
    num_clients = len(clip_norm) if isinstance(clip_norm, tuple) else 1

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    sampler = dppvi.FullBatch() if sampler is None else sampler
    expectation = dppvi.MonteCarlo(2)
    method = dppvi.DPOptimization(clip_norm, num_steps, optax.sgd(rate), sampler, expectation)
    budget = dataclasses.replace(BUDGET, relation=relation)
    sizes = (num_records,) * num_clients
    setting = {"client_sizes": sizes, "schedule": dppvi.synchronous}
    plan = dppvi.plan_privacy(method, budget, num_rounds=1, **setting)
    y = np.full(num_records, others * HUGE, np.float32)
    shapes = {"y": jax.ShapeDtypeStruct(y.shape, y.dtype)}
    algorithm = dppvi.pvi(model, None, shapes, method=method, plan=plan, damping=1.0, **setting)
    beside = [{"y": y.copy()}] * (num_clients - 1)
    y[-1] = HUGE
    world = dppvi.records.stack_clients([*beside, {"y": y}])
    if relation == "replace_one":
        y[-1] = -HUGE
        other = dppvi.records.stack_clients([*beside, {"y": y}])
    else:
        fewer = np.append(np.zeros(num_clients - 1, int), 1)
        other = world._replace(num_records=world.num_records - fewer)
    problem, params, before, _, groups, keys, _ = taken(algorithm, world, rounds, "run_round")

    def score(secret_key: jax.Array, shards: dppvi.records.Shards) -> jax.Array:
        end, _ = rounds.run_round(problem, params, before, shards, groups, (keys[0], secret_key))
        sent = jax.tree.map(lambda leaf: leaf[-1:], end.server.factors)
        q = server.approximation(end.server.prior, sent)
        return problem.family.coordinates(q)["mu"].loc

    return Case(_claim(plan), score, (world, other))


def global_steps() -> Case:
    """One step of ``GlobalVI``: a sum over two clients, each with its share of the noise."""

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    method = dppvi.GlobalVI(1.0, optax.sgd(1e-4), expectation=dppvi.MonteCarlo(2))
    sizes = (4, 6)
    setting = {"client_sizes": sizes, "schedule": dppvi.synchronous, "trusted_aggregator": True}
    plan = dppvi.plan_privacy(method, BUDGET, num_rounds=1, **setting)
    shapes = {"y": jax.ShapeDtypeStruct((10,), np.float32)}
    algorithm = dppvi.pvi(model, None, shapes, method=method, plan=plan, **setting)
    worlds = []
    for canary in (HUGE, -HUGE):
        mine = np.array([0, 0, 0, canary], np.float32)
        worlds.append(dppvi.records.stack_clients([{"y": mine}, {"y": np.zeros(6, np.float32)}]))
    problem, params, before, _, groups, keys, _ = taken(algorithm, worlds[0], rounds, "run_round")

    def score(secret_key: jax.Array, shards: dppvi.records.Shards) -> jax.Array:
        end, _ = rounds.run_round(problem, params, before, shards, groups, (keys[0], secret_key))
        return problem.family.coordinates(end.server.natural)["mu"].loc

    return Case(_claim(plan), score, tuple(worlds))


# ---------------------------------------------------------------------------------------------
# Perturbed changes: two rounds, so that what clients keep to themselves in between counts.

PRECISION = 100.0  # the prior's; noise on it must not turn it over
HALF_PAST = 0.3
# A push of less than the clipping norm, so that the other shards have room for an answer.
PUSH = 5.0
LOCAL = {
    "num_local_steps": 1,
    "optimizer": optax.sgd(1 / 150),
    "expectation": dppvi.MonteCarlo(2),
}
# In white coordinates, where the prior's standard deviation of a tenth makes PUSH a half.
NATURAL = {
    "num_local_steps": 1,
    "optimizer": dppvi.NaturalGradient(location_rate=1.0, ridge=0.0),
    "expectation": dppvi.methods.SphericalCubature(),
}


def changes(method: Any, trusted: bool = False, push: float = PUSH) -> Case:
    """Two rounds of a method that perturbs changes; the first record is the canary.

    All other records push a second latent, which noise cannot hide: by it the canary tells the
    rounds apart, and pushes one way in the first and the other way in the second. Should its
    first push live on in the other shards' private factors, these answer it, and so add to the
    second.
    """

    def model(y: Any, z: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, PRECISION**-0.5))
        clock = numpyro.sample("clock", dist.Normal(0, PRECISION**-0.5))
        direction = jnp.where(clock < HALF_PAST, 1.0, -1.0)
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(direction * mu, 1), obs=y)
            numpyro.sample("z", dist.Normal(clock, 1), obs=z)

    num_clients = 2 if trusted else 1
    sizes = (20,) * num_clients
    schedule = dppvi.synchronous
    plan = dppvi.plan_privacy(
        method,
        BUDGET,
        num_rounds=2,
        client_sizes=sizes,
        schedule=schedule,
        trusted_aggregator=trusted,
    )
    shape = jax.ShapeDtypeStruct((sum(sizes),), np.float32)
    algorithm = dppvi.pvi(
        model,
        None,
        {"y": shape, "z": shape},
        method=method,
        client_sizes=sizes,
        plan=plan,
        schedule=schedule,
        damping=1.0,
        trusted_aggregator=trusted,
    )

    def world(canary: float) -> dppvi.records.Shards:
        clients = [{"y": np.zeros(n, np.float32), "z": np.full(n, push, np.float32)} for n in sizes]
        clients[0]["y"][0], clients[0]["z"][0] = canary, 0.0
        return dppvi.records.stack_clients(clients)

    worlds = (world(HUGE), world(-HUGE))
    problem, params, before, _, groups, keys, _ = taken(algorithm, worlds[0], rounds, "run_round")

    def score(secret_key: jax.Array, shards: dppvi.records.Shards) -> jax.Array:
        now, total = before, 0.0
        for number in range(2):
            q = problem.family.coordinates(now.server.natural)
            sign = jnp.where(q["clock"].loc < HALF_PAST, 1.0, -1.0)
            own = (jax.random.fold_in(keys[0], number), jax.random.fold_in(secret_key, number))
            after, _ = rounds.run_round(problem, params, now, shards, groups, own)
            factors = [state.server.factors["mu"].linear[0] for state in (now, after)]
            moved = factors[1] - factors[0]
            total, now = total + sign * moved, after
        return total

    return Case(_claim(plan), score, worlds)


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """All audits, by name."""
    poisson = dppvi.PoissonSampling(0.2)
    yield "full batches, 10 steps", gradients
    yield (
        "full batches, 10 steps, one record less",
        lambda: gradients(relation="add_or_remove_one"),
    )
    yield "Poisson q=.2, 20 steps", lambda: gradients(poisson, num_steps=20)
    yield (
        "Poisson q=.2, 20 steps, one record less",
        lambda: gradients(poisson, "add_or_remove_one", 20),
    )
    # Whoever takes the canary's place when it is not drawn pulls the other way.
    half = dppvi.FixedSizeSampling(5)
    yield "5 of 10 records, 10 steps", lambda: gradients(half, others=-1.0)
    own = dppvi.PoissonSampling((0.5, 0.2))
    yield (
        "the second of clients that differ, q=.2, 20 steps",
        lambda: gradients(own, num_steps=20, clip_norm=(4.0, 1.0)),
    )
    yield "global steps, two clients' joint noise", global_steps
    yield (
        "parameter perturbation, 2 rounds",
        lambda: changes(dppvi.methods.ParameterPerturbation(100.0, **LOCAL), push=0.0),
    )
    for trusted in (False, True):
        words = ", joint noise" if trusted else ""
        yield (
            f"local averaging, 2 rounds{words}",
            lambda trusted=trusted: changes(
                dppvi.methods.LocalAveraging(20, 100.0, **LOCAL), trusted
            ),
        )
        yield (
            f"virtual clients, 2 rounds{words}",
            lambda trusted=trusted: changes(dppvi.VirtualClients(20, 5.0, **LOCAL), trusted),
        )
        yield (
            f"natural gradients, 2 rounds{words}",
            lambda trusted=trusted: changes(dppvi.VirtualClients(20, 0.5, **NATURAL), trusted),
        )


def table(num_runs: int = 100_000) -> None:
    """What was shown of what is claimed."""
    print(f"\nAudits: {num_runs} runs a data set; a ratio above 1 refutes the claim (p < .001)")
    print(f"{'':<50} {'shown / claimed':>15} {'seconds':>8}")
    for name, make in cases():
        start = time.perf_counter()
        found = report(make(), num_runs)
        seconds = time.perf_counter() - start
        print(f"{name:<50} {found.ratio:>15.2f} {seconds:>8.0f}")
