"""Global discrete latents, which a guide draws from Bernoulli or Categorical, are summed over."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive

import numpyro_dppvi as dppvi
from models.examples import GUIDED
from numpyro_dppvi import guides, latents
from numpyro_dppvi.analysis import plots
from numpyro_dppvi.families import (
    MAX_JOINT_VALUES,
    Bernoulli,
    Categorical,
    DiagonalNormal,
    MeanField,
    enumeration,
    factors,
)
from numpyro_dppvi.methods import objective, visits
from numpyro_dppvi.privacy import clipped_sum
from numpyro_dppvi.protocol import algorithm, rounds, server
from numpyro_dppvi.protocol.problem import Problem


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def approximation(model, guide, records, model_kwargs=None):
    space = latents.from_model(model, records, model_kwargs)
    latents.check_additive(space, model_kwargs or {}, len(next(iter(records.values()))))
    return guides.approximation(guide, model, space, records, model_kwargs)


def fit(model, guide, data, **changes):
    arguments = {"rng_key": jax.random.key(0), "progress_bar": False, **changes}
    return dppvi.fit(model, guide, data, **arguments)


# ---------------------------------------------------------------------------------------------
# A discrete latent alone: its posterior is known, and lies in the family.

LEVELS, PRIOR = np.array([0.3, -0.4, 0.9]), np.array([0.2, 0.5, 0.3])


def level(y):
    """Which of three levels records are at."""
    k = numpyro.sample("k", dist.Categorical(probs=PRIOR))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(jnp.asarray(LEVELS)[k], 3.0), obs=y)


def level_guide(y):
    logits = numpyro.param("logits", jnp.zeros(3))
    numpyro.sample("k", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})


@functools.cache
def at_a_level():
    return np.random.default_rng(0).normal(0.3, 3.0, 18)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        pytest.param([18], dppvi.sequential, marks=pytest.mark.slow),
        ([3, 7, 8], dppvi.sequential),
        pytest.param([3, 7, 8], dppvi.synchronous, marks=pytest.mark.slow),
    ],
)
def test_the_posterior_is_exact_for_any_partition(sizes, schedule):
    """Each client's likelihood of one discrete latent is a factor of the family."""
    parts = np.split(at_a_level(), np.cumsum(sizes)[:-1])
    optimizer = optax.adam(optax.exponential_decay(0.1, 250, 0.5))
    found = fit(
        level,
        level_guide,
        [{"y": part} for part in parts],
        method=dppvi.NonPrivate(3000, optimizer),
        num_rounds=1,
        damping=1.0,
        schedule=schedule,
    )

    def log_odds(log_weights):
        return log_weights[1:] - log_weights[0]

    def log_likelihood(y):
        return dist.Normal(LEVELS, 3.0).log_prob(y[:, None]).sum(axis=0)

    np.testing.assert_allclose(found.state.prior["k"], log_odds(np.log(PRIOR)), rtol=1e-12)
    for factor, part in zip(found.state.factors["k"], parts, strict=True):
        np.testing.assert_allclose(factor, log_odds(log_likelihood(part)), atol=1e-5)
    weights = PRIOR * np.exp(log_likelihood(at_a_level()))
    weights /= weights.sum()
    posterior = found.posterior
    np.testing.assert_allclose(posterior.distribution("k").probs, weights, atol=1e-6)
    mean = weights @ np.arange(3)
    np.testing.assert_allclose(posterior.mean["k"], mean, atol=1e-5)
    sd = np.sqrt(weights @ (np.arange(3) - mean) ** 2)
    np.testing.assert_allclose(posterior.stddev["k"], sd, atol=1e-5)
    probs = jnp.exp(posterior.log_density({"k": jnp.arange(3)}))
    np.testing.assert_allclose(probs, weights, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# With continuous latents: a regression of known noise, whose free energy has a closed form.

NOISE, SLOPES = 0.8, np.array([1.0, 0.0, -0.7])


def regression(X, y):
    z = numpyro.sample("z", dist.Bernoulli(probs=0.3).expand([3]).to_event(1))
    w = numpyro.sample("w", dist.Normal(0.0, 1.5).expand([3]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(X @ jnp.where(z == 1, w, 0.0), NOISE), obs=y)


def regression_guide(X, y):
    numpyro.sample("w", dist.Normal(numpyro.param("m", jnp.zeros(3)), 1.0).to_event(1))
    with numpyro.plate("columns", 3):
        numpyro.sample("z", dist.Bernoulli(probs=numpyro.param("p", 0.5)))


@functools.cache
def regression_data():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(40, 3))
    return {"X": X, "y": X @ SLOPES + NOISE * rng.normal(size=40)}


def expected_log_likelihood(coordinates, X, y):
    """Of all rows, in closed form: E[(z w)_i (z w)_j] is a product but on the diagonal."""
    p, m = jax.nn.sigmoid(2 * coordinates["z"]), coordinates["w"].loc
    second = p * (m**2 + jnp.exp(2 * coordinates["w"].log_scale))
    square = jnp.sum((y - X @ (p * m)) ** 2) + jnp.sum(X**2 @ (second - (p * m) ** 2))
    return -0.5 * square / NOISE**2 - len(y) * jnp.log(NOISE * jnp.sqrt(2 * jnp.pi))


def some_coordinates(seed):
    rng = np.random.default_rng(seed)
    family = MeanField((("z", Bernoulli((3,))), ("w", DiagonalNormal((3,)))))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), family.standard())


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
@pytest.mark.parametrize("rule", [dppvi.methods.Automatic(), dppvi.methods.SphericalCubature()])
def test_gradients_of_records_are_those_of_the_summed_expectation(rule):
    """Against the closed form, and against a finite difference in the first log odds."""
    data = regression_data()
    space, family = approximation(regression, regression_guide, data)
    if isinstance(rule, dppvi.methods.Automatic):  # given z, there is one linear predictor
        assert isinstance(objective.rule_for(rule, space, family), dppvi.methods.GaussHermite)

    @jax.jit
    def of_rows(c):
        def loss(c, row):
            return objective.record_loss(space, family, rule, jax.random.key(0), c, row)

        return jax.vmap(jax.value_and_grad(loss), (None, 0))(c, data)

    def closed_form(c, X, y):
        return -expected_log_likelihood(c, X[None], y[None])

    for seed in range(3):
        c = some_coordinates(seed)
        values, gradients = of_rows(c)
        by_hand = jax.vmap(jax.value_and_grad(closed_form), (None, 0, 0))
        expected, expected_gradients = by_hand(c, data["X"], data["y"])
        np.testing.assert_allclose(values, expected, rtol=1e-10)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10),
            gradients,
            expected_gradients,
        )
    shift = np.array([1e-5, 0, 0])
    up, down = ({**c, "z": c["z"] + sign * shift} for sign in (1, -1))
    difference = (of_rows(up)[0] - of_rows(down)[0]) / 2e-5
    np.testing.assert_allclose(gradients["z"][:, 0], difference, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("clients", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_ends_at_a_mean_field_optimum(clients):
    """In probabilities; the log odds of what is as good as certain move on slowly."""
    optimizer = optax.adam(optax.exponential_decay(0.1, 35, 0.5))
    data = regression_data()
    found = fit(
        regression,
        regression_guide,
        data,
        clients=clients,
        method=dppvi.NonPrivate(400, optimizer),
        num_rounds=12,
        damping=0.8,
    )
    probs, loc, variance = coordinate_ascent(**data)
    posterior = found.posterior
    np.testing.assert_allclose(posterior.mean["z"], probs, atol=1e-5)
    np.testing.assert_allclose(posterior.mean["w"], loc, atol=1e-4)
    np.testing.assert_allclose(posterior.stddev["w"] ** 2, variance, rtol=1e-3)
    np.testing.assert_array_equal(probs > 0.5, SLOPES != 0)


def coordinate_ascent(X, y):
    """The optimum by its own equations, one latent's given the others', in closed form."""
    probs, loc, variance = np.full(3, 0.3), np.zeros(3), np.full(3, 1.5**2)
    for _ in range(100):
        for j in range(3):
            rest = y - X @ (probs * loc) + probs[j] * loc[j] * X[:, j]
            square, fit = X[:, j] @ X[:, j] / NOISE**2, X[:, j] @ rest / NOISE**2
            variance[j] = 1 / (1 / 1.5**2 + probs[j] * square)
            loc[j] = variance[j] * probs[j] * fit
            gain = loc[j] * fit - 0.5 * (loc[j] ** 2 + variance[j]) * square
            probs[j] = 1 / (1 + np.exp(-np.log(0.3 / 0.7) - gain))
    return probs, loc, variance


# ---------------------------------------------------------------------------------------------
# Priors.


def spike_and_slab(y):
    z = numpyro.sample("z", dist.Bernoulli(probs=0.3))
    w = numpyro.sample("w", dist.Normal(0.0, jnp.where(z == 1, 2.0, 0.5)))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


def spike_and_slab_guide(y):
    numpyro.sample("z", dist.Bernoulli(probs=0.5))
    numpyro.sample("w", dist.Normal(0.0, 1.0))


@pytest.mark.slow
def test_a_prior_that_depends_on_a_discrete_latent_is_projected(monkeypatch):
    """The best product of a Bernoulli and a normal has a closed form, up to a fixed point."""
    space, family = approximation(spike_and_slab, spike_and_slab_guide, {"y": np.zeros(4)})
    parts = guides.prior_factor(family, space)
    assert (parts.rest, parts.refined) == ({"w"}, {"z", "w"})
    method, layout = dppvi.NonPrivate(), visits.Layout(0, 1, 4)
    problem = Problem(space, family, method, layout, parts.rest, parts.refined)
    params = algorithm.round_params(method, None, [4], parts.exact, damping=1.0, prior_left_out=0.0)

    start = rounds.first_prior(problem, params, jax.random.key(0))
    monkeypatch.setattr(server, "_PRIOR_STEPS", 1000)

    @jax.jit
    def project(key):
        """As of a round in which no client has said anything yet."""
        change = server.refine_prior(problem, params, start, start, key)
        return factors.multiply(start, change)

    natural = project(jax.random.key(0))
    q = family.coordinates(natural)
    p, odds = 0.5, np.log(0.3 / 0.7)
    for _ in range(200):
        precision = p / 2.0**2 + (1 - p) / 0.5**2
        log_odds = odds + np.log(0.5 / 2.0) + 0.5 / precision * (1 / 0.5**2 - 1 / 2.0**2)
        p = 1 / (1 + np.exp(-log_odds))
    np.testing.assert_allclose(natural["z"], log_odds, atol=0.05)  # 64 draws a step
    np.testing.assert_allclose(jnp.exp(q["w"].log_scale), precision**-0.5, rtol=0.03)
    np.testing.assert_allclose(q["w"].loc, 0, atol=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_another_prior_on_the_same_integers_is_exact():
    def model(y):
        change = numpyro.sample("change", dist.Binomial(5, 0.4))
        with numpyro.plate("records", len(y)):
            later = jnp.arange(6) >= change
            numpyro.sample("y", dist.Normal(later, 1.0).to_event(1), obs=y)

    def guide(y):
        numpyro.sample("change", dist.Categorical(logits=numpyro.param("l", jnp.zeros(6))))

    space, family = approximation(model, guide, {"y": np.zeros((4, 6))})
    assert family.members == (("change", Categorical((), 6)),)
    parts = guides.prior_factor(family, space)
    assert not parts.rest
    probs = family.distribution(family.coordinates(parts.exact))["change"].probs
    expected = np.exp(dist.Binomial(5, 0.4).log_prob(np.arange(6)))
    np.testing.assert_allclose(probs, expected, rtol=1e-12)


@pytest.mark.slow
def test_a_value_is_an_integer_as_the_model_draws_it():
    seen = set()

    def model(y):
        k = numpyro.sample("k", dist.Categorical(probs=jnp.ones(3) / 3))
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2]).to_event(1))
        seen.update({k.dtype, z.dtype})
        numpyro.sample("y", dist.Normal(jnp.arange(3.0)[k] + z[0], 1.0), obs=y)

    def guide(y):
        numpyro.sample("z", dist.Bernoulli(0.5).expand([2]).to_event(1))
        numpyro.sample("k", dist.Categorical(logits=jnp.zeros(3)))

    space, family = approximation(model, guide, {"y": np.zeros(4)})
    assert family.members == (("k", Categorical((), 3)), ("z", Bernoulli((2,))))
    key, c, row = jax.random.key(0), family.standard(), {"y": jnp.ones(())}
    loss = objective.record_loss(space, family, dppvi.methods.Automatic(), key, c, row)
    levels = np.arange(3.0) + np.arange(2.0)[:, None]
    expected = 0.5 * np.mean((1 - levels) ** 2) + 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert seen == {jnp.dtype(jnp.result_type(int))}


@pytest.mark.slow
def test_as_many_values_as_are_allowed_are_summed():
    def model(y):
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2, 3]).to_event(2))
        numpyro.sample("y", dist.Normal(z.sum(), 1.0), obs=y)

    def guide(y):
        with numpyro.plate("columns", 3), numpyro.plate("rows", 2, dim=-2):
            numpyro.sample("z", dist.Bernoulli(0.5))

    _, family = approximation(model, guide, {"y": np.zeros(4)})
    assert family.members == (("z", Bernoulli((2, 3))),)
    assert enumeration.num_joint_values(family) == MAX_JOINT_VALUES


# ---------------------------------------------------------------------------------------------
# A private run, and everything that can be done with its posterior.


@pytest.fixture(scope="module")
def private():
    example = GUIDED["variable selection"]
    return fit(
        example.model,
        example.guide,
        {name: np.tile(x.T, 5).T for name, x in example.records.items()},
        clients=2,
        num_rounds=10,
        budget=dppvi.PrivacyBudget(2.0, 1e-5),
        insecure_noise_seed=3,
    )


@pytest.mark.slow
def test_a_private_run_finds_a_strong_signal(private):
    assert np.all(private.ledger.spent() <= 2.0)
    assert private.status.rounds == 10
    probs, truth = private.posterior.mean["included"], np.array([1, 0, 1, 0])
    assert np.all(np.isfinite(probs))
    assert np.all(probs[truth == 1] > 0.75)
    assert np.all(probs[truth == 0] < 0.4)
    product = jax.tree.map(
        lambda p, t: p + jnp.sum(t, axis=0), private.state.prior, private.state.factors
    )
    np.testing.assert_allclose(private.posterior.natural["included"], product["included"], 1e-4)


@pytest.mark.slow
def test_a_records_gradient_is_clipped_over_all_latents():
    example = GUIDED["variable selection"]
    space, family = approximation(example.model, example.guide, example.records)
    row = {"X": jnp.array([50.0, -80.0, 3.0, 900.0]), "y": jnp.array(1)}
    key, c = jax.random.key(0), family.standard()
    gradient = jax.jit(
        jax.grad(
            lambda c: objective.record_loss(space, family, dppvi.methods.Automatic(), key, c, row)
        )
    )(c)
    assert np.any(gradient["included"] != 0)

    def norm(tree):
        return np.sqrt(sum(np.sum(np.asarray(leaf) ** 2) for leaf in jax.tree.leaves(tree)))

    stacked = jax.tree.map(lambda leaf: leaf[None], gradient)
    clipped = clipped_sum(stacked, jnp.array([True]), jnp.array(0.5))
    assert norm(gradient) > 10
    np.testing.assert_allclose(norm(clipped), 0.5, rtol=1e-3)


@pytest.mark.slow
def test_draws_summary_and_quantiles_are_of_integers(private):
    posterior = private.posterior
    draws = posterior.sample(jax.random.key(1), (4000,))["included"]
    assert draws.shape == (4000, 4)
    assert draws.dtype == jnp.result_type(int)
    np.testing.assert_allclose(np.mean(draws, axis=0), posterior.mean["included"], atol=0.04)
    low, high = posterior.quantiles((0.05, 0.95))["included"]
    assert set(np.unique([low, high])) <= {0, 1}
    assert "included[3]" in posterior.summary()


@pytest.mark.slow
def test_it_predicts_and_goes_to_arviz(private):
    X = GUIDED["variable selection"].records["X"][:6]
    y = GUIDED["variable selection"].records["y"][:6]
    posterior = private.posterior
    assert posterior.predictive(jax.random.key(2), 30, X=X)["y"].shape == (30, 6)
    idata = posterior.to_arviz(num_samples=20, public_data={"X": X, "y": y})
    draws = idata["posterior"]
    assert draws["included"].shape == (1, 20, 4)
    assert draws["included"].dtype.kind == "i"
    np.testing.assert_allclose(draws["slopes"], draws["included"].values * draws["w"], rtol=1e-6)
    assert set(np.unique(idata["prior"]["included"])) == {0, 1}
    assert idata["log_likelihood"]["y"].shape == (1, 20, 6)
    predict = Predictive(
        posterior.model, guide=posterior.guide, params=posterior.params, num_samples=5
    )
    assert predict(jax.random.key(0), X=X)["y"].shape == (5, 6)


@pytest.mark.slow
def test_it_is_saved_and_is_a_prior_and_a_guide(private, tmp_path):
    example = GUIDED["variable selection"]
    posterior = private.posterior
    posterior.save(tmp_path / "study.npz")
    again = dppvi.load(tmp_path / "study.npz", example.model, example.guide)
    jax.tree.map(np.testing.assert_array_equal, again.natural, posterior.natural)
    algorithm = dppvi.pvi(
        example.model,
        posterior.guide,
        example.records,
        method=dppvi.NonPrivate(num_local_steps=1),
        client_sizes=[600],
        prior=again.as_prior(),
    )
    start = algorithm.posterior(algorithm.init(jax.random.key(1))).natural
    jax.tree.map(np.testing.assert_array_equal, start, posterior.natural)
    assert set(posterior.params) == {"included_auto_logits", "w_auto_loc", "w_auto_scale"}


@pytest.mark.slow
def test_a_continuous_latent_of_the_same_name_is_another(private, tmp_path):
    def other(X, y=None):
        included = numpyro.sample("included", dist.Normal(0, 1).expand([4]).to_event(1))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ (included * w)), obs=y)

    private.posterior.save(tmp_path / "study.npz")
    with pytest.raises(ValueError, match="'included' on another support"):
        dppvi.load(tmp_path / "study.npz", other)


# test_diagnostics.py and test_plots.py, but for latents that are integers.
@pytest.mark.slow
def test_diagnostics_and_pictures(private):
    found = dppvi.diagnose(private, num_replays=4)
    assert set(found.share) == {"w"}
    assert set(found.noise) == {"w", "included"}
    assert all(np.all(np.isfinite(x)) for x in found.noise.values())
    plots.convergence(private)
    plots.clients(private, found)
    with pytest.raises(ValueError, match="got the discrete latent 'included'"):
        dppvi.compare(private, {}, rng_key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("method", [dppvi.VirtualClients(2), dppvi.GlobalVI()])
def test_other_methods_take_discrete_latents(method):
    example = GUIDED["variable selection"]
    found = fit(
        example.model,
        example.guide,
        example.records,
        clients=2,
        num_rounds=2,
        method=method,
        trusted_aggregator=isinstance(method, dppvi.GlobalVI),
        budget=dppvi.PrivacyBudget(2.0, 1e-5),
    )
    assert bool(found.posterior.family.in_domain(found.posterior.natural))
