"""Runs a tutorial from scratch, and writes what it showed as a page with pictures.

Sources are Python files in jupytext's percent format: they open as notebooks, run as scripts, and
differ line by line. Of that format this reads what the tutorials use: ``# %% [markdown]``, ``# %%``
and ``# %% tags=["remove-input"]``, whose output alone is shown.
"""

import ast
import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DPI = 110


@dataclass(frozen=True)
class Cell:
    """A piece of a notebook: text, or code whose last line is shown."""

    source: str
    is_text: bool
    shows_source: bool = True


def cells(text: str) -> list[Cell]:
    """The cells of a source."""
    found = []
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        options, _, body = part.partition("\n")
        body = body.strip("\n")
        if "[markdown]" in options:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.splitlines()]
            found.append(Cell("\n".join(lines), is_text=True))
        else:
            found.append(Cell(body, is_text=False, shows_source="remove-input" not in options))
    return found


def run(source: Path, folder: Path) -> str:
    """Runs a tutorial and returns its page; pictures are written beside it.

    Args:
        source: The tutorial.
        folder: Where the page will be; pictures go to ``folder/images``.
    """
    text = source.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    pieces, pictures = [], 0
    for cell in cells(text):
        if cell.is_text:
            pieces.append(cell.source)
            continue
        if cell.shows_source:
            pieces.append(f"```python\n{cell.source}\n```")
        printed, value = _executed(cell.source, str(source), names)
        if printed:
            pieces.append(_block(printed))
        if hasattr(value, "savefig"):
            pictures += 1
            name = f"images/{source.stem}-{pictures}.png"
            (folder / "images").mkdir(parents=True, exist_ok=True)
            value.savefig(folder / name, dpi=_DPI)
            pieces.append(f"![{_caption(value)}]({name})")
        elif hasattr(value, "_repr_markdown_"):
            pieces.append(value._repr_markdown_())
        elif value is not None:
            pieces.append(_block(str(value)))
    return "\n\n".join(piece.strip("\n") for piece in [*pieces, _origin(source)]) + "\n"


def _executed(code: str, file: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell printed, and the value of its last line if that is an expression."""
    body = ast.parse(code).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    return printed.getvalue(), value


def _block(text: str) -> str:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return "```text\n" + "\n".join(lines) + "\n```"


def _caption(figure: Any) -> str:
    """What a picture shows, for those who do not see it."""
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    return "; ".join(titles) or "picture"


def _origin(source: Path) -> str:
    return (
        f"---\n\n*Written by `make tutorials` from `tutorials/{source.name}`. Noise comes from the "
        "operating system: when you run it, the numbers will differ a little, here and in the "
        "text.*"
    )
