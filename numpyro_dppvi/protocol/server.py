"""What the server does: ask, take what is released, merge, refine the prior. Sees no record."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey, PyTree
from numpyro_dppvi.families import LocationScaleFamily, MeanField, factors, precision
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.guides import PriorFactor
from numpyro_dppvi.methods import hierarchies, local_solve, objective
from numpyro_dppvi.methods.visits import ByClient, Received
from numpyro_dppvi.protocol.messages import Answer, Release, Request
from numpyro_dppvi.protocol.problem import Problem, RoundParams

# The prior's factor is refined by draws alone, which cost neither data nor privacy.
PRIOR_EXPECTATION = objective.MonteCarlo(64)
# Where clients add no noise, so many numbers are drawn a step: of few draws, a spread that its
# effects' widths follow comes out .4 of its standard deviations too large.
_EXACTLY, _MOST_DRAWS = 2**17, 1024
_PRIOR_STEPS = 200
# How often the first factor is solved for, each time in units of the place that was found last.
_FIRST_PRIOR_SOLVES = 8


@dataclass(frozen=True)
class TrustedAggregator:
    """A party, or a protocol, that shows the server nothing but the sum of the clients' messages.

    The clients' noise then protects the sum jointly: each adds a share (paper, Theorems 6 and 8).
    A client that drops out takes its share with it. The others' shares are sized so that
    ``max_dropouts`` may be missing; a round with fewer clients is refused before any release.

    Args:
        max_dropouts: How many clients may be missing from a round.

    Raises:
        ValueError: If it is no whole number, or negative.
    """

    max_dropouts: int = 0

    def __post_init__(self) -> None:
        _validate.set_field(self, "max_dropouts", _validate.not_negative_int)

    def num_shares(self, num_clients: int) -> int:
        """The least number of clients whose shares make up the noise of a sum.

        Args:
            num_clients: How many clients there are.

        Raises:
            ValueError: If all of them may be missing.
        """
        if self.max_dropouts >= num_clients:
            raise ValueError(
                f"max_dropouts must be below the number of clients, got {self.max_dropouts} for "
                f"{num_clients} clients."
            )
        return num_clients - self.max_dropouts

    def check(self, groups: np.ndarray, num_clients: int) -> None:
        """Refuses a round in which too few clients' shares would meet in one sum.

        Args:
            groups: A round of a schedule, shape ``(num_groups, group_size)``.
            num_clients: How many clients there are.

        Raises:
            ValueError: In that case.
        """
        # Of M clients D may be missing, so that each adds noise of variance v / (M - D), and M - D
        # of them add up to v. The groups of a round are summed one by one: two of M / 2 clients
        # would have about half of v each.
        present = groups.shape[1]
        if groups.shape[0] != 1 or present < self.num_shares(num_clients):
            raise ValueError(
                f"with a trusted aggregator a round must be one group of at least "
                f"{self.num_shares(num_clients)} of the {num_clients} clients, got "
                f"{groups.shape[0]} groups of {present}: write schedule=synchronous, or "
                "TrustedAggregator(max_dropouts=...)."
            )


def aggregator(trusted: bool | TrustedAggregator) -> TrustedAggregator | None:
    """What ``trusted_aggregator=`` means: ``True`` allows no client to drop out."""
    if isinstance(trusted, TrustedAggregator):
        return trusted
    return TrustedAggregator() if _validate.flag("trusted_aggregator", trusted) else None


class ServerState(NamedTuple):
    """What the server knows, but for the number of the round; all of it was released.

    Attributes:
        prior: The prior's factor t_0.
        factors: The clients' factors t_m, on a leading axis; with a trusted aggregator the one
            factor of all clients together, because only the sum of what they release is known.
        memory: What the method remembers of releases; ``None`` for nothing.
        begin: The public start, or ``None`` for a run that begins at the prior.
    """

    prior: Natural
    factors: Natural
    memory: PyTree = None
    begin: Natural | None = None

    @property
    def natural(self) -> Natural:
        """Natural parameters of q, which is always the product of the factors."""
        return approximation(self.prior, self.factors)


class MergeInfo(NamedTuple):
    """What a merge did; functions of released values only."""

    projected: Array  # entries of the product of the clients' factors that were raised to zero
    rejected: Array  # whether the merge was refused because q would have left its domain


# Compiled as one: called by itself it would be a program for each of its operations.
@compiled()
def approximation(prior: Natural, client_factors: Natural) -> Natural:
    """q: the prior's factor times every client's factor (stacked on a leading axis)."""
    return factors.multiply(prior, factors.total(client_factors))


def from_totals(prior: Natural, totals: Natural) -> Natural:
    """The same from the ``factors.block_totals`` of the clients' factors, to the last bit."""
    return factors.multiply(prior, factors.of_blocks(totals))


def begin_round(
    problem: Problem, params: RoundParams, state: ServerState, rng_key: PRNGKey
) -> tuple[ServerState, PRNGKey]:
    """The prior's own update, where it has one, and the public key of the round's groups."""
    prior_key, rng_key = round_keys(problem, rng_key)
    if prior_key is None:
        return state, rng_key
    # Once a round and before any group, so that all of them are sent a q with the same prior.
    refined = refined_prior(problem, params, state.natural, state.prior, prior_key, params.damping)
    return with_prior(problem, state, refined), rng_key


def refines(problem: Problem) -> bool:
    """Whether the prior has an update of its own before each round."""
    # A server that takes the steps has the prior in each of them.
    return bool(problem.refined) and not problem.method.central


def round_keys(problem: Problem, rng_key: PRNGKey) -> tuple[PRNGKey | None, PRNGKey]:
    """A key for the prior's own update, where it has one, and the public key of the groups."""
    if not refines(problem):
        return None, rng_key
    prior_key, rng_key = jax.random.split(rng_key)
    return prior_key, rng_key


def public_key(problem: Problem, rng_key: PRNGKey, number: Array | int) -> PRNGKey:
    """The public key of a group's visits from its round's, or of a client's from its group's."""
    # A server that takes the steps has one group a round, whose clients draw latents alike.
    return rng_key if problem.method.central else jax.random.fold_in(rng_key, number)


def request(
    problem: Problem,
    params: RoundParams,
    state: ServerState,
    q: Natural,
    client: Array | int,
    rng_key: PRNGKey,
) -> Request:
    """What a client is asked."""
    rng_key = public_key(problem, rng_key, client)
    # With an aggregator there is one factor, of all clients together, and one memory.
    place = 0 if problem.aggregated else client
    own = params.precision
    told = precision.rounded(problem.method.told(state.memory, place), own)
    # Such a client divides out its shards' factors, which the server has never seen.
    if problem.layout.private:
        return Request(precision.rounded(q, own), None, rng_key, params.learning_rate, told)
    factor = factors.multiply(
        jax.tree.map(lambda leaf: leaf[place], state.factors), _left_out(params, state)
    )
    if problem.starts_ahead:
        # A solve begins at its q: both move, and the cavity q / factor does not.
        ahead = _ahead(state, q)
        q, factor = factors.multiply(q, ahead), factors.multiply(factor, ahead)
    q, factor = precision.rounded((q, factor), own)
    return Request(q, factor, rng_key, params.learning_rate, told)


def take(
    problem: Problem,
    params: RoundParams,
    state: ServerState,
    clients: Array,
    q: Natural,
    releases: Release,
    rng_key: PRNGKey,
    totals: Natural | None = None,
) -> tuple[ServerState, Answer, MergeInfo]:
    """Takes what a group of clients has released, on a leading axis, when it was sent q.

    ``totals`` are the ``factors.block_totals`` of the clients' factors, where they are known: a
    visit costs as much then however many clients there are.
    """
    method, value, targets = problem.method, releases.value, clients
    each = params.clients
    noise_std, num_records = each.noise_std[clients], each.num_records[clients]
    if problem.aggregated:
        # Independent shares of noise: their variances add up, as the records behind the sum do.
        value = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, keepdims=True), value)
        targets = jnp.zeros(1, clients.dtype)
        noise_std = jnp.sqrt(jnp.sum(noise_std**2, keepdims=True))
        num_records = jnp.sum(num_records, keepdims=True)
    parts, solver = params.prior_of(problem), method.solver(params.learning_rate)
    before = factors.picked(state.factors, targets)
    received = Received(
        space=problem.space,
        family=problem.family,
        q=q,
        factor=before,
        noise_std=noise_std,
        num_records=num_records,
        total_records=jnp.sum(each.num_records),
        num_factors=jax.tree.leaves(state.factors)[0].shape[0],
        learning_rate=params.learning_rate,
        rng_key=rng_key,
        prior_loss=functools.partial(
            _prior_loss, problem, problem.family, parts, params.exact_prior
        ),
    )
    of_group = _of_group(state.memory, targets)
    changes, remembered = method.take(received, value, of_group, targets)
    # Noise that is part of a factor may have to be repaired. Factors that the server makes of sums
    # are proper by themselves, but for rounding: repaired, their least eigenvalues would be lost
    # among the largest, which in raw units are 1e8 times as large.
    noisy_factors = method.releases in ("gradients", "changes") and not method.central
    if not problem.layout.private:
        changes = _as_if_from_q(problem, params, state, q, releases.failed, changes)
    totals = factors.block_totals(state.factors) if totals is None else totals
    merged, totals, info = merge(
        problem.family,
        state.prior,
        state.factors,
        totals,
        targets,
        changes,
        damping=params.damping,
        project=noisy_factors,
        whole=solver.repaired_whole(problem.family, problem.refined),
    )
    # What was refused did not happen: a step that is taken back leaves no momentum, either.
    remembered = factors.select(info.rejected, of_group, remembered)
    memory = _with_group(state.memory, targets, remembered)
    after = state._replace(factors=merged, memory=memory)
    # Clients' private factors follow by as much, or they would hold changes that are not in q.
    share = jnp.where(info.rejected, 0.0, params.damping)
    return after, Answer(share, from_totals(state.prior, totals)), info


def _of_group(memory: PyTree, places: Array) -> PyTree:
    """What is remembered, and of each client only for some."""

    def of(part: Any) -> Any:
        return factors.picked(part, places) if _is_by_client(part) else part

    return jax.tree.map(of, memory, is_leaf=_is_by_client)


def _with_group(memory: PyTree, places: Array, group: PyTree) -> PyTree:
    """What is remembered, where :func:`_of_group` of it has become something else."""

    # Written once, in place: a copy of what is remembered of all clients would cost more than a
    # visit.
    def put(before: Any, now: Any) -> Any:
        return factors.replaced(before, places, now) if _is_by_client(before) else now

    return jax.tree.map(put, memory, group, is_leaf=_is_by_client)


def _is_by_client(part: Any) -> bool:
    return isinstance(part, ByClient)


def _left_out(params: RoundParams, state: ServerState) -> Natural:
    """The part of the prior that a client's cavity leaves out."""
    return factors.power(state.prior, params.prior_left_out)


def _ahead(state: ServerState, q: Natural) -> Natural:
    """The way from q to the public start."""
    assert state.begin is not None, "Problem.starts_ahead without a start"
    return factors.divide(state.begin, q)


def _as_if_from_q(
    problem: Problem,
    params: RoundParams,
    state: ServerState,
    q: Natural,
    failed: Array,
    changes: Natural,
) -> Natural:
    """Changes of q, from those of what was sent in its place; undoes what :func:`request` did."""
    # With l the part of the prior that is left out and a = begin / q, the client was sent q a and
    # t l a. Its cavity was (q a) / (t l a) = q / (t l), and it returns the change d = q' / (q a).
    # Its new factor is q' over that cavity, q' t l / q, so t changes by q' l / q = d a l.
    if problem.starts_ahead:
        ahead = _ahead(state, q)
        # A solve that failed stays at q, where it was before it was sent ahead.
        moved = jax.tree.map(jnp.add, changes, ahead)
        changes = jax.vmap(factors.select)(failed, changes, moved)
    return jax.tree.map(jnp.add, changes, _left_out(params, state))


@precision.in_own_precision
def merge(
    family: MeanField,
    prior: Natural,
    client_factors: Natural,
    totals: Natural,
    clients: Array,
    changes: Natural,
    *,
    damping: Array | float,
    project: bool,
    whole: frozenset[str] = frozenset(),
) -> tuple[Natural, Natural, MergeInfo]:
    """Multiplies damped changes into the factors of the clients that sent them.

    One rule keeps noise from leaving the domain, and acts on released values only, after the sum:
    where the product of all clients' factors falls below precision zero, so that q would know less
    than the prior, it is raised to zero by the factors of this group, in equal shares
    (``project``). If q is still improper, the merge is refused whole and all stays as it was.

    Where the prior is refined itself, as in a hierarchy, what is raised to zero also loses its
    location: a group's effect of no precision but some location would widen the prior of all
    effects, which lets go of that effect further, and so on without end (``whole``: these members).

    Without noise factors may rightly be improper, and are not repaired. ``totals`` are the
    ``factors.block_totals`` of all clients' factors; these and the changes, of ``clients`` alone,
    have a leading axis. The new factors are returned, with their totals and what happened.
    """
    # Factors are written once, and not added up: what is done to all of them costs as much as a
    # visit where clients are visited one by one.
    # t_m <- t_m * change^damping, and so q <- q * (product of the changes)^damping.
    old = factors.picked(client_factors, clients)
    # As natural parameters: a product of factors is a sum, a power a multiple.
    mine = jax.tree.map(jnp.add, old, factors.power(changes, damping))
    sums = factors.renewed(totals, client_factors, clients, mine)
    raised = jnp.zeros((), jnp.int32)
    if project:
        likelihood = factors.of_blocks(sums)
        # What is missing of the projected product, an n-th of it for each of the n clients. It is
        # not damped: the product must be at its bound after this merge, not on the way there.
        deficit = factors.divide(family.project(likelihood, whole), likelihood)
        raised = factors.count_nonzero(deficit)
        share = factors.power(deficit, 1 / clients.shape[0])
        mine = jax.tree.map(jnp.add, mine, share)
        sums = factors.renewed(totals, client_factors, clients, mine)
    # A release may be infinite or NaN, a hostile client's for one, and then q is not in the domain.
    # Factors are selected and not weighted by 0 or 1, because 0 times such a number is NaN.
    good = family.in_domain(from_totals(prior, sums))
    merged = factors.replaced(client_factors, clients, factors.select(good, mine, old))
    sums = factors.select(good, sums, totals)
    return merged, sums, MergeInfo(jnp.where(good, raised, 0), ~good)


def _prior_loss(
    problem: Problem,
    family: MeanField,
    parts: PriorFactor,
    cavity: Natural,
    rng_key: PRNGKey,
    coordinates: Coordinates,
) -> Array:
    """The loss of a cavity and of the priors that lie outside the family."""
    loss = objective.cavity_loss(family, cavity, coordinates)
    if not parts.refined:
        return loss
    rule = PRIOR_EXPECTATION
    if problem.method.releases == "nothing":
        most = min(_MOST_DRAWS, _EXACTLY // problem.space.size)
        rule = objective.MonteCarlo(max(rule.num_draws, most))
    return loss + objective.prior_loss(
        problem.space, family, rule, rng_key, coordinates, parts.rest
    )


def refine_prior(
    problem: Problem, params: RoundParams, q: Natural, prior: Natural, rng_key: PRNGKey
) -> Natural:
    """The change of the prior's factor: like a client's, with the prior as its "likelihood".

    It is zero for latents whose prior is exact, and where the solve failed.
    """
    # As for a client with the factor prior / exact and the inexact densities as its likelihood:
    # the exact part stays in the cavity, where it is neither fitted nor lost.
    # q / (prior / exact) = exact * all clients' factors.
    own, parts = params.precision, params.prior_of(problem)
    # The expected log density r of those priors is a function of the marginal of q over the latents
    # x that they depend on. With q = q(x) q(y | x) and a cavity c(x) c(y | x), the divergence is
    # KL(q(x) || c(x) exp r) + E KL(q(y | x) || c(y | x)): the second is 0 at q(y | x) = c(y | x),
    # and the factor is one of x alone. Of y a step of Adam would change nothing but by noise and
    # rounding, as large as q's precision there, which may be 1e10 times that of a wide prior.
    family = problem.family.within(problem.space.seen_by(parts.rest))
    mine = problem.family.block(factors.divide(prior, parts.exact), family)
    q = problem.family.marginal(q, family)
    cavity = factors.divide(q, mine)
    found = None
    if problem.method.matches:
        found = hierarchies.matched(problem.space, family, parts.rest, cavity, q)
    if found is not None:
        return _kept(problem, parts, family, factors.divide(found, q))
    cavity, here = precision.rounded((cavity, family.coordinates(q)), own)

    # Adam's steps have no units but latents have, and may differ by orders of magnitude. So steps
    # are taken in x, with theta = m + L x and x standard normal under q, where all are alike.
    white = {n: f for n, f in family.members if isinstance(f, LocationScaleFamily)}

    def at(inner: Coordinates) -> Coordinates:
        moved = {name: member.composed(here[name], inner[name]) for name, member in white.items()}
        return Coordinates({**inner, **moved})

    def loss(key: PRNGKey, inner: Coordinates) -> Array:
        return _prior_loss(problem, family, parts, cavity, key, at(inner))

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, _PRIOR_STEPS, alpha=0.02))
    # Fresh draws at every step, and a rate that falls to a fiftieth, so that their noise averages
    # out.
    keys = jax.random.split(rng_key, _PRIOR_STEPS)
    with precision.program(own):
        # Others stay where they are: standard distributions of theirs would not be q.
        standard = family.standard()
        start = Coordinates({**here, **{name: standard[name] for name in white}})
        end = at(local_solve.solve(keys, start, jax.grad(loss, argnums=1), optimizer))
    change = factors.divide(family.natural(precision.as_wide_as(q, end)), q)
    return _kept(problem, parts, family, change)


def _kept(problem: Problem, parts: PriorFactor, family: MeanField, change: Natural) -> Natural:
    """A change of a marginal's factor as one of the prior's; none where it is not finite."""
    change = problem.family.embedded(change, family)
    # Adam turns rounding errors into steps: latents that the rest does not touch stay put.
    change = Natural(
        {
            name: part if name in parts.refined else jax.tree.map(jnp.zeros_like, part)
            for name, part in change.items()
        }
    )
    return factors.select(factors.is_finite(change), change, factors.unit(change))


def refined_prior(
    problem: Problem,
    params: RoundParams,
    q: Natural,
    prior: Natural,
    rng_key: PRNGKey,
    share: Array | float,
) -> Natural:
    """The prior's factor with a share of its change; other arguments as of :func:`refine_prior`."""
    change = refine_prior(problem, params, q, prior, rng_key)
    return factors.multiply(prior, factors.power(change, share))


def with_prior(problem: Problem, state: ServerState, refined: Natural) -> ServerState:
    """The state after an update of the prior's factor, which needs no data: it is free."""
    # As in a merge, a step after which q would be improper is not taken. A proper prior does not
    # rule that out, because the clients' factors are noisy.
    good = problem.family.in_domain(approximation(refined, state.factors))
    return state._replace(prior=factors.select(good, refined, state.prior))


def before_first_prior(
    problem: Problem, params: RoundParams, rng_key: PRNGKey
) -> tuple[Natural, list[PRNGKey]]:
    """Where the solves for the prior's first factor start, and a key for each."""
    parts = params.prior_of(problem)
    # Latents that the exact part says nothing of would have no distribution to start from.
    start = factors.multiply(parts.exact, problem.family.standard_of(parts.rest))
    return start, list(jax.random.split(rng_key, _FIRST_PRIOR_SOLVES))
