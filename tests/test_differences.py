"""By how much clients differ: exact without noise, calibrated with it, and what it changes."""

import jax
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
    assert not differences.large(differences.Differences(changed, alike), SIZE)
    assert differences.large(differences.Differences(changed, changed), SIZE)


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
