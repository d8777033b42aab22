"""Every family passes the same tests: a new one is a row in ``CASES``."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dppvi import factors
from numpyro_dppvi.families import (
    DiagonalNormal,
    MeanField,
    NormalCoordinates,
    NormalNatural,
)


class Case(NamedTuple):
    """A family, and what is known of it without its code.

    Attributes:
        family: The family.
        coordinates: Random numbers -> coordinates of a proper member.
        distribution: Those coordinates -> the same member by NumPyro's own names.
        improper: Natural parameters outside the domain, by what is wrong with them.
        projected: Pairs of natural parameters and their projection.
        statistics: Draws -> the statistics T of each.
    """

    family: Any
    coordinates: Any
    distribution: Any
    improper: dict[str, Any]
    projected: list[tuple[Any, Any]]
    statistics: Any


def _normal(*shape: int) -> Case:
    family = DiagonalNormal(shape)

    def coordinates(generator: np.random.Generator) -> NormalCoordinates:
        loc, log_scale = generator.normal(size=(2, *shape))
        return NormalCoordinates(jnp.asarray(2 * loc), jnp.asarray(log_scale))

    def distribution(c: NormalCoordinates) -> dist.Distribution:
        return dist.Normal(c.loc, jnp.exp(c.log_scale)).to_event(len(shape))

    def natural(linear: float, quadratic: float) -> NormalNatural:
        """All entries proper but the last, which is as given."""
        fine = np.full(shape, -0.5)
        broken = fine.copy()
        broken[(-1,) * len(shape)] = quadratic
        other = np.zeros(shape)
        other[(-1,) * len(shape)] = linear
        return NormalNatural(jnp.asarray(other), jnp.asarray(broken))

    improper = {
        "precision zero": natural(1.0, 0.0),
        "precision below zero": natural(1.0, 0.25),
        "precision NaN": natural(1.0, math.nan),
        "precision infinite": natural(1.0, -math.inf),
        "location NaN": natural(math.nan, -0.5),
        "location infinite": natural(math.inf, -0.5),
    }
    projected = [
        (natural(3.0, 0.25), natural(3.0, 0.0)),
        (natural(-3.0, -2.0), natural(-3.0, -2.0)),
        (natural(3.0, 0.0), natural(3.0, 0.0)),
    ]

    def statistics(draws: Any) -> NormalNatural:
        return NormalNatural(draws, draws**2)

    return Case(family, coordinates, distribution, improper, projected, statistics)


def _mean_field() -> Case:
    a, b = _normal(2), _normal()
    family = MeanField((("b", b.family), ("a", a.family)))

    def distribution(c: dict[str, Any]) -> dict[str, dist.Distribution]:
        return {"a": a.distribution(c["a"]), "b": b.distribution(c["b"])}

    fine = a.family.natural(a.family.standard())
    return Case(
        family,
        lambda generator: {"a": a.coordinates(generator), "b": b.coordinates(generator)},
        distribution,
        {words: {"a": fine, "b": natural} for words, natural in b.improper.items()},
        [({"a": fine, "b": raw}, {"a": fine, "b": repaired}) for raw, repaired in b.projected],
        lambda draws: {"a": a.statistics(draws["a"]), "b": b.statistics(draws["b"])},
    )


CASES = {
    "scalar normal": _normal(),
    "matrix of normals": _normal(2, 2),
    "mean field of two latents": _mean_field(),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def member(case: Case, seed: int = 0) -> Any:
    """Coordinates of a proper member, in the precision that is switched on."""
    drawn = case.coordinates(np.random.default_rng(seed))
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), drawn)


def in_precision(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), tree)


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def by_latent(distribution: Any) -> list[tuple[str | None, dist.Distribution]]:
    return list(distribution.items()) if isinstance(distribution, dict) else [(None, distribution)]


def of_latent(tree: Any, name: str | None) -> Any:
    return tree if name is None else tree[name]


class TestEveryFamily:
    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize("seed", range(3))
    def test_the_two_parameterisations_invert_each_other(self, case, seed):
        coordinates = member(case, seed)
        natural = case.family.natural(coordinates)
        assert_close(case.family.coordinates(natural), coordinates, rtol=1e-12, atol=1e-12)
        assert_close(
            case.family.natural(case.family.coordinates(natural)), natural, rtol=1e-12, atol=1e-12
        )

    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize("seed", range(3))
    def test_the_gradient_of_the_log_partition_is_the_expected_statistics(self, case, seed):
        coordinates = member(case, seed)
        gradient = jax.grad(case.family.log_partition)(case.family.natural(coordinates))
        assert_close(gradient, case.family.statistics(coordinates), rtol=1e-10, atol=1e-10)

    @pytest.mark.usefixtures("x64")
    def test_the_log_density_is_linear_in_the_statistics(self, case):
        coordinates = member(case)
        natural = case.family.natural(coordinates)
        distribution = case.distribution(coordinates)
        draws = jax.tree.map(
            lambda d: d.sample(jax.random.key(1)),
            distribution,
            is_leaf=lambda d: isinstance(d, dist.Distribution),
        )
        expected = sum(d.log_prob(of_latent(draws, n)) for n, d in by_latent(distribution))
        actual = factors.inner(natural, case.statistics(draws)) - case.family.log_partition(natural)
        np.testing.assert_allclose(actual, expected, rtol=1e-10)

    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize("seed", range(3))
    def test_entropy_is_numpyros(self, case, seed):
        coordinates = member(case, seed)
        expected = sum(d.entropy() for _, d in by_latent(case.distribution(coordinates)))
        actual = case.family.entropy(coordinates)
        assert actual.shape == ()
        np.testing.assert_allclose(actual, expected, rtol=1e-12)

    @pytest.mark.usefixtures("x64")
    def test_entropy_is_the_log_partition_less_the_linear_part(self, case):
        coordinates = member(case)
        natural = case.family.natural(coordinates)
        linear = factors.inner(natural, case.family.statistics(coordinates))
        np.testing.assert_allclose(
            case.family.entropy(coordinates), case.family.log_partition(natural) - linear
        )

    def test_a_proper_member_and_the_standard_one_are_in_the_domain(self, case):
        for coordinates in (member(case), case.family.standard()):
            answer = case.family.in_domain(case.family.natural(coordinates))
            assert answer.shape == ()
            assert bool(answer)

    def test_what_is_improper_is_not_in_the_domain(self, case):
        for words, natural in case.improper.items():
            assert not bool(case.family.in_domain(in_precision(natural))), words

    def test_the_unit_is_no_distribution_but_changes_none(self, case):
        natural = case.family.natural(member(case))
        unit = factors.unit(natural)
        assert not bool(case.family.in_domain(unit))
        assert_close(factors.multiply(natural, unit), natural)

    def test_projection_moves_what_must_move_and_nothing_else(self, case):
        for natural, expected in case.projected:
            assert_close(case.family.project(in_precision(natural)), in_precision(expected))

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def test_a_projected_factor_times_a_proper_member_is_proper(self, case, seed):
        natural = case.family.natural(member(case, seed))
        noise = np.random.default_rng(seed)
        factor = jax.tree.map(lambda leaf: jnp.asarray(5 * noise.normal(size=leaf.shape)), natural)
        projected = case.family.project(factor)
        assert bool(case.family.in_domain(factors.multiply(natural, projected)))
        assert_close(case.family.project(projected), projected)

    def test_draws_have_the_expected_statistics(self, case):
        coordinates = member(case)
        draws = case.family.draws(jax.random.key(0), coordinates, 40_000)
        actual = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), case.statistics(draws))
        assert_close(actual, case.family.statistics(coordinates), rtol=0.05, atol=0.02)

    @pytest.mark.parametrize("num_draws", [1, 2, 7])
    def test_as_many_draws_as_asked_for(self, case, num_draws):
        coordinates = member(case)
        draws = jax.eval_shape(
            lambda c: case.family.draws(jax.random.key(0), c, num_draws), coordinates
        )
        one = jax.eval_shape(case.distribution, coordinates)
        for name, distribution in by_latent(one):
            assert of_latent(draws, name).shape == (num_draws, *distribution.shape())

    def test_draws_follow_their_key(self, case):
        coordinates = member(case)
        first = case.family.draws(jax.random.key(0), coordinates, 4)
        assert_close(case.family.draws(jax.random.key(0), coordinates, 4), first)
        second = case.family.draws(jax.random.key(1), coordinates, 4)
        assert all(
            np.all(a != b)
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        )

    @pytest.mark.usefixtures("x64")
    def test_draws_can_be_differentiated_in_the_coordinates(self, case):
        """The mean of mirrored draws of x is its location: gradient one in every mean."""
        coordinates = member(case)

        def mean(c: Any) -> jax.Array:
            draws = case.family.draws(jax.random.key(0), c, 2)
            return sum(jnp.sum(jnp.mean(leaf, axis=0)) for leaf in jax.tree.leaves(draws))

        gradient = jax.grad(mean)(coordinates)
        for normal in jax.tree.leaves(gradient, is_leaf=lambda x: isinstance(x, NormalCoordinates)):
            np.testing.assert_allclose(normal.loc, 1, rtol=1e-12)
            np.testing.assert_allclose(normal.log_scale, 0, atol=1e-12)

    def test_its_distribution_is_numpyros(self, case):
        coordinates = member(case)
        actual = dict(by_latent(case.family.distribution(coordinates)))
        for name, expected in by_latent(case.distribution(coordinates)):
            assert actual[name].event_shape == expected.event_shape
            assert actual[name].batch_shape == ()
            value = expected.sample(jax.random.key(0))
            np.testing.assert_allclose(actual[name].log_prob(value), expected.log_prob(value))

    def test_can_be_hashed_and_compared(self, case):
        """Families are compiled in; equal ones must share a program."""
        assert hash(case.family) == hash(type(case.family)(*_arguments(case.family)))
        assert case.family == type(case.family)(*_arguments(case.family))


def _arguments(family: Any) -> tuple[Any, ...]:
    return tuple(getattr(family, name) for name in family.__dataclass_fields__)


class TestMirroredDraws:
    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_each_second_draw_mirrors_the_one_before_it(self, shape):
        loc, log_scale = jnp.full(shape, 2.0), jnp.full(shape, 0.3)
        family = DiagonalNormal(shape)
        draws = family.draws(jax.random.key(0), NormalCoordinates(loc, log_scale), 6)
        np.testing.assert_allclose(draws[0::2] + draws[1::2], np.full((3, *shape), 4.0), rtol=1e-6)
        assert len(np.unique(draws[0::2])) == draws[0::2].size

    def test_an_odd_draw_out_is_a_draw_like_the_others(self):
        family, coordinates = DiagonalNormal(()), NormalCoordinates(jnp.array(2.0), jnp.array(0.3))
        keys = jax.random.split(jax.random.key(0), 20_000)
        last = jax.vmap(lambda key: family.draws(key, coordinates, 3)[-1])(keys)
        np.testing.assert_allclose(jnp.mean(last), 2.0, atol=0.05)
        np.testing.assert_allclose(jnp.std(last), math.exp(0.3), rtol=0.03)


def test_latents_are_drawn_independently_of_each_other():
    family = MeanField((("a", DiagonalNormal(())), ("b", DiagonalNormal(()))))
    draws = family.draws(jax.random.key(0), family.standard(), 4000)
    correlation = np.corrcoef(draws["a"][::2], draws["b"][::2])[0, 1]
    np.testing.assert_allclose(correlation, 0, atol=0.1)


class TestSigmaPoints:
    @pytest.mark.usefixtures("x64")
    def test_integrate_quadratics_exactly_over_two_latents_together(self):
        case = CASES["mean field of two latents"]
        coordinates = member(case)
        generator = np.random.default_rng(5)
        size = sum(family.size for _, family in case.family.members)
        curvature, slope = generator.normal(size=(size, size)), generator.normal(size=size)

        def quadratic(x: jax.Array) -> jax.Array:
            return x @ curvature @ x + slope @ x + 3.0

        points = case.family.sigma_points(coordinates)
        assert points["a"].shape == (2 * size, 2)
        assert points["b"].shape == (2 * size,)
        flat = jnp.concatenate([points["a"], points["b"][:, None]], axis=1)
        mean = jnp.append(coordinates["a"].loc, coordinates["b"].loc)
        scale = jnp.exp(jnp.append(coordinates["a"].log_scale, coordinates["b"].log_scale))
        expected = quadratic(mean) + jnp.sum(jnp.diag(curvature) * scale**2)
        np.testing.assert_allclose(jnp.mean(jax.vmap(quadratic)(flat)), expected, rtol=1e-12)

    def test_are_two_a_dimension_at_one_distance(self):
        family = MeanField((("m", DiagonalNormal((2, 2))), ("x", DiagonalNormal(()))))
        points = family.sigma_points(family.standard())
        flat = np.concatenate([points["m"].reshape(10, 4), points["x"].reshape(10, 1)], axis=1)
        np.testing.assert_allclose(np.linalg.norm(flat, axis=1), np.sqrt(5), rtol=1e-6)
        assert len(np.unique(flat, axis=0)) == 10


class TestReadingADistribution:
    @pytest.mark.parametrize(
        ("shape", "distribution"),
        [
            ((), dist.Normal(2, 0.5)),
            ((3,), dist.Normal(2, 0.5).expand([3])),
            ((3,), dist.Normal(2, 0.5).expand([3]).to_event(1)),
            ((3,), dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5)),
            ((3,), dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5).to_event(1)),
            ((3,), dist.Normal(2, jnp.array([0.1, 0.5, 9.0]))),
            ((2, 3), dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5).expand([2, 3]).to_event(2)),
            ((2, 3), dist.Normal(jnp.ones((2, 1)), jnp.array([0.1, 0.5, 9.0]))),
        ],
        ids=[
            "plain",
            "expanded",
            "expanded event",
            "locations",
            "locations of an event",
            "widths",
            "expanded event of locations",
            "broadcast",
        ],
    )
    def test_a_normal_is_read_exactly(self, shape, distribution):
        natural = DiagonalNormal(shape).of_distribution(distribution)
        mean = np.broadcast_to(distribution.mean, shape)
        variance = np.broadcast_to(distribution.variance, shape)
        assert natural.linear.shape == natural.quadratic.shape == shape
        np.testing.assert_allclose(natural.linear, mean / variance, rtol=1e-6)
        np.testing.assert_allclose(natural.quadratic, -0.5 / variance, rtol=1e-6)

    @pytest.mark.parametrize(
        "distribution",
        [
            None,
            dist.StudentT(4.0, 0.0, 1.0),
            dist.LogNormal(0.0, 1.0),
            dist.HalfNormal(1.0),
            dist.TruncatedNormal(0.0, 1.0, low=0.0),
            dist.Normal(0, 1).mask(False),
            dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
            dist.Delta(0.0),
        ],
        ids=lambda d: type(d).__name__,
    )
    def test_anything_else_is_none(self, distribution):
        shape = () if distribution is None else distribution.shape()
        assert DiagonalNormal(shape).of_distribution(distribution) is None
