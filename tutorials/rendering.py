"""Makes a notebook of a tutorial, runs it, and writes what it showed as a page with pictures.

Sources are Python files in jupytext's percent format: they run as scripts, and differ line by line.
A cell's line may say more:

- ``tags=["remove-input"]``: the page shows the output alone, and the notebook folds the code.
- ``quick="size = 100"``: what a quick run sets once the cell has run.
- ``alt="..."``: what the cell's picture shows, for those who do not see it; of several pictures a
  list, with a text for each.
"""

import base64
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

Notebook = nbformat.NotebookNode
Cell = nbformat.NotebookNode

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
_HIDDEN = "remove-input"


def cells(source: Path) -> list[Cell]:
    """The cells of a source."""
    return jupytext.read(source, fmt="py:percent").cells


def notebook(source: Path) -> Notebook:
    """The notebook that readers open: without outputs, and with links that lead somewhere there."""
    found = []
    for number, cell in enumerate(cells(source)):
        if cell.cell_type == "markdown":
            made = nbformat.v4.new_markdown_cell(_with_absolute_links(cell.source))
        else:
            folded = {"tags": [_HIDDEN], "jupyter": {"source_hidden": True}}
            hidden = _HIDDEN in cell.metadata.get("tags", ())
            made = nbformat.v4.new_code_cell(cell.source, metadata=folded if hidden else {})
        made["id"] = f"cell-{number}"
        found.append(made)
    return nbformat.v4.new_notebook(cells=found, metadata={"kernelspec": _KERNEL})


def run(source: Path, folder: Path, quick: bool = False) -> str:
    """Runs a tutorial as a notebook and returns its page; pictures are written beside it.

    Args:
        source: The tutorial.
        folder: Where the page will be; pictures go to ``folder/images``.
        quick: Whether to run it with small settings, to see that it runs.
    """
    told = cells(source)
    executed = _executed(notebook(source), told, quick)
    pieces: list[str] = []
    pictures = 0
    for cell, ran in zip(told, executed.cells, strict=True):
        if cell.cell_type == "markdown":
            pieces.append(cell.source)
            continue
        if _HIDDEN not in cell.metadata.get("tags", ()):
            pieces.append(f"```python\n{cell.source}\n```")
        drawn = []
        alts = _alts(cell)
        for kind, content in _shown(ran.outputs):
            if kind != "image/png":
                pieces.append(content if kind == "text/markdown" else _block(content))
                continue
            pictures += 1
            drawn.append(f"![{alts[len(drawn)]}](images/{source.stem}-{pictures}.png)")
            (folder / "images").mkdir(parents=True, exist_ok=True)
            place = folder / "images" / f"{source.stem}-{pictures}.png"
            place.write_bytes(base64.b64decode(content))
        if drawn:  # in one paragraph: beside each other where there is room
            pieces.append("\n".join(drawn))
    first, *rest = pieces
    title, _, goals = first.partition("\n")
    pieces = [title, _origin(source), goals, *rest]
    return "\n\n".join(piece.strip("\n") for piece in pieces) + "\n"


def _executed(made: Notebook, told: list[Cell], quick: bool) -> Notebook:
    """The notebook with what its cells showed; raises what a cell raises."""
    if quick:
        for cell, ran in zip(told, made.cells, strict=True):
            if "quick" in cell.metadata:
                ran["source"] += f"\n{cell.metadata['quick']}"
    return NotebookClient(made, timeout=None, kernel_name=_KERNEL["name"]).execute()


def _shown(outputs: list[Any]) -> Iterator[tuple[str, str]]:
    """Kind and content of what a cell showed: pictures, Markdown or else plain text, in order.

    What went to standard error, the progress bar for one, is left out.
    """
    printed = ""
    for output in outputs:
        if output.output_type == "stream":
            printed += output.text if output.name == "stdout" else ""
            continue
        if printed:
            yield "text/plain", printed
            printed = ""
        data = output.data
        kind = next(k for k in ("image/png", "text/markdown", "text/plain") if k in data)
        if not (kind == "text/plain" and data[kind].startswith(("<Figure", "<Axes"))):
            yield kind, data[kind]
    if printed:
        yield "text/plain", printed


def _alts(cell: Cell) -> list[str]:
    """What each picture of a cell shows."""
    told: str | list[str] = cell.metadata.get("alt", [])
    return [told] if isinstance(told, str) else told


def _block(text: str) -> str:
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    # Sentences are wrapped on a narrow page. Columns are not: what is wide is scrolled there.
    kind = "text" if any("  " in line.strip() for line in lines) else "output"
    return f"```{kind}\n" + "\n".join(lines) + "\n```"


def _with_absolute_links(text: str) -> str:
    """Links to other pages, which lie beside no notebook, as links to the project's own."""
    urls = importlib.metadata.metadata("numpyro-dppvi").get_all("Project-URL") or []
    home = dict(url.split(", ") for url in urls)["Homepage"]
    docs = f"{home}/blob/main/docs"
    text = re.sub(r"\]\(\.\./", f"]({docs}/", text)
    return re.sub(r"\]\((?=[\w-]+\.md)", f"]({docs}/tutorials/", text)


def _origin(source: Path) -> str:
    name = source.stem
    return (
        f"*This page is the notebook [{name}.ipynb]({name}.ipynb), which opens in Jupyter wherever "
        "this library is [installed](../start.md). Noise comes from the operating system: when you "
        "run it, numbers differ a little, here and in the text.*"
    )
