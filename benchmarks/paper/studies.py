"""What is run: the paper's figures, and every method's numbers in one table.

Numbers were chosen once a figure, on rows that are not reported (see docs/reproduction.md), and
serve all three splits of the figure. ``tried`` says how many settings of a method were looked at.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import optax

import numpyro_dppvi as dppvi
from benchmarks.adult import SPLITS
from models.bnn import bnn
from models.logistic_regression import logistic_regression
from numpyro_dppvi.datasets import TabularData, load_adult, load_support2

EVEN_SPLITS = SPLITS | {"unbalanced 2": (0.7, -0.5)}
"""The splits of a data set whose labels are balanced."""


@dataclass(frozen=True)
class Settings:
    """One method of one figure, in numbers.

    Attributes:
        name: The method, in the words of the paper's legend.
        kind: Which method of the library.
        clip_norm: The clip.
        num_local_steps: Optimiser steps a visit.
        optimizer: Adam, plain gradient descent, or the library's natural gradient.
        learning_rate: Its rate (of locations); ``None`` for the library's default.
        num_rounds: Rounds, at most as many as the paper took.
        damping: The share of a change that is merged.
        num_shards: Shards a client, at most one a record.
        shard_size: Records a shard, where shards follow the clients' sizes instead.
        sampling_prob: The share of records in a step's batch (Poisson); all records if ``None``.
        aggregated: Whether a trusted aggregator sums the changes.
        synchronous: Whether all clients work at once.
        draws: Draws for an expected log likelihood where there is no quadrature for it.
        init_scale: How narrow a random start the run begins at; ``None`` for the prior.
        tried: Settings that were compared to find these.
    """

    name: str
    kind: Literal["optimization", "averaging", "virtual", "same", "split", "global"]
    clip_norm: float = 2.5
    num_local_steps: int = 3
    optimizer: Literal["adam", "sgd", "natural"] = "adam"
    learning_rate: float | None = None
    num_rounds: int = 10
    damping: float = 0.4
    num_shards: int | None = None
    shard_size: int | None = None
    sampling_prob: float | None = None
    aggregated: bool = False
    synchronous: bool = False
    draws: int = 10
    init_scale: float | None = field(default=None, repr=False)  # shown by __str__ if it is set
    tried: int = field(default=1, repr=False, compare=False)  # no part of what is run

    def __str__(self) -> str:
        """What is run. Results are known by it: a later field shows only where it is set."""
        start = "" if self.init_scale is None else f", init_scale={self.init_scale}"
        return f"{repr(self)[:-1]}{start})"

    def method(self, sizes: Sequence[int]) -> Any:
        """The method as a value of the library."""
        rule, optimizer = dppvi.methods.Automatic(self.draws), self._optimizer()
        steps = (self.clip_norm, self.num_local_steps, optimizer)
        if self.kind == "virtual":
            return dppvi.VirtualClients(self._shards(sizes), *steps, expectation=rule)
        if self.kind == "averaging":
            shards = self._shards(sizes)
            return dppvi.methods.LocalAveraging(
                shards, self._clips(shards), *steps[1:], expectation=rule
            )
        if self.kind == "global":
            return dppvi.GlobalVI(self.clip_norm, optimizer, self._sampler(), rule)
        local = dppvi.DPOptimization(*steps, self._sampler(), rule)
        if self.kind == "optimization":
            return local
        return dppvi.BayesianCommitteeMachine(self.kind, local)

    def arguments(self) -> dict[str, Any]:
        """The other arguments of ``fit``."""
        together = self.aggregated or self.synchronous
        return {
            "num_rounds": self.num_rounds,
            "damping": self.damping,
            "init_scale": self.init_scale,
            "trusted_aggregator": self.aggregated,
            "schedule": dppvi.synchronous if together else dppvi.sequential,
        }

    def _optimizer(self) -> optax.GradientTransformation | dppvi.NaturalGradient | None:
        if self.optimizer == "natural":
            return dppvi.NaturalGradient(self.learning_rate or 0.2)
        if self.learning_rate is None:
            return None
        return _optimizer(self.optimizer, self.learning_rate)

    def _sampler(self) -> dppvi.privacy.Sampler:
        if self.sampling_prob is None:
            return dppvi.privacy.FullBatch()
        return dppvi.privacy.PoissonSampling(self.sampling_prob)

    def _shards(self, sizes: Sequence[int]) -> tuple[int, ...]:
        if self.shard_size is not None:
            return tuple(max(1, size // self.shard_size) for size in sizes)
        return tuple(min(self.num_shards or 1, size) for size in sizes)

    def _clips(self, shards: Sequence[int]) -> float | tuple[float, ...]:
        """For the mean over shards of equal size: a larger client's changes are longer."""
        if self.shard_size is None:
            return self.clip_norm
        return tuple(self.clip_norm * number for number in shards)


@functools.cache
def _optimizer(kind: str, rate: float) -> optax.GradientTransformation:
    """One value a rate: equal optimisers share a compiled program."""
    return optax.adam(rate) if kind == "adam" else optax.sgd(rate)


class Study(NamedTuple):
    """One figure of the paper.

    Attributes:
        title: What it shows.
        load: The rows.
        model: The model.
        logits: From draws of its latents and features, shape ``(num_draws, num_rows)``.
        num_clients: How many clients.
        epsilon: The budget, with delta 1e-5.
        splits: Size and class-balance factors by the split's name.
        settings: The methods.
        note: What a reader must know.
    """

    title: str
    load: Callable[[], TabularData]
    model: Callable[..., Any]
    logits: Callable[[Mapping[str, jax.Array], jax.Array], jax.Array]
    num_clients: int
    epsilon: float
    splits: Mapping[str, tuple[float, float]]
    settings: tuple[Settings, ...]
    note: str = ""


def _linear(draws: Mapping[str, jax.Array], X: jax.Array) -> jax.Array:
    return draws["w"] @ X.T


def _network(draws: Mapping[str, jax.Array], X: jax.Array) -> jax.Array:
    def of_draw(weights: Mapping[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.relu(X @ weights["w1"] + weights["b1"])
        return hidden @ weights["w2"] + weights["b2"]

    return jax.lax.map(of_draw, dict(draws))


OPTIMIZATION = Settings("DP optimisation", "optimization")
DESCENT = replace(
    OPTIMIZATION,
    clip_norm=2.0,
    optimizer="sgd",
    learning_rate=3e-4,
    num_rounds=20,
    damping=0.25,
    synchronous=True,
    tried=35,
)
SAME = Settings("BCM same", "same", num_local_steps=30)
SPLIT = Settings("BCM split", "split", num_local_steps=30)
COMMITTEES = tuple(
    replace(one, clip_norm=2.7, num_local_steps=60, optimizer="sgd", learning_rate=3e-4, tried=25)
    for one in (SAME, SPLIT)
)
GLOBAL = Settings("global VI, trusted aggr.", "global", num_rounds=200, aggregated=True)
NATURAL = Settings(
    "virtual",
    "virtual",
    clip_norm=0.013,
    num_local_steps=1,
    optimizer="natural",
    learning_rate=0.2,
    num_rounds=15,
    damping=0.75,
    shard_size=1,
    synchronous=True,
    tried=1400,
)
NATURAL_SUMMED = replace(
    NATURAL, name="virtual, trusted aggr.", clip_norm=0.015, aggregated=True, tried=370
)
MEAN = replace(NATURAL, name="local avg", kind="averaging", clip_norm=0.012, tried=1100)
MEAN_SUMMED = replace(NATURAL_SUMMED, name="local avg, trusted aggr.", kind="averaging")
VIRTUAL = Settings(
    "virtual",
    "virtual",
    clip_norm=0.015,
    num_local_steps=20,
    learning_rate=0.05,
    num_rounds=8,
    damping=0.15,
    shard_size=6,
    draws=2,
)
VIRTUAL_SUMMED = Settings(
    "virtual, trusted aggr.",
    "virtual",
    clip_norm=0.018,
    num_local_steps=5,
    learning_rate=0.042,
    num_rounds=8,
    damping=0.61,
    shard_size=12,
    aggregated=True,
    draws=2,
)
AVERAGING = Settings(
    "local avg",
    "averaging",
    clip_norm=1.4,
    optimizer="sgd",
    learning_rate=2e-4,
    num_rounds=8,
    damping=0.7,
    num_shards=400,
    synchronous=True,
    draws=2,
)
AVERAGING_SUMMED = Settings(
    "local avg, trusted aggr.",
    "averaging",
    clip_norm=3.0,
    optimizer="sgd",
    learning_rate=2e-4,
    num_rounds=15,
    damping=0.5,
    num_shards=400,
    aggregated=True,
    draws=2,
)

MORTALITY = (
    replace(OPTIMIZATION, clip_norm=3.2, num_local_steps=1, damping=0.43, tried=35),
    replace(
        AVERAGING,
        clip_norm=0.73,
        learning_rate=5e-4,
        num_rounds=3,
        damping=0.46,
        num_shards=300,
        tried=30,
    ),
    replace(
        AVERAGING_SUMMED,
        clip_norm=0.53,
        learning_rate=5e-4,
        damping=0.41,
        num_shards=50,
        tried=28,
    ),
    replace(
        VIRTUAL,
        num_local_steps=5,
        clip_norm=0.016,
        learning_rate=0.05,
        num_rounds=5,
        damping=0.2,
        shard_size=3,
        tried=66,
    ),
    replace(
        VIRTUAL_SUMMED,
        clip_norm=0.028,
        learning_rate=0.05,
        num_rounds=5,
        damping=0.5,
        shard_size=3,
        tried=30,
    ),
    replace(SAME, clip_norm=4.2, num_local_steps=2, tried=11),
    replace(SPLIT, clip_norm=3.7, num_local_steps=10, tried=11),
    replace(GLOBAL, clip_norm=3.2, num_rounds=100, tried=14),
)

MANY_SUMMED = replace(NATURAL_SUMMED, clip_norm=0.018, learning_rate=0.25, damping=0.61, tried=24)
MANY = (
    replace(OPTIMIZATION, clip_norm=2.1, num_rounds=20, damping=0.57, tried=10),
    replace(MANY_SUMMED, name="local avg, trusted aggr.", kind="averaging"),
    MANY_SUMMED,
    *(SAME, SPLIT, GLOBAL),
)
COMMITTEE: dict[str, Any] = {
    "clip_norm": 5.0,
    "num_local_steps": 60,
    "optimizer": "sgd",
    "learning_rate": 1e-4,
    "sampling_prob": 0.1,
    "draws": 1,
    "init_scale": 0.1,
    "tried": 5,
}
"""Both committees of the network."""

NETWORK = (
    replace(
        OPTIMIZATION,
        clip_norm=5.0,
        optimizer="sgd",
        learning_rate=3e-4,
        num_rounds=20,
        damping=0.15,
        sampling_prob=0.1,
        draws=4,
        init_scale=0.1,
        tried=61,
    ),
    replace(
        AVERAGING,
        clip_norm=60.0,
        learning_rate=1e-4,
        num_local_steps=5,
        num_rounds=15,
        damping=0.2,
        draws=1,
        init_scale=0.1,
        tried=19,
    ),
    replace(
        VIRTUAL,
        clip_norm=0.3,
        num_local_steps=3,
        optimizer="sgd",
        learning_rate=3e-4,
        num_rounds=20,
        damping=0.15,
        shard_size=6,
        synchronous=True,
        draws=1,
        init_scale=0.1,
        tried=17,
    ),
    replace(SAME, **COMMITTEE),
    replace(SPLIT, **COMMITTEE),
    replace(
        GLOBAL,
        clip_norm=5.0,
        num_rounds=400,
        learning_rate=0.01,
        sampling_prob=0.02,
        draws=1,
        init_scale=0.1,
        tried=3,
    ),
)

STUDIES: Mapping[str, Study] = {
    "adult-10": Study(
        "Adult, logistic regression, 10 clients, (1, 1e-5)",
        load_adult,
        logistic_regression,
        _linear,
        10,
        1.0,
        SPLITS,
        (
            *(DESCENT, MEAN, MEAN_SUMMED, NATURAL, NATURAL_SUMMED),
            *(*COMMITTEES, GLOBAL),
        ),
    ),
    "mortality": Study(
        "In-hospital mortality, logistic regression, 10 clients, (1, 1e-5)",
        load_support2,
        logistic_regression,
        _linear,
        10,
        1.0,
        EVEN_SPLITS,
        MORTALITY,
        "Ours is on SUPPORT2, the paper's on MIMIC-III: only the order of methods can be compared.",
    ),
    "adult-200": Study(
        "Adult, logistic regression, 200 clients, (1/2, 1e-5)",
        load_adult,
        logistic_regression,
        _linear,
        200,
        0.5,
        SPLITS,
        MANY,
    ),
    "bnn": Study(
        "Adult, Bayesian neural network, 10 clients, (2, 1e-5)",
        load_adult,
        bnn,
        _network,
        10,
        2.0,
        SPLITS,
        NETWORK,
    ),
}
"""The paper's figures, by name."""
