import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from numpyro_dppvi.families import NormalNatural, factors
from tests.grids import grid

# Whole numbers: sums and differences of them are exact, so that laws can be held to the last bit.
entries = st.integers(-1000, 1000).map(float)


def factor_of(*lead):
    """A factor over two latents, of shape (2,) and (), with leading axes."""

    def leaf(*shape):
        return arrays(np.float32, (*lead, *shape), elements=entries).map(jnp.asarray)

    return st.fixed_dictionaries(
        {
            "w": st.builds(NormalNatural, leaf(2), leaf(2)),
            "b": st.builds(NormalNatural, leaf(), leaf()),
        }
    )


factor = factor_of()
law = settings(max_examples=25)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
@law
@given(factor, factor, factor)
def test_multiplication_is_a_commutative_group_with_division_as_its_inverse(a, b, c):
    assert_same(factors.multiply(a, b), factors.multiply(b, a))
    grouped = factors.multiply(a, factors.multiply(b, c))
    assert_same(factors.multiply(factors.multiply(a, b), c), grouped)
    assert_same(factors.multiply(a, b, c), grouped)
    assert_same(factors.divide(factors.multiply(a, b), b), a)
    assert_same(factors.multiply(a, factors.unit(a)), a)
    assert_same(factors.divide(a, a), factors.unit(a))


def test_multiplying_adds_natural_parameters():
    a = NormalNatural(jnp.array([1.0, 2.0]), jnp.array([-1.0, -0.5]))
    b = NormalNatural(jnp.array([10.0, 0.0]), jnp.array([0.25, -0.5]))
    assert_same(
        factors.multiply(a, b), NormalNatural(jnp.array([11.0, 2.0]), jnp.array([-0.75, -1.0]))
    )
    assert_same(
        factors.divide(a, b), NormalNatural(jnp.array([-9.0, 2.0]), jnp.array([-1.25, 0.0]))
    )


@pytest.mark.slow
@law
@given(factor, factor, st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))
def test_a_power_distributes_over_products_and_adds_in_the_exponent(a, b, exponent):
    assert_same(
        factors.power(factors.multiply(a, b), exponent),
        factors.multiply(factors.power(a, exponent), factors.power(b, exponent)),
    )
    assert_same(
        factors.multiply(factors.power(a, exponent), factors.power(a, 1.0)),
        factors.power(a, exponent + 1.0),
    )
    assert_same(factors.power(a, 0.0), factors.unit(a))
    assert_same(factors.power(a, 2), factors.multiply(a, a))


def test_a_power_keeps_the_precision_of_the_factor():
    with jax.enable_x64(True):
        wide = NormalNatural(jnp.ones(2), jnp.ones(2))
        assert factors.power(wide, jnp.float32(0.5)).linear.dtype == jnp.float64
        narrow = NormalNatural(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.float32))
        assert factors.power(narrow, jnp.asarray(0.5, jnp.float64)).linear.dtype == jnp.float32


@pytest.mark.slow
@law
@given(factor_of(4))
def test_a_total_is_the_product_of_all_that_is_stacked(stacked):
    each = [jax.tree.map(lambda leaf, m=m: leaf[m], stacked) for m in range(4)]
    assert_same(factors.total(stacked), factors.multiply(*each))


@pytest.mark.slow
@law
@given(factor, st.integers(1, 5))
def test_units_multiply_to_the_unit(a, num_factors):
    units = factors.unit(a, num_factors)
    assert jax.tree.map(jnp.shape, units) == jax.tree.map(
        lambda leaf: (num_factors, *leaf.shape), a
    )
    assert_same(factors.total(units), factors.unit(a))


@pytest.mark.slow
@law
@given(factor, factor, factor)
def test_the_inner_product_is_symmetric_and_linear(a, b, c):
    # Whole numbers up to 3 * 2 * 10^6 are exact in float32.
    inner = factors.inner
    assert inner(a, b).shape == ()
    assert float(inner(a, b)) == float(inner(b, a))
    assert float(inner(factors.multiply(a, c), b)) == float(inner(a, b)) + float(inner(c, b))
    assert float(inner(factors.power(a, 2.0), b)) == 2 * float(inner(a, b))
    assert float(inner(a, factors.unit(a))) == 0


def test_the_inner_product_sums_over_all_entries_of_all_latents():
    a = {"w": NormalNatural(jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])), "b": jnp.array(5.0)}
    b = {"w": NormalNatural(jnp.array([1.0, 10.0]), jnp.array([100.0, 1.0])), "b": jnp.array(2.0)}
    assert float(factors.inner(a, b)) == 1 + 20 + 300 + 4 + 10


@pytest.mark.slow
def test_nonzero_entries_are_counted_over_all_latents():
    a = {"w": NormalNatural(jnp.array([1.0, 0.0]), jnp.array([0.0, -4.0])), "b": jnp.array(5.0)}
    assert int(factors.count_nonzero(a)) == 3
    assert int(factors.count_nonzero(factors.unit(a))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["linear", "quadratic"])
def test_one_entry_that_is_not_finite_is_seen(bad, where):
    a = {"w": NormalNatural(jnp.array([1.0, 0.0]), jnp.array([0.0, -4.0])), "b": jnp.array(5.0)}
    assert bool(factors.is_finite(a))
    broken = a["w"]._replace(**{where: jnp.array([0.0, bad])})
    assert not bool(factors.is_finite({**a, "w": broken}))
    assert not bool(factors.is_finite({**a, "b": jnp.array(bad)}))


@pytest.mark.slow
@law
@given(factor, factor)
def test_selecting_gives_one_or_the_other_whole(a, b):
    assert_same(factors.select(jnp.array(True), a, b), a)
    assert_same(factors.select(jnp.array(False), a, b), b)


def test_selecting_lets_nothing_of_the_other_through():
    """A failed solve is full of NaN; where the zero change is chosen instead, none may be left."""
    good = NormalNatural(jnp.ones(2), jnp.ones(2))
    broken = NormalNatural(jnp.full(2, jnp.nan), jnp.full(2, jnp.inf))
    assert_same(factors.select(factors.is_finite(broken), broken, good), good)


@grid("num_factors", [1, 256, 257, 600], quick=[0, 2])
@pytest.mark.parametrize("changed", [[0], [-1], [-1, 0]])
def test_a_total_that_is_kept_up_to_date_is_the_total(num_factors, changed):
    """To the last bit: where a run goes on from its factors alone, it adds them up anew."""
    rng = np.random.default_rng(0)
    changed = jnp.asarray(np.unique(np.arange(num_factors)[changed]))

    def some(number):
        shapes = {"w": (number, 3), "b": (number,)}
        return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}

    stacked, new = some(num_factors), some(len(changed))
    before = factors.block_totals(stacked)
    after = jax.jit(factors.renewed)(before, stacked, changed, new)
    now = factors.replaced(stacked, changed, new)
    assert_same(after, jax.jit(factors.block_totals)(now))
    assert_same(factors.of_blocks(after), factors.total(now))
    for name, leaf in factors.total(now).items():
        exact = np.asarray(now[name], float).sum(axis=0)
        np.testing.assert_allclose(leaf, exact, rtol=1e-5, atol=1e-5)
