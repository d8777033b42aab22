"""Trees of one shape that mean different things: mypy tells them apart."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAD = """
from numpyro_dppvi._typing import Coordinates, Gradient, Natural
from numpyro_dppvi.families import MeanField, factors

def f(family: MeanField, q: Natural, at: Coordinates, slope: Gradient) -> None:
"""
RIGHT = (
    "cavity: Natural = factors.divide(q, q)",
    "there: Coordinates = family.coordinates(factors.power(q, 0.5))",
    "tempered: Gradient = factors.power(slope, 2.0)",
)
WRONG = (
    "family.coordinates(slope)",
    "family.coordinates(at)",
    "family.natural(q)",
    "factors.divide(q, slope)",
    "factors.multiply(q, at)",
    "change: Natural = factors.power(slope, 0.5)",
    "family.in_domain(slope)",
)


@pytest.mark.slow  # mypy reads the whole package, which takes it half a minute the first time
def test_a_gradient_where_natural_parameters_belong_is_an_error(tmp_path):
    source = tmp_path / "snippet.py"
    source.write_text(HEAD + "".join(f"    {line}\n" for line in (*RIGHT, *WRONG)))
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(source)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = {int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error:" in line}
    first = len(HEAD.splitlines()) + 1 + len(RIGHT)
    assert lines == set(range(first, first + len(WRONG))), found.stdout + found.stderr
