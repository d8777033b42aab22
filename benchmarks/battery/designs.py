"""Models, priors and records of a set, in standardised columns and in the units it comes in.

*Standardised*: numbers have mean 0 and standard deviation 1, indicators stay 0 and 1; continuous
outcomes are standardised, times are divided by their mean. The constants are those of all rows
pooled: an oracle that no study has, and that no epsilon here covers. Weights are Normal(0, 1), the
intercept is Normal(0, 3).

*Raw*: columns and outcomes as they come, with priors that mean the same: a weight is Normal(0, the
outcome's unit over the column's standard deviation), and the intercept as wide as it has to be to
make up for columns far from zero. Only that is wider than it would be after standardising.

Log densities of outcomes in raw units differ by a constant a record; it is added, so that scores of
the two designs can be compared.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask

from benchmarks.battery import sets

DESIGNS = ("standardised", "raw")
SPLITS: dict[str, tuple[float, ...]] = {
    "10 equal": (0.1,) * 10,
    "5 unequal": (0.02, 0.05, 0.13, 0.3, 0.5),
    "50 small": (0.02,) * 50,
}
HELD_OUT = 0.2
INTERCEPT_WIDTH = 3.0


def _weights(widths: jax.Array) -> jax.Array:
    return numpyro.sample("w", dist.Normal(0, widths).to_event(1))


def logistic(x: jax.Array, y: jax.Array, widths: jax.Array) -> None:
    """A binary outcome."""
    w = _weights(widths)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def poisson(x: jax.Array, y: jax.Array, widths: jax.Array) -> None:
    """Counts."""
    w = _weights(widths)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def linear(x: jax.Array, y: jax.Array, widths: jax.Array, unit: jax.Array) -> None:
    """A continuous outcome of unknown spread."""
    w = _weights(widths)
    spread = numpyro.sample("spread", dist.LogNormal(jnp.log(unit), 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, spread), obs=y)


def weibull(x: jax.Array, y: jax.Array, event: jax.Array, widths: jax.Array) -> None:
    """Times whose logarithm's location is linear; the others have survived up to then."""
    w = _weights(widths)
    concentration = numpyro.sample("concentration", dist.LogNormal(0, 0.5))
    with numpyro.plate("records", x.shape[0]):
        with mask(mask=event):
            numpyro.sample("time", dist.Weibull(jnp.exp(x @ w), concentration), obs=y)
        survived = -jnp.exp(concentration * (jnp.log(y) - x @ w))
        numpyro.factor("survived", jnp.where(event, 0.0, survived))


def exponential(x: jax.Array, y: jax.Array, event: jax.Array, widths: jax.Array) -> None:
    """Exponential times, as counts of events over the time at risk: the same likelihood of w.

    Given the time at risk, the number of events is Poisson with a rate a unit of time, so that
    outcomes can be drawn; of the Weibull model they cannot.
    """
    w = _weights(widths)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("event", dist.Poisson(y * jnp.exp(-x @ w)), obs=event)


MODELS: dict[str, Callable[..., None]] = {
    "logistic": logistic,
    "poisson": poisson,
    "linear": linear,
    "weibull": weibull,
    "exponential": exponential,
}


class Problem(NamedTuple):
    """A set in one design.

    Attributes:
        model: The NumPyro model.
        kwargs: Its public arguments: the widths of priors.
        train: Records to train on, a mapping of arrays, in random order.
        held_out: Records to score on.
        constant: To be added to the log densities of held-out records, shape `(rows,)`.
    """

    model: Callable[..., None]
    kwargs: dict[str, Any]
    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    constant: np.ndarray


def problem(name: str, design: str) -> Problem:
    """Reads a set in a design.

    Args:
        name: Of the set.
        design: One of `DESIGNS`.
    """
    kind = sets.named(name).model
    found = sets.load(name)
    means = np.where(found.is_indicator, 0.0, found.x.mean(axis=0))
    sds = np.where(found.is_indicator, 1.0, found.x.std(axis=0))
    centre = found.y.mean() if kind == "linear" else 0.0
    unit = {"linear": found.y.std(), "weibull": found.y.mean(), "exponential": found.y.mean()}
    scale = float(unit.get(kind, 1.0))
    kwargs: dict[str, Any] = {"unit": 1.0} if kind == "linear" else {}
    x, y, constant = (found.x - means) / sds, (found.y - centre) / scale, np.zeros(len(found.y))
    intercept, widths = INTERCEPT_WIDTH, np.ones(x.shape[1])
    if design == "raw":
        x, y = found.x, found.y
        # A weight's unit: the outcome's, where it is the outcome's location that is linear.
        times = scale if kind == "linear" else 1.0
        moved = centre / times if kind == "linear" else np.log(scale)
        intercept = times * np.sqrt(INTERCEPT_WIDTH**2 + np.sum((means / sds) ** 2) + moved**2)
        widths = times / sds
        kwargs = dict.fromkeys(kwargs, scale)
        # Of the density of an outcome, or of a time that ended in the event. The Poisson form of
        # the exponential model has neither unit.
        if kind in ("linear", "weibull"):
            constant = np.where(found.event, np.log(scale), 0.0)
    records = _records(kind, x, y, found.event)
    first = int(len(y) * HELD_OUT)
    return Problem(
        MODELS[kind],
        {"widths": np.append(intercept, widths).astype(np.float32), **kwargs},
        {name: rows[first:] for name, rows in records.items()},
        {name: rows[:first] for name, rows in records.items()},
        constant[:first],
    )


def _records(kind: str, x: np.ndarray, y: np.ndarray, event: np.ndarray) -> dict[str, np.ndarray]:
    """Arguments of the model; the first column of `x` is ones."""
    records = {"x": np.column_stack([np.ones(len(y)), x]).astype(np.float32)}
    records["y"] = y.astype(np.int32 if kind in ("logistic", "poisson") else np.float32)
    if kind == "weibull":
        records["event"] = event
    if kind == "exponential":
        records["event"] = event.astype(np.int32)
    return records


def without_columns(whole: Problem) -> Problem:
    """The model of no information: an intercept, and what else is not a weight."""
    return whole._replace(
        kwargs={**whole.kwargs, "widths": whole.kwargs["widths"][:1]},
        train={**whole.train, "x": whole.train["x"][:, :1]},
        held_out={**whole.held_out, "x": whole.held_out["x"][:, :1]},
    )


def clients(records: dict[str, np.ndarray], split: str) -> list[dict[str, np.ndarray]]:
    """Cuts records, which are in random order, into clients."""
    num_records = len(records["x"])
    ends = np.round(np.cumsum(SPLITS[split]) * num_records).astype(int)
    ends[-1] = num_records
    return [
        {name: rows[start:end] for name, rows in records.items()}
        for start, end in itertools.pairwise([0, *ends])
    ]
