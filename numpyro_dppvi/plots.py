"""Pictures of a fit, from released values only. Needs matplotlib (``numpyro-dppvi[plots]``)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_dppvi.fit import FitResult

# Okabe and Ito's palette, told apart by colour-blind readers and in print.
_BLUE = "#0072B2"
_REFERENCES = ("#000000", "#D55E00", "#009E73", "#CC79A7")
_STYLES = ("--", ":", "-.", (0, (1, 1)))


def convergence(
    result: FitResult,
    scores: Mapping[str, Sequence[float]] | None = None,
    references: Mapping[str, Mapping[str, float]] | None = None,
) -> Any:
    """Draws how a fit went, round by round.

    Args:
        result: What ``fit`` returned.
        scores: Numbers by round to draw, one panel each, by their label: scores on public rows,
            say. The last panel is always the movement of the posterior.
        references: For a score's label, horizontal lines by their name.

    Returns:
        A ``matplotlib.figure.Figure``, which belongs to no window: ``figure.savefig(path)``.

    Raises:
        ModuleNotFoundError: Without matplotlib; says what to install.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, Sequence[float]] = {**(scores or {})}
    panels["movement of the posterior"] = result.history.movement.tolist()
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(panels)))
    for number, (axis, (label, values)) in enumerate(zip(axes, panels.items(), strict=True)):
        rounds = np.arange(1, len(values) + 1)
        axis.plot(rounds, values, color=_BLUE, marker="o", markersize=4, label="this fit")
        lines = (references or {}).get(label, {})
        for index, (name, value) in enumerate(lines.items()):
            style = _STYLES[index % len(_STYLES)]
            color = _REFERENCES[index % len(_REFERENCES)]
            axis.axhline(value, color=color, linestyle=style, label=name)
        axis.set(xlabel="round", title=label)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        if number == len(panels) - 1:
            axis.set_ylim(bottom=0)
            axis.set_ylabel("Jeffreys divergence, nats")
        if lines:
            axis.legend(frameon=False, fontsize="small", loc="lower right")
    return figure
