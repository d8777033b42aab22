"""A study of SUPPORT2 over three hospitals, each behind a gateway process of its own.

    python -m tutorials.silos [FOLDER]

What `dppvi new-study` writes, completed: a study, and a loader for each hospital. Then `dppvi silo
check` and `dppvi silo run` for each of them, and the consortium's server, which gets releases and
nothing else. SUPPORT2 does not say which hospital a patient was in, so rows are assigned at random.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from models.evaluation import held_out
from numpyro_dppvi import silo
from numpyro_dppvi.datasets import TabularData, load_support2
from numpyro_dppvi.silo import new_study, settings

ROOT = Path(__file__).parents[1]
NAMES, SHARES = ("north", "south", "west"), (0.5, 0.3, 0.2)
COMMAND = [sys.executable, "-c", "import numpyro_dppvi.silo.command as c; exit(c.main())"]
LOADER = """
import numpy as np

def load():
    with np.load({path!r}) as found:
        return {{"X": found["X"], "y": found["y"]}}
"""


def write(folder: Path, data: TabularData, num_rounds: int) -> dict[str, Path]:
    """A study and its hospitals' folders; returns the path of each silo.toml by name."""
    order = np.random.default_rng(0).permutation(len(data.y_train))
    ends = np.cumsum([int(share * len(order)) for share in SHARES])
    rows = dict(zip(NAMES, np.split(order, ends), strict=False))
    new_study.write(folder, {name: len(mine) for name, mine in rows.items()})
    text = (folder / "study.py").read_text()
    text = text.replace("((3,), ", f"(({data.X_train.shape[1]},), ")
    text = text.replace("num_rounds=5", f"num_rounds={num_rounds}")
    (folder / "study.py").write_text(text)
    digest = silo.digest_of(folder / "study.py")
    for name, mine in rows.items():
        records = folder / name / "records.npz"
        np.savez(records, X=data.X_train[mine], y=data.y_train[mine])
        (folder / name / "hospital.py").write_text(LOADER.format(path=str(records)))
        decided = folder / name / "silo.toml"
        pinned = re.sub('sha256 = "[0-9a-f]*"', f'sha256 = "{digest}"', decided.read_text())
        decided.write_text(pinned)
    return {name: folder / name / "silo.toml" for name in NAMES}


@contextlib.contextmanager
def gateways(paths: dict[str, Path]) -> Iterator[None]:
    """A process for each hospital, until the block ends."""
    with contextlib.ExitStack() as stack:
        started = []
        for path in paths.values():
            process = subprocess.Popen(
                [*COMMAND, "silo", "run", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            started.append(process)
        for process in started:
            print(process.stdout.readline(), end="", flush=True)
        yield


def main(folder: Path, num_rounds: int = 10) -> float:
    """Runs the study in a new folder; returns the mean log-likelihood of held-out patients."""
    data = load_support2()
    paths = write(folder, data, num_rounds)
    subprocess.run([*COMMAND, "silo", "check", str(paths[NAMES[0]])], cwd=ROOT, check=True)
    pinned = silo.load_study(folder / "study.py")
    places = {name: settings.read(path).socket for name, path in paths.items()}
    with gateways(paths):
        result = silo.run_study(
            pinned,
            lambda name, message: silo.send(places[name], message),
            checkpoint=folder / "server.npz",
        )
    print(f"\n{result.status}\n")
    mean, stddev = result.posterior.mean["w"], result.posterior.stddev["w"]
    for name, m, s in zip(data.feature_names, mean, stddev, strict=True):
        print(f"  {name:<30} {m:6.2f} ± {s:.2f}")
    draws = result.posterior.sample(jax.random.key(1), (100,))["w"]
    accuracy, log_likelihood = held_out(draws, data.X_test, data.y_test)
    print(f"\nHeld-out patients: accuracy {accuracy:.3f}, log-likelihood {log_likelihood:.3f}")
    for name, statement in silo.statements(pinned, result).items():
        print(f"\n{name}\n{statement}")
    return float(log_likelihood)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as elsewhere:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(elsewhere) / "study")
