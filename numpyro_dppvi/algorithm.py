"""Differentially private partitioned variational inference (paper, Algorithm 1), as functions.

    algorithm = pvi(model, guide, records, method=..., client_sizes=..., plan=...)
    state = algorithm.init(key)
    for round_number in range(num_rounds):
        state, info = algorithm.step(key, state, shards)
    posterior = algorithm.posterior(state)

The loop is the user's; the ledger still counts, because it is a field of the state.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate, client, factors, guides, latents, methods, schedules, server
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.guides import PriorFactor
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import Method, NonPrivate, default_learning_rate
from numpyro_dppvi.partition import Shards
from numpyro_dppvi.posterior import Posterior
from numpyro_dppvi.privacy import Entry, Ledger, PrivacyPlan, SecretKeys
from numpyro_dppvi.server import MergeInfo

# Clients of one group that are solved side by side; the rest wait. Bounds memory.
_CLIENTS_AT_ONCE = 16


class PVIState(NamedTuple):
    """Everything the next round needs; nothing in it is a record or an unreleased number.

    Attributes:
        round: How many rounds have been run.
        prior: The prior's factor t_0.
        factors: The clients' factors t_m, on a leading axis.
        ledger: What was released.
    """

    round: int
    prior: Natural
    factors: Natural
    ledger: Ledger

    @property
    def natural(self) -> Natural:
        """Natural parameters of q: always the product of the factors."""
        return server.approximation(self.prior, self.factors)


class RoundInfo(NamedTuple):
    """What a round did; functions of released values only.

    Attributes:
        movement: Jeffreys divergence between q before and after the round, in nats.
        projected: Entries of the product of the clients' factors that were raised to zero, summed
            over the round's merges.
        rejected: Merges that were refused because q would have left its domain.
    """

    movement: Array
    projected: Array
    rejected: Array


class Algorithm(NamedTuple):
    """Partitioned variational inference as three functions.

    Attributes:
        init: ``rng_key -> state``.
        step: ``(rng_key, state, shards) -> (state, info)``: one round, charged to the state's
            ledger before anything is computed.
        posterior: ``state -> Posterior``.
    """

    init: Callable[[PRNGKey], PVIState]
    step: Callable[[PRNGKey, PVIState, Shards], tuple[PVIState, RoundInfo]]
    posterior: Callable[[PVIState], Posterior]


class _Problem(NamedTuple):
    """What is compiled in: equal problems share one compiled program."""

    space: LatentSpace
    family: MeanField
    method: Method
    physical_size: int
    rest: frozenset[str]
    refined: frozenset[str]


class _Numbers(NamedTuple):
    """What is handed to the compiled program."""

    exact_prior: Natural
    noise_std: Array
    damping: Array
    learning_rate: Array


def pvi(
    model: Model,
    guide: Any,
    records: Mapping[str, Any],
    *,
    method: Method,
    client_sizes: Sequence[int],
    plan: PrivacyPlan | None = None,
    schedule: schedules.Schedule = schedules.sequential,
    damping: float = 0.4,
    model_kwargs: Mapping[str, Any] | None = None,
    secret_keys: SecretKeys = SecretKeys(),
) -> Algorithm:
    """Builds the algorithm. Nothing is computed from records until ``step`` gets shards.

    Args:
        model: A NumPyro model.
        guide: ``None``, ``AutoNormal(model)`` or ``AutoDiagonalNormal(model)``.
        records: Arrays or ``jax.ShapeDtypeStruct`` by argument name; only shapes and dtypes count.
        method: What a client does when visited.
        client_sizes: Number of records of each client.
        plan: The privacy plan of a private method; ``None`` for ``NonPrivate``.
        schedule: Which clients each round visits.
        damping: In (0, 1]; the share of a change that is merged.
        model_kwargs: The model's public arguments.
        secret_keys: Where noise and batches come from.

    Returns:
        The algorithm. Its ``step`` compiles once, whatever the number of rounds.

    Raises:
        UnsupportedModelError: If the model or guide cannot be fitted.
        ValueError: If the damping is outside (0, 1], or method and plan do not match.
    """
    methods.check(method)
    _validate.half_open_unit("damping", damping)
    num_clients = len(client_sizes)
    _check_plan(method, plan, num_clients)
    space = latents.from_model(model, records, model_kwargs)
    family = guides.family_of(guide, model, space)
    prior = guides.prior_factor(family, space)
    physical_size = plan.clients[0].mechanism.physical_size if plan else 0
    problem = _Problem(space, family, method, physical_size, prior.rest, prior.refined)
    noise_std = plan.noise_std if plan else np.zeros(num_clients)
    num_releases = sum(c.num_releases for c in plan.clients) if plan else 0
    rate = default_learning_rate(method, num_releases, damping)
    numbers = _Numbers(prior.exact, *(jnp.asarray(x) for x in (noise_std, damping, rate)))

    def init(rng_key: PRNGKey) -> PVIState:
        first = _first_prior(problem, numbers, _validate.rng_key(rng_key))
        ledger = plan.ledger() if plan else Ledger()
        return PVIState(0, first, factors.unit(first, num_clients), ledger)

    def step(rng_key: PRNGKey, state: PVIState, shards: Shards) -> tuple[PVIState, RoundInfo]:
        groups = schedules.check(schedule(state.round, num_clients), num_clients)
        ledger = state.ledger.charge(_entries(plan, state.round, groups)) if plan else state.ledger
        key = jax.random.fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, secret_keys.round_key(state.round))
        first, states, info = _run_round(
            problem, numbers, state.prior, state.factors, shards, jnp.asarray(groups), keys
        )
        return PVIState(state.round + 1, first, states, ledger), info

    def posterior(state: PVIState) -> Posterior:
        return Posterior(state.natural, family, space, model, dict(model_kwargs or {}), {})

    return Algorithm(init, step, posterior)


@functools.partial(jax.jit, static_argnames="problem")
def _first_prior(problem: _Problem, numbers: _Numbers, rng_key: PRNGKey) -> Natural:
    parts = PriorFactor(numbers.exact_prior, problem.rest, problem.refined)
    return server.first_prior(problem.space, problem.family, parts, rng_key)


@functools.partial(jax.jit, static_argnames="problem")
def _run_round(
    problem: _Problem,
    numbers: _Numbers,
    prior: Natural,
    states: Natural,
    shards: Shards,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
) -> tuple[Natural, Natural, RoundInfo]:
    """One round: the prior's factor, then group after group of clients."""
    num_clients = shards.num_records.shape[0]
    before = server.approximation(prior, states)
    if problem.refined:
        prior = _refined_prior(
            problem, numbers, prior, states, jax.random.fold_in(keys[0], num_clients)
        )

    def group_step(carry: Natural, group: tuple[Array, Array]) -> tuple[Natural, MergeInfo]:
        clients, index = group
        group_keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
        q = server.approximation(prior, carry)
        changes = jax.lax.map(
            lambda number: _visit(problem, numbers, q, carry, shards, group_keys, number),
            clients,
            # A batch of one is many times slower than no batch at all.
            batch_size=min(_CLIENTS_AT_ONCE, clients.size) if clients.size > 1 else None,
        )
        project = not isinstance(problem.method, NonPrivate)
        return server.merge(
            problem.family, prior, carry, clients, changes, numbers.damping, project
        )

    states, merges = jax.lax.scan(group_step, states, (groups, jnp.arange(groups.shape[0])))
    movement = _jeffreys(problem.family, before, server.approximation(prior, states))
    return prior, states, RoundInfo(movement, *(jnp.sum(leaf, axis=0) for leaf in merges))


def _jeffreys(family: MeanField, p: Natural, q: Natural) -> Array:
    """KL(p || q) + KL(q || p) within one exponential family: <eta_p - eta_q, E_p[T] - E_q[T]>."""
    means = [family.statistics(family.coordinates(natural)) for natural in (p, q)]
    return factors.inner(factors.divide(p, q), factors.divide(*means))


def _refined_prior(
    problem: _Problem, numbers: _Numbers, prior: Natural, states: Natural, rng_key: PRNGKey
) -> Natural:
    """The prior's factor after its own damped update; needs no data and costs no privacy."""
    parts = PriorFactor(numbers.exact_prior, problem.rest, problem.refined)
    q = server.approximation(prior, states)
    change = server.refine_prior(problem.space, problem.family, parts, q, prior, rng_key)
    refined = factors.multiply(prior, factors.power(change, numbers.damping))
    good = problem.family.in_domain(server.approximation(refined, states))
    return factors.select(good, refined, prior)


def _visit(
    problem: _Problem,
    numbers: _Numbers,
    q: Natural,
    states: Natural,
    shards: Shards,
    keys: tuple[PRNGKey, PRNGKey],
    number: Array,
) -> Natural:
    """One client's visit, with keys of its own."""
    shard = client.Shard(
        {name: leaf[number] for name, leaf in shards.records.items()},
        shards.num_records[number],
        numbers.noise_std[number],
    )
    factor = jax.tree.map(lambda leaf: leaf[number], states)
    rng_key, secret_key = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
    return client.visit(
        problem.space,
        problem.family,
        problem.method,
        problem.physical_size,
        q,
        factor,
        shard,
        numbers.learning_rate,
        rng_key,
        secret_key,
    )


def _entries(plan: PrivacyPlan, round_number: int, groups: np.ndarray) -> list[Entry]:
    """What a round is charged, client by client."""
    visits = np.bincount(groups.ravel(), minlength=len(plan.clients))
    return [
        Entry(round_number, m, mine.mechanism.dp_event, int(visits[m]) * mine.releases_per_visit)
        for m, mine in enumerate(plan.clients)
        if visits[m]
    ]


def _check_plan(method: Method, plan: PrivacyPlan | None, num_clients: int) -> None:
    if isinstance(method, NonPrivate) != (plan is None):
        raise ValueError(
            f"{type(method).__name__}() and {'no plan' if plan is None else 'a plan'} do not go "
            "together: private methods need plan=plan_privacy(...), NonPrivate() takes none."
        )
    if plan is not None and len(plan.clients) != num_clients:
        raise ValueError(
            f"the plan is for {len(plan.clients)} clients, but there are {num_clients}: make it "
            "with client_sizes of the same length."
        )
