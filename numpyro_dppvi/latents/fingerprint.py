"""Digests of traced programs: functions that compute the same can share a compilation."""

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from numpyro_dppvi._typing import Array, PyTree

# Functions and other objects are printed with their memory address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(*programs: Any) -> str:
    """A digest of traced programs (``jax.make_jaxpr(f)(...)``) and all their constants."""
    # The identity of the function would not do, because a model may read globals that change.
    digest = hashlib.sha256()
    for program in programs:
        # JAX names variables in the order in which they appear, so that equal programs print alike.
        # The text holds shapes and operations but not the constants, which follow.
        digest.update(_ADDRESS.sub("", str(program.jaxpr)).encode())
        for array in map(_host, constants(program)):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def evaluated(function: Callable[[], PyTree]) -> PyTree:
    """What a function without arguments returns, compiled as a whole and once for equal programs.

    Run eagerly, each operation would be compiled separately; under ``jax.jit`` every closure would
    be compiled anew, however often it had been written before. Records must not be closed over:
    what was computed is remembered.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)()
    values = _known(program) or _values(_Program(fingerprint(program), program))
    return jax.tree.unflatten(jax.tree.structure(shapes), values)


def _known(program: ClosedJaxpr) -> list[Array]:
    """The results of a program that has nothing to compute, as of plain numbers; else none."""
    outputs = program.jaxpr.outvars
    constant = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    # An output that is a literal or a constant needs no compilation.
    if not all(isinstance(v, Literal) or v in constant for v in outputs):
        return []
    found = (v.val if isinstance(v, Literal) else constant[v] for v in outputs)
    # Numbers as NumPy's first, because JAX compiles what it converts.
    return [
        jnp.asarray(np.asarray(x, v.aval.dtype) if np.isscalar(x) else x, v.aval.dtype)
        for x, v in zip(found, outputs, strict=True)
    ]


@dataclass(frozen=True)
class _Program:
    """A traced program without arguments; equal to others of the same digest."""

    digest: str
    program: ClosedJaxpr = field(compare=False)


@functools.lru_cache(maxsize=64)
def _values(one: _Program) -> list[Array]:
    return jax.jit(jaxpr_as_fun(one.program))()


def _host(constant: Any) -> np.ndarray:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.asarray(constant)


def constants(program: Any) -> list[Any]:
    """The arrays that a traced program and its inner programs close over."""
    found = [c for c in program.consts if hasattr(c, "dtype")]
    # Bodies of loops and the like close over arrays of their own.
    for equation in program.jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=_is_program):
            if _is_program(value):
                found += constants(value)
    return found


def _is_program(value: Any) -> bool:
    return hasattr(value, "jaxpr") and hasattr(value, "consts")
