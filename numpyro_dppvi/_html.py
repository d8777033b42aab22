"""Text and tables as HTML for notebooks.

No style but alignment and distance, so that the notebook's own fonts and colours hold, in dark mode
too. A table that is wider than the page is scrolled by itself.
Every function escapes the texts that it is given; a result is HTML and is not escaped again.
"""

from collections.abc import Iterable, Sequence
from html import escape

_APART = "padding:0.2em 0.4em;white-space:nowrap"


class Text(str):
    """A text of several lines that prompts and notebooks show as it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def heading(text: str) -> str:
    """A short line that stands out."""
    return f"<p><strong>{escape(text)}</strong></p>"


def paragraph(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def bullets(texts: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with what each row is about on its left, and numbers on its right."""
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    table = f"<table>{head}<tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}</div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of names and sentences."""
    rows = (
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(fact)}</td></tr>'
        for name, fact in pairs
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def folded(summary: str, *parts: str) -> str:
    """HTML that shows after a click on its summary."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def _cells(tag: str, texts: Sequence[str]) -> str:
    sides = ("left", *["right"] * (len(texts) - 1))
    return "".join(
        f'<{tag} style="text-align:{side};{_APART}">{escape(text)}</{tag}>'
        for side, text in zip(sides, texts, strict=True)
    )
