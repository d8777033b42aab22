"""Scores of clients where they are taken next, from where they were released.

When the location moves by w, a sum of n scores changes by -n J w, known as well as J is. Clients'
scores are kept in units of :class:`Moves`, one sum for all of them, so that a visit costs as much
however many clients there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.methods.kinds import Kinds
from numpyro_dppvi.methods.lookups import Lookups, noise_left
from numpyro_dppvi.methods.remembered import Memory
from numpyro_dppvi.methods.visits import Received
from numpyro_dppvi.methods.white import White, coordinates

# Chosen by simulation (docs/believe.md says on which studies).
_SHAPE_DRIFT = 3.0  # variance of an entry of the shape after a step of white length 1, times d
_CORRELATION = 0.5  # of columns, a usual one
# How much of what is unknown of the level counts, where scores are moved; by how much it lags, over
# what is unknown of it, squared; and the most that counts of that.
_LEVEL_DOUBT, _LEVEL_LAG, _MOST_LAG = 0.3, 40.0, 0.2
# Errors of the linear observation: of third order, of a path and of a step where records look
# entries up, and of second order.
_CURVATURE, _LOOKED_UP, _UNSURE = 3.0, 6.0, 0.1
# What a round leaves of the way of those before, and in how many directions a path's error lies;
# nobody knows in which.
_LATELY, _DIRECTIONS = 0.5, 4.0


class Unknown(NamedTuple):
    """The noise of what was seen of the shape, N^(1/2) e N^(1/2).

    Attributes:
        axes: The coordinates of the next two.
        known: Eigenvalues of N^-1, shape ``(d,)``.
        turn: Its eigenvectors.
        meeting: Which entries can matter to one record together, shape ``(d, d)``.
        share: How many of all records look up each entry, shape ``(d,)``.
        left: The part of entries' variance that lookups leave, in prior units, shape ``(d, d)``;
            ``None`` for all of it.
    """

    axes: White
    known: Array
    turn: Array
    meeting: Array
    share: Array
    left: Array | None

    @property
    def noise(self) -> Array:
        """N."""
        return (self.turn / jnp.maximum(self.known, 1e-6)) @ self.turn.T

    @property
    def outside(self) -> Array:
        """N in prior units."""
        return self.axes.outside(self.noise)


def unknown(memory: Memory, axes: White, lookups: Lookups | None) -> Unknown:
    """The noise of what was seen of the shape so far."""
    known, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    if lookups is None:
        # Beside the identity, entries off the diagonal are correlations: noise hides no more.
        known = jnp.hypot(known, 1 / _CORRELATION)
    found = Unknown(axes, known, turn, jnp.ones_like(memory.shape), jnp.ones_like(known), None)
    if lookups is None:
        return found
    shape, seen, noise = map(jnp.diagonal, (memory.shape, memory.seen, found.outside))
    peers = lookups.peers_by(memory.prior_sd, memory.scales.information)
    # Of a set's records, a place has as many as its part of the information.
    among = jnp.where(lookups.peers, shape, 0)
    parts = among / jnp.maximum(jnp.sum(among, axis=1, keepdims=True), 1e-30)
    share = jnp.where(jnp.any(lookups.peers, axis=0), jnp.sum(parts, axis=0), 1)
    return found._replace(
        left=noise_left(shape, seen, noise, lookups.meeting, peers),
        meeting=jnp.asarray(lookups.meeting, shape.dtype),
        share=jnp.maximum(share, 1e-6),
    )


def error_of(memory: Memory, unknown: Unknown, way: Array) -> Array:
    """Covariance of the error of one record's score by extrapolation over a way.

    ``way`` is in prior units; the result is in the coordinates of ``unknown``.
    """
    axes, left = unknown.axes, unknown.left
    # A noisy level is followed slowly: by the share g = var / (var + noise) of what a visit says.
    # On a way along which it changes by r a visit it lags by r / g. With var^2 = drift noise, as
    # where visits make up for the drift, that is in proportion to var, and its square to var^2.
    lag = _LEVEL_LAG * memory.level_var**2
    lag = lag / (1 + lag / _MOST_LAG)
    unsure = _UNSURE**2 + _LEVEL_DOUBT * memory.level_var + lag
    if left is None:

        def felt(way: Array) -> Array:
            squared, bent = (jnp.sum((w @ axes.back.T) ** 2) for w in (way, memory.curved * way))
            return _CURVATURE * bent**2 / 2 + unsure * squared

        alike = felt(way) * jnp.eye(way.size)
        curved = memory.curved[:, None] * memory.curved * memory.shape
        part = jnp.minimum(1, _DIRECTIONS / way.size) * _of_path(memory, way, felt)
        alike = alike + part * axes.information(curved)
        white = way @ axes.back.T
        wrong = (white @ unknown.noise @ white) * unknown.noise
    else:
        alike = axes.information(_of_entries(memory, unknown, way, unsure))
        # E w with E = N^(1/2) e N^(1/2), but zero where entries do not meet: of its entries i and
        # j the covariance is N_ij sum_kl M_ik w_k N_kl w_l M_lj.
        met = jnp.sqrt(left) * way
        wrong = axes.information(unknown.outside * (met @ unknown.outside @ met.T))
    return alike + wrong


def _of_path(memory: Memory, way: Array, error: Callable[[Array], Array]) -> Array:
    """What is to be added to the error over a way, because others led there.

    Where the information falls all along a path, all of its steps are off in one direction: errors
    add up, and not their squares. Where a path leads there and back, they cancel.
    """
    lately, way = memory.moves.lately, memory.curved * way
    more = jnp.maximum(error(lately + way) - error(lately) - error(way), 0)
    # Where outcomes cannot be drawn, what is seen of the shape has an error for that already.
    return memory.drawn * more


def _of_entries(memory: Memory, unknown: Unknown, way: Array, unsure: Array) -> Array:
    """What is alike for all entries elsewhere, where a record looks entries up; in prior units.

    A record that looks up entry i moves by the way of those that meet i alone: by l_i, whose square
    is w' J w of these over the share s_i of such records. Their scores are off by about l_i^2, so
    that the mean of all records' is off by s_i^(1/2) l_i^2, for J_ii of 1.
    """
    shape = memory.shape
    each = (unknown.meeting * w for w in (way, memory.curved * way))
    felt, bent = (jnp.maximum(jnp.sum(w @ shape * w, axis=1), 0) for w in each)
    root = jnp.sqrt(_LOOKED_UP * bent**2 / unknown.share / 2 + unsure * felt)
    return root[:, None] * shape * root


def hidden(unknown: Unknown) -> tuple[Array, Array]:
    """Where noise in the shape could hide correlation: E[E E'], by eigenvalues and -vectors."""
    axes, left = unknown.axes, unknown.left
    if left is None:
        # Of d entries in a row of e each adds N_ii N_jj, and about N^2.
        return unknown.known.size / jnp.maximum(unknown.known, 1e-9) ** 2, unknown.turn
    # In prior units, where entries are told apart: E A E' with the metric A = W W'.
    own = jnp.diagonal(unknown.outside)
    met = left * own[:, None] * own
    metric = axes.white @ axes.white.T
    found = jnp.diag(met @ jnp.diagonal(metric)) + met * metric
    values, turn = jnp.linalg.eigh(axes.information(found))
    return jnp.maximum(values, 0), turn


def less(known: Array, error: Array) -> Array:
    """Inverse covariances K once there is more error E, (K^-1 + E)^-1; symmetric but for rounding.

    ``known`` is K, symmetric matrices on a leading axis.
    """
    # (K^-1 + E)^-1 = (1 + K E)^-1 K, which K = 0 leaves at 0. What is solved for comes column by
    # column: of a symmetric matrix these are its rows, and nothing has to be laid out anew.
    columns = jnp.linalg.solve(jnp.eye(known.shape[-1]) + known @ error, known)
    return jnp.swapaxes(columns, -1, -2)


def found(received: Received, memory: Memory, axes: White, alike: Kinds) -> Memory:
    """Scores of clients at ``memory.loc``, as far as they are known, from where they are kept.

    They are in ``axes``, until :func:`outside` takes them back. What is known of them has a row for
    each kind of client, until :func:`kept` gives each client its own.
    """
    unit, way, own = memory.moves.unit, memory.moves.way, memory.own

    def now(known: Array, error: Array, weights: Array) -> Array:
        more = axes.information(memory.moves.error - unpack(error))
        return pack(less(axes.known(unpack(known)), weights * more) / unit**2)

    # All clients' errors are alike and do not average out: each counts as if it were theirs all.
    weights = received.num_factors * received.num_records[:, None, None] ** 2
    known = alike.of_first(now, own.score_known, own.error, weights)
    told_something = jnp.any(own.score_known != 0, axis=1)
    score = jnp.where(told_something[:, None], own.score - own.records[:, None] * way, 0)
    return memory.with_own(score=unit * score @ axes.white, score_known=known)


def outside(memory: Memory, axes: White, alike: Kinds) -> Memory:
    """The same with clients' scores, which were in ``axes``, in prior units."""

    def there(known: Array) -> Array:
        return pack(axes.unknown(unpack(known)))

    return memory.with_own(
        score=memory.own.score @ axes.back,
        score_known=alike.of_each(there, memory.own.score_known),
    )


def kept(memory: Memory, alike: Kinds) -> Memory:
    """The inverse of :func:`found`: scores and what is known of them as they are kept."""
    (unit, way, error, _), own = memory.moves, memory.own
    return memory.with_own(
        score=own.score / unit + own.records[:, None] * way,
        score_known=alike.clients(own.score_known) * unit**2,
        error=jnp.broadcast_to(pack(error), own.error.shape),
    )


def moved(memory: Memory, loc: Array, lookups: Lookups | None, share: Array) -> Memory:
    """What is remembered, seen from where scores are taken next.

    That is ``loc``, in base values; ``lookups`` is as of ``noisy_scores.take``, and ``share`` that
    of all records whose clients were visited.
    """
    axes, size = coordinates(memory.shape), loc.size
    way = (loc - memory.loc) / memory.prior_sd
    # The shape depends on where scores are taken: what was seen elsewhere counts for less.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    p = jnp.maximum(p, 0)
    length = memory.level * jnp.sum((axes.back @ way) ** 2)
    p = p / jnp.sqrt(1 + p**2 * _SHAPE_DRIFT * length / size)
    before = memory.moves
    error = axes.outside(error_of(memory, unknown(memory, axes, lookups), way))
    return memory._replace(
        loc=loc,
        shape_known=axes.unknown((turn * p) @ turn.T),
        moves=before._replace(
            lately=_LATELY**share * (before.lately + memory.curved * way),
            way=before.way + memory.shape @ way / before.unit,
            error=before.error + error / before.unit**2,
        ),
    )
