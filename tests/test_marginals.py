"""Means, standard deviations and quantiles against closed forms of SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions import transforms
from scipy import stats

from numpyro_dppvi.posterior import marginals
from tests.grids import grid

PROBS = (0.01, 0.3, 0.5, 0.975)
LOC, SCALE = np.array([0.3, -1.0]), np.array([0.2, 0.7])
NORMAL = dist.Normal(LOC, SCALE).to_event(1)


def through(*pieces):
    return dist.TransformedDistribution(NORMAL, list(pieces))


EXP = transforms.IndependentTransform(transforms.ExpTransform(), 1)
TURN = transforms.IndependentTransform(transforms.AffineTransform(1.0, -2.0), 1)
SIGMOID = transforms.IndependentTransform(transforms.SigmoidTransform(), 1)
LOG_NORMAL = stats.lognorm(SCALE, scale=np.exp(LOC))


@grid(
    ("make", "expected"),
    [
        (lambda: NORMAL, stats.norm(LOC, SCALE)),
        (lambda: through(EXP), LOG_NORMAL),
        (lambda: through(TURN), stats.norm(1 - 2 * LOC, 2 * SCALE)),
        (
            lambda: dist.MultivariateNormal(LOC, jnp.diag(jnp.array(SCALE**2))),
            stats.norm(LOC, SCALE),
        ),
        (
            lambda: dist.Bernoulli(np.array([0.2, 0.75])).to_event(1),
            stats.bernoulli([0.2, 0.75]),
        ),
        (lambda: dist.Bernoulli(logits=-25.0), stats.bernoulli(1 / (1 + np.exp(25)))),
        (
            lambda: dist.Categorical(np.array([0.1, 0.3, 0.6])),
            stats.rv_discrete(values=([0, 1, 2], [0.1, 0.3, 0.6])),
        ),
    ],
    ids=[
        *("normal", "log-normal", "turned around", "multivariate"),
        *("Bernoulli", "Bernoulli, all but certain", "categorical"),
    ],
    quick=[0, 1, 2, 3, 5, 6],
)
def test_closed_forms(make, expected):
    distribution = make()
    np.testing.assert_allclose(marginals.mean(distribution), expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(marginals.stddev(distribution), expected.std(), rtol=1e-4)
    quantiles = [expected.ppf(prob) for prob in PROBS]
    np.testing.assert_allclose(marginals.quantiles(distribution, PROBS), quantiles, rtol=1e-4)


@pytest.mark.slow
def test_correlated_normals_through_a_bijection_entry_by_entry():
    covariance = jnp.array([[0.04, 0.05], [0.05, 0.49]])
    base = dist.MultivariateNormal(jnp.array(LOC), covariance)
    distribution = dist.TransformedDistribution(base, EXP)
    quantiles = [LOG_NORMAL.ppf(prob) for prob in PROBS]
    np.testing.assert_allclose(marginals.quantiles(distribution, PROBS), quantiles, rtol=1e-4)
    np.testing.assert_allclose(marginals.mean(distribution), LOG_NORMAL.mean(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("exponentiated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_vector_in_a_shape_of_its_own(exponentiated):
    """A part of a normal vector that several latents share, as a matrix."""
    base = dist.MultivariateNormal(jnp.array([*LOC, *LOC]), jnp.diag(jnp.tile(SCALE**2, 2)))
    shape = transforms.ReshapeTransform((2, 2), (4,))
    distribution = dist.TransformedDistribution(base, [shape])
    expected = stats.norm(LOC, SCALE)
    if exponentiated:
        exp = transforms.IndependentTransform(transforms.ExpTransform(), 2)
        distribution = dist.TransformedDistribution(distribution, [exp])
        expected = LOG_NORMAL
    assert distribution.event_shape == (2, 2)
    for found, wanted in (
        (marginals.mean(distribution), expected.mean()),
        (marginals.stddev(distribution), expected.std()),
        (marginals.quantiles(distribution, (0.3,))[0], expected.ppf(0.3)),
    ):
        np.testing.assert_allclose(found, np.stack([wanted] * 2), rtol=1e-4)


@pytest.mark.slow
def test_where_there_is_no_closed_form_draws_agree():
    draws = np.asarray(through(SIGMOID).sample(jax.random.key(1), (20_000,)))
    # Four standard errors of 20 000 draws.
    np.testing.assert_allclose(marginals.mean(through(SIGMOID)), draws.mean(0), atol=4e-3)
    np.testing.assert_allclose(marginals.stddev(through(SIGMOID)), draws.std(0), atol=4e-3)


@pytest.mark.slow
def test_a_simplex_is_simulated():
    stick = transforms.StickBreakingTransform()
    distribution = dist.TransformedDistribution(NORMAL, stick)
    draws = np.asarray(distribution.sample(jax.random.key(1), (20_000,)))
    np.testing.assert_allclose(marginals.mean(distribution), draws.mean(0), atol=0.01)
    found = marginals.quantiles(distribution, PROBS)
    assert found.shape == (4, 3)
    np.testing.assert_allclose(found, np.quantile(draws, PROBS, axis=0), atol=0.02)


def test_families_without_a_normal_base():
    gamma = dist.Gamma(jnp.array([2.0, 5.0]), 3.0).to_event(1)
    np.testing.assert_allclose(marginals.mean(gamma), [2 / 3, 5 / 3], rtol=1e-5)
    np.testing.assert_allclose(marginals.stddev(gamma), np.sqrt([2, 5]) / 3, rtol=1e-5)
    expected = stats.gamma([2.0, 5.0], scale=1 / 3).ppf(0.3)
    np.testing.assert_allclose(marginals.quantiles(gamma, (0.3,))[0], expected, rtol=0.03)


@settings(max_examples=20)
@given(st.floats(-3, 3), st.floats(0.05, 1.5))
def test_quadrature_is_that_of_the_log_normal(loc, scale):
    base = dist.TransformedDistribution(dist.Normal(loc, scale), transforms.ExpTransform())
    expected = stats.lognorm(scale, scale=np.exp(loc))
    np.testing.assert_allclose(marginals.mean(base), expected.mean(), rtol=1e-4)
    np.testing.assert_allclose(marginals.stddev(base), expected.std(), rtol=5e-3)


@pytest.mark.slow
def test_a_table_has_a_line_an_entry_and_says_what_it_leaves_out():
    distributions = {"w": NORMAL, "s": dist.Normal(2.0, 1.0)}
    rows, left_out = marginals.table(distributions)
    assert [row[0] for row in rows] == ["", "w[0]", "w[1]", "s"]
    assert rows[3] == ["s", "2", "1", "0.3551", "2", "3.645"]
    assert left_out == 0
    short, left_out = marginals.table(
        {"w": dist.Normal(jnp.zeros(50), 1).to_event(1)}, max_lines=10
    )
    assert (len(short), left_out) == (11, 40)
