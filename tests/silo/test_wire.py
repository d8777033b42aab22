"""Messages come back as they were written, and nothing else is read."""

import hashlib
import json

import numpy as np
import pytest

from numpyro_dppvi._files import flatten
from numpyro_dppvi.silo import messages, wire
from numpyro_dppvi.silo.messages import Code, Form, Join, Ready, Refused, Released, Visit
from numpyro_dppvi.silo.wire import MalformedError
from tests.silo import mutations

STUDY, OTHER = "a1" * 32, "b2" * 32
Q = {"w": {"linear": np.array([1.5, -2.0], np.float32), "quadratic": np.float32([-0.5, -1.0])}}
FORM = Form(
    q={"w": {"linear": np.zeros(2, np.float32), "quadratic": np.zeros(2, np.float32)}},
    factor=None,
    told={"counts": np.zeros((2, 2), np.int32)},
    value={"w": np.zeros(3, np.float32)},
    share=np.zeros((), np.float32),
)
VISIT = Visit(
    STUDY,
    "north",
    2,
    1,
    np.float32(0.4),
    Q,
    None,
    {"counts": np.arange(4, dtype=np.int32).reshape(2, 2)},
)
RELEASED = Released(
    STUDY, "north", 2, OTHER, {"w": np.array([0.0, -1e-30, 3e38], np.float32)}, np.asarray(True)
)


def read_visit(data, form=FORM):
    return messages.read_visit(data, wire.read_head(data), form)


def same(one, other):
    assert type(one) is type(other)
    for name, value in one._asdict().items():
        if isinstance(value, (str, int, Code)):
            assert value == getattr(other, name)
            continue
        mine, theirs = flatten(value, "x"), flatten(getattr(other, name), "x")
        assert mine.keys() == theirs.keys()
        for place in mine:
            np.testing.assert_array_equal(mine[place], theirs[place], strict=True)


@pytest.mark.parametrize(
    "reply", [RELEASED, Ready(STUDY, "north", 3), *(Refused(code, OTHER) for code in Code)]
)
def test_a_reply_comes_back(reply):
    same(reply, messages.read_reply(messages.encode(reply), FORM))


def test_a_request_comes_back():
    same(VISIT, read_visit(messages.encode(VISIT)))
    join = messages.encode(Join(STUDY))
    assert messages.read(Join, join, wire.read_head(join)) == Join(STUDY)


def test_equal_messages_have_equal_bytes():
    told = {"counts": np.arange(4, dtype=np.int32).reshape(2, 2).T.copy().T}  # not C-contiguous
    assert messages.encode(VISIT._replace(told=told)) == messages.encode(VISIT)


def test_numbers_are_written_little_endian_and_in_full():
    data = messages.encode(RELEASED)
    assert np.array([0.0, -1e-30, 3e38], "<f4").tobytes() in data


@pytest.mark.parametrize(
    "visit",
    [
        VISIT._replace(share=np.float32(np.nan)),
        VISIT._replace(share=np.float32(1.5)),
        VISIT._replace(share=np.float32(-0.1)),
        VISIT._replace(share=np.float64(0.4)),
        VISIT._replace(q={"w": Q["w"] | {"linear": np.float32([1, np.inf])}}),
        VISIT._replace(q={"w": Q["w"] | {"linear": np.float32([1, 2, 3])}}),
        VISIT._replace(q={"w": Q["w"] | {"linear": np.float32([[1, 2]])}}),
        VISIT._replace(q={"w": Q["w"] | {"linear": np.array([1.0, 2.0])}}),
        VISIT._replace(q={"w": Q["w"], "v": np.float32(1)}),
        VISIT._replace(q={"v": Q["w"]}),
        VISIT._replace(q={}),
        VISIT._replace(factor=Q),
        VISIT._replace(told=None),
        VISIT._replace(told={"counts": np.zeros((2, 2), np.float32)}),
        VISIT._replace(told={"counts": np.zeros((2, 2), np.uint32)}),
        RELEASED,
        Join(STUDY),
    ],
)
def test_a_visit_of_another_form_is_refused(visit):
    with pytest.raises(MalformedError):
        read_visit(messages.encode(visit))


@pytest.mark.parametrize(
    "reply",
    [
        RELEASED._replace(value={"w": np.float32([0, np.nan, 0])}),
        RELEASED._replace(value={"w": np.zeros(4, np.float32)}),
        RELEASED._replace(failed=np.zeros((), np.uint8)),
        VISIT,
        Join(STUDY),
    ],
)
def test_a_reply_of_another_form_is_refused(reply):
    with pytest.raises(MalformedError):
        messages.read_reply(messages.encode(reply), FORM)


def assembled(header, arrays, magic=b"dppvi\0\0\1"):
    """A message by hand, with a digest that is right."""
    if not isinstance(header, bytes):
        header = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    body = magic + len(header).to_bytes(4, "big") + header + arrays
    return body + hashlib.sha256(body).digest()


def taken_apart(data):
    size = int.from_bytes(data[8:12], "big")
    return json.loads(data[12 : 12 + size]), data[12 + size : -32]


def test_a_message_by_hand_is_read():
    """So that what is refused below is refused for what is wrong with it."""
    header, arrays = taken_apart(messages.encode(RELEASED))
    same(RELEASED, messages.read_reply(assembled(header, arrays), FORM))


BY_HAND = {
    "another version": lambda header, arrays: assembled(header, arrays, b"dppvi\0\0\2"),
    "another format": lambda header, arrays: assembled(header, arrays, b"doggo\0\0\1"),
    "a byte too many": lambda header, arrays: assembled(header, arrays + b"\0"),
    "a byte too few": lambda header, arrays: assembled(header, arrays[:-1]),
    "no arrays": lambda header, arrays: assembled(header, b""),
    "neither true nor false": lambda header, arrays: assembled(header, b"\2" + arrays[1:]),
    "spaces": lambda header, arrays: assembled(json.dumps(header).encode(), arrays),
    "a key twice": lambda header, arrays: assembled(
        json.dumps(header, sort_keys=True, separators=(",", ":"))
        .replace('"kind"', '"kind":"refused","kind"')
        .encode(),
        arrays,
    ),
    "one more entry": lambda header, arrays: assembled(header | {"more": 1}, arrays),
    "one more fact": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"more": 1}}, arrays
    ),
    "one fact less": lambda header, arrays: assembled(
        header | {"facts": {n: v for n, v in header["facts"].items() if n != "step"}}, arrays
    ),
    "a step in words": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"step": "2"}}, arrays
    ),
    "a step that is true": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"step": True}}, arrays
    ),
    "a step below 0": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"step": -1}}, arrays
    ),
    "a step of 2.0": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"step": 2.0}}, arrays
    ),
    "an endless word": lambda header, arrays: assembled(
        header | {"facts": header["facts"] | {"hospital": "n" * 10**4}}, arrays
    ),
    "a huge shape": lambda header, arrays: assembled(
        header | {"arrays": [["value/w", "f4", [2**62]]]}, arrays
    ),
    "an object": lambda header, arrays: assembled(
        header | {"arrays": [["failed", "O8", []], ["value/w", "f4", [3]]]}, arrays
    ),
    "no header": lambda header, arrays: assembled(b"", arrays),
    "a list": lambda header, arrays: assembled(b"[]", arrays),
    "a deep list": lambda header, arrays: assembled(b"[" * 10**5, arrays),
    "no JSON": lambda header, arrays: assembled(b"\xff\xfe", arrays),
    "kind in a list": lambda header, arrays: assembled(header | {"kind": ["released"]}, arrays),
    "a header beyond the end": lambda header, arrays: b"dppvi\0\0\1\xff\xff\xff\xff" + arrays * 9,
}


@pytest.mark.parametrize("how", BY_HAND)
def test_a_message_that_is_wrong_by_hand_is_refused(how):
    data = BY_HAND[how](*taken_apart(messages.encode(RELEASED)))
    with pytest.raises(MalformedError):
        messages.read_reply(data, FORM)


def test_a_reply_that_is_too_large_is_not_looked_into(monkeypatch):
    """A dishonest hospital could have the server read gigabytes."""
    monkeypatch.setattr(wire, "read_head", lambda data: pytest.fail("it was read"))
    with pytest.raises(MalformedError, match="larger than any reply of this study"):
        messages.read_reply(messages.encode(RELEASED) + bytes(3 * 2**20), FORM)


def test_an_error_repeats_nothing_of_what_was_received():
    data = messages.encode(RELEASED._replace(hospital="secret", value={"w": np.zeros(4)}))
    with pytest.raises(MalformedError) as caught:
        messages.read_reply(data, FORM)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_cannot_be_read_is_not_written():
    for name in ("tab\t", "é", "n" * 300):
        with pytest.raises(MalformedError):
            messages.encode(Ready(STUDY, name, 0))


@pytest.mark.slow
@pytest.mark.parametrize("number", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_mutated_message_is_accepted(number):
    rng = np.random.default_rng(0)
    sources = [RELEASED, Ready(STUDY, "north", 3), Refused(Code.USED_UP, OTHER)]
    sources = [messages.encode(reply) for reply in sources]
    for count in range(number):
        data = mutations.of_bytes(rng, sources[count % len(sources)])
        if data in sources:
            continue
        with pytest.raises(MalformedError):
            messages.read_reply(data, FORM)
