"""Bad input gets one clear sentence: what was wrong, what was received, what to write instead."""

import copy
import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import autoguide
from numpyro.infer.reparam import LocScaleReparam

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds

NUM_ROWS = 12
# A record that must never be shown. It reads the same in float32 and as an integer.
CANARY = 7654321.0

BUDGET = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
generator = np.random.default_rng(0)
X = generator.normal(size=(NUM_ROWS, 2))
X[3, 1] = CANARY
y = generator.integers(0, 2, NUM_ROWS).astype(float)
y[5] = CANARY
GROUPS = generator.integers(0, 3, NUM_ROWS)
WHOLE = {"X": X, "y": y}


def with_value(value: float) -> np.ndarray:
    changed = X.copy()
    changed[0, 0] = value
    return changed


def weights() -> jax.Array:
    return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))


def linear(X, y=None):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def assert_refuses(exception: type[Exception], words: list[str], call, *args, **kwargs) -> None:
    """Holds a refusal to what a reader needs: short, plain, complete, and without records."""
    with pytest.raises(exception) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert caught.type is exception  # ours, and no other kind of it
    assert 40 < len(message) <= 300
    assert "\n" not in message
    assert "Traceback" not in message
    assert "object at 0x" not in message
    assert message.endswith(".")
    assert message.count(". ") <= 1  # one sentence, or two
    assert ": " in message  # what to write instead comes after a colon
    assert str(int(CANARY))[:6] not in message
    assert not getattr(caught.value, "__notes__", [])
    # A cause is printed, too: only the line of the user's model that is to blame may be one.
    cause = caught.value.__cause__
    assert cause is None or str(int(CANARY))[:6] not in str(cause)


def fit(**changes: Any) -> dppvi.run.FitResult:
    """A fit that would be fine without the changes."""
    arguments = {
        "model": linear,
        "guide": None,
        "data": WHOLE,
        "rng_key": jax.random.key(0),
        "clients": 3,
        "budget": BUDGET,
        "num_rounds": 2,
        "progress_bar": False,
    }
    return dppvi.fit(**{**arguments, **changes})


@pytest.fixture(scope="module")
def result() -> dppvi.run.FitResult:
    with dry_rounds():
        return fit(num_rounds=1)


class Bad(NamedTuple):
    """Arguments of ``fit`` that differ from a good call, and words of the answer."""

    words: list[str]
    changes: dict[str, Any]
    exception: type[Exception] = ValueError


def refused(table: dict[str, Bad]):
    return pytest.mark.parametrize("bad", table.values(), ids=table.keys())


PER_CLIENT = {"clients": None}

DATA = {
    "NaN": Bad(
        ["data['X']", "finite", "got NaN", "drop or impute", "jnp.isnan"],
        {"data": {"X": with_value(math.nan), "y": y}},
    ),
    "infinite": Bad(
        ["data['X']", "finite", "infinite values", "drop or impute"],
        {"data": {"X": with_value(math.inf), "y": y}},
    ),
    "NaN at one client": Bad(
        ["client 1's data['X']", "finite"],
        {"data": [WHOLE, {"X": with_value(math.nan), "y": y}], **PER_CLIENT},
    ),
    "unequal lengths": Bad(
        ["unequal lengths", "'X': 12", "'y': 5", "same number of rows"],
        {"data": {"X": X, "y": y[:5]}},
    ),
    "unequal lengths at one client": Bad(
        ["client 0's data", "'X': 12", "'y': 5"], {"data": [{"X": X, "y": y[:5]}], **PER_CLIENT}
    ),
    "no rows": Bad(["data", "at least one record", "empty"], {"data": {"X": X[:0], "y": y[:0]}}),
    "an empty client": Bad(
        ["client 1's data", "at least one record", "leave such a client out"],
        {"data": [WHOLE, {"X": X[:0], "y": y[:0]}], **PER_CLIENT},
    ),
    "no arrays": Bad(["data", "empty mapping", '{"X": X, "y": y}'], {"data": {}}),
    "no clients": Bad(["data", "empty list", 'data={"X": X'], {"data": []}, TypeError),
    "nothing": Bad(["data", "got None", 'data={"X": X'], {"data": None}, TypeError),
    "an array": Bad(["data", "float64 of shape (12, 2)"], {"data": X}, TypeError),
    "a tuple of arrays": Bad(
        ["data", "got a tuple that holds an object of type ndarray"], {"data": (X, y)}, TypeError
    ),
    "text": Bad(
        ["data['y']", "numbers", "<U1", "encode"], {"data": {"X": X, "y": np.full(12, "a")}}
    ),
    "objects": Bad(
        ["data['y']", "numbers", "object"], {"data": {"X": X, "y": np.array([None] * 12)}}
    ),
    "ragged": Bad(
        ["data['X']", "one shape", "ragged list", "pad"],
        {"data": {"X": [[CANARY, 2.0], [3.0]], "y": [0, 1]}},
    ),
    "a constant": Bad(
        ["data['y']", "one row per record", "model_kwargs"], {"data": {"X": X, "y": CANARY}}
    ),
    "integers too large": Bad(
        ["data['y']", "int32", "floats"],
        {"data": {"X": X, "y": np.full(12, int(CANARY) * 10**6)}},
    ),
    "other names at a client": Bad(
        ["same names", "['X'] from client 1", "['X', 'y'] from client 0"],
        {"data": [WHOLE, {"X": X}], **PER_CLIENT},
    ),
    "other columns at a client": Bad(
        ["'X'", "(1,) from client 1", "(2,) from client 0"],
        {"data": [WHOLE, {"X": X[:, :1], "y": y}], **PER_CLIENT},
    ),
}


class TestData:
    @refused(DATA)
    def test_is_refused_with_a_sentence(self, bad):
        assert_refuses(bad.exception, bad.words, fit, **bad.changes)


CLIENTS = {
    "more than rows": Bad(
        ["clients", "13 clients", "12 rows", "clients=12 or less"], {"clients": 13}
    ),
    "none": Bad(["clients", "at least 1", "got 0", "clients=10"], {"clients": 0}),
    "minus one": Bad(["clients", "at least 1", "got -1"], {"clients": -1}),
    "a fraction": Bad(["clients", "whole number", "got 2.5"], {"clients": 2.5}),
    "sizes": Bad(["clients", "whole number", "got a list"], {"clients": [4, 8]}),
    "labels": Bad(
        ["clients", "whole number", "float64 of shape (12,)", "from_labels"], {"clients": y}
    ),
    "clients' data": Bad(
        ["clients", "got a dict", "data={...}", "leave clients= out"],
        {"clients": {"Turku": WHOLE, "Oulu": WHOLE}},
    ),
    "called like arguments": Bad(
        ["data must not call clients as the model calls its arguments", "got 'X' for both"],
        {"data": {"X": WHOLE, "y": WHOLE}, **PER_CLIENT},
    ),
    "data is per client": Bad(
        ["one mapping per client", "clients", "got 2", "leave it out"],
        {"data": [WHOLE, WHOLE], "clients": 2},
    ),
    "a partition of other rows": Bad(
        ["row 12", "12 rows"], {"clients": dppvi.Partition((np.arange(13),))}
    ),
}


class TestClients:
    @refused(CLIENTS)
    def test_is_refused_with_a_sentence(self, bad):
        assert_refuses(bad.exception, bad.words, fit, **bad.changes)


RUN = {
    "no rng_key": Bad(
        ["rng_key", "got None", "rng_key=jax.random.key(0)"], {"rng_key": None}, TypeError
    ),
    "an integer for a key": Bad(
        ["rng_key", "got 0", "rng_key=jax.random.key(0)"], {"rng_key": 0}, TypeError
    ),
    "an array for a key": Bad(
        ["rng_key", "float32 of shape (3,)"], {"rng_key": jnp.ones(3)}, TypeError
    ),
    "several keys": Bad(
        ["rng_key", "single key", "shape (2,)", "keys[0]"],
        {"rng_key": jax.random.split(jax.random.key(0))},
    ),
    "no budget": Bad(
        ["budget", "got None", "PrivacyBudget(epsilon=1.0", "NonPrivate()"], {"budget": None}
    ),
    "a budget without privacy": Bad(
        ["NonPrivate()", "budget", "DPOptimization()", "leave budget out"],
        {"method": dppvi.NonPrivate()},
    ),
    "too few budgets": Bad(
        ["2 budgets", "3 clients", "PrivacyBudget("], {"budget": [BUDGET, BUDGET]}
    ),
    "a number for a budget": Bad(
        ["budget", "got 1.0", "PrivacyBudget("], {"budget": 1.0}, TypeError
    ),
    "a pair for a budget": Bad(
        ["budget", "a tuple of numbers", "PrivacyBudget("], {"budget": (1.0, 1e-5)}, TypeError
    ),
    "a budget's arguments for a budget": Bad(
        ["budget", "own arguments (epsilon, delta)", "=PrivacyBudget(epsilon=1.0, delta=1e-5)"],
        {"budget": {"epsilon": 1, "delta": 1e-5}},
        TypeError,
    ),
    "numbers by name for a budget": Bad(
        ["budget", "a mapping that holds 1.0", "PrivacyBudget("],
        {"budget": {"Turku": 1.0}},
        TypeError,
    ),
    "epsilon beside the budget": Bad(
        ["epsilon must be a part of the budget", "budget=PrivacyBudget("],
        {"epsilon": 1.0},
        TypeError,
    ),
    "rounds as others call them": Bad(
        ["fit has no argument 'rounds'", "write num_rounds= instead"], {"rounds": 20}, TypeError
    ),
    "a misspelt argument": Bad(
        ["fit has no argument 'num_round'", "write num_rounds="], {"num_round": 20}, TypeError
    ),
    "data in the place of the guide": Bad(
        ["guide", "got a dict", "third", "fit(model, None, data, ...)"],
        {"guide": WHOLE, "data": None},
        TypeError,
    ),
    "a word for a method": Bad(
        ["method", "got 'dp'", "FisherScoring()"], {"method": "dp"}, TypeError
    ),
    "a class for a method": Bad(
        ["method", "class NonPrivate", "FisherScoring()"], {"method": dppvi.NonPrivate}, TypeError
    ),
    "no rounds": Bad(["num_rounds", "at least 1", "got 0"], {"num_rounds": 0}),
    "half a round": Bad(["num_rounds", "whole number", "got 0.5"], {"num_rounds": 0.5}),
    "no damping": Bad(["damping", "above 0", "got 0", "damping=0.5"], {"damping": 0}),
    "damping above one": Bad(["damping", "at most 1", "got 1.5"], {"damping": 1.5}),
    "damping NaN": Bad(["damping", "got nan"], {"damping": math.nan}),
    "a word for a seed": Bad(
        ["insecure_noise_seed", "whole number", "got 'a'"], {"insecure_noise_seed": "a"}
    ),
}


class TestRun:
    @refused(RUN)
    def test_is_refused_with_a_sentence(self, bad):
        assert_refuses(bad.exception, bad.words, fit, **bad.changes)


class TestOrder:
    """Of a model, a guide and data, a user forgets the guide first."""

    @pytest.mark.parametrize(
        ("args", "kwargs", "got"),
        [
            ((linear, WHOLE), {}, "a dict in the place of the guide"),
            ((linear, [WHOLE, WHOLE]), {}, "a list in the place of the guide"),
            ((linear,), {"data": WHOLE}, "got model and data"),
            ((linear, None), {}, "got model and guide"),
            ((), {}, "none of them"),
        ],
    )
    def test_what_is_lacking_is_said(self, args, kwargs, got):
        words = ["model, a guide and data", got, "fit(model, None, data, ...)", "None lets"]
        kwargs = {"rng_key": jax.random.key(0), "budget": BUDGET, **kwargs}
        assert_refuses(TypeError, words, dppvi.fit, *args, **kwargs)


class TestResult:
    """Names of NumPyro, ArviZ and others on a result, and where they are here."""

    @pytest.mark.parametrize(
        ("name", "instead"),
        {
            "summary": "result.posterior.summary(...)",
            "to_arviz": "result.posterior.to_arviz(...)",
            "mean": "result.posterior.mean.",
            "sample": "result.posterior.sample(...)",
            "samples": "result.posterior.sample(jax.random.key(1), (1000,))",
            "get_samples": "result.posterior.sample(jax.random.key(1), (1000,))",
            "print_summary": "result.posterior.summary()",
            "predict": "result.posterior.predictive(jax.random.key(1), X=X_test)",
            "losses": "result.history.movement",
            "epsilon": "result.ledger.spent()",
        }.items(),
    )
    def test_what_others_call_otherwise_is_said(self, result, name, instead):
        assert_refuses(AttributeError, ["FitResult", repr(name), instead], getattr, result, name)

    def test_so_does_a_posterior(self, result):
        posterior = result.posterior
        for name in ("samples", "get_samples"):
            words = ["Posterior", repr(name), "posterior.sample(jax.random.key(1), (1000,))"]
            assert_refuses(AttributeError, words, getattr, posterior, name)

    def test_what_has_another_name_nowhere_is_lacking(self, result):
        for value in (result, result.posterior):
            assert not hasattr(value, "nonsense")
            assert not hasattr(value, "_repr_png_")
            assert copy.copy(value) is not value

    def test_a_prompt_shows_the_summary_as_it_is_printed(self, result):
        shown = result.posterior.summary()
        assert repr(shown) == shown
        assert "\n" in shown


def returning(groups: Any):
    return lambda round_number, num_clients: groups


SCHEDULES = {
    "one axis": Bad(
        ["schedule", "(num_groups, group_size)", "shape (3,)", "numpyro_dppvi.sequential"],
        {"schedule": lambda _, num_clients: np.arange(num_clients)},
    ),
    "nobody": Bad(["schedule", "shape (0, 1)"], {"schedule": returning(np.zeros((0, 1), int))}),
    "fractions": Bad(["schedule", "float64"], {"schedule": returning([[0.0, 1.0]])}),
    "groups of unequal size": Bad(
        ["schedule", "unequal length"], {"schedule": returning([[0], [1, 2]])}
    ),
    "a client too many": Bad(
        ["schedule", "client 3", "3 clients", "0 to 2"], {"schedule": returning([[1, 3]])}
    ),
    "a client below zero": Bad(
        ["schedule", "client -1", "0 to 2"], {"schedule": returning([[2, -1]])}
    ),
    "a client twice": Bad(
        ["schedule", "client 1 twice", "two groups"], {"schedule": returning([[0, 1, 1]])}
    ),
    "bad in a later round only": Bad(
        ["schedule", "client 7"], {"schedule": lambda round_number, _: [[7 * round_number]]}
    ),
    "no function": Bad(
        ["schedule", "got 'sequential'", "schedule=numpyro_dppvi.sequential"],
        {"schedule": "sequential"},
        TypeError,
    ),
}


class TestSchedules:
    @refused(SCHEDULES)
    @pytest.mark.parametrize(
        "run",
        [{}, {"method": dppvi.NonPrivate(), "budget": None}],
        ids=["with privacy", "without privacy"],
    )
    def test_is_refused_with_a_sentence(self, bad, run):
        assert_refuses(bad.exception, bad.words, fit, **bad.changes, **run)


class TestPieces:
    @pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, "1", None, True])
    def test_epsilon_is_above_zero(self, epsilon):
        words = ["epsilon", "above 0", f"got {epsilon!r}", "epsilon=1.0"]
        assert_refuses(ValueError, words, dppvi.PrivacyBudget, epsilon, 1e-5)

    @pytest.mark.parametrize("delta", [0, 1, 1.5, -0.1, math.nan, None])
    def test_delta_is_between_zero_and_one(self, delta):
        words = ["delta", "between 0 and 1", f"got {delta!r}", "delta=1e-5"]
        assert_refuses(ValueError, words, dppvi.PrivacyBudget, 1.0, delta)

    def test_numbers_of_numpy_are_numbers(self):
        budget = dppvi.PrivacyBudget(np.int64(2), np.float32(0.25))
        assert budget == dppvi.PrivacyBudget(2.0, 0.25)
        assert type(budget.epsilon) is type(budget.delta) is float
        assert type(dppvi.PoissonSampling(np.float32(0.5)).sampling_prob) is float
        assert type(dppvi.DPOptimization(clip_norm=np.int64(2)).clip_norm) is float

    def test_the_relation_is_one_of_two(self):
        words = ["relation", "'replace_one' or 'add_or_remove_one'", "got 'swap'"]
        with pytest.raises(ValueError, match="relation") as caught:
            dppvi.PrivacyBudget(1.0, 1e-5, "swap")
        assert all(word in str(caught.value) for word in words)

    @pytest.mark.parametrize("sampling_prob", [0.0, 1.0, -0.5, 2, math.nan])
    def test_sampling_prob_is_between_zero_and_one(self, sampling_prob):
        words = ["sampling_prob", "between 0 and 1", f"got {sampling_prob!r}", "sampling_prob=0.1"]
        assert_refuses(ValueError, words, dppvi.PoissonSampling, sampling_prob)

    @pytest.mark.parametrize("clip_norm", [0, -2.5, math.inf, math.nan, "1"])
    def test_clip_norm_is_above_zero(self, clip_norm):
        words = ["clip_norm", "above 0", f"got {clip_norm!r}", "clip_norm=1.0"]
        assert_refuses(ValueError, words, dppvi.DPOptimization, clip_norm=clip_norm)

    def test_each_of_several_numbers_is_checked(self):
        words = ["clip_norm", "above 0", "got -1.0", "clip_norm=1.0"]
        assert_refuses(ValueError, words, dppvi.DPOptimization, clip_norm=[2.0, -1.0])
        words = ["sampling_prob", "between 0 and 1", "got 1.5", "sampling_prob=0.1"]
        assert_refuses(ValueError, words, dppvi.PoissonSampling, (0.1, 1.5))

    @pytest.mark.parametrize(
        ("method", "name"),
        [
            (dppvi.DPOptimization(clip_norm=(1.0, 2.0)), "clip_norm"),
            (dppvi.DPOptimization(sampler=dppvi.PoissonSampling((0.1, 0.2))), "sampling_prob"),
            (dppvi.VirtualClients((3, 4)), "num_shards"),
            (dppvi.VirtualClients(3, clip_norm=(1.0, 2.0)), "clip_norm"),
        ],
    )
    def test_numbers_are_one_or_one_a_client(self, method, name):
        words = [name, "one number or one per client", "got 2 numbers", "3 clients"]
        budget = dppvi.PrivacyBudget(1.0)
        arguments = {"num_rounds": 2, "client_sizes": [30] * 3}
        assert_refuses(ValueError, words, dppvi.plan_privacy, method, budget, **arguments)

    @pytest.mark.parametrize(
        "method",
        [
            dppvi.GlobalVI(clip_norm=(1.0, 2.0)),
            dppvi.GlobalVI(sampler=dppvi.PoissonSampling((0.1, 0.2))),
        ],
    )
    def test_clients_of_one_sum_are_alike(self, method):
        words = ["trusted aggregator" if method.clip_norm == (1.0, 2.0) else "same fraction", "got"]
        assert_refuses(
            ValueError,
            words,
            dppvi.plan_privacy,
            method,
            dppvi.PrivacyBudget(1.0),
            num_rounds=2,
            client_sizes=[30] * 2,
            schedule=dppvi.synchronous,
            trusted_aggregator=True,
        )

    @pytest.mark.parametrize("method", [dppvi.DPOptimization, dppvi.NonPrivate])
    @pytest.mark.parametrize("steps", [0, -1, 1.5, None])
    def test_num_local_steps_is_a_whole_number(self, method, steps):
        words = ["num_local_steps", "whole number", f"got {steps!r}"]
        assert_refuses(ValueError, words, method, num_local_steps=steps)

    def test_num_draws_is_a_whole_number(self):
        words = ["num_draws", "at least 1", "got 0"]
        assert_refuses(ValueError, words, dppvi.MonteCarlo, 0)

    def test_an_optimizer_is_one_of_optax(self):
        words = ["optimizer", "optax", "got 0.05", "optax.adam"]
        assert_refuses(TypeError, words, dppvi.DPOptimization, optimizer=0.05)

    @pytest.mark.parametrize("batch_size", [0, 2.5, None])
    def test_batch_size_is_a_whole_number(self, batch_size):
        words = ["batch_size", "whole number", f"got {batch_size!r}", "batch_size=10"]
        assert_refuses(ValueError, words, dppvi.FixedSizeSampling, batch_size)

    def test_a_batch_is_no_larger_than_the_smallest_client(self):
        method = dppvi.DPOptimization(sampler=dppvi.FixedSizeSampling(20))
        words = ["batch_size", "got 20", "client 1's 19 records", "FixedSizeSampling(19)"]
        assert_refuses(
            ValueError,
            words,
            dppvi.plan_privacy,
            method,
            dppvi.PrivacyBudget(1.0),
            num_rounds=2,
            client_sizes=[20, 19],
        )

    def test_batches_of_fixed_size_are_for_replaced_records(self):
        method = dppvi.DPOptimization(sampler=dppvi.FixedSizeSampling(20))
        words = ["fixed size", "add_or_remove_one", 'relation="replace_one"', "PoissonSampling"]
        assert_refuses(
            ValueError,
            words,
            dppvi.plan_privacy,
            method,
            dppvi.PrivacyBudget(1.0, 1e-5, "add_or_remove_one"),
            num_rounds=2,
            client_sizes=[20, 20],
        )

    def test_a_sampler_is_a_sampler(self):
        words = ["sampler", "got 0.1", "PoissonSampling(0.1)"]
        assert_refuses(TypeError, words, dppvi.DPOptimization, sampler=0.1)
        words = ["sampler", "the class FullBatch"]
        assert_refuses(TypeError, words, dppvi.DPOptimization, sampler=dppvi.FullBatch)

    def test_an_expectation_is_a_function(self):
        words = ["expectation", "got 10", "MonteCarlo(10)"]
        assert_refuses(TypeError, words, dppvi.NonPrivate, expectation=10)


# ---------------------------------------------------------------------------------------------
# Models. What a model is fed comes first, then what is in it.


def needs_a_constant(X, y, num_groups):
    linear(X, y)


ARGUMENTS = {
    "no argument that the model knows": Bad(
        ["no argument 'a'", "data", "takes X, y"], {"data": {"a": X, "b": y}}
    ),
    "one argument too many": Bad(["no argument 'v'", "data"], {"data": {**WHOLE, "v": y}}),
    "an argument too few": Bad(
        ["argument 'X'", "data={'X': ...}", "model_kwargs"], {"data": {"y": y}}
    ),
    "a constant too few": Bad(
        ["argument 'num_groups'", "model_kwargs={'num_groups': ...}"], {"model": needs_a_constant}
    ),
    "a constant too many": Bad(
        ["no argument 'bias'", "model_kwargs"], {"model_kwargs": {"bias": 1}}
    ),
    "data that is a constant, too": Bad(
        ["'X'", "both data and model_kwargs"], {"model_kwargs": {"X": 1}}
    ),
    "the outcome is left out": Bad(
        ["latent 'y'", "data plate 'records'", "data={'y': ...}"], {"data": {"X": X}}
    ),
    "no model": Bad(["model", "function", "got None"], {"model": None}),
}


class TestArguments:
    @refused(ARGUMENTS)
    def test_is_refused_with_a_sentence(self, bad):
        assert_refuses(dppvi.UnsupportedModelError, bad.words, fit, **bad.changes)


def unobserved(X):
    weights()


def unobserved_outcome(X, y):
    numpyro.sample("y", dist.Normal(X @ weights(), 1))


def unobserved_in_a_plate(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("outcome", dist.Normal(X @ w, 1))


def observes_a_constant(X, y):
    numpyro.sample("pilot", dist.Normal(weights().sum(), 1), obs=1.0)


def no_latent(X, y):
    numpyro.sample("y", dist.Normal(X.sum(axis=1), 1), obs=y)


def discrete_latent(X, y):
    k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
    numpyro.sample("y", dist.Normal(X[:, 0] + k, 1), obs=y)


def endless_discrete_latent(X, y):
    k = numpyro.sample("k", dist.Poisson(2.0))
    numpyro.sample("y", dist.Normal(X[:, 0] + k, 1), obs=y)


def discrete_latent_of_unequal_ranges(X, y):
    k = numpyro.sample("k", dist.DiscreteUniform(0, jnp.array([1, 4])).to_event(1))
    numpyro.sample("y", dist.Normal(X[:, 0] + k[0], 1), obs=y)


def latent_in_the_plate(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(X @ w + u, 1), obs=y)


def latent_in_a_subsampled_plate(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0], subsample_size=4) as rows:
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(X[rows] @ w + u, 1), obs=y[rows])


def latent_in_a_plate_of_stated_size(X, y):
    w = weights()
    with numpyro.plate("records", 12):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(X @ w + u, 1), obs=y)


def discrete_latent_in_the_plate(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        u = numpyro.sample("u", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(X @ w + u, 1), obs=y)


def vector_of_one_latent_a_row(X, y):
    w = weights()
    u = numpyro.sample("u", dist.Normal(0, 1).expand([X.shape[0]]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w + u, 1).to_event(1), obs=y)


def as_long_as_the_data(X, y):
    u = numpyro.sample("u", dist.Normal(0, 1).expand([12]).to_event(1))
    numpyro.sample("y", dist.Normal(X[:, 0] + u, 1).to_event(1), obs=y)


def parameter(X, y):
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("y", dist.Normal(X @ weights(), noise), obs=y)


def improper_prior(X, y):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), (2,)))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def prior_masked_away(X, y):
    with handlers.mask(mask=False):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def improper_prior_in_a_plate(X, y):
    with numpyro.plate("columns", 2):
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.positive, (), ()))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def counts_groups(X, y, g):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([len(np.unique(g))]).to_event(1))
    numpyro.sample("y", dist.Normal(a[g], 1), obs=y)


def counts_groups_with_jax(X, y, g):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([len(jnp.unique(g))]).to_event(1))
    numpyro.sample("y", dist.Normal(a[g], 1), obs=y)


def largest_group(X, y, g):
    with numpyro.plate("groups", int(g.max()) + 1):
        a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a[g], 1), obs=y)


def decides_by_a_latent(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w if w[0] > 0 else 0.0, 1), obs=y)


def looks_at_values(X, y):
    sign = 1.0 if X.sum() > 0 else -1.0
    numpyro.sample("y", dist.Normal(sign * (X @ weights()), 1), obs=y)


def drops_rows(X, y):
    w = weights()
    numpyro.sample("y", dist.Normal(X[y > 0] @ w, 1), obs=y[y > 0])


def prior_from_data(X, y):
    w = numpyro.sample("w", dist.Normal(0, X.std(axis=0)).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def moving_support(X, y):
    top = numpyro.sample("top", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Uniform(0, top))
    numpyro.sample("y", dist.Normal(X[:, 0] * w, 1), obs=y)


def standardises(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal((X - X.mean(axis=0)) @ w, 1), obs=y)


def accumulates(X, y):
    numpyro.sample("y", dist.Normal(jnp.cumsum(X @ weights()), 1).to_event(1), obs=y)


def follows_the_row_before(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a * y[:-1], 1).to_event(1), obs=y[1:])


def scans_over_rows(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(before, now):
        return now, numpyro.sample("y", dist.Normal(a * before, 1), obs=now)

    scan(step, 0.0, y)


def goes_through_states(X, y):
    stay = numpyro.sample("stay", dist.Beta(2, 1))

    def step(state, now):
        up = jnp.where(state == 1, stay, 1 - stay)
        mark = {"enumerate": "parallel"}
        state = numpyro.sample("state", dist.Bernoulli(up), infer=mark)
        numpyro.sample("y", dist.Normal(state, 1.0), obs=now)
        return state, None

    scan(step, 0, y)


def learns_how_far_it_centers(X, y):
    m = numpyro.sample("m", dist.Normal(0, 1))
    with handlers.reparam(config={"w": LocScaleReparam()}):
        w = numpyro.sample("w", dist.Normal(m, 1).expand([X.shape[1]]).to_event(1))
    numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def meets_a_table_of_one_column(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def scans_in_a_plate(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(before, now):
        return now, numpyro.sample("x", dist.Normal(a * before, 1), obs=now)

    with numpyro.plate("records", X.shape[0]):
        scan(step, X[:, 0], X[:, 1:].T)


def carries_another_shape(X, y):
    a = numpyro.sample("a", dist.Normal(0, 1))

    def step(before, now):
        with numpyro.plate("records", X.shape[0]):
            now = numpyro.sample("x", dist.Normal(a * before, 1), obs=now)
        return now, None

    scan(step, 0.0, X.T)


def computes_with_a_list(X, y):
    w = weights() * [2.0, 20.0]
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def process_over_rows(X, y):
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    apart = ((X[:, None] - X[None]) ** 2).sum(axis=-1)
    covariance = jnp.exp(-apart / length**2) + 0.1 * jnp.eye(len(y))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(y)), covariance), obs=y)


def competes_with_other_rows(X, y):
    shares = jax.nn.softmax(X @ weights())
    numpyro.sample("y", dist.Normal(shares, 1).to_event(1), obs=y)


def scales_by_the_batch(X, y):
    w = weights()
    with numpyro.handlers.scale(scale=1000 / X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


OUTSIDE = np.linspace(0.0, 1.0, 12)


def closes_over_rows(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]) as rows:
        numpyro.sample("y", dist.Normal(X @ w + jnp.asarray(OUTSIDE)[rows], 1), obs=y)


def drops_units(X, y):
    w = weights()
    kept = jax.random.bernoulli(numpyro.prng_key(), 0.5, X.shape)
    numpyro.sample("y", dist.Normal((X * kept) @ w, 1), obs=y)


def some_latents_at_a_time(X, y):
    with numpyro.plate("groups", 10, subsample_size=3):
        a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(X[:, 0] + a.sum(), 1), obs=y)


def imputes_a_column(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        age = numpyro.sample("age", dist.Gamma(2, 1), obs=X[:, 0], obs_mask=X[:, 1] > 0)
        numpyro.sample("y", dist.Normal(w[0] + w[1] * age, 1), obs=y)


def imputes_a_category(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        sex = numpyro.sample("sex", dist.Bernoulli(0.5), obs=X[:, 0], obs_mask=X[:, 1] > 0)
        numpyro.sample("y", dist.Normal(w[0] + w[1] * sex, 1), obs=y)


def asks_for_a_table(X, y):
    numpyro.sample("y", dist.Normal(X.values @ weights(), 1), obs=y)


def by_position_only(X, y, /):
    numpyro.sample("y", dist.Normal(X @ weights(), 1), obs=y)


def takes_all_at_once(data):
    linear(data["X"], data["y"])


def takes_some_at_once(covariates, y=None):
    linear(covariates["X"], y)


def takes_a_tuple(*arrays):
    linear(*arrays)


class BadModel(NamedTuple):
    """A model that cannot be fitted, words of the answer, and a data argument more."""

    model: Any
    words: list[str]
    more: Mapping[str, Any] = MappingProxyType({})


ITS_OWN = ["latent 'u'", "clients cannot share", "observe it", "integrate it out"]
MARK_IT = ["infer={'enumerate': 'parallel'}", "summed out"]
WRITE_A_GUIDE = ["latent 'k'", "discrete", "write a guide", "dist.Bernoulli", "dist.Categorical"]
GROUPED = {"g": GROUPS}
MIXES = ["'y'", "not the sum over each", "no client has all records", "by itself", "model_kwargs"]
VALUES = ["depends on the values of its data", "model_kwargs={'num_groups': 8}"]

MODELS = [
    BadModel(unobserved_outcome, ["latent 'y'", "one value per record", "obs=y"]),
    BadModel(unobserved_in_a_plate, ["latent 'outcome'", "data plate 'records'", "obs=y"]),
    BadModel(observes_a_constant, ["no observed site", "depends on data", "obs=y"]),
    BadModel(no_latent, ["no latent", "numpyro.sample"]),
    BadModel(discrete_latent, [*WRITE_A_GUIDE, "sum it out", "MixtureSameFamily"]),
    BadModel(endless_discrete_latent, ["latent 'k'", "one finite range of integers", "sum it out"]),
    BadModel(discrete_latent_of_unequal_ranges, ["latent 'k'", "one finite range", "sum it out"]),
    BadModel(latent_in_the_plate, [*ITS_OWN, "data plate 'records'"]),
    BadModel(
        scans_in_a_plate, ["a plate stands around scan (line", "plate inside of the function"]
    ),
    BadModel(carries_another_shape, ["returns a carry of another shape", "jnp.zeros(len(y), int)"]),
    BadModel(computes_with_a_list, ["computes with a list (line", "write jnp.array([1.0, 2.0])"]),
    BadModel(latent_in_a_subsampled_plate, [*ITS_OWN, "data plate 'records'"]),
    BadModel(latent_in_a_plate_of_stated_size, [*ITS_OWN, "data plate 'records'"]),
    BadModel(discrete_latent_in_the_plate, [*ITS_OWN[:3], "data plate 'records'", *MARK_IT]),
    BadModel(vector_of_one_latent_a_row, [*ITS_OWN, "one value per record"]),
    BadModel(
        as_long_as_the_data, ["runs on 12 rows only", "'u' has shape (12,)", "integrate it out"]
    ),
    BadModel(parameter, ["numpyro.param('noise')", "no prior", "numpyro.sample('noise'"]),
    BadModel(improper_prior, ["latent 'w'", "improper", "dist.Normal(0, 10)"]),
    BadModel(prior_masked_away, ["latent 'w'", "mask(False)", "leave the mask out"]),
    BadModel(improper_prior_in_a_plate, ["latent 'w'", "improper", "dist.HalfNormal(1)"]),
    BadModel(counts_groups, [*VALUES, "len(np.unique(...))"], GROUPED),
    BadModel(counts_groups_with_jax, [*VALUES, "len(np.unique(...))"], GROUPED),
    BadModel(largest_group, [*VALUES, "int(...)"], GROUPED),
    BadModel(looks_at_values, ["decides by values of its data", "(line", "jnp.where(a > 0, b, c)"]),
    BadModel(decides_by_a_latent, ["decides by values", "or latents", "jnp.where(a > 0, b, c)"]),
    BadModel(drops_rows, ["indexes with booleans", "values of its data", "jnp.where"]),
    BadModel(prior_from_data, ["prior of latent 'w'", "depends on the data", "model_kwargs"]),
    BadModel(moving_support, ["support of latent 'w'", "another latent", "fixed support"]),
    BadModel(standardises, MIXES),
    BadModel(accumulates, MIXES),
    BadModel(follows_the_row_before, MIXES),
    BadModel(scans_over_rows, MIXES),
    BadModel(
        goes_through_states, ["from record to record", "'state[", "a whole series one record"]
    ),
    BadModel(learns_how_far_it_centers, ["LocScaleReparam() of 'w'", "centered=0"]),
    BadModel(
        meets_a_table_of_one_column,
        [
            "'y' is a table of one column, of shape (n, 1)",
            "table['y'] in the place of table[['y']]",
        ],
        {"X": X, "y": y[:, None]},
    ),
    BadModel(process_over_rows, MIXES),
    BadModel(competes_with_other_rows, MIXES),
    BadModel(scales_by_the_batch, ["'y'", "how many rows", "N / len(y)", "leave that number out"]),
    BadModel(closes_over_rows, ["shape (12,)", "not one of its arguments", "data", "model_kwargs"]),
    BadModel(
        drops_units, ["'y'", "random numbers", "dropout", "must be the same", "leave them out"]
    ),
    BadModel(some_latents_at_a_time, ["'groups'", "'a'", "all of it", "leave out subsample_size"]),
    BadModel(imputes_a_column, ["'y'", "'age_unobserved'", "obs_mask", "normal distribution"]),
    BadModel(imputes_a_category, ["'y'", "'sex_unobserved'", *MARK_IT]),
    BadModel(asks_for_a_table, [".values", "pandas", "write X instead", "to_numpy()"]),
    BadModel(linear, ["no argument 'age'", "it takes X, y", "rename", "leave it out"], {"age": y}),
    BadModel(
        takes_all_at_once,
        [
            "no argument 'X'",
            "it takes data",
            "if 'data' is a mapping of these",
            "def flat(X, y): model({'X': X, 'y': y})",
        ],
    ),
    BadModel(
        takes_some_at_once,
        ["no argument 'X'", "def flat(X, age, y): model({'X': X, 'age': age}, y=y)"],
        {"X": X, "age": y},
    ),
    BadModel(takes_a_tuple, ["no argument by name", "as in def model(X, y=None)"]),
    BadModel(by_position_only, ["'X'", "by position only", "remove the '/'"]),
]


class TestModels:
    @pytest.mark.parametrize("bad", MODELS, ids=lambda bad: bad.model.__name__)
    def test_is_refused_with_a_sentence(self, bad):
        data = {**WHOLE, **bad.more}
        assert_refuses(dppvi.UnsupportedModelError, bad.words, fit, model=bad.model, data=data)

    def test_without_an_outcome_it_is_refused(self):
        words = ["observes nothing", "obs=y", "data={'y': ...}"]
        assert_refuses(dppvi.UnsupportedModelError, words, fit, model=unobserved, data={"X": X})

    def test_an_error_of_the_models_own_is_left_as_it_is(self):
        """A user finds a mistake in a model by its own message and line."""

        def mistaken(X, y):
            raise RuntimeError("my own mistake")

        with pytest.raises(RuntimeError, match="my own mistake") as caught:
            fit(model=mistaken)
        assert any("X (12, 2), y (12,)" in note for note in caught.value.__notes__)

    def test_a_public_array_may_be_as_long_as_the_data(self):
        """As an argument it is public on purpose."""

        def with_offsets(X, y, offsets):
            w = weights()
            with numpyro.plate("records", X.shape[0]):
                numpyro.sample("y", dist.Normal(X @ w + offsets[0], 1), obs=y)

        with dry_rounds():
            fit(model=with_offsets, model_kwargs={"offsets": OUTSIDE}, num_rounds=1)


# ---------------------------------------------------------------------------------------------
# Guides.


def another_model(X, y=None):
    linear(X, y)


def two_latents(X, y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.HalfNormal(1).expand([2]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(a + X @ b, 1), obs=y)


def normal(name, loc=0.0, *shape):
    return numpyro.sample(name, dist.Normal(loc, 1).expand(shape).to_event(len(shape)))


def positive(name="b", *shape):
    return numpyro.sample(name, dist.LogNormal(0, 1).expand(shape).to_event(len(shape)))


def misses_one(X, y=None):
    normal("a")


def has_one_too_many(X, y=None):
    normal("a"), positive("b", 2), normal("c")


def has_an_auxiliary_one(X, y=None):
    u = numpyro.sample("u", dist.Normal(0, 1), infer={"is_auxiliary": True})
    normal("a", u), positive("b", 2)


def of_another_shape(X, y=None):
    normal("a"), positive("b", 3)


def scalar_for_a_vector(X, y=None):
    normal("a"), positive("b")


def on_all_reals(X, y=None):
    normal("a"), normal("b", 0.0, 2)


def on_an_interval(X, y=None):
    normal("a")
    numpyro.sample("b", dist.Beta(2, 2).expand([2]).to_event(1))


def on_the_positive_reals(X, y=None):
    positive("a"), positive("b", 2)


def structured(X, y=None):
    a = normal("a")
    numpyro.sample("b", dist.LogNormal(a, 1).expand([2]).to_event(1))


def amortised(X, y=None):
    normal("a", X.mean() * numpyro.param("slope", 1.0)), positive("b", 2)


def amortised_in_a_transform(X, y=None):
    transform = dist.transforms.AffineTransform(X.mean(), 1.0)
    numpyro.sample("a", dist.TransformedDistribution(dist.Normal(0, 1), transform))
    positive("b", 2)


def points(X, y=None):
    numpyro.sample("a", dist.Delta(numpyro.param("a_loc", 0.0)))
    positive("b", 2)


def heavy_tailed(X, y=None):
    numpyro.sample("a", dist.StudentT(4.0, 0.0, 1.0))
    positive("b", 2)


def mixed(X, y=None):
    parts = dist.Normal(jnp.zeros(2), 1.0)
    numpyro.sample("a", dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), parts))
    positive("b", 2)


def discrete(X, y=None):
    numpyro.sample("a", dist.Bernoulli(numpyro.param("a_prob", 0.5)))
    positive("b", 2)


def masked(X, y=None):
    numpyro.sample("a", dist.Normal(0, 1).mask(False))
    positive("b", 2)


def subsampled(X, y=None):
    normal("a")
    with numpyro.plate("entries", 2, subsample_size=1):
        numpyro.sample("b", dist.LogNormal(0, 1))


def rescaled(X, y=None):
    with numpyro.handlers.scale(scale=0.5):
        normal("a")
    positive("b", 2)


def observing(X, y=None):
    normal("a"), positive("b", 2)
    numpyro.sample("y", dist.Normal(0, 1), obs=0.0)


def raising(X, y=None):
    raise RuntimeError("a mistake of mine")


def without_the_arguments():
    normal("a"), positive("b", 2)


def looking(X, y=None):
    normal("a", float(X[0, 0])), positive("b", 2)


def with_discrete_latents(X, y=None):
    z = numpyro.sample("z", dist.Bernoulli(0.5).expand([2, 3]).to_event(2))
    k = numpyro.sample("k", dist.Categorical(jnp.ones(3) / 3))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(z.sum() + k, 1), obs=y)


def bits(distribution):
    return numpyro.sample("z", distribution.expand([2, 3]).to_event(2))


def kind(number=3, logits=0.0):
    numpyro.sample("k", dist.Categorical(logits=logits + jnp.zeros(number)))


def of_too_many_values(X, y=None):
    bits(dist.Bernoulli(0.5)), kind()


def relaxed(X, y=None):
    bits(dist.Beta(2, 2)), kind()


def points_of_integers(X, y=None):
    bits(dist.Delta(0)), kind()


def counting(X, y=None):
    bits(dist.Binomial(1, 0.5)), kind()


def of_more_classes(X, y=None):
    bits(dist.Bernoulli(0.5)), kind(4)


def structured_by_a_switch(X, y=None):
    kind(logits=bits(dist.Bernoulli(0.5))[0, 0])


ALLOWED = ["guide", "None", "AutoNormal(model)", "AutoMultivariateNormal(model)", "a function"]
FULL = "write guide=AutoMultivariateNormal(model)"

AUTOMATIC = {
    "AutoLowRankMultivariateNormal": (
        autoguide.AutoLowRankMultivariateNormal(linear),
        ["AutoLowRankMultivariateNormal", "low rank", FULL],
    ),
    "AutoLaplaceApproximation": (
        autoguide.AutoLaplaceApproximation(linear),
        ["AutoLaplaceApproximation", "maximum", FULL],
    ),
    "AutoDelta": (
        autoguide.AutoDelta(linear),
        ["AutoDelta", "a point mass is not a product", "write guide=AutoNormal(model)"],
    ),
    "AutoIAFNormal": (
        autoguide.AutoIAFNormal(linear),
        ["AutoIAFNormal", "not an exponential family", FULL],
    ),
    "AutoDAIS": (autoguide.AutoDAIS(linear), ["AutoDAIS", "not an exponential family", FULL]),
    "AutoBatchedMultivariateNormal": (
        autoguide.AutoBatchedMultivariateNormal(linear),
        ["AutoBatchedMultivariateNormal", FULL],
    ),
    "AutoGuideList": (
        autoguide.AutoGuideList(linear),
        ["AutoGuideList", "combined guides are not supported", FULL],
    ),
    "inside a partial": (
        functools.partial(autoguide.AutoNormal(linear)),
        ["AutoNormal must not be wrapped", "partial", "guide=AutoNormal(model)"],
    ),
    "inside a handler": (
        numpyro.handlers.block(autoguide.AutoDelta(linear)),
        ["AutoDelta", "a point mass is not a product"],
    ),
    "a class": (
        autoguide.AutoNormal,
        [*ALLOWED, "the class AutoNormal", "call it with the model"],
    ),
    "a word": ("AutoNormal", [*ALLOWED, "got 'AutoNormal'"]),
    "of another model": (
        autoguide.AutoNormal(another_model),
        ["guide", "another model", "AutoNormal(model)"],
    ),
    "full, of another model": (
        autoguide.AutoMultivariateNormal(another_model),
        ["guide", "another model", "AutoMultivariateNormal(model)"],
    ),
}

OWN = "its own parameters"

WRITTEN = {
    misses_one: ["misses_one", "does not draw the latent 'b'", "numpyro.sample('b'"],
    has_one_too_many: ["has_one_too_many", "'c'", "not a latent of the model", "draw a, b and"],
    has_an_auxiliary_one: ["'u'", "not a latent of the model"],
    of_another_shape: ["'b'", "(2,) in the model", "(3,) in the guide", ".expand([2])"],
    scalar_for_a_vector: ["'b'", "(2,) in the model", "() in the guide", ".expand([2])"],
    on_all_reals: ["'b'", "(0, inf) in the model", "real in the guide", "Transformed"],
    on_an_interval: ["'b'", "(0, inf) in the model", "(0, 1) in the guide"],
    on_the_positive_reals: ["'a'", "support real in the model", "(0, inf) in the guide"],
    structured: ["'b'", "depend on latent 'a'", "independent", OWN, "AutoMultivariateNormal"],
    amortised: ["'a'", "depend on the data", "unaccounted for", OWN],
    amortised_in_a_transform: ["'a'", "depend on the data", OWN],
    points: ["'a'", "Delta", "a point mass is not a product", "write Normal"],
    heavy_tailed: ["'a'", "StudentT", "products of its densities", "write Normal", "Gamma"],
    mixed: ["'a'", "Mixture", "write Normal"],
    discrete: ["'a'", "Bernoulli", "that is discrete and the latent is continuous", "write Normal"],
    masked: ["'a'", "MaskedDistribution", "write Normal"],
    subsampled: ["plate 'entries'", "subsampled", "leave out subsample_size"],
    rescaled: ["'a'", "rescaled", "leave out handlers.scale"],
    observing: ["observing", "observes 'y'", "remove that statement"],
    raising: ["raising", "RuntimeError", "the same arguments"],
    without_the_arguments: ["without_the_arguments", "TypeError", "the same arguments"],
    looking: ["looking", "depends on values", OWN],
}


KINDS = "write Bernoulli or Categorical, or sum it out in the model"

OF_INTEGERS = {
    of_too_many_values: [
        "(z, k)",
        "192 joint values",
        "may be 64 at most",
        "draw fewer",
        "sum them out",
    ],
    relaxed: ["'z'", "Beta", "that is continuous and the latent is discrete", KINDS],
    points_of_integers: ["'z'", "Delta", "a point mass is not a product", KINDS],
    counting: ["'z'", "Binomial", "products of its densities", KINDS],
    of_more_classes: ["'k'", "{0, 1, 2} in the model", "{0, 1, ..., 3} in the guide"],
    structured_by_a_switch: ["'k'", "depend on latent 'z'", "independent", OWN],
}


class TestGuides:
    @pytest.mark.parametrize(
        ("guide", "words"), OF_INTEGERS.items(), ids=[guide.__name__ for guide in OF_INTEGERS]
    )
    def test_of_discrete_latents_is_refused_with_a_sentence(self, guide, words):
        refused = {"model": with_discrete_latents, "guide": guide}
        assert_refuses(dppvi.UnsupportedModelError, words, fit, **refused)

    @pytest.mark.parametrize("kind", [autoguide.AutoNormal, autoguide.AutoMultivariateNormal])
    def test_of_numpyro_does_not_draw_discrete_latents(self, kind):
        words = ["latent 'k'", "automatic guides do not support", "write a guide", "sum it out"]
        refused = {"model": discrete_latent, "guide": kind(discrete_latent)}
        assert_refuses(dppvi.UnsupportedModelError, words, fit, **refused)

    @pytest.mark.parametrize(("guide", "words"), AUTOMATIC.values(), ids=AUTOMATIC.keys())
    def test_of_numpyro_is_refused_with_a_sentence(self, guide, words):
        assert_refuses(dppvi.UnsupportedModelError, words, fit, guide=guide)

    @pytest.mark.parametrize(
        ("guide", "words"), WRITTEN.items(), ids=[guide.__name__ for guide in WRITTEN]
    )
    def test_of_ones_own_is_refused_with_a_sentence(self, guide, words):
        assert_refuses(dppvi.UnsupportedModelError, words, fit, model=two_latents, guide=guide)


# ---------------------------------------------------------------------------------------------
# The checks above can fail.


@pytest.mark.parametrize(
    "message",
    [
        "Too short: a.",
        "a sentence about X without an end, and with what to write: X=1",
        f"X holds {CANARY:.0f}, which is a record: leave it out, say, and try again.",
        "a sentence about X that has\na line break: write X in one line, say, and not in two.",
        "One sentence about X: write it so. Another sentence about X. And a third one on top.",
        "X must be positive and so it should, but nothing says what to write instead of that.",
        f"X is wrong: {'very ' * 60}wrong.",
    ],
)
def test_a_poor_sentence_is_found(message):
    def refuse():
        raise ValueError(message)

    with pytest.raises(AssertionError):
        assert_refuses(ValueError, [], refuse)


def test_a_chained_record_is_found():
    def refuse():
        raise ValueError("X is wrong for this reason: leave it out, say.") from KeyError(CANARY)

    with pytest.raises(AssertionError):
        assert_refuses(ValueError, ["X"], refuse)


@pytest.mark.slow
def test_what_is_refused_above_would_work_without_the_mistake():
    result = fit(num_rounds=1)
    assert result.posterior.names == ("w",)
