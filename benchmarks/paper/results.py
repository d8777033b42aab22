"""Results in a tidy table: a line for each round of each run, in one CSV file."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

PUBLISHED = Path(__file__).with_name("published.csv")
"""The paper's values, read off its figures: curves, and final values with standard errors."""

RESULTS = Path(__file__).with_name("results.csv")
"""Ours."""


class Line(NamedTuple):
    """One round of one run.

    Attributes:
        figure: The study's key.
        method: The method's name in the paper's legend.
        split: How records were split over clients.
        seed: The run.
        round: The round, from 1: one exchange of messages with every client.
        accuracy: On the held-out rows.
        log_likelihood: Mean over the held-out rows, in nats.
        epsilon: Spent up to this round, at delta 1e-5, by the valid accountant; the paper's
            agrees for full batches, shards and Poisson samples, which are all that is used here.
        noise: Standard deviation of the noise over the clip.
        seconds: Since the run began, compilation included.
        settings: The numbers that it was run with.
    """

    figure: str
    method: str
    split: str
    seed: int
    round: int
    accuracy: float
    log_likelihood: float
    epsilon: float
    noise: float
    seconds: float
    settings: str

    @property
    def run(self) -> tuple[str, str, str, int, str]:
        """What tells one run from another."""
        return (self.figure, self.method, self.split, self.seed, self.settings)


def read(path: Path = RESULTS) -> list[Line]:
    """All lines of a file; none if there is no file."""
    if not path.exists():
        return []
    kinds = Line.__annotations__
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Line(**{name: kinds[name](x) for name, x in row.items()}) for row in rows]


def append(path: Path, lines: Iterable[Line]) -> None:
    """Adds the lines of a run that has ended: a run is there whole or not at all."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(Line._fields)
        writer.writerows(
            [f"{x:.6g}" if isinstance(x, float) else x for x in line] for line in lines
        )


def replace(path: Path, lines: Iterable[Line]) -> None:
    """Writes a file anew."""
    path.unlink(missing_ok=True)
    append(path, lines)


class Curve(NamedTuple):
    """Mean and standard error over seeds, by round.

    Attributes:
        rounds: Shape ``(num_rounds,)``.
        mean: Accuracy and log-likelihood, shape ``(num_rounds, 2)``.
        error: Their standard errors; NaN where there are none.
        seeds: How many runs.
    """

    rounds: np.ndarray
    mean: np.ndarray
    error: np.ndarray
    seeds: int


def curve(lines: Iterable[Line], figure: str, method: str, split: str) -> Curve | None:
    """Our curve of one method in one panel."""
    runs: dict[int, list[Line]] = {}
    for line in lines:
        if (line.figure, line.method, line.split) == (figure, method, split):
            runs.setdefault(line.seed, []).append(line)
    if not runs:
        return None
    ordered = [sorted(run, key=lambda line: line.round) for run in runs.values()]
    values = np.array([[(x.accuracy, x.log_likelihood) for x in run] for run in ordered])
    spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.full(values.shape[1:], np.nan)
    rounds = np.array([line.round for line in ordered[0]])
    return Curve(rounds, values.mean(axis=0), spread / np.sqrt(len(values)), len(values))


def published(figure: str, method: str, split: str) -> Curve | None:
    """The paper's curve; its last point has standard errors."""
    with PUBLISHED.open(newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["figure"], row["method"], row["split"]) == (figure, method, split)
        ]
    if not rows:
        return None
    numbers = {
        name: np.array([float(row[name] or "nan") for row in rows])
        for name in rows[0]
        if name not in ("figure", "split", "method")
    }
    scores = ("accuracy", "log_likelihood")
    return Curve(
        numbers["round"].astype(int),
        np.stack([numbers[name] for name in scores], axis=1),
        np.stack([numbers[f"{name}_error"] for name in scores], axis=1),
        5,
    )
