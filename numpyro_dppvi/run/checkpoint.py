"""Checkpoints: a run that is killed at any moment and started again goes on where it was.

The file holds what was released: factors, history, and what every client was charged. Before a
round starts, its charge is on the disk; before anything of a round is shown, its result is. A round
whose charge was written and whose result was not is run again under that charge: nothing of the
first attempt has left the process. One write after each round does both, for the round that has
ended and the one that begins.

With a ledger file, too, the two files have to agree on which result is a run's newest, or a copy of
the checkpoint could release a round a second time under its one charge. The ledger decides: a
result is written beside the checkpoint, the ledger says that it is kept, and then it gets the
checkpoint's name. A process that is killed between the last two has kept it, and one that is killed
before has not. A copy that is not what the ledger calls the newest is refused.

What clients keep to themselves (the private factors of ``VirtualClients`` and of runs under a
trusted aggregator) lies in a file of its own beside the checkpoint. It carries no noise, must be
guarded like the data, and is removed when the run has ended.
"""

import contextlib
import glob
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from numpyro_dppvi import _disk, _files
from numpyro_dppvi.privacy import Ledger, LedgerFile, PrivacyPlan
from numpyro_dppvi.privacy.ledger_file import random_name
from numpyro_dppvi.protocol import schedules
from numpyro_dppvi.protocol.algorithm import PVIState, entries
from numpyro_dppvi.run import parts
from numpyro_dppvi.run.history import History

_KIND, _PRIVATE_KIND = "checkpoint", "private state of clients"
# The facts in each kind of file, with the types that JSON may give them.
_FACTS = {
    "round": (int,),
    "charged_rounds": (int,),
    "charged": (list,),
    "private_file": (str, type(None)),
    "run": (dict,),
    "parts": (list,),
    "ledger": (dict, type(None)),
}
_PRIVATE_FACTS = {"round": (int,)}

Description = Mapping[str, str]
"""What a run is, by aspects that people know; see ``run.description``."""


def read(path: Path, ledger_file: LedgerFile | None) -> parts.Past | None:
    """What a locked checkpoint says before it is known of what run; ``None`` without one."""
    beside = _beside(path)
    if beside.exists():
        if ledger_file is not None:
            facts = _files.read_facts(beside, _KIND, kinds=_FACTS, owner_only=True)
            # Both files have reached some point of the same write: the ledger says which.
            names = _names(beside, facts)
            newest = ledger_file.newest(names["run"])
            if newest == names["kept"]:
                beside.replace(path)  # killed when the ledger had it, and before it had its name
            elif newest == names["replaces"]:
                beside.unlink()  # killed before the ledger had it
            # Else one of the files is an older copy, and `resume` asks the ledger about the
            # checkpoint.
        elif not path.exists():
            # The first write of a run with a ledger file, which comes before its first round: such
            # a run has released nothing.
            beside.unlink()
    return past(path)


def past(path: Path) -> parts.Past | None:
    """The same of a checkpoint that another process may be writing."""
    if not path.exists():
        return None
    facts = _files.read_facts(path, _KIND, kinds=_FACTS, owner_only=True)
    try:
        found = parts.from_json(facts["parts"])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(_damaged(path, "it does not say what it was planned from")) from error
    run_name = None if facts["ledger"] is None else _names(path, facts)["run"]
    # Without privacy nothing was planned for the rounds that are left.
    ended = facts["round"] == found[-1].num_rounds or not found[-1].budgets
    method = str(facts["run"].get("method"))
    return parts.Past(found, ended, run_name, method)


def _names(path: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    """The names that a ledger file knows a run and its results by."""
    names = facts["ledger"] or {}
    # A file may come from anybody: what a ledger is asked by must be text, and nothing else.
    if names.keys() != {"run", "kept", "replaces"} or {type(n) for n in names.values()} != {str}:
        raise ValueError(_damaged(path, "it does not say what the ledger file knows it by"))
    return dict(names)


def _damaged(path: Path, why: object) -> str:
    return (
        f"{path} is damaged, because {why}: restore it from a copy, or start anew with another "
        "path, at its full cost."
    )


def _beside(path: Path) -> Path:
    """Where a result lies before the ledger file says that it is kept."""
    return path.with_name(f".{path.name}.next")


class Continued(NamedTuple):
    """An ended run that is about to be continued."""

    description: Description
    num_rounds: int


@dataclass(frozen=True)
class Journal:
    """Where a run is kept."""

    path: Path
    description: Description
    plan: PrivacyPlan | None
    groups: tuple[np.ndarray, ...]
    ledger_file: LedgerFile | None = None
    continued: Continued | None = None

    @property
    def lacks_charge(self) -> bool:
        """Whether the charge of the round that comes first is yet to be written."""
        return self.continued is not None or not self.path.exists()

    def keep(self, state: Any, history: History) -> Any:
        """Writes a state, and the charge of the round that comes next, before it starts.

        Where another process has gone on from a copy of the checkpoint, it is a ValueError, and
        this state must not be shown.
        """
        # The round that comes next is charged in the same write that keeps this one's result, so
        # that no moment exists in which a round may run and is not paid.
        charged = min(state.round + 1, len(self.groups))
        private = self._of_clients(state.clients.private)
        arrays = _files.flatten(_released(state), "state") | _files.flatten(history, "history")
        # At the end nothing needs what carries no noise: no file is written, the last is removed.
        private_file = None
        if private is not None and state.round < len(self.groups):
            # A name for each round, written before the checkpoint that names it: the file of the
            # round before stays until this checkpoint is in place. So whenever the process dies,
            # the private file that the checkpoint names is there.
            private_file = self._private_name(state.round)
            _files.write(
                self.path.with_name(private_file),
                _PRIVATE_KIND,
                {"round": state.round, "warning": "guard this file like the data"},
                _files.flatten(private, "private"),
                owner_only=True,
            )
        facts = {
            "round": state.round,
            "charged_rounds": charged,
            "charged": self._charged(charged),
            "private_file": private_file,
            "run": dict(self.description),
            "parts": parts.to_json(self.plan, len(self.groups)),
            "ledger": None,
        }
        if self.ledger_file is None:
            _files.write(self.path, _KIND, facts, arrays, owner_only=True)
        else:
            name, ledger = random_name(), state.ledger
            # What it replaces is said, too, so that `read` can tell a write that was broken off.
            facts["ledger"] = {"run": ledger.run, "kept": name, "replaces": ledger.kept}
            beside = _beside(self.path)
            _files.write(beside, _KIND, facts, arrays, owner_only=True)
            try:
                ledger = self.ledger_file.keep(ledger, name)
            except ValueError:
                # The ledger has nothing of it. What must not be shown must not lie about, either.
                beside.unlink()
                raise
            # Not flushed: where a loss of power undoes it, `read` does it again.
            beside.replace(self.path)
            # The next charge shows this name, and is refused if another result is the newest by
            # then.
            state = state._replace(ledger=ledger)
        # Last: until the checkpoint has its name, the one before may still be needed, and its file.
        self._discard_private(except_for=private_file)
        return state

    def _of_clients(self, private: Any) -> Any:
        """Without what stands after the last client, where clients are spread over devices."""
        if private is None or self.plan is None:
            return private
        # So that a run may go on with another number of devices.
        num_clients = len(self.plan.clients)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:num_clients], private)

    def resume(self, first: Any, past: History) -> tuple[Any, History]:
        """The state to go on from: what the file holds, or ``first`` if there is no file.

        A file that is damaged, of another run, or an older copy is refused, and says what differs.
        """
        if not self.path.exists():
            return first, past
        # A file cannot be larger than this run makes it; a hostile one is refused before it is
        # read.
        most = self._most(first, past)
        facts, arrays = _files.read(self.path, _KIND, kinds=_FACTS, most=most, owner_only=True)
        self._check(facts)
        if self.continued is not None and first.clients.private is not None:
            raise ValueError(
                f"the run of {self.path} cannot be continued: what its clients kept to themselves "
                "(the factors of shards) was removed when it ended; start a new run, with "
                "ledger_file= to count both."
            )
        try:
            rounds, charged = facts["round"], facts["charged_rounds"]
            # These two numbers and the name of the private file come from the file and are used
            # below to build arrays and a path: they are checked before anything else.
            self._check_rounds(first, facts)
            state = self._state(first, facts, arrays)
            history = history_of(past, arrays, rounds)
        except ValueError as error:
            raise ValueError(_damaged(self.path, error)) from error
        # Computed anew from this call's plan: a file whose charges were lowered does not go on.
        if facts["charged"] != self._charged(charged):
            raise ValueError(
                f"{self.path} does not say what this run's plan charges for {charged} rounds: it "
                "was changed, or written by another version; restore it from a copy."
            )
        if self.ledger_file is not None:
            # Under the run's old name: under the new one of `first` its rounds would be charged
            # again.
            names = _names(self.path, facts)
            ledger = self._ledger(replace(first.ledger, run=names["run"]), rounds)
            ledger = self.ledger_file.rejoin(replace(ledger, kept=names["kept"]))
            state = state._replace(ledger=ledger)
        self._discard_private(except_for=facts["private_file"])
        return state, history

    def _state(self, first: Any, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
        rounds = facts["round"]
        released = _files.unflatten(arrays, "state", _released(first))
        clients = first.clients._replace(pulled=released.pop("pulled", None))
        state = first._replace(
            round=rounds,
            server=first.server._replace(**released),
            clients=clients,
            ledger=self._ledger(first.ledger, rounds),
        )
        if facts["private_file"] is None:
            return state
        # `_check_rounds` has found the name to be the one that this run writes: no checkpoint can
        # make the run read another file.
        place = self.path.with_name(facts["private_file"])
        if not place.is_file():
            raise FileNotFoundError(
                f"{place}, which holds what clients keep to themselves, is missing: put it beside "
                f"{self.path.name} again, because the run cannot go on without it."
            )
        kept_facts, kept = _files.read(
            place,
            _PRIVATE_KIND,
            kinds=_PRIVATE_FACTS,
            most=_files.Most(facts=2**16, arrays=_files.size(clients.private)),
            owner_only=True,
        )
        if kept_facts["round"] != rounds:
            raise ValueError(f"{place.name} is of another round")
        private = _files.unflatten(kept, "private", clients.private)
        return state._replace(clients=clients._replace(private=private))

    def _most(self, first: Any, past: History) -> _files.Most:
        """How much the checkpoint of this run can hold."""
        rounds = len(self.groups)
        told = [self._charged(rounds), dict(self.description), parts.to_json(self.plan, rounds)]
        # The facts as this run would write them at its end. The slack is for those not told here: a
        # few numbers and names.
        words = json.dumps(told, indent=1)
        a_round = sum(
            math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(past)
        )
        arrays = _files.size(_released(first)) + rounds * a_round
        return _files.Most(facts=len(words) + 2**16, arrays=arrays)

    def _check_rounds(self, first: Any, facts: Mapping[str, Any]) -> None:
        """Refuses numbers of rounds that no checkpoint of this run has."""
        # `keep` charges one round ahead, but for the last.
        rounds, end = facts["round"], self._end
        if not 0 <= rounds <= end or facts["charged_rounds"] != min(rounds + 1, end):
            raise ValueError(f"it is after round {rounds} of {end} with another number charged")
        has_private = first.clients.private is not None and rounds < end
        if facts["private_file"] != (self._private_name(rounds) if has_private else None):
            raise ValueError("it names another private file than it has")

    @property
    def _end(self) -> int:
        """How many rounds the run has whose checkpoint is read."""
        return self.continued.num_rounds if self.continued else len(self.groups)

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another run, by name."""
        # A continued run is first held against what it was, its rounds and budget included.
        theirs = facts["run"]
        described = self.continued.description if self.continued else self.description
        for name, mine in described.items():
            if theirs.get(name) != mine:
                raise ValueError(
                    f"the checkpoint {self.path} is of a run with another {name}: it has "
                    f"{_short(theirs.get(name))}, and this call {_short(mine)}; write the "
                    f"arguments that it was started with{_OR_CONTINUE.get(name, '')}, or another "
                    "path."
                )

    def _charged(self, rounds: int) -> list[dict[str, Any]]:
        """What all clients are charged for some rounds, as the file says it."""
        if self.plan is None:
            return []
        rows = []
        # Each part of a continued run is charged by its own plan.
        ends = [*(part.first_round for part in self.plan.parts[1:]), len(self.groups)]
        for part, end in zip(self.plan.parts, ends, strict=True):
            of_part = self.groups[part.first_round : min(end, rounds)]
            visits = schedules.num_visits(of_part, len(part.clients)).tolist()
            rows += [
                {
                    "client": number,
                    "event": repr(client.mechanism.dp_event),
                    "releases": visits[number] * client.releases_per_visit,
                }
                for number, client in enumerate(part.clients)
                if of_part
            ]
        return rows

    def _ledger(self, first: Ledger, rounds: int) -> Ledger:
        """The run's own ledger after some rounds."""
        if self.plan is None:
            return first
        # From the plan and not from the file, which `resume` compares with it: nothing that stands
        # in the file can lower what a client is charged.
        charged = [
            entries(self.plan.at(number), number, self.groups[number], first.run)
            for number in range(rounds)
        ]
        return replace(first, entries=()).charge(e for of_round in charged for e in of_round)

    def _private_name(self, rounds: int) -> str:
        return f"{self.path.name}.private-{rounds}"

    def _discard_private(self, except_for: str | None) -> None:
        for place in self.path.parent.glob(f"{glob.escape(self.path.name)}.private-*"):
            if place.name != except_for:
                place.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Keeps a second process away, which would release rounds under the same charge.

    One that runs is waited for ``patience`` seconds. A link is refused: it would be replaced and
    not followed.
    """
    _disk.check_place(path)
    _disk.refuse_link(path)
    # Never removed: a process that has opened the old one and a process that makes a new one would
    # both hold a lock.
    lock = path.with_name(f".{path.name}.lock")
    with _disk.open_or_create(lock) as file:
        if not _disk.try_lock(file, patience):
            raise RuntimeError(
                f"another process{_whose(file)} runs on the checkpoint {path}: wait for it, end "
                "it, or give this run another path."
            )
        # Only the holder of the lock writes here; who waits reads whom to ask.
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        # Under the lock, or they might be what another process is writing.
        _files.discard_partial(path)
        _files.discard_partial(_beside(path))
        yield


def _whose(file: BinaryIO) -> str:
    """The number of the process that holds a lock, as it has written it there."""
    file.seek(0)
    found = file.read(20)
    return f" ({found.decode()})" if found.isdigit() else ""


def _released(state: PVIState) -> dict[str, Any]:
    """The arrays of a state that were released, by name."""
    # What asynchronous clients have pulled is a q that the server has sent them.
    parts = {**state.server._asdict(), "pulled": state.clients.pulled}
    return {name: part for name, part in parts.items() if part is not None}


def history_of(past: History, arrays: Mapping[str, np.ndarray], rounds: int) -> History:
    """The history in a file, in the shapes of ``past``: no file can ask for more memory."""
    like = jax.tree.map(lambda leaf: np.zeros((rounds, *leaf.shape[1:]), leaf.dtype), past)
    return jax.tree.map(np.asarray, _files.unflatten(arrays, "history", like))


# How what an ended run had may become another.
_OR_CONTINUE = {
    "number of rounds": " (when all its rounds have run, it can be continued by more)",
    "budget": " (an ended run can be continued under a larger one, with a larger num_rounds)",
}


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= 100 else f"{text[:97]}..."
