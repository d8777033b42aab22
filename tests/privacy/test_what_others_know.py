"""Statements say what they count as known: the number of records, and a participant's noise."""

import json
import math

import numpy as np
import pytest
from scipy import optimize, stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import (
    Entry,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyBudget,
    PrivacyStatement,
    accounting,
    statement_schema,
)
from numpyro_dppvi.privacy.plan import of_changes, of_gradients
from numpyro_dppvi.privacy.words import rounded_up
from tests.grids import grid

DELTA = 1e-5
BUDGET = PrivacyBudget(1.0, DELTA)
OTHER_RELATION = PrivacyBudget(1.0, DELTA, "add_or_remove_one")


def closed_form(mu, delta):
    """Epsilon of a Gaussian mechanism whose means are mu standard deviations apart.

    Balle and Wang (2018), Theorem 8, solved by bisection; none of the library's code.
    """

    def excess(epsilon):
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta

    return optimize.brentq(excess, 0, 50, xtol=1e-12)


def changes(num_clients, num_shares=None, budget=BUDGET, averaged=False):
    return of_changes(
        [budget] * num_clients,
        clip_norm=0.7,
        num_shards=[4] * num_clients,
        averaged=averaged,
        num_visits=[6] * num_clients,
        client_sizes=[40] * num_clients,
        num_shares=num_shares,
    )


def gradients(sampler, num_shares, budgets=(BUDGET,) * 3, sizes=(40, 60, 80)):
    return of_gradients(
        list(budgets),
        sampler,
        clip_norm=1.5,
        releases_per_visit=1,
        num_visits=[6] * len(sizes),
        client_sizes=list(sizes),
        num_shares=num_shares,
    )


def statement(plan, rounds=6):
    ledger = plan.ledger()
    for number in range(rounds):
        ledger = ledger.charge(
            Entry(number, m, client.mechanism.dp_event, client.releases_per_visit)
            for m, client in enumerate(plan.clients)
        )
    return PrivacyStatement("VirtualClients", plan, ledger, insecure_seed=False)


def flat(text):
    return " ".join(str(text).split())


def forms(plan):
    """Everything that people read."""
    mine = statement(plan)
    return flat(plan), flat(mine), flat(mine.to_markdown())


class TestParticipants:
    @pytest.mark.parametrize(
        ("num_clients", "dropouts", "expected"),
        [(2, 0, 1.465), (3, 0, 1.25), (10, 0, 1.06), (4, 2, 1.465), (11, 1, 1.06)],
    )
    def test_a_known_share_is_no_noise(self, num_clients, dropouts, expected):
        plan = changes(num_clients, num_clients - dropouts)
        shares = num_clients - dropouts
        for client in plan.clients:
            mechanism = client.mechanism
            # What is left of the sum's noise once one share is subtracted, and nothing else.
            left = math.sqrt(shares - 1) * mechanism.share_std
            distance = mechanism.sensitivity("replace_one") / left * math.sqrt(6)
            exact = closed_form(distance, DELTA)
            assert client.epsilon_to_participant == pytest.approx(exact, rel=1e-7)
            assert client.epsilon_to_participant == pytest.approx(expected, abs=6e-3)
            assert client.epsilon == pytest.approx(1.0, rel=5e-3)

    @pytest.mark.parametrize("num_shares", [None, 1])
    def test_who_adds_all_of_its_noise_is_protected_from_all_alike(self, num_shares):
        """One share is a client's own, and its records are in no sum without it."""
        plan = changes(3, num_shares)
        for client in plan.clients:
            assert client.epsilon_to_participant == client.epsilon
        for text in forms(plan):
            assert "participant" not in text
            assert "share" not in text
        facts = statement(plan).as_dict()
        assert facts["max_epsilon_to_participant"] == facts["max_epsilon"]

    @grid(
        "planned",
        [
            lambda: changes(3, 3),
            lambda: changes(3, 3, averaged=True),
            lambda: gradients(FullBatch(), 3),
            lambda: gradients(FullBatch(), 3, [OTHER_RELATION] * 3),
            lambda: gradients(PoissonSampling(0.2), 3),
            lambda: gradients(
                PoissonSampling(0.2), 3, [OTHER_RELATION, BUDGET, BUDGET], (400, 60, 80)
            ),
            lambda: gradients(FixedSizeSampling(8), 3, sizes=(40, 40, 40)),
        ],
        quick=[0, 1, 2, 3],
        ids=["sum", "mean", "full", "one less", "Poisson", "truncated", "fixed size"],
    )
    def test_it_is_what_a_run_with_so_much_less_noise_costs(self, planned):
        """Whatever is aggregated: the mechanism with the noise of two shares, accounted itself."""
        plan = planned()
        for client, row in zip(plan.clients, statement(plan).as_dict()["clients"], strict=True):
            mechanism, relation = client.mechanism, client.budget.relation
            noise = mechanism.share_std * math.sqrt(2) / mechanism.noise_std
            weaker = type(mechanism)(
                **{**vars(mechanism), "noise_multiplier": noise * mechanism.noise_multiplier}
            )
            cost = accounting.compose([(weaker.dp_event, 6)])
            expected = accounting.epsilon(cost, DELTA, relation)
            assert row["epsilon_to_participant"] == client.epsilon_to_participant
            assert row["epsilon_to_participant"] >= expected * (1 - 1e-9)
            assert row["epsilon_to_participant"] == pytest.approx(expected, rel=2e-3)
            assert row["epsilon_to_participant"] > row["epsilon_spent"]

    def test_plan_statement_and_markdown_tell_it(self):
        plan = changes(3, 3)
        told = f"epsilon = {rounded_up(plan.clients[0].epsilon_to_participant)} at delta = 1e-05"
        for text in forms(plan):
            assert "At least 3 clients each add a share of a sum" in text
            assert f"against one of the others, one record is protected by {told}." in text
            assert "to participants" in text
        mine = statement(plan)
        header, _, row = (line for line in mine.to_markdown().splitlines() if line[0:1] == "|")
        cells = dict(zip(header.split("|"), row.split("|"), strict=True))
        shown = float(cells[" to participants "])
        assert shown == pytest.approx(plan.clients[0].epsilon_to_participant, abs=1e-4)
        assert shown >= plan.clients[0].epsilon_to_participant

    def test_what_was_not_spent_yet_is_not_told(self):
        plan = changes(3, 3)
        half = statement(plan, rounds=3).as_dict()
        client = plan.clients[0]
        distance = client.mechanism.sensitivity("replace_one") / client.mechanism.share_std
        exact = closed_form(distance * math.sqrt(3 / 2), DELTA)
        assert half["max_epsilon_to_participant"] == pytest.approx(exact, rel=1e-7)
        nothing = statement(plan, rounds=0).as_dict()
        assert nothing["max_epsilon_to_participant"] == 0

    def test_an_unlimited_budget_promises_nothing_to_anybody(self):
        plan = changes(3, 3, PrivacyBudget(math.inf))
        facts = json.loads(statement(plan).to_json(), parse_constant=pytest.fail)
        assert facts["max_epsilon_to_participant"] == "infinity"

    def test_a_planned_run_says_it_from_its_arguments(self):
        plan = dppvi.plan_privacy(
            dppvi.VirtualClients(4),
            BUDGET,
            num_rounds=6,
            client_sizes=[40] * 4,
            schedule=dppvi.random_subset(3),
            trusted_aggregator=dppvi.TrustedAggregator(max_dropouts=2),
        )
        assert plan.clients[0].mechanism.num_shares == 2
        assert np.ptp([c.epsilon_to_participant for c in plan.clients if c.num_visits == 5]) == 0
        assert "At least 2 clients each add a share" in flat(plan)


class TestNumberOfRecords:
    def test_what_the_relation_suggests_and_nobody_promises_is_said(self):
        plan = gradients(FullBatch(), None, [OTHER_RELATION] * 3)
        for text in forms(plan):
            words = "one record; neighbours by add_or_remove_one, given the number of records of "
            assert words + "each client, which is public" in text
            assert "In other words, leaving the public counts aside: an attacker who knows" in text
        for text in forms(plan)[1:]:
            assert (
                "how many records a client holds: add_or_remove_one would usually protect" in text
            )
        facts = statement(plan).as_dict()
        assert facts["given"] == "the number of records of each client, which is public"
        assert any("how many records" in item for item in facts["not_covered"])

    def test_replacing_a_record_leaves_their_number_alone(self):
        plan = gradients(FullBatch(), None)
        for text in forms(plan):
            assert "given" not in text
            assert "In other words: an attacker" in text
            assert "how many records a client holds" not in text

    def test_one_client_under_the_other_relation_is_enough(self):
        plan = gradients(FullBatch(), None, [BUDGET, OTHER_RELATION, BUDGET])
        for text in forms(plan):
            assert "neighbours by add_or_remove_one, replace_one, given the number of" in text


def test_the_schema_knows_both():
    schema = statement_schema()
    client = schema["properties"]["clients"]["items"]
    for place, names in (
        (schema, ("given", "max_epsilon_to_participant")),
        (client, ("epsilon_to_participant",)),
    ):
        assert set(names) <= set(place["required"])
        assert all("description" in place["properties"][name] for name in names)
    facts = json.loads(statement(changes(3, 3)).to_json())
    assert set(schema["required"]) <= set(facts) <= set(schema["properties"])
    one = set(facts["clients"][0])
    assert set(client["required"]) <= one <= set(client["properties"])
