"""Information that scores show where the matrix misses it: exact quadratics, noise, bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi.methods import secant

TRUE = np.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])
TOLD = np.diag([1.0, 0.1, 0.4])
WAY = np.array([0.2, -0.7, 0.1])
RECORDS = 500.0


def rounds(noise_var, way=WAY):
    """Two rounds' scores of a quadratic log likelihood, whose noise is not drawn."""
    places = (np.array([0.1, 0.5, -0.3]), np.array([0.1, 0.5, -0.3]) + way)
    return [
        secant.Round(jnp.asarray(at), jnp.asarray(-RECORDS * TRUE @ at), noise_var * jnp.eye(3))
        for at in places
    ]


def missed(noise_var, shape=TOLD, way=WAY, told=TOLD):
    with jax.enable_x64(True):
        return np.asarray(secant.missed(*rounds(noise_var, way), told, shape, RECORDS))


def test_with_it_the_shape_explains_how_scores_changed():
    found = missed(1e-12)
    assert np.linalg.matrix_rank(found, tol=1e-9) == 1
    np.testing.assert_allclose(WAY @ (TOLD + found) @ WAY, WAY @ TRUE @ WAY, rtol=1e-6)
    assert np.linalg.eigvalsh(found)[0] > -1e-12


@pytest.mark.parametrize("shape", [TRUE, 1.1 * TRUE])
def test_what_the_shape_explains_adds_nothing(shape):
    assert np.all(missed(1e-12, shape) == 0)


def test_only_what_noise_does_not_explain_counts():
    squared, change = WAY @ WAY, WAY @ (TRUE - TOLD) @ WAY
    # Three standard deviations of the noise of two rounds are half of the change.
    noise_var = (0.5 * RECORDS * change / 3) ** 2 / (2 * squared)
    np.testing.assert_allclose(WAY @ missed(noise_var) @ WAY, change / 2, rtol=1e-6)
    assert np.all(missed(4.01 * noise_var) == 0)


def test_a_rise_is_bounded_by_what_was_told():
    found = missed(1e-12, 1e-4 * TOLD, told=1e-4 * TOLD)
    np.testing.assert_allclose(WAY @ found @ WAY, 20 * WAY @ (1e-4 * TOLD) @ WAY, rtol=1e-6)


def test_without_a_round_before_or_a_step_nothing_is_added():
    assert np.all(missed(0.0) == 0)
    assert np.all(missed(1.0, way=0 * WAY) == 0)
    first = secant.missed(secant.nothing(3), rounds(1.0)[1], TOLD, TOLD, RECORDS)
    assert np.all(np.asarray(first) == 0)
