"""Sums of factors in 64 bits, in programs of 32."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents
from numpyro_dppvi.families import FullNormal, MeanField, factors, precision
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack

FAMILY = MeanField((("w", FullNormal((2,))),))
# Of 1000 records with a column of ones and one of 2005 +- 3.
YEARS = 1000 * np.array([[1.0, 2005.0], [2005.0, 2005.0**2 + 9]])
LOC = np.array([-802.0, 0.4])


def years():
    with jax.enable_x64(True):
        natural = NormalNatural(jnp.asarray(YEARS @ LOC), pack(jnp.asarray(-YEARS / 2)))
    return {"w": natural}


@pytest.mark.slow
def test_sums_of_factors_keep_their_digits():
    half = factors.power(years(), 0.5)
    whole = factors.multiply(half, factors.total(jax.tree.map(lambda x: x[None], half)))
    np.testing.assert_allclose(whole["w"].linear, YEARS @ LOC, rtol=1e-15)
    np.testing.assert_allclose(unpack(whole["w"].quadratic), -YEARS / 2, rtol=1e-15)


@pytest.mark.slow
def test_what_is_drawn_and_shown_has_the_precision_of_the_program():
    """A mean to 1e-6 of itself, and a standard deviation of what is left beside the ones."""
    coordinates = FAMILY.coordinates(years())
    assert {leaf.dtype for leaf in jax.tree.leaves(coordinates)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(coordinates["w"].loc, LOC, rtol=1e-6)
    deviations = FAMILY.distribution(coordinates)["w"].variance ** 0.5
    np.testing.assert_allclose(deviations, np.sqrt(np.diag(np.linalg.inv(YEARS))), rtol=1e-4)
    assert bool(FAMILY.in_domain(years()))


@pytest.mark.slow
def test_divergences_are_computed_as_wide_as_their_factors():
    """KL(p || q) + KL(q || p) = (m_p - m_q)' P (m_p - m_q) for equal precisions P."""
    moved = years()
    way = np.array([-2005.0, 1.0]) / 1000
    with jax.enable_x64(True):
        moved["w"] = moved["w"]._replace(linear=jnp.asarray(YEARS @ (LOC + way)))
    found = FAMILY.jeffreys(years(), moved)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, way @ YEARS @ way, rtol=1e-4)


def test_narrow_factors_are_computed_as_ever():
    narrow = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), years())
    assert {x.dtype for x in jax.tree.leaves(factors.power(narrow, 0.5))} == {np.dtype(np.float32)}
    with jax.enable_x64(True):  # and where the program has 64 bits, nothing is rounded
        assert FAMILY.coordinates(years())["w"].loc.dtype == np.float64


def test_arrays_of_the_host_come_back_as_wide_as_they_were():
    kept = jax.device_get(years())
    back = precision.arrays(kept)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(back))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), kept)


def study(first_year):
    rng = np.random.default_rng(0)
    year = rng.normal(0, 3, 2000)
    y = rng.uniform(size=2000) < 1 / (1 + np.exp(0.5 - 0.4 * year))
    ones = np.ones(2000)
    return {"x": np.c_[ones, year + first_year].astype(np.float32), "y": y.astype(np.int32)}


SEEN = set()


def by_year(x, y, widths):
    w = numpyro.sample("w", dist.Normal(0, widths).to_event(1))
    SEEN.update((x.dtype, w.dtype))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@pytest.fixture(scope="module")
def fitted():
    """By calendar years, 670 spreads from zero."""
    return dppvi.fit(
        by_year,
        None,
        study(2005),
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(epsilon=30.0, delta=1e-5),
        model_kwargs={"widths": np.array([1000.0, 0.5], np.float32)},
        insecure_noise_seed=1,
    )


@pytest.mark.slow
def test_calendar_years_are_fitted(fitted):
    """The slope, the intercept at 2005, and how sure they are, as if 2005 had been subtracted."""
    draws = np.asarray(fitted.posterior.sample(jax.random.key(1), (4000,))["w"], float)
    here = np.c_[draws[:, 0] + 2005 * draws[:, 1], draws[:, 1]]
    x = np.asarray(study(0)["x"], float)
    odds = np.exp(x @ [-0.5, 0.4])
    exact = np.sqrt(np.diag(np.linalg.inv((x.T * odds / (1 + odds) ** 2) @ x)))
    off = (here.mean(axis=0) - [-0.5, 0.4]) / exact
    assert np.all(np.abs(off) < 5), off
    ratio = here.std(axis=0) / exact
    assert np.all((ratio > 0.9) & (ratio < 2)), ratio


def test_layers_are_the_programs_whoever_asks_first():
    """Servers, which compute in 64 bits, ask; what is found is kept for clients' programs."""
    SEEN.clear()
    records = {"x": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.int32)}
    space = latents.from_model(by_year, records, {"widths": np.array([3.0, 0.7], np.float32)})
    with jax.enable_x64(True):
        layers = space.first_layers
    row = {"x": np.ones(2, np.float32), "y": np.int32(1)}
    ((_, product),) = layers.products({"w": jnp.ones(2)}, row).items()
    assert product.dtype == np.float32
    assert {str(dtype) for dtype in SEEN} == {"float32"}


@pytest.mark.slow
def test_models_and_records_stay_in_the_precision_of_the_program(fitted):
    assert {str(dtype) for dtype in SEEN} == {"float32"}
    assert fitted.posterior.natural["_auto_latent"].linear.dtype == np.float64
    assert fitted.posterior.mean["w"].dtype == np.float32


@pytest.mark.slow
def test_an_earlier_round_is_as_wide_as_the_last(fitted):
    last = fitted.posterior_at(len(fitted.history.movement))
    jax.tree.map(np.testing.assert_array_equal, last.natural, fitted.posterior.natural)
