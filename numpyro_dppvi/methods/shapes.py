"""What noise leaves of a released information matrix: the shape of an average record's.

The server of :class:`~numpyro_dppvi.FisherScoring` believes what stands out from noise, no more.
``axes`` are the coordinates of a release, in which the old shape is the identity. ``seen`` is the
mean of all released shapes in these, and ``known`` what is known of it. Shapes are in prior units.
"""

import math

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array
from numpyro_dppvi.methods.white import White, coordinates, symmetric

# Chosen by simulation (docs/believe.md says on which studies).
_LENGTHS = 0.5  # a change of lengths is believed if its relative error is less
_ALONE = 2.0  # an axis is taken for seen if it stands out by so many deviations of noise
_PAIR = 3.0  # the same for a pair of columns, if these are few
_FLOOR = 0.5  # of the noise's edge: what lies below it is not told from it
_LEAST = 0.05  # of information that zeros leave of a direction, in its own scale
_FAR = 1.5  # of the noise's edge: what exceeds it is believed beside what looks have found


def shrunk(axes: White, seen: Array, known: Array) -> Array:
    """The new shape in prior units: of the difference to what was seen, what is not noise.

    Noise hides an entry least, a direction that has to be searched for most. So entries of the
    diagonal are compared by themselves, then all columns' together, then what is left by
    eigenvalues, and last by pairs. The old shape is the identity in ``axes``.
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


def _by_column(shape: Array, axes: White, seen: Array, noise: Array) -> Array:
    """All columns' own entries, which are known sqrt(d) times better than the spectrum.

    By James and Stein's rule, as far as columns differ by no more than their own size.
    """
    had = jnp.diagonal(axes.outside(shape))
    error = jnp.diagonal(axes.outside(noise)) / had
    stray = jnp.diagonal(axes.outside(seen)) / had - 1
    chance = 2 * error**2
    differ = jnp.clip(jnp.mean(stray**2 - chance), 0, 1)
    # In more noise than that, what it makes would be believed a little more at each visit.
    differ = jnp.where(jnp.mean(chance) < 1, differ, 0)
    worth = differ / jnp.maximum(differ + chance, 1e-12)
    by = jnp.sqrt(jnp.clip(1 + worth * stray, 0.3, 3.0))
    return axes.information(by[:, None] * axes.outside(shape) * by)


def raised(axes: White, seen: Array, known: Array) -> Array:
    """The old shape in prior units, and what stands out far above it."""
    p, turn = jnp.linalg.eigh(known)
    p = jnp.maximum(p, 1e-9)
    return axes.outside(_by_eigenvalue(jnp.eye(len(seen)), seen, p, turn, above=_FAR))


def _by_eigenvalue(
    shape: Array, seen: Array, p: Array, turn: Array, above: float | None = None
) -> Array:
    """Directions that stand out; noise has eigenvalues 1 / p and eigenvectors ``turn``.

    With ``above``, those alone that stand out above the shape, by so many of the noise's edges.
    """
    # In coordinates where noise is white, eigenvalues of noise alone end at the edge 2 sqrt(d).
    # One that was v without noise is found near sqrt(v^2 + edge^2) (Gavish and Donoho 2017).
    root = (turn * jnp.sqrt(p)) @ turn.T
    undo = (turn / jnp.sqrt(p)) @ turn.T
    edge = 2 * math.sqrt(len(shape))
    values, vectors = jnp.linalg.eigh(symmetric(root @ (seen - shape) @ root))
    kept = jnp.sign(values) * jnp.sqrt(jnp.maximum(values**2 - edge**2, 0))
    if above is not None:
        kept = jnp.where(values > above * edge, kept, 0)
    had = symmetric(root @ shape @ root)
    now = had + (vectors * kept) @ vectors.T
    # What is small already shrinks no further than to the noise. Not along these vectors alone:
    # what is taken off them may be all that there is in a direction between them.
    own, ways = jnp.linalg.eigh(had)
    least = ways * jnp.sqrt(jnp.clip(own, 1e-9, _FLOOR * edge))
    most = ways / jnp.sqrt(jnp.clip(own, 1e-9, _FLOOR * edge))
    parts, along = jnp.linalg.eigh(symmetric(most.T @ now @ most))
    along = undo @ least @ along
    return _proper((along * jnp.maximum(parts, 1)) @ along.T)


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
    values, vectors = jnp.linalg.eigh(symmetric(shape))
    return (vectors * jnp.maximum(values, 0.02)) @ vectors.T


def apart(shape: Array, meeting: np.ndarray) -> tuple[Array, Array]:
    """A shape with zeros where entries do not meet, and what that has added to it.

    What noise has put there had made it positive definite: the other entries off the diagonal
    shrink until it is so again. Along some direction it is larger then than before. Where a column
    is the same for all records of a group, it is one of which no record tells.
    """
    root = jnp.sqrt(jnp.diagonal(shape))
    own = jnp.diag(jnp.diagonal(shape))
    across = (shape - own) * meeting
    values, turn = jnp.linalg.eigh(across / (root[:, None] * root))
    part = jnp.minimum(1, (1 - _LEAST) / jnp.maximum(-values[0], 1e-6))
    more = (turn * ((1 - part) * jnp.maximum(-values, 0))) @ turn.T
    return own + across * part, more * (root[:, None] * root)


def longer(axes: White, shape: Array, seen: Array, known: Array) -> Array:
    """How much longer scores are in the coordinates of a new shape, as far as is known."""
    # By what was seen itself and not by its shape alone: if the clip followed the length of what it
    # clips, both would run away.
    turned = axes.back @ coordinates(shape).white
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
