"""One round, compiled: group after group of clients, visited side by side."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import factors, precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods.visits import Outcome
from numpyro_dppvi.protocol import client, initial, server
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.messages import Release, Request
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.server import ServerState
from numpyro_dppvi.records import Shards

Respond: TypeAlias = Callable[[Array, ClientState, Request, PRNGKey, Any], Outcome]
"""What a client does: its number, what it has kept, what it is sent, secret key, drawn noise."""

# Local problems of one group that are solved side by side; the rest wait. Bounds memory.
_SOLVES_AT_ONCE = 512
_CLIENTS_AT_ONCE = 16
# Clients with more floats of gradients than this (64 KiB, about a core's first cache) keep a core
# busy by themselves. Sixteen at a time, those of 2442 records and 109 columns took 1.3 to 1.7 times
# as long as one after the other, and those of 50 records and 20 columns .9 times.
_FLOATS_OF_ONE = 2**14
# An accelerator takes as many clients at once as its memory allows (256 MiB of gradients).
_FLOATS_ON_ACCELERATOR = 2**26
# A server that does algebra takes longer to compile than its clients do, and is hardly slower
# without the compiler's optimisations, which clients need. As programs of their own the two compile
# in half the time, and each turn takes half a millisecond to one and a half longer: not for many.
_FEW_GROUPS = 64


class RoundState(NamedTuple):
    """What a round changes; what each client keeps to itself is on a leading axis."""

    server: ServerState
    clients: ClientState


class RoundInfo(NamedTuple):
    """What a round did; functions of released values only.

    Attributes:
        movement: Jeffreys divergence between q before and after the round, in nats.
        projected: Entries of the product of the clients' factors that were raised to zero, summed
            over the round's merges.
        rejected: Merges that were refused because q would have left its domain.
        failed: Clients whose solve did not end in finite numbers; always 0 for methods that add
            noise after the solve, which hides it.
    """

    movement: Array
    projected: Array
    rejected: Array
    failed: Array


# A program of its own, because a run begins with it, and each round: compiled twice it took a
# hierarchy's first fit seconds.
_refined = compiled("problem")(server.refined_prior)
_before_first_prior = compiled("problem", quick=True)(server.before_first_prior)


def first_prior(problem: Problem, params: RoundParams, rng_key: PRNGKey) -> Natural:
    """The prior's first factor: exact where it can be, else its variational projection."""
    if not problem.refined:
        return params.exact_prior
    prior, keys = _before_first_prior(problem, params, rng_key)
    whole: Any = np.ones((), params.precision)
    for key in keys:
        # All of it but its exact part leaves the cavity: it is only where the solve starts.
        prior = _refined(problem, params, prior, prior, key, whole)
    return prior


@compiled("problem", "asynchronous", quick=True)
def first_state(
    problem: Problem,
    params: RoundParams,
    prior: Natural,
    begin: Natural | None,
    *,
    asynchronous: bool,
) -> RoundState:
    """What server and clients begin with.

    Clients' factors hold the public start ``begin``, but for those of clients who fit alone.
    Asynchronous clients start from the q that they pulled when they last sent.
    """
    num_clients, layout = params.clients.num_shards.shape[0], problem.layout
    held = None if problem.starts_ahead else begin
    num_factors = 1 if problem.aggregated else num_clients
    each = initial.of_clients(prior, held, num_factors)
    q = prior if held is None else held
    memory = problem.method.memory(problem.space, problem.family, q, num_factors)
    private = None
    if layout.private:
        # A client's factor is the product of its shards' to the power of its weight w. So M clients
        # of n shards hold begin / prior together if each shard holds its power 1 / (M n w).
        shares = 1 / (num_clients * params.clients.num_shards * params.clients.weight)
        private = initial.of_shards(prior, held, shares, layout.num_shards)
    # All begin their first visit where the run begins, whenever they send.
    pulled = factors.repeated(q, num_clients) if asynchronous else None
    return RoundState(ServerState(prior, each, memory, begin), ClientState(private, pulled))


class Turn(NamedTuple):
    """Where a round is between two groups."""

    now: RoundState  # what server and clients have
    # The ``factors.block_totals`` of the clients' factors. They travel from group to group: adding
    # up all M factors anew at each of M visits would make a sequential round cost M squared.
    totals: Natural
    counts: tuple[Array, Array, Array]  # what a ``RoundInfo`` counts, so far


class Group(NamedTuple):
    """A group of a round: which one, its clients, and their noise if it is drawn on the host."""

    place: Array
    numbers: Array
    drawn: Any


def run_round(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    drawn: Any = None,
) -> tuple[RoundState, RoundInfo]:
    """One round, compiled: the prior's factor, then group after group of clients.

    ``groups`` are client numbers, shape ``(num_groups, group_size)``, and ``keys`` the round's key
    and its secret key. ``drawn`` is the noise of the visits where it is drawn on the host, leading
    axes as of ``groups``; ``None`` where it comes from the secret key.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((before, keys)))
    turns = problem.method.wide and groups.shape[0] <= _FEW_GROUPS
    run: Callable[..., tuple[RoundState, RoundInfo]] = in_turn if turns and not traced else as_one
    # Once a round and before any group, the prior's own update.
    apart = not traced and (turns or server.refines(problem))
    begun = _begun(problem, params, before, keys[0]) if apart else None
    return run(problem, params, before, shards, groups, keys, drawn, begun)


@compiled("problem")
def as_one(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    drawn: Any,
    begun: tuple[Turn, PRNGKey] | None = None,
) -> tuple[RoundState, RoundInfo]:
    """A round as one program; arguments as of :func:`run_round` and :func:`one_round`."""
    respond = _of_records(problem, params, shards)
    return one_round(problem, params, before, groups, keys, respond, drawn, begun)


@precision.in_own_precision
def in_turn(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    drawn: Any,
    begun: tuple[Turn, PRNGKey],
) -> tuple[RoundState, RoundInfo]:
    """A round by the programs of clients and server in turn; arguments as of :func:`as_one`."""
    # All are started one after the other: nothing waits for numbers, and none comes to the host.
    start, public = begun
    turn = start
    for index in map(np.int32, range(groups.shape[0])):
        asked = _asked.program(problem, params, turn, groups, index, public)
        visits = params, turn.now.clients, groups, drawn, index, keys[1], asked, shards
        takes = params, turn, groups, index, public
        with _compiled_beside(problem, visits, takes):
            outcomes = _visited.program(problem, *visits)
        turn = _taken.program(problem, *takes, outcomes)
    return turn.now, _ended.program(problem, before, start, turn)


def _compiled_beside(
    problem: Problem, visits: tuple[Any, ...], takes: tuple[Any, ...]
) -> contextlib.AbstractContextManager[Any]:
    """Compiles the server's program on another core while that of clients is compiled and run."""
    # Each takes seconds. Where clients lie on several devices they are compiled one after the
    # other: it is not known here how their releases will lie.
    leaves, structure = jax.tree.flatten((visits, takes))
    shapes = [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
    seen = hash((problem, structure, *shapes))
    if seen in _seen or jax.device_count() > 1:
        return contextlib.nullcontext()
    _seen.add(seen)
    like = _visited.program.lower(problem, *visits).out_info
    server_side = _taken.program.lower(problem, *takes, like)
    beside = concurrent.futures.ThreadPoolExecutor(1)
    # What fails there fails again, and is told, where it is called.
    beside.submit(server_side.compile)
    return beside


_seen: set[int] = set()


@precision.in_own_precision
def _begun(
    problem: Problem, params: RoundParams, before: RoundState, rng_key: PRNGKey
) -> tuple[Turn, PRNGKey]:
    """Where a round stands after the prior's own update, and the public key of the groups."""
    if not server.refines(problem):
        return _started.program(problem, before), rng_key
    prior_key, public = _keys.program(problem, rng_key)
    known = before.server
    q = server.approximation.program(known.prior, known.factors)
    prior = _refined.program(problem, params, q, known.prior, prior_key, params.damping)
    return _started.program(problem, before, prior), public


def one_round(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    respond: Respond,
    drawn: Any = None,
    begun: tuple[Turn, PRNGKey] | None = None,
) -> tuple[RoundState, RoundInfo]:
    """A round of clients who do whatever ``respond`` says; else as :func:`run_round`.

    ``begun`` is where the round stands after the prior's own update, and the public key of the
    groups; ``None`` if that is still to be done.
    """
    if begun is None:
        # The public key makes the draws of the latents, the secret one noise and batches. The two
        # never meet: who knows the one can compute nothing of the other.
        first, public = server.begin_round(problem, params, before.server, keys[0])
        start = _start(before._replace(server=first))
    else:
        start, public = begun

    def visit_group(turn: Turn, group: Group) -> tuple[Turn, None]:
        group = _in_order(params, group)
        asked = _ask(problem, params, turn, group, public)
        outcomes = _visit(problem, params, turn.now.clients, group, keys[1], asked, respond)
        return _take(problem, params, turn, group, public, outcomes), None

    # Groups depend on each other and are scanned. Clients of a group do not, and are mapped.
    visits = Group(jnp.arange(groups.shape[0]), groups, drawn)
    turn, _ = jax.lax.scan(visit_group, start, visits)
    return turn.now, _end(problem, before, start, turn)


def _of_records(problem: Problem, params: RoundParams, shards: Shards) -> Respond:
    """What clients do with their records."""

    def respond(
        number: Array, state: ClientState, request: Request, secret_key: PRNGKey, noise: Any
    ) -> Outcome:
        mine = jax.tree.map(lambda leaf: leaf[number], params.clients)
        records, num_records = shards.of_client(number)
        return client.respond(
            problem, mine, state, request, records, num_records, secret_key, noise
        )

    return respond


def _start(now: RoundState) -> Turn:
    none = jnp.zeros((), jnp.int32)
    return Turn(now, factors.block_totals(now.server.factors), (none, none, none))


def _ask(
    problem: Problem, params: RoundParams, turn: Turn, group: Group, public: PRNGKey
) -> Callable[[Array], Request]:
    """What the server asks of each client of a group."""
    known, key = turn.now.server, server.public_key(problem, public, group.place)
    # All clients of a group start from this q, which has the changes of the groups before it.
    q = server.from_totals(known.prior, turn.totals)
    return lambda number: server.request(problem, params, known, q, number, key)


def _visit(
    problem: Problem,
    params: RoundParams,
    clients: ClientState,
    group: Group,
    secret: PRNGKey,
    asked: Callable[[Array], Request] | Request,
    respond: Respond,
) -> Outcome:
    """What comes of a group's visits, on a leading axis."""

    def visit(at: tuple[Array, Any]) -> Outcome:
        number, (noise, request) = at
        request = asked(number) if callable(asked) else request
        mine = factors.picked(clients, number)
        # The noise of a visit has a key of its own by round, group and client: a client that is
        # visited twice in a round must not add the same noise twice.
        own = client.secret_key_of_visit(problem, secret, group=group.place, client=number)
        # What the server adds up may be wider; a client and its model are as they are anywhere.
        with precision.program(params.precision):
            return respond(number, mine, request, own, noise)

    each = None if callable(asked) else asked
    numbers = jnp.asarray(group.numbers)
    return _side_by_side(problem, params, visit, (numbers, (group.drawn, each)))


def _take(
    problem: Problem,
    params: RoundParams,
    turn: Turn,
    group: Group,
    public: PRNGKey,
    outcomes: Outcome,
) -> Turn:
    """What the server makes of a group's releases, and what its clients keep of them."""
    now, totals, numbers = turn.now, turn.totals, group.numbers
    q = server.from_totals(now.server.prior, totals)
    key = server.public_key(problem, public, group.place)
    # From here to the answer nothing is seen but what was released.
    releases = Release(outcomes.release, outcomes.failed)
    known, answer, info = server.take(
        problem, params, now.server, numbers, q, releases, key, totals
    )
    # Totals are taken again from the factors that were written, not from the changes, so that
    # they cannot drift away from them.
    # With an aggregator there is one factor, number 0, of all clients.
    changed = jnp.zeros_like(numbers) if problem.aggregated else numbers
    mine = factors.picked(known.factors, changed)
    totals = factors.renewed(totals, known.factors, changed, mine)
    clients = client.settle_many(now.clients, numbers, outcomes.kept, answer)
    each = (*info, jnp.sum(outcomes.failed, dtype=jnp.int32))
    counts = jax.tree.map(lambda so_far, more: so_far + more.astype(jnp.int32), turn.counts, each)
    return Turn(RoundState(known, clients), totals, counts)


def _end(problem: Problem, before: RoundState, start: Turn, turn: Turn) -> RoundInfo:
    now = turn.now
    # The prior's update has left the clients' factors as they were.
    q = server.from_totals(before.server.prior, start.totals)
    movement = problem.family.jeffreys(q, server.from_totals(now.server.prior, turn.totals))
    return RoundInfo(movement, *turn.counts)


_keys = compiled("problem", quick=True)(server.round_keys)


@compiled("problem", quick=True)
def _started(problem: Problem, before: RoundState, prior: Natural | None = None) -> Turn:
    """Where a round stands once the prior has been refined, if it is."""
    if prior is None:
        return _start(before)
    return _start(before._replace(server=server.with_prior(problem, before.server, prior)))


@compiled("problem", quick=True)
def _asked(
    problem: Problem, params: RoundParams, turn: Turn, groups: Array, index: Array, public: PRNGKey
) -> Request:
    """What the server asks of the clients of one of the groups, on a leading axis."""
    group = _group(params, groups, None, index)
    return jax.vmap(_ask(problem, params, turn, group, public))(group.numbers)


@compiled("problem")
def _visited(
    problem: Problem,
    params: RoundParams,
    clients: ClientState,
    groups: Array,
    drawn: Any,
    index: Array,
    secret: PRNGKey,
    asked: Request,
    shards: Shards,
) -> Outcome:
    group = _group(params, groups, drawn, index)
    respond = _of_records(problem, params, shards)
    return _visit(problem, params, clients, group, secret, asked, respond)


@compiled("problem", quick=True)
def _taken(
    problem: Problem,
    params: RoundParams,
    turn: Turn,
    groups: Array,
    index: Array,
    public: PRNGKey,
    outcomes: Outcome,
) -> Turn:
    """What the server makes of the releases of one of the groups."""
    group = _group(params, groups, None, index)
    return _take(problem, params, turn, group, public, outcomes)


_ended = compiled("problem", quick=True)(_end)


def _group(params: RoundParams, groups: Array, drawn: Any, index: Array) -> Group:
    drawn = jax.tree.map(lambda leaf: leaf[index], drawn)
    return _in_order(params, Group(index, groups[index], drawn))


def _in_order(params: RoundParams, group: Group) -> Group:
    """The same group; if it is of all clients, by their numbers, in which nothing is looked up."""
    num_clients = params.clients.num_shards.shape[0]
    if group.numbers.shape[0] < num_clients:
        return group
    # A schedule names no client twice in a group, so that these are all. Within a group it makes no
    # difference who is before whom.
    by_number = jnp.argsort(group.numbers)
    drawn = jax.tree.map(lambda leaf: leaf[by_number], group.drawn)
    numbers = cast(Array, np.arange(num_clients, dtype=group.numbers.dtype))
    return Group(group.place, numbers, drawn)


def _side_by_side(
    problem: Problem,
    params: RoundParams,
    visit: Callable[[tuple[Array, Any]], Outcome],
    visits: tuple[Array, Any],
) -> Outcome:
    """A group's visits, given with their numbers and noise, batch after batch."""
    numbers, _ = visits
    at_once = batch_size(problem, numbers.size)
    if problem.layout.rows_at_once is None or at_once is None or at_once == numbers.size:
        return jax.lax.map(visit, visits, batch_size=at_once)
    # A batch takes as long as its largest client, so that clients of about one size share it.
    order = jnp.argsort(params.clients.num_records[numbers])
    by_size = jax.tree.map(lambda leaf: leaf[order], visits)
    outcomes = jax.lax.map(visit, by_size, batch_size=at_once)
    back = jnp.argsort(order)
    # In the group's own order again, which the server's numbers of clients follow.
    return jax.tree.map(lambda leaf: leaf[back], outcomes)


def batch_size(problem: Problem, group_size: int) -> int | None:
    """Clients that are solved side by side; ``None`` for one after the other."""
    layout = problem.layout
    # A batch of one is many times slower than no batch at all.
    if group_size == 1 or (on_cpu() and _floats(problem) > _FLOATS_OF_ONE):
        return None
    if not on_cpu():
        return min(group_size, max(1, _FLOATS_ON_ACCELERATOR // _floats(problem)))
    # A client of n shards solves n problems.
    return min(group_size, _CLIENTS_AT_ONCE, max(1, _SOLVES_AT_ONCE // layout.num_shards))


def _floats(problem: Problem) -> int:
    """The entries of the gradients of all rows in a step of the largest client."""
    layout = problem.layout
    rows = layout.physical_size or layout.num_shards * layout.shard_capacity
    entries = jax.eval_shape(problem.family.standard)
    return rows * sum(leaf.size for leaf in jax.tree.leaves(entries))
