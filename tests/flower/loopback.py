"""Flower as processes on loopback, with TLS and registered nodes; run by test_processes.py.

Usage: python loopback.py FOLDER SCHEDULE SCENARIO

Keys and the proxy are those of the page on Flower, as they are printed there. What was found is
written to FOLDER/found.json.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

from numpyro_dppvi.silo import messages, settings
from numpyro_dppvi.silo.sockets import listening
from tests.silo import hospitals
from tests.silo.hospitals import NAMES

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PAGE = ROOT / "docs" / "flower.md"

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
        clientapp = "node:client"
        [tool.flwr.app.config]
        """,
    "study_app.py": """
        from numpyro_dppvi import flower

        def done(result):
            result.posterior.save("{folder}/posterior.npz")
            with open("{folder}/status.txt", "w") as file:
                file.write(str(result.status))

        server = flower.server_app("{folder}/study.py", done, checkpoint="{folder}/server.npz")
        """,
}


def printed(name):
    """A file as the page prints it."""
    found = re.search(rf"```\w+\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found.group(1)


def free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def descendants(pid):
    """All processes that a process has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def killed(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds):
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.5)
    return true


class Flower:
    """A SuperLink, a proxy where nginx is installed, and a SuperNode for each hospital."""

    def __init__(self, folder, names=NAMES):
        self.folder, self.names, self.processes = folder, names, {}
        self.link_port, self.proxy_port, *self.node_ports = free_ports(2 + len(names))
        self.proxied = shutil.which("nginx") is not None
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        own = {"FLWR_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        path = {"PATH": f"{BIN}:{os.environ['PATH']}"}
        self.environment = {**os.environ, **quiet, **own, **path}
        self.write()

    def write(self):
        for name in ("home", "app"):
            (self.folder / name).mkdir()
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink.lo]\naddress = "127.0.0.1:{self.link_port}"\n'
            f'root-certificates = "{self.folder}/ca.crt"\n'
        )
        for name, text in APP.items():
            filled = textwrap.dedent(text).replace("{folder}", str(self.folder)).lstrip()
            (self.folder / "app" / name).write_text(filled)
        shutil.copy(ROOT / "numpyro_dppvi" / "flower" / "node.py", self.folder / "app")
        (self.folder / "keys.sh").write_text(printed("keys.sh"))
        self.done("sh", "-e", "keys.sh")
        places = "".join(
            f"{kind}_temp_path nginx-{kind}; "
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        proxy = printed("nginx.conf").replace("http {", f"http {{ access_log off; {places}")
        proxy = proxy.replace("9443", str(self.proxy_port)).replace("8443", str(self.link_port))
        (self.folder / "nginx.conf").write_text(proxy)

    def done(self, *command):
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
            )

    def kill(self, *names):
        """Flower's processes start others in sessions of their own, which would live on."""
        for name in names:
            process = self.processes.pop(name)
            killed([process.pid, *descendants(process.pid)])
            process.wait()

    def start_link(self):
        self.start(
            "superlink",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.link_port)),
            *("--ssl-ca-certfile", "ca.crt"),
            *("--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"),
            *("--enable-supernode-auth", "--database", "state.db"),
            "--disable-runtime-dependency-installation",
        )
        assert wait_for(lambda: self.answers(self.link_port), 120), "no SuperLink"

    def start_proxy(self):
        if self.proxied:
            here = ("-p", str(self.folder), "-c", "nginx.conf", "-e", "stderr")
            user = "" if os.geteuid() else "user root;"  # else it gives folders to another user
            self.start("proxy", "nginx", *here, "-g", f"daemon off; pid nginx.pid; {user}")
            assert wait_for(lambda: self.answers(self.proxy_port), 60), "no proxy"

    def register(self):
        for name in self.names:
            self.done("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"{name}-key")
            self.done("flwr", "supernode", "register", f"{name}-key.pub", "lo", "--name", name)

    def start_node(self, name, place):
        port = self.proxy_port if self.proxied else self.link_port
        self.start(
            f"node-{name}",
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{port}", "--root-certificates", "ca.crt"),
            *("--auth-supernode-private-key", f"{name}-key"),
            *("--host", "127.0.0.1", "--port", str(self.node_ports[self.names.index(name)])),
            *("--node-config", f'silo-socket="{place}"'),
        )

    def supervise(self, name, place):
        """Starts a node again whenever it ends: Flower wants it to have been missed for a minute.

        On a busy machine it can take longer than that to find out that it is not wanted yet.
        """
        process = None
        while self.processes.get(f"node-{name}") is process:  # else it was killed for good
            self.start_node(name, place)
            process = self.processes[f"node-{name}"]
            process.wait()
            time.sleep(5)

    def answers(self, port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def run(self, app="app"):
        self.done("flwr", "run", str(app), "lo")

    def listed(self):
        """The status of each run, the newest first; ``flwr run`` does not fail for one of these."""
        return [run["status"] for run in self.runs()]

    def runs(self):
        return json.loads(self.done("flwr", "list", "lo", "--format", "json"))["runs"]

    def log(self):
        """What the newest run's server has said."""
        return self.done("flwr", "log", str(self.runs()[0]["run-id"]), "lo", "--show")


def honest(name, message, reply):
    del name, message
    return reply


def rogue(form):
    """South and west answer every step in another wrong way."""
    earlier = {}

    def other(reply, **facts):
        return messages.encode(messages.read_reply(reply, form)._replace(**facts))

    def filled(reply, value):
        w = messages.read_reply(reply, form).value["w"]
        return other(reply, value={"w": type(w)(*(np.full_like(leaf, value) for leaf in w))})

    def short(reply):
        w = messages.read_reply(reply, form).value["w"]
        return other(reply, value={"w": type(w)(*(leaf[:1] for leaf in w))})

    ways = {
        ("south", 1): short,
        ("south", 2): lambda reply: filled(reply, np.nan),
        ("south", 3): lambda reply: earlier["south"],
        ("west", 1): lambda reply: other(reply, study="0" * 64),
        ("west", 2): lambda reply: filled(reply, 1e6),
        ("west", 3): lambda reply: b"no message" * 100,
    }
    steps = {}

    def changed(name, message, reply):
        del message
        steps[name] = steps.get(name, 0) + 1
        earlier.setdefault(name, reply)
        return ways.get((name, steps[name]), lambda reply: reply)(reply)

    return changed


class Study:
    """Three gateways that listen, and Flower between them and the server."""

    def __init__(self, folder, schedule, scenario):
        self.folder, self.scenario, self.found = folder, scenario, {}
        caps = {"south": {"epsilon": 3.5}} if scenario == "budget" else None
        arguments = f"{hospitals.QUICK}, schedule={schedule}"
        _, self.paths = hospitals.write_consortium(folder, arguments, caps)
        self.places = {name: settings.read(path).socket for name, path in self.paths.items()}
        self.flower = Flower(folder)
        self.first = True

    def steps(self):
        return [len(each.store.ledger().entries) for each in self.opened.values()]

    def listen(self, stack):
        self.opened = stack.enter_context(hospitals.gateways(self.paths))
        (opened,) = self.opened["north"].studies.values()
        self.changed = rogue(opened.prepared.form) if self.scenario == "rogue" else honest
        for name, gateway in self.opened.items():
            handle = self.handler(name, gateway)
            server = stack.enter_context(listening(self.places[name], handle, gateway.most_bytes))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)

    def handler(self, name, gateway):
        def handle(message):
            reply = self.changed(name, message, gateway.handle(message))
            if self.scenario == "node" and name == "south" and self.first:
                self.first = False  # it has released, and its reply does not leave the machine
                self.flower.kill("node-south")
                self.supervise(name)
            return reply

        return handle

    def start(self, again=False):
        self.flower.start_link()
        self.flower.start_proxy()
        for name, place in self.places.items():
            if again:
                self.supervise(name)
            else:
                self.flower.start_node(name, place)

    def supervise(self, name):
        again = (name, self.places[name])
        threading.Thread(target=self.flower.supervise, args=again, daemon=True).start()

    def stop_midway(self):
        """Everything, or the SuperLink alone, is killed when two steps have been released."""
        assert wait_for(lambda: sum(self.steps()) >= 2, 300), "no steps"
        if self.scenario == "all":
            self.flower.kill(*self.flower.processes)
        else:
            link = self.flower.processes.pop("superlink")
            orphans = descendants(link.pid)
            link.kill()
            link.wait()
            began = time.monotonic()
            self.found["orphans"] = len(orphans)
            self.found["ended"] = wait_for(lambda: not any(map(alive, orphans)), 60)
            self.found["seconds_to_end"] = time.monotonic() - began
            killed(orphans)
        self.found["killed_at"] = self.steps()
        assert not (self.folder / "status.txt").exists()

    def run(self):
        with contextlib.ExitStack() as stack:
            self.listen(stack)
            stack.callback(lambda: self.flower.kill(*self.flower.processes))
            self.flower.start_link()
            self.flower.register()
            self.flower.kill("superlink")
            self.start()
            self.flower.run()
            if self.scenario in ("all", "link"):
                self.stop_midway()
                if self.scenario == "all":
                    self.start(again=True)
                else:
                    self.flower.start_link()
                self.flower.run()
            began = time.monotonic()
            wait_for((self.folder / "status.txt").exists, 500)
            self.found["seconds"] = time.monotonic() - began
            # A run that was killed counts as running until no sign of life came for a minute.
            wait_for(lambda: all(s.startswith("finished") for s in self.flower.listed()), 120)
            self.found |= {"listed": self.flower.listed(), "steps": self.steps()}
            self.found["log"] = self.flower.log()
        (self.folder / "found.json").write_text(json.dumps(self.found))


if __name__ == "__main__":
    Study(Path(sys.argv[1]), sys.argv[2], sys.argv[3]).run()
