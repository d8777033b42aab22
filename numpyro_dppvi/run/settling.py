"""Whether a run has settled: how far its posterior is from where more rounds would take it.

The posterior's path is read from the history, that is, from released values. Rounds can be small
and many, and draws of the latents move every round a little: a small last round says nothing. So
the last half of the path is cut into three blocks, and their means are compared. Along a ridge
(latents that only together are known) rounds creep, and draws add up to a walk of their own, in
which a block can stand still by chance. So its last three quarters and all of it are cut up, too.
Where the path has arrived and draws still move it, rounds are averaged until that is little.
"""

import math
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
# From this round on, a path that goes nowhere has arrived even where draws could hide some of it.
_PATIENCE = 60
# Draws hide a path that falls by this factor a round, at the most.
_HIDDEN = 0.95
# Rounds are averaged until draws leave less than this in q, but not for ever.
_FAINT, _MOST_AVERAGED = CLOSE / 3, 100
# A round corrects this share of what q is off, at the least, where draws matter.
_CORRECTED = 1 / 8
# Rounds remember each other by no more than this.
_MEMORY = 0.9
# Blocks that differ by less than this many times their noise do not differ.
_CERTAIN = 2.0
# By what factor a block moves less than the one before it, at the least and at the most: the former
# for blocks of a sixth of the path. At .98 a path has 49 times its last move to go: more than that
# is not believed from three blocks.
_FASTEST, _SLOWEST = 0.3, 0.98
# Three blocks of the path: each is this part of it, and what they say is left counts so much. Early
# rounds tell less of what is left.
_SHORT, _LONGER = 6, ((4, 1.0), (3, 0.5))
_FEWEST = 6


class Way(NamedTuple):
    """How a path ends, in posterior standard deviations, of the entry for which it is largest."""

    left: float  # how far more rounds would still go
    noise: float  # the standard deviation of a round around the path, from draws or privacy noise
    hidden: float  # how far a slow path can still go without being seen in the noise of two blocks
    # The same as ``noise`` of all rounds that one draw moves, added up: the mean of n rounds has
    # this over sqrt(n).
    lasting: float


def way(history: History, family: MeanField, damping: float) -> Way | None:
    """What is left of the way, and what is noise; ``None`` for too few rounds."""
    rounds = len(history.movement)
    if rounds < _FEWEST:
        return None
    # Three blocks make up the last half; second differences need two rounds before them.
    length = rounds // _SHORT
    whole = _path(family, history.natural)
    path = whole[-3 * length - 2 :]
    if not np.all(np.isfinite(path)):
        return None
    # A round that goes the damping's share of its way remembers the one before it: rounds are
    # correlated by rho = 1 - damping, so that second differences have 6 - 8 rho + 2 rho^2 times
    # their variance, and means over n rounds about (1 + rho) / (1 - rho) / n times it.
    rho = 1 - damping
    bends = np.mean(np.diff(path, 2, axis=0) ** 2, axis=0)
    variance = bends / (6 - 8 * rho + 2 * rho**2)

    def noise(length: int) -> np.ndarray:
        # Of the difference of two blocks' means, hence the 2.
        return 2 * variance * min(1.0, (1 + rho) / (1 - rho) / length)

    left, _ = _left(path, length, noise(length), _FASTEST)
    for parts, counts in _LONGER:
        found, ratio = _left(
            whole, rounds // parts, noise(rounds // parts), _FASTEST ** (_SHORT / parts)
        )
        # From the end of the last block and not from its middle, which is long before.
        left = np.maximum(left, np.nan_to_num(counts * found * np.sqrt(ratio)))
    worst = (left, variance, noise(length), _lasting(path, bends))
    far, scatter, unseen, lasting = (float(np.max(each, initial=0.0)) for each in worst)
    slowest = _HIDDEN**length
    hidden = _CERTAIN * unseen**0.5 * slowest / (1 - slowest)
    return Way(far, scatter**0.5, hidden, lasting**0.5)


def _left(
    path: np.ndarray, length: int, noise: np.ndarray, fastest: float
) -> tuple[np.ndarray, np.ndarray]:
    """How far each entry has to go from the last of three blocks, and how its moves shrink."""
    blocks = path[-3 * length :].reshape(3, length, -1).mean(axis=1)
    before, moved = np.diff(blocks, axis=0)
    # A path that falls by the same factor from block to block has moved * r / (1 - r) to go.
    # The slope of `moved` on `before`. Noise in the denominator draws it towards 0, or noise alone
    # would look like a path with a long way to go.
    ratio = before * moved / np.maximum(before**2 + noise, np.finfo(float).tiny)
    ratio = np.clip(ratio, fastest, _SLOWEST)
    # Movement that noise can explain does not count.
    sure = np.maximum(np.abs(moved) - _CERTAIN * np.sqrt(noise), 0)
    return sure * ratio / (1 - ratio), ratio


def _lasting(path: np.ndarray, bends: np.ndarray) -> np.ndarray:
    """The variance that draws give a mean over rounds, times their number."""
    # Rounds x' = rho x + e around an end have E[(x' - x)^2] = 2 V (1 - rho) with V the variance of
    # x, and second differences have 3 - rho times that. So both give rho and the variance of e.
    moves = np.mean(np.diff(path, axis=0) ** 2, axis=0)
    rho = np.clip(3 - bends / np.maximum(moves, np.finfo(float).tiny), 0, _MEMORY)
    fresh = bends * (1 + rho) / (2 * (3 - rho))
    # What bends less than it moves is a path, and 3 - rho at least 2.
    return np.where(bends < moves, 0.0, fresh / (1 - rho) ** 2)


class Arrival(NamedTuple):
    """A path that goes nowhere any more, but for what draws of the latents move q in a round.

    From here on each round merges a smaller share of its changes than the one before it, so that
    q averages over what all of them found. It stays the product of the factors.
    """

    round: int  # how many rounds it took
    way: Way  # what was left then
    damping: float  # the share of a change that was merged until then
    until_settled: bool  # whether the run ends once draws do not matter

    def looks_back_to(self) -> int:
        """The first round of the path that says so."""
        return self.round - 3 * (self.round // 6)

    def share(self, round_number: int) -> float:
        """The part of the damping in a round, counted from 0."""
        if self.way.lasting <= _FAINT:
            return 1.0
        # Shares of 1 / (c n) of changes that correct a share c of what q is off average as well as
        # can be (Robbins and Monro); where changes correct more, nearly as well.
        return 1 / (1 + _CORRECTED * self.damping * (round_number - self.round + 1))

    def noise(self, rounds: int) -> float:
        """What draws leave in q after so many rounds, in its standard deviations."""
        averaged = max(rounds - self.round, 0)
        last = self.share(rounds - 1) if averaged else 1.0
        # Of entries that rounds correct slowly and at once; neither is better than an average.
        slow, fast = 1 / (1 + averaged), last / (2 - last)
        return max(self.way.lasting * math.sqrt(slow), self.way.noise * math.sqrt(fast))

    def ends(self, rounds: int) -> bool:
        """Whether the run ends here."""
        enough = self.noise(rounds) <= _FAINT or rounds - self.round >= _MOST_AVERAGED
        return self.until_settled and enough


class Course(NamedTuple):
    """How a run without privacy is watched; ``damping`` is the share merged until it arrives."""

    family: MeanField
    damping: float
    until_settled: bool

    def look(self, history: History) -> Arrival | None:
        """Whether it has arrived with the last round, where it looks."""
        # A function of the history alone, so that a run that was broken off ends where it would
        # have.
        rounds = len(history.movement)
        if rounds < _FIRST_LOOK or rounds % _LOOKS_APART:
            return None
        found = way(history, self.family, self.damping)
        if found is None or found.left > CLOSE:
            return None
        # Noise can hide a path; the longer the blocks, the less.
        sure = found.hidden <= CLOSE or rounds >= _PATIENCE
        return Arrival(rounds, found, self.damping, self.until_settled) if sure else None

    def arrival(self, history: History) -> Arrival | None:
        """When it has arrived, if it has."""
        for rounds in range(_FIRST_LOOK, len(history.movement) + 1, _LOOKS_APART):
            found = self.look(jax.tree.map(lambda leaf, n=rounds: leaf[:n], history))
            if found is not None:
                return found
        return None


def shares(history: History, family: MeanField, damping: float) -> np.ndarray:
    """The share of its changes that each round of a run without privacy has merged."""
    rounds = len(history.movement)
    arrival = Course(family, damping, until_settled=True).arrival(history)
    parts = [
        1.0 if arrival is None or number < arrival.round else arrival.share(number)
        for number in range(rounds)
    ]
    return damping * np.array(parts)


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
