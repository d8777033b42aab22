"""What a consortium's server knows while a study is under way, and the file that it keeps it in.

A request is in the file before it is sent. A server that is killed sends the same bytes again, and
a gateway answers the same bytes with the reply that it kept: no step is released twice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numpyro_dppvi import _files
from numpyro_dppvi.privacy import Ledger
from numpyro_dppvi.protocol import algorithm
from numpyro_dppvi.protocol.server import ServerState
from numpyro_dppvi.run import loop
from numpyro_dppvi.run.checkpoint import history_of
from numpyro_dppvi.run.history import History
from numpyro_dppvi.silo import wire
from numpyro_dppvi.silo.study import Prepared

_KIND = "checkpoint of a consortium"
_FACTS = {"study": (str,), "slot": (int,), "rounds": (int,), "taken": (dict,), "charged": (list,)}
# Bytes; most of them list the releases that have arrived.
_MOST_FACTS = 2**26


class Taken(NamedTuple):
    """The last step whose release arrived, 0 for none, and the share of it that was accepted."""

    step: int = 0
    share: float = 0.0


class Counts(NamedTuple):
    """Incidents of the round under way, as of ``protocol.RoundInfo``."""

    projected: int = 0
    rejected: int = 0
    failed: int = 0


class Progress(NamedTuple):
    """What the server knows. All of it was released, or is public."""

    slot: int  # how many groups, or with asynchronous hospitals how many releases, are done with
    known: ServerState  # its state
    history: History  # of the rounds that have ended
    counts: Counts  # of the round that has not
    taken: Mapping[str, Taken]  # by hospital
    # Visits whose replies have not been dealt with, as they were sent, by hospital.
    asked: Mapping[str, bytes]
    # Every release that has arrived: round, number of the hospital, and its step.
    charged: tuple[tuple[int, int, int], ...]


def first(prepared: Prepared) -> Progress:
    """What the server knows before anybody was asked."""
    known = prepared.first_state().server
    return Progress(0, known, loop.no_history(known.natural), Counts(), {}, {}, ())


def ledger(prepared: Prepared, progress: Progress) -> Ledger:
    """The releases that have arrived, as the study plans them."""
    # A hospital's own ledger may have one more, whose reply never came.
    plan = prepared.plan
    if plan is None:
        return Ledger()
    # As if each had been visited alone; the step is there so that none is counted twice.
    each = (algorithm.entries(plan, r, np.array([[m]])) for r, m, _ in progress.charged)
    return plan.ledger().charge(entry for entries in each for entry in entries)


def write(path: Path, prepared: Prepared, progress: Progress) -> None:
    """Keeps what the server knows; on the disk when it returns."""
    facts = {
        "study": prepared.digest,
        "slot": progress.slot,
        # How long the history's arrays are, which whoever reads them has to know before.
        "rounds": len(progress.history.movement),
        "taken": {name: list(taken) for name, taken in progress.taken.items()},
        "charged": [list(charge) for charge in progress.charged],
    }
    arrays = _files.flatten(progress.known, "known") | _files.flatten(progress.history, "history")
    arrays["counts"] = np.array(progress.counts, np.int32)
    # As they were sent, to the byte: a gateway that kept its reply knows the request by its digest.
    arrays |= {f"asked/{n}": np.frombuffer(x, np.uint8) for n, x in progress.asked.items()}
    _files.write(path, _KIND, facts, arrays)


def read(path: Path, prepared: Prepared) -> Progress:
    """What :func:`write` has kept, or the beginning if there is no such file."""
    begin = first(prepared)
    if not path.exists():
        return begin
    most = _files.Most(_MOST_FACTS, wire.MOST_BYTES)
    facts, arrays = _files.read(path, _KIND, kinds=_FACTS, most=most)
    if facts["study"] != prepared.digest:
        raise ValueError(
            f"the checkpoint {path} belongs to another study file: write another path, or restore "
            "that file."
        )
    try:
        return _progress(begin, facts, arrays)
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged, because {error}: restore it from a copy.") from error


def _progress(begin: Progress, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> Progress:
    rounds = facts["rounds"]
    if rounds < 0 or facts["slot"] < 0:
        raise ValueError("it counts below 0")
    projected, rejected, failed = arrays["counts"].tolist()
    return Progress(
        slot=facts["slot"],
        known=_files.unflatten(arrays, "known", begin.known),
        history=history_of(begin.history, arrays, rounds),
        counts=Counts(projected, rejected, failed),
        taken={name: Taken(int(step), float(s)) for name, (step, s) in facts["taken"].items()},
        asked={
            name.removeprefix("asked/"): array.astype(np.uint8).tobytes()
            for name, array in arrays.items()
            if name.startswith("asked/")
        },
        charged=tuple((int(r), int(m), int(step)) for r, m, step in facts["charged"]),
    )
