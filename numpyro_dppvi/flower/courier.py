"""The server's end of the courier: messages go to hospitals' nodes by name, and replies come back.

Node ids change when a node starts again without a key, so hospitals are known by the names that
their nodes' keys were registered with.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from numpyro_dppvi.flower.node import TYPE, packed, unpacked
from numpyro_dppvi.run import FitResult
from numpyro_dppvi.silo import load_study, messages, run_study, wire
from numpyro_dppvi.silo.messages import Join, Ready
from numpyro_dppvi.silo.wire import MalformedError

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
# How long nodes have to say which hospital they are; most of it is the start of a process.
_LOOK_SECONDS = 90.0
# Between attempts at a hospital; a message costs Flower the start of a process.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 3.0, 60.0


def server_app(
    study: str | os.PathLike[str],
    done: Callable[[FitResult], None],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    patience: float = 600.0,
) -> ServerApp:
    """What the consortium's server runs: the study, over Flower's nodes.

    Args:
        study: The study's file.
        done: What to do with the result, such as to save its posterior.
        checkpoint: As of ``run_study``.
        patience: Seconds to wait for a hospital before it misses its step: for its node to come
            (again), for its gateway, and for its reply.

    Returns:
        Flower's server application.
    """

    def main(grid: Grid, context: Context) -> None:
        _tell_progress()
        pinned = load_study(study)
        courier = GridCourier(grid, pinned.digest, patience)
        done(run_study(pinned, courier.deliver, checkpoint=checkpoint))

    app = ServerApp()
    app.main()(main)
    return app


def _tell_progress() -> None:
    """Has rounds, hospitals and costs on the terminal, which Flower copies to its run's log."""
    room = logging.getLogger("numpyro_dppvi")
    room.setLevel(logging.INFO)
    # Once a process, or every line would be there as often as a server has run in it.
    if not room.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        room.addHandler(handler)


class GridCourier:
    """Delivers messages to hospitals by name, over Flower's nodes.

    A node that was registered with a name and a key is the hospital of that name. Where no node
    has one, as in simulations, nodes are asked, and are what their gateways say.
    A hospital is waited for ``patience`` seconds.
    """

    def __init__(self, grid: Grid, digest: str, patience: float) -> None:
        self.grid, self.digest, self.patience = grid, digest, patience
        self._said: dict[int, str] = {}
        self._registered = False  # whether nodes have names; then no other is listened to
        self._away: set[str] = set()
        self._one_at_a_time = threading.Lock()  # Flower says nothing about threads
        self._looking = threading.Lock()

    def deliver(self, hospital: str, message: bytes) -> bytes:
        """A courier, as ``run_study`` wants one.

        A node or gateway that fails is tried again, with the same bytes, as long as there is
        patience: what was released meanwhile was kept, and comes at no new cost. Who has been
        waited for in vain is tried once only, until it answers.

        Raises:
            ConnectionError: If no node is this hospital's, or several are, or it does not answer.
        """
        end, pause = time.monotonic() + self.patience, _PAUSE_SECONDS
        while True:
            found = self._node_of(hospital)
            why = found if isinstance(found, str) else "brought no reply"
            if isinstance(found, int):
                # The last attempt gets a moment, too.
                left = max(end - time.monotonic(), _PAUSE_SECONDS)
                reply = self._replies({found: message}, left).get(found)
                # Empty where the node could not reach its gateway (node.client_app).
                if reply:
                    self._away.discard(hospital)
                    return reply
                with self._looking:
                    self._said.pop(found, None)  # it may come back with another id
            # A hospital that is away would otherwise hold up every round by the whole patience.
            if hospital in self._away or time.monotonic() + pause >= end:
                self._away.add(hospital)
                raise ConnectionError(f"the node of {hospital} {why}")
            _LOG.info("%s: its node %s; it is tried again in %.0f s", hospital, why, pause)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _node_of(self, hospital: str) -> int | str:
        """The one node of a hospital, or what is wrong with it."""
        with self._looking:
            with self._one_at_a_time:
                online = {node.node_id: node.name for node in self.grid.get_nodes()}
            # Once a node is known by a key, nodes without one are never asked again: any of them
            # could say that it is a hospital.
            self._registered |= any(online.values())
            names = online if self._registered else self._said
            nodes = [node for node in online if names.get(node) == hospital]
            if not nodes and not self._registered:
                self._ask_names([node for node in online if node not in self._said])
                nodes = [node for node in online if self._said.get(node) == hospital]
        if len(nodes) == 1:
            return nodes[0]
        return f"is one of {len(nodes)} with this name" if nodes else "is not there"

    def _ask_names(self, nodes: Iterable[int]) -> None:
        """Asks nodes what hospital they are."""
        # A Join costs nothing: it asks a gateway's name, and charges no ledger.
        join = messages.encode(Join(self.digest))
        for node, reply in self._replies(dict.fromkeys(nodes, join), _LOOK_SECONDS).items():
            try:
                self._said[node] = messages.read(Ready, reply, wire.read_head(reply)).hospital
            except MalformedError:
                _LOG.warning("a node does not take part")

    def _replies(self, sent: Mapping[int, bytes], patience: float) -> dict[int, bytes]:
        """What comes back in time, by node."""
        out = [
            Message(packed(data), dst_node_id=node, message_type=TYPE, ttl=patience)
            for node, data in sent.items()
        ]
        with self._one_at_a_time:
            # No id, or an empty one, for what Flower does not take: the node has just left, say.
            ids = self.grid.push_messages(out)
            waiting = {number: node for number, node in zip(ids, sent, strict=False) if number}
        found, end = {}, time.monotonic() + patience
        while waiting and time.monotonic() < end:
            with self._one_at_a_time:
                come = list(self.grid.pull_messages(list(waiting)))
            for reply in come:
                # Not by its source: a failed node's is another.
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and reply.has_content():
                    found[node] = unpacked(reply.content)
            # Asked again at once as long as replies come in.
            if waiting and not come:
                time.sleep(_POLL_SECONDS)
        return found
