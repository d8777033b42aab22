"""What people and machines read is what was planned, released and spent."""

import json
import math
import re
from fractions import Fraction

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dppvi.privacy import (
    Entry,
    FixedSizeSampling,
    FullBatch,
    Ledger,
    PoissonSampling,
    PrivacyBudget,
    PrivacyStatement,
    best_attack,
    statement_schema,
)
from numpyro_dppvi.privacy.plan import of_changes, of_gradients
from numpyro_dppvi.privacy.words import percent, rounded_up

# Clients 0 and 1 are equal, 2 is larger, 3 and 4 are equal again, 4 is never visited.
BUDGETS = [PrivacyBudget(1.0)] * 3 + [PrivacyBudget(2.5, 1e-6)] * 2
SIZES = [120, 120, 300, 80, 80]
VISITS = [10, 10, 10, 4, 0]


def full_batch_plan(clip_norm=1.5):
    return of_gradients(
        BUDGETS,
        FullBatch(),
        clip_norm=clip_norm,
        releases_per_visit=3,
        num_visits=VISITS,
        client_sizes=SIZES,
    )


def carried_out(plan, visits):
    """The plan's ledger after some visits to each client."""
    ledger = plan.ledger()
    for number, (client, count) in enumerate(zip(plan.clients, visits, strict=True)):
        for visit in range(count):
            event = client.mechanism.dp_event
            ledger = ledger.charge([Entry(visit, number, event, client.releases_per_visit)])
    return ledger


def statement(plan, visits, insecure_seed=False):
    return PrivacyStatement("DPOptimization", plan, carried_out(plan, visits), insecure_seed)


def cells(line):
    return re.split(r"\s{2,}", line.strip())


class TestPlan:
    def test_calibrates_each_client_to_its_own_budget_and_visits(self):
        plan = full_batch_plan()
        for client, budget, visits in zip(plan.clients, BUDGETS, VISITS, strict=True):
            assert client.num_releases == 3 * visits
            # A client that is never visited gets noise for one visit.
            noise = (
                2
                * math.sqrt(3 * max(visits, 1 / 3))
                * dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
            )
            assert client.mechanism.noise_multiplier == pytest.approx(noise, rel=1e-8)
            assert client.mechanism.noise_std == 1.5 * client.mechanism.noise_multiplier
        np.testing.assert_array_equal(plan.noise_std, [c.mechanism.noise_std for c in plan.clients])
        np.testing.assert_allclose(plan.epsilons, [1.0, 1.0, 1.0, 2.5, 0.0], rtol=1e-9)

    @pytest.mark.slow
    def test_no_client_is_planned_beyond_its_budget(self):
        plans = [
            full_batch_plan(),
            of_gradients(
                BUDGETS,
                PoissonSampling(0.1),
                clip_norm=1.5,
                releases_per_visit=3,
                num_visits=VISITS,
                client_sizes=SIZES,
            ),
            of_changes(
                BUDGETS,
                clip_norm=0.7,
                num_shards=[3, 3, 7, 1, 1],
                averaged=True,
                num_visits=VISITS,
                client_sizes=SIZES,
            ),
            of_changes(
                BUDGETS,
                clip_norm=0.7,
                num_shards=[3, 3, 7, 1, 1],
                averaged=False,
                num_visits=VISITS,
                client_sizes=SIZES,
                num_shares=5,
            ),
        ]
        for plan in plans:
            for client in plan.clients:
                assert client.epsilon <= client.budget.epsilon

    @pytest.mark.slow
    @settings(max_examples=100)
    @given(
        st.floats(0.01, 20.0),
        st.floats(1e-10, 1e-2),
        st.floats(0.01, 100.0),
        st.integers(1, 9),
    )
    def test_rounding_breaks_no_budget(self, epsilon, delta, clip_norm, num_shards):
        # A plan that is a hair too dear would be refused in its last round.
        budgets = [PrivacyBudget(epsilon, delta)] * 2
        plan = of_changes(
            budgets,
            clip_norm=clip_norm,
            num_shards=[num_shards, 1],
            averaged=True,
            num_visits=[10, 7],
            client_sizes=[90, 90],
        )
        for client, budget in zip(plan.clients, budgets, strict=True):
            assert client.epsilon <= budget.epsilon
            event, mechanism = client.mechanism.dp_event, client.mechanism
            per_sensitivity = mechanism.noise_std / mechanism.sensitivity("replace_one")
            assert event.noise_multiplier == pytest.approx(2 * per_sensitivity, rel=1e-12)

    def test_shards_are_for_replacing_records_only(self):
        # A record is in the shard of its place: with one removed, all after it would move.
        budgets = [PrivacyBudget(1.0), PrivacyBudget(1.0, relation="add_or_remove_one")]
        with pytest.raises(
            ValueError, match="relation must be 'replace_one' for methods that divide"
        ):
            of_changes(
                budgets,
                clip_norm=1.0,
                num_shards=[3, 3],
                averaged=False,
                num_visits=[1, 1],
                client_sizes=[50, 50],
            )

    @pytest.mark.slow
    def test_one_batch_shape_serves_all_clients(self):
        sampler = PoissonSampling(0.1)
        plan = of_gradients(
            BUDGETS,
            sampler,
            clip_norm=1.5,
            releases_per_visit=3,
            num_visits=VISITS,
            client_sizes=SIZES,
        )
        assert plan.physical_size == sampler.physical_size(SIZES)
        assert {client.mechanism.physical_size for client in plan.clients} == {plan.physical_size}
        # Only where more records than rows can come up is the batch ever cut.
        for client, size in zip(plan.clients, SIZES, strict=True):
            cut = isinstance(client.mechanism.dp_event, dpa.TruncatedSubsampledGaussianDpEvent)
            assert cut == (size > plan.physical_size)

    def test_the_ledger_starts_empty_with_the_plans_budgets(self):
        ledger = full_batch_plan().ledger()
        assert ledger.budgets == tuple(BUDGETS)
        assert ledger.entries == ()
        assert not ledger.spent().any()

    def test_prints_one_line_for_equal_clients(self):
        plan = full_batch_plan()
        title, header, *lines = str(plan).splitlines()
        lines = lines[:4]
        assert "no data has been read" in title
        rows = [dict(zip(cells(header), cells(line), strict=True)) for line in lines]
        assert [row["client"] for row in rows] == ["0-1", "2", "3", "4"]
        for row in rows:
            client = plan.clients[int(row["client"].split("-")[0])]
            assert int(row["records"]) == client.mechanism.num_records
            assert row["batch"] == "full batch"
            assert float(row["clip"]) == 1.5
            assert float(row["noise std"]) == pytest.approx(client.mechanism.noise_std, rel=5e-4)
            visits, releases = map(int, row["releases"].split(" x "))
            assert (visits, releases) == (client.num_visits, 3)
            spent, budget = map(float, row["epsilon"].split(" of "))
            assert client.epsilon <= spent <= client.epsilon + 1e-4
            assert budget == client.budget.epsilon
            assert float(row["delta"]) == client.budget.delta

    @pytest.mark.slow
    def test_names_the_sampler_and_its_expected_batch(self):
        plan = of_gradients(
            [PrivacyBudget(1.0)],
            PoissonSampling(0.1),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[5],
            client_sizes=[230],
        )
        assert "Poisson q=0.1 (~23 rows)" in str(plan)


class TestStatement:
    def test_its_numbers_are_the_plans_and_the_ledgers(self):
        plan, visits = full_batch_plan(), [10, 7, 10, 1, 0]
        facts = json.loads(statement(plan, visits).to_json())
        assert facts["private"] is True
        assert facts["method"] == "DPOptimization"
        spent = carried_out(plan, visits).spent()
        assert facts["max_epsilon"] == spent.max()
        rows = zip(facts["clients"], plan.clients, visits, spent, strict=True)
        for number, (row, client, count, epsilon) in enumerate(rows):
            mechanism, budget = client.mechanism, client.budget
            assert row["client"] == number
            assert row["records"] == SIZES[number]
            assert row["relation"] == budget.relation
            assert row["batch"] == "full batch"
            assert row["clip_norm"] == 1.5
            assert row["sensitivity"] == 3.0
            assert row["noise_multiplier"] == mechanism.noise_multiplier
            assert row["noise_std"] == mechanism.noise_std
            assert row["releases"] == 3 * count
            assert row["epsilon_spent"] == epsilon <= budget.epsilon
            assert row["epsilon_budget"] == budget.epsilon
            assert row["delta"] == budget.delta
            assert "Balle and Wang" in row["accountant"]
            # And they fit together: nothing but the statement is needed to check its epsilon.
            if count:
                per_release = row["noise_std"] / row["sensitivity"]
                exact = dpa.get_epsilon_gaussian(per_release / math.sqrt(3 * count), budget.delta)
                assert row["epsilon_spent"] == pytest.approx(exact, rel=1e-9)

    def test_its_text_says_the_same(self):
        visits = [10, 10, 10, 1, 0]
        mine = statement(full_batch_plan(), visits)
        facts, text = mine.as_dict(), str(mine)
        lines = text.splitlines()
        start = next(n for n, line in enumerate(lines) if line.strip().startswith("clients "))
        header = cells(lines[start])
        assert header == [
            "clients",
            "records",
            "releases",
            "clip",
            "noise std",
            "epsilon spent",
            "of budget",
            "delta",
        ]
        rows = [line.split() for line in lines[start + 1 : start + 5]]
        assert [row[0] for row in rows] == ["0-1", "2", "3", "4"]
        for row in rows:
            client = facts["clients"][int(row[0].split("-")[0])]
            names = ("records", "releases", "clip_norm", "noise_std", "epsilon_spent")
            names += ("epsilon_budget", "delta")
            for cell, name in zip(row[1:], names, strict=True):
                assert float(cell) == pytest.approx(client[name], rel=5e-4, abs=1e-4)
            assert float(row[5]) >= client["epsilon_spent"]
        words = " ".join(text.split())
        overall = f"epsilon = {rounded_up(facts['max_epsilon'])} at delta = 1e-05."
        assert f"over all clients, one record is protected by {overall}" in words
        assert facts["max_delta"] == 1e-5
        assert f"dp-accounting {facts['versions']['dp-accounting']}" in text
        assert "neighbours by replace_one" in text
        assert all(item in text for item in facts["not_covered"])

    @pytest.mark.slow
    def test_names_all_relations_accountants_and_mechanisms(self):
        budgets = [PrivacyBudget(1.0), PrivacyBudget(1.0, relation="add_or_remove_one")]
        plan = of_gradients(
            budgets,
            PoissonSampling(0.2),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[3, 3],
            client_sizes=[50, 50],
        )
        text = str(statement(plan, [3, 3]))
        assert "neighbours by add_or_remove_one, replace_one" in text
        assert "privacy loss distribution" in text
        by_client = statement(plan, [3, 3]).as_dict()["clients"]
        assert [row["sensitivity"] for row in by_client] == [2.0, 1.0]

    def test_says_whose_noise_protects_a_sum_over_clients(self):
        budgets = [PrivacyBudget(1.0)] * 4
        plan = of_changes(
            budgets,
            clip_norm=1.0,
            num_shards=[2] * 4,
            averaged=False,
            num_visits=[5] * 4,
            client_sizes=[50] * 4,
            num_shares=4,
        )
        for row in statement(plan, [5] * 4).as_dict()["clients"]:
            assert row["noise_shared_by"] == 4
            assert row["own_noise_std"] * 2 == pytest.approx(row["noise_std"])

    def test_says_where_the_noise_came_from(self):
        plan = full_batch_plan()
        secret, seeded = (statement(plan, [1] * 4 + [0], seed) for seed in (False, True))
        for form in (str, PrivacyStatement.to_json):
            assert "operating system" in form(secret)
            assert "known seed" not in form(secret)
            assert "anyone who knows it can remove the noise" in form(seeded)
            assert "operating system" not in form(seeded)

    def test_of_a_run_that_released_nothing(self):
        facts = json.loads(statement(full_batch_plan(), [0] * 5).to_json())
        assert facts["max_epsilon"] == 0
        assert {row["releases"] for row in facts["clients"]} == {0}

    def test_of_an_infinite_budget_says_so(self):
        plan = of_gradients(
            [PrivacyBudget(math.inf)],
            FullBatch(),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[2],
            client_sizes=[50],
        )
        mine = statement(plan, [2])
        assert mine.as_dict()["clients"][0]["epsilon_spent"] == math.inf
        # JSON has no infinity, and a reader in another language would choke on one.
        facts = json.loads(mine.to_json(), parse_constant=pytest.fail)
        assert facts["clients"][0]["epsilon_spent"] == facts["max_epsilon"] == "infinity"
        assert facts["clients"][0]["best_attack"]["advantage"] == 1
        assert "epsilon = inf" in str(mine)

    def test_of_a_run_without_privacy_promises_nothing(self):
        without = PrivacyStatement("NonPrivate", None, Ledger(), insecure_seed=False)
        text, facts = str(without), json.loads(without.to_json())
        assert "NonPrivate adds no noise" in text
        assert "no differential privacy" in text
        assert not re.search(r"\d", text)
        assert facts["private"] is False
        assert facts["clients"] == []
        assert facts["max_epsilon"] is facts["max_delta"] is None
        assert facts["noise"] == "none"
        assert "no differential privacy" in without.to_markdown()

    def test_its_markdown_says_the_same_as_its_text(self):
        mine = statement(full_batch_plan(), [10, 10, 10, 1, 0])
        text, markdown = str(mine), mine.to_markdown()
        table = [line for line in markdown.splitlines() if line.startswith("|")]
        header, ruler, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in table)
        assert set(ruler) == {"---"}
        assert len(header) == len(ruler)
        lines = text.splitlines()
        start = next(n for n, line in enumerate(lines) if line.strip().startswith("clients "))
        assert header == cells(lines[start])
        assert rows == [line.split() for line in lines[start + 1 : start + 5]]
        words = " ".join(text.split())
        for line in markdown.splitlines():
            if line and not line.startswith("|"):
                plain = line.lstrip("#- ").replace("**:", "").replace("**", "")
                assert plain.lower() in words.lower(), plain

    def test_says_what_the_best_attack_reaches(self):
        plan = full_batch_plan()
        mine = statement(plan, [10, 10, 10, 4, 0])
        rows = mine.as_dict()["clients"]
        ledger = carried_out(plan, [10, 10, 10, 4, 0])
        for number, row in enumerate(rows):
            attack = best_attack(ledger.composition(number), "replace_one")
            assert row["best_attack"] == attack._asdict()
        # The text names the client that is worst off: client 3 has the largest budget.
        worst = rows[3]["best_attack"]
        words = " ".join(str(mine).split())
        assert "all other records of client 3" in words
        assert "which of two records it holds" in words
        assert f"at most {percent((1 + worst['advantage']) / 2)} of cases" in words
        assert (
            "at a false-positive rate of 1 %, the true-positive rate is at most "
            f"{percent(worst['true_positive_rate'])}." in words
        )
        assert words.split("In other words")[1].split("Not covered")[0].strip() in " ".join(
            str(plan).split()
        )

    @pytest.mark.slow
    def test_names_few_of_many_batches(self):
        sizes = list(range(50, 60))
        plan = of_gradients(
            [PrivacyBudget(1.0)] * 10,
            FixedSizeSampling(50),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[3] * 10,
            client_sizes=sizes,
        )
        assert "50 of 52 rows, fixed size, and 7 others" in str(statement(plan, [3] * 10))


class TestRounding:
    @pytest.mark.slow
    @given(st.floats(0, 1e300) | st.floats(0, 50) | st.floats(0, 1e-3))
    def test_never_shows_less(self, value):
        shown = rounded_up(value)
        assert Fraction(shown) >= Fraction(value)
        # And hardly more: the last of four digits at least.
        assert Fraction(shown) - Fraction(value) <= Fraction(1, 10**4)
        assert Fraction(shown) <= Fraction(value) * Fraction(10011, 10000) or value > 0.1
        assert Fraction(percent(min(value, 1)).rstrip(" %")) >= 100 * Fraction(min(value, 1))

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (0.0, "0.0000"),
            (1.0, "1.0000"),
            (0.99991, "1.0000"),
            (1.00000001, "1.0001"),
            (0.00123456, "0.001235"),
            (12.5, "12.5000"),
            (math.inf, "inf"),
        ],
    )
    def test_looks_like_this(self, value, shown):
        assert rounded_up(value) == shown


def faults(value, schema, path="statement"):
    """What a JSON schema has against a value; knows the words that ours uses, and no others."""
    words = dict(schema)
    for word in ("$schema", "title", "description"):
        words.pop(word, None)
    found = []
    if "anyOf" in words:
        options = words.pop("anyOf")
        if all(faults(value, option) for option in options):
            found.append(f"{path}: is none of {len(options)}")
    if "const" in words and value != words.pop("const"):
        found.append(f"{path}: is {value!r}")
    words.pop("const", None)
    if "enum" in words and value not in words.pop("enum"):
        found.append(f"{path}: is {value!r}")
    words.pop("enum", None)
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
        "integer": int,
        "number": (int, float),
    }
    kind = words.pop("type", None)
    if kind and (
        not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [*found, f"{path}: is no {kind}"]
    if isinstance(value, (int, float)):
        if value < words.pop("minimum", value) or value > words.pop("maximum", value):
            found.append(f"{path}: is out of range")
        if value <= words.pop("exclusiveMinimum", value - 1):
            found.append(f"{path}: is out of range")
    for item in value if isinstance(value, list) else []:
        found += faults(item, words["items"], f"{path}[]")
    words.pop("items", None)
    properties, others = words.pop("properties", {}), words.pop("additionalProperties", True)
    required = words.pop("required", [])
    if isinstance(value, dict):
        found += [f"{path}: lacks {name}" for name in required if name not in value]
        for name, part in value.items():
            if name in properties:
                found += faults(part, properties[name], f"{path}.{name}")
            elif others is False:
                found.append(f"{path}: has {name}")
            elif others is not True:
                found += faults(part, others, f"{path}.{name}")
    assert not (words.keys() - {"minimum", "maximum", "exclusiveMinimum"}), words
    return found


class TestSchema:
    @pytest.mark.parametrize(
        "mine",
        [
            statement(full_batch_plan(), [10, 7, 10, 1, 0]),
            statement(
                of_gradients(
                    [PrivacyBudget(math.inf)],
                    FullBatch(),
                    clip_norm=1,
                    releases_per_visit=1,
                    num_visits=[2],
                    client_sizes=[50],
                ),
                [2],
            ),
            PrivacyStatement("NonPrivate", None, Ledger(), insecure_seed=False),
        ],
        ids=["private", "unlimited", "not private"],
    )
    def test_covers_every_statement(self, mine):
        facts = json.loads(mine.to_json())
        assert faults(facts, statement_schema()) == []
        for name in facts.keys() - {"cautions"}:  # nothing else may be missing
            assert faults({k: v for k, v in facts.items() if k != name}, statement_schema())

    def test_finds_faults(self):
        facts = json.loads(statement(full_batch_plan(), [10, 7, 10, 1, 0]).to_json())
        wrong = {
            "private": 1,
            "max_epsilon": -1.0,
            "max_delta": 2,
            "schema": "another",
            "unit": None,
            "more": 1,
            "versions": {"jax": 1},
        }
        for name, value in wrong.items():
            assert faults({**facts, name: value}, statement_schema()), name
        for name, value in {"delta": "small", "relation": "swap", "releases": 1.5}.items():
            client = {**facts["clients"][0], name: value}
            assert faults({**facts, "clients": [client]}, statement_schema()), name

    def test_says_what_every_number_is(self):
        properties = statement_schema()["properties"]["clients"]["items"]["properties"]
        assert all("description" in entry for entry in properties.values())
