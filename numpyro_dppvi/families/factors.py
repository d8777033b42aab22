"""Arithmetic of factors: multiplying densities of one family adds their natural parameters.

A factor is just its natural parameters, a tree of arrays. It need not be a proper distribution:
the unit factor is not, nor may be a noisy factor, a cavity or a change between rounds.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Parameters, PyTree, Tree
from numpyro_dppvi.families.precision import in_own_precision


@in_own_precision
def multiply(*factors: Parameters) -> Parameters:
    """The product of factors: the sum of their natural parameters.

    Example:
        >>> one, other = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.5, 3.0])}
        >>> multiply(one, other)["w"].tolist()
        [1.5, 1.0]
    """
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *factors)


@in_own_precision
def divide(numerator: Parameters, denominator: Parameters) -> Parameters:
    """The quotient of two factors (such as a cavity): the difference of natural parameters.

    Args:
        numerator: A factor.
        denominator: Another factor of the same latents.

    Example:
        >>> divide({"w": jnp.array([1.0])}, {"w": jnp.array([3.0])})["w"].tolist()  # improper
        [-2.0]
    """
    return jax.tree.map(jnp.subtract, numerator, denominator)


@in_own_precision
def power(factor: Parameters, exponent: Array | float) -> Parameters:
    """A factor raised to a power (damping, tempering): a multiple of its natural parameters.

    Args:
        factor: A factor.
        exponent: A scalar.

    Example:
        >>> power({"w": jnp.array([2.0, -4.0])}, 0.5)["w"].tolist()
        [1.0, -2.0]
    """
    # The dtype of the factor, or an exponent of 64 bits would promote all factors.
    return jax.tree.map(lambda leaf: jnp.asarray(exponent, leaf.dtype) * leaf, factor)


# q is always this sum, never a running total of changes: the rounding errors of a total would grow
# with the rounds, and q would cease to be the product of its factors. But a sum over ten thousand
# clients at every visit would cost more than the visit.
# Factors of many clients are added up in blocks of this many, of which a visit changes one.
_BLOCK = 256


def total(stacked: Parameters) -> Parameters:
    """The product of factors stacked on a leading axis."""
    return of_blocks(block_totals(stacked))


@in_own_precision
def block_totals(stacked: Parameters) -> Parameters:
    """The products of blocks of factors, on a leading axis; their product is :func:`total`."""

    def of(leaf: Array) -> Array:
        # Zeros are the factor 1: padding changes no product.
        padding = [(0, -leaf.shape[0] % _BLOCK)] + [(0, 0)] * (leaf.ndim - 1)
        blocks = jnp.pad(leaf, padding).reshape(-1, _BLOCK, *leaf.shape[1:])
        return jnp.sum(blocks, axis=1)

    if _num_factors(stacked) <= _BLOCK:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, keepdims=True), stacked)
    return jax.tree.map(of, stacked)


@in_own_precision
def of_blocks(totals: Parameters) -> Parameters:
    """The product of all factors, from :func:`block_totals`."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), totals)


@in_own_precision
def renewed(
    totals: Parameters, stacked: Parameters, changed: Array | np.ndarray, new: Parameters
) -> Parameters:
    """:func:`block_totals` with some factors replaced: for one, at the cost of its block.

    Args:
        totals: What it was before.
        stacked: The factors before.
        changed: Numbers of those that are replaced.
        new: What they are replaced by, on a leading axis.
    """
    num_factors = _num_factors(stacked)
    if changed.size > 1 or num_factors <= _BLOCK:
        return block_totals(replaced(stacked, changed, new))
    # One client at a time, in a sequential round: only the sum of its own block is taken anew.
    block, place = changed[0] // _BLOCK, changed % _BLOCK
    places = block * _BLOCK + jnp.arange(_BLOCK)

    def of(total: Array, leaf: Array, mine: Array) -> Array:
        # The last block may end behind the last factor: what lacks there is the factor 1, too.
        rows = leaf.at[places].get(mode="fill", fill_value=0).at[place].set(mine)
        return total.at[block].set(jnp.sum(rows, axis=0))

    return jax.tree.map(of, totals, stacked, new)


@in_own_precision
def replaced(stacked: Tree, changed: Array | np.ndarray, new: Tree) -> Tree:
    """What is on a leading axis, with something new in the places of some.

    Args:
        stacked: A tree of arrays on a leading axis.
        changed: Numbers of those that are replaced, no two alike.
        new: What they are replaced by, on a leading axis.
    """
    if _all_in_order(stacked, changed):
        return jax.tree.map(lambda leaf, rows: jnp.asarray(rows, leaf.dtype), stacked, new)
    return jax.tree.map(lambda leaf, rows: leaf.at[changed].set(rows), stacked, new)


def picked(stacked: Tree, places: Array | np.ndarray) -> Tree:
    """Some of many, on a leading axis.

    Args:
        stacked: A tree of arrays on a leading axis.
        places: Which of them.
    """
    if _all_in_order(stacked, places):
        return stacked
    return jax.tree.map(lambda leaf: leaf[places], stacked)


# Looked up and written one by one, what ten thousand clients have took a tenth of a server's time.
def _all_in_order(stacked: PyTree, places: Array | np.ndarray) -> bool:
    """Whether these are known, while a program is traced, to be all places in their order."""
    if not isinstance(places, np.ndarray) or places.ndim != 1:
        return False
    are_all = all(leaf.shape[:1] == places.shape for leaf in jax.tree.leaves(stacked))
    return are_all and bool(np.all(places == np.arange(places.size)))


def repeated(tree: Tree, times: int) -> Tree:
    """Copies of a tree on a leading axis.

    Args:
        tree: Any tree of arrays.
        times: How many.
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (times, *jnp.shape(leaf))), tree)


def _num_factors(stacked: PyTree) -> int:
    return int(jax.tree.leaves(stacked)[0].shape[0])


@in_own_precision
def unit(like: Parameters, num_factors: int | None = None) -> Parameters:
    """The factor 1 in the shape of ``like``, stacked if ``num_factors`` is given."""
    lead = () if num_factors is None else (num_factors,)
    return jax.tree.map(lambda leaf: jnp.zeros(lead + jnp.shape(leaf), jnp.result_type(leaf)), like)


@in_own_precision
def inner(natural: PyTree, statistics: PyTree) -> Array:
    """The inner product of natural parameters and (expected) sufficient statistics, a scalar."""
    products = jax.tree.leaves(jax.tree.map(jnp.multiply, natural, statistics))
    return functools.reduce(jnp.add, map(jnp.sum, _by_shape(jnp.add, products)))


def count_nonzero(change: PyTree) -> Array:
    """How many natural parameters differ from zero, a scalar."""
    counts = [(leaf != 0).astype(jnp.int32) for leaf in jax.tree.leaves(change)]
    return functools.reduce(
        jnp.add, [jnp.sum(each, dtype=jnp.int32) for each in _by_shape(jnp.add, counts)]
    )


@in_own_precision
def is_finite(natural: PyTree) -> Array:
    """Whether every natural parameter is finite, a scalar boolean."""
    return all_of(*map(jnp.isfinite, jax.tree.leaves(natural)))


def all_of(*conditions: Array) -> Array:
    """Whether all entries of some boolean arrays hold, a scalar boolean."""
    return functools.reduce(jnp.logical_and, map(jnp.all, _by_shape(jnp.logical_and, conditions)))


def _by_shape(operation: Callable[..., Array], arrays: Iterable[Array]) -> list[Array]:
    """Arrays of one shape taken together: a reduction takes as long to compile as ten sums."""
    found: dict[tuple[int, ...], Array] = {}
    for each in arrays:
        found[each.shape] = operation(found[each.shape], each) if each.shape in found else each
    return list(found.values())


@in_own_precision
def select(condition: Array, if_true: Tree, if_false: Tree) -> Tree:
    """One of two factors, chosen by a scalar boolean.

    Args:
        condition: A scalar boolean, which may be traced.
        if_true: A factor.
        if_false: Another factor of the same latents.
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
