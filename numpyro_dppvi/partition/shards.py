"""Records of all clients as padded arrays with one leading client axis."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from numpyro_dppvi.partition.clients import Partition


class Shards(NamedTuple):
    """Records of all clients in arrays of one shape, padded with zeros to the largest client.

    Sensitive: this is the data itself.

    Attributes:
        records: Name of a model argument -> array of shape `(num_clients, capacity, ...)`. Rows
            from `num_records` on are zeros and no records; `mask` tells them apart.
        num_records: The number of records of each client, int32, shape `(num_clients,)`. Public.
    """

    records: dict[str, jax.Array]
    num_records: jax.Array

    @property
    def capacity(self) -> int:
        """The number of rows that every client is padded to; right inside `vmap`, too."""
        return int(next(iter(self.records.values())).shape[self.num_records.ndim])

    @property
    def mask(self) -> jax.Array:
        """True where a row is a record, shape `(num_clients, capacity)`; right inside `vmap`."""
        return jnp.arange(self.capacity) < self.num_records[..., None]


def stack(data: Mapping[str, npt.ArrayLike], partition: Partition) -> Shards:
    """Stack pooled data into one padded array per name, client by client.

    Args:
        data: Name -> array with one row per record on the leading axis, `(num_rows, ...)`.
        partition: The rows of each client.

    Returns:
        The shards. float64 becomes JAX's default float; integers and booleans stay what they are.

    Raises:
        ValueError: If arrays differ in length or are no numbers, or the partition names rows that
            the data does not have.
    """
    arrays = record_arrays(data, "data")
    num_rows = len(next(iter(arrays.values())))
    highest = max(int(rows.max()) for rows in partition.rows)
    if highest >= num_rows:
        raise ValueError(
            f"partition must name rows that data has, got row {highest} for {num_rows} rows "
            f"counted from 0: build the partition for {num_rows} rows."
        )
    return _pad([{name: array[rows] for name, array in arrays.items()} for rows in partition.rows])


def stack_clients(data_per_client: Sequence[Mapping[str, npt.ArrayLike]]) -> Shards:
    """Stack data that is already held client by client.

    Args:
        data_per_client: For every client a mapping of name -> array with one row per record on the
            leading axis, `(num_records, ...)`; the same names and trailing axes at every client.

    Returns:
        The shards. Where clients hold different dtypes under one name, NumPy's promotion decides.

    Raises:
        ValueError: If there are no clients, a client has no records, or clients' names or trailing
            axes differ.
    """
    if isinstance(data_per_client, Mapping):
        raise ValueError(
            f"data_per_client must be a sequence with one mapping per client, got one mapping of "
            f"{list(data_per_client)}: write [data_a, data_b], or stack(data, partition)."
        )
    if len(data_per_client) == 0:
        raise ValueError(
            "data_per_client must hold at least one client, got an empty sequence: "
            'write [{"X": X, "y": y}], with one mapping per client.'
        )
    clients = [
        record_arrays(data, f"client {client}'s data")
        for client, data in enumerate(data_per_client)
    ]
    for client, arrays in enumerate(clients):
        _check_like_first(client, arrays, clients[0])
    return _pad(clients)


def record_arrays(data: Any, name: str) -> dict[str, npt.NDArray[Any]]:
    """Return data as NumPy arrays of one length that hold finite numbers and at least one record.

    Raises:
        ValueError: In a sentence that names the array, and shows no record nor how many are at
            fault.
    """
    if not isinstance(data, Mapping) or len(data) == 0:
        received = "an empty mapping" if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise ValueError(
            f"{name} must map names to arrays, got {received}: "
            'write {"X": X, "y": y}, with the names of the model\'s arguments.'
        )
    arrays = {key: _number_array(value, f"{name}[{key!r}]") for key, value in data.items()}
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"arrays of {name} must have one row per record, got unequal lengths {lengths}: "
            "give them all the same number of rows."
        )
    if 0 in lengths.values():
        raise ValueError(
            f"{name} must hold at least one record, got empty arrays: leave such a client out."
        )
    return arrays


def _number_array(value: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """Return one array of data, or refuse what JAX cannot hold unchanged."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"rows of {name} must all have one shape, got a ragged {type(value).__name__}: "
            "pad the rows, or summarise them to a fixed number of columns."
        ) from error
    if array.dtype.kind not in "biufc":
        raise ValueError(
            f"{name} must hold numbers, got dtype {array.dtype}: "
            "encode text, dates and missing values as floats, integers or booleans."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name} must have one row per record, got a single number: "
            "pass constants of the model in model_kwargs."
        )
    if not np.all(np.isfinite(array)):
        raise ValueError(
            f"{name} must hold finite numbers, got NaN or infinite values: drop or impute those "
            "records first."
        )
    # JAX without x64 would wrap such integers around in silence.
    if array.dtype.kind in "iu" and array.size > 0:
        held = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
        if array.max() > held.max or array.min() < held.min:
            raise ValueError(
                f"{name} must fit JAX's {held.dtype}, got larger integers: convert them to floats, "
                'or write jax.config.update("jax_enable_x64", True) first.'
            )
    return array


def _check_like_first(
    client: int, arrays: Mapping[str, npt.NDArray[Any]], first: Mapping[str, npt.NDArray[Any]]
) -> None:
    if set(arrays) != set(first):
        raise ValueError(
            f"clients must all hold the same names, got {sorted(arrays)} from client {client} and "
            f"{sorted(first)} from client 0: give every client the same arrays."
        )
    for key, array in arrays.items():
        if array.shape[1:] != first[key].shape[1:]:
            raise ValueError(
                f"rows of {key!r} must have one shape at all clients, got {array.shape[1:]} from "
                f"client {client} and {first[key].shape[1:]} from client 0: "
                "give every client the same columns."
            )


def _pad(clients: Sequence[Mapping[str, npt.NDArray[Any]]]) -> Shards:
    """Copy every client's arrays into one array of zeros per name, then hand them to JAX."""
    sizes = [len(next(iter(arrays.values()))) for arrays in clients]
    capacity = max(sizes)
    records = {}
    for name, example in clients[0].items():
        dtype = np.result_type(*(arrays[name].dtype for arrays in clients))
        padded = np.zeros((len(clients), capacity, *example.shape[1:]), dtype)
        for client, arrays in enumerate(clients):
            padded[client, : sizes[client]] = arrays[name]
        records[name] = jnp.asarray(padded)
    return Shards(records, jnp.asarray(sizes, jnp.int32))
