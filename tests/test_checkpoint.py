"""Runs that are killed at any moment and started again: the posterior, the ledger, the refusals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import _files
from numpyro_dppvi.run import checkpoint
from tests.dry import dry_rounds
from tests.grids import grid

NUM_ROUNDS, NUM_CLIENTS = 3, 3
BUDGET = dppvi.PrivacyBudget(2.0, 1e-5)
# In float32 it reads 123456.78125.
CANARY = 123456.78


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)


def other_means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2.5).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)


def records(num_rows=12, num_columns=2):
    y = np.random.default_rng(0).normal(size=(num_rows, num_columns))
    y[0, 0] = CANARY
    return {"y": y}


def run(path=None, model=means, data=None, **changes):
    arguments = {
        "rng_key": jax.random.key(0),
        "clients": NUM_CLIENTS,
        "method": dppvi.DPOptimization(num_local_steps=1),
        "budget": BUDGET,
        "num_rounds": NUM_ROUNDS,
        "progress_bar": False,
        "insecure_noise_seed": 7,
        **changes,
    }
    guide = arguments.pop("guide", None)
    return dppvi.fit(model, guide, data or records(), checkpoint=path, **arguments)


METHODS = {
    "DPOptimization": {},
    "VirtualClients": {"method": dppvi.VirtualClients(num_shards=2, num_local_steps=1)},
    "trusted aggregator": {
        "method": dppvi.VirtualClients(num_shards=2, num_local_steps=1),
        "schedule": dppvi.synchronous,
        "trusted_aggregator": True,
    },
    "GlobalVI": {"method": dppvi.GlobalVI(), "trusted_aggregator": True},
    "Asynchronous": {"schedule": dppvi.Asynchronous((1.0, 1.5, 2.5))},
    "NonPrivate": {"method": dppvi.NonPrivate(num_local_steps=1), "budget": None},
    "FisherScoring": {"method": dppvi.FisherScoring(2)},
}


@pytest.fixture(scope="module")
def unbroken():
    """The same runs without interruption, by their name in ``METHODS``."""
    runs = {}

    def of(name):
        if name not in runs:
            runs[name] = run(**METHODS[name])
        return runs[name]

    return of


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


class Killed(BaseException):
    """What no handler of the library catches."""


@contextlib.contextmanager
def killed_at(monkeypatch, owner, name, call):
    """Dies at one call of a function; ``call`` counts from 0."""
    original, calls = getattr(owner, name), []

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) == call + 1:
            raise Killed
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies)
        with contextlib.suppress(Killed):
            yield calls


def header(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("header.json"))


def assert_same(one, two):
    for mine, theirs in ((one.state, two.state), (one.history, two.history)):
        jax.tree.map(
            np.testing.assert_array_equal,
            [mine._replace(ledger=None) if hasattr(mine, "ledger") else mine],
            [theirs._replace(ledger=None) if hasattr(theirs, "ledger") else theirs],
        )
    assert one.ledger == two.ledger
    assert str(one.status) == str(two.status)
    assert one.posterior.attrs == two.posterior.attrs


# Inside a round, after its charge and before its noise; before a file is flushed; before it is
# moved to its place; after it was.
# Each with the calls to die at: there are as many rounds and one write more.
MOMENTS = {
    "in a round": (dppvi.privacy.SecretKeys, "round_key", range(NUM_ROUNDS)),
    "before a file is flushed": (os, "fsync", range(0, 2 * NUM_ROUNDS + 2, 2)),  # and its folder
    "before a file is moved": (Path, "replace", range(NUM_ROUNDS + 1)),
    "after a file was moved": (_files, "flush_folder", range(NUM_ROUNDS + 1)),
}


@grid(
    ("owner", "name", "call"),
    [(owner, name, call) for owner, name, calls in MOMENTS.values() for call in calls],
    quick=[6, 7, 8, 11, 12, 13],
)
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    path, unbroken, monkeypatch, owner, name, call
):
    with killed_at(monkeypatch, owner, name, call) as calls:
        run(path)
    assert len(calls) == call + 1  # it did die
    if path.exists():  # what was charged covers every round that anything was kept of
        facts = header(path)
        assert facts["charged_rounds"] >= facts["round"]
    assert_same(run(path), unbroken("DPOptimization"))


# A run of the first is killed above; the others keep nothing that the rest does not.
SLOW = ("DPOptimization", "trusted aggregator", "NonPrivate", "FisherScoring", "Asynchronous")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in METHODS]
)
def test_every_kind_of_run_goes_on(path, unbroken, monkeypatch, name):
    with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 2):
        run(path, **METHODS[name])
    assert header(path)["round"] == 2
    result = run(path, **METHODS[name])
    assert_same(result, unbroken(name))
    assert sorted(p.name for p in path.parent.iterdir()) == [".run.npz.lock", "run.npz"]


def test_a_round_is_charged_on_the_disk_before_it_starts(path, monkeypatch):
    original, seen = dppvi.privacy.SecretKeys.round_key, []

    def spy(keys, number):
        facts = header(path)
        releases = sum(row["releases"] for row in facts["charged"])
        seen.append((number, facts["charged_rounds"], facts["round"], releases))
        return original(keys, number)

    monkeypatch.setattr(dppvi.privacy.SecretKeys, "round_key", spy)
    run(path)
    assert seen == [(r, r + 1, r, (r + 1) * NUM_CLIENTS) for r in range(NUM_ROUNDS)]


@pytest.mark.slow
def test_without_a_seed_what_was_kept_stays_and_the_rest_is_drawn_anew(path, monkeypatch):
    drawn = []

    def watched(keys, number, round_key=dppvi.privacy.SecretKeys.round_key):
        drawn.append((number, round_key(keys, number)))
        return drawn[-1][1]

    with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 2):
        run(path, insecure_noise_seed=None)
    monkeypatch.setattr(dppvi.privacy.SecretKeys, "round_key", watched)
    with zipfile.ZipFile(path) as archive, archive.open("history/natural/mu/linear.npy") as file:
        kept = np.lib.format.read_array(file)
    copy = path.with_name("copy.npz")
    copy.write_bytes(path.read_bytes())
    first, second = run(path, insecure_noise_seed=None), run(copy, insecure_noise_seed=None)
    for result in (first, second):
        np.testing.assert_array_equal(result.history.natural["mu"].linear[:2], kept)
        assert len(result.ledger.entries) == NUM_ROUNDS * NUM_CLIENTS
        np.testing.assert_allclose(result.ledger.spent(), BUDGET.epsilon, rtol=5e-3)
        assert np.all(result.ledger.spent() <= BUDGET.epsilon)
    # Keys of 256 bits, and not what one step of Adam makes of them, which may well be the same.
    assert [number for number, _ in drawn] == [2, 2]
    one, other = (np.asarray(jax.random.key_data(key)) for _, key in drawn)
    assert one.size * 32 == 256
    assert not np.array_equal(one, other)


@pytest.mark.slow
def test_a_run_that_has_ended_computes_nothing_more(path, unbroken, monkeypatch):
    run(path)
    with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 0) as calls:
        result = run(path)
    assert calls == []
    assert_same(result, unbroken("DPOptimization"))


def test_what_clients_keep_is_in_a_file_of_its_own(path, monkeypatch):
    arguments = METHODS["VirtualClients"]
    with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 2):
        run(path, **arguments)
    private = path.with_name("run.npz.private-2")
    assert private.stat().st_mode & 0o077 == 0
    assert list(path.parent.glob("*.private-*")) == [private]
    _, arrays = _files.read(path, "checkpoint")
    assert not any("private" in name for name in arrays)
    assert header(private)["warning"] == "guard this file like the data"
    private.unlink()
    with pytest.raises(FileNotFoundError, match=r"run\.npz\.private-2, which holds what clients"):
        run(path, **arguments)


def test_no_file_holds_a_record(path, monkeypatch):
    """Not even without privacy: q is what fits the records, and no record itself."""
    needles = [np.array(CANARY, dtype).tobytes() for dtype in (np.float32, np.float64)]
    for name in ("DPOptimization", "VirtualClients"):
        place = path.with_name(name)
        with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 2):
            run(place, **METHODS[name])
    files = list(path.parent.iterdir())
    assert len(files) >= 3
    for file in files:
        content = file.read_bytes()
        assert not any(needle in content for needle in needles), file


OTHERS = {
    "model": {"model": other_means},
    "data shape": {"data": records(num_rows=15)},
    "method": {"method": dppvi.DPOptimization(num_local_steps=1, clip_norm=3.0)},
    "method ": {"method": dppvi.DPOptimization(num_local_steps=1, optimizer=optax.adam(0.1))},
    "method  ": {"method": dppvi.DPOptimization(num_local_steps=1, clip_norm=(2.5, 2.5, 3.0))},
    "method   ": {
        "method": dppvi.DPOptimization(
            num_local_steps=1, sampler=dppvi.PoissonSampling((0.5, 0.5, 0.4))
        )
    },
    "number of rounds": {"num_rounds": 2},
    "schedule": {"schedule": dppvi.random_subset(2)},
    "budget": {"budget": dppvi.PrivacyBudget(3.0, 1e-5)},
    "damping": {"damping": 0.5},
    "rng_key": {"rng_key": jax.random.key(1)},
    "insecure_noise_seed": {"insecure_noise_seed": 8},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "run.npz"
    run(path)
    return path


class TestRefusals:
    @pytest.fixture
    def copy(self, written, path):
        path.write_bytes(written.read_bytes())
        return path

    @pytest.mark.parametrize(("name", "changes"), OTHERS.items())
    def test_another_run_is_refused_by_name(self, copy, name, changes):
        words = rf"is of a run with another {name.strip()}: it has .*, and this call "
        with pytest.raises(ValueError, match=words):
            run(copy, **changes)

    @pytest.mark.slow
    def test_optimizers_are_told_apart_by_what_they_do(self, path):
        def method(rate):
            return dppvi.DPOptimization(num_local_steps=1, optimizer=optax.adam(rate))

        with dry_rounds():
            run(path, method=method(0.1))
            run(path, method=method(0.1))  # another object, the same optimiser
        with pytest.raises(ValueError, match="another method"):
            run(path, method=method(0.2))

    @pytest.mark.slow
    def test_what_differs_is_what_is_named(self, copy):
        """A method without a guide brings its own, which is not what was written otherwise."""
        words = r"another method: it has DPOptimization\(.*, and this call FisherScoring\("
        with pytest.raises(ValueError, match=words):
            run(copy, method=dppvi.FisherScoring(), guide=None)
        words = r"another guide: it has DiagonalNormal of .*, and this call FullNormal of "
        with pytest.raises(ValueError, match=words):
            run(copy, guide=AutoMultivariateNormal(means))

    def test_a_guide_of_the_same_kind_is_the_same(self, copy, unbroken):
        assert_same(run(copy, guide=AutoNormal(means)), unbroken("DPOptimization"))

    def test_another_prior_is_refused(self, copy, unbroken):
        prior = unbroken("DPOptimization").posterior.as_prior()
        with pytest.raises(ValueError, match="another prior: it has the model's, and this call an"):
            run(copy, prior=prior)

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_a_truncated_file(self, copy, share):
        content = copy.read_bytes()
        copy.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match="is damaged or not a file"):
            run(copy)

    def test_a_saved_posterior(self, path, unbroken):
        unbroken("DPOptimization").posterior.save(path)
        with pytest.raises(ValueError, match="must be of kind 'checkpoint', got 'posterior'"):
            run(path)

    def test_a_ledger_that_was_cleaned(self, copy):
        facts, arrays = _files.read(copy, "checkpoint")
        facts["charged"][0]["releases"] -= 1
        _files.write(copy, "checkpoint", facts, arrays)
        with pytest.raises(ValueError, match="does not say what this run's plan charges"):
            run(copy)

    def test_arrays_of_another_shape(self, copy):
        facts, arrays = _files.read(copy, "checkpoint")
        arrays["state/factors/mu/linear"] = np.zeros((1, 2), np.float32)
        _files.write(copy, "checkpoint", facts, arrays)
        with pytest.raises(ValueError, match="is damaged, because array 'state/factors/mu/linear'"):
            run(copy)

    def test_a_folder(self, tmp_path):
        with pytest.raises(IsADirectoryError, match="is a folder: write the path of a file"):
            run(tmp_path)
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            run(tmp_path / "no" / "run.npz")

    def test_a_second_process_on_the_same_checkpoint(self, path, monkeypatch):
        original, refused = dppvi.privacy.SecretKeys.round_key, []

        def spy(keys, number):
            if number == 1:
                with pytest.raises(RuntimeError, match=rf"process \({os.getpid()}\) runs on the"):
                    run(path)
                refused.append(number)
            return original(keys, number)

        monkeypatch.setattr(dppvi.privacy.SecretKeys, "round_key", spy)
        run(path)
        assert refused == [1]

    def test_one_that_lets_go_soon_is_waited_for(self, tmp_path):
        with contextlib.ExitStack() as stack:
            stack.enter_context(checkpoint.locked(tmp_path / "run.npz"))
            letting_go = threading.Timer(0.3, stack.close)
            letting_go.start()
            with checkpoint.locked(tmp_path / "run.npz", patience=30.0):
                letting_go.join()


class TestInterrupt:
    @pytest.fixture
    def interrupted_at(self, monkeypatch, unbroken):
        """Presses Ctrl-C while a round is computed; several times if asked to."""
        unbroken("DPOptimization")  # run before, and not into it
        original = dppvi.privacy.SecretKeys.round_key
        # A job in the background is started with Ctrl-C ignored, as in some CI.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)

        def press(number, times=1):
            def spy(keys, current):
                if current == number:
                    for _ in range(times):
                        signal.raise_signal(signal.SIGINT)
                return original(keys, current)

            monkeypatch.setattr(dppvi.privacy.SecretKeys, "round_key", spy)

        yield press
        monkeypatch.undo()
        signal.signal(signal.SIGINT, before)

    def test_once_ends_the_run_after_the_round(self, interrupted_at, unbroken):
        interrupted_at(1)
        result = run()
        assert result.status.outcome is dppvi.run.Outcome.INTERRUPTED
        assert str(result.status).startswith(
            "The run was interrupted: 2 of 3 rounds ran, and this is the posterior after them."
        )
        assert len(result.ledger.entries) == 2 * NUM_CLIENTS
        after_two = unbroken("DPOptimization").posterior_at(2)
        jax.tree.map(np.testing.assert_array_equal, result.posterior.natural, after_two.natural)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_twice_gives_up_the_round(self, interrupted_at, unbroken):
        interrupted_at(1, times=2)
        result = run()
        assert "1 of 3 rounds ran" in str(result.status)
        after_one = unbroken("DPOptimization").posterior_at(1)
        jax.tree.map(np.testing.assert_array_equal, result.posterior.natural, after_one.natural)

    def test_before_the_first_round_has_ended_it_leaves_the_prior(self, interrupted_at):
        interrupted_at(0, times=2)
        result = run()
        assert "0 of 3 rounds ran, and this is the prior, because none did" in str(result.status)
        np.testing.assert_allclose(result.posterior.stddev["mu"], 2)
        assert result.history.movement.shape == (0,)
        assert np.all(result.ledger.spent() == 0)

    def test_in_the_last_round_it_changes_nothing(self, interrupted_at, unbroken):
        interrupted_at(NUM_ROUNDS - 1)
        assert_same(run(), unbroken("DPOptimization"))

    @pytest.mark.slow
    @pytest.mark.parametrize("times", [1, 2])
    def test_a_checkpoint_goes_on_afterwards(
        self, path, interrupted_at, unbroken, times, monkeypatch
    ):
        interrupted_at(1, times)
        assert run(path).status.outcome is dppvi.run.Outcome.INTERRUPTED
        monkeypatch.undo()
        assert_same(run(path), unbroken("DPOptimization"))


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_checkpoint as t
from numpyro_dppvi import _files
if sys.argv[1] != "no":
    write, count = _files._write_zip, [0]
    def dies(*args):
        count[0] += 1
        if count[0] == int(sys.argv[1]):
            args[0].write(b"half a file"); args[0].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)
    _files._write_zip = dies
result = t.run({path!r})
print(result.posterior.natural["mu"].linear.tolist(), result.ledger.spent().tolist())
"""


@pytest.mark.slow
def test_a_process_that_is_killed_is_started_again_and_ends_alike(path, unbroken):
    """A real process and a real SIGKILL, in the middle of writing the third state."""
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent), path=str(path))

    def start(argument):
        command = [sys.executable, "-c", script, argument]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert start("3").returncode == -signal.SIGKILL
    assert header(path)["round"] == 1
    assert path.with_name(".run.npz.partial").exists()
    ended = start("no")
    assert ended.returncode == 0, ended.stderr
    expected = unbroken("DPOptimization")
    linear = expected.posterior.natural["mu"].linear.tolist()
    assert ended.stdout.strip() == f"{linear} {expected.ledger.spent().tolist()}"
    assert not path.with_name(".run.npz.partial").exists()
