"""What a fit gives back: draws, moments, predictions, a guide for NumPyro, and no record."""

import dataclasses
import functools
import gc
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.families import NormalCoordinates
from numpyro_dppvi.guides import family_of
from numpyro_dppvi.latents import from_model
from numpyro_dppvi.posterior import predictions as predictions_module
from numpyro_dppvi.posterior.exported import of_public_data
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.posterior.predictions import check_missing, predict
from tests.grids import grid

KEY = jax.random.key(0)
NUM_COLUMNS = 3
X_TEST = jnp.array([[1.0, 0.0, 0.0], [0.0, 2.0, -1.0]])


def model(X, y=None, *, shift=0.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_COLUMNS]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("groups", 2):
        numpyro.sample("a", dist.Normal(0, 1))
    mean = numpyro.deterministic("mean", X @ w + shift)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean + 0 * shares[0], noise), obs=y)


COORDINATES = {
    "w": NormalCoordinates(jnp.array([1.0, -2.0, 0.5]), jnp.log(jnp.array([0.1, 0.2, 0.3]))),
    "noise": NormalCoordinates(jnp.array(-1.0), jnp.log(jnp.array(0.25))),
    "shares": NormalCoordinates(jnp.array([0.5, -0.5]), jnp.log(jnp.array([0.3, 0.3]))),
    "a": NormalCoordinates(jnp.array([3.0, 4.0]), jnp.log(jnp.array([0.5, 2.0]))),
}


@pytest.fixture(scope="module")
def posterior():
    """A posterior that is known, because no fit made it."""
    records = {"X": jax.ShapeDtypeStruct((9, NUM_COLUMNS), float), "y": jnp.zeros(9)}
    space = from_model(model, records)
    family = family_of(None, model, space)
    return Posterior(family.natural(COORDINATES), family, space, model, {}, {"method": "none"})


@pytest.fixture(scope="module")
def draws(posterior):
    return posterior.sample(KEY, (4000,))


class TestSample:
    @pytest.mark.slow
    def test_latents_come_in_the_models_order(self, posterior):
        assert posterior.names == ("w", "noise", "shares", "a")

    @pytest.mark.slow
    @grid("shape", [(), (5,), (2, 3)], quick=[2])
    def test_shapes_are_those_asked_for_and_the_latents_own(self, posterior, shape):
        shapes = {name: value.shape for name, value in posterior.sample(KEY, shape).items()}
        assert shapes == {
            "w": (*shape, 3),
            "noise": shape,
            "shares": (*shape, 3),
            "a": (*shape, 2),
        }

    @pytest.mark.slow
    def test_draws_have_the_moments_of_the_normal(self, draws):
        for name in ("w", "a"):
            scale = np.exp(COORDINATES[name].log_scale)
            error = (np.mean(draws[name], axis=0) - COORDINATES[name].loc) / scale
            np.testing.assert_allclose(error, 0, atol=0.06)
            np.testing.assert_allclose(np.std(draws[name], axis=0) / scale, 1, atol=0.05)

    @pytest.mark.slow
    def test_draws_are_in_their_supports(self, draws):
        assert np.all(draws["noise"] > 0)
        assert np.all(draws["shares"] > 0)
        np.testing.assert_allclose(np.sum(draws["shares"], axis=-1), 1, rtol=1e-5)

    def test_draws_are_independent_over_latents_and_entries(self, draws):
        flat = np.concatenate([draws["w"], draws["noise"][:, None], draws["a"]], axis=1)
        correlation = np.corrcoef(flat.T)
        np.testing.assert_allclose(correlation, np.eye(len(correlation)), atol=0.08)
        # These two have unconstrained values of one shape, and would be equal under one key.
        between = np.corrcoef(draws["shares"][:, 0], draws["a"][:, 0])[0, 1]
        np.testing.assert_allclose(between, 0, atol=0.08)

    @pytest.mark.slow
    def test_a_key_gives_the_same_draws_again_and_another_key_others(self, posterior):
        first = posterior.sample(KEY)["w"]
        np.testing.assert_array_equal(first, posterior.sample(KEY)["w"])
        assert np.all(first != posterior.sample(jax.random.key(1))["w"])

    def test_a_key_is_required(self, posterior):
        with pytest.raises(TypeError, match=r"rng_key.*got 0: write rng_key=jax.random.key\(0\)"):
            posterior.sample(0, (3,))


class TestMoments:
    def test_of_normal_latents_are_exact(self, posterior):
        for name in ("w", "a"):
            np.testing.assert_allclose(posterior.mean[name], COORDINATES[name].loc, rtol=1e-5)
            expected = np.exp(COORDINATES[name].log_scale)
            np.testing.assert_allclose(posterior.stddev[name], expected, rtol=1e-5)

    def test_of_a_positive_latent_are_those_of_the_log_normal(self, posterior):
        expected = stats.lognorm(0.25, scale=np.exp(-1.0))
        np.testing.assert_allclose(posterior.mean["noise"], expected.mean(), rtol=0.02)
        np.testing.assert_allclose(posterior.stddev["noise"], expected.std(), rtol=0.05)

    def test_of_a_simplex_sum_to_one(self, posterior):
        assert posterior.mean["shares"].shape == posterior.stddev["shares"].shape == (3,)
        np.testing.assert_allclose(np.sum(posterior.mean["shares"]), 1, rtol=1e-4)

    def test_are_the_same_at_every_look(self, posterior):
        np.testing.assert_array_equal(posterior.mean["noise"], posterior.mean["noise"])


class TestQuantiles:
    def test_are_those_of_the_distributions(self, posterior):
        found = posterior.quantiles((0.1, 0.5))
        shapes = {name: value.shape for name, value in found.items()}
        assert shapes == {"w": (2, 3), "noise": (2,), "shares": (2, 3), "a": (2, 2)}
        expected = stats.norm([3, 4], [0.5, 2]).ppf([[0.1], [0.5]])
        np.testing.assert_allclose(found["a"], expected, rtol=1e-4)
        expected = stats.lognorm(0.25, scale=np.exp(-1.0)).ppf([0.1, 0.5])
        np.testing.assert_allclose(found["noise"], expected, rtol=1e-4)

    @pytest.mark.parametrize("prob", [0, 1, -0.5, "half"])
    def test_levels_are_between_zero_and_one(self, posterior, prob):
        with pytest.raises(ValueError, match="probs must lie strictly between 0 and 1"):
            posterior.quantiles((0.5, prob))


class TestLogDensity:
    @pytest.mark.slow
    def test_is_the_sum_over_latents(self, posterior, draws):
        some = jax.tree.map(lambda leaf: leaf[:6].reshape(2, 3, *leaf.shape[1:]), draws)
        found = posterior.log_density(some)
        assert found.shape == (2, 3)
        expected = stats.norm(COORDINATES["w"].loc, np.exp(COORDINATES["w"].log_scale))
        expected = expected.logpdf(some["w"]).sum(-1)
        expected += stats.norm([3, 4], [0.5, 2]).logpdf(some["a"]).sum(-1)
        expected += stats.lognorm(0.25, scale=np.exp(-1.0)).logpdf(some["noise"])
        expected += np.asarray(posterior.distribution("shares").log_prob(some["shares"]))
        np.testing.assert_allclose(found, expected, rtol=1e-4)

    @pytest.mark.slow
    def test_its_mean_is_minus_the_entropy(self, posterior, draws):
        """Over unconstrained latents, where the entropy has a closed form."""
        base = posterior.family.entropy(COORDINATES)
        jacobian = jnp.mean(jnp.log(draws["noise"]))
        sticks = dist.transforms.StickBreakingTransform()
        at = sticks.inv(draws["shares"])
        jacobian += jnp.mean(sticks.log_abs_det_jacobian(at, draws["shares"]))
        found = jnp.mean(posterior.log_density(draws))
        # The standard error of 4000 draws is about .03.
        np.testing.assert_allclose(found, -(base + jacobian), atol=0.12)

    def test_values_that_do_not_fit_are_refused(self, posterior):
        values = posterior.sample(KEY)
        with pytest.raises(ValueError, match=r"hold exactly the latents, got \['a', 'noise'\]"):
            posterior.log_density({name: values[name] for name in ("a", "noise")})
        with pytest.raises(
            ValueError, match=r"values\['w'\] must end in the latent's shape \(3,\)"
        ):
            posterior.log_density({**values, "w": jnp.zeros(2)})
        unequal = {**posterior.sample(KEY, (4,)), "a": posterior.sample(KEY, (5,))["a"]}
        with pytest.raises(ValueError, match=r"agree in the axes .*'noise': \(4,\).*'a': \(5,\)"):
            posterior.log_density(unequal)


@pytest.mark.slow
def test_a_summary_has_a_line_an_entry_and_says_what_it_is(posterior):
    lines = posterior.summary().splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert names == [
        *(f"w[{i}]" for i in range(3)),
        "noise",
        *(f"shares[{i}]" for i in range(3)),
        "a[0]",
        "a[1]",
    ]
    assert lines[-3].split()[1:3] == ["4", "2"]
    assert "R-hat" in lines[-2]


class TestDistribution:
    def test_is_numpyros_with_the_latents_shape(self, posterior):
        for name, shape in {"w": (3,), "noise": (), "shares": (3,), "a": (2,)}.items():
            distribution = posterior.distribution(name)
            assert isinstance(distribution, dist.Distribution)
            assert distribution.batch_shape == ()
            assert distribution.event_shape == shape

    def test_has_the_density_of_the_constrained_value(self, posterior):
        expected = stats.lognorm(0.25, scale=np.exp(-1.0)).logpdf(0.4)
        actual = posterior.distribution("noise").log_prob(0.4)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)

    def test_of_an_unconstrained_latent_is_plain(self, posterior):
        expected = stats.norm([3, 4], [0.5, 2]).logpdf([3.5, 3.5]).sum()
        actual = posterior.distribution("a").log_prob(jnp.array([3.5, 3.5]))
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        assert not isinstance(posterior.distribution("a"), dist.TransformedDistribution)

    def test_an_unknown_latent_is_refused_by_name(self, posterior):
        with pytest.raises(KeyError, match="one of w, noise, shares, a, got 'v'"):
            posterior.distribution("v")


def assert_predicts(y: jax.Array, shift: float = 0.0) -> None:
    """Predictions for ``X_TEST``: normal in w, with the noise's second moment on top."""
    w = COORDINATES["w"]
    noise = stats.lognorm(0.25, scale=np.exp(-1.0))
    variance = X_TEST**2 @ np.exp(2 * w.log_scale) + noise.var() + noise.mean() ** 2
    np.testing.assert_allclose(np.mean(y, axis=0), X_TEST @ w.loc + shift, atol=0.05)
    np.testing.assert_allclose(np.std(y, axis=0), np.sqrt(variance), rtol=0.06)


@pytest.fixture(scope="module")
def predictions(posterior):
    return posterior.predictive(KEY, 4000, X=X_TEST)


class TestPredictive:
    @pytest.mark.slow
    def test_draws_what_the_model_observes_and_computes(self, predictions):
        shapes = {name: value.shape for name, value in predictions.items()}
        assert shapes == {"y": (4000, 2), "mean": (4000, 2)}

    @pytest.mark.slow
    def test_has_the_right_distribution(self, predictions):
        assert_predicts(predictions["y"])

    @pytest.mark.slow
    def test_agrees_with_numpyros_predictive(self, posterior):
        """The guide and its parameters are all that plain NumPyro needs."""
        predict = Predictive(
            model, guide=posterior.guide, params=posterior.params, num_samples=4000
        )
        drawn = predict(jax.random.key(1), X=X_TEST)
        assert_predicts(drawn["y"])
        assert drawn["mean"].shape == (4000, 2)

    @pytest.mark.slow
    def test_public_arguments_are_remembered(self, posterior):
        moved = Posterior(
            posterior.natural, posterior.family, posterior.space, model, {"shift": 5.0}, {}
        )
        assert_predicts(moved.predictive(KEY, 4000, X=X_TEST)["y"], shift=5.0)
        assert_predicts(moved.predictive(KEY, 4000, X=X_TEST, shift=7.0)["y"], shift=7.0)

    def test_a_missing_argument_is_named(self, posterior):
        words = r"needs the model's argument 'X': write predictive\(key, X=\.\.\.\)"
        with pytest.raises(TypeError, match=words):
            posterior.predictive(KEY)

    def test_an_unknown_argument_is_named(self, posterior):
        with pytest.raises(TypeError, match=r"'Z', which is not an argument.*one of X, y, shift"):
            posterior.predictive(KEY, X=X_TEST, Z=X_TEST)

    def test_an_outcome_that_is_passed_is_not_repeated(self, posterior, predictions):
        found = posterior.predictive(KEY, 4000, X=X_TEST, y=jnp.zeros(2))
        np.testing.assert_array_equal(found["y"], predictions["y"])

    def test_a_key_is_required(self, posterior):
        with pytest.raises(TypeError, match="rng_key"):
            posterior.predictive(None, X=X_TEST)


# A line, 2 + 3 x, with next to no noise, and covariates around -1.
LINE = {
    "a": np.full(2000, 2.0, np.float32),
    "b": np.full(2000, 3.0, np.float32),
    "c": np.full(2000, -1.0, np.float32),
}
GIVEN = np.array([5.0, -5.0, np.nan], np.float32)


def line():
    return (numpyro.sample(name, dist.Normal(0, 1)) for name in "abc")


def missing_entries(x, y=None):
    a, b, c = line()
    with numpyro.plate("records", len(x)):
        full = numpyro.sample("x", dist.Normal(c, 1), obs=x, obs_mask=~jnp.isnan(x))
        numpyro.sample("y", dist.Normal(a + b * full, 0.01), obs=y)


def chained(X, x=None, y=None, z=None):
    a, b, c = line()
    with numpyro.plate("records", len(X)):
        x = numpyro.sample("x", dist.Normal(c, 1), obs=x)
        y = numpyro.sample("y", dist.Normal(a + b * x, 0.01), obs=y)
        numpyro.sample("z", dist.Normal(-y, 0.01), obs=z)


def side_by_side(X, x=None, y=None, z=None):
    """Whether x is above zero decides on a mask and on nothing else."""
    a, b, c = line()
    with numpyro.plate("records", len(X)):
        above = numpyro.sample("above", dist.Bernoulli(0.5), obs=None if x is None else x > 0)
        numpyro.sample("y", dist.Normal(a, 1).mask(above), obs=y)
        numpyro.sample("z", dist.Normal(b + c, 1), obs=z)


class TestPredictiveAtObservedCovariates:
    """What outcomes are computed from stays as it is passed; what nothing depends on is drawn."""

    @grid("y", [None, np.zeros(3, np.float32)], quick=[1])
    def test_missing_entries_are_drawn_and_others_stay(self, y):
        rows = {"x": GIVEN} if y is None else {"x": GIVEN, "y": y}
        found = predict(missing_entries, LINE, rows, {}, KEY)
        np.testing.assert_allclose(np.mean(found["y"], 0), [17.0, -13.0, -1.0], atol=0.3)
        np.testing.assert_allclose(np.std(found["y"], 0), [0.01, 0.01, 3.0], rtol=0.1)
        np.testing.assert_array_equal(found["x"][:, :2], np.tile(GIVEN[:2], (2000, 1)))

    @pytest.mark.parametrize(
        ("passed", "expected", "spread"),
        [
            ((), [-1.0, -1.0, 1.0], [1.0, 3.0, 3.0]),
            (("x",), [5.0, 17.0, -17.0], [0.0, 0.01, 0.014]),
            (("x", "y"), [5.0, 0.0, 0.0], [0.0, 0.0, 0.01]),
            # x and y are not drawn from the z that is passed: it is ignored.
            (("z",), [-1.0, -1.0, 1.0], [1.0, 3.0, 3.0]),
        ],
    )
    def test_of_several_outcomes_earlier_ones_stay(self, passed, expected, spread):
        values = {"x": np.full(2, 5.0), "y": np.zeros(2), "z": np.full(2, 99.0)}
        rows = {"X": np.zeros(2), **{n: values[n].astype(np.float32) for n in passed}}
        found = predict(chained, LINE, rows, {}, KEY)
        for name, mean, sd in zip("xyz", expected, spread, strict=True):
            np.testing.assert_allclose(np.mean(found[name], 0), mean, atol=0.3)
            np.testing.assert_allclose(np.std(found[name], 0), sd, rtol=0.1, atol=1e-4)

    def test_outcomes_side_by_side_are_all_drawn(self):
        rows = {"X": np.zeros(2), "x": np.ones(2), "y": np.full(2, 9.0), "z": np.full(2, 9.0)}
        found = predict(side_by_side, LINE, rows, {}, KEY)
        np.testing.assert_allclose(np.mean(found["above"], 0), 0.5, atol=0.05)
        np.testing.assert_allclose(np.mean(found["y"], 0), 2.0, atol=0.2)
        np.testing.assert_allclose(np.mean(found["z"], 0), 2.0, atol=0.2)

    def test_they_may_not_be_nan_where_no_mask_says_that_they_are_missing(self):
        rows = {"X": np.zeros(3, np.float32), "x": GIVEN, "y": np.full(3, np.nan, np.float32)}
        space = from_model(chained, {**rows, "z": rows["X"]})
        with pytest.raises(ValueError, match="x must hold finite numbers"):
            check_missing(space, chained, LINE, rows, {})
        check_missing(space, chained, LINE, {**rows, "x": rows["X"], "y": rows["X"]}, {})

    def test_public_data_is_predicted_the_same_way(self):
        rows = {"x": GIVEN, "y": np.zeros(3, np.float32)}
        space = from_model(missing_entries, rows)
        groups = of_public_data(missing_entries, space, LINE, rows, {}, rows, KEY)
        mean = np.mean(groups["posterior_predictive"]["y"].values, 0)
        np.testing.assert_allclose(mean, [17.0, -13.0, -1.0], atol=0.3)


def grouped(g, y=None):
    level = numpyro.sample("level", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", len(g)):
        numpyro.sample("y", dist.Normal(level[g], 1), obs=y)


def test_floats_for_indices_are_refused_in_a_sentence():
    rows = {"g": jnp.zeros(9, jnp.int32), "y": jnp.zeros(9)}
    space = from_model(grouped, rows)
    family = family_of(None, grouped, space)
    natural = family.natural(family.standard())
    posterior = Posterior(natural, family, space, grouped, {}, {}, records=rows)
    given = {"g": np.array([0.0, 2.0]), "y": np.zeros(2)}
    words = r"the model indexes with floats .*write g.astype\(int\)"
    for call in (
        lambda: posterior.predictive(KEY, 3, **given),
        lambda: posterior.to_arviz(num_samples=3, public_data=given),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert posterior.predictive(KEY, 3, g=np.array([0, 2]))["y"].shape == (3, 2)


def subsampled(x, y=None):
    a, b, _ = line()
    with numpyro.plate("records", len(x), subsample_size=4) as index:
        mean = a + b * numpyro.subsample(x, 0)
        numpyro.sample("y", dist.Normal(mean, 0.01), obs=None if y is None else y[index])


class TestPredictiveOfSubsamples:
    """All rows are predicted, where the model would draw a subsample of them."""

    @grid("number", [2, 4], quick=[9])
    def test_they_come_in_the_order_given(self, number):
        x = np.linspace(-1, 1, number, dtype=np.float32)
        for rows in ({"x": x}, {"x": x, "y": x}):
            found = predict(subsampled, LINE, rows, {}, KEY)["y"]
            np.testing.assert_allclose(np.mean(found, 0), 2 + 3 * x, atol=0.01)

    def test_public_data_too(self):
        rows = dict.fromkeys("xy", np.linspace(-1, 1, 9, dtype=np.float32))
        space = from_model(subsampled, rows)
        groups = of_public_data(subsampled, space, LINE, rows, {}, rows, KEY)
        assert groups["posterior_predictive"]["y"].values.shape == (2000, 9)
        density = groups["log_likelihood"]["y"].values[0]
        expected = stats.norm(2 + 3 * rows["x"], 0.01).logpdf(rows["y"])
        np.testing.assert_allclose(density, expected, rtol=1e-3)


class TestPredictiveInBatches:
    X_LARGE = np.tile(np.asarray(X_TEST), (5, 1))  # ten rows

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, posterior):
        """A posterior that knows what its records looked like."""
        records = {
            "X": jax.ShapeDtypeStruct((9, NUM_COLUMNS), jnp.float32),
            "y": jax.ShapeDtypeStruct((9,), jnp.float32),
        }
        return dataclasses.replace(posterior, records=records)

    @grid("batch_size", [1, 3, 4, 9], quick=[2])
    def test_every_row_is_predicted_once_and_in_its_place(self, fitted, batch_size):
        found = fitted.predictive(KEY, 3, X=self.X_LARGE, batch_size=batch_size)
        whole = fitted.predictive(KEY, 3, X=self.X_LARGE)
        assert found["y"].shape == whole["y"].shape == (3, 10)
        # The same draws of the latents; only the noise of the outcomes is another.
        np.testing.assert_allclose(found["mean"], whole["mean"], rtol=1e-5)

    @pytest.mark.slow
    def test_batches_have_noise_of_their_own(self, fitted):
        found = fitted.predictive(KEY, 500, X=self.X_LARGE, batch_size=2)["y"]
        found = found - found.mean(axis=0)
        residual = found[:, ::2] - found[:, ::2].mean(axis=1, keepdims=True)
        correlation = np.corrcoef(residual.T)
        # Five rows' deviations from their mean correlate by -1/4, if they are independent.
        np.testing.assert_allclose(correlation[np.triu_indices(5, 1)], -0.25, atol=0.15)

    @pytest.mark.slow
    def test_it_happens_by_itself_where_predictions_are_many(self, fitted, monkeypatch):
        monkeypatch.setattr(predictions_module, "_VALUES_PER_BATCH", 12)
        found = fitted.predictive(KEY, 3, X=self.X_LARGE)
        assert isinstance(found["y"], np.ndarray)  # pieces are put together on the host
        batches = fitted.predictive(KEY, 3, X=self.X_LARGE, batch_size=4)
        np.testing.assert_array_equal(found["y"], batches["y"])

    def test_a_model_of_a_stated_number_of_rows_is_run_whole(self):
        def stated(X, y=None):
            w = numpyro.sample("w", dist.Normal(0, 1))
            numpyro.deterministic("double", 2 * w)
            with numpyro.plate("records", 10):
                numpyro.sample("y", dist.Normal(X * w, 1), obs=y)

        draws = {"w": jnp.ones(4)}
        found = predict(stated, draws, {"X": np.ones(10)}, {}, KEY, batch_size=3)
        assert found["y"].shape == (4, 10)

    def test_what_has_no_entry_a_row_is_taken_once(self):
        def shared(X, y=None):
            w = numpyro.sample("w", dist.Normal(0, 1))
            numpyro.deterministic("double", 2 * w)
            with numpyro.plate("records", X.shape[0]):
                numpyro.sample("y", dist.Normal(X * w, 1), obs=y)

        found = predict(shared, {"w": jnp.arange(4.0)}, {"X": np.ones(10)}, {}, KEY, batch_size=3)
        np.testing.assert_array_equal(found["double"], 2 * np.arange(4.0))
        assert found["y"].shape == (4, 10)

    def test_arguments_that_do_not_fit_are_refused(self, fitted):
        with pytest.raises(
            ValueError, match=r"X must be numbers of shape \(rows, 3\) as in the fit"
        ):
            fitted.predictive(KEY, X=np.ones((2, 4)))
        with pytest.raises(ValueError, match=r"X must be numbers.*got an array of object"):
            fitted.predictive(KEY, X=np.full((2, 3), None))
        with pytest.raises(ValueError, match=r"unequal lengths \{'X': 10, 'y': 2\}: give them all"):
            fitted.predictive(KEY, X=self.X_LARGE, y=np.ones(2))
        with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
            fitted.predictive(KEY, X=self.X_LARGE, batch_size=0)
        with pytest.raises(ValueError, match="num_samples must be a whole number of at least 1"):
            fitted.predictive(KEY, 0, X=self.X_LARGE)

    @pytest.mark.slow
    def test_a_missing_entry_gets_no_prediction_that_looks_like_one(self, fitted):
        missing = X_TEST.at[0, 0].set(jnp.nan)
        words = "X must hold finite numbers, got NaN, and the model does not say"
        with pytest.raises(ValueError, match=words):
            fitted.predictive(KEY, 4, X=missing)
        with pytest.raises(ValueError, match=words):
            fitted.to_arviz(num_samples=4, public_data={"X": missing})

    @pytest.mark.slow
    def test_an_outcome_that_is_passed_may_be_missing(self, fitted):
        found = fitted.predictive(KEY, 4, X=X_TEST, y=np.full(2, np.nan))
        assert np.all(np.isfinite(found["y"]))

    def test_an_entry_may_be_missing_where_the_model_says_what_it_is_then(self):
        def filled(x, y=None):
            w = numpyro.sample("w", dist.Normal(0, 1))
            with numpyro.plate("records", x.shape[0]):
                numpyro.sample("y", dist.Normal(w * jnp.where(jnp.isnan(x), 0.0, x), 1), obs=y)

        rows = {"x": np.array([1.0, np.nan], np.float32)}
        structs = {name: jax.ShapeDtypeStruct((2,), jnp.float32) for name in ("x", "y")}
        check_missing(from_model(filled, structs, {}), filled, {"w": jnp.ones(1)}, rows, {})


class TestGuide:
    @pytest.mark.slow
    def test_parameters_are_named_as_autonormal_names_them(self, posterior):
        records = {"X": jnp.ones((2, NUM_COLUMNS)), "y": jnp.ones(2)}

        def theirs():
            guide = numpyro.handlers.seed(AutoNormal(model), 0)
            sites = numpyro.handlers.trace(guide).get_trace(**records)
            return {name: s["value"] for name, s in sites.items() if s["type"] == "param"}

        expected = {name: value.shape for name, value in jax.eval_shape(theirs).items()}
        assert {name: value.shape for name, value in posterior.params.items()} == expected

    @pytest.mark.slow
    def test_draws_from_the_posterior_by_itself(self, posterior):
        drawn = Predictive(posterior.guide, num_samples=4000)(KEY)["a"]
        np.testing.assert_allclose(np.mean(drawn, axis=0), [3, 4], atol=0.15)
        np.testing.assert_allclose(np.std(drawn, axis=0), [0.5, 2], rtol=0.06)

    def test_draws_follow_parameters_that_are_given(self, posterior):
        params = {**posterior.params, "a_auto_loc": jnp.array([-50.0, 50.0])}
        seeded = numpyro.handlers.seed(posterior.guide, 0)
        values = numpyro.handlers.substitute(seeded, data=params)()
        np.testing.assert_allclose(values["a"], [-50, 50], atol=10)

    def test_takes_any_arguments_and_looks_at_none(self, posterior):
        seeded = numpyro.handlers.seed(posterior.guide, 0)
        first = seeded("anything", at=object())
        second = numpyro.handlers.seed(posterior.guide, 0)()
        jax.tree.map(np.testing.assert_array_equal, first, second)


# ---------------------------------------------------------------------------------------------
# No record is held.

# Planted in the data and looked for everywhere. In float32 it reads 123456.78125.
CANARY = 123456.78


def _children(thing: Any) -> list[Any]:
    """What an object refers to: attributes, items, slots, closures, defaults, bound arguments."""
    if isinstance(thing, types.FunctionType):  # its globals are the module's, not its own
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        return [*cells, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    return gc.get_referents(thing)


def _is_boring(thing: Any) -> bool:
    shared = (type, types.ModuleType, types.CodeType, types.FrameType)
    return isinstance(thing, shared) or (isinstance(thing, dict) and "__builtins__" in thing)


def reachable(root: Any) -> list[Any]:
    """Every object that can be reached from one."""
    found, waiting, seen = [], [root], set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or _is_boring(thing):
            continue
        seen.add(id(thing))
        found.append(thing)  # kept, so that no address is used twice
        if not isinstance(thing, (np.ndarray, jax.Array)):
            waiting += _children(thing)
    return found


def holds_canary(thing: Any) -> bool:
    if isinstance(thing, str):
        return "123456" in thing
    if isinstance(thing, (np.ndarray, jax.Array)):
        if isinstance(thing, jax.Array) and jnp.issubdtype(thing.dtype, jax.dtypes.prng_key):
            return False
        array = np.asarray(thing)
        return array.dtype.kind == "f" and bool(np.any(np.isclose(array, CANARY, rtol=1e-6)))
    return isinstance(thing, float) and abs(thing - CANARY) < 1


def culprits(root: Any) -> list[Any]:
    return [thing for thing in reachable(root) if holds_canary(thing)]


def canaries() -> dict[str, np.ndarray]:
    """Records with a canary in every array and every client."""
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(8, NUM_COLUMNS)), generator.normal(size=8)
    X[::2, 1] = CANARY
    y[1::2] = CANARY
    return {"X": X, "y": y}


@dataclass
class _Holder:
    """Something that keeps what it is given."""

    kept: Any

    def method(self) -> None:
        """Does nothing."""


class _Pair(NamedTuple):
    first: Any
    second: Any


class _Slots:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


def regression(X, y=None, *, shift=0.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_COLUMNS]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w + shift, noise), obs=y)


def _guide_run_on_rows(X: np.ndarray) -> AutoNormal:
    guide = AutoNormal(regression)
    numpyro.handlers.seed(guide, 0)(X=jnp.asarray(X), y=jnp.zeros(len(X)))
    return guide


HIDING_PLACES = {
    "itself": lambda X: X,
    "on the device": jnp.asarray,
    "containers": lambda X: {"a": [1, (X,)]},
    "view": lambda X: X[3:],
    "text": lambda X: f"the largest is {X.max()}",
    "number": lambda X: float(X.max()),
    "dataclass": _Holder,
    "slots": _Slots,
    "NamedTuple": lambda X: _Pair(None, X),
    "bound method": lambda X: _Holder(X).method,
    "closure": lambda X: lambda: X,
    "default": lambda X: lambda kept=X: kept,
    "keyword default": lambda X: lambda *, kept=X: kept,
    "partial": lambda X: functools.partial(print, X),
    "compiled function": lambda X: jax.jit(lambda: X),
    "guide that was run": _guide_run_on_rows,  # NumPyro's keep the rows they are set up on
}


@pytest.mark.parametrize("hide", HIDING_PLACES.values(), ids=HIDING_PLACES.keys())
def test_a_record_that_is_held_is_found(hide):
    assert culprits(hide(canaries()["X"]))


@pytest.fixture(
    scope="module",
    params=["with privacy", pytest.param("without privacy", marks=pytest.mark.slow)],
)
def result(request):
    """A fit of canaries, by a guide that was run on them before."""
    data = canaries()
    run = {"method": dppvi.NonPrivate(num_local_steps=2)}
    if request.param == "with privacy":
        run = {"budget": dppvi.PrivacyBudget(1.0, 1e-5)}
    guide = AutoNormal(regression)
    numpyro.handlers.seed(guide, 0)(**data)
    return dppvi.fit(
        regression,
        guide,
        data,
        rng_key=KEY,
        clients=2,
        num_rounds=2,
        model_kwargs={"shift": 0.5},
        progress_bar=False,
        **run,
    )


@pytest.mark.parametrize(
    "part",
    [
        lambda result: result,
        lambda result: result.posterior,
        lambda result: result.posterior_at(1),
        lambda result: result.guide,
        lambda result: result.params,
        lambda result: result.state,
        lambda result: result.ledger,
        lambda result: result.history,
        lambda result: result.privacy_statement(),
        lambda result: str(result.privacy_statement()) + result.privacy_statement().to_json(),
        repr,
        lambda result: result.posterior.to_arviz(num_samples=3),
    ],
    ids=[
        "result",
        "posterior",
        "posterior_at",
        "guide",
        "params",
        "state",
        "ledger",
        "history",
        "statement",
        "text of the statement",
        "text of the result",
        "to_arviz",
    ],
)
def test_no_part_of_a_result_holds_a_record(result, part):
    assert culprits(part(result)) == []


def test_a_result_was_walked_through(result):
    """The walk does reach the numbers that a result is made of, and the model's closure."""
    found = reachable(result)
    assert any(thing is result.state.prior["w"].linear for thing in found)
    assert any(thing is regression for thing in found)
    assert any(thing is result.posterior.space.log_likelihood_of for thing in found)


def test_a_result_goes_through_numpyros_predictive(result):
    predict = Predictive(regression, guide=result.guide, params=result.params, num_samples=3)
    assert predict(KEY, X=X_TEST)["y"].shape == (3, 2)
    assert result.posterior.predictive(KEY, 3, X=X_TEST)["y"].shape == (3, 2)


@pytest.mark.slow
def test_the_log_density_of_latents_that_know_of_each_other_is_the_joint_one():
    """At base values u with one normal distribution over all, less the bijection's Jacobian."""

    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        spread = numpyro.sample("spread", dist.LogNormal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(slope * x, spread), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=12).astype(np.float32)
    result = dppvi.fit(
        model,
        AutoMultivariateNormal(model),
        [{"x": x, "y": x + rng.normal(size=12).astype(np.float32)}],
        rng_key=jax.random.key(0),
        method=dppvi.NonPrivate(2, optax.adam(0.3)),
        num_rounds=1,
        progress_bar=False,
    )
    posterior = result.posterior
    drawn = posterior.sample(jax.random.key(1), (5,))
    ((name, member),) = posterior.family.members
    normal = member.distribution(posterior.family.coordinates(posterior.natural)[name])
    parts = [part.latent for part in dict(posterior.family.shared)[name]]
    base = {"slope": drawn["slope"], "spread": jnp.log(drawn["spread"])}
    expected = normal.log_prob(jnp.stack([base[part] for part in parts], axis=-1)) - base["spread"]
    np.testing.assert_allclose(posterior.log_density(drawn), expected, rtol=1e-4, atol=1e-4)
    apart = sum(posterior.distribution(part).log_prob(drawn[part]) for part in parts)
    assert np.abs(np.asarray(apart - expected)).max() > 0.01
