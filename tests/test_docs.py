"""The examples of the documentation run, in the order in which they are read."""

import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """All names that the page's examples define."""
    text = (DOCS / "posterior.md").read_text(encoding="utf-8")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("docs"))
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(code, "posterior.md", "exec"), found)
        found["files"] = sorted(path.name for path in Path.cwd().iterdir())
    return found


def test_the_page_on_posteriors_runs(names):
    np.testing.assert_array_equal(names["again"].mean["w"], names["posterior"].mean["w"])
    assert names["idata"].posterior["w"].dims == ("chain", "draw", "feature")
    assert names["second"].status.rounds == 10
    assert np.all(names["second"].posterior.stddev["w"] < names["posterior"].stddev["w"])
    assert names["files"] == [".run.npz.lock", "run.npz", "study.npz"]
    assert "precision" in str(names["diagnostics"])
