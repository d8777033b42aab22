"""Runs that are killed, resumed, copied, repeated and share ledgers, in any order.

Whatever happens, each client was charged for every release that anybody can have seen, no charge
covers two of them, and no ledger file holds more than the largest budget that was promised on it.

A round is stubbed: it computes nothing, and its movement is a number that no other round has. So
what was released can be read off the histories of results and checkpoints.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import dp_accounting as dpa
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.privacy import ledger_file as ledgers
from numpyro_dppvi.protocol import algorithm, rounds
from numpyro_dppvi.run import checkpoint as checkpoints
from tests.grids import grid

NUM_CLIENTS, NUM_ROUNDS, NUM_STEPS, CLIP_NORM = 3, 2, 2, 2.0
DELTA = 1e-5
METHOD = dppvi.DPOptimization(num_local_steps=NUM_STEPS, clip_norm=CLIP_NORM)
REFUSALS = (dppvi.BudgetExceededError, ValueError, RuntimeError, FileNotFoundError)
fit_module = sys.modules["numpyro_dppvi.run.fitting"]


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


class Killed(BaseException):
    """What no handler of the library catches."""


class World:
    """What can be seen of all runs, and what is done to the one that is under way.

    Attributes:
        released: Of each round that was computed, by its number: what was released by which client
            at which noise.
        at: The moment at which something happens, counted from 0; moments are those before a file
            is flushed, before and after it is moved, and before and after a round is computed.
        what: What happens then.
    """

    def __init__(self):
        self.released = {}
        self.at, self.what, self.busy = None, None, False

    def moment(self, name):
        if self.at is None or self.busy:
            return
        self.at -= 1
        if self.at < 0 and (self.what is not in_between or name == "in a round"):
            what, self.at = self.what, None
            what(self)

    def compute(self, problem, params, before, shards, groups, keys, drawn):
        del problem, shards, keys, drawn
        self.moment("in a round")
        number = len(self.released) + 1
        noise = np.asarray(params.clients.noise_std) / CLIP_NORM
        visits = np.bincount(np.asarray(groups).ravel(), minlength=NUM_CLIENTS)
        self.released[number] = [
            (client, float(noise[client]), int(visits[client]) * NUM_STEPS)
            for client in range(NUM_CLIENTS)
        ]
        self.moment("after a round")
        none = np.zeros((), np.int32)
        return before, rounds.RoundInfo(np.float32(number), none, none, none)


def killed(world):
    raise Killed


def in_between(world):
    """Another process runs now."""
    world.busy = True
    world.other()
    world.busy = False


@functools.cache
def read_once():
    """What reading the model takes long to find out, which is the same for all runs."""
    records = {"y": np.linspace(-1, 1, 12)}
    of_all = {"y": jax.ShapeDtypeStruct((12,), np.dtype("float32"))}
    space = latents.from_model(model, of_all, {})
    space, family = guides.approximation(None, model, space, of_all, {})
    laid_out = fit_module.lay_out(records, NUM_CLIENTS, jax.random.key(0), model, {})
    prior = algorithm.first_factor(None, family, space)
    return space, family, laid_out, prior, jax.device_get(prior.exact)


def stubbed(patch, world):
    """Leaves of a run what it charges, keeps, plans and describes."""
    space, family, laid_out, prior, first = read_once()
    patch.setattr(latents, "from_model", lambda *arguments: space)
    patch.setattr(latents, "check_additive", lambda *arguments: None)
    patch.setattr(latents, "check_records", lambda *arguments: None)
    patch.setattr(guides, "approximation", lambda *arguments: (space, family))
    patch.setattr(algorithm, "first_factor", lambda *arguments: prior)
    patch.setattr(fit_module, "lay_out", lambda *arguments: laid_out)
    patch.setattr(fit_module, "_attrs", lambda *arguments: {})
    patch.setattr(rounds, "first_prior", lambda *arguments: first)
    patch.setattr(rounds, "run_round", world.compute)
    replace, encoded = Path.replace, ledgers._encoded

    def moved(path, target):
        world.moment("before a move")
        replace(path, target)
        world.moment("after a move")

    def written(lines, check):
        data, after = encoded(lines, check)
        if world.what is half_written and world.at == 0:
            return data[: 2 * len(data) // 3], after
        return data, after

    patch.setattr(os, "fsync", lambda number: world.moment("before a flush"))
    patch.setattr(Path, "replace", moved)
    patch.setattr(ledgers, "_encoded", written)


def half_written(world):
    raise Killed


def shuffled(seed):
    """A schedule with a generator of its own, which never answers the same again."""
    rng = np.random.default_rng(seed)

    def schedule(round_number, num_clients):
        del round_number
        return rng.choice(num_clients, (2, 1))

    return schedule


SCHEDULES = {
    "all": lambda seed: dppvi.sequential,
    "some": lambda seed: dppvi.random_subset(2),
    "shuffled": shuffled,
}


def lines_of(path):
    """The lines of a ledger file that are whole, read without the library."""
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def entries_of(path):
    return [
        (fields["client"], fields["event"]["GaussianDpEvent"]["noise_multiplier"], fields)
        for fields in lines_of(path)
        if "event" in fields
    ]


# All moments of a run with both files, and half as often none.
NUM_MOMENTS = 28
KILLS = st.sampled_from([*range(NUM_MOMENTS), *[None] * (NUM_MOMENTS // 2)])


def epsilons_of(charges):
    """What clients have spent, by the closed form."""
    squared = np.zeros(NUM_CLIENTS)
    for client, noise, count in charges:
        squared[client] += count * (2 / noise) ** 2
    return [dpa.get_epsilon_gaussian(s**-0.5, DELTA) if s else 0.0 for s in squared.tolist()]


def totals(charges):
    """Releases by client and noise."""
    found = {}
    for client, noise, count in charges:
        key = client, float(np.float32(noise))  # as a compiled round gets it
        found[key] = found.get(key, 0) + count
    return found


def expect(condition, error):
    """A refusal that is none of those that are right here is a failure."""
    if not condition:
        raise AssertionError(f"refused: {error}") from error


class Runs(RuleBasedStateMachine):
    """Fits on two ledger files and any number of checkpoints."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.world = World()
        # Of this machine alone: the same steps must have the same outcome, or hypothesis is lost.
        self.seeds = itertools.count()
        self.patch = pytest.MonkeyPatch()
        stubbed(self.patch, self.world)
        self.specs = {}  # by checkpoint: what it was started with
        self.promised = {}  # by ledger file: the largest epsilon
        self.seen = {}  # by ledger file: numbers of the rounds that somebody has seen
        self.newest = {}  # by run: the checkpoint that has not been left behind by a copy
        self.touched = {}  # by ledger file: how often another run has charged it

    def teardown(self):
        """However a run was left, it goes on to its end, if nobody else has spent its budget."""
        try:
            for name in self.kept():
                if self.is_alone(name) and self.specs[name]["schedule"] != "shuffled":
                    self.whole(self.fit(name, self.specs[name]), self.specs[name])
            self.every_release_was_charged_and_none_twice()
            self.no_file_has_spent_more_than_was_promised_on_it()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)

    # What is done.

    def place(self, name):
        return None if name is None else self.folder / name

    def fit(self, checkpoint, spec):
        """One call; what it returned, or ``None`` if it was killed."""
        if spec["ledger"]:
            of_file = self.promised.get(spec["ledger"], 0)
            self.promised[spec["ledger"]] = max(spec["epsilon"], of_file)
        schedule = SCHEDULES[spec["schedule"]](next(self.seeds))
        try:
            result = dppvi.fit(
                model,
                None,
                {"y": np.zeros(12)},
                rng_key=jax.random.key(spec["run"]),
                clients=NUM_CLIENTS,
                method=METHOD,
                budget=dppvi.PrivacyBudget(spec["epsilon"], DELTA),
                num_rounds=spec["rounds"],
                schedule=schedule,
                progress_bar=False,
                checkpoint=self.place(checkpoint),
                ledger_file=self.place(spec["ledger"]),
            )
        except Killed:
            return None
        finally:
            self.world.at = None
            self.look(checkpoint, spec)
        self.returned(result, spec)
        return result

    def returned(self, result, spec):
        """Counts what a result shows; its own ledger has all of it."""
        numbers = [int(number) for number in result.history.movement]
        self.seen.setdefault(spec["ledger"], set()).update(numbers)
        released = totals(row for number in numbers for row in self.world.released[number])
        charged = totals(
            (e.client, e.event.noise_multiplier, e.num_releases) for e in result.ledger.entries
        )
        for key, count in released.items():
            assert charged.get(key, 0) >= count, "a result's ledger lacks a release"
        assert np.all(result.ledger.spent() <= max(spec["epsilon"], self.promise(spec)))

    def promise(self, spec):
        return self.promised.get(spec["ledger"], 0)

    def look(self, checkpoint, spec):
        """Counts what a checkpoint holds, by its name."""
        place = self.place(checkpoint)
        if place is None or not place.exists():
            return
        with zipfile.ZipFile(place) as archive, archive.open("history/movement.npy") as file:
            numbers = np.lib.format.read_array(file)
        self.seen.setdefault(spec["ledger"], set()).update(int(number) for number in numbers)

    def whole(self, result, spec):
        assert result.status.rounds == spec["rounds"], str(result.status)

    def charges(self, ledger):
        found = entries_of(self.place(ledger))
        return [(client, noise, fields["num_releases"]) for client, noise, fields in found]

    # What may happen.

    @rule(
        ledger=st.sampled_from(["one", "two", "two", None]),
        epsilon=st.sampled_from([1.0, 2.0, 4.0]),
        schedule=st.sampled_from(sorted(SCHEDULES)),
        kept=st.sampled_from([True, True, False]),
        kill=KILLS,
        how=st.sampled_from([killed, half_written]),
    )
    def a_new_run(self, ledger, epsilon, schedule, kept, kill, how):
        """It must run to its end, unless it is killed or the file has spent its budget."""
        spec = {"ledger": ledger, "epsilon": epsilon, "schedule": schedule, "run": len(self.specs)}
        spec["rounds"] = NUM_ROUNDS
        name = f"run-{len(self.specs)}.npz"
        self.specs[name] = spec
        self.newest[name] = {name}
        self.world.at, self.world.what = kill, how
        before = max(epsilons_of(self.charges(ledger))) if ledger else 0.0
        try:
            result = self.fit(name if kept else None, spec)
        except dppvi.BudgetExceededError as error:
            expect(before > 0.99 * epsilon and "budget is used up" in str(error), error)
        else:
            if result is not None:
                self.whole(result, spec)
        self.others_spent(name, ledger)

    @precondition(lambda self: self.kept())
    @rule(
        data=st.data(),
        kill=KILLS,
        how=st.sampled_from([killed, half_written]),
    )
    def the_same_again(self, data, kill, how):
        """It must go on to its end, unless others have spent the budget, or a copy went on."""
        name = data.draw(st.sampled_from(self.kept()))
        spec = self.specs[name]
        self.world.at, self.world.what = kill, how
        alone = self.is_alone(name)
        try:
            result = self.fit(name, spec)
        except ValueError as error:
            stateful = spec["schedule"] == "shuffled" and "another schedule" in str(error)
            expect(stateful or not alone, error)
        except dppvi.BudgetExceededError as error:
            expect(not alone, error)
        else:
            if result is not None and alone:
                self.whole(result, spec)
        self.others_spent(name, spec["ledger"])

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), kill=KILLS, how=st.sampled_from([killed, half_written]))
    def it_is_continued(self, data, kill, how):
        """An ended run goes on by a round under a larger budget, from whatever file it left."""
        name = data.draw(st.sampled_from(self.kept()))
        old = self.specs[name]
        if not self.found(name).ended:
            return
        spec = {**old, "rounds": old["rounds"] + 1, "epsilon": 1.5 * old["epsilon"]}
        self.world.at, self.world.what = kill, how
        alone = self.is_alone(name)
        try:
            result = self.fit(name, spec)
        except ValueError as error:
            stateful = spec["schedule"] == "shuffled" and "another schedule" in str(error)
            expect(stateful or not alone, error)
        except dppvi.BudgetExceededError as error:
            expect(not alone, error)
        else:
            if result is not None and alone:
                self.whole(result, spec)
        if self.found(name).num_rounds == spec["rounds"]:
            self.specs[name] = spec
        self.others_spent(name, spec["ledger"])

    def found(self, name):
        """What a checkpoint is of; an older copy is of what it was of."""
        ledger = self.place(self.specs[name]["ledger"])
        return checkpoints.read(self.place(name), ledger and dppvi.privacy.LedgerFile(ledger))

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def a_copy_is_made(self, data):
        name = data.draw(st.sampled_from(self.kept()))
        self.copied(name)

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), at=st.integers(0, 4))
    def a_copy_goes_on_meanwhile(self, data, at):
        """Another process takes a copy while a round is computed, and runs it to its end."""
        name = data.draw(st.sampled_from(self.kept()))
        spec = self.specs[name]

        def other():
            copy = self.copied(name)
            with contextlib.suppress(*REFUSALS):
                self.fit(copy, spec)

        self.world.at, self.world.what, self.world.other = at, in_between, other
        with contextlib.suppress(*REFUSALS):
            self.fit(name, spec)
        self.others_spent(name, spec["ledger"])

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), at=st.integers(0, 4), epsilon=st.sampled_from([1.0, 2.0, 4.0]))
    def another_run_meanwhile(self, data, at, epsilon):
        """Another process fits on the same ledger file while a round is computed."""
        name = data.draw(st.sampled_from(self.kept()))
        spec = self.specs[name]

        def other():
            with contextlib.suppress(*REFUSALS):
                self.fit(None, {**spec, "epsilon": epsilon, "run": 10**6 + len(self.specs)})

        self.world.at, self.world.what, self.world.other = at, in_between, other
        with contextlib.suppress(*REFUSALS):
            self.fit(name, spec)
        self.others_spent(None, spec["ledger"])

    def kept(self):
        return sorted(name for name in self.specs if self.place(name).exists())

    def is_alone(self, name):
        """Whether nobody has charged a run's ledger file since it began, nor gone on from it."""
        return not self.touched.get(name) and name in self.newest[name]

    def copied(self, name):
        """Without a ledger file a copy cannot be noticed: such a run's is left alone."""
        copy = f"copy-{len(self.specs)}.npz"
        if self.specs[name]["ledger"] is None:
            return name
        shutil.copy(self.place(name), self.place(copy))
        self.specs[copy] = self.specs[name]
        self.newest[copy] = set()
        self.newest[name] = set()
        return copy

    def others_spent(self, name, ledger):
        """Remembers that what was planned on a file may not fit any longer."""
        for other, spec in self.specs.items():
            if other != name and ledger and spec["ledger"] == ledger:
                self.touched[other] = True

    # What must hold.

    @invariant()
    def every_release_was_charged_and_none_twice(self):
        for ledger, numbers in self.seen.items():
            if ledger is None:
                continue
            charged = totals(self.charges(ledger))
            released = totals(row for number in numbers for row in self.world.released[number])
            for key, count in released.items():
                if count:
                    assert charged.get(key, 0) >= count, (key, count, charged)

    @invariant()
    def no_file_has_spent_more_than_was_promised_on_it(self):
        for ledger, epsilon in self.promised.items():
            assert max(epsilons_of(self.charges(ledger))) <= epsilon * (1 + 1e-9)


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=40,
    stateful_step_count=6,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


SPEC = {"ledger": "one", "epsilon": 1.0, "schedule": "all", "run": 0, "rounds": NUM_ROUNDS}
MORE = SPEC | {"epsilon": 2.0, "rounds": 2 * NUM_ROUNDS}


@pytest.fixture
def runs():
    machine = Runs()
    machine.specs["run.npz"], machine.newest["run.npz"] = SPEC, {"run.npz"}
    yield machine
    machine.teardown()  # goes on to the end, and counts


def dies(runs, name, at, how=killed, spec=SPEC):
    runs.world.at, runs.world.what = at, how
    return runs.fit(name, spec)


@pytest.mark.parametrize("how", [killed, half_written])
@grid("at", range(NUM_MOMENTS), quick=range(0, NUM_MOMENTS, 3))
def test_killed_at_every_moment_and_then_at_another(runs, at, how):
    assert dies(runs, "run.npz", at, how) is None
    dies(runs, "run.npz", (7 * at + 3) % NUM_MOMENTS, how)
    runs.whole(runs.fit("run.npz", SPEC), SPEC)
    # Two rounds of three clients, and nothing is charged for being killed.
    assert len(runs.charges("one")) == NUM_ROUNDS * NUM_CLIENTS


@pytest.mark.parametrize("how", [killed, half_written])
@grid("at", range(NUM_MOMENTS), quick=range(0, NUM_MOMENTS, 3))
def test_a_continued_run_is_killed_at_every_moment_and_then_at_another(runs, at, how):
    """It has as many rounds more as it had, so that as many moments are in them."""
    runs.whole(runs.fit("run.npz", SPEC), SPEC)
    runs.specs["run.npz"] = MORE
    dies(runs, "run.npz", at, how, MORE)
    dies(runs, "run.npz", (7 * at + 3) % NUM_MOMENTS, how, MORE)
    runs.whole(runs.fit("run.npz", MORE), MORE)
    assert len(runs.charges("one")) == 2 * NUM_ROUNDS * NUM_CLIENTS


def test_there_are_no_other_moments(runs):
    assert dies(runs, "run.npz", NUM_MOMENTS) is not None


@pytest.mark.parametrize("at", range(NUM_MOMENTS))
def test_of_two_copies_one_goes_on(runs, at):
    """Everything is copied, as by a backup; whichever goes on first leaves the other behind."""
    dies(runs, "run.npz", at)
    if runs.place("run.npz").exists():
        for part in ("{}", ".{}.next"):
            if runs.place(part.format("run.npz")).exists():
                there = runs.place(part.format("copy.npz"))
                shutil.copy(runs.place(part.format("run.npz")), there)
        runs.whole(runs.fit("copy.npz", SPEC), SPEC)
        before = set(runs.seen["one"])
        with contextlib.suppress(ValueError):  # where both were at their end it is no copy's loss
            runs.fit("run.npz", SPEC)
        assert runs.seen["one"] == before
        runs.newest["run.npz"] = set()
