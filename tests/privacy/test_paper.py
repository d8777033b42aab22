"""The paper's number is reproduced, and is not taken for a guarantee."""

import ast
from pathlib import Path

import dp_accounting as dpa
import pytest

from numpyro_dppvi import privacy
from numpyro_dppvi.privacy import FixedSizeSampling, epsilon_from_noise, paper_epsilon
from tests.grids import grid

# (q, steps, noise): get_epsilon_S of fourier-accountant 0.12.11 at delta 1e-5, to its four digits.
FOURIER = {
    (0.1, 1000, 2.0): 17.685,
    (0.1, 1000, 4.0): 7.489,
    (0.1, 1000, 8.0): 3.3389,
    (0.1, 1000, 16.0): 1.5344,
    (0.02, 2000, 1.0): 9.406,
    (0.02, 2000, 4.0): 1.760,
    (0.02, 2000, 8.0): 0.8196,
}


@grid("case", FOURIER, quick=[0, 1], ids=str)
def test_is_the_fourier_accountants(case):
    prob, steps, noise = case
    assert paper_epsilon(noise, prob, steps) == pytest.approx(FOURIER[case], abs=1e-3)


@pytest.mark.slow
def test_is_too_small_for_batches_without_replacement():
    number = paper_epsilon(4.0, 0.1, 1000)
    assert number == pytest.approx(7.489, abs=1e-3)
    # A real pair of data sets is told apart better: all other records equal the new one.
    pair = dpa.pld.privacy_loss_distribution.from_gaussian_mechanism(
        4.0 / 2, value_discretization_interval=1e-3, sampling_prob=0.1
    )
    reached = pair.self_compose(1000).get_epsilon_for_delta(1e-5)
    assert reached == pytest.approx(8.279, abs=2e-3)
    valid = epsilon_from_noise(4.0, 1000, sampler=FixedSizeSampling(100), num_records=1000)
    assert valid == pytest.approx(9.522, abs=1e-3)
    assert number < reached < valid


@pytest.mark.slow
def test_nothing_in_the_library_relies_on_it():
    folder = Path(privacy.__file__).parents[1]
    importers = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.alias) and "paper_epsilon" in ast.unparse(node)
    }
    assert importers == {"privacy/__init__.py"}
    assert "not a guarantee" in paper_epsilon.__doc__.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("noise_multiplier must be", (0.0, 0.1, 10)),
        ("sampling_prob must lie", (1.0, 1.0, 10)),
        ("num_releases must be", (1.0, 0.1, 0)),
    ],
)
def test_refuses_what_is_out_of_range(words, arguments):
    with pytest.raises(ValueError, match=words):
        paper_epsilon(*arguments)
