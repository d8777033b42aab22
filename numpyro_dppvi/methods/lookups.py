"""What lookups tell of an average record's information, before any record is seen.

A record names one place of a lookup: its group, its item. Two facts follow for the server of
:class:`~numpyro_dppvi.FisherScoring`. No record tells how the entries of two places go together, so
that the information has zeros there (``latents.meeting``). And entries of different places are
alike: what one of them tells by itself drowns in noise where there are many, but what they have in
common does not. So each is taken for what all have in common, and for as much beside as stands out
(James and Stein's rule).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array

FEW = 4  # peers at least
_DOUBT = 0.5  # how little is known of what all have in common before a release, relatively
_SCALES = 2.0  # the most by which the scales of peers' priors differ
_FAR = 0.1  # of the mean: what is less is as little as noise lets it be
# By so many of its deviations a variance has to exceed that of noise, or may fall short of it.
_CERTAIN, _POSSIBLE = 2.0, 1.0


class Lookups(NamedTuple):
    """What is read off the model."""

    # Which entries can matter to one record together, truth values, shape ``(d, d)``.
    meeting: np.ndarray
    # Sets of entries of one latent, of which a record looks up one: truth values of shape ``(c,
    # d)``, each entry in one set at most, and each set of ``FEW`` or more.
    peers: np.ndarray

    def peers_by(self, prior_sd: Array, expected: Array | None = None) -> Array:
        """The sets whose priors have about one scale, shape ``(c, d)``.

        In units of their priors, others would not be alike.

        Args:
            prior_sd: Standard deviations of the prior, shape ``(d,)``.
            expected: The information that histograms have each expect; ``None`` for all the same.

        Returns:
            In each row what is expected of its members, over their mean, and zeros.
        """
        most = jnp.max(jnp.where(self.peers, prior_sd, 0), axis=1)
        least = jnp.min(jnp.where(self.peers, prior_sd, jnp.inf), axis=1)
        sets = jnp.where(self.peers & (most < _SCALES * least)[:, None], 1.0, 0.0)
        if expected is None:
            return sets
        mean = sets @ expected / self.peers.sum(axis=1)
        return sets * expected / jnp.where(mean > 0, mean, 1)[:, None]


class _Common(NamedTuple):
    """Of each entry that has peers; of others zeros."""

    mean: Array  # what is expected of it by what was seen of all of them
    var: Array  # the variance of its error
    apart: Array  # how much of an entry's own difference to it is no noise for certain, in [0, 1]
    unsure: Array  # how much may be none
    number: Array  # how many peers there are


def _common(seen: Array, var: Array, peers: Array) -> _Common:
    """What peers have in common.

    ``var`` is the variance of the noise of what was ``seen`` of each entry, both of shape ``(d,)``;
    ``peers`` are as of ``Lookups.peers_by``.
    """
    sets, number = _sets(peers)
    mean, noise_var = sets @ seen / number, sets @ var / number
    scatter = sets @ (seen - mean @ peers) ** 2 / (number - 1)
    # The variance of so many draws has this deviation of its own, relatively.
    own = jnp.sqrt(2 / (number - 1))

    def beside(deviations: float) -> Array:
        """How much of a difference is none of noise, if that has so many deviations more."""
        more = jnp.maximum(scatter - noise_var * (1 + deviations * own), 0) @ sets
        return more / jnp.maximum(more + var, 1e-30)

    return _Common(
        mean @ peers,
        (noise_var / number) @ peers**2,
        beside(_CERTAIN),
        beside(-_POSSIBLE),
        number @ sets,
    )


def _above(each: Array, mean: Array, noise: Array) -> Array:
    """Far below the mean, not below what noise would hide."""
    return jnp.maximum(each, jnp.minimum(_FAR * jnp.maximum(mean, 0), noise))


def _sets(peers: Array) -> tuple[Array, Array]:
    """Who is in which set, as ones and zeros, and how many are."""
    sets = jnp.where(peers > 0, 1.0, 0.0)
    return sets, jnp.maximum(jnp.sum(sets, axis=1), FEW)


def alike(shape: Array, before: Array, seen: Array, noise: Array, peers: Array) -> Array:
    """A shape whose peers have what they have in common, and as much beside as stands out.

    Args:
        shape: In prior units.
        before: The diagonal of the one before.
        seen: What was seen of each entry's own information, shape ``(d,)``.
        noise: The diagonal of N, if the noise of what was seen is N^(1/2) e N^(1/2).
        peers: Sets of entries that are alike (``Lookups.peers_by``).
    """
    # Of e, entries of the diagonal have the variance 2.
    found, own = _common(seen, 2 * noise**2, peers), jnp.diagonal(shape)
    sets, number = _sets(peers)
    had = (sets @ before / number) @ peers
    doubt = (_DOUBT * had) ** 2
    mean = had + doubt / jnp.maximum(doubt + found.var, 1e-30) * (found.mean - had)
    mean = _above(mean, had, jnp.sqrt(found.var))
    each = _above(mean + found.apart * (seen - found.mean), mean, jnp.sqrt(2.0) * noise)
    by = jnp.sqrt(jnp.where(found.number > 0, each, own) / own)
    return by[:, None] * shape * by


def together(counts: Array, noise: Array, peers: Array) -> tuple[Array, Array]:
    """Histograms of peers as their mean, and the standard deviation of its noise.

    Each of many peers is in few records, but a record has one of them.

    ``counts`` have shape ``(d, bins)``, and ``noise`` is the standard deviation of the noise in
    each row; ``peers`` are as of ``Lookups.peers_by``.
    """
    (sets, number), alone = _sets(peers), jnp.sum(peers, axis=0) == 0
    mean = sets.T @ (sets @ counts / number[:, None])
    mean_noise = jnp.sqrt((sets @ noise**2 / number**2) @ sets)
    return jnp.where(alone[:, None], counts, mean), jnp.where(alone, noise, mean_noise)


def shared_by(peers: Array) -> Array:
    """How many entries there are of which a record has one, of each; 1 for those without peers."""
    sets, number = _sets(peers)
    return jnp.maximum(number @ sets, 1)


def by_itself(seen: Array, noise: Array, peers: Array) -> Array:
    """What was seen of entries, where they have peers as far as it stands out from theirs.

    ``noise`` is the standard deviation of the noise of ``seen``, both of shape ``(d,)``; ``peers``
    are as of ``Lookups.peers_by``.
    """
    found = _common(seen, noise**2, peers)
    each = found.mean + found.apart * (seen - found.mean)
    return jnp.where(found.number > 0, _above(each, found.mean, noise), seen)


def noise_left(shape: Array, seen: Array, noise: Array, meeting: np.ndarray, peers: Array) -> Array:
    """Of the variance of noise in entries of the shape, what is left, shape ``(d, d)``.

    Nothing where entries do not meet, and little of what peers have in common. Columns of peers
    are orthogonal: no record has two of them. So the squares of their correlations with another
    column add up to 1 at most, however many there are (Bessel's inequality).

    Args:
        shape: The shape's diagonal, in prior units.
        seen: What was seen of it.
        noise: The diagonal of N, if the noise of what was seen is N^(1/2) e N^(1/2).
        meeting: As of :class:`Lookups`.
        peers: Sets of entries that are alike (``Lookups.peers_by``).
    """
    found, (sets, _) = _common(seen, 2 * noise**2, peers), _sets(peers)
    alone = found.number == 0
    own = jnp.where(alone, 1, found.unsure + (1 - found.unsure) / jnp.maximum(found.number, 1))
    across = jnp.asarray(meeting & ~np.eye(len(own), dtype=bool), noise.dtype)
    root = noise / shape
    total = (across * root[:, None] * root) @ sets.T
    bound = jnp.where(alone, 1, (1 / jnp.maximum(total, 1)) @ sets)
    return across * jnp.minimum(bound, bound.T) + jnp.diag(own)
