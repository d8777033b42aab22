"""Finds directions of the latents along which no record's density changes, whatever the record.

Where an intercept rises by as much as all groups' effects fall, every record's density stays what
it is: no record tells these apart, only the prior does. So it is where the logits of all classes
rise alike. As with ``latents.predictor``, users declare nothing: it is read off the traced program.
A direction v is followed through additions, through products with columns, whatever these hold, and
through lookups of a record's group, whatever group that is. Where it meets anything else, it must
have vanished: each of its entries there is a linear function of v, and where all of these are zero
the density is the same along v.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.predictor import LogLikelihood
from numpyro_dppvi.latents.programs import shape_of

# An array as a function of v: one coefficient for each entry of v on a last axis.
Linear: TypeAlias = np.ndarray

# A sum of such terms, each times a number of the record: a column's, or one.
Terms: TypeAlias = dict[Any, Linear]

_ONE = "one"
_MOST_TERMS = 500_000  # numbers in all; beyond so many, what enters a product must have vanished
_ROUNDING = 1e-5


def unseen_directions(
    log_likelihood: LogLikelihood, base: Mapping[str, Any], row: PyTree
) -> np.ndarray:
    """Directions along which the density of no record changes.

    A basis of those that were found, shape ``(d, m)``, of the entries of all latents in the order
    of their names.
    """
    num_entries, program, units = programs.entries(log_likelihood, base, row)
    vanishing = None if program is None else _vanishing(program, num_entries, units)
    return np.zeros((num_entries, 0)) if vanishing is None else _null_space(vanishing)


def _vanishing(
    program: ClosedJaxpr, num_entries: int, units: Mapping[Any, Linear]
) -> Linear | None:
    """All that must vanish along a direction, or else the density changes; ``None`` if too much."""
    followed: dict[Any, Terms] = {var: {_ONE: unit} for var, unit in units.items()}
    rows: list[Linear] = []
    total = 0
    (density,) = program.jaxpr.outvars
    if isinstance(density, Literal):  # no latent enters
        return np.zeros((0, num_entries))
    names: dict[Any, Any] = {}
    for eqn in programs.needed(program, program.jaxpr.invars, density):
        ins = [{} if isinstance(v, Literal) else followed.get(v, {}) for v in eqn.invars]
        (out,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if not any(ins):
            # Two columns are one if they are computed alike.
            given = tuple(_name(v, names) for v in eqn.invars)
            names[out] = eqn.primitive.name, str(eqn.params), given
            continue
        # A density that is finite stays so.
        if eqn.primitive.name == "is_finite":
            names[out] = "finite", eqn.invars[0]
            continue
        found = _terms(eqn, ins, names)
        if found is None:
            must = [one for terms in ins for one in terms.values()]
        else:
            followed[out], must = found
        rows += [one.reshape(-1, num_entries) for one in must]
        total += sum(one.size for one in must)
        if total > programs.MOST:  # of all that must vanish, as of one array
            return None
    if density in followed:
        rows += [one.reshape(-1, num_entries) for one in followed[density].values()]
    return np.concatenate(rows) if rows else np.zeros((0, num_entries))


def _name(var: Any, names: Mapping[Any, Any]) -> Any:
    return repr(var) if isinstance(var, Literal) else names.get(var, var)


def _terms(
    eqn: JaxprEqn, ins: list[Terms], names: Mapping[Any, Any]
) -> tuple[Terms, list[Linear]] | None:
    """What an operation makes of sums of terms, and what must vanish for that to be true."""
    if eqn.primitive.name in ("mul", "dot_general"):
        found = _by_columns(eqn, ins, names)
        if found is not None:
            return found, []
    if eqn.primitive.name == "select_n" and len(ins) == 3:
        # What is finite is chosen, whatever is written for when it is not.
        is_finite = names.get(eqn.invars[0]) == ("finite", eqn.invars[2])
        return (ins[2], []) if is_finite else None
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        return None
    out: Terms = {}
    vanish: list[Linear] = []
    for column in dict.fromkeys(column for terms in ins for column in terms):
        each = rule(eqn, [terms.get(column) for terms in ins])
        if each is None:
            return None
        out[column] = each[0]
        vanish += each[1]
    return out, vanish


def _by_columns(eqn: JaxprEqn, ins: list[Terms], names: Mapping[Any, Any]) -> Terms | None:
    """A product with what depends on the record: a term for each of its numbers."""
    # Not of products of products, nor with several numbers for one entry.
    place = 0 if ins[0] else 1
    terms, other = ins[place], eqn.invars[1 - place]
    if ins[1 - place] or list(terms) != [_ONE] or isinstance(other, Literal):
        return None
    one, shape = terms[_ONE], shape_of(other)
    if math.prod(shape) * one.size > _MOST_TERMS:
        return None
    column = _name(other, names)
    if eqn.primitive.name == "mul":
        units = np.eye(math.prod(shape)).reshape(-1, *shape, 1)
        return {(column, number): one * unit for number, unit in enumerate(units)}
    contracting, batch = eqn.params["dimension_numbers"]
    mine, theirs = contracting[place], contracting[1 - place]
    if len(mine) != 1 or any(batch) or math.prod(shape) != shape[theirs[0]]:
        return None
    # All other axes of the record's have one entry.
    kept = np.moveaxis(one, mine[0], 0)
    out = (*shape_of(eqn.outvars[0]), one.shape[-1])
    return {(column, number): each.reshape(out) for number, each in enumerate(kept)}


# What an operation makes of what is followed, ``None`` for what is not: its output, and what must
# vanish for that to be true. ``None`` where all that comes in must.
_Rule: TypeAlias = Callable[[JaxprEqn, list[Linear | None]], tuple[Linear, list[Linear]] | None]


def _of_one(function: Callable[[JaxprEqn, Linear], Linear | None]) -> _Rule:
    """An operation on one array."""

    def rule(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]] | None:
        out = None if ins[0] is None else function(eqn, ins[0])
        return None if out is None else (out, [])

    return rule


def _sum(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]]:
    second = -1.0 if eqn.primitive.name == "sub" else 1.0
    terms = [by * one for by, one in zip((1.0, second), ins, strict=True) if one is not None]
    total = functools.reduce(np.add, terms)
    return np.broadcast_to(total, (*shape_of(eqn.outvars[0]), total.shape[-1])), []


def _multiple(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]] | None:
    """By a number that is written in the model."""
    pairs = [(one, other) for one, other in zip(ins, eqn.invars[::-1], strict=True)]
    if eqn.primitive.name == "div":
        pairs = pairs[:1]
    for one, other in pairs:
        if one is not None and isinstance(other, Literal) and not np.ndim(other.val):
            return one * float(other.val) ** (-1 if eqn.primitive.name == "div" else 1), []
    return None


def _looked_up(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]] | None:
    """At a place that depends on the record: true of all places if they have all the same."""
    one, sizes = ins[0], eqn.params["slice_sizes"]
    if one is None or any(other is not None for other in ins[1:]):
        return None
    along = [n for n, size in enumerate(sizes) if size < one.shape[n]]
    if any(sizes[n] != 1 for n in along):
        return None
    differences = [one - np.take(one, [0], axis=n) for n in along]
    at_first = one[tuple(slice(0, size) for size in sizes)]
    if eqn.primitive.name == "dynamic_slice":
        return at_first, differences
    numbers = eqn.params["dimension_numbers"]
    # With a number of its own for places that are not there, it is not the same at all places.
    fill = eqn.params["fill_value"]
    if numbers.operand_batching_dims or not (fill is None or math.isnan(fill)):
        return None
    kept = [size for n, size in enumerate(sizes) if n not in numbers.collapsed_slice_dims]
    at_first = at_first.reshape(*kept, one.shape[-1])
    return programs.spread(at_first, shape_of(eqn.outvars[0]), numbers.offset_dims), differences


def _largest(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]] | None:
    """The largest of numbers that stay as far apart."""
    one = ins[0]
    if one is None:
        return None
    axes = tuple(eqn.params["axes"])
    first = one
    for axis in axes:
        first = np.take(first, [0], axis=axis)
    return np.squeeze(first, axes), [one - first]


def _at_least(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]] | None:
    """No less than minus infinity."""
    for one, other in zip(ins, eqn.invars[::-1], strict=True):
        if one is not None and isinstance(other, Literal) and np.all(np.isneginf(other.val)):
            return one, []
    return None


def _converted(eqn: JaxprEqn, one: Linear) -> Linear | None:
    return one if np.issubdtype(eqn.params["new_dtype"], np.floating) else None


def _concatenated(eqn: JaxprEqn, ins: list[Linear | None]) -> tuple[Linear, list[Linear]]:
    number = next(one.shape[-1] for one in ins if one is not None)
    parts = [
        np.zeros((*shape_of(var), number)) if one is None else one
        for var, one in zip(eqn.invars, ins, strict=True)
    ]
    return np.concatenate(parts, axis=eqn.params["dimension"]), []


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("add", "add_any", "sub"), _sum),
    **dict.fromkeys(("mul", "div"), _multiple),
    **dict.fromkeys(("gather", "dynamic_slice"), _looked_up),
    "concatenate": _concatenated,
    "neg": _of_one(lambda eqn, one: -one),
    "stop_gradient": _of_one(lambda eqn, one: one),
    "reduce_max": _largest,
    "max": _at_least,
    **{name: _of_one(layout) for name, layout in programs.LAYOUTS.items()},
    "reduce_sum": _of_one(lambda eqn, one: one.sum(axis=eqn.params["axes"])),
    "convert_element_type": _of_one(_converted),
}


def _null_space(rows: Linear) -> np.ndarray:
    """An orthonormal basis of the directions along which all rows vanish, shape ``(d, m)``."""
    # Entries that are in no row are left out: records see nothing of these anyway.
    rows = rows[np.any(rows != 0, axis=1)]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # Most rows are single entries, and these vanish.
    vanish = np.any(rows[np.count_nonzero(rows, axis=1) == 1] != 0, axis=0)
    free = np.flatnonzero(~vanish & np.any(rows != 0, axis=0))
    rows = rows[:, free]
    values, vectors = np.linalg.eigh(rows.T @ rows)
    found = vectors[:, values < _ROUNDING**2 * max(1, len(free))]
    basis = np.zeros((len(vanish), found.shape[1]))
    basis[free] = found
    return basis
