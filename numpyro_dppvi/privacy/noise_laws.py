"""What law noise has: Gaussian in 64 bits, or a discrete Gaussian that OpenDP draws exactly.

The discrete Gaussian is for methods that release once a visit. Clipped changes are rounded to
integer multiples of a step and added as integers; noise is an integer, too, drawn on the host
before the compiled round, which it is handed to. What the sum and its noise are multiplied by
afterwards is post-processing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.privacy.budget import unit_sensitivity

# As many steps make up the clipping norm, or up to twice as many.
_STEPS_PER_NORM = 2**20
# Sums and noise are integers below 2^53, which 64-bit numbers hold exactly: noise of this standard
# deviation stays below with overwhelming probability.
_MOST_STEPS = 2.0**46
# Integers reach the program as two words, because JAX would cut one of 64 bits.
_LOW_BITS = 26
_FEATURE = "contrib"


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise, made in 64-bit arithmetic from a cipher's bits (the default)."""

    @property
    def name(self) -> str:
        """The noise in words."""
        return "Gaussian noise"

    def dp_event(self, noise_multiplier: float) -> dpa.DpEvent:
        """The event that a release is charged as; noise in units of a contribution."""
        return dpa.GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class DiscreteGaussian:
    """Noise of a discrete Gaussian, drawn exactly by OpenDP (Canonne, Kamath and Steinke 2020).

    Needs ``pip install numpyro-dppvi[exact]``. What is proven of such noise in many dimensions is
    concentrated differential privacy (their theorem for many dimensions), which takes 7 to 9 %
    more noise at the usual budgets. No trusted aggregator and no ``insecure_noise_seed``: shares
    of it add up to no discrete Gaussian, and OpenDP draws from the operating system alone.
    """

    @property
    def name(self) -> str:
        """The noise in words."""
        return "discrete Gaussian noise, drawn exactly,"

    def dp_event(self, noise_multiplier: float) -> dpa.DpEvent:
        """The event that a release is charged as, for a replaced contribution.

        It satisfies rho-zCDP with rho = sensitivity^2 / (2 std^2).
        """
        if noise_multiplier == 0:
            return dpa.ZCDpEvent(math.inf)
        moved = unit_sensitivity("replace_one")
        return dpa.ZCDpEvent(moved**2 / (2 * noise_multiplier**2))


Noise: TypeAlias = Gaussian | DiscreteGaussian
"""The law of the noise of a method that releases once a visit."""


class StepNoise(NamedTuple):
    """Drawn integers, and the step that they are multiples of; one leading shape.

    Attributes:
        high: What is left above the last bits, 32-bit integers, last axis the entries.
        low: The last 26 bits, not negative, of the same shape.
        step: The step of each visit's grid, a power of two; without the last axis.
    """

    high: Array
    low: Array
    step: Array


def grid_step(clip_norm: float) -> float:
    """The step that changes clipped to a norm are rounded to: a power of two, at most 2^-20 of it.

    It depends on public numbers alone.
    """
    return math.ldexp(1.0, math.frexp(clip_norm)[1] - 1) / _STEPS_PER_NORM


def std_in_steps(noise_std: float, clip_norm: float) -> float:
    """A standard deviation as OpenDP takes it.

    Raises:
        ValueError: If sums with such noise are beyond what 64-bit numbers hold exactly.
    """
    scale = noise_std / grid_step(clip_norm)
    if not scale <= _MOST_STEPS:
        raise ValueError(
            f"noise must be at most {_MOST_STEPS / _STEPS_PER_NORM:g} times the clipping norm for "
            f"DiscreteGaussian(), got {noise_std / clip_norm:g} times: write a larger epsilon, "
            "fewer rounds, or noise=Gaussian()."
        )
    return scale


def require() -> Any:
    """OpenDP's functions.

    Raises:
        ImportError: If it is not installed; says how to install it.
    """
    try:
        import opendp.prelude as opendp
    except ImportError as error:
        raise ImportError(
            "noise=DiscreteGaussian() needs OpenDP, which is not installed: "
            "pip install numpyro-dppvi[exact]"
        ) from error
    return opendp


def integers(scale: float, count: int) -> np.ndarray:
    """Independent draws of a discrete Gaussian on the integers, from the operating system's bits.

    Args:
        scale: Its parameter sigma, the standard deviation for all but the smallest.
        count: How many.

    Returns:
        64-bit integers, shape ``(count,)``.
    """
    opendp = require()
    opendp.enable_features(_FEATURE)  # where OpenDP keeps what it has not yet vetted: all of it
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    noise = opendp.m.make_gaussian(*space, scale)
    return np.array(noise([0] * count), np.int64)


def drawn(
    scales: Sequence[float], steps: Sequence[float], clients: np.ndarray, size: int
) -> StepNoise:
    """Fresh noise for every visit of a round.

    Args:
        scales: Standard deviation of each client's noise, in steps.
        steps: The step of each client.
        clients: The clients that are visited, of any shape.
        size: Entries of what one visit releases.

    Returns:
        Integers, leading shape that of ``clients``.
    """
    visits = clients.ravel().tolist()
    noise = np.array([integers(scales[client], size) for client in visits])
    noise = noise.reshape(*clients.shape, size)
    return StepNoise(
        high=jnp.asarray((noise >> _LOW_BITS).astype(np.int32)),
        low=jnp.asarray((noise & (2**_LOW_BITS - 1)).astype(np.int32)),
        step=jnp.asarray(np.array(steps, np.float32)[clients]),
    )


def in_steps(entries: Array, step: Array) -> Array:
    """Rounds to whole numbers of steps, which are 64-bit numbers without a fraction."""
    with jax.enable_x64(True):
        return jnp.round(entries.astype(jnp.float64) / step.astype(jnp.float64))


def from_steps(steps: PyTree, step: Array, like: PyTree) -> PyTree:
    """What so many steps are, in the precisions of ``like``."""
    with jax.enable_x64(True):
        wide = step.astype(jnp.float64)
        return jax.tree.map(lambda leaf, of: (wide * leaf).astype(of.dtype), steps, like)


def released(steps: PyTree, noise: StepNoise, weight: Array, like: PyTree) -> PyTree:
    """Adds up whole numbers of steps and their noise without any error, and then weighs the sum.

    Args:
        steps: Tree of whole numbers from :func:`in_steps`, to be summed over the leading axis.
        noise: One visit's.
        weight: What the noisy sum is multiplied by, a scalar.
        like: A tree with the precisions of the result.

    Returns:
        The noisy, weighted sums.
    """
    with jax.enable_x64(True):
        totals = noisy_steps(steps, noise)
        unit = weight.astype(jnp.float64) * noise.step.astype(jnp.float64)
        return jax.tree.map(lambda leaf, of: (unit * leaf).astype(of.dtype), totals, like)


def noisy_steps(steps: PyTree, noise: StepNoise) -> PyTree:
    """The sum over the leading axis with noise: whole numbers, without any error."""
    with jax.enable_x64(True):
        words = noise.high.astype(jnp.float64), noise.low.astype(jnp.float64)
        flat = words[0] * 2.0**_LOW_BITS + words[1]
        leaves, treedef = jax.tree.flatten(steps)
        totals, start = [], 0
        for leaf in leaves:
            total = jnp.sum(leaf, axis=0)
            mine = flat[start : start + total.size].reshape(total.shape)
            totals.append(total + mine)
            start += total.size
        return jax.tree.unflatten(treedef, totals)
