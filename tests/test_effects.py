"""Effects that a model draws apart from their mean and scale, put together again."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions.transforms import AffineTransform
from numpyro.handlers import reparam
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from scipy.stats import multivariate_normal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.families.full_normal import unpack
from numpyro_dppvi.latents import affine
from numpyro_dppvi.methods import hierarchies
from tests.dry import traced_rounds
from tests.grids import grid
from tests.test_hierarchies import without_noise

GROUPS, SLOPES = 6, 2


def _hyper():
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    return mu, tau, numpyro.sample("w", dist.Normal(0, 1))


def _outcomes(logits, y):
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def centred(group, x, y):
    mu, tau, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    _outcomes(a[group] + w * x, y)


def by_hand(group, x, y):
    mu, tau, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
        a = numpyro.deterministic("a", mu + tau * z)
    _outcomes(a[group] + w * x, y)


def looked_up_first(group, x, y):
    mu, tau, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes(mu + z[group] * tau + w * x, y)


by_loc_and_scale = reparam(centred, config={"a": LocScaleReparam(0)})


def _transformed(group, x, y):
    mu, tau, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        standard = dist.TransformedDistribution(dist.Normal(0, 1), AffineTransform(mu, tau))
        a = numpyro.sample("a", standard)
    _outcomes(a[group] + w * x, y)


by_transform = reparam(_transformed, config={"a": TransformReparam()})


def in_pieces(group, x, y):
    """Not all of the mean is there when the group is looked up."""
    mu, tau, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes(mu + (tau * z)[group] + w * x, y)


def slopes(group, x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([SLOPES]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([SLOPES]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS, SLOPES]).to_event(2))
    own = mu + tau * z[group]
    _outcomes(own[:, 0] + own[:, 1] * x, y)


def _correlated():
    """Latents above slopes that are correlated, and the root of their covariance matrix."""
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([SLOPES]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([SLOPES]).to_event(1))
    return mu, tau[:, None] * numpyro.sample("root", dist.LKJCholesky(SLOPES, 2.0))


def correlated(group, x, y):
    mu, root = _correlated()
    z = numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS, SLOPES]).to_event(2))
    own = (mu + z @ root.T)[group]
    _outcomes(own[:, 0] + own[:, 1] * x, y)


def correlated_as_in_stan(group, x, y):
    mu, root = _correlated()
    z = numpyro.sample("z", dist.Normal(0, 1).expand([SLOPES, GROUPS]).to_event(2))
    own = (mu[:, None] + root @ z).T[group]
    _outcomes(own[:, 0] + own[:, 1] * x, y)


def correlated_by_einsum(group, x, y):
    mu, root = _correlated()
    z = numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS, SLOPES]).to_event(2))
    own = mu + jnp.einsum("ij,nj->ni", root, z[group])
    _outcomes(own[:, 0] + own[:, 1] * x, y)


def horseshoe(group, x, y):
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([SLOPES]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([SLOPES]).to_event(1))
    w = z * local * tau
    _outcomes(w[0] + w[1] * x, y)


def nested(group, x, y):
    mu, tau, _ = _hyper()
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("regions", 2):
        region = mu + spread * numpyro.sample("above", dist.Normal(0, 1))
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes((region[jnp.arange(GROUPS) % 2] + tau * z)[group], y)


def beside_a_curve(group, x, y):
    mu, tau, _ = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    scale = jnp.exp(-0.5 * (length * jnp.arange(1, GROUPS + 1)) ** 2)
    curve = scale * numpyro.sample("curve", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    _outcomes((mu + tau * z)[group] + jnp.sin(x[:, None] * jnp.arange(1, GROUPS + 1)) @ curve, y)


def given_a_column(group, x, y):
    """The scale is one record's."""
    _, tau, _ = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes(z[group] * x * tau, y)


def used_twice(group, x, y):
    mu, tau, _ = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes((mu + tau * z)[group] + z[group] ** 2, y)


def of_a_known_scale(group, x, y):
    mu, _, w = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes((mu + 0.5 * z)[group] + w * x, y)


def of_either_sign(group, x, y):
    scale = numpyro.sample("scale", dist.Normal(0, 1))
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    _outcomes((scale * z)[group], y)


def a_smooth_curve(group, x, y):
    """Of short waves the prior knows that they are nothing."""
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    scale = jnp.exp(-0.5 * (length * jnp.arange(1, GROUPS + 1)) ** 2)
    z = numpyro.sample("z", dist.Normal(0, 1).expand([GROUPS]).to_event(1))
    waves = jnp.sin(x[:, None] * jnp.arange(1, GROUPS + 1))
    _outcomes(waves @ (scale * z), y)


def of_heavy_tails(group, x, y):
    mu, tau, _ = _hyper()
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.StudentT(3, 0, 1))
    _outcomes((mu + tau * z)[group], y)


def above_another(group, x, y):
    mu, tau, _ = _hyper()
    z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("groups", GROUPS):
        a = numpyro.sample("a", dist.Normal(z, 1))
    _outcomes(a[group] + mu + tau * z, y)


# What stands for an effect, what its mean and scale depend on, and what records enter.
FOUND = {
    by_hand: ({"z": {"mu", "tau"}}, {"z", "w"}),
    looked_up_first: ({"z": {"mu", "tau"}}, {"z", "w"}),
    by_loc_and_scale: ({"a_decentered": {"mu", "tau"}}, {"a_decentered", "w"}),
    by_transform: ({"a_base": {"mu", "tau"}}, {"a_base", "w"}),
    in_pieces: ({"z": {"tau"}}, {"mu", "z", "w"}),
    slopes: ({"z": {"mu", "tau"}}, {"z"}),
    **dict.fromkeys(
        (correlated, correlated_as_in_stan, correlated_by_einsum),
        ({"z": {"mu", "tau", "root"}}, {"z"}),
    ),
    horseshoe: ({"z": {"local", "tau"}}, {"z"}),
    beside_a_curve: ({"z": {"mu", "tau"}}, {"z", "length", "curve"}),
    nested: ({"above": {"mu", "spread"}, "z": {"mu", "spread", "above", "tau"}}, {"z"}),
}
LEFT = (
    *(given_a_column, used_twice, of_a_known_scale, of_either_sign, of_heavy_tails),
    *(a_smooth_curve, above_another, centred),
)


def _named(value):
    return value.fn.__name__ if hasattr(value, "fn") else getattr(value, "__name__", None)


def _data(number=40, seed=0):
    rng = np.random.default_rng(seed)
    group, x = rng.integers(GROUPS, size=number), rng.normal(size=number)
    effects = -0.5 + 0.7 * rng.normal(size=GROUPS)
    y = rng.uniform(size=number) < 1 / (1 + np.exp(-effects[group] - 0.5 * x))
    return {"group": group.astype(np.int32), "x": x.astype(np.float32), "y": y.astype(np.int32)}


def _record(number=0):
    return {name: jnp.asarray(column[number]) for name, column in _data().items()}


def _base(space, seed=0, shape=()):
    rng = np.random.default_rng(seed)
    return {
        lt.name: jnp.asarray(rng.normal(size=(*shape, *lt.base_shape)), jnp.result_type(float))
        for lt in space.latents
    }


@pytest.mark.parametrize("model", FOUND, ids=_named)
def test_effects_are_found(model):
    parents, entering = FOUND[model]
    space = latents.recentred(latents.from_model(model, _data()))
    assert {name: space.parents[name] for name in space.effects} == parents
    assert space.entering == entering


@pytest.mark.parametrize("model", LEFT, ids=_named)
def test_other_models_stay_as_they_are(model):
    space = latents.from_model(model, _data())
    assert latents.recentred(space) is space


@pytest.mark.parametrize("model", FOUND, ids=_named)
def test_densities_are_those_of_the_model(model):
    """p(a) = p(z) / scale; a record's density, and its drawn outcomes, are the same."""
    space = latents.recentred(latents.from_model(model, _data()))
    plain, names = space.plain, frozenset(space.structs)
    for number in range(4):
        base, record = _base(space, number), _record(number)
        theta = space.constrain(base)
        values, log_scales = space.apart(theta)
        np.testing.assert_allclose(
            space.log_likelihood(theta, record), plain.log_likelihood(values, record), rtol=1e-4
        )
        np.testing.assert_allclose(
            space.log_density(theta, names) + sum(log_scales.values()),
            plain.log_density(values, names),
            rtol=1e-4,
        )
        key = jax.random.key(number)
        mine, theirs = space.draw(theta, record, key), plain.draw(values, record, key)
        np.testing.assert_array_equal(mine["y"], theirs["y"])


def _correlated_effects(group, x, y):
    mu, root = _correlated()
    a = numpyro.sample(
        "a", dist.MultivariateNormal(mu, scale_tril=root).expand([GROUPS]).to_event(1)
    )
    own = a[group]
    _outcomes(own[:, 0] + own[:, 1] * x, y)


@pytest.mark.parametrize(
    ("model", "twin"), [(by_hand, centred), (correlated, _correlated_effects)], ids=_named
)
def test_the_prior_is_that_of_the_centred_model(model, twin):
    space, twin = (latents.recentred(latents.from_model(m, _data())) for m in (model, twin))
    for number in range(3):
        base = _base(twin, number)
        mine = {"z" if name == "a" else name: value for name, value in base.items()}
        found = space.log_prior(mine, frozenset({"z"}))
        np.testing.assert_allclose(found, twin.log_prior(base, frozenset({"a"})), rtol=1e-4)


@pytest.mark.parametrize("model", [by_hand, in_pieces, slopes, correlated], ids=_named)
def test_effects_are_integrated_out(model):
    guide, data = AutoMultivariateNormal(model), _data()
    space, family = guides.approximation(guide, model, latents.from_model(model, data), data)
    assert hierarchies.applies(latents.recentred(space), family)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", [np.tril, np.triu, lambda x: x @ np.swapaxes(x, 1, 2)])
def test_small_systems_are_solved(kind, size):
    rng = np.random.default_rng(size)
    matrices = kind(np.eye(size) + 0.3 * rng.normal(size=(4, size, size)))
    vectors = rng.normal(size=(4, size))
    found, pivots = affine.solved(jnp.asarray(matrices), jnp.asarray(vectors))
    true = np.linalg.solve(matrices, vectors[..., None])[..., 0]
    np.testing.assert_allclose(found, true, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.prod(pivots, axis=1), np.linalg.det(matrices), rtol=1e-3)


@grid("shape", [(), (3,), (2, 3)], quick=[0, 2], ids=str)
@pytest.mark.parametrize(
    "model", [by_hand, slopes, nested, correlated, correlated_as_in_stan], ids=_named
)
def test_there_and_back(model, shape):
    space = latents.recentred(latents.from_model(model, _data()))
    theta = space.constrain(_base(space, shape=shape))
    values, log_scales = space.each(space.apart, theta)
    back, again = space.each(space.together_again, values)
    for name, value in theta.items():
        assert values[name].shape == value.shape
        np.testing.assert_allclose(back[name], value, atol=1e-4)
    for name, log_scale in log_scales.items():
        assert log_scale.shape == shape
        np.testing.assert_allclose(again[name], log_scale, rtol=1e-5, atol=1e-5)


DATA = [_data(400, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def mine():
    return without_noise(by_hand, DATA).posterior


def effects_in(draws):
    return draws["mu"][:, None] + draws["tau"][:, None] * draws["z"]


# Of 20,000 draws by NUTS: means and standard deviations.
EXACT = {
    "mu": (-0.831, 0.299),
    "log tau": (-0.419, 0.344),
    "w": (0.591, 0.0708),
    "a": (
        [-1.274, -0.940, -0.104, -1.555, -0.961, -0.300],
        [0.174, 0.164, 0.149, 0.185, 0.152, 0.142],
    ),
}


def test_it_has_the_moments_of_the_posterior(mine):
    """Had the effects not been integrated out, deviations were .87 (log tau) and .83 of these."""
    draws = mine.sample(jax.random.key(1), (20_000,))
    draws |= {"log tau": np.log(draws["tau"]), "a": effects_in(draws)}
    for name, (mean, std) in EXACT.items():
        found = np.asarray(draws[name])
        np.testing.assert_allclose((found.mean(axis=0) - mean) / std, 0, atol=0.05)
        np.testing.assert_allclose(found.std(axis=0), std, rtol=0.04)


@pytest.mark.slow
def test_a_fit_is_that_of_the_centred_model(mine):
    twin = without_noise(centred, DATA).posterior
    key = jax.random.key(1)
    draws, true = mine.sample(key, (500,)), twin.sample(key, (500,))
    for found, wanted in (
        (draws["mu"], true["mu"]),
        (draws["tau"], true["tau"]),
        (effects_in(draws), true["a"]),
    ):
        np.testing.assert_allclose(found, wanted, atol=0.02)


def test_latents_and_derived_sites_have_their_names(mine):
    assert mine.names == ("mu", "tau", "w", "z")
    group = mine.to_arviz(num_samples=50)["posterior"]
    values = {name: np.asarray(group[name])[0] for name in ("mu", "tau", "z", "a")}
    effects = values["mu"][:, None] + values["tau"][:, None] * values["z"]
    np.testing.assert_allclose(values["a"], effects, rtol=1e-4, atol=1e-4)


def test_moments_and_quantiles_are_those_of_draws(mine):
    draws = np.asarray(mine.sample(jax.random.key(0), (10_000,))["z"])
    np.testing.assert_allclose(mine.mean["z"], draws.mean(axis=0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(mine.stddev["z"], draws.std(axis=0), rtol=1e-3)
    found = mine.quantiles((0.1, 0.9))["z"]
    np.testing.assert_allclose(found, np.quantile(draws, (0.1, 0.9), axis=0), atol=1e-3)
    assert "z[5]" in mine.summary()
    assert mine.distribution("z").sample(jax.random.key(0), (3,)).shape == (3, GROUPS)
    with pytest.raises(NotImplementedError, match=r"posterior.log_density\(values\)"):
        mine.distribution("z").log_prob(draws[0])


def test_a_density_counts_the_scale(mine):
    """log q(mu, tau, w, z) = log q(mu, log tau, w, a) - log tau + G log tau, where q is normal."""
    values = mine.sample(jax.random.key(3), (4,))
    base = {**values, "tau": np.log(values["tau"]), "z": effects_in(values)}
    ((member, joint),) = mine.family.members
    natural = mine.natural[member]
    places = mine.family.by_latent({member: np.arange(joint.size)[None]})
    entries = np.zeros((4, joint.size))
    for name, where in places.items():
        entries[:, np.ravel(where)] = np.reshape(base[name], (4, -1))
    covariance = np.linalg.inv(-2 * np.asarray(unpack(natural.quadratic), np.float64))
    normal = multivariate_normal(covariance @ np.asarray(natural.linear), covariance)
    expected = normal.logpdf(entries) + (GROUPS - 1) * base["tau"]
    np.testing.assert_allclose(mine.log_density(values), expected, rtol=1e-3)


def test_its_guide_draws_what_the_model_draws(mine):
    predictive = Predictive(mine.guide, params=mine.params, num_samples=4000)
    drawn = predictive(jax.random.key(0))
    middle = mine.quantiles([0.5])["z"][0]
    np.testing.assert_allclose(np.median(drawn["z"], axis=0), middle, atol=0.1)
    traced = numpyro.handlers.trace(
        numpyro.handlers.seed(numpyro.handlers.substitute(mine.guide, mine.params), 0)
    ).get_trace()
    values = {name: traced[name]["value"] for name in mine.names}
    density = sum(
        jnp.sum(s["fn"].log_prob(s["value"])) for s in traced.values() if s["type"] == "sample"
    )
    np.testing.assert_allclose(density, mine.log_density(values), rtol=1e-3, atol=1e-2)


def test_it_is_saved_and_pickled(mine, tmp_path):
    mine.save(tmp_path / "posterior.zip")
    key = jax.random.key(4)
    for again in (
        dppvi.load(tmp_path / "posterior.zip", by_hand),
        pickle.loads(pickle.dumps(mine)),
    ):
        assert set(again.space.effects) == {"z"}
        np.testing.assert_array_equal(again.sample(key, (5,))["z"], mine.sample(key, (5,))["z"])


@pytest.fixture(scope="module")
def goes_on(mine):
    """A fit of further records from a prior and for a guide."""
    return functools.partial(
        dppvi.fit,
        by_hand,
        data=_data(300, 7),
        prior=mine.as_prior(),
        rng_key=jax.random.key(0),
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(float("inf"), 1e-5),
        progress_bar=False,
        insecure_noise_seed=0,
    )


@pytest.fixture(scope="module")
def begun(goes_on):
    """One that ends where it began."""
    with traced_rounds():
        return goes_on(guide=None)


def test_a_study_begins_at_it(mine, goes_on, begun):
    for name in mine.names:
        np.testing.assert_allclose(begun.posterior.mean[name], mine.mean[name], rtol=1e-3)
        np.testing.assert_allclose(begun.posterior.stddev[name], mine.stddev[name], rtol=1e-3)
    with pytest.raises(dppvi.UnsupportedModelError, match=r"'z' fitted as mean \+ scale \* z"):
        goes_on(guide=AutoMultivariateNormal(by_hand))


@pytest.mark.slow
def test_a_study_goes_on_from_it(mine, goes_on):
    found = goes_on(guide=None).posterior
    assert np.all(np.asarray(found.stddev["w"]) < np.asarray(mine.stddev["w"]))


def test_a_score_of_held_back_records(mine):
    data, key, budget = _data(300, 8), jax.random.key(0), dppvi.PrivacyBudget(1e4, 1e-5)
    score = dppvi.score(mine, [data], rng_key=key, budget=budget, insecure_noise_seed=0)
    draws = mine.sample(key, (4000,))
    logits = effects_in(draws)[:, data["group"]] + np.outer(draws["w"], data["x"])
    chance = np.mean(1 / (1 + np.exp(np.where(data["y"], -logits, logits))), axis=0)
    assert score.log_density.value == pytest.approx(np.mean(np.log(chance)), abs=0.002)


def test_nuts_has_no_prior_for_what_follows_from_effects(begun):
    with pytest.raises(ValueError, match="knows 'z' by what the model makes of it"):
        dppvi.compare(begun, _data(300, 7), rng_key=jax.random.key(0))
