"""A consortium of three small hospitals in a folder, for tests."""

import contextlib
import hashlib
import textwrap
from pathlib import Path

import numpy as np

from numpyro_dppvi import silo

NAMES, SIZES = ("north", "south", "west"), (12, 9, 15)

STUDY = """
import numpyro
import numpyro.distributions as dist
import numpyro_dppvi as dppvi
from numpyro_dppvi import silo

def logistic(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

def shrinkage(X, y):
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

study = silo.Study(
    hospitals={"north": 12, "south": 9, "west": 15},
    records={"X": ((2,), "FLOAT"), "y": ((), "int32")},
    num_rounds=3,
    seed=5,
    ARGUMENTS
)
"""
QUICK = "budget=dppvi.PrivacyBudget(4.0), method=dppvi.DPOptimization(num_local_steps=2)"
VIRTUAL = (
    "budget=dppvi.PrivacyBudget(4.0), "
    "method=dppvi.VirtualClients((2, 3, 4), 0.1, num_local_steps=2)"
)
LOADER = """
import numpy as np
def load():
    with np.load("{path}") as found:
        return dict(found)
"""
TOML = """
name = "{name}"
loader = "load_{name}_{token}:load"
{more}
[caps]
epsilon = {epsilon}
delta = 1e-5
releases = {releases}
noise_multiplier = {noise}
{allowed}
[[studies]]
file = "../study.py"
sha256 = "{digest}"
[checks]
rows = [5, 50]
[checks.columns.X]
least = -10
most = [10, 10]
[checks.columns.y]
least = 0
most = 1
"""


def records():
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(size, 2)).astype(np.float32) for size in SIZES]
    y = [(rng.random(len(x)) < 1 / (1 + np.exp(-x.sum(1)))).astype(np.int32) for x in X]
    return [{"X": a, "y": b} for a, b in zip(X, y, strict=True)]


def write_study(folder, arguments=QUICK, model="logistic", dtype="float32"):
    text = STUDY.replace("ARGUMENTS", f"model={model}, {arguments}").replace("FLOAT", dtype)
    (folder / "study.py").write_text(text)
    return silo.load_study(folder / "study.py")


def write_hospital(
    folder, name, *, more="", epsilon=4.0, releases=100, noise=0.1, digest=None, allowed=""
):
    """A hospital's folder, with silo.toml, loader and records."""
    place = folder / name
    place.mkdir()
    # Modules are known to Python by their names, whatever folder they are in.
    token = hashlib.sha256(str(place).encode()).hexdigest()[:8]
    np.savez(place / "records.npz", **records()[NAMES.index(name)])
    loader = textwrap.dedent(LOADER).format(path=place / "records.npz")
    (place / f"load_{name}_{token}.py").write_text(loader)
    digest = silo.digest_of(folder / "study.py") if digest is None else digest
    text = TOML.format(
        name=name,
        token=token,
        more=more,
        epsilon=epsilon,
        releases=releases,
        noise=noise,
        digest=digest,
        allowed=allowed,
    )
    (place / "silo.toml").write_text(text)
    return place / "silo.toml"


def write_consortium(folder, arguments=QUICK, caps=None, **study):
    """All of it; returns the study and the paths of each silo.toml by name."""
    pinned = write_study(folder, arguments, **study)
    return pinned, {
        name: write_hospital(folder, name, **(caps or {}).get(name, {})) for name in NAMES
    }


def beside(pinned, folder):
    """New hospitals for a study that was written elsewhere; returns the paths of each silo.toml."""
    source = Path(pinned.study.model.__code__.co_filename)
    (folder / "study.py").write_bytes(source.read_bytes())
    return {name: write_hospital(folder, name) for name in NAMES}


@contextlib.contextmanager
def gateways(paths, seed=7):
    """Open gateways by name."""
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(silo.open_gateway(path, insecure_noise_seed=seed))
            for name, path in paths.items()
        }


def in_process(opened):
    """A courier that calls the gateways directly."""
    return lambda name, message: opened[name].handle(message)
