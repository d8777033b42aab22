"""Newton's method for local problems without noise: steps that know how latents go together.

Adam moves each coordinate by about its learning rate. Where latents differ in scale by orders of
magnitude, or depend on each other closely (an intercept and the slope of a column far from zero),
that is too far for one and too little for another, and rounds creep. Here the locations' steps are
in the metric of the expected log density's Hessian, in which all directions are alike, and
precisions move towards what the records and the cavity give them (Khan and Lin 2017; in each entry
a natural-gradient step). The fixed points are those of the local objective, whatever the metric.

The Hessian also says what the draws of a step do to the precisions of a quadratic log density, for
which the answer is known: that error is taken off (a control variate). It is nearly all of it where
the posterior is nearly normal.

A step at whose end the loss climbs more than it fell at its beginning is taken back, and shorter
ones follow: one unlucky draw under heavy tails would throw q far away. A visit that ends far from
where it began goes on: its factor would be sure of a place that it only passed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Coordinates, Natural
from numpyro_dppvi.families import DiagonalNormal, FullNormal, MeanField, factors
from numpyro_dppvi.families.diagonal_normal import NormalCoordinates
from numpyro_dppvi.methods import joint_newton, objective
from numpyro_dppvi.methods.joint_newton import Walk, bent
from numpyro_dppvi.methods.local_solve import Descent, GradientFn
from numpyro_dppvi.methods.objective import MonteCarlo

# A Hessian takes a gradient a latent.
MOST_LATENTS = 256
# Solves of a visit, at most: more than one only where it has far to go.
_MOST_SOLVES = 20
# A step multiplies a precision by these at least and at most. Where the log density is not concave,
# q would widen to no end.
_LEAST_SHARPER, _MOST_SHARPER = 0.8, 50.0
# Columns of a Hessian that are computed side by side.
_COLUMNS_AT_ONCE = 8


class _Place(NamedTuple):
    """Coordinates of all latents in two vectors."""

    loc: Array
    log_scale: Array

    def narrower(self) -> "_Place":
        """The same means, and less around them."""
        return _Place(self.loc, self.log_scale + np.log(joint_newton.NARROWER))

    def is_far(self, other: "_Place") -> Array:
        """Whether another place is further away than some standard deviations, or far narrower."""
        away = (other.loc - self.loc) / jnp.exp(self.log_scale)
        moved = jnp.maximum(jnp.abs(away), jnp.abs(other.log_scale - self.log_scale))
        return jnp.max(moved) > joint_newton.FAR


@dataclass(frozen=True)
class Newton:
    """Newton's steps for normals of diagonal, and for one of full covariance; else a descent.

    ``otherwise`` is for more than ``MOST_LATENTS`` latents, too. The records' gradients are taken
    at ``draws``, where there are some.
    """

    otherwise: Descent
    draws: MonteCarlo | None = None

    def change(
        self, family: MeanField, q: Natural, own: Natural, keys: Any, records_gradient: GradientFn
    ) -> Natural:
        """As of :class:`~numpyro_dppvi.methods.local_solve.Solver`."""
        local: Any
        solve: Any
        problem = family, factors.divide(q, own), records_gradient, self.draws
        if _is_joint(family):
            local, solve = joint_newton.JointLocal(*problem), joint_newton.solve
        elif _is_for(family):
            local, solve = _Local(*problem), _solve
        else:
            return self.otherwise.change(family, q, own, keys, records_gradient)
        first = local.place(family.coordinates(q))
        end = _until_near(functools.partial(solve, local), first, keys)
        return factors.divide(family.natural(local.coordinates(end)), q)

    def measured(self, family: MeanField, q: Natural, change: Natural) -> Natural:
        """The change itself."""
        return change

    unmeasured = measured

    def repaired_whole(self, family: MeanField, refined: frozenset[str]) -> frozenset[str]:
        """Members of hierarchies, as of :class:`~numpyro_dppvi.methods.local_solve.Descent`."""
        return self.otherwise.repaired_whole(family, refined)


def _is_joint(family: MeanField) -> bool:
    """Whether q is one normal distribution over all latents."""
    ((_, member), *others) = family.members
    # More axes would be several normal distributions, each with a covariance of its own.
    one = not others and isinstance(member, FullNormal) and len(member.shape) == 1
    return one and member.size <= MOST_LATENTS


def _until_near(solve: Callable[[Any, Any], Any], first: Any, keys: Any) -> Any:
    """Goes on, with other draws, until a solve ends near where it began."""

    # A factor is made of where a solve ends. One that has not arrived is sure of where it was on
    # its way, other clients believe that, and what they believe holds it there when it goes on.
    def is_left(solved: tuple[Array, Any, Array]) -> Array:
        number, _, far = solved
        return far & (number < _MOST_SOLVES)

    def once_more(solved: tuple[Array, Any, Array]) -> tuple[Array, Any, Array]:
        number, here, _ = solved
        end = solve(here, jax.vmap(jax.random.fold_in, (0, None))(keys, number))
        # Of one that has failed this is false.
        return number + 1, end, end.is_far(here)

    end = solve(first, keys)
    return jax.lax.while_loop(is_left, once_more, (jnp.ones((), int), end, end.is_far(first)))[1]


def _is_for(family: MeanField) -> bool:
    normal = all(isinstance(member, DiagonalNormal) for _, member in family.members)
    return normal and sum(member.size for _, member in family.members) <= MOST_LATENTS


class _Local(NamedTuple):
    """A local problem; its methods take locations and log standard deviations in two vectors."""

    family: MeanField
    cavity: Natural
    records_gradient: GradientFn
    draws: MonteCarlo | None

    def place(self, tree: Any) -> _Place:
        """Two vectors from a tree like the coordinates."""
        members = [tree[name] for name, _ in self.family.members]
        return _Place(
            *(
                jnp.concatenate([jnp.ravel(x) for x in leaves])
                for leaves in zip(*members, strict=True)
            )
        )

    def coordinates(self, at: _Place) -> Coordinates:
        """Inverse of :meth:`place`."""
        found, first = {}, 0
        for name, member in self.family.members:
            last = first + member.size
            found[name] = NormalCoordinates(*(x[first:last].reshape(member.shape) for x in at))
            first = last
        return Coordinates(found)

    def free(self, at: _Place) -> _Place:
        """The gradient of the cavity's and the entropy's losses."""
        gradient = jax.grad(objective.cavity_loss, argnums=2)
        return self.place(gradient(self.family, self.cavity, self.coordinates(at)))

    def records(self, key: Any, at: _Place) -> _Place:
        """The gradient of the records' losses."""
        return self.place(self.records_gradient(key, self.coordinates(at)))

    def hessian(self, key: Any, at: _Place) -> Array:
        """The second derivatives of the records' expected losses in the locations."""
        eye = jnp.eye(at.loc.size, dtype=at.loc.dtype)
        scale = jnp.exp(at.log_scale)

        def column(direction: Array) -> Array:
            # In units of q's standard deviations numbers do not overflow.
            of_loc = lambda loc: self.records(key, at._replace(loc=loc)).loc  # noqa: E731
            return scale * bent(of_loc, at.loc, scale * direction)

        # A few columns at a time, because each takes the memory of a gradient.
        found = jax.lax.map(column, eye, batch_size=min(len(eye), _COLUMNS_AT_ONCE))
        # It is symmetric but for rounding. If it overflowed, the metric is the cavity's alone.
        return jnp.where(jnp.all(jnp.isfinite(found)), (found + found.T) / 2, 0.0)

    def off(self, key: Any, hessian: Array, times: Array) -> Array:
        """What the draws of a step do to its second part, were the loss quadratic."""
        if self.draws is None:
            return jnp.zeros(len(hessian), hessian.dtype)
        drawn = self.family.by_member(self.draws(key, self.family, self.family.standard()))
        white = [drawn[name] for name, _ in self.family.members]
        noise = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in white], axis=1)
        # Of z' A z / 2, with z = s e, the gradient in log s is z * A z: E[z_i z_j A_ij] is zero but
        # on the diagonal.
        # The Hessian is in units of the block's first standard deviations; ``times`` turns these
        # into those of now.
        off = noise.T @ noise / len(noise) - jnp.eye(len(hessian), dtype=hessian.dtype)
        return times * ((hessian * off) @ times)


def _solve(local: _Local, first: _Place, keys: Any) -> _Place:
    """Takes one step a key; NaN if no gradient was finite."""
    # Natural parameters are pairs, too, (P m, -P / 2): here ``place`` only lays them end to end.
    precision = -2 * local.place(local.cavity).log_scale

    def block(walk: Walk, steps: tuple[Any, Array]) -> tuple[Walk, None]:
        begin = walk.at
        scale = jnp.exp(begin.log_scale)
        # Draws of its own: a control variate must not know those that it is to correct.
        hessian = local.hessian(jax.random.fold_in(steps[0][0], 1), begin)
        # The second derivatives of the whole loss are the records' and the cavity's precision, here
        # in units of q's standard deviations; the entropy has none in locations.
        axes = scale, *joint_newton.definite(hessian + jnp.diag(scale**2 * precision))

        def step(walk: Walk, now: tuple[Any, Array]) -> tuple[Walk, None]:
            key, share = now
            here = jax.tree.map(jnp.add, local.free(walk.at), local.records(key, walk.at))
            held = _held(walk, here)
            at, slope, trust = held.at, held.slope, held.trust
            share = share * jnp.minimum(trust, 1.0)
            narrower = slope.log_scale - local.off(
                key, hessian, jnp.exp(at.log_scale - begin.log_scale)
            )
            # Of the visit, and not of each step: a q that narrows too soon would hold its own mean
            # there.
            widest = jnp.exp(jnp.where(walk.begun, walk.begin.log_scale, at.log_scale))
            farthest = trust * joint_newton.FARTHEST
            step, short = _step(axes, slope.loc, share, farthest, widest)
            after = _Place(at.loc - step, at.log_scale - _narrowed(narrower, share))
            held = held._replace(short=short)
            return joint_newton.onwards(walk, held, after, factors.is_finite(here)), None

        return jax.lax.scan(step, walk, steps)

    flat = jax.tree.map(jnp.zeros_like, first)
    return joint_newton.walked(first, flat, block, keys)


def _held(walk: Walk, here: _Place) -> Walk:
    """The walk if its last step held, else from before that step, with less trust."""
    # Solvers see slopes alone. Along a step d the loss changes by about (g + g')d / 2, with g and
    # g' the slopes at its ends: it rose if g'd is above -g d.
    step = jax.tree.map(jnp.subtract, walk.at, walk.before)

    def along(slope: _Place) -> Array:
        return slope.loc @ step.loc + slope.log_scale @ step.log_scale

    return joint_newton.held(walk, here, -along(walk.slope), along(here))


def _step(
    axes: tuple[Array, Array, Array], slope: Array, share: Array, farthest: Array, widest: Array
) -> tuple[Array, Array]:
    """A share of the Newton step, or what of it is trusted; and if that is less."""
    # With S the standard deviations and S A S = V D V', the step A^-1 g is S V D^-1 V'S g.
    scale, values, vectors = axes
    across = vectors.T @ (scale * slope)
    whole = scale * (vectors @ (across / values))
    # How many standard deviations that is: by the Hessian sqrt(step'A step) = |D^-1/2 V'S g|; by q
    # those of the coordinate that goes furthest. The smaller number counts, which is by the wider.
    by_hessian = jnp.linalg.norm(across / jnp.sqrt(values))
    by_q = jnp.max(jnp.abs(whole) / widest)
    most = farthest / jnp.minimum(by_hessian, by_q)
    return whole * jnp.minimum(share, most), most < share


def _narrowed(slope: Array, share: Array) -> Array:
    """The fall of the logarithm of a standard deviation."""
    # The slope is s^2 h - 1, with h the precision that records and cavity give at this q. So a
    # precision (1 - share) / s^2 + share h is 1 / s^2 times 1 + share * slope.
    ratio = jnp.clip(1 + share * slope, _LEAST_SHARPER, _MOST_SHARPER)
    return 0.5 * jnp.log(ratio)
