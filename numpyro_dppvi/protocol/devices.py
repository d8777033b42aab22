"""A round whose clients are on several devices: what passes between them are messages.

The server's part runs on one device, or on one of each process, and gives the same everywhere. A
client is visited on the device that holds its records, secret key and private factors: requests go
there, and only releases come back.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from numpyro_dppvi._typing import Array, Natural, PRNGKey, PyTree
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods.visits import ClientParams, Outcome
from numpyro_dppvi.protocol import client, rounds, server
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.messages import Answer, Release, Request
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.rounds import RoundInfo, RoundState
from numpyro_dppvi.protocol.server import MergeInfo, ServerState
from numpyro_dppvi.records import Shards
from numpyro_dppvi.records.placement import AXIS, SpreadShards, on_devices, padded


class Places(NamedTuple):
    """Where the clients of a group are visited: every device has as many places for them."""

    # The client at each place, shape ``(num_devices * width,)``; any at a free one.
    numbers: np.ndarray
    taken: np.ndarray  # whether there is one
    in_group: np.ndarray  # its place in the group; any at a free one
    of_group: np.ndarray  # the places of the group's clients, in their order


def places(
    group: np.ndarray, sizes: np.ndarray, num_devices: int, clients_each: int, at_once: int | None
) -> Places:
    """Places for a group; how many there are depends on its size alone."""
    # All clients of the group may be on one device, so that every device gets room for as many as
    # can be: shapes must not follow who is in the group, or each group would be compiled anew.
    width = min(clients_each, len(group))
    width += -width % (at_once or 1)
    free = np.arange(num_devices) * width
    of_group = np.zeros(len(group), int)
    for number in np.argsort(sizes, stable=True):
        # Smallest first, device by device, so that neighbours are of about one size: a batch takes
        # as long as its largest client.
        device = group[number] // clients_each
        of_group[number] = free[device]
        free[device] += 1
    # At a free place stands the device's first client, whose records are there; what comes of it is
    # thrown away.
    numbers = np.repeat(np.arange(num_devices) * clients_each, width)
    taken, in_group = np.zeros(len(numbers), bool), np.zeros(len(numbers), int)
    numbers[of_group], taken[of_group] = group, True
    in_group[of_group] = np.arange(len(group))
    return Places(numbers, taken, in_group, of_group)


def run_round(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    shards: SpreadShards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    drawn: Any = None,
) -> tuple[RoundState, RoundInfo]:
    """What ``rounds.run_round`` does, by as many devices as the records are spread over.

    Arguments are as there. The secret key and the noise are this process's, for its own clients.
    """
    mesh, each, known = shards.mesh, shards.clients_each, before.server
    private = before.clients.private
    if before.clients.pulled is not None:
        raise ValueError(
            "clients who work at their own pace are visited one by one, on one device, got shards "
            "that are spread over several: pass what stack or stack_clients returned."
        )
    # A first state, or one from a checkpoint, has no empty places after the last client.
    if _num_rows(private) != each * mesh.size:
        private = on_devices(mesh, padded(mesh, private))
    # Each device gets the round's secret key. Its visits' keys are made of the group and of the
    # client's number, which no two visits share.
    own = on_devices(mesh, (padded(mesh, params.clients), jnp.broadcast_to(keys[1], (mesh.size,))))
    sizes, merges = np.array(shards.sizes), []
    for index, group in enumerate(np.asarray(groups)):
        at_once = rounds.batch_size(problem, min(each, len(group)))
        at = places(group, sizes[group], mesh.size, each, at_once)
        numbers = jnp.asarray(at.numbers)
        known, asked = _ask(problem, params, known, keys[0], index, numbers, begins=index == 0)
        noise = jax.tree.map(lambda leaf: leaf[index, at.in_group], drawn)  # noqa: B023
        visits = on_devices(mesh, Visits(asked, numbers, jnp.asarray(at.taken), noise))
        released, kept = _visit(problem, mesh, at_once, private, own, shards.shards, visits, index)
        # Every device has all releases by now; the server works with the first copy of this
        # process.
        released = jax.tree.map(lambda leaf: leaf.addressable_data(0), released)
        known, answer, merge = _take(
            problem, params, known, keys[0], index, group, at.of_group, released
        )
        merges.append(merge)
        if private is not None and kept is not None:
            private = _settle(mesh, private, kept, visits, jax.device_get(answer))
    info = _summed(problem, before.server, known, merges)
    return RoundState(known, ClientState(private)), info


class Visits(NamedTuple):
    """What is sent to the devices; each gets its own clients' part."""

    asked: Request
    numbers: Array
    taken: Array
    drawn: Any


@compiled("problem", "begins")
def _ask(
    problem: Problem,
    params: RoundParams,
    known: ServerState,
    rng_key: PRNGKey,
    index: Array | int,
    numbers: Array,
    *,
    begins: bool,
) -> tuple[ServerState, Request]:
    """The prior's own update, if the round begins, and requests to clients on a leading axis."""
    if begins:
        known, _ = server.begin_round(problem, params, known, rng_key)
    q, key = known.natural, _group_key(problem, rng_key, index)
    return known, jax.vmap(lambda n: server.request(problem, params, known, q, n, key))(numbers)


@compiled("problem", "mesh", "at_once")
def _visit(
    problem: Problem,
    mesh: Mesh,
    at_once: int | None,
    private: Natural | None,
    own: tuple[ClientParams, PRNGKey],
    shards: Shards,
    visits: Visits,
    index: Array | int,
) -> tuple[Release, Natural | None]:
    """What clients release, to be seen by all, and what they will keep."""

    def on_device(
        private: Natural | None, own: Any, shards: Shards, visits: Visits, index: Array
    ) -> tuple[Release, Natural | None]:
        each = shards.num_records.shape[0]

        def visit(visits: Visits) -> Outcome:
            # Device d holds clients d * each to (d + 1) * each - 1: the remainder is the client's
            # place.
            place = visits.numbers % each
            mine, kept = jax.tree.map(lambda leaf: leaf[place], (own[0], private))
            records, num_records = shards.of_client(place)
            key = client.secret_key_of_visit(problem, own[1][0], group=index, client=visits.numbers)
            state = ClientState(kept)
            return client.respond(
                problem, mine, state, visits.asked, records, num_records, key, visits.drawn
            )

        outcomes = _in_batches(visit, visits, at_once)
        # At a free place is another visit of some client, which has not been charged for it.
        present = functools.partial(_where, visits.taken)
        released = jax.tree.map(present, Release(outcomes.release, outcomes.failed))
        # All that leaves a device, and so a process. What clients keep stays where it is.
        seen = jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, AXIS, tiled=True), released)
        return seen, outcomes.kept

    mine = P(AXIS)
    everywhere = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(mine, mine, mine, mine, P()),
        out_specs=(P(), mine),
        check_vma=False,
    )
    return everywhere(private, own, shards, visits, jnp.asarray(index))


def _in_batches(visit: Callable[[Visits], Outcome], visits: Visits, at_once: int | None) -> Outcome:
    """Visits on a leading axis, ``at_once`` side by side; batches of free places are left out."""
    one = jax.jit(visit if at_once is None else jax.vmap(visit))  # traced once for both uses
    shape = () if at_once is None else (at_once,)
    # Not -1, which says nothing of a leaf without entries.
    number = visits.taken.size // (at_once or 1)
    batches = jax.tree.map(lambda leaf: leaf.reshape(number, *shape, *leaf.shape[1:]), visits)

    def nothing(batch: Visits) -> Outcome:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, batch))

    # A condition within a map runs one of its branches. Within a vmap both would run, and free
    # places would cost as much as clients.
    def visited(batch: Visits) -> Outcome:
        return jax.lax.cond(jnp.any(batch.taken), one, nothing, batch)

    outcomes: Outcome = jax.lax.map(visited, batches)
    axes, places = 1 + len(shape), visits.taken.size
    return jax.tree.map(lambda leaf: leaf.reshape(places, *leaf.shape[axes:]), outcomes)


def _where(taken: Array, leaf: Array) -> Array:
    # Chosen, and not multiplied by 0, which would keep a NaN.
    return jnp.where(taken.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))


@compiled("problem")
def _take(
    problem: Problem,
    params: RoundParams,
    known: ServerState,
    rng_key: PRNGKey,
    index: Array | int,
    clients: np.ndarray,
    places: np.ndarray,
    released: Release,
) -> tuple[ServerState, Answer, tuple[MergeInfo, Array]]:
    """What the server makes of a group's releases."""
    # In the group's order and without free places: from here on all is as on one device.
    releases = jax.tree.map(lambda leaf: leaf[places], released)
    known, answer, info = server.take(
        problem,
        params,
        known,
        jnp.asarray(clients),
        known.natural,
        releases,
        _group_key(problem, rng_key, index),
    )
    return known, answer, (info, jnp.sum(releases.failed, dtype=jnp.int32))


@compiled("mesh")
def _settle(mesh: Mesh, private: Natural, kept: Natural, visits: Visits, answer: Answer) -> Natural:
    """What clients keep once the server has answered."""

    def on_device(private: Natural, kept: Natural, visits: Visits, answer: Answer) -> Natural:
        each = _num_rows(private)
        # A free place gets a row out of range, where what would be written is dropped.
        places = jnp.where(visits.taken, visits.numbers % each, each)
        after = client.settle_many(ClientState(private), places, kept, answer).private
        assert after is not None
        return after

    mine = P(AXIS)
    everywhere = jax.shard_map(
        on_device, mesh=mesh, in_specs=(mine, mine, mine, P()), out_specs=mine, check_vma=False
    )
    return everywhere(private, kept, visits, answer)


@compiled("problem")
def _summed(
    problem: Problem, before: ServerState, after: ServerState, merges: list[tuple[MergeInfo, Array]]
) -> RoundInfo:
    """What a round did, from what its merges did."""
    movement = problem.family.jeffreys(before.natural, after.natural)
    each = [(*merge, failed) for merge, failed in merges]
    return RoundInfo(
        movement, *(jnp.sum(jnp.stack(leaf), axis=0) for leaf in zip(*each, strict=True))
    )


def _group_key(problem: Problem, rng_key: PRNGKey, index: Array | int) -> PRNGKey:
    """The public key of a group's visits, from the round's."""
    _, key = server.round_keys(problem, rng_key)
    return server.public_key(problem, key, index)


def _num_rows(tree: PyTree) -> int:
    """The length of the leading axis; 0 if there is no array."""
    leaves = jax.tree.leaves(tree)
    return int(leaves[0].shape[0]) if leaves else 0
