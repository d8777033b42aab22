"""How strongly releases still pull the posterior away from where it is.

Where a run has arrived, scores are noise about 0. Where it has not, they point one way, however
little each round moves: clipped scores take small steps, and where records are nearly impossible a
Newton step goes one unit of a log rate. So the scores of the last rounds are added up and compared
with their noise.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array

_FORGET = 2.0  # a sum counts for 1 / (1 + this) of itself after a round


class Pull(NamedTuple):
    """The last rounds' scores, in units of the prior.

    Attributes:
        scores: Their sum, shape ``(d,)``.
        noise: Its noise's covariance, shape ``(d, d)``.
        records: How many scores it has.
        strength: The mean square of its entries, where noise and one standard deviation of the
            posterior without noise make it 1: far above 1, the run has not arrived.
    """

    scores: Array
    noise: Array
    records: Array
    strength: Array


def nothing(size: int) -> Pull:
    """Before any scores."""
    return Pull(jnp.zeros(size), jnp.zeros((size, size)), jnp.zeros(()), jnp.zeros(()))


def after(
    pull: Pull,
    white: Array,
    back: Array,
    scores: Array,
    noise_var: Array,
    records: Array,
    total_records: Array,
    level: Array,
) -> Pull:
    """The pull with a group's scores, older ones for less.

    Args:
        pull: The one before.
        white: Columns span the coordinates of the scores, in units of the prior, shape ``(d, d)``.
        back: Its inverse.
        scores: The group's sum of scores, in these coordinates, shape ``(d,)``.
        noise_var: Variance of its noise in each entry.
        records: Records of the group.
        total_records: Records of all clients.
        level: Information of an average record in these coordinates.
    """
    keep = 1 / (1 + _FORGET * records / total_records)
    total = keep * pull.scores + scores @ back
    noise = keep**2 * pull.noise + noise_var * back.T @ back
    number = keep * pull.records + records
    # One exact standard deviation (N level)^(-1/2) away, n records' scores add up to n level of it.
    own = number**2 * level / total_records * jnp.eye(len(scores))
    here = white.T @ total
    strength = here @ jnp.linalg.solve(white.T @ noise @ white + own, here) / len(scores)
    return Pull(total, noise, number, strength)
