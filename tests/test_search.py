"""Where FisherScoring begins: records vote, and the run goes where they are likely."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.methods import search

SIZE = 3


def places():
    steps = search.steps(search.nothing(jnp.zeros(SIZE), True), SIZE)
    return np.asarray(search.places(jnp.zeros(SIZE), jnp.ones(SIZE), steps))


@pytest.mark.slow
def test_places_lie_along_the_axes_in_units_of_the_prior():
    steps = jnp.array([0.1, 2.0])
    found = search.places(jnp.array([1.0, 0.0]), jnp.array([1.0, 10.0]), steps)
    away = np.asarray(found) - [1.0, 0.0]
    np.testing.assert_allclose(away[0], 0)
    expected = {(0.1, 0), (0, 1), (2, 0), (0, 20), (-0.1, 0), (0, -1), (-2, 0), (0, -20)}
    assert {tuple(float(x) for x in np.round(row, 4)) for row in away[1:]} == expected


@pytest.mark.parametrize(
    "densities",
    [
        [0.0, -1.0, -1e30],
        [-3e38, -3e38, -3e38],
        [-np.inf, -5.0, np.nan],
        [np.inf, 0.0, 0.0],
        [np.nan, np.nan, np.nan],
        [-np.inf, -np.inf, -np.inf],
    ],
)
def test_no_record_has_more_than_one_vote(densities):
    votes = np.asarray(search.votes(jnp.array(densities, jnp.float32)))
    assert np.all(votes >= 0)
    assert np.all(np.isfinite(votes))
    assert np.linalg.norm(votes) <= 1 + 1e-6


def test_votes_are_for_where_a_record_is_likely():
    votes = np.asarray(search.votes(jnp.array([-1000.0, -3.0, -3.5, -400.0])))
    assert votes[1] > votes[2] > 0.6 * votes[1]
    assert votes[0] < 0.01 * votes[1]


def after(sums, noise_std, records, most_visits=1.0):
    known = search.nothing(jnp.zeros(SIZE), True)
    rng = np.random.default_rng(0)
    noise = noise_std * rng.normal(size=(records, len(sums)))
    take = jax.vmap(lambda each: search.after(known, each, noise_std**2, 1.0, most_visits))
    found, steps = jax.jit(take)(jnp.asarray(sums + noise))
    return found, np.asarray(steps)


@pytest.mark.slow
def test_a_run_that_begins_well_stays():
    """Of 2000 studies in noise, whether votes are even or nobody has voted, none leaves.

    Hardly one in fifty votes once more.
    """
    for sums in (np.full(len(places()), 10.0), np.zeros(len(places()))):
        found, steps = after(sums, 20.0, 2000)
        assert not np.any(steps)
        assert np.mean(np.asarray(found.repeated) > 0) < 0.02


@pytest.mark.parametrize(
    ("votes", "voted", "most_visits", "again", "moves"),
    [
        (2.0, 1.0, 1.0, False, False),
        (3.0, 1.0, 1.0, True, False),
        (4.0, 1.0, 1.0, True, True),
        (3.0, 0.6, 1.0, False, False),
        (3.0, 1.0, 2.0, False, False),
        (4.0, 1.0, 3.0, False, False),
    ],
)
def test_where_noise_may_hide_a_better_place_all_vote_again(
    votes, voted, most_visits, again, moves
):
    """Three places stand out by 2.9, 4.3 and 5.8 deviations."""
    known = search.nothing(jnp.zeros(SIZE), True)
    by_place = np.zeros((2, (len(places()) - 1) // (2 * SIZE), SIZE))
    by_place[0, 5:8, 1] = votes
    sums = jnp.asarray(np.concatenate([[0.0], by_place.ravel()]))
    found, step = search.after(known, sums, 1.0, voted, most_visits)
    assert bool(np.any(step)) is moves
    assert float(found.repeated) == (most_visits if again else 0)
    # Votes that follow add up, unless the run now begins elsewhere.
    assert bool(np.any(found.votes)) is not moves


def votes_of(truth):
    """Those of 300 records of deviation .2 about a mean that is the sum of all latents."""
    y = truth + 0.2 * np.random.default_rng(1).normal(size=(300, 1))
    densities = -0.5 * ((y - places().sum(axis=1)) / 0.2) ** 2
    return np.asarray(jnp.sum(jax.vmap(search.votes)(jnp.asarray(densities)), axis=0))


@pytest.mark.slow
def test_the_step_leads_to_where_records_are_likely():
    """All latents have the same column, and make up for the mean in equal shares; a little less."""
    found, steps = after(votes_of(1.2), 5.0, 4)
    total = steps.sum(axis=1)
    assert np.all((total > 0.7) & (total < 1.2)), total
    np.testing.assert_allclose(found.repeated, 1)
    # Votes are about another place from now on.
    assert not np.any(found.votes)


@pytest.mark.slow
def test_records_that_like_all_far_places_do_not_lead_there():
    """Three fifths have no event, and are the likelier the later events are expected."""
    event = 1.0 * (np.random.default_rng(2).uniform(size=(300, 1)) < 0.4)
    log_time, late = 7.3, 100 * places().sum(axis=1)
    densities = -event * late - np.exp(np.minimum(log_time - late, 80))
    votes = np.asarray(jnp.sum(jax.vmap(search.votes)(jnp.asarray(densities)), axis=0))
    total = 100 * after(votes, 1.0, 4)[1].sum(axis=1)
    assert np.all((total > 4) & (total < 12)), total


@pytest.mark.slow
def test_a_run_that_has_begun_is_not_moved():
    assert not np.any(after(votes_of(1.2), 5.0, 4, most_visits=3.0)[1])


def days(y):
    log_mean = numpyro.sample("log_mean", dist.Normal(0, 10))
    shape = numpyro.sample("shape", dist.LogNormal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-log_mean)), obs=y)


def prices(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1000))
    spread = numpyro.sample("spread", dist.LogNormal(0, 2))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("model", [days, prices])
def test_records_that_are_impossible_at_the_priors_mean_are_found(model):
    """At epsilon 3. Runs from the prior's mean end 20 or more deviations off, or do not settle."""
    rng = np.random.default_rng(2)
    if model is days:
        y, name, exact = 2000 * rng.gamma(2, 0.5, size=3000), "log_mean", np.log
        width = 1 / np.sqrt(2 * 3000)
    else:
        y, name, exact = 1200 + 40 * rng.normal(size=3000), "mean", lambda mean: mean
        width = 40 / np.sqrt(3000)
    result = dppvi.fit(
        model,
        None,
        {"y": y.astype(np.float32)},
        clients=5,
        rng_key=jax.random.key(0),
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(3.0, 1e-5),
        progress_bar=False,
        insecure_noise_seed=0,
    )
    # The last round may still have moved it by half a deviation.
    assert result.status.outcome.name in ("COMPLETED", "UNSETTLED"), str(result.status)
    assert 1 < result.posterior.stddev[name] / width < 2
    off = (result.posterior.mean[name] - exact(y.mean())) / result.posterior.stddev[name]
    assert abs(off) < 4, off
