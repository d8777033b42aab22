"""Every guard that the page of pitfalls names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")


def named_tests(page):
    """Pairs of file and name of every test that a page refers to."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)


def missing(page, root=ROOT):
    """Complains of tests that are named and do not exist."""
    complaints = []
    for file, name in named_tests(page):
        path = root / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.parse("")
        names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        if name not in names:
            complaints.append(f"{file}::{name} does not exist")
    return complaints


def mistakes(page):
    """Grade, mistake and guard of every row."""
    rows = re.findall(r"^\| ([ABC]) \| (.+?) \| (.+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| [A-Z] \|", page, flags=re.MULTILINE))
    return rows


def test_every_guard_exists():
    assert len(named_tests(PAGE)) > 30
    assert missing(PAGE) == []


def test_every_mistake_has_a_guard_or_is_said_to_have_none():
    assert len(mistakes(PAGE)) > 30
    for _, mistake, guard in mistakes(PAGE):
        assert "::" in guard or guard.startswith("Nothing"), mistake


def test_every_kind_of_model_has_a_test():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert len(named_tests(page)) > 25
    assert missing(page) == []


@pytest.mark.parametrize(
    "reference",
    ["`tests/privacy/test_nowhere.py::test_x`", "`tests/test_pitfalls.py::test_of_another_name`"],
)
def test_a_guard_that_is_gone_is_found(reference):
    assert len(missing(f"See {reference}.")) == 1
