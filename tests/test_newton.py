"""Newton's steps: exact where the answer is known, and no worse where a Hessian says nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi._typing import Coordinates
from numpyro_dppvi.families import (
    DiagonalNormal,
    FullNormal,
    FullNormalCoordinates,
    MeanField,
    factors,
)
from numpyro_dppvi.families.diagonal_normal import NormalCoordinates
from numpyro_dppvi.methods import joint_newton, newton
from numpyro_dppvi.methods.joint_newton import bent
from tests.grids import grid

KEY = jax.random.key(0)


def line(x, y):
    b = numpyro.sample("b", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, 1), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(1, 1, 120)
    return {"x": x, "y": 1 - x + rng.normal(size=120)}


def run(model, data, guide=None, **changes):
    arguments = {"method": dppvi.NonPrivate(), "clients": 1, "progress_bar": False, "rng_key": KEY}
    return dppvi.fit(model, guide, data, **{**arguments, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("draws", [2, 10])
def test_of_a_quadratic_the_draws_leave_no_error(data, draws):
    """One visit; from two draws alone a precision would be off by its own size."""
    method = dppvi.NonPrivate(expectation=dppvi.MonteCarlo(draws))
    found = run(line, data, method=method, num_rounds=1).posterior
    X = np.stack([np.ones(120), data["x"]], 1)
    precision = X.T @ X + np.eye(2) / 9
    exact = np.linalg.solve(precision, X.T @ data["y"])
    np.testing.assert_allclose(found.mean["b"], exact, atol=0.002)
    np.testing.assert_allclose(found.stddev["b"], np.diag(precision) ** -0.5, rtol=0.005)


@pytest.mark.slow
def test_a_kink_has_a_width_that_no_second_derivative_shows():
    """The posterior of a Laplace distribution's location, whose Hessian is zero: by a grid."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Laplace(mu, 1), obs=y)

    y = np.random.default_rng(0).laplace(1, 1, 150)
    found = run(model, {"y": y}).posterior
    points = np.linspace(0, 2, 4001)
    log = -(points**2) / 18 - np.abs(y[:, None] - points).sum(axis=0)
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    mean = weights @ points
    sd = np.sqrt(weights @ (points - mean) ** 2)
    assert found.mean["mu"] == pytest.approx(mean, abs=0.2 * sd)
    assert found.stddev["mu"] == pytest.approx(sd, rel=0.2)


@pytest.mark.slow
def test_where_the_log_density_is_not_concave_q_ends_at_a_mode():
    """Two modes, and a prior at the saddle between them but for a little."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.05, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu**2, 0.3), obs=y)

    result = run(model, {"y": np.full(20, 2.0)})
    assert abs(result.posterior.mean["mu"]) == pytest.approx(np.sqrt(2), abs=0.02)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED


@pytest.mark.slow
def test_other_families_settle_too():
    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    def guide(y):
        a = numpyro.param("a", jnp.array(2.0), constraint=dist.constraints.positive)
        numpyro.sample("rate", dist.Gamma(a, 1.0))

    y = np.random.default_rng(0).poisson(3.0, 80)
    result = run(model, {"y": y}, guide)
    shape, sd = 2 + y.sum(), np.sqrt(2 + y.sum()) / 81
    assert result.run.damping == 0.4
    assert result.posterior.mean["rate"] == pytest.approx(shape / 81, abs=0.1 * sd)


@pytest.mark.slow
def test_more_latents_than_a_hessian_is_worth_take_steps_of_adam(data, monkeypatch):
    fewer = run(line, data, num_rounds=1, method=dppvi.NonPrivate(7)).posterior
    monkeypatch.setattr(newton, "MOST_LATENTS", 1)
    adam = run(line, data, num_rounds=1, method=dppvi.NonPrivate(8)).posterior
    # Eight steps of .05 go no further from the prior's location.
    assert np.abs(adam.mean["b"]).max() < 0.41
    assert np.abs(fewer.mean["b"]).max() > 0.8


@pytest.mark.slow
def test_steps_that_cannot_be_cut_into_tens_are_all_taken(data):
    for steps in (1, 13, 20):
        result = run(line, data, num_rounds=1, method=dppvi.NonPrivate(steps))
        assert np.isfinite(result.posterior.mean["b"]).all()


@grid("draws", [2, 10], quick=[])
def test_of_a_quadratic_a_joint_normal_is_exact_after_two_visits(data, draws):
    """Full covariance, also where it has most: the column is far from zero."""
    method = dppvi.NonPrivate(expectation=dppvi.MonteCarlo(draws))
    far = {"x": data["x"] + 10, "y": data["y"]}
    found = run(line, far, AutoMultivariateNormal(line), method=method, num_rounds=2).posterior
    X = np.stack([np.ones(120), far["x"]], 1)
    covariance = np.linalg.inv(X.T @ X + np.eye(2) / 9)
    exact, sd = covariance @ X.T @ far["y"], np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((found.mean["b"] - exact) / sd, 0, atol=0.005)
    np.testing.assert_allclose(found.stddev["b"], sd, rtol=0.005)
    drawn = found.sample(KEY, (4000,))["b"]
    np.testing.assert_allclose(np.corrcoef(drawn.T)[0, 1], covariance[0, 1] / sd.prod(), atol=0.01)


@pytest.mark.slow
def test_clients_of_a_joint_normal_settle_where_independent_normals_creep():
    """Two clients, raw columns and an interaction: the weights' correlations are above .99."""

    def model(h, iq, y):
        scales = jnp.array([100.0, 50.0, 10.0, 10.0])
        b = numpyro.sample("b", dist.Normal(0, scales).to_event(1))
        numpyro.sample("y", dist.Normal(b[0] + b[1] * h + b[2] * iq + b[3] * h * iq, 18), obs=y)

    rng = np.random.default_rng(1)
    h, iq = (rng.random(434) < 0.8) * 1.0, rng.normal(100, 15, 434)
    y = -11 + 51 * h + 1.1 * iq - 0.5 * h * iq + 18 * rng.normal(size=434)
    X = np.stack([np.ones(434), h, iq, h * iq], 1)
    precision = X.T @ X / 18**2 + np.diag([1e-4, 4e-4, 1e-2, 1e-2])
    exact, sd = (
        np.linalg.solve(precision, X.T @ y) / 18**2,
        np.diag(np.linalg.inv(precision)) ** 0.5,
    )
    guide = AutoMultivariateNormal(model)
    result = run(model, {"h": h, "iq": iq, "y": y}, guide, clients=2)
    assert result.status.rounds < 30
    np.testing.assert_allclose((result.posterior.mean["b"] - exact) / sd, 0, atol=0.1)
    np.testing.assert_allclose(result.posterior.stddev["b"], sd, rtol=0.02)


@pytest.mark.slow
def test_a_kink_has_a_width_under_a_joint_normal_too():
    """Independent Laplace outcomes in two columns: by the same model of independent normals."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3).expand([2]).to_event(1))
        numpyro.sample("y", dist.Laplace(mu, 1).to_event(1), obs=y)

    y = np.random.default_rng(0).laplace(1, 1, (150, 2))
    joint = run(model, {"y": y}, AutoMultivariateNormal(model)).posterior
    apart = run(model, {"y": y}).posterior
    sd = apart.stddev["mu"]
    np.testing.assert_allclose((joint.mean["mu"] - apart.mean["mu"]) / sd, 0, atol=0.25)
    np.testing.assert_allclose(joint.stddev["mu"] / sd, 1, atol=0.2)


@pytest.mark.parametrize(
    ("end", "held", "trust"),
    [(0.0, True, 0.5), (-6.0, True, 0.5), (-9.0, False, 0.0625), (jnp.inf, False, 0.0625)],
)
def test_a_step_that_climbs_is_taken_back(end, held, trust):
    """Of x^2 / 2 from x = 6: the other side of the valley holds, higher up does not."""
    place = lambda x: newton._Place(jnp.array([x]), jnp.zeros(1))  # noqa: E731
    no, before = jnp.zeros((), bool), place(6.0)
    walk = joint_newton.Walk(place(end), before, before, jnp.asarray(0.25), no, before, ~no)
    found = newton._held(walk, place(end))
    assert found.at.loc == found.before.loc == found.slope.loc == (end if held else 6.0)
    assert found.trust == trust


@pytest.mark.parametrize(
    ("end", "held", "trust"),
    [(0.0, True, 0.5), (-6.0, True, 0.5), (-9.0, False, 0.0625), (jnp.inf, False, 0.0625)],
)
def test_a_step_of_a_joint_normal_that_climbs_is_taken_back(end, held, trust):
    """The same, at a width of 2, along whose white axis the slope is twice as large."""
    place = lambda x: joint_newton.Place(jnp.array([x]), jnp.array([[2.0]]))  # noqa: E731
    slope = lambda x: jnp.array([2 * x])  # noqa: E731
    no, eye, before = jnp.zeros((), bool), jnp.eye(1), place(6.0)
    walk = joint_newton.Walk(
        place(end), before, (slope(6.0), eye), jnp.asarray(0.25), no, before, ~no
    )
    found = joint_newton._held(walk, (slope(end), eye))
    assert found.at.loc == found.before.loc == (end if held else 6.0)
    assert found.slope[0] == slope(end if held else 6.0)
    assert found.trust == trust


@pytest.mark.parametrize(("end", "held"), [(0.5, True), (0.1, True), (8.0, False)])
def test_so_is_one_that_widens_too_far(end, held):
    """Of s^2 / 2 - log(s), from s = 3 with slope s - 1 / s, which is W - 1 with W = s^2 after s."""
    place = lambda s: joint_newton.Place(jnp.zeros(1), jnp.array([[s]]))  # noqa: E731
    whole = lambda s: jnp.array([[s**2]])  # noqa: E731
    no, before = jnp.zeros((), bool), place(3.0)
    flat = jnp.zeros(1)
    walk = joint_newton.Walk(place(end), before, (flat, whole(3.0)), jnp.ones(()), no, before, ~no)
    found = joint_newton._held(walk, (flat, whole(end)))
    assert found.at.tril == (end if held else 3.0)


CHILDREN = 434
_RNG = np.random.default_rng(3)
IQ, SCHOOL = _RNG.normal(100, 15, CHILDREN), (_RNG.random(CHILDREN) < 0.8).astype(float)
X = np.stack([np.ones(CHILDREN), SCHOOL, IQ], 1)


def children(outcome):
    """A model of raw columns, as authors write it, under priors that say nothing."""

    def model(iq, school, y):
        b = numpyro.sample("b", dist.Normal(0, 1000).expand([3]).to_event(1))
        of = outcome()
        with numpyro.plate("children", len(y)):
            numpyro.sample("y", of(b[0] + b[1] * school + b[2] * iq), obs=y)

    return model


def scores():
    spread = numpyro.sample("spread", dist.HalfCauchy(2.5))
    return lambda mean: dist.Normal(mean, spread)


def passes():
    return lambda logits: dist.Bernoulli(logits=logits)


def counts():
    return lambda log_rate: dist.Poisson(jnp.exp(log_rate))


def outcomes(kind):
    """Outcomes, the likelihood's mode and its precision there."""
    rng = np.random.default_rng(4)
    if kind is scores:
        y = X @ [26, 6, 0.6] + rng.normal(0, 18, CHILDREN)
        mode, *_ = np.linalg.lstsq(X, y)
        return y, mode, X.T @ X / (np.sum((y - X @ mode) ** 2) / (CHILDREN - 3))
    mean = {passes: lambda at: 1 / (1 + np.exp(-at)), counts: np.exp}[kind]
    slope = {passes: lambda mu: mu * (1 - mu), counts: lambda mu: mu}[kind]
    if kind is passes:
        y = (rng.random(CHILDREN) < mean(X @ [-5, 0.5, 0.045])).astype(int)
    else:
        y = rng.poisson(mean(X @ [-1, 0.3, 0.02]))
    mode = np.array([0.0 if kind is passes else np.log(y.mean()), 0, 0])
    for _ in range(50):
        mu = mean(X @ mode)
        precision = (X.T * slope(mu)) @ X
        mode = mode + np.linalg.solve(precision, X.T @ (y - mu))
    return y, mode, precision


def of_children(kind, joint, clients, key=KEY):
    """A run, its means' distance from the mode in standard deviations, and its widths in those."""
    y, mode, precision = outcomes(kind)
    model, data = children(kind), {"iq": IQ, "school": SCHOOL, "y": y}
    guide = AutoMultivariateNormal(model) if joint else None
    result = run(model, data, guide, clients=clients, rng_key=key)
    sd = np.diag(np.linalg.inv(precision)) ** 0.5
    own = sd if joint else np.diag(precision) ** -0.5
    b = result.posterior.mean["b"], result.posterior.stddev["b"]
    return result, (np.asarray(b[0], float) - mode) / sd, b[1] / own


# A normal q is not the mode and the curvature there of a posterior that is none.
OFF, WIDE = {scores: 0.05, passes: 0.15, counts: 0.05}, 0.03


@grid("clients", [1, 2, 5], quick=[])
@grid("kind", [scores, passes, counts], quick=[0, 2])
def test_wide_priors_and_raw_columns_do_not_throw_a_joint_normal(kind, clients):
    """In 32 bits, from priors under which expected rates are infinite and spreads look like 1e5."""
    result, off, widths = of_children(kind, joint=True, clients=clients)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    assert result.status.failed == result.status.rejected == 0
    np.testing.assert_allclose(off, 0, atol=OFF[kind])
    np.testing.assert_allclose(widths, 1, atol=WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_nor_by_other_draws(clients, seed):
    result, off, widths = of_children(scores, True, clients, jax.random.key(seed))
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    np.testing.assert_allclose(off, 0, atol=OFF[scores])
    np.testing.assert_allclose(widths, 1, atol=WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [scores, passes, counts])
def test_nor_independent_normals(kind):
    result, off, widths = of_children(kind, joint=False, clients=1)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    assert result.status.failed == 0
    np.testing.assert_allclose(off, 0, atol=OFF[kind])
    np.testing.assert_allclose(widths, 1, atol=WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [2, 5])
@pytest.mark.parametrize("kind", [scores, passes, counts])
def test_independent_normals_of_several_clients_creep_along_the_ridge_and_say_so(kind, clients):
    """What an average child's outcome is they know all the same."""
    result, off, _ = of_children(kind, joint=False, clients=clients)
    assert result.status.failed == result.status.rejected == 0
    if result.status.outcome is dppvi.run.Outcome.COMPLETED:
        np.testing.assert_allclose(off, 0, atol=OFF[kind])
    else:
        assert result.status.outcome is dppvi.run.Outcome.UNSETTLED
    _, mode, precision = outcomes(kind)
    average = X.mean(axis=0)
    away = average @ (np.asarray(result.posterior.mean["b"], float) - mode)
    assert abs(away) < 0.5 * np.sqrt(average @ np.linalg.inv(precision) @ average)


def everywhere(slope):
    """A family of one normal, a cavity N(0, 1000^2), and visits of a loss with that slope in m."""
    family = MeanField((("b", DiagonalNormal((1,))),))
    joint = MeanField((("b", FullNormal((1,))),))

    def gradient(key, coordinates):
        at = coordinates["b"]
        by_loc, by_scale = slope(at.loc, jnp.exp(at.log_scale))
        zeros = jax.tree.map(jnp.zeros_like, at)
        return Coordinates({"b": zeros._replace(loc=by_loc, log_scale=by_scale)})

    keys = jax.random.split(KEY, 50)
    for each in (family, joint):
        wide = NormalCoordinates(jnp.zeros(1), jnp.log(jnp.array([1000.0])))
        if each is joint:
            wide = FullNormalCoordinates(*wide, jnp.zeros(0))
        q = each.natural({"b": wide})
        own = jax.tree.map(jnp.zeros_like, q)
        change = newton.Newton(None).change(each, q, own, keys, gradient)
        yield each.coordinates(factors.multiply(q, change))["b"]


@pytest.mark.slow
def test_a_visit_begins_nearer_where_its_slope_is_infinite():
    """Of a hundred counts of 20 and the rate exp(b), E exp(b) = exp(m + s^2 / 2)."""

    def slope(loc, scale):
        rate = 100 * jnp.exp(loc + scale**2 / 2)
        return rate - 2000, scale**2 * rate

    for end in everywhere(slope):
        np.testing.assert_allclose(end.loc, np.log(20), atol=0.02)
        np.testing.assert_allclose(end.log_scale, np.log(2000**-0.5), atol=0.1)


@pytest.mark.slow
def test_a_visit_whose_slope_is_nowhere_finite_has_failed():
    for end in everywhere(lambda loc, scale: (jnp.nan * loc, scale)):
        assert np.all(np.isnan(end.loc))


@pytest.mark.parametrize(
    ("trust", "holds", "short", "then"),
    [
        (0.25, True, False, 0.5),
        (0.75, True, False, 1.0),
        (1.0, True, False, 1.0),
        (1.0, True, True, 2.0),
        (64.0, True, True, 128.0),
        (64.0, True, False, 1.0),  # where steps end by themselves, caution is as before
        (64.0, False, True, 0.25),
    ],
)
def test_steps_that_hold_go_further_while_they_are_cut_short(trust, holds, short, then):
    assert joint_newton.trusted(jnp.asarray(trust), jnp.asarray(holds), jnp.asarray(short)) == then


@jax.custom_vjp
def _cubed(x):
    return x**3


# As a solver of ODEs, whose gradient calls the solver: JAX cannot push it forwards.
_cubed.defvjp(lambda x: (_cubed(x), x), lambda x, slope: (3 * x**2 * slope,))


def test_a_model_with_a_gradient_of_its_own_has_second_derivatives():
    def slope(x):
        return jax.grad(lambda x: _cubed(x @ jnp.array([1.0, 2.0])))(x)

    found = bent(slope, jnp.array([1.0, 1.0]), jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(found, 18 * np.array([2.0, 4.0]), rtol=1e-6)


def test_an_error_of_another_kind_is_left_as_it_is():
    with pytest.raises(TypeError, match="not of ours"):
        bent(_raises, jnp.ones(1), jnp.ones(1))


def _raises(x):
    raise TypeError("not of ours")
