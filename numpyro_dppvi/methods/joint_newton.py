"""Newton's steps for one normal distribution over all latents, with full covariance.

What :mod:`numpyro_dppvi.methods.newton` does for independent normals, in white coordinates e with
theta = m + L e and L L' the covariance. There q's precision is the identity, and a step moves it
towards W = L' (P_cavity + E_q[Hessian]) L, which is the natural gradient's. At the end W = I.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from numpyro.distributions.util import cholesky_of_inverse

from numpyro_dppvi._typing import Array, Coordinates, Natural
from numpyro_dppvi.families import MeanField, factors, full_normal
from numpyro_dppvi.methods.local_solve import GradientFn
from numpyro_dppvi.methods.objective import MonteCarlo

# Steps between two Hessians, at most.
_STEPS_A_HESSIAN = 10
# The share of a Newton step that is taken falls as 2 / (2 + t): the first ones go far, and the
# draws of the last ones average out.
_FALLS_AFTER = 2.0
# A step goes no further than this many of q's standard deviations, or of those that the Hessian
# gives along it, if these are larger.
FARTHEST = 1.0
# A step that is taken back is tried again at a quarter of its length; each that holds doubles it,
# up to the whole length, and beyond that while steps would go further still.
_SHORTER, _LONGER = 0.25, 2.0
# Nats by which a step's end may rise more than its beginning fell: draws' noise does not reach it.
_WORSE = 1.0
# By how much q narrows, step by step, until a visit has found a place with a finite slope. Under a
# wide prior in raw units an expected rate exp(x'b) is infinite: a solve may begin anywhere.
NARROWER = 0.25
# Standard deviations, and nats of their logarithm: a solve that has gone further goes on.
FAR = 1.0


class Place(NamedTuple):
    """Mean, and the Cholesky factor of the covariance."""

    loc: Array
    tril: Array

    def narrower(self) -> "Place":
        """The same mean, and less around it."""
        return Place(self.loc, NARROWER * self.tril)

    def is_far(self, other: "Place") -> Array:
        """Whether another place is further away than some standard deviations, or far narrower."""
        away = solve_triangular(self.tril, other.loc - self.loc, lower=True)
        turned = jnp.diagonal(solve_triangular(self.tril, other.tril, lower=True))
        return (jnp.max(jnp.abs(away)) > FAR) | (jnp.max(jnp.abs(jnp.log(turned))) > FAR)


class Walk(NamedTuple):
    """A place, and the way to it; of one normal or of independent ones."""

    at: Any
    before: Any  # the last place that has held
    slope: Any  # the slope there; of one normal, it and the whole loss's Hessian along white axes
    trust: Array  # the share of a step that is trusted; above 1, of the farthest step
    short: Array  # whether the last step would have gone further
    begin: Any  # the first place with a finite slope
    begun: Array  # whether there is one


class JointLocal(NamedTuple):
    """A local problem of one normal distribution over all latents.

    The gradient is of the records' losses, taken at ``draws``, where there are some.
    """

    family: MeanField
    cavity: Natural
    records_gradient: GradientFn
    draws: MonteCarlo | None

    def place(self, coordinates: Coordinates) -> Place:
        """Where some coordinates are."""
        (here,) = coordinates.values()
        return Place(here.loc, full_normal.scale_tril(here))

    def coordinates(self, at: Place) -> Coordinates:
        """Inverse of :meth:`place`."""
        ((name, _),) = self.family.members
        return Coordinates({name: full_normal.of_tril(*at)})

    def free(self, at: Place) -> tuple[Array, Array]:
        """Slope and Hessian of the cavity's loss along white axes."""
        # whitened() makes sqrt(2) L' D L of a quadratic part D. The cavity's is -P / 2, so that its
        # share L'P L of the Hessian is -sqrt(2) times that. The entropy's, -I, is in _narrowed.
        ((name, member),) = self.family.members
        white = member.whitened(full_normal.of_tril(*at), self.cavity[name])
        return -white.linear, -np.sqrt(2) * full_normal.unpack(white.quadratic)

    def records(self, key: Any, at: Place) -> tuple[Array, Array]:
        """Slope and Hessian of the records' expected losses along white axes."""
        (found,) = self.records_gradient(key, self.coordinates(at)).values()
        _, pull = jax.vjp(lambda tril: full_normal.of_tril(at.loc, tril), at.tril)
        (of_tril,) = pull(found)
        # d/dL E[f(m + L e)] = E[f''] L =: G (Price). Only its lower triangle is known, because L
        # has no other entries. That suffices for the lower triangle of the white Hessian L'G: in
        # (L'G)_ij = sum over k >= i of L_ki G_kj, all k are at least j where i >= j.
        return at.tril.T @ found.loc, _from_lower(at.tril.T @ jnp.tril(of_tril))

    def second(self, key: Any, at: Place) -> Array:
        """The same Hessian as a derivative of the slope; none where the loss has kinks."""

        def slope(white: Array) -> Array:
            return self.records(key, at._replace(loc=at.loc + at.tril @ white))[0]

        zero = jnp.zeros_like(at.loc)
        eye = jnp.eye(len(zero), dtype=zero.dtype)
        found = jax.lax.map(lambda e: bent(slope, zero, e), eye, batch_size=min(len(eye), 8))
        return jnp.where(jnp.all(jnp.isfinite(found)), (found + found.T) / 2, 0.0)

    def off(self, key: Any, hessian: Array) -> Array:
        """What the draws of a step do to the white Hessian, were the loss quadratic."""
        if self.draws is None:
            return jnp.zeros_like(hessian)
        drawn = self.family.by_member(self.draws(key, self.family, self.family.standard()))
        (noise,) = drawn.values()
        # The slope at e is A e, and its product with e' has the mean A e e' over the draws.
        return _from_lower(hessian @ (noise.T @ noise / len(noise) - jnp.eye(len(hessian))))


def solve(local: JointLocal, first: Place, keys: Any) -> Place:
    """Takes one step a key; NaN if no gradient was finite."""

    def block(walk: Walk, steps: tuple[Any, Array]) -> tuple[Walk, None]:
        begin = walk.at
        hessian = local.second(jax.random.fold_in(steps[0][0], 1), begin)

        def at_place(at: Place) -> Array:
            # H is along the white axes L_0 of the block's beginning. Along those of now, L, it is
            # T'H T with L = L_0 T.
            turned = solve_triangular(begin.tril, at.tril, lower=True)
            return turned.T @ hessian @ turned

        def step(walk: Walk, now: tuple[Any, Array]) -> tuple[Walk, None]:
            key, share = now
            (slope, free), (of_records, seen) = local.free(walk.at), local.records(key, walk.at)
            # Two Hessians: that of the block is the metric of the mean's step; that of this step's
            # own draws, less their known error, moves the precision.
            here = slope + of_records, free + seen - local.off(key, at_place(walk.at))
            held = _held(walk, here)
            at, (slope, whole), trust = held.at, held.slope, held.trust
            metric = local.free(at)[1] + at_place(at)
            share = share * jnp.minimum(trust, 1.0)
            widest = factors.select(walk.begun, walk.begin, at)
            step, short = _step(slope, metric, at, share, widest, trust * FARTHEST)
            after = Place(at.loc - at.tril @ step, at.tril @ _narrowed(whole, share))
            return onwards(walk, held._replace(short=short), after, factors.is_finite(here)), None

        return jax.lax.scan(step, walk, steps)

    flat = jnp.zeros_like(first.loc), jnp.eye(len(first.loc), dtype=first.loc.dtype)
    return walked(first, flat, block, keys)


def walked(first: Any, flat: Any, block: Callable[..., Any], keys: Any) -> Any:
    """Where a step a key ends; NaN if no gradient was finite.

    ``block`` takes the steps to the next Hessian: a function of the walk, their keys and shares;
    ``flat`` is what a walk's slope is where the loss is flat.
    """
    # Blocks of one length, because they are scanned over: the longest one that divides the number
    # of steps. (Of 50 steps: five blocks of ten.)
    number = len(keys)
    each = max(n for n in range(1, _STEPS_A_HESSIAN + 1) if number % n == 0)
    shares = (_FALLS_AFTER / (_FALLS_AFTER + jnp.arange(1, number + 1))).reshape(-1, each)
    one, no = jnp.ones((), first.loc.dtype), jnp.zeros((), bool)
    start = Walk(first, first, flat, one, no, first, no)
    walk, _ = jax.lax.scan(block, start, (keys.reshape(shares.shape), shares))
    return factors.select(walk.begun, walk.at, jax.tree.map(lambda x: x * jnp.nan, first))


def onwards(walk: Walk, held: Walk, after: Any, finite: Array) -> Walk:
    """The walk after a step.

    ``held`` is what has held of the walk before it, ``after`` the place after it, and ``finite``
    whether the slope before it was finite.
    """
    good = factors.is_finite(after)
    begun = walk.begun | (finite & good)
    # As in local_solve.solve: one overflow costs a step, and not the visit.
    moved = held._replace(
        at=factors.select(good, after, held.at),
        begin=factors.select(walk.begun, walk.begin, held.at),
        begun=begun,
    )
    narrower = held.at.narrower()
    # At a slope that is not finite there is nothing to go back to.
    return factors.select(begun, moved, walk._replace(at=narrower, before=narrower))


def bent(slope: Callable[[Array], Array], at: Array, direction: Array) -> Array:
    """The derivative of a slope along a direction: a product of its symmetric Jacobian."""
    # Forwards, or backwards where the model has a function whose gradient was written by hand (an
    # ODE's solver), which JAX cannot push forwards.
    try:
        return jax.jvp(slope, (at,), (direction,))[1]
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
    (found,) = jax.vjp(slope, at)[1](direction)
    return found


def _held(walk: Walk, here: tuple[Array, Array]) -> Walk:
    """As :func:`numpyro_dppvi.methods.newton._held`, with slope and Hessian."""
    begin, end = walk.before, walk.at
    eye = jnp.eye(len(end.loc), dtype=end.loc.dtype)

    def along(here: Place, other: Place, slope: Array, hessian: Array) -> Array:
        # Along white axes a step L N of the Cholesky factor changes the loss by the trace of
        # (W - I)'(N - I). Widths are compared by their logarithms, as in newton.
        turned = solve_triangular(here.tril, other.tril, lower=True)
        widths = jnp.diag(jnp.log(jnp.diagonal(turned)) - jnp.diagonal(turned))
        away = solve_triangular(here.tril, other.loc - here.loc, lower=True)
        return slope @ away + jnp.sum((hessian - eye) * (turned + widths))

    return held(walk, here, -along(begin, end, *walk.slope), -along(end, begin, *here))


def held(walk: Walk, here: Any, fell: Array, rises: Array) -> Walk:
    """The walk if its last step held, else from before that step, with less trust.

    By the slope at the step's beginning the loss ``fell`` by so much; by ``here``, the slope at its
    end, it ``rises`` by so much.
    """
    holds = factors.is_finite(here) & (rises <= jnp.maximum(fell, 0) + _WORSE)
    at, slope = factors.select(holds, (walk.at, here), (walk.before, walk.slope))
    trust = trusted(walk.trust, holds, walk.short)
    return walk._replace(at=at, before=at, slope=slope, trust=trust)


def trusted(trust: Array, holds: Array, short: Array) -> Array:
    """The share of the next step that is trusted."""
    # q is narrow where a spread in the model is too small, and steps of its own standard deviations
    # would creep. One whose slopes at both ends say that it held may be followed by a longer one.
    longer = jnp.where(short, trust * _LONGER, jnp.clip(trust * _LONGER, None, 1.0))
    return jnp.where(holds, longer, jnp.minimum(trust, 1.0) * _SHORTER)


def _from_lower(matrix: Array) -> Array:
    """The symmetric matrix with this lower triangle."""
    return jnp.tril(matrix) + jnp.tril(matrix, -1).T


def definite(hessian: Array) -> tuple[Array, Array]:
    """Eigenvalues, made positive, and eigenvectors of a Hessian in q's standard deviations."""
    # Likelihoods with kinks have a precision that their second derivatives do not show: in q's
    # units it is 1 once q has it.
    found = hessian + jnp.diag(jnp.maximum(0.5 - jnp.diagonal(hessian), 0))
    values, vectors = jnp.linalg.eigh(found)
    # A saddle is left along its negative directions as fast as a hill is climbed (|A|).
    least = len(hessian) * float(np.finfo(hessian.dtype).eps) * jnp.max(jnp.abs(values))
    return jnp.maximum(jnp.abs(values), least), vectors


def _step(
    slope: Array, hessian: Array, at: Place, share: Array, first: Place, farthest: Array | float
) -> tuple[Array, Array]:
    """A share of the Newton step along white axes, or what is trusted; and if that is less."""
    values, vectors = definite(hessian)
    across = vectors.T @ slope
    whole = vectors @ (across / values)
    # As newton._step: the step's length in standard deviations by the Hessian, and by q at the
    # beginning of the visit.
    by_hessian = jnp.linalg.norm(across / jnp.sqrt(values))
    by_q = jnp.linalg.norm(solve_triangular(first.tril, at.tril @ whole, lower=True))
    most = farthest / jnp.minimum(by_hessian, by_q)
    return whole * jnp.minimum(share, most), most < share


def _narrowed(hessian: Array, share: Array) -> Array:
    """The Cholesky factor of the covariance along white axes after a share of the step."""
    values, vectors = jnp.linalg.eigh(hessian)
    # q's precision is I along these axes, and the goal is the Hessian W of the whole loss: a share
    # of the way is (1 - share) I + share W, within the limits of newton._narrowed.
    moved = jnp.clip(1 + share * (values - 1), 0.8, 50.0)
    return cholesky_of_inverse((vectors * moved) @ vectors.T)
