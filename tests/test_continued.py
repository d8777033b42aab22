"""Runs that are continued under a larger budget: what they cost, and that they are one run."""

import json
import math
import os
from pathlib import Path

import dp_accounting as dpa
import jax
import numpy as np
import optax
import pytest
from dp_accounting import NeighboringRelation, pld

import numpyro_dppvi as dppvi
from numpyro_dppvi import _files
from numpyro_dppvi.analysis import plots, replay
from numpyro_dppvi.privacy import BudgetExceededError, LedgerFile, SecretKeys, statement_schema
from numpyro_dppvi.protocol import recommendation
from tests.dry import dry_rounds
from tests.grids import grid
from tests.privacy.test_plan_and_statement import faults
from tests.test_checkpoint import (
    METHODS,
    NUM_CLIENTS,
    assert_same,
    header,
    killed_at,
    other_means,
    records,
    run,
)

SMALL, LARGE = dppvi.PrivacyBudget(1.0, 1e-5), dppvi.PrivacyBudget(2.0, 1e-5)
FIRST, MORE = 2, 3
ALL = FIRST + MORE


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.npz"


def begin(path, **changes):
    return run(path, **{"budget": SMALL, "num_rounds": FIRST, **changes})


def go_on(path, **changes):
    return run(path, **{"budget": LARGE, "num_rounds": ALL, **changes})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of a run that has ended."""
    path = tmp_path_factory.mktemp("written") / "run.npz"
    begin(path)
    return path


@pytest.fixture
def ended(written, path):
    """A copy of it."""
    path.write_bytes(written.read_bytes())
    return path


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run that was continued at once."""
    path = tmp_path_factory.mktemp("unbroken") / "run.npz"
    begin(path)
    return go_on(path)


def noises(result):
    return [part.clients[0].mechanism.noise_multiplier for part in result.plan.parts]


def gaussian(noise, counts, delta=1e-5):
    """Epsilon of Gaussian releases under replace-one: squared distances of the means add up."""
    mu = math.sqrt(sum(n * (2 / z) ** 2 for z, n in zip(noise, counts, strict=True)))
    return dpa.get_epsilon_gaussian(1 / mu, delta)


class TestWhatItCosts:
    def test_old_and_new_noise_spend_the_raised_budget_together(self, ended, unbroken):
        first = begin(ended)
        old, new = noises(unbroken)
        assert [old] == noises(first)  # what was released keeps its noise
        by_hand = gaussian([old, new], [FIRST, MORE])
        assert 0.999 * LARGE.epsilon <= by_hand <= LARGE.epsilon
        np.testing.assert_allclose(unbroken.ledger.spent(), by_hand, rtol=1e-9)
        np.testing.assert_allclose(unbroken.plan.epsilons, by_hand, rtol=1e-9)
        # The distance that is left for three rounds: mu(2)^2 - mu(1)^2, shared out.
        small, large = (1 / dpa.get_sigma_gaussian(b.epsilon, b.delta) for b in (SMALL, LARGE))
        np.testing.assert_allclose(new, 2 * math.sqrt(MORE / (large**2 - small**2)), rtol=1e-6)

    def test_each_round_is_charged_with_its_own_noise(self, unbroken):
        old, new = noises(unbroken)
        found = [
            (entry.round, entry.event.noise_multiplier, entry.num_releases)
            for entry in unbroken.ledger.entries
            if entry.client == 1
        ]
        assert found == [(r, old if r < FIRST else new, 1) for r in range(ALL)]

    def test_twice(self, ended):
        go_on(ended)
        larger = dppvi.PrivacyBudget(3.0, 2e-5)
        result = go_on(ended, budget=larger, num_rounds=ALL + 1)
        by_hand = gaussian(noises(result), [FIRST, MORE, 1], larger.delta)
        assert 0.999 * 3 <= by_hand <= 3
        np.testing.assert_allclose(result.ledger.spent(), by_hand, rtol=1e-9)
        with killed_at(pytest.MonkeyPatch(), SecretKeys, "round_key", 0) as calls:
            assert_same(result, go_on(ended, budget=larger, num_rounds=ALL + 1))
        assert not calls

    @pytest.mark.slow
    def test_sampled_batches_are_composed_by_the_accountant(self, path):
        method = dppvi.DPOptimization(num_local_steps=1, sampler=dppvi.PoissonSampling(0.5))
        begin(path, method=method)
        result = go_on(path, method=method)
        accountant = pld.PLDAccountant(NeighboringRelation.REPLACE_ONE)
        for part, rounds in zip(result.plan.parts, (FIRST, MORE), strict=True):
            accountant.compose(part.clients[0].mechanism.dp_event, rounds)
        by_hand = accountant.get_epsilon(LARGE.delta)
        assert by_hand == pytest.approx(2.0, rel=2e-3)
        np.testing.assert_allclose(result.ledger.spent(), by_hand, rtol=1e-3)

    @pytest.mark.slow
    def test_budgets_of_clients(self, path):
        begin(path, budget=[SMALL, SMALL, LARGE])
        budgets = [LARGE, dppvi.PrivacyBudget(4.0), dppvi.PrivacyBudget(2.5)]
        spent = go_on(path, budget=budgets).ledger.spent()
        np.testing.assert_allclose(spent, [2, 4, 2.5], rtol=1e-3)
        assert all(spent <= [2, 4, 2.5])

    @pytest.mark.slow
    def test_an_aggregate(self, path):
        together = {
            "method": dppvi.FisherScoring(2),
            "schedule": dppvi.synchronous,
            "trusted_aggregator": True,
        }
        begin(path, **together)
        result = go_on(path, **together)
        by_hand = gaussian(noises(result), [FIRST, MORE])
        np.testing.assert_allclose(result.ledger.spent(), by_hand, rtol=1e-9)
        assert 0.999 * 2 <= by_hand <= 2

    def test_a_ledger_file_counts_other_runs_between(self, path):
        ledger = path.with_name("ledger.jsonl")
        first = begin(path, ledger_file=ledger)
        other = run(None, budget=dppvi.PrivacyBudget(1.5), num_rounds=1, ledger_file=ledger)
        result = go_on(path, ledger_file=ledger)
        old, new = noises(result)
        assert [old] == noises(first)
        by_hand = gaussian([old, *noises(other), new], [FIRST, 1, MORE])
        assert 0.999 * 2 <= by_hand <= 2
        np.testing.assert_allclose(result.ledger.spent(), by_hand, rtol=1e-9)
        spent = LedgerFile(ledger).spent([LARGE] * NUM_CLIENTS)
        assert spent == tuple(result.ledger.composition(m) for m in range(NUM_CLIENTS))
        before = result.privacy_statement().as_dict()["clients"][0]["epsilon_spent_before"]
        np.testing.assert_allclose(before, gaussian(noises(other), [1]), rtol=1e-9)

    def test_its_charge_is_on_the_disk_before_a_round_starts(self, ended, monkeypatch):
        original, seen = SecretKeys.round_key, []

        def spy(keys, number):
            facts = header(ended)
            releases = sum(row["releases"] for row in facts["charged"])
            seen.append((number, facts["charged_rounds"], releases))
            return original(keys, number)

        monkeypatch.setattr(SecretKeys, "round_key", spy)
        go_on(ended)
        assert seen == [(r, r + 1, (r + 1) * NUM_CLIENTS) for r in range(FIRST, ALL)]

    def test_the_statement_says_both(self, unbroken):
        statement = unbroken.privacy_statement()
        old, new = unbroken.plan.parts
        said = " ".join(str(statement).split())
        assert (
            f"goes on after rounds 1 to {FIRST} (noise std {old.noise_std[0]:.4g}, under a budget "
            f"of at most epsilon = 1.0000); the noise above is that of round {FIRST + 1} and later"
        ) in said
        assert f"{new.noise_std[0]:.4g}" in said
        assert "goes on after rounds" in str(unbroken.plan)
        facts = json.loads(statement.to_json())
        assert faults(facts, statement_schema()) == []
        (earlier,) = facts["clients"][2]["earlier_rounds"]
        assert earlier == {
            "first_round": 1,
            "last_round": FIRST,
            "releases": FIRST,
            "noise_multiplier": old.clients[2].mechanism.noise_multiplier,
            "noise_std": old.clients[2].mechanism.noise_std,
            "epsilon_budget": 1.0,
            "delta": 1e-5,
        }
        assert facts["clients"][2]["releases"] == ALL

    def test_a_run_that_was_not_continued_says_nothing_of_it(self, ended):
        facts = begin(ended).privacy_statement().as_dict()
        assert "earlier_rounds" not in facts["clients"][0]


WITHOUT_NOISE = {
    "NonPrivate": {"method": dppvi.NonPrivate(num_local_steps=1), "budget": None},
    "DPOptimization": {
        "method": dppvi.DPOptimization(num_local_steps=1, optimizer=optax.sgd(1e-3)),
        "budget": dppvi.PrivacyBudget(math.inf),
    },
    "GlobalVI": {
        "method": dppvi.GlobalVI(optimizer=optax.adam(0.02)),
        "budget": dppvi.PrivacyBudget(math.inf),
        "trusted_aggregator": True,
    },
}


@pytest.mark.slow
@grid("name", WITHOUT_NOISE, quick=[1])
def test_without_noise_the_parts_are_one_run(path, name):
    begin(path, **WITHOUT_NOISE[name])
    parts = go_on(path, **WITHOUT_NOISE[name])
    whole = go_on(None, **WITHOUT_NOISE[name])
    jax.tree.map(np.testing.assert_array_equal, parts.history, whole.history)
    assert str(parts.status) == str(whole.status)


# As in test_checkpoint: in a round, before and after a file is flushed and moved.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        *((SecretKeys, "round_key", call) for call in range(MORE)),
        *((os, "fsync", call) for call in range(0, 2 * MORE + 1, 2)),
        *((Path, "replace", call) for call in range(MORE + 1)),
        *((_files, "flush_folder", call) for call in range(MORE + 1)),
    ],
)
def test_a_continued_run_that_is_killed_ends_as_if_it_had_not_been(
    ended, unbroken, monkeypatch, owner, name, call
):
    with killed_at(monkeypatch, owner, name, call) as calls:
        go_on(ended)
    assert len(calls) == call + 1  # it did die
    assert header(ended)["charged_rounds"] >= header(ended)["round"]
    assert_same(go_on(ended), unbroken)


@pytest.mark.parametrize("call", range(MORE))
def test_killed_with_a_ledger_file_no_round_is_charged_twice(path, monkeypatch, call):
    ledger = path.with_name("ledger.jsonl")
    begin(path, ledger_file=ledger)
    with killed_at(monkeypatch, SecretKeys, "round_key", call):
        go_on(path, ledger_file=ledger)
    result = go_on(path, ledger_file=ledger)
    np.testing.assert_allclose(
        result.ledger.spent(), gaussian(noises(result), [FIRST, MORE]), rtol=1e-9
    )
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert sum("event" in line for line in lines) == ALL * NUM_CLIENTS


class TestRefusals:
    @pytest.mark.parametrize(
        ("budget", "words"),
        [
            (dppvi.PrivacyBudget(0.9), "epsilon = 0.9 at delta = 1e-05 for client 0 after 1 at"),
            (dppvi.PrivacyBudget(2.0, 1e-6), "epsilon = 2 at delta = 1e-06 for client 0 after 1"),
            ([LARGE, LARGE, dppvi.PrivacyBudget(0.5)], "epsilon = 0.5 .* for client 2 after 1 at"),
        ],
    )
    def test_less_than_before(self, ended, budget, words):
        with pytest.raises(ValueError, match=f"must not be smaller than that of .* got {words}"):
            go_on(ended, budget=budget)

    @pytest.mark.parametrize(
        "budget",
        [
            dppvi.PrivacyBudget(2.0, relation="add_or_remove_one"),
            dppvi.PrivacyBudget(2.0, max_records_per_person=2),
        ],
    )
    def test_another_unit(self, ended, budget):
        with pytest.raises(ValueError, match="must protect the same unit under the same relation"):
            go_on(ended, budget=budget)

    def test_what_is_used_up(self, ended):
        words = "client 0's budget is used up: what was released before, by this run too, has spent"
        with pytest.raises(BudgetExceededError, match=f"{words} epsilon = 1 of 1 at delta"):
            go_on(ended, budget=SMALL)

    @pytest.mark.slow
    def test_fewer_rounds(self, ended):
        words = r"another number of rounds: it has 2, and this call 1; .* can be continued by more"
        with pytest.raises(ValueError, match=words):
            go_on(ended, num_rounds=1)
        go_on(ended)
        with pytest.raises(ValueError, match="another number of rounds: it has 5, and this call 2"):
            begin(ended)

    def test_no_more_rounds(self, ended):
        with pytest.raises(ValueError, match="under a larger one, with a larger num_rounds"):
            go_on(ended, num_rounds=FIRST)

    def test_before_it_has_ended(self, path, monkeypatch):
        with killed_at(monkeypatch, SecretKeys, "round_key", 1):
            begin(path)
        with pytest.raises(
            ValueError, match=r"it has 2, and this call 5; .* all its rounds have run"
        ):
            go_on(path)

    @grid(
        ("name", "changes"),
        [
            ("model", {"model": other_means}),
            ("data shape", {"data": records(num_rows=15)}),
            ("data shape", {"clients": 4}),
            ("method", {"method": dppvi.DPOptimization(num_local_steps=1, clip_norm=3.0)}),
            ("method", {"method": dppvi.NonPrivate(), "budget": None}),
            ("schedule", {"schedule": dppvi.synchronous}),
            ("damping", {"damping": 0.5}),
            ("rng_key", {"rng_key": jax.random.key(1)}),
            ("ledger file", {"ledger_file": "ledger.jsonl"}),
        ],
        quick=[3, 4, 5, 6, 7, 8],
    )
    def test_another_run(self, ended, name, changes):
        if "ledger_file" in changes:
            changes = {"ledger_file": ended.with_name("ledger.jsonl")}
        words = f"is of a run with another {name}: it has .*, and this call "
        with pytest.raises(ValueError, match=words):
            go_on(ended, **changes)

    def test_another_method_is_named_before_the_budget(self, ended):
        with pytest.raises(ValueError, match="is of a run with another method"):
            go_on(ended, method=dppvi.GlobalVI(), trusted_aggregator=True, budget=SMALL)

    @pytest.mark.slow
    def test_with_privacy_what_had_none(self, path):
        with dry_rounds():
            begin(path, method=dppvi.NonPrivate(num_local_steps=1), budget=None)
        with pytest.raises(ValueError, match="is of a run with another method"):
            go_on(path)

    def test_what_clients_kept_is_gone(self, path):
        with dry_rounds():
            begin(path, **METHODS["VirtualClients"])
        with pytest.raises(ValueError, match="cannot be continued: what its clients kept to them"):
            go_on(path, **METHODS["VirtualClients"])

    @pytest.mark.parametrize(
        "parts",
        [
            [],
            [{}],
            [{"rounds": 2, "budgets": [], "before": []}] * 2,
            [{"rounds": True, "budgets": [], "before": []}],
            [{"rounds": 2, "budgets": [{"epsilon": -1}], "before": []}],
            [{"rounds": 2, "budgets": [], "before": [[[1, 2]]]}],
        ],
    )
    def test_a_damaged_file(self, ended, parts):
        facts, arrays = _files.read(ended, "checkpoint")
        _files.write(ended, "checkpoint", facts | {"parts": parts}, arrays)
        with pytest.raises(ValueError, match="it does not say what it was planned from"):
            go_on(ended)

    @pytest.mark.parametrize("epsilon", [0.5, 1.5])
    def test_a_file_whose_first_budget_was_changed(self, ended, epsilon):
        facts, arrays = _files.read(ended, "checkpoint")
        facts["parts"][0]["budgets"][0]["epsilon"] = epsilon
        _files.write(ended, "checkpoint", facts, arrays)
        with pytest.raises(ValueError, match="is of a run with another budget"):
            go_on(ended)


@pytest.mark.slow
def test_the_method_that_was_recommended_for_the_first_budget_stays(path, monkeypatch):
    original, asked = recommendation.of_space, []

    def recommended(*args, budgets, **kwargs):
        asked.append(set(budgets))
        return original(*args, budgets=budgets, **kwargs)

    monkeypatch.setattr(recommendation, "of_space", recommended)
    with dry_rounds():
        begin(path, method=None)
        result = go_on(path, method=None)
    assert asked == [{SMALL}, {SMALL}]
    with pytest.raises(ValueError, match="is of a run with another data shape"):
        go_on(path, method=None, clients=4)
    assert result.ledger.spent() == pytest.approx([2.0] * NUM_CLIENTS, rel=1e-3)


def test_replays_and_plots_know_the_noise_of_each_round(unbroken):
    again = replay.replay_of(unbroken, jax.random.key(0))
    old, new = (part.noise_std[0] for part in unbroken.plan.parts)
    found = [float(params.clients.noise_std[0]) for params in again.params]
    np.testing.assert_allclose(found, [old] * FIRST + [new] * MORE, rtol=1e-6)
    at, ((budget, numbers, curve),) = plots._curves(unbroken)
    assert (at.tolist(), budget, numbers) == (list(range(ALL + 1)), LARGE, list(range(NUM_CLIENTS)))
    by_hand = [0.0] + [
        gaussian(noises(unbroken), [min(r, FIRST), max(0, r - FIRST)]) for r in range(1, ALL + 1)
    ]
    np.testing.assert_allclose(curve, by_hand, rtol=1e-9)
