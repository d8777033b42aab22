"""The tutorials run from scratch with small settings, and pages and notebooks are the sources'."""

import ast
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tutorials import TUTORIALS, rendering, silos

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorials"
HEADINGS = (
    *("Data", "Model", "Inference", "Diagnostics", "Prediction", "What to report", "References"),
)
# What a plain installation of the package brings, with its extra for plots and Jupyter.
INSTALLED = {"arviz", "jax", "matplotlib", "numpy", "numpyro", "numpyro_dppvi", "optax", "IPython"}


def source(name):
    return ROOT / "tutorials" / f"{name}.py"


def page(name):
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def is_hidden(cell):
    return "remove-input" in cell.metadata.get("tags", ())


# They have a job of their own in continuous integration.
@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_it_runs_as_a_notebook(name, tmp_path):
    text = rendering.run(source(name), tmp_path, quick=True)
    shown = re.findall(r"!\[.+\]\(images/(.+)\)", text)
    assert shown
    assert shown == re.findall(r"!\[.+\]\(images/(.+)\)", page(name))
    assert sorted(shown) == sorted(picture.name for picture in (tmp_path / "images").iterdir())
    for picture in (tmp_path / "images").iterdir():
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert 1_000 < picture.stat().st_size < 150_000


@pytest.mark.parametrize("name", TUTORIALS)
def test_its_notebook_is_of_this_source(name):
    """Where this fails, run ``make tutorials TUTORIALS=NAME``."""
    kept = nbformat.read(PAGES / f"{name}.ipynb", as_version=4)
    nbformat.validate(kept)
    assert kept == rendering.notebook(source(name))


@pytest.mark.parametrize("name", TUTORIALS)
def test_its_notebook_needs_the_package_and_no_clone(name):
    kept = nbformat.read(PAGES / f"{name}.ipynb", as_version=4)
    code = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "code")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
        else:
            continue
        roots = {each.split(".")[0] for each in imported}
        assert roots <= INSTALLED | sys.stdlib_module_names
    text = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown")
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]+)\)", text))


@pytest.mark.parametrize("name", TUTORIALS)
def test_its_page_is_of_this_source(name):
    """Where this fails, run ``make tutorials TUTORIALS=NAME``."""
    text = page(name)
    assert f"[{name}.ipynb]({name}.ipynb)" in text
    first, *others = rendering.cells(source(name))
    assert text.startswith(first.source.splitlines()[0])
    for cell in others:
        if cell.cell_type == "markdown":
            assert cell.source in text
        else:
            assert (f"```python\n{cell.source}\n```" in text) != is_hidden(cell)


@pytest.mark.parametrize("name", TUTORIALS)
def test_its_pictures_are_there_and_small(name):
    pictures = sorted((PAGES / "images").glob(f"{name}-*.png"))
    assert pictures
    for picture in pictures:
        assert f"](images/{picture.name})" in page(name)
        assert picture.stat().st_size < 100_000
        width = int.from_bytes(picture.read_bytes()[16:20], "big")
        assert width <= 560, "a telephone shows no more without shrinking letters"
    told = re.findall(r"!\[(.+)\]\(images/", page(name))
    assert len(set(told)) == len(pictures), "who does not see pictures cannot tell them apart"


@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "gallery"])
def test_its_parts_stand_in_numpyros_order(name):
    texts = [c.source for c in rendering.cells(source(name)) if c.cell_type == "markdown"]
    text = "\n".join(texts)
    assert "**Goals.**" in text
    places = [text.index(f"## {heading}") for heading in HEADINGS]
    assert places == sorted(places)


def test_hello_world_takes_thirty_lines():
    """Without the picture."""
    cells = [c for c in rendering.cells(source("hello")) if c.cell_type == "code"]
    shown = [c.source for c in cells if not is_hidden(c) and "alt" not in c.metadata]
    assert sum(len([x for x in code.splitlines() if x.strip()]) for code in shown) <= 30


def test_a_study_of_the_gallery_takes_twenty_lines():
    """Text and code of each; ten kinds."""
    studies = []
    for cell in rendering.cells(source("gallery")):
        if cell.source.startswith("## "):
            studies.append(0)
        elif studies and cell.cell_type == "code":
            studies[-1] += sum(1 for line in cell.source.splitlines() if line.strip())
    assert len(studies) == 10
    assert max(studies) <= 20


@pytest.mark.parametrize("name", TUTORIALS)
def test_it_is_a_script_too(name):
    text = source(name).read_text(encoding="utf-8")
    ast.parse(text)
    assert text.startswith("# %% [markdown]\n# # ")


EXAMPLE = """# %% [markdown]
# # Title
#
# Some *text* with a [link](../faq.md), [another](hello.md) and [one more](https://x.y/z.md).

# %% quick="x = 3"
import sys
import matplotlib.pyplot as plt
x = 2
print("said")
print("not shown", file=sys.stderr)

# %%
x + 1

# %% tags=["remove-input"]
from IPython.display import Markdown
Markdown(f"x is {x}.")

# %% alt="a line"
figure, axis = plt.subplots()

# %% alt=["a plane", "a point"]
for _ in range(2):
    figure, axis = plt.subplots()
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "example.py"
    path.write_text(EXAMPLE)
    return path


@pytest.mark.slow
def test_a_page_shows_text_code_and_what_came_out(example):
    text = rendering.run(example, example.parent)
    title, origin, rest = text.split("\n\n", maxsplit=2)
    assert title == "# Title"
    assert "[example.ipynb](example.ipynb)" in origin
    assert rest == (
        "Some *text* with a [link](../faq.md), [another](hello.md) and [one more](https://x.y/z.md)."
        '\n\n```python\nimport sys\nimport matplotlib.pyplot as plt\nx = 2\nprint("said")\n'
        'print("not shown", file=sys.stderr)\n```\n\n```output\nsaid\n```\n\n'
        "```python\nx + 1\n```\n\n```output\n3\n```\n\nx is 2.\n\n"
        "```python\nfigure, axis = plt.subplots()\n```\n\n![a line](images/example-1.png)\n\n"
        "```python\nfor _ in range(2):\n    figure, axis = plt.subplots()\n```\n\n"
        "![a plane](images/example-2.png)\n![a point](images/example-3.png)\n"
    )
    assert (example.parent / "images" / "example-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_quick_run_sets_what_its_source_says(example, tmp_path):
    assert "x is 3." in rendering.run(example, tmp_path, quick=True)


def test_a_notebooks_links_lead_somewhere_and_its_text_is_folded(example):
    text, *code = rendering.notebook(example).cells
    home = "https://github.com/numpyro-dppvi/numpyro_dppvi/blob/main/docs"
    assert f"[link]({home}/faq.md), [another]({home}/tutorials/hello.md)" in text.source
    assert "[one more](https://x.y/z.md)" in text.source
    folded = [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in code]
    assert folded == [False, False, True, False, False]


@pytest.mark.slow
def test_a_cell_that_fails_fails_the_page(tmp_path):
    path = tmp_path / "example.py"
    path.write_text("# %% [markdown]\n# # Title\n\n# %%\nassert 1 == 2\n")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        rendering.run(path, tmp_path)


@pytest.mark.slow
def test_three_hospitals_keep_their_records(capfd):
    """``make hospitals``, with fewer rounds."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        score = silos.main(Path(folder) / "study", num_rounds=3)
    assert -0.75 < score < -0.4  # a coin scores -0.69
    said = capfd.readouterr().out
    assert "In 3 steps of 3 rounds the study releases" in said
    for name in silos.NAMES:
        assert f"{name} listens on" in said
        assert f"\n{name}\nPrivacy statement" in said
