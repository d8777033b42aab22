"""Traced programs of likelihoods, and parts of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, subjaxprs

from numpyro_dppvi._typing import Array, PyTree


def traced(
    function: Callable[..., Array], *arguments: PyTree, branches: bool = False
) -> ClosedJaxpr | None:
    """A function's program, with what it calls written out; ``None`` if it has loops or branches.

    Of the arguments, trees of arrays, only shapes matter; their leaves, in order, are the program's
    inputs. With ``branches`` it may have these, which stay operations of one piece:
    ``jnp.diagonal`` is one, by the kind of device.
    """
    # A loop's body is a program of its own, which nobody here looks into.
    names = {eqn.primitive.name for eqn in operations(jax.make_jaxpr(function)(*arguments).jaxpr)}
    if names & ({"scan", "while"} if branches else {"scan", "while", "cond"}):
        return None
    with jax.disable_jit():  # inlines inner jit calls (and would unroll loops)
        return jax.make_jaxpr(function)(*arguments)


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations of a program, those within others included."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from operations(inner)


def solves(function: Callable[..., PyTree], *arguments: PyTree) -> bool:
    """Whether a function factors matrices or solves with them."""
    names = {eqn.primitive.name for eqn in operations(jax.make_jaxpr(function)(*arguments).jaxpr)}
    return bool(names & {"cholesky", "triangular_solve", "lu", "qr", "eigh", "svd"})


def among(value: Any, values: Set[Any]) -> bool:
    """Whether an input of an operation is one of some variables."""
    # Literals cannot be hashed, and depend on nothing.
    return not isinstance(value, Literal) and value in values


def dependent(program: ClosedJaxpr, variables: Sequence[Any], but: Var | None = None) -> set[Any]:
    """All variables that depend on some, these included; not through the variable ``but``."""
    knowing = set(variables)
    for eqn in program.jaxpr.eqns:
        if any(among(v, knowing) for v in eqn.invars):
            knowing.update(v for v in eqn.outvars if v is not but)
    return knowing


def needed(program: ClosedJaxpr, inputs: Sequence[Var], wanted: Any) -> list[JaxprEqn]:
    """The operations that compute one variable from others, in order."""
    # Walk backwards from the wanted variable, stopping at the inputs.
    known, sought = set(inputs), {wanted}
    steps = []
    for eqn in reversed(program.jaxpr.eqns):
        if any(v in sought and v not in known for v in eqn.outvars):
            steps.append(eqn)
            sought.update(v for v in eqn.invars if not isinstance(v, Literal))
    return steps[::-1]


def part(program: ClosedJaxpr, inputs: Sequence[Var], wanted: Any) -> Callable[..., list[Array]]:
    """The part of a program that computes one variable from others, as a function."""
    steps = needed(program, inputs, wanted)
    named = program.jaxpr.debug_info._replace(
        arg_names=("value",) * len(inputs), result_paths=("result",)
    )
    part = program.jaxpr.replace(
        invars=list(inputs), outvars=[wanted], eqns=steps, debug_info=named
    )
    run = jaxpr_as_fun(ClosedJaxpr(part, program.consts))
    # A traced program takes exactly the dtypes it was traced with.
    dtypes = [v.aval.dtype for v in inputs]  # type: ignore[attr-defined]
    return lambda *values: run(*map(jnp.asarray, values, dtypes))


# Where entries of the latents are followed through a program, each array has a last axis for them.

MOST = 4_000_000
"""Beyond so many numbers for an array, entries are not followed."""


def entries(
    function: Callable[..., Array], base: Mapping[str, Any], row: PyTree
) -> tuple[int, ClosedJaxpr | None, dict[Any, np.ndarray]]:
    """What following the entries of the latents ``base`` begins with.

    How many there are; the program of the function, or ``None`` if it has loops or branches, or
    there are too many; and of each of its inputs that is a latent which entries these are, as zeros
    and ones.
    """
    sizes = [math.prod(base[name].shape) for name in sorted(base)]
    number, first = sum(sizes), 0
    program = traced(function, base, row) if number**2 <= MOST else None
    if program is None:
        return number, None, {}
    unit = np.eye(number)
    inputs: dict[Any, np.ndarray] = {}
    for var, size in zip(program.jaxpr.invars, sizes, strict=False):
        inputs[var] = unit[first : first + size].reshape(*shape_of(var), number)
        first += size
    return number, program, inputs


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable's value."""
    return variable.aval.shape


def spread(array: np.ndarray, shape: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """An array with its axes at some places of a shape."""
    between = np.ones(len(shape), int)
    between[list(places)] = array.shape[:-1]
    return np.broadcast_to(array.reshape(*between, array.shape[-1]), (*shape, array.shape[-1]))


def _slice(eqn: JaxprEqn, array: np.ndarray) -> np.ndarray:
    starts, ends = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    return array[tuple(map(slice, starts, ends, steps))]


LAYOUTS: Mapping[str, Callable[[JaxprEqn, np.ndarray], np.ndarray]] = {
    "broadcast_in_dim": lambda eqn, array: spread(
        array, eqn.params["shape"], eqn.params["broadcast_dimensions"]
    ),
    "slice": _slice,
    "transpose": lambda eqn, array: array.transpose(*eqn.params["permutation"], array.ndim - 1),
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"),
        lambda eqn, array: array.reshape(*shape_of(eqn.outvars[0]), array.shape[-1]),
    ),
}
"""What operations that lay entries out anew make of such an array."""
