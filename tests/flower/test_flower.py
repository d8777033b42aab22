"""A study over Flower is the study in one process. Slow: a message takes a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from tests.silo import hospitals

pytest.importorskip("flwr")
HERE = Path(__file__).parent
SCHEDULES = ("dppvi.sequential", "dppvi.synchronous", "dppvi.random_subset(2)")


def run(script, folder, *arguments):
    """A script in a process of its own: Flower and Ray are loud, and set signals."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(folder), *arguments],
        cwd=HERE.parents[1],
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parents[1]),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "FLWR_HOME": str(folder / "home"),
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def assert_as_in_one_process(folder):
    study = silo.load_study(folder / "study.py").study
    wanted = dppvi.fit(
        study.model,
        study.guide,
        hospitals.records(),
        rng_key=jax.random.key(study.seed),
        method=study.method,
        budget=study.budget,
        schedule=study.schedule,
        num_rounds=study.num_rounds,
        insecure_noise_seed=7,
        progress_bar=False,
    ).posterior
    found = dppvi.load(folder / "posterior.npz", study.model)
    for a, b in zip(*map(jax.tree.leaves, (found.natural, wanted.natural)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.max(np.abs(b)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_study_is_the_one_in_one_process(schedule, tmp_path):
    run("simulation.py", tmp_path, schedule)
    assert_as_in_one_process(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_study_over_processes_is_the_one_in_one_process(schedule, tmp_path):
    """A SuperLink and three SuperNodes on loopback. ``flwr run`` returns 0 on failure, too."""
    run("loopback.py", tmp_path, schedule, "live")
    found = json.loads((tmp_path / "found.json").read_text())
    (listed,) = json.loads(found["listed"])["runs"]
    assert listed["status"] == "finished:completed"
    if "random" in schedule:
        assert sum(found["steps"]) == 6
    else:
        assert found["steps"] == [3, 3, 3]
    assert_as_in_one_process(tmp_path)


@pytest.mark.slow
def test_all_of_flower_may_be_killed(tmp_path):
    """The second run goes on from the server's checkpoint, and no step is released twice."""
    run("loopback.py", tmp_path, "dppvi.sequential", "kill")
    found = json.loads((tmp_path / "found.json").read_text())
    assert 2 <= sum(found["killed_at"]) < 9
    assert found["steps"] == [3, 3, 3]
    assert_as_in_one_process(tmp_path)


@pytest.mark.slow
def test_at_their_own_pace_all_steps_are_released(tmp_path):
    """In what order is theirs, so that nothing else is known of the result."""
    run("loopback.py", tmp_path, "dppvi.Asynchronous((1.0,1.5,2.5))", "live")
    assert json.loads((tmp_path / "found.json").read_text())["steps"] == [4, 3, 2]
    study = silo.load_study(tmp_path / "study.py").study
    assert np.all(np.isfinite(dppvi.load(tmp_path / "posterior.npz", study.model).mean["w"]))
