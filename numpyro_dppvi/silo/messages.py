"""What goes between a consortium's server and a hospital's gateway, and nothing else does.

The server asks (:class:`Join`, :class:`Visit`), and the gateway answers (:class:`Ready`,
:class:`Released`) or refuses (:class:`Refused`). Both know the study, which is pinned by its
digest. So a visit carries the approximation and little else: model, method, noise, schedule and
public keys are the study's, and no message can change them.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from numpyro_dppvi import _files
from numpyro_dppvi._typing import Natural, PyTree
from numpyro_dppvi.silo import wire
from numpyro_dppvi.silo.wire import Head, MalformedError, Shapes

# The most bytes of a message beside its arrays: most of it is the header.
_BESIDES = 2**21


class Code(enum.Enum):
    """Why a gateway refuses; the value is the word that is sent."""

    MALFORMED = "malformed"
    UNKNOWN_STUDY = "unknown study"
    OTHER_HOSPITAL = "other hospital"
    NOT_PLANNED = "not planned"
    OUT_OF_ORDER = "out of order"
    OTHER_INPUT = "other input"
    USED_UP = "used up"
    FAILED = "failed"

    @property
    def sentence(self) -> str:
        """What it means, in a sentence that is the same whatever the records are."""
        return _SENTENCES[self]


_SENTENCES = {
    Code.MALFORMED: "The message is not one of this protocol and study, or was damaged.",
    Code.UNKNOWN_STUDY: "The hospital's silo.toml does not name a study with this digest.",
    Code.OTHER_HOSPITAL: "The message is for another hospital.",
    Code.NOT_PLANNED: "The study plans no such step for this hospital.",
    Code.OUT_OF_ORDER: "The hospital has released a later step already.",
    Code.OTHER_INPUT: "The hospital has been asked for this step before, with another input.",
    Code.USED_UP: "The hospital's budget does not cover this step; nothing was computed.",
    Code.FAILED: "The gateway could not answer; its own log says why.",
}


class Join(NamedTuple):
    """The server asks who this is, and whether it takes part."""

    study: str


class Visit(NamedTuple):
    """The server asks for one release. All of it was released before, or is public.

    Attributes:
        study: Digest of the study.
        hospital: The name by which the study knows the hospital.
        step: Which of the visits that the study plans for this hospital, from 1.
        taken: The last step whose release the server took, 0 for none.
        share: The share of that release's change that it accepted: the damping, or 0.
        q: The approximation, where the solve begins.
        factor: What to divide out of q; ``None`` where the hospital keeps its factors to itself.
        told: What the method's server tells its clients beside q; ``None`` for nothing.
    """

    study: str
    hospital: str
    step: int
    taken: int
    share: np.ndarray
    q: Natural
    factor: Natural | None
    told: PyTree


class Ready(NamedTuple):
    """The hospital takes part; ``released`` is the last step that it has released, 0 for none."""

    study: str
    hospital: str
    released: int


class Released(NamedTuple):
    """What leaves a hospital, made by the privacy mechanism, charged and kept before.

    Attributes:
        study: Digest of the study.
        hospital: Its name.
        step: As of the visit.
        answers: Digest of the visit's bytes.
        value: A tree of arrays; what it means is the method's to say.
        failed: Whether the solve did not end in finite numbers, as of ``protocol.Release``.
    """

    study: str
    hospital: str
    step: int
    answers: str
    value: PyTree
    failed: np.ndarray


class Refused(NamedTuple):
    """What a gateway says in the place of a release: why, and the digest of what it refuses."""

    code: Code
    answers: str


Reply: TypeAlias = Ready | Released | Refused
M = TypeVar("M", Join, Visit, Ready, Released, Refused)


class Form(NamedTuple):
    """What arrays a study's messages hold: trees of the right structure, shapes and dtypes.

    Attributes:
        q: Natural parameters.
        factor: Of the client's factor, or ``None``.
        told: What the server tells, or ``None``.
        value: What is released.
        share: A number of q's precision.
    """

    q: Natural
    factor: Natural | None
    told: PyTree
    value: PyTree
    share: Any

    @property
    def visit(self) -> Mapping[str, PyTree]:
        """The trees of a visit by name."""
        trees = {"q": self.q, "factor": self.factor, "told": self.told, "share": self.share}
        return {name: tree for name, tree in trees.items() if tree is not None}

    @property
    def release(self) -> Mapping[str, PyTree]:
        """The trees of a release by name."""
        return {"value": self.value, "failed": np.zeros((), bool)}


def encode(message: Join | Visit | Reply) -> bytes:
    """Writes a message."""
    facts: dict[str, str | int] = {}
    arrays: dict[str, np.ndarray] = {}
    kinds = _facts_of(type(message))
    for name, field in message._asdict().items():
        if name in kinds:
            facts[name] = field.value if isinstance(field, Code) else field
        else:  # a tree, as arrays by path, so that nothing of its Python types is on the wire
            arrays |= _files.flatten(field, name)
    return wire.encode(type(message).__name__.lower(), facts, arrays)


def read(kind: type[M], data: bytes, head: Head, like: Mapping[str, PyTree] = {}) -> M:
    """A message of some kind, with trees of arrays like these and no other bytes; or refuses it."""
    found = {name: type(value) for name, value in head.facts.items()}
    # Exactly these facts, of exactly these types: True does not pass for 1.
    if head.kind != kind.__name__.lower() or found != _facts_of(kind):
        raise MalformedError("the message is of another kind, or says other things")
    arrays = wire.read_arrays(data, head, shapes(like))
    trees = {name: _files.unflatten(arrays, name, tree) for name, tree in like.items()}
    # What this study's messages do not have is None.
    return kind(**{**dict.fromkeys(kind.__annotations__), **head.facts, **trees})


def read_visit(data: bytes, head: Head, form: Form) -> Visit:
    """Reads a :class:`Visit`."""
    visit = read(Visit, data, head, form.visit)
    # A share of 5 would move private factors by five times what was released.
    if not 0 <= visit.share <= 1:
        raise MalformedError("the share is not between 0 and 1")
    return visit


def read_reply(data: bytes, form: Form) -> Reply:
    """Reads what a gateway has answered."""
    if len(data) > _BESIDES + wire.num_bytes(shapes(form.release)):  # before any of it is read
        raise MalformedError("the message is larger than any reply of this study")
    head = wire.read_head(data)
    if head.kind == "ready":
        return read(Ready, data, head)
    if head.kind == "released":
        return read(Released, data, head, form.release)
    refused = read(Refused, data, head)
    try:
        return refused._replace(code=Code(refused.code))
    except ValueError:
        raise MalformedError("the reason is unknown") from None


def _facts_of(kind: type) -> dict[str, type]:
    """The fields of a message that are facts of the header, with their types; others are trees."""
    kinds = kind.__annotations__.items()
    return {name: str if of is Code else of for name, of in kinds if of in (str, int, Code)}


def shapes(trees: Mapping[str, PyTree]) -> Shapes:
    """What arrays a message of such trees holds."""
    found = {}
    for name, tree in trees.items():
        for place, leaf in _files.flatten(jax.tree.map(np.asarray, tree), name).items():
            found[place] = (leaf.shape, leaf.dtype)
    return found
