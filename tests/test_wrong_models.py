"""Models, guides and outcomes that look harmless and are not: each is told for its true reason."""

import concurrent.futures
import inspect
import re

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.posterior import predictions
from tests.dry import dry_rounds
from tests.grids import grid

N = 12
generator = np.random.default_rng(3)
X = generator.uniform(-1.0, 1.0, (N, 2)).astype(np.float32)
Z = (X @ [1.0, -1.0] + generator.normal(size=N)).astype(np.float32)


def fit(model, data, **changes):
    arguments = {
        "guide": None,
        "rng_key": jax.random.key(0),
        "clients": 2,
        "budget": dppvi.PrivacyBudget(1.0, 1e-3),
        "num_rounds": 1,
        "insecure_noise_seed": 0,
        "progress_bar": False,
    }
    return dppvi.fit(model, data=data, **{**arguments, **changes})


def refusal(model, data, **changes):
    with pytest.raises(ValueError, match=r"\.$") as caught:
        fit(model, data, **changes)
    return str(caught.value)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))


# ---------------------------------------------------------------------------------------------
# Python code that sees records.


def shown(values):
    return jax.debug.callback(lambda rows: None, values)


def printed(values):
    jax.debug.print("{}", values)


def computed(values):
    struct = jax.ShapeDtypeStruct(values.shape, values.dtype)
    jax.experimental.io_callback(lambda rows: rows, struct, values)


def in_a_loop(values):
    jax.lax.fori_loop(0, 2, lambda i, x: (printed(values), x)[1], 0)


def in_a_checkpoint(values):
    jax.checkpoint(printed)(values)


def in_a_gradient(values):
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (printed(x), (g,))[1])
    return same(values)


@pytest.mark.parametrize(
    "code", [shown, printed, computed, in_a_loop, in_a_checkpoint, in_a_gradient]
)
def test_records_are_not_handed_to_python(code, capfd):
    """They would be printed as they are, or worse: nothing of that is clipped or charged."""

    def model(X, z):
        w = weights()
        with numpyro.plate("records", X.shape[0]):
            mean = (X * w).sum(1)
            if code is in_a_gradient:
                mean = code(mean)
            else:
                code(X)
            numpyro.sample("z", dist.Normal(mean, 1), obs=z)

    words = r"hands records to Python code \((debug|io)_(print|callback)\)"
    assert re.search(words, refusal(model, {"X": X, "z": Z}))
    assert not capfd.readouterr().out.count(str(X[0, 0]))


# ---------------------------------------------------------------------------------------------
# Latents with a value.


def two_latents(z):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    width = numpyro.sample("width", dist.LogNormal(0, 1))
    with numpyro.plate("records", z.shape[0]):
        numpyro.sample("z", dist.Normal(mean, width), obs=z)


@pytest.mark.parametrize("value", [1.5, np.float32(1.5), jnp.array(1.5)])
def test_a_substituted_latent_is_not_fitted(value):
    """It was, and NumPyro would fit it, too: only conditioning fixes it."""
    said = refusal(numpyro.handlers.substitute(two_latents, {"width": value}), {"z": Z})
    assert "'width' has a value by handlers.substitute" in said
    assert "write handlers.condition(model, {'width': ...})" in said
    fixed = numpyro.handlers.condition(two_latents, {"width": value})
    assert [latent.name for latent in latents.from_model(fixed, {"z": Z}).latents] == ["mean"]


# ---------------------------------------------------------------------------------------------
# Threads.


def shifted(number):
    """Models of different latents, so that a trace that saw another's sites would show it."""

    def model(X, y):
        w = numpyro.sample(f"w{number}", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate(f"records{number}", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w + number, 1), obs=y)

    return model


def in_threads(call, number):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(number)))


@pytest.mark.slow
def test_models_that_are_read_in_threads_do_not_see_each_other():
    """NumPyro's stack of handlers is one for all threads: 67 of 100 fits failed."""

    def read(number):
        space = latents.from_model(shifted(number), {"X": X, "y": Z})
        draws = {f"w{number}": jnp.ones((3, 2))}
        rows = {"X": jnp.asarray(X), "y": jnp.asarray(Z)}
        densities = predictions.log_likelihood(shifted(number), draws, rows, {})
        return space.program, np.asarray(densities["y"])

    for number, (program, densities) in enumerate(in_threads(read, 12)):
        alone = read(number)
        assert program == alone[0]
        np.testing.assert_array_equal(densities, alone[1])


@pytest.mark.slow
def test_fits_in_threads_are_what_they_are_alone():
    def everything(number):
        result = fit(shifted(number), {"X": X, "y": Z}, rng_key=jax.random.key(number))
        key = jax.random.key(number)
        predicted = result.posterior.predictive(key, 4, X=X, y=Z)
        exported = result.posterior.to_arviz(key, 4, public_data={"X": X, "y": Z})
        prior = exported["prior"][f"w{number}"].values
        return jax.tree.map(np.asarray, (result.posterior.natural, predicted, prior))

    for number, found in enumerate(in_threads(everything, 8)):
        jax.tree.map(np.testing.assert_array_equal, found, everything(number))


# ---------------------------------------------------------------------------------------------
# Outcomes that a model cannot give.


def observing(distribution, event=False):
    """A regression with an outcome of a distribution given the predictor."""

    def model(X, y):
        fn = distribution(X @ weights())
        if event:
            numpyro.sample("y", fn.to_event(1), obs=y)
            return
        with numpyro.plate("records", X.shape[0]):
            numpyro.sample("y", fn, obs=y)

    return model


def masked(X, y, seen):
    w = weights()
    with numpyro.plate("records", X.shape[0]), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def masked_within(X, y, seen):
    fn = dist.Bernoulli(logits=X @ weights()).mask(seen).to_event(1)
    numpyro.sample("y", fn, obs=y)


def weighted(X, y, weight):
    w = weights()
    with numpyro.plate("records", X.shape[0]), numpyro.handlers.scale(scale=weight):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def of_logarithms(X, y):
    numpyro.sample("y", dist.Normal(X @ weights(), 1), obs=jnp.log(y))


def of_a_count(X, y, n):
    numpyro.sample("y", dist.Binomial(n, logits=X @ weights()), obs=y)


def cut(X, y):
    cutpoints = jnp.array([-1.0, 0.0, 1.0])
    numpyro.sample("y", dist.OrderedLogistic(X @ weights(), cutpoints), obs=y)


BERNOULLI = observing(lambda eta: dist.Bernoulli(logits=eta))
FINE = np.ones(N, np.float32)
OUTSIDE = {
    "minus one": (BERNOULLI, -1.0, "{0, 1}"),
    "two": (BERNOULLI, 2.0, "{0, 1}"),
    "between": (BERNOULLI, 0.3, "{0, 1}"),
    "of an event": (observing(lambda e: dist.Bernoulli(logits=e), event=True), 2.0, "{0, 1}"),
    "half a count": (observing(lambda e: dist.Poisson(jnp.exp(e))), 0.5, "whole numbers from 0"),
    "more than there are": (of_a_count, 3.0, "range given by its parameters"),
    "a class too many": (cut, 4, "whole numbers from 0 to 3"),
    "a negative time": (observing(lambda e: dist.Exponential(jnp.exp(e))), -1.0, "above 0"),
    "no logarithm": (observing(lambda e: dist.LogNormal(e, 1)), 0.0, "above 0"),
    "a share of one": (observing(lambda e: dist.Beta(2.0, 1 + jnp.exp(e))), 1.0, "on its boundary"),
    "truncated": (observing(lambda e: dist.TruncatedNormal(e, 1, low=0.5)), 0.2, "above 0.5"),
    "a minus infinity": (of_logarithms, 0.0, "finite numbers"),
}


def check(model, data):
    """What ``fit`` does with the data of two clients before a round is charged."""
    space = latents.from_model(model, data)
    latents.check_priors(space)
    shards = dppvi.records.stack(
        data, dppvi.records.split_evenly(jax.random.key(0), len(data["y"]), 2)
    )
    latents.check_records(space, shards.records, shards.mask)


def with_one(value, place):
    y = FINE.copy() if isinstance(value, float) else FINE.astype(int)
    if value == 1.0:
        y = y / 2
    y[place] = value
    return y


def columns(model, y):
    more = {"n": np.full(N, 2)} if model is of_a_count else {}
    return {"X": X, "y": y, **more}


@grid("case", OUTSIDE.values(), ids=OUTSIDE, quick=[2, 3, 4, 6, 7])
def test_an_outcome_that_the_model_cannot_give_is_refused_wherever_it_is(case):
    model, value, words = case
    said = set()
    for place in (0, N - 1):
        with pytest.raises(ValueError, match="outcomes in the model's support") as refused:
            check(model, columns(model, with_one(value, place)))
        said.add(str(refused.value))
    (sentence,) = said  # the same wherever the record is
    assert "'y'" in sentence
    assert words in sentence
    assert "client" not in sentence


FITTING = {
    "booleans": (BERNOULLI, {"y": FINE > 0}),
    "masked": (masked, {"y": with_one(2.0, 3), "seen": np.arange(N) != 3}),
    "masked inside": (masked_within, {"y": with_one(2.0, 3), "seen": np.arange(N) != 3}),
    "no weight": (weighted, {"y": with_one(2.0, 3), "weight": np.arange(N) != 3.0}),
    "at the end of an interval": (
        observing(lambda e: dist.TruncatedNormal(e, 1, low=1.0)),
        {"y": FINE},
    ),
    "an angle of a full turn": (observing(lambda e: dist.VonMises(e, 1.0)), {"y": 6.0 * FINE}),
    "all that there are": (of_a_count, {"y": 2 * FINE, "n": np.full(N, 2)}),
    "padding that has no density": (observing(lambda e: dist.LogNormal(e, 1)), {"y": FINE}),
}


@grid("case", FITTING.values(), ids=FITTING, quick=[2, 3, 5])
def test_an_outcome_that_the_model_can_give_is_accepted(case):
    model, more = case
    # An odd number, so that there is padding.
    data = {name: column[:-1] for name, column in {"X": X, **more}.items()}
    check(model, data)


def looking_up(mean):
    """Outcomes about what is found of three groups' effects at the places that records name."""

    def model(g, y=None):
        with numpyro.plate("groups", 3):
            a = numpyro.sample("a", dist.Normal(0, 5))
        with numpyro.plate("n", len(g)):
            numpyro.sample("y", dist.Normal(mean(a, g), 1), obs=y)

    return model


GROUP_OF = jnp.array([0, 0, 1, 2])
GROUPS = np.arange(N) % 3
LOOKUPS = {
    "an entry": (lambda a, g: a[g], GROUPS, "0 to 2"),
    "taken": (jnp.take, GROUPS, "0 to 2"),
    "at what is found elsewhere": (lambda a, g: a[GROUP_OF[g]], np.arange(N) % 4, "0 to 3"),
    "several": (lambda a, g: a[g].sum(-1), np.stack([GROUPS, GROUPS[::-1]], axis=1), "0 to 2"),
    "beside another": (lambda a, g: a[g] * GROUP_OF[g % 4], GROUPS, "0 to 2"),
    "of a scale": (lambda a, g: jnp.exp(a)[g] + 1.0, GROUPS, "0 to 2"),
}


@grid("case", LOOKUPS.values(), ids=LOOKUPS, quick=[0, 2, 3])
@pytest.mark.parametrize("wrong", [lambda g: g + 1, lambda g: g - 1, lambda g: g + 100])
def test_a_place_that_is_not_there_is_refused(case, wrong):
    # JAX takes the nearest one, or counts from the end: groups numbered from 1 would be others.
    mean, g, places = case
    model, y = looking_up(mean), np.zeros(N)
    check(model, {"g": g, "y": y})
    said = refusal(model, {"g": wrong(g), "y": y})
    assert said == (
        "data must hold indices within what the model looks up, got values of 'g' outside of "
        f"{places}: number groups from 0, and leave out records without one."
    )


def test_a_place_that_is_not_there_is_accepted_where_it_is_not_used():
    without = looking_up(lambda a, g: jnp.where(g >= 0, a[g], 0.0))
    check(without, {"g": GROUPS - 1, "y": np.zeros(N)})


def test_the_lookup_that_goes_wrong_is_named():
    def model(g, item, y=None):
        with numpyro.plate("groups", 3):
            a = numpyro.sample("a", dist.Normal(0, 5))
        with numpyro.plate("items", 5):
            b = numpyro.sample("b", dist.Normal(0, 5))
        with numpyro.plate("n", len(g)):
            numpyro.sample("y", dist.Normal(a[g] + b[item], 1), obs=y)

    data = {"g": GROUPS, "item": np.arange(N) % 5, "y": np.zeros(N)}
    check(model, data)
    assert "got values of 'item' outside of 0 to 4:" in refusal(model, data | {"item": GROUPS + 3})
    assert "got values of 'g' outside of 0 to 2:" in refusal(model, data | {"g": GROUPS + 3})


@pytest.mark.parametrize("weight", [np.where(np.arange(N) == 3, -0.5, 1.0), -np.ones(N)])
def test_a_negative_weight_is_refused(weight):
    said = refusal(weighted, {"X": X, "y": FINE, "weight": weight})
    assert said == (
        "weights of 'y' (handlers.scale) must not be negative, got some below 0: write 0 to leave "
        "a record out."
    )
    check(weighted, {"X": X, "y": FINE, "weight": np.abs(weight)})


@pytest.mark.slow
def test_the_same_is_masked_and_not():
    data = {"X": X, "y": with_one(2.0, 3), "seen": np.arange(N) != 4}
    for model in (masked, masked_within):
        with pytest.raises(ValueError, match="outcomes in the model's support"):
            check(model, data)


@grid("method", [dppvi.DPOptimization(), dppvi.GlobalVI()], quick=[0])
def test_nothing_is_charged_for_data_that_is_refused(method, tmp_path):
    data = {"X": X, "y": with_one(2.0, 3)}
    trusted = isinstance(method, dppvi.GlobalVI)
    changes = {"method": method, "trusted_aggregator": trusted, "ledger_file": tmp_path / "ledger"}
    said = refusal(BERNOULLI, data, **changes)
    assert said.startswith("data must hold outcomes")
    with dry_rounds():
        fit(BERNOULLI, {"X": X, "y": FINE}, **changes)  # all of the budget is still there


# ---------------------------------------------------------------------------------------------
# Supports and parameters that latents move.


def truncated_by_a_latent(X, y):
    high = numpyro.sample("high", dist.Normal(0, 1))
    fn = dist.RightTruncatedDistribution(dist.Normal(X @ weights(), 1.0), high)
    numpyro.sample("y", fn, obs=y)


def uniform_up_to_a_latent(X, y):
    high = numpyro.sample("high", dist.HalfNormal(5))
    numpyro.sample("y", dist.Uniform(0.0, high), obs=y)


def negative_scale(X, y):
    spread = numpyro.sample("spread", dist.Normal(0, 10))
    numpyro.sample("y", dist.Normal(X @ weights(), spread), obs=y)


def linear_probability(X, y):
    numpyro.sample("y", dist.Bernoulli(probs=X @ weights()), obs=y)


def linear_rate(X, y):
    numpyro.sample("y", dist.Poisson(X @ weights()), obs=y)


def unordered(X, y):
    cutpoints = numpyro.sample("cutpoints", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.OrderedLogistic(X @ weights(), cutpoints), obs=y)


def negative_scale_of_a_latent(X, y):
    spread = numpyro.sample("spread", dist.Normal(0, 1))
    w = numpyro.sample("w", dist.Normal(0, spread).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


MOVING = {
    truncated_by_a_latent: ["support of the outcome 'y'", "latent 'high'", "public constant"],
    uniform_up_to_a_latent: ["support of the outcome 'y'", "latent 'high'", "public constant"],
    negative_scale: ["scale of 'y'", "numbers above 0", "draws from the priors", "HalfNormal"],
    linear_probability: ["probs of 'y'", "[0, 1]", "dist.Beta", "jax.nn.sigmoid"],
    linear_rate: [
        "rate of 'y' (dist.Poisson) is outside of the numbers above 0",
        "if it is a latent, give it a prior on that range, dist.HalfNormal(1)",
        "say; if it is computed, write jnp.exp(...).",
    ],
    unordered: ["cutpoints of 'y'", "increasing numbers", "OrderedTransform"],
    negative_scale_of_a_latent: ["scale of 'w'", "numbers above 0", "HalfNormal"],
}


@grid("model", MOVING, ids=lambda model: model.__name__, quick=[0, 1])
def test_a_latent_that_leaves_records_without_a_density_is_refused(model):
    said = refusal(model, {"X": X, "y": FINE.astype(int)})
    for word in MOVING[model]:
        assert word in said


@pytest.mark.parametrize("loc", [4.0, 0.5])
def test_a_range_that_is_left_now_and_then_is_no_reason(loc):
    """Three draws in 100 000 are negative, and 31 in 100."""

    def model(X, y):
        spread = numpyro.sample("spread", dist.Normal(loc, 1))
        numpyro.sample("y", dist.Normal(X @ weights(), spread), obs=y)

    if loc == 4.0:
        check(model, {"X": X, "y": Z})
        return
    with pytest.raises(dppvi.UnsupportedModelError, match="scale of 'y'"):
        check(model, {"X": X, "y": Z})


# ---------------------------------------------------------------------------------------------
# Priors that numbers of 32 bits cannot hold, or that noisy steps leave.


def under(prior):
    def model(X, y):
        w = numpyro.sample("w", prior.expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)

    return model


@pytest.mark.parametrize("width", [1e-20, 1e20])
@pytest.mark.parametrize("kind", [dist.Normal, dist.LogNormal])
def test_a_prior_without_a_precision_is_refused_before_anything_is_spent(kind, width, tmp_path):
    changes = {"ledger_file": tmp_path / "ledger"}
    said = refusal(under(kind(0.0, width)), {"X": X, "y": Z}, **changes)
    for word in ("'w'", "float32", "precision is 0 or infinite", "scale it in the model"):
        assert word in said
    assert not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"guide": "full"},
        {"method": dppvi.DPOptimization(optimizer=optax.sgd(0.05))},
        {"method": dppvi.GlobalVI(), "trusted_aggregator": True},
    ],
    ids=["Adam", "full covariance", "another optimiser", "global"],
)
def test_a_prior_that_noisy_steps_leave_is_refused(changes):
    model = under(dist.Normal(0.0, 1e-6))
    if "guide" in changes:
        changes = {"guide": AutoMultivariateNormal(model)}
    said = refusal(model, {"X": X, "y": Z}, **changes)
    for word in ("'w'", "standard deviation of 1e-06", "noisy steps", "scale it in the model"):
        assert word in said


@pytest.mark.slow
def test_without_noise_such_a_prior_is_right():
    """The optimiser settles; its first round alone ends about one of the prior's widths off."""
    changes = {"method": dppvi.NonPrivate(), "budget": None, "num_rounds": 10}
    found = fit(under(dist.Normal(0.0, 1e-6)), {"X": X, "y": Z}, **changes)
    assert np.all(np.abs(found.posterior.mean["w"]) < 0.1e-6)
    np.testing.assert_allclose(found.posterior.stddev["w"], 1e-6, rtol=0.05)


# ---------------------------------------------------------------------------------------------
# Models that do not run on shapes, or on one row.

TABLE = np.array([0.1, 0.2, 0.3], np.float32)
CLOSED = np.array(X)


def looks_up(X, y, g):
    numpyro.sample("y", dist.Normal(X @ weights() + TABLE[g], 1), obs=y)


def looks_up_in_a_list(X, y, g):
    numpyro.sample("y", dist.Normal(X @ weights() + TABLE.tolist()[g], 1), obs=y)


def takes_a_logarithm(X, y):
    numpyro.sample("y", dist.Normal(np.log(2 + X) @ weights(), 1), obs=y)


def stacks_columns(X, y):
    columns = np.column_stack([np.ones(len(X)), X[:, 0]])
    numpyro.sample("y", dist.Normal(columns @ weights(), 1), obs=y)


def exponentiates_a_latent(X, y):
    numpyro.sample("y", dist.Normal(X[:, 0] * np.exp(weights()[0]), 1), obs=y)


def counts_values(X, y, g):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([len(np.unique(g))]).to_event(1))
    numpyro.sample("y", dist.Normal(a[g], 1), obs=y)


def prior_and_likelihood_at_once(X, y):
    """As in Stan: all of the log density is added up by hand."""
    w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
    prior = dist.Normal(0, 1).log_prob(w).sum()
    numpyro.factor("target", prior + dist.Normal(X @ w, 1).log_prob(y).sum())


def twelve_sites(X, y):
    w = weights()
    for row in range(12):
        numpyro.sample(f"y_{row}", dist.Normal(X[row] @ w, 1), obs=y[row])


def pairs_of_rows(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("steps", len(y) - 1):
        numpyro.sample("y", dist.Normal(a * y[:-1], 1), obs=y[1:])


def scans_over_conditioned_rows(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(before, _):
        now = numpyro.sample("y", dist.Normal(a * before, 1))
        return now, now

    with numpyro.handlers.condition(data={"y": y[1:]}):
        scan(step, y[0], jnp.arange(len(y) - 1))


def a_latent_a_row(X, y):
    u = numpyro.sample("u", dist.Normal(0, 1).expand([12]).to_event(1))
    numpyro.sample("y", dist.Normal(X[:, 0] + u, 1).to_event(1), obs=y)


def counts_time(X, y):
    trend = numpyro.sample("trend", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(trend * jnp.arange(12.0), 1), obs=y)


def closes_over_records(X, y):
    numpyro.sample("y", dist.Normal(CLOSED @ weights(), 1), obs=y)


def reshapes(X, y):
    numpyro.sample("y", dist.Normal((X @ weights()).reshape(12), 1), obs=y)


def indexes_with_floats(X, y, g):
    numpyro.sample("y", dist.Normal(weights()[g / 2.0], 1), obs=y)


def by_flags(X, y, g):
    numpyro.sample("y", dist.Normal(weights()[g > 0], 1), obs=y)


def has_a_plate_of_another_size(X, y):
    w = weights()
    with numpyro.plate("records", 7):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def has_a_plate_of_another_size_alone(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("records", 7):
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


def has_indicators_for_an_outcome(X, y):
    numpyro.sample("y", dist.Categorical(logits=X @ weights()[:, None] * jnp.ones(3)), obs=X > 0)


NUMPY = ["calls NumPy", "write jnp instead of np", "jnp.asarray(u)[g]"]
ONE_ROW = ["runs on 12 rows only"]
LOOP = ["a sample statement for each record", "'y_", "numpyro.plate"]
REASONS = {
    looks_up: [*NUMPY, "of looks_up)"],
    looks_up_in_a_list: [*NUMPY, "of looks_up_in_a_list)"],
    takes_a_logarithm: [*NUMPY, "of takes_a_logarithm)"],
    stacks_columns: [*NUMPY, "of stacks_columns)"],
    exponentiates_a_latent: [*NUMPY, "of exponentiates_a_latent)"],
    counts_values: ["depends on the values", "of counts_values)", "'num_groups': 8"],
    prior_and_likelihood_at_once: ["'target'", "counted once", "a factor of its own"],
    twelve_sites: LOOP,
    pairs_of_rows: ["not on a single one", "of pairs_of_rows)", "a whole series one record"],
    scans_over_conditioned_rows: ["not on a single one", "a whole series one record"],
    a_latent_a_row: [*ONE_ROW, "latent 'u' has shape (12,)", "one value per record"],
    counts_time: [*ONE_ROW, "jnp.arange(12)", "an argument in data"],
    closes_over_records: [*ONE_ROW, "array of shape (12, 2)", "not one of its arguments"],
    indexes_with_floats: ["indexes with floats (line", "write g.astype(int)", "in data or in the"],
    by_flags: ["indexes with booleans", "write g.astype(int) for groups"],
    has_a_plate_of_another_size: [
        "'y' has shape (12,)",
        "the plate 'records' of size 7",
        "X.shape[0]",
    ],
    has_a_plate_of_another_size_alone: [
        "values of 'y' have shape (12,)",
        "(7,) of dist.Normal",
        "X.shape[0]",
    ],
    has_indicators_for_an_outcome: [
        "values of 'y' have shape (12, 2), which does not fit the shape (12,) of dist.Categorical",
        "y.argmax(axis=1)",
    ],
    reshapes: [*ONE_ROW, "of reshapes)", "X.shape[0]"],
}


@pytest.mark.parametrize("model", REASONS, ids=lambda model: model.__name__)
def test_a_model_is_refused_for_its_true_reason(model):
    more = {"g": np.arange(N) % 3} if "g" in inspect.signature(model).parameters else {}
    with pytest.raises(dppvi.UnsupportedModelError) as refused:
        fit(model, {"X": X, "y": Z, **more})
    said = str(refused.value)
    for word in REASONS[model]:
        assert word in said
    assert len(said) <= 300
    for words in {id(w): w for w in (NUMPY, ONE_ROW, LOOP)}.values():
        assert (words[0] in said) == (words[0] in REASONS[model])


@pytest.mark.slow
def test_a_public_array_of_numpy_may_be_indexed_by_a_column():
    """As in the radon study: ``uranium[county]``; other uses of it stay NumPy's."""
    county, uranium = np.arange(N) % 3, np.array([0.5, -0.5, 1.0])

    def model(county, y, uranium):
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([int(len(uranium) / 3)]))
        spread = np.maximum(uranium.std(), 1.0)
        numpyro.sample("y", dist.Normal(slope * uranium[county], spread), obs=y)

    data, constants = {"county": county, "y": Z}, {"uranium": uranium}
    space = latents.from_model(model, data, constants)
    theta, row = {"slope": jnp.array([2.0])}, {"county": 2, "y": 0.3}
    row = {name: jnp.asarray(value) for name, value in row.items()}
    expected = dist.Normal(2.0, 1.0).log_prob(0.3)
    np.testing.assert_allclose(space.log_likelihood(theta, row), expected, rtol=1e-6)
    method = dppvi.NonPrivate(1)
    found = fit(model, data, method=method, budget=None, num_rounds=1, model_kwargs=constants)
    drawn = found.posterior.predictive(jax.random.key(0), 2, county=county, y=Z)
    assert drawn["y"].shape == (2, N)
    groups = found.posterior.to_arviz(num_samples=2, public_data=data)
    assert groups.log_likelihood["y"].shape == (1, 2, N)


constraints = dist.constraints
INSTEAD = {
    "real": (constraints.real, "dist.Normal(0, 10)"),
    "positive": (constraints.positive, "dist.HalfNormal(1) or dist.LogNormal(0, 1)"),
    "unit": (constraints.unit_interval, "dist.Beta(1, 1)"),
    "interval": (constraints.interval(-1.0, 2.0), "dist.Uniform(low, high)"),
    "ordered": (constraints.ordered_vector, "OrderedTransform()"),
    "simplex": (constraints.simplex, "dist.Dirichlet(jnp.ones(3))"),
}


@pytest.mark.parametrize("case", INSTEAD.values(), ids=INSTEAD)
def test_a_proper_prior_is_proposed_on_the_improper_ones_support(case):
    support, instead = case
    shapes = ((), (2,)) if support.event_dim else ((2,), ())

    def model(X, y):
        w = numpyro.sample("w", dist.ImproperUniform(support, *shapes))
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)

    said = refusal(model, {"X": X, "y": Z})
    assert "improper" in said
    assert instead in said


# ---------------------------------------------------------------------------------------------
# What is counted, or ignored, and said.


def multiplied(scale):
    def model(X, y):
        w = weights()
        with numpyro.plate("records", X.shape[0]), numpyro.handlers.scale(scale=scale):
            numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)

    return model


def by_column(X, y, weight):
    weighted(X, y, weight)


@pytest.mark.parametrize("scale", [1000 / 12, 0.5, jnp.asarray(2.0)])
def test_a_constant_that_multiplies_a_density_is_told(scale):
    space = latents.from_model(multiplied(scale), {"X": X, "y": Z})
    with pytest.warns(UserWarning, match=r"'y' is multiplied by the constant.*minibatch"):
        latents.warn_of_scales(space)


@pytest.mark.parametrize(
    ("model", "more"), [(multiplied(1.0), {}), (by_column, {"weight": FINE}), (BERNOULLI, {})]
)
def test_a_weight_a_record_or_none_is_no_such_constant(model, more):
    latents.warn_of_scales(latents.from_model(model, {"X": X, "y": FINE, **more}))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (AutoNormal, {"init_loc_fn": init_to_median}, "init_loc_fn of AutoNormal"),
        (AutoNormal, {"init_scale": 1e-3}, "init_scale of AutoNormal"),
        (AutoMultivariateNormal, {"prefix": "q"}, "prefix of AutoMultivariateNormal"),
    ],
)
def test_options_of_a_guide_that_are_ignored_are_told(kind, options, named):
    space = latents.from_model(BERNOULLI, {"X": X, "y": FINE})
    with pytest.warns(UserWarning, match=named):
        guides.family_of(kind(BERNOULLI, **options), BERNOULLI, space)


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal])
def test_a_guide_without_options_is_no_news(kind):
    space = latents.from_model(BERNOULLI, {"X": X, "y": FINE})
    guides.family_of(kind(BERNOULLI), BERNOULLI, space)


# ---------------------------------------------------------------------------------------------
# Columns that are put in order by what other records have. Of columns of whole numbers, and beside
# a binary outcome, all that a record alone shows may be a constant.

BY_OTHERS = {
    "less the mean": lambda age: age - age.mean(),
    "less the mean, tenths": lambda age: (age - age.mean()) / 10,
    "standardised": lambda age: (age - age.mean()) / age.std(),
    "standardised, guarded": lambda age: (age - age.mean()) / (age.std() + 1e-6),
    "over the spread": lambda age: age / age.std(),
    "over the largest": lambda age: age / (age.max() + 1e-6),
    "from the least": lambda age: age - age.min(),
    "ranks": lambda age: jnp.argsort(jnp.argsort(age)) / 3,
}
BY_THEMSELVES = {
    "public numbers": lambda age: (age - 60) / 10,
    "logarithm": jnp.log1p,
    "over forty": lambda age: jnp.where(age > 0.4, age, 0.0),
}


def additive(change, age, outcome):
    """Whether a model of so changed ages is taken; the other columns are a number and a mark."""

    def model(age, smoker, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        at = b[0] + b[1] * change(age) + b[2] * smoker
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", outcome(at), obs=y)

    y = np.zeros(5, bool) if outcome is dist.BernoulliLogits else np.zeros(5, np.float32)
    records = {"age": np.zeros(5, age), "smoker": np.zeros(5, bool), "y": y}
    space = latents.from_model(model, records)
    why = ""
    try:
        latents.check_additive(space, {}, 5)
    except dppvi.UnsupportedModelError as refused:
        why = str(refused)
    assert "not the sum over each" in (why or "not the sum over each"), why
    return not why


@grid(
    ("age", "outcome"),
    [
        (np.int32, dist.BernoulliLogits),
        (np.float32, dist.BernoulliLogits),
        (np.int32, dist.Normal),
        (np.float32, dist.Normal),
    ],
    quick=[],
)
def test_what_a_column_is_among_others_is_refused(age, outcome):
    taken = [name for name, change in BY_OTHERS.items() if additive(change, age, outcome)]
    assert not taken
    refused = [name for name, change in BY_THEMSELVES.items() if not additive(change, age, outcome)]
    assert not refused
