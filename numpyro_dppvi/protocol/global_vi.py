"""Baselines from the same pieces, otherwise wired: central variational inference, step by step.

The Bayesian committee machine needs no code of its own: it is one synchronous, undamped round.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi import _validate, guides, latents
from numpyro_dppvi._typing import Array, Coordinates, Model, Natural, PRNGKey
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import objective, values, visits
from numpyro_dppvi.methods.values import GlobalVI
from numpyro_dppvi.posterior.posterior import Posterior, shapes
from numpyro_dppvi.posterior.prior import Prior, check_proper, check_width, first_factor
from numpyro_dppvi.privacy import Ledger, LedgerFile, PrivacyPlan, SecretKeys
from numpyro_dppvi.protocol import checks, initial, schedules, server
from numpyro_dppvi.protocol.algorithm import Algorithm, charged, first_ledger
from numpyro_dppvi.protocol.rounds import RoundInfo
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import Shards

_LEARNING_RATE = 0.02


class GlobalState(NamedTuple):
    """Everything the next step needs; all of it was released, in sums over all clients.

    Attributes:
        round: How many steps have been taken.
        natural: Natural parameters of q.
        coordinates: The same, as the optimiser sees them.
        optimizer: The optimiser's state.
        ledger: What was released.
    """

    round: int
    natural: Natural
    coordinates: Coordinates
    optimizer: optax.OptState
    ledger: Ledger


class _Problem(NamedTuple):
    space: LatentSpace
    family: MeanField
    method: GlobalVI
    layout: visits.Layout
    rest: frozenset[str]


class _Numbers(NamedTuple):
    exact_prior: Natural
    noise_std: Array
    clip_norm: Array
    inclusion_prob: Array


def global_vi(
    model: Model,
    guide: Any,
    records: Mapping[str, Any],
    *,
    method: GlobalVI,
    client_sizes: Sequence[int],
    plan: PrivacyPlan,
    trusted: TrustedAggregator,
    model_kwargs: Mapping[str, Any] | None = None,
    secret_keys: SecretKeys = SecretKeys(),
    earlier: Prior | None = None,
    ledger_file: LedgerFile | None = None,
    init_scale: float | None = None,
) -> Algorithm:
    """Central DP-VI (Jälkö et al. 2017) as ``init / step / posterior``; arguments as of ``pvi``."""
    num_clients = len(client_sizes)
    init_scale = initial.check(init_scale)
    checks.check_plan(method, plan, client_sizes, trusted)
    space = latents.from_model(model, records, model_kwargs)
    latents.check_additive(space, model_kwargs or {}, sum(client_sizes))
    latents.check_priors(space)
    latents.warn_of_scales(space)
    space, family = guides.approximation(guide, model, space, records, model_kwargs)
    objective.rule_for(method.expectation, space, family)  # refused before anything is released
    prior = first_factor(earlier, family, space)
    check_width(family, prior, values.noisy_step(method, _LEARNING_RATE, family.standard()))
    layout = visits.Layout(plan.physical_size, 1, max(client_sizes))
    problem = _Problem(space, family, values.program_of(method), layout, prior.rest)
    mechanisms = [client.mechanism for client in plan.clients]
    numbers = _Numbers(
        exact_prior=prior.exact,
        noise_std=jnp.asarray(plan.noise_std),
        clip_norm=jnp.asarray([m.clip_norm for m in mechanisms]),
        inclusion_prob=jnp.asarray([m.inclusion_prob for m in mechanisms]),
    )
    optimizer = _optimizer(method)

    def init(rng_key: PRNGKey) -> GlobalState:
        prior_key, start_key = initial.keys(_validate.rng_key(rng_key), init_scale)
        first = jax.jit(lambda key: server.first_prior(space, family, prior, key))(prior_key)
        check_proper(family, first)
        begin = initial.narrow(family, first, start_key, init_scale)
        first = first if begin is None else begin
        coordinates = family.coordinates(first)
        ledger = first_ledger(plan, ledger_file)
        return GlobalState(0, first, coordinates, optimizer.init(coordinates), ledger)

    def step(rng_key: PRNGKey, state: GlobalState, shards: Shards) -> tuple[GlobalState, RoundInfo]:
        _validate.outside_transformations("step", rng_key, state, shards)
        checks.check_state(state, GlobalState)
        checks.check_shards(shards, client_sizes, space.row)
        groups = schedules.synchronous(state.round, num_clients)
        trusted.check(groups, num_clients)
        ledger = charged(state.ledger, plan, state.round, groups, ledger_file)
        key = jax.random.fold_in(_validate.rng_key(rng_key), state.round)
        keys = (key, secret_keys.round_key(state.round))
        moved = (state.coordinates, state.optimizer)
        coordinates, optimizer_state, natural, info = _step(problem, numbers, moved, shards, keys)
        return GlobalState(state.round + 1, natural, coordinates, optimizer_state, ledger), info

    def posterior(state: GlobalState) -> Posterior:
        checks.check_state(state, GlobalState)
        kwargs, facts = dict(model_kwargs or {}), shapes(records)
        return Posterior(state.natural, family, space, model, kwargs, {}, facts, earlier)

    return Algorithm(init, step, posterior)


def _optimizer(method: GlobalVI) -> optax.GradientTransformation:
    return optax.adam(_LEARNING_RATE) if method.optimizer is None else method.optimizer


@functools.partial(jax.jit, static_argnames="problem")
def _step(
    problem: _Problem,
    numbers: _Numbers,
    moved: tuple[Coordinates, optax.OptState],
    shards: Shards,
    keys: tuple[PRNGKey, PRNGKey],
) -> tuple[Coordinates, optax.OptState, Natural, RoundInfo]:
    """One step on the sum of all clients' noisy gradients."""
    space, family, method = problem.space, problem.family, problem.method
    coordinates, state = moved

    def of_client(number: Array) -> Coordinates:
        data = visits.LocalData(
            records={name: leaf[number] for name, leaf in shards.records.items()},
            num_records=shards.num_records[number],
            num_shards=jnp.ones((), int),
            noise_std=numbers.noise_std[number],
            weight=jnp.ones(()),
            clip_norm=numbers.clip_norm[number],
            inclusion_prob=numbers.inclusion_prob[number],
        )
        # One set of draws for all records; noise and batches of each client's own.
        own = (keys[0], jax.random.fold_in(keys[1], number))
        likelihood = visits.OfRecords(space, family, method.expectation, problem.layout, data)
        return likelihood.released(method.sampler, own, coordinates)

    clients = jnp.arange(numbers.noise_std.shape[0])
    total = factors.total(jax.lax.map(of_client, clients, batch_size=min(clients.size, 16)))

    def free(coordinates: Coordinates) -> Array:
        loss = objective.cavity_loss(family, numbers.exact_prior, coordinates)
        if problem.rest:
            loss += objective.prior_loss(
                space, family, server.PRIOR_EXPECTATION, keys[0], coordinates, problem.rest
            )
        return loss

    gradient = jax.tree.map(jnp.add, jax.grad(free)(coordinates), total)
    updates, state = _optimizer(method).update(gradient, state, coordinates)
    after = optax.apply_updates(coordinates, updates)
    natural, before = family.natural(after), family.natural(coordinates)
    good = family.in_domain(natural)
    after, state = factors.select(good, (after, state), moved)
    natural = factors.select(good, natural, before)
    none = jnp.zeros((), int)
    return (
        after,
        state,
        natural,
        RoundInfo(family.jeffreys(before, natural), none, (~good).astype(int), none),
    )
