"""What the server of :class:`~numpyro_dppvi.FisherScoring` learns from noisy releases.

Nothing here sees a record. Two things are tracked by Kalman filters, in units of the prior:

* *The shape*: the information J of an average record. A release is W'JW + e, with coordinates W
  that it was made in and noise e of one size. In other coordinates that noise is N^(1/2) e N^(1/2),
  so that what was learnt is kept as a mean and one matrix, N^-1, ``shape_known``.
* *The scores* of each client at the current location, with their precision matrix. When the
  location moves by w, a sum of n scores changes by -n J w, known as well as J is.

Directions matter: far from zero, raw columns are all but multiples of the intercept, and what is
left of them has a hundredth of the information. It shows only in coordinates that stretch it, which
:mod:`numpyro_dppvi.methods.ratios` finds.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_dppvi._typing import Array, Natural, PyTree
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.methods import differences, pull, ratios, secant, tails
from numpyro_dppvi.methods.differences import Differences
from numpyro_dppvi.methods.pull import Pull
from numpyro_dppvi.methods.ratios import Look, Ratios
from numpyro_dppvi.methods.tails import Tails
from numpyro_dppvi.methods.visits import ByClient, Received

# Bins of the scale histograms: powers of two of a record's root information, in prior units.
LOWEST, BINS = -20, ratios.BINS
# log2 |z| of a standard normal z by bins of one octave: what a column's histogram looks like.
_TEMPLATE = (0.05, 0.1, 0.18, 0.3, 0.28, 0.09)
_TEMPLATE_RMS = 4.0  # octaves from the template's first bin to the root mean square
_FOUND = 4.5  # a column is taken for seen if its template stands out by so many deviations of noise

# What was chosen by simulation (docs/believe.md says on which studies).
_FLAGS_SHARE = 0.04  # of a visit's squared norm, for the three clipped fractions
_INFO_SHARES = (0.6, 0.8, 0.1)  # first, decay a visit, last
_TARGETS, _INFO_TARGETS = (0.003, 0.2), (0.01, 0.1)  # least and largest fractions to be clipped
_ALONG = 0.2  # beyond a third of the clip: from so many scores on, clipped ones steer by weights
_AIM = 0.1  # the fraction to be clipped where noise is as large as what scores say
_CLIPS, _INFO_CLIPS = (0.1, 30.0), (0.1, 5.0)  # of scores, times sqrt(d); of information
_TRUST = 2.0  # the longest step, in white length
_STEPS = 3  # towards the mean of the posterior, whose factors depend on where it is
_SHAPE_DRIFT = 3.0  # variance of an entry of the shape after a step of white length 1, times d
_MOST_LEVEL = 6.0  # of a shape that is right, at most 1
_LEVEL_DRIFT = 0.2  # relative change of the level in a round
_LEVEL_DOUBT = 0.3  # how much of what is unknown of the level counts, where scores are moved
_LENGTHS = 0.5  # a change of lengths is believed if its relative error is less
_DOUBT = 1.5  # the misfit counts from so many of its standard deviations on
_FORGET = 2.0  # by how much a round makes the variance of a known misfit grow, relatively
_CURVATURE, _UNSURE = 6.0, 0.1  # errors of the linear observation: of third and of second order
_ALONE = 2.0  # an axis is taken for seen if it stands out by so many deviations of noise
_PAIR = 3.0  # the same for a pair of columns, if these are few
_LOOK_SHARE = 0.4  # of a visit's squared norm, where columns far from zero are looked for
_DOUBTED = 0.3  # the least response of latents that may lie far from zero
_EDGE = 6.0  # of the noise in what was seen: beyond it the shape is believed
# An observed information's error at the first visit, and by what it falls a visit: far away it says
# little of where a step will end.
_ROUGH = 0.4, 0.7
_ONE = 0.02  # the least error of one client's information, taken for everybody's
_LEAST = 0.1  # information of all records, in units of the prior's, below which none is looked for
_FLOOR = 0.5  # of the noise's edge: what lies below it is not told from it


class Told(NamedTuple):
    """What the server tells a client; made of releases only.

    Attributes:
        loc: Where scores are taken: base values of all latents in one vector, shape ``(d,)``.
        white: Columns span white coordinates, shape ``(d, d)``.
        clip: Bound on the norm of a white score.
        info_clip: Bound on the Frobenius norm of a record's white information.
        shares: Shares of a release's squared norm: score, information, fractions, scales.
        prior_sd: Standard deviations of the prior, shape ``(d,)``.
        look: Where to look for columns far from zero, at visits that do.
        along: How much of a clipped score is to answer in its own direction, where outcomes cannot
            be drawn: 1 as long as many are clipped, then 0.
        near: Where else the truth may be: ``loc + near @ z`` with standard normal z, shape
            ``(d, d)``.
    """

    loc: Array
    white: Array
    clip: Array
    info_clip: Array
    shares: Array
    prior_sd: Array
    look: Look
    along: Array
    near: Array


class Waiting(NamedTuple):
    """Sums over visits at one location since the server moved.

    Attributes:
        visits: How many.
        records: Records behind them.
        information: Released information in the coordinates that clients were told.
        information_var: Variance of its noise's entries.
        flags: What was clipped, shape ``(3,)``, in [-1, 1] a record.
        flags_var: Variance of their noise.
        scores: Released scores, in the same coordinates.
        scores_var: Variance of their noise.
        noise_var: Variance of the noise on releases of norm 1.
        noisy: A clip's noise beside the clients' own spread.
    """

    visits: Array
    records: Array
    information: Array
    information_var: Array
    flags: Array
    flags_var: Array
    scores: Array
    scores_var: Array
    noise_var: Array
    noisy: Array


class Own(NamedTuple):
    """What is remembered of each client, on a leading axis.

    Where it is kept, ``score`` and ``score_known`` are as of the client's last visit, in units of
    :class:`Moves`, so that a visit costs as much however many clients there are: see
    ``_kept``. Within ``take`` they are at ``Memory.loc``.

    Attributes:
        visits: How often it was visited.
        records: How many records it has, once it was visited.
        score: Sum of its scores over the level, shape ``(d,)``.
        score_known: The inverse of its covariance, shape ``(d, d)``.
        error: ``Moves.error`` at its last visit.
    """

    visits: Array
    records: Array
    score: Array
    score_known: Array
    error: Array


class Moves(NamedTuple):
    """What has become of all clients' scores since the run began, in one sum for all.

    Attributes:
        unit: By what scores were multiplied, because the level that they are over has changed.
        way: By how much a record's score has fallen, in this unit, shape ``(d,)``.
        error: Covariance of its error, in this unit squared, shape ``(d, d)``.
    """

    unit: Array
    way: Array
    error: Array


class Memory(NamedTuple):
    """What the server remembers; everything was released. In prior units, but for ``loc``.

    Attributes:
        loc: Where scores are taken next, base values.
        prior_sd: Standard deviations of the prior.
        level: How strongly clipped scores respond, in units of ``shape``.
        level_var: Variance of its relative error.
        shape: Information of an average record up to ``level``, shape ``(d, d)``.
        seen: Mean of the shapes that were released.
        shape_known: N^-1, if the noise of ``seen`` is N^(1/2) e N^(1/2), e symmetric with standard
            normal entries.
        clip: Bound on the norm of a white score.
        info_clip: Bound on a record's information in units of ``clip`` squared.
        misfit: Fraction of observed scores that are clipped, less that of drawn ones; below 0 where
            outcomes cannot be drawn.
        misfit_known: The inverse of its error's variance.
        tails: The same of the last rounds, each by itself.
        counts: Noisy histograms of the records' scales, shape ``(d, bins)``.
        counts_var: Variance of their noise.
        counted: Records in them.
        ratios: What is known of columns far from zero.
        most_visits: How often the client was visited that was visited most.
        clients: What is remembered of each; in ``take``, of those who were visited alone.
        moves: What has become of all clients' scores.
        pull: Whether the last rounds' scores still point one way.
        round: The scores of the last round, if all clients were asked at one location.
        waiting: Releases since the server moved.
        differences: By how much clients differ.
        near: A root of the posterior's covariance, short enough for an expansion about ``loc``.
    """

    loc: Array
    prior_sd: Array
    level: Array
    level_var: Array
    shape: Array
    seen: Array
    shape_known: Array
    clip: Array
    info_clip: Array
    misfit: Array
    misfit_known: Array
    tails: Tails
    counts: Array
    counts_var: Array
    counted: Array
    ratios: Ratios
    most_visits: Array
    clients: ByClient[Own]
    moves: Moves
    pull: Pull
    round: secant.Round
    waiting: Waiting
    differences: Differences
    near: Array

    @property
    def own(self) -> Own:
        """What is remembered of each client."""
        return self.clients.rows

    def with_own(self, **changes: Array) -> "Memory":
        """With something else remembered of them."""
        return self._replace(clients=ByClient(self.own._replace(**changes)))


class _White(NamedTuple):
    """Coordinates z of changes in prior units: ``change = white @ z``, ``z = back @ change``."""

    white: Array
    back: Array

    def known(self, matrix: Array) -> Array:
        """An inverse covariance in these coordinates; of many, on leading axes."""
        return _symmetric(_turned(self.back, matrix))

    def unknown(self, matrix: Array) -> Array:
        """The same, back in prior units."""
        return _symmetric(_turned(self.white, matrix))

    def information(self, matrix: Array) -> Array:
        """An information matrix in these coordinates."""
        return _symmetric(_turned(self.white.T, matrix))

    def outside(self, matrix: Array) -> Array:
        """The same, back in prior units."""
        return _symmetric(_turned(self.back.T, matrix))


# A part of the releases in its own units, and its noise: (sums, number of the part, scale).
_Part: TypeAlias = Callable[[Array, int, Array | float], tuple[Array, Array]]


@in_own_precision
def nothing(family: MeanField, q: Natural, num_factors: int) -> Memory:
    """What is remembered before the first visit: the prior."""
    ((name, normal),) = family.members
    size = normal.size
    zero, one, square = jnp.zeros(()), jnp.ones(()), jnp.zeros((size, size))
    prior_sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(-2 * unpack(q[name].quadratic))))
    return Memory(
        # Beside the prior's mean: where logits are all 0, densities made of |x| have no derivative.
        # By no more than that: of a wide prior in raw units, a thousandth is several logits.
        loc=normal.location(family.coordinates(q)[name]) + 1e-6 * prior_sd,
        prior_sd=prior_sd,
        level=0.6 * one,
        level_var=zero,
        shape=jnp.eye(size),
        seen=square,
        shape_known=square,
        clip=jnp.sqrt(size * one),
        info_clip=1.5 * one,
        misfit=zero,
        misfit_known=zero,
        tails=tails.nothing(),
        counts=jnp.zeros((size, BINS)),
        counts_var=zero,
        counted=zero,
        ratios=ratios.nothing(size),
        most_visits=zero,
        clients=ByClient(
            Own(
                visits=jnp.zeros(num_factors),
                records=jnp.zeros(num_factors),
                score=jnp.zeros((num_factors, size)),
                score_known=jnp.zeros((num_factors, size, size)),
                error=jnp.zeros((num_factors, size, size)),
            )
        ),
        moves=Moves(one, jnp.zeros(size), square),
        pull=pull.nothing(size),
        round=secant.nothing(size),
        waiting=_nobody(size),
        differences=differences.nothing(),
        near=square,
    )


def _nobody(size: int) -> Waiting:
    """Nothing waits."""
    zero = jnp.zeros(())
    return Waiting(
        visits=zero,
        records=zero,
        information=jnp.zeros((size, size)),
        information_var=zero,
        flags=jnp.zeros(3),
        flags_var=zero,
        scores=jnp.zeros(size),
        scores_var=zero,
        noise_var=zero,
        noisy=zero,
    )


@in_own_precision
def told(memory: Memory, place: Array | int) -> Told:
    """Where to take scores, in which coordinates, and how to share out the release."""
    visits = memory.own.visits[place]
    look = _look(memory, visits)
    first = (visits == 0) & ~_any_shape(memory)
    info = jnp.maximum(_INFO_SHARES[2], _INFO_SHARES[0] * _INFO_SHARES[1] ** visits)
    usual = jnp.array([1 - info - _FLAGS_SHARE, info, _FLAGS_SHARE, 0.0])
    looking = (1 - _LOOK_SHARE) * usual + jnp.array([0.0, 0.0, 0.0, _LOOK_SHARE])
    usual = jnp.where(jnp.any(look.step > 0), looking, usual)
    return Told(
        loc=memory.loc,
        white=memory.prior_sd[:, None] * _coordinates(memory.shape).white,
        clip=memory.clip,
        info_clip=memory.info_clip * memory.clip**2,
        shares=jnp.where(first, jnp.array([0.0, 0.0, 0.0, 1.0]), usual),
        prior_sd=memory.prior_sd,
        look=look,
        # Of outcomes that cannot be drawn, no observed score counts as clipped, and in the place of
        # drawn ones all that are beyond a third of the clip: together a misfit below 0.
        along=jnp.clip(-memory.misfit / _ALONG - 1, 0, 1),
        near=memory.prior_sd[:, None] * memory.near,
    )


def _look(memory: Memory, visits: Array) -> Look:
    """Where a client looks for columns far from zero, at its second visit and perhaps its third."""
    known = memory.ratios
    looks = (
        ratios.first(_scales(memory), memory.counts, memory.counted),
        ratios.second(known),
        known.look,
    )
    begins = (visits == known.stage + 1) & (known.stage < 2)
    which = [begins & (known.stage == 0), begins & (known.stage == 1), visits == known.stage]
    # Who joins late does not look: what is known of the shape by then would be lost.
    which = [each & (visits > 0) & (memory.most_visits <= visits + 1) for each in which]
    return jax.tree.map(lambda *leaves: jnp.select(which, leaves, 0.0), *looks)


@in_own_precision
def take(
    received: Received,
    released: PyTree,
    memory: Memory,
    *,
    centred: float,
    reach: float = 0.0,
    noise_aware: bool = True,
) -> tuple[Natural, Memory]:
    """What a group's releases change: the group's factors, and what is remembered.

    Args:
        received: What the server knows of the visits.
        released: What the group released.
        memory: What is remembered; of clients, those of the group.
        centred: Variance of a score by the outcomes drawn to centre it, over its information.
        reach: The longest that ``Memory.near`` may be, in deviations of one record.
        noise_aware: Whether factors know the noise of the releases, or else are made as if there
            were none.
    """
    said = jax.vmap(told, (None, 0))(memory, jnp.arange(received.num_records.size))
    memory = _found(received, memory, _told_axes(memory, said))
    roots = jnp.sqrt(said.shares)
    scored = said.shares[:, 0] > 0

    def part(sums: Array, number: int, scale: Array | float) -> tuple[Array, Array]:
        root = roots[:, number]
        by = jnp.where(root > 0, scale / jnp.where(root > 0, root, 1), 0)
        return sums * by.reshape(-1, *[1] * (sums.ndim - 1)), received.noise_std * by

    memory = _counted(received, released, memory, said, part, scored)
    any_scored = jnp.any(scored)
    memory = _where(any_scored, _waiting(received, released, memory, said, part, scored), memory)
    # Where clients differ, the server learns and moves once all were asked.
    everybody = memory.waiting.records > 0.999 * received.total_records
    moves = any_scored & (everybody | ~_waits(received, memory))
    memory = _where(moves, _learnt(received, memory, said, centred), memory)
    memory = _where(any_scored, _scored(received, released, memory, said, part, scored), memory)
    change, loc, covariance = _factors(received, memory, noise_aware)
    memory = _kept(memory)._replace(near=_near(memory, covariance, reach))
    return change, _moved(memory, jnp.where(moves, loc, memory.loc))


@in_own_precision
def widened(memory: Memory, q: Natural) -> Array:
    """How many times as wide as without noise the marginals of q are, the median over latents.

    Without noise the precision in prior units would be about 1 + N level J.
    """
    ((_, natural),) = q.items()
    precision = jnp.eye(memory.loc.size) + jnp.sum(memory.own.records) * memory.level * memory.shape
    without = memory.prior_sd**2 * jnp.diagonal(jnp.linalg.inv(precision))
    variances = jnp.diagonal(jnp.linalg.inv(-2 * unpack(natural.quadratic)))
    return jnp.median(jnp.sqrt(variances / without))


def _where(condition: Array, new: Memory, old: Memory) -> Memory:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


def _told_axes(memory: Memory, said: Told) -> _White:
    """The coordinates that clients were told."""
    white = said.white[0] / memory.prior_sd[:, None]
    return _White(white, jnp.linalg.inv(white))


def _partial(received: Received) -> bool:
    """Whether not all clients are visited at once."""
    return received.num_records.size < received.num_factors


def _waits(received: Received, memory: Memory) -> Array:
    """Whether the server moves only once all clients were asked."""
    return _partial(received) & differences.large(memory.differences, memory.loc.size)


def _counted(
    received: Received,
    released: PyTree,
    memory: Memory,
    said: Told,
    part: _Part,
    scored: Array,
) -> Memory:
    """After visits that counted: histograms, and the shape by scales until information is known."""
    looked = jnp.any(said.look.step > 0, axis=1)
    histograms = jnp.where(looked, jnp.sum(said.look.step > 0, axis=1), memory.loc.size)
    counts, std = part(released["scales"], 3, 1.0)
    counts, std = counts * jnp.sqrt(histograms)[:, None, None], std * jnp.sqrt(histograms)
    first = ~looked & ~scored
    memory = memory._replace(
        counts=memory.counts + jnp.sum(jnp.where(first[:, None, None], counts, 0), axis=0),
        counts_var=memory.counts_var + jnp.sum(jnp.where(first, std**2, 0)),
        counted=memory.counted + jnp.sum(jnp.where(first, received.num_records, 0)),
        ratios=_looked(received, memory, said, counts, std),
    )
    visits = memory.own.visits + 1.0
    memory = memory._replace(most_visits=jnp.maximum(memory.most_visits, jnp.max(visits)))
    memory = memory.with_own(
        visits=visits, records=received.num_records.astype(memory.own.records.dtype)
    )
    scales = jnp.diag(_scales(memory))
    return memory._replace(shape=jnp.where(_any_shape(memory), memory.shape, scales))


def _looked(received: Received, memory: Memory, said: Told, counts: Array, std: Array) -> Ratios:
    """What is known of columns far from zero after visits that looked for them."""
    known = memory.ratios
    stages = jnp.where(jnp.any(said.look.step > 0, axis=1), memory.own.visits, 0)
    stage = jnp.maximum(jnp.max(stages), known.stage)
    # A new look begins with empty histograms, and keeps what the one before has found.
    new, mine = stage > known.stage, (stages == stage) & (stages > 0)
    mean, var = ratios.found(known)
    look = jax.tree.map(lambda leaf: leaf[jnp.argmax(mine)], said.look)
    before = jax.tree.map(lambda leaf: jnp.where(new, 0, leaf), known)
    return Ratios(
        stage=stage,
        look=jax.tree.map(lambda now, old: jnp.where(new, now, old), look, known.look),
        counts=before.counts + jnp.sum(jnp.where(mine[:, None, None], counts, 0), axis=0),
        counts_var=before.counts_var + jnp.sum(jnp.where(mine, std**2, 0)),
        counted=before.counted + jnp.sum(jnp.where(mine, received.num_records, 0)),
        mean=jnp.where(new, mean, known.mean),
        var=jnp.where(new, var, known.var),
    )


def _scales(memory: Memory) -> Array:
    """The diagonal of the information, from noisy histograms, by a matched filter.

    A quantile of noisy counts would pick bins that hold nothing but noise.
    """
    template = jnp.array(_TEMPLATE, memory.counts.dtype)
    length = jnp.sqrt(jnp.sum(template**2))
    windows = jnp.arange(BINS - len(_TEMPLATE) + 1)[:, None] + jnp.arange(len(_TEMPLATE))
    fit = memory.counts[:, windows] @ template / length
    height = jnp.max(fit, axis=1)
    octave = LOWEST + jnp.argmax(fit, axis=1) + _TEMPLATE_RMS
    mass = jnp.clip(height / length / jnp.maximum(memory.counted, 1), 1e-6, 1)
    found = height > _FOUND * jnp.sqrt(memory.counts_var)
    log_scale = octave * np.log(2) + 0.5 * jnp.log(mass)
    # A column that noise hides is taken for an average one.
    usual = jnp.sum(jnp.where(found, log_scale, 0)) / jnp.maximum(1, jnp.sum(found))
    return jnp.exp(2 * jnp.where(found, log_scale, usual))


def _waiting(
    received: Received,
    released: PyTree,
    memory: Memory,
    said: Told,
    part: _Part,
    scored: Array,
) -> Memory:
    """With what came since the server moved, and by how much clients differ."""
    size, clip = memory.loc.size, said.clip[0]
    packed, info_std = part(released["information"], 1, said.info_clip[0])
    now = unpack(jnp.sum(packed, axis=0))
    info_var = jnp.sum(info_std**2) / 2  # packed entries are sqrt(2) as large
    flags, flags_std = part(released["clipped"], 2, np.sqrt(3))
    scores, std = part(released["score"], 0, clip)
    records = jnp.maximum(jnp.sum(jnp.where(scored, received.num_records, 0)), 1)
    spread = jnp.sqrt(jnp.maximum(received.num_records, 1) * size)
    fresh = Waiting(
        visits=jnp.asarray(float(received.num_records.size)),
        records=records,
        information=now,
        information_var=info_var,
        flags=jnp.sum(flags, axis=0),
        flags_var=jnp.sum(flags_std**2),
        scores=jnp.sum(jnp.where(scored[:, None], scores, 0), axis=0),
        scores_var=jnp.sum(jnp.where(scored, std**2, 0)),
        noise_var=jnp.sum(received.noise_std**2),
        noisy=jnp.sum(received.noise_std * clip / spread),
    )
    # Observed information changes wildly on the way: it would tell of differences where none are.
    if _partial(received) and received.space.can_draw:
        differ = _differences(received, memory, _told_axes(memory, said), fresh)
        memory = memory._replace(differences=differ)
    return memory._replace(waiting=jax.tree.map(jnp.add, memory.waiting, fresh))


def _differences(received: Received, memory: Memory, axes: _White, fresh: Waiting) -> Differences:
    """By how much clients differ, after a release that is compared with those before."""
    waiting, (moving, still) = memory.waiting, memory.differences
    now, error = fresh.information / fresh.records, _info_error(received, memory, fresh)
    share = fresh.records / received.total_records
    waits = waiting.visits > 0
    before, seen, known = _average(received, memory, axes)
    level = before.level
    others = waiting.information / jnp.maximum(waiting.records, 1) / level
    others_error = _info_error(received, memory, waiting) / level
    here = jnp.eye(memory.loc.size) / jnp.where(waits, others_error, 1e6)
    compared = (now / level, error / level, share)
    on_the_way = differences.after(moving, seen, known, *compared)
    at_once = differences.after(still, others, here, *compared)
    return Differences(
        jax.tree.map(lambda new, old: jnp.where(waits, old, new), on_the_way, moving),
        jax.tree.map(lambda new, old: jnp.where(waits, new, old), at_once, still),
    )


def _scored(
    received: Received,
    released: PyTree,
    memory: Memory,
    said: Told,
    part: _Part,
    scored: Array,
) -> Memory:
    """Each client's own scores, averaged with what is known of them."""
    axes, level = _told_axes(memory, said), memory.level
    sums, std = part(released["score"], 0, said.clip[0])
    fresh = jnp.where(scored, 1 / jnp.maximum((std / level) ** 2, 1e-12), 0)
    pulled = pull.after(
        memory.pull,
        axes.white,
        axes.back,
        jnp.sum(jnp.where(scored[:, None], sums, 0), axis=0),
        jnp.sum(jnp.where(scored, std**2, 0)),
        jnp.maximum(jnp.sum(jnp.where(scored, received.num_records, 0)), 1),
        received.total_records,
        level,
    )
    before, score = axes.known(memory.own.score_known), memory.own.score @ axes.white
    after = before + fresh[:, None, None] * jnp.eye(len(memory.loc))
    sums = jnp.einsum("mij,mj->mi", before, score) + fresh[:, None] * sums / level
    mean = jnp.linalg.solve(after + 1e-12 * jnp.eye(len(memory.loc)), sums[..., None])[..., 0]
    score = jnp.where(scored[:, None], mean, score)
    memory = memory._replace(pull=pulled)
    return memory.with_own(score=score @ axes.back, score_known=axes.unknown(after))


def _average(received: Received, memory: Memory, axes: _White) -> tuple[Memory, Array, Array]:
    """Level, mean shape and what is known of it, with the releases that wait."""
    waiting = memory.waiting
    records = jnp.maximum(waiting.records, 1)
    share = waiting.records / received.total_records
    # Where none waits, nothing is told: an error of so many times the shape.
    error = jnp.where(waiting.visits > 0, _info_error(received, memory, waiting), 1e6)
    return _shape_seen(memory, axes, waiting.information / records, error, share)


def _info_error(received: Received, memory: Memory, waiting: Waiting) -> Array:
    """The error of an entry of the information a record, by the releases in a sum."""
    squared = waiting.information_var / jnp.maximum(waiting.records, 1) ** 2
    if _partial(received):
        squared = squared + _ONE**2
    if not received.space.can_draw:
        # Where records are unlikely, observed curvature nearly vanishes on one side and is huge on
        # the other. Newton's steps that believe it to the last digit are thrown far away.
        squared = squared + (_ROUGH[0] * _ROUGH[1] ** memory.most_visits) ** 2
    return jnp.sqrt(squared)


def _learnt(received: Received, memory: Memory, said: Told, centred: float) -> Memory:
    """Shape, level and clips by the releases that wait; then none does.

    Args:
        received: What the server knows of the visits.
        memory: What is remembered.
        said: What the clients were told.
        centred: Variance of a score by the outcomes drawn to centre it, over its information.
    """
    axes = _told_axes(memory, said)
    waiting, before = memory.waiting, memory.round
    records = jnp.maximum(waiting.records, 1)
    share = waiting.records / received.total_records
    memory, seen, known = _average(received, memory, axes)
    shape = _shrunk(axes, seen, known)
    # Looks tell more than what noise left of the information so far.
    far = jnp.any(said.look.step > 0) & jnp.any(jnp.isfinite(ratios.found(memory.ratios)[1]))
    shape = jnp.where(far, ratios.shape(_scales(memory), memory.ratios), shape)

    fractions = (waiting.flags / records + 1) / 2
    memory = _misfit(memory, fractions, jnp.sqrt(waiting.flags_var) / records / 2, share)
    last = tails.after(
        memory.tails, memory.most_visits, waiting.flags[:2], waiting.flags_var, records
    )
    error = _info_error(received, memory, waiting)
    memory = _clips(memory, said, axes, shape, seen, known, fractions, error, share)

    metric = axes.back.T @ axes.back
    # Where records' information is the identity, outcomes that are drawn anew at each visit have
    # as much variance in all directions.
    scores_var = waiting.scores_var + centred * records * memory.level
    here = secant.Round(
        memory.loc / memory.prior_sd, waiting.scores @ axes.back, scores_var * metric
    )
    # Where clips bend, scores also change as clips do.
    whole = (share > 0.99) & (_sure_misfit(memory) <= 0)
    here = jax.tree.map(lambda leaf: jnp.where(whole, leaf, 0), here)
    shape = shape + secant.missed(before, here, metric, shape, records * memory.level)
    # Of a column that repeats others nothing is left. To stretch it until it shows would end in
    # rounding; less than a tenth of what the prior knows need not be seen.
    least = _LEAST / received.total_records * jnp.eye(len(shape))
    return memory._replace(
        shape=shape + least,
        seen=axes.outside(seen),
        shape_known=axes.unknown(known),
        tails=last,
        round=here,
        waiting=_nobody(memory.loc.size),
    )


def _misfit(memory: Memory, fractions: Array, error: Array, share: Array) -> Memory:
    """What is known of the misfit after another release of it, older ones for less."""
    before = memory.misfit_known / (1 + _FORGET * share)
    now = 1 / jnp.maximum(2 * error**2, 1e-12)
    misfit = (before * memory.misfit + now * (fractions[0] - fractions[1])) / (before + now)
    return memory._replace(misfit=misfit, misfit_known=before + now)


def _sure_misfit(memory: Memory) -> Array:
    """The misfit, less what noise may have made of it."""
    return jnp.maximum(memory.misfit - _DOUBT / jnp.sqrt(memory.misfit_known), 0)


def _clips(
    memory: Memory,
    said: Told,
    axes: _White,
    shape: Array,
    seen: Array,
    known: Array,
    fractions: Array,
    error: Array,
    share: Array,
) -> Memory:
    """The next clips, which follow the released fractions, slowly where these are noisy.

    Args:
        memory: What is remembered; its misfit is the current one.
        said: What the clients were told.
        axes: The coordinates of the release.
        shape: The new shape, in prior units.
        seen: The mean of all released shapes, in ``axes``.
        known: What is known of it, in ``axes``.
        fractions: Of observed scores, of drawn ones and of information, what was clipped.
        error: Noise on an entry of the information.
        share: Of all records, those behind the release.
    """
    size = memory.loc.size
    noise_std, records = jnp.sqrt(memory.waiting.noise_var), memory.waiting.records
    # The fractions' own noise, of a part with the share of flags.
    doubt = noise_std * math.sqrt(3 / _FLAGS_SHARE) / records / 2
    trust = jnp.sqrt(share) / (1 + (doubt / 0.1) ** 2)
    # A low clip costs information, a high one noise. Where noise is small beside the records' own
    # spread, hardly anything is clipped.
    noisy = memory.waiting.noisy / memory.waiting.visits
    drawn = fractions[1] / jnp.clip(_AIM * noisy, *_TARGETS)
    # Under the model, observed scores are clipped as often as drawn ones, which bends nothing. What
    # exceeds that pulls all one way, by up to a clip each: it must stay below a round's noise,
    # which is noise_std clips. As the misfit is not known exactly, only what is sure counts.
    bent = _sure_misfit(memory) * records / (noise_std * jnp.sqrt(share) + 1e-4 * records)
    factor = jnp.clip(jnp.maximum(drawn, bent), 0.3, 3.0) ** (0.6 * trust)
    # Lengths are of the order of sqrt(d level), of sqrt(d) if clips have made the level small.
    level = jnp.maximum(memory.level, 1)
    bounds = math.sqrt(size) * _CLIPS[0], jnp.sqrt(size * level) * _CLIPS[1]
    info_target = jnp.clip(error * np.sqrt(size), *_INFO_TARGETS)
    stretch = jnp.exp(jnp.clip(3 * (fractions[2] - info_target), -0.7, 0.7))
    return memory._replace(
        clip=jnp.clip(memory.clip * _longer(axes, shape, seen, known) * factor, *bounds),
        info_clip=jnp.clip(memory.info_clip * stretch**trust, *_INFO_CLIPS),
        misfit=memory.misfit / jnp.maximum(factor, 1.0),  # a higher clip leaves less beyond it
    )


def _longer(axes: _White, shape: Array, seen: Array, known: Array) -> Array:
    """How much longer scores are in the coordinates of a new shape, as far as is known.

    Args:
        axes: The coordinates of the release.
        shape: The new shape, in prior units.
        seen: The mean of all released shapes, in ``axes``.
        known: What is known of it, in ``axes``.
    """
    # By what was seen itself and not by its shape alone: if the clip followed the length of what it
    # clips, both would run away.
    turned = axes.back @ _coordinates(shape).white
    lengths = jnp.stack([jnp.trace(turned.T @ seen @ turned), jnp.trace(seen)])
    ratio = jnp.clip(lengths[0] / jnp.maximum(lengths[1], 1e-9), 0.1, 10.0)
    # In its own coordinates the new shape has the trace d.
    by_shape = jnp.clip(len(shape) / jnp.trace(axes.information(shape)), 0.1, 10.0)
    # The trace of T' N^(1/2) e N^(1/2) T has the deviation sqrt(2) |T' N T|. As far as noise hides
    # what was seen, the shape is believed: of noise alone clips would wander, and they make it.
    noise = jnp.linalg.inv(known + 1e-9 * jnp.eye(len(shape)))
    errors = jnp.stack([jnp.sum((turned.T @ noise @ turned) ** 2), jnp.sum(noise**2)])
    unsure = jnp.sum(2 * errors / jnp.maximum(lengths, 1e-9) ** 2) / _LENGTHS**2
    sure = jnp.where(jnp.all(lengths > 0), 1 / (1 + unsure), 0)
    return jnp.sqrt(ratio**sure * by_shape ** (1 - sure))


def _shape_seen(
    memory: Memory, axes: _White, now: Array, error: Array, share: Array
) -> tuple[Memory, Array, Array]:
    """The level, the mean of all released shapes and what is known of it, in ``axes``.

    The level comes with the memory, whose scores over the level are those of the new one.

    Args:
        memory: What is remembered; its shape is the identity in ``axes``.
        axes: The coordinates of the release.
        now: The information that was released, a record.
        error: Noise on its entries.
        share: Of all records, those behind it.
    """
    # In the eigenvectors u_i of what is known, with eigenvalues p_i, entry (i, j) of the mean has
    # the standard error (p_i p_j)^(-1/2), and a release has the same one for every entry.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    p = jnp.maximum(p, 0)
    seen = turn.T @ axes.information(memory.seen) @ turn
    now = turn.T @ now @ turn
    # Level: a scalar Kalman filter on the diagonal, where something is known of it; it drifts
    # because the clip and the location move. Directions that are weaker than their shape count,
    # too: until they are resolved, all factors claim less.
    by = 1 / (error**2 / memory.level**2 + 1 / jnp.maximum(p, 1e-6) ** 2)
    ratio = jnp.sum(by * jnp.diagonal(now)) / jnp.sum(by) / memory.level
    drift, noise = share * _LEVEL_DRIFT**2, 2 / jnp.sum(by)
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
    return memory, _symmetric(turn @ seen @ turn.T), _symmetric((turn * p) @ turn.T)


def _shrunk(axes: _White, seen: Array, known: Array) -> Array:
    """The new shape in prior units: of the difference to what was seen, what is not noise.

    Noise hides an entry least, a direction that has to be searched for most. So entries of the
    diagonal are compared by themselves, then all columns' together, then what is left by
    eigenvalues, and last by pairs. The old shape is the identity in ``axes``.

    Args:
        axes: The coordinates of the release.
        seen: The mean of all released shapes, in ``axes``.
        known: What is known of it, in ``axes``.
    """
    p, turn = jnp.linalg.eigh(known)
    noise = (turn / p) @ turn.T
    shape = _by_axis(seen, noise)
    shape = _by_column(shape, axes, seen, noise)
    shape = _by_eigenvalue(shape, seen, p, turn)
    return axes.outside(_by_pair(shape, seen, noise))


def _by_axis(seen: Array, noise: Array) -> Array:
    """Entries of the diagonal that stand out from noise by themselves; the others stay 1.

    Far from zero, raw columns are all but multiples of the intercept. An axis that is what a column
    has beside it shows here first: its noise is one entry's, not that of sqrt(d) of them.
    """
    error = math.sqrt(2) * jnp.diagonal(noise)
    # Where noise is larger than what is expected, it is left to all columns together.
    away = jnp.where(error < 1, jnp.diagonal(seen) - 1, 0)
    kept = jnp.sign(away) * jnp.sqrt(jnp.maximum(away**2 - (_ALONE * error) ** 2, 0))
    # What is small already shrinks no further than to the noise.
    return jnp.diag(jnp.clip(jnp.maximum(1 + kept, jnp.minimum(error, 1)), 1e-3, 10.0))


def _by_column(shape: Array, axes: _White, seen: Array, noise: Array) -> Array:
    """All columns' own entries, which are known sqrt(d) times better than the spectrum.

    By James and Stein's rule.
    """
    had = jnp.diagonal(axes.outside(shape))
    error = jnp.diagonal(axes.outside(noise)) / had
    stray = jnp.diagonal(axes.outside(seen)) / had - 1
    worth = 1 - 2 * jnp.sum(error**2) / jnp.maximum(jnp.sum(stray**2), 1e-12)
    by = jnp.sqrt(jnp.clip(1 + jnp.clip(worth, 0, 1) * stray, 0.3, 3.0))
    return axes.information(by[:, None] * axes.outside(shape) * by)


def _by_eigenvalue(shape: Array, seen: Array, p: Array, turn: Array) -> Array:
    """Directions that stand out; noise has eigenvalues 1 / p and eigenvectors ``turn``."""
    # In coordinates where noise is white, eigenvalues of noise alone end at the edge 2 sqrt(d).
    # One that was v without noise is found near sqrt(v^2 + edge^2) (Gavish and Donoho 2017).
    root = (turn * jnp.sqrt(p)) @ turn.T
    undo = (turn / jnp.sqrt(p)) @ turn.T
    edge = 2 * math.sqrt(len(shape))
    values, vectors = jnp.linalg.eigh(_symmetric(root @ (seen - shape) @ root))
    kept = jnp.sign(values) * jnp.sqrt(jnp.maximum(values**2 - edge**2, 0))
    # What is small already shrinks no further than to the noise.
    had = jnp.einsum("ik,ij,jk->k", vectors, root @ shape @ root, vectors)
    kept = jnp.maximum(kept, -jnp.maximum(had - _FLOOR * edge, 0))
    return _proper(shape + undo @ (vectors * kept) @ vectors.T @ undo)


def _by_pair(shape: Array, seen: Array, noise: Array) -> Array:
    """Entries off the diagonal that exceed the largest that noise alone is expected to make."""
    own = jnp.diagonal(noise)
    error = jnp.sqrt(own[:, None] * own + noise**2)
    pairs = max(1, len(shape) * (len(shape) - 1) / 2)
    largest = max(_PAIR, math.sqrt(2 * math.log(pairs))) * error
    away = seen - shape
    kept = away * jnp.maximum(1 - (largest / jnp.where(away == 0, 1, away)) ** 2, 0)
    # No correlation is beyond 1: where only more than that would stand out, what does is noise. It
    # would make two columns one, whose difference says nothing, and steps would be thrown along it.
    root = jnp.sqrt(jnp.diagonal(shape))
    kept = jnp.where(largest < root[:, None] * root, kept, 0)
    return _proper(shape + kept - jnp.diag(jnp.diagonal(kept)))


def _proper(shape: Array) -> Array:
    """Raises eigenvalues that no release could have found so small."""
    values, vectors = jnp.linalg.eigh(_symmetric(shape))
    return (vectors * jnp.maximum(values, 0.02)) @ vectors.T


def _error(memory: Memory, axes: _White, way: Array) -> Array:
    """Covariance of the error of one record's score by extrapolation over a way, in ``axes``."""
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    noise = (turn / jnp.maximum(p, 1e-6)) @ turn.T
    way = way @ axes.back.T
    squared = jnp.sum(way**2)
    unsure = _UNSURE**2 + _LEVEL_DOUBT * memory.level_var
    alike = _CURVATURE * squared**2 / 2 + unsure * squared
    return alike * jnp.eye(way.size) + (way @ noise @ way) * noise


def _weights(received: Received) -> Array:
    """What the error of one record's score counts in those of the clients', on two more axes.

    All clients' errors are alike and do not average out: each counts as if it were theirs all.
    """
    return received.num_factors * received.num_records[:, None, None] ** 2


def _found(received: Received, memory: Memory, axes: _White) -> Memory:
    """Scores of clients at ``memory.loc``, as far as they are known, from where they are kept."""
    (unit, way, _), own = memory.moves, memory.own
    error = _weights(received) * axes.information(memory.moves.error - own.error)
    # (K^-1 + E)^-1 = (1 + K E)^-1 K, which K = 0 leaves at 0.
    known = axes.known(own.score_known)
    known = _symmetric(jnp.linalg.solve(jnp.eye(way.size) + known @ error, known))
    told_something = jnp.any(own.score_known != 0, axis=(1, 2))
    score = jnp.where(told_something[:, None], own.score - own.records[:, None] * way, 0)
    return memory.with_own(score=unit * score, score_known=axes.unknown(known) / unit**2)


def _kept(memory: Memory) -> Memory:
    """The inverse of :func:`_found`: scores and what is known of them as they are kept."""
    (unit, way, error), own = memory.moves, memory.own
    return memory.with_own(
        score=own.score / unit + own.records[:, None] * way,
        score_known=own.score_known * unit**2,
        error=jnp.broadcast_to(error, own.error.shape),
    )


def _moved(memory: Memory, loc: Array) -> Memory:
    """What is remembered, seen from where scores are taken next."""
    axes, size = _coordinates(memory.shape), loc.size
    way = (loc - memory.loc) / memory.prior_sd
    # The shape depends on where scores are taken: what was seen elsewhere counts for less.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    p = jnp.maximum(p, 0)
    moved = memory.level * jnp.sum((axes.back @ way) ** 2)
    p = p / jnp.sqrt(1 + p**2 * _SHAPE_DRIFT * moved / size)
    before = memory.moves
    error = axes.outside(_error(memory, axes, way))
    return memory._replace(
        loc=loc,
        shape_known=axes.unknown((turn * p) @ turn.T),
        moves=before._replace(
            way=before.way + memory.shape @ way / before.unit,
            error=before.error + error / before.unit**2,
        ),
    )


def _factors(received: Received, memory: Memory, noise_aware: bool) -> tuple[Natural, Array, Array]:
    """Changes of visited clients' factors, where scores go next, and q's covariance."""
    ((name, _),) = received.family.members
    size, sd, num_records = memory.loc.size, memory.prior_sd, received.num_records
    axes = _coordinates(memory.shape)
    # Less is made of directions in which noise could hide correlation: J (J + sqrt(d) N)^-1 of a
    # step, J^2 (J^2 + d N^2)^-1 of what a factor claims.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    p = jnp.maximum(p, 1e-9)
    sure = (turn * (p / (p + math.sqrt(size)))) @ turn.T
    half = (turn * (p / jnp.sqrt(p**2 + size))) @ turn.T
    known = axes.known(memory.own.score_known)
    here, waits = memory.loc / sd, _waits(received, memory)
    responses, ways = _responses(memory, axes)
    responses = jnp.where(noise_aware, responses, 1)
    response = (ways * responses) @ ways.T
    # Each client's own maximum, by one Newton step.
    own = memory.own.score @ axes.white / num_records[:, None]
    own = here + own @ (ways / responses) @ ways.T @ axes.white.T
    # Factors have the precision claims_m, turned so.
    turn = half @ response if noise_aware else jnp.eye(size)
    before = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), received.factor[name])

    def claims(middle: Array) -> Array:
        """What factors claim to know, given about where the posterior's mean is."""
        # In white coordinates A = n level R with the response R, which is about the identity, so
        # that A (A + Sigma)^-1 A is n R (n R / level + V)^-1 n R for scores over the level with
        # error V, and with K = V^-1 the middle is (1 + K n R / level)^-1 K.
        # As long as the server waits, scores stay where they are.
        way = jnp.where(waits, 0, middle - here)
        if not noise_aware:  # the limit of the same without noise, A, once there are scores
            scored = jnp.any(memory.own.score_known != 0, axis=(1, 2))
            exact = jnp.where(scored, num_records * memory.level, 0)
            return exact[:, None, None] * jnp.eye(size)
        records = num_records[:, None, None]
        error = _weights(received) * _error(memory, axes, way)
        slope = records / memory.level * response
        amount = jnp.linalg.solve(jnp.eye(size) + known @ (slope + error), known)
        return records**2 * _symmetric(amount)

    def naturals(claims: Array) -> NormalNatural:
        """Their factors."""
        precision = axes.outside(_turned(turn, claims)) / (sd[:, None] * sd)
        linear = jnp.einsum("mij,mj->mi", precision, own * sd)
        return NormalNatural(linear, pack(-0.5 * precision))

    def total(claims: Array) -> NormalNatural:
        """The product of their factors, which takes less time."""
        precision = axes.outside(_turned(turn, jnp.sum(claims, axis=0))) / (sd[:, None] * sd)
        linear = jnp.einsum("mij,mj->i", claims, own @ axes.back.T @ turn)
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

    def step(mean: Array, covariance: Array) -> Array:
        width = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), 0))
        way = sure @ (axes.back @ (mean - here))
        length = jnp.sqrt(jnp.sum(way**2))
        way = axes.white @ way * jnp.minimum(1.0, _TRUST / jnp.maximum(length, 1e-12))
        # What is not sure is mixed along white axes. A little of one that is known well can be a
        # hundred prior widths of one that is hardly known: the prior holds q, but not the step.
        to = jnp.clip(here + way, jnp.minimum(here, mean) - width, jnp.maximum(here, mean) + width)
        return jnp.where(jnp.all(jnp.isfinite(to)), to, here)

    # A loop, in which factors come before steps, because compiling each of them took a second. Of
    # the last turn only the factors and the covariance count.
    def again(number: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        middle, _, _ = found
        now = claims(middle)
        mean, covariance = moments(total(now))
        return jnp.where(number < _STEPS, step(mean, covariance), middle), now, covariance

    start = (here, jnp.zeros_like(known), jnp.zeros_like(memory.shape))
    middle, last, covariance = jax.lax.fori_loop(0, _STEPS + 1, again, start)
    change = jax.tree.map(jnp.subtract, naturals(last), received.factor[name])
    return Natural({name: change}), middle * sd, covariance


def _near(memory: Memory, covariance: Array, reach: float) -> Array:
    """A root of a covariance in prior units, no longer than an expansion reaches."""
    back = _coordinates(memory.shape).back
    width = jnp.sqrt(jnp.diagonal(covariance))
    root = width[:, None] * jnp.linalg.cholesky(covariance / (width[:, None] * width))
    length = jnp.sqrt(memory.level * jnp.sum((back @ root) ** 2))
    root = root * jnp.minimum(1, reach / jnp.maximum(length, 1e-12))
    return jnp.where(jnp.all(jnp.isfinite(root)), root, 0)


def _responses(memory: Memory, axes: _White) -> tuple[Array, Array]:
    """How strongly scores respond in ``axes``, as far as is sure: eigenvalues and eigenvectors.

    By 1, if the shape is right. It may not be among latents whose records have about one scale: of
    columns far from zero, what is left beside the intercept can have so little information that
    noise hides from the shape that it is small. If it is believed to be large, scores that say
    nothing seem to say that all is well, and intervals are many times too narrow. So these respond
    by no more than what was seen, noise and all.
    """
    alike = ratios.narrow(memory.counts, memory.counted)
    alike = jnp.where(alike & (jnp.sum(alike) > 1), 1.0, 0.0)[_order(memory.shape)]
    among = alike[:, None] * alike * axes.information(memory.seen)
    values, vectors = jnp.linalg.eigh(among + jnp.diag(1 - alike))
    # Of many latents in much noise, what was seen says nothing: its eigenvalues spread as far as
    # the edge of the noise, 2 sqrt(k) errors of an entry. Then the shape is believed after all.
    p, turn = jnp.linalg.eigh(axes.known(memory.shape_known))
    noise = turn**2 @ (1 / jnp.maximum(p, 1e-9))
    edge = 2 * jnp.sum(alike * noise) / jnp.sqrt(jnp.maximum(jnp.sum(alike), 1))
    doubt = 1 / (1 + (edge / _EDGE) ** 4)
    return 1 - doubt * (1 - jnp.clip(values, _DOUBTED, 1)), vectors


def _order(shape: Array) -> Array:
    """Latents in the order in which coordinates take them.

    First come columns that have most in common, the intercept and those far from zero: what little
    they have of their own would drown in the noise of others that were taken off them.
    """
    root = jnp.sqrt(jnp.diagonal(shape))
    alike = shape / (root[:, None] * root)  # correlations, which are well scaled
    # The diagonal of the fourth power weighs eigenvectors by their eigenvalues' fourth powers.
    common = jnp.sum((alike @ alike) ** 2, axis=1)
    # Columns with as much in common keep the model's order. Were it a matter of the last digits, so
    # would be which noise falls on which of them, and two machines had different runs.
    return jnp.argsort(-jnp.round(common, 5))


def _coordinates(shape: Array) -> _White:
    """Coordinates in which the shape is the identity, one column after the other.

    By Cholesky's factors: an axis is what a column has beside those before it, so that columns keep
    apart. Eigenvectors of the shape would mix what noise cannot tell from one another.
    """
    root = jnp.sqrt(jnp.diagonal(shape))
    order = _order(shape)
    alike = shape / (root[:, None] * root)
    # What is added is more than rounding, which makes no direction's information negative.
    rounding = 3 * len(root) * float(np.finfo(shape.dtype).eps)
    eye = jnp.eye(len(root))
    tril = jnp.linalg.cholesky(alike[order][:, order] + rounding * eye)
    white = jnp.zeros_like(shape).at[order].set(solve_triangular(tril, eye, lower=True).T)
    back = jnp.zeros_like(shape).at[:, order].set(tril.T)
    return _White(white / root[:, None], back * root)


def _any_shape(memory: Memory) -> Array:
    """Whether any information was released."""
    return jnp.trace(memory.shape_known) > 0


def _turned(by: Array, matrix: Array) -> Array:
    """``by @ matrix @ by.T``; of many matrices, without moving their axes, which takes longer."""
    if matrix.ndim == 2:
        return by @ matrix @ by.T
    rows = (matrix.reshape(-1, matrix.shape[-1]) @ by.T).reshape(matrix.shape)
    return jnp.broadcast_to(by, matrix.shape) @ rows


def _symmetric(matrix: Array) -> Array:
    return (matrix + jnp.swapaxes(matrix, -1, -2)) / 2
