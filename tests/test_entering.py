"""Latents that no record enters: FisherScoring claims nothing of them but by the prior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi._typing import Natural
from numpyro_dppvi.families import FullNormal, MeanField
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.methods import entering

GROUPS, EACH, SD = 4, 300, 0.5


def hierarchy(group, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("groups", GROUPS):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(a[group], SD), obs=y)


def decentred(group, y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal((mu + z)[group], SD), obs=y)


@pytest.mark.parametrize(("model", "names"), [(hierarchy, {"a"}), (decentred, {"mu", "z"})])
def test_what_records_enter_is_read_off_the_model(model, names):
    shapes = {"group": jax.ShapeDtypeStruct((9,), int), "y": jax.ShapeDtypeStruct((9,), float)}
    assert latents.from_model(model, shapes).entering == names


def walks(week, y):
    spread = numpyro.sample("spread", dist.HalfNormal(1))

    def step(before, _):
        level = numpyro.sample("level", dist.Normal(before, spread))
        return level, level

    # Its carry begins in the program's precision, whatever that is where the model is run.
    _, levels = scan(step, jnp.zeros(()), None, length=3)
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(levels[week], 1.0), obs=y)


@pytest.mark.slow
def test_a_model_is_asked_in_the_precision_in_which_it_was_read():
    shapes = {"week": jax.ShapeDtypeStruct((9,), int), "y": jax.ShapeDtypeStruct((9,), float)}
    space = latents.from_model(walks, shapes)
    with jax.enable_x64(True):  # as where factors are added up
        assert space.entering == {"level", "spread"}  # a scan hides what its steps depend on


@pytest.mark.slow
def test_a_factor_of_some_entries_times_q_has_their_marginal_times_that_factor():
    rng = np.random.default_rng(0)
    family, entries = MeanField((("x", FullNormal((5,))),)), np.array([1, 2, 4])

    def normals(size, number=1):
        roots = jnp.asarray(rng.normal(size=(number, size, size)))
        linear = jnp.asarray(rng.normal(size=(number, size)))
        return Natural({"x": NormalNatural(linear, pack(-roots @ roots.mT))})

    q = jax.tree.map(lambda leaf: leaf[0], normals(5))
    precision = -2 * unpack(q["x"].quadratic)
    covariance = np.linalg.inv(precision)
    marginal = jax.jit(lambda q: entering.marginal(family, q, entries))
    found = marginal(q)["x"]
    known = np.linalg.inv(covariance[np.ix_(entries, entries)])
    np.testing.assert_allclose(-2 * unpack(found.quadratic), known, rtol=1e-4, atol=1e-5)
    mean = (covariance @ q["x"].linear)[entries]
    np.testing.assert_allclose(found.linear, known @ mean, rtol=1e-4, atol=1e-5)

    some = normals(3, number=2)
    times = jax.tree.map(
        lambda one, many: one + jnp.sum(many, axis=0), q, entering.whole(family, some, entries)
    )
    apart = jax.tree.map(lambda one, many: one + jnp.sum(many, axis=0), found, some["x"])
    together = marginal(times)["x"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), together, apart)


@pytest.mark.slow
def test_scores_are_taken_of_what_records_enter():
    shapes = {"group": jax.ShapeDtypeStruct((9,), int), "y": jax.ShapeDtypeStruct((9,), float)}
    method, space = dppvi.FisherScoring(), latents.from_model(hierarchy, shapes)
    family = guides.family_of(AutoMultivariateNormal(hierarchy), hierarchy, space)
    memory = method.memory(space, family, family.natural(family.standard()), 2)
    assert memory.loc.shape == (GROUPS,)


@pytest.mark.slow
def test_a_hierarchys_mean_is_as_uncertain_as_its_groups_leave_it():
    """Clients' scores of it are zero; once they were taken for evidence, and it 20 times too sure.

    The posterior is normal, and known: given the groups' means, mu has precision 1/4 + groups.
    """
    rng = np.random.default_rng(1)
    group = np.tile(np.arange(GROUPS), EACH)
    y = (rng.normal(size=GROUPS) + 1)[group] + SD * rng.normal(size=len(group))
    result = dppvi.fit(
        hierarchy,
        None,
        {"group": group, "y": y},
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.FisherScoring(),
        budget=dppvi.PrivacyBudget(10.0, 1e-5),
        num_rounds=6,
        progress_bar=False,
        insecure_noise_seed=0,
    )
    means = np.array([y[group == g].mean() for g in range(GROUPS)])
    variance = 1 / (1 / 4 + GROUPS / (1 + SD**2 / EACH))
    middle = variance * means.sum() / (1 + SD**2 / EACH)
    posterior = result.posterior
    assert float(posterior.stddev["mu"]) == pytest.approx(np.sqrt(variance), rel=0.1)
    assert float(posterior.mean["mu"]) == pytest.approx(middle, abs=0.15)
    np.testing.assert_allclose(posterior.mean["a"], means, atol=0.15)
    assert np.all(posterior.stddev["a"] < 0.15)
