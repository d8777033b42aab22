"""How a model is read: records on one side, prior on the other, and nothing lost in between."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from numpyro import handlers
from numpyro.infer.util import log_density, log_likelihood, potential_energy
from scipy import stats

from numpyro_dppvi.families import DiagonalNormal
from numpyro_dppvi.latents import from_model

NUM_ROWS, NUM_COLUMNS, NUM_GROUPS = 9, 3, 4


@functools.cache
def data() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(NUM_ROWS, NUM_COLUMNS))
    return {
        "X": X,
        "y": (generator.random(NUM_ROWS) < 0.5).astype(float),
        "z": X.sum(axis=1) + generator.normal(size=NUM_ROWS),
        "Z": generator.normal(size=(NUM_ROWS, NUM_ROWS)),
        "g": generator.integers(0, NUM_GROUPS, NUM_ROWS),
        "seen": generator.random(NUM_ROWS) < 0.6,
    }


# ---------------------------------------------------------------------------------------------
# Models, as NumPyro users write them.


def weights(num_columns=NUM_COLUMNS):
    return numpyro.sample("w", dist.Normal(0, 1).expand([num_columns]).to_event(1))


def logistic(X, y=None):
    w = weights(X.shape[1])
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def subsampled(X, y, subsample_size=None):
    w = weights()
    with numpyro.plate("records", X.shape[0], subsample_size=subsample_size) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=X[rows] @ w), obs=y[rows])


def subsampled_by_statement(X, y, subsample_size=None):
    w = weights()
    with numpyro.plate("records", X.shape[0], subsample_size=subsample_size):
        X, y = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def size_as_a_number(X, y):
    w = weights()
    with numpyro.plate("records", 9):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def size_as_a_number_subsampled(X, y, subsample_size=None):
    w = weights()
    with numpyro.plate("records", 9, subsample_size=subsample_size) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=X[rows] @ w), obs=y[rows])


def as_many_groups_as_rows_as_numbers(z, g):
    with numpyro.plate("groups", 9):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("records", 9):
        numpyro.sample("z", dist.Normal(a[g], 1), obs=z)


def no_plate(X, z):
    w = weights()
    noise = numpyro.sample("noise", dist.Exponential(1))
    numpyro.sample("z", dist.Normal(X @ w, noise).to_event(1), obs=z)


def no_plate_no_event(X, z):
    numpyro.sample("z", dist.Normal(X @ weights(), 1), obs=z)


def several_outcomes(X, y, z):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
    with numpyro.plate("again", X.shape[0]):
        numpyro.sample("z", dist.StudentT(4, X @ w, 1), obs=z)


def positive_latents(X, z):
    width = numpyro.sample("width", dist.LogNormal(0.3, 0.7))
    noise = numpyro.sample("noise", dist.HalfNormal(2))
    numpyro.deterministic("both", width * noise)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(width * X[:, 0], noise), obs=z)


def constrained_latents(X, z):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(NUM_COLUMNS)))
    bound = numpyro.sample("bound", dist.Uniform(-2, 3))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(X @ shares + bound, 1), obs=z)


def grouped(X, y, g, num_groups=NUM_GROUPS):
    w = weights()
    spread = numpyro.sample("spread", dist.HalfCauchy(1))
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(0, spread))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + a[g]), obs=y)


def two_plates(X, Z):
    """As many outcomes as there are rows, so that sizes cannot tell the plates apart."""
    num_outcomes = Z.shape[1]
    with numpyro.plate("outcomes", num_outcomes):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([NUM_COLUMNS]).to_event(1))
    with (
        numpyro.plate("records", X.shape[0], dim=-2),
        numpyro.plate("outcomes", num_outcomes, dim=-1) as k,
    ):
        numpyro.sample("Z", dist.Normal(X @ b[k].T, 1), obs=Z)


def ridge(X, z):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([NUM_COLUMNS]).to_event(1))
    numpyro.factor("ridge", -0.5 * jnp.sum(w**2))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def factor_in_the_plate(X, z):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.factor("z", dist.Normal(X @ w, 1).log_prob(z))


def factor_over_all_rows(X, z):
    w = weights()
    numpyro.factor("z", jnp.sum(dist.Normal(X @ w, 1).log_prob(z)))


def rescaled_prior(X, z):
    with handlers.scale(scale=0.5):
        w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def weighted_rows(X, z):
    w = weights()
    with numpyro.plate("records", X.shape[0]), handlers.scale(scale=0.25):
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def missing_outcomes(X, z, seen):
    w = weights()
    with numpyro.plate("records", X.shape[0]), handlers.mask(mask=seen):
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def conditioned_prior(X, z):
    """An observed site that no record enters: it belongs to the prior."""
    w = weights()
    numpyro.sample("pilot", dist.Normal(w[0], 0.1), obs=jnp.array(0.7))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def batch_normalised(X, z):
    w = weights()
    centred = X - X.mean(axis=0)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("z", dist.Normal(centred @ w, 1), obs=z)


class Case(NamedTuple):
    """A model, its data arguments, its other arguments, and those that make it see all rows."""

    model: Any
    records: str
    model_kwargs: Mapping[str, Any] = MappingProxyType({})
    whole: Mapping[str, Any] = MappingProxyType({})
    pseudo_observations: tuple[str, ...] = ()


CASES = [
    Case(logistic, "X y"),
    Case(functools.partial(grouped, num_groups=NUM_GROUPS + 1), "X y g"),
    Case(subsampled, "X y"),
    Case(subsampled, "X y", {"subsample_size": 4}, {"subsample_size": None}),
    Case(subsampled_by_statement, "X y", {"subsample_size": 4}, {"subsample_size": None}),
    Case(size_as_a_number, "X y"),
    Case(size_as_a_number_subsampled, "X y", {"subsample_size": 4}, {"subsample_size": None}),
    Case(as_many_groups_as_rows_as_numbers, "z g"),
    Case(no_plate, "X z"),
    Case(no_plate_no_event, "X z"),
    Case(several_outcomes, "X y z"),
    Case(positive_latents, "X z"),
    Case(constrained_latents, "X z"),
    Case(grouped, "X y g"),
    Case(grouped, "X y g", {"num_groups": NUM_ROWS}),
    Case(two_plates, "X Z"),
    Case(ridge, "X z", pseudo_observations=("ridge",)),
    Case(factor_in_the_plate, "X z"),
    Case(factor_over_all_rows, "X z"),
    Case(rescaled_prior, "X z"),
    Case(weighted_rows, "X z"),
    Case(missing_outcomes, "X z seen"),
    Case(conditioned_prior, "X z", pseudo_observations=("pilot",)),
]


def records_of(case: Case) -> dict[str, jax.Array]:
    return {name: jnp.asarray(data()[name]) for name in case.records.split()}


def named(case: Case) -> str:
    name = getattr(case.model, "__name__", type(case.model).__name__)
    return "-".join([name, *(f"{k}={v}" for k, v in case.model_kwargs.items())])


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def some_base(space, seed=1):
    generator = np.random.default_rng(seed)
    return {
        latent.name: jnp.asarray(generator.normal(size=latent.base_shape))
        for latent in space.latents
    }


def evaluate(space, base, records):
    """Log likelihood of each row, and log prior, compiled as one."""

    @jax.jit
    def both(base, records):
        theta = space.constrain(base)
        rows = jax.vmap(space.log_likelihood, (None, 0))(theta, records)
        return rows, space.log_prior(base, frozenset(base))

    return both(base, records)


# ---------------------------------------------------------------------------------------------
# The split adds up to the model.


# Each is compiled by itself, which takes seconds. These differ most in how they are read.
QUICK = (logistic, no_plate, constrained_latents, grouped, missing_outcomes, conditioned_prior)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=named(case), marks=[] if case.model in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_prior_and_one_row_likelihoods_add_up_to_the_model(case):
    records = records_of(case)
    space = from_model(case.model, records, case.model_kwargs)
    base = some_base(space)
    rows, prior = evaluate(space, base, records)
    assert rows.shape == (NUM_ROWS,)
    arguments = {**records, **case.model_kwargs, **case.whole}
    # NumPyro's own, Jacobians of all bijections included.
    expected = -jax.jit(lambda base: potential_energy(case.model, (), arguments, base))(base)
    np.testing.assert_allclose(jnp.sum(rows) + prior, expected, rtol=1e-9, atol=1e-9)
    assert tuple(space.pseudo_observations) == case.pseudo_observations


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("model", [logistic, size_as_a_number])
def test_the_likelihood_of_a_row_is_numpyros(model):
    records = records_of(Case(model, "X y"))
    space = from_model(model, records)
    base = some_base(space)
    rows, _ = evaluate(space, base, records)
    expected = log_likelihood(model, {"w": base["w"][None]}, **records)["y"][0]
    np.testing.assert_allclose(rows, expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_prior_is_exact_for_any_choice_of_latents():
    records = records_of(Case(positive_latents, "X z"))
    space = from_model(positive_latents, records)
    base = {"width": jnp.array(0.4), "noise": jnp.array(-0.2)}
    log_prior = {
        "width": stats.norm.logpdf(0.4, 0.3, 0.7),
        # The density of noise = exp(u), times its Jacobian exp(u).
        "noise": stats.halfnorm.logpdf(np.exp(-0.2), scale=2) - 0.2,
    }
    for names in ({"width"}, {"noise"}, {"width", "noise"}, set()):
        expected = sum(log_prior[name] for name in names)
        actual = space.log_prior(base, frozenset(names))
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_global_factor_is_counted_once_and_on_the_side_of_the_prior():
    records = records_of(Case(ridge, "X z"))
    space = from_model(ridge, records)
    base = some_base(space)
    rows, prior = evaluate(space, base, records)
    w = base["w"]
    np.testing.assert_allclose(prior, stats.norm.logpdf(w, 0, 10).sum() - 0.5 * w @ w, rtol=1e-9)
    np.testing.assert_allclose(rows, stats.norm.logpdf(records["z"], records["X"] @ w), rtol=1e-9)
    # It is part of the prior even where no latent's own prior is asked for.
    np.testing.assert_allclose(space.log_prior(base, frozenset()), -0.5 * w @ w, rtol=1e-9)
    assert space.pseudo_observations == {"ridge": frozenset({"w"})}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_masked_row_counts_for_nothing():
    records = records_of(Case(missing_outcomes, "X z seen"))
    space = from_model(missing_outcomes, records)
    rows, _ = evaluate(space, some_base(space), records)
    np.testing.assert_array_equal(rows != 0, records["seen"])


# ---------------------------------------------------------------------------------------------
# What is known of a latent.


def latents_of(model, records, model_kwargs=None):
    case = Case(model, records)
    space = from_model(model, records_of(case), model_kwargs)
    return space, {latent.name: latent for latent in space.latents}


@pytest.mark.slow
def test_latents_have_their_shapes_and_their_plates_names():
    space, latents = latents_of(grouped, "X y g")
    assert [latent.name for latent in space.latents] == ["w", "spread", "a"]
    assert (latents["w"].shape, latents["w"].dims) == ((NUM_COLUMNS,), (None,))
    assert (latents["spread"].shape, latents["spread"].dims) == ((), ())
    assert (latents["a"].shape, latents["a"].dims) == ((NUM_GROUPS,), ("groups",))


def test_dims_take_event_dimensions_and_several_plates_into_account():
    def model(X, z):
        with numpyro.plate("rows", 2, dim=-2), numpyro.plate("columns", 4, dim=-1):
            b = numpyro.sample("b", dist.Normal(0, 1).expand([2, 4, NUM_COLUMNS]).to_event(1))
        numpyro.sample("z", dist.Normal(X @ b[0, 0], 1), obs=z)

    _, latents = latents_of(model, "X z")
    assert latents["b"].shape == (2, 4, NUM_COLUMNS)
    assert latents["b"].dims == ("rows", "columns", None)


@pytest.mark.slow
def test_an_unconstrained_latent_may_have_another_shape():
    _, latents = latents_of(constrained_latents, "X z")
    assert latents["shares"].shape == (NUM_COLUMNS,)
    assert latents["shares"].base_shape == (NUM_COLUMNS - 1,)
    assert latents["shares"].dims == (None,)


@pytest.mark.slow
def test_values_are_constrained_to_their_supports_whatever_their_leading_axes():
    space, _ = latents_of(constrained_latents, "X z")
    theta = space.constrain({"shares": jnp.ones((5, 2, 2)), "bound": jnp.full((5, 2), 30.0)})
    assert theta["shares"].shape == (5, 2, NUM_COLUMNS)
    np.testing.assert_allclose(jnp.sum(theta["shares"], axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(theta["bound"], 3, rtol=1e-5)


@pytest.mark.slow
def test_parents_are_the_latents_that_a_prior_depends_on():
    space, _ = latents_of(grouped, "X y g")
    assert space.parents == {"w": frozenset(), "spread": frozenset(), "a": frozenset({"spread"})}


@pytest.mark.slow
def test_a_prior_is_read_off_where_it_is_normal_in_the_base_space():
    _, latents = latents_of(positive_latents, "X z")
    base = latents["width"].base_prior
    assert isinstance(base, dist.Normal)
    np.testing.assert_allclose([base.loc, base.scale], [0.3, 0.7], rtol=1e-6)
    assert latents["noise"].base_prior is None  # the logarithm of a half-normal is not normal

    _, latents = latents_of(logistic, "X y")
    base = latents["w"].base_prior
    assert base.batch_shape == (NUM_COLUMNS,)
    np.testing.assert_array_equal(base.mean, np.zeros(NUM_COLUMNS))
    np.testing.assert_array_equal(base.variance, np.ones(NUM_COLUMNS))


def vector_of_log_normals(X, z):
    w = numpyro.sample("w", dist.LogNormal(jnp.arange(3.0), 0.5).to_event(1))
    numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def test_a_prior_is_read_off_entry_by_entry():
    _, latents = latents_of(vector_of_log_normals, "X z")
    base = latents["w"].base_prior
    np.testing.assert_allclose(base.mean, [0, 1, 2])
    np.testing.assert_allclose(base.variance, np.full(3, 0.25))


def child_of_a_constant(X, z, loc=2.0):
    """What looks like a hierarchy but has constants for parents."""
    w = numpyro.sample("w", dist.Normal(jnp.full(NUM_COLUMNS, loc), 0.5).to_event(1))
    numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def child_of_a_latent(X, z):
    m = numpyro.sample("m", dist.Normal(0, 1))
    w = numpyro.sample("w", dist.Normal(m, 1).expand([NUM_COLUMNS]).to_event(1))
    numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def masked_prior(X, z):
    with handlers.mask(mask=jnp.asarray(False)):
        w = weights()
    numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


def other_prior(X, z):
    w = numpyro.sample("w", dist.Laplace(0, 1).expand([NUM_COLUMNS]).to_event(1))
    numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)


@pytest.mark.parametrize("model", [child_of_a_latent, rescaled_prior])
def test_a_prior_is_not_read_off_where_it_is_something_else(model):
    _, latents = latents_of(model, "X z")
    assert latents["w"].prior is None
    assert latents["w"].base_prior is None


@pytest.mark.parametrize("model", [masked_prior, other_prior])
def test_a_prior_that_is_not_normal_is_not_taken_for_one(model):
    _, latents = latents_of(model, "X z")
    assert not isinstance(latents["w"].base_prior, dist.Normal)
    family = DiagonalNormal(latents["w"].base_shape)
    assert family.of_distribution(latents["w"].base_prior) is None


def test_a_prior_with_public_parameters_is_read_off():
    _, latents = latents_of(child_of_a_constant, "X z", {"loc": 7.0})
    np.testing.assert_allclose(latents["w"].base_prior.mean, np.full(NUM_COLUMNS, 7.0))


# ---------------------------------------------------------------------------------------------
# Privacy: rows cannot mix, values are not looked at, nothing leaks into a caller's handlers.


@pytest.mark.slow
def test_a_model_that_mixes_rows_cannot_carry_one_row_into_the_others_gradients():
    records = records_of(Case(batch_normalised, "X z"))
    changed = {**records, "X": records["X"].at[4].set(1000.0)}
    space = from_model(batch_normalised, records)

    @jax.jit
    def gradients(records):
        def of_row(row):
            return jax.grad(lambda w: space.log_likelihood({"w": w}, row))(jnp.ones(NUM_COLUMNS))

        return jax.vmap(of_row)(records)

    others = np.arange(NUM_ROWS) != 4
    np.testing.assert_array_equal(gradients(records)[others], gradients(changed)[others])

    # The model, run on all rows at once, does mix them: what is tested above is not idle.
    def batched(records):
        return log_likelihood(batch_normalised, {"w": jnp.ones((1, NUM_COLUMNS))}, **records)["z"]

    assert np.all(batched(records)[0, others] != batched(changed)[0, others])


class Untouchable(jax.ShapeDtypeStruct):
    """Knows its shape and dtype; whoever asks for a value fails the test."""

    def __array__(self, *args, **kwargs):
        raise AssertionError("a value was asked for")

    __jax_array__ = __getitem__ = __iter__ = __float__ = __array__


def test_structure_is_read_without_touching_a_value():
    def fresh(X, y, g):  # read for the first time here
        grouped(X, y, g)

    records = records_of(Case(fresh, "X y g"))
    structs = {name: Untouchable(value.shape, value.dtype) for name, value in records.items()}
    assert from_model(fresh, structs) == from_model(fresh, records)


@pytest.mark.parametrize("order", ["values first", "shapes first"])
def test_what_is_read_does_not_depend_on_values(order):
    def model(X, y):
        logistic(X, y)

    records = records_of(Case(model, "X y"))
    other = {name: value * 0 for name, value in records.items()}
    first, second = (records, other) if order == "values first" else (other, records)
    assert from_model(model, first) == from_model(model, second)


@pytest.mark.slow
def test_a_callers_handlers_do_not_see_the_model():
    records = records_of(Case(logistic, "X y"))

    def fresh(X, y):
        logistic(X, y)

    with handlers.trace() as trace, handlers.seed(rng_seed=0):
        space = from_model(fresh, records)
        row = {name: value[0] for name, value in records.items()}
        space.log_likelihood({"w": jnp.zeros(NUM_COLUMNS)}, row)
    assert trace == {}


# ---------------------------------------------------------------------------------------------
# Models that compute the same are equal, so that fits share a compiled program.


def shifted(X, y, shift=1.0, unused=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w + shift, 1), obs=y)


def shifted_again(X, y, shift=1.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w + shift, 1), obs=y)


def shifted_scaled(X, y, shift=1.0):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w + shift, 1), obs=y)


SAME = {
    "model": shifted,
    "records": {"X": jnp.ones((NUM_ROWS, 3)), "y": jnp.ones(NUM_ROWS)},
    "model_kwargs": {},
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model": shifted_again},
        {"model_kwargs": {"unused": 3}},
        {"model_kwargs": {"shift": 1.0}},
        {"records": {"X": jnp.ones((NUM_ROWS + 1, 3)), "y": jnp.zeros(NUM_ROWS + 1)}},
    ],
    ids=["nothing", "typed again", "an unused argument", "its default", "more rows"],
)
def test_what_computes_the_same_is_equal(change):
    first, second = from_model(**SAME), from_model(**{**SAME, **change})
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.slow
def test_of_equal_ones_only_the_first_is_split_at_its_predictor():
    runs = []

    def model(X, y):
        runs.append(1)
        shifted(X, y, shift=5.0)

    first, second = from_model(model, SAME["records"]), from_model(model, SAME["records"])
    row = {"X": np.ones(3, np.float32), "y": np.float32(4)}

    def density(space):
        found = space.predictor
        return found.log_likelihood(found.value({"w": np.ones(3, np.float32)}, row), row)

    # Found while something else is traced, and of use outside of it.
    jax.eval_shape(lambda: density(first))
    before = len(runs)
    np.testing.assert_allclose(density(second), scipy.stats.norm.logpdf(4, 3 + 5), rtol=1e-6)
    assert len(runs) == before
    other = from_model(shifted, SAME["records"], {"shift": 7.0})
    np.testing.assert_allclose(density(other), scipy.stats.norm.logpdf(4, 3 + 7), rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"model": shifted_scaled},
        {"model_kwargs": {"shift": 2.0}},
        {"model_kwargs": {"shift": jnp.ones(1)}},
        {"records": {"X": jnp.ones((NUM_ROWS, 4)), "y": jnp.ones(NUM_ROWS)}},
        {"records": {"X": jnp.ones((NUM_ROWS, 3), int), "y": jnp.ones(NUM_ROWS)}},
    ],
    ids=["another prior", "a constant", "an array", "more columns", "other dtype"],
)
def test_what_computes_something_else_is_not(change):
    assert from_model(**SAME) != from_model(**{**SAME, **change})


@pytest.mark.slow
def test_arrays_that_a_model_closes_over_are_compared_by_value():
    tables = {"now": np.arange(3.0)}

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ (w + jnp.asarray(tables["now"])), 1), obs=y)

    first = from_model(model, SAME["records"])
    assert from_model(model, SAME["records"]) == first
    tables["now"] = np.arange(3.0)
    assert from_model(model, SAME["records"]) == first
    tables["now"] = np.array([0.0, 1.0, 7.0])
    assert from_model(model, SAME["records"]) != first


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_precision_is_part_of_what_a_space_is(dtype):
    records = {name: data()[name].astype(dtype) for name in ("X", "z")}
    narrow = from_model(positive_latents, records)
    with jax.enable_x64(True):
        wide = from_model(positive_latents, records)
        assert wide != narrow
        assert wide.latents[0].base_prior.mean.dtype == jnp.float64
    assert from_model(positive_latents, records) == narrow


@pytest.mark.slow
def test_arguments_that_cannot_be_hashed_work():
    def model(X, z, prior_loc):
        w = numpyro.sample("w", dist.Normal(prior_loc, 1).to_event(1))
        numpyro.sample("z", dist.Normal(X @ w, 1), obs=z)

    for loc in (0.0, 5.0):
        _, latents = latents_of(model, "X z", {"prior_loc": jnp.full(NUM_COLUMNS, loc)})
        np.testing.assert_allclose(latents["w"].base_prior.mean, np.full(NUM_COLUMNS, loc))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_density_of_a_constrained_model_needs_no_jacobian():
    """Likelihoods take values in the supports, which is what `log_density` takes, too."""
    records = records_of(Case(positive_latents, "X z"))
    space = from_model(positive_latents, records)
    theta = {"width": jnp.array(1.5), "noise": jnp.array(0.8)}
    rows = jax.vmap(space.log_likelihood, (None, 0))(theta, records)
    full, _ = log_density(positive_latents, (), records, theta)
    prior = stats.lognorm.logpdf(1.5, 0.7, scale=np.exp(0.3)) + stats.halfnorm.logpdf(0.8, scale=2)
    np.testing.assert_allclose(jnp.sum(rows) + prior, full, rtol=1e-9)
