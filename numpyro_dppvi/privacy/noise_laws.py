"""The distributions of noise: Gaussian in 64 bits, or a discrete Gaussian drawn by OpenDP.

The discrete Gaussian is for methods that release once per visit. Clipped changes are rounded to
integer multiples of a step and summed exactly; the noise is an integer, too, drawn on the host and
passed to the compiled round. Scaling the noisy integers afterwards is post-processing.
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

# The clipping norm is between 2^20 and 2^21 steps.
_STEPS_PER_NORM = 2**20
# 64-bit floats hold integers below 2^53 exactly. Noise with this standard deviation stays below
# that with overwhelming probability: 2^53 is 128 standard deviations.
_MOST_STEPS = 2.0**46
# Integers are passed to the program as two 32-bit words, because JAX truncates 64-bit integers.
_LOW_BITS = 26


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise in 64-bit arithmetic, from a cipher's random bits (the default)."""

    @property
    def name(self) -> str:
        """The noise in words."""
        return "Gaussian noise"

    def dp_event(self, noise_multiplier: float) -> dpa.DpEvent:
        """The accounting event of a release, with noise in units of a contribution."""
        return dpa.GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class DiscreteGaussian:
    """Discrete Gaussian noise, drawn exactly by OpenDP (Canonne, Kamath and Steinke 2020).

    Needs ``pip install numpyro-dppvi[exact]``. It is accounted as concentrated differential
    privacy, the guarantee that is proven in many dimensions, and takes 7 to 9 % more noise at the
    usual budgets. It cannot be combined with a trusted aggregator, because shares of discrete
    Gaussian noise do not add up to a discrete Gaussian, nor with ``insecure_noise_seed``, because
    OpenDP draws from the operating system.
    """

    @property
    def name(self) -> str:
        """The noise in words."""
        return "discrete Gaussian noise, drawn exactly,"

    def dp_event(self, noise_multiplier: float) -> dpa.DpEvent:
        """The accounting event of a release under ``"replace_one"``."""
        # Discrete Gaussian noise satisfies rho-zCDP with rho = sensitivity^2 / (2 std^2), as
        # continuous Gaussian noise does.
        if noise_multiplier == 0:
            return dpa.ZCDpEvent(math.inf)
        moved = unit_sensitivity("replace_one")
        return dpa.ZCDpEvent(moved**2 / (2 * noise_multiplier**2))


Noise: TypeAlias = Gaussian | DiscreteGaussian
"""The noise distribution of a method that releases once per visit."""


class StepNoise(NamedTuple):
    """Integer noise for a number of visits, and the steps that it counts.

    Attributes:
        high: The integers without their last 26 bits, as 32-bit integers; the last axis are the
            entries.
        low: The last 26 bits, not negative, of the same shape.
        step: The step of each visit's grid, a power of two; without the last axis.
    """

    high: Array
    low: Array
    step: Array


def grid_step(clip_norm: float) -> float:
    """The step that clipped changes are rounded to: a power of two, at most 2^-20 of the norm."""
    # A power of two divides exactly: numbers of steps are whole, and 32 bits hold the step.
    return math.ldexp(1.0, math.frexp(clip_norm)[1] - 1) / _STEPS_PER_NORM


def std_in_steps(noise_std: float, clip_norm: float) -> float:
    """A standard deviation in steps; refused if it is too large to be held exactly in 64 bits."""
    # In units of the grid, whose step is a power of two: the quotient is exact.
    scale = noise_std / grid_step(clip_norm)
    if not scale <= _MOST_STEPS:
        raise ValueError(
            f"noise must be at most {_MOST_STEPS / _STEPS_PER_NORM:g} times the clipping norm for "
            f"DiscreteGaussian(), got {noise_std / clip_norm:g} times: write a larger epsilon, "
            "fewer rounds, or noise=Gaussian()."
        )
    return scale


def require() -> Any:
    """The module of OpenDP; raises an ImportError that says how to install it."""
    try:
        import opendp.prelude as opendp
    except ImportError as error:
        raise ImportError(
            "noise=DiscreteGaussian() needs OpenDP, which is not installed: "
            "pip install numpyro-dppvi[exact]"
        ) from error
    return opendp


def integers(scale: float, count: int) -> np.ndarray:
    """Independent discrete Gaussian draws, 64-bit integers of shape ``(count,)``.

    ``scale`` is the parameter sigma, which is the standard deviation unless it is well below 1.
    """
    opendp = require()
    opendp.enable_features("contrib")  # OpenDP marks its constructors as not yet vetted
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    noise = opendp.m.make_gaussian(*space, scale)
    return np.array(noise([0] * count), np.int64)


def drawn(
    scales: Sequence[float], steps: Sequence[float], clients: np.ndarray, size: int
) -> StepNoise:
    """Fresh noise for every visit of a round, of ``size`` entries.

    ``scales`` are the standard deviations of the clients' noise, in ``steps`` of their own.
    """
    visits = clients.ravel().tolist()
    noise = np.array([integers(scales[client], size) for client in visits])
    noise = noise.reshape(*clients.shape, size)
    return StepNoise(
        # An arithmetic shift: high carries the sign, low is between 0 and 2^26.
        high=jnp.asarray((noise >> _LOW_BITS).astype(np.int32)),
        low=jnp.asarray((noise & (2**_LOW_BITS - 1)).astype(np.int32)),
        step=jnp.asarray(np.array(steps, np.float32)[clients]),
    )


def in_steps(entries: Array, step: Array) -> Array:
    """Rounds to integer numbers of steps, as 64-bit floats."""
    with jax.enable_x64(True):
        return jnp.round(entries.astype(jnp.float64) / step.astype(jnp.float64))


def from_steps(steps: PyTree, step: Array, like: PyTree) -> PyTree:
    """Numbers of steps converted to values, in the dtypes of ``like``."""
    with jax.enable_x64(True):
        wide = step.astype(jnp.float64)
        return jax.tree.map(lambda leaf, of: (wide * leaf).astype(of.dtype), steps, like)


def released(steps: PyTree, noise: StepNoise, weight: Array, like: PyTree) -> PyTree:
    """The weighted sum over the leading axis with noise; exact up to the final scaling."""
    with jax.enable_x64(True):
        # All numbers are integers below 2^53, so 64-bit floats add them exactly. Noise comes in two
        # words of 32 bits, because JAX cuts 64-bit integers where x64 is off.
        words = noise.high.astype(jnp.float64), noise.low.astype(jnp.float64)
        flat = words[0] * 2.0**_LOW_BITS + words[1]
        leaves, treedef = jax.tree.flatten(steps)
        totals, start = [], 0
        for leaf in leaves:
            total = jnp.sum(leaf, axis=0)
            mine = flat[start : start + total.size].reshape(total.shape)
            totals.append(total + mine)
            start += total.size
        # The one rounding is here, after the noise: post-processing.
        unit = weight.astype(jnp.float64) * noise.step.astype(jnp.float64)
        noisy = jax.tree.unflatten(treedef, totals)
        return jax.tree.map(lambda leaf, of: (unit * leaf).astype(of.dtype), noisy, like)
