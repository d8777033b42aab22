"""The methods: what a client does in a visit, as frozen values."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import optax

from numpyro_dppvi import _validate
from numpyro_dppvi.objective import Expectation, MonteCarlo
from numpyro_dppvi.privacy import FullBatch, Sampler


def _adam() -> optax.GradientTransformation:
    return _ADAM


# One object, so that two methods with the default optimiser are equal and share a compilation.
_ADAM = optax.adam(0.05)


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
        optimizer: Any optax optimiser; its state starts afresh at every visit.
        sampler: ``FullBatch()`` or ``PoissonSampling(sampling_prob)``.
        expectation: Points of q for the expected log likelihood.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is none.
    """

    clip_norm: float = 2.5
    num_local_steps: int = 3
    optimizer: optax.GradientTransformation = field(default_factory=_adam)
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
        optimizer: Any optax optimiser; its state starts afresh at every visit.
        expectation: Points of q for the expected log likelihood.

    Raises:
        ValueError: If the number of steps is not a whole number of at least 1.
        TypeError: If the optimiser or expectation is none.
    """

    num_local_steps: int = 50
    optimizer: optax.GradientTransformation = field(default_factory=_adam)
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
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"optimizer must be an optax optimiser, got {_validate.shown(optimizer)}: write "
            "optimizer=optax.adam(0.05), say."
        )
    if isinstance(expectation, type) or not callable(expectation):
        raise TypeError(
            "expectation must be MonteCarlo(...) or another function to points, got "
            f"{_validate.shown(expectation)}: write expectation=MonteCarlo(10), say."
        )
