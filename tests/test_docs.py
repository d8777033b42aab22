"""The examples of the documentation run, in the order in which they are read."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import families
from numpyro_dppvi.families import factors
from tests.dry import dry_rounds

DOCS = Path(__file__).parents[1] / "docs"


def run(page, folder):
    """All names that a page's examples define, run in a folder of their own."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(code, page, "exec"), found)
        found["files"] = sorted(path.name for path in Path.cwd().iterdir())
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    return run("posterior.md", tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def families_put_back():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "BY_DISTRIBUTION", families.BY_DISTRIBUTION)
        yield


@pytest.fixture(scope="module")
def extended(families_put_back, tmp_path_factory):
    """What the page defines, and what its runs cost."""
    with dry_rounds():
        return run("extending.md", tmp_path_factory.mktemp("docs"))


@pytest.mark.slow
def test_the_page_on_models_runs(tmp_path):
    shown = run("models.md", tmp_path)
    assert shown["mixed"].posterior.names == ("shares", "centres")
    assert shown["filled"].posterior.names == ("mean", "centre", "spread", "base", "effect")


@pytest.mark.slow
def test_the_page_on_posteriors_runs(names):
    np.testing.assert_array_equal(names["again"].mean["w"], names["posterior"].mean["w"])
    assert names["idata"].posterior["w"].dims == ("chain", "draw", "feature")
    assert names["second"].status.rounds == 10
    assert np.all(names["second"].posterior.stddev["w"] < names["posterior"].stddev["w"])
    assert names["files"] == [".run.npz.lock", "run.npz", "study.npz"]
    assert "precision" in str(names["diagnostics"])


@pytest.mark.slow
@pytest.mark.usefixtures("families_put_back")
def test_a_family_of_ones_own_gives_the_closed_form(tmp_path):
    found = run("extending.md", tmp_path)
    posterior, y = found["alone"].posterior, found["y"]
    np.testing.assert_allclose(posterior.mean["mean"], y.sum(axis=0) / 61, atol=0.02)
    np.testing.assert_allclose(posterior.stddev["mean"], 61**-0.5, rtol=0.08)  # ten draws
    assert posterior.natural["mean"].quadratic.shape == ()  # one width


@pytest.mark.slow
def test_a_family_of_ones_own_is_one(extended):
    """What every family is held to, for the one of the page."""
    family = extended["SphericalNormal"]((2, 3))
    coordinates = extended["NormalCoordinates"](jnp.arange(6.0).reshape(2, 3), jnp.array(0.3))
    natural = family.natural(coordinates)
    for found, expected in (
        (family.coordinates(natural), coordinates),
        (jax.grad(family.log_partition)(natural), family.statistics(coordinates)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    expected = family.distribution(coordinates).base_dist.entropy().sum()
    np.testing.assert_allclose(family.entropy(coordinates), expected, rtol=1e-6)


def test_a_family_of_ones_own_is_short():
    code = (DOCS / "extending.md").read_text(encoding="utf-8").split("```python\n")[2]
    assert len(code.split("```")[0].splitlines()) < 80


def test_a_sampler_of_ones_own_is_accounted_and_stated(extended):
    assert np.all(extended["private"].ledger.spent() <= 1.0)
    assert "the first 20 of 20 records" in str(extended["private"].privacy_statement())


def test_a_schedule_of_ones_own_is_accounted(extended):
    np.testing.assert_allclose(extended["halves"].ledger.spent(), 1.0, rtol=0.01)


def test_a_method_of_ones_own_is_planned_charged_and_stated(extended):
    result, method = extended["steps"], extended["OneStep"]
    np.testing.assert_allclose(result.ledger.spent(), 8.0, rtol=0.01)
    assert "OneStep" in str(result.privacy_statement())
    assert result.method == method(clip_norm=30.0)
    # What is clipped is what is accounted: without noise a visit goes as far as the clip.
    moved = dppvi.fit(
        extended["means"],
        None,
        [{"y": np.full((20, 5), 1e3)}],
        rng_key=extended["key"],
        method=method(clip_norm=0.5),
        budget=dppvi.PrivacyBudget(math.inf),
        num_rounds=1,
        damping=1.0,
        progress_bar=False,
    )
    q, prior = moved.posterior, moved.state.prior
    rule = dppvi.NaturalGradient(1.0, ridge=0.0)
    change = rule.measured(q.family, prior, factors.divide(q.natural, prior))
    np.testing.assert_allclose(factors.inner(change, change), 0.5**2, rtol=1e-4)


def test_a_method_of_ones_own_is_held_to_its_plan(extended):
    method = extended["OneStep"](clip_norm=2.0)
    setting = {"client_sizes": [30, 30]}
    plan = dppvi.plan_privacy(
        extended["OneStep"](clip_norm=1.0), dppvi.PrivacyBudget(1.0), num_rounds=2, **setting
    )
    with pytest.raises(ValueError, match=r"clip_norm is 1\.0 for client 0 in the plan"):
        dppvi.pvi(
            extended["means"], None, {"y": extended["y"]}, method=method, plan=plan, **setting
        )


@pytest.mark.slow
def test_the_front_page_runs(tmp_path):
    first = run("start.md", tmp_path)["hospitals"]
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found = {"helsinki": first["Helsinki"], "turku": first["Turku"]}
    exec(compile(code, "index.md", "exec"), found)
    assert found["result"].client_names == ("Helsinki", "Turku")
    assert len([line for line in code.splitlines() if line.strip()]) <= 11


@pytest.mark.slow
def test_the_first_page_runs(tmp_path, monkeypatch, capsys):
    # It takes many seconds, and tests/test_diagnostics.py does it.
    monkeypatch.setattr(dppvi, "diagnose", lambda result: f"Diagnostics of {result.status.rounds}")
    found = run("start.md", tmp_path)
    assert found["draws"].shape == (1000, 3)
    # The truth, within four posterior standard deviations, which include the noise.
    shift = np.asarray(found["result"].posterior.mean["w"]) - [-1.0, 0.02, -0.1]
    assert np.all(np.abs(shift) < 4 * np.asarray(found["result"].posterior.stddev["w"]))
    assert found["risk"][0] < found["risk"][1]
    assert (tmp_path / "study.npz").exists()
    said = capsys.readouterr().out
    for sentence in ("Privacy plan", "Diagnostics", "Privacy statement", "@article{heikkila2023"):
        assert sentence in said
