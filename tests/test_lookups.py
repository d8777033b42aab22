"""Entries that records look up: alike, orthogonal, and learnt together."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

from benchmarks import groups
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import entering, scales
from numpyro_dppvi.methods.lookups import FEW, Lookups, alike, by_itself, noise_left, together
from tests.test_hierarchies import without_noise

GROUPS, ITEMS = 6, 5
ROW = {"g": int, "h": int, "x": float, "y": float}


def _model(latents, predictor):
    """A linear regression on latents of these shapes."""

    def model(g, h, x, y):
        drawn = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
            for name, shape in latents.items()
        }
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", dist.Normal(predictor(drawn, g, h, x), 1), obs=y)

    return model


# Latents, a predictor, and of each latent with peers which index tells the sets apart.
MODELS = {
    "effects": (
        {"a": (), "u": (GROUPS,)},
        lambda t, g, h, x: t["a"] + t["u"][g],
        {"u": np.zeros(GROUPS)},
    ),
    "slopes": (
        {"w": (GROUPS, 2)},
        lambda t, g, h, x: t["w"][g, 0] + t["w"][g, 1] * x,
        {"w": np.tile([0, 1], (GROUPS, 1))},
    ),
    "crossed": (
        {"u": (GROUPS,), "v": (ITEMS,)},
        lambda t, g, h, x: t["u"][g] + t["v"][h],
        {"u": np.zeros(GROUPS), "v": np.zeros(ITEMS)},
    ),
    "a table": (
        {"w": (GROUPS, ITEMS)},
        lambda t, g, h, x: t["w"][g, h],
        {"w": np.zeros((GROUPS, ITEMS))},
    ),
    "few": (
        {"u": (FEW - 1,), "v": (ITEMS,)},
        lambda t, g, h, x: t["u"][g] + t["v"][h],
        {"v": np.zeros(ITEMS)},
    ),
    "players": ({"u": (GROUPS,)}, lambda t, g, h, x: t["u"][g] - t["u"][h], None),
    "no lookup": ({"w": (GROUPS,)}, lambda t, g, h, x: jnp.sum(t["w"]) * x, None),
}


def read(model):
    shapes = {name: jax.ShapeDtypeStruct((9,), kind) for name, kind in ROW.items()}
    space = latents.from_model(model, shapes)
    family = guides.family_of(AutoMultivariateNormal(model), model, space)
    return entering.lookups(space, family), family


@pytest.mark.parametrize("name", MODELS)
def test_peers_are_read_off_the_model(name):
    shapes, predictor, sets = MODELS[name]
    found, family = read(_model(shapes, predictor))
    if sets is None:
        assert found is None
        return
    expected = set()
    for latent, which in sets.items():
        places = entering._places(family, [latent])
        for one in np.unique(which):
            expected.add(frozenset(places[np.ravel(which) == one].tolist()))
    assert {frozenset(np.flatnonzero(row).tolist()) for row in found.peers} == expected


def test_priors_of_other_scales_keep_entries_apart():
    peers = np.array([[1, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1, 0]], bool)
    lookups = Lookups(~(peers.T @ peers), peers)
    found = lookups.peers_by(jnp.array([1, 1.5, 1, 1, 1, 3, 1, 1, 1.0]))
    np.testing.assert_array_equal(found, [peers[0], np.zeros(9)])


def test_peers_that_noise_hides_share_the_records():
    """A record has one of ten, so that each has a tenth of what all columns are expected to tell.

    Believed to tell as much as a column each, effects of 85 counties pulled their mean to zero, in
    intervals that were twenty times too narrow.
    """
    counts = jnp.zeros((11, scales.BINS))
    told = (counts, jnp.asarray(1e4), jnp.asarray(700.0), jnp.ones(()), jnp.zeros(11))
    found = scales.of(*told, _peers(10))
    assert not found.found.any()
    np.testing.assert_allclose(found.information, [1] + [0.1] * 10, rtol=1e-6)
    # What is seen of others is expected of all peers together.
    seen = counts.at[0, scales.BINS // 2].set(700.0)
    found = scales.of(seen, jnp.asarray(1e-2), *told[2:], _peers(10))
    np.testing.assert_array_equal(found.found, [True] + [False] * 10)
    np.testing.assert_allclose(found.most[1:], found.most[0] / 10, rtol=1e-6)


def _peers(size, alone=1):
    return jnp.asarray([[0.0] * alone + [1.0] * size])


def test_without_noise_each_has_its_own_information():
    seen = jnp.array([5.0, 0.5, 1.0, 1.5, 3.0, 0.7])
    shape = jnp.diag(jnp.array([5.0, 1, 1, 1, 1, 1])) + 0.1
    found = alike(shape, jnp.diagonal(shape), seen, jnp.zeros(6), _peers(5))
    np.testing.assert_allclose(jnp.diagonal(found)[1:], seen[1:], rtol=1e-5)
    # Others stay as they are, and so do correlations.
    np.testing.assert_allclose(found[0, 0], shape[0, 0], rtol=1e-6)
    root, before = jnp.sqrt(jnp.diagonal(found)), jnp.sqrt(jnp.diagonal(shape))
    np.testing.assert_allclose(found / root / root[:, None], shape / before / before[:, None], 1e-5)


@pytest.mark.parametrize("number", [8, 40])
def test_in_noise_they_have_what_they_have_in_common(number):
    """Noise as large as the information itself: of each by itself nothing would be known."""
    rng, truth, noise = np.random.default_rng(number), 2.0, np.full(number + 1, 1.0)
    apart = []
    for _ in range(40):
        seen = truth + np.sqrt(2) * noise * rng.normal(size=number + 1)
        shape = jnp.diag(jnp.asarray(rng.uniform(0.5, 4, number + 1)))
        before = jnp.full(number + 1, truth)
        found = np.diag(alike(shape, before, jnp.asarray(seen), jnp.asarray(noise), _peers(number)))
        # The mean has the error sqrt(2 / number), less what was known before.
        assert abs(found[1:].mean() / truth - 1) < 3 * np.sqrt(2 / number) / truth
        apart.append(found[1:].std() > 1e-3 * truth)
    # A variance exceeds that of noise by two of its deviations, of noise alone, in about 4 %.
    assert np.mean(apart) < 0.2


def test_groups_of_other_sizes_stand_out():
    rng = np.random.default_rng(0)
    truth = rng.lognormal(size=30)
    noise = np.full(30, 0.2 * truth.mean())
    seen = truth + np.sqrt(2) * noise * rng.normal(size=30)
    before = jnp.full(30, truth.mean())
    arrays = [jnp.asarray(each) for each in (seen, noise)]
    found = np.diag(alike(jnp.diag(before), before, *arrays, _peers(30, alone=0)))
    assert np.corrcoef(found, truth)[0, 1] > 0.9
    assert np.mean((found - truth) ** 2) < 0.5 * np.var(truth)


def test_of_groups_that_hardly_any_record_has_next_to_nothing_is_claimed():
    """Two of four groups, as rare as one record in four hundred: intervals were six times too wide,
    and .6 times as wide once all had what they have in common at least a tenth of.
    """
    truth = jnp.array([0.6, 0.4, 0.002, 0.002]) * 4
    noise = 0.01 * truth
    before = jnp.full(4, 1.0)
    found = np.diag(alike(jnp.diag(before), before, truth, noise, _peers(4, alone=0)))
    np.testing.assert_allclose(found, truth, rtol=0.1)
    seen = jnp.array([600.0, 400.0, 3.0, -2.0])
    found = by_itself(seen, jnp.full(4, 5.0), _peers(4, alone=0))
    np.testing.assert_allclose(found, [600, 400, 5, 5], rtol=0.05)


def test_a_group_that_most_records_have_has_as_much():
    """Half of the records are one of sixty groups', which has thirty times the mean."""
    truth = jnp.asarray([30.0, *[0.5] * 59])
    for noise in (1e-6, 0.2):
        found = np.diag(
            alike(jnp.eye(60), jnp.ones(60), truth, jnp.full(60, noise), _peers(60, alone=0))
        )
        np.testing.assert_allclose(found, truth, rtol=0.05)
    found = by_itself(100 * truth, jnp.full(60, 10.0), _peers(60, alone=0))
    np.testing.assert_allclose(found, 100 * truth, rtol=0.01)


@pytest.mark.parametrize("times", [0.01, 100.0])
def test_without_noise_what_all_have_changes_at_once(times):
    seen = times * jnp.array([1.0, 2, 3, 4])
    before = jnp.full(4, 2.5)
    found = alike(jnp.diag(before), before, seen, jnp.full(4, 1e-6), _peers(4, alone=0))
    np.testing.assert_allclose(jnp.diagonal(found), seen, rtol=1e-3)


def test_what_histograms_have_shown_of_each_is_expected():
    """In noise that hides all differences, peers differ as their histograms did."""
    shown = jnp.array([0.5, 1.0, 1.5, 2.0, 5.0])
    lookups = Lookups(np.eye(5, dtype=bool), np.ones((1, 5), bool))
    peers = lookups.peers_by(jnp.ones(5), shown)
    np.testing.assert_allclose(peers, shown[None] / 2, rtol=1e-6)
    shape = jnp.diag(shown)
    found = alike(shape, shown, jnp.zeros(5), jnp.full(5, 1e3), peers)
    np.testing.assert_allclose(jnp.diagonal(found), shown, rtol=0.1)


def test_correlations_with_columns_that_no_record_has_two_of_add_up_to_one():
    """Bessel's inequality, where records look up one of thirty entries."""
    rng, number, places = np.random.default_rng(0), 400, 30
    place = rng.integers(places, size=number)
    # Columns that depend on the place all but wholly, and hardly.
    columns = np.stack([rng.normal(size=places)[place] + by * rng.normal(size=number)
                        for by in (0.01, 1.0)])  # fmt: skip
    rows = np.column_stack([*columns, np.eye(places)[place]])
    information = (rows.T * rng.uniform(0.1, 1, number)) @ rows / number
    root = np.sqrt(np.diag(information))
    squares = (information / root / root[:, None])[:2, 2:] ** 2
    assert squares.sum(axis=1)[0] > 0.99
    assert np.all(squares.sum(axis=1) <= 1 + 1e-9)

    # So noise that is larger hides no more than that.
    size = places + 2
    meeting = np.ones((size, size), bool)
    meeting[2:, 2:] = np.eye(places, dtype=bool)
    own, shape = jnp.full(size, 0.7), jnp.ones(size)
    left = np.asarray(noise_left(shape, shape, own, meeting, _peers(places, alone=2)))
    hidden = np.asarray(left * own[:, None] * own)
    np.testing.assert_allclose(hidden[:2, 2:].sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(left, left.T)
    # What is known well is hidden by its noise, as ever, and entries of two places by nothing.
    np.testing.assert_array_equal(left[:2, :2], 1)
    assert not left[2:, 2:][~np.eye(places, dtype=bool)].any()
    little = np.asarray(noise_left(shape, shape, 0.1 * own, meeting, _peers(places, alone=2)))
    np.testing.assert_array_equal(little[:2, 2:], 1)
    # Of what peers have in common a thirtieth of the noise is left.
    np.testing.assert_allclose(np.diag(left)[2:], 1 / places, rtol=1e-5)


def test_histograms_of_many_groups_show_their_scale_together():
    """Each group by itself has a thirtieth of the records, which noise hides."""
    rng, places, records, noise_std = np.random.default_rng(0), 30, 3000, 70.0
    counts = np.zeros((places + 1, scales.BINS))
    counts[0, -scales.LOWEST - 2 : -scales.LOWEST + 1] = records / 3
    counts[1:, -scales.LOWEST - 3] = rng.multinomial(records, np.full(places, 1 / places))
    noisy = jnp.asarray(counts + noise_std * rng.normal(size=counts.shape))
    of = noisy, jnp.asarray(noise_std**2), jnp.asarray(1.0 * records), jnp.ones(()), jnp.zeros(31)
    found = jax.jit(scales.of)(*of, _peers(places))
    # In the middle of an octave from 1/8, a thirtieth of the records.
    expected = (2**0.5 / 8) ** 2 / places
    np.testing.assert_allclose(found.most[1:], expected, rtol=0.3)
    by_itself = jax.jit(scales.of)(*of)
    assert np.mean(by_itself.found[1:]) < 0.1
    np.testing.assert_allclose(found.most[0], by_itself.most[0], rtol=1e-6)
    mean, noise = together(noisy, jnp.full(places + 1, noise_std), _peers(places))
    np.testing.assert_allclose(noise[1:], noise_std / np.sqrt(places), rtol=1e-6)
    np.testing.assert_array_equal(mean[0], noisy[0])


def test_a_column_that_is_the_same_for_all_of_a_group_is_known_no_better_than_the_groups():
    """The posterior is normal, and known. Once its deviation came out a fifth as large: along the
    direction that no record sees, what made the information positive definite was claimed, too.
    """
    rng, places, number, spread = np.random.default_rng(0), 8, 2000, 0.5
    level = rng.normal(size=places)
    group = rng.integers(places, size=number)
    y = (rng.normal(size=places) + 0.4 * level)[group] + spread * rng.normal(size=number)

    def model(u, group, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, 0.7).expand([places]).to_event(1))
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", dist.Normal(a[group] + b * u, spread), obs=y)

    data = [
        {"u": level[group[part]], "group": group[part], "y": y[part]}
        for part in (slice(1000), slice(1000, None))
    ]
    draws = without_noise(model, data).posterior.sample(jax.random.key(1), (20_000,))
    rows = np.column_stack([level[group], np.eye(places)[group]])
    precision = rows.T @ rows / spread**2 + np.diag([1, *[0.7**-2] * places])
    covariance = np.linalg.inv(precision)
    mean = covariance @ (rows.T @ y / spread**2)
    std = np.sqrt(np.diag(covariance))
    # Clients' own columns differ by chance, which is taken for noise: of effects within a quarter.
    # Outcomes are drawn, which moves means by up to half a deviation.
    for name, part, rtol in (("b", slice(1), 0.1), ("a", slice(1, None), 0.25)):
        table = np.asarray(draws[name]).reshape(20_000, -1)
        np.testing.assert_allclose(table.std(axis=0), std[part], rtol=rtol)
        away = (table.mean(axis=0) - mean[part]) / std[part]
        assert np.all(np.abs(away) < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "uneven", "least"), [(1.0, False, 0.76), (1.0, True, 0.72)])
def test_effects_of_many_groups_are_covered_in_noise(epsilon, uneven, least):
    """Once .65 of the 90 % intervals of thirty groups' effects, and .76 if these differ in size.

    Studies on which nothing was chosen, sixteen of thirty effects, which share what is wrong.
    """
    cell, covered = groups.Cell((1000,) * 5, epsilon, num_groups=30, uneven=uneven), []
    for seed in range(720, 736):
        made = groups.study(cell, seed)
        mean, std = groups.posterior(cell, made, seed)["effects"]
        covered.append(np.mean(np.abs(mean - made.truth["effects"]) < 1.645 * std))
    assert np.mean(covered) > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "seed", "part", "least", "most"),
    [
        # Correlation with thirty groups, which noise could hide, once left next to nothing.
        pytest.param(1.0, 3, "w", 1, 5, id="weights"),
        # No record tells it from the groups' mean, which noise hides: .5 if nobody says so.
        pytest.param(3.0, 0, "mu", 0.85, 1.3, id="an intercept"),
    ],
)
def test_what_is_known_beside_many_groups(epsilon, seed, part, least, most):
    cell = groups.Cell((1000,) * 5, epsilon, num_groups=30, model=groups.intercept)
    made = groups.study(cell, seed)
    _, std = groups.posterior(cell, made, seed)[part]
    ratio = std / made.exact[part]
    assert np.all((ratio > least) & (ratio < most)), ratio
