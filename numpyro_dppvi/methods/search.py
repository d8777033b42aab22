"""Where to begin: records vote for places where they are likely, before anything else is asked.

Under a wide prior in raw units, records can be all but impossible at the prior's mean: times of
thousands of days where it says one day. A Newton step from there goes one unit of a log rate, and
what records say of scales there is wrong by thousands. So at first visits a client also releases
votes for places along the latents' axes. A record's votes are a vector of length 1, whose entries
are larger where its density is near the best that it has anywhere. If one place is surely better
than the prior's mean, the run begins about there, and asks again. If noise may hide one, records
vote once more where they are.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array

SHARE = 0.3  # of a first visit's squared norm
_MOST = 1000  # places, more or less
_LENGTHS = 2, 17  # of steps along an axis, at least and at most
_REACH = 0.003, 3.0  # shortest and longest step, in standard deviations of the prior
_REGRET = 5.0  # a place counts half if a record's density is lower there by so many nats
_HARDLY = 0.02  # of the best place's votes: what counts as an error where there is no noise
_SURE = 10.0, 5.0  # errors by which a place has to be better, and once all have voted
_BETTER = 1.5  # and so many times as good
_UNSURE = 3.9  # from so many errors on all vote once more; of noise alone one run in twenty-five
_AS_GOOD = 0.6  # of the best place's votes: from so many on a place counts
_FIRST = 0.9  # of the best along an axis: the first step with so many ends it
_HOLDS = 0.7  # what a round leaves of ``Search.holds``
_VISITS = 2  # of a client, after which a run has begun


class Search(NamedTuple):
    """What is known of where to begin.

    Attributes:
        votes: Sums of votes for the places about where they were asked, shape ``(places,)``.
        var: Variance of their noise.
        voted: Records that have voted, as a share of all.
        repeated: Visits of a client that do not count, because the run then began elsewhere, or
            votes or histograms were asked for once more.
        origin: Where it would begin otherwise, in units of the prior, shape ``(d,)``.
        holds: How much of what the prior would pull steps back to its mean is taken off: all once
            the run has begun elsewhere, then less and less; 0 if it has not.
    """

    votes: Array
    var: Array
    voted: Array
    repeated: Array
    origin: Array
    holds: Array


def nothing(origin: Array, asks: bool) -> Search:
    """Nobody has voted, or will; votes are asked first at ``origin``, in units of the prior."""
    size = origin.size
    zero, number = jnp.zeros(()), 1 + 2 * len(_lengths(size)) * size
    return Search(jnp.zeros(number if asks else 0), zero, zero, zero, origin, zero)


def _lengths(size: int) -> np.ndarray:
    number = int(np.clip(_MOST // (2 * size), *_LENGTHS))
    return np.geomspace(*_REACH, number)


def steps(search: Search, size: int) -> Array:
    """Lengths of the steps to places, in units of the prior; none where nobody votes."""
    return jnp.asarray(_lengths(size) if search.votes.size else np.zeros(0))


def places(loc: Array, prior_sd: Array, steps: Array) -> Array:
    """Where a record votes: base values at ``loc`` and at steps up and down along each axis.

    Steps are in units of the prior; the shape is ``(1 + 2 * len(steps) * d, d)``.
    """
    along = jnp.concatenate([steps, -steps])
    away = along[:, None, None] * jnp.diag(prior_sd)
    return loc + jnp.concatenate([jnp.zeros((1, loc.size)), away.reshape(-1, loc.size)])


def votes(densities: Array) -> Array:
    """One record's votes, of length 1 or none, from its log densities at the places."""
    # Hostile records have none, or infinite ones.
    finite = jnp.where(jnp.isfinite(densities), densities, -jnp.inf)
    regret = jnp.max(finite) - finite
    fit = jnp.where(jnp.isfinite(regret), 1 / (1 + regret / _REGRET), 0)
    return fit / jnp.maximum(jnp.sqrt(jnp.sum(fit * fit)), 1)


def after(
    search: Search, sums: Array, var: Array, share: Array, most_visits: Array
) -> tuple[Search, Array]:
    """What is known after a group's votes, and the step to where the run begins.

    The step is in units of the prior, shape ``(d,)``; zero to stay.
    """
    size, lengths = search.origin.size, _lengths(search.origin.size)
    total, noise, voted = search.votes + sums, search.var + var, search.voted + share
    by_place = total[1:].reshape(2, len(lengths), size)
    # The shortest steps lead nowhere else.
    stay = (total[0] + jnp.sum(by_place[:, 0])) / (1 + 2 * size)
    # A place's neighbours along its axis are about as good, and the mean of three has less noise.
    near = np.sum([np.eye(len(lengths), k=k) for k in (-1, 0, 1)], axis=0)
    number = near.sum(axis=1)[:, None]
    mean = jnp.einsum("kl,slj->skj", near, by_place) / number
    noise_var = noise / number + noise / (1 + 2 * size)
    error = jnp.sqrt(noise_var + (_HARDLY * jnp.max(mean)) ** 2)
    better = (mean - stay) / jnp.maximum(error, 1e-12)
    # A move costs all clients a visit, whenever it is made.
    all_voted = voted > 0.999
    bound = jnp.where(all_voted, _SURE[1], _SURE[0])
    best = jnp.max(jnp.where(mean > _BETTER * stay, better, 0))
    moves = (best > bound) & (most_visits <= _VISITS)
    # A run that stays where records are impossible is lost, which is worth another visit.
    again = all_voted & (best > _UNSURE) & ~moves & (most_visits < _VISITS)
    # Often many latents could make up for what is far, each by a column of its own. All that are
    # about as good together, in shares that add up to 1, scatter less over records. Along an axis,
    # no step counts beyond the first that is about as good as any: records that are censored, say,
    # like all places that are far enough.
    shares = jnp.maximum(mean - _AS_GOOD * jnp.max(mean), 0)
    first = jnp.argmax(mean >= _FIRST * jnp.max(mean, axis=1, keepdims=True), axis=1)
    shares = jnp.where(np.arange(len(lengths))[:, None] <= first[:, None], shares, 0)
    shares = shares / jnp.maximum(jnp.sum(shares), 1e-12)
    # Geometric means of lengths: too short a step is better than one too long, beyond which records
    # may say nothing.
    by_axis = jnp.sum(shares, axis=1)
    log_lengths = jnp.einsum("k,skj->sj", np.log(lengths), shares) / jnp.maximum(by_axis, 1e-12)
    step = jnp.array([1.0, -1.0]) @ (by_axis * jnp.exp(log_lengths))
    return search._replace(
        votes=jnp.where(moves, 0, total),
        var=jnp.where(moves, 0, noise),
        voted=jnp.where(moves, 0, voted),
        repeated=jnp.where(moves | again, most_visits, search.repeated),
        holds=jnp.where(moves, 1, search.holds),
    ), jnp.where(moves, step, 0)


def let_go(search: Search, share: Array) -> Search:
    """After visits to a share of all records, the prior holds steps back a little more."""
    return search._replace(holds=search.holds * _HOLDS**share)
