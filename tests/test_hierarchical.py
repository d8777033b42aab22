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
from scipy.optimize import minimize

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.families import (
    DiagonalNormal,
    FullNormal,
    FullNormalCoordinates,
    MeanField,
    NormalNatural,
    Part,
    factors,
    full_normal,
)
from numpyro_dppvi.methods import visits
from numpyro_dppvi.protocol import algorithm, rounds, server
from numpyro_dppvi.protocol.problem import Problem

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


# ---------------------------------------------------------------------------------------------
# Noise must not blow a hierarchy up.


@pytest.mark.slow
@pytest.mark.parametrize("refined", [frozenset(), frozenset({"effect"})])
def test_a_merge_takes_the_location_of_what_has_no_precision(refined):
    """Of latents whose prior is refined, and of no others; q stays the product of factors."""
    family = MeanField((("effect", DiagonalNormal((2,))),))

    def natural(*parts):
        return {"effect": NormalNatural(*map(jnp.asarray, parts))}

    prior = natural([0.0, 0.0], [-0.5, -0.5])
    before = factors.unit(prior, 3)
    changes = natural([[30.0, 1.0], [20.0, 1.0]], [[0.5, -1.0], [-0.25, -1.0]])
    merged, totals, info = server.merge(
        family,
        prior,
        before,
        factors.block_totals(before),
        jnp.array([0, 2]),
        changes,
        damping=1.0,
        project=True,
        whole=refined,
    )
    total = factors.total(merged)["effect"]
    np.testing.assert_array_equal(total, factors.of_blocks(totals)["effect"])
    np.testing.assert_allclose(total.quadratic, [0.0, -2.0], atol=1e-6)
    np.testing.assert_allclose(total.linear, [0.0 if refined else 50.0, 2.0], atol=1e-5)
    np.testing.assert_array_equal(merged["effect"].linear[1], 0)  # sent nothing
    assert int(info.projected) == (2 if refined else 1)
    assert not bool(info.rejected)


def varying_intercepts(group, y):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    noise = numpyro.sample("noise", dist.Exponential(1.0))
    with numpyro.plate("groups", 5):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
    with numpyro.plate("records", group.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], noise), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 10.0])
@pytest.mark.parametrize(
    "method",
    [dppvi.methods.ParameterPerturbation(), dppvi.DPOptimization()],
    ids=["natural", "gradient"],
)
def test_noise_does_not_blow_a_hierarchy_up(method, epsilon):
    """Five clients of eight records, one group each, and far more noise than signal.

    Effects are about 1, and their standard deviations .2 without noise. Were locations kept where
    precisions are raised to zero, effects of 10^4 would be found, because each widens the prior
    that holds it. Now they are below 8, over six seeds.
    """
    rng = np.random.default_rng(0)
    effects = 1 + rng.normal(size=5)
    data = [{"group": np.full(8, m), "y": effects[m] + 0.7 * rng.normal(size=8)} for m in range(5)]
    for seed in (2, 3):
        result = dppvi.fit(
            varying_intercepts,
            None,
            data,
            rng_key=jax.random.key(seed),
            budget=dppvi.PrivacyBudget(epsilon, 1e-3),
            method=method,
            schedule=dppvi.synchronous,
            num_rounds=20,
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        assert np.abs(result.posterior.mean["effect"]).max() < 20
        for natural in result.history.natural.values():
            assert (-0.5 / natural.quadratic).max() ** 0.5 < 8
        assert result.history.projected.sum() > 0


@pytest.mark.slow
def test_a_prior_outside_the_family_begins_as_its_projection():
    """The normal that is nearest to the logarithm of a half-normal has mean -1/2, variance 1/2."""

    def model(y=None):
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, spread), obs=y)

    algorithm = dppvi.pvi(
        model, None, {"y": np.zeros(5)}, method=dppvi.NonPrivate(), client_sizes=[5]
    )
    posterior = algorithm.posterior(algorithm.init(jax.random.key(0)))
    found = posterior.family.coordinates(posterior.natural)["spread"]
    np.testing.assert_allclose(found.loc, -0.5, atol=0.03)
    np.testing.assert_allclose(np.exp(found.log_scale), 0.5**0.5, atol=0.03)


def problem_of(space, family):
    """Four records of one client, without privacy; and what its program is handed."""
    parts, method = guides.prior_factor(family, space), dppvi.NonPrivate()
    assert parts.rest == {"spread"}
    layout = visits.Layout(0, 1, 4)
    params = algorithm.round_params(method, None, [4], parts.exact, damping=1.0, prior_left_out=0.0)
    return Problem(space, family, method, layout, parts.rest, parts.refined), params


def refined(unit):
    """A joint normal, far from its prior, after the prior was refined; lengths in the unit."""

    def model(y):
        level = numpyro.sample("level", dist.Normal(0, unit))
        spread = numpyro.sample("spread", dist.HalfNormal(2.0))
        numpyro.sample("y", dist.Normal(level / unit, spread), obs=y)

    data = {"y": np.zeros(4, np.float32)}
    space = latents.from_model(model, data)
    guide = AutoMultivariateNormal(model)
    space, family = guides.approximation(guide, model, space, data, {})
    ((name, member),) = family.members
    problem, params = problem_of(space, family)
    scales = jnp.array([unit, 1.0])
    loc, width = scales * jnp.array([0.7, 1.5]), scales * jnp.array([0.1, 0.3])
    begin = FullNormalCoordinates(loc, jnp.log(width), jnp.array([0.8]))
    q = {name: member.natural(begin)}
    # Of a factor of the prior that says too little as yet.
    prior = {name: member.natural(FullNormalCoordinates(0 * loc, jnp.log(scales), jnp.zeros(1)))}
    change = server.refine_prior(problem, params, q, prior, jax.random.key(0))
    end = member.coordinates(factors.multiply(q, change)[name])
    return end.loc / scales, end.log_scale - jnp.log(scales), end.lower


@pytest.mark.slow
def test_a_prior_is_refined_alike_in_any_units():
    """Dollars or ten thousands of them: what else is in the joint normal goes along."""
    for large, one in zip(refined(1e4), refined(1.0), strict=True):
        np.testing.assert_allclose(large, one, rtol=1e-3, atol=1e-3)


def level_and_spread(width, prior):
    """A normal's mean and spread in one joint normal; the spread's prior is refined."""

    def model(y):
        level = numpyro.sample("level", dist.Normal(0, width))
        spread = numpyro.sample("spread", prior)
        numpyro.sample("y", dist.Normal(level, spread), obs=y)

    data = {"y": np.zeros(4, np.float32)}
    space = latents.from_model(model, data)
    space, family = guides.approximation(AutoMultivariateNormal(model), model, space, data, {})
    return family, *problem_of(space, family)


@pytest.mark.slow
def test_refining_a_prior_leaves_latents_alone_that_it_does_not_depend_on():
    """However narrow q is, and however much it knows together: the level's prior is exact."""
    family, problem, params = level_and_spread(1000, dist.HalfCauchy(2.5))
    ((name, member),) = family.members
    prior = rounds.first_prior(problem, params, jax.random.key(0))
    narrow = FullNormalCoordinates(
        jnp.array([500.0, 3.0]), jnp.log(jnp.array([0.01, 1e-4])), jnp.array([0.8])
    )
    change = server.refine_prior(
        problem, params, {name: member.natural(narrow)}, prior, jax.random.key(1)
    )[name]
    matrix = full_normal.unpack(change.quadratic)
    assert change.linear[0] == matrix[0, 0] == matrix[0, 1] == 0
    assert jnp.isfinite(matrix[1, 1])
    # And its factor is that of the exact prior, to the last digit.
    assert full_normal.unpack(prior[name].quadratic)[0, 0] == jnp.float32(-0.5e-6)


@pytest.mark.slow
def test_a_marginal_of_columns_far_from_zero_is_a_distribution():
    """An intercept and calendar years: the product of rows is no covariance in single precision."""
    tril = np.diag([1e-3, 1e3, 1e-4, 1.0]).astype(np.float32)
    tril[2, 1], tril[3, 0] = -0.5, 2.0
    at = full_normal.of_tril(jnp.zeros(4), jnp.asarray(tril))
    found = full_normal.marginal(at, range(1, 3), (2,))
    np.testing.assert_allclose(found.scale_tril, tril[1:3, 1:3], rtol=1e-4, atol=1e-9)
    assert np.isfinite(found.log_prob(found.mean))


def test_marginals_and_factors_of_some_latents_of_a_joint_normal():
    parts = (Part("a", ()), Part("b", (2,)), Part("c", ()))
    family = MeanField((("w", FullNormal((4,))),), (("w", parts),))
    part = family.within(frozenset({"a", "c"}))
    assert part.members == (("w", FullNormal((2,))),)
    assert family.within(frozenset({"a", "b", "c"})) == family == family.within(frozenset())
    rng = np.random.default_rng(0)
    root = rng.normal(size=(4, 4))
    precision, loc = root @ root.T + np.eye(4), rng.normal(size=4)
    natural = {
        "w": NormalNatural(
            jnp.asarray(precision @ loc, jnp.float32),
            full_normal.pack(jnp.asarray(-precision / 2, jnp.float32)),
        )
    }
    found = part.coordinates(family.marginal(natural, part))["w"]
    kept = np.ix_([0, 3], [0, 3])
    covariance = np.linalg.inv(precision)[kept]
    tril = full_normal.scale_tril(found)
    np.testing.assert_allclose(found.loc, loc[[0, 3]], atol=1e-4)
    np.testing.assert_allclose(tril @ tril.T, covariance, rtol=1e-3, atol=1e-5)
    one = {"w": part.members[0][1].natural(found)}
    whole = family.embedded(one, part)
    assert np.count_nonzero(full_normal.unpack(whole["w"].quadratic)) == 4
    back = family.block(whole, part)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), back, one)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1.0, 2e4])
def test_the_first_factor_of_a_prior_is_found_however_far_it_is(width):
    """Of HalfNormal(c), seen on log s: the best normal is N(log c - 1/2, 1/2)."""
    family, problem, params = level_and_spread(width, dist.HalfNormal(width))
    ((name, member),) = family.members
    normal = member.distribution(
        family.coordinates(rounds.first_prior(problem, params, jax.random.key(0)))[name]
    )
    np.testing.assert_allclose(normal.mean[1], np.log(width) - 0.5, atol=0.05)  # 64 draws a step
    np.testing.assert_allclose(normal.variance[1], 0.5, rtol=0.1)
    np.testing.assert_allclose(normal.variance[0], width**2, rtol=0.05)


def spread_of_effects(group, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 60):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], 1), obs=y)


def best_of_independent_normals(group, y):
    """Where the evidence's lower bound is largest: (mean, standard deviation) of log tau."""
    counts = np.bincount(group, minlength=60)
    sums = np.bincount(group, y, minlength=60)

    def loss(point):
        # Given log tau ~ N(m, s^2), each effect's best normal is known: E[1 / tau^2] is its prior's
        # precision.
        m, log_s = point
        variance = np.exp(2 * log_s)
        inverse = np.exp(-2 * m + 2 * variance)
        width = 1 / (counts + inverse)
        mean = width * sums
        of_records = 0.5 * np.sum(counts * (mean**2 + width) - 2 * mean * sums)
        of_effects = 60 * m + 0.5 * inverse * np.sum(mean**2 + width) - 0.5 * np.sum(np.log(width))
        of_tau = 0.5 * np.exp(2 * m + 2 * variance) - m - log_s
        return of_records + of_effects + of_tau

    settings = {"xatol": 1e-6, "fatol": 1e-10, "maxiter": 4000}
    m, log_s = minimize(loss, [-1.0, -2.0], method="Nelder-Mead", options=settings).x
    return m, np.exp(log_s)


@pytest.mark.slow
def test_a_spread_is_exact_though_most_groups_have_no_record():
    """Effects' widths follow their spread there, and the bound is nearly flat along both."""
    rng = np.random.default_rng(0)
    group = rng.integers(0, 10, 200)
    y = 0.4 * rng.normal(size=60)[group] + rng.normal(size=200)
    result = dppvi.fit(
        spread_of_effects,
        None,
        {"group": group, "y": y},
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.NonPrivate(),
        progress_bar=False,
    )
    found = result.posterior.family.coordinates(result.posterior.natural)["tau"]
    m, s = best_of_independent_normals(group, y)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    assert abs(float(found.loc) - m) < 0.03 * s
    assert abs(float(jnp.exp(found.log_scale)) / s - 1) < 0.03
