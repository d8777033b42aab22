"""Partitions: which client holds which row, and two everyday ways to make one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from numpyro_dppvi import _validate

Rows = npt.NDArray[np.int64]

_LONGEST_NAME = 60
_MOST_ROW = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """The rows that each client holds.

    Which client holds a row, and how many rows each client holds, are public.

    Attributes:
        rows: For every client its row numbers, a read-only int64 array of shape
            `(num_records,)`. No row appears twice and no client is empty. Rows of the data that
            do not appear are not used.
        names: The clients' names; empty if they have none.

    Raises:
        ValueError: If there are no clients, a client has no rows, a row appears twice, or a row
            number is negative or not an integer; or if names are not short, distinct texts.
    """

    rows: tuple[Rows, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the rows and keep read-only copies, so that a partition cannot change."""
        is_array = isinstance(self.rows, np.ndarray) and self.rows.ndim > 0
        is_text = isinstance(self.rows, (str, bytes))
        if is_text or not (is_array or isinstance(self.rows, Sequence)):
            raise TypeError(
                f"rows must be a sequence, got {_validate.shown(self.rows)}: "
                "write one array of row numbers per client."
            )
        if len(self.rows) == 0:
            raise ValueError(
                "rows must hold at least one client, got an empty sequence: "
                "write one array of row numbers per client."
            )
        checked = tuple(_row_numbers(client, rows) for client, rows in enumerate(self.rows))
        # A row at two clients would be one person's record under two epsilons, which then add up.
        _check_disjoint(checked)
        # Checked copies in the place of what was passed: nobody can change them afterwards.
        object.__setattr__(self, "rows", checked)
        object.__setattr__(self, "names", names_of(self.names, len(checked)))

    @classmethod
    def from_labels(cls, labels: npt.ArrayLike) -> "Partition":
        """Build a partition from a column of clients' names or numbers.

        Args:
            labels: One label per row, shape `(num_rows,)`: integers, strings, or other sortable
                values.

        Returns:
            One client per distinct label, in sorted order of the labels; rows keep their order.
            Labels that are strings are the clients' names.

        Raises:
            ValueError: If `labels` is not one-dimensional, is empty, has missing entries, or cannot
                be sorted.
        """
        column = label_column(labels)
        values, client_of_row = distinct(column)
        # Sorted by client, in their own order, the rows of one client end where the next begin.
        by_client = np.argsort(client_of_row, kind="stable")
        ends = np.cumsum(np.bincount(client_of_row, minlength=len(values)))
        names = tuple(values) if all(isinstance(value, str) for value in values) else ()
        return cls(tuple(np.split(by_client, ends[:-1])), names)

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.rows)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each client."""
        return tuple(len(rows) for rows in self.rows)

    def __repr__(self) -> str:
        """Show sizes instead of rows, which would fill the screen."""
        if self.num_clients <= 20:
            return f"Partition(num_clients={self.num_clients}, sizes={self.sizes})"
        return (
            f"Partition(num_clients={self.num_clients}, "
            f"sizes between {min(self.sizes)} and {max(self.sizes)})"
        )


def split_evenly(rng_key: jax.Array, num_rows: int, num_clients: int) -> Partition:
    """Distribute all rows at random over clients of equal size.

    Unlike `partition`, it drops no rows: if the division leaves a remainder, the first clients hold
    one more row.

    Args:
        rng_key: A JAX key. The same key, and NumPy version, give the same partition.
        num_rows: The number of rows of the data.
        num_clients: The number of clients.

    Returns:
        A partition of all `num_rows` rows whose sizes differ by at most one.

    Raises:
        ValueError: If there are more clients than rows, or either is not a whole number >= 1.
        TypeError: If `rng_key` is not a JAX key.

    Example:
        >>> split_evenly(jax.random.key(0), 10, 3)
        Partition(num_clients=3, sizes=(4, 3, 3))
    """
    check_counts(num_rows, num_clients)
    # Shuffled before it is cut: rows of data are often sorted by time or outcome.
    shuffled = host_generator(rng_key).permutation(num_rows)
    return Partition(tuple(np.array_split(shuffled, num_clients)))


def names_and_sizes(
    client_sizes: Sequence[int] | Mapping[str, int],
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The clients' names, if they have any, and how many records each holds."""
    if isinstance(client_sizes, Mapping):
        names = names_of(list(client_sizes), len(client_sizes))
        return names, _validate.client_sizes(list(client_sizes.values()))
    return (), _validate.client_sizes(client_sizes)


def names_of(names: Any, num_clients: int) -> tuple[str, ...]:
    """A name for each client, or none at all, as texts for tables, plots and files."""
    entries = _validate.entries("names", names, "['Helsinki', 'Turku']")
    found = tuple(_client_name(name) for name in entries)
    if len(set(found)) < len(found):
        # 1 and '1' are the same name once they are texts.
        twice = next(name for name in found if found.count(name) > 1)
        raise ValueError(f"clients must have distinct names, got {twice!r} twice: rename one.")
    if found and len(found) != num_clients:
        raise ValueError(
            f"names must hold one name per client, got {len(found)} names for {num_clients} "
            "clients: name all of them or none."
        )
    return found


def _client_name(name: Any) -> str:
    is_number = isinstance(name, (int, np.integer)) and not isinstance(name, bool)
    # Years and numbers of wards are names, too; 1.0 and True are not.
    text = str(int(name)) if is_number else name
    # Names stand in tables, messages, file headers and ledger lines: nothing in them may break a
    # line or hide.
    is_text = isinstance(text, str) and text.isprintable() and text == text.strip()
    if not is_text or not 0 < len(text) <= _LONGEST_NAME:
        raise ValueError(
            f"a client's name must be 1 to {_LONGEST_NAME} printable characters, got "
            f'{_validate.shown(name)}: write {{"Helsinki": data, "Turku": other}}, say.'
        )
    return str(text)


def host_generator(rng_key: jax.Array) -> np.random.Generator:
    """Seed a NumPy generator from a JAX key; shuffling on the host needs no compilation."""
    key = _validate.rng_key(rng_key)
    # All words of the key: two keys that differ anywhere give different shuffles.
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def check_counts(num_rows: int, num_clients: int, name: str = "num_clients") -> None:
    """Refuse more clients than rows; `name` is the argument for the number of clients."""
    _validate.positive_int("num_rows", num_rows)
    _validate.positive_int(name, num_clients)
    if num_clients > num_rows:
        raise ValueError(
            f"{name} must not exceed the number of rows, got {num_clients} clients for "
            f"{num_rows} rows: write {name}={num_rows} or less, because every client needs a row."
        )


def label_column(labels: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return labels as an array; refuse anything but one label per row."""
    column = _validate.host_array("labels", labels)
    if column.ndim != 1 or len(column) == 0:
        raise ValueError(
            f"labels must be a one-dimensional array, one label per row, got shape {column.shape}: "
            "write labels=y, say."
        )
    if _has_missing(column):
        raise ValueError(
            "labels must not be missing, got NaN or similar: write a label for every row, "
            "or leave such rows out of the data."
        )
    return column


def _has_missing(column: npt.NDArray[Any]) -> bool:
    try:
        # NaN and NaT differ from themselves; comparing pandas.NA raises a TypeError.
        return bool(np.any(np.not_equal(column, column)))
    except TypeError:
        return True


def distinct(column: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp]]:
    """Return the distinct labels in sorted order, and for every row the number of its label."""
    try:
        # Sorted, so that clients have the same numbers whatever order the rows come in.
        return np.unique(column, return_inverse=True)
    except TypeError as error:
        # Kinds and not labels: a label may say something about a record.
        kinds = " and ".join(sorted({type(label).__name__ for label in column}))
        raise ValueError(
            f"labels must be of one sortable type, got {kinds}: write strings, say."
        ) from error


def _row_numbers(client: int, rows: npt.ArrayLike) -> Rows:
    """Check one client's rows; return them as a read-only int64 copy."""
    array = _validate.host_array(f"rows of client {client}", rows)
    if array.size == 0:
        raise ValueError(
            f"every client must hold a row, got an empty client {client}: "
            "give it a row, or leave it out."
        )
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"rows of client {client} must be a one-dimensional array of integers, got "
            f"{array.dtype} of shape {array.shape}: write np.flatnonzero(mask), say."
        )
    # Unsigned integers may be larger, and the cast below would make them negative.
    wrong = array[(array < 0) | (array > _MOST_ROW)]
    if wrong.size:
        raise ValueError(
            f"rows of client {client} must be at least 0 and below 2**63, got {wrong[0]}: count "
            "rows from 0."
        )
    # A copy: the caller's array may change after it was checked.
    numbers = array.astype(np.int64)
    numbers.setflags(write=False)
    return numbers


def _check_disjoint(rows: tuple[Rows, ...]) -> None:
    # Sorted, a row that appears twice stands beside itself; a stable order names the earlier
    # client first.
    every_row = np.concatenate(rows)
    order = np.argsort(every_row, kind="stable")
    repeated = np.flatnonzero(np.diff(every_row[order]) == 0)
    if len(repeated) == 0:
        return
    first, second = order[repeated[0]], order[repeated[0] + 1]
    # Which client each place of ``every_row`` belongs to.
    client_of = np.repeat(np.arange(len(rows)), [len(client_rows) for client_rows in rows])
    raise ValueError(
        f"clients must not share rows, got row {every_row[first]} in client {client_of[first]} and "
        f"in client {client_of[second]}: give every row to one client, once."
    )
