"""No record's contribution is longer than the bound, whatever the record holds."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from numpyro_dppvi._typing import Hits, LowerProduct, RowProduct
from numpyro_dppvi.privacy import arithmetic, clipped, clipped_sum
from tests.grids import grid

NUM_RECORDS = 6
SHAPES = [
    {"x": ()},
    {"loc": (3,), "log_scale": (3,)},
    {"a": (2, 3), "b": {"c": (), "d": (1, 1, 4)}},
]
NASTY = [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e15, 1e-19, 1e-22, 1e-40, 0.0, -0.0, 1.0, -1.0]

seeds = st.integers(0, 2**32 - 1)
DTYPES = (np.float32, np.float64)
precisions = grid("dtype", DTYPES, quick=[0])
summed, each = jax.jit(clipped_sum), jax.jit(clipped)
unrounded = jax.jit(functools.partial(clipped_sum, rounded=False))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def is_shape(node):
    return isinstance(node, tuple)


def trees(dtype, num_records=NUM_RECORDS):
    """Trees of one array a leaf, shape (num_records, ...), with nasty numbers among them."""
    entries = st.one_of(
        st.sampled_from(NASTY),
        st.floats(-3, 3, width=32),
        st.floats(width=32),
    )

    def tree(shapes):
        leaves, treedef = jax.tree.flatten(shapes, is_leaf=is_shape)
        arrays = [hnp.arrays(dtype, (num_records, *shape), elements=entries) for shape in leaves]
        return st.tuples(*arrays).map(treedef.unflatten)

    return st.sampled_from(SHAPES).flatmap(tree)


def summable(dtype):
    """The same, and trees in which one leaf is a product that is not laid out."""
    entries = st.sampled_from([*NASTY, 0.3, -2.0])
    sides = hnp.arrays(dtype, (NUM_RECORDS, 2, 4), elements=entries)
    weights = hnp.arrays(dtype, (NUM_RECORDS,), elements=entries)
    products = st.builds(LowerProduct, sides, sides) | st.builds(RowProduct, weights, sides)
    places = hnp.arrays(dtype, (NUM_RECORDS, 2), elements=st.sampled_from([-1, 0, 3, 4]))
    bins = np.broadcast_to(np.arange(4, dtype=dtype), (NUM_RECORDS, 4))
    asked = st.sampled_from([np.ones(NUM_RECORDS, dtype), np.zeros(NUM_RECORDS, dtype)])
    products = products | st.builds(Hits, weights, places, st.just(bins), asked)
    flat = hnp.arrays(dtype, (NUM_RECORDS, 3), elements=st.floats(-3, 3, width=32))
    return trees(dtype) | st.fixed_dictionaries({"flat": flat, "product": products})


def clip_norms(dtype):
    return st.sampled_from([dtype(c) for c in (1e-30, 1e-6, 0.1, 1.0, 2.5, 1e6, 1e25)])


def norm(tree):
    """Joint L2 norm over all leaves, in float64."""
    squares = [np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(squares)))


def minus(one, other):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), one, other)


def replaced(tree, other, record):
    """The tree with one record taken from another tree."""
    return jax.tree.map(
        lambda a, b: np.concatenate([a[:record], b[:1], a[record + 1 :]]), tree, other
    )


def longest_contribution(clip, tree, clip_norm):
    """The longest contribution of a single record, each summed on its own."""
    contributions = [
        clip(tree, np.arange(NUM_RECORDS) == record, clip_norm) for record in range(NUM_RECORDS)
    ]
    return max(norm(contribution) for contribution in contributions)


@precisions
@settings(max_examples=150)
@given(data=st.data())
def test_no_record_contributes_more_than_the_bound(dtype, data):
    tree, clip_norm = data.draw(summable(dtype)), data.draw(clip_norms(dtype))
    longest = longest_contribution(summed, tree, clip_norm)
    target(longest / float(clip_norm))
    assert longest <= clip_norm  # exactly: no tolerance


def clipped_one_norm_a_leaf(tree, mask, clip_norm):
    """Planted mistake: every leaf has a norm of its own."""
    return jax.tree.map(lambda leaf: clipped_sum(leaf, mask, clip_norm), tree)


def clipped_leaving_out(name):
    """Planted mistake: one leaf does not enter the norm."""

    def clip(tree, mask, clip_norm):
        rest = {key: leaf for key, leaf in tree.items() if key != name}
        norms = np.sqrt(sum(np.sum(np.square(leaf), axis=1) for leaf in rest.values()))
        factor = np.where(mask, np.minimum(1, clip_norm / norms), 0)
        return jax.tree.map(lambda leaf: factor @ leaf, tree)

    return clip


@grid(
    "clip",
    [clipped_one_norm_a_leaf, clipped_leaving_out("loc"), clipped_leaving_out("log_scale")],
    quick=[2],
)
def test_the_norm_is_joint_or_the_bound_is_broken(clip):
    # The negative control: the same measurement finds what the planted mistakes let through.
    rng = np.random.default_rng(0)
    tree = {
        "loc": rng.normal(size=(NUM_RECORDS, 3)),
        "log_scale": rng.normal(size=(NUM_RECORDS, 3)),
    }
    assert longest_contribution(clip, tree, 1.0) > 1.2
    assert longest_contribution(summed, tree, 1.0) <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@grid("size", [1, 2, 218, 5000, 300_000], quick=[1, 2, 3])
def test_the_bound_holds_against_rounding(dtype, size):
    """Vectors around the bound, and some whose small squares vanish beside their first ones."""
    rng = np.random.default_rng(1)
    around = 1 + np.finfo(dtype).eps * rng.integers(-4, 5, size=(20, 1))
    rows = rng.normal(size=(20, size))
    rows *= around / np.linalg.norm(rows, axis=1, keepdims=True)
    # However many lanes the sum runs in, squares that small are lost beside each lane's first.
    for lanes in (1, 8, 16, 32, 64, 128):
        lopsided = np.full(size, np.sqrt(0.2 * np.finfo(dtype).eps / lanes))
        lopsided[:lanes] = min(lanes, size) ** -0.5
        rows = np.concatenate([rows, lopsided[None], lopsided[None, ::-1]])
    rows = rows.astype(dtype)
    one = jax.jit(lambda row: clipped_sum(row[None], jnp.ones(1, bool), dtype(1.0)))
    norms = [norm(one(row)) for row in rows]
    assert max(norms) <= 1.0
    # Room for the rounding of entries, at worst all of them one way.
    assert min(norms) >= 1 - 2e-5 - 2 * arithmetic.rounding_norm(size)


@precisions
def test_the_bound_holds_where_squares_vanish(dtype):
    info = np.finfo(dtype)
    # The first square is a normal number and the others are flushed to zero, or the sum of all is.
    some = np.sqrt(info.tiny) * np.array([[1.05, 0.95, 0.95]], dtype)
    all_ = np.full((1, 3), 0.1 * np.sqrt(info.smallest_subnormal), dtype)
    for row in (some, all_):
        clip_norm = dtype(1e-3) * row[0, 0]
        assert norm(summed(row, np.ones(1, bool), clip_norm)) <= clip_norm


@pytest.mark.slow
@precisions
@settings(max_examples=50)
@given(data=st.data())
def test_replacing_one_record_moves_the_sum_by_twice_the_bound_at_most(dtype, data):
    tree, clip_norm = data.draw(summable(dtype)), data.draw(clip_norms(dtype))
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [leaf.shape[1:] for leaf in leaves]
    others = [hnp.arrays(dtype, (1, *shape), elements=st.sampled_from(NASTY)) for shape in shapes]
    neighbour = replaced(tree, treedef.unflatten(data.draw(st.tuples(*others))), 2)
    mask = np.ones(NUM_RECORDS, bool)
    moved = norm(minus(summed(tree, mask, clip_norm), summed(neighbour, mask, clip_norm)))
    target(moved / float(clip_norm))
    assert moved <= 2 * float(clip_norm)


@pytest.mark.slow
@precisions
@settings(max_examples=50)
@given(data=st.data(), record=st.integers(0, NUM_RECORDS - 1))
def test_removing_one_record_moves_the_sum_by_the_bound_at_most(dtype, data, record):
    tree, clip_norm = data.draw(summable(dtype)), data.draw(clip_norms(dtype))
    mask = np.ones(NUM_RECORDS, bool)
    without = mask & (np.arange(NUM_RECORDS) != record)
    moved = norm(minus(summed(tree, mask, clip_norm), summed(tree, without, clip_norm)))
    target(moved / float(clip_norm))
    assert moved <= float(clip_norm)


@pytest.mark.slow
@precisions
def test_the_worst_neighbours_come_as_close_as_they_can(dtype):
    # What the tests above hold is tight: long and opposite vectors reach it.
    tree = {"x": np.zeros((NUM_RECORDS, 3), dtype)}
    there, back = ({"x": np.full((1, 3), value, dtype)} for value in (1e15, -1e15))
    mask = np.ones(NUM_RECORDS, bool)
    one, other = (summed(replaced(tree, new, 2), mask, dtype(2.5)) for new in (there, back))
    assert 5.0 * (1 - 3e-5) <= norm(minus(one, other)) <= 5.0


@precisions
@given(data=st.data(), mask=hnp.arrays(bool, NUM_RECORDS))
def test_masked_rows_count_for_nothing_whatever_they_hold(dtype, data, mask):
    tree, clip_norm = data.draw(summable(dtype)), data.draw(clip_norms(dtype))
    zeroed = jax.tree.map(
        lambda leaf: np.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, dtype(0)), tree
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        summed(tree, mask, clip_norm),
        summed(zeroed, np.ones(NUM_RECORDS, bool), clip_norm),
    )
    nothing = summed(tree, np.zeros(NUM_RECORDS, bool), clip_norm)
    assert norm(nothing) == 0


@precisions
@given(st.data())
def test_a_record_with_one_bad_entry_contributes_nothing_and_spoils_nothing(dtype, data):
    tree = data.draw(summable(dtype))
    bad = np.zeros(NUM_RECORDS, bool)
    for leaf in jax.tree.leaves(tree):
        bad |= ~np.isfinite(leaf.reshape(NUM_RECORDS, -1)).all(axis=1)
    mask = np.ones(NUM_RECORDS, bool)
    total = summed(tree, mask, dtype(1.0))
    assert np.isfinite(norm(total))  # NaN would equal itself below
    jax.tree.map(np.testing.assert_array_equal, total, summed(tree, mask & ~bad, dtype(1.0)))


@pytest.mark.slow
@precisions
@given(seed=seeds)
def test_short_vectors_pass_unchanged_and_long_ones_keep_their_direction(dtype, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(NUM_RECORDS, 7)).astype(dtype)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    mask = np.ones(NUM_RECORDS, bool)

    def parts(clip_norm):
        total = unrounded({"a": rows[:, :4], "b": rows[:, 4:]}, mask, dtype(clip_norm))
        return np.concatenate([total["a"], total["b"]])

    unclipped = rows.astype(np.float64).sum(axis=0)
    rounding = 10 * np.finfo(dtype).eps * lengths.max()
    np.testing.assert_allclose(parts(1.0001 * lengths.max()), unclipped, rtol=0, atol=rounding)
    # At the bound itself the margin for rounding shows.
    at_bound = np.abs(parts(lengths.max()) - unclipped).max()
    assert at_bound <= 2e-5 * lengths.max()
    clip_norm = 0.5 * lengths.min()
    directions = (rows / lengths[:, None]).sum(axis=0)
    np.testing.assert_allclose(
        parts(clip_norm) / clip_norm, directions, rtol=0, atol=2e-5 * NUM_RECORDS
    )


@pytest.mark.slow
@precisions
@given(data=st.data(), mask=hnp.arrays(bool, NUM_RECORDS))
def test_vectors_that_are_not_summed_are_clipped_alike(dtype, data, mask):
    tree, clip_norm = data.draw(trees(dtype)), data.draw(clip_norms(dtype))
    vectors = each(tree, mask, clip_norm)
    assert jax.tree.map(np.shape, vectors) == jax.tree.map(np.shape, tree)
    for record in range(NUM_RECORDS):
        vector = jax.tree.map(lambda leaf, record=record: leaf[record], vectors)
        assert norm(vector) <= clip_norm
        alone = summed(tree, mask & (np.arange(NUM_RECORDS) == record), clip_norm)
        assert norm(minus(vector, alone)) <= 2e-5 * clip_norm


def lower_products(left, right):
    left[5, 1, 2] = np.inf
    return LowerProduct(jnp.asarray(left), jnp.asarray(right))


def row_products(left, right):
    weights = left[:, 0, 0]
    weights[5] = np.inf
    return RowProduct(jnp.asarray(weights), jnp.asarray(right))


def hits(left, right):
    """Some in no bin, and at two records an infinite weight and no number for a place."""
    weights, places = left[:, 0, 0], np.floor(5 * right[:, :, 0])
    weights[5], places[6, 1] = np.inf, np.nan
    bins = np.broadcast_to(np.arange(4, dtype=left.dtype), (len(left), 4))
    return Hits(*map(jnp.asarray, (weights, places, bins, np.ones_like(weights))))


@pytest.mark.slow
@precisions
@pytest.mark.parametrize("of", [lower_products, row_products, hits])
@pytest.mark.parametrize("clip_norm", [0.5, 1e3])
def test_products_are_clipped_and_summed_as_if_laid_out(dtype, of, clip_norm):
    rng = np.random.default_rng(3)
    left, right = rng.normal(size=(2, 20, 2, 5)).astype(dtype)
    left[3], right[4, 0, 1] = 0, np.nan
    products, mask = of(left, right), np.arange(20) != 7
    flat = rng.normal(size=(20, 3)).astype(dtype)
    one = summed({"product": products, "flat": flat}, mask, dtype(clip_norm))
    other = summed({"product": products.laid_out(), "flat": flat}, mask, dtype(clip_norm))
    assert one["product"].shape == products.laid_out().shape[1:]
    assert one["product"].dtype == np.float64
    for name in ("product", "flat"):
        # Entries may be rounded to the neighbouring multiple.
        np.testing.assert_allclose(
            one[name], other[name], rtol=0, atol=20 * clip_norm * 2.0**-20, err_msg=name
        )


@pytest.mark.slow
@precisions
def test_the_norm_of_a_product_keeps_small_entries_behind_large_ones(dtype):
    """Whose squares a running sum would lose if it were taken away from the sum of all."""
    left, right = np.zeros((2, 1, 4), dtype)
    left[0], right[0] = [0, 1e9, 0, 0], [1, 0, 0, 1e15]
    product = LowerProduct(jnp.asarray(left), jnp.asarray(right))
    total = summed(product, np.ones(1, bool), dtype(1.0))
    assert 1 - 2e-5 <= norm(total) <= 1.0


def test_a_weight_that_overflows_when_it_is_scaled_leaves_the_row_out():
    """In units of a narrow clip's grid, it can be out of range while the product is not."""
    rows = np.full((2, 3), 4e-35, np.float32)
    product = RowProduct(jnp.full(2, 1.5e19, jnp.float32), jnp.asarray(rows))
    assert norm(summed(product, np.ones(2, bool), np.float32(1e-15))) <= 2e-15


@precisions
@pytest.mark.parametrize("size", [2, 3, 40])
def test_the_bound_holds_for_products_at_the_bound(dtype, size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        left, right = rng.normal(size=(2, 1, size)) ** 5
        length = norm(LowerProduct(left, right).laid_out())
        around = LowerProduct((left / length).astype(dtype), right.astype(dtype))
        assert 1 - 2e-5 - 2 * arithmetic.rounding_norm(size**2) <= norm(
            summed(around, np.ones(1, bool), dtype(1.0))
        )
        assert norm(summed(around, np.ones(1, bool), dtype(1.0))) <= 1.0


@precisions
@pytest.mark.parametrize("size", [2, 3, 40])
def test_the_bound_holds_for_weighted_rows_at_the_bound(dtype, size):
    rng = np.random.default_rng(size)
    for weight in (1e-6, -1.0, 1e6):
        rows = rng.normal(size=(1, size)) ** 5
        rows /= norm(rows) * abs(weight)
        around = RowProduct(jnp.full(1, weight, dtype), jnp.asarray(rows, dtype))
        found = norm(summed(around, np.ones(1, bool), dtype(1.0)))
        assert 1 - 2e-5 - 2 * arithmetic.rounding_norm(size) <= found <= 1.0


@pytest.mark.slow
def test_leaves_of_several_precisions_share_one_norm_and_add_up_in_64_bits():
    tree = {"a": np.full((1, 3), 2.0, np.float32), "b": np.full((1, 3), -3.0, np.float64)}
    mask = np.ones(1, bool)
    assert {name: leaf.dtype for name, leaf in each(tree, mask, 1.0).items()} == {
        "a": np.float32,
        "b": np.float64,
    }
    total = summed(tree, mask, 1.0)
    assert {leaf.dtype for leaf in total.values()} == {np.dtype(np.float64)}
    assert 1 - 2e-5 <= norm(total) <= 1.0
    np.testing.assert_allclose(total["b"], -1.5 * total["a"], rtol=2e-5)


def test_no_matrix_unit_rounds_a_sum():
    # They keep 11 bits of a float32 unless told otherwise: more than the margin covers.
    for function in (clipped, clipped_sum):
        jaxpr = jax.make_jaxpr(function)({"x": np.ones((3, 2))}, np.ones(3, bool), 1.0)
        products = re.findall(r"(\w+)\[[^]]*\] = dot_general\[(.*?)\n *\]", str(jaxpr), re.DOTALL)
        assert all(dtype == "f64" and "HIGHEST" in how for dtype, how in products)
        assert str(jaxpr).count("= dot_general") == len(products)
