"""How time and memory grow with clients, records, columns and shards.

    python -m benchmarks growth

Each line is measured in a process of its own, as of ``benchmarks.cost``. Growth is the power of the
size that time or memory grew by since the line before: 1 is linear.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator

import numpyro_dppvi as dppvi
from benchmarks import cost
from benchmarks.cost import Built, made_up, rounds
from models.logistic_regression import logistic_regression

REPEATS = 5


def _round(
    sizes: list[int],
    num_columns: int,
    method: dppvi.DPOptimization | dppvi.VirtualClients | dppvi.FisherScoring,
    schedule: Callable[..., object],
) -> Built:
    # Records are made within, so that they count as memory.
    data = made_up(sizes, num_columns)
    return Built(lambda: rounds(logistic_regression, data, method, None, schedule))


FULL = dppvi.DPOptimization()
SERIES: dict[str, tuple[tuple[int, ...], Callable[[int], Built]]] = {
    "clients x 50 rows x 20 columns, in turn": (
        (10, 100, 1000, 10_000),
        lambda n: _round([50] * n, 20, FULL, dppvi.sequential),
    ),
    "clients x 50 rows x 20 columns, side by side": (
        (10, 100, 1000, 10_000),
        lambda n: _round([50] * n, 20, FULL, dppvi.synchronous),
    ),
    "clients x 50 rows x 20 columns, FisherScoring in turn": (
        (10, 100, 1000, 10_000),
        lambda n: _round([50] * n, 20, dppvi.FisherScoring(), dppvi.sequential),
    ),
    "clients x 50 rows x 20 columns, FisherScoring side by side": (
        (10, 100, 1000, 10_000),
        lambda n: _round([50] * n, 20, dppvi.FisherScoring(), dppvi.synchronous),
    ),
    "clients x 122 rows x 109 columns, side by side": (
        (50, 100, 200),
        lambda n: _round([122] * n, 109, FULL, dppvi.synchronous),
    ),
    "rows of one client x 100 columns": (
        (10_000, 100_000, 1_000_000),
        lambda n: _round([n], 100, FULL, dppvi.sequential),
    ),
    "columns of one client x 1000 rows": (
        (100, 1000, 10_000),
        lambda n: _round([1000], n, FULL, dppvi.sequential),
    ),
    "records of one client, in shards of one, 10 columns": (
        (1000, 10_000, 100_000),
        lambda n: _round(
            [n], 10, dppvi.VirtualClients(n, 0.005, num_local_steps=5), dppvi.sequential
        ),
    ),
}


def table() -> None:
    """Prints the table, and writes it into the docs once it is complete."""
    cost.into_page("growth", lines())


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    yield "| a round of | warm ms | growth | cold s | memory MB | growth |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, (sizes, _) in SERIES.items():
        last = None
        for size in sizes:
            found = cost.in_a_process("benchmarks.growth", f"{size} {name}")
            warm = sorted(found.warm)[len(found.warm) // 2]
            grown = ["", ""]
            if last is not None:
                factor = math.log(size / last[0])
                grown = [
                    f"{math.log(now / then) / factor:.2f}"
                    for now, then in ((warm, last[1]), (found.memory, last[2]))
                ]
            last = size, warm, found.memory
            count, times = f"{size:,}".replace(",", " "), [1e3 * each for each in found.warm]
            yield (
                f"| {count} {name} | {cost.spread(times)} | {grown[0]} "
                f"| {found.cold:.1f} | {found.memory / 2**20:.0f} | {grown[1]} |"
            )


if __name__ == "__main__":
    here = cost.peak()
    number, series = sys.argv[1].split(" ", maxsplit=1)
    built = SERIES[series][1](int(number))
    sys.stdout.write(json.dumps(cost.measure(built, here, REPEATS)._asdict()) + "\n")
