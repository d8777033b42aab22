"""What private rounds cost beside NumPyro's SVI, and how that grows with the clients.

    python -m benchmarks scale

Times are of the processor, not of the clock, so that a busy machine changes them less; only the
ratios of one run travel to other machines. Best run on one core: ``taskset -c 0 python -m ...``.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro.optim
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from benchmarks import adult
from models.logistic_regression import logistic_regression

STEPS, DRAWS = 10, 10
CLIENTS = (10, 100, 1000, 10_000)


def table(repeats: int = 7) -> None:
    """Steps beside SVI's, a small fit, and rounds of ever more clients."""
    print("\nScale: processor time; cold is the first call, which compiles")
    print(f"{'':<58} {'cold s':>7} {'warm ms':>8} {'ratio':>6}")
    _steps(repeats)
    _small_fit(repeats)
    _many_clients(repeats)


def _row(name: str, cold: float, warm: float, ratio: float | None = None) -> None:
    print(f"{name:<58} {cold:>7.2f} {1000 * warm:>8.2f} {'' if ratio is None else f'{ratio:6.2f}'}")


def _timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the first call, and the median of later ones."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - start)
    return times[0], statistics.median(times[1:])


def _steps(repeats: int) -> None:
    """A step over all 24 420 training rows of Adult, of ten in one program."""
    data = adult.reported()
    records = {"X": data.X_train[:24_420], "y": data.y_train[:24_420]}
    svi = SVI(
        logistic_regression,
        AutoNormal(logistic_regression),
        numpyro.optim.Adam(1e-2),
        Trace_ELBO(num_particles=DRAWS),
    )
    first = svi.init(jax.random.key(0), **records)
    peer = jax.jit(
        lambda state: jax.lax.scan(lambda s, _: svi.update(s, **records), state, length=STEPS)
    )
    cold, svi_seconds = _timed(lambda: peer(first), repeats)
    _row(f"a step of SVI without privacy, {DRAWS} particles", cold, svi_seconds / STEPS, 1.0)
    for name, expectation in (
        ("a private step, quadrature", dppvi.GaussHermite()),
        (f"a private step, {DRAWS} draws", dppvi.MonteCarlo(DRAWS)),
    ):
        method = dppvi.DPOptimization(num_local_steps=STEPS, expectation=expectation)
        cold, seconds = _timed(_rounds(logistic_regression, [records], method, repeats), repeats)
        _row(name, cold, seconds / STEPS, seconds / svi_seconds)


def _made_up(num_clients: int) -> list[dict[str, np.ndarray]]:
    """Clients of 50 records with 20 columns."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_clients, 50, 20)).astype(np.float32)
    y = rng.integers(0, 2, (num_clients, 50))
    return [{"X": X[m], "y": y[m]} for m in range(num_clients)]


def _small_fit(repeats: int) -> None:
    data, keys = _made_up(10), iter(range(repeats + 1))

    def run() -> Any:
        return dppvi.fit(
            logistic_regression,
            None,
            data,
            rng_key=jax.random.key(next(keys)),
            method=dppvi.DPOptimization(),
            budget=dppvi.PrivacyBudget(1.0),
            num_rounds=5,
            progress_bar=False,
        ).state.natural

    _row("a fit of 5 rounds, 10 clients x 50 rows x 20 columns", *_timed(run, repeats))


def _many_clients(repeats: int) -> None:
    least = None
    for number in CLIENTS:
        method = dppvi.DPOptimization()
        run = _rounds(logistic_regression, _made_up(number), method, repeats)
        cold, seconds = _timed(run, repeats)
        least = min(least or seconds / number, seconds / number)
        name = f"a visit of one of {number} clients x 50 rows x 20 columns"
        _row(name, cold, seconds / number, seconds / number / least)


def _rounds(model: Any, data: list[Any], method: Any, repeats: int) -> Callable[[], Any]:
    """A function that runs the next round."""
    sizes = [len(client["y"]) for client in data]
    budget, public = dppvi.PrivacyBudget(1.0), {"client_sizes": sizes}
    plan = dppvi.plan_privacy(method, budget, num_rounds=repeats + 1, **public)
    pvi = dppvi.pvi(model, None, data[0], method=method, plan=plan, **public)
    state, shards = pvi.init(jax.random.key(0)), dppvi.records.stack_clients(data)

    def run() -> Any:
        nonlocal state
        state, info = pvi.step(jax.random.key(0), state, shards)
        return state.factors, info

    return run
