"""The methods: what a client does in a visit, as frozen values."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Coordinates
from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.objective import Automatic, Expectation, GaussHermite
from numpyro_dppvi.privacy import (
    DiscreteGaussian,
    FullBatch,
    Gaussian,
    Noise,
    PoissonSampling,
    Sampler,
    sampling,
)

Optimizer: TypeAlias = optax.GradientTransformation | NaturalGradient

# How far pure noise may carry a coordinate in a whole run, in units of the unconstrained latents,
# whose priors have a width of about one: see default_learning_rate.
_NOISE_TRAVEL = 1 / 3
_NOISELESS_LEARNING_RATE = 0.05
# Every step of a visit has keys of its own, which are made beforehand.
_MOST_STEPS = 10**6
# A visit of 20 steps goes no further than the small clips of these methods let through.
_SHARD_LEARNING_RATE = 0.02


def _set_each(method: Any, name: str, check: Callable[[str, Any], Any]) -> None:
    """Checks a field that holds one number for all clients or one a client."""
    each = _validate.one_or_each(name, getattr(method, name), check)
    object.__setattr__(method, name, each)


def _set_steps(method: Any) -> None:
    steps = _validate.positive_int("num_local_steps", method.num_local_steps, _MOST_STEPS)
    object.__setattr__(method, "num_local_steps", steps)


def _check_pieces(optimizer: Any, expectation: Any, *, natural: bool = False) -> None:
    """``natural``: whether steps may be natural gradients, which noise on each of them forbids."""
    allowed = Optimizer if natural else optax.GradientTransformation
    if optimizer is not None and not isinstance(optimizer, allowed):
        raise TypeError(
            f"optimizer must be an optax optimiser, got {_validate.shown(optimizer)}: write "
            "optimizer=optax.adam(0.05), say."
        )
    named = isinstance(expectation, Automatic | GaussHermite)
    if not named and (isinstance(expectation, type) or not callable(expectation)):
        raise TypeError(
            "expectation must be MonteCarlo(...) or another function to points, got "
            f"{_validate.shown(expectation)}: write expectation=MonteCarlo(10), say."
        )


@dataclass(frozen=True)
class DPOptimization:
    """Privacy by perturbing the local optimisation: DP-SGD at every client (paper, Theorem 1).

    In each local step the gradient of every sampled record's expected log likelihood is clipped,
    summed and noised; the cavity's and the entropy's gradients are functions of what was
    released before and are added exactly. The defaults are meant to be used untuned; most
    people change ``clip_norm`` if anything.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's gradient in (location, log standard
            deviation) of all latents; one number for all clients, or one a client.
        num_local_steps: Noisy gradients a visit; each is charged.
        optimizer: Any optax optimiser; its state starts afresh at every visit. ``None`` is Adam at
            :func:`default_learning_rate`, which suits any number of clients and rounds. Make it
            once and use it in every fit: to optax, ``adam(0.05)`` is another optimiser each time it
            is written, and each is compiled anew.
        sampler: ``FullBatch()``, ``PoissonSampling(sampling_prob)`` or
            ``FixedSizeSampling(batch_size)``.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is none.
    """

    clip_norm: float | tuple[float, ...] = 2.5
    num_local_steps: int = 3
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = Automatic()

    def __post_init__(self) -> None:
        _set_each(self, "clip_norm", _validate.positive)
        _set_steps(self)
        _check_pieces(self.optimizer, self.expectation)
        sampling.check_kind(self.sampler)


@dataclass(frozen=True)
class NonPrivate:
    """Partitioned variational inference without privacy (paper, Algorithm 1).

    Args:
        num_local_steps: Optimiser steps a visit, on all of the client's records.
        optimizer: Any optax optimiser, whose state starts afresh at every visit, or
            :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.

    Raises:
        ValueError: If the number of steps is not a whole number of at least 1.
        TypeError: If the optimiser or expectation is none.
    """

    num_local_steps: int = 50
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic()

    def __post_init__(self) -> None:
        _set_steps(self)
        _check_pieces(self.optimizer, self.expectation, natural=True)


@dataclass(frozen=True)
class ParameterPerturbation:
    """One local solve a visit; the change of natural parameters is clipped and noised (Sec. 4.2).

    The noise does not shrink with the number of records: a baseline, seldom of use. It is the
    limit of :class:`LocalAveraging` and :class:`VirtualClients` with one shard.

    Args:
        clip_norm: Bound on the L2 norm of the change of all natural parameters, one number or one
            a client; with :class:`NaturalGradient` in units of q's standard deviations.
        num_local_steps: Optimiser steps a visit; they cost no privacy.
        optimizer: Any optax optimiser, or :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else few draws, whose noise averages out over shards, steps and rounds.
        noise: ``Gaussian()``, or ``DiscreteGaussian()``: drawn exactly, on the host, by OpenDP.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is none.
    """

    clip_norm: float | tuple[float, ...] = 0.002
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)


@dataclass(frozen=True)
class LocalAveraging:
    """Clients average the changes of local models, one a shard of their records (Algorithm 2).

    Every shard starts from q, with the client's own cavity and a likelihood that is raised to the
    number of shards. The mean of the clipped changes is released with noise over the number of
    shards: more shards, less noise, but a noisier mean (Theorem 4).

    Args:
        num_shards: One number for all clients, or one a client; at most a client's records.
        clip_norm: Bound on the L2 norm of one shard's change of all natural parameters; with
            :class:`NaturalGradient` in units of q's standard deviations. It wants choosing for a
            model, by simulation on public or made-up records. One number for all clients, or one
            a client.
        num_local_steps: Optimiser steps a visit; they cost no privacy.
        optimizer: Any optax optimiser, or :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else few draws, whose noise averages out over shards, steps and rounds.
        noise: ``Gaussian()``, or ``DiscreteGaussian()``: drawn exactly, on the host, by OpenDP.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is none.
    """

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.2
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)


@dataclass(frozen=True)
class VirtualClients:
    """Every shard of a client's records is a client of its own, with its own factor (Algorithm 3).

    The sum of the clipped changes is released with noise. The shards' factors stay at the client:
    they follow the clipped changes without noise, and never leave.

    Args:
        num_shards: One number for all clients, or one a client; at most a client's records.
        clip_norm: Bound on the L2 norm of one shard's change of all natural parameters; with
            :class:`NaturalGradient` in units of q's standard deviations. It wants choosing for a
            model, by simulation on public or made-up records. One number for all clients, or one
            a client.
        num_local_steps: Optimiser steps a visit; they cost no privacy.
        optimizer: Any optax optimiser, or :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else few draws, whose noise averages out over shards, steps and rounds.
        noise: ``Gaussian()``, or ``DiscreteGaussian()``: drawn exactly, on the host, by OpenDP.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is none.
    """

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.005
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)


@dataclass(frozen=True)
class BayesianCommitteeMachine:
    """A baseline with one communication: clients fit alone, and their posteriors are multiplied.

    Tresp (2000); the paper's BCM. It is one synchronous, undamped round, whatever schedule,
    damping and number of rounds are asked for.

    Args:
        prior: ``"same"``: every client uses the whole prior, and the surplus is divided out
            afterwards. ``"split"``: every client uses the prior's M-th root.
        local: What a client does; its ``num_local_steps`` are all the steps there are.

    Raises:
        ValueError: If the prior is neither.
        TypeError: If ``local`` is another method.
    """

    prior: Literal["same", "split"] = "same"
    local: DPOptimization = DPOptimization(num_local_steps=30)

    def __post_init__(self) -> None:
        _validate.choice("prior", self.prior, ("same", "split"))
        if not isinstance(self.local, DPOptimization):
            raise TypeError(
                f"local must be a DPOptimization, got {_validate.shown(self.local)}: write "
                "local=DPOptimization(num_local_steps=30), say."
            )


@dataclass(frozen=True)
class GlobalVI:
    """A baseline with one communication a step: central DP-VI under a trusted aggregator.

    Jälkö, Dikmen and Honkela (2017). In every round all clients send a clipped sum of gradients
    with their share of the noise, and the server takes one optimiser step.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's gradient.
        optimizer: Any optax optimiser; its state lives through all rounds. ``None`` is Adam.
        sampler: ``FullBatch()``, ``PoissonSampling(sampling_prob)`` or
            ``FixedSizeSampling(batch_size)``, at every client.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is none.
    """

    clip_norm: float | tuple[float, ...] = 2.5
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = Automatic()

    def __post_init__(self) -> None:
        _set_each(self, "clip_norm", _validate.positive)
        _check_pieces(self.optimizer, self.expectation)
        sampling.check_kind(self.sampler)


ShardMethod: TypeAlias = ParameterPerturbation | LocalAveraging | VirtualClients
Method: TypeAlias = DPOptimization | NonPrivate | ShardMethod
AnyMethod: TypeAlias = Method | BayesianCommitteeMachine | GlobalVI
AnyOf = TypeVar("AnyOf", DPOptimization, NonPrivate, ShardMethod, Method, GlobalVI)


def check(method: Any) -> None:
    """Refuses what is not a method."""
    if not isinstance(method, AnyMethod):
        names = ", ".join(cls.__name__ for cls in get_args(AnyMethod))
        raise TypeError(
            f"method must be one of {names}, got {_validate.shown(method)}: write "
            "method=DPOptimization(), say."
        )


def check_assembled(method: Any) -> None:
    """Refuses what ``pvi`` cannot run as it is: what is no method, and what is wired otherwise."""
    check(method)
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be one that visits clients in rounds, got {_validate.shown(method)}: "
            f"write fit(..., method={type(method).__name__}()), which wires it."
        )


def draws_exactly(method: Any) -> bool:
    """Whether noise is drawn on the host, before a round is computed."""
    return isinstance(getattr(method, "noise", None), DiscreteGaussian)


def shards_by_client(method: Method, client_sizes: Sequence[int]) -> tuple[int, ...]:
    """How many shards each client cuts its records into.

    Raises:
        ValueError: If there is not one number for each client, or a client has fewer records.
    """
    chosen = getattr(method, "num_shards", 1)
    num_shards = _validate.by_client("num_shards", chosen, len(client_sizes))
    for client, (shards, size) in enumerate(zip(num_shards, client_sizes, strict=True)):
        if shards > size:
            raise ValueError(
                f"num_shards must be at most a client's records, got {shards} shards for client "
                f"{client}'s {size} records: write num_shards={size}, or fewer."
            )
    return num_shards


def clip_norms_by_client(method: Any, num_clients: int) -> tuple[float, ...]:
    """Each client's clipping norm; infinity where nothing is clipped.

    Raises:
        ValueError: If there is not one number for each client.
    """
    clip_norm = getattr(method, "clip_norm", math.inf)
    return _validate.by_client("clip_norm", clip_norm, num_clients)


def inclusion_probs_by_client(method: Any, client_sizes: Sequence[int]) -> tuple[float, ...]:
    """The probability that a record is in a batch, for each client's; 1 without batches."""
    sampler = getattr(method, "sampler", FullBatch())
    return tuple(
        float(sampler.of_client(number).inclusion_prob(size))
        for number, size in enumerate(client_sizes)
    )


def program_of(method: AnyOf) -> AnyOf:
    """The method without the numbers that clients are handed, which a compiled program is not of.

    Methods that differ in nothing else share a compilation. What reads these numbers from a method
    inside a program would read stand-ins: they are in ``protocol.client.LocalData``.
    """
    stand_ins: dict[str, Any] = {"clip_norm": 1.0, "num_shards": 1}
    sampler = getattr(method, "sampler", None)
    if isinstance(sampler, PoissonSampling):
        stand_ins["sampler"] = dataclasses.replace(sampler, sampling_prob=0.5)
    fields = {field.name for field in dataclasses.fields(method)}
    present = {name: value for name, value in stand_ins.items() if name in fields}
    return dataclasses.replace(method, **present)


def _check_shard_method(method: ShardMethod) -> None:
    _check_pieces(method.optimizer, method.expectation, natural=True)
    if not isinstance(method.noise, Noise):
        raise TypeError(
            "noise must be Gaussian() or DiscreteGaussian(), got "
            f"{_validate.shown(method.noise)}: write noise=DiscreteGaussian(), say."
        )
    _set_each(method, "clip_norm", _validate.positive)
    _set_steps(method)
    if hasattr(method, "num_shards"):
        _set_each(method, "num_shards", _validate.positive_int)


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
    if isinstance(method, ShardMethod):
        return _SHARD_LEARNING_RATE
    if isinstance(method, NonPrivate) or num_releases == 0:
        return _NOISELESS_LEARNING_RATE
    return _NOISE_TRAVEL / (damping * math.sqrt(num_releases))


def noisy_step(method: DPOptimization | GlobalVI, learning_rate: float, like: Coordinates) -> float:
    """How far the first step of a noisy solve takes a coordinate.

    Args:
        method: A method whose gradients are noisy.
        learning_rate: Adam's, where the method names no optimiser.
        like: Coordinates, of which only shapes count.
    """
    if method.optimizer is None:
        return learning_rate
    slope = jax.tree.map(jnp.ones_like, like)
    step, _ = method.optimizer.update(slope, method.optimizer.init(like), like)
    return max(float(jnp.max(jnp.abs(x), initial=0.0)) for x in jax.tree.leaves(step))
