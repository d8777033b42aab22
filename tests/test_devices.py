"""Clients over several devices and processes: the same numbers as on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import numpyro_dppvi as dppvi
from numpyro_dppvi.protocol import devices
from numpyro_dppvi.records import placement
from numpyro_dppvi.records.placement import AXIS, SpreadShards, on_devices
from numpyro_dppvi.run import fitting
from numpyro_dppvi.run.checkpoint import Journal
from tests import test_client
from tests.test_client import KEY, RUNS, data

ROOT = Path(__file__).parents[1]
AT_ONE_PACE = [name for name in RUNS if "pace" not in name]


def script(name, *arguments, **environment):
    """A process that runs a script of the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.{name}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process):
    """The last line that a script prints, as JSON."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("group", "at_once"), [([0, 1, 2, 3, 4], 2), ([4, 0], None), ([3, 2, 1], 3), ([4], None)]
)
def test_every_client_of_a_group_has_a_place_on_its_own_device(group, at_once):
    sizes = np.array([5, 3, 4, 9, 1])
    at = devices.places(np.array(group), sizes[group], 3, clients_each=2, at_once=at_once)
    width = len(at.numbers) // 3
    assert width % (at_once or 1) == 0
    assert at.numbers[at.of_group].tolist() == group
    assert at.in_group[at.of_group].tolist() == list(range(len(group)))
    assert np.flatnonzero(at.taken).tolist() == sorted(at.of_group)
    # On a device, small clients come first.
    for mine in np.split(np.arange(len(at.numbers)), 3):
        assert np.all(np.diff(sizes[at.numbers[mine[at.taken[mine]]]]) >= 0)
    # A free place repeats a client of the device it is on.
    assert (at.numbers // 2).tolist() == np.repeat(range(3), width).tolist()


def test_a_group_of_a_size_has_as_many_places_whoever_is_in_it():
    sizes = {
        len(devices.places(np.array(g), np.ones(3), 3, 4, 2).numbers)
        for g in ([0, 1, 2], [0, 5, 9])
    }
    assert sizes == {12}


def test_on_one_device_nothing_is_spread():
    shards = dppvi.records.stack_clients(data())
    assert len(placement._devices(3)) == 1
    assert dppvi.records.spread(shards) is shards


@pytest.mark.parametrize(
    ("num_clients", "used"), [(1, 1), (7, 7), (8, 8), (9, 5), (10, 5), (17, 6), (1009, 8)]
)
def test_no_more_devices_are_used_than_there_is_work_for(num_clients, used, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: list(range(8)))
    assert len(placement._devices(num_clients)) == used


def test_what_is_spread_must_be_shards():
    with pytest.raises(TypeError, match="write shards=stack_clients"):
        dppvi.records.spread(data())


def test_a_run_of_several_processes_wants_clients_spread_and_no_file(monkeypatch, tmp_path):
    _, steps = test_client.named("full batches")
    with jax.enable_x64(True):
        shards, state = dppvi.records.stack_clients(data()), steps.init(KEY)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ValueError, match=r"write shards=spread\(shards\)"):
            steps.step(KEY, state, shards)
    settings = {"rng_key": KEY, "method": dppvi.NonPrivate(), "progress_bar": False}
    with pytest.raises(ValueError, match="checkpoint is written by one process"):
        dppvi.fit(test_client.logistic, None, data(), checkpoint=tmp_path / "run.npz", **settings)


def test_nothing_leaves_a_place_without_a_client():
    """A free place repeats some client's visit, which nobody has charged."""
    assembly, steps = test_client.named("full batches")
    problem, mesh = assembly.problem, Mesh(jax.devices()[:1], (AXIS,))
    with jax.enable_x64(True):
        shards, known = dppvi.records.stack_clients(data()), steps.init(KEY).server
        numbers, taken = jnp.array([2, 0, 1]), np.array([True, False, True])
        asked = devices._ask(problem, assembly.params, known, KEY, 0, numbers, begins=True)[1]
        keys = assembly.setup.secret_keys.round_key(0)[None]
        released, _ = devices._visit(
            problem,
            mesh,
            3,
            None,
            (assembly.params.clients, keys),
            shards,
            devices.Visits(asked, numbers, jnp.asarray(taken), None),
            0,
        )
        for leaf in jax.tree.leaves(released.value):
            assert np.all(leaf[taken] != 0)
            assert not np.any(leaf[~taken])


def test_what_pads_the_devices_is_not_kept():
    """So that a run goes on on another number of devices."""
    journal = Journal(Path("run.npz"), {}, SimpleNamespace(clients=[None] * 3), [])
    private = {"w": np.arange(8).reshape(4, 2)}
    assert journal._of_clients(private)["w"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert journal._of_clients(None) is None


@pytest.mark.parametrize(
    ("schedule", "enough", "several"),
    [(dppvi.synchronous, 1, True), (dppvi.synchronous, 10**9, False), (dppvi.sequential, 1, False)],
)
def test_a_fit_spreads_clients_who_are_visited_side_by_side(schedule, enough, several, monkeypatch):
    monkeypatch.setattr(fitting, "_WORTH_SPREADING", enough)
    monkeypatch.setattr(fitting, "spread", lambda _: "spread")
    run = SimpleNamespace(local=dppvi.DPOptimization(), groups=[schedule(0, 3)])
    shards = dppvi.records.stack_clients(data())
    assert (fitting.over_devices(run, shards) == "spread") is several


def test_clients_at_their_own_pace_are_not_spread():
    assembly, _ = test_client.named("at their own pace")
    with jax.enable_x64(True):
        shards = dppvi.records.stack_clients(data())
        first = assembly.first_state(KEY)
        spread = SpreadShards(on_devices(Mesh(jax.devices()[:1], (AXIS,)), shards), (3,))
        with pytest.raises(ValueError, match="at their own pace are visited one by one"):
            devices.run_round(assembly.problem, assembly.params, first, spread, [], (KEY, KEY))


@pytest.mark.slow
def test_on_two_devices_the_numbers_are_those_of_one():
    """Private factors, groups of some of the clients, and a place without a client."""
    (found,) = said(script("forced_devices", 2, "virtual, end to end")).values()
    apart, used = found
    assert apart < 1e-14
    assert used == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 8])
def test_on_several_devices_every_method_gives_the_numbers_of_one(num_devices):
    """To the last of 53 bits: fewer clients are solved side by side, whose sums XLA orders anew."""
    found = said(script("forced_devices", num_devices, *AT_ONE_PACE))
    assert set(found) == set(AT_ONE_PACE)
    assert all(apart < 1e-14 for apart, _ in found.values())
    assert {found[name][1] for name in found if "virtual" in name} == {min(num_devices, 3)}


@pytest.mark.slow
def test_a_run_over_devices_goes_on_from_its_checkpoint_on_one():
    apart, was_kept = said(script("forced_devices", 2, "resumed"))["resumed"]
    assert was_kept
    assert apart < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, "none"])
def test_two_processes_give_the_numbers_of_one(seed):
    """Without a seed each draws its own clients' noise, and both come to the same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [script("two_processes", address, number, seed) for number in range(2)]
    first, second = map(said, both)
    assert first == second
    assert (first["processes"], first["devices"]) == (2, 4)
    assert "one process" in first["checkpoint"]
    alone = said(script("two_processes", "alone", 0, seed))
    if seed == "none":
        assert alone["synchronous"] != first["synchronous"]
    else:
        assert alone["synchronous"] == pytest.approx(first["synchronous"], rel=1e-5)
        assert alone["sequential"] == pytest.approx(first["sequential"], rel=1e-5)
