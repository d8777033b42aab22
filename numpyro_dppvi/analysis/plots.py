"""Plots of a fit, from released values only; needs matplotlib (``numpyro-dppvi[plots]``).

Every function returns a ``matplotlib.figure.Figure`` without a window: make it the last line of a
notebook's cell, which shows it, or call ``figure.savefig(path)``. With ``ax=`` it draws on axes of
your own and returns these.
"""

import functools
import io
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.analysis.diagnostics import Diagnostics, diagnose, labels
from numpyro_dppvi.families import precision
from numpyro_dppvi.posterior.marginals import moments
from numpyro_dppvi.privacy import Ledger, PrivacyBudget, accounting
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.protocol.algorithm import entries
from numpyro_dppvi.run.fitting import FitResult

__all__ = ["clients", "convergence", "privacy"]

# Okabe and Ito's palette for colour-blind readers, dark colours first.
_BLUE, _RED, _GREEN, _PURPLE, _ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
_GREY = "#777777"
_LINES = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE)
_REFERENCES = ("#000000", _RED, _GREEN, _PURPLE)
_STYLES = ("--", ":", "-.", (0, (1, 1)))
_MARKERS = ("o", "s", "^", "D", "v")
_PANEL = (4.2, 3.4)

# With more clients than this, they are drawn as points instead of bars.
_BARS = 15
# With more distinct spending curves than this, they are drawn without labels.
_KINDS = 3
# Points of a spending curve; accountants without a closed form are slow.
_CURVE_POINTS = 12
# Clients that share a line and are named.
_NAMED = 3


def __dir__() -> list[str]:
    return __all__


def convergence(
    result: FitResult,
    scores: Mapping[str, Sequence[float]] | None = None,
    references: Mapping[str, Mapping[str, float]] | None = None,
    *,
    ax: Any = None,
) -> Any:
    """Plots the course of a fit over rounds.

    Args:
        result: The result of ``fit``.
        scores: Numbers by round, such as scores on public rows, by the label of their panel.
            Without them, a panel shows the parameters that moved farthest. The last panel is
            always the movement of the posterior.
        references: Horizontal lines by name, for each label of a score.
        ax: Axes to draw on, one per panel: one for each score (or for the parameters) and one for
            the movement, as from ``matplotlib.pyplot.subplots(1, 2)``.

    Returns:
        A ``matplotlib.figure.Figure``; ``ax`` where it is given.

    Raises:
        ModuleNotFoundError: Without matplotlib; says what to install.
        TypeError: If ``ax`` holds something else, or another number of axes.
    """
    _validate.instance("result", result, FitResult, "fit(...)")
    panels = {} if scores is None else _numbers("scores", scores)
    lines_of = _validate.mapping("references", references, "{'accuracy': {'pooled': 0.9}}")
    lines_of = {
        label: _reference_lines(f"references[{label!r}]", lines)
        for label, lines in lines_of.items()
    }
    figure, axes = _panels(max(len(panels), 1) + 1, ax)
    if not panels:
        _parameters(axes[0], result)
    for axis, (label, values) in zip(axes, panels.items(), strict=False):
        rounds = np.arange(1, len(values) + 1)
        axis.plot(rounds, values, color=_BLUE, marker="o", markersize=4, label="this fit")
        lines = lines_of.get(label, {})
        for index, (name, value) in enumerate(lines.items()):
            style = _STYLES[index % len(_STYLES)]
            color = _REFERENCES[index % len(_REFERENCES)]
            axis.axhline(value, color=color, linestyle=style, label=name)
        axis.set_title(label)
        if lines:
            axis.legend(frameon=False, fontsize="small", loc="lower right")
    _movement(axes[-1], result)
    for axis in axes:
        _count_rounds(axis)
    return figure


def privacy(result: FitResult, diagnostics: Diagnostics | None = None, *, ax: Any = None) -> Any:
    """Plots the privacy cost of a fit over rounds, and the effect of noise.

    Args:
        result: The result of ``fit``.
        diagnostics: The result of ``diagnose``; computed by default, which takes some seconds.
        ax: Axes to draw on, one per panel: what was spent, and the noise where that is known.

    Returns:
        A ``matplotlib.figure.Figure``; ``ax`` where it is given.

    Raises:
        ModuleNotFoundError: Without matplotlib; says what to install.
        TypeError: If ``ax`` holds something else, or another number of axes.
        ValueError: If the fit was not private.
    """
    _check(result, diagnostics)
    if result.plan is None:
        raise ValueError(
            "result must be a private fit, got one without noise: write plots.convergence(result)."
        )
    noise = (diagnose(result) if diagnostics is None else diagnostics).noise
    figure, axes = _panels(2 if noise else 1, ax)
    _spending(axes[0], result)
    if noise:
        _noise(axes[1], noise)
    return figure


def clients(result: FitResult, diagnostics: Diagnostics | None = None, *, ax: Any = None) -> Any:
    """Plots each client's share of the posterior precision and of the records.

    Args:
        result: The result of ``fit``.
        diagnostics: The result of ``diagnose``; computed by default, which takes some seconds.
        ax: Axes to draw on.

    Returns:
        A ``matplotlib.figure.Figure``; ``ax`` where it is given.

    Raises:
        ModuleNotFoundError: Without matplotlib; says what to install.
        TypeError: If ``ax`` holds something else, or another number of axes.
        ValueError: If clients' shares are unknown.
    """
    _check(result, diagnostics)
    found = diagnose(result) if diagnostics is None else diagnostics
    if not found.share:
        raise ValueError(
            "result must have clients' factors of continuous latents, got none (the method keeps "
            "no factors, or all latents are discrete): write plots.convergence(result)."
        )
    flat = np.concatenate([x.reshape(len(found.contributors), -1) for x in found.share.values()], 1)
    records = np.array(result.client_sizes) / sum(result.client_sizes)
    # With a trusted aggregator, the prior and all clients together are the only contributors.
    if len(found.contributors) == 2 and len(records) > 1:
        records = np.ones(1)
    if len(found.contributors) <= _BARS:
        return _bars(found.contributors, flat, records, ax)
    return _cloud(flat, records, ax)


def _check(result: FitResult, diagnostics: Diagnostics | None) -> None:
    _validate.instance("result", result, FitResult, "fit(...)")
    if diagnostics is not None:
        _validate.instance("diagnostics", diagnostics, Diagnostics, "diagnose(result)")


def _numbers(name: str, values: Any) -> dict[str, list[float]]:
    """Numbers by round, for each panel's label."""
    by_label = _validate.mapping(name, values, "{'accuracy': [0.8, 0.9]}")
    if not by_label:
        raise ValueError(f"{name} must not be empty, got no entries: leave {name} out.")
    return {
        label: [
            _drawn(f"{name}[{label!r}]", one)
            for one in _validate.entries(f"{name}[{label!r}]", numbers, "[0.8, 0.9]")
        ]
        for label, numbers in by_label.items()
    }


def _reference_lines(name: str, lines: Any) -> dict[str, float]:
    by_label = _validate.mapping(name, lines, "{'pooled': 0.9}")
    return {label: _drawn(f"{name}[{label!r}]", value) for label, value in by_label.items()}


def _drawn(name: str, value: Any) -> float:
    """A number to plot; values that are not finite leave a gap."""
    try:
        # float() would make a masked entry NaN, and a gap of what is a mistake.
        number = None if np.ma.is_masked(value) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = None
    if number is None:
        raise ValueError(f"{name} must be a number, got {_validate.shown(value)}: write 0.9, say.")
    return number


def _panels(number: int, ax: Any, height: float = _PANEL[1]) -> tuple[Any, Any]:
    """What to return and the axes to draw on: a new figure's, or the user's own."""
    if ax is None:
        figure = _picture()(figsize=(_PANEL[0] * number, height))
        # Legends stand outside some axes: only this layout makes room for them.
        figure.set_layout_engine("constrained", w_pad=0.1)
        returned, axes = figure, np.ravel(figure.subplots(1, number)).tolist()
    else:
        returned, axes = ax, _own(ax, number)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return returned, axes


def _own(ax: Any, number: int) -> list[Any]:
    """The user's axes, one per panel."""
    from matplotlib.axes import Axes

    is_array = isinstance(ax, np.ndarray)
    # What pyplot.subplots returns: one Axes, or an array of them. Lists are taken as well.
    found = ax.ravel().tolist() if is_array else [ax] if isinstance(ax, Axes) else ax
    wrong = [one for one in _validate.listed(found) or [found] if not isinstance(one, Axes)]
    if wrong or len(found) != number:
        received = _validate.shown(wrong[0]) if wrong else f"{len(found)} axes"
        raise TypeError(
            f"ax must be the axes of {number} panel{'s' * (number > 1)}, got {received}: write "
            f"figure, ax = matplotlib.pyplot.subplots(1, {number})."
        )
    return list(found)


@functools.cache
def _picture() -> Any:
    """Figures that notebooks show: those of matplotlib they show only with pyplot."""
    from matplotlib.figure import Figure

    # A method of this name is what Jupyter looks for.
    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture


def _note(axis: Any, text: str, at: tuple[Any, Any], shift: tuple[int, int], va: str) -> None:
    axis.annotate(text, at, xytext=shift, textcoords="offset points", va=va, fontsize="small")


def _count_rounds(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _movement(axis: Any, result: FitResult) -> None:
    """Movement by round, marking rounds in which a merge was rejected or a visit failed."""
    history = result.history
    movement = np.asarray(history.movement)
    rounds = np.arange(1, len(movement) + 1)
    axis.plot(rounds, movement, color=_BLUE, marker="o", markersize=4)
    # A round that changed nothing looks settled: it is marked.
    odd = (history.rejected + history.failed) > 0
    if odd.any():
        axis.plot(
            rounds[odd],
            movement[odd],
            "X",
            color=_RED,
            markersize=9,
            label="merge rejected or failed",
        )
        axis.legend(frameon=False, fontsize="small")
    axis.set(title="movement of the posterior", ylabel="Jeffreys divergence, nats")
    # Logarithms where the first round dwarfs all others, and none of them is 0.
    positive = movement[np.isfinite(movement) & (movement > 0)]
    if len(positive) == len(movement) > 0 and positive.max() > 30 * positive.min():
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)


def _parameters(axis: Any, result: FitResult) -> None:
    """Means of the parameters that moved farthest, with bands of one standard deviation."""
    num_rounds = len(result.history.movement)
    if not num_rounds:
        return
    of_round = jax.vmap(functools.partial(moments, result.posterior.family))
    history = precision.arrays(result.history.natural)
    means, widths = precision.in_own_precision(of_round)(history)
    names = labels({name: np.asarray(values[-1]) for name, values in means.items()})
    mean, width = (
        np.concatenate([np.asarray(x).reshape(num_rounds, -1) for x in tree.values()], axis=1)
        for tree in (means, widths)
    )
    rounds = np.arange(1, len(mean) + 1)
    tiny = np.finfo(width.dtype).tiny  # a discrete latent may have no width
    # Farthest from 0 in standard deviations, so that units do not decide which are shown.
    farthest = np.argsort(-np.abs(mean[-1]) / np.maximum(width[-1], tiny))[: len(_LINES)]
    # The legend in the order of the lines' right ends.
    for place, index in enumerate(sorted(farthest, key=lambda i: -mean[-1, i])):
        color, marker = _LINES[place], _MARKERS[place]
        line, band = mean[:, index], width[:, index]
        axis.plot(rounds, line, color=color, marker=marker, markersize=4, label=names[index])
        axis.fill_between(rounds, line - band, line + band, color=color, alpha=0.15, linewidth=0)
    axis.axhline(0, color=_GREY, linewidth=0.8, zorder=0)
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    axis.set(title="largest parameters", ylabel="mean ± sd, unconstrained")


def _spending(axis: Any, result: FitResult) -> None:
    """Epsilon after each round; clients with equal costs share a line."""
    at, curves = _curves(result)
    # Clients with budgets and visits of their own: shares of a budget compare, epsilons do not.
    if len(curves) > _KINDS:
        for budget, _, curve in curves:
            axis.plot(at, curve / budget.epsilon, color=_BLUE, linewidth=1, alpha=0.5)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set(title="spent so far, client by client", ylabel="share of the client's epsilon")
        _percent(axis.yaxis)
    else:
        for place, (_, numbers, curve) in enumerate(curves):
            color, marker = _LINES[place], _MARKERS[place]
            label = _range(numbers, result.client_names)
            axis.plot(at, curve, color=color, marker=marker, markersize=4, label=label)
        for epsilon in {budget.epsilon for budget, _, _ in curves if np.isfinite(budget.epsilon)}:
            axis.axhline(epsilon, color="black", linestyle="--", linewidth=1)
            _note(axis, f"budget {epsilon:g}", (0, epsilon), shift=(2, -3), va="top")
        if len(curves) > 1:
            axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        deltas = {budget.delta for budget, _, _ in curves}
        delta = f"delta = {deltas.pop():g}" if len(deltas) == 1 else "the client's delta"
        axis.set(title="spent so far", ylabel=f"epsilon at {delta}")
    axis.set_ylim(bottom=0)
    _count_rounds(axis)


def _curves(
    result: FitResult,
) -> tuple[np.ndarray, list[tuple[PrivacyBudget, list[int], np.ndarray]]]:
    """Rounds, and for each group of equal clients its budget, numbers and epsilons."""
    assert result.plan is not None
    plan, num_rounds = result.plan, result.state.round
    # Few rounds, with the first and the last among them.
    at = np.unique(np.linspace(0, num_rounds, min(num_rounds + 1, _CURVE_POINTS)).round())
    at = at.astype(int)
    # A run that was continued has a plan for each part, with another noise.
    charged = [entries(plan.at(r), r, result.run.groups[r]) for r in range(num_rounds)]
    by_then = [Ledger(entries=tuple(itertools.chain(*charged[:rounds]))) for rounds in at]
    kinds: dict[tuple[PrivacyBudget, tuple[Composition, ...]], list[int]] = {}
    for number, client in enumerate(plan.clients):
        own = [ledger.composition(number) for ledger in by_then]
        # Charges of other runs on the same ledger count from the start.
        others = Counter(dict(result.ledger.composition(number))) - Counter(dict(own[-1]))
        spent = tuple(accounting.compose([*others.items(), *released]) for released in own)
        # Clients that agree in these have one curve, computed once: an epsilon may take seconds.
        kinds.setdefault((client.budget, spent), []).append(number)
    return at, [
        (
            budget,
            numbers,
            np.array([accounting.epsilon(c, budget.delta, budget.relation) for c in spent]),
        )
        for (budget, spent), numbers in kinds.items()
    ]


def _range(numbers: Sequence[int], names: Sequence[str]) -> str:
    """A short label for clients."""
    if names:
        more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
        return ", ".join(names[m] for m in numbers[:_NAMED]) + more
    if len(numbers) == 1:
        return f"client {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"clients {numbers[0]}–{numbers[-1]}"
    return f"{len(numbers)} clients ({numbers[0]}, {numbers[1]}, ...)"


def _noise(axis: Any, noise: Mapping[str, np.ndarray]) -> None:
    """The distribution of noise over parameters, with a line above which they are mostly noise."""
    values = np.concatenate([x.ravel() for x in noise.values()])
    names = labels(noise)
    order = np.argsort(values)
    share = (np.arange(len(values)) + 1) / len(values)
    noisy = values[order] > 1
    for mask, color, label in (
        (~noisy, _BLUE, f"{np.sum(~noisy)} parameters"),
        (noisy, _RED, f"{np.sum(noisy)} mostly noise"),
    ):
        if mask.any():
            axis.plot(values[order][mask], share[mask], "o", color=color, markersize=4, label=label)
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    # The noisiest parameter is named; a median far below it wants a logarithmic axis.
    largest, right = order[-1], max(1.1, 1.25 * values.max())
    _note(axis, names[largest], (values[largest], 1.0), shift=(6, 0), va="center")
    axis.set(
        title="noise in the posterior means",
        xlabel="noise sd / posterior sd",
        ylabel="share of the parameters",
        ylim=(0, 1.05),
    )
    if values.max() > 20 * max(np.median(values), 1e-12):
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0, right=right)
    axis.legend(frameon=False, fontsize="small", loc="best")


def _bars(contributors: Sequence[str], share: np.ndarray, records: np.ndarray, ax: Any) -> Any:
    """One bar per contributor, with the spread over parameters and the share of the records."""
    height = max(_PANEL[1] - 0.8, 0.28 * len(contributors) + 1.3)
    figure, [axis] = _panels(1, ax, height)
    places = np.arange(len(contributors))
    axis.barh(places, share.mean(axis=1), color=_BLUE, height=0.6, label="of the precision (mean)")
    # Over parameters: a client may have most of one latent's precision and little of another's.
    low, high = np.quantile(share, (0.1, 0.9), axis=1)
    axis.hlines(places, low, high, color=_GREY, linewidth=1, label="middle 80 % of parameters")
    axis.plot(
        # The prior, in place 0, has no records.
        records, places[1:], "D", markerfacecolor="white", markeredgecolor=_RED, markersize=6,
        markeredgewidth=1.5, label="of the records",
    )  # fmt: skip
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(yticks=places, yticklabels=contributors, xlabel="share", title="whose data is in it")
    axis.invert_yaxis()
    _percent(axis.xaxis)
    below = axis if ax is not None else figure
    place = "best" if ax is not None else "outside lower center"
    below.legend(frameon=False, fontsize="small", loc=place)
    return figure


def _cloud(share: np.ndarray, records: np.ndarray, ax: Any) -> Any:
    """One point per client: its share of the precision over its share of the records."""
    figure, [axis] = _panels(1, ax)
    mean = share.mean(axis=1)
    line = {"color": "black", "linestyle": "--", "linewidth": 1, "label": "in proportion"}
    dots = {"color": _BLUE, "markersize": 4, "alpha": 0.6, "label": "a client"}
    if records.max() < 1.1 * records.min():  # clients of equal size: one beside the other
        axis.plot(np.arange(len(records)), np.sort(mean[1:]), "o", **dots)
        axis.axhline((1 - mean[0]) / len(records), **line)
        axis.set(xlabel="clients, by their share", xticks=[])
    else:
        axis.plot(records, mean[1:], "o", **dots)
        # What the prior leaves, shared out by records.
        axis.axline((0, 0), slope=1 - mean[0], **line)
        axis.set(xlabel="share of the records", xlim=(0, 1.1 * records.max()))
        _percent(axis.xaxis)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set(
        title=f"whose data is in it (prior: {mean[0]:.0%})",
        ylabel="share of the posterior precision",
    )
    _percent(axis.yaxis)
    axis.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


def _percent(side: Any) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    side.set_major_locator(MaxNLocator(5))
    side.set_major_formatter(PercentFormatter(1.0, decimals=None))
