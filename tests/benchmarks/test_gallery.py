"""The gallery: studies of many kinds are read, or refused for their true reason."""

import functools
import os

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from benchmarks import gallery
from benchmarks.studies import CLASSES, REFUSED, STUDIES
from numpyro_dppvi import guides, latents
from tests import dry

FITTED = [name for name in STUDIES if name not in REFUSED]
# Those whose records have discrete latents of their own, and some others.
PRIVATE = [name for name in CLASSES if STUDIES[name].guide is None]
PRIVATE += ["switching wells", "insurance claims", "choice of party", "Weibull survival", "batches"]


def test_there_are_at_least_sixty_each_with_records():
    assert len(STUDIES) >= 60
    assert len({id(study.model) for study in STUDIES.values()}) == len(STUDIES)
    for name, study in STUDIES.items():
        assert len({len(column) for column in study.records.values()}) == 1, name
        assert bool(study.refused) == (name in REFUSED)
        assert (study.twin is not None) == (name in CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n == "a process over records" else n
        for n in REFUSED
    ],
)
def test_it_is_refused_for_its_true_reason(name):
    found = gallery.tried(REFUSED[name])
    assert found.outcome == "refused", found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE)
def test_a_private_round_of_it_can_be_traced(name):
    """By the method that ``fit`` takes; ``python -m benchmarks noisy`` fits all."""
    study = STUDIES[name]
    with dry.traced_rounds():
        dppvi.fit(
            study.model,
            None,
            dict(study.records),
            rng_key=jax.random.key(0),
            clients=2,
            num_rounds=2,
            budget=dppvi.PrivacyBudget(3.0, 1e-5),
            model_kwargs=study.model_kwargs,
            progress_bar=False,
        )


@pytest.mark.slow
def test_a_study_that_is_refused_for_another_reason_fails():
    found = gallery.tried(REFUSED["one series by lags"]._replace(refused="the moon"))
    assert found.outcome == "fails"


def test_the_table_counts_outcomes(capsys):
    gallery.table(tuple(REFUSED)[:2])
    assert "2 studies: 0 runs, 2 refused, 0 fails; 0 of 0" in capsys.readouterr().out


def dies(names, what):
    os._exit(9)


@pytest.mark.slow
def test_many_are_fitted_in_processes_of_their_own(monkeypatch):
    """Which give their memory back; where one is killed, its studies fail, and the others go on."""
    monkeypatch.setattr(gallery, "_BATCH", 1)
    names = tuple(REFUSED)[:2]
    what = functools.partial(gallery.tried, beside=False)
    found = dict(gallery._each(names, what))
    assert {each.outcome for each in found.values()} == {"refused"}
    monkeypatch.setattr(gallery, "_of_batch", dies)
    found = dict(gallery._each(names, what))
    assert tuple(found) == names
    assert all(each.sentence.startswith("its process was killed") for each in found.values())


def test_the_page_says_what_comes_out_of_each():
    well = gallery.Found(
        "runs", "All 9 rounds ran and every merge was accepted.", 0.02, 1.0, 2.5, 9
    )
    unsettled = gallery.Found("runs", "It has not settled.", 0.5, 30.0, 2.5, 160)
    refused = gallery.Found("refused", "Write a | b.")
    page = gallery.markdown({"one": refused, "two": well, "three": unsettled})
    assert page.splitlines() == [
        "3 studies: 2 runs, 1 refused, 0 fails; 1 of 2 within 0.1 sd of SVI.",
        "",
        "| study | what the status says | rounds | a mean off by (sd) | a sd off by (%) |",
        "| - | - | - | - | - |",
        "| two | settled | 9 | 0.020 | 1.0 |",
        "| three | It has not settled. | 160 | 0.500 | 30.0 |",
        "| one | refused: Write a   b. | - | - | - |",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_it_is_read_and_adds_up(name):
    study = STUDIES[name]
    records = {key: np.asarray(column) for key, column in study.records.items()}
    space = latents.from_model(study.model, records, study.model_kwargs)
    latents.check_additive(space, study.model_kwargs, len(next(iter(records.values()))))
    latents.check_priors(space)
    guides.approximation(study.guide, study.model, space, records, study.model_kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_twin_has_the_same_density(name):
    """Both are sums over records; the twin has no latents of its own."""
    study = STUDIES[name]
    records = {key: np.asarray(column)[:20] for key, column in study.records.items()}
    mine, twin = (latents.from_model(model, records) for model in (study.model, study.twin))
    assert [latent.name for latent in mine.latents] == [latent.name for latent in twin.latents]
    assert mine.summation.summed or name == "outcomes not given"
    base = {lt.name: jax.numpy.full(lt.base_shape, 0.3) for lt in mine.latents}

    def densities(space):
        theta = space.constrain(base)
        return jax.jit(jax.vmap(space.log_likelihood, (None, 0)))(theta, records)

    np.testing.assert_allclose(densities(mine), densities(twin), rtol=2e-4, atol=2e-4)
