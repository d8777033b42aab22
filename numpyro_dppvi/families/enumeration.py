"""Exact expectations over the discrete latents of a mean-field family.

A draw of a discrete latent has no derivative in its log odds, but a sum over all joint values z
does: E_q[f] = sum over z of q(z) E_q[f | z], where q(z) is a product over latents.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Coordinates
from numpyro_dppvi.families.base import DiscreteFamily
from numpyro_dppvi.families.mean_field import MeanField

MAX_JOINT_VALUES = 64
"""The most joint values of all discrete latents; a step costs as much as that many without them."""

OfValues: TypeAlias = Callable[[dict[str, Array]], Array]
"""A scalar function of a value of every discrete latent."""


def continuous(family: MeanField) -> MeanField:
    """The family without its discrete members; itself if it has none."""
    rest = tuple((n, member) for n, member in family.members if not _is_discrete(member))
    return family if len(rest) == len(family.members) else MeanField(rest, family.shared)


def num_joint_values(family: MeanField) -> int:
    """The number of joint values of all discrete latents; 1 if there are none."""
    return math.prod(f.num_values ** math.prod(f.shape) for _, f in _discrete(family))


def joint_values(family: MeanField) -> dict[str, np.ndarray]:
    """All joint values of the discrete latents, by latent, shape ``(num_joint_values, *shape)``."""
    # Entries in the order of a raveled array of each latent, latents in the family's order.
    entries = [[range(f.num_values)] * math.prod(f.shape) for _, f in _discrete(family)]
    table = np.array(list(itertools.product(*itertools.chain(*entries))), int)
    found, start = {}, 0
    for name, member in _discrete(family):
        end = start + math.prod(member.shape)
        found[name] = table[:, start:end].reshape(len(table), *member.shape)
        start = end
    return found


def expectation(family: MeanField, coordinates: Coordinates, given: OfValues) -> Array:
    """The expectation over the discrete latents, differentiable in their coordinates.

    ``given`` is the expectation over the continuous latents, given the discrete ones.
    """
    members = _discrete(family)
    if not members:
        return given({})
    # The sum of q(z) E_q[f | z]: log q(z) is a sum over independent latents, and ``given`` is
    # evaluated for all z at once.
    values = {name: jnp.asarray(x) for name, x in joint_values(family).items()}
    terms = [f.distribution(coordinates[name]).log_prob(values[name]) for name, f in members]
    log_probs = functools.reduce(jnp.add, terms)
    # The derivative by the log odds is sum_z q(z) (d log q(z)) E_q[f | z]: exact, where an estimate
    # from draws (REINFORCE) would have a variance that clipping turns into bias.
    return jnp.dot(jnp.exp(log_probs), jax.vmap(given)(values))


def _discrete(family: MeanField) -> list[tuple[str, DiscreteFamily]]:
    return [(name, member) for name, member in family.members if _is_discrete(member)]


def _is_discrete(member: object) -> bool:
    return isinstance(member, DiscreteFamily)
