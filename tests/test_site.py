"""The site lacks no public name, names none that is gone, and no link within the pages is dead."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = "numpyro_dppvi"
# Packages that are covered member by member; the others, by one directive for all of a module.
ROOMS = ("analysis", "families", "methods", "posterior", "privacy", "protocol", "records", "run")
LISTED = (PACKAGE, *(f"{PACKAGE}.{room}" for room in ROOMS))
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


def directives(text):
    """Pairs of directive and dotted name, as in ``autofunction`` and ``numpyro_dppvi.fit``."""
    return re.findall(r"^\.\. auto(\w+):: ([\w.]+)$", text, flags=re.MULTILINE)


def named(dotted):
    """The object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ModuleNotFoundError):
        return importlib.import_module(dotted)


def documented(text):
    """Dotted names of all that the pages of the reference describe."""
    found = []
    for kind, dotted in directives(text):
        if kind == "module":
            module = importlib.import_module(dotted)
            own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == dotted]
            found += [f"{dotted}.{name}" for name in own if not name.startswith("_")]
        else:
            found.append(dotted)
    return found


def missing(text):
    """Complains of public names that no page describes, under this or another name."""
    known = documented(text)
    values = {id(named(dotted)) for dotted in known}
    complaints = []
    for package in LISTED:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and id(value) not in values:
                complaints.append(f"{package}.{name} is on no page in docs/api")
    return complaints


def dead_links(page, text):
    """Complains of relative links to files that do not exist."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    local = [target for target in targets if "://" not in target and "mailto:" not in target]
    return [f"{page}: {t}" for t in local if not (page.parent / t).exists()]


@pytest.fixture(scope="module")
def reference():
    return "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))


def test_every_public_name_is_in_the_reference(reference):
    assert missing(reference) == []


def test_the_reference_names_nothing_that_is_gone_or_twice(reference):
    names = documented(reference)
    assert len(names) == len(set(names))
    assert len(names) > 80
    for name in names:
        named(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page):
    assert dead_links(page, page.read_text(encoding="utf-8")) == []


def test_links_of_the_readme_lead_somewhere_from_anywhere():
    """A package index shows it without the repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    inside = re.findall(r"\]\(([^)]+)\)", text)
    labels = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, flags=re.MULTILINE))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == labels.keys()
    home = "https://github.com/numpyro-dppvi/numpyro_dppvi/blob/main/"
    pictures = "https://raw.githubusercontent.com/numpyro-dppvi/numpyro_dppvi/main/"
    for link in [*inside, *labels.values()]:
        assert link.startswith("https://")
        for base in (home, pictures):
            if link.startswith(base):
                assert (ROOT / link.removeprefix(base)).exists(), link
    assert all(link.startswith(home) for link in labels.values())
    assert any(link.startswith(pictures) for link in inside)


@pytest.mark.parametrize("page", ["methods.md", "faq.md"])
def test_numbers_that_guide_a_choice_are_measured_ones(page):
    pages = ("benchmarks.md", "reproduction.md")
    measured = "".join((DOCS / name).read_text(encoding="utf-8") for name in pages)
    shown = re.findall(r"-\.\d{4}", (DOCS / page).read_text(encoding="utf-8"))
    assert [number for number in shown if number not in measured] == []
    assert page != "methods.md" or len(shown) > 20


def test_a_missing_name_and_a_dead_link_are_found(reference):
    without = reference.replace(".. autofunction:: numpyro_dppvi.fit\n", "")
    places = ("numpyro_dppvi.fit", "numpyro_dppvi.run.fit")
    assert missing(without) == [f"{place} is on no page in docs/api" for place in places]
    assert len(dead_links(DOCS / "index.md", "[a](nowhere.md#x) [b](https://x.y) [c](#z)")) == 1
