"""The loop over rounds: one after the other, shown, kept on disk, and stopped by Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dppvi._typing import Natural, PRNGKey
from numpyro_dppvi.privacy import BudgetExceededError
from numpyro_dppvi.protocol.algorithm import Algorithm
from numpyro_dppvi.protocol.rounds import RoundInfo
from numpyro_dppvi.records import Shards, SpreadShards
from numpyro_dppvi.run.checkpoint import Journal
from numpyro_dppvi.run.history import History
from numpyro_dppvi.run.settling import Arrival, Course


class LoopEnd(NamedTuple):
    """How far a run got."""

    state: Any  # the algorithm's state after the last round that ran
    history: History  # what happened, round by round
    interrupted: bool  # whether somebody stopped it
    refused: bool  # whether the ledger did, because other runs have used up a budget
    # When its path had arrived; ``None`` if it had not, or nobody can tell.
    arrival: Arrival | None = None


def run_rounds(
    algorithm: Algorithm,
    first: Any,
    past: History,
    rng_key: PRNGKey,
    shards: Shards | SpreadShards,
    num_rounds: int,
    journal: Journal | None,
    show: Callable[[int, float], None],
    course: Course | None = None,
) -> LoopEnd:
    """Runs the rounds that are left.

    With a journal the charge of a round is on the disk before the round starts, and what the round
    gave is on the disk before anything of it is shown. ``show`` is called after each round with its
    number and movement. ``num_rounds`` are all, with those before ``first``. Without a ``course``
    nobody can tell how the run arrives.
    """
    rows: list[History] = []
    state, interrupted, refused = first, False, False
    # A function of the history alone: a run that was broken off goes on as it would have.
    arrival = None if course is None else course.arrival(past)

    def ends() -> bool:
        return state.round >= num_rounds or (arrival is not None and arrival.ends(state.round))

    try:
        with _graceful_interrupt() as stop:
            # Other rounds are charged with the result of the one before them.
            if journal is not None and journal.lacks_charge:
                with stop.held():
                    state = journal.keep(state, past)
            while not stop.requested and not ends():
                # Until `state` is moved on below, the round has not happened to whoever sees the
                # run.
                share = 1.0 if arrival is None else arrival.share(state.round)
                after, info = algorithm.step(rng_key, state, shards, share)
                with stop.held():
                    rows.append(row(after.natural, info))
                    if journal is not None:
                        after = journal.keep(after, joined(past, rows))
                    state = after
                if course is not None and arrival is None:
                    arrival = course.look(joined(past, rows))
                show(state.round - 1, float(rows[-1].movement))
            interrupted = stop.requested
    except KeyboardInterrupt:  # the second one: the round under way is given up
        interrupted = True
    except BudgetExceededError:
        # Before any round there is nothing to return; the error says what to do.
        if not state.round:
            raise
        refused = True  # what was released is not thrown away
    # A row whose result could not be kept is left out: history and state must end alike.
    done = joined(past, rows[: state.round - first.round])
    return LoopEnd(state, done, interrupted, refused, arrival)


def row(natural: Natural, info: RoundInfo) -> History:
    """What a round adds to the history, on the host."""
    movement, *counts = jax.device_get(info)
    return History(jax.device_get(natural), movement, *(np.asarray(x, np.int32) for x in counts))


def joined(past: History, rows: list[History]) -> History:
    """A history with some rounds more."""
    if not rows:
        return past
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), past, stacked)


def no_history(natural: Natural) -> History:
    """The history of no round at all."""
    none = jax.tree.map(lambda leaf: np.zeros((0, *leaf.shape), leaf.dtype), natural)
    counts = (np.zeros(0, np.int32) for _ in range(3))
    return History(none, np.zeros(0, jax.tree.leaves(none)[0].dtype), *counts)


class _Stop:
    """The wish to stop, and what must not be broken off for it."""

    def __init__(self) -> None:
        self.requested = False  # whether Ctrl-C was pressed
        self._busy = False

    def __call__(self, number: int, frame: Any) -> None:
        """What Ctrl-C does: asks the first time, breaks off the second."""
        # A second Ctrl-C while a result is kept changes nothing: the loop ends right after it.
        if self.requested and not self._busy:
            signal.default_int_handler(number, frame)
        self.requested = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While a round's result is kept, which takes a moment, nothing is broken off."""
        # A file that was broken off in the middle raises errors of its own, which hide the Ctrl-C.
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


@contextlib.contextmanager
def _graceful_interrupt() -> Iterator[_Stop]:
    """Makes the first Ctrl-C a request to stop after the round; only the second is an exception."""
    # A round is one compiled program, which no signal stops: what has been computed by the time it
    # returns would otherwise be thrown away, although it has been charged.
    stop = _Stop()
    if (
        # Python lets the main thread alone handle signals.
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield stop  # whoever handles signals goes on handling them
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
