"""The README's example runs, and says what it claims to say."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def example():
    text = README.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
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
