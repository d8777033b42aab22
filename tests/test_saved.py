"""Posteriors on disk: they open where the data has never been, and refuse what is not theirs."""

import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi import _files
from numpyro_dppvi.families import NormalNatural
from numpyro_dppvi.guides import family_of
from numpyro_dppvi.latents import from_model
from numpyro_dppvi.latents.space import shapes
from numpyro_dppvi.posterior.posterior import Posterior

ROOT = Path(__file__).parents[1]
KEY = jax.random.key(0)
KWARGS = {"prior_scale": jnp.array([1.0, 2.0, 3.0]), "df": 4.0, "link": "identity"}


def model(X, y=None, *, prior_scale=1.0, df=3.0, link="identity", groups=None):
    w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ w + 0 * shares[0], noise), obs=y)


def bounded(X, y=None, *, prior_scale=1.0, df=3.0, link="identity"):
    """The same latents, one of them on another support."""
    w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([3]).to_event(1))
    noise = numpyro.sample("noise", dist.Uniform(0, 5))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(df, X @ w + 0 * shares[0], noise), obs=y)


def wider(X, y=None, **kwargs):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w[:3] + 0 * shares[0], noise), obs=y)


def renamed(X, y=None, **kwargs):
    v = numpyro.sample("v", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ v, 1), obs=y)


def known(model, data, kwargs, attrs=None, prior=None):
    """A posterior with numbers that no fit made."""
    space = from_model(model, data, kwargs)
    family = family_of(None, model, space)

    def numbers(shape):
        size = int(np.prod(shape))
        return jnp.linspace(0.5, 1.5, size).reshape(shape)

    natural = {
        name: NormalNatural(numbers(member.shape), -numbers(member.shape))
        for name, member in family.members
    }
    return Posterior(natural, family, space, model, kwargs, attrs or {}, shapes(data), prior)


DATA = {"X": np.ones((5, 3)), "y": np.zeros(5)}


@pytest.fixture(scope="module")
def posterior():
    attrs = {"privacy": "differential privacy", "max_epsilon": 1.5}
    prior = known(model, DATA, {}, {"privacy": "none"}).as_prior()
    return known(model, DATA, KWARGS, attrs, prior)


@pytest.fixture
def path(tmp_path, posterior):
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    return path


@pytest.mark.slow
def test_what_is_loaded_is_what_was_saved(path, posterior):
    loaded = dppvi.load(path, model, AutoNormal(model))
    jax.tree.map(np.testing.assert_array_equal, loaded.natural, posterior.natural)
    jax.tree.map(np.testing.assert_array_equal, loaded.prior.natural, posterior.prior.natural)
    assert loaded.attrs == posterior.attrs
    assert loaded.prior.attrs == posterior.prior.attrs
    assert loaded.records == posterior.records
    assert set(loaded.model_kwargs) == set(KWARGS)
    jax.tree.map(
        np.testing.assert_array_equal,
        loaded.predictive(KEY, 7, X=DATA["X"]),
        posterior.predictive(KEY, 7, X=DATA["X"]),
    )


def test_public_arguments_can_be_replaced(path):
    loaded = dppvi.load(path, model, model_kwargs={"df": 30.0})
    assert loaded.model_kwargs["df"] == 30.0
    assert loaded.model_kwargs["link"] == "identity"


@pytest.mark.slow
def test_public_arguments_that_no_open_format_holds_are_asked_for(tmp_path):
    path = tmp_path / "posterior.npz"
    kwargs = {"groups": ("north", "south")}
    known(model, DATA, kwargs).save(path)
    with pytest.raises(ValueError, match=r"lacks the public argument 'groups'.*write load"):
        dppvi.load(path, model)
    assert dppvi.load(path, model, model_kwargs=kwargs).model_kwargs == kwargs


@pytest.mark.slow
def test_a_posterior_of_a_fit_can_be_saved_whichever_way_it_came(tmp_path):
    arguments = {"method": dppvi.NonPrivate(num_local_steps=1)}
    data = {"X": np.ones((4, 2)), "y": np.array([0, 1, 1, 0])}
    result = dppvi.fit(
        logistic_regression, None, data, rng_key=KEY, num_rounds=1, progress_bar=False, **arguments
    )
    algorithm = dppvi.pvi(logistic_regression, None, data, client_sizes=[4], **arguments)
    for number, posterior in enumerate(
        (result.posterior, result.posterior_at(1), algorithm.posterior(algorithm.init(KEY)))
    ):
        path = tmp_path / f"{number}.npz"
        posterior.save(path)
        loaded = dppvi.load(path, logistic_regression)
        jax.tree.map(np.testing.assert_array_equal, loaded.natural, posterior.natural)


SCRIPT = """
import sys
import jax, numpy as np
import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
posterior = dppvi.load(sys.argv[1], logistic_regression)
np.savez(
    sys.argv[2],
    mean=posterior.mean["w"],
    draws=posterior.sample(jax.random.key(3), (4,))["w"],
    y=posterior.predictive(jax.random.key(1), 5, X=np.eye(2))["y"],
)
"""


@pytest.mark.slow
def test_it_opens_in_a_process_that_never_saw_the_data(tmp_path):
    data = {"X": np.ones((4, 2)), "y": np.array([0, 1, 1, 0])}
    posterior = known(logistic_regression, data, {})
    path, answer = tmp_path / "posterior.npz", tmp_path / "answer.npz"
    posterior.save(path)
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), str(answer)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    found = np.load(answer)
    np.testing.assert_allclose(found["mean"], posterior.mean["w"], rtol=1e-6)
    draws = posterior.sample(jax.random.key(3), (4,))["w"]
    np.testing.assert_allclose(found["draws"], draws, rtol=1e-6)
    expected = posterior.predictive(jax.random.key(1), 5, X=np.eye(2))["y"]
    np.testing.assert_array_equal(found["y"], expected)


@pytest.mark.slow
def test_double_precision_opens_in_single_precision(tmp_path):
    path = tmp_path / "posterior.npz"
    with jax.enable_x64(True):
        saved = known(model, DATA, {})
        saved.save(path)
        mean = saved.mean["w"]
    opened = dppvi.load(path, model)
    # What was added up in 64 bits keeps them; what is computed from it is the program's own.
    assert opened.natural["w"].linear.dtype == np.float64
    assert opened.mean["w"].dtype == opened.sample(jax.random.key(0))["w"].dtype == jnp.float32
    np.testing.assert_allclose(opened.mean["w"], mean, rtol=1e-6)


class TestRefusals:
    @pytest.mark.parametrize(
        ("other", "words"),
        [
            (bounded, "of model 'model' with a latent 'noise' on another support"),
            (wider, r"with a latent 'w' of shape \(3,\), not \(4,\)"),
            (renamed, "with latents noise, shares, w, not v"),
            (lambda Z, y=None: None, "was made with another model or guide.*no argument 'X'"),
            (None, "was made with another model or guide.*model must be a function"),
        ],
    )
    def test_another_model(self, path, other, words):
        with pytest.raises(ValueError, match=words):
            dppvi.load(path, other)

    def test_another_guide(self, path):
        with pytest.raises(ValueError, match="another model or guide than the one given: guide mu"):
            dppvi.load(path, model, "guide")

    def test_a_guide_of_another_family(self, path):
        facts, arrays = _files.read(path, "posterior")
        _files.write(path, "posterior", {**facts, "family": "MeanField(...)"}, arrays)
        with pytest.raises(ValueError, match="was fitted with another guide than the one given"):
            dppvi.load(path, model)

    def test_a_damaged_file(self, path):
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(ValueError, match="is damaged or not a file of numpyro_dppvi"):
            dppvi.load(path, model)

    def test_a_file_without_some_numbers(self, path):
        facts, arrays = _files.read(path, "posterior")
        arrays.pop("natural/w/linear")
        _files.write(path, "posterior", facts, arrays)
        with pytest.raises(ValueError, match="is damaged, because the file lacks array 'natural"):
            dppvi.load(path, model)

    def test_a_newer_file(self, path):
        facts, arrays = _files.read(path, "posterior")
        _files.write(path, "posterior", {**facts, "version": 9}, arrays)
        with pytest.raises(ValueError, match="was written by a newer numpyro_dppvi"):
            dppvi.load(path, model)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file"):
            dppvi.load(tmp_path / "posterior.npz", model)

    def test_a_posterior_that_knows_no_shapes(self, posterior, tmp_path):
        without = Posterior(posterior.natural, posterior.family, posterior.space, model, {}, {})
        with pytest.raises(ValueError, match="must hold the shapes of the data"):
            without.save(tmp_path / "posterior.npz")
