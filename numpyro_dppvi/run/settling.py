"""Whether a run has settled: how far its posterior is from where more rounds would take it.

The posterior's path is read from the history, that is, from released values. Rounds can be small
and many, and draws of the latents move every round a little: a small last round says nothing. So
the last half of the path is cut into three blocks, and their means are compared.
"""

from typing import NamedTuple

import jax
import numpy as np

from numpyro_dppvi._typing import Natural
from numpyro_dppvi.families import MeanField, enumeration
from numpyro_dppvi.posterior import marginals
from numpyro_dppvi.run.history import History

CLOSE = 0.05
"""A run without privacy ends when this many posterior standard deviations are left."""

_FIRST_LOOK, _LOOKS_APART = 15, 5
# From this round on, a path that goes nowhere ends even where draws move it more than that.
_PATIENCE = 60
# Blocks that differ by less than this many times their noise do not differ.
_CERTAIN = 2.0
# By what factor a block moves less than the one before it, at the least and at the most. At .98 a
# path has 49 times its last move to go: more than that is not believed from three blocks.
_FASTEST, _SLOWEST = 0.3, 0.98
_FEWEST = 6


class Way(NamedTuple):
    """How a path ends, in posterior standard deviations, of the entry for which it is largest.

    Attributes:
        left: How far more rounds would still go.
        noise: The standard deviation of a round around the path, from draws or privacy noise.
        unseen: How far two blocks can differ by noise alone.
    """

    left: float
    noise: float
    unseen: float


def way(history: History, family: MeanField, damping: float) -> Way | None:
    """What is left of the way, and what is noise; ``None`` for too few rounds.

    Args:
        history: All rounds so far.
        family: The family of q.
        damping: The share of a change that is merged.
    """
    rounds = len(history.movement)
    if rounds < _FEWEST:
        return None
    # Three blocks make up the last half; second differences need two rounds before them.
    length = rounds // 6
    last = jax.tree.map(lambda leaf: leaf[-3 * length - 2 :], history.natural)
    path = _path(family, last)
    if not np.all(np.isfinite(path)):
        return None
    # A round that goes the damping's share of its way remembers the one before it: rounds are
    # correlated by rho = 1 - damping, so that second differences have 6 - 8 rho + 2 rho^2 times
    # their variance, and means over n rounds about (1 + rho) / (1 - rho) / n times it.
    rho = 1 - damping
    variance = np.mean(np.diff(path, 2, axis=0) ** 2, axis=0) / (6 - 8 * rho + 2 * rho**2)
    # Of the difference of two blocks' means, hence the 2.
    noise = 2 * variance * min(1.0, (1 + rho) / (1 - rho) / length)
    blocks = path[-3 * length :].reshape(3, length, -1).mean(axis=1)
    before, moved = np.diff(blocks, axis=0)
    # A path that falls by the same factor from block to block has moved * r / (1 - r) to go.
    # The slope of `moved` on `before`. Noise in the denominator draws it towards 0, or noise alone
    # would look like a path with a long way to go.
    ratio = before * moved / np.maximum(before**2 + noise, np.finfo(float).tiny)
    ratio = np.clip(ratio, _FASTEST, _SLOWEST)
    # Movement that noise can explain does not count.
    sure = np.maximum(np.abs(moved) - _CERTAIN * np.sqrt(noise), 0)
    largest = (np.max(each, initial=0.0) for each in (sure * ratio / (1 - ratio), variance, noise))
    left, variance, noise = map(float, largest)
    return Way(left, variance**0.5, noise**0.5)


def has_settled(history: History, family: MeanField, damping: float) -> bool:
    """Whether a run without privacy is to end after the rounds that it had.

    A function of the history alone, so that a run that was broken off ends where it would have.
    """
    rounds = len(history.movement)
    if rounds < _FIRST_LOOK or rounds % _LOOKS_APART:
        return False
    found = way(history, family, damping)
    if found is None or found.left > CLOSE:
        return False
    # Noise can hide a path; the longer the blocks, the less.
    return found.unseen <= CLOSE or rounds >= _PATIENCE


def _path(family: MeanField, natural: Natural) -> np.ndarray:
    """Means and standard deviations round by round, in the last round's standard deviations.

    Shape ``(num_rounds, 2 * num_entries)``. A standard deviation's place is its logarithm: at equal
    numbers both move q by about as much. A discrete latent's mean is in halves of one.
    """
    rounds = len(jax.tree.leaves(natural)[0])
    # Round by round, because a program for each number of rounds would have to be compiled.
    each = (
        _moments(family, jax.tree.map(lambda leaf, r=r: leaf[r], natural)) for r in range(rounds)
    )
    columns = []
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves).astype(float), *jax.device_get([*each]))
    # A discrete latent's width goes to 0 with its last doubt.
    continuous = {name for name, _ in enumeration.continuous(family).members}
    for name, mean in stacked[0].items():
        width, parts = stacked[1][name], []
        if family.member_of(name) in continuous:
            parts = [np.log(width / width[-1])]
        else:  # nearly certain, it has next to no width, and log odds that grow change nothing
            width = np.full_like(width, 0.5)
        parts.append((mean - mean[-1]) / width[-1])
        columns += [part.reshape(rounds, -1) for part in parts]
    return np.concatenate(columns, axis=1)


_moments = jax.jit(marginals.moments, static_argnums=0)
