"""Moments of a posterior whose prior is a hierarchy: normal, once a few latents are given.

The prior of groups' effects is normal given their mean and spread, but not together with these. A
projection (the normal q of least KL(q || posterior)) claims to know the logarithm of a spread of G
groups up to (2 G)^(-1/2), whatever records say, because q's effects must suit all spreads at once.
Where effects are known no better than their spread, as in noise, the true posterior is many times
as wide.

But the effects can be integrated out. Given the few others s, the effects n have the log density

    r(n, s) + log c(n, s) = const(s) + b(s)'(n - m) - (n - m)' A(s) (n - m) / 2,

with c the rest of the posterior, a normal factor. So log p(s) = const + b'A^-1 b / 2 - log|A| / 2,
and the moments of n given s are those of a normal distribution. Of s, importance sampling takes
them, at places that follow what was found (adaptive importance sampling, Bugallo and others 2017).
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.scipy.linalg import cho_solve
from scipy.stats import norm, qmc

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi.families import FullNormal, MeanField, precision
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.guides import prior_factor
from numpyro_dppvi.latents import LatentSpace, programs
from numpyro_dppvi.latents.reasons import WRONG_NUMBER_ERRORS

_MOST = 4  # latents' entries of which places are taken, at most
_PLACES, _LAST, _TURNS = 64, 128, 4  # how many in a turn; in the last one, for no other; turns
_WIDER = 3.0  # half of the places are so many times as far from the middle
_KEPT = 0.25  # of a turn's variance in the next one's, so that places do not fall on one another
# Whether a number is finite, as densities ask, is the same at all places but single ones.
_CONSTANT = {"eq", "ne", "is_finite"}
_PIECEWISE = {
    *("abs", "sign", "max", "min", "clamp", "floor", "ceil", "round", "rem", "sort", "argsort"),
    *("lt", "le", "gt", "ge", "cond"),
}
_REACH = 4.0  # beyond so many squared deviations an entry, places do not count for the effects


class Split(NamedTuple):
    """Entries of a joint normal's vector: those that are normal once the others are given."""

    normal: np.ndarray
    others: np.ndarray


def matched(
    space: LatentSpace, family: MeanField, rest: frozenset[str], cavity: Natural, q: Natural
) -> Natural | None:
    """The normal with a factor's moments under some latents' priors; ``None`` for other models.

    These are the priors of ``rest``, and ``family`` is over the latents that they depend on. The
    factor is ``cavity``; ``q`` is about where to look first.
    """
    parts = split(space, family, rest)
    if parts is None:
        return None
    ((member, _),) = family.members

    def density(vector: Array) -> Array:
        return _log_prior(space, rest, family.by_latent({member: vector}))

    return Natural({member: moments(density, parts, cavity[member], q[member])})


def applies(space: LatentSpace, family: MeanField) -> bool:
    """Whether :func:`matched` has a factor for the model's own priors."""
    rest = prior_factor(family, space).rest
    return bool(rest) and split(space, family.within(space.seen_by(rest)), rest) is not None


@functools.lru_cache(maxsize=32)
def split(space: LatentSpace, family: MeanField, rest: frozenset[str]) -> Split | None:
    """Which latents are normal once a few others are given; ``None`` if there are no such.

    Read off the program of the second derivatives, which must not depend on them.

    ``family`` is over the latents that the priors of ``rest`` depend on, and has none of ``rest``.
    """
    if len(family.members) != 1 or not isinstance(family.members[0][1], FullNormal):
        return None
    ((member, joint),) = family.members
    places = np.arange(joint.size)
    found = family.by_latent({member: places[None]})  # type: ignore[dict-item]
    entries = {name: each[0] for name, each in found.items()}
    normal: list[str] = []
    # In 64 bits, as these densities are computed later: where effects all but equal their mean, 32
    # leave no precision of what they have in common. Not every model runs in them.
    with precision.program(np.dtype(np.float64)), contextlib.suppress(*WRONG_NUMBER_ERRORS):
        # The largest first: if two latents are not normal together, the larger one is.
        for name in sorted(entries, key=lambda name: (-np.size(entries[name]), name)):
            if _is_normal(space, rest, entries, [*normal, name]):
                normal.append(name)
    mine = np.sort(np.concatenate([np.zeros(0, int), *(np.ravel(entries[n]) for n in normal)]))
    # As wide as JAX's indices are in any precision.
    mine, others = mine.astype(np.int32), np.setdiff1d(places, mine).astype(np.int32)
    return Split(mine, others) if 0 < len(others) <= _MOST and len(mine) else None


def _log_prior(space: LatentSpace, rest: frozenset[str], base: Mapping[str, Array]) -> Array:
    # The model is run with any value of the latents that these priors do not depend on.
    zeros = {latent.name: jnp.zeros(latent.base_shape) for latent in space.latents}
    return space.log_prior({**zeros, **base}, rest)


def _is_normal(
    space: LatentSpace,
    rest: frozenset[str],
    entries: Mapping[str, Any],
    names: Sequence[str],
) -> bool:
    """Whether the second derivatives by some latents depend on none of these."""

    def derivatives(some: Mapping[str, Array], others: Mapping[str, Array]) -> list[list[Array]]:
        def density(some: Mapping[str, Array]) -> Array:
            return _log_prior(space, rest, {**others, **some})

        return [jax.tree.leaves(jax.hessian(density)(some)), [*jax.grad(density)(some).values()]]

    dtype = jnp.result_type(float)
    structs = {n: jax.ShapeDtypeStruct(np.shape(each), dtype) for n, each in entries.items()}
    some = {name: structs.pop(name) for name in names}
    program = programs.traced(derivatives, some, structs, branches=True)  # type: ignore[arg-type]
    if program is None:
        return False
    knowing = set(program.jaxpr.invars[: len(some)])
    wanted = [v for v in program.jaxpr.outvars if not isinstance(v, Literal)]
    needed = {id(e) for v in wanted for e in programs.needed(program, program.jaxpr.invars, v)}
    for eqn in program.jaxpr.eqns:
        if eqn.primitive.name in _CONSTANT:
            continue
        if any(programs.among(v, knowing) for v in eqn.invars):
            # Of slopes that jump, the second derivative does not know.
            if eqn.primitive.name in _PIECEWISE and id(eqn) in needed:
                return False
            knowing.update(eqn.outvars)
    return not any(programs.among(v, knowing) for v in program.jaxpr.outvars[: len(some) ** 2])


class _Given(NamedTuple):
    """The posterior given the others, one row a place.

    ``log_density`` is of the place, but for a constant; ``mean`` is of the entries that are normal
    then, and ``tril`` is the root of their precision, by Cholesky.
    """

    log_density: Array
    mean: Array
    tril: Array


@precision.in_own_precision
def moments(
    density: Callable[[Array], Array],
    parts: Split,
    cavity: NormalNatural,
    start: NormalNatural,
) -> NormalNatural:
    """The normal distribution with the moments of ``exp(density)`` times a normal factor.

    ``cavity`` is this factor, and ``start`` is about where to look first.
    """
    normal, others = parts
    linear, square = cavity.linear, -2 * unpack(cavity.quadratic)
    begin = -2 * unpack(start.quadratic)
    covariance = jnp.linalg.inv(begin)
    middle = covariance @ start.linear

    def given(places: Array) -> _Given:
        def at(place: Array) -> tuple[Array, Array, Array]:
            def of(some: Array) -> Array:
                return density(middle.at[others].set(place).at[normal].set(some))

            here = middle[normal]
            return of(here), jax.grad(of)(here), -jax.hessian(of)(here)

        # Priors that take roots of matrices take them one place after another: jaxlib 0.10 shares a
        # batch of matrices among a processor's threads and waits for them on one of these, and two
        # batches at once wait for ever where there are two threads (0.11.2 no longer does).
        one_by_one = programs.solves(at, places[0])
        value, slope, curve = jax.lax.map(at, places) if one_by_one else jax.vmap(at)(places)
        vectors = jnp.broadcast_to(middle, (len(places), middle.size)).at[:, others].set(places)
        tril = jnp.linalg.cholesky(curve + square[normal][:, normal])
        slope = slope + (linear - vectors @ square)[:, normal]
        way = jax.vmap(lambda tril, slope: cho_solve((tril, True), slope))(tril, slope)
        diagonals = jnp.diagonal(tril, axis1=1, axis2=2)
        log_density = (
            value
            + vectors @ linear
            - jnp.sum(vectors @ square * vectors, axis=1) / 2
            + jnp.sum(slope * way, axis=1) / 2
            - jnp.sum(jnp.log(diagonals), axis=1)
        )
        # Where rounding leaves no precision even so, places do not count.
        good = jnp.isfinite(log_density)
        return _Given(
            jnp.where(good, log_density, -jnp.inf),
            middle[normal] + jnp.where(good[:, None], way, 0),
            jnp.where(good[:, None, None], tril, jnp.eye(len(normal), dtype=tril.dtype)),
        )

    def turn(number: int, about: tuple[Array, Array]) -> tuple[Array, Array]:
        places, log_chance = _places(*about, number=_PLACES)
        weights = jax.nn.softmax(given(places).log_density - log_chance)
        mean = weights @ places
        spread = jnp.einsum("k,ki,kj", weights, places - mean, places - mean)
        found = mean, spread + _KEPT * about[1]
        good = jnp.all(jnp.isfinite(found[1])) & jnp.all(jnp.isfinite(mean))
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), found, about)

    first = middle[others], covariance[others][:, others]
    about = jax.lax.fori_loop(0, _TURNS, turn, first)
    places, log_chance = _places(*about, number=_LAST * 2 ** len(others))
    each = given(places)
    weights = jax.nn.softmax(each.log_density - log_chance)
    mean = jnp.zeros_like(middle).at[others].set(weights @ places)
    away = places - mean[others]
    spread = jnp.einsum("k,ki,kj", weights, away, away)
    # A spread's prior may have tails as heavy as a Cauchy's, under which effects have no variance.
    far = jnp.sum(away * jnp.linalg.solve(spread, away.T).T, axis=1)
    weights = jnp.where(far < _REACH * len(others), weights, 0)
    weights = weights / jnp.sum(weights)
    eye = jnp.eye(len(normal), dtype=linear.dtype)
    own_cov = jax.vmap(lambda tril: cho_solve((tril, True), eye))(each.tril)
    mean = mean.at[normal].set(weights @ each.mean)
    beside, away = each.mean - mean[normal], places - weights @ places
    own_cov = jnp.einsum("k,kij", weights, own_cov) + (weights * beside.T) @ beside
    across = (weights * beside.T) @ away
    total = jnp.zeros_like(square).at[np.ix_(normal, normal)].set(own_cov)
    total = total.at[np.ix_(others, others)].set(spread)
    total = total.at[np.ix_(normal, others)].set(across).at[np.ix_(others, normal)].set(across.T)
    # In its own coordinates q's precision is the identity. A hierarchy tells something, or nothing:
    # it does not take away what the factor knows.
    root = jnp.linalg.cholesky(total)
    values, turned = jnp.linalg.eigh(root.T @ square @ root)
    back = jnp.linalg.inv(root).T @ turned
    found = (back * jnp.maximum(values, 1)) @ back.T
    return NormalNatural(found @ mean, pack(-found / 2))


def _places(mean: Array, covariance: Array, *, number: int) -> tuple[Array, Array]:
    """Places about a mean, and their log densities but for a constant, a row each.

    Half of them are drawn from a wider distribution, and both fill space evenly (Sobol's sequence).
    """
    size = mean.size
    even = qmc.Sobol(size + 1, seed=0).random(number)
    white = norm.ppf(even[:, 1:]) * np.where(even[:, :1] < 0.5, 1, _WIDER)
    squared = np.sum(white**2, axis=1)
    narrow, far = -squared / 2, -squared / (2 * _WIDER**2) - size * np.log(_WIDER)
    root = jnp.linalg.cholesky(covariance)
    places = mean + jnp.asarray(white, mean.dtype) @ root.T
    return places, jnp.asarray(np.logaddexp(narrow, far), mean.dtype)
