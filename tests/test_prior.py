"""Two studies one after the other are one study on all data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds

NOISE = 1.7
PRIOR_LOC, PRIOR_SCALE = jnp.array([0.5, -1.0]), jnp.array([2.0, 0.7])
# Converges to rounding error on a smooth, noise-free objective.
PRECISE = dppvi.NonPrivate(
    num_local_steps=1500,
    optimizer=optax.adam(optax.exponential_decay(0.1, 60, 0.7)),
    expectation=dppvi.methods.SphericalCubature(),
)
Y = np.random.default_rng(1).normal(1.0, 2.0, size=(24, 2))


def normal_means(y):
    """Conjugate: the posterior is a diagonal normal in closed form."""
    mu = numpyro.sample("mu", dist.Normal(PRIOR_LOC, PRIOR_SCALE).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def hierarchical(y):
    """Its prior lies in no family, and has to be approximated."""
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    mu = numpyro.sample("mu", dist.Normal(0, spread).expand([2]).to_event(1))
    numpyro.factor("ridge", -0.5 * jnp.sum(mu**2))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def other_support(y):
    mu = numpyro.sample("mu", dist.Uniform(-5, 5).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def closed_form(y):
    precision = 1 / PRIOR_SCALE**2 + len(y) / NOISE**2
    mean = (PRIOR_LOC / PRIOR_SCALE**2 + y.sum(0) / NOISE**2) / precision
    return np.asarray(mean), np.asarray(precision**-0.5)


fit = functools.partial(
    dppvi.fit,
    rng_key=jax.random.key(0),
    method=PRECISE,
    num_rounds=1,
    damping=1.0,
    progress_bar=False,
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [dppvi.sequential, dppvi.synchronous])
def test_studies_in_sequence_are_one_study_on_all_data(schedule):
    with jax.enable_x64(True):
        prior, seen = None, 0
        for part in np.split(Y, 3):  # three studies, each with two new clients
            clients = [{"y": part[:5]}, {"y": part[5:]}]
            result = fit(normal_means, None, clients, schedule=schedule, prior=prior)
            seen += len(part)
            mean, stddev = closed_form(Y[:seen])
            np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
            np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)
            prior = result.posterior.as_prior()


def quick(model, prior=None, **arguments):
    arguments = {"method": dppvi.NonPrivate(num_local_steps=2), "num_rounds": 2, **arguments}
    return fit(model, None, {"y": Y[:6]}, prior=prior, clients=2, **arguments)


@pytest.fixture(scope="module")
def first():
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    method = dppvi.DPOptimization(num_local_steps=2)
    return quick(hierarchical, method=method, budget=budget, insecure_noise_seed=1)


@pytest.mark.slow
def test_it_is_factor_zero_and_nothing_else_is_added_or_refined(first):
    """The model's prior and its pseudo-observations are in the earlier posterior already."""
    second = quick(hierarchical, first.posterior.as_prior())
    jax.tree.map(np.testing.assert_array_equal, second.state.prior, first.posterior.natural)
    algorithm = dppvi.pvi(
        hierarchical,
        None,
        {"y": Y[:6]},
        method=dppvi.NonPrivate(num_local_steps=2),
        client_sizes=[3, 3],
        prior=first.posterior.as_prior(),
    )
    start = algorithm.posterior(algorithm.init(jax.random.key(1)))
    jax.tree.map(np.testing.assert_array_equal, start.natural, first.posterior.natural)


@pytest.mark.slow
def test_global_vi_takes_it_too(first):
    second = quick(
        hierarchical,
        first.posterior.as_prior(),
        method=dppvi.GlobalVI(),
        trusted_aggregator=True,
        budget=dppvi.PrivacyBudget(1e-3),
        num_rounds=1,
    )
    # One step of Adam from the earlier posterior moves every coordinate by its learning rate.
    shift = second.posterior.mean["mu"] - first.posterior.mean["mu"]
    np.testing.assert_allclose(np.abs(shift), 0.02, rtol=1e-2)


@pytest.mark.slow
def test_exports_say_where_it_came_from(first, tmp_path):
    second = quick(hierarchical, first.posterior.as_prior()).posterior
    assert second.attrs["prior"] == (
        "the posterior of an earlier study, privacy: differential privacy, unit one record"
    )
    assert second.attrs["prior_max_epsilon"] == first.posterior.attrs["max_epsilon"]
    prior = second.to_arviz(num_samples=4000)["prior"]["mu"].values[0]
    # Draws from the earlier posterior, not from the model's prior: four standard errors.
    error = (prior.mean(axis=0) - first.posterior.mean["mu"]) / first.posterior.stddev["mu"]
    np.testing.assert_allclose(error, 0, atol=4 / np.sqrt(4000))
    second.save(tmp_path / "second.npz")
    loaded = dppvi.load(tmp_path / "second.npz", hierarchical)
    third = quick(hierarchical, loaded.as_prior())
    jax.tree.map(np.testing.assert_array_equal, third.state.prior, second.natural)


class TestRefusals:
    def test_what_is_no_prior(self):
        words = "got a Posterior: write prior=earlier.posterior.as_p"
        with dry_rounds(), pytest.raises(TypeError, match=words):
            quick(normal_means, quick(normal_means).posterior)

    @pytest.mark.slow
    def test_other_latents(self):
        words = "from a study with latents mu, spread, not mu: fit both studies with the same lat"
        with dry_rounds(), pytest.raises(dppvi.UnsupportedModelError, match=words):
            quick(normal_means, quick(hierarchical).posterior.as_prior())

    def test_another_support(self):
        words = "latent 'mu' on another support"
        with dry_rounds(), pytest.raises(dppvi.UnsupportedModelError, match=words):
            quick(other_support, quick(normal_means).posterior.as_prior())
