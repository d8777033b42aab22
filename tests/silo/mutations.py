"""Messages with something of them changed at random."""

import hashlib

_DIGEST = 32


def of_bytes(rng, data):
    """Anywhere, with the digest as it was."""
    return _changed(rng, data)


def with_a_right_digest(rng, data):
    """In front of the digest, which is made to fit: what is left to find is what it says."""
    body = _changed(rng, data[:-_DIGEST])
    return body + hashlib.sha256(body).digest()


def _changed(rng, data):
    data, at = bytearray(data), int(rng.integers(len(data)))
    length = int(rng.integers(1, 40))
    kind = rng.integers(7)
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data[at] = int(rng.integers(256))
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = rng.bytes(length)
    elif kind == 4:
        data[at : at + 4] = b"\xff\xff\xff\xff"
    elif kind == 5:
        start = int(rng.integers(len(data)))
        data[at : at + length] = data[start : start + length]
    else:
        data = bytearray(rng.bytes(at))
    return bytes(data)
