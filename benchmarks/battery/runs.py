"""Runs, and the files that their scores are kept in: one a method, a line a run."""

import csv
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import numpyro_dppvi as dppvi
from benchmarks.battery import designs, scores

METHODS: dict[str, dict[str, Any]] = {
    "default": {},  # whatever fit takes
    "aggregated": {"trusted_aggregator": True},  # the same with an aggregator
    "DPOptimization": {"method": dppvi.DPOptimization()},
    "FisherScoring": {"method": dppvi.FisherScoring()},
}
# Without privacy, for "central" without partition, or for "limit" with all known that a run has to
# find; on standardised columns.
REFERENCES = ("none", "alone", "pooled", "central", "limit")
EPSILONS = (0.5, 1.0, 3.0, 10.0)
# Clients that are fitted by themselves, at most: every so many-th of them.
_MOST_ALONE = 10


class Run(NamedTuple):
    """One run; an epsilon of infinity is none. What does not matter to a method is `"any"`."""

    name: str
    method: str
    design: str
    split: str
    epsilon: float
    seed: int


class Line(NamedTuple):
    """A run and its outcome: mean held-out log predictive density, seconds, how it ended."""

    run: Run
    score: float
    seconds: float
    status: str


class Wanted(NamedTuple):
    """What is to be run."""

    names: Sequence[str]
    methods: Sequence[str]
    designs: Sequence[str]
    splits: Sequence[str]
    epsilons: Sequence[float]
    seeds: int

    def has(self, run: Run) -> bool:
        """Whether a run is among these."""
        return (
            run.name in self.names
            and run.method in self.methods
            and (run.design in self.designs or run.method in REFERENCES)
            and run.split in (*self.splits, "any")
            and run.epsilon in (*self.epsilons, float("inf"))
            and run.seed < self.seeds
        )


def listed(wanted: Wanted) -> Iterator[list[Run]]:
    """All runs, in groups that share what is compiled."""
    infinite, seeds = float("inf"), range(wanted.seeds)
    for name in wanted.names:
        for method in wanted.methods:
            if method in ("none", "pooled"):
                yield [Run(name, method, "standardised", "any", infinite, 0)]
            elif method == "alone":
                yield [Run(name, method, "standardised", s, infinite, 0) for s in wanted.splits]
            elif method == "limit":
                yield [
                    Run(name, method, "standardised", split, epsilon, 0)
                    for split in wanted.splits
                    for epsilon in wanted.epsilons
                ]
            elif method == "central":
                yield [
                    Run(name, method, "standardised", "any", epsilon, seed)
                    for epsilon in wanted.epsilons
                    for seed in seeds
                ]
            else:
                for split in wanted.splits:
                    yield [
                        Run(name, method, design, split, epsilon, seed)
                        for seed in seeds
                        for design in wanted.designs
                        for epsilon in wanted.epsilons
                    ]


def _file(folder: Path, method: str) -> Path:
    return folder / f"{method}.csv"


def read(folder: Path) -> list[Line]:
    """All lines of a folder; the last one of a run that is there twice."""
    found: dict[Run, Line] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for name, method, design, split, epsilon, seed, *rest in csv.reader(file):
                run = Run(name, method, design, split, float(epsilon), int(seed))
                found[run] = Line(run, float(rest[0]), float(rest[1]), rest[2])
    return list(found.values())


def append(folder: Path, line: Line) -> None:
    """Adds a line, in one write, so that processes can share a file."""
    with _file(folder, line.run.method).open("a", newline="", encoding="utf-8") as file:
        fields = [*line.run, f"{line.score:.6f}", f"{line.seconds:.2f}", line.status]
        csv.writer(file, lineterminator="\n").writerow(fields)


def score(run: Run) -> tuple[float, str]:
    """Runs one run, and says how it ended."""
    task = designs.problem(run.name, run.design)
    if run.method == "none":
        task = designs.without_columns(task)
        return scores.held_out(task, scores.laplace(task, task.train)), ""
    if run.method == "pooled":
        return scores.held_out(task, scores.laplace(task, task.train)), ""
    if run.method == "alone":
        clients = designs.clients(task.train, run.split)
        clients = clients[:: max(1, len(clients) // _MOST_ALONE)]
        alone = [scores.held_out(task, scores.laplace(task, client)) for client in clients]
        return float(np.mean(alone)), ""
    if run.method == "limit":
        return scores.limit(task, designs.SPLITS[run.split], run.epsilon), ""
    if run.method == "central":
        return scores.held_out(task, scores.central(task, run.epsilon, run.seed)), ""
    clients = designs.clients(task.train, run.split)
    return scores.fitted(task, clients, run.epsilon, run.seed, METHODS[run.method])


def _work(folder: Path, runs: Sequence[Run]) -> str:
    """Runs what is left of a group; what a method refuses or fails at is a line, too."""
    begun = time.perf_counter()
    for run in runs:
        start = time.perf_counter()
        try:
            value, status = score(run)
        except (ValueError, ArithmeticError) as refusal:  # UnsupportedModelError is a ValueError
            value, status = float("nan"), f"{type(refusal).__name__}: {refusal}"
        append(folder, Line(run, value, time.perf_counter() - start, status))
    first = runs[0]
    taken = time.perf_counter() - begun
    return f"{first.name}, {first.method}, {first.split}: {len(runs)} runs in {taken:.0f} s"


def all_of(wanted: Wanted, folder: Path, processes: int) -> None:
    """Runs everything that the folder does not have yet, a group a process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    have = {line.run for line in read(folder)}
    groups = [[run for run in group if run not in have] for group in listed(wanted)]
    groups = [group for group in groups if group]
    # One thread a process: XLA would start one a core in each of them.
    one = "--xla_cpu_multi_thread_eigen=false"
    if processes > 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one}".strip()
        os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=8) as pool:
        waiting = [pool.apply_async(_work, (folder, group)) for group in groups]
        for number, job in enumerate(waiting, start=1):
            print(f"{number}/{len(waiting)} {job.get()}", flush=True)
        pool.close()
        pool.join()
