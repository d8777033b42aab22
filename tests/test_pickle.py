"""What users keep can be pickled and copied, with the same numbers and nothing of the records."""

import copy
import dataclasses
import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds
from tests.grids import grid

KEY = jax.random.key(0)
SECRET = 12.345678901  # in every record


def model(y, num_groups):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([num_groups]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean[0], spread), obs=y)


def guide(y, num_groups):
    loc = numpyro.param("loc", np.zeros(num_groups))
    numpyro.sample("mean", dist.Normal(loc, 1).to_event(1))
    numpyro.sample("spread", dist.LogNormal(numpyro.param("m", 0.0), 1))


def run(of=None, **changes):
    data = {"Turku": {"y": np.full(20, SECRET)}, "Oulu": {"y": np.full(30, SECRET)}}
    options = {
        "method": dppvi.DPOptimization(num_local_steps=1),
        "budget": dppvi.PrivacyBudget(1.0),
        "num_rounds": 1,
        "model_kwargs": {"num_groups": 2},
        "progress_bar": False,
        **changes,
    }
    return dppvi.fit(model, of, data, rng_key=KEY, **options)


@pytest.fixture(scope="module")
def result():
    with dry_rounds():
        return run()


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = {"pickle": pickled, "copy": copy.copy, "deepcopy": copy.deepcopy}


def assert_same(mine, theirs):
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def assert_same_posterior(mine, theirs):
    assert mine is not theirs
    assert_same(mine.natural, theirs.natural)
    assert_same(mine.sample(KEY, (3,)), theirs.sample(KEY, (3,)))
    assert mine.summary() == theirs.summary()
    assert mine.attrs == theirs.attrs
    assert mine.space == theirs.space
    assert_same(mine.predictive(KEY, 2, y=np.zeros(3)), theirs.predictive(KEY, 2, y=np.zeros(3)))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_result_comes_back(result, way):
    again = WAYS[way](result)
    assert repr(again) == repr(result)
    assert str(again.privacy_statement()) == str(result.privacy_statement())
    assert again.plan == result.plan
    assert again.status == result.status
    assert_same(again.history, result.history)
    assert_same_posterior(WAYS[way](result.posterior), result.posterior)
    assert_same(again.posterior.natural, result.posterior.natural)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_result_that_came_back_can_be_diagnosed(result, way):
    again = WAYS[way](result)
    diagnosed = (str(dppvi.diagnose(each, num_replays=2)) for each in (again, result))
    assert len(set(diagnosed)) == 1


@pytest.mark.parametrize("way", WAYS)
def test_plans_statements_and_diagnostics_come_back(result, way):
    plan, statement = result.plan, result.privacy_statement()
    assert WAYS[way](plan) == plan
    assert str(WAYS[way](plan)) == str(plan)
    assert WAYS[way](statement).to_json() == statement.to_json()


@pytest.mark.slow
@grid("of", [AutoMultivariateNormal(model), guide], quick=[1])
@pytest.mark.parametrize("way", WAYS)
def test_posteriors_of_other_guides_come_back(of, way):
    with dry_rounds():
        found = run(of, method=dppvi.NonPrivate(num_local_steps=1), budget=None).posterior
    assert_same_posterior(WAYS[way](found), found)


@pytest.mark.filterwarnings("ignore:.* took part in the study whose posterior is the prior")
def test_a_posterior_that_went_on_from_another_comes_back(result):
    prior = result.posterior.as_prior()
    with dry_rounds():
        mine = run(prior=prior).posterior
    theirs = pickled(mine)
    assert_same_posterior(theirs, mine)
    assert_same(theirs.prior.natural, prior.natural)
    assert theirs.prior.attrs == prior.attrs
    assert_same(theirs._prior_draws(KEY, 2), mine._prior_draws(KEY, 2))


@pytest.mark.slow
def test_no_record_is_in_it():
    held = pickle.dumps(run())
    for dtype in (np.float32, np.float64):
        assert np.asarray(SECRET, dtype).tobytes() not in held


def test_a_deep_copy_has_mappings_of_its_own(result):
    again = copy.deepcopy(result.posterior)
    again.attrs["method"] = "another"
    again.model_kwargs["num_groups"] = 7
    assert result.posterior.attrs["method"] == "DPOptimization"
    assert result.posterior.model_kwargs == {"num_groups": 2}


def other_model(y, num_groups):
    numpyro.sample("mean", dist.Normal(0, 1).expand([num_groups + 1]).to_event(1))
    numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(0, 1), obs=y)


def renamed_model(y, num_groups):
    mean = numpyro.sample("level", dist.Normal(0, 1).expand([num_groups]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean[0], 1), obs=y)


@pytest.mark.parametrize("now", [other_model, renamed_model])
def test_a_model_that_has_changed_is_refused(result, now, monkeypatch):
    held = pickle.dumps(result.posterior)
    now.__name__, now.__qualname__ = "model", "model"
    monkeypatch.setitem(globals(), "model", now)
    with pytest.raises(ValueError, match=r"pickled with another model, which has.*restore"):
        pickle.loads(held)


def test_without_shapes_of_the_data_there_is_no_way_back(result):
    with pytest.raises(ValueError, match="records must hold the shapes of the data"):
        pickle.dumps(dataclasses.replace(result.posterior, records={}))


def test_a_prior_is_made_of_a_posterior_that_is_back(result):
    prior = result.posterior.as_prior()
    with pytest.raises(TypeError, match=r"a Prior cannot be pickled: pickle the posterior"):
        pickle.dumps(prior)
    for again in (copy.copy(prior), copy.deepcopy(prior)):
        assert_same(again.natural, prior.natural)
