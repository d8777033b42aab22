"""Seconds a round, after compilation, and seconds to compile.

    python -m benchmarks speed

Times are of this machine; the ratio to plain NumPy, measured in the same run, travels better.
"""

import contextlib
import dataclasses
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import numpyro_dppvi as dppvi
from benchmarks import adult
from models.logistic_regression import logistic_regression

STEPS, PROB, DRAWS, CLIP = 50, 0.1, 10, 2.5


def table(repeats: int = 7) -> None:
    """Rounds of ten clients with 2442 rows each, d = 109."""
    where = adult.setting(adult.reported(), 10)
    sampler = dppvi.PoissonSampling(PROB)
    exact = dppvi.DPOptimization(CLIP, STEPS, sampler=sampler)
    drawn = dataclasses.replace(exact, expectation=dppvi.MonteCarlo(DRAWS))
    full = dppvi.DPOptimization()
    numpy_seconds = _median(lambda: _numpy_round(where), max(3, repeats // 2))
    print("\nSpeed: 10 clients x 2442 rows, d = 109, the ordinary NumPyro model")
    print(f"{'':<58} {'compile s':>9} {'round ms':>9} {'x NumPy':>8}")
    for name, method, schedule in (
        ("50 Poisson steps of ~244 rows, quadrature, synchronous", exact, dppvi.synchronous),
        ("the same, sequential", exact, dppvi.sequential),
        ("the same with 10 shared draws, synchronous", drawn, dppvi.synchronous),
        ("3 full-batch steps (the default), sequential", full, dppvi.sequential),
    ):
        compiling, seconds = _round(where, method, schedule, repeats)
        ratio = f"{'':>8}" if method is full else f"{numpy_seconds / seconds:>8.1f}"
        print(f"{name:<58} {compiling:>9.1f} {1000 * seconds:>9.0f} {ratio}")
    virtual = dppvi.VirtualClients(50, 0.01, 10)
    compiling, seconds = _round(where, virtual, dppvi.synchronous, repeats)
    name = "virtual clients, 50 shards, 10 steps, synchronous"
    print(f"{name:<58} {compiling:>9.1f} {1000 * seconds:>9.0f}")
    # By hand one knows that a record's gradient is a residual times its row.
    name = "50 steps of 244 rows, this one model by hand in NumPy"
    print(f"{name:<58} {'':>9} {1000 * numpy_seconds:>9.0f} {1:>8.1f}")
    print(f"the progress bar takes {100 * _bar(where, repeats):.1f} % of a fit of 30 rounds")


def _bar(where: adult.Setting, repeats: int) -> float:
    """What the progress bar adds to a fit with the defaults, as a share: medians of turns."""
    budget = dppvi.PrivacyBudget(1.0)

    def run(shown: bool) -> None:
        records = adult.records(where.data)
        with contextlib.redirect_stderr(io.StringIO()):
            dppvi.fit(
                logistic_regression,
                None,
                records,
                rng_key=jax.random.key(0),
                clients=where.partition,
                budget=budget,
                num_rounds=30,
                progress_bar=shown,
            )

    run(False)  # compiles
    turns = [
        [_median(lambda shown=shown: run(shown), 1) for shown in (False, True)]
        for _ in range(repeats)
    ]
    without, with_bar = np.median(turns, axis=0)
    return float(with_bar / without - 1)


def _round(
    where: adult.Setting, method: Any, schedule: Callable[..., np.ndarray], repeats: int
) -> tuple[float, float]:
    """Seconds of the first round (which compiles) less a later one's, and of a later one."""
    sizes = where.partition.sizes
    plan = dppvi.plan_privacy(
        method,
        dppvi.PrivacyBudget(1.0),
        num_rounds=repeats + 1,
        client_sizes=sizes,
        schedule=schedule,
    )
    pvi = dppvi.pvi(
        logistic_regression,
        None,
        adult.records(where.data),
        method=method,
        client_sizes=sizes,
        plan=plan,
        schedule=schedule,
    )
    state = pvi.init(jax.random.key(0))

    def run() -> None:
        nonlocal state
        state, info = pvi.step(jax.random.key(0), state, where.shards)
        jax.block_until_ready((state.factors, info))

    first = _median(run, 1)
    seconds = _median(run, repeats)
    return first - seconds, seconds


def _median(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _numpy_round(where: adult.Setting) -> None:
    """The same arithmetic by hand: gradients of ten draws, clipped by record, Adam left out."""
    rng = np.random.default_rng(0)
    for rows in where.partition.rows:
        X, y = where.data.X_train[rows], where.data.y_train[rows].astype(np.float32)
        loc = np.zeros(X.shape[1], np.float32)
        scale = np.ones(X.shape[1], np.float32)
        for _ in range(STEPS):
            batch = rng.choice(len(rows), round(PROB * len(rows)), replace=False)
            noise = rng.standard_normal((DRAWS, len(loc)), np.float32)
            residual = 1 / (1 + np.exp(-X[batch] @ (loc + scale * noise).T)) - y[batch, None]
            by_loc = X[batch] * residual.mean(axis=1, keepdims=True)
            by_scale = X[batch] * (residual @ noise) / DRAWS * scale
            norms = np.sqrt((by_loc**2).sum(axis=1) + (by_scale**2).sum(axis=1))
            weights = np.minimum(1, CLIP / norms)
            gradient = weights @ by_loc + rng.standard_normal(len(loc), np.float32)
            loc -= 1e-5 * gradient
            scale -= 1e-5 * (weights @ by_scale + rng.standard_normal(len(loc), np.float32))
