"""The README's table and picture: measured, kept in a file, and written into the README.

    python -m benchmarks.readme               writes README.md's table from docs/results.json
    python -m benchmarks.readme --seeds 5     measures first, and draws the picture

`tests/test_readme.py` holds README, page of measurements and file against each other, and (slow)
one fresh run against the file. `benchmarks/picture.py` draws the picture.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpyro_dppvi as dppvi
from benchmarks import accuracy, adult, picture

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.json"
README = ROOT / "README.md"
START, END = "<!-- written by python -m benchmarks.readme -->\n", "<!-- until here -->\n"


def measure(seeds: int) -> dict[str, Any]:
    """Runs what the table shows: means over seeds and their standard errors."""
    where = adult.setting(adult.reported(), 10)
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    private = [adult.fit(where, seed, budget=budget)[1] for seed in range(seeds)]
    pooled = [accuracy.pooled_svi(seed) for seed in range(seeds)]
    return {
        "seeds": seeds,
        "version": dppvi.__version__,
        "without privacy": _entry(pooled),
        "private": _entry(private),
    }


def _entry(scores: list[adult.Score]) -> dict[str, list[float]]:
    mean, error = adult.mean_and_error(scores)
    return {
        name: [round(getattr(mean, name), 4), round(getattr(error, name), 4)]
        for name in mean._fields
    }


def table(results: dict[str, Any]) -> str:
    """The README's table."""
    seeds = results["seeds"]
    paper = adult.PAPER["DP optimisation, 20 rounds"]
    lines = [
        "| Adult, 10 clients, held-out half | accuracy | log-likelihood |",
        "| --- | --- | --- |",
        _row("without privacy, pooled mean-field VI", results["without privacy"], errors=False),
        _row(
            f"this library, (1, 1e-5)-DP, untuned defaults, 10 rounds, {seeds} seeds",
            results["private"],
            bold=True,
        ),
        _row(
            "the paper's code, tuned, 20 rounds, 5 seeds",
            {
                "accuracy": [paper.accuracy, 0.0019],
                "log_likelihood": [paper.log_likelihood, 0.0026],
            },
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, entry: dict[str, list[float]], errors: bool = True, bold: bool = False) -> str:
    mark = "**" if bold else ""
    cells = [f"{mark}{name}{mark}"]
    for value, error in entry.values():
        shown = f"{mark}{short(value)}{mark}"
        cells.append(f"{shown} ({short(error)})" if errors else shown)
    return "| " + " | ".join(cells) + " |"


def short(value: float) -> str:
    """Four digits, without the zero before the point."""
    return f"{value:.4f}".replace("0.", ".", 1)


def written(readme: str, results: dict[str, Any]) -> str:
    """The README with its table replaced."""
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{table(results)}\n{END}{after}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--seeds", type=int, help="measure with so many seeds")
    seeds = parser.parse_args().seeds
    if seeds:
        RESULTS.write_text(json.dumps(measure(seeds), indent=2) + "\n", encoding="utf-8")
        picture.draw()
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    README.write_text(written(README.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
