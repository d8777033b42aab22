"""Runs the paper's experiments again, draws its figures and writes the tables of differences.

python -m benchmarks.paper                             all of it; goes on where it was interrupted
python -m benchmarks.paper --figure adult-10 --seeds 5
python -m benchmarks.paper --draw                      from results that are there
"""

import argparse
import itertools
import os
from pathlib import Path

from benchmarks.paper import draw, jobs, results, table, trade_off
from benchmarks.paper.studies import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reproduction.md"


def publish(figures: list[str], place: Path) -> None:
    """Draws the figures and writes their tables into the page."""
    lines = results.read(place)
    text = PAGE.read_text(encoding="utf-8")
    text = table.between_marks(text, "accounting", table.accountings())
    for figure in figures:
        draw.draw(figure, lines, DOCS / "images")
        text = table.between_marks(text, figure, table.markdown(figure, lines))
        text = table.between_marks(text, f"{figure}, order", table.orders(figure, lines))
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    names = [*STUDIES, trade_off.KEY]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--figure", choices=names, action="append", help="all if not given")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="one a core")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    chosen = arguments.figure or names
    figures = [name for name in chosen if name in STUDIES]
    if not arguments.draw:
        todo = itertools.chain.from_iterable(
            jobs.of_study(name, arguments.seeds)
            if name in STUDIES
            else trade_off.jobs(arguments.seeds)
            for name in chosen
        )
        jobs.run(todo, arguments.results, arguments.processes)
    publish(figures, arguments.results)
    if trade_off.KEY in chosen:
        trade_off.draw(results.read(arguments.results), DOCS / "images")


if __name__ == "__main__":
    main()
