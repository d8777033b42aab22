"""The local optimiser's handling of gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import numpyro_dppvi as dppvi
from models.examples import EXAMPLES
from numpyro_dppvi.methods import local_solve

START = {"x": jnp.array([1.0, -2.0])}


def pulled_to_zero(scale, point):
    return jax.tree.map(lambda leaf: scale * leaf, point)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)])
def test_a_step_whose_gradient_is_not_finite_is_not_taken(optimizer, bad):
    """The optimiser's state does not move, either: Adam would remember a NaN for good."""
    skipped = local_solve.solve(jnp.array([1.0, bad, 1.0]), START, pulled_to_zero, optimizer)
    without = local_solve.solve(jnp.array([1.0, 1.0]), START, pulled_to_zero, optimizer)
    np.testing.assert_array_equal(skipped["x"], without["x"])


def test_a_solve_whose_last_step_is_not_taken_has_failed():
    end = local_solve.solve(jnp.array([1.0, 1.0, jnp.nan]), START, pulled_to_zero, optax.sgd(0.1))
    assert np.isnan(end["x"]).all()


def test_a_solve_that_diverges_has_failed():
    """It is not left at the last finite number before it overflowed."""
    end = local_solve.solve(jnp.ones(60), START, pulled_to_zero, optax.sgd(-9.0))
    assert np.isnan(end["x"]).all()


@pytest.mark.slow
def test_draws_from_the_tail_of_a_prior_do_not_stop_a_fit():
    """Long lengths of this curve underflow a spectral density, whose root has then no gradient."""
    example = EXAMPLES["smooth curve"]
    result = dppvi.fit(
        example.model,
        None,
        example.records,
        rng_key=jax.random.key(0),
        clients=1,
        method=dppvi.NonPrivate(100, expectation=dppvi.MonteCarlo(64)),
        num_rounds=5,
        progress_bar=False,
    )
    assert result.history.failed[-1] == 0
    assert result.history.movement[-2:].min() > 0
    draws = result.posterior.sample(jax.random.key(1), (200,))
    np.testing.assert_allclose(np.mean(draws["noise"]), 0.3, atol=0.1)
