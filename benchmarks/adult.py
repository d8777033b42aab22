"""Adult logistic regression: the setting that the tables share, and how a run is scored."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import numpyro_dppvi as dppvi
from models.evaluation import held_out, selection_split
from models.logistic_regression import logistic_regression
from numpyro_dppvi.datasets import TabularData, load_adult


class Setting(NamedTuple):
    """Rows to train on, split over clients, and rows to score on."""

    data: TabularData
    partition: dppvi.Partition
    shards: dppvi.records.Shards


class Score(NamedTuple):
    """Accuracy and mean log-likelihood over the scored rows."""

    accuracy: float
    log_likelihood: float


@functools.cache
def reported() -> TabularData:
    """The paper's split: the rows that tables report on."""
    return load_adult()


@functools.cache
def selection() -> TabularData:
    """A split of the training half alone: the rows that hyperparameters are chosen on."""
    return selection_split(load_adult())


SPLITS = {"balanced": (0.0, 0.0), "unbalanced 1": (0.75, 0.95), "unbalanced 2": (0.7, -3.0)}
"""The paper's splits: size factor rho and class-balance factor kappa."""


def setting(data: TabularData, num_clients: int, split: str = "balanced") -> Setting:
    """Splits the training rows over clients in one of the paper's ways."""
    partition = dppvi.partition(jax.random.key(0), data.y_train, num_clients, *SPLITS[split])
    return Setting(data, partition, dppvi.records.stack(records(data), partition))


def records(data: TabularData) -> dict[str, np.ndarray]:
    """The training rows as the model's arguments."""
    return {"X": data.X_train, "y": data.y_train}


def score(w: jax.Array, data: TabularData) -> Score:
    """Scores draws of the weights, shape ``(num_draws, 109)``."""
    return Score(*(float(x) for x in held_out(w, data.X_test, data.y_test)))


def fit(where: Setting, seed: int, **arguments: Any) -> tuple[dppvi.run.FitResult, Score]:
    """One fit with noise from the operating system, and its score from 100 draws."""
    result = dppvi.fit(
        logistic_regression,
        None,
        records(where.data),
        rng_key=jax.random.key(seed),
        clients=where.partition,
        progress_bar=False,
        **arguments,
    )
    draws = result.posterior.sample(jax.random.key(1000 + seed), (100,))["w"]
    return result, score(draws, where.data)


def mean_and_error(scores: list[Score]) -> tuple[Score, Score]:
    """Mean over two or more seeds, and its standard error."""
    values = np.array(scores)
    error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return Score(*values.mean(axis=0)), Score(*error)


def row(name: str, scores: list[Score], note: str = "") -> str:
    """A line of a table: mean and standard error of both scores."""
    mean, error = mean_and_error(scores)
    return (
        f"{name:<44} {mean.accuracy:.4f} ({error.accuracy:.4f})   "
        f"{mean.log_likelihood:.4f} ({error.log_likelihood:.4f})   {note}"
    )


HEADER = f"{'':<44} {'accuracy (SE)':<17} {'log-likelihood (SE)':<20}"
PAPER: Mapping[str, Score] = {"DP optimisation, 20 rounds": Score(0.8382, -0.3494)}
"""Read off the paper's figure for 10 clients, balanced: mean of 5 seeds."""
