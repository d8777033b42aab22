"""How large an honest hospital's release can be, given its announced clip and noise.

A hospital that does not follow the study can send any numbers. What no honest one sends is refused,
so that a dishonest one moves the posterior by no more than an honest one with hostile records
could, times a small factor. Where there is no bound, ``None`` says so.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Natural, PyTree
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods import DPOptimization
from numpyro_dppvi.methods.visits import ClientParams
from numpyro_dppvi.protocol.problem import Problem

# An honest release is refused with probability below exp(-t^2 / 2) = 2.3e-11: the norm of d
# standard normal numbers exceeds sqrt(d) + t no more often.
_TAIL = 7.0
# Room for rounding in 32 bits.
_SLACK = 1.001
# The decay rates of optax.adam, which runs where the method names no optimiser.
_B1, _B2 = 0.9, 0.999


def excess(
    problem: Problem, params: ClientParams, learning_rate: Array, q: Natural, value: PyTree
) -> float | None:
    """How large a release is, over the most that an honest hospital sends.

    Args:
        problem: What is compiled in.
        params: The numbers of the hospital's mechanism.
        learning_rate: The study's.
        q: What the hospital was sent.
        value: What it released, finite.

    Returns:
        At most 1 for an honest one; ``None`` where nothing bounds it.
    """
    releases = problem.method.releases
    if releases == "changes":
        return float(_of_changes(problem, params, learning_rate, q, value))
    if releases == "sums":
        most = params.num_records * params.clip_norm + _noise(params, value)
        return float(_norm(value) / (_SLACK * most))
    if isinstance(problem.method, DPOptimization) and problem.method.optimizer is None:
        return float(_of_descent(problem, learning_rate, q, value))
    return None


@functools.partial(jax.jit, static_argnames="problem")
def _of_changes(
    problem: Problem, params: ClientParams, learning_rate: Array, q: Natural, value: Natural
) -> Array:
    """The norm in which changes were clipped and noised, over clip and noise.

    A sum of ``num_shards`` vectors of norm at most the clip, times the weight, and noise.
    """
    measured = problem.method.solver(learning_rate).measured(problem.family, q, value)
    most = params.weight * params.num_shards * params.clip_norm + _noise(params, value)
    return _norm(measured) / (_SLACK * most)


@functools.partial(jax.jit, static_argnames="problem")
def _of_descent(problem: Problem, learning_rate: Array, q: Natural, value: Natural) -> Array:
    """How far coordinates have moved, over the furthest that so many steps of Adam go."""
    family = problem.family
    end = factors.multiply(q, value)
    moved = jax.tree.map(jnp.subtract, family.coordinates(end), family.coordinates(q))
    furthest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(moved)]))
    most = _SLACK * learning_rate * _steps_of_adam(problem.method.num_local_steps)
    # Rounding of natural parameters, where a coordinate is far from 0.
    size = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(family.coordinates(q))]))
    rounding = 100 * np.finfo(furthest.dtype).eps * (1 + size)
    return jnp.where(family.in_domain(end), furthest / (most + rounding), jnp.inf)


def _steps_of_adam(num_steps: int) -> float:
    """The furthest that a coordinate moves in some first steps of Adam, in learning rates.

    By Cauchy and Schwarz the mean of gradients is at most sqrt(sum_j (b1^2 / b2)^j) times the root
    of the mean of their squares, both with their decays; the two bias corrections follow.
    """
    total, squares = 0.0, 0.0
    for step in range(1, num_steps + 1):
        squares += (_B1**2 / _B2) ** (step - 1)
        corrections = (1 - _B1) / (1 - _B1**step) * math.sqrt((1 - _B2**step) / (1 - _B2))
        total += corrections * math.sqrt(squares)
    return total


def _noise(params: ClientParams, value: PyTree) -> Array:
    """The largest norm of the noise."""
    size = sum(leaf.size for leaf in jax.tree.leaves(value))
    return params.noise_std * (math.sqrt(size) + _TAIL)


def _norm(tree: PyTree) -> Array:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
