"""Natural parameters in 64 bits, where the program has 32.

A column of calendar years, 2005 +- 3, is the column of ones over again but for two millionths of
its information. In 32 bits a sum of precision matrices has no such digits left, and in 64 bits it
has nine. Models and records stay in the program's precision: a score needs no more, because what is
left of it is taken off record by record.

JAX keeps arrays of 64 bits as they are where 64 bits are off, but rounds most of what is computed
from them. So what is wide by its arrays is computed with 64 bits on.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, Tree

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_own_precision(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: computes with 64 bits on where an argument has an array of 64 bits."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        wide = any(map(_is_wide, jax.tree.leaves((args, kwargs))))
        with jax.enable_x64(True) if wide else contextlib.nullcontext(), _whole_products():
            return function(*args, **kwargs)

    return run


def _whole_products() -> contextlib.AbstractContextManager[object]:
    # By default a GPU rounds the factors of a product of matrices to eleven bits.
    default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if on_cpu() or default is not None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")


def widened(tree: Tree) -> Tree:
    """Real numbers in 64 bits."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: _cast(leaf, np.dtype(np.float64)), tree)


def rounded(tree: Tree, own: np.dtype | None = None) -> Tree:
    """Real numbers of 64 bits in the program's own precision, by default that of the caller."""
    own = jnp.result_type(float) if own is None else own
    return jax.tree.map(lambda leaf: _cast(leaf, own) if _is_wide(leaf) else leaf, tree)


def _cast(leaf: Array, dtype: np.dtype) -> Array:
    if isinstance(leaf, jax.core.Tracer):
        return leaf.astype(dtype)
    # On the host: by itself, a conversion is a program for every shape.
    return jnp.asarray(np.asarray(leaf).astype(dtype), dtype)


def program(own: np.dtype) -> contextlib.AbstractContextManager[object]:
    """Within it, what is traced is traced as in a program of this precision."""
    return jax.enable_x64(own == np.float64)


def arrays(tree: Tree) -> Tree:
    """JAX's arrays of what was kept on the host, in the precision in which it was."""
    wide = any(np.result_type(leaf) == np.float64 for leaf in jax.tree.leaves(tree))
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        return jax.tree.map(jnp.asarray, tree)


def as_wide_as(like: object, tree: Tree) -> Tree:
    """Real numbers in 64 bits if ``like`` has them, else as they are."""
    return widened(tree) if any(map(_is_wide, jax.tree.leaves(like))) else tree


def _is_wide(leaf: object) -> bool:
    # Not NumPy's, which are as wide where nobody has asked for it.
    return isinstance(leaf, jax.Array) and leaf.dtype == np.float64
