"""Posteriors in ArviZ: ``InferenceData`` with ArviZ 0.x, ``DataTree`` with ArviZ 1.x."""

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.to_arviz import to_arviz

mpl.use("Agg")

IS_TREE = int(az.__version__.split(".")[0]) >= 1
NUM_DRAWS = 200
GROUPS = ["north", "south"]


def model(X, g, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    with numpyro.plate("group", 2):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2, 1]).to_event(1))
    with numpyro.plate("record", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w + a[g, 0], noise), obs=y)


@pytest.fixture(scope="module")
def result():
    generator = np.random.default_rng(0)
    return dppvi.fit(
        model,
        None,
        {"X": generator.normal(size=(8, 3)), "g": np.arange(8) % 2, "y": generator.normal(size=8)},
        rng_key=jax.random.key(0),
        clients=2,
        num_rounds=2,
        budget=[dppvi.PrivacyBudget(2.0, 1e-5), dppvi.PrivacyBudget(3.0, 1e-4)],
        progress_bar=False,
    )


@pytest.fixture(scope="module")
def exported(result):
    return result.posterior.to_arviz(
        num_samples=NUM_DRAWS,
        dims={"w": ["feature"]},
        coords={"feature": ["age", "hours", "bias"], "group": GROUPS},
    )


def variables(exported):
    return exported["posterior"]


def test_is_the_type_that_users_of_this_arviz_expect(exported):
    expected = "DataTree" if IS_TREE else "InferenceData"
    assert type(exported).__name__ == expected


def test_draws_make_one_chain(exported):
    assert variables(exported).sizes["chain"] == 1
    assert variables(exported).sizes["draw"] == NUM_DRAWS
    assert variables(exported)["noise"].shape == (1, NUM_DRAWS)


def test_there_is_nothing_but_the_latents(exported):
    assert set(variables(exported).data_vars) == {"w", "noise", "a"}
    groups = list(exported.children) if IS_TREE else exported.groups()
    assert groups == ["posterior"]


def test_values_are_draws_from_the_posterior(result, exported):
    draws = result.posterior.sample(jax.random.key(0), (NUM_DRAWS,))
    for name, values in draws.items():
        np.testing.assert_array_equal(variables(exported)[name].values[0], values)


def test_a_key_gives_other_draws(result, exported):
    other = result.posterior.to_arviz(jax.random.key(5), num_samples=NUM_DRAWS)
    assert np.all(variables(other)["w"].values != variables(exported)["w"].values)


def test_dimensions_are_named_by_plates_and_by_the_user(result, exported):
    assert variables(exported)["w"].dims == ("chain", "draw", "feature")
    assert variables(exported)["a"].dims == ("chain", "draw", "group", "a_dim_1")
    assert variables(exported)["noise"].dims == ("chain", "draw")
    unnamed = result.posterior.to_arviz(num_samples=2)
    assert variables(unnamed)["w"].dims == ("chain", "draw", "w_dim_0")
    assert variables(unnamed)["a"].dims == ("chain", "draw", "group", "a_dim_1")


def test_coordinates_label_dimensions(exported):
    posterior = variables(exported)
    assert posterior["feature"].values.tolist() == ["age", "hours", "bias"]
    assert posterior["group"].values.tolist() == GROUPS
    north = posterior["a"].sel(group="north").values
    np.testing.assert_array_equal(north, posterior["a"].values[:, :, 0])


def test_attributes_say_what_it_cost(result, exported):
    for attrs in (exported.attrs, variables(exported).attrs):
        assert attrs["inference_library"] == "numpyro_dppvi"
        assert attrs["inference_library_version"] == dppvi.__version__
        assert attrs["method"] == "DPOptimization"
        assert "differential privacy" in attrs["privacy"]
        assert "one record" in attrs["privacy"]
        assert attrs["max_epsilon"] == pytest.approx(float(result.ledger.spent().max()))
        assert attrs["max_epsilon"] <= 3.0
        assert attrs["max_delta"] == 1e-4
        assert attrs["relation"] == "replace_one"


def test_attributes_say_where_there_is_no_privacy(result):
    attrs = {**result.posterior.attrs, "privacy": "none"}
    exported = to_arviz({"x": jnp.zeros(3)}, {}, {}, attrs)
    assert exported.attrs["privacy"] == "none"


def test_summary_opens_it(result, exported):
    table = az.summary(exported, kind="stats")
    weights = ["w[age]", "w[hours]", "w[bias]"]
    assert set(table.index) == {*weights, "noise", "a[north, 0]", "a[south, 0]"}
    draws = variables(exported)["w"].values[0]
    means = table["mean"].loc[weights].astype(float)
    np.testing.assert_allclose(means, draws.mean(axis=0), atol=0.05, rtol=0.05)


def test_a_forest_plot_opens_it(exported):
    az.plot_forest(exported, var_names=["w"])
    mpl.pyplot.close("all")


@pytest.mark.parametrize("engine", ["h5netcdf", "netcdf4"])
def test_it_goes_through_a_file_unchanged(exported, tmp_path, engine):
    path = tmp_path / "posterior.nc"
    exported.to_netcdf(path, engine=engine)
    opened = az.from_netcdf(path, engine=engine)
    assert opened.attrs == exported.attrs
    assert variables(opened).attrs == variables(exported).attrs
    for name in ("w", "noise", "a"):
        assert variables(opened)[name].dims == variables(exported)[name].dims
        np.testing.assert_array_equal(
            variables(opened)[name].values, variables(exported)[name].values
        )
    assert variables(opened)["feature"].values.tolist() == ["age", "hours", "bias"]


def test_a_scalar_model_needs_no_dimensions():
    exported = to_arviz({"x": jnp.arange(4.0)}, {}, {}, {"method": "none"})
    np.testing.assert_array_equal(variables(exported)["x"].values, [[0, 1, 2, 3]])
