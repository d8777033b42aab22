"""Factors that know their noise: A (A + Sigma)^-1 A of what clients released."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.methods import moving
from numpyro_dppvi.methods.kinds import Kinds
from numpyro_dppvi.methods.lookups import Lookups
from numpyro_dppvi.methods.remembered import Memory, any_shape, least
from numpyro_dppvi.methods.visits import Received
from numpyro_dppvi.methods.white import White, coordinates, order_of, seen, symmetric, turned

# Chosen by simulation (docs/believe.md says on which studies).
_TRUST = 2.0, 1.0  # the longest step, in white length; of outcomes that cannot be drawn
_FARTHEST = 1.0  # how far a step takes a latent at most, in its prior's deviations
_STEPS = 3  # towards the mean of the posterior, whose factors depend on where it is
_LEAST = 0.1  # response that a client's own step counts with
_DOUBTED = 0.3  # the least response of latents that may lie far from zero
# What a direction may have of a column's information at the most, and within how many errors of
# none, for it to be said to have none.
_LITTLE, _ERRORS = 0.3, 2.0
_EDGE = 6.0  # of the noise in what was seen: beyond it the shape is believed
_WANDERS = 0.07  # the variance of noise in a latent's step from which on steps are shorter
_FAR = 2.0  # spreads from zero, beyond which a column counts as far from it
_BEYOND = 1e3  # how many times the noise's deviation an error counts at most


def changes(
    received: Received,
    memory: Memory,
    alike: Kinds,
    unseen: np.ndarray,
    lookups: Lookups | None,
    noise_aware: bool,
    waits: Array,
) -> tuple[Natural, Array, Array]:
    """Changes of visited clients' factors, where scores go next, and q's covariance.

    Args:
        received: What the server knows of the visits.
        memory: What is remembered, the releases included.
        alike: Clients of whose scores as much is known.
        unseen: Directions of which no record tells, shape ``(d, m)``, in base values.
        lookups: As of ``noisy_scores.take``.
        noise_aware: As of ``noisy_scores.take``.
        waits: Whether the server waits, so that scores stay where they are.
    """
    ((name, _),) = received.family.members
    size, sd, num_records = memory.loc.size, memory.prior_sd, received.num_records
    axes = coordinates(memory.shape)
    # Less is made of directions in which noise could hide correlation: J (J + sqrt(d) N)^-1 of a
    # step, J^2 (J^2 + d N^2)^-1 of what a factor claims, if all entries meet.
    unknown = moving.unknown(memory, axes, lookups)
    hidden, turn = moving.hidden(unknown)
    half = (turn / jnp.sqrt(1 + hidden)) @ turn.T
    if lookups is not None:
        # What peers have in common is known here, and changes on the way. Steps that count on it
        # overshoot where a spread is learnt, and are thrown.
        each = unknown._replace(left=jnp.asarray(lookups.meeting, sd.dtype))
        hidden, turn = moving.hidden(each)
    sure = (turn / (1 + jnp.sqrt(hidden))) @ turn.T
    here = memory.loc / sd
    responses, ways = responses_in(memory, axes)
    # What is in a learnt shape for the sake of its coordinates alone, nobody has told.
    added = jnp.where(any_shape(memory), axes.information(least(size, received.total_records)), 0)
    if lookups is not None:
        values, along = jnp.linalg.eigh(added + axes.information(memory.added))
        added = (along * jnp.clip(values, 0, 1)) @ along.T
    response = (ways * responses) @ ways.T @ (jnp.eye(size) - added)
    response = symmetric(response) if noise_aware else jnp.eye(size)
    responses, ways = jnp.linalg.eigh(response)
    # Each client's own maximum, by one Newton step.
    own = memory.own.score @ axes.white / num_records[:, None]
    own = here + own @ (ways / jnp.maximum(responses, _LEAST)) @ ways.T @ axes.white.T
    # Factors have the precision claims_m, turned so.
    turn = half @ response if noise_aware else response
    if unseen.shape[1]:
        # A shape that is learnt in noise has some information there, which nobody has told: it is
        # the prior alone that tells an intercept from the mean of all groups' effects.
        turn = seen(axes, jnp.asarray(unseen, sd.dtype) / sd[:, None]) @ turn
    if lookups is None and noise_aware:
        turn = told_of(memory, axes, unknown.outside) @ turn
    before = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), received.factor[name])
    known = alike.of_each(lambda rows: pack(axes.known(unpack(rows))), memory.own.score_known)
    records = alike.of_first(lambda rows: rows, num_records[:, None, None])
    # How many clients a kind has, and the sum of where they would have the posterior's mean.
    many, pulls = alike.sums(jnp.ones_like(own[:, 0])), alike.sums(own @ axes.back.T @ turn)

    def told(many: Array, known: Array, records: Array) -> Array:
        traces = jnp.trace(unpack(known), axis1=1, axis2=2)
        return jnp.sum(many * records[:, 0, 0] ** 2 * traces)

    # The variance of noise in a record's score, if all clients' are taken together.
    noise = size / jnp.maximum(alike.total(told, many, known, records), 1e-30)

    def claims(middle: Array) -> Array:
        """What factors claim to know, given about where the posterior's mean is; of each kind."""
        # In white coordinates A = n level R with the response R, which is about the identity, so
        # that A (A + Sigma)^-1 A is n R (n R / level + V)^-1 n R for scores over the level with
        # error V, and with K = V^-1 the middle is (1 + K n R / level)^-1 K.
        # As long as the server waits, scores stay where they are.
        way = jnp.where(waits, 0, middle - here)
        error = moving.error_of(memory, unknown, way)
        most = _BEYOND**2 * noise
        error = error * jnp.minimum(1, most / jnp.maximum(jnp.trace(error) / size, 1e-30))
        error = received.num_factors * error

        def of_kind(known: Array, records: Array) -> Array:
            if not noise_aware:  # the limit of the same without noise, A, once there are scores
                scored = jnp.any(known != 0, axis=1, keepdims=True)
                return jnp.where(scored, records[:, 0] * memory.level, 0) * pack(jnp.eye(size))
            slope = records / memory.level * response
            return pack(records**2 * moving.less(unpack(known), slope + records**2 * error))

        return alike.of_each(of_kind, known, records)

    def naturals(claims: Array) -> NormalNatural:
        """Their factors."""

        def outside(claims: Array) -> Array:
            precision = symmetric(turned(axes.back.T @ turn, unpack(claims)))
            return pack(precision / (sd[:, None] * sd))

        precision = alike.of_each(outside, claims)
        return NormalNatural(alike.times(precision, own * sd), -0.5 * alike.clients(precision))

    def total(claims: Array) -> NormalNatural:
        """The product of their factors, which takes less time."""

        def some(claims: Array, many: Array, pulls: Array) -> tuple[Array, Array]:
            return many @ claims, jnp.einsum("kij,kj->i", unpack(claims), pulls)

        summed, linear = alike.total(some, claims, many, pulls)
        precision = axes.outside(turned(turn, unpack(summed))) / (sd[:, None] * sd)
        return NormalNatural(axes.back.T @ turn @ linear / sd, pack(-0.5 * precision))

    def moments(found: NormalNatural) -> tuple[Array, Array]:
        """The posterior's mean and covariance."""
        change = jax.tree.map(jnp.subtract, found, before)
        q = jax.tree.map(jnp.add, received.q[name], change)
        precision = -2 * unpack(q.quadratic)
        root = jnp.sqrt(jnp.diagonal(precision))
        scaled = precision / (root[:, None] * root)
        covariance = jnp.linalg.inv(scaled)
        mean = jnp.linalg.solve(scaled, q.linear / root) / root
        return mean / sd, covariance / (root[:, None] * root) / (sd[:, None] * sd)

    # Columns far from zero share what records tell of them with the column of ones, which is one of
    # them here. Such runs have far to go, and must not lag.
    ratios = memory.ratios.found
    far = jnp.sum(ratios.mean**2 > _FAR**2 * ratios.var) > 1

    def step(mean: Array, covariance: Array) -> Array:
        # Where little is known, q is the prior. A run that began elsewhere must not be pulled back
        # to the prior's mean by that: steps are as if the prior were about where it is.
        mean = mean + memory.search.holds * covariance @ (here - memory.search.origin)
        width = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), 0))
        way = axes.back @ (mean - here)
        way = jnp.where(far, 1, steady(way, noise)) * (sure @ way)
        length = jnp.sqrt(jnp.sum(way**2))
        longest = jnp.where(memory.drawn > 0, *_TRUST)
        way = axes.white @ way * jnp.minimum(1.0, longest / jnp.maximum(length, 1e-12))
        # Far away, records can say next to nothing of a latent: of a share of zeros, say, where
        # all counts are expected to be 0. A white length is any way there.
        way = way * jnp.minimum(1.0, _FARTHEST / jnp.maximum(jnp.max(jnp.abs(way)), 1e-12))
        # What is not sure is mixed along white axes. A little of one that is known well can be a
        # hundred prior widths of one that is hardly known: the prior holds q, but not the step.
        to = jnp.clip(here + way, jnp.minimum(here, mean) - width, jnp.maximum(here, mean) + width)
        return jnp.where(jnp.all(jnp.isfinite(to)), to, here)

    # Of a place far away factors claim little. If that is less than the prior knows, the next step
    # goes to the prior's mean, and without noise a run goes there and back for ever; or clients in
    # turn each lead to their own mode. So an error counts for so many times the noise at most.
    # A loop, in which factors come before steps, because compiling each of them took a second. Of
    # the last turn only the factors and the covariance count.
    def again(number: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        middle, _, _ = found
        now = claims(middle)
        mean, covariance = moments(total(now))
        to = step(mean, covariance)
        # The first is Newton's step. What factors claim of a place far away is little, and would
        # pull later ones back.
        to = jnp.where(number > 0, to + memory.search.holds * (middle - to), to)
        return jnp.where(number < _STEPS, to, middle), now, covariance

    start = (here, jnp.zeros_like(known), jnp.zeros_like(memory.shape))
    middle, last, covariance = jax.lax.fori_loop(0, _STEPS + 1, again, start)
    change = jax.tree.map(jnp.subtract, naturals(last), received.factor[name])
    return Natural({name: change}), middle * sd, covariance


def told_of(memory: Memory, axes: White, noise: Array) -> Array:
    """Takes off a vector in ``axes`` what records may not speak of at all.

    Columns that add up to a constant say nothing of one direction. Noise hides that: the shape has
    as much information there as noise could hide. Where columns surely have little of their own
    beside others, and none of it was seen, factors claim none; the prior keeps what it says.

    Columns far from zero have little of their own, too, which looks and not the matrix show.

    ``noise`` is that of what was seen of the shape, N in prior units.
    """
    alone = coordinates(jnp.diag(jnp.diagonal(memory.shape)))
    values, turn = jnp.linalg.eigh(alone.information(memory.seen))
    noise = jnp.diagonal(turn.T @ alone.information(noise) @ turn)
    # Noise in a given direction, and in one that was searched for in noise alone.
    error, edge = math.sqrt(2) * noise, 2 * math.sqrt(len(turn)) * noise
    # 1 for what is to be taken off, 0 for what may not be; between these, a part.
    little = jnp.clip(2 - (jnp.maximum(values, 0) + edge) / _LITTLE, 0, 1)
    off = little * jnp.clip(2 - values / (_ERRORS * error), 0, 1)
    off = jnp.where(jnp.sum(memory.scales.constant) > 1, 0, off)
    ways = axes.back @ alone.white @ turn
    ways = ways / jnp.sqrt(jnp.sum(ways**2, axis=0))
    by = off / (1 - off + 1e-4)
    return jnp.linalg.inv(jnp.eye(len(turn)) + (ways * by) @ ways.T)


def steady(way: Array, noise: Array) -> Array:
    """The part of a step that is taken, in (0, 1].

    A step costs some of what was known before, the more the longer it is. Where noise leads about
    as far as a record's own deviations, so little of each visit would be left that the next step is
    as noisy, and the run wanders. Shorter steps keep more, so that visits add up.

    ``way`` is the step in white coordinates, shape ``(d,)``, and ``noise`` the variance of noise in
    each of its entries.
    """
    told = jnp.sum(way**2) + 1  # a step as long as a record's deviation stands for itself
    return told / (told + way.size * jnp.maximum(noise - _WANDERS, 0))


def by_noise(covariance: Array) -> Array:
    """The covariance of the posterior's mean by the noise of releases, in prior units.

    If q has the covariance C, releases have told it C^-1 - 1, and their noise moves its mean by
    C (C^-1 - 1) C. Where nothing is known, C = 1, noise has moved nothing.
    """
    return covariance - covariance @ covariance


def near(memory: Memory, covariance: Array, reach: float) -> Array:
    """A root of a covariance in prior units, no longer than an expansion reaches."""
    values, turn = jnp.linalg.eigh(symmetric(covariance))
    root = turn * jnp.sqrt(jnp.maximum(values, 0))
    length = jnp.sqrt(memory.level * jnp.sum((coordinates(memory.shape).back @ root) ** 2))
    root = root * jnp.minimum(1, reach / jnp.maximum(length, 1e-12))
    return jnp.where(jnp.all(jnp.isfinite(root)), root, 0)


def responses_in(memory: Memory, axes: White) -> tuple[Array, Array]:
    """How strongly scores respond in ``axes``, as far as is sure: eigenvalues and eigenvectors.

    By 1, if the shape is right. It may not be among latents whose records have about one scale: of
    columns far from zero, what is left beside the intercept can have so little information that
    noise hides from the shape that it is small. If it is believed to be large, scores that say
    nothing seem to say that all is well, and intervals are many times too narrow. So these respond
    by no more than what was seen, noise and all.
    """
    narrow = memory.scales.constant
    narrow = jnp.where(narrow & (jnp.sum(narrow) > 1), 1.0, 0.0)[order_of(memory.shape)]
    among = narrow[:, None] * narrow * axes.information(memory.seen)
    values, vectors = jnp.linalg.eigh(among + jnp.diag(1 - narrow))
    # Of many latents in much noise, what was seen says nothing: its eigenvalues spread as far as
    # the edge of the noise, 2 sqrt(k) errors of an entry. Then the shape is believed after all.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    noise = turn**2 @ (1 / jnp.maximum(p, 1e-9))
    edge = 2 * jnp.sum(narrow * noise) / jnp.sqrt(jnp.maximum(jnp.sum(narrow), 1))
    doubt = 1 / (1 + (edge / _EDGE) ** 4)
    return 1 - doubt * (1 - jnp.clip(values, _DOUBTED, 1)), vectors
