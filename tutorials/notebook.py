"""What the tutorials share: text with computed numbers in it, sizes for quick runs, pictures."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure

T = TypeVar("T")

# Okabe and Ito's palette: told apart by colour-blind readers, and in print.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"


class Text(str):
    """Markdown that a notebook shows as such: the last line of a cell, with numbers filled in."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)


def pick(in_full: T, quickly: T) -> T:
    """One of two sizes: the second in ``python -m tutorials --quick``."""
    return quickly if os.environ.get("QUICK_TUTORIALS") else in_full


def panels(number: int, width: float = 4.5, height: float = 3.4) -> tuple[Figure, Any]:
    """A figure with some axes beside each other; ``figure`` as a cell's last line shows it."""
    figure = Figure(figsize=(width * number, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    axes = np.atleast_1d(figure.subplots(1, number))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


Interval = tuple[float, float]
"""A mean and a standard deviation."""


def forest(rows: Mapping[str, Sequence[Interval]], names: Sequence[str]) -> Figure:
    """Means with 90 % intervals (1.645 standard deviations), one panel a parameter.

    Args:
        rows: By the posterior's name, a mean and a standard deviation for each parameter; the
            last row is the one that the others are held against.
        names: The parameters' names.
    """
    figure, axes = panels(len(names), 3.2, 0.9 + 0.38 * len(rows))
    colors = [GREY] * (len(rows) - 2) + [BLUE, RED]
    for place, (axis, name) in enumerate(zip(axes, names, strict=True)):
        for height, (row, color) in enumerate(zip(rows.values(), colors, strict=True)):
            mean, width = row[place]
            axis.errorbar(
                mean, -height, xerr=1.645 * width, fmt="o", color=color, capsize=3, linewidth=2
            )
        axis.axvline([*rows.values()][-1][place][0], color=RED, linewidth=0.8, linestyle=":")
        axis.set(title=name, yticks=[-h for h in range(len(rows))])
        axis.set_yticklabels(rows if place == 0 else [])
        axis.set_ylim(0.6 - len(rows), 0.4)
    axes[0].set_xlabel("mean and 90 % interval")
    return figure
