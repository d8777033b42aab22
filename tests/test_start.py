"""The public start: what it is, that it changes no fixed point, and that no record enters it."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import replay
from tests.dry import dry_rounds
from tests.grids import grid

PRIOR_LOC, PRIOR_SCALE, NOISE = jnp.array([0.5, -1.0]), jnp.array([2.0, 0.7]), 1.7
INIT_SCALE = 0.1
NO_NOISE = dppvi.PrivacyBudget(math.inf)
STEPS = {
    "num_local_steps": 3000,
    "optimizer": optax.adam(optax.exponential_decay(0.1, 100, 0.7)),
    "expectation": dppvi.methods.SphericalCubature(),
}
PRECISE = dppvi.NonPrivate(**STEPS)
UNBOUNDED = 1e9
Y = np.random.default_rng(1).normal(1.0, 2.0, size=(23, 2))
DATA = [{"y": part} for part in np.split(Y, [4, 11])]
METHODS = {
    "optimization": dppvi.DPOptimization(num_local_steps=1),
    "averaging": dppvi.methods.LocalAveraging((4, 2, 3), num_local_steps=1),
    "virtual": dppvi.VirtualClients((4, 2, 3), num_local_steps=1),
}


def means(y):
    mu = numpyro.sample("mu", dist.Normal(PRIOR_LOC, PRIOR_SCALE).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def closed_form(y=Y):
    precision = 1 / PRIOR_SCALE**2 + len(y) / NOISE**2
    mean = (PRIOR_LOC / PRIOR_SCALE**2 + y.sum(0) / NOISE**2) / precision
    return np.asarray(mean), np.asarray(precision**-0.5)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def fit(init_scale=INIT_SCALE, data=DATA, guide=None, model=means, **changes):
    arguments = {"rng_key": jax.random.key(0), "progress_bar": False, "damping": 1.0, **changes}
    return dppvi.fit(model, guide, data, init_scale=init_scale, **arguments)


def begun(name, key=0, init_scale=INIT_SCALE, aggregated=False, guide=None, model=means):
    """A run's first state; what it is made from holds no record."""
    method, sizes = METHODS[name], [4, 7, 12]
    schedule = dppvi.synchronous
    shared = {"schedule": schedule, "trusted_aggregator": aggregated}
    budget = dppvi.PrivacyBudget(1.0)
    plan = dppvi.plan_privacy(method, budget, num_rounds=2, client_sizes=sizes, **shared)
    shapes = {"y": jax.ShapeDtypeStruct((23, 2), np.float64)}
    algorithm = dppvi.pvi(
        model,
        guide,
        shapes,
        method=method,
        client_sizes=sizes,
        plan=plan,
        init_scale=init_scale,
        **shared,
    )
    state = algorithm.init(jax.random.key(key))
    return state, algorithm.posterior(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "aggregated"),
    [*((name, False) for name in METHODS), ("averaging", True), ("virtual", True)],
)
def test_the_start_is_narrow_and_near_the_prior(x64, name, aggregated):
    state, posterior = begun(name, aggregated=aggregated)
    np.testing.assert_allclose(posterior.stddev["mu"], INIT_SCALE * PRIOR_SCALE, rtol=1e-6)
    moved = (posterior.mean["mu"] - PRIOR_LOC) / PRIOR_SCALE
    assert np.all(np.abs(moved) < 4 * INIT_SCALE)  # fails for one key of 8000, and key 0 is fixed
    assert np.all(moved != 0)
    assert state.ledger.spent().max() == 0
    leaves = zip(jax.tree.leaves(state.natural), jax.tree.leaves(state.server.begin), strict=True)
    for found, begin in leaves:
        np.testing.assert_allclose(found, begin, rtol=1e-12)


@pytest.mark.slow
def test_locations_are_drawn_with_the_spread_that_is_said(x64):
    def wide(y):
        mu = numpyro.sample("mu", dist.Normal(3.0, 2.0).expand([20_000]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu[:2], NOISE).to_event(1), obs=y)

    _, posterior = begun("optimization", model=wide)
    # The standard error of both is below .007; six of them.
    moved = (posterior.mean["mu"] - 3.0) / (INIT_SCALE * 2.0)
    np.testing.assert_allclose([moved.mean(), moved.std()], [0, 1], atol=0.04)


@pytest.mark.slow
def test_the_start_is_a_function_of_the_key():
    same, again, other = (begun("virtual", key)[1].mean["mu"] for key in (0, 0, 1))
    np.testing.assert_array_equal(same, again)
    assert np.all(same != other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "aggregated"), [("virtual", False), ("averaging", True)])
def test_a_clients_shards_make_up_its_factor(x64, name, aggregated):
    """Virtual clients' shards multiply to it; of an average's each holds all of it."""
    state, _ = begun(name, aggregated=aggregated)
    whole = (state.server.begin["mu"].quadratic - state.prior["mu"].quadratic) / 3
    private = state.clients.private["mu"].quadratic
    for client, shards in enumerate((4, 2, 3)):
        of_client = private[client, :shards]
        total = of_client.sum(0) / (shards if name == "averaging" else 1)
        np.testing.assert_allclose(total, whole, rtol=1e-12)
        if not aggregated:
            np.testing.assert_allclose(total, state.factors["mu"].quadratic[client], rtol=1e-12)


@pytest.mark.slow
def test_full_covariance_narrows_whole(x64):
    state, posterior = begun("optimization", guide=AutoMultivariateNormal(means))
    plain = begun("optimization", init_scale=None, guide=AutoMultivariateNormal(means))[1]
    np.testing.assert_allclose(posterior.stddev["mu"], INIT_SCALE * plain.stddev["mu"], rtol=1e-9)
    assert np.all(posterior.mean["mu"] != plain.mean["mu"])
    assert state.server.begin is not None


@pytest.mark.slow
def test_without_it_a_run_begins_at_the_prior():
    state, posterior = begun("virtual", init_scale=None)
    assert state.server.begin is None
    np.testing.assert_allclose(posterior.mean["mu"], PRIOR_LOC, rtol=1e-6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((state.factors, state.clients.private)))


def test_other_families_begin_at_the_prior():
    def rates(y):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 3.0))
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, rate).expand([2]).to_event(1), obs=y)

    def guide(y):
        numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        numpyro.sample("mu", dist.Normal(0.0, 1.0))

    state, _ = begun("optimization", model=rates, guide=guide)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.factors["rate"]))
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(state.factors["mu"]))


@pytest.mark.slow
@grid("schedule", [dppvi.sequential, dppvi.synchronous], quick=[0])
@grid("init_scale", [None, INIT_SCALE], quick=[1])
def test_it_changes_no_fixed_point(x64, schedule, init_scale):
    result = fit(init_scale, method=PRECISE, schedule=schedule, num_rounds=1)
    mean, stddev = closed_form()
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.slow
def test_asynchronous_clients_begin_there_too(x64):
    schedule = dppvi.Asynchronous((1.0, 1.5, 2.5))
    result = fit(method=PRECISE, schedule=schedule, num_rounds=6)
    mean, stddev = closed_form()
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.slow
def test_damping_forgets_it_geometrically(x64):
    rounds, damping = 4, 0.5
    result = fit(method=PRECISE, schedule=dppvi.synchronous, num_rounds=rounds, damping=damping)
    mean, stddev = closed_form()
    prior, begin = result.state.prior["mu"].linear, result.state.server.begin["mu"].linear
    exact = mean / stddev**2
    for number, found in enumerate(result.history.natural["mu"].linear, start=1):
        left = (1 - damping) ** number
        np.testing.assert_allclose(found, exact + left * (begin - exact), rtol=1e-6)
    assert np.all(np.abs(begin - prior) > 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "aggregated"),
    [
        (dppvi.VirtualClients, True),
        (dppvi.methods.LocalAveraging, False),
        (dppvi.methods.LocalAveraging, True),
        (dppvi.VirtualClients, False),
    ],
)
def test_shards_forget_it_where_nothing_is_clipped(x64, method, aggregated):
    result = fit(
        method=method((2, 3, 4), UNBOUNDED, **STEPS),
        budget=NO_NOISE,
        schedule=dppvi.synchronous,
        trusted_aggregator=aggregated,
        num_rounds=1,
    )
    mean, stddev = closed_form()
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-5)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["same", "split"])
@pytest.mark.parametrize("init_scale", [pytest.param(None, marks=pytest.mark.slow), INIT_SCALE])
def test_committees_do_not_keep_it(x64, prior, init_scale):
    local = dppvi.DPOptimization(UNBOUNDED, **STEPS)
    method = dppvi.BayesianCommitteeMachine(prior, local)
    result = fit(init_scale, method=method, budget=NO_NOISE)
    mean, stddev = closed_form()
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.slow
def test_a_committee_whose_solves_fail_stays_at_the_prior():
    nowhere = optax.stateless(lambda slope, _: jax.tree.map(lambda leaf: jnp.nan * leaf, slope))
    local = dppvi.DPOptimization(1.0, 2, nowhere)
    method = dppvi.BayesianCommitteeMachine("same", local)
    result = fit(method=method, budget=dppvi.PrivacyBudget(1.0))
    assert result.history.failed.sum() == 3
    np.testing.assert_allclose(result.posterior.mean["mu"], PRIOR_LOC, rtol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], PRIOR_SCALE, rtol=1e-6)


@pytest.mark.slow
def test_committees_solve_from_there(x64):
    """Steps too short to move show where they began: every member ends at the start."""
    local = dppvi.DPOptimization(UNBOUNDED, 1, optax.sgd(1e-12))
    method = dppvi.BayesianCommitteeMachine("same", local)
    result = fit(method=method, budget=NO_NOISE)
    prior, begin = result.state.prior["mu"], result.state.server.begin["mu"]
    for found, old, new in zip(result.state.factors["mu"], prior, begin, strict=True):
        np.testing.assert_allclose(found, np.broadcast_to(new - old, found.shape), rtol=1e-6)


# test_methods.py ends at the same posterior from the prior.
@pytest.mark.slow
def test_global_vi_begins_there_and_ends_at_the_posterior(x64):
    method = dppvi.GlobalVI(
        UNBOUNDED, optax.adam(0.05), expectation=dppvi.methods.SphericalCubature()
    )
    run = functools.partial(
        fit, method=method, budget=NO_NOISE, trusted_aggregator=True, damping=0.4
    )
    first = run(num_rounds=1).posterior.stddev["mu"] / PRIOR_SCALE
    np.testing.assert_allclose(first, INIT_SCALE, rtol=0.06)
    mean, stddev = closed_form()
    last = run(num_rounds=800).posterior
    np.testing.assert_allclose(last.mean["mu"], mean, atol=1e-3)
    np.testing.assert_allclose(last.stddev["mu"], stddev, atol=1e-3)


def test_a_checkpoint_of_another_start_is_refused(tmp_path):
    path = tmp_path / "run.npz"
    run = functools.partial(fit, method=dppvi.NonPrivate(1), num_rounds=2, checkpoint=path)
    with dry_rounds():
        done = run()
        resumed = run()
    for old, new in zip(
        jax.tree.leaves(done.state.natural), jax.tree.leaves(resumed.state.natural), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(ValueError, match=r"another init_scale: it has 0\.1, and this call None"):
        run(init_scale=None)


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, math.nan, "a", True])
def test_init_scale_is_above_zero_and_at_most_one(wrong):
    with pytest.raises(ValueError, match="init_scale must lie above 0 and be at most 1, got "):
        fit(wrong, method=PRECISE)
    with pytest.raises(ValueError, match="init_scale must lie above 0"):
        begun("virtual", init_scale=wrong)


@pytest.mark.slow
def test_replays_begin_there_too(x64):
    """Without steps, a replay's noise aside, nothing leaves the start."""
    still = dppvi.DPOptimization(1e-6, 1, optax.sgd(1e-12))
    result = fit(method=still, budget=dppvi.PrivacyBudget(1.0), num_rounds=2)
    at = replay.replay_of(result, jax.random.key(1))
    found = replay.replays(at, jax.random.key(1), 1.0, 2)["mu"].quadratic
    begin = result.state.server.begin["mu"].quadratic
    np.testing.assert_allclose(found, np.broadcast_to(begin, found.shape), rtol=1e-6)


class TestWidePriors:
    """Steps of one length do not come from a prior that is a hundred times too wide."""

    @staticmethod
    def run(width, method=None, **changes):
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, width))
            with numpyro.plate("records", y.shape[0]):
                numpyro.sample("y", dist.Normal(mu, 1), obs=y)

        options = {"num_rounds": 2, "progress_bar": False, **changes}
        options["budget"] = dppvi.PrivacyBudget(1.0)
        with dry_rounds():
            return dppvi.fit(
                model,
                None,
                {"y": np.zeros(60)},
                rng_key=jax.random.key(0),
                clients=2,
                method=method or dppvi.DPOptimization(num_local_steps=1),
                **options,
            )

    def test_plan_and_statement_say_so(self):
        words = "the prior of latent 'mu' has a standard deviation of 1e\\+03 on the unconstrained"
        with pytest.warns(UserWarning, match=words):
            result = self.run(1000.0)
        for text in (str(result.plan), str(result.privacy_statement())):
            assert "Caution: the prior of latent 'mu'" in text
            assert "method=FisherScoring()" in text
        assert "'mu'" in result.privacy_statement().as_dict()["cautions"][0]

    def test_others_say_nothing(self):
        assert not self.run(10.0).plan.of_model
        assert not self.run(1000.0, dppvi.FisherScoring()).plan.of_model
        own = dppvi.DPOptimization(num_local_steps=1, optimizer=optax.adam(10.0))
        assert not self.run(1000.0, own).plan.of_model
