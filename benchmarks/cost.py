"""What rounds and fits cost: time, cold and warm, beside the least possible, others, and memory.

    python -m benchmarks cost growth

Each line is measured in a process of its own, which compiles everything anew. Times are of the
processor, not of the clock, so that a busy machine changes them less; ratios are medians over
runs that take turns, and travel best. Best run on one core: ``taskset -c 0 make bench``. With a
GPU, times are those of the clock, and memory is the GPU's.
"""

import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from benchmarks import adult, peers
from benchmarks.paper import table as paper
from benchmarks.peers import DRAWS, Run
from models.bnn import bnn
from models.logistic_regression import logistic_regression

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

ON_CPU = jax.default_backend() == "cpu"

REPEATS = 9
# A GPU takes its steps in less time than the host takes for what is around a round of ten.
STEPS = 10 if ON_CPU else 100


class Built(NamedTuple):
    """Work that is ready to be run, but for compilation.

    Attributes:
        start: Makes the function that does the work once; all of it counts as cold.
        units: How many steps, visits or rounds that is.
        flops: Operations that it cannot do without, or 0 where none are counted.
        bytes: Bytes of records that it must read.
        peers: The same work as others do it, by name; made when asked for.
    """

    start: Callable[[], Run]
    units: int = 1
    flops: float = 0
    bytes: float = 0
    peers: Mapping[str, Callable[[], Run]] = {}


class Measured(NamedTuple):
    """What a line of a table says.

    Attributes:
        cold: Seconds until the first result, compilation included.
        warm: Seconds of each later run, by unit.
        ratios: By peer, our time over theirs in runs that took turns.
        memory: Bytes beyond what the process had before, at most, records included.
        floor: Seconds that a unit takes at least at this machine's rates; 0 where it is unknown.
    """

    cold: float
    warm: list[float]
    ratios: dict[str, list[float]]
    memory: int
    floor: float


def logistic_records(num_rows: int) -> dict[str, np.ndarray]:
    """The first training rows of Adult."""
    data = adult.reported()
    return {"X": data.X_train[:num_rows], "y": data.y_train[:num_rows].astype(np.float32)}


def made_up(sizes: Sequence[int], num_columns: int = 20) -> list[dict[str, np.ndarray]]:
    """Clients' records."""
    rng = np.random.default_rng(0)
    return [
        {
            "X": rng.standard_normal((size, num_columns), np.float32),
            "y": rng.integers(0, 2, size).astype(np.float32),
        }
        for size in sizes
    ]


def linear_regression(X: jax.Array, y: jax.Array) -> None:
    """With an unknown spread, so that a record sees its latents through two numbers."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, spread), obs=y)


def rounds(
    model: Any,
    data: Sequence[Mapping[str, np.ndarray]],
    method: Any,
    guide: Any = None,
    schedule: Any = dppvi.sequential,
) -> Run:
    """A function that runs the next round."""
    sizes = [len(client["y"]) for client in data]
    public = {"client_sizes": sizes, "schedule": schedule}
    budget = dppvi.PrivacyBudget(1.0)
    plan = dppvi.plan_privacy(method, budget, num_rounds=20 * REPEATS, **public)
    pvi = dppvi.pvi(model, guide, data[0], method=method, plan=plan, **public)
    state, shards = pvi.init(jax.random.key(0)), dppvi.records.stack_clients(data)

    def run() -> Any:
        nonlocal state
        state, info = pvi.step(jax.random.key(0), state, shards)
        return state.factors, info

    return run


def _step(model: Any, guide: Any, num_rows: int, rule: Any, kind: str = "") -> Built:
    """Full-batch steps of one client."""
    records = logistic_records(num_rows)
    n, d = records["X"].shape
    method = dppvi.DPOptimization(num_local_steps=STEPS, expectation=rule)
    others: dict[str, Callable[[], Run]] = {"SVI": lambda: peers.svi(model, guide, records, STEPS)}
    drawn = isinstance(rule, dppvi.MonteCarlo)
    if kind and drawn:
        others["torch.func"] = lambda: peers.torch_func(kind, records["X"], records["y"], STEPS)
    if kind and (kind == "network" or not drawn):
        others["Opacus"] = lambda: peers.opacus(kind, records["X"], records["y"], STEPS)
    # Products with a row's columns: mean and variance, or each draw, on the way there; the sums of
    # two vectors on the way back, and the norms of both.
    products = (DRAWS if drawn else 2) + 4
    if kind == "network":
        products = 50 * DRAWS * 3
    if guide is AutoMultivariateNormal:
        products = 2 * d
    return Built(
        lambda: rounds(model, [records], method, guide(model)),
        STEPS,
        2.0 * products * n * d * STEPS,
        4.0 * n * (d + 1) * STEPS,
        others,
    )


def _poisson(rule: Any, schedule: Any) -> Built:
    """The batches of ten clients."""
    steps, prob = 50, 0.1
    records = logistic_records(24_420)
    sizes = [2442] * 10
    ends = np.cumsum(sizes)[:-1]
    data = [
        {"X": X, "y": y}
        for X, y in zip(np.split(records["X"], ends), np.split(records["y"], ends), strict=True)
    ]
    sampler = dppvi.PoissonSampling(prob)
    method = dppvi.DPOptimization(num_local_steps=steps, sampler=sampler, expectation=rule)
    X, y = records["X"], records["y"]
    products = (DRAWS if isinstance(rule, dppvi.MonteCarlo) else 2) + 4
    return Built(
        lambda: rounds(logistic_regression, data, method, None, schedule),
        1,
        2.0 * products * prob * X.size * steps,
        4.0 * prob * X.size * steps,
        {
            "NumPy": lambda: peers.by_hand(X, y, sizes, steps, prob),
            "torch.func": lambda: peers.one_by_one(
                [
                    peers.torch_func("logistic", client["X"], client["y"], steps, prob)
                    for client in data
                ]
            ),
        },
    )


def _fit(num_rounds: int, data: Any, **settings: Any) -> Built:
    """Whole fits, each with a key of its own."""

    def of(**more: Any) -> Run:
        keys = iter(range(1000))

        def run() -> Any:
            return dppvi.fit(
                logistic_regression,
                None,
                data,
                rng_key=jax.random.key(next(keys)),
                budget=dppvi.PrivacyBudget(1.0),
                num_rounds=num_rounds,
                **{"progress_bar": False, **settings, **more},
            ).state.natural

        return run

    return Built(of)


def _unequal() -> Built:
    """A thousand clients of log-normal sizes, beside as many of their mean size."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(100), 1, 1000))
    sizes = np.maximum(20, drawn).astype(int).tolist()
    equal = [round(statistics.mean(sizes))] * len(sizes)
    method = dppvi.DPOptimization()

    def of(sizes: list[int]) -> Run:
        return rounds(logistic_regression, made_up(sizes), method)

    bytes_read = 4.0 * 21 * sum(sizes) * method.num_local_steps
    return Built(
        lambda: of(sizes), 1, 12 * bytes_read / 4, bytes_read, {"equal": lambda: of(equal)}
    )


QUADRATURE, DRAWN = dppvi.methods.GaussHermite(), dppvi.MonteCarlo(DRAWS)
FITTED = dppvi.DPOptimization()

WORKS: dict[str, Callable[[], Built]] = {
    "a step of logistic regression, 24 420 rows, quadrature": lambda: _step(
        logistic_regression, AutoNormal, 24_420, QUADRATURE, "logistic"
    ),
    "the same with ten draws": lambda: _step(
        logistic_regression, AutoNormal, 24_420, DRAWN, "logistic"
    ),
    "a step of linear regression, unknown spread, ten draws": lambda: _step(
        linear_regression, AutoNormal, 24_420, DRAWN
    ),
    "a step with full covariance, 4096 rows, quadrature": lambda: _step(
        logistic_regression, AutoMultivariateNormal, 4096, QUADRATURE
    ),
    "a step of a network of 50 units, 1000 rows, ten draws": lambda: _step(
        bnn, AutoNormal, 1000, DRAWN, "network"
    ),
    "50 Poisson steps of 10 clients, 244 of 2442 rows, quadrature": lambda: _poisson(
        QUADRATURE, dppvi.synchronous
    ),
    "the same, one client after the other": lambda: _poisson(QUADRATURE, dppvi.sequential),
    "the same with ten draws, side by side": lambda: _poisson(DRAWN, dppvi.synchronous),
    "a round of 1000 clients of log-normal sizes, 20 columns": _unequal,
    "a fit of 5 rounds, 10 clients x 50 rows x 20 columns": lambda: _fit(
        5, made_up([50] * 10), method=FITTED
    ),
    "a fit with all defaults, 10 clients, Adult": lambda: _fit(
        10, logistic_records(24_420), clients=10
    ),
}


def rates() -> tuple[float, float]:
    """What this machine reaches: operations a second in a product of matrices, bytes in a sum."""
    side, length = (1024, 2**25) if ON_CPU else (8192, 2**29)
    matrix, long = jnp.ones((side, side)), jnp.ones(length)
    product = jax.jit(functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST))
    total = jax.jit(jnp.sum)
    seconds = min(_timed(lambda: product(matrix, matrix)) for _ in range(9))
    reading = min(_timed(lambda: total(long)) for _ in range(9))
    return 2 * side**3 / seconds, 4 * length / reading


def _now() -> float:
    """Seconds of the processor or, where that is not what computes, of the clock."""
    return time.process_time() if ON_CPU else time.perf_counter()


def _timed(run: Run) -> float:
    """Seconds as of :func:`_now`."""
    start = _now()
    jax.block_until_ready(run())
    return _now() - start


def peak() -> int:
    """The most memory that the process has had, in bytes, or that of its GPU."""
    if not ON_CPU:
        return int(jax.devices()[0].memory_stats()["peak_bytes_in_use"])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measure(built: Built, before: int, repeats: int = REPEATS) -> Measured:
    """Runs the work alone, and then in turns with each peer.

    Args:
        built: The work.
        before: The memory that the process had before its records were made.
        repeats: Runs of each.
    """
    start = _now()
    run = built.start()
    _timed(run)
    cold = _now() - start
    warm = [_timed(run) for _ in range(repeats)]
    memory, ratios = peak() - before, {}
    for name, make in built.peers.items():
        if name in ("torch.func", "Opacus") and not peers.has_torch():
            continue
        other = make()
        _timed(other)
        ratios[name] = [_timed(run) / _timed(other) for _ in range(repeats)]
    per_second, bytes_per_second = rates()
    floor = max(built.flops / per_second, built.bytes / bytes_per_second) / built.units
    return Measured(cold, [each / built.units for each in warm], ratios, memory, floor)


def in_a_process(module: str, name: str, **environment: str) -> Measured:
    """Measures a line of a table in a process that has compiled nothing."""
    off = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-m", module, name],
        env=os.environ | off | environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """A median and, behind it, the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def machine() -> str:
    """What the numbers were measured on."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "numpyro", "numpy"))
    if peers.has_torch():
        versions += ", " + ", ".join(f"{n} {metadata.version(n)}" for n in ("torch", "opacus"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python, gpu = f"Python {platform.python_version()}", ""
    if not ON_CPU:
        gpu = f"{jax.devices()[0].device_kind} with a host of "
    return f"{gpu}{platform.machine()}, {cores} core(s) in use, {python}, {versions}"


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    if not peers.has_torch():
        yield "Opacus and torch.func are left out: pip install numpyro-dppvi[peers] to compare.\n"
    yield "| work | warm ms | cold s | floor ms | our time over that of others | memory MB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name in WORKS:
        found = in_a_process("benchmarks.cost", name)
        others = ", ".join(f"{peer} {spread(ratios)}" for peer, ratios in found.ratios.items())
        floor = f"{1e3 * found.floor:.2g}" if found.floor else ""
        warm = spread([1e3 * each for each in found.warm])
        memory = f"{found.memory / 2**20:.0f}"
        yield f"| {name} | {warm} | {found.cold:.1f} | {floor} | {others} | {memory} |"


def table() -> None:
    """Prints the table, and writes it into the docs once it is complete."""
    into_page("cost", lines())


def into_page(mark: str, rows: Iterable[str]) -> None:
    """Prints rows as they come, and puts all of them between a mark of the page of measurements."""
    written = [f"Measured on {machine()}.", ""]
    print(*written, sep="\n")
    for row in rows:
        print(row, flush=True)
        written.append(row)
    mark = mark if ON_CPU else f"{mark} on a GPU"
    PAGE.write_text(paper.between_marks(PAGE.read_text(), mark, "\n".join(written)))


if __name__ == "__main__":
    here = peak()
    sys.stdout.write(json.dumps(measure(WORKS[sys.argv[1]](), here)._asdict()) + "\n")
