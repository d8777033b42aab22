"""Whether outcomes lie further out than the model says, by what clips cut off.

Under the model, observed scores are clipped as often as those of drawn outcomes. Where many more
are, clips cut off what pulls the posterior towards far outcomes, and no interval knows of it. One
round tells little of this, because few records do it: the last rounds are taken together.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.precision import in_own_precision

_ROUNDS = 4  # so many count: in early ones the model is far from the records
# By chance, as many deviations of noise are exceeded by one run in two hundred.
_SURE = 2.6


class Tails(NamedTuple):
    """What was clipped in the last rounds; arrays have shape ``(rounds,)``.

    Attributes:
        number: Which round a place holds.
        excess: Observed scores that were clipped, less as many as the model expects.
        excess_var: Variance of the noise on that.
        records: Records behind them.
    """

    number: Array
    excess: Array
    excess_var: Array
    records: Array


def nothing() -> Tails:
    """Before any round."""
    return Tails(*[jnp.zeros(_ROUNDS)] * 4)


def after(tails: Tails, number: Array, flags: Array, flags_var: Array, records: Array) -> Tails:
    """With releases of a round.

    Args:
        tails: What was known before.
        number: Which round it is, from 1 on.
        flags: Sums over records of 1 where the observed score was clipped and -1 where not, and of
            the same for drawn ones, shape ``(2,)``.
        flags_var: Variance of the noise on each.
        records: Records behind them.
    """
    place = jnp.mod(number, _ROUNDS).astype(int)
    fresh = jnp.stack([(flags[0] - flags[1]) / 2, flags_var / 2, records])
    old = jnp.stack([tails.excess, tails.excess_var, tails.records])[:, place]
    now = jnp.where(tails.number[place] == number, old, 0) + fresh
    return Tails(
        tails.number.at[place].set(number),
        tails.excess.at[place].set(now[0]),
        tails.excess_var.at[place].set(now[1]),
        tails.records.at[place].set(now[2]),
    )


@in_own_precision
def cut(tails: Tails) -> Array:
    """The fraction of records whose scores were clipped, beyond what the model expects.

    0 where it may be noise.
    """
    excess = jnp.sum(tails.excess)
    sure = excess > _SURE * jnp.sqrt(jnp.sum(tails.excess_var))
    return jnp.where(sure, excess / jnp.maximum(jnp.sum(tails.records), 1), 0)
