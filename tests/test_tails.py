"""Whether clips cut more scores than the model expects, from counts that are known."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi.methods import tails

RECORDS, VISITS, COUNTED = 1000.0, 5, 7


def after(excesses, noise_std=0.0, first=tails.SETTLED + 1):
    """What is known after rounds of five visits; of each, how many scores too many were far out."""
    rng, known = np.random.default_rng(0), tails.nothing()
    for number, excess in enumerate(excesses, first):
        for _ in range(VISITS):
            # A sum of 1 for every score that the model clips and of -1 for every other one.
            flags = jnp.array([excess / VISITS, 2 * 30.0 - RECORDS])
            flags += noise_std * rng.normal(size=2)
            known = tails.after(known, float(number), flags, jnp.full(2, noise_std**2), RECORDS)
    return known


@pytest.mark.parametrize(
    ("excesses", "first"),
    [((50.0,) * 7, 4), ((500.0, *(50.0,) * 7), 4), ((500.0, 500.0, 500.0, 50.0), 1)],
)
def test_the_last_rounds_count(excesses, first):
    """Early ones, in which the model was far from the records, do not: nor in a short run."""
    found = tails.cut(after(excesses, first=first))
    np.testing.assert_allclose(found, 50 / (VISITS * RECORDS), rtol=1e-5)


def test_nothing_is_said_of_what_may_be_noise():
    """The excess is a sum over 35 visits."""
    deviation = np.sqrt(COUNTED * VISITS) * 3.0
    assert tails.cut(tails.nothing()) == 0
    assert tails.cut(after([-50.0] * COUNTED)) == 0
    for deviations, said in ((2.5, False), (2.7, True)):
        known = after([0.0] * COUNTED, noise_std=3.0)
        np.testing.assert_allclose(np.sum(known.excess_var), deviation**2)
        known = known._replace(
            excess=jnp.full(COUNTED, deviations * deviation / COUNTED),
            expected=jnp.zeros(COUNTED),
        )
        assert bool(tails.cut(known) > 0) is said


@pytest.mark.parametrize(("excess", "said"), [(30.0, False), (33.0, True)])
def test_chance_is_that_of_the_records(excess, said):
    """150 are expected in each round, and the same records are seen in all of them."""
    assert bool(tails.cut(after([excess] * COUNTED)) > 0) is said


def test_noise_alone_stays_within_its_deviation():
    known = after([0.0] * COUNTED, noise_std=3.0)
    assert abs(np.sum(known.excess)) < 3 * np.sqrt(np.sum(known.excess_var))
