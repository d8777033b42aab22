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

# An honest release is refused with probability below 2 exp(-t^2 / 2) = 4.6e-11: the norm of d
# standard normal numbers exceeds sqrt(d) + t no more often than with half of that, and the largest
# of them sqrt(2 log(2 d)) + t.
_TAIL = 7.0
# Room for rounding in 32 bits.
_SLACK = 1.001
# The decay rates of optax.adam, which runs where the method names no optimiser.
_B1, _B2 = 0.9, 0.999


def excess(
    problem: Problem, params: ClientParams, learning_rate: Array, q: Natural, value: PyTree
) -> float | None:
    """How large a release is, over the most that an honest one is; ``None`` where unbounded."""
    releases = problem.method.releases
    if releases == "changes":
        return float(_of_changes(problem, params, learning_rate, q, value))
    if releases == "sums":
        return float(_of_sum(params, params.num_records * params.clip_norm, value))
    # An optimiser of the study's own may take steps of any length (SGD's grow with gradients).
    if isinstance(problem.method, DPOptimization) and problem.method.optimizer is None:
        return float(_of_descent(problem, learning_rate, q, value))
    return None


@functools.partial(jax.jit, static_argnames="problem")
def _of_changes(
    problem: Problem, params: ClientParams, learning_rate: Array, q: Natural, value: Natural
) -> Array:
    """Changes are measured as they were clipped and noised: in white coordinates, say."""
    # They are a sum of ``num_shards`` vectors of norm at most the clip, times the weight, and
    # noise.
    # Natural gradients clip and noise in white coordinates of q: that is where the clip is a bound.
    measured = problem.method.solver(learning_rate).measured(problem.family, q, value)
    return _of_sum(params, params.weight * params.num_shards * params.clip_norm, measured)


def _of_sum(params: ClientParams, most: Array, value: PyTree) -> Array:
    """Norm and largest entry of a clipped sum with noise, each over the most that it can be."""
    # The norm alone would let a hospital put the noise of all entries into one.
    leaves = jax.tree.leaves(value)
    size = sum(leaf.size for leaf in leaves)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in leaves))
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    # Without noise the norm is at most that of the clipped sum. Noise adds s |z|, with |z| near
    # sqrt(d) for d standard normal numbers, and at most s max |z_i| to one entry.
    noise_of_norm = params.noise_std * (math.sqrt(size) + _TAIL)
    noise_of_entry = params.noise_std * (math.sqrt(2 * math.log(2 * size)) + _TAIL)
    return jnp.maximum(norm / (most + noise_of_norm), largest / (most + noise_of_entry)) / _SLACK


@functools.partial(jax.jit, static_argnames="problem")
def _of_descent(problem: Problem, learning_rate: Array, q: Natural, value: Natural) -> Array:
    """How far coordinates have moved, over the furthest that this many steps of Adam can go."""
    family = problem.family
    # A solve's release is post-processing of noisy gradients and has no clip of its own. What
    # bounds it is Adam, whose step does not grow with its gradient.
    end = factors.multiply(q, value)
    moved = jax.tree.map(jnp.subtract, family.coordinates(end), family.coordinates(q))
    furthest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(moved)]))
    most = _SLACK * learning_rate * _steps_of_adam(problem.method.num_local_steps)
    # Rounding of natural parameters, where a coordinate is far from 0.
    size = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(family.coordinates(q))]))
    rounding = 100 * np.finfo(furthest.dtype).eps * (1 + size)
    # Honest steps move coordinates, which are those of a proper distribution wherever they go.
    return jnp.where(family.in_domain(end), furthest / (most + rounding), jnp.inf)


def _steps_of_adam(num_steps: int) -> float:
    """The furthest that a coordinate moves in some first steps of Adam, in learning rates."""
    # By Cauchy and Schwarz the mean of gradients is at most sqrt(sum_j (b1^2 / b2)^j) times the
    # root of the mean of their squares, both with their decays; the two bias corrections follow.
    steps = np.arange(1, num_steps + 1)
    # The mean is (1 - b1) / (1 - b1^t) sum b1^j g_j, the root sqrt((1 - b2) / (1 - b2^t) sum b2^j
    # g_j^2), and sum b1^j g_j <= sqrt(sum (b1^2 / b2)^j) sqrt(sum b2^j g_j^2).
    squares = np.cumsum((_B1**2 / _B2) ** (steps - 1))
    corrections = (1 - _B1) / (1 - _B1**steps) * np.sqrt((1 - _B2**steps) / (1 - _B2))
    return float(np.sum(corrections * np.sqrt(squares)))
