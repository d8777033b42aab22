"""Information that the released matrix misses, from how scores change from round to round.

With many latents, noise hides most of the information matrix, while all clients' scores at once are
known far better. Where the matrix misses information along some direction, a round steps over the
mode and the next one steps back, further each time. Such a step tells: scores change along it by
more than the matrix explains.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array

_SURE = 3.0  # standard deviations of noise that a change has to exceed
_MOST = 20.0  # by what the information along a step rises at the most, times what it was


class Round(NamedTuple):
    """All clients' scores at one place, in units of the prior.

    Attributes:
        loc: The place, shape ``(d,)``.
        scores: Their sum, shape ``(d,)``.
        noise: Its noise's covariance, shape ``(d, d)``; zero if there are no scores.
    """

    loc: Array
    scores: Array
    noise: Array


def nothing(size: int) -> Round:
    """Before any scores."""
    return Round(jnp.zeros(size), jnp.zeros(size), jnp.zeros((size, size)))


def missed(before: Round, now: Round, told: Array, shape: Array, unit: Array) -> Array:
    """What to add to the shape: a matrix of rank one, or zero if it explains how scores changed.

    Args:
        before: The scores of the round before, at another place.
        now: The scores of this one.
        told: The shape that clients were told, which both places' distance is measured by.
        shape: The new shape, without this.
        unit: The sum of the records' information over the shape: their number times the level.
    """
    way = now.loc - before.loc
    ahead = told @ way
    # The square of the step's white length: all below is in units of information along it.
    squared = jnp.maximum(way @ ahead, 1e-12)
    change = way @ (before.scores - now.scores) / (squared * unit)
    error = jnp.sqrt(way @ (before.noise + now.noise) @ way) / (squared * unit)
    more = jnp.clip(change - _SURE * error - way @ shape @ way / squared, 0, _MOST)
    known = (jnp.trace(before.noise) > 0) & (squared > 1e-12)
    return jnp.where(known, more, 0) * jnp.outer(ahead, ahead) / squared
