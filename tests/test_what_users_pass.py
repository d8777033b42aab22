"""Whatever a user passes for any argument is accepted, or refused in one sentence of ours.

Every public callable is called with valid arguments but for one, in whose place comes each of many
values. Whatever is refused must be refused by one of the package's own ``raise`` statements, in a
sentence that names the argument. A call may be stopped where the first round would be compiled.
"""

import ast
import datetime as dt
import decimal
import fractions
import functools
import inspect
import linecache
import math
import pathlib
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import privacy, silo
from numpyro_dppvi.analysis import plots, replay
from numpyro_dppvi.privacy import audit
from numpyro_dppvi.protocol import rounds

PACKAGE = pathlib.Path(dppvi.__file__).parent
HERE = pathlib.Path(__file__)


# ---------------------------------------------------------------------------------------------
# What is passed. Each is made anew for every call: generators are used up.


class Anything:
    """No number, no array, no function."""


def _masked() -> np.ndarray:
    return np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])


def _pandas(make: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: make(pytest.importorskip("pandas"))


def _tracer() -> Any:
    """What JAX passes inside a transformation; it has leaked here, which nobody may look into."""
    found = []
    jax.make_jaxpr(lambda x: found.append(x) or x)(1.0)
    return found[0]


FEW: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "two": lambda: 2,
    "a half": lambda: 0.5,
    "many digits": lambda: 10**30,
    "nan": lambda: np.nan,
    "inf": lambda: np.inf,
    "1e308": lambda: 1e308,
    "1e-320": lambda: 1e-320,
    "1e39": lambda: 1e39,
    "1e-40": lambda: 1e-40,
    "complex": lambda: 1j,
    "no": lambda: "no",
    "bytes": lambda: b"true",
    "a path": lambda: pathlib.Path("nowhere/at/all"),
    "empty list": list,
    "empty dict": dict,
    "list of True": lambda: [True],
    "ragged": lambda: [[1.0, 2.0], [3.0]],
    "dict": lambda: {"y": [1.0, 2.0]},
    "nested dict": lambda: {"y": {"a": np.ones(3)}},
    "array": lambda: np.ones(3),
    "no columns": lambda: np.zeros((3, 0)),
    "array of objects": lambda: np.array([None, 1, "a"], object),
    "masked": _masked,
    "jax array": lambda: jnp.ones(3),
    "class": lambda: Anything,
    "object": Anything,
    "function": lambda: lambda: None,
    "generator": lambda: (x for x in [1.0, 2.0]),
    "method": dppvi.NonPrivate,
    "class of methods": lambda: dppvi.DPOptimization,
    "tracer": _tracer,
}
MANY: dict[str, Callable[[], Any]] = {
    "False": lambda: False,
    "numpy True": lambda: np.True_,
    "one": lambda: 1,
    "minus many digits": lambda: -(10**30),
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "minus zero": lambda: -0.0,
    "one and a half": lambda: 1.5,
    "minus inf": lambda: -np.inf,
    "1e-300": lambda: 1e-300,
    "1e-46": lambda: 1e-46,
    "1e30": lambda: 1e30,
    "1e-30": lambda: 1e-30,
    "float32": lambda: np.float32(0.5),
    "float16": lambda: np.float16(0.5),
    "longdouble": lambda: np.longdouble(0.5),
    "huge longdouble": lambda: np.longdouble("1e400"),
    "int8": lambda: np.int8(3),
    "uint64": lambda: np.uint64(2**64 - 1),
    "fraction": lambda: fractions.Fraction(1, 2),
    "decimal": lambda: decimal.Decimal("0.5"),
    "huge fraction": lambda: fractions.Fraction(10**400),
    "empty word": lambda: "",
    "false": lambda: "false",
    "number in a word": lambda: "1",
    "nul": lambda: "a\0b",
    "bytearray": lambda: bytearray(b"1"),
    "empty tuple": tuple,
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({"a"}),
    "list of a number": lambda: [1],
    "two numbers": lambda: [1.0, 2.0],
    "two counts": lambda: (2, 3),
    "list of None": lambda: [None],
    "list of nan": lambda: [np.nan, np.nan],
    "list of words": lambda: ["a", "b"],
    "list of dicts": lambda: [{"y": [1.0]}, {}],
    "list of arrays": lambda: [np.ones(3), np.ones(2)],
    "list of masked": lambda: [_masked(), _masked()],
    "nested lists": lambda: [[[1]]],
    "dict of numbers": lambda: {1: 2},
    "dict of None": lambda: {"y": None},
    "mapping": lambda: types.MappingProxyType({"y": np.ones(4)}),
    "0-d": lambda: np.array(1.0),
    "0-d whole": lambda: np.array(2),
    "0-d nan": lambda: np.array(np.nan),
    "0-d word": lambda: np.array("no"),
    "0-d bool": lambda: np.array(True),
    "0-d jax": lambda: jnp.array(2),
    "empty array": lambda: np.array([]),
    "no rows": lambda: np.zeros((0, 2)),
    "matrix": lambda: np.ones((2, 2)),
    "whole numbers": lambda: np.arange(3),
    "array of nan": lambda: np.full(3, np.nan),
    "array of 1e39": lambda: np.full(3, 1e39),
    "array of 1e-320": lambda: np.full(3, 1e-320),
    "array of 2**40": lambda: np.full(3, 2**40),
    "array of words": lambda: np.array(["a", "b"]),
    "array of bytes": lambda: np.array([b"a", b"b"]),
    "array of bools": lambda: np.array([True, False]),
    "array of complex": lambda: np.ones(3, complex),
    "array of longdouble": lambda: np.ones(3, np.longdouble),
    "array of 1e400": lambda: np.full(3, np.longdouble("1e400")),
    "array of float16": lambda: np.ones(3, np.float16),
    "array of bfloat16": lambda: jnp.ones(3, jnp.bfloat16),
    "array of float8": lambda: np.ones(3, jnp.float8_e4m3fn),
    "array of int4": lambda: jnp.ones(3, jnp.int4),
    "array of dates": lambda: np.array(["2020-01-01"] * 3, "datetime64[D]"),
    "array of durations": lambda: np.ones(3, "timedelta64[s]"),
    "array of pairs": lambda: np.zeros(3, [("a", float), ("b", int)]),
    "record array": lambda: np.rec.array([(1, 2.0)], names=("a", "b")),
    "not masked": lambda: np.ma.masked_array([1.0, 2.0, 3.0]),
    "masked whole": lambda: np.ma.masked_array([1, 2, 3], [0, 0, 1]),
    "masked constant": lambda: np.ma.masked,
    "key": lambda: jax.random.key(1),
    "old key": lambda: jax.random.PRNGKey(1),
    "keys": lambda: jax.random.split(jax.random.key(1)),
    "shape": lambda: jax.ShapeDtypeStruct((3,), jnp.float32),
    "range": lambda: range(3),
    "slice": lambda: slice(3),
    "ellipsis": lambda: ...,
    "not implemented": lambda: NotImplemented,
    "module": lambda: np,
    "type": lambda: int,
    "builtin": lambda: len,
    "print": lambda: print,
    "iterator": lambda: iter([1, 2]),
    "date": lambda: dt.date(2020, 1, 1),
    "exception": lambda: ValueError("a"),
    "budget": lambda: dppvi.PrivacyBudget(1.0),
    "class of budgets": lambda: dppvi.PrivacyBudget,
    "sampler": lambda: dppvi.PoissonSampling(0.5),
    "class of schedules": lambda: dppvi.Asynchronous,
    "schedule": lambda: dppvi.synchronous,
    "optimizer": lambda: optax.adam(0.1),
    "partition": lambda: dppvi.Partition((np.arange(2), np.arange(2, 4))),
    "distribution": lambda: dist.Normal(0, 1),
    "series": _pandas(lambda pandas: pandas.Series([1.0, None, 3.0])),
    "series of objects": _pandas(lambda pandas: pandas.Series([1, "a", None])),
    "nullable series": _pandas(lambda pandas: pandas.Series([1, None], dtype="Int64")),
    "data frame": _pandas(lambda pandas: pandas.DataFrame({"y": [1.0, 2.0]})),
    "missing": _pandas(lambda pandas: pandas.NA),
}


# ---------------------------------------------------------------------------------------------
# What is called, and with what if nothing is wrong.


def model(y, z=None, spread=1.0):
    """The smallest model of all."""
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean if z is None else mean + z, spread), obs=y)


def another_model(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0, 10)), 1), obs=y)


DATA = [{"y": np.zeros(2)}, {"y": np.ones(2)}]
KEY = jax.random.key(0)
BUDGET = dppvi.PrivacyBudget(1.0)
METHOD = dppvi.DPOptimization(num_local_steps=1)
FIT = {"model": model, "guide": None, "data": DATA, "rng_key": KEY, "method": METHOD}
FIT |= {"budget": BUDGET, "num_rounds": 1, "progress_bar": False}
PLAN = dppvi.plan_privacy(METHOD, BUDGET, num_rounds=1, client_sizes=[2, 2])
PVI = {"model": model, "guide": None, "records": DATA[0], "method": METHOD}
PVI |= {"client_sizes": [2, 2], "plan": PLAN}
SELECTION = {"runs": privacy.NegativeBinomialRuns(2.0), "client_sizes": [2, 2], "score_bound": 1.0}
RELEASE = {"noise_multiplier": 4.0, "num_releases": 3}


@functools.cache
def fitted() -> dppvi.run.FitResult:
    return dppvi.fit(**FIT)


@functools.cache
def fitted_posterior() -> dppvi.posterior.Posterior:
    return fitted().posterior


@functools.cache
def algorithm() -> dppvi.protocol.Algorithm:
    return dppvi.pvi(**PVI)


@functools.cache
def first_state() -> dppvi.protocol.PVIState:
    return algorithm().init(KEY)


@functools.cache
def shards() -> dppvi.records.Shards:
    return dppvi.records.stack_clients(DATA)


@functools.cache
def diagnosed() -> dppvi.analysis.Diagnostics:
    return dppvi.diagnose(fitted(), num_replays=2)


@functools.cache
def compared() -> dppvi.analysis.Comparison:
    found = fitted().posterior
    mean, stddev = found.mean, found.stddev
    each = {"this posterior": mean, "nonprivate_pooled_nuts": mean}
    return dppvi.analysis.Comparison(each, dict.fromkeys(each, stddev))


@functools.cache
def saved_path() -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp()) / "posterior"
    fitted().posterior.save(path)
    return path


def saved_digest() -> str:
    return silo.digest_of(saved_path())


class StoppedError(Exception):
    """The call got so far that its first round would be compiled."""


class Call(NamedTuple):
    """Something public with arguments that are right.

    Attributes:
        function: What is called, by keyword.
        arguments: What it is called with. Others of its parameters are left to their defaults.
        names: What a sentence may call a parameter besides its name.
        of_user: Parameters that may be any object, or are called or opened as they are.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = {}
    names: Mapping[str, tuple[str, ...]] = {}
    of_user: tuple[str, ...] = ()


def in_data(function: Callable[..., Any], **rest: Any) -> Callable[..., Any]:
    """The function with the value in the place of an array of the data."""
    return lambda y: function(data={"y": y}, **rest)


def of_posterior(method: str) -> Callable[..., Any]:
    """A method of a posterior, which is fitted when it is called and not when it is written."""

    def call(**arguments: Any) -> Any:
        return getattr(fitted().posterior, method)(**arguments)

    return call


def fits(**arguments: Any) -> Any:
    return dppvi.fit(**{**FIT, **arguments})


def plans(**arguments: Any) -> Any:
    given = {"method": METHOD, "budget": BUDGET, "num_rounds": 1, "client_sizes": [2, 2]}
    return dppvi.plan_privacy(**{**given, **arguments})


# Every argument of every method, by name.
METHODS: dict[str, Call] = {
    "DPOptimization": Call(
        dppvi.DPOptimization,
        {
            "clip_norm": 1.0,
            "num_local_steps": 2,
            "optimizer": None,
            "sampler": dppvi.FullBatch(),
            "expectation": dppvi.methods.Automatic(),
            "microbatch_size": None,
        },
    ),
    "NonPrivate": Call(
        dppvi.NonPrivate,
        {
            "num_local_steps": 2,
            "optimizer": None,
            "expectation": dppvi.methods.Automatic(),
            "microbatch_size": 10,
        },
    ),
    "GlobalVI": Call(
        dppvi.GlobalVI,
        {
            "clip_norm": 1.0,
            "optimizer": None,
            "sampler": dppvi.FullBatch(),
            "expectation": dppvi.methods.Automatic(),
            "microbatch_size": None,
        },
    ),
    "BayesianCommitteeMachine": Call(
        dppvi.BayesianCommitteeMachine, {"prior": "same", "local": METHOD}
    ),
    "FisherScoring": Call(
        dppvi.FisherScoring, {"num_replicates": 8, "noise_aware": False, "microbatch_size": 10}
    ),
    **{
        method.__name__: Call(
            method,
            {
                **({} if method is dppvi.methods.ParameterPerturbation else {"num_shards": 2}),
                "clip_norm": 1.0,
                "num_local_steps": 2,
                "optimizer": None,
                "expectation": dppvi.methods.Automatic(),
                "noise": privacy.Gaussian(),
            },
        )
        for method in (
            dppvi.methods.ParameterPerturbation,
            dppvi.methods.LocalAveraging,
            dppvi.VirtualClients,
        )
    },
}

STUDY = {
    "model": model,
    "hospitals": {"north": 2, "south": 2},
    "records": {"y": ((), "float32")},
    "budget": BUDGET,
    "seed": 0,
    "guide": None,
    "method": METHOD,
    "schedule": dppvi.sequential,
    "num_rounds": 1,
    "damping": 0.4,
    "model_kwargs": {"spread": 1.0},
    "init_scale": None,
    "prior": None,
    "trusted_aggregator": False,
}


def prepared(study: silo.Study) -> Any:
    return silo.study.prepare(silo.PinnedStudy(study, "0" * 64))


def unreached(name: str, message: bytes) -> bytes:
    raise ConnectionError


def opened(**given: Any) -> None:
    with silo.open_gateway(**given):
        pass


# Cheap: nothing is traced, or next to nothing.
CALLS: dict[str, Call] = {
    "silo.Study": Call(silo.Study, STUDY),
    "silo.digest_of": Call(silo.digest_of, {"path": str(HERE)}),
    "silo.load_study": Call(
        silo.load_study, {"path": str(HERE.parent / "silo" / "smallest.py"), "sha256": None}
    ),
    "silo.send": Call(
        silo.send,
        {"path": "no.sock", "message": b"", "timeout": 1.0},
        {"message": ("gateway",), "timeout": ("gateway",)},
    ),
    "silo.open_gateway": Call(
        opened, {"path": "silo.toml", "insecure_noise_seed": 0}, {"insecure_noise_seed": ("path",)}
    ),
    **METHODS,
    "NaturalGradient": Call(
        dppvi.NaturalGradient, {"location_rate": 0.2, "ridge": 1.0, "spread_weight": 1.0}
    ),
    "MonteCarlo": Call(dppvi.MonteCarlo, {"num_draws": 2}),
    "Automatic": Call(dppvi.methods.Automatic, {"num_draws": 2}),
    "GaussHermite": Call(dppvi.methods.GaussHermite, {"num_nodes": 2}),
    "SphericalCubature": Call(dppvi.methods.SphericalCubature),
    "FullBatch": Call(dppvi.FullBatch),
    "DiscreteGaussian": Call(dppvi.privacy.DiscreteGaussian),
    "privacy.Gaussian": Call(privacy.Gaussian),
    "PoissonSampling": Call(dppvi.PoissonSampling, {"sampling_prob": 0.1}),
    "FixedSizeSampling": Call(dppvi.FixedSizeSampling, {"batch_size": 2}),
    "TrustedAggregator": Call(dppvi.TrustedAggregator, {"max_dropouts": 0}),
    "Asynchronous": Call(dppvi.Asynchronous, {"latencies": (1.0, 2.0)}),
    "random_subset": Call(dppvi.random_subset, {"group_size": 1, "seed": 0}),
    "sequential": Call(dppvi.sequential, {"round_number": 0, "num_clients": 2}),
    "synchronous": Call(dppvi.synchronous, {"round_number": 0, "num_clients": 2}),
    "Asynchronous.__call__": Call(
        dppvi.Asynchronous((1.0, 2.0)),
        {"round_number": 0, "num_clients": 2},
        {"num_clients": ("clients",)},
    ),
    "PrivacyBudget": Call(
        dppvi.PrivacyBudget,
        {
            "epsilon": 1.0,
            "delta": 1e-5,
            "relation": "replace_one",
            "unit": "record",
            "max_records_per_person": 1,
        },
    ),
    "SecretKeys": Call(
        dppvi.privacy.SecretKeys,
        {"insecure_seed": 0, "generator": None},
        {"insecure_seed": ("seed",)},
    ),
    "SecretKeys.round_key": Call(dppvi.privacy.SecretKeys(0).round_key, {"round_number": 0}),
    "Partition": Call(
        dppvi.Partition,
        {"rows": (np.arange(2), np.arange(2, 4)), "names": ["Helsinki", "Turku"]},
        {"rows": ("row",), "names": ("name",)},
    ),
    "Partition.from_labels": Call(dppvi.Partition.from_labels, {"labels": ["a", "b", "a"]}),
    "partition": Call(
        dppvi.partition,
        {
            "rng_key": KEY,
            "labels_or_num_rows": [0, 0, 0, 0, 0, 1, 1, 1],
            "num_clients": 2,
            "size_factor": 0.0,
            "class_balance_factor": 0.0,
        },
        {"labels_or_num_rows": ("labels", "num_rows", "rows")},
    ),
    "split_evenly": Call(
        dppvi.records.split_evenly,
        {"rng_key": KEY, "num_rows": 8, "num_clients": 2},
        {"num_rows": ("number of rows",)},
    ),
    "stack": Call(
        dppvi.records.stack,
        {
            "data": {"y": np.ones(4)},
            "partition": dppvi.Partition((np.arange(2), np.arange(2, 4))),
            "missing": ("y",),
        },
    ),
    "stack, one array": Call(
        lambda y: dppvi.records.stack({"y": y}, dppvi.Partition((np.arange(1),))), {"y": np.ones(3)}
    ),
    "stack_clients": Call(
        dppvi.records.stack_clients, {"data_per_client": DATA}, {"data_per_client": ("data",)}
    ),
    "stack_clients, by name": Call(
        functools.partial(dppvi.records.stack_clients, DATA),
        {"names": ["Helsinki", "Turku"], "missing": ("y",)},
        {"names": ("name",)},
    ),
    "stack_clients, one array": Call(
        lambda y: dppvi.records.stack_clients([{"y": np.ones(3)}, {"y": y}]), {"y": np.ones(3)}
    ),
    "spread": Call(dppvi.records.spread, {"shards": dppvi.records.stack_clients(DATA)}),
    "stack_clients, one client": Call(
        lambda data: dppvi.records.stack_clients([{"y": np.ones(3)}, data]),
        {"data": {"y": np.ones(3)}},
    ),
    "plan_privacy": Call(
        plans,
        {
            "method": METHOD,
            "budget": BUDGET,
            "num_rounds": 1,
            "client_sizes": [2, 2],
            "schedule": dppvi.sequential,
            "trusted_aggregator": False,
            "ledger_file": None,
            "num_latents": 3,
        },
    ),
    "plan_privacy, shards": Call(
        functools.partial(plans, method=dppvi.VirtualClients(2), schedule=dppvi.synchronous),
        {"trusted_aggregator": True, "budget": BUDGET, "client_sizes": [2, 2]},
        {"client_sizes": ("records",)},
    ),
    "plan_privacy, one of several": Call(
        lambda budget, client_size: plans(budget=[BUDGET, budget], client_sizes=[200, client_size]),
        {"budget": BUDGET, "client_size": 200},
        {"client_size": ("client_sizes",)},
    ),
    "plan_privacy, a client by name": Call(
        lambda client_size: plans(client_sizes={"Helsinki": 200, "Turku": client_size}),
        {"client_size": 200},
        {"client_size": ("client_sizes",)},
    ),
    "plan_privacy, sampled": Call(
        lambda sampling_prob, epsilon: plans(
            method=dppvi.DPOptimization(sampler=dppvi.PoissonSampling(sampling_prob)),
            budget=dppvi.PrivacyBudget(epsilon),
            client_sizes=[500],
        ),
        {"sampling_prob": 0.1, "epsilon": 1.0},
        {"sampling_prob": ("sampler", "num_shards"), "epsilon": ("delta",)},
    ),
    "plan_privacy, fixed size": Call(
        lambda batch_size, epsilon: plans(
            method=dppvi.DPOptimization(sampler=dppvi.FixedSizeSampling(batch_size)),
            budget=dppvi.PrivacyBudget(epsilon),
            client_sizes=[500],
        ),
        {"batch_size": 50, "epsilon": 1.0},
    ),
    "plan_privacy, discrete": Call(
        lambda epsilon, clip_norm: plans(
            method=dppvi.VirtualClients(2, clip_norm, noise=dppvi.privacy.DiscreteGaussian()),
            budget=dppvi.PrivacyBudget(epsilon),
        ),
        {"epsilon": 1.0, "clip_norm": 1.0},
        {"epsilon": ("noise",)},
    ),
    "plan_privacy, Gaussian": Call(
        lambda **budget: str(plans(budget=dppvi.PrivacyBudget(**budget))),
        {"epsilon": 1.0, "delta": 1e-5, "max_records_per_person": 1},
        {"epsilon": ("noise",), "max_records_per_person": ("noise",)},
    ),
    "privacy.epsilon_from_noise": Call(
        privacy.epsilon_from_noise,
        {
            **RELEASE,
            "delta": 1e-5,
            "relation": "replace_one",
            "sampler": dppvi.FullBatch(),
            "num_records": 100,
        },
    ),
    "privacy.noise_from_epsilon": Call(
        privacy.noise_from_epsilon,
        {"budget": BUDGET, "num_releases": 3, "sampler": dppvi.FullBatch(), "num_records": 100},
    ),
    "privacy.rounds_from_epsilon": Call(
        privacy.rounds_from_epsilon,
        {
            "budget": BUDGET,
            "noise_multiplier": 4.0,
            "releases_per_round": 1,
            "sampler": dppvi.FullBatch(),
            "num_records": 100,
        },
    ),
    "privacy.paper_epsilon": Call(
        privacy.paper_epsilon, {**RELEASE, "sampling_prob": 0.1, "delta": 1e-5}
    ),
    "privacy.unit_sensitivity": Call(privacy.unit_sensitivity, {"relation": "replace_one"}),
    "privacy.statement_schema": Call(privacy.statement_schema),
    "privacy.best_attack": Call(
        privacy.best_attack,
        {
            "composition": PLAN.clients[0].composition,
            "relation": "replace_one",
            "false_positive_rate": 0.01,
        },
    ),
    "privacy.NegativeBinomialRuns": Call(privacy.NegativeBinomialRuns, {"mean": 2.0, "shape": 1.0}),
    "the number of negative binomial runs": Call(
        lambda mean, shape: privacy.NegativeBinomialRuns(mean, shape).count(0.5),
        {"mean": 2.0, "shape": 1.0},
    ),
    "privacy.plan_selection": Call(
        privacy.plan_selection, {"budget": BUDGET, **SELECTION, "score_share": 0.1}
    ),
    "audit.audit": Call(
        audit.audit,
        {
            "claim": lambda delta: 1.0,
            "scores": np.arange(8.0),
            "other_scores": np.arange(8.0),
            "deltas": (0.1,),
            "failure_prob": 0.1,
        },
        {"other_scores": ("scores",)},
    ),
    "Ledger.charge": Call(PLAN.ledger().charge, {"entries": ()}),
    "Ledger.charge, one entry": Call(
        lambda **entry: PLAN.ledger().charge([privacy.Entry(**entry)]),
        {
            "round": 0,
            "client": 0,
            "event": PLAN.clients[0].mechanism.dp_event,
            "num_releases": 1,
        },
        {"num_releases": ("budget is used up",)},
    ),
    "Ledger.composition": Call(PLAN.ledger().composition, {"client": 0}),
    "Ledger.spent": Call(PLAN.ledger().spent, {"delta": 1e-5}),
    "Ledger": Call(lambda **fields: dppvi.privacy.Ledger(**fields).spent(), {"budgets": (BUDGET,)}),
    "PrivacyStatement": Call(
        lambda **fields: str(dppvi.privacy.PrivacyStatement(**fields)),
        {
            "method": "DPOptimization",
            "plan": PLAN,
            "ledger": PLAN.ledger(),
            "insecure_seed": False,
        },
    ),
    "LedgerFile": Call(dppvi.privacy.LedgerFile, {"path": "ledger"}),
    "LedgerFile.open": Call(
        lambda path: dppvi.privacy.LedgerFile(path).open(PLAN.ledger()),
        {"path": "ledger"},
        {"path": ("folder",)},
    ),
    "citation": Call(dppvi.citation, {"result": fitted}),
    "Comparison.shift": Call(lambda name: compared().shift(name), {"name": "this posterior"}),
    "Comparison.width": Call(lambda name: compared().width(name), {"name": "this posterior"}),
    "PrivacyPlan.at": Call(PLAN.at, {"round_number": 1}),
    "FitResult.posterior_at": Call(
        lambda round_number: fitted().posterior_at(round_number),
        {"round_number": 1},
        {"round_number": ("rounds",)},
    ),
}


# Dearer: a model is traced, or small programs are compiled.
@functools.cache
def pinned_study() -> silo.PinnedStudy:
    return silo.PinnedStudy(silo.Study(**STUDY), "0" * 64)


DEAR: dict[str, Call] = {
    "silo.Study, prepared": Call(lambda **given: prepared(silo.Study(**given)), STUDY),
    "silo.statements": Call(silo.statements, {"pinned": pinned_study, "result": fitted}),
    "silo.run_study": Call(
        silo.run_study,
        {
            "pinned": pinned_study,
            "deliver": unreached,
            "checkpoint": "server.npz",
        },
        {"checkpoint": ("path", "folder")},
    ),
    "fit": Call(
        dppvi.fit,
        {
            **FIT,
            "clients": None,
            "schedule": dppvi.sequential,
            "damping": 0.4,
            "model_kwargs": {"spread": 1.0},
            "trusted_aggregator": False,
            "prior": None,
            "insecure_noise_seed": 0,
            "init_scale": None,
        },
        {"guide": ("guide",), "insecure_noise_seed": ("seed",)},
    ),
    "fit, checkpoint": Call(fits, {"checkpoint": "run"}, {"checkpoint": ("path", "folder")}),
    "fit, ledger_file": Call(fits, {"ledger_file": "ledger"}, {"ledger_file": ("path", "folder")}),
    "fit, pooled": Call(functools.partial(fits, data={"y": np.zeros(8)}), {"clients": 2}),
    "fit, one array": Call(in_data(functools.partial(fits, clients=2)), {"y": np.zeros(8)}),
    "fit, a client by name": Call(
        lambda data: fits(data={"Helsinki": {"y": np.zeros(8)}, "Turku": data}),
        {"data": {"y": np.zeros(8)}},
        {"data": ("Turku's data", "model")},
    ),
    "fit, shards": Call(
        functools.partial(
            fits, method=dppvi.VirtualClients(2, num_local_steps=1), schedule=dppvi.synchronous
        ),
        {"trusted_aggregator": True, "init_scale": 0.1, "damping": 0.5},
    ),
    "fit, asynchronous": Call(
        lambda latencies: fits(schedule=dppvi.Asynchronous(latencies)), {"latencies": (1.0, 2.0)}
    ),
    "fit, a schedule of one's own": Call(
        lambda groups: fits(schedule=lambda r, m: groups),
        {"groups": [[0], [1]]},
        {"groups": ("schedule",)},
    ),
    "pvi": Call(
        dppvi.pvi,
        {
            **PVI,
            "schedule": dppvi.sequential,
            "damping": 0.4,
            "model_kwargs": {"spread": 1.0},
            "secret_keys": dppvi.privacy.SecretKeys(0),
            "trusted_aggregator": False,
            "prior": None,
            "ledger_file": None,
            "init_scale": None,
        },
    ),
    "pvi, one array": Call(lambda y: dppvi.pvi(**{**PVI, "records": {"y": y}}), {"y": np.ones(3)}),
    "pvi().init": Call(lambda rng_key: algorithm().init(rng_key), {"rng_key": KEY}),
    "pvi().step": Call(
        lambda **given: algorithm().step(**given),
        {"rng_key": KEY, "state": first_state, "shards": shards},
    ),
    "pvi().posterior": Call(lambda state: algorithm().posterior(state), {"state": first_state}),
    "select": Call(
        dppvi.select,
        {
            "settings": [0.5],
            "fit_one": lambda setting, budgets, key: fitted(),
            "score": lambda run: [np.zeros(2), np.zeros(2)],
            "plan": functools.cache(
                lambda: privacy.plan_selection(dppvi.PrivacyBudget(8.0), **SELECTION)
            ),
            "insecure_seed": 0,
        },
        {"insecure_seed": ("seed",)},
    ),
    "score": Call(
        dppvi.score,
        {
            "posterior": fitted_posterior,
            "data": DATA,
            "budget": BUDGET,
            "rng_key": KEY,
            "score_range": (-5.0, 0.0),
            "num_samples": 2,
            "trusted_aggregator": False,
            "insecure_noise_seed": 0,
        },
        {"insecure_noise_seed": ("seed",)},
    ),
    "score, ledger_file": Call(
        lambda ledger_file: dppvi.score(
            fitted().posterior, DATA, budget=BUDGET, rng_key=KEY, ledger_file=ledger_file
        ),
        {"ledger_file": "ledger"},
        {"ledger_file": ("path", "folder")},
    ),
    "compare": Call(
        dppvi.compare,
        {
            "result": fitted,
            "data": DATA,
            "rng_key": KEY,
            "guide": None,
            "clients": None,
            "max_clients": 0,
            "num_warmup": 1,
            "num_samples": 1,
        },
    ),
    "recommend": Call(
        dppvi.recommend,
        {
            "model": model,
            "records": DATA[0],
            "client_sizes": [2, 2],
            "budget": BUDGET,
            "guide": None,
            "model_kwargs": {"spread": 1.0},
            "prior": None,
            "trusted_aggregator": False,
        },
        {"guide": ("guide",)},
    ),
    "recommend, one array": Call(
        lambda y: dppvi.recommend(model, {"y": y}, [2, 2], BUDGET), {"y": np.ones(3)}
    ),
    "diagnose": Call(dppvi.diagnose, {"result": fitted, "rng_key": KEY, "num_replays": 2}),
    "Posterior.sample": Call(of_posterior("sample"), {"rng_key": KEY, "shape": (2,)}),
    "Posterior.distribution": Call(of_posterior("distribution"), {"latent": "mean"}),
    "Posterior.quantiles": Call(of_posterior("quantiles"), {"probs": (0.1, 0.9)}),
    "Posterior.log_density": Call(of_posterior("log_density"), {"values": {"mean": 1.0}}),
    "Posterior.log_density, one value": Call(
        lambda mean: fitted().posterior.log_density({"mean": mean}), {"mean": 1.0}
    ),
    "Posterior.predictive": Call(
        of_posterior("predictive"),
        {"rng_key": KEY, "num_samples": 2, "batch_size": None, "y": np.ones(3)},
    ),
    "Posterior.to_arviz": Call(
        of_posterior("to_arviz"),
        {
            "rng_key": KEY,
            "num_samples": 2,
            "public_data": {"y": np.ones(3)},
            "dims": {},
            "coords": {},
        },
        {"public_data": ("y must",)},
    ),
    "Posterior.to_arviz, one of each": Call(
        lambda y, dims, coords: fitted().posterior.to_arviz(
            num_samples=2, public_data={"y": y}, dims={"y": dims}, coords={"row": coords}
        ),
        {"y": np.ones(3), "dims": ["row"], "coords": [0, 1, 2]},
    ),
    "plots.convergence": Call(
        plots.convergence,
        {"result": fitted, "scores": {"a": [1.0]}, "references": {"a": {"b": 1.0}}, "ax": None},
    ),
    "plots.convergence, one of each": Call(
        lambda scores, references: plots.convergence(
            fitted(), {"a": scores}, {"a": {"b": references}}
        ),
        {"scores": [1.0], "references": 1.0},
    ),
    "plots.privacy": Call(plots.privacy, {"result": fitted, "diagnostics": diagnosed, "ax": None}),
    "plots.clients": Call(plots.clients, {"result": fitted, "diagnostics": diagnosed, "ax": None}),
    "Posterior.save": Call(of_posterior("save"), {"path": "posterior"}, {"path": ("folder",)}),
    "load, path": Call(
        lambda path: dppvi.load(path, model), {"path": saved_path}, {"path": ("file", "folder")}
    ),
    "load": Call(
        lambda **given: dppvi.load(**{"path": saved_path(), "model": model, **given}),
        {"model": model, "guide": None, "model_kwargs": {"spread": 1.0}},
        {"guide": ("guide",)},
    ),
    "silo.load_prior": Call(
        silo.load_prior,
        {
            "path": saved_path,
            "sha256": saved_digest,
            "model": model,
            "guide": None,
            "model_kwargs": {"spread": 1.0},
        },
        {"path": ("file", "folder", "posterior", "large"), "sha256": ("posterior",)},
    ),
}


# ---------------------------------------------------------------------------------------------
# What comes of it.


def fault_of(call: Call, name: str, value: Any) -> str | None:
    """What is wrong with how a value is taken; nothing if it is accepted, or refused well."""
    arguments = {
        key: given() if any(given is one for one in LAZY) else given
        for key, given in call.arguments.items()
        if key != name
    }
    try:
        with warnings.catch_warnings():
            # NumPyro says of values outside a support that they are; that is a density's business.
            warnings.filterwarnings("ignore", "Out-of-support values", UserWarning)
            call.function(**arguments, **{name: value})
    except StoppedError:
        return None
    except Exception as error:  # noqa: BLE001  # whatever it is, it is looked at
        return _fault(error, (name, *call.names.get(name, ())))
    return None


LAZY = (
    pinned_study,
    saved_path,
    saved_digest,
    fitted,
    fitted_posterior,
    first_state,
    shards,
    diagnosed,
    DEAR["select"].arguments["plan"],
)


def _fault(error: Exception, names: tuple[str, ...]) -> str | None:
    frames = list(_frames(error))
    file, line = frames[-1]
    if file != HERE and not (file.is_relative_to(PACKAGE) and line in _raises(file)):
        place = "/".join(file.parts[-2:])
        return f"raw {type(error).__name__} from {place}:{line}: {str(error)[:100]!r}"
    message = str(error.args[0]) if error.args else ""
    if not message.endswith((".", "?")) or "\n" in message or not 30 < len(message) <= 400:
        return f"no sentence: {message!r}"
    if "object at 0x" in message:
        return f"an address: {message!r}"
    if not any(name in message for name in (*names, "inside a JAX transformation")):
        return f"names no {names[0]}: {message!r}"
    return None


def _frames(error: Exception) -> Iterator[tuple[pathlib.Path, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield pathlib.Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno
        trace = trace.tb_next


@functools.cache
def _raises(file: pathlib.Path) -> frozenset[int]:
    """Lines of a file that belong to a ``raise`` statement."""
    tree = ast.parse("".join(linecache.getlines(str(file))))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return frozenset(
        line for node in found for line in range(node.lineno, (node.end_lineno or 0) + 1)
    )


# ---------------------------------------------------------------------------------------------
# The tests.

# Not called here, and why.
MADE_BY_US = "made by the library; what is in it is not passed by users"
IN_PROGRAMS = "runs inside compiled programs, on traced arrays"
IN_PLANS = "called by plans, with numbers that were checked"
A_TYPE = "a type"
CARRIED = "what a method carries is asked by plans and compiled rounds"
LEFT_OUT = {
    **dict.fromkeys(
        [
            *("Algorithm", "PVIState", "RoundInfo", "Citation", "Comparison", "Diagnostics"),
            *("FitResult", "History", "Outcome", "Posterior", "Prior", "PrivacyPlan", "Selection"),
            *("Status", "Shards", "privacy.Attack", "privacy.Batch", "privacy.ClientPlan"),
            *("privacy.Entry", "privacy.GaussianSum", "privacy.GaussianShardSum"),
            *("privacy.SelectionPlan", "privacy.Worth"),
        ],
        MADE_BY_US,
    ),
    **dict.fromkeys(
        [
            *("privacy.clipped", "privacy.clipped_in_steps", "privacy.clipped_sum"),
            *("privacy.add_noise", "privacy.draw_noise", "privacy.by_purpose"),
            "Shards.of_client",
        ],
        IN_PROGRAMS,
    ),
    **dict.fromkeys(
        [
            *("privacy.Mechanism", "privacy.Noise", "privacy.Relation", "privacy.Sampler"),
            *("privacy.Unit", "UnsupportedModelError", "BudgetExceededError"),
        ],
        A_TYPE,
    ),
    **{
        f"{method}.{part}": CARRIED
        for method in (
            *("DPOptimization", "NonPrivate", "ParameterPerturbation", "LocalAveraging"),
            *("VirtualClients", "GlobalVI", "FisherScoring"),
        )
        for part in (
            *("guide", "coordinates", "check", "solver", "learning_rate", "visit", "memory"),
            *("told", "take", "said", "weights", "plan"),
        )
    },
    **{
        f"NaturalGradient.{part}": CARRIED
        for part in ("change", "measured", "unmeasured", "repaired_whole")
    },
    **{
        f"privacy.Sampler.{method}": A_TYPE
        for method in (
            *("check", "of_client", "inclusion_prob", "describe", "physical_size", "draw"),
            "dp_event",
        )
    },
    "silo.Deliver": A_TYPE,
    "silo.PinnedStudy": MADE_BY_US,
    "silo.Gateway": MADE_BY_US,
    "silo.Gateway.handle": "takes bytes alone, which tests/silo mutates",
    "LedgerFile.charge": "Ledger.charge, and LedgerFile.open for its file",
    "LedgerFile.spent": IN_PLANS,
    "LedgerFile.charged_by": IN_PLANS,
    "LedgerFile.keep": IN_PLANS,
    "LedgerFile.names": IN_PLANS,
    "LedgerFile.newest": IN_PLANS,
    "LedgerFile.rejoin": IN_PLANS,
    "Ledger.check": IN_PLANS,
    "Posterior.guide": "takes any arguments, as NumPyro's guides do",
    "FixedSizeSampling.draw": IN_PROGRAMS,
    "FullBatch.draw": IN_PROGRAMS,
    "PoissonSampling.draw": IN_PROGRAMS,
    **{
        f"{name}.{method}": IN_PLANS
        for name in ("FixedSizeSampling", "FullBatch", "PoissonSampling")
        for method in (
            "check",
            "of_client",
            "inclusion_prob",
            "describe",
            "physical_size",
            "dp_event",
        )
    },
    **{
        f"privacy.{name}.{method}": IN_PLANS
        for name in ("GaussianSum", "GaussianShardSum")
        for method in ("check", "sensitivity")
    },
    "FixedSizeSampling.dp_event": IN_PLANS,
    "FullBatch.dp_event": IN_PLANS,
    "PoissonSampling.dp_event": IN_PLANS,
    "DiscreteGaussian.dp_event": IN_PLANS,
    "privacy.Gaussian.dp_event": IN_PLANS,
    "TrustedAggregator.check": IN_PLANS,
    "TrustedAggregator.num_shares": IN_PLANS,
    "privacy.NegativeBinomialRuns.count": IN_PLANS,
    "privacy.NegativeBinomialRuns.dp_event": IN_PLANS,
}
# Parameters of what is called that get no values here.
PARAMETERS_LEFT_OUT = {
    "affordable": MADE_BY_US,
    "ledger": MADE_BY_US,
    "run": MADE_BY_US,
    "kept": MADE_BY_US,
    "client_names": MADE_BY_US,
    "entries": "Ledger.charge",
    "model_args": "named one by one",
}
# What is called is the user's own, and so is what it raises.
OWN = {
    "schedule": {"distribution"},
    "deliver": {"distribution", "schedule"},
    "claim": {"builtin", "distribution"},
    "fit_one": {"distribution"},
    "score": {"builtin", "distribution"},
    "mean": {"tracer"},
}
# What takes many seconds. Mistakes in fits are in test_bad_input.py, too.
DEAR_TOO = (
    "silo.Study",
    "silo.digest_of",
    "plan_privacy, sampled",
    "plan_privacy, fixed size",
    "privacy.noise_from_epsilon",
    "privacy.paper_epsilon",
    "privacy.plan_selection",
    "privacy.rounds_from_epsilon",
)
DEAR |= {name: CALLS.pop(name) for name in DEAR_TOO}


@pytest.fixture
def no_rounds(monkeypatch, tmp_path):
    for make in (fitted, diagnosed, compared):
        make()

    def stop(*arguments: Any, **named: Any) -> None:
        raise StoppedError

    monkeypatch.chdir(tmp_path)  # for what is taken for a file's name
    monkeypatch.setattr(rounds, "run_round", stop)
    monkeypatch.setattr(replay, "replays", stop)
    monkeypatch.setattr(numpyro.infer.MCMC, "run", stop)


def faults(call: Call, values: Mapping[str, Callable[[], Any]]) -> list[str]:
    found = []
    for name in call.arguments:
        for label, make in values.items():
            if label in OWN.get(name, ()):
                continue
            fault = fault_of(call, name, make())
            if fault is not None:
                found.append(f"{name} = {label}: {fault}")
    return found


@pytest.mark.usefixtures("no_rounds")
class TestEveryArgument:
    @pytest.mark.parametrize("name", CALLS)
    def test_is_accepted_or_refused_in_a_sentence(self, name):
        assert not faults(CALLS[name], {**FEW, **MANY})

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DEAR)
    def test_that_is_dear_to_try_likewise(self, name):
        assert not faults(DEAR[name], {**FEW, **MANY})

    @pytest.mark.parametrize(
        "name", [*CALLS, *[pytest.param(name, marks=pytest.mark.slow) for name in DEAR]]
    )
    def test_is_right_to_begin_with(self, name):
        call = {**CALLS, **DEAR}[name]
        first = next(iter(call.arguments), None)
        if first is not None:
            given = call.arguments[first]
            right = given() if any(given is one for one in LAZY) else given
            assert fault_of(call, first, right) is None


def public() -> dict[str, Any]:
    """Everything that is called by users, and the methods of what they hold, by name."""
    found: dict[str, Any] = {}
    moved = [("", getattr(dppvi, room), [name]) for name, room in dppvi._MOVED.items()]
    for prefix, module, names in (
        ("", dppvi, dppvi.__all__),
        *moved,
        ("privacy.", privacy, privacy.__all__),
        ("silo.", silo, silo.__all__),
    ):
        for name in names:
            thing = getattr(module, name)
            known = any(thing is other for other in found.values())
            if known or isinstance(thing, types.ModuleType):
                continue
            found[prefix + name] = thing
            if isinstance(thing, type) and thing.__module__.startswith("numpyro_dppvi"):
                found |= {
                    f"{prefix}{name}.{method}": getattr(thing, method)
                    for base in thing.__mro__
                    if base.__module__.startswith("numpyro_dppvi")
                    for method, function in vars(base).items()
                    if inspect.isroutine(function) or isinstance(function, classmethod)
                    if not method.startswith("_")
                    if parameters_of(getattr(thing, method))
                }
    return found


def parameters_of(function: Any) -> set[str]:
    """Names of a function's parameters; none where it is a type of Python's or a union."""
    try:
        return {*inspect.signature(function).parameters} - {"self"}
    except (TypeError, ValueError):
        return set()


class TestNothingIsLeftOut:
    @pytest.mark.parametrize("name", sorted(public()))
    def test_of_what_is_public(self, name):
        called = [key for key in [*CALLS, *DEAR] if key.split(",")[0].split("()")[0] == name]
        assert bool(called) != (name in LEFT_OUT), name
        if called:
            tried = {one for key in called for one in {**CALLS, **DEAR}[key].arguments}
            missing = parameters_of(public()[name]) - tried - set(PARAMETERS_LEFT_OUT)
            assert not missing, name

    def test_of_what_is_left_out_nothing_is_gone(self):
        assert set(LEFT_OUT) <= set(public())


class TestAFault:
    """The net catches what it is for."""

    @pytest.mark.parametrize(
        ("function", "name", "value", "fault"),
        [
            (dppvi.families.factors.of_blocks, "totals", -1, "raw ValueError"),
            (dppvi.families.DiagonalNormal(()).coordinates, "natural", None, "raw AttributeError"),
            (dppvi.MonteCarlo, "num_points", 1, "no sentence"),
        ],
    )
    def test_is_what_no_line_of_ours_raises(self, function, name, value, fault):
        assert fault_of(Call(function), name, value).startswith(fault)

    def test_is_a_sentence_about_another_argument(self):
        call = Call(lambda steps: dppvi.NonPrivate(num_local_steps=steps))
        assert fault_of(call, "steps", 0) is None
        call = Call(lambda rate: dppvi.NonPrivate(num_local_steps=rate))
        assert fault_of(call, "rate", 0).startswith("names no rate")

    def test_is_an_overflow_that_numpy_tells_of(self):
        call = Call(lambda value: jnp.asarray(np.float64([value])))
        with jax.enable_x64(False):
            assert fault_of(call, "value", 1e39).startswith("raw RuntimeWarning")


# ---------------------------------------------------------------------------------------------
# What the walk above does not say: that it is the right things that are refused.

EVERYTHING_BUT_FLAGS = ["no", "false", "", 0, 1, 2, 0.5, [True], (), {}, np.array(True), math.nan]


class TestFlags:
    @pytest.mark.parametrize("value", [*EVERYTHING_BUT_FLAGS, None, dppvi.TrustedAggregator])
    def test_trusted_aggregator_is_no_matter_of_truthiness(self, value):
        arguments = {"num_rounds": 1, "client_sizes": [2, 2], "schedule": dppvi.synchronous}
        with pytest.raises(TypeError, match="trusted_aggregator must be True or False, got"):
            dppvi.plan_privacy(
                dppvi.VirtualClients(2), BUDGET, **arguments, trusted_aggregator=value
            )
        with pytest.raises(TypeError, match="trusted_aggregator must be True or False, got"):
            dppvi.pvi(**PVI, trusted_aggregator=value)

    @pytest.mark.parametrize("value", [True, np.True_, dppvi.TrustedAggregator()])
    def test_what_means_yes_halves_the_noise_of_four(self, value):
        arguments = {"num_rounds": 1, "client_sizes": [2] * 4, "schedule": dppvi.synchronous}
        method = dppvi.VirtualClients(2)
        alone = dppvi.plan_privacy(method, BUDGET, **arguments, trusted_aggregator=np.False_)
        shared = dppvi.plan_privacy(method, BUDGET, **arguments, trusted_aggregator=value)
        np.testing.assert_allclose(shared.noise_std, alone.noise_std / 2)

    @pytest.mark.parametrize("value", EVERYTHING_BUT_FLAGS)
    @pytest.mark.usefixtures("no_rounds")
    def test_progress_bar(self, value):
        with pytest.raises(TypeError, match="progress_bar must be True or False, got"):
            dppvi.fit(**{**FIT, "progress_bar": value})

    @pytest.mark.parametrize("value", [*EVERYTHING_BUT_FLAGS, None])
    def test_of_a_statement(self, value):
        # A seed of 0 is a seed: it must not be told as none.
        with pytest.raises(TypeError, match="insecure_seed must be True or False, got"):
            dppvi.privacy.PrivacyStatement("DPOptimization", PLAN, PLAN.ledger(), value)

    @pytest.mark.parametrize("value", [True, 0.5, math.nan, -1, "1", None, [1], np.array(1)])
    def test_max_dropouts_is_a_whole_number(self, value):
        with pytest.raises(ValueError, match="max_dropouts must be a whole number of at least 0"):
            dppvi.TrustedAggregator(value)


def laid_out(value: Any) -> np.ndarray:
    """An array of data as the compiled rounds see it, by both ways, which must agree."""
    whole = dppvi.Partition((np.arange(len(value)),))
    pooled, held = (
        dppvi.records.stack({"y": value}, whole),
        dppvi.records.stack_clients([{"y": value}]),
    )
    np.testing.assert_array_equal(pooled.records["y"], held.records["y"])
    return np.asarray(pooled.records["y"][0])


class TestData:
    @pytest.mark.parametrize(
        "value",
        [
            _masked(),
            [_masked(), _masked()],
            [[_masked()], [_masked()]],
            np.ma.masked_array(np.ones((2, 2)), [[0, 0], [0, 1]]),
        ],
    )
    def test_masked_entries_are_refused(self, value):
        with pytest.raises(ValueError, match=r"'y'\] must hold a number in every entry, got a mas"):
            dppvi.records.stack_clients([{"y": value}])
        with pytest.raises(ValueError, match=r"'y'\] must hold a number in every entry, got a mas"):
            dppvi.records.stack({"y": value}, dppvi.Partition((np.arange(2),)))

    def test_a_masked_array_without_a_mask_is_an_array(self):
        np.testing.assert_array_equal(laid_out(np.ma.masked_array([1.0, 2.0])), [1, 2])

    @pytest.mark.parametrize("value", [1e39, -1e39, np.inf, np.nan, 3.5e38])
    def test_numbers_are_finite_where_jax_holds_them(self, value):
        # The sentence is one for all of them: which of them it was is about a record.
        with jax.enable_x64(False), pytest.raises(ValueError, match="fit JAX's float32") as refusal:
            dppvi.records.stack_clients([{"y": [1.0, value]}])
        assert "must hold finite numbers" in str(refusal.value)
        with jax.enable_x64(False), pytest.raises(ValueError, match="fit JAX's float32") as other:
            dppvi.records.stack_clients([{"y": [math.inf, 0.0]}])
        assert str(other.value) == str(refusal.value)

    def test_in_64_bits_they_may_be_larger(self):
        with jax.enable_x64(True):
            assert laid_out([1.0, 1e39])[1] == 1e39

    @pytest.mark.parametrize(
        "value",
        [
            np.longdouble([1, 2]),
            np.float16([1, 2]),
            jnp.asarray([1, 2], jnp.bfloat16),
            np.int8([1, 2]),
            np.uint64([1, 2]),
            np.float64([1, 1e-320]),
        ],
        ids=lambda value: str(value.dtype),
    )
    def test_of_a_number_of_dtypes_is_what_it_was(self, value):
        with jax.enable_x64(False):
            np.testing.assert_array_equal(laid_out(value), np.asarray(value, np.float32))

    @pytest.mark.parametrize("value", [np.longdouble("1e400"), np.longdouble("-1e39")])
    def test_a_long_double_must_fit_as_well(self, value):
        with jax.enable_x64(False), pytest.raises(ValueError, match="fit JAX's float32"):
            dppvi.records.stack_clients([{"y": np.array([value])}])

    def test_clients_dtypes_together_do_not_wrap_around(self):
        # An unsigned number that fits, beside signed ones: NumPy needs 64 bits for both.
        parts = [{"y": np.uint32([3 * 10**9])}, {"y": np.int32([-1])}]
        with jax.enable_x64(False), pytest.raises(ValueError, match="'y' must fit JAX's int32"):
            dppvi.records.stack_clients(parts)

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({"a": np.ones(2)}, "must be an array, got a dict"),
            (np.ones(2, complex), "must hold real numbers, got dtype complex128"),
            (np.zeros((2, 0)), r"at least one number per record, got shape \(2, 0\)"),
            (np.zeros((2, 3, 0)), r"at least one number per record, got shape \(2, 3, 0\)"),
            (np.array(["2020-01-01"] * 2, "datetime64[D]"), "must hold numbers, got dtype datet"),
            (np.zeros(2, [("a", float)]), "must hold numbers, got dtype"),
            (np.ones(2, jnp.float8_e4m3fn), "must hold numbers, got dtype float8"),
        ],
        ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
    )
    def test_what_is_no_column_of_numbers_is_refused(self, value, words):
        with pytest.raises(ValueError, match=words):
            dppvi.records.stack_clients([{"y": value}])
        with pytest.raises(ValueError, match=r"'y'\]"):
            dppvi.pvi(**{**PVI, "records": {"y": value}})

    def test_an_outcome_to_predict_for_must_fit_too(self):
        with pytest.raises(ValueError, match="y must fit JAX's float32, got larger numbers"):
            fitted().posterior.predictive(KEY, 2, y=np.array([1.0, 1e39]))

    @pytest.mark.slow
    def test_an_outcome_that_is_not_known_may_be_missing(self):
        found = fitted().posterior.predictive(KEY, 2, y=np.full(3, np.nan))["y"]
        assert np.isfinite(found).all()

    @pytest.mark.usefixtures("no_rounds")
    def test_shards_of_other_arrays_are_refused(self):
        other = dppvi.records.stack_clients([{"y": np.zeros(2, int)}, {"y": np.ones(2, int)}])
        with pytest.raises(ValueError, match="shards must hold the arrays"):
            algorithm().step(KEY, first_state(), other)


class TestNumbers:
    @pytest.mark.parametrize("clip_norm", [1e-40, 1e39, 1e-320, 1e308, (1.0, 1e-46)])
    @pytest.mark.parametrize("method", [dppvi.DPOptimization, dppvi.methods.ParameterPerturbation])
    def test_clip_norms_are_neither_0_nor_infinite_in_32_bits(self, method, clip_norm):
        with pytest.raises(ValueError, match="clip_norm must lie between 1e-30 and 1e\\+30, got"):
            method(clip_norm=clip_norm)

    @pytest.mark.parametrize(
        ("method", "budget", "num_records"),
        [
            # One over two thousand million shards, and a million records a person: products of
            # numbers that are fine.
            (dppvi.methods.LocalAveraging(2 * 10**9, 1e-30), BUDGET, 2 * 10**9),
            (
                dppvi.DPOptimization(1e30),
                dppvi.PrivacyBudget(1.0, max_records_per_person=10**6),
                2 * 10**6,
            ),
        ],
        ids=["none", "infinite"],
    )
    def test_noise_is_neither_in_32_bits(self, method, budget, num_records):
        with pytest.raises(ValueError, match="noise must have a standard deviation between"):
            dppvi.plan_privacy(method, budget, num_rounds=1, client_sizes=[num_records])

    def test_of_numpy_do_not_wrap_around(self):
        # Ten rounds of 100 steps are a thousand releases, not -24 of them.
        method = dppvi.DPOptimization(num_local_steps=np.int8(100))
        arguments = {"num_rounds": np.int8(10), "client_sizes": np.int8([100, 100])}
        plan = dppvi.plan_privacy(method, BUDGET, **arguments)
        assert [client.num_releases for client in plan.clients] == [1000, 1000]
        assert plan.epsilons.max() <= 1

    @pytest.mark.parametrize("relation", ["replace-one", "", None, "no"])
    def test_a_sensitivity_is_that_of_a_relation(self, relation):
        with pytest.raises(ValueError, match="relation must be 'replace_one' or 'add_or_remove_"):
            privacy.unit_sensitivity(relation)

    def test_a_small_damping_and_a_narrow_start_are_refused(self):
        for name, value in (("damping", 1e-320), ("init_scale", 1e-320), ("init_scale", 1e-7)):
            with pytest.raises(ValueError, match=f"{name} must be at least"):
                dppvi.fit(**{**FIT, name: value})

    @pytest.mark.parametrize(
        ("runs", "fine"),
        [
            (lambda: privacy.NegativeBinomialRuns(1e4, 100.0), True),
            (lambda: privacy.NegativeBinomialRuns(1e5, 500.0), False),
            (lambda: privacy.NegativeBinomialRuns(10.0, 1e20), False),
        ],
    )
    def test_numbers_of_runs_come_to_an_end(self, runs, fine):
        if fine:
            assert runs().count(0.5) > 0
        else:
            with pytest.raises(ValueError, match="mean"):
                runs()
