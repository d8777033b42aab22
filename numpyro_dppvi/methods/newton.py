"""Newton's method for local problems without noise: steps that know how latents go together.

Adam moves each coordinate by about its learning rate. Where latents differ in scale by orders of
magnitude, or depend on each other closely (an intercept and the slope of a column far from zero),
that is too far for one and too little for another, and rounds creep. Here the locations' steps are
in the metric of the expected log density's Hessian, in which all directions are alike, and
precisions move towards what the records and the cavity give them (Khan and Lin 2017; in each entry
a natural-gradient step). The fixed points are those of the local objective, whatever the metric.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from numpyro_dppvi._typing import Array, Coordinates, Gradient, Natural
from numpyro_dppvi.families import DiagonalNormal, MeanField, factors
from numpyro_dppvi.families.diagonal_normal import NormalCoordinates
from numpyro_dppvi.methods import objective
from numpyro_dppvi.methods.local_solve import Descent, GradientFn

# A Hessian takes a gradient a latent.
MOST_LATENTS = 256
# Steps between two Hessians, at most.
_STEPS_A_HESSIAN = 10
# The share of a Newton step that is taken falls as 5 / (5 + t): the first ones go far, and the
# draws of the last ones average out.
_FALLS_AFTER = 5.0
# A step goes no further than this many of q's standard deviations, or of those that the Hessian
# gives along it, if these are larger.
_FARTHEST = 2.0
# A step multiplies no precision by more than this, nor divides it by more than its root.
_MOST_SHARPER = 50.0
_FEW_HESSIANS_AT_ONCE = 8


class _Place(NamedTuple):
    """Coordinates of all latents in two vectors."""

    loc: Array
    log_scale: Array


@dataclass(frozen=True)
class Newton:
    """Newton's steps where all members are normals with a diagonal covariance; else a descent.

    Args:
        otherwise: What is done with other families, and with more than ``MOST_LATENTS`` latents.
    """

    otherwise: Descent

    def change(
        self, family: MeanField, q: Natural, own: Natural, keys: Any, records_gradient: GradientFn
    ) -> Natural:
        """As of :class:`~numpyro_dppvi.methods.local_solve.Solver`."""
        if not _is_for(family):
            return self.otherwise.change(family, q, own, keys, records_gradient)
        cavity, start = factors.divide(q, own), family.coordinates(q)

        def gradient(key: Any, coordinates: Coordinates) -> Gradient:
            free = jax.grad(objective.cavity_loss, argnums=2)(family, cavity, coordinates)
            return jax.tree.map(jnp.add, free, records_gradient(key, coordinates))

        end = solve(keys, start, gradient)
        return factors.divide(family.natural(end), q)

    def measured(self, family: MeanField, q: Natural, change: Natural) -> Natural:
        """The change itself."""
        return self.otherwise.measured(family, q, change)

    def unmeasured(self, family: MeanField, q: Natural, measured: Natural) -> Natural:
        """The change itself."""
        return self.otherwise.unmeasured(family, q, measured)

    def repaired_whole(self, family: MeanField, refined: frozenset[str]) -> frozenset[str]:
        """Those of hierarchies."""
        return self.otherwise.repaired_whole(family, refined)


def _is_for(family: MeanField) -> bool:
    normal = all(isinstance(member, DiagonalNormal) for _, member in family.members)
    return normal and sum(member.size for _, member in family.members) <= MOST_LATENTS


def solve(keys: Any, start: Coordinates, gradient: GradientFn) -> Coordinates:
    """Takes one step a key from ``start``.

    Args:
        keys: Keys, or a tree of them, with a leading axis of one entry a step.
        start: Where to start: locations and logarithms of standard deviations.
        gradient: The loss's gradient in these.

    Returns:
        The coordinates after the last step; NaN if its gradient was not finite.
    """
    number = len(jax.tree.leaves(keys)[0])
    each = max(n for n in range(1, _STEPS_A_HESSIAN + 1) if number % n == 0)
    blocks = jax.tree.map(lambda leaf: leaf.reshape(number // each, each, *leaf.shape[1:]), keys)
    shares = (_FALLS_AFTER / (_FALLS_AFTER + jnp.arange(1, number + 1))).reshape(-1, each)
    _, unravel = ravel_pytree({name: part.loc for name, part in start.items()})
    first = _Place(*(_flat(start, field) for field in NormalCoordinates._fields))
    widest = jnp.exp(first.log_scale)

    def slope(key: Any, at: _Place) -> _Place:
        locs, log_scales = unravel(at.loc), unravel(at.log_scale)
        here = Coordinates({n: NormalCoordinates(locs[n], log_scales[n]) for n in locs})
        found = gradient(key, here)
        return _Place(*(_flat(found, field) for field in NormalCoordinates._fields))

    def block(at: _Place, steps: tuple[Any, Array]) -> tuple[_Place, Array]:
        keys, shares = steps
        key = jax.tree.map(lambda leaf: leaf[0], keys)
        axes = _axes(lambda loc: slope(key, at._replace(loc=loc)).loc, at)

        def step(at: _Place, now: tuple[Any, Array]) -> tuple[_Place, Array]:
            key, share = now
            found = slope(key, at)
            after = _Place(
                at.loc - _step(axes, found.loc, share, widest),
                at.log_scale - _narrowed(found.log_scale, share),
            )
            finite = factors.is_finite((found, after))
            return factors.select(finite, after, at), finite

        return jax.lax.scan(step, at, (keys, shares))

    end, finite = jax.lax.scan(block, first, (blocks, shares))
    end = jax.tree.map(lambda leaf: jnp.where(finite[-1, -1], leaf, jnp.nan), end)
    locs, log_scales = unravel(end.loc), unravel(end.log_scale)
    return Coordinates({n: NormalCoordinates(locs[n], log_scales[n]) for n in locs})


def _flat(tree: Coordinates, field: str) -> Array:
    return ravel_pytree({name: getattr(part, field) for name, part in tree.items()})[0]


class _Axes(NamedTuple):
    """The metric at some q: S A S of the Hessian A, with S the standard deviations.

    Attributes:
        scale: The standard deviations.
        vectors: Its eigenvectors in columns.
        values: Its eigenvalues, made positive.
    """

    scale: Array
    vectors: Array
    values: Array


def _axes(slope: Any, at: _Place) -> _Axes:
    """The metric: the Hessian in units of q's standard deviations, made positive definite."""
    size, scale = at.loc.size, jnp.exp(at.log_scale)

    def column(direction: Array) -> Array:
        return scale * jax.jvp(slope, (at.loc,), (scale * direction,))[1]

    eye = jnp.eye(size, dtype=scale.dtype)
    found = jax.lax.map(column, eye, batch_size=min(size, _FEW_HESSIANS_AT_ONCE))
    found = jnp.where(jnp.all(jnp.isfinite(found)), (found + found.T) / 2, eye)
    # Likelihoods with kinks have a precision that their second derivatives do not show: in q's
    # units it is 1 once q has it.
    found += jnp.diag(jnp.maximum(0.5 - jnp.diagonal(found), 0))
    values, vectors = jnp.linalg.eigh(found)
    # A saddle is left along its negative directions as fast as a hill is climbed (|A|).
    least = size * jnp.finfo(scale.dtype).eps * jnp.max(jnp.abs(values))
    return _Axes(scale, vectors, jnp.maximum(jnp.abs(values), least))


def _step(axes: _Axes, slope: Array, share: Array, widest: Array) -> Array:
    """A share of the Newton step, or as much of it as is trusted."""
    across = axes.vectors.T @ (axes.scale * slope)
    whole = axes.scale * (axes.vectors @ (across / axes.values))
    by_hessian = jnp.linalg.norm(across / jnp.sqrt(axes.values))
    by_q = jnp.max(jnp.abs(whole) / widest)
    return whole * jnp.minimum(share, _FARTHEST / jnp.minimum(by_hessian, by_q))


def _narrowed(slope: Array, share: Array) -> Array:
    """The fall of the logarithm of a standard deviation."""
    # The slope is s^2 h - 1, with h the precision that records and cavity give at this q. So a
    # precision (1 - share) / s^2 + share h is 1 / s^2 times 1 + share * slope.
    ratio = jnp.clip(1 + share * slope, _MOST_SHARPER**-0.5, _MOST_SHARPER)
    return 0.5 * jnp.log(ratio)
