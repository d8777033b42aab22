"""Runs the paper's experiments again, draws its figures and writes the tables of differences.

python -m benchmarks.paper                             all of it; goes on where it was interrupted
python -m benchmarks.paper --figure adult-10 --seeds 5
python -m benchmarks.paper --draw                      from results that are there
"""

import argparse
import itertools
from pathlib import Path

from tqdm.auto import tqdm

from benchmarks.paper import draw, results, table, trade_off
from benchmarks.paper.run import Runner
from benchmarks.paper.studies import STUDIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reproduction.md"


def run(figures: list[str], seeds: int, place: Path) -> None:
    """Runs whatever is not in the results yet; lines of other settings are dropped."""
    wanted = [
        (figure, settings, split, seed)
        for figure in figures
        for settings, split, seed in itertools.product(
            STUDIES[figure].settings, STUDIES[figure].splits, range(seeds)
        )
    ]
    current = {(f, str(s)) for f in STUDIES for s in STUDIES[f].settings}
    kept = [
        line
        for line in results.read(place)
        if (line.figure, line.settings) in current or line.figure not in STUDIES
    ]
    results.replace(place, kept)
    done = {line.run for line in kept}
    todo = [w for w in wanted if (w[0], w[1].name, w[2], w[3], str(w[1])) not in done]
    bar = tqdm(todo, disable=not todo)
    runner: Runner | None = None
    for figure, settings, split, seed in bar:
        bar.set_description(f"{figure}, {settings.name}, {split}, seed {seed}")
        if runner is None or runner.key != figure:
            runner = Runner(figure, STUDIES[figure], STUDIES[figure].load())
        results.append(place, runner.run(settings, split, seed))


def publish(figures: list[str], place: Path) -> None:
    """Draws the figures and writes their tables into the page."""
    lines = results.read(place)
    text = PAGE.read_text(encoding="utf-8")
    text = table.between_marks(text, "accounting", table.accountings())
    for figure in figures:
        draw.draw(figure, lines, DOCS / "images")
        text = table.between_marks(text, figure, table.markdown(figure, lines))
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
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    arguments = parser.parse_args()
    chosen = arguments.figure or names
    figures = [name for name in chosen if name in STUDIES]
    if not arguments.draw:
        run(figures, arguments.seeds, arguments.results)
        if trade_off.KEY in chosen:
            trade_off.run(arguments.seeds, arguments.results)
    publish(figures, arguments.results)
    if trade_off.KEY in chosen:
        trade_off.draw(results.read(arguments.results), DOCS / "images")


if __name__ == "__main__":
    main()
