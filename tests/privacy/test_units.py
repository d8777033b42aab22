"""The unit of protection: whatever one unit can change is covered, and words say which it is."""

import itertools
import json
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dppvi as dppvi
from numpyro_dppvi.privacy import (
    ClientPlan,
    FixedSizeSampling,
    FullBatch,
    GaussianShardSum,
    GaussianSum,
    PoissonSampling,
    PrivacyBudget,
    clipped,
    clipped_sum,
    rounds_from_epsilon,
    statement_schema,
    units,
)
from numpyro_dppvi.privacy.plan import of_changes, of_gradients
from tests.dry import dry_rounds
from tests.grids import grid

PERSON = PrivacyBudget(1.0, max_records_per_person=3)
CLIENT = PrivacyBudget(1.0, unit="client")
CLIP = 2.5


def cost(noise_std, sensitivity, count, delta=1e-5):
    """Epsilon by the closed form, from nothing but noise, sensitivity and count."""
    return dpa.get_epsilon_gaussian(noise_std / sensitivity / math.sqrt(count), delta)


class TestHowManyChange:
    def test_records(self):
        assert units.records_changed(PrivacyBudget(1.0)) == 1
        assert units.records_changed(PERSON) == 3

    @pytest.mark.parametrize(
        ("records", "num_shards", "changed"),
        [(1, 1, 1), (1, 7, 1), (3, 7, 3), (7, 7, 7), (9, 7, 7), (9, 1, 1)],
    )
    def test_shards(self, records, num_shards, changed):
        budget = PrivacyBudget(1.0, max_records_per_person=records)
        assert units.shards_changed(budget, num_shards) == changed

    def test_all_shards_of_a_client(self):
        assert [units.shards_changed(CLIENT, n) for n in (1, 5, 50)] == [1, 5, 50]

    @pytest.mark.parametrize(("num_records", "num_shards"), [(6, 1), (6, 3), (7, 3), (5, 5)])
    def test_shards_by_trying_all_places_of_a_persons_records(self, num_records, num_shards):
        # Record i is in shard i mod N: the most shards that any choice of records can touch.
        for k in range(1, num_records + 1):
            touched = max(
                len({place % num_shards for place in places})
                for places in itertools.combinations(range(num_records), k)
            )
            budget = PrivacyBudget(1.0, max_records_per_person=k)
            assert touched == units.shards_changed(budget, num_shards)


class TestSums:
    """The exhaustive and the worst neighbours of the sums themselves, without noise."""

    @grid("k", [1, 2, 5], quick=[2])
    def test_the_bound_on_records_is_reached(self, k):
        mechanism = GaussianSum(CLIP, 4.0, FullBatch(), 12, 12, contributions=k)
        ones = np.full((12, 1), 100.0, np.float32)
        other = ones.copy()
        other[:k] *= -1
        present = jnp.ones(12, bool)
        replaced = clipped_sum(ones, present, CLIP) - clipped_sum(other, present, CLIP)
        assert float(replaced[0]) == pytest.approx(mechanism.sensitivity("replace_one"), rel=1e-4)
        removed = clipped_sum(ones, present, CLIP) - clipped_sum(
            ones, present.at[:k].set(False), CLIP
        )
        assert float(removed[0]) == pytest.approx(
            mechanism.sensitivity("add_or_remove_one"), rel=1e-4
        )

    @pytest.mark.slow
    @settings(max_examples=60)
    @given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 4), st.floats(-3, 4))
    def test_no_records_of_a_person_move_the_sum_further(self, seed, k, dimension, magnitude):
        rng = np.random.default_rng(seed)
        rows = 10**magnitude * rng.standard_cauchy((8, dimension))
        other = rows.copy()
        other[rng.permutation(8)[:k]] = 10**magnitude * rng.standard_cauchy((k, dimension))
        present = jnp.ones(8, bool)
        total = jax.jit(clipped_sum)
        moved = total(rows.astype(np.float32), present, CLIP) - total(
            other.astype(np.float32), present, CLIP
        )
        mechanism = GaussianSum(CLIP, 4.0, FullBatch(), 8, 8, contributions=k)
        assert np.linalg.norm(moved) <= mechanism.sensitivity("replace_one")

    @pytest.mark.parametrize("weight", [1.0, 1 / 4])
    @pytest.mark.parametrize("k", [1, 3, 4])
    def test_the_bound_on_shards_is_reached(self, k, weight):
        mechanism = GaussianShardSum(CLIP, 4.0, 4, 12, weight, contributions=k)
        changes = np.full((4, 1), 100.0, np.float32)
        other = changes.copy()
        other[:k] *= -1
        present = jnp.ones(4, bool)
        moved = weight * (clipped(changes, present, CLIP) - clipped(other, present, CLIP)).sum()
        assert float(moved) == pytest.approx(mechanism.sensitivity("replace_one"), rel=1e-4)


class TestPlans:
    @pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
    @pytest.mark.parametrize("k", [1, 3, 10])
    def test_of_gradients_cover_all_records_of_a_person(self, k, relation):
        budget = PrivacyBudget(1.0, 1e-5, relation, max_records_per_person=k)
        mine = of_gradients(
            [budget],
            FullBatch(),
            clip_norm=CLIP,
            releases_per_visit=3,
            num_visits=[5],
            client_sizes=[200],
        ).clients[0]
        per_record = CLIP * (2 if relation == "replace_one" else 1)
        assert mine.mechanism.sensitivity(relation) == pytest.approx(k * per_record)
        exact = cost(mine.mechanism.noise_std, k * per_record, 15)
        assert mine.epsilon == pytest.approx(exact, rel=1e-9)
        assert 0.995 <= mine.epsilon <= 1
        # k times the noise of single records.
        single = of_gradients(
            [PrivacyBudget(1.0, 1e-5, relation)],
            FullBatch(),
            clip_norm=CLIP,
            releases_per_visit=3,
            num_visits=[5],
            client_sizes=[200],
        )
        assert mine.mechanism.noise_std == pytest.approx(k * single.noise_std[0], rel=1e-12)

    @pytest.mark.parametrize("averaged", [True, False])
    @pytest.mark.parametrize("num_shards", [1, 4, 20])
    @pytest.mark.parametrize("budget", [PERSON, CLIENT], ids=["person", "client"])
    def test_of_changes_cover_all_shards_of_a_unit(self, budget, num_shards, averaged):
        mine = of_changes(
            [budget],
            clip_norm=CLIP,
            num_shards=[num_shards],
            averaged=averaged,
            num_visits=[5],
            client_sizes=[200],
        ).clients[0]
        changed = num_shards if budget is CLIENT else min(3, num_shards)
        sensitivity = 2 * CLIP * changed / (num_shards if averaged else 1)
        assert mine.mechanism.sensitivity("replace_one") == pytest.approx(sensitivity)
        assert mine.epsilon == pytest.approx(cost(mine.mechanism.noise_std, sensitivity, 5))
        assert 0.995 <= mine.epsilon <= 1

    @pytest.mark.slow
    @settings(max_examples=100)
    @given(
        st.floats(0.01, 20.0),
        st.floats(1e-10, 1e-2),
        st.floats(0.01, 100.0),
        st.lists(st.integers(1, 9), min_size=2, max_size=2),
        st.integers(1, 12),
        st.sampled_from([None, 2]),
    )
    def test_rounding_breaks_no_budget(self, epsilon, delta, clip_norm, num_shards, k, shares):
        budgets = [
            PrivacyBudget(epsilon, delta, max_records_per_person=k),
            PrivacyBudget(epsilon, delta, unit="client"),
        ]
        plan = of_changes(
            budgets,
            clip_norm=clip_norm,
            num_shards=num_shards,
            averaged=True,
            num_visits=[10, 7],
            client_sizes=[90, 90],
            num_shares=shares,
        )
        for client in plan.clients:
            assert client.epsilon <= client.budget.epsilon

    @pytest.mark.parametrize("averaged", [True, False])
    @pytest.mark.parametrize("num_shards", [[4, 4, 4], [2, 10, 5]])
    @pytest.mark.parametrize("budget", [PERSON, CLIENT], ids=["person", "client"])
    def test_shared_noise_covers_every_client(self, budget, num_shards, averaged):
        plan = of_changes(
            [budget] * 3,
            clip_norm=CLIP,
            num_shards=num_shards,
            averaged=averaged,
            num_visits=[6] * 3,
            client_sizes=[50] * 3,
            num_shares=3,
        )
        together = math.sqrt(np.sum(plan.noise_std**2))
        for mine, shards in zip(plan.clients, num_shards, strict=True):
            changed = shards if budget is CLIENT else min(3, shards)
            moved = 2 * CLIP * changed / (shards if averaged else 1)
            assert cost(together, moved, 6) <= 1 + 1e-9
            assert together >= mine.mechanism.noise_std * (1 - 1e-9)

    def test_clients_may_have_units_of_their_own(self):
        plan = of_changes(
            [PrivacyBudget(1.0), PERSON, CLIENT],
            clip_norm=1.0,
            num_shards=[5] * 3,
            averaged=True,
            num_visits=[4] * 3,
            client_sizes=[50] * 3,
        )
        assert [c.mechanism.contributions for c in plan.clients] == [1, 3, 5]
        assert plan.noise_std.argsort().tolist() == [0, 1, 2]
        assert plan.unit == (
            "one client with all its records, one person with at most 3 records of one client, "
            "one record"
        )

    def test_a_sum_over_clients_wants_one_share_of_everyones_records(self):
        # Each client divides its noise by its own share: unequal ones do not add up to what the
        # smallest share needs.
        budgets = [PrivacyBudget(1.0)] * 2
        sampler = FixedSizeSampling(10)
        of_gradients(
            budgets,
            sampler,
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[5, 5],
            client_sizes=[50, 50],
            num_shares=2,
        )
        of_gradients(
            budgets,
            sampler,
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[5, 5],
            client_sizes=[50, 80],
        )
        of_gradients(
            budgets,
            PoissonSampling(0.1),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=[5, 5],
            client_sizes=[50, 80],
            num_shares=2,
        )
        with pytest.raises(ValueError, match=r"same fraction of every client's .* 0.125 to 0.2"):
            of_gradients(
                budgets,
                sampler,
                clip_norm=1.0,
                releases_per_visit=1,
                num_visits=[5, 5],
                client_sizes=[50, 80],
                num_shares=2,
            )


class TestRefusals:
    @pytest.mark.parametrize("sampler", [PoissonSampling(0.1), FixedSizeSampling(20)])
    @pytest.mark.parametrize("sizes", [[20], [50]])
    def test_sampled_batches_are_for_single_records(self, sampler, sizes):
        sentence = r"FullBatch\(\) if a budget protects a person with at most 3 .* got "
        with pytest.raises(ValueError, match=sentence + type(sampler).__name__):
            of_gradients(
                [PERSON],
                sampler,
                clip_norm=1.0,
                releases_per_visit=1,
                num_visits=[5],
                client_sizes=sizes,
            )
        with pytest.raises(ValueError, match=sentence):
            rounds_from_epsilon(PERSON, 5.0, sampler=sampler, num_records=sizes[0])
        with pytest.raises(ValueError, match=sentence):
            ClientPlan(PERSON, GaussianSum(1.0, 9.0, sampler, 50, 50, contributions=3), 5, 1)

    @pytest.mark.parametrize(
        ("method", "options"),
        [
            (dppvi.DPOptimization(), {}),
            (dppvi.BayesianCommitteeMachine(), {}),
            (dppvi.GlobalVI(), {"trusted_aggregator": True}),
        ],
    )
    def test_methods_that_clip_records_do_not_protect_clients(self, method, options):
        with pytest.raises(ValueError, match=r"unit must be 'record' .*method=VirtualClients"):
            dppvi.plan_privacy(method, CLIENT, num_rounds=3, client_sizes=[50] * 2, **options)

    def test_a_mechanism_for_less_than_the_unit(self):
        # Written by hand; plan_privacy asks the budget.
        weak = GaussianSum(1.0, 9.0, FullBatch(), 50, 50)
        with pytest.raises(ValueError, match=r"contributions must be at least 3 .* got 1"):
            ClientPlan(PERSON, weak, 5, 1)
        shards = GaussianShardSum(1.0, 9.0, 5, 50, contributions=4)
        ClientPlan(PERSON, shards, 5, 1)
        with pytest.raises(ValueError, match="at least 5 if a budget protects a client"):
            ClientPlan(CLIENT, shards, 5, 1)

    @pytest.mark.parametrize(
        ("words", "arguments"),
        [
            ("unit must be 'record' or 'client', got 'person'", {"unit": "person"}),
            ("max_records_per_person must be a whole number", {"max_records_per_person": 0}),
            ("max_records_per_person must be a whole number", {"max_records_per_person": 2.5}),
            (
                "max_records_per_person must be left out with unit='client'.* got 3",
                {"unit": "client", "max_records_per_person": 3},
            ),
            (
                "relation must be 'replace_one' with unit='client'",
                {"unit": "client", "relation": "add_or_remove_one"},
            ),
        ],
    )
    def test_budgets_that_mean_nothing(self, words, arguments):
        with pytest.raises(ValueError, match=words):
            PrivacyBudget(1.0, **arguments)


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "method", "unit", "asked"),
    [
        (
            PERSON,
            dppvi.DPOptimization(),
            "one person with at most 3 records of one client",
            "but one person's, sees everything that is released and has to say which of two",
        ),
        (
            CLIENT,
            dppvi.methods.LocalAveraging(4),
            "one client with all its records",
            "which of two sets of records it holds",
        ),
    ],
    ids=["person", "client"],
)
def test_a_fit_says_what_it_protects(budget, method, unit, asked):
    with dry_rounds():
        result = dppvi.fit(
            normal_mean,
            None,
            {"y": np.linspace(-1, 1, 40)},
            rng_key=jax.random.key(0),
            clients=2,
            method=method,
            budget=budget,
            num_rounds=2,
            progress_bar=False,
        )
    assert result.ledger.spent().max() <= 1
    statement = result.privacy_statement()
    facts = json.loads(statement.to_json())
    assert set(facts["clients"][0]) == set(
        statement_schema()["properties"]["clients"]["items"]["required"]
    )
    assert facts["unit"] == facts["clients"][0]["unit"] == unit
    assert facts["clients"][0]["contributions"] == (3 if budget is PERSON else 4)
    for text in (str(statement), statement.to_markdown()):
        flat = " ".join(text.split())
        assert f"{unit};" in flat
        assert f"over all clients, {unit} is protected by epsilon =" in flat
        assert asked in flat
    assert result.posterior.attrs["privacy"] == f"differential privacy, unit {unit}"
