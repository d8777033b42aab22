"""Public docstrings name every argument and say what is refused; their examples run."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import analysis, methods, privacy, protocol, records, run
from numpyro_dppvi.analysis import plots
from numpyro_dppvi.families import factors

# Modules whose docstrings hold an example: a module that loses all of its examples is noticed.
WITH_EXAMPLES = (
    "analysis.citations",
    "analysis.scoring",
    "analysis.selection",
    "families.factors",
    "posterior.posterior",
    "privacy.audit",
    "privacy.budget",
    "privacy.clipping",
    "privacy.inverse",
    "privacy.ledger",
    "privacy.selection",
    "privacy.statement",
    "protocol.algorithm",
    "protocol.planning",
    "protocol.recommendation",
    "protocol.schedules",
    "records.clients",
    "records.unequal",
    "run.fitting",
)

# Of fits see the example of the README, too (tests/test_readme.py).
SLOW = ("analysis.citations", "analysis.scoring", "analysis.selection", "run.fitting")


def public():
    """Public functions and classes by their dotted names, each once."""
    found = {}
    rooms = (analysis, methods, privacy, protocol, records, run)
    for module in (dppvi, *rooms, plots, factors):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            known = any(value is other for other in found.values())
            error = inspect.isclass(value) and issubclass(value, BaseException)
            here = name in getattr(module, "__all__", ()) or value.__module__ == module.__name__
            if (inspect.isfunction(value) or inspect.isclass(value)) and not (known or error):
                found |= {f"{module.__name__}.{name}": value} if here else {}
    return found


PUBLIC = public()


def unnamed(value):
    """Arguments that a docstring does not mention; one argument alone may go without a name."""
    text = inspect.getdoc(value) or ""
    names = [n for n in inspect.signature(value).parameters if n not in ("args", "kwargs")]
    if len(names) < 2 or value is run.Outcome:  # an enumeration
        return []
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


def silent(value):
    """Whether a function or a class raises without its docstring saying so."""
    bodies = [value] if inspect.isfunction(value) else [vars(value).get("__post_init__")]
    raises = any(body and "raise " in inspect.getsource(body) for body in bodies)
    return raises and not re.search(r"Raises:|[Rr]efuse", inspect.getdoc(value) or "")


def test_the_public_names_were_found():
    assert len(PUBLIC) > 70


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_names_arguments_and_errors(name):
    assert unnamed(PUBLIC[name]) == []
    assert not silent(PUBLIC[name])


def test_a_docstring_that_says_too_little_is_found():
    def f(one, other):
        """Says nothing of one."""
        raise ValueError

    def g(one, other):
        """Takes one and other.

        Raises:
            ValueError: Always.
        """
        raise ValueError

    assert unnamed(f) == ["other"]
    assert silent(f)
    assert unnamed(g) == []
    assert not silent(g)


def examples(module):
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in WITH_EXAMPLES],
)
def test_its_examples_run(name):
    module = importlib.import_module(f"numpyro_dppvi.{name}")
    found = examples(module)
    assert found
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_no_example_is_forgotten():
    names = [
        module.name.removeprefix("numpyro_dppvi.")
        for module in pkgutil.walk_packages(dppvi.__path__, "numpyro_dppvi.")
        if not module.name.startswith("numpyro_dppvi.flower")
    ]
    with_examples = [n for n in names if examples(importlib.import_module(f"numpyro_dppvi.{n}"))]
    assert sorted(with_examples) == sorted(WITH_EXAMPLES)
