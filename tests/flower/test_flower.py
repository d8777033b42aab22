"""A study over Flower is the study in one process. Slow: a message takes a process of its own."""

import functools
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from numpyro_dppvi.silo import messages, wire
from numpyro_dppvi.silo.sockets import listening
from tests.flower import in_one_process

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, RecordDict

from numpyro_dppvi import flower
from numpyro_dppvi.flower import courier, node

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


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_study_is_the_one_in_one_process(schedule, tmp_path):
    pytest.importorskip("ray", reason="Flower simulates with `flwr[simulation]`")
    run("simulation.py", tmp_path, schedule)
    in_one_process.assert_same(tmp_path)


class Note:
    """A message of Flower's, which can be made in one of its runs alone."""

    def __init__(self, content, dst_node_id=0, message_type="query", ttl=1.0, reply_to=None):
        del message_type, ttl, reply_to
        self.content, self.metadata = content, types.SimpleNamespace(dst_node_id=dst_node_id)


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    for module in (courier, node):
        monkeypatch.setattr(module, "Message", Note)


class FakeGrid:
    """Nodes that answer at once, fail, or say nothing; Flower's ids are numbers."""

    def __init__(self, nodes, names=None):
        self.nodes, self.waiting, self.asked, self.names = nodes, {}, [], names or {}

    def get_nodes(self):
        return [
            types.SimpleNamespace(node_id=node, name=self.names.get(node, ""))
            for node in self.nodes
        ]

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
    """With the same bytes, so that a reply that was kept comes again."""
    grid = FakeGrid({5: hospital("north")})
    deliver = courier.GridCourier(grid, DIGEST, 5.0).deliver
    deliver("north", a_visit("north"))
    grid.nodes = {5: lambda data: b"", 6: hospital("north")}
    assert deliver("north", a_visit("north")) == b"north" + a_visit("north")
    visits = [data for node, data in grid.asked if wire.read_head(data).kind == "visit"]
    assert visits == [a_visit("north")] * 3


def test_a_courier_serves_no_name_that_two_nodes_say():
    grid = FakeGrid({5: hospital("north"), 6: hospital("north"), 7: hospital("south")})
    deliver = courier.GridCourier(grid, DIGEST, 0.5).deliver
    with pytest.raises(ConnectionError, match="the node of north is one of 2 with this name"):
        deliver("north", a_visit("north"))
    with pytest.raises(ConnectionError, match="the node of west is not there"):
        deliver("west", a_visit("west"))
    assert deliver("south", a_visit("south"))


@pytest.mark.parametrize("ids", [[""], []])
def test_a_courier_tries_again_what_flower_does_not_take(ids, monkeypatch):
    """Its node has just left, or the message is too large."""
    monkeypatch.setattr(courier, "_PAUSE_SECONDS", 0.1)
    grid = FakeGrid({5: hospital("north")}, names={5: "north"})
    push, refused = grid.push_messages, []
    monkeypatch.setattr(
        grid, "push_messages", lambda out: push(out) if refused else refused.append(1) or ids
    )
    before = time.monotonic()
    assert courier.GridCourier(grid, DIGEST, 60.0).deliver("north", a_visit("north"))
    assert time.monotonic() - before < 20


def test_a_node_is_what_it_was_registered_as():
    """Whatever it says, and it is not asked; nor is one that was registered without a name."""
    nodes = {5: hospital("south"), 6: hospital("west"), 7: hospital("north")}
    grid = FakeGrid(nodes, names={5: "north", 6: "south"})
    deliver = courier.GridCourier(grid, DIGEST, 0.5).deliver
    assert deliver("north", a_visit("north")) == b"south" + a_visit("north")
    del grid.nodes[5], grid.names[5]
    with pytest.raises(ConnectionError, match="is not there"):
        deliver("north", a_visit("north"))
    grid.nodes, grid.names = {7: hospital("north")}, {}
    with pytest.raises(ConnectionError, match="is not there"):
        deliver("north", a_visit("north"))
    assert {wire.read_head(data).kind for _, data in grid.asked} == {"visit"}


def test_a_courier_waits_for_a_hospital_that_comes_late_and_not_for_ever(caplog):
    caplog.set_level("INFO", "numpyro_dppvi.flower")
    grid = FakeGrid({5: hospital("north")}, names={5: "north"})
    deliver = courier.GridCourier(grid, DIGEST, 20.0).deliver
    grid.nodes, joined = {}, dict(grid.nodes)
    threading.Timer(0.5, grid.nodes.update, [joined]).start()
    assert deliver("north", a_visit("north")) == b"north" + a_visit("north")
    assert "north: its node is not there; it is tried again in 3 s" in caplog.text
    short = courier.GridCourier(grid, DIGEST, 0.5)
    grid.nodes = {5: lambda data: None}
    with pytest.raises(ConnectionError, match="brought no reply"):
        short.deliver("north", a_visit("north"))
    short.patience, before = 60.0, len(grid.asked)
    grid.nodes = {5: lambda data: b""}
    with pytest.raises(ConnectionError, match="brought no reply"):
        short.deliver("north", a_visit("north"))  # once, because it was waited for in vain
    assert len(grid.asked) == before + 1
    grid.nodes = {5: hospital("north")}
    assert short.deliver("north", a_visit("north"))


def asked_of_a_node(data, path, monkeypatch):
    """What a node's client application replies."""
    found = []
    app = types.SimpleNamespace(query=lambda: found.append)
    monkeypatch.setattr(node, "ClientApp", lambda: app)
    flower.client_app()
    content = RecordDict({"silo": ConfigRecord({"message": data})})
    context = Context(1, 1, {"silo-socket": str(path)}, RecordDict(), {})
    return found[0](Note(content, 1), context).content["silo"]["message"]


def test_a_node_needs_nothing_of_ours():
    """JAX takes seconds to import, for every message, and three times the memory."""
    code = """
import importlib.util, sys
found = importlib.util.spec_from_file_location("node", sys.argv[1])
node = importlib.util.module_from_spec(found)
found.loader.exec_module(node)
assert type(node.client).__name__ == "ClientApp"
assert not {"jax", "numpyro", "numpyro_dppvi"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, node.__file__], check=True, cwd="/")


def test_a_node_hands_messages_to_the_gateway_and_tells_no_error(tmp_path, monkeypatch):
    path = tmp_path / "silo.sock"
    with listening(path, lambda data: b"reply to " + data, 100) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert asked_of_a_node(b"visit", path, monkeypatch) == b"reply to visit"
        server.shutdown()
    assert asked_of_a_node(b"visit", path, monkeypatch) == b""
