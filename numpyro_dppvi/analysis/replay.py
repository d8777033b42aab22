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

from numpyro_dppvi._typing import Array, Coordinates, Gradient, Natural, PRNGKey, PyTree
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods import values, visits
from numpyro_dppvi.methods.local_solve import GradientFn
from numpyro_dppvi.posterior.prior import first_factor
from numpyro_dppvi.privacy import PrivacyPlan, Sampler, add_noise
from numpyro_dppvi.privacy.keys import Purposes
from numpyro_dppvi.protocol import algorithm, client, rounds, schedules
from numpyro_dppvi.protocol.client import ClientState
from numpyro_dppvi.protocol.messages import Request
from numpyro_dppvi.protocol.problem import Problem, RoundParams
from numpyro_dppvi.protocol.rounds import RoundState
from numpyro_dppvi.run.fitting import FitResult

# Replays that are run side by side hold so many numbers (64 MiB); the rest wait.
_FLOATS_AT_ONCE = 2**24


class Replay(NamedTuple):
    """What to run again; all of it is public or was released. See :func:`replay_of`."""

    problem: Problem  # what the run's rounds were compiled from, with one shard per client
    # What each round was handed; noise and rate differ where a run was continued.
    params: Sequence[RoundParams]
    # The clients' factors, on a leading axis: what stands in for their likelihoods.
    targets: Natural
    first: RoundState  # what server and clients begin with
    groups: Sequence[np.ndarray]  # the clients that each round visits


def replay_of(result: FitResult, rng_key: PRNGKey) -> Replay:
    """The replay of a run that is ``repeatable``, from what it released.

    Where the server took the steps, what a client's likelihood is was not released. Where only the
    sum of the clients' changes is known, every client stands for an equal share. The key is of the
    prior's first factor, where that is found by draws.
    """
    run, state, posterior = result.run, result.state, result.posterior
    num_clients, aggregated = run.num_clients, run.trusted is not None
    prior = first_factor(posterior.prior, posterior.family, posterior.space)

    def params_of(plan: PrivacyPlan | None) -> RoundParams:
        return algorithm.round_params(
            run.local,
            plan,
            result.client_sizes,
            prior.exact,
            damping=run.damping,
            prior_left_out=run.prior_left_out,
        )

    plan, groups = result.plan, run.groups[: state.round]
    # A continued run had one noise before, and another one after: each part is replayed with its
    # own.
    by_start = {part.first_round: params_of(part) for part in plan.parts} if plan else {}
    begin = by_start.get(0) or params_of(None)
    params = [by_start[plan.at(r).first_round] if plan else begin for r in range(len(groups))]
    # Equal shards make equal changes: one of them is solved for.
    private = aggregated or run.local.keeps_factors
    problem = Problem(
        posterior.space,
        posterior.family,
        values.program_of(run.local),
        # No batch, one shard, and no rows in it.
        visits.Layout(0, 1, 0, private),
        prior.rest,
        prior.refined,
        aggregated,
        starts_ahead=run.alone and state.server.begin is not None,
    )
    targets = state.factors
    if aggregated:
        # One factor stands for all clients, and who contributed what is not known: equal M-th
        # roots.
        share = factors.power(factors.total(targets), 1 / num_clients)
        targets = factors.repeated(share, num_clients)
    asynchronous = isinstance(run.schedule, schedules.Asynchronous)
    first = rounds.first_state(
        problem,
        begin,
        rounds.first_prior(problem, begin, rng_key),
        state.server.begin,
        asynchronous=asynchronous,
    )
    return Replay(problem, params, targets, first, groups)


def replays(replay: Replay, rng_key: PRNGKey, power: float, num_replays: int) -> Natural:
    """Replays a run with targets to a power. The key is no secret: this noise protects nothing.

    Natural parameters of q after every round, leading axes ``(num_rounds, num_replays)``.
    """
    # A replay's memory is its state, of which every one has a copy.
    floats = sum(leaf.size for leaf in jax.tree.leaves(replay.first))
    at_once = max(1, _FLOATS_AT_ONCE // floats)
    targets = factors.power(replay.targets, power)
    state = factors.repeated(replay.first, num_replays)
    after = []
    for number, (groups, params) in enumerate(zip(replay.groups, replay.params, strict=True)):
        # As in runs that differ in their noise alone, all else is drawn alike.
        key, secret = jax.random.split(jax.random.fold_in(rng_key, number))
        keys = key, jax.random.split(secret, num_replays)
        state, q = _round(
            replay.problem, params, targets, jnp.asarray(groups), keys, state, at_once
        )
        after.append(q)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *after)


@compiled("problem", "at_once")
def _round(
    problem: Problem,
    params: RoundParams,
    targets: Natural,
    groups: Array,
    keys: tuple[PRNGKey, PRNGKey],
    state: RoundState,
    at_once: int,
) -> tuple[RoundState, Natural]:
    """One round of every replay, and q after it."""
    respond = functools.partial(_respond, problem, params, targets)
    key, secret_keys = keys

    def one(at: tuple[PRNGKey, RoundState]) -> tuple[RoundState, Natural]:
        secret, before = at
        after, _ = rounds.one_round(problem, params, before, groups, (key, secret), respond)
        return after, after.server.natural

    return jax.lax.map(one, (secret_keys, state), batch_size=at_once)


class _OfFactor(NamedTuple):
    """The likelihood of a client whose likelihood is a factor.

    ``noise_std`` is the noise on a released gradient, after its division by the batch's share.
    """

    family: MeanField
    factor: Natural
    noise_std: Array

    @property
    def draws(self) -> None:
        """None: expectations of a factor's logarithm are known."""

    def of_shard(self, number: Array) -> GradientFn:
        """The gradient of the factor's negative logarithm, for the only shard there is."""

        def gradient(key: PRNGKey, coordinates: Coordinates) -> Gradient:
            return jax.grad(lambda at: -factors.inner(self.factor, self.family.statistics(at)))(
                coordinates
            )

        return gradient

    def released(
        self, sampler: Sampler, keys: tuple[PRNGKey, Purposes], coordinates: Coordinates
    ) -> Gradient:
        """The same with noise."""
        exact = self.of_shard(jnp.zeros((), int))(keys[0], coordinates)
        return add_noise(keys[1].noise, exact, self.noise_std)

    def released_sum(
        self,
        contribution: Callable[..., PyTree],
        floats: int,
        secret_key: PRNGKey,
        asked: PyTree | None = None,
    ) -> PyTree:
        """A factor has no records whose contributions could be added up."""
        raise TypeError("a factor has no records.")


def _respond(
    problem: Problem,
    params: RoundParams,
    targets: Natural,
    number: Array,
    state: ClientState,
    request: Request,
    secret_key: PRNGKey,
    drawn: Any,
) -> visits.Outcome:
    """What a client does whose likelihood is a factor."""
    mine, target = jax.tree.map(lambda leaf: leaf[number], (params.clients, targets))
    # A sum over shards of equal changes, times its weight, is one of them so many times.
    times = mine.num_shards * mine.weight
    # What is added to a sum over a batch is divided by the batch's share of records.
    noise_std = mine.noise_std / mine.inclusion_prob
    # times * (factor / times) = factor: the sum of equal changes is that of the whole client.
    likelihood = _OfFactor(problem.family, factors.power(target, 1 / times), noise_std)
    one_shard = mine._replace(num_shards=jnp.ones((), int), weight=times)
    return client.visit(problem, one_shard, state, request, likelihood, secret_key)
