"""What it costs that any NumPyro model will do: rounds with and without a gradient by hand.

    python -m benchmarks generic

Everything else is the same on both sides (sampling, clipping, noise, optimiser, merge), and rounds
of both kinds take turns in one run: only ratios are reported. By hand one knows that a record's
gradient is a residual times what it sees, and back-propagates through the network's two layers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_dppvi as dppvi
from benchmarks import adult
from models.bnn import bnn
from models.logistic_regression import logistic_regression
from numpyro_dppvi.methods import objective, record_gradients

NODES, DRAWS, CLIP = 20, 10, 2.5

Gradient = Callable[..., Any]


class Case(NamedTuple):
    """A model, its gradient by hand, the rule for its expectation, and how much work a round is."""

    name: str
    model: Any
    gradient: Gradient
    rule: Any
    num_rows: int
    num_clients: int
    num_steps: int


# Of other types than the library's rules, so that the two kinds of round are compiled apart.
@dataclass(frozen=True)
class NodesByHand(objective.GaussHermite):
    """Quadrature on the side that is written by hand."""


@dataclass(frozen=True)
class DrawsByHand(objective.MonteCarlo):
    """Draws on the side that is written by hand."""


def logistic_gradient(key: Any, family: Any, coordinates: Any, row: Any) -> Any:
    """Of -E[log p(y | x'w)] by quadrature: two residuals times the row."""
    del key, family
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    x, (loc, log_scale) = row["X"], coordinates["w"]
    variance = jnp.exp(2 * log_scale)
    stddev = jnp.sqrt(x**2 @ variance)
    residual = jax.nn.sigmoid(x @ loc + stddev * nodes.astype(np.float32)) - row["y"]
    by_mean = residual @ (weights / weights.sum()).astype(np.float32)
    by_stddev = residual @ (weights * nodes / weights.sum()).astype(np.float32)
    return {
        "w": coordinates["w"]._replace(
            loc=by_mean * x, log_scale=by_stddev / stddev * x**2 * variance
        )
    }


def network_gradient(key: Any, family: Any, coordinates: Any, row: Any) -> Any:
    """Of -E[log p(y | network(x))] by draws: back-propagation, layer by layer."""
    draws = objective.MonteCarlo(DRAWS)(key, family, coordinates)
    x = row["X"]
    before = x @ draws["w1"] + draws["b1"]
    hidden = jnp.maximum(before, 0)
    logits = jnp.sum(hidden * draws["w2"], axis=-1) + draws["b2"]
    residual = (jax.nn.sigmoid(logits) - row["y"]) / DRAWS
    below = residual[:, None] * draws["w2"] * (before > 0)
    by_draw = {
        "w1": x[:, None] * below[:, None, :],
        "b1": below,
        "w2": residual[:, None] * hidden,
        "b2": residual,
    }

    def of(name: str) -> Any:
        moved = draws[name] - coordinates[name].loc
        return coordinates[name]._replace(
            loc=by_draw[name].sum(0), log_scale=(by_draw[name] * moved).sum(0)
        )

    return {name: of(name) for name in coordinates}


CASES = (
    Case("logistic regression", logistic_regression, logistic_gradient, NODES, 24420, 10, 10),
    Case("network of 50 units", bnn, network_gradient, DRAWS, 1000, 2, 2),
)


def table(repeats: int = 9) -> None:
    """Ratios of a round's time; medians over pairs of rounds that take turns."""
    print("\nA round through the generic path against one with a gradient by hand (d = 109)")
    for case in CASES:
        generic, hand = _runs(case)
        _check_equal(generic, hand)
        print(f"{case.name:<44} {_ratio(generic, hand, repeats):>6.2f}", flush=True)
    small = CASES[0]._replace(num_rows=4884, num_clients=2, num_steps=3)
    quadrature = _round(small, objective.GaussHermite(NODES))
    drawn = _round(small, objective.MonteCarlo(DRAWS))
    name = f"{DRAWS} shared draws against quadrature"
    print(f"{name:<44} {_ratio(drawn, quadrature, repeats):>6.2f}", flush=True)


def _runs(case: Case) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A round of either kind, compiled."""
    is_normal = case.model is logistic_regression
    generic = objective.GaussHermite(NODES) if is_normal else objective.MonteCarlo(DRAWS)
    by_hand = NodesByHand(NODES) if is_normal else DrawsByHand(DRAWS)
    first = _round(case, generic)
    with mock.patch.object(record_gradients, "of_rows", _by_hand(case.gradient)):
        return first, _round(case, by_hand)


def _by_hand(gradient: Gradient) -> Callable[..., Any]:
    """The given gradient in the place of ``record_gradients.of_rows``."""

    def of_rows(space: Any, family: Any, rule: Any, key: Any, coordinates: Any, rows: Any) -> Any:
        del space, rule
        return jax.vmap(lambda row: gradient(key, family, coordinates, row))(rows)

    return of_rows


def _round(case: Case, rule: Any) -> Callable[[], Any]:
    """A function that runs the first round from the prior; compiled by a first call."""
    data = adult.reported()
    rows = {"X": data.X_train[: case.num_rows], "y": data.y_train[: case.num_rows]}
    method = dppvi.DPOptimization(CLIP, case.num_steps, expectation=rule)
    split = dppvi.records.split_evenly(jax.random.key(0), case.num_rows, case.num_clients)
    plan = dppvi.plan_privacy(
        method,
        dppvi.PrivacyBudget(1.0),
        num_rounds=1,
        client_sizes=split.sizes,
        schedule=dppvi.synchronous,
    )
    pvi = dppvi.pvi(
        case.model,
        None,
        rows,
        method=method,
        client_sizes=split.sizes,
        plan=plan,
        schedule=dppvi.synchronous,
        secret_keys=dppvi.privacy.SecretKeys(insecure_seed=0),
    )
    shards, state = dppvi.records.stack(rows, split), pvi.init(jax.random.key(0))

    def run() -> Any:
        after, _ = pvi.step(jax.random.key(0), state, shards)
        return jax.block_until_ready(after.factors)

    run()
    return run


def _check_equal(generic: Callable[[], Any], hand: Callable[[], Any]) -> None:
    """Both must do the same work, or the ratio says nothing."""
    for a, b in zip(jax.tree.leaves(generic()), jax.tree.leaves(hand()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02 * np.abs(b).max())


def _ratio(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> float:
    ratios = []
    for _ in range(repeats):
        start = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios)
