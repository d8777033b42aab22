"""One round as one compiled program: group after group of clients, visited side by side."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import factors, precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods.visits import Outcome
from numpyro_dppvi.protocol import client, initial, server
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.messages import Release, Request
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.server import MergeInfo, ServerState
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


class RoundState(NamedTuple):
    """What a round changes.

    Attributes:
        server: What the server knows.
        clients: What each client keeps to itself, on a leading axis.
    """

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


first_prior = compiled("problem")(server.first_prior)
"""The prior's factor to begin with, compiled."""


@compiled("problem", "asynchronous")
def first_state(
    problem: Problem,
    params: RoundParams,
    prior: Natural,
    begin: Natural | None,
    *,
    asynchronous: bool,
) -> RoundState:
    """What server and clients begin with.

    Args:
        problem: What is compiled in.
        params: What is not.
        prior: The prior's first factor.
        begin: The public start; ``None`` for the prior. Clients' factors hold it, but for those of
            clients who fit alone.
        asynchronous: Whether clients start from the q that they pulled when they last sent.
    """
    num_clients, layout = params.clients.num_shards.shape[0], problem.layout
    held = None if problem.starts_ahead else begin
    each = initial.of_clients(prior, held, num_clients, problem.aggregated)
    q = prior if held is None else held
    num_factors = 1 if problem.aggregated else num_clients
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


@compiled("problem")
def run_round(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    drawn: Any = None,
) -> tuple[RoundState, RoundInfo]:
    """One round: the prior's factor, then group after group of clients.

    Args:
        problem: What is compiled in.
        params: What is not.
        before: What server and clients have.
        shards: All clients' records.
        groups: Client numbers, shape ``(num_groups, group_size)``.
        keys: The round's key and its secret key.
        drawn: The noise of the round's visits where it is drawn on the host, leading axes as of
            ``groups``; ``None`` where it comes from the secret key.

    Returns:
        What they have after it, and what happened.
    """

    def respond(
        number: Array, state: ClientState, request: Request, secret_key: PRNGKey, noise: Any
    ) -> Outcome:
        mine, records, num_records = jax.tree.map(
            lambda leaf: leaf[number], (params.clients, dict(shards.records), shards.num_records)
        )
        return client.respond(
            problem, mine, state, request, records, num_records, secret_key, noise
        )

    return one_round(problem, params, before, groups, keys, respond, drawn)


def one_round(
    problem: Problem,
    params: RoundParams,
    before: RoundState,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    respond: Respond,
    drawn: Any = None,
) -> tuple[RoundState, RoundInfo]:
    """A round of clients who do whatever ``respond`` says; else as :func:`run_round`."""
    # keys[0] is public and makes the draws of the latents; keys[1] is secret and makes noise and
    # batches. The two never meet: who knows the one can compute nothing of the other.
    first, public = server.begin_round(problem, params, before.server, keys[0])

    def visit_group(
        carry: tuple[RoundState, Natural], group: tuple[Array, Array, Any]
    ) -> tuple[tuple[RoundState, Natural], tuple[MergeInfo, Array]]:
        now, totals = carry
        numbers, index, noise = group
        key = server.group_key(problem, public, index)
        # All clients of a group start from this q, which has the changes of the groups before it.
        # The totals of the factors travel from group to group: adding up all M factors anew at each
        # of M visits would make a sequential round cost M squared.
        q = server.from_totals(now.server.prior, totals)

        def visit(number: Array, noise: Any) -> Outcome:
            request = server.request(problem, params, now.server, q, number, key)
            mine = client.of_many(now.clients, number)
            # The noise of a visit has a key of its own by round, group and client: a client that is
            # visited twice in a round must not add the same noise twice.
            own = client.secret_key_of_visit(problem, keys[1], group=index, client=number)
            # What the server adds up may be wider; a client and its model are as they are anywhere.
            with precision.program(params.precision):
                return respond(number, mine, request, own, noise)

        outcomes = _side_by_side(problem, params, lambda at: visit(*at), (numbers, noise))
        # From here to the answer nothing is seen but what was released.
        releases = Release(outcomes.release, outcomes.failed)
        known, answer, info = server.take(
            problem, params, now.server, numbers, q, releases, key, totals
        )
        # Totals are taken again from the factors that were written, not from the changes, so that
        # they cannot drift away from them.
        # With an aggregator there is one factor, number 0, of all clients.
        changed = jnp.zeros_like(numbers) if problem.aggregated else numbers
        mine = jax.tree.map(lambda leaf: leaf[changed], known.factors)
        totals = factors.renewed(totals, known.factors, changed, mine)
        clients = client.settle_many(now.clients, numbers, outcomes.kept, answer)
        failed = jnp.sum(outcomes.failed, dtype=jnp.int32)
        return (RoundState(known, clients), totals), (info, failed)

    # Groups depend on each other and are scanned. Clients of a group do not, and are mapped.
    visits = (groups, jnp.arange(groups.shape[0]), drawn)
    totals = factors.block_totals(first.factors)
    start = before._replace(server=first), totals
    (end, last), (merges, failed) = jax.lax.scan(visit_group, start, visits)
    # The prior's update has left the clients' factors as they were.
    q = server.from_totals(before.server.prior, totals)
    movement = problem.family.jeffreys(q, server.from_totals(end.server.prior, last))
    return end, RoundInfo(movement, *(jnp.sum(leaf, axis=0) for leaf in (*merges, failed)))


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
    in_turn: Outcome = jax.tree.map(lambda leaf: leaf[back], outcomes)
    return in_turn


def batch_size(problem: Problem, group_size: int) -> int | None:
    """Clients that are solved side by side; ``None`` for one after the other."""
    layout = problem.layout
    one_by_one = jax.default_backend() == "cpu" and _floats(problem) > _FLOATS_OF_ONE
    # A batch of one is many times slower than no batch at all.
    if group_size == 1 or one_by_one:
        return None
    # A client of n shards solves n problems.
    return min(group_size, _CLIENTS_AT_ONCE, max(1, _SOLVES_AT_ONCE // layout.num_shards))


def _floats(problem: Problem) -> int:
    """The entries of the gradients of all rows in a step of the largest client."""
    layout = problem.layout
    rows = layout.physical_size or layout.num_shards * layout.shard_capacity
    entries = jax.eval_shape(problem.family.standard)
    return rows * sum(leaf.size for leaf in jax.tree.leaves(entries))
