"""Where a record's likelihood looks something up at a place that the record names.

JAX takes the nearest place for one that is not there, and counts negative ones from the end. So
groups that are numbered from 1, or a group of -1 for none, would be other groups without a word.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from numpyro_dppvi._typing import Array
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.space import LatentSpace

_MOST = 16  # lookups


class Lookup(NamedTuple):
    """One lookup of a program."""

    equation: int
    """Its place among the program's."""
    arguments: tuple[str, ...]
    """The arguments of the model that name its places."""
    sizes: tuple[int, ...]
    """How many places there are, along each axis that has several."""


class Lookups(NamedTuple):
    """A likelihood's program and its lookups."""

    program: ClosedJaxpr
    found: tuple[Lookup, ...]

    def outside(self, theta: Mapping[str, Array], row: Mapping[str, Array]) -> tuple[Array, ...]:
        """Whether the likelihood of a record rests on a place that is not there, by lookup.

        It may look there and then leave out what it finds, as by ``jnp.where(g >= 0, a[g], 0)``.
        What is true of a lookup is true of those before it, too: the last one is to blame.
        """
        values = jax.tree.leaves((theta, row))
        given = [
            jnp.asarray(value, var.aval.dtype)
            for value, var in zip(values, self.program.jaxpr.invars, strict=True)
        ]

        def rests(lookups: Sequence[Lookup]) -> Array:
            one, other = (_result(self.program, lookups, given, fill) for fill in (0, 1))
            return (one != other) & ~(jnp.isnan(one) & jnp.isnan(other))

        # A lookup among whole numbers may name the place of a later one.
        return tuple(rests(self.found[first:]) for first in range(len(self.found)))


@functools.lru_cache(maxsize=32)
def lookups(space: LatentSpace) -> Lookups | None:
    """The lookups at places that records name; ``None`` without any, or where it cannot be told."""
    row = dict(space.row)
    program = programs.traced(space.log_likelihood, space.structs, row, branches=True)
    if program is None:
        return None
    names = sorted(row)
    theirs = dict(zip(program.jaxpr.invars[len(space.structs) :], names, strict=True))
    follow = {name: programs.dependent(program, [var]) for var, name in theirs.items()}
    found = []
    for number, eqn in enumerate(program.jaxpr.eqns):
        if eqn.primitive.name not in _RULES:
            continue
        by = tuple(
            name for name in names if any(programs.among(v, follow[name]) for v in eqn.invars[1:])
        )
        shape = programs.shape_of(eqn.invars[0])
        sizes = zip(shape, eqn.params["slice_sizes"], strict=True)
        several = tuple(size for size, taken in sizes if taken < size)
        if by and several:
            found.append(Lookup(number, by, several))
    # Each is tried by itself.
    return Lookups(program, tuple(found)) if 0 < len(found) <= _MOST else None


def _result(
    program: ClosedJaxpr, lookups: Sequence[Lookup], given: list[Array], fill: int
) -> Array:
    """The program's result, with one of two values for what lookups find where nothing is."""
    jaxpr = program.jaxpr
    made = {var: each for each in jaxpr.eqns for var in each.outvars}
    plain = jaxpr.replace(eqns=[_without_wrapping(each, made) for each in jaxpr.eqns])
    before, known = ClosedJaxpr(plain, program.consts), dict(zip(jaxpr.invars, given, strict=True))

    def value(program: ClosedJaxpr, var: Any) -> Array:
        return programs.part(program, list(known), var)(*known.values())[0]

    for each in lookups:
        eqn = jaxpr.eqns[each.equation]
        ins = [value(before, v) if isinstance(v, Var) else v.val for v in eqn.invars]
        known[eqn.outvars[0]] = _RULES[eqn.primitive.name](eqn, ins, fill)
    return value(program, jaxpr.outvars[0])


def _without_wrapping(eqn: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> JaxprEqn:
    """An operation ``i < 0 ? i + size : i``, as NumPy counts places, as i; others as they are."""
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return eqn
    below, index, other = eqn.invars
    asked, moved = (made[v] if isinstance(v, Var) and v in made else None for v in (below, other))
    wraps = (
        np.issubdtype(index.aval.dtype, np.integer)  # type: ignore[attr-defined]
        and asked is not None
        and asked.primitive.name == "lt"
        and moved is not None
        and moved.primitive.name == "add"
        and moved.invars[0] is index
    )
    return eqn.replace(invars=[below, index, index]) if wraps else eqn


def _filled(kind: Any, fill: int) -> Any:
    """One of two values: in the range of most parameters, and no place of any lookup."""
    if jnp.issubdtype(kind, jnp.inexact):
        return (0.37, 0.61)[fill]
    return np.iinfo(kind).max - fill if jnp.issubdtype(kind, jnp.integer) else bool(fill)


def _gathered(eqn: JaxprEqn, ins: list[Any], fill: int) -> Array:
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    value = _filled(ins[0].dtype, fill)
    return eqn.primitive.bind(*ins, **{**eqn.params, "mode": mode, "fill_value": value})


def _sliced(eqn: JaxprEqn, ins: list[Any], fill: int) -> Array:
    whole, *starts = ins
    room = [size - some for size, some in zip(whole.shape, eqn.params["slice_sizes"], strict=True)]
    there = [(start >= 0) & (start <= most) for start, most in zip(starts, room, strict=True)]
    found = eqn.primitive.bind(*ins, **eqn.params)
    return jnp.where(
        jnp.all(jnp.stack(there)), found, jnp.asarray(_filled(found.dtype, fill), found.dtype)
    )


_RULES: dict[str, Callable[[JaxprEqn, list[Any], int], Array]] = {
    "gather": _gathered,
    "dynamic_slice": _sliced,
}
