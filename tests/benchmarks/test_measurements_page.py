"""The page of measurements has the lines that the benchmarks write."""

import pytest

from benchmarks import cost, growth
from benchmarks.paper import table


def written(mark):
    text = cost.PAGE.read_text()
    return text.split(f"<!-- {mark}: begins -->\n")[1].split(f"\n<!-- {mark}: ends -->")[0]


def first_cells(text):
    return [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if "|" in line]


def test_every_line_is_there_once():
    work, rule, *names = first_cells(written("cost"))
    assert (work, rule) == ("work", "---")
    assert names == list(cost.WORKS)
    assert written("cost").startswith("Measured on ")
    _, _, *sizes = first_cells(written("growth"))
    assert sizes == [
        f"{size:,}".replace(",", " ") + f" {name}"
        for name, (each, _) in growth.SERIES.items()
        for size in each
    ]


@pytest.mark.parametrize("mark", ["cost", "growth"])
def test_what_is_printed_is_what_is_written(mark, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(cost.PAGE.read_text())
    monkeypatch.setattr(cost, "PAGE", page)
    cost.into_page(mark, iter(["| a | b |", "| 1 | 2 |"]))
    assert "| a | b |\n| 1 | 2 |\n" in capsys.readouterr().out
    assert f"| a | b |\n| 1 | 2 |\n<!-- {mark}: ends -->" in page.read_text()
    other = {"cost": "growth", "growth": "cost"}[mark]
    assert written(other) in table.between_marks(page.read_text(), mark, "")
