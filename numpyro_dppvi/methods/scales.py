"""Scales of latents, from noisy histograms of the information that single records have.

A histogram has a record in each latent's bin: a power of two of the root of its information, in
units of the prior. A column of noughts and ones leaves out the noughts, which have none.

* *Most records* of a column about zero are spread as a normal's: a template of six octaves. A
  quantile of noisy counts would pick bins that hold nothing but noise.
* *The others* may have nearly all information. Of a standardised column of amounts of which most
  are nothing, nine records in ten lie at -.1 and one at 3. Steps by what the nine say would be a
  hundred times too long.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array
from numpyro_dppvi.methods import ratios
from numpyro_dppvi.methods.lookups import by_itself, shared_by, together

LOWEST, BINS = -20, ratios.BINS  # of histograms: their first octave, and how many there are
_RMS = 4.0  # octaves from the template's first bin to the root mean square
_LENGTH = float(np.linalg.norm(ratios.NORMAL))
_PEAK = 3  # the bin of the template that holds most
# A column is taken for seen if its template, or a bin that all its records may share, stands out by
# so many deviations of noise. More are asked far from columns that are seen for certain, and less
# where histograms are clear and others have about its scale: within so many octaves.
_FOUND, _SPIKE, _CERTAIN, _NEAR, _ABOUT = 4.5, 5.0, 6.0, 3.5, 6.0
# Records beyond the template, in one bin or in three, by so many: there are many places for noise.
_BEYOND = 5.0
# Of all records, that a histogram may show, and what is believed of each. Records of a rare
# indicator are few, which is why noise hides it.
_PARTS = 1.0, 0.6, 0.3, 0.1, 0.03, 0.01
_BELIEFS = 0.5, 0.1, 0.1, 0.1, 0.1, 0.1
# By how many octaves columns' scales may differ, and their common place from the prior's own scale.
_APART, _PLACED = (1.0, 2.0, 4.0), 4.0
_MISFIT = 0.02  # of the records: what a histogram may differ from a template
_IN_OCTAVE = 2.2  # the mean square of what is in an octave, over its lower end's: 2.16 to 2.33
# All records are so many deviations of a bin's noise, or histograms show nothing but noise.
FAINT = 5.0


class Scales(NamedTuple):
    """What histograms say, of latents on the last axis.

    Attributes:
        clear: How many deviations of a bin's noise all their records are.
        found: Which latents' scales stand out from noise, shape ``(d,)``.
        most: The information of an average record among most, shape ``(d,)``.
        beyond: What the others add to it, which lie far beyond these.
        centred: That of an average column about zero, for columns that are all but constant; 0 for
            others, shape ``(d,)``. A small constant may be what rare values were centred by.
        constant: Which latents' records have about one scale.
    """

    clear: Array
    found: Array
    most: Array
    beyond: Array
    centred: Array
    constant: Array

    @property
    def information(self) -> Array:
        """That of an average record, shape ``(d,)``."""
        return jnp.maximum(self.most + self.beyond, self.centred)


def nothing(size: int, drawn: bool) -> Scales:
    """What empty histograms say."""
    none, zero = jnp.zeros(size, bool), jnp.zeros(size)
    clear = jnp.zeros(())
    return Scales(clear if drawn else clear + jnp.inf, none, jnp.ones(size), zero, zero, none)


def clear(drawn: Array, counted: Array, counts_var: Array) -> Array:
    """How many deviations of a bin's noise all records in histograms are.

    An outcome that cannot be drawn scatters all scales of its record. Histograms of such are taken
    for clear, as nothing better was found for them.
    """
    deviations = counted / jnp.sqrt(jnp.maximum(counts_var, 1e-12))
    return jnp.where(drawn > 0, deviations, jnp.inf)


def of(
    counts: Array,
    counts_var: Array,
    counted: Array,
    drawn: Array,
    columns: Array,
    peers: Array | None = None,
) -> Scales:
    """What noisy histograms say of latents' scales."""
    constant = ratios.narrow(counts, counts_var, counted, drawn)
    deviations = clear(drawn, counted, counts_var)
    noise = jnp.broadcast_to(jnp.sqrt(counts_var), len(counts))
    each, each_noise = counts, noise
    if peers is not None:
        counts, noise = together(counts, noise, peers)
    template = jnp.array(ratios.NORMAL, counts.dtype)
    windows = jnp.arange(BINS - len(ratios.NORMAL) + 1)[:, None] + jnp.arange(len(ratios.NORMAL))
    fit = counts[:, windows] @ template / _LENGTH
    # Records of an indicator share one bin, of which the template's peak is two thirds as clear.
    one_bin = counts[:, _PEAK : _PEAK + fit.shape[1]]
    height = jnp.maximum(fit, _FOUND / _SPIKE * one_bin)
    window = jnp.argmax(height, axis=1)
    height, held, single = (
        jnp.take_along_axis(rows, window[:, None], 1)[:, 0] for rows in (height, fit, one_bin)
    )
    # All that an indicator has is in the middle of one octave. By the template, which has most of a
    # normal column's information above its peak, it would be taken for nearly three times as much.
    # Columns that are all but constant are looked at in units of the template's scale.
    indicator = (_FOUND / _SPIKE * single > held) & ~constant
    middle = jnp.where(indicator, _PEAK + 0.5, _RMS)
    mass = jnp.where(indicator, single, held / _LENGTH)
    if peers is not None:
        # Where they are is what peers have in common. How many they are, each shows by itself.
        rows = jnp.arange(len(counts))
        held = each[rows[:, None], windows[window]] @ template / _LENGTH
        own = jnp.where(indicator, each[rows, window + _PEAK], held / _LENGTH)
        own = by_itself(own, each_noise / jnp.where(indicator, 1, _LENGTH), peers)
        mass = jnp.where(jnp.sum(peers, axis=0) > 0, own, mass)
    mass = mass / jnp.maximum(counted, 1)
    log_scale = (LOWEST + window + middle) * np.log(2) + 0.5 * jnp.log(jnp.clip(mass, 1e-6, 1))
    # Of many places, noise alone reaches a lower bound in some: a scale wrong by a thousand.
    certain = height > _CERTAIN * noise
    far = jnp.abs(log_scale - _mean_of(log_scale, certain)) >= _ABOUT * np.log(2)
    found = certain | ((height > _FOUND * noise) & ~(jnp.any(certain) & far))
    about = jnp.abs(log_scale - _mean_of(log_scale, found)) < _ABOUT * np.log(2)
    some = jnp.any(found) & (drawn > 0) & (deviations > FAINT)
    found = found | (some & about & (height > _NEAR * noise))
    if peers is None:
        hidden = _expected(counts, noise, counted)
    else:
        # Where records look entries up, what noise hides is taken for an average one. Of so many
        # peers a record has one: what it tells of them all is shared by them.
        part = -0.5 * jnp.log(shared_by(peers))
        hidden = part + _mean_of(log_scale - part, found)
    most = jnp.exp(2 * jnp.where(found, log_scale, hidden))
    # What is far from zero has the scale of its mean, which says little of others.
    wide = found & ~constant & (columns > 0)
    usual = jnp.exp(2 * _mean_of(log_scale, jnp.where(jnp.any(wide), wide, found)))
    centred = jnp.where(constant & (columns > 0) & (drawn > 0), usual, 0)
    above = window + jnp.where(indicator, _PEAK + 1, len(ratios.NORMAL))
    others = jnp.where(jnp.arange(BINS) >= above[:, None], counts, 0)
    beyond = jnp.where(drawn > 0, _squares(others, noise[:, None]) / jnp.maximum(counted, 1), 0)
    return Scales(deviations, found, most, beyond, centred, constant)


def _expected(counts: Array, noise: Array, counted: Array) -> Array:
    """Expected logarithms of scales that noise hides, which are about those of other columns.

    Scales are normal about a common place, both of which are unknown. Each column's records, or a
    part of them, are spread as a normal's, or share one bin.
    """
    number = np.arange(BINS - len(ratios.NORMAL) + 1)
    template = jnp.array(ratios.NORMAL, counts.dtype)
    parts = jnp.array(_PARTS, counts.dtype)
    said = counts[:, number[:, None] + jnp.arange(len(template))] @ template
    said = jnp.stack([said, counts[:, _PEAK : _PEAK + len(number)]], axis=1)
    squares = jnp.array([_LENGTH**2, 1.0], counts.dtype)[:, None]
    held = counted * parts[:, None, None]
    var = noise[:, None, None, None] ** 2 + (_MISFIT * counted) ** 2
    fits = (held * said[:, None] - held**2 * squares / 2) / jnp.maximum(var, 1e-6)
    middle = np.array([_RMS, _PEAK + 0.5])[:, None]
    part = np.log2(_PARTS)[:, None, None]
    scaled, places = ((number + middle + by).ravel() for by in (0 * part, part / 2))
    fits = fits.reshape(len(counts), -1)
    # Of places, given where scales are together and how far apart; on the host, as all are known.
    about, apart = np.arange(BINS), np.array(_APART)[:, None, None]
    beside = np.exp(-(((scaled - about[:, None]) / apart) ** 2) / 2) / apart
    beside = beside * np.repeat(_BELIEFS, places.size // len(_BELIEFS))
    prior = jnp.asarray(beside.reshape(-1, places.size).T, counts.dtype)
    by_place = jnp.exp(fits - jnp.max(fits, axis=1, keepdims=True))
    # All sums over places are products of matrices: for each on its own, visits took three times as
    # long.
    likely = by_place @ prior
    within = (by_place * jnp.asarray(places, counts.dtype)) @ prior / jnp.maximum(likely, 1e-30)
    # Wherever scales may be together, by all histograms, and then each by its own.
    placed = np.tile(-(((about + LOWEST) / _PLACED) ** 2) / 2, len(_APART))
    weight = jax.nn.softmax(jnp.sum(jnp.log(likely), axis=0) + jnp.asarray(placed, counts.dtype))
    place = LOWEST + within @ weight
    return jnp.where(counted > 0, place, 0) * np.log(2)


def _squares(counts: Array, noise: Array) -> Array:
    """The information of the records in some bins, up to the last that stand out from noise."""
    wide = jnp.pad(counts, ((0, 0), (1, 1)))
    three = wide[:, :-2] + counts + wide[:, 2:]
    stand_out = (counts > _BEYOND * noise) | (three > _BEYOND * 3**0.5 * noise)
    number = jnp.arange(BINS)
    last = jnp.max(jnp.where(stand_out, number, -1), axis=1)
    inner = jnp.where(number <= last[:, None], jnp.maximum(counts, 0), 0)
    return _IN_OCTAVE * inner @ 4.0 ** (LOWEST + number)


def _mean_of(values: Array, chosen: Array) -> Array:
    return jnp.sum(jnp.where(chosen, values, 0)) / jnp.maximum(1, jnp.sum(chosen))
