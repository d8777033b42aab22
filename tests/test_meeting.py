"""Entries of the latents that matter to one record together; of others nothing is learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_dppvi.latents.meeting import meeting
from numpyro_dppvi.methods import moving
from numpyro_dppvi.methods.lookups import Lookups
from numpyro_dppvi.methods.shapes import apart
from numpyro_dppvi.methods.white import coordinates
from tests import gallery
from tests.test_noisy_scores import remembered

# Base values of all latents, and one record.
BASE = {"a": (), "u": (3,), "v": (4,), "w": (3, 2)}
ROW = {
    "g": ((), int),
    "h": ((), int),
    "both": ((2,), int),
    "one": ((1,), int),
    "x": ((2,), float),
    "y": ((), float),
}
A, U, V, W = [0], [1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 13]
SIZE = 14
NO_PEERS = np.zeros((0, 4), bool)


def blocks(*names, apart=()):
    """All of some entries meet, but for two of one lookup each."""
    found = np.zeros((SIZE, SIZE), bool)
    entries = np.concatenate(names)
    found[np.ix_(entries, entries)] = True
    for group in apart:
        places = {entry: place for place, several in enumerate(group) for entry in several}
        for one in places:
            for other in places:
                if places[one] != places[other]:
                    found[one, other] = False
    return found


def each(entries):
    return [[entry] for entry in entries]


ROWS = [[8, 9], [10, 11], [12, 13]]

# A predictor, and which of the entries that it depends on meet in it.
PREDICTORS = {
    "effects": (lambda t, r: t["a"] + t["u"][r["g"]], blocks(A, U, apart=[each(U)])),
    "crossed": (
        lambda t, r: t["u"][r["g"]] + t["v"][r["h"]],
        blocks(U, V, apart=[each(U), each(V)]),
    ),
    "players": (lambda t, r: t["v"][r["g"]] - t["v"][r["h"]], blocks(V)),
    "intercepts and slopes": (
        lambda t, r: t["u"][r["g"]] + t["w"][r["g"], 0] * r["x"][0] + t["w"][r["g"], 1],
        blocks(U, W, apart=[[[u, *w] for u, w in zip(U, ROWS, strict=True)]]),
    ),
    "slopes one by one": (
        lambda t, r: t["u"][r["one"]] + t["w"][r["one"], 0] + t["w"][r["one"], 1] * r["x"][0],
        blocks(U, W, apart=[[[u, *w] for u, w in zip(U, ROWS, strict=True)]]),
    ),
    "a table of ones": (
        lambda t, r: t["w"][r["one"], r["one"] - 1],
        blocks(W, apart=[each(W)]),
    ),
    "another's slope": (
        lambda t, r: t["w"][r["one"], 0] + t["w"][r["both"][:1], 1] * r["x"][0],
        blocks(W),
    ),
    "decentred": (
        lambda t, r: (jnp.exp(t["a"]) * t["u"])[r["g"]],
        blocks(A, U, apart=[each(U)]),
    ),
    "about their mean": (lambda t, r: (t["u"] - jnp.mean(t["u"]))[r["g"]], blocks(U)),
    "two at once": (lambda t, r: jnp.sum(t["v"][r["both"]]), blocks(V)),
    "one and all": (lambda t, r: t["u"][r["g"]] + jnp.sum(t["u"] ** 2), blocks(U)),
    "a table": (
        lambda t, r: t["w"][r["g"], r["h"]],
        blocks(W, apart=[each(W)]),
    ),
    "the same place": (lambda t, r: t["u"][r["g"]] * t["v"][0], blocks(U, [V[0]], apart=[each(U)])),
    "the group before": (lambda t, r: t["u"][r["g"]] + t["u"][r["g"] - 1], blocks(U)),
    "by a condition": (lambda t, r: jnp.where(r["y"] > 0, t["u"][0], t["u"][1]), blocks(U[:2])),
    "no lookup": (lambda t, r: t["u"] @ t["w"] @ r["x"], blocks(U, W)),
}


def structs(shapes):
    return {name: jax.ShapeDtypeStruct(shape, float) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", PREDICTORS)
def test_what_meets_is_read_off_the_program(name):
    predictor, expected = PREDICTORS[name]

    def log_likelihood(base, row):
        return -jnp.sum((row["y"] - predictor(base, row)) ** 2)

    row = {name: jax.ShapeDtypeStruct(*one) for name, one in ROW.items()}
    found = meeting(log_likelihood, structs(BASE), row)
    entering = expected.any(axis=1)
    np.testing.assert_array_equal(found[entering][:, entering], expected[entering][:, entering])
    rng = np.random.default_rng(0)
    for _ in range(30):
        record = {
            "g": jnp.asarray(rng.integers(3)),
            "h": jnp.asarray(rng.integers(2)),
            "one": jnp.asarray(rng.integers(3, size=1)),
            "both": jnp.asarray(rng.integers(4, size=2)),
            "x": jnp.asarray(rng.normal(size=2)),
            "y": jnp.asarray(rng.normal()),
        }
        base = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in BASE.items()}
        _agrees(log_likelihood, base, record, found)


def _agrees(log_likelihood, base, record, found):
    """A record's score is zero in one of two entries that do not meet."""
    score, _ = ravel_pytree(jax.grad(log_likelihood)(base, record))
    on = np.asarray(score) != 0
    assert not np.any(on[:, None] & on & ~found)


# Studies of the gallery, by how large a share of pairs does not meet at least.
KNOWN = {
    "radon, intercepts": 0.4,
    "seeds": 0.6,
    "surgery": 0.6,
    "item response": 0.6,
    "differences in differences": 0.3,
    "football": 0.0,
    "rankings": 0.0,
}


@pytest.mark.parametrize("name", KNOWN)
def test_records_of_the_gallery_agree(name):
    space, record = gallery.read(name)
    assert np.mean(~space.meeting) >= KNOWN[name]
    rng = np.random.default_rng(1)
    for turn in range(20):
        base = {
            name: jnp.asarray(rng.normal(size=struct.shape))
            for name, struct in sorted(space.continuous.items())
        }
        _agrees(
            lambda base, row: space.log_likelihood(space.constrain(base), row),
            base,
            record(5 * turn),
            space.meeting,
        )


def _memory(rng):
    root = rng.normal(size=(4, 4))
    shape = root @ root.T + 4 * np.eye(4)
    known = 3 * np.diag(rng.uniform(1, 2, 4))
    return remembered(shape=shape, shape_known=known, level_var=0.0, curved=np.zeros(4))


def test_where_all_meet_nothing_is_different(monkeypatch):
    # What noise hides is bounded only where no records look entries up.
    monkeypatch.setattr(moving, "_CORRELATION", np.inf)
    memory = _memory(np.random.default_rng(0))
    axes, way = coordinates(memory.shape), jnp.array([0.3, -0.2, 0.5, 0.1])
    all_meet = moving.unknown(memory, axes, Lookups(np.ones((4, 4), bool), NO_PEERS))
    nothing = moving.unknown(memory, axes, None)
    expected = moving.error_of(memory, nothing, way)
    found = moving.error_of(memory, all_meet, way)
    # Off the diagonal is next to nothing, beside which 32 bits round.
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6 * float(expected.max()))


def test_a_record_of_one_group_is_moved_by_the_way_of_that_group():
    """Four groups, of which a quarter of the records each tells: what others do is no error."""
    straight = _of_one_group(curved=np.zeros(4))
    np.testing.assert_allclose(straight[0], straight[1] / 16, rtol=1e-3)
    # What changes on the way counts twice, because errors of a path are not added to it.
    bent = _of_one_group(curved=np.ones(4)) - straight
    np.testing.assert_allclose(bent[0], 2 * bent[1] / 16, rtol=1e-3)


def _of_one_group(curved):
    """The error of one group's entry, and that of records which all belong to it."""
    alone = np.eye(4, dtype=bool)
    lookups = Lookups(alone, np.ones((1, 4), bool))
    # A record has the information 2 of its own group's entry, so that the mean has half.
    sure = {"shape_known": 1e9 * np.eye(4), "level_var": 0.0, "curved": curved}
    exact = remembered(shape=np.eye(4) / 2, **sure)
    axes = coordinates(exact.shape)
    unknown = moving.unknown(exact, axes, lookups)
    far = np.array([0.4, 0.0, 0.0, 0.0])
    found = np.asarray(axes.outside(moving.error_of(exact, unknown, jnp.asarray(far))))
    np.testing.assert_allclose(found[1:, 1:], 0, atol=1e-7)
    # What one kind of record alone would have, for a quarter of all: its own way's, by that share.
    single = remembered(shape=2 * np.eye(4), **sure)
    whole = moving.unknown(single, coordinates(single.shape), None)
    of_all = coordinates(single.shape).outside(moving.error_of(single, whole, jnp.asarray(far)))
    return np.array([found[0, 0], np.asarray(of_all)[0, 0]])


def test_errors_are_those_of_a_matrix_with_zeros():
    """Beside 40 000 such matrices, E = N^(1/2) e N^(1/2) without entries that do not meet."""
    rng = np.random.default_rng(1)
    memory = _memory(rng)
    meet = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], bool)
    axes, way = coordinates(memory.shape), np.array([0.3, -0.2, 0.5, 0.1])
    noise = np.sqrt(1 / np.diag(np.asarray(memory.shape_known)))
    drawn = rng.normal(size=(40_000, 4, 4))
    drawn = (drawn + np.swapaxes(drawn, 1, 2)) / np.sqrt(2)
    drawn = drawn * noise[:, None] * noise * meet
    white = np.asarray(axes.white).T @ drawn @ np.asarray(axes.white)
    unknown = moving.unknown(memory, axes, Lookups(meet, NO_PEERS))
    values, turn = moving.hidden(unknown)
    expected = np.mean(white @ white, axis=0)
    np.testing.assert_allclose((turn * values) @ turn.T, expected, atol=0.04 * expected.max())
    # Of E w, what an entry shares with others' is left out, and that its diagonal varies twice.
    half = drawn.copy()
    half[:, range(4), range(4)] /= np.sqrt(2)
    exact = np.mean((half @ way) ** 2, axis=0)
    found = np.asarray(axes.outside(moving.error_of(memory, unknown, jnp.asarray(way))))
    none = unknown._replace(left=jnp.zeros((4, 4)))
    without = np.asarray(axes.outside(moving.error_of(memory, none, jnp.asarray(way))))
    np.testing.assert_allclose(np.diag(found - without), exact, rtol=0.05)


def test_a_shape_with_zeros_is_positive_definite():
    rng = np.random.default_rng(2)
    meet = np.ones((6, 6), bool)
    meet[1:, 1:] = np.eye(5, dtype=bool)
    for _ in range(20):
        root = rng.normal(size=(6, 2))
        shape = jnp.asarray(root @ root.T + 1e-3 * np.eye(6))
        found, added = map(np.asarray, apart(shape, meet))
        assert np.all(found[~meet] == 0)
        np.testing.assert_allclose(np.diag(found), np.diag(shape), rtol=1e-6)
        scale = np.sqrt(np.diag(found))
        assert np.linalg.eigvalsh(found / scale / scale[:, None])[0] > 0.04
        # What was added is at least all by which it is larger than with zeros alone.
        zeros = np.where(meet, shape, 0)
        assert np.linalg.eigvalsh((zeros + added - found) / scale / scale[:, None])[0] > -1e-5
    # What meets, and is one already, stays as it is.
    for found, expected in zip(apart(jnp.eye(6), meet), (np.eye(6), 0), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
