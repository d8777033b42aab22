"""One round as one compiled program: group after group of clients, visited side by side."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.guides import PriorFactor
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import visits
from numpyro_dppvi.methods.values import Method
from numpyro_dppvi.protocol import server
from numpyro_dppvi.protocol.initial import of_clients, of_shards
from numpyro_dppvi.protocol.server import MergeInfo
from numpyro_dppvi.records import Shards

Visit: TypeAlias = Callable[[Array, Natural, Natural, PRNGKey, PRNGKey, Any], visits.Message]
"""What a visit does: client's number, q, what to divide out of q, key, secret key, drawn noise."""

# Local problems of one group that are solved side by side; the rest wait. Bounds memory.
_SOLVES_AT_ONCE = 512
_CLIENTS_AT_ONCE = 16


class Problem(NamedTuple):
    """What is compiled in: equal problems share one compiled program.

    Attributes:
        space: The model.
        family: The family of q.
        method: What a client does, as of :func:`~numpyro_dppvi.methods.values.program_of`.
        layout: Sizes.
        rest: Latents whose prior does not lie in the family.
        refined: Members of the family whose part of the prior's factor is refined.
        aggregated: Whether the server sees only the sum of the changes.
    """

    space: LatentSpace
    family: MeanField
    method: Method
    layout: visits.Layout
    rest: frozenset[str]
    refined: frozenset[str]
    aggregated: bool


class Numbers(NamedTuple):
    """What is handed to the compiled program.

    Attributes:
        exact_prior: The part of the prior that lies in the family.
        noise_std: Noise that each client adds, shape ``(M,)``.
        num_shards: Shards of each client, shape ``(M,)``.
        weight: What each client's sum over shards is multiplied by, shape ``(M,)``.
        clip_norm: Each client's bound on what enters a sum, shape ``(M,)``.
        inclusion_prob: The probability that a record of each client is in a batch, shape ``(M,)``.
        damping: The share of a change that is merged.
        learning_rate: For Adam, where the method names no optimiser.
        prior_left_out: The power of the prior that a client's cavity leaves out, 0 but for a
            committee machine with a split prior.
        drawn: The noise of a round's visits where it is drawn on the host, leading axes as of its
            groups; ``None`` where it comes from the secret key.
        begin: Where local solves begin that do not begin at q; ``None`` for at q.
    """

    exact_prior: Natural
    noise_std: Array
    num_shards: Array
    weight: Array
    clip_norm: Array
    inclusion_prob: Array
    damping: Array
    learning_rate: Array
    prior_left_out: Array
    drawn: Any = None
    begin: Natural | None = None


class Factors(NamedTuple):
    """What a round changes.

    Attributes:
        prior: The prior's factor.
        clients: The clients' factors, or the one of all together, on a leading axis.
        private: Factors that stay at their clients, or ``None``.
        pulled: The q that each client starts from, or ``None`` for the current one.
    """

    prior: Natural
    clients: Natural
    private: Natural | None
    pulled: Natural | None


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


@functools.partial(jax.jit, static_argnames="problem")
def first_prior(problem: Problem, numbers: Numbers, rng_key: PRNGKey) -> Natural:
    """The prior's factor to begin with."""
    parts = PriorFactor(numbers.exact_prior, problem.rest, problem.refined)
    return server.first_prior(problem.space, problem.family, parts, rng_key)


def first_factors(
    problem: Problem, numbers: Numbers, prior: Natural, begin: Natural | None, asynchronous: bool
) -> Factors:
    """The factors to begin with.

    Args:
        problem: What is compiled in.
        numbers: What is not.
        prior: The prior's first factor.
        begin: The public start that clients' factors hold; ``None`` for the prior.
        asynchronous: Whether clients start from the q that they pulled when they last sent.
    """
    num_clients, layout = numbers.num_shards.shape[0], problem.layout
    clients = of_clients(prior, begin, num_clients, problem.aggregated)
    private = pulled = None
    if layout.private:
        # A client's factor is the product of its shards' to the power of its weight.
        shares = 1 / (num_clients * numbers.num_shards * numbers.weight)
        private = of_shards(prior, begin, shares, layout.num_shards)
    if asynchronous:
        q = prior if begin is None else begin
        pulled = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), q)
    return Factors(prior, clients, private, pulled)


@functools.partial(jax.jit, static_argnames="problem")
def run(
    problem: Problem,
    numbers: Numbers,
    start: Factors,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
) -> tuple[Factors, RoundInfo]:
    """One round: the prior's factor, then group after group of clients.

    Args:
        problem: What is compiled in.
        numbers: What is not.
        start: The factors before.
        shards: All clients' records.
        groups: Client numbers, shape ``(num_groups, group_size)``.
        keys: The round's key and its secret key.

    Returns:
        The factors after, and what happened.
    """
    visit = functools.partial(_visit_records, problem, numbers, shards)
    return one_round(problem, numbers, start, groups, keys, visit)


def one_round(
    problem: Problem,
    numbers: Numbers,
    start: Factors,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    visit: Visit,
) -> tuple[Factors, RoundInfo]:
    """What :func:`run` does, whatever a client does when it is visited; arguments as there."""
    before = server.approximation(start.prior, start.clients)
    if problem.refined:
        prior_key, clients_key = jax.random.split(keys[0])
        keys = (clients_key, keys[1])
        start = start._replace(prior=_refined_prior(problem, numbers, start, prior_key))

    def group_step(
        now: Factors, group: tuple[Array, Array, Any]
    ) -> tuple[Factors, tuple[MergeInfo, Array]]:
        clients, index, noise = group
        group_keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
        q = server.approximation(now.prior, now.clients)
        messages = jax.lax.map(
            lambda at: _visit(numbers, q, now, visit, group_keys, *at),
            (clients, noise),
            batch_size=_batch_size(problem, clients.size),
        )
        after, info = _merged(problem, numbers, now, clients, messages)
        return after, (info, jnp.sum(messages.failed, dtype=jnp.int32))

    visits = (groups, jnp.arange(groups.shape[0]), numbers.drawn)
    end, (merges, failed) = jax.lax.scan(group_step, start, visits)
    movement = problem.family.jeffreys(before, server.approximation(end.prior, end.clients))
    return end, RoundInfo(movement, *(jnp.sum(leaf, axis=0) for leaf in (*merges, failed)))


def _batch_size(problem: Problem, group_size: int) -> int | None:
    """Clients that are solved side by side; ``None`` for one after the other."""
    if group_size == 1:  # a batch of one is many times slower than no batch at all
        return None
    return min(group_size, _CLIENTS_AT_ONCE, max(1, _SOLVES_AT_ONCE // problem.layout.num_shards))


def _merged(
    problem: Problem, numbers: Numbers, now: Factors, clients: Array, messages: visits.Message
) -> tuple[Factors, MergeInfo]:
    """The server's merge, and the clients' own factors after it."""
    changes, targets = messages.change, clients
    solver = problem.method.solver(numbers.learning_rate)
    if problem.aggregated:
        changes = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, keepdims=True), changes)
        targets = jnp.zeros(1, clients.dtype)
    merged, info = server.merge(
        problem.family,
        now.prior,
        now.clients,
        targets,
        changes,
        numbers.damping,
        problem.method.releases != "nothing",
        solver.repaired_whole(problem.family, problem.refined),
    )
    after = now._replace(clients=merged)
    if now.private is not None:
        # What the server refused did not happen at the clients, either.
        share = jnp.where(info.rejected, 0.0, numbers.damping)
        kept = factors.power(messages.kept, share)
        after = after._replace(
            private=jax.tree.map(lambda all_, c: all_.at[clients].add(c), now.private, kept)
        )
    if now.pulled is not None:
        q = server.approximation(after.prior, after.clients)
        pulled = jax.tree.map(lambda all_, leaf: all_.at[clients].set(leaf), now.pulled, q)
        after = after._replace(pulled=pulled)
    return after, info


def _visit(
    numbers: Numbers,
    q: Natural,
    now: Factors,
    visit: Visit,
    keys: tuple[PRNGKey, PRNGKey],
    number: Array,
    noise: Any,
) -> visits.Message:
    """One client's visit, with keys or noise of its own."""

    def of_client(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[number], tree)

    left_out = factors.power(now.prior, numbers.prior_left_out)
    own = of_client(now.clients if now.private is None else now.private)
    # Broadcasts over the shards of a virtual client.
    own = factors.multiply(own, left_out)
    q = q if now.pulled is None else of_client(now.pulled)
    ahead = None if numbers.begin is None else factors.divide(numbers.begin, q)
    if ahead is not None:  # a solve begins at its q: both move, and the cavity q / own does not
        q, own = factors.multiply(q, ahead), factors.multiply(own, ahead)
    rng_key, secret_key = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
    message = visit(number, q, own, rng_key, secret_key, noise)
    change = message.change
    if ahead is not None:
        change = factors.select(message.failed, change, factors.multiply(change, ahead))
    return message._replace(change=factors.multiply(change, left_out))


def _visit_records(
    problem: Problem,
    numbers: Numbers,
    shards: Shards,
    number: Array,
    q: Natural,
    own: Natural,
    rng_key: PRNGKey,
    secret_key: PRNGKey,
    noise: Any,
) -> visits.Message:
    """What a client does with its records."""

    def of_client(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[number], tree)

    data = visits.LocalData(
        records=dict(of_client(shards.records)),
        num_records=shards.num_records[number],
        num_shards=numbers.num_shards[number],
        noise_std=numbers.noise_std[number],
        weight=numbers.weight[number],
        clip_norm=numbers.clip_norm[number],
        inclusion_prob=numbers.inclusion_prob[number],
    )
    return visits.with_records(
        problem.method,
        problem.space,
        problem.family,
        problem.layout,
        q,
        own,
        data,
        learning_rate=numbers.learning_rate,
        rng_key=rng_key,
        secret_key=secret_key,
        drawn=noise,
    )


def _refined_prior(problem: Problem, numbers: Numbers, start: Factors, rng_key: PRNGKey) -> Natural:
    """The prior's factor after its own damped update; needs no data and costs no privacy."""
    parts = PriorFactor(numbers.exact_prior, problem.rest, problem.refined)
    q = server.approximation(start.prior, start.clients)
    change = server.refine_prior(problem.space, problem.family, parts, q, start.prior, rng_key)
    refined = factors.multiply(start.prior, factors.power(change, numbers.damping))
    good = problem.family.in_domain(server.approximation(refined, start.clients))
    return factors.select(good, refined, start.prior)
