"""The gateway that owns a hospital's records: bytes in, a release or a refusal out.

Records, secret keys, private factors and ledger are here and nowhere else. What is answered depends
on records in one way: through the value of a release, which a privacy mechanism has made. Studies
are opened and records checked before the first message is read, so that what is wrong with them
shows on the hospital's own terminal alone.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import latents
from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.privacy import BudgetExceededError, ClientPlan, SecretKeys
from numpyro_dppvi.protocol import server
from numpyro_dppvi.protocol.client import Client, ClientState
from numpyro_dppvi.protocol.messages import Answer, Request
from numpyro_dppvi.silo import loading, messages, settings, store, wire
from numpyro_dppvi.silo.messages import Code, Join, Ready, Refused, Released, Visit
from numpyro_dppvi.silo.settings import Caps, Settings
from numpyro_dppvi.silo.store import Reserved, Store
from numpyro_dppvi.silo.study import Prepared, Step, load_study, prepare

_LOG = logging.getLogger(__name__)
# For what a message has beside its arrays: the header, with a line or two for each array.
_ROOM = 2**20


class RefusedError(Exception):
    """A message that is not answered by a release; carries nothing but why."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.sentence)
        self.code = code


@dataclass(frozen=True)
class OpenStudy:
    """A study that the hospital allows, with its records. Sensitive, as its client is."""

    prepared: Prepared  # what follows from the study; public
    number: int  # which of the study's clients the hospital is
    client: Client = dataclasses.field(repr=False)  # it, with its first state
    steps: tuple[Step, ...]  # the visits that are planned for it

    def request(self, visit: Visit) -> Request:
        """What the client is asked. Keys and learning rate are the study's own."""
        # From the study, and not from the message: round, group and keys are what everybody
        # reviewed.
        step = self.steps[visit.step - 1]
        problem, params = self.prepared.assembly.problem, self.prepared.assembly.params
        _, key = server.round_keys(problem, self.prepared.round_key(step.round))
        key = server.public_key(problem, server.public_key(problem, key, step.group), self.number)
        q, factor, told = jax.tree.map(jnp.asarray, (visit.q, visit.factor, visit.told))
        return Request(q, factor, key, params.learning_rate, told, step.round, step.group)


class Gateway:
    """Answers messages; one at a time, whoever asks. Make one by :func:`open_gateway`.

    Args:
        name: The hospital's name.
        caps: The most that it gives away.
        kept: Its folder, which is locked.
        studies: Those that it allows, by digest.
    """

    def __init__(
        self, name: str, caps: Caps, kept: Store, studies: Mapping[str, OpenStudy]
    ) -> None:
        self.name, self.caps, self.store, self.studies = name, caps, kept, dict(studies)
        self._one_at_a_time = threading.Lock()

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest message that any of its studies has, and some room."""
        visits = [messages.shapes(opened.prepared.form.visit) for opened in self.studies.values()]
        return _ROOM + max((wire.num_bytes(shapes) for shapes in visits), default=0)

    def handle(self, message: bytes) -> bytes:
        """Answers a message, whatever its bytes. Raises nothing.

        Args:
            message: A ``Join`` or a ``Visit``.

        Returns:
            The bytes of a ``Ready``, ``Released`` or ``Refused``.
        """
        # Two messages at once could both find that a step is not reserved yet, and charge it twice.
        with self._one_at_a_time:
            try:
                return self._answer(message)
            except RefusedError as refusal:
                code = refusal.code
            except wire.MalformedError:
                code = Code.MALFORMED
            # An error's text may show records, so nothing of it may leave, whatever it is.
            except Exception as error:  # noqa: BLE001
                code = Code.FAILED
                _LOG.error("the gateway failed: %s", _where(error))
        # The reply says which of a fixed list of reasons it was. What is refused depends on public
        # state and on the message, never on a record.
        _LOG.warning("refused: %s", code.sentence)
        return messages.encode(Refused(code, wire.digest(message)))

    def _answer(self, message: bytes) -> bytes:
        head = wire.read_head(message)
        opened = self.studies.get(str(head.facts.get("study")))
        if opened is None:
            raise RefusedError(Code.UNKNOWN_STUDY)
        digest = opened.prepared.digest
        if head.kind == "join":
            messages.read(Join, message, head)
            return messages.encode(Ready(digest, self.name, self.store.released(digest)))
        visit = messages.read_visit(message, head, opened.prepared.form)
        # Of the bytes and not of what they say: there is one way to write a message (wire).
        reserved = Reserved(visit.step, wire.digest(message))
        self._check(opened, visit)
        before = self.store.reserved(digest)
        # One step, one input: two answers to two inputs under one charge would be two releases.
        if before.get(visit.step, reserved) != reserved:
            raise RefusedError(Code.OTHER_INPUT)
        if visit.step in before:
            # The server has lost our reply, or was killed: the same bytes again reveal nothing
            # more.
            reply = self.store.reply(digest, reserved)
            if reply is not None:
                _LOG.info("step %d: the reply that was kept is sent again", visit.step)
                return reply
        # An older step is never begun after a newer one: private factors have moved on.
        if any(step > visit.step for step in before):
            raise RefusedError(Code.OUT_OF_ORDER)
        client = self._settled(opened, visit)
        request = opened.request(visit)
        # Charged, on the disk, before anything is computed. If the gateway is killed in between,
        # the step is computed at the next call, with new noise: nobody has seen the first attempt.
        if visit.step not in before:
            client = self._charged(client, request, digest, reserved)
        return self._released(client, request, digest, reserved)

    def _check(self, opened: OpenStudy, visit: Visit) -> None:
        """Refuses a visit that no honest server of the study sends."""
        if visit.hospital != self.name:
            raise RefusedError(Code.OTHER_HOSPITAL)
        if not 1 <= visit.step <= len(opened.steps):
            raise RefusedError(Code.NOT_PLANNED)
        q = jax.tree.map(jnp.asarray, visit.q)
        # An improper q would make NaN of every gradient. Clipping takes these to zero, and a budget
        # would be spent on noise alone.
        if not bool(opened.prepared.assembly.problem.family.in_domain(q)):
            raise RefusedError(Code.MALFORMED)

    def _settled(self, opened: OpenStudy, visit: Visit) -> Client:
        """The client, following what the server has taken of its last release."""
        client, digest = opened.client, opened.prepared.digest
        last = self.store.released(digest)
        # Nobody can have taken what was not released.
        if visit.taken > last:
            raise RefusedError(Code.MALFORMED)
        if not last or client.state.private is None:
            return client
        private = client.state.private
        # As of the last release: what private factors were before it, and by what they move if the
        # server has taken it.
        was, kept = self.store.private(digest, last, (private, private))
        client = dataclasses.replace(client, state=ClientState(was), unanswered=kept)
        # A last release that the server never took moved q by nothing, and must move no factor.
        share = jnp.asarray(visit.share if visit.taken == last else 0 * visit.share)
        return client.settle(Answer(share, jax.tree.map(jnp.asarray, visit.q)))

    def _charged(self, client: Client, request: Request, digest: str, reserved: Reserved) -> Client:
        ledger = self.store.ledger()
        # Counted over all studies, whatever their epsilons: a limit that a person can check.
        if len(ledger.entries) >= self.caps.releases:
            raise RefusedError(Code.USED_UP)
        # The charge and the reservation are one line of the ledger file: neither is there without
        # the other.
        ledger = dataclasses.replace(ledger, run=store.label(digest, reserved))
        client = dataclasses.replace(client, ledger=ledger, ledger_file=self.store.ledger_file)
        try:
            client = client.charged(request)
        except BudgetExceededError:
            raise RefusedError(Code.USED_UP) from None
        _LOG.info("step %d is charged: epsilon %.4g", reserved.step, client.ledger.spent()[0])
        return client

    def _released(self, client: Client, request: Request, digest: str, reserved: Reserved) -> bytes:
        after, release = client.released(request)
        # On the host before anything is written: a device's error shows here, and not in half a
        # file.
        value, failed = jax.device_get((release.value, release.failed))
        step, answers = reserved
        reply = messages.encode(
            Released(digest, self.name, step, answers, value, np.asarray(failed))
        )
        private: PyTree = None
        if client.state.private is not None:
            private = jax.device_get((client.state.private, after.unanswered))
        self.store.keep(digest, reserved, reply, private)
        _LOG.info("step %d is released", step)
        return reply


@contextlib.contextmanager
def open_gateway(
    path: str | os.PathLike[str], *, insecure_noise_seed: int | None = None
) -> Iterator[Gateway]:
    """A hospital's gateway, while the block lasts; no other one can run on its store.

    Args:
        path: Its ``silo.toml``.
        insecure_noise_seed: For tests only: makes the noise reproducible, and removable.

    Raises:
        ValueError: If the file, a study or the records are not as they should be, or a study asks
            for less privacy than the hospital allows; says which.
        RuntimeError: If another gateway runs on the store.
    """
    mine = settings.read(path)
    kept = Store(mine.store, mine.caps.budget)
    with kept.locked():
        kept.ledger()  # a damaged one is refused before anybody asks
        yield Gateway(mine.name, mine.caps, kept, open_studies(mine, insecure_noise_seed))


def open_studies(mine: Settings, insecure_noise_seed: int | None = None) -> dict[str, OpenStudy]:
    """The studies that a hospital allows, with its records."""
    records = loading.load(mine)
    keys = SecretKeys(insecure_noise_seed)
    opened = {}
    for allowed in mine.studies:
        prepared = prepare(load_study(allowed.file, allowed.sha256), keys)
        try:
            opened[prepared.digest] = _opened(mine, prepared, records)
        except ValueError as error:
            # For the hospital's own terminal: nothing has been listened to yet.
            raise ValueError(f"{allowed.file}: {error}") from None
    return opened


def _opened(mine: Settings, prepared: Prepared, records: Mapping[str, np.ndarray]) -> OpenStudy:
    study, assembly = prepared.study, prepared.assembly
    if mine.name not in study.hospitals:
        raise ValueError(
            f"the study names no hospital {mine.name!r}, but {', '.join(study.names)}: write one "
            "of these as name in silo.toml, if it is this hospital's."
        )
    # Every cap is one on a plan: without noise there would be nothing to hold against them.
    if prepared.plan is None:
        raise ValueError("the study adds no noise, which no hospital allows.")
    number = study.names.index(mine.name)
    plan = prepared.plan.clients[number]
    _check_allowed(mine.caps, plan)
    if prepared.run.trusted is not None and not mine.caps.trusted_aggregator:
        raise ValueError(
            "the study's releases carry a share of the noise, for a trusted aggregator to add up, "
            "and [caps] in silo.toml does not allow that: write trusted_aggregator = true there, "
            "if whoever runs the server may see them."
        )
    rows = _rows(prepared, records, study.hospitals[mine.name])
    problem = assembly.problem
    of_one_client = {name: jnp.asarray(array)[None] for name, array in rows.items()}
    latents.check_missing(problem.space.plain, of_one_client, np.zeros((1, 1), int), ["records"])
    is_record = jnp.ones((1, study.hospitals[mine.name]), bool)
    latents.check_records(problem.space.plain, of_one_client, is_record)
    # All clients' arrays have as many rows as the largest has, as in one process.
    capacity = max(study.hospitals.values())
    padded = {name: _padded(array, capacity) for name, array in rows.items()}
    private = None
    if problem.layout.private:
        # This hospital's; the public start has those of all, and no record is in them yet.
        private = jax.tree.map(lambda leaf: leaf[number], prepared.first_state().clients.private)
    num_records = jnp.asarray(study.hospitals[mine.name], jnp.int32)
    client = assembly.client(number, padded, num_records, ClientState(private))
    return OpenStudy(prepared, number, client, prepared.steps(number))


def _check_allowed(caps: Caps, plan: ClientPlan) -> None:
    """Refuses a study that promises less privacy than the hospital allows."""
    for name in ("relation", "unit", "max_records_per_person"):
        asked, allowed = getattr(plan.budget, name), getattr(caps.budget, name)
        # Equal, and not weaker or stronger: epsilons of other relations or units cannot be
        # compared.
        if asked != allowed:
            raise ValueError(
                f"the study protects {name} = {asked!r}, and [caps] in silo.toml allows "
                f"{allowed!r} alone."
            )
    noise = plan.mechanism.noise_multiplier
    # Written so that NaN is refused, too.
    if not noise >= caps.noise_multiplier:
        raise ValueError(
            f"the study's noise_multiplier is {noise:.4g}, and [caps] in silo.toml allows no less "
            f"than {caps.noise_multiplier:g}."
        )


def _rows(
    prepared: Prepared, records: Mapping[str, np.ndarray], num_records: int
) -> dict[str, np.ndarray]:
    """The arrays that a study asks for, in its shapes and dtypes."""
    wanted = prepared.assembly.problem.space.row
    # Columns that the study does not ask for stay out of it.
    missing = sorted(set(wanted) - set(records))
    if missing:
        raise ValueError(f"the loader returns no array {missing[0]!r}, which the study asks for.")
    for name, row in wanted.items():
        found = records[name].shape[1:], records[name].dtype
        # Exactly the dtype: a cast would be a choice about records that nobody has reviewed.
        if found != (row.shape, row.dtype):
            raise ValueError(
                f"the study asks for records of {name!r} of shape {row.shape} and {row.dtype}, and "
                f"the loader returns {found[0]} and {found[1]}."
            )
    rows = len(records[next(iter(wanted))])
    if rows != num_records:
        raise ValueError(
            f"the study says that this hospital has {num_records} records, and the loader returns "
            f"{rows}."
        )
    return {name: records[name] for name in wanted}


def _where(error: Exception) -> str:
    """An error's kind and place, without its text and the values around it."""
    # The text of an error may quote what it failed on, and a log is read by more people than
    # records are.
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"a {type(error).__name__} in {place.filename}, line {place.lineno}"


def _padded(array: np.ndarray, capacity: int) -> jax.Array:
    rows = [(0, capacity - len(array))] + [(0, 0)] * (array.ndim - 1)
    return jnp.asarray(np.pad(array, rows))
