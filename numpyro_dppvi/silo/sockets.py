"""The Unix socket between a courier and the gateway: lengths and bytes, and nothing else.

A message is written as its length, 8 bytes big-endian, and its bytes; a reply likewise. One
connection carries any number of them, one after the other. Only the gateway's user can open the
socket, and a group of users that the hospital may name.
"""

import contextlib
import io
import os
import shutil
import socket
import socketserver
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from numpyro_dppvi import _validate
from numpyro_dppvi.silo import wire

_LENGTH = 8
# How long one side waits for the next bytes of a message that has begun.
_STALLED_SECONDS = 60.0
# The most that the operating system takes as a socket's path, on any that we know.
_MOST_PATH = 100


def send(path: str | os.PathLike[str], message: bytes, timeout: float = 600.0) -> bytes:
    """Hands a message to the gateway behind a socket, and waits for its reply.

    Args:
        path: The socket.
        message: Its bytes.
        timeout: Seconds to wait for the reply.

    Returns:
        The reply's bytes.

    Raises:
        OSError: If there is no gateway, or it does not answer.
    """
    target = _validate.path("path", path)
    _validate.instance("message", message, bytes, "bytes of a message")
    seconds = _validate.positive("timeout", timeout, most=1e6)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            # The first step of a gateway compiles, which may take minutes.
            connection.settimeout(seconds)
            connection.connect(os.fspath(target))
            with connection.makefile("rwb") as stream:
                _write(stream, message)
                reply = _read(stream, wire.MOST_BYTES)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConnectionError(
            f"no gateway answers on path {str(target)[:_MOST_PATH]} ({reason}): start it with "
            "`dppvi silo run silo.toml`."
        ) from None
    if reply is None:
        raise ConnectionError(
            f"the gateway on path {target} hung up: look into its log, and send the message again."
        )
    return reply


@contextlib.contextmanager
def listening(
    path: Path, handle: Callable[[bytes], bytes], most: int, group: str | None = None
) -> Iterator[socketserver.BaseServer]:
    """A server on a socket of its own, for the caller to run; messages have ``most`` bytes at most.

    A socket that nobody listens on is replaced. Refused are paths that are too long or taken, one
    that somebody listens on, and groups that there are not.
    """
    _make_room(path)

    class Handler(socketserver.StreamRequestHandler):
        timeout = _STALLED_SECONDS

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # a courier that went away asks again
                while (message := _read(self.rfile, most)) is not None:
                    _write(self.wfile, handle(message))

    # Made closed, because between binding and a later chmod anybody could connect.
    before = os.umask(0o177)
    try:
        server = _Server(os.fspath(path), Handler)
    finally:
        os.umask(before)
    if group is not None:
        # The group first: opened first, it would be open to the user's default group for a moment.
        shutil.chown(path, group=group)
        path.chmod(0o660)
    try:
        yield server
    finally:
        server.server_close()
        path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    # A courier that keeps its connection open does not keep the gateway from ending.
    daemon_threads = True
    # Couriers that come while this many wait to be let in are turned away at once; 5 if not said.
    request_queue_size = 128


def _make_room(path: Path) -> None:
    if len(os.fsencode(path)) > _MOST_PATH:
        raise ValueError(
            f"socket must be a path of at most {_MOST_PATH} bytes, got {len(os.fsencode(path))}: "
            "write a shorter one in silo.toml."
        )
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ValueError(
            f"socket must be a new path, got {path}, where another file lies: move that file."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            # A gateway that was killed leaves its socket behind. If nobody answers there, it is
            # removed.
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise RuntimeError(f"somebody listens on {path}: stop that gateway first.")


def _write(stream: io.BufferedIOBase, data: bytes) -> None:
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def _read(stream: io.BufferedIOBase, most: int) -> bytes | None:
    """A message; ``None`` where the other side has hung up before one."""
    length = stream.read(_LENGTH)
    if not length:
        return None
    size = int.from_bytes(length, "big")
    # Eight bytes can announce 2^64: nothing is read or allocated for a length that no message has.
    if size > most:
        raise ConnectionError("the message is too large")
    # A buffered stream waits for all bytes, and returns fewer where the other side hangs up.
    data = stream.read(size)
    if len(length) < _LENGTH or len(data) < size:
        raise ConnectionError("the other side hung up in the middle of a message")
    return data
