"""The README's example runs, and says what it claims to say; its numbers are the measured ones."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import numpyro_dppvi as dppvi
from benchmarks import adult, readme

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
