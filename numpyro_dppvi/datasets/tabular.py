"""What the tabular data sets share: features, labels, rows to train on and rows to score on."""

import csv
import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int32]


def columns_of(path: Path) -> dict[str, list[str]]:
    """The columns of a zipped table, by name."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


class TabularData(NamedTuple):
    """Training rows, rows to score on, and what the columns mean.

    Attributes:
        X_train: Features, shape `(num_train, num_features)`, without units; the first column is
            ones, for the bias.
        y_train: Labels in {0, 1}, shape `(num_train,)`.
        X_test: Features of the rows to score on, shape `(num_test, num_features)`.
        y_test: Labels of the rows to score on, shape `(num_test,)`.
        feature_names: Names of the columns.
    """

    X_train: Features
    y_train: Labels
    X_test: Features
    y_test: Labels
    feature_names: tuple[str, ...]


def balanced(X: Features, y: Labels, feature_names: tuple[str, ...]) -> TabularData:
    """Keep as many rows of the more frequent label as there are of the other; four fifths train."""
    rng = np.random.RandomState(0)  # frozen: the same rows under every version of NumPy
    by_label = [rng.permutation(np.flatnonzero(y == label)) for label in (0, 1)]
    fewest = min(len(rows) for rows in by_label)
    kept = rng.permutation(np.concatenate([rows[:fewest] for rows in by_label]))
    training, held_out = np.split(kept, [int(0.8 * len(kept))])
    return TabularData(X[training], y[training], X[held_out], y[held_out], feature_names)
