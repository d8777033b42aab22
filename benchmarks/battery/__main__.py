"""Reads the command line: see the package's docstring."""

import argparse
import sys
from pathlib import Path

from benchmarks import battery
from benchmarks.battery import designs, picked, runs, sets, table


def _names(arguments: argparse.Namespace) -> list[str]:
    if arguments.sets:
        return arguments.sets
    if arguments.picked:
        return picked.names(*arguments.picked)
    return [s.name for s in sets.SOURCES if arguments.half in (s.half, "all")]


def main() -> None:
    """Runs, or prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.battery",
        description=battery.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("run", "table", "sets"))
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results/battery"))
    parser.add_argument("--half", choices=(*sets.HALVES, "all"), default="chosen")
    parser.add_argument("--sets", nargs="+", choices=sets.BY_NAME, metavar="SET")
    parser.add_argument(
        "--picked",
        nargs=2,
        type=int,
        metavar=("FIRST", "COUNT"),
        help="in place of sets of the battery, so many that nobody chose",
    )
    every = (*runs.REFERENCES, *runs.METHODS)
    parser.add_argument("--methods", nargs="+", choices=every, default=every, metavar="METHOD")
    parser.add_argument("--designs", nargs="+", choices=designs.DESIGNS, default=designs.DESIGNS)
    parser.add_argument("--splits", nargs="+", choices=designs.SPLITS, default=[*designs.SPLITS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=runs.EPSILONS)
    parser.add_argument("--seeds", type=int, help="2 for run; all that there are for table")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    wanted = runs.Wanted(
        _names(arguments),
        arguments.methods,
        arguments.designs,
        arguments.splits,
        arguments.epsilons,
        arguments.seeds or (2 if arguments.command == "run" else sys.maxsize),
    )
    if arguments.command == "run":
        runs.all_of(wanted, arguments.folder, arguments.processes)
    elif arguments.command == "table":
        table.printed([line for line in runs.read(arguments.folder) if wanted.has(line.run)])
    else:
        print("\n".join(table.set_rows()))


if __name__ == "__main__":
    main()
