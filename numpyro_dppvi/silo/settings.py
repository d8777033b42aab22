"""``silo.toml``: what a hospital has decided, read strictly and once."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import PrivacyBudget
from numpyro_dppvi.silo.study import check_name

_SHA256 = 64


@dataclass(frozen=True)
class Caps:
    """The most that a hospital gives away, over all studies together."""

    budget: PrivacyBudget  # also the relation and the unit that every study must protect
    releases: int  # the most replies that may leave
    noise_multiplier: float  # the least noise of a release, over what a unit can change in it
    # Whether a release may carry a share of that noise alone, all of which is in the sum over
    # hospitals: whoever runs the server then sees more than the budget says.
    trusted_aggregator: bool = False


@dataclass(frozen=True)
class Checks:
    """What the data officer expects of the records."""

    rows: tuple[int, int]  # the least and the largest number of them
    # For each array its ``least`` and its ``most`` value, or one of them per column; there must be
    # no other arrays. Empty for no expectations.
    columns: Mapping[str, Mapping[str, Any]]


class AllowedStudy(NamedTuple):
    """A study that was reviewed."""

    file: Path
    sha256: str


@dataclass(frozen=True)
class Settings:
    """A hospital's ``silo.toml``."""

    folder: Path  # where the file lies, and the loader's module beside it
    name: str  # of the hospital
    loader: str  # ``module:function`` that returns the records
    store: Path  # the folder of ledger, kept replies and private factors
    socket: Path  # the Unix socket
    socket_group: str | None  # the group of users who may open it, too; ``None`` for nobody else
    caps: Caps
    studies: tuple[AllowedStudy, ...]  # what was reviewed
    checks: Checks


def read(path: str | os.PathLike[str]) -> Settings:
    """Reads ``silo.toml``; refuses entries that lack, are unknown, or have a wrong value."""
    # Read strictly: a cap that is misspelt, and so ignored, would be no cap.
    target = _validate.path("path", path).absolute()
    try:
        found = tomllib.loads(target.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no file {target}: write the path of a silo.toml."
        ) from None
    except ValueError as error:
        raise ValueError(f"{target} must be a TOML file, got a syntax error: {error}.") from None
    try:
        return _settings(target.parent, found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"in {target}: {error}") from None


def _settings(folder: Path, found: Mapping[str, Any]) -> Settings:
    needed = {"name": str, "loader": str, "caps": dict, "studies": list}
    optional = {"store": str, "socket": str, "socket_group": str, "checks": dict}
    table = _table("silo.toml", found, needed, optional)
    loader = table["loader"]
    if loader.count(":") != 1 or not all(part.isidentifier() for part in loader.split(":")):
        raise ValueError(
            f"loader must be a module beside silo.toml and its function, got "
            f"{_validate.shown(loader)}: write loader = 'hospital:load'."
        )
    # Relative paths are from the file and not from where the process was started.
    store = folder / table.get("store", "store")
    if "socket_group" in table and "socket" not in table:
        raise ValueError(
            "socket must be in a folder that its group may enter, got none, which stands for the "
            "closed store: write socket = '/run/silo/silo.sock', say."
        )
    return Settings(
        folder=folder,
        name=check_name("name", table["name"]),
        loader=loader,
        store=store,
        socket=folder / table["socket"] if "socket" in table else store / "silo.sock",
        socket_group=table.get("socket_group"),
        caps=_caps(table["caps"]),
        studies=tuple(_allowed(folder, entry) for entry in table["studies"]),
        checks=_checks(table.get("checks", {})),
    )


def _caps(found: Any) -> Caps:
    numbers = {"epsilon": (int, float), "delta": float, "noise_multiplier": (int, float)}
    protected = {"relation": str, "unit": str, "max_records_per_person": int}
    protected |= {"trusted_aggregator": bool}
    table = _table("[caps]", found, {**numbers, "releases": int}, protected)
    # What is not an argument of PrivacyBudget is taken out: the rest of the table goes to it, with
    # its own defaults and checks.
    least = _validate.positive("noise_multiplier", table.pop("noise_multiplier"))
    releases = _validate.positive_int("releases", table.pop("releases"))
    # TOML has inf, and for a budget of fit it is a way to say "no noise". No hospital's cap says
    # that.
    if not table["epsilon"] < float("inf"):
        raise ValueError("epsilon must be a finite number, got inf: write epsilon = 1.0, say.")
    trusted = table.pop("trusted_aggregator", False)
    return Caps(PrivacyBudget(**table), releases, least, trusted)


def _allowed(folder: Path, found: Any) -> AllowedStudy:
    table = _table("[[studies]]", found, {"file": str, "sha256": str}, {})
    digest = table["sha256"].lower()
    if len(digest) != _SHA256 or set(digest) - set("0123456789abcdef"):
        raise ValueError(
            f"sha256 must be {_SHA256} hexadecimal digits, got {_validate.shown(digest)}: read the "
            "study, and write what `dppvi silo digest FILE` prints."
        )
    return AllowedStudy(folder / table["file"], digest)


def _checks(found: Any) -> Checks:
    table = _table("[checks]", found, {}, {"rows": list, "columns": dict})
    rows = table.get("rows", [1, _validate.MOST_INT])
    if len(rows) != 2 or rows[0] > _validate.positive_int("rows", rows[1]):
        raise ValueError(
            "rows must be the least and the largest number of them, got a list of "
            f"{len(rows)}: write rows = [100, 5000]."
        )
    least = _validate.positive_int("rows", rows[0])
    columns = {
        name: _bounds(f"[checks.columns.{name}]", entry)
        for name, entry in table.get("columns", {}).items()
    }
    return Checks((least, rows[1]), columns)


def _bounds(where: str, found: Any) -> dict[str, Any]:
    kinds = (int, float, list)
    table = _table(where, found, {"least": kinds, "most": kinds}, {})
    for name, value in table.items():
        # TOML has inf and nan: as bounds they would let everything pass, or nothing.
        for number in value if isinstance(value, list) else [value]:
            _validate.finite(name, number, "0.0")
    return table


def _table(
    where: str, found: Any, needed: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """A table of TOML with the entries that it must and may have, of their types."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a table, got {_validate.shown(found)}: see the docs.")
    kinds = {**needed, **optional}
    for name in needed.keys() - found.keys():
        raise ValueError(f"{where} must have {name}, got none: write {name} = ..., see the docs.")
    for name, value in found.items():
        if name not in kinds:
            raise ValueError(
                f"{where} must have no entry but {', '.join(kinds)}, got "
                f"{_validate.shown(name)}: take it out, or correct its spelling."
            )
        # True is an int to Python, but not to a person who reads the file.
        if not isinstance(value, kinds[name]) or isinstance(value, bool) != (kinds[name] is bool):
            raise ValueError(f"{name} in {where} has a wrong type, got {_validate.shown(value)}.")
    return dict(found)
