"""Hierarchies: priors outside the guide's family are a factor that the server refines."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi

NUM_GROUPS = 8
# Clients hold whole groups: each knows of others' effects through the hierarchy alone.
HOLDERS = [(0, 1), (2,), (3, 4), (5, 6), (7,)]


def logistic(X, group, y=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", NUM_GROUPS):
        effect = numpyro.sample("effect", dist.Normal(0.0, tau))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group] + X @ slopes), obs=y)


def schools(group, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("groups", NUM_GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
    with numpyro.plate("records", group.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], 10.0), obs=y)


def schools_guide(group, y=None):
    """A gamma for the width, and normals; parameters named as the fit names them."""
    positive = dist.constraints.positive
    loc = numpyro.param("mu_auto_loc", 0.0)
    numpyro.sample("mu", dist.Normal(loc, numpyro.param("mu_auto_scale", 1.0, constraint=positive)))
    # Mean and concentration: (concentration, rate) converge slowly.
    mean = numpyro.param("tau_mean", 5.0, constraint=positive)
    concentration = numpyro.param("tau_auto_concentration", 2.0, constraint=positive)
    numpyro.sample("tau", dist.Gamma(concentration, concentration / mean))
    with numpyro.plate("groups", NUM_GROUPS):
        loc = numpyro.param("effect_auto_loc", jnp.zeros(NUM_GROUPS))
        scale = numpyro.param("effect_auto_scale", jnp.ones(NUM_GROUPS), constraint=positive)
        numpyro.sample("effect", dist.Normal(loc, scale))


@functools.cache
def logistic_data():
    rng = np.random.default_rng(0)
    group = rng.integers(0, NUM_GROUPS, 400)
    X = rng.normal(size=(400, 2))
    logits = 1.2 * rng.normal(size=NUM_GROUPS)[group] + X @ [1.0, -0.5]
    return {"X": X, "group": group, "y": (rng.uniform(size=400) < 1 / (1 + np.exp(-logits))) * 1}


@functools.cache
def schools_data():
    group = np.repeat(np.arange(NUM_GROUPS), 20)
    effect = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    return {"group": group, "y": effect[group] + 10 * np.random.default_rng(0).normal(size=160)}


def by_holder(data):
    rows = [np.isin(data["group"], groups) for groups in HOLDERS]
    return [{name: column[mine] for name, column in data.items()} for mine in rows]


class Case(NamedTuple):
    model: Any
    data: Any
    guide: Any
    svi_guide: Any


def automatic(kind, model):
    # From the default, init_to_uniform, Adam may not arrive.
    return kind(model, init_loc_fn=init_to_median(num_samples=15))


CASES = {
    "logistic": Case(logistic, logistic_data, None, automatic(AutoNormal, logistic)),
    "schools": Case(schools, schools_data, None, automatic(AutoNormal, schools)),
    "schools, gamma": Case(schools, schools_data, schools_guide, schools_guide),
    "schools, full covariance": Case(
        schools,
        schools_data,
        AutoMultivariateNormal(schools),
        automatic(AutoMultivariateNormal, schools),
    ),
}


def means_and_stddevs(params):
    """By latent, in the guide's base space."""
    if "auto_loc" in params:
        covariance = params["auto_scale_tril"] @ params["auto_scale_tril"].T
        return {"all": (params["auto_loc"], np.sqrt(np.diag(covariance)))}
    found = {}
    for name, loc in params.items():
        if name.endswith("_auto_loc"):
            latent = name.removesuffix("_auto_loc")
            found[latent] = (loc, params[f"{latent}_auto_scale"])
        if name == "tau_auto_concentration":
            mean = params.get("tau_mean", loc / params.get("tau_auto_rate", 1.0))
            found["tau"] = (mean, mean / np.sqrt(loc))
    return found


@functools.cache
def by_svi(name):
    case = CASES[name]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 6000, alpha=0.002))
    elbo = Trace_ELBO(num_particles=64, vectorize_particles=True)
    svi = SVI(case.model, case.svi_guide, optimizer, elbo)
    run = svi.run(jax.random.key(0), 6000, progress_bar=False, **case.data())
    return means_and_stddevs(run.params)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [dppvi.sequential, dppvi.synchronous])
@pytest.mark.parametrize("name", CASES)
def test_a_run_ends_where_svi_ends(name, schedule):
    """Over seeds, means were within .025 standard deviations and these within 2 %.

    Of that, 1 % is the error of SVI itself: so far do two of its seeds differ.
    """
    case = CASES[name]
    local = optax.adam(optax.cosine_decay_schedule(0.05, 100, alpha=0.02))
    result = dppvi.fit(
        case.model,
        case.guide,
        by_holder(case.data()),
        rng_key=jax.random.key(1),
        method=dppvi.NonPrivate(100, local, dppvi.MonteCarlo(64)),
        schedule=schedule,
        num_rounds=60,
        damping=0.2,
        progress_bar=False,
    )
    found = means_and_stddevs(result.params)
    expected = by_svi(name)
    assert found.keys() == expected.keys()
    for latent, (mean, stddev) in expected.items():
        shift = (found[latent][0] - mean) / stddev
        np.testing.assert_allclose(shift, 0, atol=0.05, err_msg=latent)
        np.testing.assert_allclose(found[latent][1] / stddev, 1, atol=0.03, err_msg=latent)
