"""A checkpoint and a ledger file together: resumes, copies, shared budgets, schedules, Ctrl-C."""

import contextlib
import functools
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import _files
from numpyro_dppvi.privacy import Ledger, LedgerFile, accounting
from numpyro_dppvi.privacy.words import rounded_up as words_of
from numpyro_dppvi.protocol import planning, rounds
from tests import test_checkpoint as one_file
from tests.dry import dry_rounds
from tests.grids import grid
from tests.test_checkpoint import NUM_CLIENTS, NUM_ROUNDS, killed_at

BUDGET = one_file.BUDGET


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


def run(path, ledger=None, **changes):
    """With a secret key of its own each time, as users run it."""
    ledger = path.with_name("ledger.jsonl") if ledger is None else ledger
    return one_file.run(path, ledger_file=ledger, **{"insecure_noise_seed": None, **changes})


def charged(path):
    ledger = LedgerFile(path.with_name("ledger.jsonl")).open(Ledger((BUDGET,) * NUM_CLIENTS))
    return len(ledger.entries)


def kept_rounds(path):
    return one_file.header(path)["round"] if path.exists() else 0


# Before anything is charged, between charge and release, before the result is written, before the
# ledger says that it is kept, and before it gets its name.
MOMENTS = {
    "before the charge": (LedgerFile, "charge"),
    "after the charge": (dppvi.privacy.SecretKeys, "round_key"),
    "before the result": (_files, "write"),
    "before it is kept": (LedgerFile, "keep"),
    "before it is named": (Path, "replace"),
}


class TestResume:
    @pytest.mark.slow
    @grid(
        ("moment", "call"),
        [
            (m, c)
            for m in MOMENTS
            for c in range(2 * NUM_ROUNDS + 2 if "named" in m else NUM_ROUNDS)
        ],
        quick=range(0, 100, 2),
    )
    def test_a_run_that_is_killed_ends_on_its_budget(self, path, monkeypatch, moment, call):
        with killed_at(monkeypatch, *MOMENTS[moment], call) as calls:
            run(path)
        assert len(calls) == call + 1
        result = run(path)
        assert result.status.rounds == NUM_ROUNDS
        assert charged(path) == NUM_ROUNDS * NUM_CLIENTS  # no round twice, and none left out
        np.testing.assert_array_equal(result.ledger.spent(), result.plan.epsilons)

    @pytest.mark.slow
    def test_what_was_kept_stays(self, path, monkeypatch):
        with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 2):
            run(path)
        _, arrays = _files.read(path, "checkpoint")
        kept = arrays["history/natural/mu/linear"]
        assert kept.shape[0] == 2
        result = run(path)
        np.testing.assert_array_equal(result.history.natural["mu"].linear[:2], kept)

    # test_checkpoint.py stops them without a ledger, to which all methods are alike.
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["VirtualClients", "GlobalVI", "Asynchronous"])
    def test_every_kind_of_run_goes_on(self, path, monkeypatch, name):
        arguments = one_file.METHODS[name]
        with killed_at(monkeypatch, LedgerFile, "keep", 2):  # the first is the start
            run(path, **arguments)
        assert kept_rounds(path) == 1
        result = run(path, **arguments)
        assert result.status.rounds == NUM_ROUNDS
        assert np.all(result.ledger.spent() <= BUDGET.epsilon)
        names = sorted(place.name for place in path.parent.iterdir())
        assert names == [".run.npz.lock", "ledger.jsonl", "run.npz"]

    @pytest.mark.slow
    def test_after_its_end_it_gives_the_same_and_charges_nothing(self, path, monkeypatch):
        first, before = run(path), charged(path)
        with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 0) as calls:
            again = run(path)
        assert calls == []
        assert charged(path) == before
        np.testing.assert_array_equal(first.history.movement, again.history.movement)
        np.testing.assert_array_equal(first.ledger.spent(), again.ledger.spent())

    def test_a_run_keeps_its_plan_when_others_have_spent(self, path, monkeypatch):
        """Planned on an empty file; the rounds that no longer fit are refused, the rest stays."""
        with killed_at(
            monkeypatch, dppvi.privacy.SecretKeys, "round_key", 1
        ):  # charged, not computed
            run(path)
        of_others = run(None, path.with_name("ledger.jsonl"))
        assert of_others.status.rounds == NUM_ROUNDS
        for _ in range(2):
            result = run(path)
            assert result.status.outcome is dppvi.run.Outcome.INTERRUPTED
            assert str(result.status).startswith(
                "The run was interrupted, because other runs on its ledger file have used up a "
                "budget: 2 of 3 rounds ran, and this is the posterior after them."
            )
            assert result.posterior.natural["mu"].linear.shape == (2,)
            assert np.all(result.ledger.spent() <= BUDGET.epsilon)


class TestRefusals:
    @pytest.mark.slow
    def test_a_copy_that_was_left_behind(self, path, monkeypatch):
        """It would release a round again under the charge of the one that went on."""
        copy = path.with_name("copy.npz")
        with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 1):
            run(path)
        shutil.copy(path, copy)
        run(path)
        ran = []
        monkeypatch.setattr(rounds, "run_round", lambda *arguments: ran.append(arguments))
        with pytest.raises(ValueError, match="the checkpoint is an older copy: the ledger file"):
            run(copy)
        assert ran == []

    def test_a_copy_that_went_on_while_a_round_was_computed(self, path, monkeypatch):
        """Then the round that is computed is not shown: its charge covers the copy's."""
        copy, computed = path.with_name("copy.npz"), rounds.run_round
        results = []

        def meanwhile(*arguments):
            monkeypatch.setattr(rounds, "run_round", computed)
            shutil.copy(path, copy)
            results.append(run(copy))
            return computed(*arguments)

        monkeypatch.setattr(rounds, "run_round", meanwhile)
        with pytest.raises(ValueError, match="the checkpoint is an older copy"):
            run(path)
        assert results[0].status.rounds == NUM_ROUNDS
        assert kept_rounds(path) == 0
        assert not path.with_name(".run.npz.next").exists()
        assert charged(path) == NUM_ROUNDS * NUM_CLIENTS

    @pytest.mark.slow
    def test_an_older_or_another_ledger(self, path, monkeypatch):
        with killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 1):
            run(path)
        ledger = path.with_name("ledger.jsonl")
        older = ledger.read_bytes()
        run(path)
        for content in (older, None):
            ledger.unlink()
            if content is not None:
                ledger.write_bytes(content)
            with pytest.raises(ValueError, match="lacks the checkpoint's run"):
                run(path)
        assert not ledger.exists()

    @pytest.mark.slow
    def test_a_ledger_that_comes_later_or_goes(self, path):
        one_file.run(path, insecure_noise_seed=None)
        with pytest.raises(ValueError, match="another ledger file: it has none, and this call one"):
            run(path)
        other = path.with_name("other.npz")
        run(other)
        with pytest.raises(ValueError, match="another ledger file: it has one, and this call none"):
            one_file.run(other, insecure_noise_seed=None)

    def test_the_wrong_ledger_takes_nothing_away(self, path, monkeypatch):
        with killed_at(monkeypatch, Path, "replace", 3):  # the second result, kept and not named
            run(path)
        assert path.with_name(".run.npz.next").exists()
        with pytest.raises(ValueError, match="lacks the checkpoint's run"):
            run(path, path.with_name("wrong.jsonl"))
        assert run(path).status.rounds == NUM_ROUNDS
        assert charged(path) == NUM_ROUNDS * NUM_CLIENTS

    def test_going_on_by_hand_is_charged_for_itself(self, path):
        """Also where a round was charged and given up: the checkpoint may go on with it, too."""
        result = run(path)
        assert (result.state.ledger.run, result.state.ledger.kept) == ("", "")


class TestSharing:
    @pytest.fixture(autouse=True)
    def _dry(self):
        with dry_rounds():
            yield

    def spent(self, ledger, epsilon):
        budgets = (dppvi.PrivacyBudget(epsilon, BUDGET.delta),) * NUM_CLIENTS
        return LedgerFile(ledger).open(Ledger(budgets)).spent()

    @pytest.mark.slow
    @grid(
        "method",
        [
            dppvi.DPOptimization(num_local_steps=1),
            dppvi.DPOptimization(num_local_steps=1, sampler=dppvi.PoissonSampling(0.5)),
            dppvi.VirtualClients(num_shards=2, num_local_steps=1),
        ],
        quick=[0, 2],
        ids=["full batches", "sampled batches", "shards"],
    )
    def test_a_second_run_has_what_is_left(self, tmp_path, monkeypatch, method):
        ledger = tmp_path / "ledger"
        first = one_file.run(method=method, ledger_file=ledger, num_rounds=2)
        assert first.plan.before_in_words == ""
        with monkeypatch.context() as patch:
            patch.setattr(
                rounds, "run_round", lambda *arguments: pytest.fail("something was computed")
            )
            words = "client 0's budget is used up: other runs on the ledger file have spent epsilon"
            with pytest.raises(dppvi.BudgetExceededError, match=words):
                one_file.run(method=method, ledger_file=ledger, num_rounds=2)
        raised = dppvi.PrivacyBudget(3.0, BUDGET.delta)
        second = one_file.run(method=method, ledger_file=ledger, num_rounds=2, budget=raised)
        assert second.status.rounds == 2
        for epsilons in (second.ledger.spent(), second.plan.epsilons, self.spent(ledger, 3.0)):
            assert np.all(epsilons <= 3.0)
            assert np.all(epsilons >= 0.998 * 3.0)
        # Less is left than 3, so that there is more noise than a run alone would need.
        alone = one_file.run(method=method, num_rounds=2, budget=raised)
        assert np.all(second.plan.noise_std > alone.plan.noise_std)
        spent = words_of(first.ledger.spent().max())
        told = f"Earlier runs on the same ledger file spent up to epsilon = {spent} of a client"
        statement = second.privacy_statement()
        for text in (str(second.plan), str(statement), statement.to_markdown()):
            assert told in " ".join(text.split())
        before = [client["epsilon_spent_before"] for client in statement.as_dict()["clients"]]
        np.testing.assert_array_equal(before, first.ledger.spent())

    def test_a_lower_budget_than_was_spent_is_refused(self, tmp_path):
        one_file.run(ledger_file=tmp_path / "ledger")
        with pytest.raises(dppvi.BudgetExceededError, match="have spent epsilon = 2 of 1 at delta"):
            one_file.run(ledger_file=tmp_path / "ledger", budget=dppvi.PrivacyBudget(1.0))

    @pytest.mark.slow
    def test_who_is_not_visited_needs_nothing_left(self, tmp_path):
        """Client 0 has spent all; a run on the others goes on."""
        ledger = tmp_path / "ledger"
        one_file.run(ledger_file=ledger, num_rounds=1, schedule=lambda number, of: np.array([[0]]))
        others = one_file.run(
            ledger_file=ledger, num_rounds=1, schedule=lambda number, of: np.array([[1], [2]])
        )
        assert others.status.rounds == 1
        assert np.all(self.spent(ledger, BUDGET.epsilon) <= BUDGET.epsilon)

    def test_a_plan_by_hand_counts_it_too(self, tmp_path):
        ledger = tmp_path / "ledger"
        arguments = {"num_rounds": NUM_ROUNDS, "client_sizes": [4] * NUM_CLIENTS}
        method = dppvi.DPOptimization(num_local_steps=1)
        raised = dppvi.PrivacyBudget(3.0, BUDGET.delta)
        empty = dppvi.plan_privacy(method, raised, ledger_file=LedgerFile(ledger), **arguments)
        assert not ledger.exists()
        assert empty == dppvi.plan_privacy(method, raised, **arguments)
        one_file.run(ledger_file=ledger)
        plan = dppvi.plan_privacy(method, raised, ledger_file=LedgerFile(ledger), **arguments)
        assert plan == one_file.run(ledger_file=ledger, budget=raised).plan

    def test_discrete_noise_counts_what_was_before(self):
        pytest.importorskip("opendp")
        method = dppvi.VirtualClients(num_shards=2, noise=dppvi.privacy.DiscreteGaussian())
        plan = dppvi.plan_privacy(method, BUDGET, num_rounds=2, client_sizes=[20])
        before = plan.clients[0].composition
        more = dppvi.PrivacyBudget(4.0, BUDGET.delta)
        noise = dppvi.privacy.calibrate.discrete_noise_multiplier(more, 2, before)
        event = dppvi.privacy.DiscreteGaussian().dp_event(noise)
        together = accounting.compose([*before, (event, 2)])
        assert 0.998 * 4 <= accounting.epsilon(together, BUDGET.delta, "replace_one") <= 4

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "share", [0.01, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.5, 0.99)), 0.9989]
    )
    @pytest.mark.parametrize("sampler", [dppvi.FullBatch(), dppvi.PoissonSampling(0.1)])
    def test_any_rest_is_used_and_kept(self, share, sampler):
        """However much was spent before; all of it together is accounted at once."""
        part = dppvi.PrivacyBudget(share * BUDGET.epsilon, BUDGET.delta)
        multiplier = functools.partial(
            dppvi.privacy.calibrate.noise_multiplier,
            sampler=sampler,
            num_records=1000,
            physical_size=1000,
        )
        first = multiplier(part, num_releases=10)
        before = accounting.compose([(sampler.dp_event(first, 1000, 1000), 10)])
        noise = multiplier(BUDGET, num_releases=20, before=before)
        together = accounting.compose([*before, (sampler.dp_event(noise, 1000, 1000), 20)])
        epsilon = accounting.epsilon(together, BUDGET.delta, BUDGET.relation)
        assert 0.998 * BUDGET.epsilon <= epsilon <= BUDGET.epsilon


def shuffled():
    """Answers otherwise every time that it is asked."""
    rng = np.random.default_rng(next(shuffled.seeds))
    return lambda number, num_clients: rng.choice(num_clients, (2, 1))


shuffled.seeds = itertools.count()


class TestSchedules:
    @pytest.mark.slow
    def test_a_schedule_is_asked_once_a_round(self):
        asked = []

        def schedule(number, num_clients):
            asked.append(number)
            return np.arange(num_clients)[:, None]

        for trusted in (False, True):
            asked.clear()
            synchronous = (lambda n, of: schedule(n, of).T) if trusted else schedule
            method = dppvi.VirtualClients(num_shards=2, num_local_steps=1) if trusted else None
            with contextlib.nullcontext() if trusted else dry_rounds():
                result = one_file.run(
                    schedule=synchronous,
                    trusted_aggregator=trusted,
                    **({"method": method} if method else {}),
                )
            assert asked == list(range(NUM_ROUNDS))
        dppvi.diagnose(result, num_replays=2)
        assert asked == list(range(NUM_ROUNDS))

    @pytest.mark.parametrize("seed", range(4))
    def test_who_releases_is_who_is_charged(self, seed, monkeypatch):
        """The groups that the compiled round gets, against what the ledger says."""
        visited = np.zeros(NUM_CLIENTS, int)
        rng = np.random.default_rng(seed)
        with dry_rounds(), monkeypatch.context() as patch:
            computed = rounds.run_round

            def watched(problem, params, before, shards, groups, keys, drawn):
                np.add.at(visited, np.asarray(groups).ravel(), 1)
                return computed(problem, params, before, shards, groups, keys, drawn)

            patch.setattr(rounds, "run_round", watched)
            result = one_file.run(schedule=lambda number, of: rng.choice(of, (2, 1)))
        charges = [
            sum(count for _, count in result.ledger.composition(m)) for m in range(NUM_CLIENTS)
        ]
        assert charges == visited.tolist() == [c.num_visits for c in result.plan.clients]

    def test_an_array_that_a_schedule_writes_into_again_is_copied(self):
        answer = np.zeros((1, 1), int)

        def schedule(number, num_clients):
            answer[:] = number % num_clients
            return answer

        with dry_rounds():
            result = one_file.run(schedule=schedule)
        assert [groups.tolist() for groups in result.run.groups] == [[[0]], [[1]], [[2]]]
        assert [client.num_visits for client in result.plan.clients] == [1, 1, 1]

    def test_a_resume_with_other_groups_is_refused(self, path, monkeypatch):
        with dry_rounds(), killed_at(monkeypatch, dppvi.privacy.SecretKeys, "round_key", 1):
            one_file.run(path, schedule=shuffled())
        with pytest.raises(ValueError, match="is of a run with another schedule"):
            one_file.run(path, schedule=shuffled())

    @pytest.mark.parametrize("num_rounds", [1_000_001, 10**30])
    def test_more_rounds_than_any_run_has_are_refused_at_once(self, num_rounds):
        def schedule(number, num_clients):
            pytest.fail("a round was planned")

        sizes = {"num_rounds": num_rounds, "client_sizes": [10, 10], "schedule": schedule}
        with pytest.raises(ValueError, match="num_rounds must be at most 1,000,000, got 1"):
            dppvi.plan_privacy(dppvi.DPOptimization(), BUDGET, **sizes)
        with pytest.raises(ValueError, match="num_rounds must be at most 1,000,000, got 1"):
            one_file.run(num_rounds=num_rounds, schedule=schedule)


class TestPlaces:
    def test_a_ledger_in_a_missing_folder(self, tmp_path):
        words = r"there is no folder \S+nowhere: create it first\."
        with pytest.raises(FileNotFoundError, match=words):
            one_file.run(ledger_file=tmp_path / "nowhere" / "ledger.jsonl")

    def test_a_ledger_that_is_a_folder(self, tmp_path):
        with pytest.raises(IsADirectoryError, match="is a folder: write the path of a file"):
            one_file.run(ledger_file=tmp_path)


@pytest.fixture
def signals():
    # A job in the background is started with Ctrl-C ignored, as in some CI.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals")
class TestInterrupt:
    @pytest.mark.slow
    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.parametrize("ledger", [False, True])
    def test_while_a_result_is_kept_it_waits(self, path, monkeypatch, number, ledger):
        """Twice in the middle of writing it: nothing is broken off, and the round counts."""
        original, calls = np.lib.format.write_array, []

        def pressed(*arguments, **options):
            calls.append(arguments)
            if kept_rounds(path) == number - 1 and path.exists() and len(calls) % 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return original(*arguments, **options)

        monkeypatch.setattr(np.lib.format, "write_array", pressed)
        result = run(path) if ledger else one_file.run(path)
        assert result.status.outcome is dppvi.run.Outcome.INTERRUPTED
        assert result.status.rounds == kept_rounds(path) == number
        monkeypatch.undo()
        again = run(path) if ledger else one_file.run(path)
        assert again.status.rounds == NUM_ROUNDS

    def test_before_the_first_round_it_says_that_nothing_was_released(self, path, monkeypatch):
        def pressed(*arguments):
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(planning, "plan_run", pressed)
        with pytest.raises(KeyboardInterrupt) as stopped:
            run(path)
        said = "Before a round began in this call: nothing was released or charged by it."
        assert stopped.value.__notes__ == [said]
        assert not path.with_name("ledger.jsonl").exists()


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests import test_both_files as t
count, at = [0], int(sys.argv[1])
def spy(owner, name):
    original = getattr(owner, name)
    def dies(*args, **kwargs):
        count[0] += 1
        if count[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(owner, name, dies)
spy(os, "fsync"); spy(Path, "replace"); spy(t.rounds, "run_round")
result = t.run(Path({path!r}))
print(result.status.rounds, len(result.ledger.entries), max(result.ledger.spent()))
"""


@pytest.mark.slow
def test_real_processes_that_are_killed_again_and_again(path):
    """Each dies a little later than the one before it had begun; the last one ends."""
    root = str(Path(__file__).parents[1])
    script = textwrap.dedent(SCRIPT).format(root=root, path=str(path))
    for at in itertools.count(3, 2):
        command = [sys.executable, "-c", script, str(at)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    num_rounds, entries, spent = ended.stdout.split()
    assert (int(num_rounds), int(entries)) == (NUM_ROUNDS, NUM_ROUNDS * NUM_CLIENTS)
    assert math.isclose(float(spent), BUDGET.epsilon, rel_tol=1e-6)
    assert float(spent) <= BUDGET.epsilon
    assert at > 5  # it did die before
