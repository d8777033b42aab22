"""The README's example runs, and says what it claims to say; its numbers are the measured ones."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import numpyro_dppvi as dppvi
from benchmarks import adult, picture, readme
from tutorials import demo

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def code():
    text = README.read_text(encoding="utf-8")
    return re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def example(code):
    names = {}
    exec(compile(code, str(README), "exec"), names)
    return names


def test_the_example_learns_the_weights(example):
    found = example["result"].posterior.mean["w"]
    # The truth, within four posterior standard deviations and the noise of epsilon = 1.
    np.testing.assert_allclose(found, [1.0, -2.0, 0.5], atol=0.8)
    assert found[0] > 0 > found[1]


def test_the_example_predicts_and_exports(example):
    assert example["predictions"].shape == (1000, 3)
    assert example["idata"].posterior["w"].shape == (1, 1000, 3)


def test_the_example_states_what_it_cost(example):
    statement = str(example["result"].privacy_statement())
    spent = example["result"].ledger.spent()
    assert (spent <= 1.0).all()
    assert f"{spent.max():.4f}" in statement


def test_the_example_is_short(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 25


def test_the_table_is_what_the_script_writes():
    text = README.read_text(encoding="utf-8")
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    assert readme.written(text, results) == text, "out of date: python -m benchmarks.readme"


def test_the_page_of_measurements_shows_the_same_numbers():
    page = (README.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    for row, entry in (
        (r"\*\*`DPOptimization\(\)`, 10 rounds\*\*", results["private"]),
        (r"pooled, NumPyro's SVI with `AutoNormal`", results["without privacy"]),
    ):
        found = re.search(rf"^\| {row} \|(.*)$", page, flags=re.MULTILINE).group(1)
        numbers = re.findall(r"-?\.\d{4}", found)
        assert numbers == [readme.short(x) for pair in entry.values() for x in pair]


def test_other_numbers_would_be_found():
    text = README.read_text(encoding="utf-8")
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    results["private"]["accuracy"][0] += 0.0001
    assert readme.written(text, results) != text


def test_the_picture_is_of_todays_settings_and_code():
    drawn_from, _ = picture.read()
    now = json.loads(json.dumps(picture.origin()))
    assert drawn_from == now, "out of date: python -m benchmarks.picture"


def test_the_picture_shows_what_the_table_says():
    """One run's last scores: within six of its standard deviations of the mean over seeds."""
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    _, shown = picture.read()
    assert len(shown) == demo.NUM_ROUNDS
    for value, (mean, error) in zip(shown[-1], results["private"].values(), strict=True):
        assert abs(value - mean) < 6 * max(error * np.sqrt(results["seeds"]), 0.001)


def test_other_settings_or_other_code_would_be_found(monkeypatch):
    before = picture.origin()
    monkeypatch.setattr(demo, "NUM_ROUNDS", 11)
    assert picture.origin()["plan"] != before["plan"]
    monkeypatch.setattr(picture, "DRAWN_BY", (demo.main, demo.print_table))
    changed = picture.origin()["functions"]
    assert changed["tutorials.demo.main"] == before["functions"]["tutorials.demo.main"]
    assert changed != before["functions"]


def test_a_comment_changes_no_digest_and_code_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for name, text in (
        ("first_one", 'def f():\n    """Says."""\n    return 1\n'),
        ("second_one", 'def f():\n    """Says\n    more."""\n\n    # Why.\n    return 1\n'),
        ("third_one", 'def f():\n    """Says."""\n    return 2\n'),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        digests.append(picture._digest(importlib.import_module(name).f))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_a_fresh_run_is_where_the_table_says():
    """Six standard deviations of one run: fails by chance less than once in 10^8 runs."""
    results = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    where = adult.setting(adult.reported(), 10)
    found = adult.fit(where, 17, budget=dppvi.PrivacyBudget(1.0, 1e-5))[1]
    for name, (mean, error) in results["private"].items():
        # The spread is known from few seeds only, so no less than a thousandth is taken for it.
        spread = max(error * np.sqrt(results["seeds"]), 0.001)
        assert abs(getattr(found, name) - mean) < 6 * spread, name
