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
from scipy import stats

from numpyro_dppvi.families import (
    BY_DISTRIBUTION,
    Bernoulli,
    Beta,
    BetaCoordinates,
    BetaNatural,
    Categorical,
    DiagonalNormal,
    Dirichlet,
    DirichletCoordinates,
    Exponential,
    FullNormal,
    FullNormalCoordinates,
    Gamma,
    GammaCoordinates,
    GammaNatural,
    HalfNormal,
    MeanField,
    NormalCoordinates,
    NormalNatural,
    Part,
    enumeration,
    factors,
)
from numpyro_dppvi.families.full_normal import pack
from tests.grids import grid


class Case(NamedTuple):
    """A family, and what is known of it without its code.

    Attributes:
        family: The family.
        coordinates: Random numbers -> coordinates of a proper member.
        distribution: Those coordinates -> the same member by NumPyro's own names.
        improper: Natural parameters outside the domain, by what is wrong with them.
        projected: Pairs of natural parameters and their projection.
        statistics: Draws -> the statistics T of each.
        unit_is_proper: Whether the factor 1 is a distribution, as on a bounded support.
        entropy: Those coordinates -> the entropy, where NumPyro does not know it.
        discrete: Whether draws are integers, of which nothing can be differentiated.
    """

    family: Any
    coordinates: Any
    distribution: Any
    improper: dict[str, Any]
    projected: list[tuple[Any, Any]]
    statistics: Any
    unit_is_proper: bool = False
    entropy: Any = None
    discrete: bool = False


def last(shape: tuple[int, ...], others: float, value: float) -> np.ndarray:
    """An array of one value in all entries but the last, which is another."""
    array = np.full(shape, others)
    array[(-1,) * len(shape)] = value
    return array


def _normal(*shape: int) -> Case:
    family = DiagonalNormal(shape)

    def coordinates(generator: np.random.Generator) -> NormalCoordinates:
        loc, log_scale = generator.normal(size=(2, *shape))
        return NormalCoordinates(2 * loc, log_scale)

    def distribution(c: NormalCoordinates) -> dist.Distribution:
        return dist.Normal(c.loc, jnp.exp(c.log_scale)).to_event(len(shape))

    def natural(linear: float, quadratic: float) -> NormalNatural:
        return NormalNatural(last(shape, 0.0, linear), last(shape, -0.5, quadratic))

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


def _full_normal(*shape: int) -> Case:
    size = shape[-1]

    def coordinates(generator: np.random.Generator) -> FullNormalCoordinates:
        loc, log_scale = generator.normal(size=(2, *shape))
        lower = generator.normal(size=(*shape[:-1], size * (size - 1) // 2))
        return FullNormalCoordinates(loc, log_scale / 2, lower)

    @jax.jit
    def distribution(c: FullNormalCoordinates) -> dist.Distribution:
        rows, number = [], 0
        for i in range(size):
            below = [c.lower[..., number + j] for j in range(i)]
            number += i
            row = [*below, jnp.ones(shape[:-1]), *([jnp.zeros(shape[:-1])] * (size - 1 - i))]
            rows.append(jnp.stack(row, -1) * jnp.exp(c.log_scale[..., i, None]))
        normal = dist.MultivariateNormal(c.loc, scale_tril=jnp.stack(rows, -2))
        return normal.to_event(len(shape) - 1)

    def packed(matrix: Any) -> jax.Array:
        """Row by row of the lower triangle, off-diagonal entries times sqrt(2)."""
        entries = [
            matrix[..., i, j] * (1 if i == j else math.sqrt(2))
            for i in range(size)
            for j in range(i + 1)
        ]
        return jnp.stack(entries, -1)

    # An orthogonal basis that is not the axes'.
    basis = jnp.asarray(stats.ortho_group.rvs(size, random_state=0))

    def natural(linear: float, eigenvalue: float) -> NormalNatural:
        """All eigenvalues -1/2, but the last one, in the last batch."""
        values = last(shape, -0.5, eigenvalue)
        matrix = jnp.einsum("ij,...j,kj->...ik", basis, values, basis)
        return NormalNatural(last(shape, 0.0, linear), packed(matrix))

    improper = {
        "precision all but singular": natural(1.0, 0.01),
        "precision indefinite": natural(1.0, 0.25),
        "precision NaN": natural(1.0, math.nan),
        "location NaN": natural(math.nan, -0.5),
    }
    projected = [
        (natural(3.0, 0.25), natural(3.0, 0.0)),
        (natural(-3.0, -2.0), natural(-3.0, -2.0)),
    ]

    def statistics(draws: Any) -> NormalNatural:
        return NormalNatural(draws, packed(draws[..., :, None] * draws[..., None, :]))

    return Case(FullNormal(shape), coordinates, distribution, improper, projected, statistics)


def _gamma(*shape: int) -> Case:
    def coordinates(generator: np.random.Generator) -> GammaCoordinates:
        log_mean, log_concentration = generator.normal(size=(2, *shape))
        return GammaCoordinates(log_mean, log_concentration + 1)

    def distribution(c: GammaCoordinates) -> dist.Distribution:
        concentration = jnp.exp(c.log_concentration)
        return dist.Gamma(concentration, concentration / jnp.exp(c.log_mean)).to_event(len(shape))

    def natural(log: float, linear: float) -> GammaNatural:
        return GammaNatural(last(shape, 1.0, log), last(shape, -1.0, linear))

    improper = {
        "concentration zero": natural(-1.0, -1.0),
        "concentration below zero": natural(-1.5, -1.0),
        "rate zero": natural(1.0, 0.0),
        "rate below zero": natural(1.0, 0.5),
        "concentration NaN": natural(math.nan, -1.0),
        "rate infinite": natural(1.0, -math.inf),
    }
    projected = [
        (natural(-0.5, -2.0), natural(0.0, -2.0)),
        (natural(0.5, 2.0), natural(0.5, 0.0)),
        (natural(3.0, -2.0), natural(3.0, -2.0)),
    ]

    def statistics(draws: Any) -> GammaNatural:
        return GammaNatural(jnp.log(draws), draws)

    return Case(Gamma(shape), coordinates, distribution, improper, projected, statistics)


def _beta(*shape: int) -> Case:
    def coordinates(generator: np.random.Generator) -> BetaCoordinates:
        logit_mean, log_concentration = generator.normal(size=(2, *shape))
        return BetaCoordinates(logit_mean, log_concentration + 2)

    def distribution(c: BetaCoordinates) -> dist.Distribution:
        mean, concentration = 1 / (1 + jnp.exp(-c.logit_mean)), jnp.exp(c.log_concentration)
        return dist.BetaProportion(mean, concentration).to_event(len(shape))

    def natural(log: float, log_complement: float) -> BetaNatural:
        return BetaNatural(last(shape, 1.0, log), last(shape, 1.0, log_complement))

    improper = {
        "a zero": natural(-1.0, 1.0),
        "b below zero": natural(1.0, -1.5),
        "a NaN": natural(math.nan, 1.0),
        "b infinite": natural(1.0, math.inf),
    }
    projected = [
        (natural(-0.5, 2.0), natural(0.0, 2.0)),
        (natural(0.5, -2.0), natural(0.5, 0.0)),
        (natural(3.0, 2.0), natural(3.0, 2.0)),
    ]

    def statistics(draws: Any) -> BetaNatural:
        return BetaNatural(jnp.log(draws), jnp.log1p(-draws))

    def entropy(c: BetaCoordinates) -> float:
        mean, concentration = 1 / (1 + np.exp(-c.logit_mean)), np.exp(c.log_concentration)
        return stats.beta(mean * concentration, (1 - mean) * concentration).entropy().sum()

    return Case(
        Beta(shape), coordinates, distribution, improper, projected, statistics, True, entropy
    )


def _dirichlet(*shape: int) -> Case:
    def coordinates(generator: np.random.Generator) -> DirichletCoordinates:
        logits = generator.normal(size=shape)
        logits -= logits.mean(axis=-1, keepdims=True)
        log_concentration = generator.normal(size=shape[:-1]) + 2
        return DirichletCoordinates(logits, log_concentration)

    def distribution(c: DirichletCoordinates) -> dist.Distribution:
        share = jnp.exp(c.logits) / jnp.sum(jnp.exp(c.logits), axis=-1, keepdims=True)
        dirichlet = dist.Dirichlet(share * jnp.exp(c.log_concentration)[..., None])
        return dirichlet.to_event(len(shape) - 1)

    def natural(value: float) -> jax.Array:
        return last(shape, 1.0, value)

    improper = {
        "zero": natural(-1.0),
        "below zero": natural(-1.5),
        "NaN": natural(math.nan),
        "infinite": natural(math.inf),
    }
    projected = [(natural(-0.5), natural(0.0)), (natural(3.0), natural(3.0))]
    return Case(Dirichlet(shape), coordinates, distribution, improper, projected, jnp.log, True)


def _one_number(family: Any, distribution: Any, statistics: Any, entropy: Any = None) -> Case:
    """Families whose natural parameter is one negative number an entry."""
    shape = family.shape

    def natural(value: float) -> jax.Array:
        return last(shape, -1.0, value)

    return Case(
        family,
        lambda generator: generator.normal(size=shape),
        lambda c: distribution(c).to_event(len(shape)),
        {
            "zero": natural(0.0),
            "above zero": natural(0.5),
            "NaN": natural(math.nan),
            "infinite": natural(-math.inf),
        },
        [(natural(0.5), natural(0.0)), (natural(-3.0), natural(-3.0))],
        statistics,
        entropy=entropy,
    )


def _exponential(*shape: int) -> Case:
    return _one_number(
        Exponential(shape), lambda c: dist.Exponential(1 / jnp.exp(c)), lambda draws: draws
    )


def _half_normal(*shape: int) -> Case:
    def entropy(c: jax.Array) -> float:
        return stats.halfnorm(scale=np.exp(c)).entropy().sum()

    return _one_number(
        HalfNormal(shape), lambda c: dist.HalfNormal(jnp.exp(c)), jnp.square, entropy
    )


def _log_odds(family: Any, distribution: Any, statistics: Any) -> Case:
    """Families of integers, whose natural parameters may be any finite numbers."""
    shape = family.standard().shape

    def natural(value: float) -> jax.Array:
        return last(shape, -1.0, value)

    return Case(
        family,
        lambda generator: generator.normal(size=shape),
        lambda c: distribution(c).to_event(len(family.shape)),
        {"NaN": natural(math.nan), "certain": natural(math.inf), "never": natural(-math.inf)},
        [(natural(3.0), natural(3.0)), (natural(-30.0), natural(-30.0))],
        statistics,
        unit_is_proper=True,
        discrete=True,
    )


def _bernoulli(*shape: int) -> Case:
    return _log_odds(
        Bernoulli(shape),
        lambda c: dist.Bernoulli(probs=1 / (1 + jnp.exp(-2 * c))),
        lambda draws: draws,
    )


def _categorical(num_values: int, *shape: int) -> Case:
    def distribution(c: jax.Array) -> dist.Distribution:
        unit = num_values / math.sqrt(num_values - 1)
        odds = jnp.concatenate([jnp.ones((*shape, 1)), jnp.exp(unit * c)], axis=-1)
        return dist.Categorical(probs=odds / odds.sum(axis=-1, keepdims=True))

    def statistics(draws: Any) -> jax.Array:
        return (draws[..., None] == jnp.arange(1, num_values)).astype(float)

    return _log_odds(Categorical(shape, num_values), distribution, statistics)


def _mean_field(**cases: Case) -> Case:
    """A product; what is improper is so in the latent that comes last."""
    *others, broken = cases
    family = MeanField(tuple((name, case.family) for name, case in reversed(cases.items())))

    def by_latent(function: Any) -> dict[str, Any]:
        return {name: function(name, case) for name, case in cases.items()}

    def natural(value: Any) -> dict[str, Any]:
        fine = {name: cases[name].family for name in others}
        return {broken: value} | {n: f.natural(f.standard()) for n, f in fine.items()}

    def entropy(c: dict[str, Any]) -> float:
        return sum(_entropy(case, c[name]) for name, case in cases.items())

    return Case(
        family,
        lambda generator: by_latent(lambda name, case: case.coordinates(generator)),
        lambda c: by_latent(lambda name, case: case.distribution(c[name])),
        {words: natural(value) for words, value in cases[broken].improper.items()},
        [(natural(raw), natural(repaired)) for raw, repaired in cases[broken].projected],
        lambda draws: by_latent(lambda name, case: case.statistics(draws[name])),
        all(case.unit_is_proper for case in cases.values()),
        entropy,
        any(case.discrete for case in cases.values()),
    )


def _entropy(case: Case, coordinates: Any) -> Any:
    if case.entropy:
        return case.entropy(coordinates)
    return case.distribution(coordinates).entropy()


CASES = {
    "matrix of normals": _normal(2, 2),
    "two full normals": _full_normal(2, 3),
    "vector of gammas": _gamma(3),
    "matrix of betas": _beta(2, 2),
    "two dirichlets": _dirichlet(2, 4),
    "scalar exponential": _exponential(),
    "vector of half-normals": _half_normal(3),
    "matrix of Bernoullis": _bernoulli(2, 2),
    "scalar categorical": _categorical(4),
    "vector of categoricals": _categorical(3, 2),
    "mean field with a discrete latent": _mean_field(a=_normal(2), b=_categorical(3)),
    "mean field of two latents": _mean_field(a=_normal(2), b=_normal()),
    "mean field of several families": _mean_field(a=_full_normal(1), c=_half_normal(), b=_gamma()),
}


def test_every_family_is_tested():
    assert {family for _, family in BY_DISTRIBUTION} <= {type(c.family) for c in CASES.values()}


# Their members are cases of their own.
SLOW = (
    "vector of categoricals",
    "mean field with a discrete latent",
    "mean field of several families",
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=pytest.mark.slow if name in SLOW else (), id=name)
        for name, case in CASES.items()
    ],
)
def case(request):
    return request.param


# Gradients of their draws take long to compile.
SLOWLY_DRAWN = (*SLOW, "matrix of betas", "two dirichlets", "vector of gammas")
quickly_drawn = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if name in SLOWLY_DRAWN else (), id=name)
        for name, case in CASES.items()
    ],
    indirect=True,
    scope="module",
)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def member(case: Case, seed: int = 0) -> Any:
    """Coordinates of a proper member, in the precision that is switched on."""
    drawn = case.coordinates(np.random.default_rng(seed))
    return in_precision(drawn)


def in_precision(tree: Any) -> Any:
    dtype = jnp.result_type(float)
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, dtype), dtype), tree)


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


def by_latent(distribution: Any) -> list[tuple[str | None, dist.Distribution]]:
    return list(distribution.items()) if isinstance(distribution, dict) else [(None, distribution)]


def of_latent(tree: Any, name: str | None) -> Any:
    return tree if name is None else tree[name]


NUM_DRAWS = 20_000


class Simulation(NamedTuple):
    """What many draws of a member tell; compiled as one, and made once a family."""

    coordinates: Any
    statistics: Any
    statistics_error: Any
    gradient: Any
    log_density_mean: jax.Array
    log_density_stddev: jax.Array
    expected_statistics: Any
    expected_gradient: Any
    entropy: jax.Array


def weighted(statistics: Any) -> jax.Array:
    """Some linear function of all statistics."""
    return sum(
        jnp.ravel(leaf) @ jnp.cos(number + jnp.arange(float(leaf.size)))
        for number, leaf in enumerate(jax.tree.leaves(statistics))
    )


@pytest.fixture(scope="module")
def simulation(case):
    @jax.jit
    def simulate(coordinates: Any) -> Simulation:
        def draws_of(c: Any) -> Any:
            return case.family.draws(jax.random.key(0), c, NUM_DRAWS)

        def mean_of(draws: Any) -> Any:
            return jax.tree.map(lambda x: jnp.mean(x, axis=0), case.statistics(draws))

        draws = draws_of(coordinates)
        gradient = jax.grad(lambda c: weighted(mean_of(draws_of(c))))(coordinates)
        log_density = sum(
            d.log_prob(of_latent(draws, name))
            for name, d in by_latent(case.distribution(coordinates))
        )
        spread = jax.tree.map(lambda x: jnp.std(x, axis=0), case.statistics(draws))
        return Simulation(
            coordinates,
            mean_of(draws),
            jax.tree.map(lambda x: x / math.sqrt(NUM_DRAWS / 2), spread),  # mirrored at worst
            gradient,
            jnp.mean(log_density),
            jnp.std(log_density),
            case.family.statistics(coordinates),
            jax.grad(lambda c: weighted(case.family.statistics(c)))(coordinates),
            case.family.entropy(coordinates),
        )

    return simulate(member(case))


class Exact(NamedTuple):
    """What is exact of three members, in 64 bits; compiled as one, and made once a family."""

    coordinates: Any
    natural: Any
    coordinates_again: Any
    natural_again: Any
    gradient: Any
    statistics: Any
    entropy: jax.Array
    log_partition: jax.Array
    linear: jax.Array
    draw: Any
    log_density: jax.Array
    log_density_by_statistics: jax.Array


@pytest.fixture(scope="module")
def exact(case):
    def compute(c: Any, key: jax.Array) -> Exact:
        family, natural = case.family, case.family.natural(c)
        draw = jax.tree.map(lambda x: x[0], family.draws(key, c, 1))
        log_partition = family.log_partition(natural)
        own = by_latent(family.distribution(c))
        return Exact(
            c,
            natural,
            family.coordinates(natural),
            family.natural(family.coordinates(natural)),
            jax.grad(family.log_partition)(natural),
            family.statistics(c),
            family.entropy(c),
            log_partition,
            factors.inner(natural, family.statistics(c)),
            draw,
            sum(d.log_prob(of_latent(draw, name)) for name, d in own),
            factors.inner(natural, case.statistics(draw)) - log_partition,
        )

    with jax.enable_x64(True):
        members = [member(case, seed) for seed in range(3)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
        return jax.jit(jax.vmap(compute))(stacked, jax.random.split(jax.random.key(0), 3))


@pytest.mark.usefixtures("x64")
class TestExactly:
    @pytest.mark.slow
    def test_the_two_parameterisations_invert_each_other(self, exact):
        assert_close(exact.coordinates_again, exact.coordinates, rtol=1e-12, atol=1e-12)
        assert_close(exact.natural_again, exact.natural, rtol=1e-12, atol=1e-12)

    def test_the_gradient_of_the_log_partition_is_the_expected_statistics(self, exact):
        assert_close(exact.gradient, exact.statistics, rtol=1e-10, atol=1e-10)

    def test_entropy_is_numpyros_or_scipys(self, case, exact):
        assert exact.entropy.shape == (3,)
        if case.entropy:  # of SciPy's
            expected = [case.entropy(member(case, seed)) for seed in range(3)]
        else:
            expected = jax.jit(jax.vmap(lambda c: case.distribution(c).entropy()))(
                exact.coordinates
            )
        np.testing.assert_allclose(exact.entropy, expected, rtol=1e-10, atol=1e-10)

    def test_entropy_is_the_log_partition_less_the_linear_part(self, exact):
        np.testing.assert_allclose(exact.entropy, exact.log_partition - exact.linear, rtol=1e-9)

    def test_the_log_density_is_linear_in_the_statistics(self, exact):
        np.testing.assert_allclose(exact.log_density_by_statistics, exact.log_density, rtol=1e-9)

    def test_its_distribution_is_numpyros(self, case, exact):
        def log_density(c: Any, draw: Any) -> jax.Array:
            distribution = by_latent(case.distribution(c))
            return sum(d.log_prob(of_latent(draw, name)) for name, d in distribution)

        expected = jax.jit(jax.vmap(log_density))(exact.coordinates, exact.draw)
        np.testing.assert_allclose(exact.log_density, expected, rtol=1e-9)


class TestEveryFamily:
    @pytest.mark.slow
    @quickly_drawn
    def test_entropy_is_minus_the_mean_log_density(self, case, simulation):
        error = simulation.log_density_stddev / math.sqrt(NUM_DRAWS / 2)  # mirrored at worst
        expected = -simulation.log_density_mean
        np.testing.assert_allclose(simulation.entropy, expected, atol=4.5 * error + 1e-5)

    def test_a_proper_member_and_the_standard_one_are_in_the_domain(self, case):
        in_domain = jax.jit(lambda c: case.family.in_domain(case.family.natural(c)))
        for coordinates in (member(case), case.family.standard()):
            answer = in_domain(coordinates)
            assert answer.shape == ()
            assert bool(answer)

    def test_what_is_improper_is_not_in_the_domain(self, case):
        in_domain = jax.jit(case.family.in_domain)
        for words, natural in case.improper.items():
            assert not bool(in_domain(in_precision(natural))), words

    def test_the_unit_changes_no_distribution(self, case):
        @jax.jit
        def compute(coordinates: Any) -> Any:
            natural = case.family.natural(coordinates)
            unit = factors.unit(natural)
            same = factors.multiply(natural, unit)
            return natural, unit, same, case.family.in_domain(unit), case.family.project(unit)

        natural, unit, same, in_domain, projected = compute(member(case))
        assert bool(in_domain) == case.unit_is_proper
        assert_close(same, natural)
        assert_close(projected, unit)

    def test_projection_moves_what_must_move_and_nothing_else(self, case):
        project = jax.jit(case.family.project)
        for natural, expected in case.projected:
            actual = project(in_precision(natural))
            assert_close(actual, in_precision(expected), rtol=1e-5, atol=1e-6)

    @pytest.mark.slow
    @settings(max_examples=15)
    @given(seed=st.integers(0, 2**32 - 1), whole=st.booleans())
    def test_a_projected_factor_times_a_proper_member_is_proper(self, case, seed, whole):
        natural = case.family.natural(member(case, seed))
        noise = np.random.default_rng(seed)
        factor = in_precision(jax.tree.map(lambda leaf: 5 * noise.normal(size=leaf.shape), natural))
        projected = _projected(case.family, factor, whole)
        assert bool(case.family.in_domain(factors.multiply(natural, projected)))
        again = case.family.project(projected)  # rounding leaves eigenvalues of 1e-8
        assert_close(again, projected, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    @quickly_drawn
    def test_draws_have_the_expected_statistics(self, case, simulation):
        found = simulation.statistics, simulation.expected_statistics, simulation.statistics_error
        for actual, mean, error in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_array_less(np.abs(actual - mean), 4.5 * error + 1e-5)

    @pytest.mark.parametrize("num_draws", [1, 2, 7])
    def test_as_many_draws_as_asked_for(self, case, num_draws):
        coordinates = member(case)
        draws = jax.eval_shape(
            lambda c: case.family.draws(jax.random.key(0), c, num_draws), coordinates
        )
        one = jax.eval_shape(case.distribution, coordinates)
        for name, distribution in by_latent(one):
            assert of_latent(draws, name).shape == (num_draws, *distribution.shape())

    @pytest.mark.slow
    def test_draws_follow_their_key(self, case):
        coordinates = member(case)
        draws = jax.jit(lambda key: case.family.draws(key, coordinates, 4))
        first = draws(jax.random.key(0))
        assert_close(draws(jax.random.key(0)), first)
        second = draws(jax.random.key(1))
        assert all(
            np.any(a != b) if case.discrete else np.all(a != b)
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        )

    @quickly_drawn
    def test_draws_can_be_differentiated_in_the_coordinates(self, case, simulation):
        """The gradient of the draws' statistics is, on average, that of the expected ones."""
        if case.discrete:
            pytest.skip("draws are integers; TestEnumeration says what holds instead")
        assert_close(simulation.gradient, simulation.expected_gradient, rtol=0.1, atol=0.05)

    def test_its_distribution_is_of_one_event(self, case):
        coordinates = member(case)
        actual = dict(by_latent(case.family.distribution(coordinates)))
        for name, expected in by_latent(case.distribution(coordinates)):
            assert actual[name].event_shape == expected.event_shape
            assert actual[name].batch_shape == ()

    @pytest.mark.parametrize("x64", [False, True])
    def test_works_in_the_precision_that_is_switched_on(self, case, x64):
        def everything() -> list[Any]:
            coordinates = case.family.standard()
            natural = case.family.natural(coordinates)
            return [
                coordinates,
                natural,
                case.family.coordinates(natural),
                case.family.statistics(coordinates),
                case.family.entropy(coordinates),
                case.family.log_partition(natural),
                case.family.project(natural),
                [] if case.discrete else case.family.draws(jax.random.key(0), coordinates, 2),
            ]

        with jax.enable_x64(x64):
            made = jax.eval_shape(everything)
            expected = jnp.float64 if x64 else jnp.float32
            assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype(expected)}

    def test_can_be_hashed_and_compared(self, case):
        """Families are compiled in; equal ones must share a program."""
        assert hash(case.family) == hash(type(case.family)(*_arguments(case.family)))
        assert case.family == type(case.family)(*_arguments(case.family))


def _arguments(family: Any) -> tuple[Any, ...]:
    return tuple(getattr(family, name) for name in family.__dataclass_fields__)


DISCRETE = [name for name, case in CASES.items() if case.discrete]


class TestEnumeration:
    """Expectations over integers are sums over all of them."""

    @pytest.mark.usefixtures("x64")
    @grid("name", DISCRETE, quick=[0])
    def test_it_gives_expected_statistics_and_their_gradient(self, name):
        case = CASES[name]
        family, c = case.family, member(case)
        if not isinstance(family, MeanField):
            family, c = MeanField((("b", family),)), {"b": c}

        def by_sum(c: Any) -> jax.Array:
            def given(values: dict[str, jax.Array]) -> jax.Array:
                if isinstance(case.family, MeanField):
                    values = {"a": jnp.zeros(2), **values}
                    return weighted(case.statistics(values)["b"])
                return weighted(case.statistics(values["b"]))

            return enumeration.expectation(family, c, given)

        def expected(c: Any) -> jax.Array:
            return weighted(family.statistics(c)["b"])

        summed, gradient = jax.jit(jax.value_and_grad(by_sum))(c)
        value, expected_gradient = jax.jit(jax.value_and_grad(expected))(c)
        np.testing.assert_allclose(summed, value, rtol=1e-12)
        assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-14)

    def test_values_are_all_and_once(self):
        members = (("z", Bernoulli((2,))), ("w", DiagonalNormal(())), ("k", Categorical((), 3)))
        family = MeanField(members)
        values = enumeration.joint_values(family)
        rows = {(*z, int(k)) for z, k in zip(values["z"].tolist(), values["k"], strict=True)}
        assert values.keys() == {"z", "k"}
        assert rows == {(a, b, k) for a in (0, 1) for b in (0, 1) for k in (0, 1, 2)}
        assert enumeration.num_joint_values(family) == len(values["k"]) == 12

    @grid("family", [Bernoulli(()), Categorical((), 2), Categorical((), 9)], quick=[0])
    def test_a_unit_moves_the_mean_by_a_standard_deviation_at_even_odds(self, family):
        start = family.standard()
        step = jnp.zeros_like(start).at[..., :1].set(1) if start.ndim else jnp.ones(())
        _, moved = jax.jvp(family.statistics, (start,), (step,))
        share = 1 / family.num_values
        np.testing.assert_allclose(jnp.max(moved), math.sqrt(share * (1 - share)), rtol=1e-6)

    def test_what_is_continuous_is_left(self):
        normal = ("w", DiagonalNormal(()))
        assert enumeration.continuous(MeanField((("z", Bernoulli(())), normal))).members == (
            normal,
        )
        alone = MeanField((normal,))
        assert enumeration.continuous(alone) is alone
        assert enumeration.num_joint_values(alone) == 1

    def test_so_many_that_they_cannot_be_listed_are_counted(self):
        family = MeanField((("z", Bernoulli((50, 4))),))
        assert enumeration.num_joint_values(family) == 2**200


class TestMirroredDraws:
    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_each_second_draw_mirrors_the_one_before_it(self, shape):
        loc, log_scale = jnp.full(shape, 2.0), jnp.full(shape, 0.3)
        family = DiagonalNormal(shape)
        draws = family.draws(jax.random.key(0), NormalCoordinates(loc, log_scale), 6)
        np.testing.assert_allclose(draws[0::2] + draws[1::2], np.full((3, *shape), 4.0), rtol=1e-6)
        assert len(np.unique(draws[0::2])) == draws[0::2].size

    @pytest.mark.slow
    def test_an_odd_draw_out_is_a_draw_like_the_others(self):
        family, coordinates = DiagonalNormal(()), NormalCoordinates(jnp.array(2.0), jnp.array(0.3))
        keys = jax.random.split(jax.random.key(0), 20_000)
        last = jax.vmap(lambda key: family.draws(key, coordinates, 3)[-1])(keys)
        np.testing.assert_allclose(jnp.mean(last), 2.0, atol=0.05)
        np.testing.assert_allclose(jnp.std(last), math.exp(0.3), rtol=0.03)


@pytest.mark.slow
def test_latents_are_drawn_independently_of_each_other():
    family = MeanField((("a", DiagonalNormal(())), ("b", DiagonalNormal(()))))
    draws = family.draws(jax.random.key(0), family.standard(), 4000)
    correlation = np.corrcoef(draws["a"][::2], draws["b"][::2])[0, 1]
    np.testing.assert_allclose(correlation, 0, atol=0.1)


@pytest.mark.slow
def test_draws_of_small_concentrations_stay_inside_the_support():
    """Of concentration .001, most draws are smaller than the smallest float."""
    family = MeanField((("g", Gamma(())), ("b", Beta(())), ("d", Dirichlet((3,)))))
    natural = {
        "g": GammaNatural(jnp.array(-0.999), jnp.array(-1.0)),
        "b": BetaNatural(jnp.array(-0.999), jnp.array(-0.999)),
        "d": jnp.full(3, -0.999),
    }

    @jax.jit
    @jax.value_and_grad
    def log_sum(coordinates: Any) -> jax.Array:
        draws = family.draws(jax.random.key(0), coordinates, 500)
        logs = [jnp.log1p(-draws["b"]), *(jnp.log(leaf) for leaf in draws.values())]
        return sum(jnp.sum(leaf) for leaf in logs)

    value, gradient = log_sum(family.coordinates(natural))
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


def _projected(family, factor, whole):
    if isinstance(family, MeanField):
        return family.project(factor, frozenset(name for name, _ in family.members if whole))
    return getattr(family, "project_whole" if whole else "project", family.project)(factor)


class TestProjectingWhole:
    """What had to be repaired becomes the factor 1, and nothing else changes."""

    def test_a_precision_below_zero_takes_its_location_along(self):
        factor = NormalNatural(jnp.array([3.0, -4.0]), jnp.array([0.25, -1.0]))
        projected = DiagonalNormal((2,)).project_whole(factor)
        assert_close(projected, NormalNatural(jnp.array([0.0, -4.0]), jnp.array([0.0, -1.0])))

    def test_so_does_an_eigenvalue_below_zero_along_its_eigenvector(self):
        basis = stats.ortho_group.rvs(3, random_state=1)
        values, white = np.array([-2.0, 0.5, -1.0]), np.array([1.0, 7.0, -3.0])
        matrix = basis @ np.diag(values) @ basis.T
        repaired = basis @ np.diag([-2.0, 0.0, -1.0]) @ basis.T
        family = FullNormal((3,))
        projected = family.project_whole(
            NormalNatural(jnp.array(basis @ white), pack(jnp.array(matrix)))
        )
        expected = NormalNatural(basis @ [1.0, 0.0, -3.0], pack(repaired))
        assert_close(projected, expected, rtol=1e-5, atol=1e-5)

    def test_the_two_numbers_of_a_gamma_go_together(self):
        factor = GammaNatural(jnp.array([-0.5, 2.0, 2.0]), jnp.array([-3.0, 1.0, -3.0]))
        projected = Gamma((3,)).project_whole(factor)
        expected = GammaNatural(jnp.array([0.0, 0.0, 2.0]), jnp.array([0.0, 0.0, -3.0]))
        assert_close(projected, expected)

    def test_only_of_the_members_that_are_named(self):
        normal = DiagonalNormal(())
        factor = NormalNatural(jnp.array(3.0), jnp.array(0.25))
        family = MeanField((("a", normal), ("b", normal)))
        projected = family.project({"a": factor, "b": factor}, frozenset({"b"}))
        assert (projected["a"].linear, projected["b"].linear) == (3.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", [Exponential((2,)), HalfNormal((2,))], ids=["e", "h"])
def test_draws_by_quantiles_are_mirrored(family):
    """Each pair's quantiles add up to one."""
    draws = np.asarray(family.draws(jax.random.key(0), family.standard(), 6), np.float64)
    cdf = stats.expon.cdf if isinstance(family, Exponential) else stats.halfnorm.cdf
    np.testing.assert_allclose(cdf(draws[0::2]) + cdf(draws[1::2]), 1, rtol=1e-5)
    assert len(np.unique(draws)) == draws.size


class TestSigmaPoints:
    @pytest.mark.usefixtures("x64")
    def test_integrate_quadratics_exactly_over_two_latents_together(self):
        case = CASES["mean field of two latents"]
        coordinates = member(case)
        generator = np.random.default_rng(5)
        size = sum(family.size for _, family in case.family.members)
        curvature, slope = generator.normal(size=(size, size)), generator.normal(size=size)

        def quadratic(x: np.ndarray) -> np.ndarray:
            return x @ curvature @ x + slope @ x + 3.0

        points = jax.tree.map(np.asarray, jax.jit(case.family.sigma_points)(coordinates))
        coordinates = jax.tree.map(np.asarray, coordinates)
        assert points["a"].shape == (2 * size, 2)
        assert points["b"].shape == (2 * size,)
        flat = np.concatenate([points["a"], points["b"][:, None]], axis=1)
        mean = np.append(coordinates["a"].loc, coordinates["b"].loc)
        scale = np.exp(np.append(coordinates["a"].log_scale, coordinates["b"].log_scale))
        expected = quadratic(mean) + np.sum(np.diag(curvature) * scale**2)
        np.testing.assert_allclose(np.mean([quadratic(x) for x in flat]), expected, rtol=1e-12)

    @pytest.mark.slow
    def test_are_two_a_dimension_at_one_distance(self):
        family = MeanField((("m", DiagonalNormal((2, 2))), ("x", DiagonalNormal(()))))
        points = family.sigma_points(family.standard())
        flat = np.concatenate([points["m"].reshape(10, 4), points["x"].reshape(10, 1)], axis=1)
        np.testing.assert_allclose(np.linalg.norm(flat, axis=1), np.sqrt(5), rtol=1e-6)
        assert len(np.unique(flat, axis=0)) == 10

    @pytest.mark.slow
    @pytest.mark.usefixtures("x64")
    def test_integrate_quadratics_exactly_under_any_covariance(self):
        case = _full_normal(3)
        family = MeanField((("v", case.family), ("b", DiagonalNormal(()))))
        coordinates = {"v": member(case), "b": NormalCoordinates(jnp.array(1.0), jnp.array(-0.5))}
        distribution = case.distribution(coordinates["v"])
        curvature = np.random.default_rng(5).normal(size=(3, 3))
        points = jax.tree.map(np.asarray, jax.jit(family.sigma_points)(coordinates))
        actual = np.einsum("ni,ij,nj->n", points["v"], curvature, points["v"]) + points["b"] ** 2
        loc = np.asarray(distribution.loc)
        second = np.asarray(distribution.covariance_matrix) + np.outer(loc, loc)
        expected = np.sum(curvature * second) + 1 + np.exp(-1.0)
        np.testing.assert_allclose(np.mean(actual), expected, rtol=1e-12)

    def test_are_refused_where_a_latent_is_not_normal(self):
        family = MeanField((("w", DiagonalNormal(())), ("rate", Gamma(()))))
        words = r"'rate' has a Gamma: write expectation=MonteCarlo\(32\)"
        with pytest.raises(TypeError, match=words):
            family.sigma_points(family.standard())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("make", [_normal, _full_normal], ids=["diagonal", "full"])
def test_a_normal_seen_from_another_has_the_moments_of_what_it_is_mapped_to(make):
    """Of m + L x: its mean is m + L E[x], its covariance L Cov[x] L'."""
    case = make(3)
    outer = member(case)
    inner = jax.tree.map(lambda leaf: 0.3 - 0.5 * leaf, outer)

    def moments(coordinates):
        normal = case.distribution(coordinates)
        covariance = getattr(normal, "covariance_matrix", None)
        return normal.mean, jnp.diag(normal.variance) if covariance is None else covariance

    (loc, covariance), (mean, within) = moments(outer), moments(inner)
    factor = jnp.linalg.cholesky(covariance)
    found_loc, found = moments(case.family.composed(outer, inner))
    np.testing.assert_allclose(found_loc, loc + factor @ mean, rtol=1e-12)
    np.testing.assert_allclose(found, factor @ within @ factor.T, rtol=1e-12, atol=1e-12)
    same = case.family.composed(outer, case.family.standard())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), same, outer)


COVARIANCE = np.array([[1.0, 0.6], [0.6, 2.0]], np.float32)
WIDTHS = np.array([0.5, 1.0, 3.0], np.float32)


class TestSharedMember:
    """Latents of one normal vector."""

    PARTS = (Part("b", ()), Part("W", (2, 2)), Part("v", (2,)))
    FAMILY = MeanField((("all", FullNormal((7,))), ("r", Gamma(()))), (("all", PARTS),))

    @pytest.fixture
    def coordinates(self):
        return {"all": member(_full_normal(7), 3), "r": member(_gamma())}

    def flat(self, draws: dict[str, jax.Array]) -> jax.Array:
        num_draws = draws["b"].shape[0]
        return jnp.concatenate(
            [draws[part.latent].reshape(num_draws, -1) for part in self.PARTS], 1
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["draws", "sample"])
    def test_draws_are_the_vectors_cut_into_its_parts(self, coordinates, how):
        shape = 20_000 if how == "draws" else (20_000,)
        draw = jax.jit(getattr(self.FAMILY, how), static_argnums=2)
        draws = draw(jax.random.key(0), coordinates, shape)
        assert {name: x.shape[1:] for name, x in draws.items()} == {
            "b": (),
            "W": (2, 2),
            "v": (2,),
            "r": (),
        }
        expected = _full_normal(7).distribution(coordinates["all"])
        scale = jnp.sqrt(expected.variance)
        shift = (jnp.mean(self.flat(draws), axis=0) - expected.mean) / scale
        np.testing.assert_allclose(shift, 0, atol=0.04)
        covariance = np.cov(self.flat(draws).T) / jnp.outer(scale, scale)
        expected_correlation = expected.covariance_matrix / jnp.outer(scale, scale)
        np.testing.assert_allclose(covariance, expected_correlation, atol=0.05)

    @pytest.mark.slow
    def test_marginals_are_those_of_the_vector(self, coordinates):
        vector = _full_normal(7).distribution(coordinates["all"])
        marginals = self.FAMILY.distribution(coordinates)
        draws = vector.sample(jax.random.key(0))
        for name, entries, shape in (
            ("b", 0, ()),
            ("W", slice(1, 5), (2, 2)),
            ("v", slice(5, 7), (2,)),
        ):
            assert marginals[name].event_shape == shape
            assert marginals[name].batch_shape == ()
            one = np.atleast_1d(np.arange(7)[entries])
            expected = stats.multivariate_normal(
                vector.mean[one], vector.covariance_matrix[np.ix_(one, one)]
            )
            actual = marginals[name].log_prob(draws[one].reshape(shape))
            np.testing.assert_allclose(actual, expected.logpdf(draws[one]), rtol=1e-3)
        assert isinstance(marginals["r"], dist.Gamma)

    @pytest.mark.slow
    @pytest.mark.usefixtures("x64")
    def test_a_product_of_priors_is_one_of_the_vector(self):
        precision = np.array([[2.0, 0.5], [0.5, 1.0]])
        priors = {
            "b": dist.Normal(1.0, 2.0),
            "W": None,
            "v": dist.MultivariateNormal(jnp.array([3.0, -1.0]), precision_matrix=precision),
            "r": dist.Gamma(2.0, 3.0),
        }
        exact, rest = self.FAMILY.of_distributions(priors)
        assert rest == {"W"}
        np.testing.assert_allclose([exact["r"].log, exact["r"].linear], [1, -3])
        standard = self.FAMILY.standard_of(rest)
        np.testing.assert_array_equal(jnp.stack(standard["r"]), 0)
        q = factors.multiply(exact, standard)
        vector = self.FAMILY.members[0][1].distribution(self.FAMILY.coordinates(q)["all"])
        np.testing.assert_allclose(vector.mean, [1, 0, 0, 0, 0, 3, -1], atol=1e-12)
        expected = np.eye(7)
        expected[0, 0] = 0.25
        expected[5:, 5:] = precision
        np.testing.assert_allclose(np.linalg.inv(vector.covariance_matrix), expected, atol=1e-12)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "prior",
        [
            lambda: dist.Normal(jnp.arange(6.0).reshape(3, 2), 0.5).to_event(2),
            lambda: dist.Normal(1.0, jnp.arange(1.0, 7.0).reshape(3, 2)),
            lambda: dist.Normal(0.0, jnp.array([0.5, 2.0])).expand([3, 2]).to_event(2),
            lambda: dist.Normal(jnp.arange(3.0)[:, None], jnp.array([0.5, 2.0])),
            lambda: dist.MultivariateNormal(jnp.ones(2), COVARIANCE).expand([3]).to_event(1),
            lambda: dist.MultivariateNormal(jnp.arange(6.0).reshape(3, 2), COVARIANCE),
            lambda: dist.MultivariateNormal(jnp.zeros(2), WIDTHS[:, None, None] * COVARIANCE),
        ],
        ids=["means", "widths", "a row's", "outer", "plate", "plate of means", "plate of widths"],
    )
    def test_a_matrix_of_latents_has_its_prior(self, prior):
        """Whatever its parameters' shapes are; once these had to be scalars."""
        prior = prior()
        parts = (Part("b", ()), Part("W", (3, 2)))
        family = MeanField((("all", FullNormal((7,))),), (("all", parts),))
        exact, rest = family.of_distributions({"b": dist.Normal(0.0, 1.0), "W": prior})
        assert not rest
        vector = FullNormal((7,)).distribution(family.coordinates(exact)["all"])
        W = np.random.default_rng(0).normal(size=(2, 3, 2))
        rows = np.column_stack([np.zeros(2), W.reshape(2, 6)])
        own = np.sum(np.asarray(prior.log_prob(W)).reshape(2, -1), axis=1)
        np.testing.assert_allclose(
            np.diff(vector.log_prob(rows)), np.diff(own), rtol=1e-3, atol=1e-3
        )

    def test_latents_know_their_member(self):
        assert self.FAMILY.member_of("W") == "all"
        assert self.FAMILY.member_of("r") == "r"


def read(family: Any, distribution: dist.Distribution) -> Any:
    """What a family makes of a distribution; of integers, whose odds are arithmetic, compiled."""
    if isinstance(family, Bernoulli | Categorical):
        return jax.jit(lambda: family.of_distribution(distribution))()
    return family.of_distribution(distribution)


class TestReadingADistribution:
    @pytest.mark.parametrize(
        ("shape", "distribution"),
        [
            ((), lambda: dist.Normal(2, 0.5)),
            ((3,), lambda: dist.Normal(2, 0.5).expand([3])),
            ((3,), lambda: dist.Normal(2, 0.5).expand([3]).to_event(1)),
            ((3,), lambda: dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5)),
            ((3,), lambda: dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5).to_event(1)),
            ((3,), lambda: dist.Normal(2, jnp.array([0.1, 0.5, 9.0]))),
            (
                (2, 3),
                lambda: dist.Normal(jnp.array([1.0, 2.0, 3.0]), 0.5).expand([2, 3]).to_event(2),
            ),
            ((2, 3), lambda: dist.Normal(jnp.ones((2, 1)), jnp.array([0.1, 0.5, 9.0]))),
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
        distribution = distribution()
        natural = DiagonalNormal(shape).of_distribution(distribution)
        mean = np.broadcast_to(distribution.mean, shape)
        variance = np.broadcast_to(distribution.variance, shape)
        assert natural.linear.shape == natural.quadratic.shape == shape
        np.testing.assert_allclose(natural.linear, mean / variance, rtol=1e-6)
        np.testing.assert_allclose(natural.quadratic, -0.5 / variance, rtol=1e-6)

    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize(
        ("family", "distribution", "expected"),
        [
            (
                FullNormal((2,)),
                lambda: dist.Normal(np.array([1.0, 2.0]), 0.5).to_event(1),
                ([4.0, 8.0], [-2.0, 0.0, -2.0]),
            ),
            (
                FullNormal((2,)),
                lambda: dist.MultivariateNormal(
                    3.0, precision_matrix=np.array([[2.0, 0.5], [0.5, 1.0]])
                ),
                ([7.5, 4.5], [-1.0, -0.25 * math.sqrt(2), -0.5]),
            ),
            (
                FullNormal((4, 2)),
                lambda: dist.MultivariateNormal(1.0, scale_tril=np.diag([2.0, 0.5])).expand([4]),
                ([[0.25, 4.0]] * 4, [[-0.125, 0.0, -2.0]] * 4),
            ),
            (Gamma((2,)), lambda: dist.Gamma(2.0, np.array([1.0, 3.0])), ([1, 1], [-1, -3])),
            (
                Gamma((2, 3)),
                lambda: dist.Gamma(2.0, 3.0).expand([3]).to_event(1).expand([2]),
                (np.ones((2, 3)), np.full((2, 3), -3)),
            ),
            (Gamma((2,)), lambda: dist.Exponential(3.0).expand([2]), ([0, 0], [-3, -3])),
            (Gamma(()), lambda: dist.Chi2(3.0), (0.5, -0.5)),
            (Beta((2,)), lambda: dist.Beta(np.array([1.0, 2.0]), 0.5), ([0, 1], [-0.5, -0.5])),
            (Beta(()), lambda: dist.BetaProportion(0.25, 8.0), (1, 5)),
            (Beta((2,)), lambda: dist.Uniform(0.0, 1.0).expand([2]), ([0, 0], [0, 0])),
            (Dirichlet((2,)), lambda: dist.Dirichlet(np.array([1.0, 2.0])), ([0, 1],)),
            (
                Dirichlet((3, 2)),
                lambda: dist.Dirichlet(np.array([1.0, 2.0])).expand([3]).to_event(1),
                ([[0, 1]] * 3,),
            ),
            (Exponential((2,)), lambda: dist.Exponential(3.0).expand([2]), ([-3, -3],)),
            (HalfNormal((2,)), lambda: dist.HalfNormal(np.array([1.0, 0.1])), ([-0.5, -50],)),
            (Bernoulli((2,)), lambda: dist.Bernoulli(0.25).expand([2]), ([-math.log(3)] * 2,)),
            (Bernoulli((2,)), lambda: dist.Bernoulli(logits=np.array([1.0, -2])), ([1, -2],)),
            (Bernoulli(()), lambda: dist.DiscreteUniform(0, 1), (0,)),
            (Bernoulli(()), lambda: dist.Binomial(1, 0.75), (math.log(3),)),
            (
                Categorical((), 3),
                lambda: dist.Categorical(probs=np.array([0.5, 0.25, 0.25])),
                ([-math.log(2)] * 2,),
            ),
            (
                Categorical((2,), 3),
                lambda: dist.Categorical(logits=np.array([1.0, 2, 4])).expand([2]).to_event(1),
                ([[1, 3]] * 2,),
            ),
            (
                Categorical((), 3),
                lambda: dist.Binomial(2, 0.5),
                ([math.log(2), 0],),
            ),
        ],
    )
    def test_is_exact_where_it_is_of_the_family(self, family, distribution, expected):
        found = jax.tree.leaves(read(family, distribution()))
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(actual, np.asarray(wanted, float), rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("family", "distribution"),
        [
            (FullNormal((2,)), lambda: dist.MultivariateStudentT(3.0, jnp.zeros(2), jnp.eye(2))),
            (Gamma(()), lambda: dist.InverseGamma(2.0, 3.0)),
            (Gamma(()), lambda: dist.HalfNormal(1.0)),
            (Gamma(()), lambda: None),
            (Beta(()), lambda: dist.Uniform(0.0, 2.0)),
            (Beta(()), lambda: dist.Uniform(0.1, 1.0)),
            (Beta(()), lambda: dist.Kumaraswamy(1.0, 2.0)),
            (Dirichlet((2,)), lambda: dist.Normal(0.0, 1.0).expand([2]).to_event(1)),
            (Exponential(()), lambda: dist.Gamma(1.0, 2.0)),
            (HalfNormal(()), lambda: dist.HalfCauchy(1.0)),
            (Bernoulli(()), lambda: None),
            (Bernoulli(()), lambda: dist.Uniform(0.0, 1.0)),
            (Categorical((), 2), lambda: dist.Normal(0.0, 1.0)),
        ],
    )
    def test_is_none_where_it_is_not(self, family, distribution):
        assert family.of_distribution(distribution()) is None

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("family", "distribution"),
        [
            (Bernoulli(()), lambda: dist.Bernoulli(1.0)),
            (Categorical((), 3), lambda: dist.Categorical(probs=jnp.array([0.0, 0.5, 0.5]))),
        ],
    )
    def test_what_a_prior_excludes_is_as_good_as_excluded(self, family, distribution):
        """A factor that excluded it could not be taken back, and would be none."""
        natural = read(family, distribution())
        assert bool(family.in_domain(natural))
        assert family.distribution(natural).log_prob(0) < -15

    @pytest.mark.parametrize(
        "distribution",
        [
            lambda: None,
            lambda: dist.StudentT(4.0, 0.0, 1.0),
            lambda: dist.LogNormal(0.0, 1.0),
            lambda: dist.HalfNormal(1.0),
            lambda: dist.TruncatedNormal(0.0, 1.0, low=0.0),
            lambda: dist.Normal(0, 1).mask(False),
            lambda: dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
            lambda: dist.Delta(0.0),
        ],
        ids=[
            *("None", "StudentT", "LogNormal", "HalfNormal"),
            *("TruncatedNormal", "masked", "MultivariateNormal", "Delta"),
        ],
    )
    def test_anything_else_is_none(self, distribution):
        distribution = distribution()
        shape = () if distribution is None else distribution.shape()
        assert DiagonalNormal(shape).of_distribution(distribution) is None
