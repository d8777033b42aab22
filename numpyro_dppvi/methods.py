"""The methods: what a client does in a visit, as frozen values."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import optax

from numpyro_dppvi import _validate
from numpyro_dppvi.objective import Expectation, MonteCarlo
from numpyro_dppvi.privacy import FullBatch, Sampler

# How far pure noise may carry a coordinate in a whole run, in units of the unconstrained latents,
# whose priors have a width of about one: see default_learning_rate.
_NOISE_TRAVEL = 1 / 3
_NON_PRIVATE_LEARNING_RATE = 0.05


@dataclass(frozen=True)
class DPOptimization:
    """Privacy by perturbing the local optimisation: DP-SGD at every client (paper, Theorem 1).

    In each local step the gradient of every sampled record's expected log likelihood is clipped,
    summed and noised; the cavity's and the entropy's gradients are functions of what was
    released before and are added exactly. The defaults are meant to be used untuned; most
    people change ``clip_norm`` if anything.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's gradient in (location, log standard
            deviation) of all latents.
        num_local_steps: Noisy gradients a visit; each is charged.
        optimizer: Any optax optimiser; its state starts afresh at every visit. ``None`` is Adam at
            :func:`default_learning_rate`, which suits any number of clients and rounds.
        sampler: ``FullBatch()`` or ``PoissonSampling(sampling_prob)``.
        expectation: Points of q for the expected log likelihood.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is none.
    """

    clip_norm: float = 2.5
    num_local_steps: int = 3
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = MonteCarlo()

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", _validate.positive("clip_norm", self.clip_norm))
        _validate.positive_int("num_local_steps", self.num_local_steps)
        _check_pieces(self.optimizer, self.expectation)
        if isinstance(self.sampler, type) or not hasattr(self.sampler, "dp_event"):
            raise TypeError(
                "sampler must be FullBatch() or PoissonSampling(...), got "
                f"{_validate.shown(self.sampler)}: write sampler=PoissonSampling(0.1), say."
            )


@dataclass(frozen=True)
class NonPrivate:
    """Partitioned variational inference without privacy (paper, Algorithm 1).

    Args:
        num_local_steps: Optimiser steps a visit, on all of the client's records.
        optimizer: Any optax optimiser; its state starts afresh at every visit. ``None`` is Adam.
        expectation: Points of q for the expected log likelihood.

    Raises:
        ValueError: If the number of steps is not a whole number of at least 1.
        TypeError: If the optimiser or expectation is none.
    """

    num_local_steps: int = 50
    optimizer: optax.GradientTransformation | None = None
    expectation: Expectation = MonteCarlo()

    def __post_init__(self) -> None:
        _validate.positive_int("num_local_steps", self.num_local_steps)
        _check_pieces(self.optimizer, self.expectation)


Method: TypeAlias = DPOptimization | NonPrivate


def check(method: Any) -> None:
    """Refuses what is not a method."""
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be DPOptimization(...) or NonPrivate(...), got "
            f"{_validate.shown(method)}: write method=DPOptimization(), say."
        )


def _check_pieces(optimizer: Any, expectation: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax optimiser, got {_validate.shown(optimizer)}: write "
            "optimizer=optax.adam(0.05), say."
        )
    if isinstance(expectation, type) or not callable(expectation):
        raise TypeError(
            "expectation must be MonteCarlo(...) or another function to points, got "
            f"{_validate.shown(expectation)}: write expectation=MonteCarlo(10), say."
        )


def default_learning_rate(method: Method, num_releases: int, damping: float) -> float:
    """Adam's learning rate where the user names no optimiser.

    Adam turns a gradient that is all noise into steps of about the learning rate in random
    directions. Over all noisy steps of all clients they add up to a random walk of
    ``learning_rate * damping * sqrt(num_releases)``, which is held at a third. Many clients then
    take small steps and few clients large ones.

    Args:
        method: The method.
        num_releases: Noisy gradients of all clients in the whole run; 0 without privacy.
        damping: The share of a change that is merged.

    Returns:
        The learning rate, in units of (location, log standard deviation).
    """
    if isinstance(method, NonPrivate) or num_releases == 0:
        return _NON_PRIVATE_LEARNING_RATE
    return _NOISE_TRAVEL / (damping * math.sqrt(num_releases))
