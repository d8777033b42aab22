"""Tables of differences: the paper's final values, ours, and how many standard errors apart."""

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
