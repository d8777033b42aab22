"""Discrete latents of a record, marked for enumeration, are summed out, record by record."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents
from numpyro_dppvi.latents.summation import MAX_TERMS
from numpyro_dppvi.latents.trace import _StepByStep
from tests.grids import grid

MARK = {"enumerate": "parallel"}
N = 6
rng = np.random.default_rng(0)
Z = rng.normal(size=N).astype(np.float32)
COUNTS = np.array([0, 3, 0, 1, 2, 0])
SEEN = np.array([True, False, True, True, False, True])
HISTORIES = rng.integers(0, 2, (N, 4))
HISTORIES[:, 0] = 1


def mixture(y):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("classes", 3):
        centre = numpyro.sample("centre", dist.Normal(0, 2))
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample("kind", dist.Categorical(shares), infer=MARK)
        numpyro.sample("y", dist.Normal(centre[kind], 1), obs=y)


def mixture_of_a_stated_size(y):
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", N):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3), infer=MARK)
        numpyro.sample("y", dist.Normal(centre[kind], 1), obs=y)


def minibatches_of_a_mixture(y):
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0], subsample_size=3) as rows:
        kind = numpyro.sample("kind", dist.Bernoulli(0.3), infer=MARK)
        numpyro.sample("y", dist.Normal(centre[kind], 1), obs=y[rows])


def extra_zeros(y):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("records", y.shape[0]):
        empty = numpyro.sample("empty", dist.Bernoulli(gate), infer=MARK)
        with handlers.mask(mask=empty == 0):
            numpyro.sample("y", dist.Poisson(rate), obs=y)
        numpyro.factor("never above zero", jnp.where((empty == 1) & (y > 0), -jnp.inf, 0.0))


def abundance(y):
    """The true number is at least what was counted: a support that depends on it."""
    seen = numpyro.sample("seen", dist.Beta(2, 2))
    with numpyro.plate("sites", y.shape[0]):
        number = numpyro.sample("number", dist.Categorical(jnp.arange(1.0, 7) / 21), infer=MARK)
        numpyro.sample("y", dist.Binomial(number, seen), obs=y)


def missing_category(y, g, known):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    effect = numpyro.sample("effect", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        group = numpyro.sample("group", dist.Categorical(shares), obs=g, obs_mask=known, infer=MARK)
        numpyro.sample("y", dist.Normal(effect[group], 1), obs=y)


def several_judges(votes):
    """Annotation: a true class an item, and a confusion matrix a judge."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("judges", 4, dim=-1), numpyro.plate("classes", 2, dim=-2):
        right = numpyro.sample("right", dist.Beta(2, 1))
    with numpyro.plate("items", votes.shape[0], dim=-2):
        truth = numpyro.sample("truth", dist.Categorical(shares), infer=MARK)
        with numpyro.plate("judges", 4, dim=-1):
            says = jnp.where(truth == 1, right[1], 1 - right[0])
            numpyro.sample("votes", dist.Bernoulli(says), obs=votes)


def two_classes(y):
    """Two summed latents that meet in one outcome, and one that meets none of them."""
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        first = numpyro.sample("first", dist.Bernoulli(0.3), infer=MARK)
        second = numpyro.sample("second", dist.Bernoulli(0.2 + 0.5 * first), infer=MARK)
        third = numpyro.sample("third", dist.Bernoulli(0.4), infer=MARK)
        numpyro.sample("y", dist.Normal(centre[first] * (1 + second), 1), obs=y)
        numpyro.sample("again", dist.Normal(centre[third], 2), obs=y)


def a_vector_of_classes(y):
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0], dim=-1), numpyro.plate("parts", 3, dim=-2):
        on = numpyro.sample("on", dist.Bernoulli(0.3), infer=MARK)
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(shift * on.sum(axis=0), 1), obs=y)


def chain(histories, steps=4):
    """A hidden Markov model along a record's own steps."""
    stay = numpyro.sample("stay", dist.Beta(2, 1))
    right = numpyro.sample("right", dist.Beta(2, 1))
    state = 0
    with numpyro.plate("records", histories.shape[0]):
        for t in range(steps):
            up = jnp.where(state == 1, stay, 1 - stay)
            state = numpyro.sample(f"state_{t}", dist.Bernoulli(up), infer=MARK)
            seen = jnp.where(state == 1, right, 1 - right)
            numpyro.sample(f"seen_{t}", dist.Bernoulli(seen), obs=histories[:, t])


def chain_by_scan(histories):
    """Capture and recapture: alive or dead along a record's own steps, in NumPyro's ``scan``."""
    lives = numpyro.sample("lives", dist.Beta(2, 1))
    caught = numpyro.sample("caught", dist.Beta(1, 1))

    def step(alive, now):
        with numpyro.plate("animals", histories.shape[0]):
            alive = numpyro.sample("alive", dist.Bernoulli(alive * lives), infer=MARK)
            numpyro.sample("now", dist.Bernoulli(alive * caught), obs=now)
        return alive, None

    scan(step, jnp.ones(histories.shape[0], int), histories.T[1:])


CASES = {
    mixture: {"y": Z},
    mixture_of_a_stated_size: {"y": Z},
    minibatches_of_a_mixture: {"y": Z},
    extra_zeros: {"y": COUNTS},
    abundance: {"y": COUNTS},
    missing_category: {"y": Z, "g": np.where(SEEN, COUNTS % 3, 0), "known": SEEN},
    several_judges: {"votes": HISTORIES},
    two_classes: {"y": Z},
    a_vector_of_classes: {"y": Z},
    chain: {"histories": HISTORIES},
    chain_by_scan: {"histories": HISTORIES},
}
# One of each kind: a mixture, two latents that meet, a loop along a record, a missing column.
FIRST = (two_classes, missing_category)
named = functools.partial(pytest.mark.parametrize, "model", ids=lambda model: model.__name__)


def some_theta(space):
    unit = {lt.name: jnp.full(lt.base_shape, 0.2) for lt in space.latents}
    shifted = {name: x + 0.3 * jnp.arange(x.size).reshape(x.shape) for name, x in unit.items()}
    return space.constrain(shifted)


def of_scans(z):
    """States under the names that NumPyro has for them: those of a scan's steps in one array."""
    steps = {}
    for name, value in z.items():
        steps.setdefault(name.partition("[")[0], []).append(value)
    return {n: jnp.stack(v) if f"{n}[0]" in z else v[0] for n, v in steps.items()}


def by_brute_force(model, space, theta, row):
    """The sum over all joint values of NumPyro's own log density of one row, less the priors'."""
    rows = {name: jnp.asarray(value)[None] for name, value in row.items()}
    summed = space.summation.summed
    tables = [one.values for one in summed]
    joint = list(itertools.product(*tables))
    z = {one.name: np.stack([v[k] for v in joint]) for k, one in enumerate(summed)}
    whole = jax.vmap(lambda z: log_density(model, (), rows, {**theta, **of_scans(z)})[0])(z)
    prior = space.log_density(theta, frozenset(theta))
    return jax.nn.logsumexp(whole) - prior


@named(
    [
        m if m in FIRST else pytest.param(m, marks=pytest.mark.slow)
        for m in CASES
        if m not in (minibatches_of_a_mixture, missing_category, abundance)
    ]
)
def test_it_is_numpyros_density_summed_over_all_joint_values(model):
    records = CASES[model]
    space = latents.from_model(model, records)
    theta = some_theta(space)
    found = jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, records)
    # A plate of stated size is told to hold one row; elsewhere one row is passed.
    if model is mixture_of_a_stated_size:
        expected = dist.MixtureSameFamily(
            dist.Categorical(jnp.array([0.7, 0.3])), dist.Normal(theta["centre"], 1)
        ).log_prob(Z)
    else:
        numbers = jax.jit(lambda row: by_brute_force(model, space, theta, row))
        expected = [numbers({k: x[i] for k, x in records.items()}) for i in range(N)]
    np.testing.assert_allclose(found, np.asarray(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_counts_above_the_number_are_impossible():
    """The closed form: sum_n p(n) Binomial(y | n, p) over n of at least y."""
    space = latents.from_model(abundance, CASES[abundance])
    theta = {"seen": jnp.asarray(0.4)}
    found = jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, CASES[abundance])
    n, shares = np.arange(6), np.arange(1.0, 7) / 21
    chosen = [[_choose(k, y) * 0.4**y * 0.6 ** (k - y) if k >= y else 0 for k in n] for y in COUNTS]
    np.testing.assert_allclose(found, np.log(np.asarray(chosen) @ shares), rtol=1e-5)


def test_a_count_above_all_numbers_is_refused():
    space = latents.from_model(abundance, CASES[abundance])
    counts = jnp.asarray(COUNTS)[None]
    latents.check_records(space, {"y": counts}, jnp.ones((1, N), bool))
    with pytest.raises(ValueError, match="outcomes in the model's support, got values of 'y'"):
        latents.check_records(space, {"y": counts.at[0, 2].set(6)}, jnp.ones((1, N), bool))


def _choose(n, k):
    return float(np.prod([(n - i) / (i + 1) for i in range(k)]))


@pytest.mark.slow
def test_a_category_that_was_seen_is_not_summed_over():
    records = CASES[missing_category]
    space = latents.from_model(missing_category, records)
    theta = some_theta(space)
    found = jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, records)
    terms = dist.Normal(theta["effect"], 1).log_prob(Z[:, None]) + jnp.log(theta["shares"])
    of_seen = np.take_along_axis(np.asarray(terms), records["g"][:, None], axis=1)[:, 0]
    expected = np.where(SEEN, of_seen, jax.nn.logsumexp(terms, axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# A missing column: the spread of its outcome over its slope, in the column's standard deviations.
@grid("ratio", [0.2, 1.0, 20.0], quick=[2])
def test_a_normal_column_that_is_missing_is_integrated_out(ratio):
    """The closed form: y is normal around a + b mean, with variance (b spread)^2 + noise^2."""

    def model(x, known, y):
        a, b = numpyro.sample("line", dist.Normal(0, 1).expand([2]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        with numpyro.plate("records", y.shape[0]):
            full = numpyro.sample("x", dist.Normal(2.0, 3.0), obs=x, obs_mask=known)
            numpyro.sample("y", dist.Normal(a + b * full, noise), obs=y)

    records = {"x": np.where(SEEN, Z, 0), "known": SEEN, "y": np.r_[2 * Z[:5], -9.0]}
    space = latents.from_model(model, records)
    latents.check_additive(space, {}, N)
    b = 0.7
    theta = {"line": jnp.array([0.3, b]), "noise": jnp.asarray(ratio * b * 3.0)}

    def alone(y):
        return dist.Normal(0.3 + b * 2.0, jnp.hypot(b * 3.0, theta["noise"])).log_prob(y)

    def both(x, y):
        density = dist.Normal(2.0, 3.0).log_prob(x)
        return density + dist.Normal(0.3 + b * x, theta["noise"]).log_prob(y)

    found = jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, records)
    expected = np.where(SEEN, both(records["x"], records["y"]), alone(records["y"]))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def two_missing_columns(x, w, known, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        first = numpyro.sample("x", dist.Normal(0.0, 0.5), obs=x, obs_mask=known)
        second = numpyro.sample("w", dist.Normal(first, 0.5), obs=w, obs_mask=known)
        numpyro.sample("y", dist.Normal(b * second, 1), obs=y)


def test_a_column_that_is_a_function_of_a_normal_one_is_integrated_out():
    """Log-normal and seen through a logistic curve: a fine grid of 20 000 points in NumPy."""

    def model(x, known, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            full = numpyro.sample("x", dist.LogNormal(0.2, 0.4), obs=x, obs_mask=known)
            numpyro.sample("y", dist.Bernoulli(logits=b * full - 1), obs=y)

    records = {"x": np.ones(N), "known": np.zeros(N, bool), "y": COUNTS > 0}
    space = latents.from_model(model, records)
    row = {name: jnp.asarray(column[1]) for name, column in records.items()}
    found = jax.jit(space.log_likelihood)({"b": jnp.asarray(1.5)}, row)
    u = np.linspace(-8, 8, 20_000)
    chance = 1 / (1 + np.exp(1 - 1.5 * np.exp(0.2 + 0.4 * u)))
    np.testing.assert_allclose(found, np.log(np.average(chance, weights=np.exp(-(u**2) / 2))), 1e-4)


@pytest.mark.slow
def test_a_minibatch_counts_each_record_once():
    space = latents.from_model(minibatches_of_a_mixture, {"y": Z})
    whole = latents.from_model(mixture_of_a_stated_size, {"y": Z})
    theta = some_theta(space)
    for row in ({"y": Z[0]}, {"y": Z[1]}):
        both = [jax.jit(one.log_likelihood)(theta, row) for one in (space, whole)]
        np.testing.assert_allclose(*both, rtol=1e-6)


@pytest.mark.slow
@named(CASES)
def test_it_is_read_adds_up_and_has_gradients(model):
    records = CASES[model]
    space = latents.from_model(model, records)
    assert space.summation.summed
    latents.check_additive(space, {}, N)
    latents.check_priors(space)
    of_one_client = {name: jnp.asarray(column)[None] for name, column in records.items()}
    latents.check_records(space, of_one_client, jnp.ones((1, N), bool))
    base = {lt.name: jnp.full(lt.base_shape, 0.3) for lt in space.latents}

    def log_likelihood(base, row):
        return space.log_likelihood(space.constrain(base), row)

    found = jax.jit(jax.vmap(jax.grad(log_likelihood), (None, 0)))(base, records)
    for leaf in jax.tree.leaves(found):
        assert leaf.shape[0] == N
        assert np.all(np.isfinite(leaf))
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_what_is_impossible_has_a_gradient_over_many_records_too():
    """NumPyro's clamped probabilities make a shared one NaN from about three records on."""
    data = {"histories": jnp.asarray(np.random.default_rng(2).integers(0, 2, (30, 4)))}
    space = latents.from_model(chain_by_scan, data)
    theta = {"lives": jnp.asarray(0.6), "caught": jnp.asarray(0.4)}

    @jax.jit
    def total(theta):
        return jax.vmap(space.log_likelihood, (None, 0))(theta, data).sum()

    slopes = jax.jit(jax.grad(total))(theta)
    by_row = jax.jit(jax.vmap(jax.grad(space.log_likelihood), (None, 0)))(theta, data)
    for name, slope in slopes.items():
        np.testing.assert_allclose(slope, by_row[name].sum(), rtol=1e-4)
        up, down = (total({**theta, name: theta[name] + h}) for h in (1e-2, -1e-2))
        np.testing.assert_allclose(slope, (up - down) / 2e-2, rtol=2e-2)


def chain_of_twelve(histories):
    chain(histories, steps=12)


def the_same_by_scan(histories):
    stay = numpyro.sample("stay", dist.Beta(2, 1))
    right = numpyro.sample("right", dist.Beta(2, 1))

    def step(state, now):
        up = jnp.where(state == 1, stay, 1 - stay)
        with numpyro.plate("records", histories.shape[0]):
            state = numpyro.sample("state", dist.Bernoulli(up), infer=MARK)
            seen = jnp.where(state == 1, right, 1 - right)
            numpyro.sample("seen", dist.Bernoulli(seen), obs=now)
        return state, None

    scan(step, jnp.zeros(histories.shape[0], int), histories.T)


def mark_all(fn):
    """What NumPyro's ``config_enumerate`` is, which needs another package."""

    def of_discrete(site):
        free = site["type"] == "sample" and not site["is_observed"]
        return MARK if free and site["fn"].has_enumerate_support else {}

    return handlers.infer_config(fn, of_discrete)


@mark_all
def marked_from_outside(histories):
    stay = numpyro.sample("stay", dist.Beta(2, 1))
    right = numpyro.sample("right", dist.Beta(2, 1))

    def step(state, now):
        up = jnp.where(state == 1, stay, 1 - stay)
        with numpyro.plate("records", histories.shape[0]):
            state = numpyro.sample("state", dist.Bernoulli(up))
            seen = jnp.where(state == 1, right, 1 - right)
            numpyro.sample("seen", dist.Bernoulli(seen), obs=now)
        return state, None

    scan(step, jnp.zeros(histories.shape[0], int), histories.T)


@pytest.mark.slow
@named([chain_of_twelve, the_same_by_scan, marked_from_outside])
def test_a_long_chain_is_summed_step_by_step(model):
    """Too many paths for one table; four entries a step, against the forward algorithm."""
    steps = 12
    assert 2**steps > MAX_TERMS
    histories = np.random.default_rng(1).integers(0, 2, (2, steps))
    space = latents.from_model(model, {"histories": histories})
    assert space.summation.num_terms == 4
    theta = {"stay": jnp.asarray(0.8), "right": jnp.asarray(0.7)}
    found = jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, {"histories": histories})
    moves = np.array([[0.8, 0.2], [0.2, 0.8]])
    for history, value in zip(histories, found, strict=True):
        forward, total = np.array([1.0, 0.0]), 0.0
        for seen in history:
            forward = (forward @ moves) * np.where(np.arange(2) == seen, 0.7, 0.3)
            total, forward = total + np.log(forward.sum()), forward / forward.sum()
        np.testing.assert_allclose(value, total, rtol=1e-5)


def test_a_scan_goes_as_numpyro_has_it_where_it_is_taken_apart():
    """Backwards, over a mapping, with outputs and a last carry: the same numbers."""

    def step(before, now):
        with numpyro.plate("records", 2):
            kind = numpyro.sample("kind", dist.Bernoulli(0.5), infer=MARK, obs=now["kind"])
        if not all_observed:
            numpyro.sample("other", dist.Bernoulli(0.5), infer=MARK)
        return before + kind * now["x"], {"sum": before, "kind": kind}

    def model(x):
        return scan(step, jnp.zeros(2), {"x": x, "kind": (x > 0).astype(int)}, reverse=True)

    x = np.random.default_rng(3).normal(size=(4, 2))
    found = []
    for all_observed in (True, False):  # the second is taken apart
        stepwise = handlers.seed(_StepByStep(model, frozenset(), 2), rng_seed=0)
        found.append(stepwise(x))
        names = handlers.trace(stepwise).get_trace(x)
        assert ("other[3]" in names) != all_observed
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *found)


# ---------------------------------------------------------------------------------------------
# What comes out.


@pytest.mark.slow
def test_a_fit_of_the_marked_model_is_that_of_the_summed_one():
    """The same program but for rounding: the mixture written with NumPyro's own sum."""

    def summed(y):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
        with numpyro.plate("classes", 3):
            centre = numpyro.sample("centre", dist.Normal(0, 2))
        with numpyro.plate("records", y.shape[0]):
            mixed = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(centre, 1))
            numpyro.sample("y", mixed, obs=y)

    data = {"y": rng.normal(size=40) + 4 * (rng.random(40) < 0.4)}
    common = {"rng_key": jax.random.key(0), "clients": 2, "num_rounds": 3, "progress_bar": False}
    method = dppvi.NonPrivate(20, optax.adam(0.05))
    first, second = (
        dppvi.fit(model, None, data, method=method, **common).posterior
        for model in (mixture, summed)
    )
    assert first.names == second.names
    for name in first.names:
        np.testing.assert_allclose(first.mean[name], second.mean[name], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(first.stddev[name], second.stddev[name], rtol=1e-3)


@pytest.mark.slow
def test_it_can_be_fitted_in_private_and_used():
    data = {"y": np.r_[np.zeros(30), np.full(30, 4.0)] + rng.normal(size=60)}
    result = dppvi.fit(
        mixture,
        None,
        data,
        rng_key=jax.random.key(0),
        clients=2,
        num_rounds=1,
        budget=dppvi.PrivacyBudget(1.0, 1e-3),
        progress_bar=False,
    )
    assert set(result.posterior.names) == {"shares", "centre"}
    drawn = result.posterior.predictive(jax.random.key(1), 5, y=data["y"])
    assert drawn["y"].shape == drawn["kind"].shape == (5, 60)
    groups = result.posterior.to_arviz(num_samples=7, public_data=data)
    found = np.asarray(groups.log_likelihood["y"])[0]
    theta = {n: jnp.asarray(groups.posterior[n].values)[0, 2] for n in result.posterior.names}
    expected = jax.vmap(result.posterior.space.log_likelihood, (None, 0))(theta, data)
    np.testing.assert_allclose(found[2], expected, rtol=1e-4)


@pytest.mark.slow
def test_it_is_compared_with_nuts_on_the_summed_density():
    data = {"histories": np.random.default_rng(2).integers(0, 2, (30, 4))}
    common = {"rng_key": jax.random.key(0), "clients": 1}
    method = dppvi.NonPrivate(50)
    result = dppvi.fit(chain_by_scan, None, data, method=method, progress_bar=False, **common)
    found = dppvi.compare(result, data, num_warmup=200, num_samples=300, max_clients=0, **common)
    for name in result.posterior.names:
        mine, nuts = (found.mean[kind][name] for kind in list(found.mean)[:2])
        assert abs(mine - nuts) < 0.5 * found.stddev["nonprivate_pooled_nuts"][name]


@pytest.mark.slow
def test_outcomes_are_drawn_with_the_class():
    """Not given one class: the draws' variance is that of the mixture, within 6 standard errors."""
    space = latents.from_model(mixture, {"y": Z})
    theta = {"shares": jnp.array([0.5, 0.5, 0.0]), "centre": jnp.array([-10.0, 10.0, 0.0])}
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(lambda key: space.draw(theta, {"y": Z[0]}, key)["y"]))(keys)
    share = np.mean(np.asarray(drawn) > 0)
    assert abs(share - 0.5) < 6 * 0.5 / np.sqrt(4000)
    assert np.all(np.abs(np.abs(drawn) - 10) < 6)


# ---------------------------------------------------------------------------------------------
# What is refused.


def unmarked(y):
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(centre[kind], 1), obs=y)


def endless(y):
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("records", y.shape[0]):
        number = numpyro.sample("number", dist.Poisson(rate), infer=MARK)
        numpyro.sample("y", dist.Normal(number, 1), obs=y)


def ends_at_the_data(y):
    share = numpyro.sample("share", dist.Beta(1, 1))
    with numpyro.plate("records", y.shape[0]):
        number = numpyro.sample("number", dist.Binomial(jnp.abs(y).astype(int), share), infer=MARK)
        numpyro.sample("y", dist.Normal(number, 1), obs=y)


def too_many(y):
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0], dim=-1), numpyro.plate("parts", 11, dim=-2):
        on = numpyro.sample("on", dist.Bernoulli(0.3), infer=MARK)
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(shift * on.sum(axis=0), 1), obs=y)


def weighted(y):
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3), infer=MARK)
        with handlers.scale(scale=2.0):
            numpyro.sample("y", dist.Normal(centre[kind], 1), obs=y)


def mixes_classes(y):
    centre = numpyro.sample("centre", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3), infer=MARK)
        numpyro.sample("y", dist.Normal(centre[kind] + kind.mean(), 1), obs=y)


def a_prior_of_the_class(y):
    with numpyro.plate("records", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3), infer=MARK)
    centre = numpyro.sample("centre", dist.Normal(kind.sum(), 2))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(centre, 1), obs=y)


def skewed_column(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        full = numpyro.sample("x", dist.Gamma(2, 1), obs=x, obs_mask=x > 0)
        numpyro.sample("y", dist.Normal(b * full, 1), obs=y)


REFUSED = {
    two_missing_columns: [
        "w_unobserved",
        "4,096 joint values",
        "1024 at most",
        "one normal column",
    ],
    skewed_column: ["outcome 'y'", "'x_unobserved'", "normal distribution"],
    unmarked: ["latent 'kind'", "records", "infer={'enumerate': 'parallel'}", "summed out"],
    endless: ["latent 'number'", "one finite range of integers"],
    ends_at_the_data: ["latent 'number'", "one finite range of integers"],
    too_many: ["(on)", "2,048 joint values", f"{MAX_TERMS} at most", "logsumexp"],
    weighted: ["handlers.scale", "'y'", "'kind'", "leave it out"],
    mixes_classes: ["'y'", "not the sum over each"],
    a_prior_of_the_class: ["prior of latent 'centre'", "depends on the data"],
}


@named(REFUSED)
def test_it_is_refused_with_a_sentence(model):
    names = inspect.signature(model).parameters
    data = {name: SEEN if name == "known" else Z for name in names}
    with pytest.raises(dppvi.UnsupportedModelError) as refused:
        latents.check_additive(latents.from_model(model, data), {}, N)
    said = str(refused.value)
    for word in REFUSED[model]:
        assert word in said
    assert len(said) <= 300
