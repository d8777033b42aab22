"""Puts effects together again that a model draws apart from their mean and scale.

``mu + tau * z`` with z ~ Normal(0, 1), as ``LocScaleReparam`` writes it, is an effect
a ~ Normal(mu, tau); ``mu + z @ L.T`` is one, too, whose entries are correlated. Samplers do better
with it written so, and a joint normal q does worse: records tell of a, which in z, mu and log tau
is a ridge that bends. In a, mu and log tau, records enter a alone, and the rest is the prior's. As
with ``latents.predictor``, users declare nothing: it is read off the traced program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from numpyro_dppvi._typing import Array, PRNGKey, PyTree
from numpyro_dppvi.families import precision
from numpyro_dppvi.families.reading import elementary, one_of
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.additive import made_up
from numpyro_dppvi.latents.affine import Effect, solved
from numpyro_dppvi.latents.reasons import WRONG_NUMBER_ERRORS
from numpyro_dppvi.latents.space import LatentSpace, fingerprinted, several

# At so many made-up values it must add up, up to rounding.
_TRIES, _ROUNDING = 5, 1e-3
# Scales are positive, and no entry's is so much smaller than another's. Those of a smooth curve's
# short waves are: the prior knows that they are nothing.
_LEAST = 1e-4

_MOST_MIXED = 8  # entries in a group

_LAYOUT = {
    *("gather", "dynamic_slice", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"),
    *("slice", "transpose", "copy"),
}
_AFFINE = {"mul", "div", "add", "add_any", "sub", "neg", "dot_general", "transpose"}


class _Path(NamedTuple):
    """How all that depends on a latent z does so: through ``effect = mean + scale * seen``.

    Attributes:
        seen: Entries of z, laid out as a record sees them.
        effect: What becomes of them.
        of_scale: The variables that make the scale.
        operands: Those that make the scale or the mean.
        axis: The axis along which entries are mixed, from the end; ``None`` if there is none.
    """

    seen: Var
    effect: Var
    of_scale: frozenset[Any]
    operands: frozenset[Any]
    axis: int | None


@functools.lru_cache(maxsize=32)
def recentred(space: LatentSpace) -> LatentSpace:
    """The same model with its effects in the places of latents that it draws apart from them.

    Args:
        space: A model's latent space.

    Returns:
        A space whose ``effects`` names these latents, and whose ``apart`` gives them back; or
        ``space`` itself, where there are none.
    """
    # Factors may have 64 bits where this is asked.
    with precision.program(space.precision):
        above = frozenset().union(*space.parents.values(), *space.pseudo_observations.values())
        normal = space.facts(
            lambda trace: {n for n in space.structs if one_of(trace[n]["fn"], dist.Normal)}
        )
        free = {lt.name for lt in space.latents if not elementary([lt.transform])} - above
        program, paths = _read(space, False)
        parents = {
            name: _latents_of(program, space, path.operands)
            for name, path in paths.items()
            if name in free & normal and _latents_of(program, space, path.of_scale)
        }
        # Of a product of two, neither is the other's scale.
        parents = {n: p for n, p in parents.items() if n not in _all_above(n, parents)}
        if not _adds_up(_with_effects(space, parents)):
            parents = {n: p for n, p in parents.items() if _adds_up(_with_effects(space, {n: p}))}
        return fingerprinted(_with_effects(space, parents)) if parents else space


def _with_effects(space: LatentSpace, parents: Mapping[str, frozenset[str]]) -> LatentSpace:
    paths = _read(space, False)[1]
    # Where one effect is another's mean, the mean comes first.
    order = sorted(parents, key=lambda name: len(_all_above(name, parents)))
    effects = {
        name: Effect(functools.partial(_mean_and_scale, space, name), paths[name].axis)
        for name in order
    }

    def written(theta: Mapping[str, Array]) -> dict[str, Array]:
        return found.apart(theta)[0]

    def log_likelihood_of(
        theta: Mapping[str, Array], row: Mapping[str, Array], outcomes: Mapping[str, Array]
    ) -> Array:
        return _through(space.log_likelihood_of, frozenset(parents), written, theta, row, outcomes)

    def draw(
        theta: Mapping[str, Array], row: Mapping[str, Array], rng_key: PRNGKey
    ) -> dict[str, Array]:
        return space.draw(written(theta), row, rng_key)

    def log_density(theta: Mapping[str, Array], names: frozenset[str]) -> Array:
        # p(a) = p(z) / scale, with z = (a - mean) / scale.
        values, log_scales = found.apart(theta)
        mine = (one for name, one in log_scales.items() if name in names)
        return space.log_density(values, names) - sum(mine, start=jnp.zeros(()))

    found = replace(
        space,
        latents=tuple(
            replace(lt, prior=None) if lt.name in parents else lt for lt in space.latents
        ),
        log_likelihood_of=log_likelihood_of,
        draw=draw,
        log_density=log_density,
        parents={name: own | parents.get(name, frozenset()) for name, own in space.parents.items()},
        effects=effects,
        as_written=space,
    )
    return found


@functools.lru_cache(maxsize=64)
def _read(space: LatentSpace, wide: bool) -> tuple[ClosedJaxpr | None, dict[str, _Path]]:
    """The program of a record's density and the paths in it, with 64 bits if ``wide``."""
    dtype = np.dtype(np.float64) if wide else space.precision
    structs = {
        name: jax.ShapeDtypeStruct(s.shape, dtype if s.dtype == space.precision else s.dtype)
        for name, s in space.structs.items()
    }
    with precision.program(dtype):
        program = programs.traced(space.log_likelihood, structs, dict(space.row))
    return program, {} if program is None else _paths(program, sorted(structs))


def _paths(program: ClosedJaxpr, names: Sequence[str]) -> dict[str, _Path]:
    """By latent, for those that enter as effects."""
    inputs, (density,) = program.jaxpr.invars, program.jaxpr.outvars
    if isinstance(density, Literal):
        return {}
    of_records = programs.dependent(program, inputs[len(names) :])
    of_latents = programs.dependent(program, inputs[: len(names)])
    uses: dict[Any, list[JaxprEqn]] = {density: []}
    for eqn in programs.needed(program, inputs, density):
        for var in eqn.invars:
            if not isinstance(var, Literal):
                uses.setdefault(var, []).append(eqn)
    paths = {}
    for name, seen in zip(names, inputs, strict=False):
        while (step := _next(uses, seen, _LAYOUT)) is not None:
            # Where it goes may depend on the record, and on no latent.
            if step.invars[0] is not seen or of_latents & _variables(step.invars[1:]):
                break
            seen = step.outvars[0]  # noqa: PLW2901
        paths[name] = _affine(uses, seen, of_records)
    return paths


def _affine(uses: Mapping[Any, list[JaxprEqn]], seen: Var, of_records: set[Any]) -> _Path:
    """What the model makes of a latent as long as it is ``mean + scale * seen``."""
    now, path = seen, _Path(seen, seen, frozenset(), frozenset(), None)
    of_scale, operands, axis = set(), set(), None
    # Which axis of ``seen`` is where: an effect has them in the same order.
    axes = tuple(range(len(programs.shape_of(seen))))
    while (step := _next(uses, now, _AFFINE)) is not None:
        others, kind = _variables(step.invars) - {now}, step.primitive.name
        if others & of_records or (kind == "div" and step.invars[0] is not now):
            break
        if kind == "transpose":
            axes = tuple(axes[n] for n in step.params["permutation"])
        elif kind == "dot_general":
            mixed = _mixed(step, now)
            if mixed is None or axis not in (None, axes[mixed]):
                break
            axis, rest = axes[mixed], axes[:mixed] + axes[mixed + 1 :]
            axes = (*rest, axis) if step.invars[0] is now else (axis, *rest)
        elif programs.shape_of(step.outvars[0]) != programs.shape_of(now):
            break
        operands |= others
        of_scale |= others if kind in ("mul", "div", "dot_general") else set()
        now = step.outvars[0]
        if axes == tuple(range(len(axes))):
            place = None if axis is None else axis - len(axes)
            path = _Path(seen, now, frozenset(of_scale), frozenset(operands), place)
    return path


def _mixed(step: JaxprEqn, variable: Var) -> int | None:
    """The axis of a variable that a product with a square matrix mixes."""
    contracted, batch = step.params["dimension_numbers"]
    mine, other = (0, 1) if step.invars[0] is variable else (1, 0)
    shape = programs.shape_of(step.invars[other])
    if any(batch[0]) or len(contracted[0]) != 1 or len(shape) != 2 or shape[0] != shape[1]:
        return None
    if shape[0] > _MOST_MIXED:
        return None
    return int(contracted[mine][0])


def _next(uses: Mapping[Any, list[JaxprEqn]], variable: Var, kinds: Set[str]) -> JaxprEqn | None:
    """The operation that uses a variable, if there is just one, once, and of some kinds."""
    found = uses.get(variable, [])
    return found[0] if len(found) == 1 and found[0].primitive.name in kinds else None


def _variables(values: Sequence[Any]) -> set[Any]:
    return {value for value in values if not isinstance(value, Literal)}


def _latents_of(
    program: ClosedJaxpr | None, space: LatentSpace, variables: frozenset[Any]
) -> frozenset[str]:
    """The latents that some variables depend on."""
    if program is None:
        return frozenset()
    pairs = zip(sorted(space.structs), program.jaxpr.invars, strict=False)
    return frozenset(n for n, v in pairs if variables & programs.dependent(program, [v]))


def _all_above(name: str, parents: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The effects that an effect's mean and scale depend on, and those that these do."""
    found: frozenset[str] = frozenset()
    more = parents[name] & parents.keys()
    while more - found:
        found |= more
        more = frozenset().union(*(parents[one] & parents.keys() for one in more))
    return found


def _mean_and_scale(
    space: LatentSpace, name: str, values: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Of one effect, given the other latents as they are written: see ``Effect``."""
    wide = any(jnp.result_type(x) == np.float64 for x in values.values())
    program, paths = _read(space, wide)
    if program is None:  # which was asked in the precision of the model
        raise RuntimeError(f"the program of {name!r} has loops in this precision")
    path, shape = paths[name], space.structs[name].shape
    pairs = zip(sorted(space.structs), program.jaxpr.invars, strict=False)
    others = {var: values[other] for other, var in pairs if var is not path.seen}
    run = programs.part(program, [*others, path.seen], path.effect)
    zeros = jnp.zeros(programs.shape_of(path.seen), jnp.result_type(float))
    at_zero = functools.partial(run, *others.values())
    # Affine in z: the value at 0, and the slope.
    if path.axis is None:
        (mean,), (scale,) = jax.jvp(at_zero, [zeros], [jnp.ones_like(zeros)])
        return _laid_out(mean, shape), _laid_out(scale, shape)
    axis, size = path.axis, shape[path.axis]
    (mean,), slope = jax.linearize(at_zero, zeros)
    # Only entries along the axis are mixed, so that those of all others are found at once.
    along = [size if n == axis else 1 for n in range(-zeros.ndim, 0)]
    units = jnp.broadcast_to(jnp.eye(size).reshape(size, *along), (size, *zeros.shape))
    columns = jnp.moveaxis(jax.vmap(lambda unit: slope(unit)[0])(units), axis, -1)
    matrices = jnp.moveaxis(columns, 0, -1)
    wanted = (*np.delete(shape, axis), size, size)
    return _laid_out(mean, shape), _laid_out(matrices, wanted)


def _laid_out(each: Array, shape: tuple[int, ...]) -> Array:
    """For all of a latent's entries, from those that one record sees: all others are alike."""
    if each.shape == shape:
        return each
    own = [
        size for n, size in enumerate(each.shape) if any(size != 1 for size in each.shape[: n + 1])
    ]
    return jnp.broadcast_to(each.reshape(own), shape)


def _through(
    function: Callable[..., Array],
    names: frozenset[str],
    written: Callable[[Mapping[str, Array]], dict[str, Array]],
    theta: Mapping[str, Array],
    *rest: PyTree,
) -> Array:
    """A density with effects in the places of some latents, which are never taken apart."""
    leaves, tree = jax.tree.flatten((dict(theta), *rest))
    found = _program(function, tree, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))
    paths = {} if found is None else _paths(found, sorted(theta))
    if found is None or not all(n in paths and paths[n].of_scale for n in names):
        return function(written(theta), *rest)
    inputs, (density,) = found.jaxpr.invars, found.jaxpr.outvars
    seen = [
        programs.part(found, inputs, paths[name].seen)(*leaves)[0]
        if paths[name].seen not in inputs
        else theta[name]
        for name in sorted(names)
    ]
    effects = [paths[name].effect for name in sorted(names)]
    return programs.part(found, [*inputs, *effects], density)(*leaves, *seen)[0]


@functools.lru_cache(maxsize=64)
def _program(
    function: Callable[..., Array], tree: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...]
) -> ClosedJaxpr | None:
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]
    return programs.traced(function, *jax.tree.unflatten(tree, structs))


def _adds_up(space: LatentSpace) -> bool:
    """Whether scales are of one order, and densities with effects are those that are written."""
    if not space.effects:
        return True
    rng, plain = np.random.default_rng(0), space.plain
    base = {
        lt.name: jnp.asarray(rng.normal(size=(_TRIES, *lt.base_shape)), plain.precision)
        for lt in space.latents
        if not lt.is_discrete
    }
    discrete = {
        lt.name: jnp.zeros((_TRIES, *lt.shape), lt.dtype) for lt in space.latents if lt.is_discrete
    }
    rows = {name: made_up(rng, s) for name, s in several(space.row, _TRIES).items()}

    @jax.vmap
    def both(
        base: Mapping[str, Array], discrete: Mapping[str, Array], row: Mapping[str, Array]
    ) -> tuple[Array, Array, Array]:
        theta = {**space.constrain(base), **discrete}
        values, _ = space.apart(theta)
        alike = jnp.stack([_alike(effect, values) for effect in space.effects.values()])
        return alike, space.log_likelihood(theta, row), plain.log_likelihood(values, row)

    try:
        alike, mine, theirs = map(np.asarray, jax.jit(both)(base, discrete, rows))
    except WRONG_NUMBER_ERRORS:  # entries that are not alike
        return False
    good = np.isfinite(theirs)
    near = np.isclose(mine, theirs, rtol=_ROUNDING, atol=_ROUNDING)
    return bool(alike.all() and good.any() and near[good].all())


def _alike(effect: Effect, values: Mapping[str, Array]) -> Array:
    """Whether a scale is positive, and everywhere of one order."""
    _, scale = effect.mean_and_scale(values)
    if effect.axis is not None:
        scale = solved(scale, scale[..., 0])[1]
    return jnp.min(scale) > _LEAST * jnp.max(scale)
