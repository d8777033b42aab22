"""On which latents' values it depends how much a record tells."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dppvi import latents

RECORDS = {
    "x": jax.ShapeDtypeStruct((5, 3), float),
    "y": jax.ShapeDtypeStruct((5,), float),
    "count": jax.ShapeDtypeStruct((5,), int),
    "group": jax.ShapeDtypeStruct((5,), int),
}


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))


def linear(x, y):
    spread, w = numpyro.sample("a_spread", dist.LogNormal(0, 1)), weights()
    numpyro.sample("y", dist.Normal(x @ w, spread), obs=y)


def fixed_spread(x, y):
    numpyro.sample("y", dist.Normal(x @ weights(), 2.0), obs=y)


def effects(group, y):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau).expand([4]).to_event(1))
    numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


def logistic(x, count):
    numpyro.sample("count", dist.Bernoulli(logits=x @ weights()), obs=count)


def poisson(x, count):
    numpyro.sample("count", dist.Poisson(jnp.exp(x @ weights())), obs=count)


def product(x, y):
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a * b * x[:, 0], 1.0), obs=y)


def square(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a**2 * x[:, 0], 1.0), obs=y)


def robust(x, y):
    numpyro.sample("y", dist.StudentT(4.0, x @ weights(), 1.0), obs=y)


def chosen(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(jnp.where(x[:, 0] > 0, a, 2 * a), 1.0), obs=y)


def hinge(x, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(jnp.where(a > 0, a, 0.0) * x[:, 0], 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "curved"),
    [
        (linear, [1, 0, 0, 0]),
        (fixed_spread, [0, 0, 0]),
        (effects, [0] * 6),
        (logistic, [1, 1, 1]),
        (poisson, [1, 1, 1]),
        (product, [1, 1]),
        (square, [1]),
        (robust, [1, 1, 1]),
        (chosen, [0]),
        (hinge, [1]),
    ],
)
def test_latents_that_bend_a_density_by_more_than_a_parabola(model, curved):
    names = model.__code__.co_varnames[: model.__code__.co_argcount]
    space = latents.from_model(model, {name: RECORDS[name] for name in names})
    assert space.curved.tolist() == [bool(one) for one in curved]


@pytest.mark.parametrize("model", [linear, fixed_spread, logistic, poisson, square, robust])
def test_along_the_others_second_derivatives_are_the_same_everywhere(model):
    names = model.__code__.co_varnames[: model.__code__.co_argcount]
    space = latents.from_model(model, {name: RECORDS[name] for name in names})
    rng = np.random.default_rng(0)
    row = {name: jnp.asarray(rng.integers(0, 2, s.shape), s.dtype) for name, s in space.row.items()}
    ordered = sorted(space.continuous)
    sizes = np.cumsum([int(np.prod(space.continuous[name].shape)) for name in ordered])

    def density(flat):
        parts = jnp.split(flat, sizes[:-1])
        base = {
            name: part.reshape(space.continuous[name].shape)
            for name, part in zip(ordered, parts, strict=True)
        }
        return space.log_likelihood(space.constrain(base), row)

    third = jax.jacfwd(jax.hessian(density))(jnp.asarray(rng.normal(size=sizes[-1])))
    straight = ~space.curved
    within = np.asarray(third)[np.ix_(straight, straight, straight)]
    np.testing.assert_allclose(within, 0, atol=1e-5)
    if space.curved.any():
        assert np.abs(np.asarray(third)[space.curved]).max() > 1e-4
