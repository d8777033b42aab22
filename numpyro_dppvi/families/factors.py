"""Arithmetic of factors: multiplying densities of one family adds their natural parameters.

A factor is just its natural parameters, a tree of arrays. It need not be a proper distribution:
the unit factor is not, nor may be a noisy factor, a cavity or a change between rounds.
"""

import functools

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, Parameters, PyTree, Tree


def multiply(*factors: Parameters) -> Parameters:
    """The product of factors: the sum of their natural parameters.

    Example:
        >>> one, other = {"w": jnp.array([1.0, -2.0])}, {"w": jnp.array([0.5, 3.0])}
        >>> multiply(one, other)["w"].tolist()
        [1.5, 1.0]
    """
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *factors)


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


def power(factor: Parameters, exponent: Array | float) -> Parameters:
    """A factor raised to a power (damping, tempering): a multiple of its natural parameters.

    Args:
        factor: A factor.
        exponent: A scalar.

    Example:
        >>> power({"w": jnp.array([2.0, -4.0])}, 0.5)["w"].tolist()
        [1.0, -2.0]
    """
    return jax.tree.map(lambda leaf: jnp.asarray(exponent, leaf.dtype) * leaf, factor)


def total(stacked: Parameters) -> Parameters:
    """The product of factors stacked on a leading axis."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stacked)


def unit(like: Parameters, num_factors: int | None = None) -> Parameters:
    """The factor 1 in the shape of ``like``, stacked if ``num_factors`` is given."""
    lead = () if num_factors is None else (num_factors,)
    return jax.tree.map(lambda leaf: jnp.zeros(lead + jnp.shape(leaf), jnp.result_type(leaf)), like)


def inner(natural: PyTree, statistics: PyTree) -> Array:
    """The inner product of natural parameters and (expected) sufficient statistics, a scalar."""
    products = jax.tree.map(lambda n, t: jnp.sum(n * t), natural, statistics)
    return functools.reduce(jnp.add, jax.tree.leaves(products))


def count_nonzero(change: PyTree) -> Array:
    """How many natural parameters differ from zero, a scalar."""
    counts = [jnp.sum(leaf != 0, dtype=jnp.int32) for leaf in jax.tree.leaves(change)]
    return functools.reduce(jnp.add, counts)


def is_finite(natural: PyTree) -> Array:
    """Whether every natural parameter is finite, a scalar boolean."""
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(natural)]
    )


def select(condition: Array, if_true: Tree, if_false: Tree) -> Tree:
    """One of two factors, chosen by a scalar boolean.

    Args:
        condition: A scalar boolean, which may be traced.
        if_true: A factor.
        if_false: Another factor of the same latents.
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)
