"""Plan and statement say where a budget promises little, and are silent elsewhere."""

import json
import re

import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import Entry, PrivacyBudget, PrivacyStatement

METHOD = dppvi.DPOptimization(num_local_steps=1)
SIZES = {"Helsinki": 900, "Turku": 100, "Oulu": 80}


def planned(*budgets, sizes=SIZES, method=METHOD):
    budget = budgets[0] if len(budgets) == 1 else budgets
    return dppvi.plan_privacy(method, budget, num_rounds=2, client_sizes=sizes)


def spent(plan, rounds=2):
    ledger = plan.ledger()
    for number, client in enumerate(plan.clients):
        for visit in range(rounds):
            ledger = ledger.charge([Entry(visit, number, client.mechanism.dp_event, 1)])
    return PrivacyStatement("DPOptimization", plan, ledger, insecure_seed=False)


def told(plan, rounds=2):
    """What all forms of plan and statement say, which must be the same."""
    statement = spent(plan, rounds)
    texts = [str(plan), plan._repr_html_()] if rounds == 2 else []
    texts += [str(statement), statement.to_markdown(), statement._repr_html_()]
    found = {tuple(re.findall(r"Caution: (.*?[a-z0-9])[.:] ", " ".join(t.split()))) for t in texts}
    assert len(found) == 1
    (said,) = found
    in_json = json.loads(statement.to_json()).get("cautions", [])
    assert len(in_json) == len(said)
    assert all(f"Caution: {a}" in b for a, b in zip(said, in_json, strict=True))
    return said


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_usual_budgets_get_no_word(epsilon):
    assert told(planned(PrivacyBudget(epsilon, 1e-5))) == ()
    assert told(planned(PrivacyBudget(epsilon, 1 / 901))) == ()
    assert "cautions" not in spent(planned(PrivacyBudget(epsilon))).as_dict()


@pytest.mark.parametrize(
    ("delta", "who"),
    [
        (1 / 900, "Helsinki"),
        (1 / 100, "Helsinki and Turku"),
        (0.5, "all clients"),
    ],
)
def test_a_delta_of_one_over_the_records_is_too_large(delta, who):
    assert told(planned(PrivacyBudget(1.0, delta))) == (f"delta is too large for {who}",)


def test_the_worst_client_is_the_example():
    plan = planned(PrivacyBudget(1.0, 1e-5), PrivacyBudget(1.0, 0.02), PrivacyBudget(1.0, 0.02))
    text = " ".join(str(plan).split())
    assert "delta is too large for Turku and Oulu. With 100 records and delta = 0.02" in text
    assert "probability delta, 2 of them on average" in text
    assert "far below 1 / 100." in text


def test_a_client_that_is_the_unit_is_one():
    budget = PrivacyBudget(1.0, 0.5, unit="client")
    method = dppvi.methods.ParameterPerturbation(num_local_steps=1)
    assert told(planned(budget, method=method)) == ()


def test_an_epsilon_above_ten_is_told():
    plan = planned(PrivacyBudget(10.0), PrivacyBudget(12.0), PrivacyBudget(1.0))
    assert told(plan) == (f"epsilon = {plan_epsilon(plan, 1)} is above 10 for Turku",)
    assert "by a factor of e^12 in odds" in " ".join(str(plan).split())
    assert told(planned(PrivacyBudget(12.0)))[0].endswith("is above 10 for all clients")


def plan_epsilon(plan, client):
    return dppvi.privacy.words.rounded_up(plan.clients[client].epsilon)


def test_a_statement_goes_by_what_was_spent():
    """A run that was ended early may have spent less."""
    plan = planned(PrivacyBudget(12.0))
    assert told(plan, rounds=1) == ()


def test_without_a_limit_nothing_is_promised():
    plan = planned(PrivacyBudget(float("inf")), sizes=[900, 100, 80])
    assert "Caution: epsilon is infinite for all clients, which promises nothing." in str(plan)


def test_one_client_and_many_are_called_what_they_are():
    assert told(planned(PrivacyBudget(1.0, 0.5), sizes=[9]))[0].endswith("for client 0")
    budgets = [PrivacyBudget(1.0, 0.1)] * 6 + [PrivacyBudget(1.0)]
    said = told(planned(*budgets, sizes=[20] * 7))
    assert said == ("delta is too large for client 0, client 1, client 2 and 3 more",)
