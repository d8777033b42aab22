"""The hospital's loader is run, and its records are held against what the data officer expects.

Errors from here are for the hospital's own terminal. A gateway loads its records before it listens,
so that nothing about them can be asked for.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.records.shards import record_arrays
from numpyro_dppvi.silo.settings import Checks, Settings


def load(settings: Settings) -> dict[str, np.ndarray]:
    """The hospital's records: arrays by argument name, as its data officer expects them.

    Others are refused by the name of the array; no record is shown.
    """
    records = _loader(settings)()
    # Whether an array may hold NaN is a question to each study's model. [checks] allows none where
    # it says a range.
    missing = tuple(records) if isinstance(records, Mapping) else ()
    arrays = record_arrays(records, "records", missing)
    check(arrays, settings.checks)
    return arrays


def _loader(settings: Settings) -> Callable[[], Any]:
    module, name = settings.loader.split(":")
    # First on the path, and gone again: the loader's module lies beside silo.toml.
    sys.path.insert(0, str(settings.folder))
    try:
        found = getattr(importlib.import_module(module), name, None)
    finally:
        sys.path.remove(str(settings.folder))
    if not callable(found):
        raise ValueError(
            f"loader must name a function, got {_validate.shown(settings.loader)}: define {name}() "
            f"in {module}.py beside silo.toml."
        )
    return found


def check(arrays: Mapping[str, np.ndarray], checks: Checks) -> None:
    """Refuses records that are not what the data officer expects; shows none."""
    rows = len(next(iter(arrays.values())))
    least, most = checks.rows
    if not least <= rows <= most:
        raise ValueError(
            f"the records must have {least} to {most} rows, got {rows}: correct the loader, or "
            "rows under [checks]."
        )
    if not checks.columns:
        return
    if arrays.keys() != checks.columns.keys():
        raise ValueError(
            f"the records must be the arrays {sorted(checks.columns)}, got {sorted(arrays)}: "
            "correct the loader, or the columns under [checks]."
        )
    for name, bounds in checks.columns.items():
        _check_range(name, arrays[name], bounds)


def _check_range(name: str, array: np.ndarray, bounds: Mapping[str, Any]) -> None:
    for word, bound in bounds.items():
        given = np.asarray(bound, float)
        # NumPy would broadcast some other shapes, to columns that they were not written for.
        if given.shape not in ((), array.shape[1:]):
            raise ValueError(
                f"{word} must be a number, or one for each column of {name}, got {given.size} "
                f"for records of shape {array.shape[1:]}: correct [checks.columns.{name}]."
            )
        # NaN is in no range.
        inside = array >= given if word == "least" else array <= given
        if not np.all(inside):
            raise ValueError(
                f"all values of {name} must be at {word} what [checks.columns.{name}] says, got "
                "others: correct the loader, or the range."
            )
