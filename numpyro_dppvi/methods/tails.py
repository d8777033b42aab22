"""Whether outcomes lie further out than the model says, by what clips cut off.

Under the model, observed scores are clipped as often as those of drawn outcomes. Where many more
are, clips cut off what pulls the posterior towards far outcomes, and no interval knows of it. One
round tells little of this, because few records do it: the last rounds are taken together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.precision import in_own_precision

_ROUNDS = 4  # so many count: in early ones the model is far from the records
# By chance, as many deviations are exceeded by one run in two hundred.
_SURE = 2.6


class Tails(NamedTuple):
    """What was clipped in the last rounds; arrays have shape ``(rounds,)``.

    Attributes:
        number: Which round a place holds.
        excess: Observed scores that were clipped, less as many as the model expects.
        excess_var: Variance of the noise on that.
        expected: How many the model expects, as released.
        records: Records behind them.
    """

    number: Array
    excess: Array
    excess_var: Array
    expected: Array
    records: Array


def nothing() -> Tails:
    """Before any round."""
    return Tails(*[jnp.zeros(_ROUNDS)] * 5)


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
    fresh = Tails(
        number, (flags[0] - flags[1]) / 2, flags_var / 2, (flags[1] + records) / 2, records
    )
    same = tails.number[place] == number

    def put(sums: Array, more: Array) -> Array:
        return sums.at[place].set(jnp.where(same, sums[place], 0) + more)

    found: Tails = jax.tree.map(put, tails, fresh)
    return found._replace(number=tails.number.at[place].set(number))


@in_own_precision
def cut(tails: Tails) -> Array:
    """The fraction of records whose scores were clipped, beyond what the model expects.

    0 where it may be noise, or chance: of n records that are expected, the square root of n more or
    less. These are the same ones in all rounds, so that their chance does not average out.
    """
    excess = jnp.sum(tails.excess)
    chance = jnp.sum(jnp.sqrt(jnp.maximum(tails.expected, 0))) ** 2
    sure = excess > _SURE * jnp.sqrt(jnp.sum(tails.excess_var) + chance)
    return jnp.where(sure, excess / jnp.maximum(jnp.sum(tails.records), 1), 0)
