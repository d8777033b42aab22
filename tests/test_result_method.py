"""A result names the method that was asked for, whatever its clients were made to run."""

import json

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds
from tests.grids import grid

DATA = [{"y": np.linspace(-1, 1, size).astype(np.float32)} for size in (40, 60)]
BUDGET = dppvi.PrivacyBudget(2.0, 1e-5)
LOCAL = dppvi.DPOptimization(num_local_steps=2)
TOGETHER = {"schedule": dppvi.synchronous, "trusted_aggregator": True}
RUNS = {
    "gradients": (LOCAL, {}),
    "perturbed": (dppvi.methods.ParameterPerturbation(num_local_steps=2), {}),
    "averaging": (dppvi.methods.LocalAveraging(4, num_local_steps=2), TOGETHER),
    "virtual": (dppvi.VirtualClients(4, num_local_steps=2), {}),
    "committee": (dppvi.BayesianCommitteeMachine("same", LOCAL), {}),
    "split committee": (dppvi.BayesianCommitteeMachine("split", LOCAL), {}),
    "global": (dppvi.GlobalVI(), TOGETHER),
    "not private": (dppvi.NonPrivate(2), {"budget": None}),
}


def normal_mean(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def run(method, **arguments):
    arguments = {"num_rounds": 2, "budget": BUDGET, "progress_bar": False, **arguments}
    return dppvi.fit(normal_mean, None, DATA, rng_key=jax.random.key(0), method=method, **arguments)


@grid("name", RUNS, quick=[2, 3, 5, 6, 7])
def test_everything_names_the_method_that_was_asked_for(name):
    method, arguments = RUNS[name]
    with dry_rounds():
        result = run(method, **arguments)
    assert result.method is method
    kind = type(method).__name__
    assert result.posterior.attrs["method"] == kind
    statement = result.privacy_statement()
    assert json.loads(statement.to_json())["method"] == kind
    for told in (str(statement), statement.to_markdown()):
        assert kind in told
        others = {type(other).__name__ for other, _ in RUNS.values()} - {kind}
        assert not [other for other in others if other in told]
    assert ("tresp2000bcm" in dppvi.citation(result).keys) == ("committee" in name)
    assert ("abadi2016dpsgd" in dppvi.citation(result).keys) == (
        name in ("gradients", "committee", "split committee", "global")
    )


def test_one_undamped_synchronous_round_is_no_committee():
    """Nothing is guessed from how a run was wired."""
    with dry_rounds():
        result = run(LOCAL, num_rounds=1, damping=1.0, schedule=dppvi.synchronous)
    assert "tresp2000bcm" not in dppvi.citation(result).keys
    assert "ashman2022pvi" in dppvi.citation(result).keys


@pytest.mark.slow
def test_a_checkpoint_says_which_committee_it_is_of(tmp_path):
    """Both kinds run the same local method; what one has kept is no start for the other."""
    path = tmp_path / "run.npz"
    with dry_rounds():
        run(RUNS["committee"][0], checkpoint=path)
    with pytest.raises(ValueError, match="another method: it has BayesianCommitteeMachine"):
        run(RUNS["split committee"][0], checkpoint=path)
    with pytest.raises(ValueError, match="another method: it has BayesianCommitteeMachine"):
        run(LOCAL, checkpoint=path)


@pytest.mark.slow
def test_a_committee_is_diagnosed_as_what_its_clients_ran():
    found = dppvi.diagnose(run(RUNS["split committee"][0]), num_replays=4)
    assert np.all(found.noise["mean"] > 0)
