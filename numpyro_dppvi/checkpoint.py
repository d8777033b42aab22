"""Checkpoints: a run that is killed at any moment and started again goes on where it was.

The file holds what was released: factors, history, and what every client was charged. Before a
round starts, its charge is on the disk; before anything of a round is shown, its result is. A round
whose charge was written and whose result was not is run again under that charge: nothing of the
first attempt has left the process. One write after each round does both, for the round that has
ended and the one that begins.

What clients keep to themselves (the private factors of ``VirtualClients`` and of runs under a
trusted aggregator) lies in a file of its own beside the checkpoint. It carries no noise, must be
guarded like the data, and is removed when the run has ended.
"""

import contextlib
import glob
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_dppvi import _disk, _files
from numpyro_dppvi._result import History
from numpyro_dppvi.algorithm import entries
from numpyro_dppvi.privacy import Ledger, PrivacyPlan

try:
    import fcntl
except ImportError:  # Windows, where two processes on one checkpoint are not noticed
    fcntl = None  # type: ignore[assignment]

_KIND, _PRIVATE_KIND = "checkpoint", "private state of clients"
# What JSON types their facts are of.
_FACTS = {
    "round": (int,),
    "charged_rounds": (int,),
    "charged": (list,),
    "private_file": (str, type(None)),
    "run": (dict,),
}
_PRIVATE_FACTS = {"round": (int,)}

Description = Mapping[str, str]
"""What a run is, by aspects that people know; see ``describe.description``."""


@dataclass(frozen=True)
class Journal:
    """Where a run is kept.

    Args:
        path: The checkpoint.
        description: What the run is. Another run is refused.
        plan: The run's privacy plan; ``None`` without privacy.
        groups: The clients that each round visits.
    """

    path: Path
    description: Description
    plan: PrivacyPlan | None
    groups: tuple[np.ndarray, ...]

    def keep(self, state: Any, history: History) -> None:
        """Writes a state, and the charge of the round that comes next, before it starts.

        Args:
            state: The algorithm's state.
            history: What happened so far.
        """
        charged = min(state.round + 1, len(self.groups))
        private = getattr(state, "private", None)
        arrays = _files.flatten(_released(state), "state") | _files.flatten(history, "history")
        private_file = None
        if private is not None and state.round < len(self.groups):
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
        }
        _files.write(self.path, _KIND, facts, arrays, owner_only=True)
        self._discard_private(except_for=private_file)

    def resume(self, first: Any, past: History) -> tuple[Any, History]:
        """The state to go on from: what the file holds, or ``first`` if there is no file.

        Args:
            first: The state of a new run.
            past: Its history.

        Raises:
            ValueError: If the file is damaged or of another run; names what differs.
            FileNotFoundError: If the clients' private file is missing.
        """
        if not self.path.exists():
            return first, past
        most = self._most(first, past)
        facts, arrays = _files.read(self.path, _KIND, kinds=_FACTS, most=most, owner_only=True)
        self._check(facts)
        try:
            rounds, charged = facts["round"], facts["charged_rounds"]
            self._check_rounds(first, facts)
            state = self._state(first, facts, arrays)
            history = _history(past, arrays, rounds)
        except ValueError as error:
            raise ValueError(
                f"{self.path} is damaged, because {error}: restore it from a copy, or start anew "
                "with another path, at its full cost."
            ) from error
        if facts["charged"] != self._charged(charged):
            raise ValueError(
                f"{self.path} does not say what this run's plan charges for {charged} rounds: it "
                "was changed, or written by another version; restore it from a copy."
            )
        return state, history

    def _state(self, first: Any, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
        rounds = facts["round"]
        released = _files.unflatten(arrays, "state", _released(first))
        state = first._replace(**released, round=rounds, ledger=self._ledger(first.ledger, rounds))
        if facts["private_file"] is None:
            return state
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
            most=_files.Most(facts=2**16, arrays=_files.size(first.private)),
            owner_only=True,
        )
        if kept_facts["round"] != rounds:
            raise ValueError(f"{place.name} is of another round")
        return state._replace(private=_files.unflatten(kept, "private", first.private))

    def _most(self, first: Any, past: History) -> _files.Most:
        """How much the checkpoint of this run can hold."""
        rounds = len(self.groups)
        words = json.dumps([self._charged(rounds), dict(self.description)], indent=1)
        a_round = sum(
            math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(past)
        )
        arrays = _files.size(_released(first)) + rounds * a_round
        return _files.Most(facts=len(words) + 2**16, arrays=arrays)

    def _check_rounds(self, first: Any, facts: Mapping[str, Any]) -> None:
        """Refuses numbers of rounds that no checkpoint of this run has."""
        rounds, end = facts["round"], len(self.groups)
        if not 0 <= rounds <= end or facts["charged_rounds"] != min(rounds + 1, end):
            raise ValueError(f"it is after round {rounds} of {end} with another number charged")
        has_private = getattr(first, "private", None) is not None and rounds < end
        if facts["private_file"] != (self._private_name(rounds) if has_private else None):
            raise ValueError("it names another private file than it has")

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another run, by name."""
        theirs = facts["run"]
        for name, mine in self.description.items():
            if theirs.get(name) != mine:
                raise ValueError(
                    f"the checkpoint {self.path} is of a run with another {name}: it has "
                    f"{_short(theirs.get(name))}, and this call {_short(mine)}; write the "
                    "arguments that it was started with, or another path."
                )

    def _charged(self, rounds: int) -> list[dict[str, Any]]:
        """What all clients are charged for some rounds, as the file says it."""
        if self.plan is None:
            return []
        clients = self.plan.clients
        visits = np.zeros(len(clients), int)
        for groups in self.groups[:rounds]:
            visits += np.bincount(groups.ravel(), minlength=len(clients))
        return [
            {
                "client": number,
                "event": repr(client.mechanism.dp_event),
                "releases": int(visits[number]) * client.releases_per_visit,
            }
            for number, client in enumerate(clients)
        ]

    def _ledger(self, empty: Ledger, rounds: int) -> Ledger:
        """The ledger after some rounds."""
        if self.plan is None:
            return empty
        charged = [entries(self.plan, number, self.groups[number]) for number in range(rounds)]
        return empty.charge(entry for of_round in charged for entry in of_round)

    def _private_name(self, rounds: int) -> str:
        return f"{self.path.name}.private-{rounds}"

    def _discard_private(self, except_for: str | None) -> None:
        for place in self.path.parent.glob(f"{glob.escape(self.path.name)}.private-*"):
            if place.name != except_for:
                place.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second process away, which would release rounds under the same charge.

        Raises:
            RuntimeError: If another process runs on this checkpoint.
            ValueError: If the checkpoint is a link: it would be replaced and not followed.
        """
        _disk.check_place(self.path)
        _disk.refuse_link(self.path)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with _disk.open_or_create(lock) as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RuntimeError(
                        f"another process runs on the checkpoint {self.path}: wait for it, or give "
                        "this run another path."
                    ) from None
            _files.discard_partial(self.path)
            yield


def _released(state: Any) -> dict[str, Any]:
    """The arrays of a state that were released, by name."""
    return {
        name: part
        for name, part in state._asdict().items()
        if name not in ("round", "ledger", "private") and part is not None
    }


def _history(past: History, arrays: Mapping[str, np.ndarray], rounds: int) -> History:
    like = jax.tree.map(lambda leaf: np.zeros((rounds, *leaf.shape[1:]), leaf.dtype), past)
    return jax.tree.map(np.asarray, _files.unflatten(arrays, "history", like))


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= 100 else f"{text[:97]}..."
