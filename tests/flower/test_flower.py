"""A study over Flower is the study in one process. Slow: a message takes a process of its own."""

import functools
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from numpyro_dppvi.silo import messages, wire
from numpyro_dppvi.silo.sockets import listening
from tests.silo import hospitals

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, RecordDict

from numpyro_dppvi import flower
from numpyro_dppvi.flower import courier

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


class Note:
    """A message of Flower's, which can be made in one of its runs alone."""

    def __init__(self, content, dst_node_id=0, message_type="query", ttl=1.0, reply_to=None):
        del message_type, ttl, reply_to
        self.content, self.metadata = content, types.SimpleNamespace(dst_node_id=dst_node_id)


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    monkeypatch.setattr(courier, "Message", Note)


class FakeGrid:
    """Nodes that answer at once, fail, or say nothing; Flower's ids are numbers."""

    def __init__(self, nodes):
        self.nodes, self.waiting, self.asked = nodes, {}, []

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, sent):
        ids = []
        for message in sent:
            node = message.metadata.dst_node_id
            data = message.content["silo"]["message"]
            self.asked.append((node, data))
            ids.append(f"{node} {len(self.asked)}")
            self.waiting[ids[-1]] = self.nodes[node](data)
        return ids

    def pull_messages(self, ids):
        """A failed node's reply is Flower's own, from node 1 and without content."""
        for each in ids:
            reply = self.waiting.pop(each, None)
            if reply is not None:
                content = reply and RecordDict({"silo": ConfigRecord({"message": reply})})
                metadata = types.SimpleNamespace(reply_to_message_id=each, src_node_id=1)
                yield types.SimpleNamespace(
                    metadata=metadata, content=content, has_content=functools.partial(bool, content)
                )


DIGEST = "a1" * 32


def hospital(name):
    """A node whose gateway says its name, and else repeats what it is sent."""

    def answer(data):
        if wire.read_head(data).kind == "join":
            return messages.encode(messages.Ready(DIGEST, name, 0))
        return name.encode() + data

    return answer


def a_visit(name):
    return wire.encode("visit", {"hospital": name}, {})


def test_a_courier_finds_hospitals_by_name():
    grid = FakeGrid({5: hospital("north"), 9: hospital("south"), 7: lambda data: b"who?"})
    deliver = courier.GridCourier(grid, DIGEST, 5.0).deliver
    for _ in range(3):
        for name in ("south", "north"):
            assert deliver(name, a_visit(name)) == name.encode() + a_visit(name)
    joins = [node for node, data in grid.asked if wire.read_head(data).kind == "join"]
    assert sorted(joins) == [5, 7, 9]  # once each


def test_a_courier_follows_a_hospital_to_another_node():
    grid = FakeGrid({5: hospital("north")})
    deliver = courier.GridCourier(grid, DIGEST, 5.0).deliver
    deliver("north", a_visit("north"))
    grid.nodes = {5: lambda data: b"", 6: hospital("north")}
    with pytest.raises(ConnectionError, match="brought no reply"):
        deliver("north", a_visit("north"))
    assert deliver("north", a_visit("north")) == b"north" + a_visit("north")


def test_a_courier_serves_no_name_that_two_nodes_say(monkeypatch):
    grid = FakeGrid({5: hospital("north"), 6: hospital("north"), 7: hospital("south")})
    deliver = courier.GridCourier(grid, DIGEST, 5.0).deliver
    with pytest.raises(ConnectionError, match="2 nodes say that they are north"):
        deliver("north", a_visit("north"))
    with pytest.raises(ConnectionError, match="0 nodes say that they are west"):
        deliver("west", a_visit("west"))
    assert deliver("south", a_visit("south"))


def test_a_courier_does_not_wait_for_ever(monkeypatch):
    grid = FakeGrid({5: hospital("north")})
    deliver = courier.GridCourier(grid, DIGEST, 0.5).deliver
    deliver("north", a_visit("north"))
    grid.nodes = {5: lambda data: None}
    with pytest.raises(ConnectionError, match="brought no reply"):
        deliver("north", a_visit("north"))


def asked_of_a_node(data, path, monkeypatch):
    """What a node's client application replies."""
    found = []
    app = types.SimpleNamespace(query=lambda: found.append)
    monkeypatch.setattr(courier, "ClientApp", lambda: app)
    flower.client_app()
    content = RecordDict({"silo": ConfigRecord({"message": data})})
    context = Context(1, 1, {"silo-socket": str(path)}, RecordDict(), {})
    return found[0](Note(content, 1), context).content["silo"]["message"]


def test_a_node_hands_messages_to_the_gateway_and_tells_no_error(tmp_path, monkeypatch):
    path = tmp_path / "silo.sock"
    with listening(path, lambda data: b"reply to " + data, 100) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert asked_of_a_node(b"visit", path, monkeypatch) == b"reply to visit"
        server.shutdown()
    assert asked_of_a_node(b"visit", path, monkeypatch) == b""
