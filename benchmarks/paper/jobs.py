"""Runs that are still to be done, side by side: one process a core.

The runs of one method on one split differ in their seed alone and share a compiled program, so
they are one process's job.
"""

import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tqdm.auto import tqdm

from benchmarks.paper import results
from benchmarks.paper.results import Line
from benchmarks.paper.run import Runner
from benchmarks.paper.studies import STUDIES, Settings


class Job(NamedTuple):
    """Runs of one method on one split.

    Attributes:
        figure: What the results are filed under.
        study: The key of the study whose rows and model they take.
        epsilon: The budget.
        settings: The method.
        split: How records are split.
        seeds: One run each.
    """

    figure: str
    study: str
    epsilon: float
    settings: Settings
    split: str
    seeds: tuple[int, ...]


def of_study(figure: str, seeds: int) -> Iterator[Job]:
    """All runs of one of the studies."""
    study = STUDIES[figure]
    for settings in study.settings:
        for split in study.splits:
            yield Job(figure, figure, study.epsilon, settings, split, tuple(range(seeds)))


def run(jobs: Iterable[Job], place: Path, processes: int) -> None:
    """Runs whatever is not in the results yet; lines of other settings are dropped."""
    jobs = list(jobs)
    figures = {job.figure for job in jobs}
    current = {(job.figure, str(job.settings)) for job in jobs}
    lines = results.read(place)
    kept = [x for x in lines if x.figure not in figures or (x.figure, x.settings) in current]
    if len(kept) < len(lines):
        results.replace(place, kept)
    done = {line.run for line in kept}
    todo = [left for job in jobs if (left := _left(job, done)).seeds]
    if todo:
        _side_by_side(todo, place, processes)


def _left(job: Job, done: set[tuple[str, str, str, int, str]]) -> Job:
    run = (job.figure, job.settings.name, job.split)
    seeds = [seed for seed in job.seeds if (*run, seed, str(job.settings)) not in done]
    return job._replace(seeds=tuple(seeds))


def _side_by_side(jobs: list[Job], place: Path, processes: int) -> None:
    # Workers start afresh and read this before JAX starts: a core is enough for each.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    context = multiprocessing.get_context("spawn")
    total = sum(len(job.seeds) for job in jobs)
    with ProcessPoolExecutor(processes, context) as pool, tqdm(total=total) as bar:
        running = {pool.submit(_perform, job): job for job in jobs}
        for future in as_completed(running):
            job = running[future]
            results.append(place, future.result())
            bar.set_description(f"{job.figure}, {job.settings.name}, {job.split}")
            bar.update(len(job.seeds))


def _perform(job: Job) -> list[Line]:
    runner = _runner(job.figure, job.study, job.epsilon)
    return [line for seed in job.seeds for line in runner.run(job.settings, job.split, seed)]


@functools.lru_cache(maxsize=2)
def _runner(figure: str, study: str, epsilon: float) -> Runner:
    chosen = STUDIES[study]._replace(epsilon=epsilon)
    return Runner(figure, chosen, chosen.load())
