"""Data as users have it: arrays, tables and clients with names, laid out as shards."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Model, PRNGKey, Records
from numpyro_dppvi.latents.arguments import Asked, asked_of
from numpyro_dppvi.latents.tables import (
    Table,
    arguments_of,
    is_one_party,
    is_records,
    is_table,
    matrix_columns,
)
from numpyro_dppvi.records import Partition, Shards, split_evenly, stack, stack_clients
from numpyro_dppvi.records.clients import check_counts, names_of
from numpyro_dppvi.records.shards import record_arrays

Data: TypeAlias = Records | Sequence[Records] | Mapping[str, Records] | Table


class LaidOut(NamedTuple):
    """All clients' records."""

    shards: Shards  # the records; all else is public
    sizes: tuple[int, ...]  # records of each client
    names: tuple[str, ...]  # of the clients; empty if they have none
    called: tuple[str, ...]  # what messages call each client's data
    # By argument whose array came as a table, the names of its columns.
    columns: Mapping[str, tuple[str, ...]] = {}


def lay_out(
    data: Data,
    clients: int | Partition | None,
    rng_key: PRNGKey,
    model: Model,
    model_kwargs: Mapping[str, Any],
) -> LaidOut:
    """Checks the data and lays it out.

    NaN passes: whether an array may hold it is a question to the model (``latents.check_missing``).

    A mapping is one party's records where its values are arrays, and clients by name where they
    are all mappings or tables; unless its keys are arguments of the model, whose tables are
    matrices then. Of a table's columns, those that the model has arguments for are records.
    """
    asked = asked_of(model, model_kwargs)
    if is_one_party(data, asked):
        _check_one_party(data, asked)
        records = arguments_of(data, asked, "data")
        found = _split(record_arrays(records, "data", records), clients, rng_key)
        return found._replace(columns=matrix_columns([records], ["data"]))
    names: tuple[str, ...] = ()
    if isinstance(data, Mapping):
        names, data = names_of(list(data), len(data)), list(data.values())
    _check_per_client(data)
    if clients is not None:
        raise ValueError(
            "data is already one mapping per client, so clients must not be given, got "
            f"{_validate.shown(clients)}: leave it out."
        )
    called = names or tuple(f"client {number}" for number in range(len(data)))
    # Every message about records names the client who can mend them.
    theirs = tuple(f"{name}'s data" for name in called)
    parts = [arguments_of(part, asked, name) for name, part in zip(theirs, data, strict=True)]
    columns = matrix_columns(parts, called)
    shards = stack_clients(parts, names, missing=frozenset().union(*parts))
    sizes = tuple(int(n) for n in np.asarray(shards.num_records))
    return LaidOut(shards, sizes, names, theirs, columns)


def pooled_shapes(shards: Shards, num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of all clients' records together, which is what a model is written for."""
    return {
        name: jax.ShapeDtypeStruct((num_rows, *leaf.shape[2:]), leaf.dtype)
        for name, leaf in shards.records.items()
    }


def _split(
    pooled: Mapping[str, np.ndarray], clients: int | Partition | None, rng_key: PRNGKey
) -> LaidOut:
    """One party's records, split over clients."""
    if not isinstance(clients, Partition):
        num_rows = len(next(iter(pooled.values())))
        clients = 1 if clients is None else clients
        if not isinstance(clients, int | np.integer):
            instead = 'write clients=10, or clients=Partition.from_labels(table["city"])'
            if isinstance(clients, Mapping):
                instead = "pass clients' own data as data={...}, and leave clients= out"
            raise ValueError(
                f"clients must be a whole number or a Partition, got {_validate.shown(clients)}: "
                f"{instead}."
            )
        check_counts(num_rows, clients, "clients")
        clients = split_evenly(rng_key, num_rows, clients)
    # NaN passes in every array: see `lay_out`.
    shards = stack(pooled, clients, missing=pooled)
    return LaidOut(shards, clients.sizes, clients.names, ("data",) * len(clients.sizes))


def _check_one_party(data: Any, asked: Asked) -> None:
    """Refuses a mapping of some clients' records and some arrays."""
    # A model that takes any argument may mean its keys so: nobody can tell.
    if is_table(data) or asked.anything:
        return
    # Parts that have what the whole has are no matrices.
    names = [set(getattr(part, "columns", part)) for part in data.values() if is_records(part)]
    if 1 < len(data) == len(names) and all(set(data) <= mine for mine in names):
        raise ValueError(
            "data must not call clients as the model calls its arguments, got "
            f"{_validate.shown(next(iter(data)))} for both: write other names, or a list of the "
            "clients' data."
        )
    clients = [name for name, part in data.items() if is_records(part) and name not in asked.names]
    if clients:
        array = next(name for name, part in data.items() if not is_records(part))
        raise ValueError(
            "data must be one party's arrays by argument or clients by name, got both: "
            f"{_validate.shown(clients[0])} is a table or mapping and no argument of the model, "
            f"and {_validate.shown(array)} is neither: put each client's arrays into a "
            "mapping of its own."
        )


def _check_per_client(data: Any) -> None:
    """Refuses data that is neither one party's records nor a sequence of them."""
    is_list = isinstance(data, Sequence) and not isinstance(data, (str, bytes, bytearray))
    wrong = [part for part in data if not is_records(part)] if is_list else []
    if wrong:
        received = f"a {type(data).__name__} that holds an object of type {type(wrong[0]).__name__}"
    elif not is_list:
        received = _validate.shown(data)
    elif not data:
        received = "an empty list"
    else:
        return
    raise TypeError(
        "data must be a mapping from the model's arguments to arrays or a table with such columns, "
        "or a list of these, one per client, or a mapping of these by the clients' names, got "
        f'{received}: write data={{"X": X, "y": y}}, or dict(iter(groups)) for a grouped table.'
    )
