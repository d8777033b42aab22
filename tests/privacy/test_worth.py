"""What budgets buy at best: widths by hand, and when joining begins to pay."""

import math

import dp_accounting as dpa
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import PrivacyBudget
from numpyro_dppvi.privacy.worth import of_client, of_joining, of_widths, worth

LATENTS, SIZES = 6, (100, 200, 8000)
BUDGET = PrivacyBudget(0.5)
NAMES = ("Turku", "Oulu", "Helsinki")


def of(epsilon, sizes=SIZES, **more):
    return worth(LATENTS, [PrivacyBudget(epsilon)] * len(sizes), sizes, **more)


def noise(epsilon):
    """On a sum of clipped vectors under replace-one."""
    return 2 * dpa.get_sigma_gaussian(epsilon, 1e-5)


def test_widths_are_those_of_one_release():
    found, z, total = of(0.5), noise(0.5), sum(SIZES)
    np.testing.assert_allclose(found.together, math.sqrt(1 + LATENTS * 3 * z**2 / total), rtol=1e-9)
    np.testing.assert_allclose(found.alone, np.sqrt(total / np.array(SIZES)), rtol=1e-12)
    own = [math.sqrt(total / n) * math.sqrt(1 + LATENTS * z**2 / n) for n in SIZES]
    np.testing.assert_allclose(found.alone_private, own, rtol=1e-9)


def test_a_client_by_itself_is_a_study_of_one():
    found = of(0.5)
    for n, private, alone in zip(SIZES, found.alone_private, found.alone, strict=True):
        np.testing.assert_allclose(of(0.5, (n,)).together * alone, private, rtol=1e-9)


def test_without_noise_nothing_is_lost():
    found = of(math.inf)
    assert found.together == 1.0
    assert found.alone == found.alone_private
    assert not found.gainless


def test_other_budgets_and_units():
    budgets = [PrivacyBudget(0.5), PrivacyBudget(2.0), PrivacyBudget(1.0, max_records_per_person=3)]
    found = worth(LATENTS, budgets, SIZES)
    variance = sum((c * noise(e)) ** 2 for c, e in ((1, 0.5), (1, 2.0), (3, 1.0)))
    expected = math.sqrt(1 + LATENTS * variance / sum(SIZES))
    np.testing.assert_allclose(found.together, expected, rtol=1e-9)
    assert found.epsilon_needed is None
    summed = worth(LATENTS, budgets, SIZES, num_shares=2)
    variance = max((c * noise(e)) ** 2 for c, e in ((1, 0.5), (1, 2.0), (3, 1.0))) * 3 / 2
    expected = math.sqrt(1 + LATENTS * variance / sum(SIZES))
    np.testing.assert_allclose(summed.together, expected, rtol=1e-9)


@pytest.mark.parametrize("num_shares", [None, 3, 2])
@pytest.mark.parametrize("client", range(3))
def test_from_the_epsilon_that_is_named_on_joining_can_pay(client, num_shares):
    threshold = of(0.5, num_shares=num_shares).epsilon_needed[client]
    assert client in of(threshold * 0.999, num_shares=num_shares).gainless
    assert client not in of(threshold * 1.001, num_shares=num_shares).gainless


@pytest.mark.parametrize("client", range(3))
def test_from_the_others_records_that_are_named_on_joining_can_pay(client):
    needed = of(0.05).others_needed[client]

    def gainless(others):
        sizes = [SIZES[client], others // 2, others - others // 2]
        return 0 in of(0.05, tuple(sizes)).gainless

    assert gainless(needed - 1)
    assert not gainless(needed)


def test_what_was_spent_before_buys_nothing():
    spent = frozenset({(dpa.GaussianDpEvent(noise(0.5)), 1)})
    found = of(1.0, before=[spent] * 3)
    left = math.sqrt(noise(1.0) ** -2 - noise(0.5) ** -2)  # squared distances add up
    expected = math.sqrt(1 + LATENTS * 3 / left**2 / sum(SIZES))
    np.testing.assert_allclose(found.together, expected, rtol=1e-6)
    assert min(found.epsilon_needed) > 0.5


class TestSentences:
    def test_who_gains_nothing_is_called_by_name(self):
        found = of(0.5)
        assert found.gainless == [2]
        epsilon, others = found.epsilon_needed[2], found.others_needed[2]
        assert of_joining(found, NAMES) == (
            "joining cannot pay for Helsinki: alone and without privacy its intervals would be no "
            f"wider. At least epsilon = {math.floor(epsilon * 100) / 100:g}, or others with "
            f"{others} records and not 300, would be needed."
        )
        assert "pay for client 2: alone" in of_joining(found)

    def test_several_and_none(self):
        several = of_joining(of(0.01, (1000, 1000, 1000)), NAMES)
        assert "cannot pay for Turku, Oulu and Helsinki: alone and without privacy their" in several
        assert several.endswith("records and not 2000, would be needed for all of them.")
        none = of(3.0, (1000, 1000, 1000))
        threshold = math.floor(none.epsilon_needed[0] * 1000) / 1000
        assert of_joining(none) == (
            f"joining can pay for every client; below epsilon = {threshold:g} it could not for "
            "client 0, client 1 and client 2."
        )
        budgets = [PrivacyBudget(3.0), PrivacyBudget(4.0)]
        other = of_joining(worth(LATENTS, budgets, (1000, 1000)))
        assert other == "joining can pay for every client."
        hardly_private = worth(LATENTS, [PrivacyBudget(1.0, delta=0.5)] * 2, (1000, 1000))
        assert of_joining(hardly_private) == "joining can pay for every client."

    def test_one_client_joins_nobody(self):
        found = of(0.5, (400,))
        assert of_joining(found) == ""
        assert found.gainless == []

    def test_lower_limits_are_rounded_down(self):
        found = of(0.5)
        said = float(of_widths(found).split("at least ")[1].split()[0])
        assert said <= found.together < said + 0.01


class TestPlans:
    def plan(self, budget=BUDGET, **changes):
        arguments = {
            "num_rounds": 10,
            "client_sizes": dict(zip(NAMES, SIZES, strict=True)),
            "num_latents": LATENTS,
            **changes,
        }
        method = arguments.pop("method", dppvi.DPOptimization())
        return dppvi.plan_privacy(method, budget, **arguments)

    def test_say_what_budgets_buy(self):
        plan = self.plan()
        assert plan.worth == of(0.5)
        text, page = " ".join(str(plan).split()), plan._repr_html_()
        for said in (of_joining(plan.worth, NAMES), of_widths(plan.worth)):
            assert said[1:] in text
            assert said[1:].split(":")[0] in page
        assert of_client(plan.worth, 2) in page

    def test_without_the_number_of_latents_nothing_is_said(self):
        plan = self.plan(num_latents=None)
        assert plan.worth is None
        assert "alone" not in str(plan)
        assert plan == self.plan()

    def test_an_aggregators_noise_is_shared(self):
        plan = self.plan(
            method=dppvi.FisherScoring(),
            schedule=dppvi.synchronous,
            trusted_aggregator=dppvi.TrustedAggregator(max_dropouts=1),
        )
        assert plan.worth == of(0.5, num_shares=2)

    def test_of_whole_clients_nothing_is_known(self):
        method = dppvi.methods.LocalAveraging(num_shards=2)
        plan = self.plan(PrivacyBudget(0.5, unit="client"), method=method)
        assert plan.worth is None

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, "6", True])
    def test_a_wrong_number_is_refused(self, wrong):
        with pytest.raises(ValueError, match="num_latents must be a whole number"):
            self.plan(num_latents=wrong)
