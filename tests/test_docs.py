"""The examples of the documentation run, in the order in which they are read."""

import re
from pathlib import Path

import numpy as np
import pytest

import numpyro_dppvi as dppvi

DOCS = Path(__file__).parents[1] / "docs"


def run(page):
    """All names that a page's examples define."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page, "exec"), found)
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """All names that the page on posteriors defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        found = run("posterior.md")
        found["files"] = sorted(path.name for path in Path.cwd().iterdir())
    return found


def test_the_page_on_posteriors_runs(names):
    np.testing.assert_array_equal(names["again"].mean["w"], names["posterior"].mean["w"])
    assert names["idata"].posterior["w"].dims == ("chain", "draw", "feature")
    assert names["second"].status.rounds == 10
    assert np.all(names["second"].posterior.stddev["w"] < names["posterior"].stddev["w"])
    assert names["files"] == [".run.npz.lock", "run.npz", "study.npz"]
    assert "precision" in str(names["diagnostics"])


def test_the_first_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # It takes many seconds, and tests/test_diagnostics.py does it.
    monkeypatch.setattr(dppvi, "diagnose", lambda result: f"Diagnostics of {result.status.rounds}")
    found = run("start.md")
    assert found["draws"].shape == (1000, 3)
    assert found["predictions"].shape == (1000, 3)
    assert (tmp_path / "study.npz").exists()
    said = capsys.readouterr().out
    for sentence in ("Privacy plan", "Diagnostics", "Privacy statement", "@article{heikkila2023"):
        assert sentence in said
