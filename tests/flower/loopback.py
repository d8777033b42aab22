"""A SuperLink and three SuperNodes as processes on loopback; run by test_flower.py.

Usage: python loopback.py FOLDER SCHEDULE live|kill
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from numpyro_dppvi.silo import settings
from numpyro_dppvi.silo.sockets import listening
from tests.silo import hospitals

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

APP = {
    "pyproject.toml": """
        [project]
        name = "study"
        version = "1.0.0"
        dependencies = []
        [tool.flwr.app]
        publisher = "tests"
        [tool.flwr.app.components]
        serverapp = "study_app:server"
        clientapp = "study_app:client"
        [tool.flwr.app.config]
        """,
    "study_app.py": """
        from numpyro_dppvi import flower

        def done(result):
            result.posterior.save("{folder}/posterior.npz")
            with open("{folder}/status.txt", "w") as file:
                file.write(str(result.status))

        client = flower.client_app()
        server = flower.server_app(
            "{folder}/study.py", done, checkpoint="{folder}/server.npz", patience=120.0
        )
        """,
}


def environment(folder):
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    home = {"FLWR_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **quiet, **home, "PATH": f"{BIN}:{os.environ['PATH']}"}


def free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def process(folder, name, *command):
    with (folder / f"{name}.log").open("w") as log:
        started = subprocess.Popen(
            command,
            env=environment(folder),
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield started
        finally:
            # Flower's processes start others in sessions of their own, which would live on.
            for pid in (started.pid, *descendants(started.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            started.wait()


def descendants(pid):
    """All processes that a process has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def link(folder, ports):
    return process(
        folder,
        "superlink",
        "flower-superlink",
        "--insecure",
        *("--host", "127.0.0.1", "--port", str(ports[0])),
        "--disable-runtime-dependency-installation",
    )


def node(folder, ports, number, place):
    return process(
        folder,
        f"supernode-{number}",
        "flower-supernode",
        "--insecure",
        *("--superlink", f"127.0.0.1:{ports[0]}"),
        *("--host", "127.0.0.1", "--port", str(ports[1 + number])),
        *("--node-config", f'silo-socket="{place}"'),
    )


def flwr(folder, *command):
    return subprocess.run(
        ["flwr", *command],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def configure(folder, ports):
    config = f'[superlink.lo]\naddress = "127.0.0.1:{ports[0]}"\ninsecure = true\n'
    (folder / "home" / "config.toml").write_text(config)


def written(folder, ports):
    (folder / "home").mkdir()
    configure(folder, ports)
    (folder / "app").mkdir()
    for name, text in APP.items():
        filled = textwrap.dedent(text).replace("{folder}", str(folder)).lstrip()
        (folder / "app" / name).write_text(filled)


@contextlib.contextmanager
def engine(folder, ports, places):
    """Flower's processes, which are killed when the block ends."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(link(folder, ports))
        time.sleep(5)
        for number, place in enumerate(places):
            stack.enter_context(node(folder, ports, number, place))
        time.sleep(10)
        yield


def start(folder):
    """Starts a run, once the SuperLink is there."""
    for _ in range(20):
        if "Successfully started run" in flwr(folder, "run", "app", "lo").stdout:
            return
        time.sleep(3)
    raise AssertionError("no run was started")


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.5)


def main(folder, schedule, kill):
    """Runs a study; with ``kill``, all of Flower is killed when two steps have been released."""
    _, paths = hospitals.write_consortium(folder, f"{hospitals.QUICK}, schedule={schedule}")
    ports = free_ports(8)
    written(folder, ports)
    found = {}
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(hospitals.gateways(paths))
        places = [settings.read(path).socket for path in paths.values()]
        for place, gateway in zip(places, opened.values(), strict=True):
            server = stack.enter_context(listening(place, gateway.handle, gateway.most_bytes))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)

        def steps():
            return [len(each.store.ledger().entries) for each in opened.values()]

        if kill:
            with engine(folder, ports, places):
                start(folder)
                wait_for(lambda: sum(steps()) >= 2, 200)
                found["killed_at"] = steps()
            assert not (folder / "status.txt").exists()
            ports = ports[4:]
            configure(folder, ports)
        with engine(folder, ports, places):
            began = time.monotonic()
            start(folder)
            wait_for((folder / "status.txt").exists, 400)
            found["seconds"] = time.monotonic() - began
            time.sleep(3)
            found["listed"] = flwr(folder, "list", "lo", "--format", "json").stdout
        found["steps"] = steps()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "kill")
