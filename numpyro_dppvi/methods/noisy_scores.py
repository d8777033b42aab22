"""What the server of :class:`~numpyro_dppvi.FisherScoring` learns from noisy releases.

Nothing here sees a record. Two things are tracked by Kalman filters, in units of the prior:

* *The shape*: the information J of an average record. A release is W'JW + e, with coordinates W
  that it was made in and noise e of one size. In other coordinates that noise is N^(1/2) e N^(1/2),
  so that what was learnt is kept as a mean and one matrix, N^-1, ``shape_known``.
* *The scores* of each client at the current location, with their precision matrix. When the
  location moves by w, a sum of n scores changes by -n J w, known as well as J is.

What is remembered is in :mod:`numpyro_dppvi.methods.remembered`, what noise leaves of the shape in
:mod:`numpyro_dppvi.methods.shapes`, how scores follow the location in
:mod:`numpyro_dppvi.methods.moving`, and what factors claim in
:mod:`numpyro_dppvi.methods.noisy_factors`, and how clips follow in
:mod:`numpyro_dppvi.methods.clips`.

Directions matter: far from zero, raw columns are all but multiples of the intercept, and what is
left of them has a hundredth of the information. It shows only in coordinates that stretch it, which
:mod:`numpyro_dppvi.methods.ratios` finds.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Natural, PyTree
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.methods import (
    clips,
    differences,
    kinds,
    moving,
    noisy_factors,
    pull,
    ratios,
    scales,
    search,
    secant,
    tails,
)
from numpyro_dppvi.methods.differences import Differences
from numpyro_dppvi.methods.kinds import Kinds
from numpyro_dppvi.methods.lookups import Lookups, alike
from numpyro_dppvi.methods.ratios import Look, Ratios
from numpyro_dppvi.methods.remembered import (
    Memory,
    Told,
    Waiting,
    any_shape,
    begun,
    least,
    nobody,
    partial,
)
from numpyro_dppvi.methods.shapes import apart, raised, shrunk
from numpyro_dppvi.methods.visits import Received
from numpyro_dppvi.methods.white import White, coordinates, symmetric

_IN_STEP = 2, 4  # visits by which all must have sent scales or ratios, to be asked for them again

# What was chosen by simulation (docs/believe.md says on which studies).
_INFO_SHARES = (0.6, 0.8, 0.1)  # first, decay a visit, last
_ALONG = 0.2  # beyond a third of the clip: from so many scores on, clipped ones steer by weights
_MOST_LEVEL = 6.0  # of a shape that is right, at most 1
# Relative change of the level in a round that leads nowhere, and in one of at least so many squared
# deviations of a record.
_LEVEL_DRIFT = 0.05, 0.2, 0.1
_KNOWN = 3.0  # of its information, over the error: from here on a direction counts by what was seen
_LOOK_SHARE = 0.8  # of a visit's squared norm, where columns far from zero are looked for
# An observed information's error at the first visit, and by what it falls a visit: far away it says
# little of where a step will end.
_ROUGH = 0.2, 0.7
# The share of squared scores in it, likewise: of a wrong model they are no information.
_SQUARED = 0.7, 0.8
_ONE = 0.02  # the least error of one client's information, taken for everybody's
# Of all records, those whose releases have to wait for the server to move by them: about a tenth,
# and each of ten clients has so many, also where their records cannot be shared out evenly.
_ENOUGH = 0.085
_TOGETHER = 2  # the first visits, of which all are waited for
# Where it has to wait for all, it moves at the end of a round in which all were asked, or after so
# many times all records if clients are not asked equally often.
_ALL_ASKED = 2.0

# What clients release, in the order of ``Told.shares``.
_PARTS = "score", "information", "clipped", "scales", "votes"


class _Group(NamedTuple):
    """Visits of a group, and the coordinates ``axes`` that it was told."""

    received: Received
    released: PyTree
    said: Told
    axes: White

    @property
    def scored(self) -> Array:
        """Which of them have released scores."""
        return self.said.shares[:, 0] > 0

    def part(self, name: str, scale: Array | float) -> tuple[Array, Array]:
        """A part of the releases, and its noise, in its own units: those of ``scale``."""
        root, sums = jnp.sqrt(self.said.shares)[:, _PARTS.index(name)], self.released[name]
        by = jnp.where(root > 0, scale / jnp.where(root > 0, root, 1), 0)
        return sums * by.reshape(-1, *[1] * (sums.ndim - 1)), self.received.noise_std * by


@in_own_precision
def told(memory: Memory, place: Array | int) -> Told:
    """Where to take scores, in which coordinates, and how to share out the release."""
    visits = begun(memory, memory.own.visits[place])
    look = _look(memory, visits)
    first = (visits == 0) & ~any_shape(memory)
    info = jnp.maximum(_INFO_SHARES[2], _INFO_SHARES[0] * _INFO_SHARES[1] ** visits)
    flags = clips.share(memory)
    nothing = jnp.zeros_like(flags)
    usual = jnp.stack([1 - info - flags, info, flags, nothing, nothing])
    looking = (1 - _LOOK_SHARE) * usual + jnp.array([0.0, 0.0, 0.0, _LOOK_SHARE, 0.0])
    usual = jnp.where(jnp.any(look.step > 0), looking, usual)
    votes = search.SHARE if memory.search.votes.size else 0.0
    return Told(
        loc=memory.loc,
        white=memory.prior_sd[:, None] * coordinates(memory.shape).white,
        clip=memory.clip,
        info_clip=memory.info_clip * memory.clip**2,
        shares=jnp.where(first, jnp.array([0.0, 0.0, 0.0, 1 - votes, votes]), usual),
        prior_sd=memory.prior_sd,
        look=look,
        # Of outcomes that cannot be drawn, no observed score counts as clipped, and in the place of
        # drawn ones all that are beyond a third of the clip: together a misfit below 0.
        along=jnp.clip(-memory.misfit[0] / _ALONG - 1, 0, 1),
        squared=_SQUARED[0] * _SQUARED[1] ** visits * (1 - memory.drawn),
        near=memory.prior_sd[:, None] * memory.near,
        steps=search.steps(memory.search, memory.loc.size),
    )


def _look(memory: Memory, visits: Array) -> Look:
    """Where a client looks for columns far from zero, at its second visit and perhaps its third."""
    known = memory.ratios
    by_scale = memory.scales
    alike = by_scale.constant & (by_scale.clear > scales.FAINT)
    looks = (
        ratios.first(by_scale.most, alike, by_scale.clear),
        ratios.second(known),
        known.look,
    )
    begins = (visits == known.stage + 1) & (known.stage < 2)
    which = [begins & (known.stage == 0), begins & (known.stage == 1), visits == known.stage]
    # Who joins late does not look: what is known of the shape by then would be lost.
    which = [
        each & (visits > 0) & (begun(memory, memory.most_visits) <= visits + 1) for each in which
    ]
    return jax.tree.map(lambda *leaves: jnp.select(which, leaves, 0.0), *looks)


@in_own_precision
def take(
    received: Received,
    released: PyTree,
    memory: Memory,
    *,
    centred: float,
    reach: float,
    unseen: np.ndarray,
    lookups: Lookups | None,
    noise_aware: bool,
) -> tuple[Natural, Memory]:
    """What a group's releases change: the group's factors, and what is remembered.

    Args:
        received: What the server knows of the visits.
        released: What the group released.
        memory: What is remembered; of clients, those of the group.
        centred: Variance of a score by the outcomes drawn to centre it, over its information.
        unseen: Directions of which no record tells, shape ``(d, m)``, in base values.
        lookups: What lookups tell of an average record's information; ``None`` if nothing.
        reach: The longest that ``Memory.near`` may be, in deviations of one record.
        noise_aware: Whether factors know the noise of the releases, or else are made as if there
            were none.
    """
    said = jax.vmap(told, (None, 0))(memory, jnp.arange(received.num_records.size))
    white = said.white[0] / memory.prior_sd[:, None]
    axes = White(white, jnp.linalg.inv(white))
    group = _Group(received, released, said, axes)
    # Clients of whose scores as much is known, before and after a release.
    public = received.num_records, received.noise_std, memory.own.visits
    alike = kinds.of(*public, memory.own.score_known, memory.own.error)
    memory = moving.found(received, memory, axes, alike)
    memory = _counted(group, memory, lookups)
    scored, any_scored = group.scored, jnp.any(group.scored)
    memory = factors.select(any_scored, _waiting(group, memory, centred, lookups), memory)
    # At first, and where clients differ, the server learns and moves once all were asked; elsewhere
    # once enough were: what a small client releases is mostly noise, and a step by it can lead
    # anywhere.
    waiting = memory.waiting.records / received.total_records
    differ = differences.large(memory.differences, memory.loc.size)
    must = _may_wait(received) & (differ | (begun(memory, memory.most_visits) <= _TOGETHER))
    whole = jnp.abs(memory.rounds.going.records / received.total_records - 1) < 1e-3
    all_asked = (whole & (waiting > 0.999)) | (waiting > _ALL_ASKED)
    moves = any_scored & jnp.where(must, all_asked, waiting > _ENOUGH)

    def with_scores(memory: Memory) -> Memory:
        scored = factors.select(any_scored, _scored(group, memory, alike), memory)
        return moving.outside(scored, axes, alike)

    before, memory = memory, factors.select(moves, _learnt(group, memory, lookups), memory)
    memory = with_scores(memory)
    # Where clients differ, their scores cancel each other only in factors that are made alike: all
    # of a round by what was known when it began.
    known = factors.select(must, with_scores(before), memory) if _may_wait(received) else memory
    change, loc, covariance = noisy_factors.changes(
        received, known, alike, unseen, lookups, noise_aware, must | (any_scored & ~moves)
    )
    asked = jnp.sum(jnp.where(scored, received.num_records, 0)) / received.total_records
    # A posterior that is hardly told anything is wider than its mean is off. Outcomes drawn about
    # it would seem to say that a learnt spread is too large.
    about = noisy_factors.by_noise(covariance) if centred else covariance
    memory = moving.kept(memory, alike)._replace(
        near=noisy_factors.near(memory, about, reach),
        search=search.let_go(memory.search, asked),
    )
    return change, moving.moved(memory, jnp.where(moves, loc, memory.loc), lookups, asked)


def _counted(group: _Group, memory: Memory, lookups: Lookups | None) -> Memory:
    """After visits that counted: histograms, and the shape by scales until information is known."""
    received, said = group.received, group.said
    looked = jnp.any(said.look.step > 0, axis=1)
    histograms = jnp.where(looked, jnp.sum(said.look.step > 0, axis=1), memory.loc.size)
    _, std = group.part("scales", jnp.sqrt(histograms))
    first = ~looked & ~group.scored

    def counts_of(whose: Array) -> Array:
        """The sum of some clients' histograms; they fill more memory than all else."""

        def total() -> Array:
            counts, _ = group.part("scales", jnp.sqrt(histograms))
            return jnp.sum(jnp.where(whose[:, None, None], counts, 0), axis=0)

        nothing = jnp.zeros_like(memory.counts)
        found: Array = jax.lax.cond(jnp.any(whose), total, lambda: nothing)
        return found

    memory = memory._replace(
        counts=memory.counts + counts_of(first),
        counts_var=memory.counts_var + jnp.sum(jnp.where(first, std**2, 0)),
        counted=memory.counted + jnp.sum(jnp.where(first, received.num_records, 0)),
        ratios=_looked(received, memory, said, counts_of, std),
    )
    visits = memory.own.visits + 1.0
    memory = memory._replace(most_visits=jnp.maximum(memory.most_visits, jnp.max(visits)))
    memory = memory.with_own(
        visits=visits, records=received.num_records.astype(memory.own.records.dtype)
    )
    if memory.search.votes.size:
        memory = _searched(group, memory)
    memory = _asked_again(received, _with_scales(memory, lookups), first, looked)
    first_shape = jnp.diag(memory.scales.information)
    return memory._replace(shape=jnp.where(any_shape(memory), memory.shape, first_shape))


def _asked_again(received: Received, memory: Memory, first: Array, looked: Array) -> Memory:
    """Asks once more for histograms in which noise hides columns, as soon as all have sent them.

    Of a column whose scale or place is wrong by a hundred, all later visits say nothing.
    """
    known, visits = memory.ratios, memory.most_visits

    def again(counted: Array, counts_var: Array, now: Array, latest: int) -> Array:
        clear = scales.clear(memory.drawn, counted, counts_var)
        faint = (clear > scales.FAINT) & (clear < ratios.FAINT)
        once = jnp.abs(counted / received.total_records - 1) < 1e-3
        return jnp.any(now) & faint & once & (visits <= latest)

    hidden = ~jnp.all(memory.scales.found)
    octaves = again(memory.counted, memory.counts_var, first & hidden, _IN_STEP[0])
    looks = again(known.counted, known.counts_var, looked & (known.stage == 1), _IN_STEP[1])
    repeated = jnp.where(looks, visits - 1, memory.search.repeated)
    repeated = jnp.where(octaves, visits, repeated)
    return memory._replace(search=memory.search._replace(repeated=repeated))


def _searched(group: _Group, memory: Memory) -> Memory:
    """After votes. If the run is to begin elsewhere, nothing is known of scales there."""
    received, (votes, std) = group.received, group.part("votes", 1.0)
    sums, var = jnp.sum(votes, axis=0), jnp.sum(std**2)
    share = jnp.sum(jnp.where(std > 0, received.num_records, 0)) / received.total_records
    found, step = search.after(memory.search, sums, var, share, memory.most_visits)
    stays = jnp.where(jnp.any(step != 0), 0, 1)
    return memory._replace(
        search=found,
        loc=memory.loc + step * memory.prior_sd,
        counts=stays * memory.counts,
        counts_var=stays * memory.counts_var,
        counted=stays * memory.counted,
    )


def _looked(
    received: Received,
    memory: Memory,
    said: Told,
    counts_of: Callable[[Array], Array],
    std: Array,
) -> Ratios:
    """What is known of columns far from zero after visits that looked for them."""
    known = memory.ratios
    stages = jnp.where(jnp.any(said.look.step > 0, axis=1), begun(memory, memory.own.visits), 0)
    stage = jnp.maximum(jnp.max(stages), known.stage)
    # A new look begins with empty histograms, and keeps what the one before has found.
    new, mine = stage > known.stage, (stages == stage) & (stages > 0)
    look = jax.tree.map(lambda leaf: leaf[jnp.argmax(mine)], said.look)
    before = jax.tree.map(lambda leaf: jnp.where(new, 0, leaf), known)
    now = Ratios(
        stage=stage,
        look=factors.select(new, look, known.look),
        counts=before.counts + counts_of(mine),
        counts_var=before.counts_var + jnp.sum(jnp.where(mine, std**2, 0)),
        counted=before.counted + jnp.sum(jnp.where(mine, received.num_records, 0)),
        earlier=factors.select(new, known.found, known.earlier),
        found=known.found,
    )
    # A visit that has not looked changes no histogram, and most visits do not look.
    found: Ratios = jax.lax.cond(jnp.any(mine), ratios.with_found, lambda now: now, now)
    return found


def _with_scales(memory: Memory, lookups: Lookups | None = None) -> Memory:
    """With what its histograms say. Once a visit: it takes long to compile."""
    peers = None if lookups is None else lookups.peers_by(memory.prior_sd)
    of = memory.counts, memory.counts_var, memory.counted, memory.drawn, memory.columns, peers
    return memory._replace(scales=scales.of(*of))


def _waiting(group: _Group, memory: Memory, centred: float, lookups: Lookups | None) -> Memory:
    """With what came since the server moved, and by how much clients differ.

    ``centred`` is the variance of a score by the outcomes drawn to centre it, over its information.
    """
    received, axes, scored = group.received, group.axes, group.scored
    size, clip = memory.loc.size, group.said.clip[0]
    packed, info_std = group.part("information", group.said.info_clip[0])
    now = unpack(jnp.sum(packed, axis=0))
    info_var = jnp.sum(info_std**2) / 2  # packed entries are sqrt(2) as large
    flags, flags_std = group.part("clipped", 1.0)
    parts = jnp.asarray(tails.ROOTS, flags.dtype)
    scores, std = group.part("score", clip)
    records = jnp.maximum(jnp.sum(jnp.where(scored, received.num_records, 0)), 1)
    spread = jnp.sqrt(jnp.maximum(received.num_records, 1) * size)
    fresh = Waiting(
        visits=jnp.asarray(float(received.num_records.size)),
        records=records,
        information=now,
        information_var=info_var,
        flags=jnp.sum(flags, axis=0) / parts,
        flags_var=jnp.sum(flags_std**2) / parts**2,
        noise_var=jnp.sum(received.noise_std**2),
        noisy=jnp.sum(received.noise_std * clip / spread),
        score=jnp.sum(jnp.where(scored[:, None], scores, 0), axis=0),
        score_var=jnp.sum(jnp.where(scored, std**2, 0)),
    )
    if _may_wait(received):
        memory = memory._replace(differences=_opposed(received, memory, fresh))
        memory = memory._replace(differences=_differences(received, memory, axes, fresh, lookups))
    newest = scored & (memory.own.visits == memory.most_visits)
    asked = jnp.sum(jnp.where(newest, received.num_records, 0))
    # Where records' information is the identity, outcomes that are drawn anew at each visit have
    # as much variance in all directions.
    var = jnp.sum(jnp.where(newest, std**2, 0)) + centred * asked * memory.level
    new = secant.Scores(
        loc=memory.loc / memory.prior_sd,
        scores=jnp.sum(jnp.where(newest[:, None], scores, 0), axis=0) @ axes.back,
        noise=var * axes.back.T @ axes.back,
        records=asked,
        visit=memory.most_visits,
    )
    return memory._replace(
        waiting=jax.tree.map(jnp.add, memory.waiting, fresh),
        rounds=secant.after(memory.rounds, new, received.total_records),
    )


def _may_wait(received: Received) -> bool:
    """Whether the server may wait for all clients, where these differ."""
    # Observed information changes wildly on the way: it would tell of differences where none are.
    return partial(received) and received.space.can_draw


def _differences(
    received: Received, memory: Memory, axes: White, fresh: Waiting, lookups: Lookups | None
) -> Differences:
    """By how much clients differ, after a release that is compared with those before."""
    waiting, (moving, still, *_) = memory.waiting, memory.differences
    now, error = fresh.information / fresh.records, _info_error(received, memory, fresh)
    share = fresh.records / received.total_records
    waits = waiting.visits > 0
    before, seen, known = _average(received, memory, axes, lookups)
    level = before.level
    others = waiting.information / jnp.maximum(waiting.records, 1) / level
    others_error = _info_error(received, memory, waiting) / level
    here = jnp.eye(memory.loc.size) / jnp.where(waits, others_error, 1e6)
    compared = (now / level, error / level, share)
    on_the_way = differences.after(moving, seen, known, *compared)
    at_once = differences.after(still, others, here, *compared)
    return memory.differences._replace(
        moving=factors.select(waits, moving, on_the_way),
        still=factors.select(waits, at_once, still),
    )


def _opposed(received: Received, memory: Memory, fresh: Waiting) -> Differences:
    """By how much clients' scores differ, after a release, in deviations of one record."""
    waiting, known, unit = memory.waiting, memory.differences, jnp.sqrt(memory.level)
    number = jnp.maximum(waiting.records, 1)
    away = fresh.score / fresh.records - waiting.score / number
    noise = fresh.score_var / fresh.records**2 + waiting.score_var / number**2
    noise = noise / memory.level + 1 / fresh.records + 1 / number
    share = fresh.records / received.total_records
    scores = differences.after_scores(known.scores, away / unit, noise, share)
    # Where nobody waits, there is nobody to compare with.
    return known._replace(scores=factors.select(waiting.visits > 0, scores, known.scores))


def _scored(group: _Group, memory: Memory, alike: Kinds) -> Memory:
    """Each client's own scores, averaged with what is known of them, in the coordinates told."""
    scored, level = group.scored, memory.level
    sums, std = group.part("score", group.said.clip[0])
    fresh = jnp.where(scored, 1 / jnp.maximum((std / level) ** 2, 1e-6), 0)
    score, identity = memory.own.score, jnp.eye(len(memory.loc))

    def added(known: Array, fresh: Array) -> Array:
        return known + fresh * pack(identity)

    def gained(known: Array, fresh: Array) -> Array:
        """How far scores move towards new ones, (K + f)^-1 f if K was known and f is new."""
        after = unpack(added(known, fresh)) + 1e-12 * identity
        return pack(fresh[..., None] * jnp.linalg.inv(after))

    new = alike.of_first(lambda rows: rows, fresh[:, None])
    gain = alike.of_each(gained, memory.own.score_known, new)
    moved = score + alike.times(gain, sums / level - score)
    score = jnp.where(scored[:, None], moved, score)
    return memory.with_own(
        score=score, score_known=alike.of_each(added, memory.own.score_known, new)
    )


def _average(
    received: Received, memory: Memory, axes: White, lookups: Lookups | None
) -> tuple[Memory, Array, Array]:
    """Level, mean shape and what is known of it, with the releases that wait."""
    waiting = memory.waiting
    records = jnp.maximum(waiting.records, 1)
    share = waiting.records / received.total_records
    # Where none waits, nothing is told: an error of so many times the shape.
    error = jnp.where(waiting.visits > 0, _info_error(received, memory, waiting), 1e6)
    added = axes.information(least(len(memory.shape), received.total_records))
    told = jnp.eye(len(added)) - jnp.where(any_shape(memory), added, 0)
    # Where records look entries up, each moves by a few of them: not by how far all lead together.
    drift = _level_drift(memory, axes) if lookups is None else jnp.asarray(_LEVEL_DRIFT[1] ** 2)
    now = waiting.information / records
    return _shape_seen(memory, axes, now, error, share, told, share * drift)


def _info_error(received: Received, memory: Memory, waiting: Waiting) -> Array:
    """The error of an entry of the information a record, by the releases in a sum."""
    squared = waiting.information_var / jnp.maximum(waiting.records, 1) ** 2
    if partial(received):
        squared = squared + _ONE**2
    if not received.space.can_draw:
        # Where records are unlikely, observed curvature nearly vanishes on one side and is huge on
        # the other. Newton's steps that believe it to the last digit are thrown far away.
        squared = squared + (_ROUGH[0] * _ROUGH[1] ** begun(memory, memory.most_visits)) ** 2
    return jnp.sqrt(squared)


def _learnt(group: _Group, memory: Memory, lookups: Lookups | None) -> Memory:
    """Shape, level and clips by the releases that wait; then none does."""
    received, axes, waiting = group.received, group.axes, memory.waiting
    records = jnp.maximum(waiting.records, 1)
    share = waiting.records / received.total_records
    memory, seen, known = _average(received, memory, axes, lookups)
    if lookups is not None:
        seen = axes.information(axes.outside(seen) * lookups.meeting)
    near = clips.near(memory, axes)
    memory = clips.misfit(memory, near, share)
    bent = clips.cut_off(memory, near, share, received.total_records)
    responded = secant.response(memory.rounds, axes, memory.level, received.total_records)
    # Where clips bend, scores also change as clips do.
    responded = responded._replace(error=jnp.where(bent > 0, jnp.inf, responded.error))
    seen, known = secant.learnt(responded, seen, known)
    shape = axes.information(shrunk(axes, seen, known))
    shape = axes.outside(secant.less(responded, shape, seen, known))
    # Looks tell more than what noise left of the information so far, but nothing of what has grown
    # on the way: the information on rates, tenfold.
    far = jnp.any(group.said.look.step > 0) & jnp.any(jnp.isfinite(memory.ratios.found.var))

    def closer() -> Array:
        by_scale = memory.scales
        looked = coordinates(
            ratios.shape(by_scale.most, by_scale.beyond, by_scale.centred, memory.ratios)
        )
        seen_there = looked.information(axes.outside(seen))
        return raised(looked, seen_there, looked.known(axes.unknown(known)))

    shape = jax.lax.cond(far, closer, lambda: shape)
    last = tails.after(
        memory.tails,
        begun(memory, memory.most_visits),
        near,
        waiting.flags,
        waiting.flags_var,
        records,
    )
    error = _info_error(received, memory, waiting)
    more = least(len(shape), received.total_records)
    memory = clips.after(memory, axes, bent, shape + more, seen, known, error, share)
    if not partial(received):
        shape = shape + axes.outside(secant.missed(responded, axes.information(shape)))
    before = jnp.diagonal(jnp.where(far, shape, memory.shape))
    memory = memory._replace(seen=axes.outside(seen), shape_known=axes.unknown(known))
    if lookups is not None:
        noise = jnp.diagonal(moving.unknown(memory, axes, lookups).outside)
        shape, added = apart(shape, lookups.meeting)
        memory = memory._replace(added=added)
        peers = lookups.peers_by(memory.prior_sd, memory.scales.information)
        shape = alike(shape, before, jnp.diagonal(memory.seen), noise, peers)
    # Of all that wait at once: where clients differ, the last ones' scores alone point one way.
    pulled = pull.after(
        memory.pull,
        axes.white,
        axes.back,
        waiting.score,
        waiting.score_var,
        records,
        received.total_records,
        memory.level,
    )
    return memory._replace(
        shape=shape + more,
        tails=last,
        pull=pulled,
        rounds=secant.used(memory.rounds),
        waiting=nobody(memory.loc.size),
    )


def _shape_seen(
    memory: Memory,
    axes: White,
    now: Array,
    error: Array,
    share: Array,
    told: Array,
    drift: Array,
) -> tuple[Memory, Array, Array]:
    """The level, the mean of all released shapes and what is known of it, in ``axes``.

    The level comes with the memory, whose scores over the level are those of the new one.

    Args:
        memory: What is remembered; its shape is the identity in ``axes``.
        axes: The coordinates of the release.
        now: The information that was released, a record.
        error: Noise on its entries.
        share: Of all records, those behind it.
        told: The shape without what was only added to it.
        drift: Variance by which the level has changed since the last releases, relatively.
    """
    # In the eigenvectors u_i of what is known, with eigenvalues p_i, entry (i, j) of the mean has
    # the standard error (p_i p_j)^(-1/2), and a release has the same one for every entry.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    p = jnp.maximum(p, 0)
    seen = turn.T @ axes.information(memory.seen) @ turn
    now = turn.T @ now @ turn
    # Level: a scalar Kalman filter on the diagonal, where something is known of it; it drifts
    # because the clip and the location move.
    by = 1 / (error**2 / memory.level**2 + 1 / jnp.maximum(p, 1e-6) ** 2)
    by = by * _beside(jnp.diagonal(seen), p, by)
    told = jnp.diagonal(turn.T @ told @ turn)
    ratio = jnp.sum(by * jnp.diagonal(now)) / jnp.sum(by * told) / memory.level
    noise = 2 / jnp.sum(by)
    # What is not known of the level by now: the variance at which what a visit tells makes up for
    # the drift since the one before, var = drift + var noise / (var + noise).
    var = (drift + jnp.sqrt(drift**2 + 4 * drift * noise)) / 2
    gain = var / (var + noise)
    level = memory.level * jnp.clip(1 + gain * (ratio - 1), 0.2, 5.0)
    # Where some latents' information has grown thousandfold on the way (a dose's, once it has an
    # effect), the level must not grow for all: that is the shape's to follow.
    level = jnp.minimum(level, _MOST_LEVEL)
    # A level has changed because it was wrong before, or because it drifts: by their variances
    # (a smoother, one step back). As far as it was wrong, all scores so far
    # were divided by the wrong number.
    left = gain * noise
    wrong = (memory.level / level) ** (left / jnp.maximum(left + drift, 1e-12))
    unit = memory.moves.unit * wrong
    memory = memory._replace(
        level=level, level_var=left, moves=memory.moves._replace(unit=unit)
    ).with_own(score=memory.own.score * wrong, score_known=memory.own.score_known / wrong**2)
    error = jnp.maximum(error / level, 1e-6)
    old = p[:, None] * p
    seen = (old * seen + now / level / error**2) / (old + error**-2)
    # Exact on the diagonal; elsewhere it claims a little too much (Cauchy-Schwarz).
    p = jnp.sqrt(p**2 + error**-2)
    return memory, symmetric(turn @ seen @ turn.T), symmetric((turn * p) @ turn.T)


def _level_drift(memory: Memory, axes: White) -> Array:
    """Variance of the level's relative change in a round: by how far the last rounds have led."""
    before = memory.rounds.before
    way = axes.back @ (memory.loc / memory.prior_sd - before.loc)
    far = memory.level * jnp.sum(way**2) / _LEVEL_DRIFT[2]
    # Of the first rounds, nobody knows how far they will lead.
    far = jnp.where(jnp.trace(before.noise) > 0, jnp.minimum(1, far), 1)
    # Where outcomes are rare, a short way in these units can halve what records tell.
    far = jnp.maximum(far, jnp.mean(memory.curved))
    return _LEVEL_DRIFT[0] ** 2 + _LEVEL_DRIFT[1] ** 2 * far


def _beside(seen: Array, p: Array, by: Array) -> Array:
    """How much directions count for the level, in [0, 1]: by what was seen of them so far.

    Nothing responds in directions that no record speaks of. If these counted, the level would fall
    round after round. It is the mean that is 1 here: if less is seen of all, then the level is too
    high. Directions that are not well known yet count as if all were there, so that factors claim
    less until they are.

    ``seen`` is of each direction's information, ``p`` the inverse of its error, and ``by`` how much
    directions would count otherwise.
    """
    mean = jnp.sum(by * seen) / jnp.sum(by)
    beside = jnp.where(mean > 0, seen / jnp.where(mean > 0, mean, 1), 1)
    return jnp.clip((p**2 * beside + _KNOWN**2) / (p**2 + _KNOWN**2), 0, 1)
