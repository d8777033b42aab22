"""Chooses a method's numbers on rows that are not reported: random search over all three splits.

    python -m benchmarks.paper.choose --figure mortality --method virtual --number 30

Four fifths of the training rows train, the last fifth scores. Prints every setting that was tried,
the best last; the best is written into ``studies.py`` by hand, with how many were tried.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from benchmarks.paper.run import Runner
from benchmarks.paper.studies import STUDIES, Settings
from models.evaluation import selection_split

Draw = Callable[[np.random.Generator], Any]


def _one_of(*values: Any) -> Draw:
    return lambda rng: values[rng.integers(len(values))]


def _between(low: float, high: float) -> Draw:
    """Two digits of a number, uniform in its logarithm."""
    return lambda rng: float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.1e}")


RANGES: dict[str, dict[str, Draw]] = {
    "optimization": {
        "clip_norm": _between(1.0, 4.0),
        "num_local_steps": _one_of(1, 3, 5),
        "num_rounds": _one_of(5, 10, 20),
        "damping": _between(0.15, 1.0),
    },
    "averaging": {
        "clip_norm": _between(0.2, 5.0),
        "learning_rate": _one_of(1e-4, 2e-4, 5e-4, 1e-3),
        "num_rounds": _one_of(5, 8, 15),
        "damping": _between(0.2, 1.0),
        "num_shards": _one_of(50, 150, 400),
    },
    "virtual": {
        "clip_norm": _between(0.003, 0.2),
        "learning_rate": _one_of(0.02, 0.05),
        "num_rounds": _one_of(5, 8, 15),
        "damping": _between(0.05, 0.7),
        "shard_size": _one_of(1, 4, 12),
    },
    "natural": {
        "clip_norm": _between(0.006, 0.06),
        "learning_rate": _one_of(0.15, 0.2, 0.25),
        "num_rounds": _one_of(8, 12, 15),
        "damping": _between(0.25, 1.0),
    },
    "same": {"clip_norm": _between(1.0, 4.0), "num_local_steps": _one_of(5, 10, 30, 60)},
    "split": {"clip_norm": _between(1.0, 4.0), "num_local_steps": _one_of(5, 10, 30, 60)},
    "global": {
        "clip_norm": _between(1.0, 4.0),
        "num_rounds": _one_of(50, 100, 200, 400),
        "learning_rate": _one_of(0.005, 0.01, 0.02, 0.05),
    },
}
"""What is drawn, by kind of method or for natural gradients; few values of what is compiled."""


def candidates(settings: Settings, number: int) -> list[Settings]:
    """The settings that stand in the table, and others drawn around them, always the same ones."""
    rng = np.random.default_rng(0)
    draws = RANGES["natural" if settings.optimizer == "natural" else settings.kind]
    others = [
        dataclasses.replace(settings, **{name: draw(rng) for name, draw in draws.items()})
        for _ in range(number)
    ]
    return [settings, *others]


def choose(figure: str, method: str, number: int, seeds: int) -> None:
    """Scores all candidates and prints them, the best last."""
    study = STUDIES[figure]
    runner = Runner(figure, study, selection_split(study.load()))
    (settings,) = [s for s in study.settings if s.name == method]
    found = []
    for candidate in tqdm(candidates(settings, number), desc=f"{figure}, {method}"):
        ends = np.array(
            [
                [runner.run(candidate, split, seed)[-1][5:7] for seed in range(seeds)]
                for split in study.splits
            ]
        )
        found.append((float(np.mean(ends[..., 1])), ends.mean(axis=1), candidate))
    for mean, by_split, candidate in sorted(found, key=lambda entry: entry[0]):
        scores = "  ".join(f"{accuracy:.4f} {likelihood:.4f}" for accuracy, likelihood in by_split)
        print(f"{mean:.4f}  {scores}  {candidate}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=STUDIES, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    choose(arguments.figure, arguments.method, arguments.number, arguments.seeds)


if __name__ == "__main__":
    main()
