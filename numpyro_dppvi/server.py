"""What the server does: merge changes into factors, refine the prior's factor. Sees no record."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi import factors, local, objective
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.guides import PriorFactor
from numpyro_dppvi.latents import LatentSpace

# The prior's factor is refined by draws alone, which cost neither data nor privacy.
_PRIOR_EXPECTATION = objective.MonteCarlo(64)
_PRIOR_STEPS = 200
_FIRST_PRIOR_STEPS = 1000


class MergeInfo(NamedTuple):
    """What a merge did; functions of released values only.

    Attributes:
        projected: Entries of the product of the clients' factors that were raised to zero.
        rejected: Whether the merge was refused because q would have left its domain.
    """

    projected: Array
    rejected: Array


def approximation(prior: Natural, client_factors: Natural) -> Natural:
    """q: the prior's factor times every client's factor (stacked on a leading axis)."""
    return factors.multiply(prior, factors.total(client_factors))


def merge(
    family: MeanField,
    prior: Natural,
    client_factors: Natural,
    clients: Array,
    changes: Natural,
    damping: Array,
    project: bool,
) -> tuple[Natural, MergeInfo]:
    """Multiplies damped changes into the factors of the clients that sent them.

    One rule keeps noise from leaving the domain, and acts on released values only, after the
    sum: where the product of all clients' factors falls below precision zero, so that q would
    know less than the prior, it is raised to zero by the factors of this group, in equal shares
    (``project``). If q is still improper, the merge is refused whole and all stays as it was.

    Args:
        family: The family of q.
        prior: The prior's factor.
        client_factors: Factors of all clients, on a leading axis.
        clients: Numbers of the clients that sent something, shape ``(group_size,)``.
        changes: Their changes, on a leading axis.
        damping: In (0, 1].
        project: Whether to repair factors; without noise they may rightly be improper.

    Returns:
        The new factors, and what happened.
    """
    damped = factors.power(changes, damping)
    proposal = _add(client_factors, clients, damped)
    raised = jnp.zeros((), jnp.int32)
    if project:
        likelihood = factors.total(proposal)
        deficit = factors.divide(family.project(likelihood), likelihood)
        raised = factors.count_nonzero(deficit)
        share = factors.power(deficit, 1 / clients.shape[0])
        proposal = _add(proposal, clients, share)
    good = family.in_domain(approximation(prior, proposal))
    merged = factors.select(good, proposal, client_factors)
    return merged, MergeInfo(jnp.where(good, raised, 0), ~good)


def _add(client_factors: Natural, clients: Array, changes: Natural) -> Natural:
    """Multiplies changes into some clients' factors; one change may go to all of them."""
    return jax.tree.map(lambda leaf, change: leaf.at[clients].add(change), client_factors, changes)


def refine_prior(
    space: LatentSpace,
    family: MeanField,
    parts: PriorFactor,
    q: Natural,
    prior: Natural,
    rng_key: PRNGKey,
    num_steps: int = _PRIOR_STEPS,
) -> Natural:
    """The change of the prior's factor: like a client's, with the prior as its "likelihood".

    Args:
        space: The model.
        family: The family of q.
        parts: Which part of the prior lies in the family, and which latents' part does not.
        q: The current approximation.
        prior: The prior's current factor, its exact part included.
        rng_key: Key for draws of the latents.
        num_steps: Optimiser steps.

    Returns:
        The change; zero for latents whose prior is exact, and where the solve failed.
    """
    cavity = factors.divide(q, factors.divide(prior, parts.exact))

    def loss(key: PRNGKey, coordinates: Coordinates) -> Array:
        points = _PRIOR_EXPECTATION(key, family, coordinates)
        free = objective.cavity_loss(family, cavity, coordinates)
        return free + objective.prior_loss(space, points, parts.rest)

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, num_steps, alpha=0.02))
    keys = jax.random.split(rng_key, num_steps)
    end = local.solve(keys, family.coordinates(q), jax.grad(loss, argnums=1), optimizer)
    change = factors.divide(family.natural(end), q)
    # Adam turns rounding errors into steps: latents that the rest does not touch stay put.
    change = {
        name: part if name in parts.refined else factors.unit(part) for name, part in change.items()
    }
    return factors.select(factors.is_finite(change), change, factors.unit(change))


def first_prior(
    space: LatentSpace, family: MeanField, parts: PriorFactor, rng_key: PRNGKey
) -> Natural:
    """The prior's first factor: exact where it can be, else its variational projection."""
    if not parts.refined:
        return parts.exact
    standard = family.natural(family.standard())
    start = {
        name: standard[name] if name in parts.rest else parts.exact[name] for name in parts.exact
    }
    change = refine_prior(
        space, family, parts, start, parts.exact, rng_key, num_steps=_FIRST_PRIOR_STEPS
    )
    return factors.multiply(start, change)
