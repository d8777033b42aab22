"""Clips of :class:`~numpyro_dppvi.FisherScoring`: what they cut off, and how they follow that.

A low clip costs information, a high one lets in noise. Where outcomes lie further out than the
model says, a low one also bends the posterior, and no interval knows of it: then it has to rise.
Shares are of all records: those behind the releases that wait.
"""

import math

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array
from numpyro_dppvi.methods import tails
from numpyro_dppvi.methods.remembered import Memory, begun
from numpyro_dppvi.methods.shapes import longer
from numpyro_dppvi.methods.white import White

# What was chosen by simulation (docs/believe.md says on which studies).
# Of a visit's squared norm, for what is clipped: at least, and so much more as soon as the error of
# the misfit is far below the last number. With less budget or fewer records nothing is seen of it.
_SHARE = 0.04, 0.08, 0.02
_TARGETS, _INFO_TARGETS = (0.003, 0.2), (0.01, 0.1)  # least and largest fractions to be clipped
_AIM = 0.1  # the fraction to be clipped where noise is as large as what scores say
# By which power of a fraction over its target a clip changes, and by which at once at the most if
# outcomes can be drawn. The fraction of these falls tenfold where the clip grows by a half: by all
# clients' fractions at once, clips swung between a half and twice what they should be.
_GAIN = 0.6, 0.2
_CLIPS, _INFO_CLIPS = (0.1, 30.0), (0.1, 5.0)  # of scores, times sqrt(d); of information
_DOUBT = 2.0  # the misfit counts from so many of its standard deviations on
# The model is near the records after so many rounds, once a round's step is shorter than so many
# deviations of one record.
_SETTLED, _STEADY = 3, 0.1
# Before the model is near the records, and then: by how much a round makes the variance of a known
# misfit grow, relatively, and how much may be cut off beyond the model, in a round's noise.
_FORGET, _BENT = (2.0, 0.3), (1.0, 1 / 3)
_DRIFT = 0.005  # by how much a misfit changes in a round, as the model and clips do


def share(memory: Memory) -> Array:
    """Of a visit's squared norm, the part that says what is clipped."""
    least, more, error = _SHARE
    seen = 1 / (1 + 1 / jnp.maximum(memory.misfit_known[0] * error**2, 1e-6))
    return least + more * memory.drawn * seen


def near(memory: Memory, axes: White) -> Array:
    """Whether the model has come near the records: after some rounds, once steps are short.

    As long as noise throws the model about, some records lie far from it. That is no reason to
    doubt the model, and a higher clip would let in more noise.
    """
    rounds, loc = memory.rounds, memory.loc / memory.prior_sd
    ways = jnp.stack([loc - rounds.before.loc, loc - rounds.now.loc])
    longest = jnp.max(jnp.linalg.norm(ways @ axes.back.T, axis=1))
    return (begun(memory, memory.most_visits) > _SETTLED) & (longest < _STEADY)


def misfit(memory: Memory, is_near: Array, share: Array) -> Memory:
    """What is known of the misfit with the releases that wait, older ones for less."""
    waiting = memory.waiting
    excess, variance = tails.excesses(waiting.flags, waiting.flags_var)
    records = jnp.maximum(waiting.records, 1)
    forget = jnp.where(is_near, _FORGET[1], _FORGET[0])
    before = memory.misfit_known / (1 + forget * share)
    before = before / (1 + before * share * _DRIFT**2)
    now = 1 / jnp.maximum(variance / records**2, 1e-12)
    found = (before * memory.misfit + now * excess / records) / (before + now)
    return memory._replace(misfit=found, misfit_known=before + now)


def cut_off(memory: Memory, is_near: Array, share: Array, total_records: Array) -> Array:
    """How many times as much as it may is cut off, beyond what the model expects.

    Under the model, observed scores are clipped as often as drawn ones, which bends nothing. What
    exceeds that pulls all one way, by up to a clip each: it must stay below a part of a round's
    noise. Only what is neither noise nor chance counts. Far from the records every outcome looks
    unlikely, and of more than far scores nothing is said.
    """
    waiting = memory.waiting
    chance = jnp.maximum(tails.by_chance(waiting.flags, waiting.records), 0) / waiting.records
    doubt = _DOUBT * jnp.sqrt(1 / memory.misfit_known + chance / total_records)
    far, shape = jnp.maximum(memory.misfit - doubt, 0)
    sure = jnp.maximum(far, jnp.where(is_near, shape, 0))
    noise = jnp.sqrt(waiting.noise_var * share) + 1e-4 * waiting.records  # in clips
    return sure * waiting.records / (jnp.where(is_near, _BENT[1], _BENT[0]) * noise)


def after(
    memory: Memory,
    axes: White,
    bent: Array,
    shape: Array,
    seen: Array,
    known: Array,
    error: Array,
    share: Array,
) -> Memory:
    """The next clips, which follow the released fractions, slowly where these are noisy."""
    size, waiting = memory.loc.size, memory.waiting
    records = jnp.maximum(waiting.records, 1)
    # Of drawn scores and of information, what was clipped; noise on the former.
    drawn, information = (waiting.flags[3:] / records + 1) / 2
    doubt = jnp.sqrt(waiting.flags_var[3]) / records / 2
    trust = jnp.sqrt(share) / (1 + (doubt / 0.1) ** 2)
    # A low clip costs information, a high one noise. Where noise is small beside the records' own
    # spread, hardly anything is clipped.
    # Where there is none, nothing needs to be.
    least = jnp.minimum(_TARGETS[0], jnp.maximum(doubt, 1e-5))
    target = jnp.clip(_AIM * waiting.noisy / waiting.visits, least, _TARGETS[1])
    gain = _GAIN[0] * trust
    slowly = jnp.where(memory.drawn > 0, jnp.minimum(gain, _GAIN[1]), gain)
    factor = jnp.maximum(
        jnp.clip(drawn / target, 0.3, 3.0) ** slowly, jnp.clip(bent, 0.3, 3.0) ** gain
    )
    # Lengths are of the order of sqrt(d level), of sqrt(d) if clips have made the level small.
    level = jnp.maximum(memory.level, 1)
    bounds = math.sqrt(size) * _CLIPS[0], jnp.sqrt(size * level) * _CLIPS[1]
    info_target = jnp.clip(error * np.sqrt(size), *_INFO_TARGETS)
    stretch = jnp.exp(jnp.clip(3 * (information - info_target), -0.7, 0.7))
    return memory._replace(
        clip=jnp.clip(memory.clip * longer(axes, shape, seen, known) * factor, *bounds),
        info_clip=jnp.clip(memory.info_clip * stretch**trust, *_INFO_CLIPS),
        misfit=memory.misfit / jnp.maximum(factor, 1.0),  # a higher clip leaves less beyond it
    )
