"""A ledger on disk: a round's charge is durable before the round releases anything.

The file is text with one JSON object per line: first the budgets and the clients' names, if they
have any, then one entry per line, each with a hash over all lines before it. Lines are only ever
appended.

Crash protocol. A charge is written and synced to disk before anything is computed, so a process
killed at any time leaves a file that covers every release it made, and at most one round more. A
last line without a newline was being written when the process died; its release never happened,
and the next writer marks it as unfinished.

Resuming. Every run has a random public name, which its entries carry. With a checkpoint, a round
that was charged but not saved may be computed again under the same charge, from the same state.
That is safe only for the newest checkpoint: an older copy would release rounds a second time. So
every checkpoint has a random name, the ledger file records it before the checkpoint replaces the
previous one, and only the newest name in the file may resume.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import dp_accounting as dpa

from numpyro_dppvi import _disk, _validate
from numpyro_dppvi.privacy import accounting, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.ledger import Entry, Ledger, check_names
from numpyro_dppvi.privacy.loss_distributions import fields_of

_SCHEMA = "numpyro_dppvi/ledger/2"
# Appended to a line that a killed process left unfinished.
_UNFINISHED = b" unfinished"
# The most bytes of a line of an entry, of a client in a line of budgets and names, and its slack.
_LINE, _CLIENT, _MORE = 2**14, 2**11, 2**20
# The most bytes of a line where it is not known how many clients there are.
_MOST = 2**28
# The possible beginnings of lines, to recognise unfinished ones.
_LONG = (b'{"schema": "', b'{"budgets": [')
_BEGINNINGS = (*_LONG, b'{"run": "')
# Fields of a budget that all runs on a file must share; epsilon and delta may change.
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
    """A unique public name for a run or a checkpoint."""
    return secrets.token_hex(8)


class _Seen(NamedTuple):
    """The contents of a file, as far as they have been read."""

    size: int = 0  # in bytes
    check: str = ""  # the hash in the last line
    # The newest budgets; ``None`` before the first line.
    budgets: tuple[PrivacyBudget, ...] | None = None
    names: tuple[str, ...] = ()  # the clients' names; empty if no run has had any
    entries: tuple[Entry, ...] = ()  # what was charged
    # For each run with a checkpoint, the names of its checkpoints in order.
    kept: Mapping[str, tuple[str, ...]] = {}
    repair: bytes = b""  # what to write first if the file ends in an unfinished line


class LedgerFile:
    """A ledger file that several runs may share, one after another or at the same time.

    What any of the runs has spent counts against the budgets of all.

    Args:
        path: The file, which is created when first needed, readable by its owner only. Its folder
            must exist. Links and files that belong to another user are refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _validate.path("path", path)
        self._seen = _Seen()

    def spent(
        self,
        budgets: Sequence[PrivacyBudget],
        besides: str | None = None,
        names: tuple[str, ...] = (),
    ) -> tuple[Composition, ...]:
        """What each client has released so far according to the file.

        Args:
            budgets: One per client.
            besides: The public name of a run whose releases are left out.
            names: The clients' names; empty if they have none.

        Raises:
            ValueError: If the file is damaged, not a ledger file, or was made for other clients,
                names, relations or units.
            FileNotFoundError: If its folder is missing.
        """
        ledger = self.open(Ledger(tuple(budgets), client_names=names))
        # A run that is continued plans anew for what it has itself released.
        others = tuple(entry for entry in ledger.entries if entry.run != besides)
        ledger = replace(ledger, entries=others)
        return tuple(ledger.composition(client) for client in range(len(budgets)))

    def charged_by(self, runs: Collection[str]) -> set[int]:
        """The numbers of the clients that some runs were charged for.

        Args:
            runs: The runs' public names.
        """
        return {entry.client for entry in self._look().entries if entry.run in runs}

    def names(self, num_clients: int) -> tuple[str, ...]:
        """The clients' names in the file; empty if it has none, or another number of clients.

        Args:
            num_clients: How many clients a run has.
        """
        names = self._look().names
        return names if len(names) == num_clients else ()

    def open(self, ledger: Ledger) -> Ledger:
        """A ledger for a new run that includes everything in the file; writes nothing.

        Clients without names have those of the file then.

        Raises:
            ValueError: As :meth:`spent`.
            FileNotFoundError: If its folder is missing.
        """
        seen = self._look(ledger)
        return _caught_up(self.path, replace(ledger, run=random_name()), seen)

    def rejoin(self, ledger: Ledger) -> Ledger:
        """The ledger of a resumed run, including everything in the file.

        Args:
            ledger: The checkpoint's ledger: the run's name, the checkpoint's name, and the entries
                of the saved rounds.

        Raises:
            ValueError: If the run was not charged in this file, or the checkpoint is an older
                copy; and as :meth:`spent`.
        """
        seen = self._look(ledger)
        _check_newest(self.path, ledger, seen)
        return _caught_up(self.path, ledger, seen)

    def newest(self, run: str) -> str:
        """The name of a run's newest checkpoint in the file; empty if there is none."""
        return self._look().kept.get(run, ("",))[-1]

    def charge(self, ledger: Ledger, entries: Iterable[Entry]) -> Ledger:
        """Charges a ledger and the file; the charge is on disk when this returns.

        A run with a checkpoint is not charged again for a round that it was charged for but did
        not save.

        Args:
            ledger: A ledger whose entries are in the file.
            entries: What is about to be released.

        Returns:
            A ledger with the file's entries and the new ones.

        Raises:
            BudgetExceededError: If a budget does not allow it. Nothing is written then.
            ValueError: If the file lacks entries of ``ledger``, or the run has a newer
                checkpoint; and as :meth:`spent`.
        """
        entries = tuple(entries)
        with self._locked() as file:
            seen = self._read(file, ledger)
            if ledger.kept:
                # The process that died may have charged this round and not saved it. Nobody
                # has seen what it computed, so that the newest checkpoint may compute it again.
                _check_newest(self.path, ledger, seen)
                paid = {entry for entry in seen.entries if entry.run == ledger.run}
                entries = tuple(entry for entry in entries if entry not in paid)
            # The lock is held from reading to writing: two runs at once cannot both find room for
            # one charge.
            charged = _caught_up(self.path, ledger, seen).charge(entries)
            seen = seen._replace(entries=charged.entries)
            self._append(file, seen, ledger, [_fields(entry) for entry in entries])
        return charged

    def keep(self, ledger: Ledger, name: str) -> Ledger:
        """Records that a checkpoint is about to be saved; older ones can no longer resume.

        Args:
            ledger: The run's ledger.
            name: A new name for the checkpoint.

        Returns:
            The ledger to continue with.

        Raises:
            ValueError: If the run has a newer checkpoint elsewhere. This result must not be shown
                then, because the charges cover that one.
        """
        with self._locked() as file:
            seen = self._read(file, ledger)
            _check_newest(self.path, ledger, seen)
            before = seen.kept.get(ledger.run, ())
            # Names are appended, and the last one counts: older checkpoints stay known as older
            # ones.
            seen = seen._replace(kept={**seen.kept, ledger.run: (*before, name)})
            self._append(file, seen, ledger, [{"run": ledger.run, "kept": name}])
        return replace(ledger, kept=name)

    def _append(
        self, file: BinaryIO, seen: _Seen, ledger: Ledger, lines: list[dict[str, Any]]
    ) -> None:
        """Appends lines, with budgets and names before them if these are new; syncs to disk."""
        # A run without names goes on under those of the file.
        names = ledger.client_names or seen.names
        if lines and (seen.budgets, seen.names) != (ledger.budgets, names):
            schema = {"schema": _SCHEMA} if seen.budgets is None else {}
            lines = [{**schema, **_of_clients(ledger.budgets, names)}, *lines]
            seen = seen._replace(budgets=ledger.budgets, names=names)
        # One write, then fsync: after a crash at any point, the file ends in complete lines and
        # possibly a beginning of the next one.
        data, check = _encoded(lines, seen.check)
        data = seen.repair + data
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        self._seen = seen._replace(size=seen.size + len(data), check=check, repair=b"")

    def _look(self, ledger: Ledger | None = None) -> _Seen:
        """The file's contents, read only; empty if there is no file."""
        if not os.path.lexists(_disk.check_place(self.path)):
            return self._read(io.BytesIO(), ledger)
        # Shared with other readers, but not with a writer, who may be in the middle of a line.
        with os.fdopen(_disk.open_to_read(self.path, through_links=False), "rb") as file:
            _disk.lock(file, shared=True)
            return self._read(file, ledger)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        new = not _disk.check_place(self.path).exists()
        with _disk.open_or_create(self.path) as file:
            _disk.lock(file)
            if new:
                _disk.flush_folder(self.path.parent)
            yield file

    def _read(self, file: BinaryIO, ledger: Ledger | None = None) -> _Seen:
        """Reads and checks the lines that were appended since the last call."""
        # Lines before ``seen.size`` were checked earlier and are never rewritten, so only the rest
        # is read. The hash chain continues from the last checked line.
        seen = self._seen
        file.seek(0, os.SEEK_END)
        if file.tell() < seen.size:
            raise ValueError(_sentence(self.path, "was cut while in use"))
        file.seek(seen.size)
        entries, kept = list(seen.entries), dict(seen.kept)
        found = _Found(self.path, seen.check, seen.budgets, seen.names, entries, kept)
        size, repair = seen.size, b""
        # A hostile file could be one endless line: no more of it is read than an honest one has.
        most = _MOST if ledger is None else _MORE + _CLIENT * len(ledger.budgets)
        while line := _line(self.path, file, most):
            size += len(line)
            if line.endswith(b"\n"):
                found.read(line[:-1])
            elif found.is_unfinished(line):  # its charge was never acted on: drop it
                repair = _UNFINISHED + b"\n"
            else:  # a whole line that lacks only its newline
                found.read(line)
                repair = b"\n"
        if found.budgets is not None and ledger is not None:
            _check_protected(self.path, found.budgets, ledger.budgets)
            _check_names(self.path, found.names, ledger.client_names)
        charged = tuple(entries) if len(entries) > len(seen.entries) else seen.entries
        return _Seen(size, found.check, found.budgets, found.names, charged, kept, repair)


def _line(path: Path, file: BinaryIO, most: int) -> bytes:
    """The next line; refuses lines longer than the library writes."""
    line = file.readline(_LINE)
    if len(line) == _LINE and line.startswith(_LONG):
        line += file.readline(most - _LINE)
    if not line.endswith(b"\n") and file.read(1):
        raise ValueError(_sentence(path, "has a line that is too long for a ledger"))
    return line


@dataclass
class _Found:
    """A file's contents while it is being read, line by line."""

    path: Path
    check: str
    budgets: tuple[PrivacyBudget, ...] | None
    names: tuple[str, ...]
    entries: list[Entry]
    kept: dict[str, tuple[str, ...]]

    def read(self, line: bytes) -> None:
        """Takes in a line, or refuses the file."""
        if line.endswith(_UNFINISHED):
            # Otherwise, marking a complete line as unfinished would erase its charge.
            if not self.is_unfinished(line.removesuffix(_UNFINISHED)):
                raise ValueError(_sentence(self.path, self._fault))
            return
        try:
            fields = json.loads(line)
            claimed = fields.pop("check")
            if claimed != _check(self.check, _dumps(fields)):
                raise ValueError("a changed line")
            # Parsing JSON forgives spaces, duplicate keys and the like; comparing bytes does not.
            if line != _dumps({**fields, "check": claimed}):
                raise ValueError("a line with something added")
            self._take(fields)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(_sentence(self.path, self._fault)) from error
        self.check = _check(self.check, line)

    def is_unfinished(self, line: bytes) -> bool:
        """Whether a line is a proper beginning of a line that the library writes."""
        # After a power failure, zeros may stand in place of bytes that had not reached the disk.
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
        return "is not a ledger file" if self.budgets is None else "is damaged"

    def _take(self, fields: Mapping[str, Any]) -> None:
        if self.budgets is None and fields["schema"] != _SCHEMA:
            raise ValueError("another schema")
        # Lines are told apart by their fields, all of them: one with a field more is no line of
        # ours.
        header = {"schema", "budgets"} if self.budgets is None else {"budgets"}
        if fields.keys() - {"clients"} == header:
            self.budgets = tuple(PrivacyBudget(**budget) for budget in fields["budgets"])
            if "clients" in fields:
                self.names = _names(fields["clients"], len(self.budgets))
        elif fields.keys() == {"run", "kept"}:
            run, name = _name(fields["run"]), _name(fields["kept"])
            self.kept[run] = (*self.kept.get(run, ()), name)
        else:
            self.entries.append(_entry(fields, len(self.budgets or ())))


def _entry(fields: Mapping[str, Any], num_clients: int) -> Entry:
    if fields.keys() != {"run", "client", "round", "num_releases", "event"}:
        raise ValueError("other fields")
    if _whole(fields["client"]) >= num_clients:
        raise ValueError("a client without a budget")
    return Entry(
        _whole(fields["round"]),
        _whole(fields["client"]),
        event_from_json(fields["event"]),
        _validate.positive_int("num_releases", fields["num_releases"]),
        _name(fields["run"]),
    )


def _name(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("no name")
    return value


def _names(value: Any, num_clients: int) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError("no names")
    return check_names(tuple(value), num_clients)


def _of_clients(budgets: Sequence[PrivacyBudget], names: Sequence[str]) -> dict[str, Any]:
    """Budgets as the file has them, and names if there are any."""
    fields: dict[str, Any] = {"budgets": [dict(vars(budget)) for budget in budgets]}
    return fields | ({"clients": list(names)} if names else {})


def _caught_up(path: Path, ledger: Ledger, seen: _Seen) -> Ledger:
    """The ledger with all entries of the file; refuses a file that lacks some of the ledger's."""
    if seen.names and not ledger.client_names:
        ledger = replace(ledger, client_names=seen.names)
    if ledger.entries == seen.entries:
        return ledger
    # The file may have more entries (of other runs), but never fewer than this run was charged.
    missing = Counter(ledger.entries) - Counter(seen.entries)
    if missing:
        raise ValueError(_lacking(path, f"{missing.total()} entries that this run was charged"))
    return replace(ledger, entries=seen.entries)


def _check_newest(path: Path, ledger: Ledger, seen: _Seen) -> None:
    """Refuses to continue from a checkpoint that is not the run's newest."""
    names = seen.kept.get(ledger.run, ("",))
    if names[-1] == ledger.kept:
        return
    if ledger.kept not in names:
        raise ValueError(_lacking(path, "the checkpoint's run"))
    raise ValueError(
        f"the checkpoint is an older copy: the ledger file {path} knows a newer one of this run, "
        "and no round may be released twice under one charge; resume from that one, or start a "
        "new run with another checkpoint."
    )


def _lacking(path: Path, what: str) -> str:
    return (
        f"the ledger file {path} lacks {what}: it is an older copy or belongs to another run; "
        "restore the right file."
    )


def _encoded(lines: Sequence[Mapping[str, Any]], check: str) -> tuple[bytes, str]:
    """Lines as they are written to the file, and the hash in the last one."""
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
    """Refuses a file of other clients, or with other relations or units of protection."""
    if len(theirs) != len(mine):
        raise ValueError(
            f"the ledger file {path} was made for {len(theirs)} clients, got {len(mine)}: "
            f"{_ELSEWHERE}"
        )
    for number, (their, my) in enumerate(zip(theirs, mine, strict=True)):
        # Epsilons of other relations or units would be added up like pounds and kilos.
        for name in _PROTECTED:
            was, now = getattr(their, name), getattr(my, name)
            if was != now:
                raise ValueError(
                    f"the ledger file {path} was made for {name}={was!r} of client {number}, got "
                    f"{now!r}: {_ELSEWHERE}"
                )


def _check_names(path: Path, theirs: tuple[str, ...], mine: tuple[str, ...]) -> None:
    """Refuses a run whose clients have other names, or come in another order."""
    if not theirs or not mine or theirs == mine:
        return
    number = next(m for m, name in enumerate(theirs) if name != mine[m])
    raise ValueError(
        f"the ledger file {path} has client {number} under the name {theirs[number]!r}, got "
        f"{mine[number]!r}: pass the same clients in the order of the first run, "
        f"{words.listed(range(len(theirs)), theirs)}, so that each is charged what is its own."
    )


_ELSEWHERE = (
    "all runs on a file must have the same clients and protect the same unit; write ledger_file= "
    "with a new name if nothing was ever released about these records."
)


def _sentence(path: Path, fault: str) -> str:
    return (
        f"{path} {fault}, so it is unknown what was spent: restore the right file, or write "
        "ledger_file= with a new name if nothing was ever released about these records."
    )


def _check(previous: str, line: bytes) -> str:
    """A hash of a line and, through the previous line's hash, of all lines before it."""
    # 64 bits against accidents. Whoever can write the file can write its hashes, too.
    return hashlib.sha256(previous.encode() + line).hexdigest()[:16]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, default=lambda number: number.item()).encode("ascii")


def event_to_json(event: dpa.DpEvent) -> dict[str, Any]:
    """An event as JSON values; :func:`event_from_json` is its exact inverse."""
    name = type(event).__name__
    if _EVENTS.get(name) is not type(event):
        raise TypeError(f"event must be one of {', '.join(_EVENTS)}, got a {name}.")
    fields = fields_of(event).items()
    return {name: {k: event_to_json(x) if isinstance(x, dpa.DpEvent) else x for k, x in fields}}


def event_from_json(value: Any) -> dpa.DpEvent:
    """The inverse of :func:`event_to_json`; refuses anything else."""
    ((name, fields),) = value.items()
    # Constructors from a table and never by name from the file.
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


# How the fields of events are read, by name.
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


def composition_to_json(composition: Composition) -> list[Any]:
    """A composition as JSON values, in a fixed order."""
    return [[event_to_json(event), count] for event, count in sorted(composition, key=repr)]


def composition_from_json(value: Sequence[Any]) -> Composition:
    """The inverse of :func:`composition_to_json`."""
    return accounting.compose((event_from_json(event), int(count)) for event, count in value)
