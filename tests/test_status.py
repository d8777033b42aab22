"""How a run ended is said in a sentence, and a run that diverges keeps its last good posterior."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi.run.history import _SETTLED, _SETTLED_WITH_NOISE, History, status_of
from tests.grids import grid

NUM_ROUNDS = 3


def means(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)


DATA = {"y": np.random.default_rng(0).normal(size=(12, 2))}


def run(method, **arguments):
    arguments = {"clients": 3, "num_rounds": NUM_ROUNDS, **arguments}
    return dppvi.fit(
        means,
        None,
        DATA,
        rng_key=jax.random.key(0),
        method=method,
        schedule=dppvi.synchronous,
        progress_bar=False,
        **arguments,
    )


def test_the_docs_name_all_outcomes_and_the_thresholds():
    page = (Path(__file__).parents[1] / "docs" / "posterior.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() >= {outcome.name for outcome in dppvi.run.Outcome}
    with_noise, without = _SETTLED_WITH_NOISE, _SETTLED
    words = (
        f"more than {with_noise:g} of its standard deviations with noise, or {without:g} without"
    )
    assert words in rows["UNSETTLED"]


def assert_prior(result):
    np.testing.assert_allclose(result.posterior.mean["mu"], 0)
    np.testing.assert_allclose(result.posterior.stddev["mu"], 2)


def test_a_run_without_incidents():
    result = run(dppvi.NonPrivate(), num_rounds=12)
    assert re.match(r"History\(12 rounds, the last moved \S+ nats; ", repr(result.history))
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    assert result.status.moved < 0.1
    assert str(result.status) == "All 12 rounds ran and every merge was accepted."


@pytest.mark.slow
def test_a_committee_is_not_told_to_run_more_rounds():
    result = run(dppvi.BayesianCommitteeMachine(), budget=dppvi.PrivacyBudget(8.0))
    assert result.history.movement[-1] > 1
    assert str(result.status) == "The one round ran and every merge was accepted."


@pytest.mark.slow
def test_a_run_that_still_moves_is_no_success():
    result = run(dppvi.NonPrivate(num_local_steps=2))
    assert result.status.outcome is dppvi.run.Outcome.UNSETTLED
    last = result.history.movement[-1]
    assert result.status.moved == pytest.approx(np.sqrt(last / 2))
    assert str(result.status).startswith(
        "All 3 rounds ran, but the posterior has not settled: the last one still moved it by"
    )
    assert str(result.status).endswith("Write num_rounds=6, or leave it out.")


@pytest.mark.slow
def test_a_merge_outside_the_domain_is_refused_and_told():
    """Each of three clients undoes most of the prior, and together they undo more than it."""
    widen = optax.GradientTransformation(
        lambda params: (),
        lambda grads, state, params: (
            {"mu": grads["mu"]._replace(loc=jnp.zeros(2), log_scale=jnp.ones(2))},
            state,
        ),
    )
    result = run(dppvi.NonPrivate(num_local_steps=2, optimizer=widen), damping=1.0)
    assert result.status.outcome is dppvi.run.Outcome.DIVERGED
    assert str(result.status).startswith(
        "All 3 rounds ran. 3 merges would have left the family's domain"
    )
    assert "charged" not in str(result.status)
    assert result.history.rejected.tolist() == [1, 1, 1]
    assert_prior(result)


@pytest.mark.slow
@grid("private", [False, True], quick=[1])
def test_solves_that_end_in_no_numbers_are_told_and_the_budget_is_spent(private):
    optimizer = optax.stateless(lambda slope, _: jax.tree.map(lambda leaf: np.nan * leaf, slope))
    if private:
        method = dppvi.DPOptimization(num_local_steps=2, optimizer=optimizer)
        result = run(method, budget=dppvi.PrivacyBudget(1.0, 1e-5))
        np.testing.assert_allclose(result.ledger.spent(), 1.0, rtol=5e-3)
        assert "is charged all the same" in str(result.status)
    else:
        result = run(dppvi.NonPrivate(num_local_steps=2, optimizer=optimizer))
    assert result.status.outcome is dppvi.run.Outcome.DIVERGED
    assert "9 visits ended in no finite numbers" in str(result.status)
    assert result.history.failed.tolist() == [3, 3, 3]
    assert_prior(result)


@pytest.mark.slow
def test_a_failure_that_noise_hides_is_not_told():
    """Whether a solve before the noise failed is the client's secret."""
    method = dppvi.methods.ParameterPerturbation(num_local_steps=2, optimizer=optax.sgd(np.inf))
    result = run(method, budget=dppvi.PrivacyBudget(1.0, 1e-5))
    assert result.history.failed.tolist() == [0, 0, 0]
    assert "finite" not in str(result.status)


def history(projected=(0, 0), rejected=(0, 0), failed=(0, 0), movement=(1.0, 0.01)):
    counts = (np.array(x) for x in (projected, rejected, failed))
    return History({}, np.array(movement), *counts)


@pytest.mark.parametrize(
    ("events", "interrupted", "outcome", "words"),
    [
        ({}, False, "COMPLETED", ["All 2 rounds ran and every merge was accepted."]),
        (
            {"projected": (3, 4)},
            False,
            "PROJECTED",
            ["All 2 rounds ran and every merge was accepted."],
        ),
        (
            {"movement": (0.5, 0.25)},
            False,
            "UNSETTLED",
            [
                "still moved it by 0.5 of its",
                "Write num_rounds=4, or allow a larger epsilon.",
                "Another run on the same records spends its budget on top of this one's.",
            ],
        ),
        (
            {"projected": (1, 0), "rejected": (0, 2)},
            False,
            "DIVERGED",
            ["All 2 rounds ran. 2 merges would have", "released is charged"],
        ),
        (
            {"failed": (1, 0)},
            False,
            "DIVERGED",
            [
                "1 visit ended in no finite numbers",
                # Newton's steps have no learning rate, and are what most visits take.
                "Use priors and units under which",
                "where method= names an optimizer, a smaller learning rate",
            ],
        ),
        (
            {"rejected": (1, 0)},
            True,
            "INTERRUPTED",
            ["was interrupted: 2 of 5 rounds ran", "1 merge would have"],
        ),
    ],
)
def test_sentences(events, interrupted, outcome, words):
    num_rounds = 5 if interrupted else 2
    status = status_of(history(**events), num_rounds, True, interrupted)
    assert status.outcome is dppvi.run.Outcome[outcome]
    for word in words:
        assert word in str(status)
    assert str(status).endswith(".")


def test_a_pull_that_noise_does_not_explain_is_said():
    """However little the last round moved: small rounds can go a long way."""
    status = status_of(history(), 2, True, False, num_latents=4, pull=36.0)
    assert status.outcome is dppvi.run.Outcome.UNSETTLED
    assert "pulls it away, 6 times as strongly as noise explains" in str(status)
    assert "Write num_rounds=4, or priors and units" in str(status)
    assert "synchronous" not in str(status)
    in_turn = status_of(history(), 2, True, False, num_latents=4, pull=36.0, in_turn=True)
    assert "(each one outcome, say), write schedule=dppvi.synchronous." in str(in_turn)
    # The mean of four squares of standard normal numbers exceeds 5.88 once in ten thousand times.
    for pull, pulled in ((5.8, False), (5.95, True)):
        assert status_of(history(), 2, True, False, num_latents=4, pull=pull).pulled is pulled


def test_intervals_that_are_mostly_noise_are_no_success():
    status = status_of(history(), 2, True, False, widened=8.03)
    assert status.outcome is dppvi.run.Outcome.NOISY
    assert str(status).startswith("All 2 rounds ran, but most of what was released is noise")
    assert "about 8 times as wide as they would be without privacy" in str(status)
    unsettled = status_of(history(), 2, True, False, pull=36.0, widened=8.03)
    assert unsettled.outcome is dppvi.run.Outcome.UNSETTLED
    assert "about 8 times as wide" in str(unsettled)
    assert status_of(history(), 2, True, False, widened=2.9).outcome is dppvi.run.Outcome.COMPLETED


def test_outcomes_that_clips_cut_are_no_success():
    status = status_of(history(), 2, True, False, widened=8.03, cut=0.0123)
    assert status.outcome is dppvi.run.Outcome.BENT
    assert str(status).startswith("All 2 rounds ran, but outcomes lie further out than the model")
    assert "0.012 of the records are far out" in str(status)
    assert "StudentT in the place of Normal" in str(status)
    assert "about 8 times as wide" in str(status)
    assert status_of(history(), 2, True, False, cut=0.0).outcome is dppvi.run.Outcome.COMPLETED
    unsettled = status_of(history(), 2, True, False, pull=36.0, cut=0.0123)
    assert unsettled.outcome is dppvi.run.Outcome.UNSETTLED
    assert "Besides, outcomes lie further out than the model says" in str(unsettled)


def test_more_far_records_than_can_be_outliers_are_a_posterior_that_is_far_off():
    status = str(status_of(history(), 2, True, False, cut=0.63))
    assert status.startswith("All 2 rounds ran, but 0.63 of the records are further out than")
    assert "too many to be outliers" in status
    assert "Allow a larger epsilon" in status


def test_latents_of_which_little_was_learnt_are_named_in_a_success():
    faint = (("b", 2, 8), ("phi", 1, 1))
    status = status_of(history(), 2, True, False, widened=1.3, faint=faint)
    assert status.outcome is dppvi.run.Outcome.COMPLETED
    assert str(status) == (
        "All 2 rounds ran and every merge was accepted. Little was learnt of 2 of the 8 entries of "
        "'b' and 'phi': intervals are more than half as wide as under the prior."
    )
    assert "learnt" not in str(status_of(history(), 2, True, False, faint=faint))


def test_effects_do_not_pass_for_what_was_learnt():
    """They are as narrow as their spread says, also if that and all else is the prior still."""

    def outcome(least, above):
        told = {"least": least, "above": above, "narrowed": 0.1, "widened": 1.3}
        return status_of(history(), 2, True, False, **told).outcome

    assert outcome(2.7, 0.5) is dppvi.run.Outcome.NOISY
    assert outcome(2.7, 0.2) is outcome(1.9, 0.5) is dppvi.run.Outcome.COMPLETED


def test_what_would_not_have_been_seen_is_not_passed_over():
    """A run says nothing against its model either if noise hides what is against it."""
    success = "All 2 rounds ran and every merge was accepted."

    def said(unseen, **others):
        return str(status_of(history(), 2, True, False, cut=0.0, unseen=unseen, **others))

    assert said(None) == said(0.02) == success
    assert said(0.0834).startswith(success + " Outcomes further out than the model says pull")
    assert "would have been noticed only in more than 8.3 % of the records" in said(0.0834)
    assert "here they could not have been noticed" in said(1.0)
    assert "further out" not in said(0.0834, widened=8.03)


def test_a_posterior_that_hardly_differs_from_the_prior_is_said_to():
    status = status_of(history(), 2, True, False, widened=8.03, narrowed=0.97)
    said = "from the prior: three quarters of the latents are at least 97 % as wide as under"
    assert said in str(status)
    # Noise is why, and a narrower prior helps; where it is not, the prior is narrow already.
    assert str(status).endswith("a model of fewer latents or narrower priors.")
    half = str(status_of(history(), 2, True, False, widened=8.03, narrowed=0.897))
    assert " Three quarters of the latents are at least 89 % as wide as under the prior." in half
    assert "hardly differs" not in half
    some = status_of(history(), 2, True, False, widened=8.03, narrowed=0.4)
    assert "prior:" not in str(some)
    # Whatever is wide by itself is no reason to worry.
    fine = status_of(history(), 2, True, False, widened=1.1, narrowed=0.9)
    assert str(fine) == "All 2 rounds ran and every merge was accepted."
    idle = status_of(history(), 2, True, False, widened=1.1, narrowed=0.91)
    assert idle.outcome is dppvi.run.Outcome.NOISY
    assert str(idle).startswith("All 2 rounds ran, but little was learnt. The posterior hardly")
    assert str(idle).endswith("or write a model of fewer latents.")


def test_where_releases_do_not_tell_of_noise_the_budget_does():
    told = {"least": 21.4, "narrowed": 0.4}
    status = status_of(history(), 2, True, False, **told)
    assert status.outcome is dppvi.run.Outcome.NOISY
    assert "intervals must be at least 21 times as wide" in str(status)
    assert "about 30 times" in str(status_of(history(), 2, True, False, widened=30.0, **told))
    assert "at least 21 times" in str(status_of(history(), 2, True, False, widened=1.9, **told))
    for changes in ({"least": 2.9}, {"narrowed": 0.2}, {"narrowed": None}):
        fine = status_of(history(), 2, True, False, **{**told, **changes})
        assert fine.outcome is dppvi.run.Outcome.COMPLETED
        # What is fine otherwise says that it does not know of noise.
        assert "do not know of the noise" in str(fine)
    little = status_of(history(), 2, True, False, least=1.4, narrowed=0.4)
    assert str(little) == "All 2 rounds ran and every merge was accepted."


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, dppvi.DPOptimization(), dppvi.FisherScoring()])
def test_a_budget_for_next_to_nothing_is_no_success(method):
    data = {"y": np.random.default_rng(0).normal(2, 1.5, size=(300, 2))}
    arguments = {"rng_key": jax.random.key(0), "clients": 3, "progress_bar": False}
    budget = dppvi.PrivacyBudget(0.01)
    result = dppvi.fit(means, None, data, method=method, budget=budget, **arguments)
    said = ("most of what was released is noise", "Noise makes its intervals", "has not settled")
    assert any(words in str(result.status) for words in said)


def test_a_spread_of_effects_that_nobody_has_seen_is_no_success():
    """Its normal approximation is too narrow, wherever it is."""
    untold = (("effects", ("mu", "tau")),)
    status = status_of(history(), 2, True, False, untold=untold)
    assert status.outcome is dppvi.run.Outcome.NOISY
    assert "noise hides what records say of 'effects', and so of 'mu' and 'tau'" in str(status)
    assert "LocScaleReparam" in str(status)


def _heavy(loc, scale):
    return dist.StudentT(4, loc, scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "epsilon", "said"),
    # Normal effects are integrated out, and their spread is as unsure as it should be.
    [(_heavy, 0.3, True), (_heavy, 1000.0, False), (dist.Normal, 0.3, False)],
)
def test_a_run_says_it_of_effects(law, epsilon, said):
    def groups(g, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("groups", 3):
            effects = numpyro.sample("effects", law(0, tau))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(effects[g], 1), obs=y)

    rng = np.random.default_rng(0)
    g = rng.integers(3, size=300)
    data = {"g": g, "y": (np.array([-0.7, 0.1, 0.9])[g] + rng.normal(size=300)).astype("f")}
    result = dppvi.fit(
        groups,
        None,
        data,
        clients=3,
        rng_key=jax.random.key(0),
        budget=dppvi.PrivacyBudget(epsilon),
        progress_bar=False,
        insecure_noise_seed=0,
    )
    assert (result.status.untold == (("effects", ("tau",)),)) is said


@pytest.mark.parametrize(
    "told",
    [
        {"pull": 36.0, "widened": 8.03},
        {"widened": 8.03, "narrowed": 0.97},
        {"narrowed": 0.97},
        {"untold": (("effects", ("mu", "tau")),)},
        {"caution": "", "left": None},
    ],
    ids=", ".join,
)
def test_where_no_noise_was_added_it_is_not_to_blame(told):
    """An infinite epsilon cannot be raised, and nothing of it is spent: more rounds may help."""
    moving = history(movement=(1.0, 1.0) if "left" in told else (1.0, 0.01))
    status = status_of(moving, 2, True, False, noiseless=True, **told)
    assert not re.search("nois|epsilon|budget", str(status), re.IGNORECASE)
    assert "Write num_rounds=4" in str(status)
    assert re.search("nois|epsilon", str(status_of(moving, 2, True, False, **told)))


@pytest.mark.slow
@pytest.mark.parametrize("method", [dppvi.DPOptimization(), dppvi.FisherScoring()])
def test_a_run_under_an_infinite_epsilon_knows_of_no_noise(method):
    result = run(method, budget=dppvi.PrivacyBudget(np.inf), num_rounds=2)
    assert result.status.noiseless
    assert not re.search("nois|epsilon|budget", str(dppvi.diagnose(result)), re.IGNORECASE)
    assert not run(method, budget=dppvi.PrivacyBudget(1e3), num_rounds=2).status.noiseless


@pytest.mark.slow
def test_steps_that_cannot_come_from_the_prior_are_no_success():
    """The caution before the run is told again after it."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 300).expand([2]).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.5).to_event(1), obs=y)

    arguments = {"rng_key": jax.random.key(0), "progress_bar": False, "num_rounds": 1}
    method, budget = dppvi.DPOptimization(num_local_steps=1), dppvi.PrivacyBudget(3.0)
    with pytest.warns(UserWarning, match="a standard deviation of 300") as caught:
        result = dppvi.fit(model, None, DATA, method=method, budget=budget, **arguments)
    assert Path(caught[0].filename) == Path(__file__)
    assert result.status.outcome is dppvi.run.Outcome.UNSETTLED
    assert "The one round ran, but the posterior has not arrived: the prior of" in str(
        result.status
    )


def test_visits_that_change_nothing_have_settled_nothing():
    """A posterior that no visit can move stands still."""
    said = str(status_of(history(failed=(3, 3)), 160, False, False, left=0.0, until_settled=True))
    assert said.startswith("The run ended after 2 rounds. 6 visits ended in no finite numbers")
    assert "settled" not in said


def test_an_interrupt_after_the_last_round_is_none():
    assert status_of(history(), 2, True, True).outcome is dppvi.run.Outcome.COMPLETED


@pytest.mark.slow
def test_a_committee_has_one_round_and_no_next():
    committee = dppvi.BayesianCommitteeMachine("split")
    result = run(committee, num_rounds=None, budget=dppvi.PrivacyBudget(1.0))
    assert str(result.status).startswith("The one round ran")
    assert result.status.outcome is not dppvi.run.Outcome.UNSETTLED
