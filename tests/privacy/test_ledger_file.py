"""What was released is on the disk before it is released, and a file never counts too little."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import dp_accounting as dpa
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import (
    BudgetExceededError,
    Entry,
    Ledger,
    LedgerFile,
    PrivacyBudget,
    ledger_file,
)
from numpyro_dppvi.protocol import rounds
from tests.dry import dry_rounds

BUDGETS = (PrivacyBudget(1.0), PrivacyBudget(3.0, 1e-6, "add_or_remove_one"))
EVENTS = [
    dpa.GaussianDpEvent(20.0),
    dpa.GaussianDpEvent(math.pi * 1e5),
    dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(40.1)),
    dpa.SampledWithoutReplacementDpEvent(1000, 20, dpa.GaussianDpEvent(30.0)),
    dpa.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 30, 7.3),
]


def entry(client=0, event=EVENTS[0], count=1, number=0):
    return Entry(number, client, event, count)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def reopened(path, budgets=BUDGETS):
    return LedgerFile(path).open(Ledger(budgets))


class TestWhatIsWritten:
    @pytest.mark.parametrize("event", EVENTS, ids=repr)
    def test_is_read_again_to_the_last_bit(self, path, event):
        # Nothing checks these costs against a budget.
        unlimited = (PrivacyBudget(math.inf),)
        entries = [entry(0, event, 3, number) for number in range(4)]
        assert ledger_file.event_from_json(ledger_file.event_to_json(event)) == event
        file = LedgerFile(path)
        if not isinstance(event, dpa.SampledWithoutReplacementDpEvent):
            ledger = file.charge(file.open(Ledger(unlimited)), entries)
            assert ledger.entries == reopened(path, unlimited).entries == tuple(entries)

    def test_is_a_line_of_json_an_entry(self, path):
        file = LedgerFile(path)
        ledger = file.open(Ledger(BUDGETS))
        assert not path.exists()  # made when something is charged
        ledger = file.charge(ledger, [entry(0), entry(1, EVENTS[2], 5)])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[0]["schema"] == "numpyro_dppvi/ledger/2"
        assert [budget["epsilon"] for budget in lines[0]["budgets"]] == [1.0, 3.0]
        assert lines[2]["client"] == 1
        assert lines[2]["num_releases"] == 5
        assert lines[2]["event"]["PoissonSampledDpEvent"]["sampling_probability"] == 0.1

    def test_is_only_ever_added_to(self, path):
        file = LedgerFile(path)
        ledger, before = file.open(Ledger(BUDGETS)), b""
        for number in range(4):
            ledger = file.charge(ledger, [entry(number=number)])
            now = path.read_bytes()
            assert now.startswith(before)
            assert len(now) > len(before)
            before = now

    def test_is_synced_before_charge_returns(self, path, monkeypatch):
        synced = []

        def fsync(number):
            synced.append(os.fstat(number).st_size)

        monkeypatch.setattr(os, "fsync", fsync)
        file = LedgerFile(path)
        ledger = file.open(Ledger(BUDGETS))
        file.charge(ledger, [entry()])
        assert synced[-1] == path.stat().st_size

    def test_numbers_of_numpy_are_numbers(self, path):
        file = LedgerFile(path)
        event = dpa.GaussianDpEvent(np.float32(20.0))
        file.charge(
            file.open(Ledger(BUDGETS)), [Entry(np.int64(0), np.int64(1), event, np.int64(2))]
        )
        assert reopened(path).entries == (Entry(0, 1, dpa.GaussianDpEvent(20.0), 2),)

    def test_an_event_that_nobody_accounts_for_is_refused(self, path):
        file = LedgerFile(path)
        ledger = file.open(Ledger((PrivacyBudget(math.inf),)))
        with pytest.raises(TypeError):
            file.charge(ledger, [entry(0, dpa.LaplaceDpEvent(1.0))])
        assert reopened(path, ledger.budgets).entries == ()


class TestWhatCounts:
    def test_what_a_file_has_spent_counts_for_every_later_run(self, path):
        for _ in range(3):
            file = LedgerFile(path)
            ledger = file.charge(file.open(Ledger(BUDGETS)), [entry(0, count=1), entry(1)])
        np.testing.assert_array_equal(
            ledger.spent(), Ledger(BUDGETS).charge([entry(0, count=3), entry(1, count=3)]).spent()
        )
        with pytest.raises(BudgetExceededError, match="client 0's budget is used up"):
            file.charge(ledger, [entry(count=10)])

    def test_what_is_refused_is_not_written(self, path):
        file = LedgerFile(path)
        ledger = file.charge(file.open(Ledger(BUDGETS)), [entry()])
        before = path.read_bytes()
        for wrong in ([entry(1), entry(0, count=100)], [entry(5)], [entry(count=0)]):
            with pytest.raises((BudgetExceededError, ValueError)):
                file.charge(ledger, wrong)
        assert path.read_bytes() == before

    def test_two_runs_at_the_same_time_share_the_budget(self, path):
        files = [LedgerFile(path), LedgerFile(path)]
        ledgers = [file.open(Ledger(BUDGETS)) for file in files]
        granted = 0
        while granted < 100:
            turn = granted % 2
            try:
                ledgers[turn] = files[turn].charge(ledgers[turn], [entry()])
            except BudgetExceededError:
                break
            granted += 1
        # Noise 20 composes to 20 / sqrt(n) over a sensitivity of 2.
        cost = [dpa.get_epsilon_gaussian(10 / n**0.5, 1e-5) for n in (granted, granted + 1)]
        assert cost[0] <= 1 < cost[1]
        assert reopened(path).spent()[0] <= 1.0

    def test_charging_a_ledger_of_the_past_counts_both(self, path):
        file = LedgerFile(path)
        past = file.open(Ledger(BUDGETS))
        file.charge(past, [entry()])
        both = file.charge(past, [entry(number=1)])
        assert both.entries == (entry(), entry(number=1))

    def test_a_file_that_lacks_what_was_charged_is_refused(self, path):
        file = LedgerFile(path)
        ledger = file.charge(file.open(Ledger(BUDGETS)), [entry(), entry(1)])
        path.unlink()
        with pytest.raises(ValueError, match="lacks 2 entries that this run was charged"):
            LedgerFile(path).charge(ledger, [entry()])
        with pytest.raises(ValueError, match="was cut while in use"):
            file.charge(ledger, [entry()])

    def test_other_clients_relations_and_units_are_refused(self, path):
        LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        for other, words in (
            (BUDGETS[:1], "for 2 clients, got 1"),
            ((*BUDGETS, BUDGETS[0]), "for 2 clients, got 3"),
            ((), "for 2 clients, got 0"),
            (BUDGETS[::-1], "for relation='replace_one' of client 0, got 'add_or_remove_one'"),
            (
                (PrivacyBudget(1.0, unit="client"), BUDGETS[1]),
                "for unit='record' of client 0, got 'client'",
            ),
            (
                (PrivacyBudget(1.0, max_records_per_person=2), BUDGETS[1]),
                "for max_records_per_person=1 of client 0, got 2",
            ),
        ):
            for use in (LedgerFile(path).open, lambda one: LedgerFile(path).charge(one, [entry()])):
                with pytest.raises(ValueError, match=f"was made {words}: all runs on a file"):
                    use(Ledger(other))
        assert len(reopened(path).entries) == 1

    def test_other_epsilons_and_deltas_are_not_and_are_written_down(self, path):
        LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        raised = (PrivacyBudget(2.0, 1e-6), BUDGETS[1])
        for _ in range(2):
            ledger = LedgerFile(path).open(Ledger(raised))
            LedgerFile(path).charge(ledger, [entry(count=2)])
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        promised = [[b["epsilon"] for b in line["budgets"]] for line in lines if "budgets" in line]
        assert promised == [[1.0, 3.0], [2.0, 3.0]]
        with pytest.raises(BudgetExceededError, match="client 0's budget is used up"):
            LedgerFile(path).charge(Ledger(BUDGETS), [entry(count=10)])


NAMES = ("Helsinki", "Åbo 東京")


def named(names=NAMES, budgets=BUDGETS):
    return Ledger(budgets, client_names=names)


class TestNames:
    def test_are_kept_and_given_to_who_has_none(self, path):
        LedgerFile(path).charge(named(), [entry()])
        assert json.loads(path.read_text().splitlines()[0])["clients"] == list(NAMES)
        assert reopened(path).client_names == NAMES == LedgerFile(path).names(2)
        assert LedgerFile(path).names(3) == ()
        ledger = LedgerFile(path).charge(reopened(path), [entry()])
        assert ledger.client_names == NAMES
        with pytest.raises(BudgetExceededError, match="Helsinki's budget is used up"):
            LedgerFile(path).charge(Ledger(BUDGETS), [entry(count=50)])

    def test_are_added_to_a_file_without_once(self, path):
        LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        assert reopened(path).client_names == ()
        for _ in range(2):
            LedgerFile(path).charge(named(), [entry()])
            LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        assert reopened(path).client_names == NAMES
        assert path.read_text().count('"clients"') == 1
        assert len(reopened(path).entries) == 5

    def test_stay_when_a_budget_changes(self, path):
        file = LedgerFile(path)
        file.charge(named(), [entry()])
        raised = (PrivacyBudget(2.0), BUDGETS[1])
        file.charge(Ledger(raised), [entry()])
        assert reopened(path, raised).client_names == NAMES

    @pytest.mark.parametrize("others", [NAMES[::-1], ("Helsinki", "Oulu")])
    def test_of_other_clients_or_in_another_order_are_refused(self, path, others):
        """Or one client would be charged for another's releases."""
        LedgerFile(path).charge(named(), [entry()])
        before = path.read_bytes()
        for use in (LedgerFile(path).open, lambda one: LedgerFile(path).charge(one, [entry()])):
            with pytest.raises(ValueError, match=r"under the name '.*', got '.*': pass the same"):
                use(named(others))
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        "names", [NAMES[:1], (*NAMES, "Oulu"), ("Oulu", "Oulu"), ("", "a"), ("a\n", "b"), (1, 2)]
    )
    def test_that_no_file_could_keep_are_refused(self, names):
        with pytest.raises(ValueError, match="client_names must be one name for each of 2 clients"):
            named(names)

    @pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", 1], "ab", None, {"a": 1, "b": 2}])
    def test_that_were_forged_are_refused(self, path, names):
        fields = {"schema": "numpyro_dppvi/ledger/2"}
        fields |= ledger_file._of_clients(BUDGETS, ()) | {"clients": names}
        path.write_bytes(ledger_file._encoded([fields], "")[0])
        with pytest.raises(ValueError, match="is damaged"):
            reopened(path)

    def test_of_very_many_clients_are_read(self, path):
        """Also where it is not known how many there are."""
        many = (PrivacyBudget(math.inf),) * 20_000
        names = tuple(f"hospital {number} in the north" for number in range(len(many)))
        LedgerFile(path).charge(named(names, many), [entry()])
        assert reopened(path, many).client_names == names
        assert LedgerFile(path).charged_by([""]) == {0}


class TestDamage:
    @pytest.fixture
    def whole(self, path):
        file = LedgerFile(path)
        ledger = file.open(Ledger(BUDGETS))
        for number in range(2):
            ledger = file.charge(ledger, [entry(number=number), entry(1, EVENTS[2], 3, number)])
        return path.read_bytes()

    @pytest.mark.slow
    def test_a_write_that_was_cut_off_anywhere_is_survived(self, path, whole):
        """Every line that is whole counts, and the file goes on."""
        ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
        for size in {*range(0, len(whole), 13), *ends, *(end - 1 for end in ends)}:
            path.write_bytes(whole[:size])
            ledger = reopened(path)
            lines = whole[:size].count(b"\n")
            assert len(ledger.entries) >= lines - 1
            file = LedgerFile(path)
            after = file.charge(file.open(Ledger(BUDGETS)), [entry(1, number=9)])
            assert after.entries == (*ledger.entries, entry(1, number=9))
            assert reopened(path).entries == after.entries

    def test_a_whole_line_without_its_end_counts(self, path, whole):
        path.write_bytes(whole[:-1])
        assert len(reopened(path).entries) == 4

    @pytest.mark.slow
    def test_a_changed_byte_is_found(self, path, whole):
        for place in [*range(0, len(whole), 3), len(whole) - 1]:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=r"^/\S+ (is|was) .* restore the right file, or"):
                reopened(path)

    @pytest.mark.parametrize(
        "added",
        [
            b" unfinished\n",
            b" unfinished",
            b"x",
            b" ",
            b" \n",
            b",\n",
            b"}",
            b'{"run": "',
            b"\nx",
            b"\n\n",
            b'\n{"event": 1',
            b"\n{}\n",
            b"\0x",
        ],
    )
    def test_what_is_added_to_the_last_line_takes_no_charge_away(self, path, whole, added):
        """A charge counts, or the file is refused; a repair may not turn one into nothing."""
        path.write_bytes(whole[:-1] + added)
        with pytest.raises(ValueError, match=r"is damaged, so it is unknown what was spent"):
            reopened(path)
        with pytest.raises(ValueError, match="is damaged"):
            LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        assert path.read_bytes() == whole[:-1] + added

    @pytest.mark.parametrize("left", [0, 1, 9, 40])
    def test_what_a_loss_of_power_leaves_is_repaired(self, path, whole, left):
        """A part of a line, and zeros where the disk had not got the rest."""
        path.write_bytes(whole + b'{"run": "", "client": 0, "round": 7, "num_'[:left] + b"\0" * 50)
        assert len(reopened(path).entries) == 4
        LedgerFile(path).charge(Ledger(BUDGETS), [entry(number=7)])
        assert len(reopened(path).entries) == 5

    def test_a_header_that_was_left_unfinished_binds_nobody(self, path):
        """Nothing was charged under it, so that a run with another budget may begin."""
        LedgerFile(path).charge(Ledger(BUDGETS), [entry()])
        header = path.read_bytes().split(b"\n")[0]
        for size in (1, 20, len(header) // 2, len(header) - 1):
            path.write_bytes(header[:size])
            LedgerFile(path).charge(Ledger(BUDGETS[::-1]), [entry(1)])
            assert reopened(path, BUDGETS[::-1]).entries == (entry(1),)

    def test_a_line_that_is_missing_moved_or_doubled_is_found(self, path, whole):
        header, *lines = whole.splitlines(keepends=True)
        for other in (lines[1:], [*lines[:2], lines[3], lines[2]], [*lines, lines[3]]):
            path.write_bytes(header + b"".join(other))
            with pytest.raises(ValueError, match="is damaged"):
                reopened(path)

    @pytest.mark.parametrize(
        "content",
        [b"hello", b"hello\n", b"{}\n", b"[1]\n", b'{"schema": "another"}\n', b"\xff\xfe\n", b"\n"],
    )
    def test_a_file_of_something_else_is_refused_and_left_alone(self, path, content):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match="is not a ledger file, so it is unknown what was spent"
        ) as refusal:
            reopened(path)
        assert "\n" not in str(refusal.value)
        assert path.read_bytes() == content

    def test_a_folder_that_does_not_exist_is_an_error_before_anything_is_charged(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            reopened(tmp_path / "nowhere" / "ledger")


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def fit(path, method=None, num_rounds=2, budget=BUDGETS[0], **options):
    return dppvi.fit(
        normal_mean,
        None,
        {"y": np.linspace(-1, 1, 12)},
        rng_key=jax.random.key(0),
        clients=2,
        method=method or dppvi.DPOptimization(num_local_steps=2),
        budget=budget,
        num_rounds=num_rounds,
        progress_bar=False,
        ledger_file=path,
        **options,
    )


class TestFit:
    @pytest.mark.parametrize("method", [None, dppvi.VirtualClients(2), dppvi.GlobalVI()])
    def test_every_round_is_on_the_disk_before_it_runs(self, path, method, monkeypatch):
        counted = []

        def watched(*arguments):
            counted.append(len(LedgerFile(path).open(Ledger((PrivacyBudget(1.0),) * 2)).entries))
            return step(*arguments)

        with dry_rounds(), monkeypatch.context() as patch:
            step = rounds.run_round
            patch.setattr(rounds, "run_round", watched)
            result = fit(path, method, trusted_aggregator=isinstance(method, dppvi.GlobalVI))
        assert counted == [2, 4]
        assert len(result.ledger.entries) == 4

    def test_a_second_run_on_the_same_file_finds_the_budget_spent(self, path, monkeypatch):
        with dry_rounds():
            fit(path)

        def run(*arguments):
            raise AssertionError("something was computed")

        monkeypatch.setattr(rounds, "run_round", run)
        with pytest.raises(BudgetExceededError, match="client 0's budget is used up"):
            fit(path)

    @pytest.mark.slow
    def test_nothing_is_released_if_the_disk_does_not_take_it(self, path, monkeypatch):
        with dry_rounds():
            fit(path, num_rounds=1, budget=PrivacyBudget(0.3))
        ran = []
        monkeypatch.setattr(rounds, "run_round", lambda *arguments: ran.append(arguments))

        def fsync(number):
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="no space left"):
            fit(path, budget=PrivacyBudget(0.5))
        assert ran == []

    def test_without_privacy_there_is_nothing_to_keep(self, path):
        with pytest.raises(ValueError, match="ledger_file keeps what a private method releases"):
            fit(path, dppvi.NonPrivate(), budget=None)
        assert not path.exists()


def killed(tmp_path, run, *places):
    """Runs killed.py; asserts that every run was killed once and that nothing is missing."""
    script = Path(__file__).with_name("killed.py")
    command = [sys.executable, str(script), str(tmp_path), run, *places]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    report = [line.split("\t") for line in process.stdout.splitlines()]
    assert all(signals == ["9", "0"] for _, *signals in report), process.stdout
    for place, *_ in report:
        budgets = (PrivacyBudget(1.0),) * 2
        ledger = LedgerFile(tmp_path / place / "ledger").open(Ledger(budgets))
        released = [int(n) for n in (tmp_path / place / "released").read_text().split()]
        for client in range(2):
            counted = sum(e.num_releases for e in ledger.entries if e.client == client)
            assert counted >= sum(released), place
            # At most the round that was under way is counted and was not released.
            assert counted <= sum(released) + 2, place
        assert len(released) >= 2
        assert np.all(ledger.spent() <= 1.0)
    return [place for place, *_ in report]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
class TestKilledProcesses:
    @pytest.mark.slow
    def test_at_every_place_of_a_charge(self, tmp_path):
        assert len(killed(tmp_path, "charges")) == 6

    # test_both_files.py stops whole runs at every moment without a process for each.
    @pytest.mark.slow
    def test_in_the_middle_of_a_release_of_a_whole_run(self, tmp_path):
        assert killed(tmp_path, "fit", "releasing") == ["releasing"]

    @pytest.mark.slow
    def test_at_every_place_of_a_whole_run(self, tmp_path):
        assert len(killed(tmp_path, "fit")) == 6
