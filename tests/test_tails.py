"""Whether clips cut more scores than the model expects, from counts that are known."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi.methods import tails

RECORDS, VISITS = 1000.0, 5


def after(excesses, noise_std=0.0):
    """What is known after rounds of five visits; of each, how many scores too many were cut."""
    rng, known = np.random.default_rng(0), tails.nothing()
    for number, excess in enumerate(excesses, 2):
        for _ in range(VISITS):
            # A sum of 1 for every score that was clipped and of -1 for every other one.
            clipped = jnp.array([30.0 + excess / VISITS, 30.0])
            flags = 2 * clipped - RECORDS + noise_std * rng.normal(size=2)
            known = tails.after(known, float(number), flags, noise_std**2, RECORDS)
    return known


@pytest.mark.parametrize("excesses", [(50.0,) * 4, (500.0, 50.0, 50.0, 50.0, 50.0)])
def test_the_last_four_rounds_count(excesses):
    """Early ones, in which the model was far from the records, do not."""
    np.testing.assert_allclose(tails.cut(after(excesses)), 50 / (VISITS * RECORDS), rtol=1e-5)


def test_nothing_is_said_of_what_may_be_noise():
    """The excess is half a difference of two sums over 20 visits."""
    deviation = np.sqrt(2 * 20 / 4) * 3.0
    assert tails.cut(tails.nothing()) == 0
    assert tails.cut(after([-50.0] * 4)) == 0
    for deviations, said in ((2.5, False), (2.7, True)):
        known = after([0.0] * 4, noise_std=3.0)
        np.testing.assert_allclose(np.sum(known.excess_var), deviation**2)
        known = known._replace(
            excess=jnp.full(4, deviations * deviation / 4), expected=jnp.zeros(4)
        )
        assert bool(tails.cut(known) > 0) is said


@pytest.mark.parametrize(("excess", "said"), [(30.0, False), (33.0, True)])
def test_chance_is_that_of_the_records(excess, said):
    """150 are expected in each round, and the same records are seen in all of them."""
    assert bool(tails.cut(after([excess] * 4)) > 0) is said


def test_noise_alone_stays_within_its_deviation():
    known = after([0.0] * 4, noise_std=3.0)
    assert abs(np.sum(known.excess)) < 3 * np.sqrt(np.sum(known.excess_var))
