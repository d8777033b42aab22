"""Finds which entries of the latents can matter to one record together.

A record has one group, and its density depends on that group's effect alone. So no record tells
how two groups' effects go together: an average record's information has zeros there, whatever the
records. As with ``latents.unseen``, users declare nothing: it is read off the traced program. A
lookup at a place that the record names makes what comes out depend on one place's entries. Those
of two places of the same lookup never meet, unless there is another way around it.
"""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.predictor import LogLikelihood
from numpyro_dppvi.latents.programs import shape_of


class _Reach(NamedTuple):
    """On which entries of the latents an array depends."""

    on: np.ndarray  # whether each of its entries does, on a last axis for the latents'
    # By lookup, at which place it has to find the record for that; -1 for any.
    place: Mapping[Hashable, np.ndarray]

    def at(self, lookup: Hashable) -> np.ndarray:
        """The places of one lookup."""
        return self.place.get(lookup, np.full(self.on.shape, -1))

    def mapped(self, function: Callable[[np.ndarray], np.ndarray]) -> "_Reach":
        """The same of entries that a function of arrays has laid out anew."""
        return _Reach(function(self.on), {key: function(each) for key, each in self.place.items()})


def meeting(log_likelihood: LogLikelihood, base: Mapping[str, Any], row: PyTree) -> np.ndarray:
    """Which entries can matter to the density of one record together.

    A symmetric matrix of truth values, true where it is not known, of the entries of all latents in
    the order of their names.
    """
    num_entries, program, units = programs.entries(log_likelihood, base, row)
    reach = None if program is None else _reach(program, num_entries, units)
    if reach is None:
        return np.ones((num_entries, num_entries), bool)
    apart = np.zeros((num_entries, num_entries), bool)
    for place in reach.place.values():
        known = (place >= 0) & reach.on
        apart |= known[:, None] & known & (place[:, None] != place)
    return ~apart


def _reach(
    program: ClosedJaxpr, num_entries: int, units: Mapping[Any, np.ndarray]
) -> _Reach | None:
    """That of a record's density; ``None`` if it takes too much."""
    (density,) = program.jaxpr.outvars
    reached = {var: _Reach(unit.astype(bool), {}) for var, unit in units.items()}
    if isinstance(density, Literal):
        return None
    named: dict[Any, int] = {}
    numbers: dict[Hashable, int] = {}
    columns: dict[Any, Sequence[int]] = {}

    def number(value: Any, column: int | None = None) -> int:
        """The same for what is computed in the same way: of a record's group, for each lookup."""
        if column is not None and shape_of(value)[-1] > 1:
            if value in columns:
                return columns[value][column]
            return numbers.setdefault((number(value), column), len(numbers) + 1)
        key = ("literal", repr(value.val)) if isinstance(value, Literal) else value
        return named.get(key) or numbers.setdefault(key, len(numbers) + 1)

    for eqn in program.jaxpr.eqns:
        ins = [None if isinstance(v, Literal) else reached.get(v) for v in eqn.invars]
        if all(one is None for one in ins):
            how = eqn.primitive.name, repr(eqn.params), *map(number, eqn.invars)
            for place, var in enumerate(eqn.outvars):
                named[var] = numbers.setdefault((*how, place), len(numbers) + 1)
            # Places along several axes: a group of one, say, and the number of a slope.
            if eqn.primitive.name == "concatenate":
                (out,), last = eqn.outvars, len(shape_of(eqn.outvars[0])) - 1
                if eqn.params["dimension"] == last and len(eqn.invars) == shape_of(out)[-1]:
                    columns[out] = [number(var) for var in eqn.invars]
            continue
        if max(math.prod(shape_of(var)) for var in eqn.outvars) * num_entries > programs.MOST:
            return None
        rule = _RULES.get(eqn.primitive.name)
        out = None if rule is None else rule(eqn, ins, number)
        for var in eqn.outvars:
            reached[var] = _everywhere(ins, shape_of(var)) if out is None else out
    return reached.get(density)


_Ins: TypeAlias = Sequence[_Reach | None]
_Number: TypeAlias = Callable[..., int]
# What an operation makes of the reaches of its inputs, ``None`` for those that depend on no latent;
# ``None`` where each entry may depend on all that comes in.
_Rule: TypeAlias = Callable[[JaxprEqn, _Ins, _Number], _Reach | None]


def _all_of(reach: _Reach, axes: Sequence[int]) -> _Reach:
    """Of entries that depend on all along some axes: a place is kept where there is but one."""
    axes = tuple(axes)
    on = np.asarray(reach.on.any(axis=axes))
    most = {key: np.where(reach.on, each, -2).max(axis=axes) for key, each in reach.place.items()}
    least = {
        key: np.where(reach.on, each, np.iinfo(int).max).min(axis=axes)
        for key, each in reach.place.items()
    }
    return _Reach(on, {key: np.where(most[key] == least[key], most[key], -1) for key in most})


def _both(one: _Reach, other: _Reach) -> _Reach:
    """Of entries that depend on two others."""
    stacked = _Reach(
        np.stack([one.on, other.on]),
        {key: np.stack([one.at(key), other.at(key)]) for key in {*one.place, *other.place}},
    )
    return _all_of(stacked, (0,))


def _everywhere(ins: _Ins, shape: tuple[int, ...]) -> _Reach:
    """Of an array each entry of which may depend on all that comes in."""
    whole = [_all_of(one, range(one.on.ndim - 1)) for one in ins if one is not None]
    total = functools.reduce(_both, whole)
    return total.mapped(lambda each: np.broadcast_to(each, (*shape, each.shape[-1])))


def _by_entry(eqn: JaxprEqn, ins: _Ins, number: _Number) -> _Reach:
    shape = shape_of(eqn.outvars[0])

    def spread(each: np.ndarray) -> np.ndarray:
        return np.broadcast_to(each, (*shape, each.shape[-1]))

    return functools.reduce(_both, [one.mapped(spread) for one in ins if one is not None])


def _laid_out(function: Callable[[JaxprEqn, np.ndarray], np.ndarray]) -> _Rule:
    """An operation that lays entries of its first input out anew."""

    def rule(eqn: JaxprEqn, ins: _Ins, number: _Number) -> _Reach | None:
        return None if ins[0] is None else ins[0].mapped(functools.partial(function, eqn))

    return rule


def _looked_up(eqn: JaxprEqn, ins: _Ins, number: _Number) -> _Reach | None:
    """At one place that depends on the record."""
    one, sizes = ins[0], eqn.params["slice_sizes"]
    if one is None or any(other is not None for other in ins[1:]):
        return None
    along = [n for n, size in enumerate(sizes) if size < one.on.shape[n]]
    if any(sizes[n] != 1 for n in along):
        return None
    if eqn.primitive.name == "dynamic_slice":
        # JAX moves places that are not there inside.
        return _at_a_place(one, {n: (number(eqn.invars[1 + n]), one.on.shape[n]) for n in along})
    numbers, places = eqn.params["dimension_numbers"], shape_of(eqn.invars[1])
    if math.prod(places[:-1]) != 1 or numbers.operand_batching_dims:
        return None
    if not set(along) <= set(numbers.start_index_map):
        return None
    # Places that are not there are moved inside or left out, which depends on the mode.
    mode, order = str(eqn.params["mode"]), list(numbers.start_index_map)
    columns = {n: number(eqn.invars[1], order.index(n)) for n in along}
    out = _at_a_place(one, {n: (columns[n], mode, one.on.shape[n]) for n in along})
    shape = shape_of(eqn.outvars[0])
    return out.mapped(lambda each: each.reshape(*shape, each.shape[-1]))


def _at_a_place(one: _Reach, lookups: Mapping[int, Hashable]) -> _Reach:
    """With axes of length 1 in place of those along which a record names a place."""
    for axis, key in lookups.items():
        places = np.arange(one.on.shape[axis])
        places = places.reshape(*[-1 if n == axis else 1 for n in range(one.on.ndim)])
        here = {**one.place, key: np.broadcast_to(places, one.on.shape)}
        found = _all_of(_Reach(one.on, here), (axis,))
        one = found.mapped(functools.partial(np.expand_dims, axis=axis))
    return one


def _summed(eqn: JaxprEqn, ins: _Ins, number: _Number) -> _Reach | None:
    return None if ins[0] is None else _all_of(ins[0], eqn.params["axes"])


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(
        (
            *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow"),
            *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sqrt", "rsqrt"),
            *("square", "abs", "sign", "lgamma", "digamma", "erf", "erfc", "erf_inv", "sin"),
            *("cos", "select_n", "convert_element_type", "copy", "is_finite", "and", "or", "not"),
            *("eq", "ne", "lt", "le", "gt", "ge", "clamp", "stop_gradient"),
        ),
        _by_entry,
    ),
    **dict.fromkeys(("gather", "dynamic_slice"), _looked_up),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _summed),
    **{name: _laid_out(layout) for name, layout in programs.LAYOUTS.items()},
}
