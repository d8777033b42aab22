"""The ledger counts every release, forgets none, and refuses before it charges."""

import dataclasses
import itertools
import math
import pickle
import re

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dppvi.privacy import (
    BudgetExceededError,
    Entry,
    GaussianSum,
    Ledger,
    PoissonSampling,
    PrivacyBudget,
    accounting,
)
from numpyro_dppvi.privacy import ledger as ledger_module
from numpyro_dppvi.privacy.plan import ClientPlan, PrivacyPlan, of_changes, of_gradients
from tests.grids import grid

BUDGET = PrivacyBudget(1.0, 1e-5)


def gaussian(noise):
    return dpa.GaussianDpEvent(noise)


def entry(client=0, noise=20.0, releases=1, round_number=0):
    return Entry(round_number, client, gaussian(noise), releases)


def closed_form(entries, delta=1e-5, sensitivity=2):
    squared = sum(e.num_releases * (sensitivity / e.event.noise_multiplier) ** 2 for e in entries)
    return dpa.get_epsilon_gaussian(1 / math.sqrt(squared), delta) if squared else 0.0


class TestValue:
    def test_charging_makes_a_new_ledger(self):
        empty = Ledger(budgets=(BUDGET, BUDGET))
        first = empty.charge([entry(0)])
        second = first.charge([entry(1), entry(0, round_number=1)])
        assert empty.entries == ()
        assert first.entries == (entry(0),)
        assert second.entries == (entry(0), entry(1), entry(0, round_number=1))
        assert first.charge([]) == first

    def test_cannot_be_changed(self):
        ledger = Ledger(budgets=(BUDGET,)).charge([entry()])
        for field in dataclasses.fields(Ledger):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(ledger, field.name, ())
            assert isinstance(getattr(ledger, field.name), tuple | str)
        with pytest.raises(AttributeError):
            ledger.entries[0].num_releases = 0

    def test_takes_entries_one_by_one(self):
        # A generator is read once only.
        ledger = Ledger(budgets=(BUDGET,)).charge(entry(round_number=r) for r in range(3))
        assert [e.round for e in ledger.entries] == [0, 1, 2]


class TestSpent:
    def test_is_each_clients_own_cost(self):
        budgets = (
            PrivacyBudget(1.0, 1e-5),
            PrivacyBudget(3.0, 1e-3),
            PrivacyBudget(2.0, 1e-6, "add_or_remove_one"),
            PrivacyBudget(1.0, 1e-5),
        )
        mine = [
            [entry(0, 40.0, 10), entry(0, 30.0, 2)],
            [entry(1, 8.0, 3)],
            [entry(2, 20.0, 7)],
            [],
        ]
        ledger = Ledger(budgets).charge(itertools.chain(*mine))
        expected = [
            closed_form(mine[0]),
            closed_form(mine[1], 1e-3),
            closed_form(mine[2], 1e-6, sensitivity=1),
            0.0,
        ]
        np.testing.assert_allclose(ledger.spent(), expected, rtol=1e-9)
        at_delta = [closed_form(es, 1e-4, 1 if m == 2 else 2) for m, es in enumerate(mine)]
        np.testing.assert_allclose(ledger.spent(delta=1e-4), at_delta, rtol=1e-9)

    def test_does_not_depend_on_the_order_of_entries(self):
        charges = [
            Entry(0, 0, dpa.PoissonSampledDpEvent(0.1, gaussian(8.0)), 40),
            entry(0, 40.0, 3),
            entry(0, 60.0, 2),
            entry(0, 40.0, 1),
        ]
        costs = set()
        for order in itertools.permutations(charges):
            ledger = Ledger((PrivacyBudget(5.0),))
            for charge in order:
                ledger = ledger.charge([charge])
            costs.add(float(ledger.spent()[0]))
        assert costs == {float(Ledger((PrivacyBudget(5.0),)).charge(charges).spent()[0])}

    def test_of_no_clients_is_empty(self):
        assert Ledger().spent().shape == (0,)


class TestCounting:
    def test_a_charge_costs_what_it_adds(self, monkeypatch):
        # Not what was charged before: a long run of many clients would take forever.
        counted, compose = [], accounting.compose

        def recorded(events):
            events = list(events)
            counted.append(len(events))
            return compose(events)

        ledger = Ledger((PrivacyBudget(50.0),) * 3)
        monkeypatch.setattr(accounting, "compose", recorded)
        for number in range(100):
            ledger = ledger.charge(entry(m, 40.0, round_number=number) for m in range(3))
        assert max(counted) == 2
        assert ledger.composition(1) == {(gaussian(40.0), 100)}

    @settings(max_examples=50)
    @given(
        st.lists(
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([20.0, 30.0])), max_size=4),
            max_size=6,
        )
    )
    def test_the_running_count_is_that_of_the_entries(self, charges):
        ledger = Ledger((PrivacyBudget(50.0),) * 3)
        for number, charge in enumerate(charges):
            ledger = ledger.charge(entry(m, noise, round_number=number) for m, noise in charge)
        afresh = Ledger(ledger.budgets, entries=ledger.entries)
        assert afresh == ledger
        for client in range(3):
            assert afresh.composition(client) == ledger.composition(client)

    def test_a_refused_charge_leaves_no_trace_in_it(self):
        ledger = Ledger((BUDGET,)).charge([entry()])
        with pytest.raises(BudgetExceededError):
            ledger.charge([entry(noise=1.0)])
        assert ledger.composition(0) == {(gaussian(20.0), 1)}

    def test_a_changed_copy_counts_afresh(self):
        ledger = Ledger((PrivacyBudget(50.0),)).charge([entry(), entry()])
        shorter = dataclasses.replace(ledger, entries=ledger.entries[:1])
        assert shorter.composition(0) == {(gaussian(20.0), 1)}
        copied = pickle.loads(pickle.dumps(ledger))
        assert copied == ledger
        assert copied.composition(0) == ledger.composition(0)


class TestRefusal:
    def test_names_the_client_what_it_would_reach_and_its_budget(self):
        ledger = Ledger((PrivacyBudget(5.0), PrivacyBudget(0.75, 1e-6))).charge([entry(1, 20.0)])
        too_much = entry(1, 20.0, 50)
        reached = closed_form([entry(1, 20.0), too_much], 1e-6)
        with pytest.raises(BudgetExceededError) as refusal:
            ledger.charge([entry(0), too_much])
        sentence = str(refusal.value)
        assert sentence.startswith("client 1's budget is used up")
        assert f"{reached:.6g} of 0.75 at delta = 1e-06" in sentence
        assert "\n" not in sentence

    def test_charges_nothing_at_all(self):
        ledger = Ledger((PrivacyBudget(5.0), PrivacyBudget(0.1)))
        with pytest.raises(BudgetExceededError):
            ledger.charge([entry(0), entry(1, 1.0)])
        assert ledger.entries == ()
        assert not ledger.spent().any()
        # What fits may still be charged, and what does not is still refused.
        ledger = ledger.charge([entry(0)])
        for _ in range(2):
            with pytest.raises(BudgetExceededError):
                ledger.charge([entry(1, 1.0)])
        assert ledger.entries == (entry(0),)

    def test_adds_up_within_one_charge(self):
        one = PrivacyBudget(closed_form([entry()]) * 1.001)
        Ledger((one,)).charge([entry()])
        with pytest.raises(BudgetExceededError):
            Ledger((one,)).charge([entry(), entry()])
        with pytest.raises(BudgetExceededError):
            Ledger((one,)).charge([entry()]).charge([entry(round_number=1)])

    def test_of_a_release_without_noise(self):
        with pytest.raises(BudgetExceededError, match="epsilon = inf of 1 "):
            Ledger((BUDGET,)).charge([entry(noise=0.0)])
        unlimited = Ledger((PrivacyBudget(math.inf),)).charge([entry(noise=0.0)])
        assert unlimited.spent() == [math.inf]

    @pytest.mark.parametrize("noise", [math.nan, -20.0])
    def test_of_noise_that_is_no_number_of_deviations(self, noise):
        with pytest.raises(BudgetExceededError, match="epsilon = inf of 1 "):
            Ledger((BUDGET,)).charge([entry(noise=noise)])

    @pytest.mark.parametrize("client", [-1, 2, 10])
    def test_of_a_client_without_a_budget(self, client):
        with pytest.raises(ValueError, match=f"client must be a number from 0 to 1, got {client}"):
            Ledger((BUDGET, BUDGET)).charge([entry(client)])

    @pytest.mark.parametrize("releases", [0, -5, 1.5, True])
    def test_of_less_than_one_release(self, releases):
        # A negative number would take back what was charged.
        ledger = Ledger((BUDGET,)).charge([entry(releases=6)])
        with pytest.raises(ValueError, match="num_releases must be a whole number of at least 1"):
            ledger.charge([entry(releases=releases)])


def plans():
    """Plans of full and sampled batches and of shards, for two clients with unequal budgets."""
    budgets = [PrivacyBudget(1.0), PrivacyBudget(3.0, 1e-6, "add_or_remove_one")]
    arguments = {"num_visits": [5, 2], "client_sizes": [300, 500]}
    sampler = PoissonSampling(0.1)
    return {
        "shards": of_changes(
            [budgets[0], PrivacyBudget(3.0, 1e-6)],
            clip_norm=2.0,
            num_shards=[3, 7],
            averaged=True,
            **arguments,
        ),
        "sampled": of_gradients(budgets, sampler, clip_norm=2.0, releases_per_visit=4, **arguments),
    }


class TestAffordable:
    """The plan spares the accountant work; it never lets through what would be refused."""

    @grid("name", ["shards", "sampled"], quick=[0])
    def test_a_whole_plan_can_be_carried_out_and_not_more(self, name):
        plan = plans()[name]
        ledger = plan.ledger()
        for client, mine in enumerate(plan.clients):
            for visit in range(mine.num_visits):
                event = mine.mechanism.dp_event
                ledger = ledger.charge([Entry(visit, client, event, mine.releases_per_visit)])
        np.testing.assert_array_equal(ledger.spent(), plan.epsilons)
        for client, mine in enumerate(plan.clients):
            with pytest.raises(BudgetExceededError, match=f"client {client}'s"):
                ledger.charge([Entry(9, client, mine.mechanism.dp_event, mine.num_releases)])

    def test_the_accountant_is_not_asked_about_parts_of_a_plan(self, monkeypatch):
        plan = plans()["sampled"]
        ledger, asked = plan.ledger(), set()
        epsilon = accounting.epsilon

        def recorded(composition, *arguments):
            asked.add(composition)
            return epsilon(composition, *arguments)

        monkeypatch.setattr(accounting, "epsilon", recorded)
        ledger_module._is_planned.cache_clear()  # of what other tests have asked
        event = plan.clients[0].mechanism.dp_event
        for visit in range(5):
            ledger = ledger.charge([Entry(visit, 0, event, 4)])
        assert asked == {plan.clients[0].composition}

    @pytest.mark.slow
    @settings(max_examples=60)
    @given(
        st.lists(st.tuples(st.sampled_from([15.0, 20.0, 30.0]), st.integers(1, 8)), max_size=4),
        st.lists(
            st.tuples(st.sampled_from([15.0, 20.0, 30.0]), st.integers(1, 8)),
            min_size=1,
            max_size=5,
        ),
        st.floats(0.2, 3.0),
    )
    def test_never_admits_what_the_accountant_would_refuse(self, planned, charges, epsilon):
        # Whether or not the plan itself keeps to the budget.
        budget = PrivacyBudget(epsilon)
        affordable = accounting.compose((gaussian(noise), count) for noise, count in planned)
        quick, thorough = Ledger((budget,), (affordable,)), Ledger((budget,))
        for number, (noise, count) in enumerate(charges):
            charge = [entry(0, noise, count, number)]
            try:
                thorough = thorough.charge(charge)
            except BudgetExceededError:
                with pytest.raises(BudgetExceededError):
                    quick.charge(charge)
            else:
                quick = quick.charge(charge)
            assert quick.spent() == thorough.spent() <= epsilon

    def test_a_plan_beyond_its_budget_opens_no_door(self):
        # Written by hand: nothing calibrated this noise.
        weak = GaussianSum(1.0, 0.5, PoissonSampling(0.1), 100, 100)
        plan = PrivacyPlan((ClientPlan(BUDGET, weak, 10, 1),))
        assert plan.epsilons[0] > BUDGET.epsilon
        with pytest.raises(BudgetExceededError):
            plan.ledger().charge([Entry(0, 0, weak.dp_event, 10)])


def test_a_refusal_never_shows_equal_numbers():
    # A hair too much must not read "epsilon = 1 of 1".
    exact = closed_form([entry()])
    budget = PrivacyBudget(round(exact * (1 - 1e-5), 9))
    with pytest.raises(BudgetExceededError) as refusal:
        Ledger((budget,)).charge([entry()])
    reached, of = re.search(r"epsilon = (\S+) of (\S+) at", str(refusal.value)).groups()
    assert float(reached) > float(of)


def test_it_prints_what_each_client_has_spent():
    ledger = Ledger((BUDGET, PrivacyBudget(2.0, 1e-6)), client_names=("Helsinki", "Turku"))
    ledger = ledger.charge([entry(releases=2), entry(releases=1, round_number=3)])
    header, *rows = (line.split() for line in str(ledger).splitlines()[1:])
    assert header == ["client", "rounds", "releases", "epsilon", "of", "budget", "delta"]
    # Rounded up, as in plan and statement.
    spent = math.ceil(ledger.spent()[0] * 1e4) / 1e4
    assert rows == [
        ["Helsinki", "2", "3", f"{spent:.4f}", "1", "1e-05"],
        ["Turku", "0", "0", "0.0000", "2", "1e-06"],
    ]
    assert f">{spent:.4f}</td>" in ledger._repr_html_()


def test_in_a_notebook_or_a_debugger_it_is_a_line():
    ledger = Ledger((PrivacyBudget(epsilon=1.0),) * 200)
    assert repr(ledger) == "Ledger(clients=200, entries=0, run='')"
