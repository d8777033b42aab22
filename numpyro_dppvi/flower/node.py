"""The hospital's end of the courier: a message goes to the gateway's socket, and its reply back.

Flower sends this code from the server, so it is not to be trusted with records, and reads none.
This file stands alone: an application has a copy of it, so that nodes need Flower and nothing of
ours, can review all that they run, and do not import JAX for every message.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

TYPE = "query"
_RECORD, _FIELD = "silo", "message"
_LENGTH = 8


def packed(data: bytes) -> RecordDict:
    """Bytes as Flower sends them."""
    return RecordDict({_RECORD: ConfigRecord({_FIELD: data})})


def unpacked(content: RecordDict) -> bytes:
    """The bytes that were packed; none if it is something else."""
    data = content[_RECORD][_FIELD] if _RECORD in content else b""
    return data if isinstance(data, bytes) else b""


def _configured(node: Mapping[str, Any]) -> str:
    """The socket that the hospital names when it starts its SuperNode."""
    return str(node["silo-socket"])


def client_app(
    socket_of: Callable[[Mapping[str, Any]], str] = _configured, *, timeout: float = 600.0
) -> ClientApp:
    """What a hospital's node runs: hands messages to the gateway.

    Args:
        socket_of: From the node's configuration to the gateway's socket; the entry
            ``silo-socket`` if not given. Simulated nodes have a ``partition-id``.
        timeout: Seconds to wait for the gateway.

    Returns:
        Flower's client application.
    """

    def answer(message: Message, context: Context) -> Message:
        try:
            place = socket_of(context.node_config)
            reply = _asked(place, unpacked(message.content), timeout)
        # Flower sends an exception's text to the server.
        except Exception:  # noqa: BLE001
            reply = b""
        return Message(packed(reply), reply_to=message)

    app = ClientApp()
    app.query()(answer)
    return app


def _asked(place: str, message: bytes, timeout: float) -> bytes:
    """The gateway's reply; both are written as their length, 8 bytes big-endian, and themselves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(place)
        connection.sendall(len(message).to_bytes(_LENGTH, "big") + message)
        # A buffered file's read(n) waits for all n bytes, where recv(n) may return the first few.
        with connection.makefile("rb") as replies:
            size = int.from_bytes(replies.read(_LENGTH), "big")
            reply = replies.read(size)
    if len(reply) < size:
        raise ConnectionError("the gateway hung up")
    return reply


# What an application's pyproject.toml names as its clientapp, "node:client".
client = client_app()
