"""NaN in a column of which the model says what a missing entry is."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents
from numpyro_dppvi.latents.missing import may_be_missing
from numpyro_dppvi.records import stack_clients
from tests.grids import grid

N = 40
rng = np.random.default_rng(0)
KNOWN = rng.random(N) < 0.7
FULL = rng.normal(1.0, 1.0, N).astype(np.float32)
X = np.where(KNOWN, FULL, np.nan).astype(np.float32)
Y = (0.8 * FULL + rng.normal(size=N)).astype(np.float32)
B, M = 0.7, 0.4


def latents_of_all():
    b, m = numpyro.sample("b", dist.Normal(0, 1)), numpyro.sample("m", dist.Normal(0, 1))
    return b, m


def asks_for_an_outcome(x, y):
    b, m = latents_of_all()
    numpyro.sample("x", dist.Normal(m, 1).mask(~jnp.isnan(x)), obs=x)
    numpyro.sample("y", dist.Normal(b, 1), obs=y)


def under_a_handler(x, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        with handlers.mask(mask=~jnp.isnan(x)):
            numpyro.sample("x", dist.Normal(m, 1), obs=x)
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def is_told_of_an_outcome(x, known, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        numpyro.sample("x", dist.Normal(m, 1).mask(known), obs=x)
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def asks_for_a_covariate(x, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        full = numpyro.sample("x", dist.Normal(m, 1), obs=x, obs_mask=~jnp.isnan(x))
        numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def is_told_of_a_covariate(x, known, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        full = numpyro.sample("x", dist.Normal(m, 1), obs=x, obs_mask=known)
        numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def learns_its_spread(x, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        full = numpyro.sample("x", dist.Normal(m, jnp.exp(b)), obs=x, obs_mask=~jnp.isnan(x))
        numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def fills_with_a_latent(x, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(b * jnp.where(jnp.isnan(x), m, x), 1), obs=y)


def fills_with_a_number(X, y):
    b, m = latents_of_all()
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(m + b * jnp.nan_to_num(X).sum(-1), 1), obs=y)


def log_density(x, mean, variance=1.0):
    return -((x - mean) ** 2) / (2 * variance) - np.log(2 * np.pi * variance) / 2


OF_Y_ALONE = np.where(KNOWN, log_density(FULL, M), 0) + log_density(Y, B)
# A missing x is integrated out: y ~ Normal(b m, b^2 + 1).
INTEGRATED = np.where(
    KNOWN, log_density(FULL, M) + log_density(Y, B * FULL), log_density(Y, B * M, B**2 + 1)
)
EXACT = {
    asks_for_an_outcome: OF_Y_ALONE,
    under_a_handler: OF_Y_ALONE,
    is_told_of_an_outcome: OF_Y_ALONE,
    asks_for_a_covariate: INTEGRATED,
    is_told_of_a_covariate: INTEGRATED,
    learns_its_spread: np.where(
        KNOWN,
        log_density(FULL, M, np.exp(2 * B)) + log_density(Y, B * FULL),
        log_density(Y, B * M, B**2 * np.exp(2 * B) + 1),
    ),
    fills_with_a_latent: log_density(Y, B * np.where(KNOWN, FULL, M)),
    fills_with_a_number: log_density(Y, M + B * np.where(KNOWN, FULL, 0)),
}


def data_of(model, **changes):
    everything = {"x": X, "X": X[:, None], "known": KNOWN, "y": Y} | changes
    return {name: everything[name] for name in inspect.signature(model).parameters}


def without_privacy(model, data, **arguments):
    method = dppvi.NonPrivate()
    key = jax.random.key(0)
    return dppvi.fit(model, None, data, rng_key=key, method=method, progress_bar=False, **arguments)


@grid("model", EXACT, ids=lambda model: model.__name__, quick=[0, 5])
def test_a_missing_entry_is_what_the_model_says(model):
    data = data_of(model)
    space = latents.from_model(model, data)
    of_one = {name: x[None] for name, x in data.items()}
    latents.check_missing(space, of_one, np.zeros((1, 1), int), ["data"])

    def of_record(theta, row):
        return space.log_likelihood(theta, row)

    theta = {"b": jnp.asarray(B), "m": jnp.asarray(M)}
    density, slopes = jax.jit(jax.vmap(jax.value_and_grad(of_record), (None, 0)))(theta, data)
    np.testing.assert_allclose(density, EXACT[model], rtol=2e-5, atol=2e-5)
    assert all(np.all(np.isfinite(slope)) for slope in slopes.values())


@pytest.mark.slow
def test_the_posterior_is_that_of_the_known_entries():
    """The closed form of a normal mean with a normal prior, over two hospitals."""
    tables = {"A": {"x": X[:15], "y": Y[:15]}, "B": {"x": X[15:], "y": Y[15:]}}
    found = without_privacy(asks_for_an_outcome, tables, num_rounds=3).posterior
    precision = 1 + KNOWN.sum()
    np.testing.assert_allclose(found.mean["m"], FULL[KNOWN].sum() / precision, rtol=1e-3)
    np.testing.assert_allclose(found.stddev["m"], precision**-0.5, rtol=1e-3)


@pytest.mark.slow
def test_nan_and_a_number_in_its_place_are_the_same_fit():
    """To the last bit, in private: nothing is computed from what is missing."""

    def fitted(x):
        budget = dppvi.PrivacyBudget(1.0, 1e-5)
        return dppvi.fit(
            is_told_of_a_covariate,
            None,
            data_of(is_told_of_a_covariate, x=x),
            rng_key=jax.random.key(0),
            budget=budget,
            num_rounds=2,
            method=dppvi.DPOptimization(num_local_steps=2),
            insecure_noise_seed=0,
            progress_bar=False,
        ).posterior

    first, second = fitted(X), fitted(np.where(KNOWN, X, 12.5))
    assert first.mean == second.mean
    assert first.stddev == second.stddev


def compares(x, y):
    """NaN is not above a half, and nobody said that it is below."""
    b, m = latents_of_all()
    numpyro.sample("y", dist.Normal(jnp.where(x > 0.5, m, b), 1), obs=y)


def masks_by_its_value(x, y):
    b, m = latents_of_all()
    numpyro.sample("x", dist.Normal(m, 1).mask(x > 0.5), obs=x)
    numpyro.sample("y", dist.Normal(b, 1), obs=y)


def uses_it_elsewhere(x, known, y):
    b, m = latents_of_all()
    numpyro.sample("x", dist.Normal(m, 1).mask(known), obs=x)
    numpyro.sample("y", dist.Normal(b * x, 1), obs=y)


def rounds_it(x, y):
    b, m = latents_of_all()
    numpyro.sample("y", dist.Normal(jnp.stack([b, m])[x.astype(int)], 1), obs=y)


def computes_first(x, y):
    """The gradient of b * NaN is NaN, whatever is chosen afterwards."""
    b, m = latents_of_all()
    numpyro.sample("y", dist.Normal(jnp.where(jnp.isnan(x), m, b * x), 1), obs=y)


def asks_for_another(x, w, y):
    b, m = latents_of_all()
    full = jnp.where(jnp.isnan(w), m, w)
    numpyro.sample("y", dist.Normal(jnp.where(x > 0.5, full, b), 1), obs=y)


SAYS_NOT = ["data['x']", "finite", "got NaN", "does not say", "obs_mask=~jnp.isnan(x)"]
REFUSED = {
    compares: SAYS_NOT,
    masks_by_its_value: SAYS_NOT,
    uses_it_elsewhere: SAYS_NOT,
    rounds_it: SAYS_NOT,
    asks_for_another: SAYS_NOT,
    computes_first: ["data['x']", "got NaN", "makes NaN", "before anything is computed"],
}


@grid("model", REFUSED, ids=lambda model: model.__name__, quick=[5])
def test_what_the_model_does_not_say_is_refused_with_a_sentence(model):
    with pytest.raises(ValueError, match="must hold finite numbers") as refused:
        without_privacy(model, data_of(model, w=FULL))
    assert all(word in str(refused.value) for word in REFUSED[model])
    assert len(str(refused.value)) <= 300


def by_their_places(x, y):
    """As in NumPyro's example of imputation."""
    b, m = latents_of_all()
    places = np.nonzero(np.isnan(x))[0]
    lost = numpyro.sample("lost", dist.Normal(m, 1).expand([len(places)]).mask(False))
    full = jnp.asarray(x).at[places].set(lost)
    numpyro.sample("x", dist.Normal(m, 1), obs=full)
    numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def by_as_many_places(x, y):
    b, m = latents_of_all()
    lost = numpyro.sample("lost", dist.Normal(m, 1).expand([12]).mask(False))
    full = x.at[jnp.nonzero(jnp.isnan(x), size=12)[0]].set(lost)
    numpyro.sample("x", dist.Normal(m, 1), obs=full)
    numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def by_known_places(x, y):
    b, m = latents_of_all()
    lost = numpyro.sample("lost", dist.Normal(m, 1).expand([3]))
    full = x.at[np.array([1, 5, 7])].set(lost)
    numpyro.sample("x", dist.Normal(m, 1), obs=full)
    numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def by_their_number(x, y):
    """Made-up records without NaN would not show that an entry depends on the ones before it."""
    b, m = latents_of_all()
    lost = numpyro.sample("lost", dist.Normal(m, 1).expand([12]))
    gone = jnp.isnan(x)
    full = jnp.where(gone, lost[jnp.cumsum(gone) - 1], x)
    numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


def by_booleans(x, known, y):
    b, m = latents_of_all()
    lost = numpyro.sample("lost", dist.Normal(m, 1).expand([12]))
    numpyro.sample("y", dist.Normal(b * x.at[~known].set(lost), 1), obs=y)


IMPUTED = {
    by_their_places: ["which entries are NaN", "of by_their_places"],
    by_as_many_places: ["latent 'lost'", "mask(False)", "no prior", "whose is whose"],
    by_known_places: ["the density of 'x'", "not the sum over each"],
    by_their_number: ["the density of 'y'", "not the sum over each"],
    by_booleans: ["indexes with booleans", "jnp.where(keep, a, b)"],
}


@pytest.mark.parametrize("model", IMPUTED, ids=lambda model: model.__name__)
def test_a_latent_for_each_missing_entry_is_refused_and_the_way_is_shown(model):
    with pytest.raises(dppvi.UnsupportedModelError) as refused:
        without_privacy(model, data_of(model))
    words = [*IMPUTED[model], "to impute missing entries of x", "obs_mask=~jnp.isnan(x)"]
    assert all(word in str(refused.value) for word in words)
    assert len(str(refused.value)) <= 300


@pytest.mark.slow
def test_a_refusal_names_the_client():
    data = {"Oulu": {"x": FULL, "y": Y}, "Helsinki": {"x": X, "y": Y}}
    with pytest.raises(ValueError, match=r"Helsinki's data\['x'\] must hold finite numbers"):
        without_privacy(compares, data)


@pytest.mark.slow
def test_what_is_known_and_nan_is_refused():
    with pytest.raises(ValueError, match="outcomes in the model's support, got values of 'x'"):
        without_privacy(is_told_of_an_outcome, data_of(is_told_of_an_outcome, known=KNOWN | True))


def test_infinite_entries_are_refused_as_ever():
    x = X.copy()
    x[3] = np.inf
    with pytest.raises(ValueError, match=r"data\['x'\] must hold finite numbers.*infinite values"):
        without_privacy(asks_for_an_outcome, data_of(asks_for_an_outcome, x=x))


def test_which_columns_may_be_missing_is_a_fact_of_the_model():
    """No record is looked at: with shapes alone it is known."""
    shapes = {name: jax.ShapeDtypeStruct((N,), np.float32) for name in ("x", "w", "y")}
    space = latents.from_model(asks_for_another, shapes)
    assert may_be_missing(space) == (frozenset({"w"}), frozenset({"w"}))


def test_shards_hold_nan_only_where_they_are_told():
    parts = [{"x": X, "y": Y}]
    assert np.isnan(stack_clients(parts, missing=("x",)).records["x"]).any()
    with pytest.raises(ValueError, match=r"client 0's data\['x'\] must hold finite numbers"):
        stack_clients(parts, missing=("y",))
