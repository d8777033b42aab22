"""Gradients in closed form are those of the loss of one record, mapped over the records."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import objective, record_gradients
from tests.grids import grid

RNG = np.random.default_rng(0)
ROWS = {
    "X": RNG.normal(size=(9, 3)).astype(np.float32),
    "g": np.arange(9) % 4,
    "y": RNG.integers(0, 2, 9).astype(np.float32),
}


def line(X, g, y):
    """One linear predictor of a vector, a number and effects of groups."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + b + effect[g]), obs=y)


def spread(X, g, y):
    """No linear predictor, because the spread is unknown."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0, 1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(X @ w, s), obs=y)


QUADRATURE, DRAWS = dppvi.methods.GaussHermite(6), dppvi.MonteCarlo


def space_and_family(model, guide):
    shapes = jax.eval_shape(lambda: {name: jnp.asarray(leaf) for name, leaf in ROWS.items()})
    space = latents.from_model(model, shapes)
    return space, guides.family_of(guide(model), model, space)


def gradients_of(model, guide, rule, rows=ROWS):
    """By ``of_rows``, and by differentiating the loss of each record."""
    space, family = space_and_family(model, guide)
    at = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape),
        family.standard(),
    )
    first = space, family, rule, jax.random.key(3), at
    one = jax.vmap(lambda row: jax.grad(objective.record_loss, argnums=4)(*first, row))
    closed = record_gradients.of_rows
    found = jax.jit(lambda rows: record_gradients.laid_out(closed(*first, rows)))(rows)
    return found, jax.jit(one)(rows)


@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
@grid(
    ("model", "rule"),
    [(line, QUADRATURE), (line, DRAWS(4)), (spread, DRAWS(1)), (spread, DRAWS(13))],
    quick=[0],
    ids=["quadrature", "draws of a predictor", "one draw", "draws of any model"],
)
def test_they_are_the_gradients_of_the_loss(model, rule, guide):
    found, expected = gradients_of(model, guide, rule)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.abs(b).max())


@pytest.mark.slow
@grid(("model", "rule"), [(line, QUADRATURE), (line, DRAWS(4)), (spread, DRAWS(4))], quick=[2])
def test_a_hostile_record_stays_in_its_own_gradient(model, rule):
    """To the last bit, whatever it holds."""
    usual, _ = gradients_of(model, AutoNormal, rule)
    for bad in (np.nan, np.inf, 1e30):
        X = ROWS["X"].copy()
        X[4] = bad
        found, _ = gradients_of(model, AutoNormal, rule, ROWS | {"X": X})
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(usual), strict=True):
            np.testing.assert_array_equal(np.delete(a, 4, 0), np.delete(b, 4, 0))


@pytest.mark.slow
def test_a_record_that_sees_no_latent_has_a_finite_gradient():
    rows = ROWS | {"X": np.zeros((9, 3), np.float32)}

    def blind(X, g, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    found, _ = gradients_of(blind, AutoNormal, QUADRATURE, rows)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_what_is_not_finite_at_far_nodes_is_left_out():
    """Rates of 1e-9 lie seven standard deviations away, where 1 - exp(-rate) is 0 in 32 bits."""

    def counts(stable):
        def model(X, g, y):
            w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
            with numpyro.plate("n", len(y)):
                rate = jnp.exp(X @ w)
                above = jnp.log(-jnp.expm1(-rate)) if stable else jnp.log(1 - jnp.exp(-rate))
                numpyro.factor("y", (y + 1) * jnp.log(rate) - rate - above)

        return model

    rows = ROWS | {"X": np.full((9, 3), 1.5, np.float32)}
    rule = dppvi.methods.GaussHermite()
    for found, expected in zip(
        gradients_of(counts(False), AutoNormal, rule, rows),
        gradients_of(counts(True), AutoNormal, rule, rows),
        strict=True,
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.all(np.isfinite(a))
            np.testing.assert_allclose(a, b, rtol=1e-2)
