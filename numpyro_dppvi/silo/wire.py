"""How a message is written: a short header, named arrays, and a digest. Nothing is pickled.

    8 bytes    the format and its version
    4 bytes    length of the header, big-endian
    header     JSON: kind of message, facts, and name, dtype and shape of each array
    arrays     little-endian, in C order, in the header's order, with nothing between them
    32 bytes   SHA-256 of everything before

Whoever reads a message knows beforehand what arrays it must hold. From that and the facts the
header is written anew, and must come out as it was received. So there is one way to write a
message and no slack in it: no second spelling, no bytes that nobody looks at.

The digest finds accidents. It does not say who wrote a message: that is for the transport.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# Incremented with every change of the format or of what messages mean.
PROTOCOL = 1
_MAGIC = b"dppvi\0" + PROTOCOL.to_bytes(2, "big")
_LENGTH = 4
_DIGEST = hashlib.sha256().digest_size
# A header lists a few arrays a latent.
_MOST_HEADER = 2**20
_MOST_WORD = 200
_MOST_NUMBER = 2**53
MOST_BYTES = 2**32
"""The size of the largest message that anybody reads."""

Facts: TypeAlias = Mapping[str, str | int]
"""What a message says beside its arrays: short words and counts."""

Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each array that a message must hold, by name."""


class MalformedError(ValueError):
    """A message that is not what it should be. Its text repeats nothing that was received."""


class Head(NamedTuple):
    """What a message says before its arrays are looked at: its kind, and facts by name."""

    kind: str
    facts: dict[str, str | int]


def encode(kind: str, facts: Facts, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Writes a message: its kind in one word, short words and counts from 0, and arrays.

    Equal messages have equal bytes. A fact that :func:`read_head` would refuse is refused.
    """
    for value in facts.values():
        _check_fact(value)
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    header = _header(kind, facts, shapes)
    parts = [_MAGIC, len(header).to_bytes(_LENGTH, "big"), header]
    parts += [_little(arrays[name]) for name in sorted(arrays)]
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()


def read_head(data: bytes) -> Head:
    """Reads what a message says before its arrays, if it is a whole message of this version."""
    if len(data) > MOST_BYTES:
        raise MalformedError("the message is too large")
    if len(data) < len(_MAGIC) + _LENGTH + _DIGEST or not data.startswith(b"dppvi\0"):
        raise MalformedError("this is no message")
    # Said apart, so that two versions of this library can tell why they do not understand each
    # other.
    if not data.startswith(_MAGIC):
        raise MalformedError("the message is of another version of the protocol")
    # First of all: nothing of a damaged message is parsed.
    if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise MalformedError("the message is damaged")
    try:
        found = json.loads(_header_of(data))
        kind, facts = found["kind"], found["facts"]
        for value in (kind, *facts, *facts.values()):
            _check_fact(value)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise MalformedError("the header says nothing that can be read") from None
    if type(kind) is not str:
        raise MalformedError("the header names no kind")
    return Head(kind, facts)


def read_arrays(data: bytes, head: Head, shapes: Shapes) -> dict[str, np.ndarray]:
    """Reads copies of a message's arrays; refuses others than these, and numbers not finite."""
    header = _header_of(data)
    # Compared as bytes with what we would have written ourselves, so that numbers, order and
    # spelling have one form, and no parser's tolerance is an attacker's room.
    if header != _header(head.kind, head.facts, shapes):
        raise MalformedError("the message holds other arrays than it should")
    place = len(_MAGIC) + _LENGTH + len(header)
    if len(data) != place + num_bytes(shapes) + _DIGEST:
        raise MalformedError("the message is longer or shorter than its arrays")
    arrays = {}
    # In the header's order, which is that of names.
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        size = math.prod(shape) * dtype.itemsize
        piece = data[place : place + size]
        place += size
        arrays[name] = _array(piece, shape, dtype)
    return arrays


def digest(data: bytes) -> str:
    """What tells a message from any other: 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _header_of(data: bytes) -> bytes:
    start = len(_MAGIC) + _LENGTH
    size = int.from_bytes(data[len(_MAGIC) : start], "big")
    if size > min(_MOST_HEADER, len(data) - start - _DIGEST):
        raise MalformedError("the header is longer than the message, or too long")
    return data[start : start + size]


def _header(kind: str, facts: Facts, shapes: Shapes) -> bytes:
    arrays = [[name, _word(shapes[name][1]), list(shapes[name][0])] for name in sorted(shapes)]
    fields = {"kind": kind, "facts": dict(facts), "arrays": arrays}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def _word(dtype: np.dtype[Any]) -> str:
    """A dtype as the header has it: ``f4``, ``i4``, ``b1``."""
    if dtype.kind not in "biuf":
        raise MalformedError("an array holds no numbers")
    return f"{dtype.kind}{dtype.itemsize}"


def _check_fact(value: Any) -> None:
    if type(value) is str and len(value) <= _MOST_WORD and value.isascii() and value.isprintable():
        return
    # type() and not isinstance: True is an int to Python, and another word in JSON.
    if type(value) is int and 0 <= value < _MOST_NUMBER:
        return
    raise MalformedError("a fact is neither a short word nor a count")


def num_bytes(shapes: Shapes) -> int:
    """Bytes of all arrays of a message."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def _little(array: np.ndarray) -> bytes:
    # On any machine: the header says nothing about byte order.
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _array(piece: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    # A byte of 2 is not a boolean, though NumPy would take it for true.
    if dtype.kind == "b" and piece.strip(b"\0\1"):
        raise MalformedError("a truth value is neither true nor false")
    array = np.frombuffer(piece, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    # One NaN in one release would make the whole posterior NaN.
    if not np.all(np.isfinite(array)):
        raise MalformedError("a number is not finite")
    return array
