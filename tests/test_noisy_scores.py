"""What a server learns from noisy scores: filters with closed forms, and columns in raw units."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import norm

import numpyro_dppvi as dppvi
from benchmarks import believe
from numpyro_dppvi.families import FullNormal, FullNormalCoordinates, MeanField
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.methods import (
    clips,
    kinds,
    moving,
    noisy_factors,
    noisy_scores,
    pull,
    ratios,
    scales,
    shapes,
    white,
)
from numpyro_dppvi.methods.remembered import nothing
from numpyro_dppvi.methods.visits import Received
from tests.grids import grid

SIZE = 4

coordinates = jax.jit(white.coordinates)


@jax.jit
def learn(memory, axes, now, error, share, added=0.0):
    """What is learnt from a release if so much was added to the shape, as a part of it."""
    told = (1 - added) * jnp.eye(SIZE)
    return noisy_scores._shape_seen(memory, axes, now, error, share, told, 0.04 * share)


shrink = jax.jit(shapes.shrunk)
longer = jax.jit(shapes.longer)
after_step = jax.jit(functools.partial(moving.moved, lookups=None, share=0.2))


@jax.jit
def error_of(memory, axes, way):
    return moving.error_of(memory, moving.unknown(memory, axes, None), way)


put_down = jax.jit(lambda memory: moving.kept(memory, kinds.of(memory.own.score_known)))
responses = jax.jit(noisy_factors.responses_in)
pull_after = jax.jit(pull.after)

inside_of = jax.jit(lambda axes, matrix: axes.information(matrix))
outside_of = jax.jit(lambda axes, seen, known: (axes.outside(seen), axes.unknown(known)))


def picked_up(received, memory, axes):
    def found(memory, axes):
        alike = kinds.of(memory.own.score_known)
        return moving.outside(moving.found(received, memory, axes, alike), axes, alike)

    return jax.jit(found)(memory, axes)


def remembered(**changes):
    family = MeanField((("w", FullNormal((SIZE,))),))
    memory = nothing(
        family,
        family.natural(family.standard()),
        2,
        searches=False,
        drawn=True,
        columns=np.ones(SIZE),
        curved=np.ones(SIZE),
    )
    return memory._replace(**{name: jnp.asarray(value) for name, value in changes.items()})


def noise(rng, size=SIZE):
    """Symmetric, with standard normal entries off the diagonal, and sqrt(2) times that on it."""
    matrix = rng.normal(size=(size, size))
    return (matrix + matrix.T) / np.sqrt(2)


@pytest.mark.slow
def test_columns_with_as_much_in_common_keep_the_models_order():
    """Whatever rounding makes of them: it decides which noise falls on which column."""
    rng = np.random.default_rng(0)
    sizes = rng.uniform(0.5, 2, 5)
    rounding = 1 + 1e-15 * rng.normal(size=(5, 5))
    assert white.order_of(jnp.asarray(np.diag(sizes) * rounding)).tolist() == [0, 1, 2, 3, 4]
    alike = np.eye(5)
    alike[3, 1] = alike[1, 3] = 0.9
    assert white.order_of(jnp.asarray(alike * rounding)).tolist() == [1, 3, 0, 2, 4]


def raw_columns():
    """The information of a column of ones and three of 60 +- 15, 120 +- 20 and 20 +- 5."""
    mean, spread = np.array([1.0, 60, 120, 20]), np.array([0.0, 15, 20, 5])
    information = np.diag(spread**2) + np.outer(mean, mean)
    return information / np.sqrt(np.outer(np.diag(information), np.diag(information)))


def steps(truth, number, error, seed=0):
    """Shapes that a server makes of releases in its own coordinates, whose clip follows length."""
    rng = np.random.default_rng(seed)
    memory = remembered(shape=np.eye(SIZE), level=1.0)
    found = []
    for _ in range(number):
        axes = coordinates(memory.shape)
        inside = np.asarray(inside_of(axes, jnp.asarray(truth)))
        # A record's matrix is as large as the trace; so is the noise that hides it.
        std = error * np.trace(inside) / SIZE
        now = jnp.asarray(inside + std * noise(rng))
        _, seen, known = learn(memory, axes, now, jnp.asarray(std), jnp.asarray(0.0))
        outside, shape_known = outside_of(axes, seen, known)
        memory = memory._replace(
            shape=shrink(axes, seen, known), seen=outside, shape_known=shape_known
        )
        values = np.linalg.eigvalsh(inside_of(axes, jnp.asarray(truth)))
        found.append(values[-1] / values[0])
    return memory, found


@pytest.mark.slow
def test_one_exact_release_is_the_shape():
    truth = raw_columns()
    memory, _ = steps(truth, 1, 1e-6)
    np.testing.assert_allclose(memory.seen, truth, atol=1e-4)
    np.testing.assert_allclose(memory.shape, truth, atol=0.03)


@pytest.mark.slow
def test_directions_with_little_information_are_resolved_step_by_step():
    """Coordinates stretch what noise hid, so that it shows. One weight for all would forget."""
    truth = raw_columns()
    assert np.linalg.cond(truth) > 100
    for seed in range(5):
        _, found = steps(truth, 12, 0.03, seed)
        assert found[0] > 100
        assert found[-1] < 4


@pytest.mark.slow
def test_releases_in_the_same_coordinates_are_averaged():
    """The mean of n releases with noise e is known to e / sqrt(n)."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        axes = coordinates(jnp.eye(SIZE))
        memory = remembered(shape=np.eye(SIZE), level=1.0)
        shown = [np.eye(SIZE) + 0.1 * noise(rng) for _ in range(5)]
        for now in shown:
            _, seen, known = learn(
                memory, axes, jnp.asarray(now), jnp.asarray(0.1), jnp.asarray(0.0)
            )
            outside, shape_known = outside_of(axes, seen, known)
            memory = memory._replace(seen=outside, shape_known=shape_known)
        np.testing.assert_allclose(memory.seen, np.mean(shown, axis=0), atol=1e-12)
        np.testing.assert_allclose(
            memory.shape_known, np.sqrt(5) / 0.1 * np.eye(SIZE), rtol=1e-9, atol=1e-9
        )


@pytest.mark.slow
def test_coordinates_keep_columns_apart():
    """An axis holds its column and those before it, and so none that noise mixed into it."""
    axes = coordinates(jnp.asarray(raw_columns(), jnp.float32))
    order = np.argsort(np.sum(np.asarray(axes.white) != 0, axis=1))[::-1]
    ordered = np.asarray(axes.white)[order]
    np.testing.assert_array_equal(ordered, np.triu(ordered))
    assert order[0] == 0  # the intercept, which has nothing of its own
    np.testing.assert_allclose(axes.back @ axes.white, np.eye(SIZE), atol=1e-4)


@pytest.mark.slow
def test_a_weak_axis_shows_in_noise_that_hides_its_direction():
    """One entry of the diagonal has the noise of one entry; a direction that of sqrt(d) of them."""
    rng = np.random.default_rng(4)
    size, weak, error = 20, 7, 0.15
    truth = np.eye(size)
    truth[weak, weak] = 0.01
    axes = coordinates(jnp.eye(size))
    known = jnp.eye(size) / error
    assert 2 * np.sqrt(size) * error > 1  # the spectrum shows nothing
    for _ in range(5):
        found = np.diag(shrink(axes, jnp.asarray(truth + error * noise(rng, size)), known))
        assert found[weak] < 0.6
        assert np.sum(np.delete(found, weak) < 0.6) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [1.0, 3.0])
def test_noise_larger_than_the_shape_makes_no_two_columns_one(error):
    """They would seem to say nothing of what tells them apart, and steps there would be thrown."""
    size = 14
    axes, known = coordinates(jnp.eye(size)), jnp.eye(size) / error
    for seed in range(60):
        seen = np.eye(size) + error * noise(np.random.default_rng(seed), size)
        found = shrink(axes, jnp.asarray(seen), known)
        # The length of a column shrinks to .3 at the least, and nothing adds to that.
        assert np.linalg.eigvalsh(found)[0] > 0.29


@pytest.mark.slow
def test_noise_alone_changes_no_shape():
    rng = np.random.default_rng(2)
    axes = coordinates(jnp.eye(SIZE))
    seen, known = jnp.asarray(np.eye(SIZE) + 0.05 * noise(rng)), 20.0 * jnp.eye(SIZE)
    found = shrink(axes, seen, known)
    off = np.asarray(found) - np.diag(np.diag(found))
    assert np.abs(off).max() < 0.05
    much = shrink(axes, seen, 0.5 * jnp.eye(SIZE))
    np.testing.assert_allclose(much, np.eye(SIZE), atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_little_is_left_of_no_direction_that_noise_hides(seed):
    """Between one that is known and one that is not, .02 to .06 was left of what noise may hide.

    Each of the directions that stood out lost no more than it had. Together they lost nearly all
    that there was in some direction beside them, along which later steps were thrown.
    """
    size, rng = 30, np.random.default_rng(seed)
    noise = np.where(np.arange(size) < size // 2, 0.02, 1.0)
    turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
    root = (turn * np.sqrt(noise)) @ turn.T
    error = rng.normal(size=(size, size))
    way = turn @ rng.normal(size=size) / np.sqrt(size)
    seen = np.eye(size) + root @ (error + error.T) @ root / np.sqrt(2) - 5 * np.outer(way, way)
    known = jnp.asarray((turn / noise) @ turn.T, jnp.float32)
    found = shrink(coordinates(jnp.eye(size)), jnp.asarray(seen, jnp.float32), known)
    may_hide = turn / np.sqrt(np.minimum(1, np.sqrt(size) * noise))
    assert np.linalg.eigvalsh(may_hide.T @ np.asarray(found) @ may_hide).min() > 0.2


@pytest.mark.slow
def test_clips_follow_lengths_that_are_known_and_no_noise():
    """A stretched axis makes scores longer, unless noise hides how long they are."""
    rng = np.random.default_rng(5)
    axes, shape = coordinates(jnp.eye(SIZE)), jnp.diag(jnp.array([0.01, 1, 1, 1]))
    # An axis that is stretched by 10 has 100 times its information: (100 a + 3) / (a + 3).
    exact = longer(axes, shape, jnp.diag(jnp.array([0.04, 1, 1, 1])), 1e6 * jnp.eye(SIZE))
    np.testing.assert_allclose(exact, np.sqrt(7 / 3.04), rtol=1e-4)
    # Noise ten times what is to be seen, whose traces alone differ by up to the limit of ten: then
    # the new shape is right, and scores as long as in its own coordinates.
    seen = [np.eye(SIZE) + 10 * noise(rng) for _ in range(50)]
    changes = [float(longer(axes, shape, jnp.asarray(x), 0.1 * jnp.eye(SIZE))) for x in seen]
    assert np.sqrt(np.mean((np.log(changes) - np.log(4 / 3.01) / 2) ** 2)) < 0.1


@pytest.mark.slow
def test_the_level_is_found_in_noise_of_its_own_size():
    """A filter whose gain forgot what is unknown took a hundred visits for what ten can tell."""
    rng = np.random.default_rng(6)
    memory, axes, error = remembered(shape=np.eye(SIZE), level=0.6), coordinates(jnp.eye(SIZE)), 0.2
    for _ in range(20):
        now = jnp.asarray(0.1 * np.eye(SIZE) + error * noise(rng))
        memory, seen, known = learn(memory, axes, now, jnp.asarray(error), jnp.asarray(0.1))
        memory = memory._replace(seen=seen, shape_known=known)
    assert 0.05 < float(memory.level) < 0.2


@grid("error", [0.1, 0.2, 0.3], quick=[1])
def test_a_level_that_falls_is_as_unsure_as_it_lags(error):
    """By 5 % a visit, to a third, as on the way to rare outcomes; the mean of twelve runs.

    What is unknown of the level by noise alone is a fifth to a half of that.
    """
    axes, falls = coordinates(jnp.eye(SIZE)), 0.6 * 0.95 ** np.arange(1, 21)
    squared, counted, least = [], [], []
    for seed in range(12):
        rng, memory = np.random.default_rng(seed), remembered(shape=np.eye(SIZE), level=0.6)
        for level in falls:
            now = jnp.asarray(level * np.eye(SIZE) + error * noise(rng))
            memory, seen, known = learn(memory, axes, now, jnp.asarray(error), jnp.asarray(0.2))
            memory = memory._replace(seen=seen, shape_known=known)
        squared.append((float(memory.level) / falls[-1] - 1) ** 2)
        # Of a shape that is known, on a short way: errors of second order are left.
        way = 1e-3 * jnp.eye(SIZE)[0]
        sure = memory._replace(shape_known=1e6 * jnp.eye(SIZE))
        counted.append(float(error_of(sure, axes, way)[0, 0]) / 1e-6)
        nothing_unknown = sure._replace(level_var=jnp.zeros(()))
        least.append(float(error_of(nothing_unknown, axes, way)[0, 0]) / 1e-6)
    assert 0.5 < np.mean(squared) / np.mean(counted) < 1.25
    np.testing.assert_allclose(least, 0.01, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [1, 3])
def test_directions_that_no_record_speaks_of_do_not_make_the_level_fall(unseen):
    """They would count as scores that do not respond: it fell to a quarter, with three of four."""
    rng, there = np.random.default_rng(7), np.diag(1.0 * (np.arange(SIZE) >= unseen))
    known = 30.0 * jnp.eye(SIZE)
    memory = remembered(shape=np.eye(SIZE), level=0.5, seen=jnp.asarray(there), shape_known=known)
    for _ in range(20):
        now = jnp.asarray(0.5 * there + 0.02 * noise(rng))
        memory, *_ = learn(memory, coordinates(jnp.eye(SIZE)), now, jnp.asarray(0.02), 0.1)
    np.testing.assert_allclose(memory.level, 0.5, rtol=0.05)


@pytest.mark.slow
def test_what_was_added_to_a_shape_is_no_information_that_does_not_come():
    """With three quarters of it added, the level had fallen to a quarter, the shape risen."""
    told = jnp.eye(SIZE) / 4
    memory = remembered(shape=np.eye(SIZE), level=0.5, seen=told, shape_known=30.0 * jnp.eye(SIZE))
    axes, error = coordinates(jnp.eye(SIZE)), jnp.asarray(0.01)
    for _ in range(20):
        memory, seen, _ = learn(memory, axes, 0.5 * told, error, 0.1, added=0.75)
    np.testing.assert_allclose(memory.level, 0.5, rtol=0.01)
    np.testing.assert_allclose(seen, told, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("length", "visits", "near"), [(0.09, 6, True), (0.11, 6, False), (0.09, 3, False)]
)
def test_a_run_is_near_the_records_once_its_steps_are_short(length, visits, near):
    """By the deviations of one record: in these coordinates a unit is two of them."""
    axes = coordinates(4 * jnp.eye(SIZE))
    memory = remembered(most_visits=float(visits), loc=np.ones(SIZE))
    there = memory.loc / memory.prior_sd
    last = memory.rounds.now._replace(loc=there)
    before = last._replace(loc=there + jnp.array([0, length / 2, 0, 0]))
    memory = memory._replace(rounds=memory.rounds._replace(now=last, before=before))
    assert bool(jax.jit(clips.near)(memory, axes)) is near


@pytest.mark.parametrize(
    ("noise_std", "chance", "misfit", "bends"),
    [
        (0.0, 0.25, 0.03, False),
        (0.0, 0.25, 0.034, True),
        (0.02, 0.0, 0.039, False),
        (0.02, 0.0, 0.041, True),
    ],
)
def test_only_what_is_neither_noise_nor_chance_bends(noise_std, chance, misfit, bends):
    """Of 1000 records, 250 may be more or fewer by 16; two deviations are doubted."""
    memory = remembered(misfit=[-1.0, misfit], misfit_known=np.full(2, 1 / (noise_std**2 + 1e-12)))
    flags = jnp.array([0.0, 0.0, 2000 * chance - 1000, -1000.0, 0.0])
    waiting = memory.waiting._replace(records=jnp.asarray(1000.0), flags=flags)
    memory = memory._replace(waiting=waiting)
    bent = jax.jit(clips.cut_off)
    assert bool(bent(memory, True, 1.0, 1000.0) > 0) is bends
    assert bent(memory, False, 1.0, 1000.0) == 0


def test_scores_are_over_the_level_that_is_known_now():
    """A level that was wrong was wrong for earlier scores, too; one that drifts was right then."""
    axes, known = coordinates(jnp.eye(SIZE)), 1e3 * jnp.eye(SIZE)
    score, score_known = jnp.ones((2, SIZE)), jnp.stack([pack(jnp.eye(SIZE))] * 2)
    memory = remembered(shape=np.eye(SIZE), level=0.8, shape_known=known)
    memory = memory.with_own(score=score, score_known=score_known)
    now = 0.4 * jnp.eye(SIZE)
    # Much noise and next to no drift.
    after, _, _ = learn(memory, axes, now, jnp.asarray(0.1), jnp.asarray(1e-9))
    assert 0.4 < float(after.level) < 0.8
    np.testing.assert_allclose(after.own.score, 0.8 / after.level, rtol=1e-3)
    np.testing.assert_allclose(after.own.score_known[0, 0], (after.level / 0.8) ** 2, rtol=1e-3)
    # So are those of clients who are not visited.
    np.testing.assert_allclose(after.moves.unit, 0.8 / after.level, rtol=1e-3)
    # No noise: the level is what was released, and the change is drift.
    after, _, _ = learn(memory, axes, now, jnp.asarray(0.0), jnp.asarray(1.0))
    np.testing.assert_allclose(after.level, 0.4, rtol=1e-3)
    np.testing.assert_allclose(after.own.score, 1.0, rtol=1e-3)
    np.testing.assert_allclose(after.moves.unit, 1.0, rtol=1e-3)


@pytest.mark.slow
def test_a_pull_is_measured_in_what_noise_explains():
    rng = np.random.default_rng(7)
    coordinates_of = jnp.asarray(np.linalg.inv(np.eye(SIZE) + 0.3 * rng.normal(size=(SIZE, SIZE))))
    back, many = jnp.linalg.inv(coordinates_of), jnp.asarray(1e6)

    def pulls(scores, noise_var, records, total):
        found = pull.nothing(SIZE)
        for each in scores:
            found = pull_after(
                found, coordinates_of, back, each, noise_var, records, total, jnp.asarray(0.25)
            )
        return float(found.strength)

    # Noise alone: its squares have mean 1, and (2 / 200 / SIZE)^(1/2) is their error's deviation.
    alone = [
        pulls(jnp.asarray(rng.normal(size=(3, SIZE))), jnp.asarray(1.0), jnp.asarray(1.0), many)
        for _ in range(200)
    ]
    assert abs(np.mean(alone) - 1) < 4 * np.sqrt(2 / 200 / SIZE)
    # Without noise, one exact standard deviation (N level)^(-1/2) off in every coordinate: a score
    # sum of n records is n level times that.
    away = jnp.full(SIZE, 50 * 0.25 / np.sqrt(100 * 0.25))
    nothing, some, total = jnp.asarray(0.0), jnp.asarray(50.0), jnp.asarray(100.0)
    np.testing.assert_allclose(pulls([away] * 3, nothing, some, total), 1.0, rtol=1e-4)
    # Scores of three deviations each that point one way add up, and noise does not.
    same = [3 * jnp.ones(SIZE)] * 9
    assert pulls(same, jnp.asarray(1.0), jnp.asarray(1.0), jnp.asarray(3.0)) > 20


@pytest.mark.parametrize("length", [0.0, 0.3, 3.0])
def test_steps_are_shorter_only_where_noise_leads_far(length):
    way = jnp.full(SIZE, length / np.sqrt(SIZE))
    # A visit's noise of a quarter of a record's deviation, or none, changes no step in any bit.
    for little in (0.0, 0.06):
        assert noisy_factors.steady(way, jnp.asarray(little)) == 1
    parts = [float(noisy_factors.steady(way, jnp.asarray(std**2))) for std in (0.3, 1.0, 10.0)]
    assert 1 > parts[0] > parts[1] > parts[2] > 0
    assert parts[0] > 0.9
    # What stands out from its noise is taken: beyond the least, (l^2 + 1) / (l^2 + 1 + d v).
    expected = (length**2 + 1) / (length**2 + 1 + SIZE * (1 - noisy_factors._WANDERS))
    np.testing.assert_allclose(parts[1], expected, rtol=1e-6)


@pytest.mark.slow
def test_runs_with_few_records_and_much_noise_add_up_what_visits_say():
    """Steps as long as noise leads forget it again: 35 times the width without privacy, not 23."""
    cell = believe.Cell("linear", (200,) * 5, 1.0)
    errors, widths = [], []
    for seed in range(710, 722):
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, dppvi.FisherScoring(), seed)
        errors.append((mean - made.truth) / std)
        widths.append(std / made.exact)
    assert np.median(widths) < 28
    assert np.mean(np.abs(errors) < norm.ppf(0.95)) > 0.85


def test_scores_begin_hardly_beside_the_prior_mean():
    """Of a prior 3000 wide a thousandth is 3 logits, where outcomes say nothing any more."""
    family = MeanField((("w", FullNormal((2,))),))
    wide = family.natural(
        {"w": FullNormalCoordinates(jnp.zeros(2), jnp.log(jnp.array([3000.0, 1])), jnp.zeros(1))}
    )
    loc = np.asarray(
        nothing(
            family, wide, 1, searches=False, drawn=True, columns=np.ones(SIZE), curved=np.ones(SIZE)
        ).loc
    )
    assert np.all((loc > 0) & (loc < 0.01))


@pytest.mark.slow
def test_steps_add_their_errors_to_what_scores_leave_unknown():
    """In covariances V becomes V + E; the score itself moves by -n J w, or is multiplied.

    However many steps there were, a client's scores follow at its next visit.
    """
    rng = np.random.default_rng(3)
    half = rng.normal(size=(SIZE, SIZE))
    covariance = half @ half.T + np.eye(SIZE)
    received = Received(*[None] * len(Received._fields))._replace(
        num_records=np.array([50.0, 20.0]), num_factors=2
    )
    score, known = np.arange(SIZE), np.linalg.inv(covariance)
    with jax.enable_x64(True):
        memory = remembered(shape=raw_columns(), shape_known=10.0 * np.eye(SIZE)).with_own(
            records=jnp.array([50.0, 0.0]),
            score=jnp.stack([jnp.asarray(1.0 * score), jnp.zeros(SIZE)]),
            score_known=pack(jnp.stack([jnp.asarray(known), jnp.zeros((SIZE, SIZE))])),
        )
        memory = put_down(memory._replace(moves=memory.moves._replace(unit=jnp.asarray(3.0))))
        for times in (0.5, 1.0, 1.5):
            way = jnp.asarray(0.1 * rng.normal(size=SIZE))
            axes = coordinates(memory.shape)
            error, _ = outside_of(axes, *[error_of(memory, axes, way)] * 2)
            error = 2 * 50**2 * np.asarray(error)
            covariance = times**2 * (covariance + error)
            score = times * (score - 50 * np.asarray(memory.shape) @ np.asarray(way))
            memory = after_step(memory, memory.loc + way * memory.prior_sd)
            # The level has changed, and a shape has been learnt.
            moves = memory.moves._replace(unit=times * memory.moves.unit)
            memory = memory._replace(moves=moves, shape=memory.shape + 0.1 * jnp.eye(SIZE))
        own = picked_up(received, memory, coordinates(memory.shape)).own
        found = np.linalg.inv(unpack(own.score_known[0]))
        np.testing.assert_allclose(found, covariance, rtol=1e-9)
        np.testing.assert_allclose(own.score[0], score, rtol=1e-9)
        # A client of which nothing is known stays unknown.
        assert not np.any(own.score_known[1])
        assert not np.any(own.score[1])


@grid("number", [0, 1, 3], quick=[2])
def test_latents_of_one_scale_respond_by_no_more_than_was_seen(number):
    """One such latent has no other that it could repeat; two or more claim what they show."""
    rng = np.random.default_rng(5)
    histograms = np.full((SIZE, scales.BINS), 1000 / scales.BINS)
    histograms[:number] = np.where(np.arange(scales.BINS) == 20, 1000, 0)
    seen = np.eye(SIZE) + 0.2 * noise(rng)
    memory = remembered(
        shape=np.eye(SIZE),
        seen=seen,
        shape_known=1e3 * np.eye(SIZE),
        counts=histograms,
        counted=1000.0,
    )
    memory = noisy_scores._with_scales(memory)
    values, vectors = responses(memory, coordinates(memory.shape))
    found = np.asarray((vectors * values) @ vectors.T)
    expected = np.eye(SIZE)
    if number > 1:
        inside, turn = np.linalg.eigh(seen[:number, :number])
        inside = np.clip(inside, noisy_factors._DOUBTED, 1)
        expected[:number, :number] = (turn * inside) @ turn.T
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Where noise hides all of it, the shape is believed.
    values, _ = responses(
        memory._replace(shape_known=1e-3 * jnp.eye(SIZE)), coordinates(memory.shape)
    )
    np.testing.assert_allclose(values, 1, atol=1e-5)


def counts(x, y, width):
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


# In much noise, to ask twice would show nothing either.
@pytest.mark.slow
@pytest.mark.parametrize(("noise_std", "once_more"), [(250.0, 0.0), (80.0, 1.0), (20.0, 0.0)])
def test_histograms_that_noise_hides_are_asked_for_once_more(noise_std, once_more):
    """As soon as all have sent them, and no more than once; none where clients are out of step."""
    received, sent, not_sent = SimpleNamespace(total_records=1000.0), jnp.ones(2), jnp.zeros(2)

    def after(memory, first, looked):
        memory = noisy_scores._with_scales(memory)
        return noisy_scores._asked_again(received, memory, first > 0, looked > 0)

    def repeated(memory, first, looked):
        return float(after(memory, first, looked).search.repeated)

    scales = remembered(counted=1000.0, counts_var=noise_std**2, most_visits=1.0)
    assert repeated(scales, sent, not_sent) == once_more
    for counted in (600.0, 1200.0):  # before all have sent them, and when some have sent them twice
        assert repeated(scales._replace(counted=jnp.asarray(counted)), sent, not_sent) == 0
    seen = jnp.zeros_like(scales.counts).at[:, 20].set(1000.0)
    assert repeated(scales._replace(counts=seen), sent, not_sent) == 0
    assert repeated(scales._replace(drawn=jnp.zeros(())), sent, not_sent) == 0
    assert repeated(scales._replace(most_visits=jnp.asarray(3.0)), sent, not_sent) == 0
    assert repeated(scales, not_sent, not_sent) == 0
    # A second visit then is a first one.
    told = noisy_scores.told(after(scales, sent, not_sent).with_own(visits=jnp.ones(2)), 0)
    assert (told.shares[3] == 1) == (once_more > 0)
    twice = remembered(counted=2000.0, counts_var=2 * noise_std**2, most_visits=2.0)
    assert repeated(twice, sent, not_sent) == 0

    look = ratios.Look(*jnp.ones((4, SIZE)))
    known = ratios.nothing(SIZE)._replace(
        stage=jnp.asarray(1.0), look=look, counted=jnp.asarray(1000.0), counts_var=noise_std**2
    )
    looks = remembered(most_visits=3.0)._replace(ratios=known)
    assert repeated(looks, not_sent, sent) == 2 * once_more
    told = noisy_scores.told(after(looks, not_sent, sent).with_own(visits=jnp.full(2, 3.0)), 0)
    assert (told.look.step[0] == 1) == (once_more > 0)
    last = known._replace(stage=jnp.asarray(2.0))
    assert repeated(looks._replace(ratios=last), not_sent, sent) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("noise_std", "looks"), [(250.0, False), (80.0, True)])
def test_nobody_looks_for_columns_where_histograms_are_noise(noise_std, looks):
    """All columns seem to be of one scale there, and a visit would be lost."""
    one_scale = jnp.zeros((SIZE, scales.BINS)).at[:, 20].set(1000.0)
    memory = remembered(
        counts=one_scale, counted=1000.0, counts_var=noise_std**2, most_visits=1.0
    ).with_own(visits=jnp.ones(2))
    memory = noisy_scores._with_scales(memory)
    assert bool(jnp.any(noisy_scores.told(memory, 0).look.step > 0)) == looks


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "poisson", "logistic"])
def test_intervals_cover_in_raw_units_with_few_records_and_much_noise(model):
    """A thousand records at epsilon 1: 90 % intervals covered .74 to .82, by errors up to 139.

    On these seeds nothing was chosen. Of six weights in 20 studies, they cover 96 or more of 120
    but once in 3000 times if all are independent, and once in 400 if two of three are.
    """
    cell, errors = believe.Cell(model, (200,) * 5, 1.0, "raw units"), []
    for seed in range(300, 320):
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, dppvi.FisherScoring(), seed)
        errors.append(((mean - made.truth) / std)[: cell.num_weights])
    assert np.sum(np.abs(errors) < norm.ppf(0.95)) >= 96, errors


@pytest.mark.slow
def test_columns_that_repeat_others_throw_no_run():
    """Both sexes of two children and whether they are the same; two groups, few in both or none.

    On the second of these seeds a run was thrown, to rates a third of what they are. Where records
    say nothing, the posterior has the prior's width: factors claim nothing of what only keeps
    coordinates apart.
    """
    for seed in (4, 5):
        rng = np.random.default_rng(seed)
        (one, two), group = rng.random((2, 25_000)) < 0.5, rng.random(25_000)
        columns = [one & two, ~one & ~two, one, two, one == two, group < 0.41, group > 0.409]
        columns += [rng.random(25_000) < 0.009, *rng.normal(size=(2, 25_000))]
        x = np.column_stack([np.ones(25_000), *columns]).astype(np.float32)
        truth = np.append(2.25, 0.05 * rng.normal(size=10))
        rates = np.exp(x @ truth)
        width = np.append(3, np.ones(10)).astype(np.float32)
        result = dppvi.fit(
            counts,
            None,
            {"x": x, "y": rng.poisson(rates).astype(np.int32)},
            clients=10,
            rng_key=jax.random.key(seed),
            method=dppvi.FisherScoring(),
            budget=dppvi.PrivacyBudget(10.0, 1e-5),
            model_kwargs={"width": width},
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        # Without noise, and with the weights known beforehand.
        exact = np.linalg.inv((x.T * rates) @ x + np.diag(1 / width.astype(float) ** 2))
        wide = result.posterior.stddev["w"] / np.sqrt(np.diagonal(exact))
        assert np.all(wide > 0.95), (seed, wide)
        # Noise hides rare values.
        assert np.all(np.delete(wide, [6, 7, 8]) < 2), (seed, wide)
        off = x @ (result.posterior.mean["w"] - truth)
        assert np.sqrt(np.mean(off**2)) < 0.03, (seed, np.sqrt(np.mean(off**2)))


@pytest.mark.slow
def test_amounts_of_which_most_are_nothing_throw_no_run():
    """Every second column of 24 is one. Intervals were 118 times as wide as without privacy.

    They are 3 times as wide. Errors of more than twice their deviations, root mean square over 200
    weights, are chance in one of 10^9 if all are independent.
    """
    cell, errors, widths = believe.Cell("linear", (1000,) * 5, 10.0, "amounts", 25), [], []
    for seed in range(320, 328):
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, dppvi.FisherScoring(), seed)
        errors.append(((mean - made.truth) / std)[:25])
        widths.append((std / made.exact)[:25])
    assert np.median(widths) < 6, np.median(widths)
    assert np.sqrt(np.mean(np.square(errors))) < 2, errors


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seeds"), [(3000, 20), (900, 40)])
def test_intervals_cover_in_raw_units(size, seeds):
    """Of 3 weights in 20 studies, 90 % intervals cover 48 or more of 60 but once in 200 times.

    With 900 records the same share of 120; on these seeds nothing was chosen.
    """
    covered = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x = np.column_stack([np.ones(size), rng.normal([60, 120], [15, 20], size=(size, 2))])
        x = x.astype(np.float32)
        slopes = 0.4 * rng.normal(size=2) / [15, 20]
        truth = np.array([0.5 * rng.normal() - slopes @ [60, 120], *slopes])
        y = rng.poisson(np.exp(x.astype(float) @ truth)).astype(np.int32)
        result = dppvi.fit(
            counts,
            None,
            [{"x": x[k::3], "y": y[k::3]} for k in range(3)],
            rng_key=jax.random.key(seed),
            method=dppvi.FisherScoring(),
            budget=dppvi.PrivacyBudget(3.0, 1e-5),
            model_kwargs={"width": np.array([30, 0.2, 0.15], np.float32)},
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        off = np.abs(result.posterior.mean["w"] - truth) / result.posterior.stddev["w"]
        covered += int(np.sum(off < norm.ppf(0.95)))
    assert covered >= 0.8 * 3 * seeds


@pytest.mark.slow
def test_a_run_arrives_from_far_away():
    """Events in 1500 days, where the prior's mean is one a day: as in units of 1500 days.

    Both intercepts are 2 to 4 deviations too high: given the days, these outcomes are not Poisson.
    """

    def survival(x, days, y=None):
        w = numpyro.sample("w", dist.Normal(0, 10 * jnp.ones(3)).to_event(1))
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Poisson(days * jnp.exp(x @ w)), obs=y)

    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = np.column_stack([np.ones(3000), rng.normal(size=(3000, 2))]).astype(np.float32)
        times = rng.exponential(np.exp(7.3 + x[:, 1:] @ [0.3, -0.2]))
        ends = rng.uniform(300, 3000, size=3000)
        days, y = np.minimum(times, ends).astype(np.float32), (times < ends).astype(np.int32)
        rates = []
        for unit in (1.0, 1500.0):
            clients = [
                {"x": x[i::3], "days": days[i::3] / np.float32(unit), "y": y[i::3]}
                for i in range(3)
            ]
            result = dppvi.fit(
                survival,
                None,
                clients,
                rng_key=jax.random.key(seed),
                budget=dppvi.PrivacyBudget(3.0),
                method=dppvi.FisherScoring(),
                progress_bar=False,
                insecure_noise_seed=seed,
            )
            assert not result.status.pulled, str(result.status)
            rates.append(result.posterior.mean["w"][0] - np.log(unit))
        assert abs(rates[0] - rates[1]) < 3 * result.posterior.stddev["w"][0], rates


@pytest.mark.slow
def test_the_intercept_of_rare_outcomes_is_covered():
    """Information falls on the way there, and scores were divided by levels of earlier places.

    That covered .12 of 32 other studies, and now .69 are, of 90 %. Of 16 studies, 6 or fewer then
    are covered once in a hundred times, and 7 once in a thousand with the earlier share.
    """
    cell = believe.Cell("logistic", (1000,) * 5, 1.0, "rare outcomes")
    covered = 0
    for seed in range(100, 116):
        made = believe.study(cell, seed)
        mean, std = believe.posterior(cell, made, dppvi.FisherScoring(), seed)
        covered += abs(mean[0] - made.truth[0]) < norm.ppf(0.95) * std[0]
    assert covered > 6


def emax(dose, y):
    """Nothing is known of two latents until the third is away from zero."""
    base, most = (
        numpyro.sample("base", dist.Normal(0, 20)),
        numpyro.sample("most", dist.Normal(0, 50)),
    )
    half = numpyro.sample("half", dist.LogNormal(jnp.log(50.0), 1.0))
    steep = numpyro.sample("steep", dist.LogNormal(0, 0.5))
    spread = numpyro.sample("spread", dist.HalfNormal(20))
    share = jnp.where(dose > 0, dose / half, 1.0) ** steep
    mean = base + most * share / (1 + share) * (dose > 0)
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


@pytest.mark.slow
def test_a_latent_that_is_hardly_known_at_first_is_not_thrown_far():
    """A step once went 290 prior deviations along it; all intervals were far too narrow."""
    truth = {"base": 12.0, "most": 30.0, "half": 40.0, "steep": 1.3, "spread": 8.0}
    rng, off = np.random.default_rng(0), []
    for seed in range(3):
        dose = rng.choice([0.0, 5, 10, 25, 50, 100, 200], 2000)
        y = 12 + 30 * dose**1.3 / (40**1.3 + dose**1.3) + 8 * rng.normal(size=2000)
        result = dppvi.fit(
            emax,
            None,
            {"dose": dose, "y": y},
            clients=5,
            rng_key=jax.random.key(seed),
            method=dppvi.FisherScoring(),
            budget=dppvi.PrivacyBudget(3.0, 1e-5),
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        mean, sd = result.posterior.mean, result.posterior.stddev
        off += [abs(float(mean[name]) - truth[name]) / float(sd[name]) for name in truth]
    # In twelve other runs 1 of 60 was above 3; it was 6 to 780 in five of six.
    assert np.max(off) < 5, off


def histograms(rng, spread, records=20_000):
    """Of scales by octaves: a column far from zero, one about zero, all scattered alike."""
    columns = np.stack([4 + rng.normal(size=records), rng.normal(size=records)])
    scales = np.log2(np.abs(columns)) + spread * rng.normal(size=records)
    edges = np.arange(ratios.BINS + 1) - ratios.BINS // 2
    return jnp.asarray([np.histogram(row, edges)[0] for row in scales], jnp.float32)


@grid("spread", [0.0, 0.5, 1.0], quick=[2])
def test_a_column_of_one_scale_is_told_from_one_about_zero(spread):
    """However much outcomes scatter what they show of it, up to an octave."""
    counts = histograms(np.random.default_rng(0), spread)
    records, noise = jnp.asarray(20_000.0), jnp.asarray(100.0**2)
    found = ratios.narrow(counts, noise, records, jnp.zeros(()))
    assert found.tolist() == [True, False]
    # By the mean of drawn outcomes, nothing scatters.
    drawn = ratios.narrow(counts, noise, records, jnp.ones(()))
    assert drawn.tolist() == [spread < 0.6, False]


def noisy(rng, columns, noise, records=5000):
    """Which of some columns count as narrow, from histograms by exponential times."""
    times = np.abs(rng.exponential(size=records) - 1)
    octaves = np.log2(np.abs(columns) * times) + rng.random((len(columns), 1))
    edges = np.arange(ratios.BINS + 1) - ratios.BINS // 2
    counts = np.stack([np.histogram(row, edges)[0] for row in octaves])
    counts = jnp.asarray(counts + noise * records * rng.normal(size=counts.shape), jnp.float32)
    var, all_records = jnp.asarray((noise * records) ** 2), jnp.asarray(float(records))
    return np.asarray(ratios.narrow(counts, var, all_records, jnp.zeros(())))


@pytest.mark.slow
def test_noise_makes_no_column_one_of_one_scale():
    """Forty runs of five columns about zero, in noise of a sixteenth of the records a bin."""
    rng = np.random.default_rng(1)
    found = [noisy(rng, rng.normal(size=(5, 5000)), 1 / 16) for _ in range(40)]
    assert np.mean(found) < 0.15, np.mean(found, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "seen", "others"), [(0.015, 0.95, 0.05), (0.03, 0.9, 0.1), (0.06, 0.8, 0.5)]
)
def test_noise_hides_hardly_any_column_far_from_zero(noise, seen, others):
    """In noise of .03 of the records a bin, up to half of such columns once stayed hidden."""
    rng, found = np.random.default_rng(2), []
    for _ in range(50):
        far = 1 + np.array([[0], [0.17], [0.25]]) * rng.normal(size=(3, 5000))
        found.append(noisy(rng, np.concatenate([far, rng.normal(size=(2, 5000))]), noise))
    assert np.mean(found, axis=0)[:3].min() > seen, np.mean(found, axis=0)
    assert np.mean(found, axis=0)[3:].max() < others, np.mean(found, axis=0)


@pytest.mark.slow
def test_what_looks_have_found_is_kept_where_no_visit_looks():
    """It takes as long as all else a server does: at a thousand visits it was four seconds."""
    before = remembered()
    found = ratios.Found(jnp.arange(1.0, 1 + SIZE), jnp.full(SIZE, 0.25), jnp.zeros(SIZE))
    known = before.ratios._replace(
        stage=jnp.asarray(2.0), counts=jnp.full((SIZE, ratios.BINS), jnp.nan), found=found
    )
    memory = before._replace(ratios=known).with_own(visits=jnp.full(2, 6.0))
    said = jax.vmap(noisy_scores.told, (None, 0))(memory, jnp.arange(2))
    assert not said.look.step.any()
    received = SimpleNamespace(num_records=jnp.array([100, 100]))
    counts = jnp.zeros_like(known.counts)
    after = noisy_scores._looked(received, memory, said, lambda whose: counts, jnp.zeros(2))
    jax.tree.map(np.testing.assert_array_equal, after.found, found)
    # Worked out anew, nothing would be left of it.
    assert not np.isfinite(jax.jit(ratios.with_found)(known).found.var).any()


def test_noise_hides_no_more_than_correlations_are():
    """An error of an entry of 5 counts as one of .5, and one of .01 as what it is."""
    for noise_std, counted in ((5.0, 0.5), (0.01, 0.01)):
        memory = remembered(shape=np.eye(SIZE), shape_known=np.eye(SIZE) / noise_std)
        hidden, _ = moving.hidden(moving.unknown(memory, coordinates(memory.shape), None))
        np.testing.assert_allclose(hidden, SIZE * counted**2, rtol=0.02)


def test_a_level_drifts_as_far_as_rounds_have_led():
    """By a twentieth where nothing moves, by a fifth once they lead a third of a deviation."""

    def drift(way, curved=0.0, told=1.0):
        memory = remembered(shape=np.eye(SIZE), level=1.0, curved=np.full(SIZE, curved))
        before = memory.rounds.before._replace(loc=memory.loc, noise=told * jnp.eye(SIZE))
        memory = memory._replace(
            rounds=memory.rounds._replace(before=before),
            loc=memory.loc + jnp.array([way, 0.0, 0.0, 0.0]),
        )
        return float(noisy_scores._level_drift(memory, coordinates(memory.shape))) ** 0.5

    np.testing.assert_allclose(drift(0.0), 0.05, rtol=1e-5)
    np.testing.assert_allclose(drift(0.1**0.5), np.hypot(0.05, 0.2), rtol=1e-5)
    assert drift(0.0, told=0.0) == drift(0.0, curved=1.0) == drift(3.0)
