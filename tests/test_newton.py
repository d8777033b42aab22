"""Newton's steps: exact where the answer is known, and no worse where a Hessian says nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.methods import newton

KEY = jax.random.key(0)


def line(x, y):
    b = numpyro.sample("b", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, 1), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(1, 1, 120)
    return {"x": x, "y": 1 - x + rng.normal(size=120)}


def run(model, data, guide=None, **changes):
    arguments = {"method": dppvi.NonPrivate(), "clients": 1, "progress_bar": False, **changes}
    return dppvi.fit(model, guide, data, rng_key=KEY, **arguments)


@pytest.mark.parametrize("draws", [2, 10])
def test_of_a_quadratic_the_draws_leave_no_error(data, draws):
    """One visit; from two draws alone a precision would be off by its own size."""
    method = dppvi.NonPrivate(expectation=dppvi.MonteCarlo(draws))
    found = run(line, data, method=method, num_rounds=1).posterior
    X = np.stack([np.ones(120), data["x"]], 1)
    precision = X.T @ X + np.eye(2) / 9
    exact = np.linalg.solve(precision, X.T @ data["y"])
    np.testing.assert_allclose(found.mean["b"], exact, atol=0.002)
    np.testing.assert_allclose(found.stddev["b"], np.diag(precision) ** -0.5, rtol=0.005)


def test_a_kink_has_a_width_that_no_second_derivative_shows():
    """The posterior of a Laplace distribution's location, whose Hessian is zero: by a grid."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Laplace(mu, 1), obs=y)

    y = np.random.default_rng(0).laplace(1, 1, 150)
    found = run(model, {"y": y}).posterior
    grid = np.linspace(0, 2, 4001)
    log = -(grid**2) / 18 - np.abs(y[:, None] - grid).sum(axis=0)
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    assert found.mean["mu"] == pytest.approx(mean, abs=0.2 * sd)
    assert found.stddev["mu"] == pytest.approx(sd, rel=0.2)


def test_where_the_log_density_is_not_concave_q_ends_at_a_mode():
    """Two modes, and a prior at the saddle between them but for a little."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.05, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu**2, 0.3), obs=y)

    result = run(model, {"y": np.full(20, 2.0)})
    assert abs(result.posterior.mean["mu"]) == pytest.approx(np.sqrt(2), abs=0.02)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED


def test_other_families_settle_too():
    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    def guide(y):
        a = numpyro.param("a", jnp.array(2.0), constraint=dist.constraints.positive)
        numpyro.sample("rate", dist.Gamma(a, 1.0))

    y = np.random.default_rng(0).poisson(3.0, 80)
    result = run(model, {"y": y}, guide)
    shape, sd = 2 + y.sum(), np.sqrt(2 + y.sum()) / 81
    assert result.run.damping == 0.4
    assert result.posterior.mean["rate"] == pytest.approx(shape / 81, abs=0.1 * sd)


def test_more_latents_than_a_hessian_is_worth_take_steps_of_adam(data, monkeypatch):
    fewer = run(line, data, num_rounds=1, method=dppvi.NonPrivate(7)).posterior
    monkeypatch.setattr(newton, "MOST_LATENTS", 1)
    adam = run(line, data, num_rounds=1, method=dppvi.NonPrivate(8)).posterior
    # Eight steps of .05 go no further from the prior's location.
    assert np.abs(adam.mean["b"]).max() < 0.41
    assert np.abs(fewer.mean["b"]).max() > 0.8


def test_steps_that_cannot_be_cut_into_tens_are_all_taken(data):
    for steps in (1, 13, 20):
        result = run(line, data, num_rounds=1, method=dppvi.NonPrivate(steps))
        assert np.isfinite(result.posterior.mean["b"]).all()
