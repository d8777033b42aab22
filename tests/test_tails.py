"""Whether more scores lie far out than the model expects, from counts that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dppvi.methods import tails
from tests.grids import grid

RECORDS, VISITS, COUNTED = 1000.0, 5, 7
FAR, NEAR = [1.0, 0.0], [0.0, -1.0]

after_visit = jax.jit(tails.after)


def after(excesses, kind=FAR, noise_std=0.0, away=0):
    """What is known after rounds of five visits; of each, how many scores were in excess.

    The model expects 30 far ones a visit, and far less near ones have a variance of 80. In the
    first rounds it is far ``away`` from the records.
    """
    rng, known = np.random.default_rng(0), tails.nothing()
    for number, excess in enumerate(excesses, 1):
        for _ in range(VISITS):
            # A sum of 1 for what the model expects and of -1 for every other score.
            expected = 2 * np.array([80.0, 30.0]) - RECORDS
            flags = np.concatenate([np.array(kind) * excess / VISITS, expected])
            flags += noise_std * rng.normal(size=4)
            variances = jnp.full(4, noise_std**2)
            near, flags = number > away, jnp.asarray(flags)
            known = after_visit(known, float(number), near, flags, variances, RECORDS)
    return known


@pytest.mark.parametrize("kind", [FAR, NEAR])
@pytest.mark.parametrize(
    ("excesses", "away"),
    [((90.0,) * 7, 0), ((500.0, *(90.0,) * 7), 0), ((500.0, 500.0, 500.0, 90.0), 3)],
)
def test_the_last_rounds_count(excesses, away, kind):
    """Those in which the model was far from the records do not: nor in a short run."""
    found = tails.cut(after(excesses, kind, away=away))
    np.testing.assert_allclose(found, 90 / (VISITS * RECORDS), rtol=1e-5)


@pytest.mark.parametrize("kind", [0, 1])
def test_nothing_is_said_of_what_may_be_noise(kind):
    """The excess is a sum over 35 visits."""
    deviation = np.sqrt(COUNTED * VISITS) * 3.0
    assert tails.cut(tails.nothing()) == 0
    assert tails.cut(after([-90.0] * COUNTED)) == 0
    for deviations, said in ((2.9, False), (3.1, True)):
        known = after([0.0] * COUNTED, noise_std=3.0)
        variances = deviation**2 * np.array([1, 2])
        np.testing.assert_allclose(np.sum(known.excess_var, axis=0), variances)
        least = 3 * deviation / (COUNTED * VISITS * RECORDS)
        each = deviations * np.sqrt(variances[kind]) / COUNTED
        excess = jnp.zeros((COUNTED, 2)).at[:, kind].set(each)
        known = known._replace(excess=excess, chance=jnp.zeros((COUNTED, 2)))
        assert bool(tails.cut(known) > 0) is said
        np.testing.assert_allclose(tails.unseen(known), least, rtol=1e-6)
    assert tails.unseen(tails.nothing()) == 1
    # Of few records noise can be more than there are.
    few = known._replace(excess=100.0 * known.excess, records=jnp.ones(COUNTED))
    assert tails.cut(few) == 1


@pytest.mark.parametrize(
    ("kind", "excess", "said"),
    [(FAR, 36.0, False), (FAR, 37.5, True), (NEAR, 59.0, False), (NEAR, 61.0, True)],
)
def test_chance_is_that_of_the_records(kind, excess, said):
    """Its variance is 150 and 400 in each round, and the same records are seen in all of them."""
    assert bool(tails.cut(after([excess] * COUNTED, kind)) > 0) is said


def test_noise_alone_stays_within_its_deviation():
    known = after([0.0] * COUNTED, noise_std=3.0)
    noise = np.abs(np.sum(known.excess, axis=0))
    assert np.all(noise < 3 * np.sqrt(np.sum(known.excess_var, axis=0)))


@grid(
    ("observed", "excess"),
    [(0.2, (-0.25, -0.25)), (0.7, (-0.25, 0.75)), (1.1, (-0.25, -0.25)), (9.0, (0.75, -0.25))],
    quick=[2, 3],
)
def test_a_record_is_compared_with_drawn_outcomes(observed, excess):
    """One of four drawn scores is far out, one nearly reaches the clip."""
    lengths = jnp.array([observed, 0.1, 2.0, 0.8, 1.2])
    found, chance = tails.counted(lengths, jnp.array([0, 0.25, 0.25, 0.25, 0.25]))
    np.testing.assert_allclose(found, excess, atol=1e-6)
    np.testing.assert_allclose(chance, 0.5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.6, 2.0])
@pytest.mark.parametrize("drawn", [2, 8])
def test_under_the_model_nothing_is_in_excess(scale, drawn):
    """Observed and drawn scores of one law, 200 000 records: means are within 4 deviations of 0.

    At the larger scale most scores are far out. Expected of a few drawn scores alone, without the
    observed one among them, means were 9 deviations off.
    """
    rng = np.random.default_rng(0)
    lengths = jnp.asarray(scale * np.abs(rng.normal(size=(200_000, drawn + 1))))
    even = jnp.full(drawn + 1, 1 / (drawn + 1))
    flags, chance = jax.vmap(tails.counted, (0, None))(lengths, even)
    assert np.max(np.linalg.norm(flags, axis=1)) < 1 + 1e-6
    found = jax.vmap(lambda one: tails.excesses(one, one)[0])(flags)
    deviations = np.mean(found, axis=0) / (np.std(found, axis=0) / np.sqrt(200_000))
    assert np.all(np.abs(deviations) < 4), deviations
    # The variance within so many scores is less than that of all by one of them.
    shape = 1.0 * (lengths > 1.25) - (lengths > 0.5) * (lengths < 1)
    np.testing.assert_allclose(np.mean(chance), drawn / (drawn + 1) * np.var(shape), rtol=0.01)
