"""Compilation in less time."""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from numpyro_dppvi.families.precision import in_own_precision

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled(*static: str, quick: bool = False) -> Callable[[Callable[_P, _R]], "Compiled[_P, _R]"]:
    """A decorator: compiles a function, with the names of its static arguments.

    ``quick``: it runs a few times on few numbers, so that little is gained by making it fast.
    """
    return lambda function: Compiled(function, static, quick)


class Compiled(Generic[_P, _R]):
    """What ``jax.jit`` makes of a function, compiled with :func:`options`."""

    def __init__(
        self, function: Callable[_P, _R], static: tuple[str, ...] = (), quick: bool = False
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._static, self._quick = function, static, quick

    @functools.cached_property
    def program(self) -> Any:
        """The ``jax.jit`` of the function. Not made on import: asking for options starts JAX."""
        return self._jit(compiler_options=dict(options(self._quick)))

    # Two programs, because JAX refuses compiler options on a function that is called while another
    # one is being traced.
    @functools.cached_property
    def inner(self) -> Any:
        """The same without options, for a place in another program, which has its own."""
        return self._jit()

    def _jit(self, **settings: Any) -> Any:
        return jax.jit(self._function, static_argnames=self._static, **settings)

    # Traced and lowered with 64 bits on where arguments have them: JAX lowers some operations of 64
    # bits to others of 32 where they are off.
    @in_own_precision
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the compiled function."""
        # Inside another program an array operation returns a tracer, whatever the arguments are.
        leaves = (jnp.zeros(()), *jax.tree.leaves((args, kwargs)))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return (self.inner if traced else self.program)(*args, **kwargs)


def options(quick: bool = False) -> tuple[tuple[str, Any], ...]:
    """Options for the compiler; none where it does not know them."""
    # Most of a first fit is compilation. Without XLA's new emitters for processors, rounds of
    # ``DPOptimization`` compile in about half to two thirds of the time, those of ``FisherScoring``
    # in about four fifths; they run at .92 to 1.00 of the time (JAX 0.10.2, one core, alternately
    # in one process, medians of twelve pairs). Cut into pieces for several cores, programs of ours
    # take a tenth to a quarter longer, on two cores, too. What is ``quick`` goes without LLVM's
    # optimisations as well, which takes half the time or less.
    wanted = ("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1)
    more = (("xla_backend_optimization_level", 0),) if quick else ()
    return tuple(option for option in (*wanted, *more) if _is_known(*option))


@functools.cache
def _is_known(name: str, value: bool | int) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={name: value})()
    except jax.errors.JaxRuntimeError:  # such options come and go
        return False
    return True
