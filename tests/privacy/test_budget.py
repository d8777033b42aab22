import dataclasses
import math

import numpy as np
import pytest

from numpyro_dppvi.privacy import PrivacyBudget, unit_sensitivity


def test_is_a_value():
    budget = PrivacyBudget(1.0)
    assert budget == PrivacyBudget(1, 1e-5, "replace_one")
    assert hash(budget) == hash(PrivacyBudget(1, 1e-5))
    assert budget != PrivacyBudget(1.0, relation="add_or_remove_one")
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.epsilon = 2.0


def test_takes_any_kind_of_real_number():
    budget = PrivacyBudget(np.float32(0.5), np.float64(1e-6))
    assert (type(budget.epsilon), type(budget.delta)) == (float, float)
    assert PrivacyBudget(math.inf).epsilon == math.inf


@pytest.mark.parametrize("epsilon", [0, 0.0, -1.0, math.nan, -math.inf, None, "1", True, 1j])
def test_refuses_an_epsilon_that_is_not_above_zero(epsilon):
    with pytest.raises(
        ValueError, match=r"^epsilon must be a number above 0, got .*: write epsilon"
    ):
        PrivacyBudget(epsilon)


@pytest.mark.parametrize("delta", [0, 1, 0.0, 1.0, -1e-5, 1.5, math.nan, math.inf, None, "1e-5"])
def test_refuses_a_delta_outside_the_open_interval(delta):
    pattern = r"^delta must lie strictly between 0 and 1, got .*: write delta=1e-5, say\.$"
    with pytest.raises(ValueError, match=pattern):
        PrivacyBudget(1.0, delta)


@pytest.mark.parametrize("relation", ["substitute", "REPLACE_ONE", "", None])
def test_refuses_an_unknown_relation(relation):
    pattern = r"relation must be 'replace_one' or 'add_or_remove_one', got"
    with pytest.raises(ValueError, match=pattern):
        PrivacyBudget(1.0, relation=relation)


def test_replacing_a_record_moves_a_sum_twice_as_far_as_adding_one():
    assert unit_sensitivity("replace_one") == 2.0
    assert unit_sensitivity("add_or_remove_one") == 1.0
