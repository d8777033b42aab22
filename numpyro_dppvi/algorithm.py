"""Differentially private partitioned variational inference (paper, Algorithm 1), as functions.

    algorithm = pvi(model, guide, records, method=..., client_sizes=..., plan=...)
    state = algorithm.init(key)
    for round_number in range(num_rounds):
        state, info = algorithm.step(key, state, shards)
    posterior = algorithm.posterior(state)

The loop is the user's; the ledger still counts, because it is a field of the state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate, client, factors, guides, latents, schedules, server
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey, Records
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.methods import Method, NonPrivate
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


class Algorithm(NamedTuple):
    """Partitioned variational inference as three functions.

    Attributes:
        init: ``rng_key -> state``.
        step: ``(rng_key, state, shards) -> (state, info)``: one round, charged to the state's
            ledger before anything is computed.
        posterior: ``state -> Posterior``.
    """

    init: Callable[[PRNGKey], PVIState]
    step: Callable[[PRNGKey, PVIState, Shards], tuple[PVIState, MergeInfo]]
    posterior: Callable[[PVIState], Posterior]


def pvi(
    model: Model,
    guide: Any,
    records: Records,
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
    _validate.half_open_unit("damping", damping)
    _check_plan(method, plan, len(client_sizes))
    space = latents.from_model(model, records, model_kwargs)
    family = guides.family_of(guide, model, space)
    parts = guides.prior_factor(family, space)
    num_clients = len(client_sizes)
    noise_std = jnp.asarray(plan.noise_std if plan else np.zeros(num_clients))
    physical_size = 0 if isinstance(method, NonPrivate) else plan.clients[0].mechanism.physical_size

    def init(rng_key: PRNGKey) -> PVIState:
        key = _validate.rng_key(rng_key)
        prior = jax.jit(lambda key: server.first_prior(space, family, parts, key))(key)
        ledger = plan.ledger() if plan else Ledger()
        return PVIState(0, prior, factors.unit(prior, num_clients), ledger)

    def visit(q: Natural, states: Natural, shards: Shards, keys: Any, number: Array) -> Natural:
        mine = client.Shard(
            {name: leaf[number] for name, leaf in shards.records.items()},
            shards.num_records[number],
            noise_std[number],
        )
        factor = jax.tree.map(lambda leaf: leaf[number], states)
        own_keys = jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
        return client.visit(space, family, method, physical_size, q, factor, mine, *own_keys)

    @jax.jit
    def run_round(
        prior: Natural, states: Natural, shards: Shards, groups: Array, keys: Any
    ) -> tuple[Natural, Natural, MergeInfo]:
        if parts.refined:
            q = server.approximation(prior, states)
            key = jax.random.fold_in(keys[0], num_clients)
            change = server.refine_prior(space, family, parts, q, prior, key)
            prior = factors.multiply(prior, factors.power(change, damping))

        def group_step(carry: Natural, group: tuple[Array, Array]) -> tuple[Natural, MergeInfo]:
            numbers, index = group
            group_keys = jax.tree.map(lambda key: jax.random.fold_in(key, index), keys)
            q = server.approximation(prior, carry)
            changes = jax.lax.map(
                lambda number: visit(q, carry, shards, group_keys, number),
                numbers,
                batch_size=min(_CLIENTS_AT_ONCE, numbers.shape[0]),
            )
            project = not isinstance(method, NonPrivate)
            return server.merge(family, prior, carry, numbers, changes, damping, project)

        indices = jnp.arange(groups.shape[0])
        states, info = jax.lax.scan(group_step, states, (groups, indices))
        return prior, states, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), info)

    def step(rng_key: PRNGKey, state: PVIState, shards: Shards) -> tuple[PVIState, MergeInfo]:
        groups = schedules.check(schedule(state.round, num_clients), num_clients)
        ledger = state.ledger.charge(_entries(plan, state.round, groups)) if plan else state.ledger
        key = jax.random.fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, secret_keys.round_key(state.round))
        prior, states, info = run_round(
            state.prior, state.factors, shards, jnp.asarray(groups, jnp.int32), keys
        )
        return PVIState(state.round + 1, prior, states, ledger), info

    def posterior(state: PVIState) -> Posterior:
        return Posterior(state.natural, family, space, model, dict(model_kwargs or {}), {})

    return Algorithm(init, step, posterior)


def _entries(plan: PrivacyPlan, round_number: int, groups: np.ndarray) -> list[Entry]:
    """What a round is charged, client by client."""
    visits = np.bincount(groups.ravel(), minlength=len(plan.clients))
    return [
        Entry(round_number, m, client.mechanism.dp_event, int(visits[m]) * client.releases_per_visit)
        for m, client in enumerate(plan.clients)
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
