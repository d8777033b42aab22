"""By how much clients differ: exact without noise, calibrated with it, and what it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.families.full_normal import unpack
from numpyro_dppvi.methods import differences

SIZE, CLIENTS = 6, 5

after = jax.jit(differences.after)


def noise(rng):
    """Symmetric, with standard normal entries off the diagonal, and sqrt(2) times that on it."""
    matrix = rng.normal(size=(SIZE, SIZE))
    return (matrix + matrix.T) / np.sqrt(2)


def visits(rng, apart, error, number):
    """What is known after so many visits of clients whose shapes are the identity and ``apart``."""
    found = differences.nothing().moving
    for visit in range(number):
        # What is known of the mean: the visits before.
        known = max(visit, 1e-9) ** 0.5 / error
        seen = np.eye(SIZE) + noise(rng) / known if visit else np.zeros((SIZE, SIZE))
        now = np.eye(SIZE) + apart + error * noise(rng)
        found = after(found, seen, known * np.eye(SIZE), now, error, 1 / CLIENTS)
    return found


def test_without_noise_the_squared_length_is_found():
    apart = noise(np.random.default_rng(0))
    seen, known = np.eye(SIZE), 1e6 * np.eye(SIZE)
    found = after(differences.nothing().moving, seen, known, seen + apart, 1e-6, 0.2)
    np.testing.assert_allclose(found.square, np.sum(apart**2), rtol=1e-5)


def test_nothing_is_found_before_there_is_anything_to_compare_with():
    unknown = np.zeros((SIZE, SIZE))
    nothing = differences.nothing()
    found = after(nothing.moving, unknown, unknown, np.diag([90.0] * SIZE), 1e-6, 0.2)
    assert found.known < 1e-20
    assert not differences.large(nothing._replace(moving=found), SIZE)


@pytest.mark.parametrize("error", [0.1, 1.0])
def test_noise_is_not_taken_for_differences(error):
    """Each estimate is unbiased within 4 of its standard errors: wrong once in 16 000 times."""
    found = visits(np.random.default_rng(1), 0.0, error, 60)
    assert abs(found.square) < 4 / np.sqrt(found.known)
    assert not differences.large(differences.nothing()._replace(moving=found), SIZE)


@pytest.mark.parametrize("error", [0.1, 1.0])
def test_groups_of_their_own_are_seen(error):
    """A client whose information is all on one of six latents: D has the length sqrt(30)."""
    apart = np.diag([5.0] + [-1.0] * (SIZE - 1))
    found = visits(np.random.default_rng(2), apart, error, 2 * CLIENTS)
    np.testing.assert_allclose(found.square, 30, atol=4 / np.sqrt(found.known))
    assert differences.large(differences.nothing()._replace(moving=found), SIZE)


@pytest.mark.parametrize("error", [0.1, 1.0])
def test_what_changes_on_the_way_is_told_from_clients_that_differ(error):
    """By what clients release at one location: these are alike, those are groups of their own."""
    apart = np.diag([5.0] + [-1.0] * (SIZE - 1))
    rng = np.random.default_rng(3)
    changed, alike = (visits(rng, d, error, 20 * CLIENTS) for d in (apart, 0.0))
    known = differences.nothing()._replace(moving=changed, still=alike)
    assert not differences.large(known, SIZE)
    assert differences.large(known._replace(still=changed), SIZE)


def opposed(rng, apart, noise, number):
    """Scores of so many visits at one location, half of them ``apart`` from the others."""
    found = differences.nothing().scores
    for visit in range(number):
        away = apart * (-1) ** visit + np.sqrt(noise) * rng.normal(size=SIZE)
        found = differences.after_scores(found, away, noise, 1 / CLIENTS)
    return found


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.5])
def test_noise_is_not_taken_for_scores_that_differ(noise):
    """The estimate is unbiased within 4 of its standard errors: wrong once in 16 000 times."""
    found = opposed(np.random.default_rng(4), np.zeros(SIZE), noise, 60)
    assert abs(found.square) < 4 * found.error
    assert not differences.large(differences.nothing()._replace(scores=found), SIZE)


@pytest.mark.parametrize("noise", [1e-6, 0.05])
def test_scores_that_differ_by_a_deviation_of_a_record_are_seen_in_a_round(noise):
    """Clients of which half hold one outcome and half the other differ by about as much."""
    found = opposed(np.random.default_rng(5), np.eye(SIZE)[0], noise, CLIENTS)
    np.testing.assert_allclose(found.square, 1, atol=4 * found.error)
    assert differences.large(differences.nothing()._replace(scores=found), SIZE)


def groups(group, y):
    effects = numpyro.sample("effects", dist.Normal(0, 3).expand([SIZE]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(effects[group], 0.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [10.0, 1000.0, np.inf])
def test_clients_that_are_groups_of_their_own_have_the_exact_posterior(epsilon):
    """By default, one client after the other. Within 4.5 sd, for 18 numbers: once in 8000 times."""
    rng = np.random.default_rng(3)
    truth = rng.normal(size=SIZE)
    data = [
        {
            "group": np.full(400, number, np.int32),
            "y": (truth[number] + 0.5 * rng.normal(size=400)).astype(np.float32),
        }
        for number in range(SIZE)
    ]
    result = dppvi.fit(
        groups,
        None,
        data,
        rng_key=jax.random.key(0),
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(epsilon, 1e-5),
        progress_bar=False,
        insecure_noise_seed=0,
    )
    (natural,) = result.posterior.natural.values()
    covariance = np.linalg.inv(-2 * np.asarray(unpack(natural.quadratic), np.float64))
    mean = covariance @ np.asarray(natural.linear, np.float64)
    precision = 400 / 0.25 + 1 / 9
    exact = np.array([client["y"].sum() for client in data]) / 0.25 / precision
    wide = np.sqrt(np.diag(covariance) * precision)
    assert np.all((wide > 0.95) & (wide < 2.0)), wide
    off = (mean - exact) / np.sqrt(np.diag(covariance))
    assert np.all(np.abs(off) < 4.5), off


def coins(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([3]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=w[0] + x @ w[1:]), obs=y)


def counts(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([3]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(w[0] + x @ w[1:])), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [5, 10])
@pytest.mark.parametrize("epsilon", [3.0, 10.0])
@pytest.mark.parametrize("model", [coins, counts], ids=["coins", "counts"])
def test_clients_that_hold_one_outcome_each_agree(model, epsilon, num_clients):
    """Cases at one hospital and controls at another, one after the other, as by default.

    Asked in turn and moved after each, intercepts lay up to 23 deviations off, in intervals 20
    times as wide as without privacy. Within 4.5 sd, for 24 numbers: once in 6000 times.
    """
    rng = np.random.default_rng(7)
    truth = np.array([-0.5, 0.8, -0.6])
    x = rng.normal(size=(5000, 2)).astype(np.float32)
    eta = truth[0] + x @ truth[1:]
    if model is coins:
        y = (rng.uniform(size=5000) < 1 / (1 + np.exp(-eta))).astype(np.int32)
    else:
        y = rng.poisson(np.exp(eta)).astype(np.int32)
    parts = np.array_split(np.argsort(y, kind="stable"), num_clients)
    result = dppvi.fit(
        model,
        None,
        [{"x": x[part], "y": y[part]} for part in parts],
        rng_key=jax.random.key(0),
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(epsilon, 1e-5),
        progress_bar=False,
        insecure_noise_seed=0,
    )
    design = np.column_stack([np.ones(5000), x])
    chance = 1 / (1 + np.exp(-eta))
    information = chance * (1 - chance) if model is coins else np.exp(eta)
    exact = np.sqrt(np.diag(np.linalg.inv((design.T * information) @ design)))
    mean, width = result.posterior.mean["w"], result.posterior.stddev["w"]
    assert np.all(width < 3 * exact), width / exact
    off = (mean - truth) / width
    assert np.all(np.abs(off) < 4.5), off
