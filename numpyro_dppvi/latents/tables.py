"""Tables, such as DataFrames: which of their columns a model asks for, and whose they are."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from numpyro_dppvi._typing import Model
from numpyro_dppvi.latents.arguments import Asked, asked_of

# A table is whatever has columns by name, such as a DataFrame of pandas or polars; neither is
# imported here, and their types would be Any to a type checker without them.
Table: TypeAlias = Any

_SHOWN = 8


def is_table(value: Any) -> bool:
    """Whether this has columns by name and is not a mapping."""
    # By what it can do: pandas and polars need not be installed for this to be read.
    # A query that has not run yet has columns, too, but no length.
    has_columns = all(hasattr(value, name) for name in ("columns", "__getitem__", "__len__"))
    return has_columns and not isinstance(value, (type, Mapping))


def is_records(value: Any) -> bool:
    """Whether this could be one client's records, by argument."""
    return isinstance(value, Mapping) or is_table(value)


def is_one_party(data: Any, asked: Asked) -> bool:
    """Whether data is one party's records, and not clients by name or in a list."""
    if is_table(data):
        return True
    if not isinstance(data, Mapping):
        return False
    # {'X': table, 'y': table} can be one party's matrices or two clients called X and y: the
    # model's arguments decide. An empty mapping is refused where arrays are read.
    each_is_records = all(is_records(part) for part in data.values())
    return not data or not each_is_records or set(data) <= set(asked.names)


def arguments_of(records: Any, asked: Asked, name: str) -> Mapping[str, Any]:
    """Records by argument: a mapping as it is, or a table's columns that the model asks for."""
    # Messages name columns, which are public, and nothing of their values.
    if not is_table(records):
        return dict(records)
    # Columns without a name, or with a number for one, can be no argument of a model.
    columns = [str(column) for column in records.columns if isinstance(column, str)]
    # Columns that the model does not ask for are left out, and never become records.
    taken = [column for column in columns if asked.anything or column in asked.names]
    missing = [argument for argument in asked.needed if argument not in taken]
    if missing or not taken:
        one = missing[0] if missing else "X"
        of = f"the columns {_listed(columns)}" if columns else "columns without plain names"
        raise ValueError(
            f"{name} must be a table with a column for each argument of the model, got a table "
            f"of {of}, without {one!r}: rename a column, or write "
            f'{{"{one}": table[["a", "b"]], ...}} for a matrix of several columns.'
        )
    repeated = [column for column in taken if taken.count(column) > 1]
    if repeated:
        raise ValueError(
            f"{name} must be a table with distinct columns, got {repeated[0]!r} more than once: "
            "rename one of them."
        )
    return {column: records[column] for column in taken}


def by_argument(records: Any, model: Model, model_kwargs: Mapping[str, Any], name: str) -> Any:
    """A table's columns that a model asks for; anything else as it is."""
    if not is_table(records):
        return records
    return arguments_of(records, asked_of(model, model_kwargs), name)


def check_clients(data: Any, model: Model, sizes: Sequence[int], names: Sequence[str]) -> None:
    """Refuses sizes of other clients than those whose records are given, if these are several."""
    if isinstance(data, Mapping):
        if is_one_party(data, asked_of(model)) or not names:
            return
        unknown = [name for name in names if name not in set(map(str, data))]
        if unknown or len(data) != len(names):
            odd = unknown or [name for name in map(str, data) if name not in names]
            which = "client_sizes" if unknown else "records"
            raise ValueError(
                f"client_sizes and records must name the same clients, got {odd[0]!r} in {which} "
                "alone: write it alike in both, or pass one client's records."
            )
    elif isinstance(data, Sequence) and 1 < len(data) != len(sizes):
        raise ValueError(
            f"client_sizes must hold one size per client, got {len(sizes)} sizes and records of "
            f"{len(data)} clients: write one size for each, or pass one client's records."
        )


def of_one_client(data: Any, model: Model, model_kwargs: Mapping[str, Any], name: str) -> Any:
    """Records by argument of one party, or of the first client of several."""
    asked = asked_of(model, model_kwargs)
    if isinstance(data, Mapping) and not is_one_party(data, asked):
        data = list(data.values())
    if isinstance(data, Sequence) and data and all(is_records(part) for part in data):
        data = data[0]
    return by_argument(data, model, model_kwargs, name)


def matrix_columns(
    parts: Sequence[Mapping[str, Any]], clients: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Names of the columns of arguments that are tables themselves, such as ``X``."""
    # All clients' must be the same, in one order, or their matrices would mean different things.
    found: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for client, part in zip(clients, parts, strict=True):
        for argument, value in part.items():
            if not is_table(value):
                continue
            columns = tuple(str(column) for column in value.columns)
            # The first client that has the table decides, and is named where another one differs.
            first.setdefault(argument, client)
            if found.setdefault(argument, columns) != columns:
                raise ValueError(
                    f"columns of {argument!r} must be the same at all clients and in one order, "
                    f"got {_listed(columns)} from {client} and {_listed(found[argument])} from "
                    f"{first[argument]}: write table[[...]] with the columns in one order."
                )
    return found


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(columns[:_SHOWN]) + (", ..." if len(columns) > _SHOWN else "")
