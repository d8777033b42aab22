"""The list of sabotages stays fit to be run; `make mutants` runs it (minutes)."""

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, planted, read_package
from tests.mutants.catalogue import MUTANTS, Mutant

SOURCES = read_package()


def is_quick(node):
    """Whether a function or a class is in the default suite, which runs no slow test."""
    return "pytest.mark.slow" not in [ast.unparse(one) for one in node.decorator_list]


def names_in(path):
    """Quick functions and classes of a test file, and the methods of its classes, for pytest."""
    for node in ast.parse(Path(path).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_quick(node):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}::{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef) and is_quick(inner)
            )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted_and_its_tests_exist(mutant):
    assert mutant.after != mutant.before
    _, source = planted(mutant, SOURCES)
    ast.parse(source)
    assert bool(mutant.tests) != bool(mutant.equivalent)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in set(names_in(ROOT / file))


def test_every_mutant_is_another():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert len({(mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("text", ["no such line", "import jax\n"])
def test_a_text_that_does_not_stand_once_is_refused(text):
    with pytest.raises(ValueError, match="must replace what stands once in numpyro_dppvi/"):
        planted(Mutant("made up", text, ""), SOURCES)
