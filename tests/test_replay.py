"""A replay is the run again: where likelihoods are factors, round for round and to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import replay
from numpyro_dppvi.families import NormalNatural
from numpyro_dppvi.posterior.marginals import moments

NO_NOISE = dppvi.PrivacyBudget(float("inf"))
SD, SIZES = 1.5, (12, 20, 8)
CUBATURE = dppvi.methods.SphericalCubature()
SGD = {"num_local_steps": 2, "optimizer": optax.sgd(0.01), "expectation": CUBATURE}
NATURAL = {"num_local_steps": 2, "optimizer": dppvi.NaturalGradient(), "expectation": CUBATURE}
TOGETHER = {"schedule": dppvi.synchronous}
AGGREGATED = {**TOGETHER, "trusted_aggregator": True}
LATE = {"schedule": dppvi.Asynchronous((1.0, 1.6, 2.5))}
COMMITTEE = dppvi.DPOptimization(1e9, **SGD)
SHARDS, FREE = (4, 5, 2), 1e9
RUNS = {
    "in turn": (dppvi.NonPrivate(**SGD), {"budget": None}),
    "at once": (dppvi.NonPrivate(**SGD), {"budget": None, **TOGETHER}),
    "asynchronous": (dppvi.NonPrivate(**SGD), {"budget": None, **LATE}),
    "noisy steps": (dppvi.DPOptimization(FREE, **SGD), LATE),
    "committee": (dppvi.BayesianCommitteeMachine("same", COMMITTEE), {}),
    "split committee": (dppvi.BayesianCommitteeMachine("split", COMMITTEE), {"init_scale": 0.5}),
    "perturbed": (dppvi.methods.ParameterPerturbation(FREE, **NATURAL), {}),
    "averaging": (dppvi.methods.LocalAveraging(SHARDS, FREE, **NATURAL), {}),
    "averaging, summed": (dppvi.methods.LocalAveraging(SHARDS, FREE, **NATURAL), AGGREGATED),
    "virtual": (dppvi.VirtualClients(SHARDS, FREE, **NATURAL), {"init_scale": 0.5}),
    "virtual, summed": (dppvi.VirtualClients(SHARDS, FREE, **NATURAL), AGGREGATED),
    "virtual, asynchronous": (dppvi.VirtualClients(SHARDS, FREE, **NATURAL), LATE),
}


def mean_of(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, SD), obs=y)


# Every shard has records of the same mean and number, so that one stands for all.
DATA = [{"y": np.full(size, value)} for size, value in zip(SIZES, (1.0, -0.5, 3.0), strict=True)]


def run(method, model=mean_of, data=DATA, **arguments):
    arguments = {"budget": NO_NOISE, "num_rounds": 3, "damping": 0.7, **arguments}
    key = jax.random.key(0)
    return dppvi.fit(model, None, data, rng_key=key, method=method, progress_bar=False, **arguments)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# Others differ from these in what they are made of, and in nothing that these do not have.
QUICK = ("virtual",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_replay_of_likelihoods_is_the_run(x64, name):
    method, arguments = RUNS[name]
    result = run(method, **arguments)
    sums = jnp.array([np.sum(part["y"]) for part in DATA]) / SD**2
    targets = {"mu": NormalNatural(sums, -0.5 * jnp.array(SIZES) / SD**2)}
    again = replay.replay_of(result, jax.random.key(7))._replace(targets=targets)
    found = replay.replays(again, jax.random.key(8), 1.0, 2)
    for one in range(2):
        jax.tree.map(
            lambda mine, theirs, one=one: np.testing.assert_allclose(
                mine[:, one], theirs, rtol=2e-5, atol=1e-6
            ),
            found,
            result.history.natural,
        )


# ---------------------------------------------------------------------------------------------
# A hierarchy, and noise that is not small.

GROUPS = 3


def groups_of(group, y):
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], SD), obs=y)


@pytest.mark.slow
def test_a_hierarchys_prior_is_refined_in_replays_too(x64):
    """Its draws are others than the run's, which moves q by some hundredths of its width."""
    data = [
        {"group": np.full(size, m), "y": np.full(size, value)}
        for m, (size, value) in enumerate(zip(SIZES, (1.0, -0.5, 3.0), strict=True))
    ]
    result = run(dppvi.NonPrivate(**SGD), groups_of, data, budget=None, num_rounds=4)
    one_group = jnp.eye(GROUPS)
    sums = one_group * jnp.array([np.sum(part["y"]) for part in data])[:, None] / SD**2
    precisions = one_group * jnp.array(SIZES)[:, None] / SD**2
    nothing = jax.tree.map(jnp.zeros_like, result.state.factors)
    targets = {**nothing, "effect": NormalNatural(sums, -0.5 * precisions)}
    again = replay.replay_of(result, jax.random.key(7))
    found = replay.replays(again._replace(targets=targets), jax.random.key(8), 1.0, 2)
    assert apart(found, result) < 0.1
    # Were it not refined, the difference would be another.
    fixed = again._replace(targets=targets, problem=again.problem._replace(refined=frozenset()))
    assert apart(replay.replays(fixed, jax.random.key(8), 1.0, 2), result) > 0.3


def apart(found, result):
    """How far q is from a run's, after any round, in its standard deviations."""
    family = result.posterior.family
    mine, _ = jax.vmap(jax.vmap(lambda q: moments(family, q)))(found)
    theirs, width = jax.vmap(lambda q: moments(family, q))(result.history.natural)
    return max(
        float(jnp.max(jnp.abs(mine[name] - theirs[name][:, None]) / width[name][:, None]))
        for name in mine
    )


def rare(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.slow
def test_noise_that_takes_precisions_below_the_priors_is_not_told_ten_thousand_times_too_large():
    """All seeds are fixed. With these and four other sets of ten the ratio was .8 to 2.4.

    So it would fail about once in two hundred times, were they drawn anew. Where replays merged by
    another rule than rounds do, the ratio was 10 000 and more.
    """
    rng = np.random.default_rng(0)
    X = np.where(rng.uniform(size=(100, 4)) < 0.2, 1.0, 0.0)
    y = rng.binomial(1, 1 / (1 + np.exp(-X @ np.linspace(-1, 1, 4))))
    results = [
        dppvi.fit(
            rare,
            None,
            {"X": X, "y": y},
            rng_key=jax.random.key(0),
            clients=2,
            method=dppvi.VirtualClients((50, 50), 0.5, 1, dppvi.NaturalGradient()),
            budget=dppvi.PrivacyBudget(1.0),
            num_rounds=15,
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        for seed in range(10)
    ]
    assert all(result.status.projected > 10 for result in results)  # it is about these
    means = np.std([result.posterior.mean["w"] for result in results], axis=0, ddof=1)
    widths = np.mean([result.posterior.stddev["w"] ** 2 for result in results], axis=0)
    real = np.sqrt(np.mean(means**2 / widths))
    seen = [np.sqrt(np.mean(dppvi.diagnose(r).noise["w"] ** 2)) for r in results[:5]]
    assert 1 / 5 < np.median(seen) / real < 5
