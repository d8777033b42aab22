"""What the runs show: scores of every set, and how often each rule is kept."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.battery import runs, sets
from benchmarks.battery.runs import Line

# What the gap is closed from and to, where, and by how much; how much raw units may cost.
GAP_EPSILON, GAP_TODAY, GAP_CLOSED = 3.0, 0.5, 0.6
RAW_COST = 0.01


class Score(NamedTuple):
    """Scores of some seeds.

    Attributes:
        mean: Their mean; NaN if one is no number.
        error: Its standard error; 0 with one seed, or where one score is infinite.
        worst: The smallest.
        seeds: How many.
        refused: Whether the method refused the model.
    """

    mean: float
    error: float
    worst: float
    seeds: int
    refused: bool


class Cell(NamedTuple):
    """What is compared."""

    name: str
    split: str
    epsilon: float


class Scores:
    """Scores by method, design and cell."""

    def __init__(self, lines: Sequence[Line]) -> None:
        by_cell: dict[tuple[str, str, Cell], list[Line]] = {}
        for line in lines:
            run = line.run
            cell = Cell(run.name, run.split, run.epsilon)
            by_cell.setdefault((run.method, run.design, cell), []).append(line)
        self._found = {key: _score(lines) for key, lines in by_cell.items()}
        self.methods = [m for m in runs.METHODS if any(key[0] == m for key in self._found)]
        order = _order(lines)
        cells = {cell for method, _, cell in self._found if method in runs.METHODS}
        self.cells = sorted(cells, key=lambda c: (order.index(c.name), c.split, c.epsilon))
        self.halves = list(dict.fromkeys(sets.named(cell.name).half for cell in self.cells))

    def of(self, method: str, cell: Cell, design: str = "standardised") -> Score | None:
        """A method's scores in a cell; ``None`` if it was not run."""
        splits = {"none": "any", "pooled": "any", "central": "any"}
        epsilon = cell.epsilon if method not in ("none", "alone", "pooled") else math.inf
        key = Cell(cell.name, splits.get(method, cell.split), epsilon)
        return self._found.get((method, design, key))


def _order(lines: Sequence[Line]) -> list[str]:
    """Names of sets: those of the battery in its order, then those that were picked in theirs."""
    found = {line.run.name for line in lines}
    others = found.difference(sets.BY_NAME)
    numbered = sorted(others, key=lambda name: int(name.partition(":")[0]))
    return [name for name in sets.BY_NAME if name in found] + numbered


def _score(lines: Sequence[Line]) -> Score:
    values = np.array([line.score for line in lines])
    error = 0.0
    if len(values) > 1 and np.all(np.isfinite(values)):
        error = float(values.std(ddof=1) / math.sqrt(len(values)))
    refused = any(line.status.startswith("UnsupportedModelError: ") for line in lines)
    return Score(float(values.mean()), error, float(values.min()), len(values), refused)


def closed(scores: Scores, method: str, cell: Cell) -> float | None:
    """The share of the gap from no information to pooled records that a method closes."""
    found, none, pooled = (scores.of(m, cell) for m in (method, "none", "pooled"))
    if found is None or none is None or pooled is None or not pooled.mean > none.mean:
        return None
    return (found.mean - none.mean) / (pooled.mean - none.mean)


# A rule says by how much a method keeps it in a cell (negative: breaks it); None: does not apply.
Rule = Callable[[Scores, str, Cell], float | None]


def _not_below_none(scores: Scores, method: str, cell: Cell, design: str) -> float | None:
    found, none = scores.of(method, cell, design), scores.of("none", cell)
    return None if found is None or none is None else found.mean + found.error - none.mean


def _does_not_fall(scores: Scores, method: str, cell: Cell, design: str) -> float | None:
    """Against the next smaller epsilon that was run; a standard error of the difference is free."""
    less = [
        other
        for other in scores.cells
        if other[:2] == cell[:2]
        and other.epsilon < cell.epsilon
        and scores.of(method, other, design) is not None
    ]
    found = scores.of(method, cell, design)
    if found is None or not less:
        return None
    before = scores.of(method, less[-1], design)
    return found.mean - before.mean + math.hypot(found.error, before.error)


def _closes_the_gap(scores: Scores, method: str, cell: Cell) -> float | None:
    today, share = closed(scores, "DPOptimization", cell), closed(scores, method, cell)
    if cell.epsilon != GAP_EPSILON or share is None or today is None or not today >= GAP_TODAY:
        return None
    return share - GAP_CLOSED


def _not_behind_today(scores: Scores, method: str, cell: Cell) -> float | None:
    found, today = scores.of(method, cell), scores.of("DPOptimization", cell)
    if found is None or today is None or math.isnan(today.mean) or method == "DPOptimization":
        return None
    return found.mean - today.mean + 2 * math.hypot(found.error, today.error)


def _raw_costs_little(scores: Scores, method: str, cell: Cell) -> float | None:
    plain, raw = scores.of(method, cell), scores.of(method, cell, "raw")
    return None if plain is None or raw is None else RAW_COST - (plain.mean - raw.mean)


RULES: dict[str, Rule] = {
    "not below no information": lambda s, m, c: _not_below_none(s, m, c, "standardised"),
    "the same in raw units": lambda s, m, c: _not_below_none(s, m, c, "raw"),
    "does not fall with epsilon": lambda s, m, c: _does_not_fall(s, m, c, "standardised"),
    "the same, raw units": lambda s, m, c: _does_not_fall(s, m, c, "raw"),
    "closes 60 % where DPOptimization closes 50 %": _closes_the_gap,
    "not behind DPOptimization": _not_behind_today,
    "raw units cost at most .01": _raw_costs_little,
}


def verdicts(scores: Scores, rule: Rule, method: str, half: str) -> dict[Cell, float | None]:
    """By how much a method keeps a rule in the cells of a half that it applies to.

    ``None`` where the method refused the model; NaN, which keeps nothing, where it has no score.
    """
    found: dict[Cell, float | None] = {}
    for cell in scores.cells:
        margin = rule(scores, method, cell)
        if sets.named(cell.name).half != half or margin is None:
            continue
        own = [scores.of(method, cell, design) for design in ("standardised", "raw")]
        without = [score for score in own if score is not None and math.isnan(score.mean)]
        refused = math.isnan(margin) and without and all(score.refused for score in without)
        found[cell] = None if refused else margin
    return found


def _shown(score: Score | None) -> str:
    if score is None:
        return ""
    if score.refused:
        return "refused"
    if score.seeds == 1 or not math.isfinite(score.mean):
        return _number(score.mean)
    return f"{_number(score.mean)} ({_number(score.error)}), {_number(score.worst)}"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.2g}"


def score_rows(scores: Scores) -> Iterator[str]:
    """Scores: mean (standard error), worst seed."""
    private = [(m, d) for m in scores.methods for d in ("standardised", "raw")]
    heads = ["set", "split", "epsilon", *runs.REFERENCES, *(f"{m}, {d}" for m, d in private)]
    heads += [f"{m} closes" for m in scores.methods]
    yield _row(heads)
    yield _row(["---"] * len(heads))
    for cell in scores.cells:
        shown = [_shown(scores.of(method, cell)) for method in runs.REFERENCES]
        shown += [_shown(scores.of(method, cell, design)) for method, design in private]
        shares = [closed(scores, method, cell) for method in scores.methods]
        shown += ["" if s is None or math.isnan(s) else f"{100 * s:.0f} %" for s in shares]
        yield _row([cell.name, cell.split, f"{cell.epsilon:g}", *shown])


def rule_rows(scores: Scores) -> Iterator[str]:
    """How many cells keep each rule, by method and half, of those it applies to."""
    columns = [(method, half) for half in scores.halves for method in scores.methods]
    yield _row(["rule", *(f"{method}, {half}" for method, half in columns)])
    yield _row(["---"] * (1 + len(columns)))
    for name, rule in RULES.items():
        counts = []
        for method, half in columns:
            found = verdicts(scores, rule, method, half)
            margins = [margin for margin in found.values() if margin is not None]
            refused = len(found) - len(margins)
            count = f"{sum(margin >= 0 for margin in margins)} of {len(margins)}"
            counts.append(count + (f", {refused} refused" if refused else ""))
        yield _row([name, *counts])


def broken(scores: Scores) -> Iterator[str]:
    """Where rules are broken, and by how much, worst first."""
    for method in scores.methods:
        for name, rule in RULES.items():
            for half in scores.halves:
                found = verdicts(scores, rule, method, half)
                bad = {c: m for c, m in found.items() if m is not None and not m >= 0}
                where = "; ".join(
                    f"{c.name}, {c.split}, {c.epsilon:g}: {bad[c]:.3g}"
                    for c in sorted(bad, key=lambda c: np.nan_to_num(bad[c], nan=-np.inf))
                )
                if bad:
                    yield f"{method}, {half}, {name}: {where}"


def second_rows(lines: Sequence[Line]) -> Iterator[str]:
    """Seconds of a run: the slowest, which compiles, and the median."""
    methods = [
        m for m in (*runs.REFERENCES, *runs.METHODS) if any(li.run.method == m for li in lines)
    ]
    yield _row(["set", *methods])
    yield _row(["---"] * (1 + len(methods)))
    for name in _order(lines):
        shown = []
        for method in methods:
            taken = [li.seconds for li in lines if li.run[:2] == (name, method)]
            shown.append(f"{max(taken):.1f}, {np.median(taken):.1f}" if taken else "")
        if any(shown):
            yield _row([name, *shown])


def set_rows() -> Iterator[str]:
    """The sets."""
    heads = ["set", "half", "model", "outcome", "mean or events", "source", "licence"]
    heads += ["rows", "columns"]
    yield _row(heads)
    yield _row(["---"] * len(heads))
    for source in sets.SOURCES:
        found = sets.load(source.name)
        mean = f"{found.y.mean():.3g}"
        if source.event is not None:
            mean = f"{100 * found.event.mean():.0f} % events"
        rows, columns = found.x.shape
        fields = [source.name, source.half, source.model, source.outcome, mean, source.origin]
        yield _row([*fields, source.licence, str(rows), str(columns)])


def _row(fields: Sequence[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def printed(lines: Sequence[Line]) -> None:
    """Prints all tables of runs."""
    scores = Scores(lines)
    for title, rows in (
        ("Mean held-out log predictive density (standard error), worst seed", score_rows(scores)),
        ("Cells that keep a rule", rule_rows(scores)),
        ("Where a rule is broken, and by how much", broken(scores)),
        ("Seconds of a run: the first, which compiles, and the median", second_rows(lines)),
    ):
        print(f"\n{title}\n")
        for row in rows:
            print(row)
