"""The study that tests of Flower run, in one process."""

import jax
import numpy as np

import numpyro_dppvi as dppvi
from numpyro_dppvi import silo
from tests.silo import hospitals


def assert_same(folder):
    """The posterior that was saved there is the one of ``fit``, to the last bits of 24."""
    study = silo.load_study(folder / "study.py").study
    wanted = dppvi.fit(
        study.model,
        study.guide,
        hospitals.records(),
        rng_key=jax.random.key(study.seed),
        method=study.method,
        budget=study.budget,
        schedule=study.schedule,
        num_rounds=study.num_rounds,
        insecure_noise_seed=7,
        progress_bar=False,
    )
    assert_close(folder, wanted)


def assert_close(folder, wanted):
    """The posterior that was saved there is a result's, to the last bits of 24."""
    found = dppvi.load(folder / "posterior.npz", wanted.posterior.model)
    for a, b in zip(*map(jax.tree.leaves, (found.natural, wanted.posterior.natural)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.max(np.abs(b)))
