"""A ledger on disk: what a round costs is there for good before the round releases anything.

The file is text, one JSON object a line: first the budgets, then one entry a line, each with a
check over all lines before it. Lines are only ever added. A process that is killed leaves a file
that counts every release it made, and perhaps some that it did not live to make.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import dp_accounting as dpa

from numpyro_dppvi import _disk, _validate
from numpyro_dppvi.privacy.ledger import Entry, Ledger

try:
    import fcntl
except ImportError:  # Windows, where two runs that write at the same moment are not kept apart
    fcntl = None  # type: ignore[assignment]

_SCHEMA = "numpyro_dppvi/ledger/1"
# Ends a line that a killed process left unfinished. Nothing is released before its line is whole.
_UNFINISHED = b" unfinished"
# Bytes of a line at most, and what the first line may have beside the budgets it should have.
_LINE, _MORE = 2**14, 2**20
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


class _Seen(NamedTuple):
    """What has been read of a file.

    Attributes:
        size: In bytes.
        check: The check of the last line.
        entries: What was charged.
        repair: What to write first, because the file is new or ends in the middle of a line.
    """

    size: int
    check: str
    entries: tuple[Entry, ...]
    repair: bytes


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
        self._seen = _Seen(0, "", (), b"")

    def open(self, ledger: Ledger) -> Ledger:
        """The same ledger with all that the file says was spent; makes the file if there is none.

        Raises:
            ValueError: If the file is no ledger, damaged, or made for other budgets.
            BudgetExceededError: If the file has spent more than a budget.
        """
        return self.charge(ledger, ())

    def charge(self, ledger: Ledger, entries: Iterable[Entry]) -> Ledger:
        """Charges a ledger and the file; when this returns, the disk has it.

        Args:
            ledger: A ledger whose entries the file has.
            entries: What is going to be released.

        Returns:
            A ledger with the file's entries and the new ones.

        Raises:
            BudgetExceededError: If a budget does not allow it. Nothing is written then.
            ValueError: If the file is no ledger, damaged, made for other budgets, or lacks
                entries of ``ledger``.
        """
        entries = tuple(entries)
        with self._locked() as file:
            seen = self._read(file, ledger)
            charged = _caught_up(self.path, ledger, seen.entries).charge(entries)
            data, check = _encoded(entries, seen.check)
            data = seen.repair + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._seen = _Seen(seen.size + len(data), check, charged.entries, b"")
        return charged

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        new = not _disk.check_place(self.path).exists()
        with _disk.open_or_create(self.path) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                _sync_folder(self.path.parent)
            yield file

    def _read(self, file: BinaryIO, ledger: Ledger) -> _Seen:
        """Reads on from where it was, and checks every line."""
        seen = self._seen
        file.seek(0, os.SEEK_END)
        if file.tell() < seen.size:
            raise ValueError(_sentence(self.path, "was cut while in use"))
        file.seek(seen.size)
        size, check, entries, tail = seen.size, seen.check, list(seen.entries), b""
        while line := file.readline(_LINE if check else len(_header(ledger)) + _MORE):
            if not line.endswith(b"\n"):
                tail = _ended(self.path, file, line)
                break
            size, line = size + len(line), line[:-1]
            if line.endswith(_UNFINISHED):
                continue
            if not check:
                _check_header(self.path, line, ledger)
            else:
                entries.append(_decoded(self.path, line, check))
            check = _check(check, line)
        size += len(tail)
        if not check:  # not even the first line was finished
            header = _header(ledger)
            if not header.startswith(tail):
                _check_header(self.path, tail, ledger)
            return _Seen(size, _check("", header), (), header[len(tail) :] + b"\n")
        repair = b""
        if tail:
            try:
                entries.append(_decoded(self.path, tail, check))
                check, repair = _check(check, tail), b"\n"
            except ValueError:
                _check_unfinished(self.path, tail)
                repair = _UNFINISHED + b"\n"
        return _Seen(size, check, tuple(entries), repair)


def _ended(path: Path, file: BinaryIO, tail: bytes) -> bytes:
    """The end of a file that was cut off; refuses a line that is longer than any of ours."""
    if file.read(1):
        raise ValueError(_sentence(path, "has a line that is longer than any of a ledger"))
    return tail


def _caught_up(path: Path, ledger: Ledger, entries: tuple[Entry, ...]) -> Ledger:
    """The ledger with all entries of the file."""
    if ledger.entries == entries:
        return ledger
    missing = Counter(ledger.entries) - Counter(entries)
    if missing:
        raise ValueError(
            f"the ledger file {path} lacks {missing.total()} entries that this run was charged: it "
            "is an older copy, or belongs to another run; put the right one there."
        )
    return Ledger(ledger.budgets, ledger.affordable).charge(entries)


def _encoded(entries: tuple[Entry, ...], check: str) -> tuple[bytes, str]:
    """The lines of some entries, and the check of the last one."""
    lines = []
    for entry in entries:
        fields = {
            "client": entry.client,
            "round": entry.round,
            "num_releases": entry.num_releases,
            "event": _event_to_json(entry.event),
        }
        line = _dumps({**fields, "check": _check(check, _dumps(fields))})
        check = _check(check, line)
        lines.append(line + b"\n")
    return b"".join(lines), check


def _decoded(path: Path, line: bytes, check: str) -> Entry:
    try:
        fields = json.loads(line)
        claimed = fields.pop("check")
        if len(fields) > 4:
            raise ValueError("more than a line holds")
        entry = Entry(
            _whole(fields["round"]),
            _whole(fields["client"]),
            _event_from_json(fields["event"]),
            _whole(fields["num_releases"]),
        )
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        claimed = None
    if claimed is None or claimed != _check(check, _dumps(fields)):
        raise ValueError(_sentence(path, "is damaged"))
    return entry


def _check_unfinished(path: Path, tail: bytes) -> None:
    """Refuses an end that is more than the beginning of a line."""
    try:
        json.JSONDecoder().raw_decode(tail.decode("ascii", "replace"))
    except (RecursionError, ValueError):
        return
    raise ValueError(_sentence(path, "is damaged"))


def _header(ledger: Ledger) -> bytes:
    return _dumps({"schema": _SCHEMA, "budgets": [vars(budget) for budget in ledger.budgets]})


def _check_header(path: Path, line: bytes, ledger: Ledger) -> None:
    if line == _header(ledger):
        return
    try:
        is_ledger = json.loads(line)["schema"] == _SCHEMA
    except (KeyError, RecursionError, TypeError, ValueError):
        is_ledger = False
    raise ValueError(
        _sentence(path, "was made for other budgets" if is_ledger else "is no ledger file")
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


def _event_to_json(event: dpa.DpEvent) -> dict[str, Any]:
    name = type(event).__name__
    if _EVENTS.get(name) is not type(event):
        raise TypeError(f"a ledger file has no words for a {name}.")
    fields = {field.name: getattr(event, field.name) for field in type(event).__attrs_attrs__}
    return {
        name: {
            field: _event_to_json(value) if isinstance(value, dpa.DpEvent) else value
            for field, value in fields.items()
        }
    }


def _event_from_json(value: Any) -> dpa.DpEvent:
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
    return _event_from_json(value)


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
