"""The progress bar tells public facts, releases and the time, and nothing else.

Two runs on neighbouring data sets, whose releases are made the same, under one clock that moves by
itself: what the bar writes is compared letter by letter, and nothing is taken out before.
"""

import itertools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import tqdm.std

import numpyro_dppvi as dppvi
from numpyro_dppvi.methods import visits
from tests.dry import dry_rounds
from tests.grids import grid
from tests.programs import forget_programs

NUM_ROUNDS = 3
REAL_NOISE = visits.add_noise


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)


def data_set(canary):
    clients = [{"y": np.random.default_rng(m).normal(size=(6, 2))} for m in range(2)]
    clients[0]["y"][3] = canary
    return clients


ONE, OTHER = data_set(1.5), data_set(-1e6)
METHODS = {
    # One step of Adam would move q alike whatever is released.
    "full batches": dppvi.DPOptimization(num_local_steps=1, optimizer=optax.sgd(0.01)),
    "shards": dppvi.VirtualClients(2, num_local_steps=1),
}


class Clock:
    """Every look at it takes as long as the last one."""

    def __init__(self, seconds):
        self.looks = itertools.count()
        self.seconds = seconds

    def __call__(self):
        return 100.0 + self.seconds * next(self.looks)


def noise_alone(rng_key, total, noise_std, like=None):
    """The mechanism at infinite noise, up to scale."""
    with jax.enable_x64(True):
        nothing = jax.tree.map(lambda leaf: 0 * leaf, total)
    return REAL_NOISE(rng_key, nothing, noise_std, total if like is None else like)


@pytest.fixture
def same_release(monkeypatch):
    forget_programs()
    monkeypatch.setattr(visits, "add_noise", noise_alone)
    yield
    forget_programs()


@pytest.fixture
def written(monkeypatch, capsys):
    """A function to what the bar of a run writes, all of its redrawings."""
    init = tqdm.std.tqdm.__init__

    def every_round(self, *arguments, **options):
        init(self, *arguments, **{**options, "mininterval": 0, "miniters": 1})

    monkeypatch.setattr(tqdm.std.tqdm, "__init__", every_round)
    monkeypatch.setattr(tqdm.std.TMonitor, "__init__", lambda *_: None)  # it redraws by real time
    monkeypatch.setattr(tqdm.std.tqdm, "monitor_interval", 0)

    def of(data, method, seconds=1.0):
        monkeypatch.setattr(tqdm.std, "time", Clock(seconds))
        capsys.readouterr()
        dppvi.fit(
            means,
            None,
            data,
            rng_key=jax.random.key(0),
            method=method,
            budget=dppvi.PrivacyBudget(2.0),
            num_rounds=NUM_ROUNDS,
            progress_bar=True,
            insecure_noise_seed=3,
        )
        return capsys.readouterr().err

    return of


@grid("name", METHODS, quick=[1])
def test_neighbours_with_the_same_releases_have_the_same_bar(name, written, same_release):
    one, other = written(ONE, METHODS[name]), written(OTHER, METHODS[name])
    assert one == other
    # It was redrawn after every round, with all that it ever says.
    drawn = one.split("\r")
    assert [f"{n}/{NUM_ROUNDS} [" in one for n in range(NUM_ROUNDS + 1)] == [True] * 4
    for words in ("2 clients", "epsilon ", " nats", "s/it"):
        assert words in drawn[-1]


@pytest.mark.slow
def test_time_is_told(written):
    """The clock that is held here is the one that the bar reads."""
    method = METHODS["full batches"]
    with dry_rounds():
        assert written(ONE, method, seconds=1.0) != written(ONE, method, seconds=7.0)


@pytest.mark.slow
def test_other_releases_are_told(written):
    """With releases left as they are, what moved differs: the comparison does see what it must."""
    method = METHODS["full batches"]
    one, other = written(ONE, method), written(OTHER, method)
    assert one != other
    assert [part.split("moved")[0] for part in one.split("\r")] == [
        part.split("moved")[0] for part in other.split("\r")
    ]
