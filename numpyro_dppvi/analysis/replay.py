"""Runs a fit again with the clients' released factors in the place of their records.

What noise does to a posterior depends on the optimiser, the damping and how sharp the likelihood
is, and no formula covers that. But all of it is public, and the factors that clients have released
say how sharp: a client whose likelihood *is* its factor can be visited as often as one likes, with
fresh noise of the same size, and costs nothing. The spread of the posteriors that come out is the
noise that is in the real one.

A round is the one that ``rounds`` runs: only what a client does when it is visited is replaced.
Per-record clipping is left out, because a factor has no records.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.methods import values, visits
from numpyro_dppvi.methods.local_solve import Gradient
from numpyro_dppvi.posterior.prior import first_factor
from numpyro_dppvi.privacy import Sampler, add_noise
from numpyro_dppvi.protocol import algorithm, planning, rounds, schedules, server
from numpyro_dppvi.protocol.rounds import Factors, Numbers, Problem
from numpyro_dppvi.run.fitting import FitResult

# Replays that are run side by side hold so many numbers (64 MiB); the rest wait.
_FLOATS_AT_ONCE = 2**24


class Setting(NamedTuple):
    """What a replay needs to know; all of it is public or was released. See :func:`setting_of`.

    Attributes:
        problem: What the run's rounds were compiled from, with one shard a client.
        numbers: What they were handed.
        targets: The clients' factors, on a leading axis: what stands in for their likelihoods.
        first: The factors to begin with.
        groups: The clients that each round visits.
    """

    problem: Problem
    numbers: Numbers
    targets: Natural
    first: Factors
    groups: Sequence[np.ndarray]


def setting_of(result: FitResult, rng_key: PRNGKey) -> Setting:
    """The replay of a run, from what it released.

    Where only the sum of the clients' changes is known, every client stands for an equal share.

    Args:
        result: What ``fit`` returned.
        rng_key: Key of the prior's first factor, where that is found by draws.

    Raises:
        TypeError: If the run has no factors: one of ``GlobalVI``.
    """
    run, state, posterior = result.run, result.state, result.posterior
    if not isinstance(state, algorithm.PVIState):
        raise TypeError("a run of GlobalVI() has no factors that could stand in for records.")
    num_clients, aggregated = len(result.client_sizes), run.trusted is not None
    prior = first_factor(posterior.prior, posterior.family, posterior.space)
    damping = 1.0 if run.damping is None else run.damping
    left_out = planning.prior_left_out(run, num_clients)
    numbers = algorithm.numbers_of(
        run.local, result.plan, result.client_sizes, prior.exact, damping, left_out
    )
    # Equal shards make equal changes: one of them is solved for.
    private = aggregated or run.local.keeps_factors
    problem = Problem(
        posterior.space,
        posterior.family,
        values.program_of(run.local),
        visits.Layout(0, 1, 0, private),
        prior.rest,
        prior.refined,
        aggregated,
    )
    targets = state.factors
    if aggregated:
        share = factors.power(factors.total(targets), 1 / num_clients)
        targets = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), share
        )
    asynchronous = isinstance(run.schedule, schedules.Asynchronous)
    first = rounds.first_prior(problem, numbers, rng_key)
    held = None if run.alone else state.begin
    return Setting(
        problem,
        numbers._replace(begin=state.begin if run.alone else None),
        targets,
        rounds.first_factors(problem, numbers, first, held, asynchronous),
        run.groups[: state.round],
    )


def replays(setting: Setting) -> Callable[[PRNGKey, Array | float, int], Natural]:
    """Makes the function that replays a run; equal problems share a compilation.

    Args:
        setting: What to replay.

    Returns:
        A function of a key (no secret: this noise protects nothing), the power that the targets
        are raised to, and how many replays to make. It returns natural parameters of q after every
        round, leading axes ``(num_rounds, num_replays)``.
    """
    floats = sum(leaf.size for leaf in jax.tree.leaves(setting.first))
    at_once = max(1, _FLOATS_AT_ONCE // floats)

    def of(rng_key: PRNGKey, power: Array | float, num_replays: int) -> Natural:
        targets = factors.power(setting.targets, power)
        state = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (num_replays, *leaf.shape)), setting.first
        )
        after = []
        for number, groups in enumerate(setting.groups):
            # As in runs that differ in their noise alone, all else is drawn alike.
            key, secret = jax.random.split(jax.random.fold_in(rng_key, number))
            keys = key, jax.random.split(secret, num_replays)
            state, q = _round(
                setting.problem, setting.numbers, targets, jnp.asarray(groups), keys, state, at_once
            )
            after.append(q)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)

    return of


@functools.partial(jax.jit, static_argnames=("problem", "at_once"))
def _round(
    problem: Problem,
    numbers: Numbers,
    targets: Natural,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    state: Factors,
    at_once: int,
) -> tuple[Factors, Natural]:
    """One round of every replay, and q after it."""
    visit = functools.partial(_visit, problem, numbers, targets)
    key, secret_keys = keys

    def one(at: tuple[PRNGKey, Factors]) -> tuple[Factors, Natural]:
        secret, before = at
        after, _ = rounds.one_round(problem, numbers, before, groups, (key, secret), visit)
        return after, server.approximation(after.prior, after.clients)

    return jax.lax.map(one, (secret_keys, state), batch_size=at_once)


class _OfFactor(NamedTuple):
    """The likelihood of a client whose likelihood is a factor.

    Attributes:
        family: The family of q.
        factor: The factor.
        noise_std: Noise on a released gradient, after its division by the batch's share.
    """

    family: MeanField
    factor: Natural
    noise_std: Array

    def of_shard(self, number: Array) -> Gradient:
        """The gradient of the factor's negative logarithm, for the only shard there is."""
        del number

        def gradient(key: PRNGKey, coordinates: Coordinates) -> Coordinates:
            del key
            return jax.grad(lambda at: -factors.inner(self.factor, self.family.statistics(at)))(
                coordinates
            )

        return gradient

    def released(
        self, sampler: Sampler, keys: tuple[PRNGKey, PRNGKey], coordinates: Coordinates
    ) -> Coordinates:
        """The same with noise."""
        del sampler
        exact = self.of_shard(jnp.zeros((), int))(keys[0], coordinates)
        return add_noise(keys[1], exact, self.noise_std)


def _visit(
    problem: Problem,
    numbers: Numbers,
    targets: Natural,
    number: Array,
    q: Natural,
    own: Natural,
    rng_key: PRNGKey,
    secret_key: PRNGKey,
    drawn: Any,
) -> visits.Message:
    """What a client does whose likelihood is a factor."""
    del drawn
    family, method = problem.family, problem.method
    # A sum over shards of equal changes, times its weight, is one of them so many times.
    times = numbers.num_shards[number] * numbers.weight[number]
    data = visits.LocalData(
        records={},
        num_records=jnp.ones((), int),
        num_shards=jnp.ones((), int),
        noise_std=numbers.noise_std[number],
        weight=times,
        clip_norm=numbers.clip_norm[number],
        inclusion_prob=numbers.inclusion_prob[number],
    )
    asked = visits.Visit(
        family=family,
        layout=problem.layout,
        solver=method.solver(numbers.learning_rate),
        num_steps=method.num_local_steps,
        q=q,
        own=own,
        data=data,
        rng_key=rng_key,
        secret_key=secret_key,
        drawn=None,
    )
    # What is added to a sum over a batch is divided by the batch's share of records.
    noise_std = data.noise_std / data.inclusion_prob
    target = jax.tree.map(lambda leaf: leaf[number], targets)
    return method.visit(asked, _OfFactor(family, factors.power(target, 1 / times), noise_std))
