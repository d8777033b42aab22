"""Flower as real processes on loopback: TLS, registered nodes, kills, rogues and no network.

All of them are slow: Flower starts a Python process for every message. Each waits 15 minutes at
most.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from tests.flower import in_one_process
from tests.silo import hospitals

pytest.importorskip("flwr", reason="needs the extra `flower`")

import httpx

from tests.flower import loopback

NEEDED = [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NEEDED), reason=f"needs {NEEDED}")]
HERE = Path(__file__).parent
# A network of its own, with nothing but a loopback interface in it.
OFFLINE = ("unshare", "--user", "--map-root-user", "--net", "sh", "-c")
LOOPBACK_UP = 'ip link set lo up && exec "$0" "$@"'


def run(folder, schedule, scenario="live", before=()):
    """A study in a process of its own; what it has found."""
    done = subprocess.run(
        [*before, sys.executable, str(HERE / "loopback.py"), str(folder), schedule, scenario],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    assert found["listed"][0] == "finished:completed", found["log"]
    return found


@pytest.mark.parametrize(
    "schedule", ["dppvi.sequential", "dppvi.synchronous", "dppvi.random_subset(2)"]
)
def test_a_study_over_processes_is_the_one_in_one_process(schedule, tmp_path):
    found = run(tmp_path, schedule)
    assert sum(found["steps"]) == (6 if "random" in schedule else 9)
    in_one_process.assert_same(tmp_path)
    for words in ("waiting for", "south: released 1", "round 3 has ended; epsilon: north"):
        assert words in found["log"]


def test_at_their_own_pace_all_steps_are_released(tmp_path):
    """In what order is theirs, so that nothing else is known of the result."""
    assert run(tmp_path, "dppvi.Asynchronous((1.0,1.5,2.5))")["steps"] == [4, 3, 2]
    study = silo.load_study(tmp_path / "study.py").study
    assert np.all(np.isfinite(dppvi.load(tmp_path / "posterior.npz", study.model).mean["w"]))


def test_without_a_network_it_is_the_same(tmp_path):
    """Nothing is looked for on the internet: no telemetry, no updates, no dependencies."""
    can = subprocess.run([*OFFLINE, LOOPBACK_UP, "true"], capture_output=True, check=False)
    if can.returncode:
        pytest.skip("needs to be allowed `unshare --net`, for a network with nobody in it")
    assert run(tmp_path, "dppvi.synchronous", before=(*OFFLINE, LOOPBACK_UP))["steps"] == [3, 3, 3]
    in_one_process.assert_same(tmp_path)


@pytest.mark.parametrize("scenario", ["all", "link"])
def test_what_was_killed_goes_on(scenario, tmp_path):
    """All of Flower, or the SuperLink alone: a second run goes on from the server's checkpoint."""
    found = run(tmp_path, "dppvi.sequential", scenario)
    assert 2 <= sum(found["killed_at"]) < 9
    assert found["steps"] == [3, 3, 3]
    in_one_process.assert_same(tmp_path)
    if scenario == "link":
        # The server's application ended by itself, and let go of the checkpoint.
        assert found["orphans"] >= 2
        assert found["ended"]
        assert found["listed"][1] == "finished:failed"


def test_a_node_that_is_killed_after_a_release_costs_nothing(tmp_path):
    """Before its reply has left: the reply that was kept is sent when the node is back."""
    found = run(tmp_path, "dppvi.sequential", "node")
    assert found["steps"] == [3, 3, 3]
    assert "south: its node" in found["log"]
    in_one_process.assert_same(tmp_path)


def over_gateways(folder, deliver_of, caps=None):
    """The same study over calls, with other gateways and the same seed of the noise."""
    folder.mkdir()
    pinned, paths = hospitals.write_consortium(folder, hospitals.QUICK, caps)
    with hospitals.gateways(paths) as opened:
        return silo.run_study(pinned, deliver_of(hospitals.in_process(opened)))


def test_rogue_hospitals_are_refused_and_the_posterior_is_unharmed(tmp_path):
    """What they send is as if they were away: a step each of six ways to be wrong."""
    found = run(tmp_path, "dppvi.sequential", "rogue")
    assert found["log"].count("sent what is refused") == 6

    def without_rogues(deliver):
        def courier(name, message):
            if name != "north":
                raise ConnectionError
            return deliver(name, message)

        return courier

    in_one_process.assert_close(tmp_path, over_gateways(tmp_path / "calls", without_rogues))


def test_a_hospital_with_a_smaller_budget_stops_and_the_others_go_on(tmp_path):
    caps = {"south": {"epsilon": 3.5}}
    found = run(tmp_path, "dppvi.sequential", "budget")
    assert found["steps"] == [3, 2, 3]
    assert silo.messages.Code.USED_UP.sentence in found["log"]
    in_one_process.assert_close(
        tmp_path, over_gateways(tmp_path / "calls", lambda deliver: deliver, caps)
    )


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """A SuperLink behind the proxy that the page prints; no nodes."""
    flower = loopback.Flower(tmp_path_factory.mktemp("front"))
    if not flower.proxied:
        pytest.skip("needs nginx, which the page puts before the SuperLink")
    try:
        flower.start_link()
        flower.start_proxy()
        yield flower
    finally:
        flower.kill(*flower.processes)


def asked(flower, port, path):
    """What whoever has the consortium's certificate is answered; paths go out as they are."""
    trusted = ssl.create_default_context(cafile=str(flower.folder / "ca.crt"))
    with (
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        trusted.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n"
            "Content-Type: application/protobuf\r\nConnection: close\r\n\r\n".encode()
        )
        return int(connection.makefile("rb").readline().split()[1])


OUTSIDE = (
    "/v1/control/list-runs",
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/v1/runtime/push-messages",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/..%5ccontrol/list-runs",
    "/v1/fleet//../control/list-runs",
    "/v1/fleet/%252e%252e/control/list-runs",
    "//v1/control/list-runs",
    "/V1/control/list-runs",
    "/docs",
    "/openapi.json",
    "/health",
    "/",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_only_fleet_routes_are_reached_from_outside(path, front):
    assert asked(front, front.proxy_port, path) in (400, 403, 404)


def test_there_is_something_to_be_kept_out(front):
    """Behind the proxy control routes answer anybody; through it, fleet routes ask for a key."""
    assert asked(front, front.link_port, "/v1/control/list-runs") == 200
    assert asked(front, front.link_port, "/v1/runtime/acquire-task") not in (403, 404)
    assert asked(front, front.proxy_port, "/v1/fleet/pull-messages") == 401
    # Another address of the same machine does not lead there.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", front.link_port), 20)


def test_without_the_certificate_nobody_is_answered(front):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        httpx.post(f"https://localhost:{front.proxy_port}/v1/fleet/pull-messages")
