"""No secret key is used twice: not by clients, steps, shards, rounds or purposes.

The generator itself is watched while whole rounds run, compiled as ever: each key must serve once,
to draw bits, to be split, or to have different numbers folded in.
"""

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.extend.random import define_prng_impl

import numpyro_dppvi as dppvi
from numpyro_dppvi.methods import visits
from numpyro_dppvi.privacy import chacha, keys

BITS, SPLIT, FOLD = 1, 2, 3
NUM_CLIENTS, NUM_ROUNDS, NUM_STEPS = 3, 2, 5
SIZES = (4, 6, 5)


class Use(NamedTuple):
    """A key, what for, and the number that was folded in."""

    key: tuple[int, ...]
    purpose: int
    number: int


@pytest.fixture
def uses(monkeypatch):
    """Every use of a secret key while this is held, as the compiled program makes it."""
    seen = []

    def note(purpose, key, number=0):
        def append(key, number):
            seen.append(Use(tuple(np.asarray(key).tolist()), purpose, int(number)))

        jax.debug.callback(append, key, number)

    def random_bits(key, bit_width, shape):
        note(BITS, key)
        return chacha._random_bits(key, bit_width, shape)

    def split(key, shape):
        note(SPLIT, key)
        return chacha._split(key, shape)

    def fold_in(key, data):
        note(FOLD, key, data)
        return chacha._fold_in(key, data)

    # A generator of its own, so that nothing that was compiled before is run.
    watched = define_prng_impl(
        key_shape=(chacha.KEY_WORDS,),
        seed=chacha._seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name="watched",
        tag="watched",
    )
    monkeypatch.setattr(chacha, "implementation", lambda: watched)
    return seen


def reused(uses):
    """The keys that were used twice, and how."""
    by_key = defaultdict(list)
    for use in uses:
        by_key[use.key].append((use.purpose, use.number))
    return [
        how
        for how in by_key.values()
        if len(set(how)) < len(how) or ({p for p, _ in how} != {FOLD} and len(how) > 1)
    ]


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def run(method, schedule, trusted=False):
    """A few rounds of three clients; the number of noisy sums."""
    rng = np.random.default_rng(0)
    data = [{"y": rng.normal(size=size).astype(np.float32)} for size in SIZES]
    shapes = {"y": jax.ShapeDtypeStruct((sum(SIZES),), jnp.float32)}
    setting = {"client_sizes": SIZES, "schedule": schedule, "trusted_aggregator": trusted}
    budget = dppvi.PrivacyBudget(1.0)
    plan = dppvi.plan_privacy(method, budget, num_rounds=NUM_ROUNDS, **setting)
    algorithm = dppvi.pvi(normal_mean, None, shapes, method=method, plan=plan, **setting)
    state = algorithm.init(jax.random.key(0))
    shards = dppvi.records.stack_clients(data)
    for _ in range(NUM_ROUNDS):
        state, _ = algorithm.step(jax.random.key(0), state, shards)
    jax.block_until_ready(state.natural)
    jax.effects_barrier()
    return sum(entry.num_releases for entry in state.ledger.entries)


POISSON = dppvi.DPOptimization(
    num_local_steps=NUM_STEPS, sampler=dppvi.PoissonSampling(0.5), expectation=dppvi.MonteCarlo(2)
)
RUNS = {
    "Poisson batches, in turn": (POISSON, dppvi.sequential),
    "full batches, at their own pace": (
        dppvi.DPOptimization(num_local_steps=NUM_STEPS, expectation=dppvi.MonteCarlo(2)),
        dppvi.Asynchronous((1.0, 0.4, 2.0)),
    ),
    "a joint sum over shards": (
        dppvi.VirtualClients(2, num_local_steps=2),
        dppvi.synchronous,
        True,
    ),
    "global steps": (dppvi.GlobalVI(sampler=dppvi.PoissonSampling(0.5)), dppvi.synchronous, True),
    "scores, whose outcomes are drawn": (dppvi.FisherScoring(2), dppvi.sequential),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_secret_key_is_used_twice(name, uses):
    num_sums = run(*RUNS[name])
    method = RUNS[name][0]
    drawn = isinstance(getattr(method, "sampler", None), dppvi.PoissonSampling)
    drawn |= isinstance(method, dppvi.FisherScoring)
    # Each noisy sum drew its noise, and its batch or outcomes if any: nothing escaped the watch.
    assert sum(use.purpose == BITS for use in uses) == num_sums * (2 if drawn else 1)
    assert num_sums >= NUM_CLIENTS * NUM_ROUNDS
    assert reused(uses) == []


def same_key_every_round(monkeypatch):
    monkeypatch.setattr(
        dppvi.privacy.SecretKeys,
        "round_key",
        lambda self, number: keys._key(bytes(32), "chacha20"),
    )


def same_key_at_every_client(monkeypatch):
    monkeypatch.setattr(jax.random, "fold_in", lambda key, data: key)


def same_key_at_every_step(monkeypatch):
    split = jax.random.split

    def one(key, num=2):
        keys = split(key, num)
        return jnp.broadcast_to(keys[0], keys.shape) if num == NUM_STEPS else keys

    monkeypatch.setattr(jax.random, "split", one)


def same_key_for_noise_and_batches(monkeypatch):
    monkeypatch.setattr(visits, "by_purpose", lambda key: keys.Purposes(key, key))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        same_key_every_round,
        pytest.param(same_key_at_every_client, marks=pytest.mark.slow),
        pytest.param(same_key_at_every_step, marks=pytest.mark.slow),
        pytest.param(same_key_for_noise_and_batches, marks=pytest.mark.slow),
    ],
)
def test_a_planted_second_use_is_found(mistake, uses, monkeypatch):
    mistake(monkeypatch)
    run(*RUNS["Poisson batches, in turn"])
    assert reused(uses)
