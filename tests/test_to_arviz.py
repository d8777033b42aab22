"""Posteriors in ArviZ: ``InferenceData`` with ArviZ 0.x, ``DataTree`` with ArviZ 1.x."""

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.reparam import LocScaleReparam
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.guides import family_of
from numpyro_dppvi.latents import from_model
from numpyro_dppvi.latents.space import shapes
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.posterior.to_arviz import Variable, to_arviz
from tests.dry import dry_rounds

mpl.use("Agg")

IS_TREE = int(az.__version__.split(".")[0]) >= 1
NUM_DRAWS = 200
GROUPS = ["north", "south"]
FEATURES = ["age", "hours", "bias"]
NAMES = {"w": ["feature"], "X": ["record", "feature"]}
LABELS = {"feature": FEATURES, "group": GROUPS}


def model(X, g, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    numpyro.deterministic("precision", noise**-2)
    with numpyro.plate("group", 2):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2, 1]).to_event(1))
    numpyro.factor("ridge", -jnp.sum(w**2))
    mean = numpyro.deterministic("mean", X @ w + a[g, 0])
    with numpyro.plate("record", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def rows(num_rows, seed):
    generator = np.random.default_rng(seed)
    X, noise = generator.normal(size=(num_rows, 3)), generator.normal(size=num_rows)
    return {"X": X, "g": np.arange(num_rows) % 2, "y": X @ [1.0, -1.0, 0.5] + noise}


PUBLIC = rows(6, seed=1)


def run():
    return dppvi.fit(
        model,
        None,
        rows(400, seed=0),
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.DPOptimization(),
        num_rounds=5,
        budget=[dppvi.PrivacyBudget(20.0, 1e-5), dppvi.PrivacyBudget(30.0, 1e-4)],
        insecure_noise_seed=1,
        progress_bar=False,
    )


def exported_from(posterior):
    return posterior.to_arviz(num_samples=NUM_DRAWS, public_data=PUBLIC, dims=NAMES, coords=LABELS)


@pytest.fixture(scope="module")
def result():
    with dry_rounds():
        return run()


@pytest.fixture(scope="module")
def exported(result):
    return exported_from(result.posterior)


def group_names(exported):
    return list(exported.children) if IS_TREE else exported.groups()


def variables(exported, group="posterior"):
    return exported[group]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    mpl.pyplot.close("all")


@pytest.mark.slow
def test_is_the_type_that_users_of_this_arviz_expect(exported):
    expected = "DataTree" if IS_TREE else "InferenceData"
    assert type(exported).__name__ == expected


def test_draws_make_one_chain(exported):
    for group in ("posterior", "prior"):
        assert variables(exported, group).sizes["chain"] == 1
        assert variables(exported, group).sizes["draw"] == NUM_DRAWS
        assert variables(exported, group)["noise"].shape == (1, NUM_DRAWS)


@pytest.mark.slow
def test_without_public_data_there_is_nothing_of_records(result):
    exported = result.posterior.to_arviz(num_samples=3)
    assert set(group_names(exported)) == {"posterior", "prior"}
    for group in group_names(exported):
        # "mean" has an entry a record; "precision" follows from the latents.
        assert set(variables(exported, group).data_vars) == {"w", "noise", "a", "precision"}
        assert "record" not in variables(exported, group).dims


def test_public_data_adds_the_groups_that_it_makes(exported):
    assert set(group_names(exported)) == {
        "posterior",
        "prior",
        "posterior_predictive",
        "log_likelihood",
        "observed_data",
        "constant_data",
    }
    assert set(variables(exported, "posterior_predictive").data_vars) == {"y"}
    assert set(variables(exported, "constant_data").data_vars) == {"X", "g"}
    np.testing.assert_allclose(variables(exported, "observed_data")["y"].values, PUBLIC["y"])
    np.testing.assert_array_equal(variables(exported, "constant_data")["X"].values, PUBLIC["X"])


def test_without_the_outcome_nothing_is_observed(result):
    covariates = {"X": PUBLIC["X"], "g": PUBLIC["g"]}
    exported = result.posterior.to_arviz(num_samples=3, public_data=covariates)
    names = set(group_names(exported))
    assert names == {"posterior", "prior", "posterior_predictive", "constant_data"}
    assert variables(exported, "posterior_predictive")["y"].dims == ("chain", "draw", "record")


def test_values_are_draws_from_the_posterior(result, exported):
    draws = result.posterior.sample(jax.random.key(0), (NUM_DRAWS,))
    for name, values in draws.items():
        np.testing.assert_array_equal(variables(exported)[name].values[0], values)
    expected = draws["noise"] ** -2
    np.testing.assert_allclose(variables(exported)["precision"].values[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_prior_draws_come_from_the_prior(result):
    prior = variables(result.posterior.to_arviz(num_samples=2000), "prior")
    # Kolmogorov and Smirnov's test, which a right answer fails once in a thousand keys.
    for name, expected in {"w": stats.norm(), "a": stats.norm(), "noise": stats.lognorm(1)}.items():
        assert stats.kstest(prior[name].values[0].reshape(2000, -1)[:, 0], expected.cdf)[1] > 1e-3


def test_log_likelihoods_are_those_of_the_rows_at_the_draws(exported):
    posterior, found = variables(exported), variables(exported, "log_likelihood")["y"]
    assert found.dims == ("chain", "draw", "record")
    draw = posterior.isel(chain=0, draw=7)
    mean = PUBLIC["X"] @ draw["w"].values + draw["a"].values[PUBLIC["g"], 0]
    expected = stats.norm(mean, draw["noise"].values).logpdf(PUBLIC["y"])
    np.testing.assert_allclose(found.values[0, 7], expected, rtol=1e-4)


def test_predictions_do_not_repeat_the_outcome(exported):
    predicted = variables(exported, "posterior_predictive")["y"].values[0]
    assert np.all(np.std(predicted, axis=0) > 0.1)


@pytest.mark.slow
def test_a_key_gives_other_draws(result, exported):
    other = result.posterior.to_arviz(jax.random.key(5), num_samples=NUM_DRAWS)
    assert np.all(variables(other)["w"].values != variables(exported)["w"].values)


@pytest.mark.slow
def test_dimensions_are_named_by_plates_and_by_the_user(result, exported):
    for group in ("posterior", "prior"):
        assert variables(exported, group)["w"].dims == ("chain", "draw", "feature")
        assert variables(exported, group)["a"].dims == ("chain", "draw", "group", "a_dim_1")
        assert variables(exported, group)["noise"].dims == ("chain", "draw")
    assert variables(exported, "constant_data")["X"].dims == ("record", "feature")
    assert variables(exported, "constant_data")["g"].dims == ("record",)
    unnamed = result.posterior.to_arviz(num_samples=2)
    assert variables(unnamed)["w"].dims == ("chain", "draw", "w_dim_0")


def test_coordinates_label_dimensions(exported):
    posterior = variables(exported)
    assert posterior["feature"].values.tolist() == FEATURES
    assert posterior["group"].values.tolist() == GROUPS
    assert posterior["a_dim_1"].values.tolist() == [0]
    north = posterior["a"].sel(group="north").values
    np.testing.assert_array_equal(north, posterior["a"].values[:, :, 0])


def test_attributes_say_what_it_cost(result, exported):
    for attrs in (exported.attrs, variables(exported).attrs):
        assert attrs["inference_library"] == "numpyro_dppvi"
        assert attrs["inference_library_version"] == dppvi.__version__
        assert attrs["model"] == "model"
        assert attrs["method"] == "DPOptimization"
        assert attrs["numpyro_version"] == numpyro.__version__
        assert attrs["privacy"] == "differential privacy, unit one record"
        assert attrs["privacy_statement"] == str(result.privacy_statement())
        assert attrs["max_epsilon"] == pytest.approx(float(result.ledger.spent().max()))
        assert attrs["max_epsilon"] <= 30.0
        assert attrs["max_delta"] == 1e-4
        assert attrs["relation"] == "replace_one"
        assert "independent" in attrs["draws"]
        assert "R-hat" in attrs["draws"]


@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")  # of Matplotlib
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of pandas
class TestArviz:
    """What ArviZ's users do first, in the ArviZ that is installed."""

    def test_summary(self, exported):
        table = az.summary(exported, kind="stats")
        weights = ["w[age]", "w[hours]", "w[bias]"]
        assert set(table.index) == {
            *weights,
            "noise",
            "precision",
            "a[north, 0]",
            "a[south, 0]",
        }
        draws = variables(exported)["w"].values[0]
        means = table["mean"].loc[weights].astype(float)
        np.testing.assert_allclose(means, draws.mean(axis=0), atol=0.05, rtol=0.05)

    def test_forest_plot(self, exported):
        az.plot_forest(exported, var_names=["w"])

    def test_plot_of_distributions(self, exported):
        if IS_TREE:
            az.plot_dist(exported, var_names=["w"])
        else:
            az.plot_posterior(exported, var_names=["w"])

    def test_plot_of_pairs(self, exported):
        az.plot_pair(exported, var_names=["w"])

    def test_plot_of_predictions_against_public_outcomes(self, exported):
        if IS_TREE:
            az.plot_ppc_dist(exported)
        else:
            az.plot_ppc(exported, num_pp_samples=20)

    @pytest.mark.slow
    def test_loo_and_compare_on_public_rows(self):
        result = run()
        exported = exported_from(result.posterior)
        first = az.loo(exported)
        likelihood = np.exp(variables(exported, "log_likelihood")["y"].values[0])
        # So much data is in the posterior that leaving out six rows more changes little.
        plain = np.log(likelihood.mean(axis=0)).sum()
        assert (first.elpd if IS_TREE else first.elpd_loo) == pytest.approx(plain, abs=0.5)
        earlier = exported_from(result.posterior_at(4))
        table = az.compare({"five rounds": exported, "four": earlier})
        assert set(table.index) == {"five rounds", "four"}

    @pytest.mark.slow
    @pytest.mark.parametrize("engine", ["h5netcdf", "netcdf4"])
    def test_a_file_and_back(self, exported, tmp_path, engine):
        path = tmp_path / "posterior.nc"
        exported.to_netcdf(path, engine=engine)
        opened = az.from_netcdf(path, engine=engine)
        assert opened.attrs == exported.attrs
        assert set(group_names(opened)) == set(group_names(exported))
        for group in group_names(exported):
            before, after = variables(exported, group), variables(opened, group)
            assert after.attrs == before.attrs
            for name in before.data_vars:
                assert after[name].dims == before[name].dims
                np.testing.assert_array_equal(after[name].values, before[name].values)
        assert variables(opened)["feature"].values.tolist() == FEATURES


def multivariate(X, y=None):
    B = numpyro.sample("B", dist.Normal(0, 1).expand([2, 2]).to_event(2))
    with numpyro.plate("record", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ B, 1).to_event(1), obs=y)


@numpyro.handlers.reparam(config={"a": LocScaleReparam(0)})
def non_centred(g, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", 2):
        a = numpyro.sample("a", dist.Normal(mu, 0.5))
    with numpyro.plate("record", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[g], 1), obs=y)


def made_up(model, data):
    """A posterior that no fit made: all latents are standard normal."""
    space = from_model(model, data)
    family = family_of(None, model, space)
    natural = family.natural(family.standard())
    return Posterior(natural, family, space, model, {}, {}, shapes(data))


@pytest.mark.slow
def test_a_density_has_the_plates_dimensions_and_an_outcome_its_own_too():
    data = {"X": np.ones((4, 2)), "y": np.zeros((4, 2))}
    exported = made_up(multivariate, data).to_arviz(
        num_samples=3, public_data=data, dims={"y": ["patient", "outcome"]}
    )
    assert variables(exported, "log_likelihood")["y"].dims == ("chain", "draw", "patient")
    predicted = variables(exported, "posterior_predictive")["y"]
    assert predicted.dims == ("chain", "draw", "patient", "outcome")


def test_a_reparametrised_latent_is_there_under_its_own_name():
    data = {"g": np.array([0, 1, 1]), "y": np.zeros(3)}
    exported = made_up(non_centred, data).to_arviz(num_samples=50, public_data=data)
    posterior = variables(exported)
    assert set(posterior.data_vars) == {"mu", "a_decentered", "a"}
    assert posterior["a"].dims == ("chain", "draw", "group")
    expected = posterior["mu"].values[..., None] + 0.5 * posterior["a_decentered"].values
    np.testing.assert_allclose(posterior["a"].values, expected, atol=1e-6)
    # The model has no default for its outcome, and predicts all the same.
    assert np.all(np.std(variables(exported, "posterior_predictive")["y"].values, axis=1) > 0.1)


def test_a_statement_of_a_thousand_different_clients_fits_a_file(tmp_path):
    lines = [f"  client {number:<5} " + "." * 90 for number in range(1000)]
    statement = "\n".join(["Privacy statement", *lines, "  Not covered: more"])
    exported = to_arviz(
        {"posterior": {"x": Variable(jnp.zeros(2))}}, {}, {}, {"privacy_statement": statement}
    )
    exported.to_netcdf(tmp_path / "posterior.nc", engine="h5netcdf")
    short = exported.attrs["privacy_statement"].splitlines()
    assert (short[0], short[-1]) == ("Privacy statement", "  Not covered: more")
    left_out = next(line for line in short if "lines left out" in line)
    assert f"({1003 - len(short)} lines left out)" in left_out


BAD = {
    "unknown variable": (
        {"v": ["feature"]},
        {},
        r"'v': write one of a, noise, w",
    ),
    "too many dims": ({"w": ["a1", "a2"]}, {}, r"dims\['w'\] must name 1 dimensions, got 2 names"),
    "too few dims": ({"a": ["a1"]}, {}, r"dims\['a'\] must name 2 dimensions, got 1"),
    "a word": ({"w": "feature"}, {}, r"must be a list of names, got 'feature': write dims="),
    "reserved": ({"w": ["draw"]}, {}, r"'chain' and 'draw', got 'draw'"),
    "its own name": ({"w": ["w"]}, {}, r"distinct names other than the variable's.*got 'w'"),
    "twice": ({"a": ["x", "x"]}, {}, r"must be distinct names.*got 'x'"),
    "two sizes": ({"w": ["group"]}, {}, r"'group' has 3 entries in 'w' and 2 in 'a'"),
    "too few labels": ({}, {"group": ["north"]}, r"coords\['group'\] must hold 2 labels.*got 1"),
    "unused labels": ({}, {"feature": FEATURES}, r"got .feature.: name it in dims"),
}


@pytest.mark.parametrize(("dims", "coords", "words"), BAD.values(), ids=BAD.keys())
def test_names_that_do_not_fit_are_refused(dims, coords, words):
    group = {
        "w": Variable(np.zeros((5, 3))),
        "noise": Variable(np.zeros(5)),
        "a": Variable(np.zeros((5, 2, 1)), ("group", None)),
    }
    with pytest.raises(ValueError, match=words):
        to_arviz({"posterior": group}, dims, coords, {})


def test_public_data_that_the_model_cannot_take_is_refused(result):
    export = result.posterior.to_arviz
    with pytest.raises(
        TypeError, match=r"public_data needs.*'g': write public_data=\{\"g\": ...\}"
    ):
        export(public_data={"X": PUBLIC["X"]})
    with pytest.raises(ValueError, match=r"X must be numbers of shape \(rows, 3\).*got an array"):
        export(public_data={**PUBLIC, "X": np.zeros((6, 2))})
    with pytest.raises(ValueError, match=r"unequal lengths \{'X': 6, 'g': 5, 'y': 6\}"):
        export(public_data={**PUBLIC, "g": np.zeros(5, int)})


def test_a_scalar_model_needs_no_dimensions():
    group = {"x": Variable(jnp.arange(4.0))}
    exported = to_arviz({"posterior": group}, {}, {}, {"method": "none"})
    np.testing.assert_array_equal(variables(exported)["x"].values, [[0, 1, 2, 3]])
