"""Columns far from zero: how much of each is its own, from histograms of ratios.

A column of 37 +- .7 is all but a multiple of the column of ones. What it has of its own is a
three-thousandth of its information, and noise hides that from anyone who looks for it in the
information matrix. A histogram shows it. A record's score is its residual times its columns, so the
ratio of two entries does not depend on the outcome: beside the column of ones it is 37 +- .7.

Nobody says which column is the one of ones. So an entry is divided by the median of the others that
are looked at. The server looks where the histograms of scales, which were released first, are
narrow, and once more, twenty times closer, where ratios lie within a bin. Only ``place`` sees a
record; clients call it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from scipy.special import ndtr

from numpyro_dppvi._typing import Array

BINS = 44
# log2 |z| of a standard normal z by bins of one octave: what a column's histogram looks like.
NORMAL = (0.05, 0.1, 0.18, 0.3, 0.28, 0.09)
# What two octaves have to hold of a latent that is looked at, and what they have to hold at least
# where noise may have taken so many of its deviations off. To look in vain costs less than not to.
_NARROW, _MISSED = (0.8, 0.6), 1.5
# Of outcomes that cannot be drawn: octaves that hold nearly all of their scales, and what two hold
# of a latent with one scale, at least. Of columns about zero two hold .47 and less.
_OCTAVES, _SCATTERED = 8, 0.5
_STEPS = (0.1, 0.005)  # widths of bins at the first and the second look
# In noise, bins of the first look are wider: by this over the deviations of a bin's noise that all
# records are, but at most so many times. A record is in one bin, so fewer bins hold less noise.
_CLEAR, _WIDER = 45.0, 4.0
_SPREADS = (0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)  # that are looked for, in bins
# That may have a ratio, the others being elsewhere, and what is believed of each.
_SHARES, _BELIEFS = (1.0, 0.9, 0.8, 0.7, 0.6), (0.9, 0.025, 0.025, 0.025, 0.025)
# With fewer deviations of a bin's noise than so many, histograms are asked for again. Until then
# a ratio is believed if the logarithm of its evidence is so high: what it stretches stays so.
FAINT, _SURE = 15.0, 2.0
_WIDE = 0.35  # and if it spreads no further, in units of its mean
_CLOSE = 0.06  # what spreads less is looked at once more
_MISFIT = 0.02  # of the records: what a histogram may differ from a normal one


class Look(NamedTuple):
    """Where to look.

    Attributes:
        members: 1 for latents that are looked at, 0 for others, shape ``(d,)``.
        unit: By what an entry is divided first: its root mean square, in units of the prior.
        centre: The middle of each latent's histogram, a ratio, shape ``(d,)``.
        step: Widths of bins, shape ``(d,)``; 0 for latents that are not looked at.
    """

    members: Array
    unit: Array
    centre: Array
    step: Array


class Found(NamedTuple):
    """What looks have found.

    Attributes:
        mean: Means of ratios, shape ``(d,)``.
        var: Their variances over records; infinite where nothing was found.
        constant: 1 where all records that are seen have one ratio, as far as looks can tell.
    """

    mean: Array
    var: Array
    constant: Array


class Ratios(NamedTuple):
    """What is known of ratios.

    Attributes:
        stage: How many looks were taken, the current one among them.
        look: The current one.
        counts: Its noisy histograms, shape ``(d, BINS)``.
        counts_var: Variance of their noise.
        counted: Records in them.
        earlier: What looks before the current one found.
        found: What all of them found. To work it out is long to compile, so it is kept.
    """

    stage: Array
    look: Look
    counts: Array
    counts_var: Array
    counted: Array
    earlier: Found
    found: Found


def nothing(size: int) -> Ratios:
    """Nothing is known."""
    zero, none = jnp.zeros(()), jnp.zeros(size)
    found = Found(none, none + jnp.inf, none)
    return Ratios(
        zero, Look(none, none, none, none), jnp.zeros((size, BINS)), zero, zero, found, found
    )


def place(look: Look, scores: Array) -> Array:
    """The bins of one record's ratios; outside of ``range(BINS)`` where nothing is counted.

    Scores are of drawn outcomes, in units of the prior, shape ``(outcomes, d)``.
    """
    member = look.members > 0
    lengths = scores / jnp.where(look.unit > 0, look.unit, 1)
    # Outcomes make all entries longer or shorter alike, and the longest are the least rounded.
    total = jnp.sum(jnp.where(member, jnp.abs(lengths), 0), axis=1)
    lengths = lengths[jnp.argmax(jnp.where(jnp.isfinite(total), total, 0))]
    size = jnp.where(member, jnp.abs(lengths), jnp.inf)
    rank = jnp.argsort(jnp.argsort(size))
    ordered, number = jnp.sort(size), jnp.sum(member)
    # The median of the other members: without the entry itself, places from its rank on move up.
    lower, upper = jnp.maximum(number - 2, 0) // 2, jnp.maximum(number - 1, 0) // 2
    others = (ordered[lower + (lower >= rank)] + ordered[upper + (upper >= rank)]) / 2
    found = lengths / others * jnp.sign(lengths[jnp.argmax(member)])
    # Hostile records make this infinite or NaN, which is in no bin.
    bins = jnp.floor((found - look.centre) / jnp.where(look.step > 0, look.step, 1)) + BINS // 2
    return jnp.where(look.step > 0, bins, -1)


def first(scales: Array, alike: Array, clear: Array) -> Look:
    """The first look, after histograms of the records' scales by octaves."""
    wider = jnp.clip(_CLEAR / clear, 1, _WIDER)
    return _of(alike, jnp.sqrt(scales), 0 * scales, _STEPS[0] * wider)


def narrow(counts: Array, counts_var: Array, counted: Array, drawn: Array) -> Array:
    """Latents whose records have about one scale, from histograms of scales by octaves."""
    # The mean scale of drawn outcomes is that of a column. An outcome that cannot be drawn has a
    # scale of its own, which scatters all latents' scales alike: what is narrow is the narrowest
    # one elsewhere, rather than what a column about zero would make of it.
    held, noise = jnp.max(_held(counts, 2), axis=1), jnp.sqrt(2 * counts_var)
    enough = jnp.maximum(_NARROW[0] * counted - _MISSED * noise, _NARROW[1] * counted)
    narrowest = counts[jnp.argmax(held)]
    start = jnp.argmax(_held(narrowest, _OCTAVES))
    alike = jax.lax.dynamic_slice(narrowest, (start,), (_OCTAVES,))
    about_zero = jnp.convolve(alike, jnp.array(NORMAL, counts.dtype))
    var = _OCTAVES * counts_var
    fits = _best(counts, alike, var) > _best(counts, about_zero, var * sum(x * x for x in NORMAL))
    some = jnp.max(held) > _SCATTERED * counted + noise
    return jnp.where(drawn > 0, held > enough, fits & some)


def _held(counts: Array, octaves: int) -> Array:
    """What so many octaves hold, by where they begin."""
    below = jnp.cumsum(jnp.pad(counts, [(0, 0)] * (counts.ndim - 1) + [(1, 0)]), axis=-1)
    return below[..., octaves:] - below[..., :-octaves]


def _best(counts: Array, shape: Array, noise: Array) -> Array:
    """How well histograms fit a shape at the best place, up to what they have in common.

    Half the fall of the squared distance. Histograms have shape ``(d, BINS)``. The shape's noise,
    of which ``noise`` is the sum of the variances, makes its own square larger.
    """
    fits = []
    for part in (0.0, 0.25, 0.5, 0.75):  # of an octave
        moved = jnp.convolve(shape, jnp.array([1 - part, part], counts.dtype))
        square = moved @ moved - noise * ((1 - part) ** 2 + part**2)
        windows = jnp.arange(BINS + len(moved) - 1)[:, None] + jnp.arange(len(moved))
        wide = jnp.pad(counts, ((0, 0), (len(moved) - 1,) * 2))
        fits.append(jnp.max(wide[:, windows] @ moved, axis=1) - square / 2)
    return jnp.max(jnp.stack(fits), axis=0)


def second(known: Ratios) -> Look:
    """The second look, where the first one found ratios within a bin."""
    mean, var, _ = known.found
    return _of(var < _CLOSE**2, known.look.unit, mean, _STEPS[1])


def _of(chosen: Array, unit: Array, centre: Array, step: Array | float) -> Look:
    look = Look(jnp.where(chosen, 1.0, 0.0), unit, centre, jnp.where(chosen, step, 0.0))
    # Of one alone nothing can be said.
    return jax.tree.map(lambda leaf: jnp.where(jnp.sum(chosen) > 1, leaf, 0), look)


def with_found(known: Ratios) -> Ratios:
    """With what the histograms of the current look show."""
    # Means over what fits: a place and a spread of a normal to which all records belong, or most,
    # against records on both sides of zero alike, and against none.
    spread = jnp.repeat(jnp.array(_SPREADS), 4 * BINS)
    middle = jnp.tile((jnp.arange(4 * BINS) + 0.5) / 4, len(_SPREADS))
    shape = _templates()
    step = known.look.step[:, None]
    mean = known.look.centre[:, None] + (middle - BINS // 2) * step
    shares, beliefs = jnp.array(_SHARES)[:, None, None], jnp.array(_BELIEFS)[:, None, None]
    by_way = _evidence(known, shape, shares) + jnp.log(beliefs)
    by_way = jnp.where(spread * step > _WIDE * jnp.abs(mean), -jnp.inf, by_way)
    ways = jnp.sum(jnp.isfinite(by_way[0]), axis=1)
    evidence = logsumexp(by_way, axis=(0, 2))
    weight = jnp.where(jnp.isfinite(by_way), jnp.exp(by_way - evidence[:, None]), 0)
    # The middle of a first look is zero.
    across = shape.reshape(BINS, len(_SPREADS), -1)[:, :, ::-1].reshape(BINS, -1)
    across = (shape + jnp.where(known.stage < 2, across, 0)) / 2
    others = logsumexp(_evidence(known, across, jnp.ones(())), axis=1) - math.log(len(middle))
    others = jnp.logaddexp(others, 0.0)
    at = jnp.sum(weight * middle, axis=(0, 2))
    doubt = jnp.sum(weight * (middle - at[:, None]) ** 2, axis=(0, 2))
    # Records elsewhere are about one ratio away: a rare indicator's information is theirs. A mean
    # of logarithms, or a little doubt about them would outweigh what is seen of all the others.
    own = step**2 * (spread**2 + doubt[:, None]) + 1 - shares
    var = jnp.exp(jnp.sum(weight * jnp.log(jnp.where(weight > 0, own, 1)), axis=(0, 2)))
    # If all records lie within a bin even at the last look, as many may lie elsewhere as noise can
    # hide.
    width = jnp.sqrt(var) / jnp.where(step > 0, step, 1)[:, 0]
    near = jnp.abs(jnp.arange(BINS) + 0.5 - at[:, None]) < 3 * width[:, None] + 1
    error = jnp.sqrt(known.counts_var * jnp.sum(near, axis=1)) / jnp.maximum(known.counted, 1)
    last = (known.stage > 1) & (width < 1)
    var = var + jnp.where(last, error, 0)
    constant = last | ((known.stage < 2) & (var < _CLOSE**2))
    sure = jnp.where(known.counted < FAINT * jnp.sqrt(known.counts_var), _SURE, 0)
    seen = (step[:, 0] > 0) & (ways > 0) & (var < known.earlier.var)
    seen = seen & (evidence - jnp.log(jnp.maximum(ways, 1)) > others + sure)
    mean = known.look.centre + (at - BINS // 2) * step[:, 0]
    found = jax.tree.map(
        lambda new, old: jnp.where(seen, new, old), Found(mean, var, 1.0 * constant), known.earlier
    )
    return known._replace(found=found)


def _evidence(known: Ratios, shape: Array, share: Array) -> Array:
    """Log densities of noisy histograms if a share of the records has this shape, over if none."""
    expected = share * known.counted
    fit = expected * (known.counts @ shape) - expected**2 * jnp.sum(shape**2, axis=0) / 2
    return fit / jnp.maximum(known.counts_var + (_MISFIT * known.counted) ** 2, 1e-6)


def _templates() -> Array:
    """What bins hold of normal ratios, shape ``(BINS, spreads * 4 BINS)``; middles vary fastest."""
    # Middles are a quarter of a bin apart, so that bin b and middle k have 4 b - k in common with
    # others. Made on the host, or the compiler would compute each place's integrals anew.
    quarters = np.arange(1 - 4 * BINS, 4 * BINS + 1)
    below = ndtr((quarters - 0.5) / 4 / np.array(_SPREADS)[:, None])
    held = jnp.asarray(below[:, 4:] - below[:, :-4], float)
    places = 4 * np.arange(BINS)[:, None] - np.arange(4 * BINS) + 4 * BINS - 1
    return jnp.moveaxis(held[:, places], 0, 1).reshape(BINS, -1)


def shape(most: Array, beyond: Array, centred: Array, known: Ratios) -> Array:
    """The information of an average record, as far as scales and looks tell, in units of the prior.

    What is shared times the mean ratios, and what each latent has of its own.

    Args:
        most: Of most records, by their scales, shape ``(d,)``.
        beyond: What others add to it, which lie further out than looks see.
        centred: What a constant may have that most records do not show, shape ``(d,)``.
        known: What looks have found.
    """
    mean, var, constant = known.found
    seen = jnp.isfinite(var)
    way = jnp.where(seen, known.look.unit * mean, 0)
    own = beyond + jnp.where(seen, known.look.unit**2 * jnp.where(seen, var, 0), most)
    # A constant column that is smaller than others is what a rare value was centred by. Steps by
    # what most records say would be a thousand times too long, and by an average column's
    # information a constant loses nothing.
    own = jnp.where(seen & (constant > 0), jnp.maximum(own, centred), own)
    return jnp.outer(way, way) + jnp.diag(own)
