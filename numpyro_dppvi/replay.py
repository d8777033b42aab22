"""Runs a fit again with the clients' released factors in the place of their records.

What noise does to a posterior depends on the optimiser, the damping and how sharp the likelihood
is, and no formula covers that. But all of it is public, and the factors that clients have released
say how sharp: a client whose likelihood *is* its factor can be visited as often as one likes, with
fresh noise of the same size, and costs nothing. The spread of the posteriors that come out is the
noise that is in the real one. Per-record clipping is left out, because a factor has no records.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_dppvi import factors, local, natural_gradient, objective, server, start
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.methods import (
    DPOptimization,
    NonPrivate,
    ParameterPerturbation,
    VirtualClients,
    default_learning_rate,
)
from numpyro_dppvi.natural_gradient import NaturalGradient
from numpyro_dppvi.privacy import GaussianSum, Mechanism, PrivacyPlan, add_noise

# Replays that are run side by side hold so many numbers (64 MiB); the rest wait.
_FLOATS_AT_ONCE = 2**24


class Setting(NamedTuple):
    """What a replay needs to know; all of it is public or was released.

    Attributes:
        family: The family of q.
        method: What a client does.
        prior: The prior's factor.
        targets: The clients' factors, on a leading axis: what stands in for their likelihoods.
        noise_std: Noise on every change, or on every gradient after its division by the sampling
            probability, of each client; shape ``(num_clients,)``.
        clip_norm: Bound on a shard's change, of each client; shape ``(num_clients,)``.
        num_shards: Shards of each client, shape ``(num_clients,)``.
        groups: The clients that each round visits.
        damping: The share of a change that is merged.
        learning_rate: For Adam, where the method names no optimiser.
        aggregated: Whether only the sum of the changes is known.
        begin: The public start; ``None`` for the prior.
        alone: Whether clients' factors leave it out, and only their solves begin there.
    """

    family: MeanField
    method: Any
    prior: Natural
    targets: Natural
    noise_std: Array
    clip_norm: Array
    num_shards: Array
    groups: Sequence[np.ndarray]
    damping: float
    learning_rate: float
    aggregated: bool
    begin: Natural | None
    alone: bool


class _State(NamedTuple):
    factors: Natural
    private: Natural | None


def replays(setting: Setting) -> Callable[[PRNGKey, Array | float, int], Natural]:
    """Makes the function that replays a run; it is compiled once.

    Args:
        setting: What to replay.

    Returns:
        A function of a key (no secret: this noise protects nothing), the power that the targets
        are raised to, and how many replays to make. It returns natural parameters of q after every
        round, leading axes ``(num_rounds, num_replays)``.
    """
    num_clients = setting.noise_std.shape[0]
    has_private = setting.aggregated or isinstance(setting.method, VirtualClients)
    held = None if setting.alone else setting.begin
    first = _State(
        start.of_clients(setting.prior, held, num_clients, setting.aggregated),
        start.of_clients(setting.prior, held, num_clients, False) if has_private else None,
    )

    floats = num_clients * sum(leaf.size for leaf in jax.tree.leaves(setting.prior))
    at_once = max(1, _FLOATS_AT_ONCE // floats)

    @jax.jit
    def step(
        keys: PRNGKey, power: Array | float, groups: Array, state: _State
    ) -> tuple[_State, Natural]:
        raised = setting._replace(targets=factors.power(setting.targets, power))
        each = functools.partial(_round, raised)
        return jax.lax.map(lambda at: each(at[0], groups, at[1]), (keys, state), batch_size=at_once)

    def of(rng_key: PRNGKey, power: Array | float, num_replays: int) -> Natural:
        state = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_replays, *leaf.shape)), first)
        after = []
        for number, groups in enumerate(setting.groups):
            keys = jax.random.split(jax.random.fold_in(rng_key, number), num_replays)
            state, q = step(keys, power, jnp.asarray(groups), state)
            after.append(q)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)

    return of


def _round(
    setting: Setting, rng_key: PRNGKey, groups: Array, state: _State
) -> tuple[_State, Natural]:
    """One round, group after group."""

    def visit_group(now: _State, group: tuple[Array, Array]) -> tuple[_State, None]:
        clients, index = group
        q = server.approximation(setting.prior, now.factors)
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(rng_key, index)))
        changes, kept = jax.vmap(functools.partial(_visit, setting, q, now))(keys(clients), clients)
        targets = clients
        if setting.aggregated:
            changes = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, keepdims=True), changes)
            targets = jnp.zeros(1, clients.dtype)
        project = not isinstance(setting.method, NonPrivate)
        damping = jnp.asarray(setting.damping)
        merged, info = server.merge(
            setting.family, setting.prior, now.factors, targets, changes, damping, project
        )
        private = now.private
        if private is not None:
            share = factors.power(kept, jnp.where(info.rejected, 0.0, damping))
            private = jax.tree.map(lambda all_, c: all_.at[clients].add(c), private, share)
        return _State(merged, private), None

    end, _ = jax.lax.scan(visit_group, state, (groups, jnp.arange(groups.shape[0])))
    return end, server.approximation(setting.prior, end.factors)


def _visit(
    setting: Setting, q: Natural, state: _State, rng_key: PRNGKey, client: Array
) -> tuple[Natural, Natural]:
    """A client's change, and what its private factor follows."""
    own = state.factors if state.private is None else state.private
    own, target = (jax.tree.map(lambda leaf: leaf[client], tree) for tree in (own, setting.targets))
    noise_std, method = setting.noise_std[client], setting.method
    if isinstance(method, DPOptimization | NonPrivate):
        change = _solve(setting, q, own, target, rng_key, noise_std)
        return change, factors.unit(change)
    # Equal shards make equal changes: one of them is solved for.
    num_shards = setting.num_shards[client]
    if isinstance(method, VirtualClients):
        own, target = (factors.power(tree, 1 / num_shards) for tree in (own, target))
    change = _solve(setting, q, own, target, rng_key, jnp.zeros(()))
    rule = method.optimizer if isinstance(method.optimizer, NaturalGradient) else None
    if rule:
        change = natural_gradient.measured(rule, setting.family, q, change)
    norm = jnp.sqrt(factors.inner(change, change))
    change = factors.power(change, jnp.minimum(1.0, setting.clip_norm[client] / norm))
    if isinstance(method, VirtualClients):
        change = factors.power(change, num_shards)
    found = add_noise(rng_key, change, noise_std), change
    if rule:
        return tuple(natural_gradient.unmeasured(rule, setting.family, q, one) for one in found)
    return found


def _solve(
    setting: Setting,
    q: Natural,
    own: Natural,
    target: Natural,
    rng_key: PRNGKey,
    noise_std: Array,
) -> Natural:
    """A local solve whose likelihood is a factor, with noise on every gradient."""
    family, method = setting.family, setting.method
    tilted = factors.multiply(factors.divide(q, own), target)

    def records_gradient(key: PRNGKey, coordinates: Coordinates) -> Coordinates:
        del key
        return jax.grad(lambda at: -factors.inner(target, family.statistics(at)))(coordinates)

    def gradient(key: PRNGKey, coordinates: Coordinates) -> Coordinates:
        exact = jax.grad(objective.cavity_loss, argnums=2)(family, tilted, coordinates)
        return add_noise(key, exact, noise_std)

    optimizer = method.optimizer or optax.adam(setting.learning_rate)
    keys = jax.random.split(rng_key, method.num_local_steps)
    first = setting.begin if setting.alone and setting.begin is not None else q
    if isinstance(optimizer, NaturalGradient):
        change = natural_gradient.change(optimizer, family, q, own, keys, records_gradient)
    else:
        end = local.solve(keys, family.coordinates(first), gradient, optimizer)
        change = factors.divide(family.natural(end), q)
    return factors.select(factors.is_finite(change), change, factors.unit(change))


def setting_of(
    family: MeanField,
    method: Any,
    prior: Natural,
    client_factors: Natural,
    plan: PrivacyPlan,
    groups: Sequence[np.ndarray],
    damping: float,
    aggregated: bool,
    begin: Natural | None = None,
    alone: bool = False,
) -> Setting:
    """The replay of a run, from what it released.

    Where only the sum of the clients' changes is known, every client stands for an equal share.
    """
    num_clients = len(plan.clients)
    targets = client_factors
    if aggregated:
        share = factors.power(factors.total(client_factors), 1 / num_clients)
        targets = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), share
        )
    shards = [getattr(c.mechanism, "num_shards", 1) for c in plan.clients]
    if isinstance(method, ParameterPerturbation):
        shards = [1] * num_clients
    releases = sum(client.num_releases for client in plan.clients)
    return Setting(
        family,
        method,
        prior,
        targets,
        jnp.asarray(plan.noise_std / [_sampling_prob(client.mechanism) for client in plan.clients]),
        jnp.asarray([client.mechanism.clip_norm for client in plan.clients]),
        jnp.asarray(shards, float),
        groups,
        damping,
        default_learning_rate(method, releases, damping),
        aggregated,
        begin,
        alone,
    )


def _sampling_prob(mechanism: Mechanism) -> float:
    """What a noisy sum is divided by; 1 where it is not."""
    if isinstance(mechanism, GaussianSum):
        return float(mechanism.sampler.inclusion_prob(mechanism.num_records))
    return 1.0
