"""Whether outcomes lie further out than the model says, by what clips cut off.

Under the model, observed scores lie beyond a clip as often as those of drawn outcomes. Where many
more do, clips cut off what pulls the posterior towards far outcomes, and no interval knows of it.
One round tells little of this, because few records do it: the last rounds are taken together.

Two things are counted. Scores somewhat beyond the clip tell where the spread is what it should be.
A learnt spread gives way until clipped scores balance: then nearly as many drawn scores are clipped
as observed ones, but these lie further out, and fewer of them nearly reach the clip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array

_FAR = 1.25  # of a clip: from here on scores are far out
_NEAR = 0.5, 1.0  # of a clip: these nearly reach it
# Of the part of a release that says what is clipped: far scores and near ones, whose norm is at
# most 1 together; the chance of their difference; drawn scores; information.
_PARTS = 0.5, 0.05, 0.25, 0.2
ROOTS = np.sqrt([_PARTS[0], *_PARTS])
_ROUNDS = 7  # the last ones, of which those count in which the model was near the records
# By chance, one run in four hundred exceeds as many deviations, by one excess or the other.
_SURE = 3.0


class Tails(NamedTuple):
    """What is known of the last rounds, one place each.

    Attributes:
        number: Which round a place holds.
        excess: Far scores, and far ones less near ones, that were observed beyond what the model
            expects, shape ``(rounds, 2)``.
        excess_var: Variance of the noise on them.
        chance: Their variance under the model, as released.
        records: Records behind them.
    """

    number: Array
    excess: Array
    excess_var: Array
    chance: Array
    records: Array


def counted(lengths: Array, shares: Array) -> tuple[Array, Array]:
    """What one record adds: its far and its near score, and how much these vary by chance.

    ``lengths`` are of its observed score and of drawn ones, in clips, and ``shares`` those of each
    in what the model expects, which add up to 1. The scores, shape ``(2,)`` and of norm at most 1,
    are less what the model expects; the variance of their difference is in [0, 1].
    """
    far, near = lengths > _FAR, (lengths > _NEAR[0]) & (lengths < _NEAR[1])
    both = 1.0 * jnp.stack([far, near], axis=1)
    each = both - shares @ both
    chance = shares @ (each[:, 0] - each[:, 1]) ** 2
    # Norms hardly exceed 1; what that cuts off is expected as well.
    each = _bounded(each)
    return _bounded(each[0] - shares @ each), chance


def _bounded(vectors: Array) -> Array:
    """With norms of at most 1."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1)


def excesses(flags: Array, flags_var: Array) -> tuple[Array, Array]:
    """Sums of far scores and of far less near ones, and the variances of their noise.

    Flags are sums over records of :func:`counted` and their noise's variances; more may follow.
    """
    (far, near), (far_var, near_var) = flags[:2], flags_var[:2]
    return jnp.stack([far, far - near]), jnp.stack([far_var, far_var + near_var])


def by_chance(flags: Array, records: Array) -> Array:
    """Variances of the two sums under the model, by chance, as released; noise may make them < 0.

    Of far scores, how many drawn ones are clipped bounds it. ``flags`` are as of :func:`after`.
    """
    return (flags[jnp.array([3, 2])] + records) / 2


def nothing() -> Tails:
    """Before any round."""
    each, both = jnp.zeros(_ROUNDS), jnp.zeros((_ROUNDS, 2))
    return Tails(each, both, both, both, each)


def after(
    tails: Tails, number: Array, near: Array, flags: Array, flags_var: Array, records: Array
) -> Tails:
    """With releases of a round.

    Args:
        tails: What was known before.
        number: Which round it is, from 1 on.
        near: Whether the model is near the records; else the releases do not count.
        flags: Sums over records of :func:`counted`, the chance as a number in [-1, 1], and of 1
            where drawn scores were clipped and -1 where not; more, shape ``(4,)`` or longer.
        flags_var: Variance of the noise on each.
        records: Records behind them.
    """
    place = jnp.mod(number, _ROUNDS).astype(int)
    chance = by_chance(flags, records)
    fresh = Tails(number, *excesses(flags, flags_var), chance, records)
    fresh = jax.tree.map(lambda leaf: jnp.where(near, leaf, 0), fresh)
    same = tails.number[place] == number

    def put(sums: Array, more: Array) -> Array:
        return sums.at[place].set(jnp.where(same, sums[place], 0) + more)

    found: Tails = jax.tree.map(put, tails, fresh)
    return found._replace(number=tails.number.at[place].set(number))


def cut(tails: Tails) -> float:
    """The fraction of records whose scores are far out, beyond what the model expects."""
    # 0 where it may be noise, or chance: of n records that are expected, the square root of n more
    # or less. These are the same ones in all rounds, so that their chance does not average out.
    excess, least, records = _added_up(tails)
    # Noise in the releases of few records can exceed all of them.
    return float(np.clip(np.max(np.where(excess > least, excess, 0)) / max(records, 1), 0, 1))


def unseen(tails: Tails) -> float:
    """The fraction of records whose scores may be far out and are not seen; 1 before any round."""
    _, least, records = _added_up(tails)
    return min(float(least[0]) / records, 1.0) if records > 0 else 1.0


def _added_up(tails: Tails) -> tuple[np.ndarray, np.ndarray, float]:
    """Over rounds: the two excesses, how large they must be to be sure, and the records."""
    # On the host, so that nothing is compiled.
    excess, var, by_chance, records = (np.asarray(leaf, np.float64) for leaf in tails[1:])
    chance = np.sum(np.sqrt(np.maximum(by_chance, 0)), axis=0) ** 2
    least = _SURE * np.sqrt(np.sum(var, axis=0) + chance)
    return np.sum(excess, axis=0), least, float(np.sum(records))
