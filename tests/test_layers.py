"""Gradients in a first layer's weights, which are clipped and added up without being laid out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents, privacy
from numpyro_dppvi._typing import LayerProduct
from numpyro_dppvi.methods import record_gradients
from numpyro_dppvi.privacy import arithmetic
from tests.grids import grid
from tests.test_record_gradients import ROWS, gradients_of, space_and_family

RNG = np.random.default_rng(0)
# Compiled as one, as in a round.
clipped_sum = jax.jit(privacy.clipped_sum)


def network(X, g, y):
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([3, 4]).to_event(2))
    b1 = numpyro.sample("b1", dist.Normal(0, 1).expand([4]).to_event(1))
    w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(X @ w1 + b1) @ w2), obs=y)


def nothing_else(X, g, y):
    """All latents are in one layer."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=y.astype(int))


def used_twice(X, g, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(X @ w, jnp.exp(w[0])), obs=y)


def names_of(model):
    shapes = jax.eval_shape(lambda: {name: jnp.asarray(leaf) for name, leaf in ROWS.items()})
    found = latents.from_model(model, shapes).first_layers
    return None if found is None else found.names


def test_a_first_layer_is_found_and_a_later_one_is_not():
    assert names_of(network) == {"w1"}
    assert names_of(used_twice) is None


def one_by_one(monkeypatch):
    """Draws are added up one after the other, as beside many other latents."""
    monkeypatch.setattr(record_gradients, "_MOST_FLOATS_AT_ONCE", -1)


@pytest.mark.parametrize("model", [network, nothing_else])
@pytest.mark.parametrize("at_once", [True, False])
@grid("num_draws", [1, 4, 5, 17], quick=[2])
def test_gradients_are_those_of_the_loss(model, at_once, num_draws, monkeypatch):
    if not at_once:
        one_by_one(monkeypatch)
    found, expected = gradients_of(model, AutoNormal, dppvi.MonteCarlo(num_draws))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.abs(b).max())


@pytest.mark.slow
@grid("bad", [np.nan, np.inf, 1e30], quick=[0, 2])
@pytest.mark.parametrize("at_once", [pytest.param(True, marks=pytest.mark.slow), False])
@grid("num_draws", [1, 4, 5], quick=[1])
def test_a_hostile_record_is_left_out_and_moves_no_other(bad, at_once, num_draws, monkeypatch):
    """To the last bit: as if it were padding, of which whatever it holds is left out, too."""
    if not at_once:
        one_by_one(monkeypatch)
    space, family = space_and_family(network, AutoNormal)

    @jax.jit
    def total(rows, mask):
        key, rule = jax.random.key(3), dppvi.MonteCarlo(num_draws)
        at = jax.tree.map(lambda leaf: leaf + 0.3, family.standard())
        each = record_gradients.of_rows(space, family, rule, key, at, rows)
        return privacy.clipped_sum(each, mask, 2.5)

    ones = np.ones(9, bool)
    without, hostile = np.arange(9) != 4, ROWS["X"].copy()
    hostile[4] = bad
    expected = jax.tree.leaves(total(ROWS, without))
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in expected)
    for mask in (without,) if bad == 1e30 else (without, ones):
        found = total(ROWS | {"X": hostile}, mask)
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_at_one_draw_is_finite_in_none_of_its_sums():
    """And in no other record's, though their sums are products of matrices."""
    each = RNG.normal(size=(6, 5, 4)).astype(np.float32)
    usual = [np.asarray(part) for part in record_gradients._paired(jnp.asarray(each))]
    for bad in (np.nan, np.inf, -np.inf):
        each[2, 3] = bad
        for part, same in zip(record_gradients._paired(jnp.asarray(each)), usual, strict=True):
            assert not np.any(np.isfinite(part[2]))
            np.testing.assert_array_equal(np.delete(part, 2, 0), np.delete(same, 2, 0))


@pytest.mark.parametrize("num_draws", [1, 2, 5, 16, 17])
def test_differences_of_pairs_are_rounded_once(num_draws):
    """As by a subtraction, however large and nearly equal their terms are."""
    each = RNG.normal(size=(6, num_draws, 4)).astype(np.float32)
    each[:, 1::2] = each[:, : num_draws // 2 * 2 : 2] * 1e6 + each[:, 1::2]
    each[:, ::2] *= 1e6
    pairs, along = record_gradients._paired(jnp.asarray(each))
    mirrored = np.zeros((6, -(-num_draws // 2), 4), np.float32)
    mirrored[:, : num_draws // 2] = each[:, 1::2]
    np.testing.assert_array_equal(pairs, each[:, ::2] - mirrored)
    np.testing.assert_allclose(along, each.mean(axis=1), rtol=1e-5, atol=1)


@pytest.mark.parametrize("num_latents", [1, 5, 50])
def test_sums_whose_terms_cancel_move_a_total_by_no_more_than_the_clip(num_latents):
    """What is added up is written down, so that the norm is one of the numbers that are summed."""
    rng = np.random.default_rng(2)
    weights = np.repeat(rng.normal(size=(1, num_latents)), 3, axis=0) * [[1], [1 + 1e-7], [1e-7]]
    sizes = 10.0 ** rng.uniform(0, 9, size=(64, 1, 1)) * np.array([[[1.0], [-1.0], [0.3]]])
    pairs = sizes * rng.normal(size=(64, 1, num_latents))

    @jax.jit
    def total(pairs, weights, mask):
        return privacy.clipped_sum(record_gradients._added_up(pairs, weights), mask, 2.5)

    arrays = jnp.asarray(pairs, jnp.float32), jnp.asarray(weights, jnp.float32)
    for number in range(64):
        alone = np.asarray(total(*arrays, jnp.arange(64) == number))
        assert np.linalg.norm(alone) <= 2.5


@jax.jit
def squared_norms(each):
    return arithmetic.squared_norms([each], jnp.float32)


def products(num_rows=21, weighted=True):
    left, right = RNG.normal(size=(num_rows, 5)), RNG.normal(size=(num_rows, 3, 4))
    weights = RNG.normal(size=(3, 5, 4))
    arrays = (left, right, weights) if weighted else (left, right[:, :1], None)
    return LayerProduct(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), arrays))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
def test_they_are_clipped_and_summed_as_if_laid_out(weighted):
    each = products(weighted=weighted)
    mask, flat = jnp.arange(21) % 3 > 0, jnp.asarray(RNG.normal(size=(21, 2)), jnp.float32)
    found = clipped_sum({"layer": each, "flat": flat}, mask, 2.5)
    expected = clipped_sum({"layer": each.laid_out(), "flat": flat}, mask, 2.5)
    unit = 2.0**-19  # of a clip near 2
    for name in found:
        assert found[name].shape == expected[name].shape
        np.testing.assert_allclose(found[name], expected[name], atol=21 * unit)
        assert np.abs(np.asarray(found[name])).max() > 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_hostile_record_leaves_no_more_than_itself_out(bad, side, weighted):
    each, ones = products(weighted=weighted), jnp.ones(21, bool)
    hostile = each._replace(**{side: getattr(each, side).at[4].set(bad)})
    left_out = clipped_sum(each, ones.at[4].set(False), 2.5)
    np.testing.assert_array_equal(clipped_sum(hostile, ones, 2.5), left_out)
    zero = hostile._replace(left=hostile.left.at[4, 0].set(0.0))
    np.testing.assert_array_equal(clipped_sum(zero, ones, 2.5), left_out)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_record_moves_a_sum_by_no_more_than_the_clip(weighted):
    """Exactly, in 64 bits: of records of all lengths, and of one whose terms cancel."""
    each, ones = products(weighted=weighted), jnp.ones(21, bool)
    lengths = jnp.logspace(-12, 12, 21, dtype=jnp.float32)
    each = each._replace(left=each.left * lengths[:, None])
    if weighted:  # entries of the last are differences of nearly equal numbers
        row = jnp.array([1e8, -1e8, 1.0], jnp.float32)
        weights = each.weights.at[1].set(each.weights[0] * (1 + 1e-7))
        each = each._replace(right=each.right.at[-1].set(row[:, None]), weights=weights)
    whole = np.asarray(clipped_sum(each, ones, 2.5))
    for number in range(21):
        rest = np.asarray(clipped_sum(each, ones.at[number].set(False), 2.5))
        assert np.linalg.norm(whole - rest) <= 2.5


def test_where_terms_cancel_the_norm_is_no_smaller_than_what_rounding_may_leave():
    # 1e8 * w - 1e8 * w: nothing is left of the entry but rounding.
    weights = jnp.array([[[0.3]], [[0.3]]], jnp.float32)
    right = jnp.array([[[1e8], [-1e8]]], jnp.float32)
    squared = squared_norms(LayerProduct(jnp.ones((1, 1), jnp.float32), right, weights))
    assert squared[0] ** 0.5 > 2.0**-24 * 6e7


@pytest.mark.slow
def test_a_norm_is_never_smaller_than_the_exact_one_and_hardly_larger():
    each = products(200)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), each)
    entries = np.einsum("ni,nmk,mik->nik", *wide)
    ratio = squared_norms(each) / np.sum(entries**2, axis=(1, 2))
    assert np.all(ratio >= 1)
    assert np.all(ratio < 1 + 2e-5)


def test_sums_do_not_depend_on_the_order_of_records():
    each, order = products(40), RNG.permutation(40)
    turned = each._replace(left=each.left[order], right=each.right[order])
    ones = jnp.ones(40, bool)
    np.testing.assert_array_equal(clipped_sum(each, ones, 2.5), clipped_sum(turned, ones, 2.5))


@pytest.mark.parametrize("weighted", [True, False])
def test_a_side_that_overflows_when_it_is_scaled_leaves_the_record_out(weighted):
    """In units of a narrow clip's grid, inputs can be out of range while their product is not."""
    left, right = jnp.full((2, 1), 1.5e19, jnp.float32), jnp.full((2, 1, 1), 4e-35, jnp.float32)
    weights = jnp.ones((1, 1, 1), jnp.float32) if weighted else None
    found = clipped_sum(LayerProduct(left, right, weights), jnp.ones(2, bool), 1e-15)
    assert np.all(np.abs(np.asarray(found)) <= 2e-15)
