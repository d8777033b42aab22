"""Comparisons without privacy, for simulations: against closed forms, and stamped as such."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi

NOISE, PRIOR_SCALE = 1.5, 2.0
SIZES = (12, 12)  # clients of one size share what is compiled
KEY = jax.random.key(2)


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SCALE).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def closed_form(y, prior_mean=0.0, prior_precision=PRIOR_SCALE**-2):
    precision = prior_precision + len(y) / NOISE**2
    return (prior_precision * prior_mean + y.sum(0) / NOISE**2) / precision, precision**-0.5


DATA = [{"y": np.random.default_rng(m).normal(m, NOISE, (n, 2))} for m, n in enumerate(SIZES)]
POOLED = np.concatenate([part["y"] for part in DATA])


@pytest.fixture(scope="module")
def result():
    return dppvi.fit(
        means,
        None,
        DATA,
        rng_key=KEY,
        method=dppvi.NonPrivate(num_local_steps=2),
        num_rounds=2,
        progress_bar=False,
    )


@pytest.fixture(scope="module")
def found(result):
    return dppvi.compare(result, DATA, rng_key=KEY, num_warmup=200, num_samples=1000)


@pytest.mark.slow
def test_every_posterior_is_there_and_named_for_what_it_is(found):
    assert (
        list(found.mean)
        == list(found.stddev)
        == [
            "this posterior",
            "nonprivate_pooled_nuts",
            "nonprivate_pooled_vi",
            "nonprivate_client_0",
            "nonprivate_client_1",
        ]
    )
    assert str(found).startswith("NOT PRIVATE: rows named nonprivate_ were computed from records")
    assert len(str(found).splitlines()) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("nonprivate_pooled_vi", POOLED),
        ("nonprivate_client_0", DATA[0]["y"]),
        ("nonprivate_client_1", DATA[1]["y"]),
        ("nonprivate_pooled_nuts", POOLED),
    ],
)
def test_numbers_are_those_of_the_closed_form(found, name, rows):
    mean, stddev = closed_form(rows)
    # Draws of the latents, and of NUTS, leave an error of about a twentieth of a deviation.
    np.testing.assert_allclose((found.mean[name]["mu"] - mean) / stddev, 0, atol=0.2)
    np.testing.assert_allclose(found.stddev[name]["mu"] / stddev, 1, atol=0.12)


@pytest.mark.slow
def test_this_posterior_is_the_one_given(found, result):
    np.testing.assert_array_equal(found.mean["this posterior"]["mu"], result.posterior.mean["mu"])


def test_distances_are_from_pooled_nuts():
    numbers = {"nonprivate_pooled_nuts": {"a": np.array([0.0, 1.0]), "b": np.array(2.0)}}
    widths = {"nonprivate_pooled_nuts": {"a": np.array([1.0, 2.0]), "b": np.array(0.5)}}
    numbers["other"] = {"b": np.array(2.5), "a": np.array([1.0, 3.0])}
    widths["other"] = {"b": np.array(1.0), "a": np.array([2.0, 4.0])}
    found = dppvi.analysis.Comparison(numbers, widths)
    assert found.shift("other") == pytest.approx(1.0)
    assert found.width("other") == pytest.approx(2.0)
    assert found.shift("nonprivate_pooled_nuts") == 0
    assert "1.00 sd    2.00x" in str(found)


@pytest.mark.slow
def test_an_earlier_posterior_is_the_prior_of_all(result):
    prior = result.posterior.as_prior()
    second = dppvi.fit(
        means,
        None,
        {"y": DATA[1]["y"]},
        rng_key=KEY,
        clients=2,
        method=dppvi.NonPrivate(num_local_steps=2),
        num_rounds=2,
        prior=prior,
        progress_bar=False,
    )
    found = dppvi.compare(
        second, {"y": DATA[1]["y"]}, rng_key=KEY, clients=2, max_clients=0, num_warmup=200
    )
    assert list(found.mean) == ["this posterior", "nonprivate_pooled_nuts", "nonprivate_pooled_vi"]
    precision = jnp.square(1 / result.posterior.stddev["mu"])
    mean, stddev = closed_form(DATA[1]["y"], result.posterior.mean["mu"], precision)
    for name in ("nonprivate_pooled_nuts", "nonprivate_pooled_vi"):
        np.testing.assert_allclose((found.mean[name]["mu"] - mean) / stddev, 0, atol=0.2)
        np.testing.assert_allclose(found.stddev[name]["mu"] / stddev, 1, atol=0.12)


def test_other_data_than_the_fits_is_refused(result):
    with pytest.raises(ValueError, match=r"with 12, 12 records per client, got 12, 11"):
        dppvi.compare(result, [DATA[0], {"y": DATA[1]["y"][1:]}], rng_key=KEY)
    with pytest.raises(TypeError, match="rng_key"):
        dppvi.compare(result, DATA)


def line(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


@pytest.mark.slow
def test_alone_and_together_have_the_same_guide():
    """Independent normals would be half as wide here, and clients alone would look too sure."""
    rng = np.random.default_rng(5)
    X = np.column_stack([np.ones(300), 1.5 + rng.normal(size=300)])
    data = {"X": X, "y": X @ [1.0, -1.0] + rng.normal(size=300)}
    budget = dppvi.PrivacyBudget(8.0)
    result = dppvi.fit(
        line, None, data, rng_key=KEY, method=dppvi.FisherScoring(), budget=budget, num_rounds=2
    )
    found = dppvi.compare(result, data, rng_key=KEY, num_warmup=200, num_samples=500)
    exact = np.sqrt(np.diag(np.linalg.inv(np.eye(2) + X.T @ X)))
    for name in ("nonprivate_pooled_vi", "nonprivate_client_0"):
        np.testing.assert_allclose(found.stddev[name]["w"] / exact, 1, atol=0.05)
    assert found.shift("nonprivate_pooled_vi") < 0.3
