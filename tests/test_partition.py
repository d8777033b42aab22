import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from numpyro_dppvi.datasets import load_adult
from numpyro_dppvi.records import Partition, partition, split_evenly, stack, stack_clients

KEY = jax.random.key(0)

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def adult_labels():
    return load_adult().y_train


def assert_disjoint(clients, num_rows):
    rows = np.concatenate(clients.rows)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < num_rows


class TestPartitionValue:
    def test_reports_number_and_sizes_of_clients(self):
        clients = Partition(([0, 1, 2], [5], np.array([3, 4], np.int32)))
        assert clients.num_clients == 3
        assert clients.sizes == (3, 1, 2)
        assert all(rows.dtype == np.int64 for rows in clients.rows)

    def test_cannot_be_changed_from_outside(self):
        rows = np.array([0, 1])
        clients = Partition((rows, [2]))
        rows[0] = 2
        assert clients.rows[0][0] == 0
        with pytest.raises(ValueError, match="read-only"):
            clients.rows[0][0] = 2

    def test_shows_sizes_not_rows(self):
        assert repr(Partition(([0, 1], [7]))) == "Partition(num_clients=2, sizes=(2, 1))"
        many = split_evenly(KEY, 101, 50)
        assert repr(many) == "Partition(num_clients=50, sizes between 2 and 3)"

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ((), ["at least one client", "empty sequence", "write one array"]),
            (([0], [], [1]), ["empty client 1", "leave it out"]),
            (([0], [3, -2]), ["client 1", "at least 0", "-2", "count rows from 0"]),
            (([0, 4], [1], [2, 4]), ["row 4", "client 0", "client 2", "one client"]),
            (([0, 4, 4],), ["row 4", "in client 0 and in client 0"]),
            (([True, False],), ["client 0", "bool", "np.flatnonzero"]),
            (([0], [1.0]), ["client 1", "integers", "float64"]),
            (([[0, 1]],), ["one-dimensional", "(1, 2)"]),
        ],
    )
    def test_refuses_bad_rows(self, rows, words):
        assert_refuses(words, Partition, rows)


class TestFromLabels:
    def test_orders_clients_by_label_and_keeps_the_order_of_rows(self):
        clients = Partition.from_labels(["south", "east", "south", "north", "east"])
        assert [rows.tolist() for rows in clients.rows] == [[1, 4], [3], [0, 2]]

    def test_takes_jax_arrays_and_negative_numbers(self):
        clients = Partition.from_labels(jnp.array([7, -1, 7]))
        assert [rows.tolist() for rows in clients.rows] == [[1], [0, 2]]

    @pytest.mark.slow
    @given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
    def test_every_row_goes_to_the_client_of_its_label(self, labels):
        clients = Partition.from_labels(labels)
        assert sum(clients.sizes) == len(labels)
        for rows, label in zip(clients.rows, sorted(set(labels)), strict=True):
            assert {labels[row] for row in rows} == {label}

    @pytest.mark.parametrize(
        ("labels", "words"),
        [
            ([], ["one-dimensional", "(0,)"]),
            (3, ["one-dimensional", "()"]),
            ([[0, 1]], ["one label per row", "(1, 2)"]),
            ([0.0, np.nan], ["missing", "NaN"]),
            (np.array(["a", None], object), ["one sortable type", "NoneType and str"]),
        ],
    )
    def test_refuses_bad_labels(self, labels, words):
        assert_refuses(words, Partition.from_labels, labels)

    def test_refuses_missing_pandas_labels(self):
        pandas = pytest.importorskip("pandas")
        assert_refuses(["missing"], Partition.from_labels, pandas.array(["a", None, "b"]))


class TestSplitEvenly:
    @pytest.mark.slow
    @given(seeds, st.integers(1, 200), st.data())
    def test_drops_nothing_and_sizes_differ_by_at_most_one(self, seed, num_rows, data):
        num_clients = data.draw(st.integers(1, num_rows))
        clients = split_evenly(jax.random.key(seed), num_rows, num_clients)
        assert clients.num_clients == num_clients
        assert sorted(np.concatenate(clients.rows)) == list(range(num_rows))
        assert max(clients.sizes) - min(clients.sizes) <= 1

    def test_is_a_function_of_the_key(self):
        first, again = (split_evenly(jax.random.key(1), 100, 3) for _ in range(2))
        other = split_evenly(jax.random.key(2), 100, 3)
        np.testing.assert_array_equal(np.concatenate(first.rows), np.concatenate(again.rows))
        assert (np.concatenate(first.rows) != np.concatenate(other.rows)).any()

    def test_takes_old_style_keys(self):
        new, old = (split_evenly(make(1), 100, 3) for make in (jax.random.key, jax.random.PRNGKey))
        np.testing.assert_array_equal(np.concatenate(new.rows), np.concatenate(old.rows))

    @pytest.mark.parametrize(
        ("num_rows", "num_clients", "words"),
        [
            (5, 6, ["num_clients", "6 clients", "5 rows", "num_clients=5"]),
            (5, 0, ["num_clients", "0"]),
            (0, 1, ["num_rows", "0"]),
            (5, 2.0, ["num_clients", "2.0"]),
        ],
    )
    def test_refuses_impossible_numbers(self, num_rows, num_clients, words):
        assert_refuses(words, split_evenly, KEY, num_rows, num_clients)


class TableRow(NamedTuple):
    """A row of the appendix's tables "Adult data, 10 (200) clients data split"."""

    num_clients: int
    size_factor: float
    class_balance_factor: float
    small_size: int
    large_size: int
    small_majority: int  # floor(n_small * lambda_small), which the table gives as a fraction
    small_fraction: str
    large_fractions: tuple[float, float]


# Sizes of large clients are not in the tables; they follow from the equation above them.
ADULT_TABLES = [
    TableRow(10, 0, 0, 2442, 2442, 1851, "0.76", (0.755, 0.765)),
    TableRow(10, 0.75, 0.95, 610, 4273, 602, "0.99", (0.725, 0.735)),
    TableRow(10, 0.7, -3, 732, 4151, 23, "0.03", (0.885, 0.895)),
    TableRow(200, 0, 0, 122, 122, 92, "0.75", (0.7, 0.8)),
    TableRow(200, 0.75, 0.95, 30, 213, 29, "0.97", (0.67, 0.78)),
    TableRow(200, 0.7, -3, 36, 207, 1, "0.03", (0.85, 0.93)),
]


class TestPaperScheme:
    @pytest.mark.parametrize("row", ADULT_TABLES, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
    def test_equals_the_tables_of_the_paper(self, row, adult_labels):
        clients = partition(
            KEY, adult_labels, row.num_clients, row.size_factor, row.class_balance_factor
        )
        half = row.num_clients // 2
        assert clients.sizes == (row.small_size,) * half + (row.large_size,) * half
        assert_disjoint(clients, len(adult_labels))

        majority = [int((adult_labels[rows] == 0).sum()) for rows in clients.rows]
        assert majority[:half] == [row.small_majority] * half
        assert f"{row.small_majority / row.small_size:.2f}" == row.small_fraction
        lowest, highest = row.large_fractions
        assert lowest <= sum(majority[half:]) / (half * row.large_size) <= highest

    def test_large_clients_are_a_random_mix(self, adult_labels):
        clients = partition(KEY, adult_labels, 10, 0.75, 0.95)
        shares = np.array([(adult_labels[rows] == 0).mean() for rows in clients.rows[5:]])
        assert len(set(shares)) > 1
        # Standard error of a share of 4273 rows: 0.007.
        np.testing.assert_allclose(shares, 0.7256, atol=0.03)

    def test_equals_the_mimic_table_where_classes_tie(self):
        # The paper has 4475 rows, in halves; a true tie leaves every size and count as it is.
        labels = np.repeat([1, 0], 2237)
        for factors, size, majority in (
            ((0, 0), 447, 223),
            ((0.75, 0.95), 111, 108),
            ((0.7, -0.5), 134, 33),
        ):
            clients = partition(KEY, labels, 10, *factors)
            assert clients.sizes[0] == size
            assert (labels[clients.rows[0]] == 0).sum() == majority

    def test_rows_are_in_random_order_within_a_client(self, adult_labels):
        small = partition(KEY, adult_labels, 10).rows[0]
        halves = np.array_split(adult_labels[small], 2)
        assert all((half == 0).mean() < 0.85 for half in halves)

    @pytest.mark.slow
    @given(seeds, st.integers(1, 300), st.integers(0, 99), st.data())
    def test_sizes_without_labels(self, seed, num_rows, percent, data):
        half = data.draw(st.integers(1, max(1, num_rows // 2)))
        num_clients = 2 * half
        small_size = num_rows * (100 - percent) // (100 * num_clients)
        assume(small_size > 0)
        clients = partition(jax.random.key(seed), num_rows, num_clients, percent / 100)
        large_size = num_rows * (100 + percent) // (100 * num_clients)
        assert clients.sizes == (small_size,) * half + (large_size,) * half
        assert_disjoint(clients, num_rows)

    @pytest.mark.slow
    @given(seeds, st.integers(1, 100), st.data())
    def test_any_number_of_clients_can_be_balanced(self, seed, num_rows, data):
        num_clients = data.draw(st.integers(1, num_rows))
        clients = partition(jax.random.key(seed), num_rows, num_clients)
        assert clients.sizes == (num_rows // num_clients,) * num_clients
        assert_disjoint(clients, num_rows)

    @pytest.mark.slow
    @given(
        seeds,
        st.lists(st.integers(10, 60), min_size=2, max_size=4),
        st.integers(1, 3),
        st.integers(50, 90),
        st.integers(0, 100),
    )
    def test_classes_of_small_clients(self, seed, class_sizes, half, percent, balance_percent):
        labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
        num_rows, most = len(labels), max(class_sizes)
        small_size = num_rows * (100 - percent) // (200 * half)
        assume(small_size > 0)
        # lambda + (1 - lambda) * kappa in whole numbers, over 100 * num_rows.
        scaled_fraction = 100 * most + (num_rows - most) * balance_percent
        expected = small_size * scaled_fraction // (100 * num_rows)
        assume(half * expected <= most)
        assume(half * (small_size - expected) <= num_rows - most)

        clients = partition(
            jax.random.key(seed), labels, 2 * half, percent / 100, balance_percent / 100
        )
        assert_disjoint(clients, num_rows)
        majority = class_sizes.index(most)
        assert clients.sizes[:half] == (small_size,) * half
        for rows in clients.rows[:half]:
            assert (labels[rows] == majority).sum() == expected

    def test_reads_factors_as_decimals(self):
        # In binary floating point 10 * (1 - 0.9) is 0.9999999999999998.
        assert partition(KEY, 100, 10, size_factor=0.9).sizes == (1,) * 5 + (19,) * 5

    def test_allows_the_lowest_class_balance_factor(self):
        labels = np.repeat(["no", "yes"], [20, 10])
        clients = partition(KEY, labels, 2, 0.5, -(2 / 3) / (1 / 3))
        assert set(labels[clients.rows[0]]) == {"yes"}

    def test_one_client_holds_everything(self, adult_labels):
        assert partition(KEY, adult_labels, 1).sizes == (24421,)

    def test_is_a_function_of_the_key(self, adult_labels):
        first, again = (partition(jax.random.key(1), adult_labels, 10) for _ in range(2))
        other = partition(jax.random.key(2), adult_labels, 10)
        for rows, rows_again in zip(first.rows, again.rows, strict=True):
            np.testing.assert_array_equal(rows, rows_again)
        assert (first.rows[0] != other.rows[0]).any()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((5, 6), ["num_clients", "6 clients", "5 rows"]),
            ((5.0, 2), ["num_rows", "5.0"]),
            ((100, 10, 1.0), ["size_factor", "[0, 1)", "1.0"]),
            ((100, 10, -0.1), ["size_factor", "-0.1"]),
            ((100, 10, float("nan")), ["size_factor", "nan"]),
            ((100, 10, 0.95), ["size_factor", "0.95", "100 rows", "size_factor=0.9"]),
            ((100, 10, 0.0, 0.5), ["class_balance_factor", "0.5", "labels"]),
            ((100, 5, 0.5), ["num_clients", "even", "5", "num_clients=6"]),
            (([0, 1] * 50, 5, 0.0, 0.5), ["num_clients", "even", "num_clients=6"]),
            (([0, 0, 0, 1], 2, 0.0, float("inf")), ["class_balance_factor", "finite"]),
            (([0, 0, 0, 1], 2, 0.0, -3.1), ["class_balance_factor", "between -3 and 1", "3 of 4"]),
            (([0, 0, 0, 1], 2, 0.0, 1.5), ["class_balance_factor", "1.5"]),
            (([0, 0, 0, 0], 2, 0.0, 0.5), ["class_balance_factor", "all labels are equal"]),
            (([0, 0, 0, 1], 2, 0.0, -3), ["other classes", "1 rows", "1 clients × 2 = 2"]),
            (
                ([0, 0, 0, 1, 1, 2, 2, 3], 2, 0.0, 1),
                ["majority class, 0,", "3 rows", "1 clients × 4 = 4", "nearer to 0"],
            ),
            (([], 2), ["one label per row", "(0,)"]),
            (([[0, 1]], 2), ["one label per row", "(1, 2)"]),
        ],
    )
    def test_refuses_what_cannot_be_met(self, arguments, words):
        assert_refuses(words, partition, KEY, *arguments)

    @pytest.mark.parametrize("make", [partition, split_evenly])
    def test_needs_one_key(self, make):
        with pytest.raises(TypeError, match=r"rng_key.*jax\.random\.key\(0\)"):
            make(0, 100, 10)
        with pytest.raises(ValueError, match="single key"):
            make(jax.random.split(KEY), 100, 10)


class TestStack:
    def test_pads_with_zeros_and_counts_records(self):
        data = {"X": np.arange(1.0, 13.0).reshape(6, 2), "y": np.arange(1, 7)}
        shards = stack(data, Partition(([4, 0, 1], [5])))
        assert shards.capacity == 3
        np.testing.assert_array_equal(shards.num_records, [3, 1])
        np.testing.assert_array_equal(shards.records["y"], [[5, 1, 2], [6, 0, 0]])
        np.testing.assert_array_equal(
            shards.records["X"], [[[9, 10], [1, 2], [3, 4]], [[11, 12], [0, 0], [0, 0]]]
        )
        np.testing.assert_array_equal(shards.mask, [[True, True, True], [True, False, False]])

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (np.float64, jnp.zeros(()).dtype),
            (np.float32, jnp.float32),
            (np.float16, jnp.float16),
            (np.int64, jnp.arange(1).dtype),
            (np.int32, jnp.int32),
            (np.uint8, jnp.uint8),
            (bool, jnp.bool_),
        ],
    )
    def test_keeps_kinds_of_numbers(self, dtype, expected):
        shards = stack({"x": np.ones(3, dtype)}, Partition(([0, 1], [2])))
        assert shards.records["x"].dtype == expected
        assert shards.num_records.dtype == jnp.int32

    @pytest.mark.slow
    @settings(max_examples=40)  # each shape is compiled
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
    def test_masked_rows_are_the_clients_rows(self, labels):
        clients = Partition.from_labels(labels)
        data = {"id": np.arange(1, len(labels) + 1), "x": np.eye(len(labels))}
        shards = stack(data, clients)
        records, mask = jax.tree.map(np.asarray, shards.records), np.asarray(shards.mask)
        assert shards.capacity == max(clients.sizes)
        assert tuple(shards.num_records) == clients.sizes
        for client, rows in enumerate(clients.rows):
            mine = mask & (np.broadcast_to(shards.owners, mask.shape) == client)
            np.testing.assert_array_equal(records["id"][mine], data["id"][rows])
            np.testing.assert_array_equal(records["x"][mine], data["x"][rows])
        assert not any(array[~mask].any() for array in records.values())

    def test_pooled_data_and_data_per_client_agree(self):
        data = {"X": np.random.default_rng(0).normal(size=(9, 2)), "y": np.arange(9) % 2 == 0}
        clients = split_evenly(KEY, 9, 4)
        pooled = stack(data, clients)
        per_client = stack_clients(
            [{name: array[rows] for name, array in data.items()} for rows in clients.rows]
        )
        assert jax.tree.structure(pooled) == jax.tree.structure(per_client)
        jax.tree.map(np.testing.assert_array_equal, pooled, per_client)

    def test_promotes_dtypes_among_clients(self):
        shards = stack_clients([{"x": [1, 2]}, {"x": [0.5]}])
        np.testing.assert_array_equal(shards.records["x"], [[1.0, 2.0], [0.5, 0.0]])

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ({}, ["data", "empty mapping", '{"X": X, "y": y}']),
            (np.ones(3), ["data", "map names to arrays", "float64 of shape (3,)"]),
            ({"X": np.ones((3, 2)), "y": np.ones(2)}, ["unequal", "'X': 3", "'y': 2"]),
            ({"X": np.ones((1, 2))}, ["row 2", "1 rows"]),
            ({"X": np.ones((0, 2))}, ["data", "empty arrays"]),
            ({"X": ["a", "b", "c"]}, ["data['X']", "numbers", "<U1"]),
            ({"X": [1.0, None, 2.0]}, ["data['X']", "numbers", "object"]),
            ({"X": [[1.0], [1.0, 2.0], [3.0]]}, ["data['X']", "one shape", "ragged list"]),
            ({"X": 3.0}, ["data['X']", "one row per record", "model_kwargs"]),
        ],
    )
    def test_refuses_bad_data(self, data, words):
        assert_refuses(words, stack, data, Partition(([0, 1], [2])))

    def test_refuses_integers_that_jax_would_wrap(self):
        with jax.enable_x64(False):
            words = ["data['id']", "int32", "jax_enable_x64"]
            assert_refuses(words, stack, {"id": np.array([1, 2**40])}, Partition(([0], [1])))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_refuses_numbers_that_are_not_finite(self, value):
        # One bad entry, placed where a look at the first or last row would miss it.
        X = np.ones((5, 2), type(value))
        X[2, 1] = value
        data = {"y": np.ones(5), "X": X}
        words = ["data['X']", "finite", "NaN or infinite", "drop or impute"]
        refusal = assert_refuses(words, stack, data, Partition(([0, 1], [3, 4])))
        # neither a record nor a count of them
        assert not re.search(r"\d", refusal.replace("float32", ""))
        words = ["client 1's data['X']", "finite"]
        assert_refuses(words, stack_clients, [{"X": np.ones((5, 2))}, {"X": X}])

    @pytest.mark.parametrize(
        ("data_per_client", "words"),
        [
            ([], ["data_per_client", "at least one client"]),
            ({"X": np.ones(2)}, ["data_per_client", "a dict", "stack(data"]),
            ([{"x": np.ones(2)}, {"x": np.ones(0)}], ["client 1's data", "leave such"]),
            ([{"x": np.ones(2)}, {"z": np.ones(2)}], ["same names", "['z']", "client 1", "['x']"]),
            (
                [{"x": np.ones((2, 3))}, {"x": np.ones((2, 4))}],
                ["'x'", "(4,)", "client 1", "(3,)", "same columns"],
            ),
            ([{"x": np.ones(2)}, [1.0]], ["client 1's data", "list"]),
        ],
    )
    def test_refuses_bad_clients(self, data_per_client, words):
        assert_refuses(words, stack_clients, data_per_client)


def assert_refuses(words, function, *arguments):
    """Assert that a call raises one sentence that has all these words in this order; return it."""
    pattern = ".*".join(re.escape(word) for word in words)
    with pytest.raises(ValueError, match=pattern) as refusal:
        function(*arguments)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)
