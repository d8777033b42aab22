"""The consortium's server: asks hospitals through a courier, and merges what they release.

A courier is a function from a hospital's name and a message's bytes to the reply's bytes. A reply
counts only if it is of this study, hospital and step, answers the very bytes that were sent, and is
finite and no larger than an honest release can be. Anything else is logged and changes nothing.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.families import precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.privacy import Ledger, PrivacyPlan, PrivacyStatement
from numpyro_dppvi.protocol import schedules, server
from numpyro_dppvi.protocol.algorithm import PVIState
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.messages import Release
from numpyro_dppvi.protocol.rounds import RoundInfo
from numpyro_dppvi.run import checkpoint as checkpoints
from numpyro_dppvi.run import loop
from numpyro_dppvi.run.fitting import FitResult, result_of
from numpyro_dppvi.silo import bounds, messages, progress, wire
from numpyro_dppvi.silo.messages import Code, Refused, Released, Visit
from numpyro_dppvi.silo.progress import Counts, Progress, Taken
from numpyro_dppvi.silo.study import PinnedStudy, Prepared, Step, prepare

Deliver: TypeAlias = Callable[[str, bytes], bytes]
"""A courier: takes a message to a hospital and brings its reply; ``OSError`` if it cannot."""

_LOG = logging.getLogger(__name__)

# After these a hospital is not asked again in this call: its answer would be the same. Of the other
# reasons, some pass with the next step, and some a person at the hospital can mend meanwhile.
_FOR_GOOD = frozenset({Code.USED_UP, Code.UNKNOWN_STUDY, Code.OTHER_HOSPITAL})

# How long a server that is being stopped may take to let go of its checkpoint.
_LOCK_SECONDS = 15.0
_PIECE_SECONDS = 0.5

_begin_round = compiled("problem")(server.begin_round)
_request = compiled("problem")(server.request)
_take = compiled("problem")(server.take)


class Missed(NamedTuple):
    """No release of a hospital, and why."""

    why: str  # a sentence for the log
    charged: bool = False  # whether the hospital may have been charged for the step all the same
    unreached: bool = False  # whether the message may not have arrived
    code: Code | None = None  # the hospital's reason, if it gave one

    @property
    def for_good(self) -> bool:
        """Whether asking again is useless."""
        return self.code in _FOR_GOOD


def run_study(
    pinned: PinnedStudy, deliver: Deliver, *, checkpoint: str | os.PathLike[str] | None = None
) -> FitResult:
    """Runs a study over hospitals that keep their records.

    Hospitals that cannot be reached, or refuse, miss their step: the others go on. With
    asynchronous hospitals, one that cannot be reached is asked again when another has answered.

    Args:
        pinned: The study.
        deliver: The courier. Called from several threads, once at a time for each hospital.
        checkpoint: A file to keep the run in. If it is there, the run goes on where it was, and no
            hospital is asked to release a step twice.

    Returns:
        What ``fit`` returns for data by the hospitals' names; :func:`statements` has a statement
        for each. Where all hospitals have missed their steps since one has released something, the
        run ends there, and ``status`` says that it was interrupted; call this again with the same
        checkpoint to go on. With a trusted aggregator it ends so where too few have released
        something for the noise of a sum.

    Raises:
        ValueError: If the checkpoint is damaged, or of another study.
        RuntimeError: If another process runs on the checkpoint, and does not end in 15 s.
    """
    _validate.instance("pinned", pinned, PinnedStudy, "load_study('study.py')")
    _validate.function("deliver", deliver, ("hospital", "message"), "a courier")
    path = None if checkpoint is None else _validate.path("checkpoint", checkpoint)
    prepared = prepare(pinned)
    # A server that is being stopped may still hold it.
    lock = contextlib.nullcontext() if path is None else checkpoints.locked(path, _LOCK_SECONDS)
    with lock:
        begun = progress.first(prepared) if path is None else progress.read(path, prepared)
        asker = _Server(prepared, deliver, path)
        own_pace = schedules.starts_from_pulled(prepared.run.schedule)
        end = asker.at_their_own_pace(begun) if own_pace else asker.in_groups(begun)
    return _result(prepared, end)


def statements(pinned: PinnedStudy, result: FitResult) -> dict[str, PrivacyStatement]:
    """A privacy statement for each hospital, by name.

    Args:
        pinned: The study.
        result: What :func:`run_study` returned. Its ledger has the releases that arrived; a
            hospital's own may have one more.

    Raises:
        ValueError: If nothing was private, or the result is of other hospitals.
    """
    _validate.instance("pinned", pinned, PinnedStudy, "load_study('study.py')")
    _validate.instance("result", result, FitResult, "run_study(...)")
    if result.plan is None or len(result.plan.clients) != len(pinned.study.names):
        raise ValueError(
            "result must be what run_study returned for this study, got one without privacy or of "
            "other hospitals: write statements(pinned, run_study(pinned, deliver))."
        )
    found = {}
    for number, (name, plan) in enumerate(
        zip(pinned.study.names, result.plan.clients, strict=True)
    ):
        # A ledger of one client: the hospital's statement says nothing about the others.
        mine = (e._replace(client=0) for e in result.ledger.entries if e.client == number)
        found[name] = PrivacyStatement(
            type(result.method).__name__,
            PrivacyPlan((plan,), (name,)),
            Ledger((plan.budget,), entries=tuple(mine)),
            insecure_seed=False,
        )
    return found


class _End(NamedTuple):
    """How far a run got, whether it was broken off, and whether budgets did that."""

    known: Progress
    interrupted: bool
    refused: bool = False


_Came: TypeAlias = Released | Missed
_Arrivals: TypeAlias = queue.SimpleQueue[tuple[str, _Came | BaseException]]


def _next(arrivals: _Arrivals) -> tuple[str, _Came]:
    """The next reply, and whose. Raises what its delivery has raised."""
    # Waits in pieces: between them Python deals with signals that another thread was sent, as by
    # Flower, whose applications are told so that their SuperLink is gone.
    while True:
        with contextlib.suppress(queue.Empty):
            name, reply = arrivals.get(timeout=_PIECE_SECONDS)
            if isinstance(reply, BaseException):
                raise reply
            return name, reply


@dataclass(frozen=True)
class _Server:
    """The server's side of a run."""

    prepared: Prepared
    deliver: Deliver
    path: Path | None

    def in_groups(self, now: Progress) -> _End:
        """Visits group after group of the schedule; waits for all of a group."""
        names = self.prepared.study.names
        gone: dict[str, Missed] = {}
        missing: set[str] = set()  # since anybody has released anything, which left ``last``
        last = now
        groups = self.prepared.run.groups
        slots = [Step(r, g) for r, of_round in enumerate(groups) for g in range(len(of_round))]
        while now.slot < len(slots):
            at = slots[now.slot]
            # After a restart there are requests in the checkpoint: those very bytes are sent again,
            # so that gateways recognise them.
            if not now.asked:
                if at.group == 0:
                    now = self._with_begun_round(now, at.round)
                # A hospital that has said that it will never release again is not asked any more.
                here = [m for m in groups[at.round][at.group].tolist() if names[m] not in gone]
                # Too few are left for the noise of a sum.
                if len(here) < self._least:
                    return _End(last, True, Code.USED_UP in {r.code for r in gone.values()})
                steps = {m: 1 + self.prepared.steps(m).index(at) for m in here}
                now = now._replace(asked={names[m]: self._visit(now, m, steps[m]) for m in here})
                # On the disk before anything is sent (see progress).
                self._keep(now)
            # In threads, and merged in the schedule's order: the result does not depend on who is
            # fastest.
            replies = self._all_replies(now.asked)
            if sum(isinstance(reply, Released) for reply in replies.values()) < self._least:
                # Their sum has too little noise. Asked again, those who have released send the
                # replies that they kept, at no cost.
                now = self._charged(now, at, replies)
                self._keep(now)
                codes = {r.code for r in replies.values() if isinstance(r, Missed)}
                return _End(now, True, Code.USED_UP in codes)
            # Not kept until the next requests are. A server that dies before that finds these
            # requests in the file and is sent the same replies, which it merges into what was there
            # before them.
            now = self._dealt_with(now, at, replies)._replace(slot=now.slot + 1, asked={})
            # The last group of its round.
            if now.slot == len(slots) or slots[now.slot].round > at.round:
                now = self._with_ended_round(now)
            # Rounds in which nobody at all answers change nothing and would count as rounds: the
            # run is wound back to where somebody last did.
            missed = {n: reply for n, reply in replies.items() if isinstance(reply, Missed)}
            gone |= {n: reply for n, reply in missed.items() if reply.for_good}
            missing |= missed.keys() | gone.keys()
            if len(missed) < len(replies):
                missing, last = set(), now
            elif missing == set(names):
                # The same requests are sent when the run is taken up again.
                last = last._replace(charged=now.charged)
                self._keep(last)
                return _End(last, True, {r.code for r in gone.values()} == {Code.USED_UP})
        self._keep(now)
        return _End(now, False)

    def at_their_own_pace(self, now: Progress) -> _End:
        """Merges releases as they come; every hospital goes on from what its own has made of q."""
        names = self.prepared.study.names
        if not now.asked and now.slot == 0:
            now = now._replace(asked={n: self._visit(now, m, 1) for m, n in enumerate(names)})
            self._keep(now)
        arrivals: _Arrivals = queue.SimpleQueue()
        # Hospitals that could not be reached, until somebody else answers.
        waiting: set[str] = set()
        flying = set(now.asked)
        for name in flying:
            self._fly(name, now.asked[name], arrivals)
        while flying:
            name, reply = _next(arrivals)
            flying.discard(name)
            # Asked again when another hospital's release arrives, and not at once, which would be a
            # busy loop against a machine that is down.
            if isinstance(reply, Missed) and reply.unreached:
                _LOG.info("%s: %s", name, reply.why)
                waiting.add(name)
                continue
            now = self._arrived(now, name, reply)
            self._keep(now)
            for again in sorted({name, *waiting} & now.asked.keys()):
                flying.add(again)
                self._fly(again, now.asked[again], arrivals)
            waiting.clear()
        # The last releases were too few for a round: what they did is a row of history, too.
        if not now.asked and now.slot % len(names):
            now = self._with_ended_round(now)
            self._keep(now)
        return _End(now, bool(now.asked))

    def _fly(self, name: str, visit: bytes, arrivals: _Arrivals) -> None:
        def fly() -> None:
            try:
                arrivals.put((name, self._reply(name, visit)))
            except BaseException as error:  # noqa: BLE001  # raised where the run waits
                arrivals.put((name, error))

        # A daemon: whoever stops the server does not wait for hospitals.
        threading.Thread(target=fly, name=f"to {name}", daemon=True).start()

    def _arrived(self, now: Progress, name: str, reply: _Came) -> Progress:
        """After one hospital's release, or refusal, with its next visit asked."""
        names = self.prepared.study.names
        number = names.index(name)
        sent = self._sent(now.asked[name])
        # As many releases as there are hospitals make a round, whoever sent them.
        at = Step(*divmod(now.slot, len(names)))
        if isinstance(reply, Released) and at.group == 0:
            now = self._with_begun_round(now, at.round)
        now = self._dealt_with(now, at, {name: reply})
        if isinstance(reply, Released):
            now = now._replace(slot=now.slot + 1)
            if now.slot % len(names) == 0:
                now = self._with_ended_round(now)
        asked = {n: visit for n, visit in now.asked.items() if n != name}
        gone = isinstance(reply, Missed) and reply.for_good
        # Its own number of visits, as planned: a fast hospital does not release more than it was
        # budgeted.
        if not gone and sent.step < len(self.prepared.steps(number)):
            asked[name] = self._visit(now, number, sent.step + 1)
        return now._replace(asked=asked)

    @property
    def _least(self) -> int:
        """The fewest releases that are merged together."""
        trusted = self.prepared.run.trusted
        # Without an aggregator every release has all of its noise, and any number may be merged.
        return 0 if trusted is None else trusted.num_shares(len(self.prepared.study.names))

    def _sent(self, visit: bytes) -> Visit:
        return messages.read_visit(visit, wire.read_head(visit), self.prepared.form)

    def _keep(self, now: Progress) -> None:
        if self.path is not None:
            progress.write(self.path, self.prepared, now)

    def _visit(self, now: Progress, number: int, step: int) -> bytes:
        """What a hospital is asked, as it is sent."""
        assembly, known = self.prepared.assembly, now.known
        name = self.prepared.study.names[number]
        # The key is the study's, and is not sent.
        key = self.prepared.keys[1]
        # The server's own request, as in one process: q, what to divide out of it, and what is
        # told.
        asked = _request(assembly.problem, assembly.params, known, known.natural, number, key)
        taken = now.taken.get(name, Taken())
        share = np.asarray(taken.share, self.prepared.form.share.dtype)
        q, factor, told = jax.device_get((asked.q, asked.factor, asked.told))
        visit = Visit(self.prepared.digest, name, step, taken.step, share, q, factor, told)
        return messages.encode(visit)

    def _all_replies(self, asked: Mapping[str, bytes]) -> dict[str, _Came]:
        arrivals: _Arrivals = queue.SimpleQueue()
        if asked:
            _LOG.info("waiting for %s", ", ".join(asked))
        for name, visit in asked.items():
            self._fly(name, visit, arrivals)
        replies = dict(_next(arrivals) for _ in asked)
        return {name: replies[name] for name in asked}  # merged in the schedule's order

    def _reply(self, name: str, visit: bytes) -> _Came:
        try:
            # An OSError is a hospital that is away. Anything else is a fault in the courier's code,
            # and ends the run.
            data = self.deliver(name, visit)
        except OSError as error:
            return Missed(f"cannot be reached ({type(error).__name__})", unreached=True)
        if not isinstance(data, bytes):
            raise TypeError(
                f"deliver must return the bytes of a reply, got {_validate.shown(data)}: raise "
                "ConnectionError where there is no reply."
            )
        try:
            return self._read(name, visit, data)
        except wire.MalformedError as error:
            # The hospital may have released something all the same: a statement must not say too
            # little.
            return Missed(f"sent what is refused: {error}", charged=True)

    def _read(self, name: str, visit: bytes, data: bytes) -> _Came:
        """A hospital's reply, if it is what it claims to be."""
        reply, sent = messages.read_reply(data, self.prepared.form), self._sent(visit)
        # Refusals are checked as well: one of an older message must not count for this one.
        answers = wire.digest(visit)
        if isinstance(reply, Refused):
            if reply.answers != answers:
                raise wire.MalformedError("a refusal of another message")
            return Missed(reply.code.sentence, code=reply.code)
        if not isinstance(reply, Released):
            raise wire.MalformedError("no release")
        if (reply.study, reply.hospital) != (self.prepared.digest, name):
            raise wire.MalformedError("a release of another study or hospital")
        if (reply.step, reply.answers) != (sent.step, answers):
            raise wire.MalformedError("a release of another step, or from another approximation")
        number, assembly = self.prepared.study.names.index(name), self.prepared.assembly
        mine = jax.tree.map(lambda leaf: leaf[number], assembly.params.clients)
        rate = assembly.params.learning_rate
        # Finite numbers alone are no protection: 1e30 is finite.
        excess = bounds.excess(assembly.problem, mine, rate, sent.q, reply.value)
        if excess is not None and not excess <= 1:
            raise wire.MalformedError("a release larger than an honest one can be")
        return reply

    def _with_begun_round(self, now: Progress, number: int) -> Progress:
        """With the prior's own update."""
        problem, params = self.prepared.assembly.problem, self.prepared.assembly.params
        known, _ = _begin_round(problem, params, now.known, self.prepared.round_key(number))
        return now._replace(known=known, counts=Counts())

    def _dealt_with(self, now: Progress, at: Step, replies: Mapping[str, _Came]) -> Progress:
        """After a group's replies: merged, charged, and told to the log."""
        released = {n: r for n, r in replies.items() if isinstance(r, Released)}
        now = self._charged(now, at, replies)
        return self._merged(now, at, released) if released else now

    def _charged(self, now: Progress, at: Step, replies: Mapping[str, _Came]) -> Progress:
        names = self.prepared.study.names
        known = {(number, step) for _, number, step in now.charged}
        charged = [*now.charged]
        for name, reply in replies.items():
            said = reply.why if isinstance(reply, Missed) else f"released {reply.step}"
            _LOG.info("%s: %s", name, said)
            number, step = names.index(name), self._sent(now.asked[name]).step
            came = isinstance(reply, Released) or reply.charged
            if came and (number, step) not in known:  # as it may be where a round is begun again
                charged.append((at.round, number, step))
        return now._replace(charged=tuple(charged))

    def _merged(self, now: Progress, at: Step, released: Mapping[str, Released]) -> Progress:
        problem, params, _ = self.prepared.assembly
        numbers = [self.prepared.study.names.index(name) for name in released]
        each = [Release(r.value, jnp.asarray(r.failed)) for r in released.values()]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        _, key = server.round_keys(problem, self.prepared.round_key(at.round))
        # The same keys as in one process, so that a study over hospitals and fit(...) on their data
        # give the same posterior for the same noise.
        key, q = server.public_key(problem, key, at.group), now.known.natural
        known, answer, info = _take(
            problem, params, now.known, jnp.asarray(numbers), q, stacked, key
        )
        share, failed = float(answer.share), int(np.sum(stacked.failed))
        taken = {n: Taken(r.step, share) for n, r in released.items()}
        counts = Counts(
            now.counts.projected + int(info.projected),
            now.counts.rejected + int(info.rejected),
            now.counts.failed + failed,
        )
        return now._replace(known=known, taken={**now.taken, **taken}, counts=counts)

    def _with_ended_round(self, now: Progress) -> Progress:
        """With a row more of history."""
        past, after = now.history, now.known.natural
        if len(past.movement):
            before = precision.arrays(jax.tree.map(lambda leaf: leaf[-1], past.natural))
        else:
            before = self.prepared.first_state().server.natural
        movement = self.prepared.assembly.problem.family.jeffreys(before, after)
        counts = (jnp.asarray(count) for count in now.counts)
        row = loop.row(after, RoundInfo(movement, *counts))
        spent = progress.ledger(self.prepared, now).spent().tolist()
        # Without privacy nobody has spent anything, and nobody is named.
        said = [f"{n} {e:.3g}" for n, e in zip(self.prepared.study.names, spent, strict=False)]
        _LOG.info("round %d has ended; epsilon: %s", len(past.movement) + 1, ", ".join(said))
        return now._replace(history=loop.joined(past, [row]), counts=Counts())


def _result(prepared: Prepared, end: _End) -> FitResult:
    known, history, study = end.known.known, end.known.history, prepared.study
    # The server has no ledger file: names of runs and checkpoints are the hospitals' own.
    ledger = progress.ledger(prepared, end.known)
    state = PVIState(len(history.movement), known, ClientState(), ledger)
    return result_of(
        prepared.run,
        prepared.assembly.posterior(known.natural),
        prepared.plan,
        loop.LoopEnd(state, history, end.interrupted, end.refused),
        client_sizes=tuple(study.hospitals.values()),
        insecure_noise_seed=None,
        client_names=study.names,
    )
