"""A model is read alike in every process, however Python orders its sets there."""

import contextlib
import io
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = """
import jax
from models.examples import EXAMPLES
from numpyro_dppvi.latents import from_model
for name, one in sorted(EXAMPLES.items()):
    if len(one.records) and not name.startswith("_"):
        rows = jax.eval_shape(lambda one=one: {k: v[:2] for k, v in one.records.items()})
        print(name, from_model(one.model, rows, one.model_kwargs).program)
"""


@pytest.mark.slow
def test_programs_do_not_depend_on_the_order_of_sets():
    """Sums in another order round otherwise, and the same seeds would give other numbers."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAMS],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as other,
        contextlib.redirect_stdout(io.StringIO()) as mine,
    ):
        exec(PROGRAMS, {})
        theirs, err = other.communicate()
    assert other.returncode == 0, err
    assert theirs.count("\n") > 10
    assert mine.getvalue() == theirs
