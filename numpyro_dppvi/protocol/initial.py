"""Where a run begins: at the prior, or at a public start that no record enters.

Under its prior a neural network is symmetric, and a few noisy steps do not leave that point. A
narrow start at random locations does. It changes no fixed point: whatever the first factors are,
the clients' own changes replace them.
"""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import MeanField, NormalFamily, factors

# A start whose precision is more than the square of 1e6 times the prior's is not told from a point
# in 32 bits.
_LEAST_SCALE = 1e-6


def check(init_scale: float | None) -> float | None:
    """Returns a number in [1e-6, 1] as a float, and ``None``, for the prior, as it is."""
    if init_scale is None:
        return None
    return _validate.half_open_unit("init_scale", init_scale, _LEAST_SCALE)


def narrow(
    family: MeanField, prior: Natural, rng_key: PRNGKey, init_scale: float | None
) -> Natural | None:
    """A distribution to begin with, made of the prior and public randomness alone.

    ``init_scale`` is how far normal members move from the prior's location, and how wide they then
    are, in the prior's standard deviations (in its Cholesky factor where they have full
    covariance). Other members stay at the prior. ``None`` is for no start.
    """
    if init_scale is None:
        return None
    begin = Natural(dict(prior))
    each = jax.random.split(rng_key, len(family.members))
    for (name, member), key in zip(family.members, each, strict=True):
        if isinstance(member, NormalFamily):
            begin[name] = _narrow_normal(member, prior[name], key, init_scale)
    return begin


def _narrow_normal(family: Any, prior: Any, rng_key: PRNGKey, init_scale: float) -> Any:
    # A draw is location + width * z with standard normal z: the start is s * z widths away.
    at = family.coordinates(prior)
    drawn = family.draws(rng_key, at, 1)[0]
    loc = at.loc + init_scale * (drawn - at.loc)
    # The power 1 / s^2 of a normal has its precision over s^2, and so s times its width.
    width = family.coordinates(factors.power(prior, 1 / init_scale**2))
    return family.natural(width._replace(loc=loc))


def of_clients(prior: Natural, begin: Natural | None, num_factors: int) -> Natural:
    """The clients' first factors, on a leading axis: equal shares of the start."""
    if begin is None:
        return factors.unit(prior, num_factors)
    # q = prior * (begin / prior)^(1/M * M) = begin.
    each = factors.power(factors.divide(begin, prior), 1 / num_factors)
    return factors.repeated(each, num_factors)


def of_shards(prior: Natural, begin: Natural | None, shares: Array, num_shards: int) -> Natural:
    """The first factors that shards keep to themselves, clients and shards on the leading axes."""
    num_clients = shares.shape[0]
    if begin is None:
        return factors.unit(factors.unit(prior, num_shards), num_clients)
    whole = factors.divide(begin, prior)

    def spread(leaf: Array) -> Array:
        # A power multiplies natural parameters. All shards of a client have the same share.
        each = jnp.multiply.outer(shares.astype(leaf.dtype), leaf)[:, None]
        return jnp.broadcast_to(each, (num_clients, num_shards, *leaf.shape))

    return jax.tree.map(spread, whole)
