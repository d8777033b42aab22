"""Tables of differences: the paper's final values, ours, and how many standard errors apart."""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.paper import results
from benchmarks.paper.results import Curve, Line
from benchmarks.paper.studies import STUDIES
from numpyro_dppvi import privacy

HEADER = (
    "| {split} | rounds | accuracy | the paper's | differs by | log-likelihood | the paper's "
    "| differs by |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def markdown(figure: str, lines: Iterable[Line]) -> str:
    """All panels of a figure. Differences are in standard errors of the difference."""
    lines, study = list(lines), STUDIES[figure]
    tables = []
    for split in study.splits:
        rows = [_row(lines, figure, settings.name, split) for settings in study.settings]
        tables.append("\n".join([HEADER.format(split=split), *filter(None, rows)]))
    return "\n\n".join(tables)


def _row(lines: list[Line], figure: str, method: str, split: str) -> str | None:
    ours = results.curve(lines, figure, method, split)
    theirs = results.published(figure, method, split)
    if ours is None:
        return None
    cells = list(_cells(ours, theirs))
    rounds = f"{ours.rounds[-1]}" + (f" ({theirs.rounds[-1]})" if theirs is not None else "")
    return f"| {method} | {rounds} | " + " | ".join(cells) + " |"


def _cells(ours: Curve, theirs: Curve | None) -> Iterator[str]:
    for index in range(2):
        mean, error = ours.mean[-1, index], ours.error[-1, index]
        yield f"{_short(mean)} ({_short(error)})"
        if theirs is None or np.isnan(theirs.mean[-1, index]):
            yield "outside its plot" if theirs is not None else ""
            yield ""
            continue
        paper, paper_error = theirs.mean[-1, index], theirs.error[-1, index]
        yield f"{_short(paper)} ({_short(paper_error)})"
        yield f"{(mean - paper) / np.hypot(error, paper_error):+.1f}"


def orders(figure: str, lines: Iterable[Line]) -> str:
    """The methods by their log-likelihood, best first, and how many pairs the paper has as we do.

    A pair counts as told apart where the difference is more than two of its standard errors.
    """
    lines, study = list(lines), STUDIES[figure]
    rows = ["| split | ours | the paper's | same order | other order |", "| --- " * 5 + "|"]
    for split in study.splits:
        names = [settings.name for settings in study.settings]
        ours = {name: results.curve(lines, figure, name, split) for name in names}
        theirs = {name: results.published(figure, name, split) for name in names}
        scores = [_scores(which) for which in (ours, theirs)]
        if not all(scores):
            continue
        ranked = [" > ".join(sorted(score, key=lambda n, s=score: -s[n][0])) for score in scores]
        signs = [
            tuple(_sign(score[a], score[b]) for score in scores)
            for a, b in itertools.combinations(names, 2)
            if all(name in score for name in (a, b) for score in scores)
        ]
        told = [pair for pair in signs if 0 not in pair]
        same = sum(one == other for one, other in told)
        rows.append(f"| {split} | {ranked[0]} | {ranked[1]} | {same} | {len(told) - same} |")
    return "\n".join(rows)


def _scores(curves: dict[str, Curve | None]) -> dict[str, tuple[float, float]]:
    """The last log-likelihood and its standard error, where there is one."""
    ends = {name: (c.mean[-1, 1], c.error[-1, 1]) for name, c in curves.items() if c is not None}
    return {name: end for name, end in ends.items() if not np.isnan(end[0])}


def _sign(one: tuple[float, float], other: tuple[float, float]) -> int:
    """Which is higher by more than two standard errors of the difference; 0 if neither is."""
    difference = one[0] - other[0]
    if abs(difference) <= 2 * np.hypot(one[1], other[1]):
        return 0
    return 1 if difference > 0 else -1


def _short(value: float) -> str:
    return f"{value:.4f}".replace("0.", ".", 1)


def between_marks(text: str, name: str, table: str) -> str:
    """A page with one of its tables replaced; the page marks where it stands."""
    begin, end = f"<!-- {name}: begins -->", f"<!-- {name}: ends -->"
    if begin not in text or end not in text:
        raise ValueError(f"the page has no place for {name!r}: write {begin} and {end} into it.")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"


SAMPLED = ((4.0, 0.1, 1000), (8.0, 0.1, 1000), (20.0, 0.1, 1000), (4.0, 0.02, 1000))
"""Noise over the clip, share of the records in a batch, and steps: sampled runs as the paper's."""


def accountings() -> str:
    """The paper's number and a valid one, for batches of fixed size."""
    rows = [
        "| noise / clip, share of the records, steps | the paper's accountant "
        "| valid for batches of fixed size |",
        "| --- | --- | --- |",
    ]
    for noise, share, steps in SAMPLED:
        num_records = 1000
        valid = privacy.epsilon_from_noise(
            noise,
            steps,
            sampler=privacy.FixedSizeSampling(round(share * num_records)),
            num_records=num_records,
        )
        paper = privacy.paper_epsilon(noise, share, steps)
        rows.append(f"| {noise:g}, {share:g}, {steps} | {paper:.3f} | {valid:.3f} |")
    return "\n".join(rows)
