"""Traced programs of likelihoods, and parts of them."""

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, subjaxprs

from numpyro_dppvi._typing import Array, PyTree


def traced(
    function: Callable[..., Array], *arguments: PyTree, branches: bool = False
) -> ClosedJaxpr | None:
    """A function's program, with what it calls written out; ``None`` if it has loops or branches.

    Args:
        function: What to trace.
        arguments: Trees of arrays, of which only shapes matter. Their leaves, in order, are the
            program's inputs.
        branches: Whether it may have branches, which stay operations of one piece. ``jnp.diagonal``
            is one, by the kind of device.
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
