"""How scores follow the location, and what factors claim where that is not known."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from benchmarks import believe
from numpyro_dppvi.methods import moving, noisy_factors
from numpyro_dppvi.methods.white import coordinates
from tests.test_noisy_scores import SIZE, error_of, raw_columns, remembered

STEP = 0.1 * np.arange(1.0, SIZE + 1)


@pytest.fixture
def in_64_bits():
    with jax.enable_x64(True):
        yield


def known(curved, **changes):
    """A shape that is known for certain."""
    memory = remembered(
        shape=raw_columns(), shape_known=1e9 * np.eye(SIZE), level_var=0.0, curved=curved
    )
    return memory._replace(**changes)


def after(memory, step, share):
    """Elsewhere, where the shape is known as well."""
    there = moving.moved(memory, memory.loc + step * memory.prior_sd, None, jnp.asarray(share))
    return there._replace(shape_known=memory.shape_known)


@pytest.mark.parametrize("back", [False, True])
def test_errors_add_up_along_a_path_and_cancel_on_the_way_back(back, in_64_bits):
    """Two steps at once are off by as much as one of twice the length; there and back, by none."""
    memory = known(np.ones(SIZE))
    axes, step = coordinates(memory.shape), jnp.asarray(STEP)
    there = after(memory, step, 0.0)
    first, one = (np.asarray(error_of(each, axes, step)) for each in (memory, there))
    both = np.asarray(error_of(memory, axes, 2 * step))
    if back:
        first, one = first * 0, np.asarray(error_of(there, axes, -step))
        both = np.asarray(error_of(memory, axes, step))
    np.testing.assert_allclose(first + one, both, rtol=1e-4, atol=1e-9)


def test_what_led_there_is_forgotten_by_rounds(in_64_bits):
    memory, step = known(np.ones(SIZE)), jnp.asarray(STEP)
    axes = coordinates(memory.shape)
    alone = np.asarray(error_of(memory, axes, step))
    there = after(memory, step, 1.0)
    errors = [np.asarray(error_of(there, axes, step))[0, 0]]
    for _ in range(8):
        there = after(there, 0 * step, 1.0)
        errors.append(np.asarray(error_of(there, axes, step))[0, 0])
    assert np.all(np.diff(errors) < 0)
    np.testing.assert_allclose(errors[-1], alone[0, 0], rtol=0.03)


def test_errors_do_not_add_up_of_what_is_straight_or_cannot_be_drawn(in_64_bits):
    step = jnp.asarray(STEP)
    straight = known(np.zeros(SIZE))
    axes = coordinates(straight.shape)
    way = np.sum((np.asarray(axes.back) @ STEP) ** 2)
    for memory in (straight, after(straight, step, 0.0)):
        found = np.asarray(error_of(memory, axes, step))
        # What is left are errors of second order, of a level that is known.
        np.testing.assert_allclose(found, 0.01 * way * np.eye(SIZE), rtol=1e-4, atol=1e-6)
    observed = known(np.ones(SIZE), drawn=jnp.zeros(()))
    there = after(observed, step, 0.0)
    np.testing.assert_allclose(error_of(there, axes, step), error_of(observed, axes, step))


def _left_of(seen, noise):
    """What is left of a factor's claims along each eigenvector of what was seen."""
    memory = remembered(
        shape=seen + 0.05 * np.eye(SIZE), seen=seen, shape_known=np.eye(SIZE) / noise
    )
    axes = coordinates(memory.shape)
    kept = noisy_factors.told_of(memory, axes, noise * jnp.eye(SIZE))
    _, turn = np.linalg.eigh(seen)
    ways = np.asarray(axes.back) @ turn
    ways = ways / np.linalg.norm(ways, axis=0)
    return np.linalg.norm(np.asarray(kept) @ ways, axis=0)


def test_factors_claim_nothing_of_a_direction_that_surely_has_next_to_nothing(in_64_bits):
    repeated = np.eye(SIZE)
    repeated[0, 1] = repeated[1, 0] = 1.0
    np.testing.assert_allclose(_left_of(repeated, 0.005), [0, 1, 1, 1], atol=0.01)
    # In more noise it could be any direction's; and what is seen of it is claimed.
    np.testing.assert_allclose(_left_of(repeated, 0.2), 1, atol=1e-6)
    repeated[0, 1] = repeated[1, 0] = 0.9
    np.testing.assert_allclose(_left_of(repeated, 0.005), 1, atol=1e-6)


def indicators(columns, y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    w = numpyro.sample("w", dist.Normal(0, 5).expand([columns.shape[1]]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(a + columns @ w, 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(3, 0), (3, 1), (10, 0), (10, 1), (30, 0)])
def test_where_columns_add_up_to_one_the_intercept_is_not_known(case):
    """It was, to a fortieth of the exact deviation: noise in the shape passed for information."""
    epsilon, seed = case
    rng = np.random.default_rng(3)
    group = rng.integers(0, 5, 2400)
    columns = np.eye(5)[group]
    y = 1 + rng.normal(size=5)[group] + rng.normal(size=2400)
    whole = np.column_stack([np.ones(2400), columns])
    exact = np.linalg.inv(whole.T @ whole + np.eye(6) / 25)
    result = dppvi.fit(
        indicators,
        None,
        {"columns": columns, "y": y},
        clients=4,
        rng_key=jax.random.key(seed),
        budget=dppvi.PrivacyBudget(epsilon),
        insecure_noise_seed=seed,
        progress_bar=False,
    )
    found = float(result.posterior.stddev["a"])
    assert 0.9 < found / math.sqrt(exact[0, 0]) < 1.05


def crossed(doc, item, y, binary):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    ad = numpyro.sample("ad", dist.Normal(0, 1).expand([15]).to_event(1))
    ai = numpyro.sample("ai", dist.Normal(0, 1).expand([10]).to_event(1))
    predicted = mu + ad[doc] + ai[item]
    outcome = dist.Bernoulli(logits=predicted) if binary else dist.Normal(predicted, 1.0)
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", outcome, obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(False, 2), (True, 3), (False, 1), (True, 1)])
def test_without_noise_clients_in_turn_agree_on_two_lookups(case):
    """Each client's factor claimed next to nothing of where the next one would go, for ever."""
    binary, seed = case
    rng = np.random.default_rng(seed)
    number = 2400
    doc, item = rng.integers(0, 15, number), rng.integers(0, 10, number)
    predicted = rng.normal(size=15)[doc] + rng.normal(size=10)[item]
    y = predicted + rng.normal(size=number)
    if binary:
        y = (rng.random(number) < 1 / (1 + np.exp(-predicted))).astype(np.int32)
    clients = [
        {"doc": doc[start : start + 600], "item": item[start : start + 600]}
        | {"y": y[start : start + 600]}
        for start in range(0, number, 600)
    ]
    result = dppvi.fit(
        crossed,
        None,
        clients,
        rng_key=jax.random.key(1),
        budget=dppvi.PrivacyBudget(math.inf),
        model_kwargs={"binary": binary},
        num_rounds=10,
        progress_bar=False,
    )
    x = np.column_stack([np.eye(15)[doc], np.eye(10)[item], np.ones(number)])
    prior = np.diag([1.0] * 25 + [1 / 9])
    mode, covariance = np.zeros(26), None
    for _ in range(20):  # Newton's steps
        mean, weight = x @ mode, np.ones(number)
        if binary:
            mean = 1 / (1 + np.exp(-mean))
            weight = mean * (1 - mean)
        covariance = np.linalg.inv(x.T @ (x * weight[:, None]) + prior)
        mode = mode + covariance @ (x.T @ (y - mean) - prior @ mode)
    exact = np.sqrt(np.diag(covariance))
    posterior = result.posterior
    found, width = (
        np.concatenate([np.ravel(each[name]) for name in ("ad", "ai", "mu")])
        for each in (posterior.mean, posterior.stddev)
    )
    assert not result.status.rejected
    np.testing.assert_allclose(width / exact, 1, atol=0.05)
    assert np.abs((found - mode) / exact).max() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "bound"), [(1.0, 2.0), (3.0, 1.35)])
def test_intercepts_of_rare_outcomes(epsilon, bound):
    """Of 1000 records, 2 to 3 % ones: errors were 2.3 of their deviations.

    32 studies; errors of calibrated intervals are below 1.35 in 99.9 of 100 tests. At epsilon 1
    they are not calibrated: 1.43 in 128 other studies.
    """
    cell = believe.Cell("logistic", (200,) * 5, epsilon, "rare outcomes")
    errors = []
    for seed in range(1600, 1632):
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, dppvi.FisherScoring(), seed)
        errors.append((mean[0] - made.truth[0]) / std[0])
    assert np.sqrt(np.mean(np.square(errors))) < bound
