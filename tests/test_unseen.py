"""Directions of the latents that no record sees: factors claim nothing along them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.latents.unseen import unseen_directions
from numpyro_dppvi.methods import entering
from numpyro_dppvi.methods.white import coordinates, seen
from tests import gallery

# Base values of all latents, and one record.
BASE = {"a": (), "b": (2,), "u": (3,), "v": (4,), "w": (3, 2)}
ROW = {"g": ((), int), "h": ((), int), "x": ((2,), float), "y": ((), float)}


def density(mean, row):
    return -jnp.sum((row["y"] - mean) ** 2)


def _log_softmax(logits, row):
    return jax.nn.log_softmax(logits)[row["g"]]


def _with_zero(logits):
    return jnp.concatenate([logits, jnp.zeros(1)])


PREDICTORS = {
    "an intercept and groups": (1, lambda t, r: t["a"] + t["u"][r["g"]]),
    "a slice for intercept": (1, lambda t, r: t["b"][0] + t["u"][r["g"]] + r["x"][0] * t["b"][1]),
    "crossed groups": (2, lambda t, r: t["a"] + t["u"][r["g"]] - t["v"][r["h"]]),
    "groups alone": (1, lambda t, r: t["u"][r["g"]] - t["v"][r["h"]]),
    "players": (1, lambda t, r: t["v"][r["g"]] - t["v"][r["h"]]),
    "in other units": (1, lambda t, r: t["a"] / 10 + 0.5 * t["u"][r["g"]]),
    "added first": (1, lambda t, r: (t["a"] + t["u"])[r["g"]]),
    "about their mean": (1, lambda t, r: (t["u"] - jnp.mean(t["u"]))[r["g"]]),
    "two numbers a group": (2, lambda t, r: t["w"][r["g"]] - t["b"]),
    "taken": (1, lambda t, r: t["a"] + jnp.take(t["u"], r["g"])),
    "once and for all": (1, lambda t, r: t["a"] + t["u"][1]),
    "slopes of all and of each": (1, lambda t, r: (t["a"] + t["u"][r["g"]]) * r["x"][0]),
    "slopes by two names": (1, lambda t, r: t["a"] * r["x"][0] + t["u"][r["g"]] * r["x"][0]),
    "columns repeated": (0, lambda t, r: r["x"] @ t["b"]),
    "a sum of two weights": (1, lambda t, r: r["x"][0] * (t["b"][0] + t["b"][1])),
    "one column twice": (1, lambda t, r: jnp.sum(r["x"][0] * t["b"])),
    "logits of classes": (2, lambda t, r: _log_softmax(r["x"] @ t["w"].T, r)),
    "logits about a mean": (1, lambda t, r: _log_softmax(t["u"] - t["a"], r)),
    "logits beside one of zero": (0, lambda t, r: _log_softmax(_with_zero(t["b"]), r)),
    "the largest": (1, lambda t, r: jnp.max(t["u"]) - t["a"]),
    "a product beside": (1, lambda t, r: t["a"] + t["u"][r["g"]] + jnp.exp(t["b"][0]) * t["b"][1]),
    # No record tells less than all here.
    "groups and nothing else": (0, lambda t, r: t["u"][r["g"]]),
    "a slope of each group": (0, lambda t, r: t["a"] + t["u"][r["g"]] * r["x"][0]),
    "learnt units": (0, lambda t, r: t["a"] + jnp.exp(t["b"][0]) * t["u"][r["g"]]),
    "a place for strangers": (
        0,
        lambda t, r: t["a"] + t["u"].at[r["g"]].get(mode="fill", fill_value=0.0),
    ),
    "a condition": (0, lambda t, r: t["a"] + jnp.where(r["y"] > 0, t["u"][r["g"]], 0)),
    "rounded": (0, lambda t, r: t["a"].astype(int) + t["u"][r["g"]]),
    "a cell a pair": (0, lambda t, r: t["a"] + t["w"][r["g"], r["h"]] * t["u"][r["g"]]),
    "nearly the same": (0, lambda t, r: t["a"] + t["u"][r["g"]] + 1e-3 * r["x"][0] * t["a"]),
}


@pytest.mark.parametrize("name", PREDICTORS)
def test_directions_are_found_along_which_no_density_changes(name):
    number, predictor = PREDICTORS[name]

    def log_likelihood(base, row):
        return density(predictor(base, row), row)

    base = {name: jax.ShapeDtypeStruct(shape, float) for name, shape in BASE.items()}
    row = {name: jax.ShapeDtypeStruct(*each) for name, each in ROW.items()}
    basis = unseen_directions(log_likelihood, base, row)
    assert basis.shape == (1 + 2 + 3 + 4 + 6, number)
    _stays(log_likelihood, basis, BASE, 3)


def _stays(log_likelihood, basis, shapes, most, rows=None):
    """Checks a density far along each direction, for records of all groups."""
    rng = np.random.default_rng(0)
    names = sorted(shapes)
    sizes = [int(np.prod(shapes[name])) for name in names]

    def of(flat, row):
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        base = {n: jnp.asarray(p.reshape(shapes[n])) for n, p in zip(names, parts, strict=True)}
        return log_likelihood(base, row)

    for turn in range(12):
        row = {
            "g": jnp.asarray(turn % most),
            "h": jnp.asarray(turn % 4),
            "x": jnp.asarray(rng.normal(size=2)),
            "y": jnp.asarray(rng.normal()),
        }
        row = row if rows is None else rows(turn)
        flat = rng.normal(size=sum(sizes))
        here = of(flat, row)
        for direction in basis.T:
            np.testing.assert_allclose(of(flat + 3 * direction, row), here, rtol=2e-4, atol=2e-4)


# Those of the gallery in which there is a direction, and others like them in which there is none.
KNOWN = {
    "seeds": 1,
    "item response": 1,
    "item response, slopes": 1,
    "football": 1,
    "tournaments": 1,
    "election": 2,
    "differences in differences": 1,
    "metabolism of species": 1,
    "radon, intercepts": 0,
    "rats": 0,
    "surgery": 0,
    "choice of party": 0,
    "spline": 0,
}


@pytest.mark.parametrize("name", KNOWN)
def test_models_of_the_gallery_do_not_change_along_theirs(name):
    space, record = gallery.read(name)
    assert space.unseen.shape[1] == KNOWN[name]

    def log_likelihood(base, row):
        return space.log_likelihood(space.constrain(base), row)

    base = {name: struct.shape for name, struct in space.continuous.items()}
    _stays(log_likelihood, space.unseen, base, 3, lambda turn: record(7 * turn))


def grouped(group, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("groups", 6):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(a + effect[group], 1.0), obs=y)


SHAPES = {"group": jax.ShapeDtypeStruct((9,), int), "y": jax.ShapeDtypeStruct((9,), float)}


def test_they_are_in_the_order_of_the_guide():
    space = latents.from_model(grouped, SHAPES)
    family = guides.family_of(AutoMultivariateNormal(grouped), grouped, space)
    (direction,) = entering.unseen(space, family).T
    intercept = int(np.flatnonzero(np.sign(direction) == np.sign(direction).sum() * -1 / 5)[0])
    effects = np.delete(direction, intercept)
    np.testing.assert_allclose(effects, -direction[intercept])
    entries = entering.of(space, family)
    ((name, normal),) = family.members
    places = family.by_latent({name: np.arange(normal.size)[None]})
    assert entries[intercept] == np.ravel(places["a"])[0]


def test_what_is_left_of_an_information_matrix_tells_nothing_along_them():
    rng = np.random.default_rng(0)
    root, unseen = rng.normal(size=(5, 5)), jnp.asarray(rng.normal(size=(5, 2)))
    shape = jnp.asarray(root @ root.T + np.eye(5))
    axes = coordinates(shape)
    left = axes.outside(seen(axes, unseen))
    np.testing.assert_allclose(left @ unseen, 0, atol=1e-4)
    # And it is the shape itself for whatever has no part in them, by the shape's own measure.
    other = np.linalg.svd(np.asarray(unseen.T @ shape))[2][2:].T
    np.testing.assert_allclose(left @ other, shape @ other, atol=1e-4)


def exact_width(group, y):
    """The standard deviation of ``a``: normal given the spread, of which a grid is taken."""
    sizes = np.bincount(group)
    means, spreads = np.bincount(group, y) / sizes, np.linspace(1e-3, 6, 4000)
    weights = 1 / (spreads[:, None] ** 2 + 1 / sizes)  # of groups' means, given the spread
    precision = 1 + weights.sum(axis=1)
    middle = weights @ means / precision
    log_density = np.sum(np.log(weights), axis=1) - np.log(precision) - weights @ means**2
    log_density = (log_density + precision * middle**2 - spreads**2) / 2
    chance = np.exp(log_density - log_density.max())
    chance /= chance.sum()
    return np.sqrt(chance @ (1 / precision + (middle - chance @ middle) ** 2))


@pytest.mark.slow  # tests/test_lookups.py has another one
@pytest.mark.parametrize("epsilon", [1.0, 3.0, np.inf])
def test_an_intercept_beside_groups_is_as_uncertain_as_the_prior_leaves_it(epsilon):
    """Noise hides that no record tells it from the groups' mean: it was three times too sure."""
    rng, number = np.random.default_rng(0), 5000
    group = rng.integers(0, 6, number)
    y = (0.5 + rng.normal(size=6)[group] + rng.normal(size=number)).astype(np.float32)
    found = dppvi.fit(
        grouped,
        AutoMultivariateNormal(grouped),
        {"group": group, "y": y},
        clients=5,
        rng_key=jax.random.key(0),
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(epsilon, 1e-5),
        insecure_noise_seed=0,
        progress_bar=False,
    )
    draws = found.posterior.sample(jax.random.key(1), (4000,))
    assert 0.85 < float(np.std(draws["a"])) / exact_width(group, y) < 1.15
