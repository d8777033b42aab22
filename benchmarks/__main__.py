"""Prints the project's tables of accuracy, likelihood and speed.

python -m benchmarks                     the short ones
python -m benchmarks accuracy --seeds 5
python -m benchmarks gallery --studies rats "smooth curve"
"""

import argparse

from benchmarks import (
    accuracy,
    audit,
    believe,
    calibration,
    cost,
    examples,
    gallery,
    generic,
    groups,
    growth,
    selection,
)
from benchmarks.studies import STUDIES

TABLES = {
    "accuracy": accuracy.private,
    "nonprivate": accuracy.non_private,
    "cost": lambda _seeds: cost.table(),
    "growth": lambda _seeds: growth.table(),
    "generic": lambda _seeds: generic.table(),
    "selection": selection.table,
    "audit": lambda _seeds: audit.table(),
    "calibration": lambda _seeds: calibration.table(),
    "believe": believe.table,
    "unseen": believe.unseen,
    "intercepts": believe.intercepts,
    "columns": believe.columns,
    "groups": groups.table,
    "examples": lambda _seeds: examples.table(),
    "gallery": lambda _seeds: gallery.table(),
    "noisy": lambda _seeds: gallery.noisy_table(),
}

SPECIAL = (
    "selection",
    "audit",
    "believe",
    "unseen",
    "intercepts",
    "columns",
    "groups",
    "calibration",
    "examples",
    "gallery",
    "noisy",
)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default = [name for name in TABLES if name not in SPECIAL]
    parser.add_argument("tables", nargs="*", default=default, metavar="|".join(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--studies", nargs="*", default=(), help="of the gallery; all if left out")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.studies) - set(STUDIES))
    if unknown:
        parser.error(f"there is no study {unknown[0]!r}; there are {', '.join(STUDIES)}")
    for name in arguments.tables:
        if name not in TABLES:
            parser.error(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        if name in ("gallery", "noisy"):
            shown = gallery.table if name == "gallery" else gallery.noisy_table
            shown(tuple(arguments.studies))
        else:
            TABLES[name](arguments.seeds)


if __name__ == "__main__":
    main()
