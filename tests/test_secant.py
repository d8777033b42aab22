"""Information along a step, by how scores change: exact quadratics, noise, bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dppvi.methods import secant
from numpyro_dppvi.methods.white import coordinates

TRUE = np.array([[2.0, 0.3, 0.0], [0.3, 1.0, -0.2], [0.0, -0.2, 0.5]])
TOLD = np.diag([1.0, 0.1, 0.4])
WAY = np.array([0.2, -0.7, 0.1])
START = np.array([0.1, 0.5, -0.3])
RECORDS = 500.0


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def scores(at, noise_var, visit, records=RECORDS, mode=0.0):
    """A client's scores of a quadratic log likelihood, whose noise is not drawn."""
    return secant.Scores(
        jnp.asarray(at),
        jnp.asarray(-records * TRUE @ (at - mode)),
        noise_var * jnp.eye(3),
        jnp.asarray(records),
        jnp.asarray(float(visit)),
    )


def rounds_of(*groups, total=RECORDS):
    found = secant.nothing(3)
    for group in groups:
        found = secant.after(found, group, jnp.asarray(total))
    return found


def response(noise_var, way=WAY, told=TOLD, level=1.0):
    two = rounds_of(scores(START, noise_var, 2), scores(START + way, noise_var, 3))
    return secant.response(two, coordinates(jnp.asarray(told)), level, RECORDS)


def missed(noise_var, shape=TOLD, way=WAY, told=TOLD):
    axes = coordinates(jnp.asarray(told))
    found = secant.missed(response(noise_var, way, told), axes.information(shape))
    return np.asarray(axes.outside(found))


@pytest.mark.slow
def test_with_it_the_shape_explains_how_scores_changed():
    found = missed(1e-12)
    assert np.linalg.matrix_rank(found, tol=1e-9) == 1
    np.testing.assert_allclose(WAY @ (TOLD + found) @ WAY, WAY @ TRUE @ WAY, rtol=1e-6)
    assert np.linalg.eigvalsh(found)[0] > -1e-12


@pytest.mark.parametrize("shape", [TRUE, 1.1 * TRUE])
def test_what_the_shape_explains_adds_nothing(shape):
    np.testing.assert_allclose(missed(1e-12, shape), 0, atol=1e-6)


def test_only_what_noise_does_not_explain_counts():
    squared, change = WAY @ WAY, WAY @ (TRUE - TOLD) @ WAY
    # Three standard deviations of the noise of two rounds are half of the change.
    noise_var = (0.5 * RECORDS * change / 3) ** 2 / (2 * squared)
    np.testing.assert_allclose(WAY @ missed(noise_var) @ WAY, change / 2, rtol=1e-6)
    assert np.all(missed(4.01 * noise_var) == 0)


def test_a_rise_is_bounded_by_what_was_told():
    found = missed(1e-12, 1e-4 * TOLD, told=1e-4 * TOLD)
    np.testing.assert_allclose(WAY @ found @ WAY, 20 * WAY @ (1e-4 * TOLD) @ WAY, rtol=1e-6)


@pytest.mark.slow
def test_without_a_round_before_or_a_step_nothing_is_known():
    axes = coordinates(jnp.asarray(TOLD))
    first = secant.response(rounds_of(scores(START, 1.0, 2)), axes, 1.0, RECORDS)
    for said in (first, response(1.0, 0 * WAY), response(0.0)):
        assert said.error == np.inf
        seen, known = secant.learnt(said, 2 * jnp.eye(3), jnp.eye(3))
        for found in (seen / 2, known, secant.less(said, jnp.eye(3), seen, known)):
            np.testing.assert_allclose(found, np.eye(3), rtol=1e-6)
        assert np.all(np.asarray(secant.missed(said, jnp.eye(3))) == 0)


SIZES = 100.0, 300.0, 100.0
MODES = np.array([[1.0, 0.0, 0.3], [-2.0, 1.0, 0.0], [0.0, 0.5, -1.0]])


def in_turn(visit, start):
    """Clients that differ, one after the other, each at a place of its own."""
    steps = np.array([[0.0, 0.0, 0.0], [0.1, -0.3, 0.0], [0.0, -0.5, 0.2]])
    places = start + steps
    return [
        scores(at, 1e-9, visit, size, mode)
        for at, size, mode in zip(places, SIZES, MODES, strict=True)
    ]


def test_clients_in_turn_tell_what_all_at_once_would():
    first, second = in_turn(2, START), in_turn(3, START + WAY)
    axes = coordinates(jnp.asarray(TOLD))
    said = secant.response(rounds_of(*first, *second), axes, 1.0, RECORDS)
    np.testing.assert_allclose(said.change, (WAY @ TRUE @ WAY) / (WAY @ TOLD @ WAY), rtol=1e-6)
    np.testing.assert_allclose(axes.white @ said.ahead * said.length, WAY, rtol=1e-6)


@pytest.mark.parametrize("absent", [0, 1, 2, 3, 4, 5])
def test_who_is_absent_hides_how_scores_changed(absent):
    groups = [*in_turn(2, START), *in_turn(3, START + WAY)]
    del groups[absent]
    said = secant.response(rounds_of(*groups), coordinates(jnp.asarray(TOLD)), 1.0, RECORDS)
    assert said.error == np.inf


def test_a_round_counts_once():
    axes = coordinates(jnp.asarray(TOLD))
    two = rounds_of(*in_turn(2, START), *in_turn(3, START + WAY))
    assert secant.response(secant.used(two), axes, 1.0, RECORDS).error == np.inf
    third = secant.after(secant.used(two), scores(START, 1e-9, 4), jnp.asarray(RECORDS))
    np.testing.assert_allclose(secant.response(third, axes, 1.0, RECORDS).length, axes_length(axes))


def axes_length(axes):
    """From the mean place of the second round back to where the third one was."""
    sizes = np.array(SIZES)
    steps = np.array([[0.0, 0.0, 0.0], [0.1, -0.3, 0.0], [0.0, -0.5, 0.2]])
    return np.linalg.norm(axes.back @ (WAY + sizes @ steps / sizes.sum()))


# Information along the step is a third of what was told.
TOO_MUCH = 3 * TRUE
SHORT = 0.05 * WAY


@pytest.mark.slow
def test_information_falls_to_what_scores_show():
    axes = coordinates(jnp.asarray(TOO_MUCH))
    said = response(1e-12, SHORT, TOO_MUCH)
    np.testing.assert_allclose(said.change, 1 / 3, rtol=1e-6)
    hardly = 1e-2 * jnp.eye(3)  # so little is known of the shape by what was released
    seen, known = secant.learnt(said, jnp.eye(3), hardly)
    shape = secant.less(said, jnp.eye(3), seen, known)
    along = float(said.ahead @ shape @ said.ahead)
    # But for what the step's length leaves open.
    assert 1 / 3 - 1e-6 < along < 1 / 3 + 0.1
    values = np.linalg.eigvalsh(shape)
    np.testing.assert_allclose(values, [along, 1, 1], rtol=1e-6)
    outside = np.asarray(axes.outside(shape))
    assert SHORT @ outside @ SHORT < 0.5 * SHORT @ TOO_MUCH @ SHORT


def test_what_is_known_along_a_step_is_what_two_observations_tell():
    said = response(1e-12, SHORT, TOO_MUCH)
    known = jnp.asarray(TRUE)
    noise, u = np.linalg.inv(TRUE), np.asarray(said.ahead)
    before = 2 * (u @ noise @ u) ** 2
    seen, after = secant.learnt(said, jnp.eye(3), known)
    own = float(said.whole_error) ** 2
    now = 2 * (u @ np.linalg.inv(after) @ u) ** 2
    np.testing.assert_allclose(now, 1 / (1 / before + 1 / own), rtol=1e-5)
    mean = (1 / before + float(said.change) / own) / (1 / before + 1 / own)
    np.testing.assert_allclose(u @ seen @ u, mean, rtol=1e-5)


@pytest.mark.parametrize(
    "why", ["nothing is too much", "noise may explain it", "the step is long", "it is too noisy"]
)
def test_otherwise_information_stays(why):
    said = {
        "nothing is too much": response(1e-12, SHORT, TRUE),
        "noise may explain it": response(1e-12, SHORT, TOO_MUCH)._replace(error=jnp.asarray(0.34)),
        "the step is long": response(1e-12, 5 * WAY, TOO_MUCH),
        "it is too noisy": response(1e-12, SHORT, TOO_MUCH)._replace(
            error=jnp.asarray(0.51), change=jnp.asarray(-5.0)
        ),
    }[why]
    seen, known = secant.learnt(said, jnp.eye(3), jnp.eye(3))
    np.testing.assert_allclose(seen, np.eye(3), rtol=1e-6)
    np.testing.assert_allclose(known, np.eye(3), rtol=1e-6)
    np.testing.assert_allclose(secant.less(said, jnp.eye(3), seen, known), np.eye(3), rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    change=st.floats(-1e3, 1),
    error=st.floats(1e-6, 1),
    length=st.floats(0, 2),
    known=st.floats(1e-9, 1e9),
    seen=st.floats(-1e3, 1e3),
)
def test_a_fall_leaves_a_fifth(change, error, length, known, seen):
    said = secant.Response(jnp.array([0.6, 0.0, 0.8]), *map(jnp.asarray, (change, error, length)))
    mean, inverse = secant.learnt(said, seen * jnp.eye(3), known * jnp.eye(3))
    shape = secant.less(said, jnp.asarray(TRUE), mean, inverse)
    assert np.all(np.isfinite(mean))
    assert np.all(np.isfinite(inverse))
    u = said.ahead
    assert u @ shape @ u > 0.2 * (u @ TRUE @ u) - 1e-9
    assert np.linalg.eigvalsh(shape)[0] > 0
