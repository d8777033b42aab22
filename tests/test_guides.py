"""How a guide is read, without data; and how what was fitted becomes a guide again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions import constraints, transforms
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.families import (
    Beta,
    DiagonalNormal,
    Dirichlet,
    Exponential,
    FullNormal,
    Gamma,
    HalfNormal,
)

NUM_ROWS = 8
RECORDS = {"X": jnp.ones((NUM_ROWS, 2)), "y": jnp.ones(NUM_ROWS)}


def approximation(model, guide, records=RECORDS, model_kwargs=None):
    space = latents.from_model(model, records, model_kwargs)
    return guides.approximation(guide, model, space, records, model_kwargs)


def one_latent(prior):
    """A model of one latent with a prior of any kind."""

    def model(X, y):
        x = numpyro.sample("x", prior())
        numpyro.sample("y", dist.Normal(jnp.sum(x), 1.0), obs=y)

    return model


def one_statement(distribution):
    def guide(X, y):
        numpyro.sample("x", distribution())

    return guide


def vector(distribution, *shape):
    return distribution.expand(shape).to_event(len(shape))


TRIL = np.array([[2.0, 0.0], [0.5, 1.0]])
# By breaking sticks at 0.3 twice, the first time of three parts and then of two.
FIRST = 1 / (1 + 2 * np.exp(-0.3))
SECOND = (1 - FIRST) / (1 + np.exp(-0.3))
STICKS = np.array([FIRST, SECOND, 1 - FIRST - SECOND])
ON_0_3 = transforms.AffineTransform(0.0, 3.0, domain=constraints.unit_interval)

# Prior, guide, family, and the value that a base value 0.3 (in each entry) stands for.
READ = {
    "normal": (
        lambda: vector(dist.Normal(0, 1), 3),
        lambda: vector(dist.Normal(1, 2), 3),
        DiagonalNormal((3,)),
        np.full(3, 0.3),
    ),
    "normal, its width tied": (
        lambda: vector(dist.Normal(0, 1), 2, 3),
        lambda: dist.Normal(jnp.ones((2, 1)), jnp.ones(3)).to_event(2),
        DiagonalNormal((2, 3)),
        np.full((2, 3), 0.3),
    ),
    "affine normal": (
        lambda: dist.Cauchy(0, 1),
        lambda: dist.TransformedDistribution(
            dist.Normal(0, 1), transforms.AffineTransform(1.0, 2.0)
        ),
        DiagonalNormal(()),
        1.6,
    ),
    "log-normal": (
        lambda: dist.HalfCauchy(1),
        lambda: dist.LogNormal(0, 1),
        DiagonalNormal(()),
        np.exp(0.3),
    ),
    "soft plus of a normal": (
        lambda: vector(dist.Gamma(1, 1), 2),
        lambda: dist.TransformedDistribution(
            vector(dist.Normal(0, 1), 2), [transforms.SoftplusTransform()]
        ),
        DiagonalNormal((2,)),
        np.full(2, np.log1p(np.exp(0.3))),
    ),
    "normal behind a simplex": (
        lambda: dist.Dirichlet(jnp.ones(3)),
        lambda: dist.TransformedDistribution(
            vector(dist.Normal(0, 1), 2), transforms.StickBreakingTransform()
        ),
        DiagonalNormal((2,)),
        STICKS,
    ),
    "multivariate normal": (
        lambda: vector(dist.Normal(0, 1), 2),
        lambda: dist.MultivariateNormal(0.0, scale_tril=TRIL),
        FullNormal((2,)),
        np.full(2, 0.3),
    ),
    "multivariate normals": (
        lambda: vector(dist.Normal(0, 1), 4, 2),
        lambda: dist.MultivariateNormal(jnp.ones((4, 2)), scale_tril=TRIL).to_event(1),
        FullNormal((4, 2)),
        np.full((4, 2), 0.3),
    ),
    "gamma": (
        lambda: dist.HalfNormal(1),
        lambda: dist.Gamma(1, 1),
        Gamma(()),
        0.3,
    ),
    "inverse gamma": (
        lambda: vector(dist.LogNormal(0, 1), 2),
        lambda: vector(dist.InverseGamma(1, 1), 2),
        Gamma((2,)),
        np.full(2, 1 / 0.3),
    ),
    "chi squared": (lambda: dist.HalfCauchy(1), lambda: dist.Chi2(3), Gamma(()), 0.3),
    "beta": (lambda: dist.Uniform(0, 1), lambda: dist.Beta(2, 2), Beta(()), 0.3),
    "beta on another interval": (
        lambda: vector(dist.Uniform(0, 3), 2),
        lambda: vector(dist.TransformedDistribution(dist.Beta(2, 2), ON_0_3), 2),
        Beta((2,)),
        np.full(2, 0.9),
    ),
    "dirichlet": (
        lambda: dist.Dirichlet(jnp.ones(3)).expand([2]).to_event(1),
        lambda: dist.Dirichlet(jnp.ones((2, 3))).to_event(1),
        Dirichlet((2, 3)),
        np.full((2, 3), 0.3),
    ),
    "exponential": (
        lambda: dist.HalfNormal(1),
        lambda: dist.Exponential(1),
        Exponential(()),
        0.3,
    ),
    "half-normal": (
        lambda: dist.HalfCauchy(1),
        lambda: dist.HalfNormal(1),
        HalfNormal(()),
        0.3,
    ),
}


@pytest.mark.parametrize(("prior", "drawn", "family", "value"), READ.values(), ids=READ.keys())
def test_a_distribution_becomes_a_family_and_a_bijection(prior, drawn, family, value):
    space, found = approximation(one_latent(prior), one_statement(drawn))
    assert found.members == (("x", family),)
    (latent,) = space.latents
    assert latent.base_shape == family.shape
    theta = space.constrain({"x": jnp.full(family.shape, 0.3)})
    np.testing.assert_allclose(theta["x"], value, rtol=1e-6)


def grouped(X, y, num_groups):
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0.0, spread))
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(2)))
    mean = effect[0] + X @ share[0]
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def grouped_guide(X, y, num_groups):
    with numpyro.plate("groups", num_groups):
        loc = numpyro.param("loc", lambda key: jax.random.normal(key, (num_groups,)))
        width = numpyro.param("width", jnp.ones(num_groups), constraint=constraints.positive)
        numpyro.sample("effect", dist.Normal(loc, width))
        a = numpyro.param("a", jnp.ones((num_groups, 2)), constraint=constraints.positive)
        numpyro.sample("share", dist.Dirichlet(a))
    numpyro.sample("spread", dist.InverseGamma(2.0, numpyro.param("b", 1.0)))


class TestReading:
    @pytest.mark.slow
    def test_plates_and_public_arguments_are_the_models(self):
        _, family = approximation(grouped, grouped_guide, model_kwargs={"num_groups": 4})
        assert dict(family.members) == {
            "spread": Gamma(()),
            "effect": DiagonalNormal((4,)),
            "share": Dirichlet((4, 2)),
        }

    @pytest.mark.slow
    def test_latents_come_in_the_models_order(self):
        _, family = approximation(grouped, grouped_guide, model_kwargs={"num_groups": 4})
        assert [name for name, _ in family.members] == ["spread", "effect", "share"]

    @pytest.mark.slow
    def test_equal_guides_share_a_compilation(self):
        def again(X, y, num_groups):
            grouped_guide(X, y, num_groups)

        first = approximation(grouped, grouped_guide, model_kwargs={"num_groups": 4})
        second = approximation(grouped, again, model_kwargs={"num_groups": 4})
        assert first == second
        assert hash(first) == hash(second)

    @pytest.mark.slow
    def test_another_bijection_is_another_program(self):
        model = one_latent(lambda: dist.HalfNormal(1))
        exponential, _ = approximation(model, one_statement(lambda: dist.LogNormal(0, 1)))
        soft_plus = lambda: dist.TransformedDistribution(  # noqa: E731
            dist.Normal(0, 1), transforms.SoftplusTransform()
        )
        other, _ = approximation(model, one_statement(soft_plus))
        assert exponential != other

    def test_parameters_are_only_initial_values(self):
        """One that is initialised from data spends nothing: its value is not used."""

        def guide(X, y):
            loc = numpyro.param("loc", jnp.mean(y))
            numpyro.sample("x", dist.Normal(loc, numpyro.param("width", jnp.std(X))))

        prior = lambda: dist.Normal(0, 1)  # noqa: E731
        _, family = approximation(one_latent(prior), guide)
        assert family.members == (("x", DiagonalNormal(())),)

    def test_it_runs_on_made_up_rows_of_the_datas_shape(self):
        seen = []

        def guide(X, y):
            seen.append((X, y))
            numpyro.sample("x", dist.Normal(0, 1))

        shapes = {
            "X": jax.ShapeDtypeStruct((NUM_ROWS, 2), np.float32),
            "y": jax.ShapeDtypeStruct((NUM_ROWS,), np.float32),
        }
        approximation(one_latent(lambda: dist.Normal(0, 1)), guide, shapes)
        assert {(X.shape, y.shape) for X, y in seen} == {((NUM_ROWS, 2), (NUM_ROWS,))}
        assert all(isinstance(X, jax.core.Tracer) for X, _ in seen)

    def test_a_callers_handlers_do_not_see_the_guide(self):
        with handlers.trace() as trace:
            approximation(
                one_latent(lambda: dist.Normal(0, 1)), one_statement(lambda: dist.Normal(0, 1))
            )
        assert not trace

    @pytest.mark.parametrize(
        "wrap",
        [
            functools.partial,
            lambda guide: handlers.scope(guide, prefix="g", hide_types=["sample"]),
            lambda guide: type("Guide", (), {"__call__": lambda self, X, y: guide(X, y)})(),
        ],
        ids=["partial", "handler", "object"],
    )
    def test_anything_that_can_be_called_is_a_guide(self, wrap):
        guide = wrap(one_statement(lambda: dist.Gamma(1, 1)))
        _, family = approximation(one_latent(lambda: dist.HalfNormal(1)), guide)
        assert family.members == (("x", Gamma(())),)


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal])
def test_an_automatic_guide_is_not_run(kind):
    model = one_latent(lambda: vector(dist.HalfNormal(1), 2))
    guide = kind(model)
    before = dict(vars(guide))
    _, family = approximation(model, guide)
    assert vars(guide) == before
    expected = FullNormal((2,)) if kind is AutoMultivariateNormal else DiagonalNormal((2,))
    assert dict(family.members).popitem()[1] == expected


# ---------------------------------------------------------------------------------------------
# Fits with such guides.


def regression(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ slopes, noise), obs=y)


def regression_guide(X, y=None):
    numpyro.sample("noise", dist.Gamma(2.0, 2.0))
    numpyro.sample("slopes", dist.MultivariateNormal(jnp.zeros(2), scale_tril=jnp.eye(2)))


@functools.cache
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    return {"X": X, "y": X @ [1.0, -1.0] + 0.5 * rng.normal(size=40)}


def fit(guide, **changes):
    arguments = {
        "rng_key": jax.random.key(0),
        "clients": 3,
        "budget": dppvi.PrivacyBudget(50.0, 1e-5),
        "num_rounds": 2,
        "progress_bar": False,
        "insecure_noise_seed": 0,
    }
    return dppvi.fit(regression, guide, data(), **{**arguments, **changes})


GUIDES = {"written": regression_guide, "full": AutoMultivariateNormal(regression)}
FEW_STEPS = dppvi.DPOptimization(num_local_steps=3)


# Runs with a full covariance are in test_start.py too.
@pytest.fixture(scope="module", params=["written", pytest.param("full", marks=pytest.mark.slow)])
def result(request):
    return fit(GUIDES[request.param], method=FEW_STEPS)


# Others see it sooner: test_algorithm.py and, where a guide was written, test_conjugate.py.
@pytest.mark.slow
def test_q_is_a_proper_product_of_the_factors(result):
    state, natural = result.state, result.posterior.natural
    product = jax.tree.map(lambda p, t: p + jnp.sum(t, axis=0), state.prior, state.factors)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), natural, product
    )
    assert bool(result.posterior.family.in_domain(natural))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "method"),
    [
        ("full", dppvi.VirtualClients(2, num_local_steps=3)),
        ("written", dppvi.VirtualClients(2, num_local_steps=3)),
        ("written", dppvi.GlobalVI()),
    ],
)
def test_other_methods_work_with_these_guides(guide, method):
    trusted = isinstance(method, dppvi.GlobalVI)
    result = fit(GUIDES[guide], method=method, trusted_aggregator=trusted)
    assert bool(result.posterior.family.in_domain(result.posterior.natural))
    draws = result.posterior.sample(jax.random.key(1), (5,))
    assert draws["slopes"].shape == (5, 2)
    assert np.all(draws["noise"] > 0)


@pytest.mark.slow
class TestFitted:
    def test_parameters_have_numpyros_names(self, result):
        shapes = {name: value.shape for name, value in result.params.items()}
        if "auto_loc" in shapes:
            assert shapes == {"auto_loc": (3,), "auto_scale_tril": (3, 3)}
        else:
            assert shapes == {
                "noise_auto_concentration": (),
                "noise_auto_rate": (),
                "slopes_auto_loc": (2,),
                "slopes_auto_scale_tril": (2, 2),
            }

    def test_its_guide_draws_what_sample_draws(self, result):
        predict = Predictive(regression, guide=result.guide, params=result.params, num_samples=4000)
        X = jnp.eye(2)
        by_numpyro = predict(jax.random.key(1), X=X)["y"]
        ours = result.posterior.predictive(jax.random.key(2), 4000, X=X)["y"]
        scale = np.std(ours, axis=0)
        np.testing.assert_allclose(np.mean(by_numpyro - ours, axis=0) / scale, 0, atol=0.1)
        np.testing.assert_allclose(np.std(by_numpyro, axis=0) / scale, 1, atol=0.1)

    def test_its_guide_has_the_posteriors_density(self, result):
        """Marginals of independent latents; of a vector, the sum is not the joint density."""
        seeded = handlers.seed(result.guide, 0)
        trace = handlers.trace(handlers.substitute(seeded, data=result.params)).get_trace()
        density = sum(
            jnp.sum(site["fn"].log_prob(site["value"]))
            for site in trace.values()
            if site["type"] == "sample"
        )
        posterior = result.posterior
        space, family = posterior.space, posterior.family
        base = {lt.name: lt.transform.inv(trace[lt.name]["value"]) for lt in space.latents}
        coordinates = family.coordinates(posterior.natural)
        jacobian = sum(
            jnp.sum(lt.transform.log_abs_det_jacobian(base[lt.name], trace[lt.name]["value"]))
            for lt in space.latents
        )
        if "auto_loc" in result.params:
            vector = jnp.append(base["slopes"], base["noise"])
            expected = family.members[0][1].distribution(coordinates["_auto_latent"])
            expected = expected.log_prob(vector)
        else:
            expected = sum(
                d.log_prob(base[name]) for name, d in family.distribution(coordinates).items()
            )
        np.testing.assert_allclose(density, expected - jacobian, rtol=1e-3)

    def test_marginals_have_the_latents_shapes(self, result):
        for name, shape in {"noise": (), "slopes": (2,)}.items():
            distribution = result.posterior.distribution(name)
            assert distribution.event_shape == shape
            assert result.posterior.mean[name].shape == shape
            assert result.posterior.stddev[name].shape == shape

    def test_it_goes_to_arviz(self, result):
        assert result.posterior.to_arviz(num_samples=3).posterior["slopes"].shape == (1, 3, 2)

    def test_it_can_be_the_guide_of_another_fit(self, result):
        """If its latents are independent: it is a function that draws each of them."""
        if "auto_loc" in result.params:
            with pytest.raises(dppvi.UnsupportedModelError, match="'_auto_latent'"):
                approximation(regression, result.guide)
        else:
            _, family = approximation(regression, result.guide)
            assert family == result.posterior.family


@pytest.mark.slow
def test_parameters_of_a_vector_are_those_of_numpyros_guide():
    """Its entries come in the same order, so that they can be put into NumPyro's own guide."""
    result = fit(GUIDES["full"], method=FEW_STEPS)
    theirs = AutoMultivariateNormal(regression)
    with handlers.seed(rng_seed=0):
        theirs(**RECORDS)
    draws = theirs.sample_posterior(jax.random.key(0), result.params, sample_shape=(20_000,))
    mean, stddev = result.posterior.mean, result.posterior.stddev
    for name in ("noise", "slopes"):
        shift = (np.mean(draws[name], axis=0) - mean[name]) / stddev[name]
        np.testing.assert_allclose(shift, 0, atol=0.06)


@pytest.mark.slow
def test_cubature_over_another_family_is_refused_before_anything_is_released():
    method = dppvi.DPOptimization(expectation=dppvi.methods.SphericalCubature())
    words = r"'noise' has a Gamma: write expectation=MonteCarlo\(32\)"
    with pytest.raises(TypeError, match=words):
        fit(regression_guide, method=method)
