"""Information along a round's step, from how scores change from round to round.

With many latents, noise hides most of the information matrix, while all clients' scores together
are known far better. A round's step tells by how much scores change along it:

* *By more than the matrix explains.* Then a round steps over the mode and the next one steps back,
  further each time.
* *By less.* Then a round goes a part of the way, and so does the next one. Information on a learnt
  spread stays what it is when that on the weights grows tenfold, once the spread has fallen.

A step leads where noise in the scores before it has pointed, and that noise is gone afterwards:
where a run has arrived, scores seem to change by more than they do, and never by less.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods.white import White

_SURE, _LESS = 3.0, 2.0  # standard deviations of noise that a change has to differ by
_MOST = 20.0  # by what the information along a step rises at the most, times what it was
_FALL = 0.8  # the largest part of it that goes at once
_CLEAR = 0.5  # the largest error of a change by which information falls
_CURVED = 0.3  # the error of a step as long as a record's deviation: information changes on the way


class Scores(NamedTuple):
    """Scores of many clients in one round, in units of the prior.

    Attributes:
        loc: Where they were taken, the mean over records, shape ``(d,)``.
        scores: Their sum, shape ``(d,)``.
        noise: Its noise's covariance, shape ``(d, d)``.
        records: How many records they are of.
        visit: Which of the clients' visits it was.
    """

    loc: Array
    scores: Array
    noise: Array
    records: Array
    visit: Array


class Rounds(NamedTuple):
    """Scores of the last rounds.

    Attributes:
        before: Of a whole round.
        now: Of the next one; the same as ``before`` if nothing is new.
        going: Of the one that has begun.
    """

    before: Scores
    now: Scores
    going: Scores


class Response(NamedTuple):
    """How scores responded along a step, in white coordinates (the shape is the identity)."""

    ahead: Array  # the step's direction, of length 1, shape ``(d,)``
    change: Array  # by how much scores have changed, over what the identity explains
    error: Array  # its noise's standard deviation, infinite if nothing is known
    length: Array  # the step's, in deviations of one record

    @property
    def whole_error(self) -> Array:
        """With that of taking information for the same all along the step."""
        return jnp.sqrt(self.error**2 + (_CURVED * self.length) ** 2)


def nothing(size: int) -> Rounds:
    """Before any scores."""
    zero = jnp.zeros(())
    none = Scores(jnp.zeros(size), jnp.zeros(size), jnp.zeros((size, size)), zero, zero)
    return Rounds(none, none, none)


def after(rounds: Rounds, new: Scores, total_records: Array) -> Rounds:
    """With the scores of another group, of which each client was visited as often."""
    # A sum of all clients' scores falls by the information times the way of their mean place, if
    # they are the same clients: so each counts once, and only whole rounds are compared.
    going = rounds.going
    keep = jnp.where(new.visit == going.visit, 1.0, 0.0)
    records = keep * going.records + new.records
    place = keep * going.records * going.loc + new.records * new.loc
    going = Scores(
        place / jnp.maximum(records, 1),
        keep * going.scores + new.scores,
        keep * going.noise + new.noise,
        records,
        new.visit,
    )
    whole = jnp.abs(records / total_records - 1) < 1e-3
    next_one = going.visit == rounds.now.visit + 1
    done = Rounds(factors.select(next_one, rounds.now, going), going, going)
    return factors.select(whole, done, rounds._replace(going=going))


def used(rounds: Rounds) -> Rounds:
    """With nothing new."""
    return rounds._replace(before=rounds.now)


def response(rounds: Rounds, axes: White, level: Array, total_records: Array) -> Response:
    """How scores responded from one whole round to the next."""
    before, now = rounds.before, rounds.now
    way = now.loc - before.loc
    ahead = axes.back @ way
    # The square of the step's white length: all below is in units of information along it.
    squared = jnp.maximum(ahead @ ahead, 1e-12)
    change = way @ (before.scores - now.scores) / (squared * level * total_records)
    noise = jnp.sqrt(way @ (before.noise + now.noise) @ way) / (squared * level * total_records)
    known = (jnp.trace(before.noise) > 0) & (squared > 1e-12)
    return Response(
        ahead=ahead / jnp.sqrt(squared),
        change=jnp.where(known, change, 1),
        error=jnp.where(known, noise, jnp.inf),
        length=jnp.sqrt(level * squared),
    )


def missed(said: Response, shape: Array) -> Array:
    """What to add to the shape: a matrix of rank one, or zero if it explains how scores changed."""
    ahead = said.ahead
    more = said.change - _SURE * said.error - ahead @ shape @ ahead
    return jnp.clip(more, 0, _MOST) * jnp.outer(ahead, ahead)


def learnt(said: Response, seen: Array, known: Array) -> tuple[Array, Array]:
    """The mean of all released shapes and ``known``, N^-1, with a response that is too small."""
    # An observation of the shape along one direction u, with error e: if noise is N^(1/2) e N^(1/2)
    # with N = known^-1, the entry along u has variance 2 (u'Nu)^2, and all others follow as N u
    # does.
    ahead = said.ahead
    noise = jnp.linalg.solve(known + 1e-9 * jnp.eye(len(known)), ahead)
    own = jnp.maximum(ahead @ noise, 1e-12)  # no step has no direction
    ratio = jnp.where(_fell(said), 2 * (own / said.whole_error) ** 2, 0)
    by = ratio / (1 + ratio) * (said.change - ahead @ seen @ ahead) / own**2
    # What is known along u is such that the variance of its entry is that after the observation.
    more = (jnp.sqrt(1 + ratio) - 1) / own
    return seen + by * jnp.outer(noise, noise), known + more * jnp.outer(ahead, ahead)


def less(said: Response, shape: Array, seen: Array, known: Array) -> Array:
    """The shape with less information along a step: what was surely too much of it.

    Arguments as of :func:`learnt`, which comes first, and the new shape without this.
    """
    ahead = said.ahead
    along = shape @ ahead
    had = jnp.maximum(ahead @ along, 1e-12)
    error = jnp.sqrt(2.0) * (ahead @ jnp.linalg.solve(known + 1e-9 * jnp.eye(len(known)), ahead))
    gone = _surely(had - ahead @ seen @ ahead, error) / had
    gone = jnp.where(_fell(said), jnp.minimum(gone, _FALL), 0)
    return shape - gone / had * jnp.outer(along, along)


def _fell(said: Response) -> Array:
    """Whether scores surely responded by less than the shape explains."""
    error = said.whole_error
    return (error < _CLEAR) & (said.change < 1 - _LESS * error)


def _surely(amount: Array, error: Array) -> Array:
    """What is left of it once noise is taken off, which it may be."""
    return jnp.sqrt(jnp.maximum(jnp.maximum(amount, 0) ** 2 - (_LESS * error) ** 2, 0))
