"""What a run says that it rests on, for every method and accountant; the entries are BibTeX."""

import importlib
import re

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import privacy
from tests.dry import dry_rounds

ALWAYS = {"numpyro_dppvi", "heikkila2023dppvi", "phan2019numpyro"}
BUDGET = dppvi.PrivacyBudget(2.0, 1e-5)


def normal_mean(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


DATA = [{"y": np.linspace(-1, 1, size).astype(np.float32)} for size in (40, 60)]


def run(method=None, budget=BUDGET, **arguments):
    arguments = {"num_rounds": 1, "progress_bar": False, **arguments}
    key = jax.random.key(0)
    with dry_rounds():
        return dppvi.fit(
            normal_mean, None, DATA, rng_key=key, method=method, budget=budget, **arguments
        )


def of(sampler):
    return dppvi.DPOptimization(num_local_steps=1, sampler=sampler)


@pytest.fixture(scope="module")
def default():
    return run()


@pytest.mark.slow
def test_the_default_cites_gradients_and_the_closed_form(default):
    found = set(dppvi.citation(default).keys)
    assert found == ALWAYS | {"ashman2022pvi", "abadi2016dpsgd", "balle2018gaussian"}


@pytest.mark.parametrize(
    ("arguments", "besides"),
    [
        (
            {"method": of(dppvi.PoissonSampling(0.2))},
            {"ashman2022pvi", "abadi2016dpsgd", "doroshenko2022dots"},
        ),
        (
            {"method": of(dppvi.FixedSizeSampling(8))},
            {"ashman2022pvi", "abadi2016dpsgd", "doroshenko2022dots", "zhu2022characteristic"},
        ),
        ({"method": dppvi.methods.LocalAveraging(4)}, {"ashman2022pvi", "balle2018gaussian"}),
        ({"method": dppvi.NonPrivate(1), "budget": None}, {"ashman2022pvi"}),
        (
            {"method": dppvi.BayesianCommitteeMachine("split", dppvi.DPOptimization())},
            {"tresp2000bcm", "abadi2016dpsgd", "balle2018gaussian"},
        ),
        (
            {"method": dppvi.GlobalVI(), "trusted_aggregator": True},
            {"jalko2017dpvi", "abadi2016dpsgd", "balle2018gaussian"},
        ),
    ],
    ids=["Poisson", "fixed size", "averaging", "not private", "committee", "global"],
)
def test_a_run_cites_what_it_used(arguments, besides):
    found = dppvi.citation(run(**arguments))
    assert set(found.keys) == ALWAYS | besides
    assert found.keys[0] == "numpyro_dppvi"
    assert dppvi.__version__ in str(found)


def test_a_selection_cites_how_it_was_charged(default):
    plan = privacy.plan_selection(
        BUDGET, privacy.NegativeBinomialRuns(1.5), client_sizes=(40, 60), score_bound=1.0
    )
    chosen = dppvi.analysis.Selection("a setting", default, 0.0, plan, ("a setting", "another"))
    assert "papernot2022tuning" in dppvi.citation(chosen).keys


def test_anything_else_is_refused(default):
    with pytest.raises(TypeError, match="result must be a FitResult or Selection"):
        dppvi.citation(default.posterior)


MODULE = importlib.import_module("numpyro_dppvi.analysis.citations")
ENTRIES = {key: text for key, text in MODULE._entries().items() if key != "numpyro_dppvi"}


def test_all_entries_were_found():
    assert len(ENTRIES) == 11


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_is_bibtex(name):
    text = ENTRIES[name]
    assert text.count("{") == text.count("}")
    assert re.match(r"@(article|misc|inproceedings)\{[a-z0-9]+,\n", text)
    fields = dict(re.findall(r"^  (\w+) *= \{(.*)\},?$", text, flags=re.MULTILINE))
    assert len(fields) == len(text.splitlines()) - 2
    assert {"title", "author", "year"} <= fields.keys()
    assert re.search(r"\d{4}", fields["year"])
    assert str(fields["year"]) in text.splitlines()[0]
    for author in fields["author"].split(" and "):
        assert author.count(",") == 1, author
    assert fields.keys() & {"journal", "booktitle", "eprint"}


def test_it_is_shown_as_it_is_printed(default):
    found = dppvi.citation(default)
    assert repr(found) == str(found)
    assert str(found).startswith("% This software\n@software{numpyro_dppvi,")
