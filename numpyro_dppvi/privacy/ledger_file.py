"""A ledger on disk: what a round costs is there for good before the round releases anything.

The file is text, one JSON object a line: first the budgets, then one entry a line, each with a
check over all lines before it. Lines are only ever added. A process that is killed leaves a file
that counts every release it made, and perhaps some that it did not live to make.

Every run has a random public name, which its entries carry. A run that a checkpoint keeps writes
a line, too, when a result is about to get its name in the checkpoint: from then on no older copy of
that checkpoint may go on. So a round that was charged and whose result was not kept runs again
under that charge, and no other does.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import dp_accounting as dpa

from numpyro_dppvi import _disk, _validate
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.ledger import Entry, Ledger

try:
    import fcntl
except ImportError:  # Windows, where two runs that write at the same moment are not kept apart
    fcntl = None  # type: ignore[assignment]

_SCHEMA = "numpyro_dppvi/ledger/2"
# Its entries name no run and it knows no lines of results. It is read, and goes on as the newer.
_OLDER_SCHEMA = "numpyro_dppvi/ledger/1"
# Ends a line that a killed process left unfinished. Nothing is released before its line is whole.
_UNFINISHED = b" unfinished"
# Bytes of a line at most, and what one of budgets may have beside those that it should have.
_LINE, _MORE = 2**14, 2**20
# What a line that was left unfinished is the beginning of.
_LONG = (b'{"schema": "', b'{"budgets": [')
_BEGINNINGS = (*_LONG, b'{"run": "', b'{"client": ')
# What all runs on a file agree on; epsilon and delta may be raised.
_PROTECTED = ("relation", "unit", "max_records_per_person")
_EVENTS = {
    event.__name__: event
    for event in (
        dpa.GaussianDpEvent,
        dpa.PoissonSampledDpEvent,
        dpa.SampledWithoutReplacementDpEvent,
        dpa.TruncatedSubsampledGaussianDpEvent,
        dpa.ZCDpEvent,
    )
}


def random_name() -> str:
    """A public name for a run, or for a result of one, that nothing else has."""
    return secrets.token_hex(8)


class _Seen(NamedTuple):
    """What has been read of a file.

    Attributes:
        size: In bytes.
        check: The check of the last line.
        budgets: What was promised last; ``None`` before the first line.
        entries: What was charged.
        kept: For each run that a checkpoint keeps, the names of its results in their order.
        repair: What to write first, because the file ends in the middle of a line.
    """

    size: int = 0
    check: str = ""
    budgets: tuple[PrivacyBudget, ...] | None = None
    entries: tuple[Entry, ...] = ()
    kept: Mapping[str, tuple[str, ...]] = {}
    repair: bytes = b""


class LedgerFile:
    """A ledger file; remembers how far it has read it, and reads the rest when it is asked.

    Several runs, one after the other or at the same time, may share a file: what any of them has
    spent counts for all.

    Args:
        path: The file; made when it is first needed, for its owner alone. Its folder must exist.
            No link is followed, and a file that belongs to another user is refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _validate.path("path", path)
        self._seen = _Seen()

    def spent(self, budgets: Sequence[PrivacyBudget]) -> tuple[Composition, ...]:
        """What each client has released, by the file.

        Args:
            budgets: One a client.

        Raises:
            ValueError: If the file is no ledger, damaged, or of other clients, relations or units.
            FileNotFoundError: If its folder is missing.
        """
        ledger = self.open(Ledger(tuple(budgets)))
        return tuple(ledger.composition(client) for client in range(len(budgets)))

    def open(self, ledger: Ledger) -> Ledger:
        """A ledger for a new run, with all that the file says was spent; writes nothing.

        Raises:
            ValueError: If the file is no ledger, damaged, or of other clients, relations or units.
            FileNotFoundError: If its folder is missing.
        """
        seen = self._look(ledger.budgets)
        return _caught_up(self.path, replace(ledger, run=random_name()), seen.entries)

    def rejoin(self, ledger: Ledger) -> Ledger:
        """The ledger of a run that a checkpoint kept, with all that the file says was spent.

        Args:
            ledger: What the checkpoint has of the run: its name, that of its newest result, and
                what the rounds that it kept were charged.

        Raises:
            ValueError: If the file is not the one that the run was charged in, or the checkpoint
                is an older copy; and as of :meth:`open`.
        """
        seen = self._look(ledger.budgets)
        _check_newest(self.path, ledger, seen)
        return _caught_up(self.path, ledger, seen.entries)

    def newest(self, run: str) -> str:
        """The name of a run's newest result by the file; empty if it knows of none."""
        return _newest(self._look(), run)

    def charge(self, ledger: Ledger, entries: Iterable[Entry]) -> Ledger:
        """Charges a ledger and the file; when this returns, the disk has it.

        What a run that a checkpoint keeps was charged already, for a round whose result was not
        kept, is not charged again.

        Args:
            ledger: A ledger whose entries the file has.
            entries: What is going to be released.

        Returns:
            A ledger with the file's entries and the new ones.

        Raises:
            BudgetExceededError: If a budget does not allow it. Nothing is written then.
            ValueError: If the file is no ledger, damaged, of other clients, relations or units, or
                lacks entries of ``ledger``, or if the run went on from a newer checkpoint.
        """
        entries = tuple(entries)
        with self._locked() as file:
            seen = self._read(file, ledger.budgets)
            if ledger.kept:
                _check_newest(self.path, ledger, seen)
                paid = {entry for entry in seen.entries if entry.run == ledger.run}
                entries = tuple(entry for entry in entries if entry not in paid)
            charged = _caught_up(self.path, ledger, seen.entries).charge(entries)
            seen = seen._replace(entries=charged.entries)
            self._append(file, seen, ledger.budgets, [_fields(entry) for entry in entries])
        return charged

    def keep(self, ledger: Ledger, name: str) -> Ledger:
        """Says that a result of a run is kept now, after which no older one may go on.

        Args:
            ledger: The run's ledger.
            name: A new name for the result.

        Returns:
            The ledger to go on with.

        Raises:
            ValueError: If the run went on from a newer result elsewhere: this one must not be
                shown, because its rounds' charges cover that one.
        """
        with self._locked() as file:
            seen = self._read(file, ledger.budgets)
            _check_newest(self.path, ledger, seen)
            before = seen.kept.get(ledger.run, ())
            seen = seen._replace(kept={**seen.kept, ledger.run: (*before, name)})
            self._append(file, seen, ledger.budgets, [{"run": ledger.run, "kept": name}])
        return replace(ledger, kept=name)

    def _append(
        self,
        file: BinaryIO,
        seen: _Seen,
        budgets: tuple[PrivacyBudget, ...],
        lines: list[dict[str, Any]],
    ) -> None:
        """Adds lines, after what is promised where that is new, and waits for the disk."""
        if lines and seen.budgets != budgets:
            schema = {"schema": _SCHEMA} if seen.budgets is None else {}
            lines = [{**schema, "budgets": _all_fields(budgets)}, *lines]
            seen = seen._replace(budgets=budgets)
        data, check = _encoded(lines, seen.check)
        data = seen.repair + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        self._seen = seen._replace(size=seen.size + len(data), check=check, repair=b"")

    def _look(self, budgets: Sequence[PrivacyBudget] | None = None) -> _Seen:
        """What the file has, without a change to it; nothing where there is none."""
        if not os.path.lexists(_disk.check_place(self.path)):
            return self._read(io.BytesIO(), budgets)
        with os.fdopen(_disk.open_to_read(self.path, through_links=False), "rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH)
            return self._read(file, budgets)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        new = not _disk.check_place(self.path).exists()
        with _disk.open_or_create(self.path) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                _sync_folder(self.path.parent)
            yield file

    def _read(self, file: BinaryIO, budgets: Sequence[PrivacyBudget] | None = None) -> _Seen:
        """Reads on from where it was, and checks every line."""
        seen = self._seen
        file.seek(0, os.SEEK_END)
        if file.tell() < seen.size:
            raise ValueError(_sentence(self.path, "was cut while in use"))
        file.seek(seen.size)
        found = _Found(self.path, seen.check, seen.budgets, list(seen.entries), dict(seen.kept))
        size, repair, most = seen.size, b"", len(_dumps(_all_fields(budgets or ()))) + _MORE
        while line := _line(self.path, file, most):
            size += len(line)
            if line.endswith(b"\n"):
                found.read(line[:-1])
            elif found.is_unfinished(line):
                repair = _UNFINISHED + b"\n"
            else:
                found.read(line)
                repair = b"\n"
        if found.budgets is not None and budgets is not None:
            _check_protected(self.path, found.budgets, budgets)
        entries = tuple(found.entries) if len(found.entries) > len(seen.entries) else seen.entries
        return _Seen(size, found.check, found.budgets, entries, found.kept, repair)


def _line(path: Path, file: BinaryIO, most: int) -> bytes:
    """The next line; refuses one that is longer than any of ours."""
    line = file.readline(_LINE)
    if len(line) == _LINE and line.startswith(_LONG):
        line += file.readline(most - _LINE)
    if not line.endswith(b"\n") and file.read(1):
        raise ValueError(_sentence(path, "has a line that is longer than any of a ledger"))
    return line


@dataclass
class _Found:
    """What is found in a file, line by line."""

    path: Path
    check: str
    budgets: tuple[PrivacyBudget, ...] | None
    entries: list[Entry]
    kept: dict[str, tuple[str, ...]]

    def read(self, line: bytes) -> None:
        """Takes in a line, or refuses the file."""
        if line.endswith(_UNFINISHED):
            # A whole line that somebody added this to would otherwise lose its charge.
            if not self.is_unfinished(line.removesuffix(_UNFINISHED)):
                raise ValueError(_sentence(self.path, self._fault))
            return
        try:
            fields = json.loads(line)
            older = self.budgets is None and fields["schema"] == _OLDER_SCHEMA
            claimed = None if older else fields.pop("check")
            if not older and claimed != _check(self.check, _dumps(fields)):
                raise ValueError("a changed line")
            if line != _dumps(fields if older else {**fields, "check": claimed}):
                raise ValueError("a line with something added")
            self._take(fields)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(_sentence(self.path, self._fault)) from error
        self.check = _check(self.check, line)

    def is_unfinished(self, line: bytes) -> bool:
        """Whether a line is the beginning of one: nothing was added to it, and it lacks its end.

        Zeros are what a loss of power may leave of what had not reached the disk.
        """
        line = line.rstrip(b"\0")
        if not any(line[: len(start)] == start[: len(line)] for start in _BEGINNINGS):
            return False
        try:
            json.JSONDecoder().raw_decode(line.decode("ascii", "replace"))
        except (ValueError, RecursionError):
            return True
        return False

    @property
    def _fault(self) -> str:
        return "is no ledger file" if self.budgets is None else "is damaged"

    def _take(self, fields: Mapping[str, Any]) -> None:
        if self.budgets is None and fields["schema"] not in (_SCHEMA, _OLDER_SCHEMA):
            raise ValueError("another schema")
        if fields.keys() == ({"schema", "budgets"} if self.budgets is None else {"budgets"}):
            self.budgets = tuple(PrivacyBudget(**budget) for budget in fields["budgets"])
        elif fields.keys() == {"run", "kept"}:
            run, name = _name(fields["run"]), _name(fields["kept"])
            self.kept[run] = (*self.kept.get(run, ()), name)
        else:
            self.entries.append(_entry(fields, len(self.budgets or ())))


def _entry(fields: Mapping[str, Any], num_clients: int) -> Entry:
    if fields.keys() - {"run"} != {"client", "round", "num_releases", "event"}:
        raise ValueError("other fields")
    _validate.positive_int("num_releases", fields["num_releases"])
    if _whole(fields["client"]) >= num_clients:
        raise ValueError("a client without a budget")
    return Entry(
        _whole(fields["round"]),
        _whole(fields["client"]),
        event_from_json(fields["event"]),
        _whole(fields["num_releases"]),
        _name(fields.get("run", "")),
    )


def _name(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("no name")
    return value


def _all_fields(budgets: Sequence[PrivacyBudget]) -> list[dict[str, Any]]:
    return [dict(vars(budget)) for budget in budgets]


def _caught_up(path: Path, ledger: Ledger, entries: tuple[Entry, ...]) -> Ledger:
    """The ledger with all entries of the file."""
    if ledger.entries == entries:
        return ledger
    missing = Counter(ledger.entries) - Counter(entries)
    if missing:
        raise ValueError(_lacking(path, f"{missing.total()} entries that this run was charged"))
    return replace(ledger, entries=entries)


def _newest(seen: _Seen, run: str) -> str:
    return seen.kept.get(run, ("",))[-1]


def _check_newest(path: Path, ledger: Ledger, seen: _Seen) -> None:
    """Refuses to go on from a result that is not a run's newest."""
    if _newest(seen, ledger.run) == ledger.kept:
        return
    if ledger.kept not in seen.kept.get(ledger.run, ()):
        raise ValueError(_lacking(path, "the run that the checkpoint keeps"))
    raise ValueError(
        f"the checkpoint is an older copy: the ledger file {path} says that this run went on from "
        "a newer one, and no round may be released twice under one charge; go on from that one, or "
        "start anew with another checkpoint."
    )


def _lacking(path: Path, what: str) -> str:
    return (
        f"the ledger file {path} lacks {what}: it is an older copy, or belongs to another run; put "
        "the right one there."
    )


def _encoded(lines: Sequence[Mapping[str, Any]], check: str) -> tuple[bytes, str]:
    """Some lines as the file has them, and the check of the last one."""
    encoded = []
    for fields in lines:
        line = _dumps({**fields, "check": _check(check, _dumps(fields))})
        check = _check(check, line)
        encoded.append(line + b"\n")
    return b"".join(encoded), check


def _fields(entry: Entry) -> dict[str, Any]:
    return {
        "run": entry.run,
        "client": entry.client,
        "round": entry.round,
        "num_releases": entry.num_releases,
        "event": event_to_json(entry.event),
    }


def _check_protected(
    path: Path, theirs: Sequence[PrivacyBudget], mine: Sequence[PrivacyBudget]
) -> None:
    """Refuses a file of other clients, or of clients that protect something else."""
    if len(theirs) != len(mine):
        raise ValueError(
            f"the ledger file {path} was made for {len(theirs)} clients, got {len(mine)}: "
            f"{_ELSEWHERE}"
        )
    for number, (their, my) in enumerate(zip(theirs, mine, strict=True)):
        for name in _PROTECTED:
            was, now = getattr(their, name), getattr(my, name)
            if was != now:
                raise ValueError(
                    f"the ledger file {path} was made for {name}={was!r} of client {number}, got "
                    f"{now!r}: {_ELSEWHERE}"
                )


_ELSEWHERE = (
    "all runs on a file are of the same clients and protect the same; write ledger_file= with a "
    "new name if nothing was ever released about these records."
)


def _sentence(path: Path, fault: str) -> str:
    return (
        f"{path} {fault}, and what was spent cannot be told from it: restore the right file, or "
        "write ledger_file= with a new name if nothing was ever released about these records."
    )


def _check(previous: str, line: bytes) -> str:
    """Ties a line to all lines before it."""
    return hashlib.sha256(previous.encode() + line).hexdigest()[:16]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, default=lambda number: number.item()).encode("ascii")


def event_to_json(event: dpa.DpEvent) -> dict[str, Any]:
    """An event in JSON's values; :func:`event_from_json` is the inverse, to the last bit."""
    name = type(event).__name__
    if _EVENTS.get(name) is not type(event):
        raise TypeError(f"a ledger file has no words for a {name}.")
    fields = {field.name: getattr(event, field.name) for field in type(event).__attrs_attrs__}
    return {
        name: {
            field: event_to_json(value) if isinstance(value, dpa.DpEvent) else value
            for field, value in fields.items()
        }
    }


def event_from_json(value: Any) -> dpa.DpEvent:
    """The inverse of :func:`event_to_json`; refuses what that does not write."""
    ((name, fields),) = value.items()
    return _EVENTS[name](**{field: _FIELDS[field](inner) for field, inner in fields.items()})


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not value >= 0:
        raise ValueError("no number")
    return value


def _share(value: Any) -> float:
    if not _number(value) <= 1:
        raise ValueError("no probability")
    return value


def _plain_event(value: Any) -> dpa.DpEvent:
    if any("event" in fields for fields in value.values()):
        raise ValueError("an event within an event within an event")
    return event_from_json(value)


# How the fields of events are read, by their name.
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "noise_multiplier": _number,
    "rho": _number,
    "xi": _number,
    "sampling_probability": _share,
    "source_dataset_size": _whole,
    "sample_size": _whole,
    "dataset_size": _whole,
    "truncated_batch_size": _whole,
    "event": _plain_event,
}


def _sync_folder(folder: Path) -> None:
    """Makes the name of a new file durable, too."""
    if os.name != "posix":
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def composition_to_json(composition: Composition) -> list[Any]:
    """What was released in JSON's values, in an order that is always the same."""
    return [[event_to_json(event), count] for event, count in sorted(composition, key=repr)]


def composition_from_json(value: Sequence[Any]) -> Composition:
    """The inverse of :func:`composition_to_json`."""
    return accounting.compose((event_from_json(event), int(count)) for event, count in value)
