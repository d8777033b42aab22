"""Draws the figures again, ours over the paper's."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper import results
from benchmarks.paper.results import Curve, Line
from benchmarks.paper.studies import STUDIES

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "DP optimisation": "#0072B2",
    "local avg": "#E69F00",
    "local avg, trusted aggr.": "#D55E00",
    "virtual": "#009E73",
    "virtual, trusted aggr.": "#56B4E9",
    "BCM same": "#CC79A7",
    "BCM split": "#555555",
    "global VI, trusted aggr.": "#000000",
}
SCORES = ("accuracy", "log-likelihood")
DPI = 160


def draw(figure: str, lines: Iterable[Line], folder: Path) -> Path:
    """One figure: a row a split, a column a score; solid is ours, dashed the paper's.

    It is narrow, so that it can be read on a telephone, too.

    Args:
        figure: The study's key.
        lines: Our results.
        folder: Where the picture goes.

    Returns:
        The picture's path.
    """
    study, lines = STUDIES[figure], list(lines)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        splits = len(study.splits)
        page, axes = plt.subplots(splits, 2, figsize=(5.4, 2 + 1.9 * splits), sharex=True)
        for panel, split in zip(axes, study.splits, strict=True):
            panel[0].set_ylabel(split)
            for settings in study.settings:
                _method(panel, lines, figure, settings.name, split)
            for each in panel:
                each.set_xscale("log")
                each.grid(alpha=0.25, linewidth=0.5)
        for score, column in zip(SCORES, axes.T, strict=True):
            column[0].set_title(score)
            _same_range(column)
        _finish(page, axes[0, 0], study.title, study.note)
        place = folder / f"paper-{figure}.png"
        page.savefig(place, dpi=DPI)
        plt.close(page)
    return place


def _method(panel: Sequence[Axes], lines: list[Line], figure: str, method: str, split: str) -> None:
    """Both scores of one method in one split, ours and the paper's."""
    colour = COLOURS[method]
    ours = results.curve(lines, figure, method, split)
    theirs = results.published(figure, method, split)
    for index, axes in enumerate(panel):
        if theirs is not None:
            _curve(axes, theirs, index, colour, dashed=True, label=None)
        if ours is not None:
            _curve(axes, ours, index, colour, dashed=False, label=method)


def _curve(
    axes: Axes, curve: Curve, index: int, colour: str, *, dashed: bool, label: str | None
) -> None:
    mean, error = curve.mean[:, index], curve.error[:, index]
    if len(curve.rounds) == 1:  # one round: a point with its standard error
        axes.errorbar(
            *(curve.rounds * (1.12 if dashed else 1.0), mean, error),
            color=colour,
            marker="o",
            markersize=5,
            markerfacecolor="white" if dashed else colour,
            label=label,
        )
        return
    style = {"color": colour, "linewidth": 1.0 if dashed else 1.8}
    axes.plot(curve.rounds, mean, linestyle="--" if dashed else "-", label=label, **style)
    if dashed:
        axes.errorbar(curve.rounds[-1:], mean[-1:], error[-1:], color=colour, capsize=2)
    else:
        axes.fill_between(curve.rounds, mean - error, mean + error, color=colour, alpha=0.2, lw=0)


def _same_range(column: Sequence[Axes]) -> None:
    """One range for all splits of a score, which leaves out the first steps of long curves.

    It leaves out what failed, too: what ends four times as far below the median as the best is
    above it.
    """
    finals = [line.get_ydata()[-1] for axes in column for line in axes.lines]
    finals = [y for y in np.asarray(finals, float) if np.isfinite(y)]
    if finals:
        high, middle = max(finals), float(np.median(finals))
        low = max(min(finals), middle - 4 * (high - middle))
        margin = 0.15 * (high - low) + 1e-3
        for axes in column:
            axes.set_ylim(low - 2 * margin, high + margin)


def _finish(page: Figure, axes: Axes, title: str, note: str) -> None:
    handles, names = axes.get_legend_handles_labels()
    solid = mpl.lines.Line2D([], [], color="#777777", linewidth=1.8)
    dashed = mpl.lines.Line2D([], [], color="#777777", linewidth=1.0, linestyle="--")
    page.legend(
        [*handles, solid, dashed],
        [*names, "ours (band: standard error)", "the paper's"],
        loc="lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    said = [title, *textwrap.wrap(note, 60)]
    page.suptitle("\n".join(said), fontsize=10)
    below = 1.1 / page.get_figheight()
    page.supxlabel("communications with every client", fontsize=9, y=below, va="bottom")
    page.tight_layout(rect=(0, below - 0.01, 1, 1))
