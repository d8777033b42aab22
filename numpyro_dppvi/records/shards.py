"""Records of all clients in one array per argument."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.records.clients import Partition, names_of

# Clients' records lie end to end if that takes less than this share of the memory.
_WORTH_CLOSING_UP = 0.8


class Shards(NamedTuple):
    """Records of all clients, in blocks of as many rows as the largest client has.

    Each client has a block of its own. Where much of these would be padding, clients' records lie
    end to end instead, over as few blocks as hold them. :meth:`of_client` gives the same of both.

    Sensitive: this is the data itself.

    Attributes:
        records: Arrays of shape `(num_blocks, capacity, ...)` by name of the model's argument.
            `mask` marks the rows that are records; the others are zeros.
        num_records: The (public) number of records of each client, int32, shape `(num_clients,)`.
        starts: The row, counted over all blocks, where a client's records begin, likewise; `None`
            where block m is client m's.
    """

    records: dict[str, jax.Array]
    num_records: jax.Array
    starts: jax.Array | None = None

    @property
    def capacity(self) -> int:
        """The number of rows of a block, and of the largest client."""
        return int(next(iter(self.records.values())).shape[1])

    @property
    def mask(self) -> jax.Array:
        """True where a row of a block is a record, shape `(num_blocks, capacity)`."""
        num_blocks = int(next(iter(self.records.values())).shape[0])
        return _present(num_blocks, self.capacity, self.num_records, self.starts is not None)

    @property
    def owners(self) -> npt.NDArray[Any]:
        """The client whose record is in a row of a block, for each row or for each block."""
        if self.starts is None:
            return np.arange(len(self.num_records))[:, None]
        owners = np.zeros(next(iter(self.records.values())).shape[:2], int)
        order = np.argsort(np.asarray(self.starts))
        in_order = np.repeat(order, np.asarray(self.num_records)[order])
        owners.reshape(-1)[: len(in_order)] = in_order
        return owners

    def of_client(self, number: Array | int) -> tuple[dict[str, jax.Array], jax.Array]:
        """One client's records, padded with zeros to the capacity, and how many they are."""
        num_records = self.num_records[number]
        if self.starts is None:
            return {name: leaf[number] for name, leaf in self.records.items()}, num_records
        start, is_mine = self.starts[number], jnp.arange(self.capacity) < num_records

        def mine(leaf: Array) -> Array:
            rows = leaf.reshape(-1, *leaf.shape[2:])
            rows = jax.lax.dynamic_slice_in_dim(rows, start, self.capacity)
            # Behind them lie other clients' records. They are replaced, here and nowhere else, and
            # not multiplied by 0: 0 * inf would carry one into this client's gradients.
            keep = is_mine.reshape(-1, *[1] * (rows.ndim - 1))
            return jnp.where(keep, rows, jnp.zeros((), leaf.dtype))

        return {name: mine(leaf) for name, leaf in self.records.items()}, num_records


@compiled("num_blocks", "capacity", "end_to_end", quick=True)
def _present(num_blocks: int, capacity: int, num_records: Array, end_to_end: bool) -> Array:
    if not end_to_end:
        return jnp.arange(capacity) < num_records[:, None]
    rows = jnp.arange(num_blocks * capacity).reshape(num_blocks, capacity)
    return rows < jnp.sum(num_records)


def stack(
    data: Mapping[str, npt.ArrayLike], partition: Partition, missing: Collection[str] = ()
) -> Shards:
    """Stack pooled data into one array per name, client by client.

    Args:
        data: Arrays by name, with one row per record on the leading axis, `(num_rows, ...)`.
        partition: The rows of each client.
        missing: The arrays in which NaN stands for a missing entry, which the model imputes.

    Returns:
        The shards. float64 becomes JAX's default float; integers and booleans keep their dtype.
        Numbers must be finite after the cast, and masked entries are refused.

    Raises:
        ValueError: If arrays differ in length or hold numbers that JAX cannot, the partition has
            rows that the data does not have, or `missing` names no array.
        TypeError: If `partition` is not a `Partition`.
    """
    example = "split_evenly(rng_key, num_rows, num_clients)"
    _validate.instance("partition", partition, Partition, example)
    _check_missing(missing, data if isinstance(data, Mapping) else ())
    arrays = record_arrays(data, "data", missing)
    num_rows = len(next(iter(arrays.values())))
    # Or NumPy would wrap around, or raise in words about axes.
    highest = max(int(rows.max()) for rows in partition.rows)
    if highest >= num_rows:
        raise ValueError(
            f"partition must name rows that data has, got row {highest} for {num_rows} rows "
            f"counted from 0: build the partition for {num_rows} rows."
        )
    parts = [{name: array[rows] for name, array in arrays.items()} for rows in partition.rows]
    return _laid_out(parts, missing)


def stack_clients(
    data_per_client: Sequence[Mapping[str, npt.ArrayLike]],
    names: Sequence[str] = (),
    missing: Collection[str] = (),
) -> Shards:
    """Stack data that is given client by client.

    Args:
        data_per_client: For every client arrays by name, with one row per record on the leading
            axis, `(num_records, ...)`; with the same names and trailing axes at every client.
        names: What to call the clients in error messages; by default, "client 0" and so on.
        missing: The arrays in which NaN stands for a missing entry, which the model imputes.

    Returns:
        The shards. Different dtypes of one array are promoted by NumPy's rules.

    Raises:
        ValueError: If there are no clients, a client has no records, clients' names or trailing
            axes differ, or `missing` names no array.
    """
    if not isinstance(data_per_client, Sequence) or isinstance(data_per_client, (str, bytes)):
        raise ValueError(
            "data_per_client must be a sequence with one mapping per client, got "
            f"{_validate.shown(data_per_client)}: write [data_a, data_b] or stack(data, partition)."
        )
    if len(data_per_client) == 0:
        raise ValueError(
            "data_per_client must hold at least one client, got an empty sequence: "
            'write [{"X": X, "y": y}], with one mapping per client.'
        )
    num_clients = len(data_per_client)
    # What is no mapping is refused below, in words that name its client.
    known = (data for data in data_per_client if isinstance(data, Mapping))
    _check_missing(missing, {key for data in known for key in data})
    called = names_of(names, num_clients) or [f"client {m}" for m in range(num_clients)]
    clients = [
        record_arrays(data, f"{client}'s data", missing)
        for client, data in zip(called, data_per_client, strict=True)
    ]
    for client, arrays in zip(called, clients, strict=True):
        _check_like_first(client, arrays, called[0], clients[0])
    return _laid_out(clients, missing)


def record_arrays(
    data: Any, name: str, missing: Collection[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return data as NumPy arrays of one length, cast to JAX's dtypes.

    There must be at least one record, and numbers must be finite after the cast. Refusals name the
    array, but show no record and no count of invalid ones.
    """
    _check_names(data, name)
    arrays = {
        key: _number_array(value, f"{name}[{key!r}]", key in missing) for key, value in data.items()
    }
    # Checked client by client, before anything is laid out together.
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"arrays of {name} must have one row per record, got unequal lengths {lengths}: "
            "give them all the same number of rows."
        )
    _check_labels(data, name)
    # A client without records would have no denominator, and no epsilon that means anything.
    if 0 in lengths.values():
        raise ValueError(
            f"{name} must hold at least one record, got empty arrays: leave such a client out."
        )
    for key, array in arrays.items():
        if array.size == 0:
            raise ValueError(
                f"{name}[{key!r}] must hold at least one number per record, got shape "
                f"{array.shape}: leave the array out, or give it a column."
            )
    return arrays


def _check_labels(data: Mapping[str, Any], name: str) -> None:
    """Refuse columns of pandas whose rows have other labels, or the same in another order.

    Arrays have no labels: rows would be put together by their places.
    """
    # By what it can do: pandas need not be installed. A list's index is a method.
    indices: dict[str, Any] = {key: getattr(value, "index", None) for key, value in data.items()}
    labelled = [(key, index) for key, index in indices.items() if hasattr(index, "equals")]
    for key, index in labelled[1:]:
        first, others = labelled[0]
        if not index.equals(others):
            raise ValueError(
                f"columns of {name} must have the same row labels in one order, got other ones for "
                f"{key!r} than for {first!r}: write {key}.loc[{first}.index] to align them, or "
                ".to_numpy() behind both if rows belong together as they stand."
            )


def record_shapes(records: Any, name: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of records, cast to JAX's dtypes, without looking at values."""
    _check_names(records, name)
    return {key: _shape(value, f"{name}[{key!r}]") for key, value in records.items()}


def _check_names(data: Any, name: str) -> None:
    """Refuse anything but a mapping from arguments' names."""
    received = _validate.shown(data)
    if isinstance(data, Mapping):
        others = [key for key in data if not isinstance(key, str)]
        if len(data) > 0 and not others:
            return
        received = f"the key {_validate.shown(others[0])}" if others else "an empty mapping"
    raise ValueError(
        f"{name} must map names to arrays, got {received}: "
        'write {"X": X, "y": y}, with the names of the model\'s arguments.'
    )


def _check_missing(missing: Any, names: Collection[str]) -> None:
    """Refuses anything but names of arrays."""
    is_list = isinstance(missing, Sequence | Set | Mapping) and not isinstance(missing, str | bytes)
    if not is_list or not all(isinstance(key, str) and key in names for key in missing):
        raise ValueError(
            f"missing must hold names of data's arrays, got {_validate.shown(missing)}: write "
            'missing=("age",), say.'
        )


def _shape(value: Any, name: str) -> jax.ShapeDtypeStruct:
    if not isinstance(value, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
        value = _number_array(value, name)
    shape, dtype = tuple(value.shape), _held_dtype(value.dtype, name)
    if not shape or 0 in shape:
        raise ValueError(
            f"{name} must have one row per record, at least one, and a number in each, got shape "
            f"{shape}: pass constants of the model in model_kwargs."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


def _number_array(value: Any, name: str, missing: bool = False) -> npt.NDArray[Any]:
    """Return one array of data cast to JAX's dtype; refuse what cannot be cast."""
    if isinstance(value, Mapping):
        raise ValueError(
            f"{name} must be an array, got {_validate.shown(value)}: pass each array as an "
            "argument of its own to a model that nests them, such as def flat(age, bmi, y): "
            "model({'age': age, 'bmi': bmi}, y)."
        )
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} must be a concrete array, got one inside a JAX transformation: call this "
            "outside of jit, vmap and similar."
        )
    if _is_masked(value):
        raise ValueError(
            f"{name} must hold a number in every entry, got a masked array: drop or impute masked "
            "entries first, or pass the mask as another array."
        )
    try:
        array = _validate.as_array(value)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) or not isinstance(value, (list, tuple)):
            # "from None": NumPy's own message may quote an entry.
            raise ValueError(_no_numbers(name, _validate.shown(value))) from None
        raise ValueError(
            f"rows of {name} must all have one shape, got a ragged {type(value).__name__}: "
            "pad the rows, or summarise them to a fixed number of columns."
        ) from None
    # Of a pandas column, what pandas calls it: NumPy makes objects of categories, too.
    dtype = _held_dtype(array.dtype, name, getattr(value, "dtype", array.dtype))
    if array.ndim == 0:
        raise ValueError(
            f"{name} must have one row per record, got a single number: "
            "pass constants of the model in model_kwargs."
        )
    return _held(array, dtype, name, missing)


def _no_numbers(name: str, received: str) -> str:
    return (
        f"{name} must hold numbers, got {received}: encode text, dates and missing values as "
        "floats, integers or booleans."
    )


def _held_dtype(dtype: Any, name: str, received: Any = None) -> np.dtype[Any]:
    """The dtype to which JAX casts an array; refuses what is not a dtype of numbers."""
    if dtype == jnp.bfloat16:  # NumPy cannot promote it
        return np.dtype(np.float32)
    kind = getattr(dtype, "kind", "")  # dtypes of JAX keys have none
    if kind == "c":
        raise ValueError(
            f"{name} must hold real numbers, got dtype {dtype}: pass real and imaginary parts as "
            "two arrays."
        )
    if kind not in "biuf" or not kind:
        received = dtype if received is None else received
        raise ValueError(_no_numbers(name, f"dtype {received}"))
    wide = np.float64 if dtype == np.longdouble else dtype
    return np.dtype(jax.dtypes.canonicalize_dtype(wide))


def _held(
    array: npt.NDArray[Any], dtype: np.dtype[Any], name: str, missing: bool
) -> npt.NDArray[Any]:
    """Cast to JAX's dtype; refuse numbers that do not fit."""
    # Messages depend on the dtype only and NumPy's warnings are suppressed, because either could
    # reveal something about a record.
    # A cast can overflow without a word: 1e39 becomes infinite in 32 bits.
    if dtype.kind == "f":
        with np.errstate(all="ignore"):
            held = array.astype(dtype, copy=False)
        # NaN alone may stand for what is missing: an infinity is a mistake in any array.
        if not np.all(np.isfinite(held) | (missing & np.isnan(array))):
            received = "infinite" if missing else "NaN or infinite"
            raise ValueError(
                f"{name} must hold finite numbers that fit JAX's {dtype}, got {received} "
                "values, or larger ones: drop or impute those records, or rescale the column."
            )
        return held
    # Without x64, JAX would silently wrap such integers around.
    if dtype.kind in "iu" and array.size > 0:
        limits = np.iinfo(dtype)
        if int(array.max()) > limits.max or int(array.min()) < limits.min:
            raise ValueError(
                f"{name} must fit JAX's {dtype}, got larger integers: convert them to floats, "
                'or write jax.config.update("jax_enable_x64", True) first.'
            )
    return array.astype(dtype, copy=False)


def _is_masked(value: Any) -> bool:
    """Whether entries are masked; NumPy drops masks when it stacks arrays."""
    if isinstance(value, (list, tuple)):
        return any(_is_masked(part) for part in value)
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _check_like_first(
    client: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    first_client: str,
    first: Mapping[str, npt.NDArray[Any]],
) -> None:
    if set(arrays) != set(first):
        raise ValueError(
            f"clients must all hold the same names, got {sorted(arrays)} from {client} and "
            f"{sorted(first)} from {first_client}: give every client the same arrays."
        )
    for key, array in arrays.items():
        if array.shape[1:] != first[key].shape[1:]:
            raise ValueError(
                f"rows of {key!r} must have one shape at all clients, got {array.shape[1:]} from "
                f"{client} and {first[key].shape[1:]} from {first_client}: "
                "give every client the same columns."
            )


def end_to_end(sizes: npt.NDArray[Any], capacity: int) -> tuple[int, npt.NDArray[Any]]:
    """How many blocks hold all clients' records, and the row where each client's begin."""
    # The largest client comes last, so that from any client's first row on there is a whole block:
    # a slice that would end behind the last row is moved, and would be another client's.
    last = int(np.argmax(sizes))
    order = np.r_[:last, last + 1 : len(sizes), last]
    starts = np.zeros(len(sizes), int)
    starts[order[1:]] = np.cumsum(sizes[order])[:-1]
    return -(-(int(starts[last]) + capacity) // capacity), starts


def _laid_out(
    clients: Sequence[Mapping[str, npt.NDArray[Any]]], missing: Collection[str]
) -> Shards:
    """Copies every client's arrays into one array per name, with zeros where there are none."""
    sizes = np.array([len(next(iter(arrays.values()))) for arrays in clients])
    # Zeros are a record like any other to a model: what keeps them out is the mask alone.
    capacity = int(sizes.max())
    num_blocks, starts = end_to_end(sizes, capacity)
    close = num_blocks < _WORTH_CLOSING_UP * len(clients)
    if not close:
        num_blocks, starts = len(clients), np.arange(len(clients)) * capacity
    records = {}
    for name, example in clients[0].items():
        # One array for all clients has one dtype: integers at one and floats at another become
        # floats.
        dtype = np.result_type(*(arrays[name].dtype for arrays in clients))
        rows = np.zeros((num_blocks * capacity, *example.shape[1:]), dtype)
        for start, size, arrays in zip(starts, sizes, clients, strict=True):
            rows[start : start + size] = arrays[name]
        # Promotion may give a third dtype that JAX cannot hold.
        held = _held_dtype(dtype, name)
        blocks = rows.reshape(num_blocks, capacity, *example.shape[1:])
        # Without a dtype, JAX compiles a copy.
        records[name] = jnp.asarray(_held(blocks, held, repr(name), name in missing), held)
    return Shards(records, _int32(sizes), _int32(starts) if close else None)


def _int32(numbers: npt.NDArray[Any]) -> jax.Array:
    return jnp.asarray(numbers.astype(np.int32), jnp.int32)
