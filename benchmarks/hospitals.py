"""Rounds over hospitals' gateways: what Flower adds, in seconds, bytes and memory.

    python -m benchmarks.hospitals --hospitals 3 --latents 200 --rounds 5 [--schedule sequential]
        [--one-process]

Starts a gateway process for each hospital. A first study runs over their sockets alone, which is
our own cost; the second over a SuperLink with TLS, nginx if it is installed, and a registered
SuperNode for each hospital. Rounds after the first are timed: in the first one, programs are
compiled. A hospital's message takes from the server's request to its reply; of that, the start of a
process is what passes until a message reaches the gateway, and the gateway what it takes there.

``--one-process`` has all gateways in one, as no hospital would: it says how far Flower goes on one
machine. Where less than 5 GB of memory are left, everything is stopped.
"""

import argparse
import contextlib
import datetime as dt
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numpyro_dppvi import silo
from numpyro_dppvi.silo import messages, new_study, settings, wire
from numpyro_dppvi.silo.sockets import listening
from tests.flower.loopback import Flower, wait_for

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import numpyro_dppvi.silo.command as c; exit(c.main())"]
TOGETHER = [sys.executable, "-c", "from benchmarks import hospitals as h; h.listen()", "silo run"]
NUM_RECORDS = 20
LEAST_FREE = 5e9
STUDY = """
import numpyro
import numpyro.distributions as dist
import numpyro_dppvi as dppvi
from numpyro_dppvi import silo

def model(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([y.shape[1]]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1).to_event(1), obs=y)

study = silo.Study(
    model=model,
    hospitals=HOSPITALS,
    records={"y": ((LATENTS,), "float32")},
    budget=dppvi.PrivacyBudget(epsilon=1.0),
    num_rounds=ROUNDS,
    schedule=dppvi.SCHEDULE,
    seed=SEED,
)
"""
LOADER = """
import numpy as np
def load():
    return {"y": np.random.default_rng(0).normal(size=(RECORDS, LATENTS)).astype(np.float32)}
"""
# Words of a command line, and what the table calls the process.
KINDS = {
    "flower-superlink": "SuperLink",
    "flower-supernode": "SuperNode",
    "flower-superexec": "SuperExec (one beside each of these)",
    "flwr-serverapp": "server's application",
    "flwr-clientapp": "node's application",
    "silo run": "gateway",
}


def write(folder: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Path]:
    """A study in a new folder; the path of each silo.toml by name."""
    names = [f"h{number}" for number in range(arguments.hospitals)]
    new_study.write(folder, dict.fromkeys(names, NUM_RECORDS))
    text = STUDY
    for word, value in {
        "HOSPITALS": dict.fromkeys(names, NUM_RECORDS),
        "LATENTS": arguments.latents,
        "ROUNDS": arguments.rounds,
        "SCHEDULE": arguments.schedule,
        "SEED": seed,
    }.items():
        text = text.replace(word, str(value))
    (folder / "study.py").write_text(text)
    digest = silo.digest_of(folder / "study.py")
    for name in names:
        loader = LOADER.replace("RECORDS", str(NUM_RECORDS))
        loader = loader.replace("LATENTS", str(arguments.latents))
        (folder / name / "hospital.py").write_text(loader)
        decided = (folder / name / "silo.toml").read_text()
        decided = re.sub('sha256 = "[0-9a-f]*"', f'sha256 = "{digest}"', decided)
        decided = decided.replace("noise_multiplier = 1.0", "noise_multiplier = 0.1")
        (folder / name / "silo.toml").write_text(decided)
    return {name: folder / name / "silo.toml" for name in names}


@contextlib.contextmanager
def gateways(paths: dict[str, Path], *, one_process: bool) -> Iterator[None]:
    """A process for each hospital, or for all; what is said goes to gateway.log in its folder."""
    commands = {path: [*COMMAND, "silo", "run", str(path)] for path in paths.values()}
    if one_process:
        first, *_ = paths.values()
        commands = {first: [*TOGETHER, *map(str, paths.values())]}
    with contextlib.ExitStack() as stack:
        for path, command in commands.items():
            log = stack.enter_context((path.parent / "gateway.log").open("w"))
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for path in paths.values():
            place = settings.read(path).socket
            assert wait_for(place.exists, 900), f"no gateway listens on {place}"
        yield


def listen() -> None:
    """Gateways of all hospitals on the command line, in one process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for path in sys.argv[2:]:
            gateway = stack.enter_context(silo.open_gateway(path))
            place, handle = settings.read(path).socket, said(gateway.handle, path)
            server = stack.enter_context(listening(place, handle, gateway.most_bytes))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        signal.pause()


def said(handle: Callable[[bytes], bytes], path: str) -> Callable[[bytes], bytes]:
    """Writes times to a hospital's own log, because gateways of one process share theirs."""
    log, number = Path(path).parent / "gateway.log", itertools.count(1)

    def handled(message: bytes) -> bytes:
        times = [dt.datetime.now()]
        reply = handle(message)
        times.append(dt.datetime.now())
        step = next(number)
        with log.open("a") as file:
            for when, words in zip(times, ("is charged", "is released"), strict=True):
                file.write(f"{when:%Y-%m-%d %H:%M:%S},{when:%f} step {step} {words}\n")
        return reply

    return handled


class Watcher:
    """The largest memory of each kind of process and of all together, and when each began."""

    def __init__(self) -> None:
        self.megabytes: dict[str, float] = {}
        self.together = 0.0
        self.begun: dict[int, float] = {}
        self.ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        begun = time.monotonic()
        while not self.ended.wait(0.05):
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, StopIteration, ValueError, KeyError):
                    self._look(folder)
            if time.monotonic() - begun > 5:
                begun, pieces = time.monotonic(), map(proportional, Path("/proc").glob("[0-9]*"))
                self.together = max(self.together, sum(pieces))
                if free_bytes() < LEAST_FREE:
                    print("stopped, because too little memory is left", flush=True)
                    os.kill(os.getpid(), signal.SIGINT)
                    return

    def _look(self, folder: Path) -> None:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        kind = next(kind for kind in KINDS if kind in command)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        memory = int(status["VmRSS"].split()[0]) / 1024
        self.megabytes[kind] = max(memory, self.megabytes.get(kind, 0.0))
        if kind == "flwr-clientapp":
            ticks = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
            up = float(Path("/proc/uptime").read_text().split()[0])
            began = time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
            self.begun.setdefault(int(folder.name), began)


def proportional(folder: Path) -> float:
    """A process's memory in MB, what it shares divided by who shares it; 0 for other processes."""
    with contextlib.suppress(OSError):
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        if any(kind in command for kind in KINDS):
            found = re.search(r"^Pss: +(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
            return int(found[1]) / 1024 if found else 0.0
    return 0.0


def free_bytes() -> float:
    """What the machine has left for new processes."""
    found = re.search(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found, "no MemAvailable"
    return 1024.0 * int(found[1])


def steps(paths: dict[str, Path]) -> dict[str, list[tuple[float, float]]]:
    """When each hospital's messages reached its gateway, and when their releases left it."""
    found = {}
    for name, path in paths.items():
        log = path.parent / "gateway.log"
        found[name] = list(zip(lines(log, "is charged"), lines(log, "is released"), strict=True))
    return found


def lines(path: Path, words: str) -> list[float]:
    """When a gateway has said some words, in seconds."""
    found = re.findall(rf"^(\S+ \S+),(\d+) step \d+ {words}", path.read_text(), re.MULTILINE)
    return [dt.datetime.fromisoformat(when).timestamp() + float(f"0.{ms}") for when, ms in found]


def seconds_a_round(found: dict[str, list[tuple[float, float]]]) -> float:
    """Between ends of rounds, but for the first."""
    ends = [max(left for _, left in each) for each in zip(*found.values(), strict=True)]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def over_sockets(folder: Path, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds a round, and seconds of a visit in the gateway, without Flower."""
    paths = write(folder, arguments, seed=1)
    with gateways(paths, one_process=arguments.one_process):
        places = {name: settings.read(path).socket for name, path in paths.items()}
        silo.run_study(
            silo.load_study(folder / "study.py"),
            lambda name, message: silo.send(places[name], message),
            checkpoint=folder / "server.npz",
        )
    found = steps(paths)
    visits = [left - came for each in found.values() for came, left in each[1:]]
    return seconds_a_round(found), statistics.median(visits)


def over_flower(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the same study takes over Flower."""
    paths = write(folder, arguments, seed=2)
    flower = Flower(folder, tuple(paths))
    watcher = Watcher()
    with contextlib.ExitStack() as stack:
        stack.callback(watcher.ended.set)
        stack.enter_context(gateways(paths, one_process=arguments.one_process))
        stack.callback(lambda: flower.kill(*flower.processes))
        flower.start_link()
        flower.start_proxy()
        flower.register()
        for name, path in paths.items():
            flower.start_node(name, settings.read(path).socket)
        flower.run(folder / "flower")
        patience = 60.0 * arguments.rounds * arguments.hospitals
        assert wait_for(lambda: flower.listed()[0].startswith("finished"), patience), "no end"
        assert flower.listed()[0] == "finished:completed", flower.log()
    found = steps(paths)
    starts = sorted(watcher.begun.values())
    waits = []
    for each in found.values():
        for came, _ in each[1:]:
            before = [start for start in starts if start < came]
            if before:
                waits.append(came - before[-1])
    visits = [left - came for each in found.values() for came, left in each[1:]]
    return {
        "round": seconds_a_round(found),
        "start": statistics.median(waits),
        "gateway": statistics.median(visits),
        "megabytes": watcher.megabytes,
        "together": watcher.together,
    }


def main() -> None:
    """Reads the command line and prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hospitals", description=__doc__)
    parser.add_argument("--hospitals", type=int, default=3)
    parser.add_argument("--latents", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedule", default="synchronous", choices=["synchronous", "sequential"])
    parser.add_argument("--one-process", action="store_true")
    arguments = parser.parse_args()
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as elsewhere:
        folder = Path(elsewhere)
        ours, visit = over_sockets(folder / "a", arguments)
        form = silo.study.prepare(silo.load_study(folder / "a" / "study.py")).form
        sent, back = (wire.num_bytes(messages.shapes(each)) for each in (form.visit, form.release))
        print(
            f"{arguments.hospitals} hospitals, {arguments.latents} latents, {arguments.schedule}, "
            f"load {os.getloadavg()[0]:.1f}\n"
            f"  without Flower: {ours:.2f} s a round, {visit:.3f} s of a visit in the gateway\n"
            f"  bytes a visit: {sent} there, {back} back, and about 1 kB of names",
            flush=True,
        )
        found = over_flower(folder / "b", arguments)
    print(
        f"  over Flower: {found['round']:.1f} s a round ({60 / found['round']:.1f} a minute); of a "
        f"message, {found['start']:.1f} s until a new process has handed it to the gateway and "
        f"{found['gateway']:.3f} s there (load {os.getloadavg()[0]:.1f})"
    )
    for kind, name in KINDS.items():
        print(f"  {name}: {found['megabytes'].get(kind, 0):.0f} MB")
    print(f"  all of these, what they share counted once: {found['together']:.0f} MB")


if __name__ == "__main__":
    main()
