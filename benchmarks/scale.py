"""What private rounds cost beside NumPyro's SVI, and how that grows with the clients.

    python -m benchmarks scale

Times are of the processor, not of the clock, so that a busy machine changes them less; only the
ratios of one run travel to other machines. Best run on one core: ``taskset -c 0 python -m ...``.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.optim
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from benchmarks import adult
from models.bnn import bnn
from models.logistic_regression import logistic_regression

STEPS, DRAWS = 10, 10
CLIENTS = (10, 100, 1000, 10_000)


def table(repeats: int = 7) -> None:
    """Steps beside SVI's, a small fit, unequal clients, and rounds of ever more clients."""
    print("\nScale: processor time; cold is the first call, which compiles")
    print(f"{'':<68} {'cold s':>7} {'warm ms':>8} {'ratio':>6}")
    _steps(repeats)
    _small_fit(repeats)
    _unequal_clients(repeats)
    _many_clients(repeats)


def _row(name: str, cold: float, warm: float, ratio: float | None = None) -> None:
    print(f"{name:<68} {cold:>7.2f} {1000 * warm:>8.2f} {'' if ratio is None else f'{ratio:6.2f}'}")


def _timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the first call, and the median of later ones."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - start)
    return times[0], statistics.median(times[1:] or times)


class Case(NamedTuple):
    """A model whose private steps are timed beside those of SVI without privacy.

    Attributes:
        name: In words.
        model: The model.
        guide: The guide of both.
        num_rows: How many records it sees.
        rules: The rules for expectations, by name.
    """

    name: str
    model: Any
    guide: Any
    num_rows: int
    rules: dict[str, Any]


def linear_regression(X: jax.Array, y: jax.Array) -> None:
    """With an unknown spread, so that a record sees its latents through two numbers."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, spread), obs=y)


QUADRATURE = {"quadrature": dppvi.methods.GaussHermite()}
DRAWN = {f"{DRAWS} draws": dppvi.MonteCarlo(DRAWS)}
CASES = (
    Case("logistic", logistic_regression, AutoNormal, 24_420, QUADRATURE | DRAWN),
    Case("linear, unknown spread", linear_regression, AutoNormal, 24_420, DRAWN),
    Case("full covariance", logistic_regression, AutoMultivariateNormal, 4096, QUADRATURE),
    Case("network of 50 units", bnn, AutoNormal, 1000, DRAWN),
)


def _steps(repeats: int) -> None:
    """A step over the first training rows of Adult, of ten in one program."""
    data = adult.reported()
    for case in CASES:
        rows = slice(case.num_rows)
        records = {"X": data.X_train[rows], "y": data.y_train[rows].astype(np.float32)}
        guide = case.guide(case.model)
        particles = Trace_ELBO(num_particles=DRAWS)
        svi = SVI(case.model, guide, numpyro.optim.Adam(1e-2), particles)
        first = svi.init(jax.random.key(0), **records)

        def steps(state: Any, svi: Any = svi, records: Any = records) -> Any:
            return jax.lax.scan(lambda s, _: svi.update(s, **records), state, length=STEPS)

        peer = functools.partial(jax.jit(steps), first)
        runs = {f"{case.name}: a step of SVI without privacy, {DRAWS} particles": peer}
        for name, rule in case.rules.items():
            method = dppvi.DPOptimization(num_local_steps=STEPS, expectation=rule)
            run = _rounds(case.model, [records], method, repeats, guide)
            runs[f"{case.name}: a private step, {name}"] = run
        colds, warms = _in_turns(runs, repeats)
        for name in runs:
            ratio = statistics.median(
                mine / svi for mine, svi in zip(warms[name], warms[next(iter(runs))], strict=True)
            )
            _row(name, colds[name], statistics.median(warms[name]) / STEPS, ratio)


def _in_turns(
    runs: dict[str, Callable[[], Any]], repeats: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Seconds of the first call of each, and of later ones, which take turns."""
    colds = {name: _timed(run, 0)[0] for name, run in runs.items()}
    warms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            warms[name].append(_timed(run, 0)[0])
    return colds, warms


def _made_up(sizes: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """Clients' records with 20 columns."""
    rng = np.random.default_rng(0)
    return [
        {"X": rng.normal(size=(size, 20)).astype(np.float32), "y": rng.integers(0, 2, size)}
        for size in sizes
    ]


def _small_fit(repeats: int) -> None:
    data, keys = _made_up([50] * 10), iter(range(repeats + 1))

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


def _unequal_clients(repeats: int) -> None:
    """Clients of log-normal sizes beside as many of their mean size."""
    rng = np.random.default_rng(0)
    drawn = np.maximum(20, np.exp(rng.normal(np.log(300), 1, 200))).astype(int).tolist()
    equal = [round(statistics.mean(drawn))] * len(drawn)
    runs = {
        f"a round of {len(drawn)} clients of {equal[0]} rows": _made_up(equal),
        f"the same of log-normal sizes, at most {max(drawn)}": _made_up(drawn),
    }
    method = dppvi.DPOptimization()
    rounds = {
        name: _rounds(logistic_regression, data, method, repeats) for name, data in runs.items()
    }
    colds, warms = _in_turns(rounds, repeats)
    seconds = {name: statistics.median(times) for name, times in warms.items()}
    for name, mine in seconds.items():
        _row(name, colds[name], mine, mine / min(seconds.values()))


def _many_clients(repeats: int) -> None:
    least = None
    for number in CLIENTS:
        method = dppvi.DPOptimization()
        run = _rounds(logistic_regression, _made_up([50] * number), method, repeats)
        cold, seconds = _timed(run, repeats)
        least = min(least or seconds / number, seconds / number)
        name = f"a visit of one of {number} clients x 50 rows x 20 columns"
        _row(name, cold, seconds / number, seconds / number / least)


def _rounds(
    model: Any, data: list[Any], method: Any, repeats: int, guide: Any = None
) -> Callable[[], Any]:
    """A function that runs the next round."""
    sizes = [len(client["y"]) for client in data]
    budget, public = dppvi.PrivacyBudget(1.0), {"client_sizes": sizes}
    plan = dppvi.plan_privacy(method, budget, num_rounds=repeats + 1, **public)
    pvi = dppvi.pvi(model, guide, data[0], method=method, plan=plan, **public)
    state, shards = pvi.init(jax.random.key(0)), dppvi.records.stack_clients(data)

    def run() -> Any:
        nonlocal state
        state, info = pvi.step(jax.random.key(0), state, shards)
        return state.factors, info

    return run
