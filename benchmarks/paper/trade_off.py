"""The paper's trade-off figure: how many shards should local averaging cut records into?

More shards mean less noise and a mean of worse local fits. As in the paper, all runs share their
numbers: 5 rounds, 50 local steps of Adam at 0.01, damping 0.4.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from benchmarks.paper import results
from benchmarks.paper.draw import DPI
from benchmarks.paper.jobs import Job
from benchmarks.paper.results import Line
from benchmarks.paper.studies import Settings

KEY = "trade-off"
SPLIT = "balanced"
SHARDS = (1, 2, 5, 10, 20, 50, 100)
VARIANTS = {
    "no privacy, clip 1000": (math.inf, 1000.0),
    "no privacy, clip 1": (math.inf, 1.0),
    "(4, 1e-5)-DP, clip 1": (4.0, 1.0),
}
"""Epsilon and clip."""

_COLOURS = ("#000000", "#E69F00", "#0072B2")


def _settings(variant: str, num_shards: int) -> Settings:
    return Settings(
        f"{variant}, {num_shards} shards",
        "averaging",
        VARIANTS[variant][1],
        num_local_steps=50,
        learning_rate=1e-2,
        num_rounds=5,
        num_shards=num_shards,
        draws=2,
    )


def jobs(seeds: int) -> Iterator[Job]:
    """All runs of the figure."""
    for variant, (epsilon, _) in VARIANTS.items():
        for number in SHARDS:
            settings = _settings(variant, number)
            yield Job(KEY, "mortality", epsilon, settings, SPLIT, tuple(range(seeds)))


def draw(lines: Iterable[Line], folder: Path) -> Path:
    """Two panels: log-likelihood by round without privacy, and after the last round by shards."""
    lines = list(lines)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        page, (upper, lower) = plt.subplots(2, 1, figsize=(4.6, 6.4))
        _by_round(upper, lines)
        _by_shards(lower, lines)
        page.suptitle("SUPPORT2, local averaging, 10 clients, balanced", fontsize=10)
        page.tight_layout()
        place = folder / f"paper-{KEY}.png"
        page.savefig(place, dpi=DPI)
        plt.close(page)
    return place


def _by_round(axes: Axes, lines: list[Line]) -> None:
    variant = next(iter(VARIANTS))
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(SHARDS)))
    for colour, number in zip(colours, SHARDS, strict=True):
        curve = results.curve(lines, KEY, _settings(variant, number).name, SPLIT)
        if curve is not None:
            axes.plot(curve.rounds, curve.mean[:, 1], color=colour, label=str(number))
    axes.set_title(variant)
    axes.set_xticks(range(1, 6))
    axes.set_xlabel("communications with every client")
    axes.set_ylabel("log-likelihood")
    axes.margins(y=0.2)  # room for the legend below
    style = {"handlelength": 0.8, "columnspacing": 0.9, "frameon": False, "fontsize": 8}
    axes.legend(title="shards a client", ncols=len(SHARDS), loc="lower center", **style)


def _by_shards(axes: Axes, lines: list[Line]) -> None:
    for colour, variant in zip(_COLOURS, VARIANTS, strict=True):
        found = [
            (number, results.curve(lines, KEY, _settings(variant, number).name, SPLIT))
            for number in SHARDS
        ]
        there = [(number, curve) for number, curve in found if curve is not None]
        axes.errorbar(
            [number for number, _ in there],
            [-curve.mean[-1, 1] for _, curve in there],
            [curve.error[-1, 1] for _, curve in there],
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            label=variant,
        )
    axes.set_xscale("log")
    axes.set_xticks(SHARDS, [str(number) for number in SHARDS])
    axes.set_xlabel("shards a client")
    # Few shards under noise are ten times as far off as the rest: a log scale, better is higher.
    axes.set_yscale("log")
    axes.invert_yaxis()
    ticks = (0.55, 0.7, 1, 2, 4)
    axes.set_yticks(ticks, [f"-{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title("after 5 rounds")
    axes.set_ylabel("log-likelihood")
    axes.legend(frameon=False, fontsize=8)
