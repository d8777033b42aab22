"""The linear predictor that is found by tracing, and quadrature over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import objective
from tests.grids import grid

ROWS = {
    "X": np.random.default_rng(0).normal(size=(12, 3)),
    "g": np.arange(12) % 4,
    "y": np.random.default_rng(1).integers(0, 3, 12),
}


def weights(name="w", size=3):
    return numpyro.sample(name, dist.Normal(0, 1).expand([size]).to_event(1))


def logistic(X, y):
    w = weights()
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y > 0)


def poisson(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    w = weights()
    numpyro.sample("y", dist.Poisson(jnp.exp(intercept + X @ w)).to_event(1), obs=y)


def groups(X, g, y):
    centre, spread = (
        numpyro.sample("centre", dist.Normal()),
        numpyro.sample("spread", dist.HalfCauchy()),
    )
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(centre, spread))
    w = weights()
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.StudentT(4.0, effect[g] + jnp.dot(X, w), 0.5), obs=y)


def known_noise(X, y):
    w = weights()
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(2.0 * (X @ w) - 1.0, 0.7), obs=y)


def missing(X, y):
    w = weights()
    with numpyro.plate("n", len(y)), numpyro.handlers.mask(mask=y > 0):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def unknown_noise(X, y):
    w, spread = weights(), numpyro.sample("spread", dist.HalfNormal())
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(X @ w, spread), obs=y)


def two_predictors(X, y):
    w, v = weights(), weights("v")
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.ZeroInflatedPoisson(jax.nn.sigmoid(X @ v), jnp.exp(X @ w)), obs=y)


def squared(X, y):
    w = weights()
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(X @ w**2, 1.0), obs=y)


def loops(X, y):
    w = weights()

    def step(carry, x):
        return carry + x, None

    with numpyro.plate("n", len(y)):
        total, _ = jax.lax.scan(step, jnp.zeros(len(y)), (X * w).T)
        numpyro.sample("y", dist.Normal(total, 1.0), obs=y)


def read(model):
    names = model.__code__.co_varnames[: model.__code__.co_argcount]
    rows = {name: jnp.asarray(ROWS[name]) for name in names}
    return latents.from_model(model, rows), rows


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@grid("model", [logistic, poisson, groups, known_noise, missing], quick=[0, 3, 4])
def test_a_linear_predictor_is_found_and_splits_the_likelihood_exactly(model):
    space, rows = read(model)
    key = jax.random.key(0)
    base = {lt.name: jax.random.normal(key, lt.base_shape) for lt in space.latents}
    other = {name: 2 * value for name, value in base.items()}

    @jax.jit
    def found(row):
        value = space.predictor.value(base, row)
        whole = space.log_likelihood(space.constrain(base), row)
        slopes = [jax.grad(space.predictor.value)(b, row) for b in (base, other)]
        return space.predictor.log_likelihood(value, row), whole, slopes

    for number in range(12):
        by_value, whole, slopes = found({name: leaf[number] for name, leaf in rows.items()})
        np.testing.assert_allclose(by_value, whole, rtol=1e-12)
        # Affine: the slope is the same everywhere.
        jax.tree.map(np.testing.assert_array_equal, *slopes)


@pytest.mark.parametrize("model", [unknown_noise, two_predictors, squared, loops])
def test_none_is_claimed_where_there_is_none(model):
    space, _ = read(model)
    assert space.predictor is None
    family = guides.family_of(None, model, space)
    assert objective.rule_for(dppvi.methods.Automatic(6), space, family) == dppvi.MonteCarlo(6)
    with pytest.raises(
        dppvi.UnsupportedModelError, match="through one linear predictor per record"
    ):
        objective.rule_for(dppvi.methods.GaussHermite(), space, family)


@pytest.mark.slow
@grid("model", [logistic, poisson, groups, known_noise], quick=[1, 3])
def test_quadrature_is_the_integral_over_the_predictor(model):
    """Against adaptive integration, value and gradient."""
    space, rows = read(model)
    family = guides.family_of(None, model, space)
    assert (
        objective.rule_for(dppvi.methods.Automatic(), space, family) == dppvi.methods.GaussHermite()
    )
    coordinates = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape),
        family.standard(),
    )
    row = {name: leaf[5] for name, leaf in rows.items()}

    @jax.jit
    def predictor(coordinates):
        center, slope = jax.value_and_grad(space.predictor.value)(family.location(coordinates), row)
        return center, jnp.sqrt(family.linear_variance(coordinates, slope))

    @jax.jit
    def density(value):
        return space.predictor.log_likelihood(value, row)

    def integral(coordinates):
        center, stddev = map(float, predictor(coordinates))
        return -scipy.integrate.quad(
            lambda z: float(density(center + stddev * z)) * np.exp(-(z**2) / 2), -12, 12
        )[0] / np.sqrt(2 * np.pi)

    loss = functools.partial(
        objective.record_loss,
        space,
        family,
        dppvi.methods.GaussHermite(150),
        jax.random.key(0),
        row=row,
    )
    value, gradient = jax.jit(jax.value_and_grad(loss))(coordinates)
    np.testing.assert_allclose(value, integral(coordinates), rtol=1e-5)
    step = 1e-4
    moved = jax.tree.map(lambda c, g: c + step * g, coordinates, gradient)
    back = jax.tree.map(lambda c, g: c - step * g, coordinates, gradient)
    numeric = (integral(moved) - integral(back)) / (2 * step)
    exact = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))
    np.testing.assert_allclose(exact, numeric, rtol=1e-3)


@pytest.mark.slow
def test_a_record_that_sees_no_latent_has_a_finite_gradient():
    space, rows = read(logistic)
    family = guides.family_of(None, logistic, space)
    row = {"X": jnp.zeros(3), "y": rows["y"][0]}
    gradient = jax.grad(objective.record_loss, argnums=4)(
        space, family, dppvi.methods.GaussHermite(), jax.random.key(0), family.standard(), row
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_quadrature_and_many_draws_end_at_the_same_posterior():
    run = functools.partial(
        dppvi.fit,
        logistic,
        None,
        {"X": ROWS["X"], "y": ROWS["y"]},
        rng_key=jax.random.key(0),
        clients=2,
        num_rounds=15,
        progress_bar=False,
    )
    exact = run(method=dppvi.NonPrivate(100)).posterior
    drawn = run(method=dppvi.NonPrivate(100, expectation=dppvi.MonteCarlo(2000))).posterior
    np.testing.assert_allclose(exact.mean["w"], drawn.mean["w"], atol=0.02)
    np.testing.assert_allclose(exact.stddev["w"], drawn.stddev["w"], rtol=0.03)
