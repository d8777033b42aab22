"""The first page of the documentation runs."""

import re
from pathlib import Path

import numpyro_dppvi as dppvi

PAGE = Path(__file__).parents[1] / "docs" / "start.md"


def test_the_first_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # It takes many seconds, and tests/test_diagnostics.py does it.
    monkeypatch.setattr(dppvi, "diagnose", lambda result: f"Diagnostics of {result.status.rounds}")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["draws"].shape == (1000, 3)
    assert names["predictions"].shape == (1000, 3)
    assert (tmp_path / "study.npz").exists()
    said = capsys.readouterr().out
    for sentence in ("Privacy plan", "Diagnostics", "Privacy statement", "@article{heikkila2023"):
        assert sentence in said
