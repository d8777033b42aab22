"""Diagnostics against exact answers, and the noise they find against the noise there is."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import replay
from numpyro_dppvi.analysis.diagnostics import curvature, precision
from numpyro_dppvi.families import DiagonalNormal, NormalCoordinates, NormalNatural
from numpyro_dppvi.run import Outcome, Status

NOISE, PRIOR_SCALE = 1.5, 2.0
SIZES = (200, 400, 1400)
FEW = (20, 40, 140)  # in the same proportions, for what is exact of any number
DAMPING = 0.5
# Converges to rounding error on a smooth, noise-free objective.
PRECISE = {
    "num_local_steps": 1500,
    "optimizer": optax.adam(optax.exponential_decay(0.1, 60, 0.7)),
    "expectation": dppvi.methods.SphericalCubature(),
}


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SCALE).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def clients(sizes=SIZES):
    generator = np.random.default_rng(0)
    return [{"y": generator.normal(0.5, NOISE, size=(size, 2))} for size in sizes]


def run(method, data=None, **arguments):
    arguments = {"num_rounds": 6, "damping": DAMPING, **arguments}
    return dppvi.fit(
        means, None, data or clients(), rng_key=jax.random.key(0), method=method,
        progress_bar=False, **arguments
    )  # fmt: skip


@pytest.fixture(scope="module")
def exact():
    """Without noise, where every number has a closed form."""
    with jax.enable_x64(True):
        result = run(dppvi.NonPrivate(**PRECISE), clients(FEW), schedule=dppvi.synchronous)
        yield result, dppvi.diagnose(result)


@pytest.mark.slow
def test_residuals_halve_as_the_distance_to_the_fixed_point_does(exact):
    result, found = exact
    assert len(found.residual) == 6
    np.testing.assert_array_equal(found.movement, result.history.movement)
    # With damping 1/2 every round goes half of the way that is left.
    np.testing.assert_allclose(found.residual[4] / found.residual[3], 0.5, rtol=0.1)
    # The last round's step in posterior standard deviations, location and width together.
    q, p = result.posterior_at(6), result.posterior_at(5)
    shift = (q.mean["mu"] - p.mean["mu"]) / q.stddev["mu"]
    ratio = q.stddev["mu"] ** 2 / p.stddev["mu"] ** 2
    jeffreys = 0.5 * shift**2 * (1 + ratio) + 0.5 * (ratio + 1 / ratio - 2)
    np.testing.assert_allclose(found.residual[-1], np.sqrt(np.mean(jeffreys)) / DAMPING, rtol=1e-6)


@pytest.mark.slow
def test_shares_are_those_of_the_records(exact):
    _, found = exact
    assert found.contributors == ("prior", "client 0", "client 1", "client 2")
    reached = 1 - DAMPING**6
    parts = [1 / PRIOR_SCALE**2, *(reached * size / NOISE**2 for size in FEW)]
    expected = np.array(parts) / sum(parts)
    # The first solve starts so far away that it stops a hundredth short of its end.
    np.testing.assert_allclose(found.share["mu"], np.stack([expected] * 2, 1), rtol=0.02)
    np.testing.assert_allclose(np.sum(found.share["mu"], axis=0), 1, rtol=1e-12)


def test_without_privacy_there_is_no_noise(exact):
    _, found = exact
    assert found.noise == {}
    assert found.noise_residual is found.sharpness is None
    assert "noise" not in str(found)


def test_curvature_is_the_precision_of_normal_factors():
    """What stands in for the precision where a family has no formula."""
    family = DiagonalNormal((2, 2))
    loc = jnp.array([[0.5, -1.0], [2.0, 0.0]])
    q = family.natural(NormalCoordinates(loc, jnp.log(jnp.array([[0.3, 1.0], [2.0, 0.5]]))))
    factor = NormalNatural(jnp.ones((2, 2)), jnp.array([[-0.5, 0.25], [0.0, -2.0]]))
    expected = [[1.0, -0.5], [0.0, 4.0]]
    np.testing.assert_allclose(precision(family, q, factor), expected)
    np.testing.assert_allclose(curvature(family, q, factor), expected, atol=1e-3)


@pytest.mark.slow
def test_noise_of_perturbed_changes_is_the_one_that_theory_says():
    """A solve takes back the noise that its client's factor holds, and damping keeps a part of it.

    An exact client's factor follows e <- (1 - damping) e + damping * noise, a first-order
    autoregression, and q's linear parameter is the sum of independent ones.
    """
    num_rounds, num_replays = 6, 300
    noise_std = np.array([0.5, 1.0, 2.0])
    precision = np.array(SIZES) / NOISE**2
    with jax.enable_x64(True):
        method = dppvi.methods.ParameterPerturbation(**PRECISE, clip_norm=1e4)
        result = run(method, budget=dppvi.PrivacyBudget(math.inf), num_rounds=num_rounds)
        family, target = result.posterior.family, np.stack([precision] * 2, axis=1)
        again = replay.replay_of(result, jax.random.key(0))
        params = again.params[0]
        clients = params.clients._replace(noise_std=jnp.asarray(noise_std))
        again = again._replace(
            params=[params._replace(clients=clients)] * num_rounds,
            targets={
                "mu": NormalNatural(jnp.asarray(target * [0.5, -1.0]), jnp.asarray(-target / 2))
            },
        )
        found = replay.replays(again, jax.random.key(0), 1.0, num_replays)
        last = family.coordinates(jax.tree.map(lambda leaf: leaf[-1], found))["mu"]
    geometric = (1 - (1 - DAMPING) ** (2 * num_rounds)) / (1 - (1 - DAMPING) ** 2)
    variance = np.sum(noise_std**2) * DAMPING**2 * geometric
    # mean = linear / precision, and noise in the precision shifts a mean that is not 0.
    whole = 1 / PRIOR_SCALE**2 + (1 - DAMPING**num_rounds) * precision.sum()
    expected = np.sqrt(variance * (1 + 4 * np.array([0.5, -1.0]) ** 2)) / whole
    # 300 replays give a standard deviation to within 4 %.
    np.testing.assert_allclose(np.std(np.asarray(last.loc), axis=0), expected, rtol=0.16)


@pytest.mark.slow
def test_an_exact_client_without_noise_ends_where_its_records_say():
    """One round of three clients, undamped, is the product of prior and targets."""
    with jax.enable_x64(True):
        result = run(dppvi.NonPrivate(**PRECISE), clients(FEW), num_rounds=1, damping=1.0)
        again = replay.replay_of(result, jax.random.key(0))
        found = replay.replays(again, jax.random.key(0), 1.0, 2)
    for number in range(2):
        q = jax.tree.map(lambda leaf, n=number: leaf[-1, n], found)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02), q, result.posterior.natural
        )


def test_the_report_is_in_sentences():
    numbers = {
        "status": Status(Outcome.UNSETTLED, 2, 2, 0, 0, 0, True, moved=0.5),
        "movement": np.array([3.0, 0.5]),
        "residual": np.array([2.0, 0.8]),
        "noise_residual": 0.3,
        "sharpness": 9.0,
        "contributors": ("prior", "client 0", "client 1"),
        "share": {"w": np.array([[0.1, 0.3], [0.5, 0.5], [0.4, 0.2]])},
        "noise": {"w": np.array([0.5, 2.5])},
    }
    report = str(dppvi.analysis.Diagnostics(**numbers))
    for words in (
        "All 2 rounds ran, but the posterior has not settled",
        "moved q by 0.5 nats; before damping, its step was 0.8 posterior sd of a parameter",
        "noise alone does 0.3: it is still moving",
        "q is up to 3 times too wide",
        "prior 20%, client 0 50%, client 1 30%",
        "1 of 2 are mostly noise: w[1] (2.5)",
    ):
        assert words in report
    calm = {**numbers, "noise_residual": 0.7, "sharpness": 1.2, "noise": {"w": np.array([0.2])}}
    report = str(dppvi.analysis.Diagnostics(**calm))
    for words in (
        "noise alone does 0.7: that may be all of it",
        "none by more than 1",
    ):
        assert words in report
    assert "privacy" not in report
    # Clips may have made q too wide, and replays do not clip.
    assert "  width " not in report
    status = dataclasses.replace(calm["status"], widened=1.83, least=1.08)
    report = str(dppvi.analysis.Diagnostics(**{**calm, "status": status}))
    words = "about 1.8 times as wide as they would be without it; the budget allows 1.1 times"
    assert words in report


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 5.0])
def test_noise_is_the_spread_over_runs_with_other_noise(epsilon):
    """Replays know the released factors alone, and yet find what only many real runs can show."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(3000, 8))
    y = generator.binomial(1, 1 / (1 + np.exp(-X @ np.linspace(-1, 1, 8))))
    fit = functools.partial(
        dppvi.fit,
        logistic,
        None,
        {"X": X, "y": y},
        rng_key=jax.random.key(0),
        clients=3,
        method=dppvi.DPOptimization(),
        budget=dppvi.PrivacyBudget(epsilon),
        progress_bar=False,
    )
    results = [fit(insecure_noise_seed=seed) for seed in range(16)]
    spread = np.std([r.posterior.mean["w"] for r in results], axis=0, ddof=1)
    width = np.mean([r.posterior.stddev["w"] for r in results], axis=0)
    real = np.sqrt(np.mean((spread / width) ** 2))
    found = [dppvi.diagnose(r) for r in results[:4]]
    seen = [np.sqrt(np.mean(f.noise["w"] ** 2)) for f in found]
    assert np.median(seen) == pytest.approx(real, rel=0.3)
    # The records' own width, which these runs are far from.
    p = 1 / (1 + np.exp(-X @ np.linspace(-1, 1, 8)))
    full = np.diag(X.T @ (X * (p * (1 - p))[:, None]))
    held = width**-2 - 1
    assert np.median([f.sharpness for f in found]) == pytest.approx(np.mean(full / held), rel=0.6)
