"""The methods, as frozen values that carry what they do.

A method says what it releases (``plan``), what a client computes when it is visited (``visit``),
how its local problem is solved (``solver``), and how the server takes what is sent (``update``).
Nothing outside asks which method it is.

Methods are not related by inheritance. What several of them do alike is a function in this module,
which each of them takes into its class body under the method's name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Coordinates, Gradient, Model, Natural, PyTree
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import objective, visits
from numpyro_dppvi.methods.local_solve import Descent, Solver
from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.newton import Newton
from numpyro_dppvi.methods.objective import Automatic, Expectation, GaussHermite
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Received, Visit
from numpyro_dppvi.privacy import (
    DiscreteGaussian,
    FullBatch,
    Gaussian,
    GaussianShardSum,
    GaussianSum,
    Noise,
    PoissonSampling,
    PrivacyBudget,
    PrivacyPlan,
    Sampler,
    plan,
    sampling,
)
from numpyro_dppvi.privacy.accounting import Composition

Optimizer: TypeAlias = optax.GradientTransformation | NaturalGradient

# How far pure noise may carry a coordinate in a whole run, in units of the unconstrained latents,
# whose priors have a width of about one: see noisy_learning_rate.
_NOISE_TRAVEL = 1 / 3
_NOISELESS_LEARNING_RATE = 0.05
# Every step of a visit has keys of its own, which are made beforehand.
_MOST_STEPS = 10**6
# A visit of 20 steps goes no further than the small clips of these methods let through.
_SHARD_LEARNING_RATE = 0.02
_CENTRAL_LEARNING_RATE = 0.02


Aggregator: TypeAlias = Literal["needed", "useful", "useless"]
"""What a trusted aggregator is to a method."""

Releases: TypeAlias = Literal["gradients", "changes", "sums", "nothing"]
"""What gets noise: gradients of a solve, shards' changes, or sums that the server reads."""

Facts: TypeAlias = Mapping[str, Any]
"""What a plan must say about one client, by the names of its fields."""


class Study(NamedTuple):
    """What a plan is made of; all of it is public.

    Attributes:
        budgets: One a client.
        num_visits: Visits of each client in the rounds to be planned.
        client_sizes: Records of each client.
        num_shares: With a trusted aggregator, how many clients' noise makes up that of a sum.
        before: What each client had released before; empty for nothing.
    """

    budgets: Sequence[PrivacyBudget]
    num_visits: Sequence[int]
    client_sizes: Sequence[int]
    num_shares: int | None
    before: Sequence[Composition]


class Resolved(NamedTuple):
    """How a method is run that fixes what others leave to the caller.

    Attributes:
        local: The method that its clients run.
        alone: Whether every client fits a posterior of its own, in one synchronous, undamped visit.
        splits_prior: Whether each client gets the prior's M-th root for its own.
    """

    local: "Method"
    alone: bool = False
    splits_prior: bool = False


@runtime_checkable
class Method(Protocol):
    """What ``pvi`` asks of a method. Methods are frozen, and equal ones share a compilation.

    Attributes:
        releases: What gets noise and leaves a client, if anything.
        aggregator: What a trusted aggregator is to it.
        keeps_factors: Whether every shard has a factor of its own even if the server sees each
            client's changes.
        central: Whether the server takes the steps, prior and all, one a round of all clients:
            nothing is repaired or refined then, and all clients draw latents alike.
        damped: Whether a factor follows what is released by the damping's share of it.
        num_local_steps: Steps of a visit.
        expectation: The rule for the expected log likelihood.
    """

    releases: ClassVar[Releases]
    aggregator: ClassVar[Aggregator]
    keeps_factors: ClassVar[bool]
    central: ClassVar[bool]
    damped: ClassVar[bool]

    @property
    def num_local_steps(self) -> int:
        """Steps of a visit."""
        ...

    @property
    def expectation(self) -> Expectation:
        """The rule for the expected log likelihood."""
        ...

    def solver(self, learning_rate: Array | float) -> Solver:
        """How a local problem is solved; the learning rate is for Adam, where none is named."""
        ...

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """Adam's learning rate where the user names no optimiser.

        Args:
            num_releases: Noisy sums of all clients in the whole run; 0 without privacy.
            damping: The share of a change that is merged.
        """
        ...

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """What a client computes when it is visited; runs inside the compiled round."""
        ...

    def guide(self, guide: Any, model: Model) -> Any:
        """The guide that is used where this one is asked for; ``None`` asks for none."""
        ...

    def check(self, space: LatentSpace, family: MeanField) -> None:
        """Refuses a model or an approximation that it cannot work with."""
        ...

    def memory(self, family: MeanField, q: Natural, num_factors: int) -> PyTree:
        """What the server remembers of releases, before any; ``None`` for nothing."""
        ...

    def told(self, memory: PyTree, place: Array | int) -> PyTree:
        """What the server tells the client of a factor beside q; ``None`` for nothing."""
        ...

    def take(
        self, received: Received, releases: PyTree, memory: PyTree, places: Array
    ) -> tuple[Natural, PyTree]:
        """The changes of factors by a group's releases, and what the server remembers then.

        Runs inside the compiled round. Releases and changes have a leading axis, and ``places``
        are the factors'. With a trusted aggregator there is one release, the sum of all clients',
        and the factor is the one of all together.
        """
        ...

    def weights(self, num_shards: np.ndarray) -> np.ndarray:
        """What each client's sum over shards is multiplied by, shape ``(num_clients,)``."""
        ...

    def plan(self, study: Study) -> PrivacyPlan:
        """What a run will release and cost."""
        ...

    def planned(self, client_sizes: Sequence[int], num_shares: int | None) -> Sequence[Facts]:
        """What its plan says about each client, noise, budget and visits aside."""
        ...


@runtime_checkable
class Composite(Protocol):
    """A method that has its clients run another one, in a way of its own."""

    releases: ClassVar[Releases]
    aggregator: ClassVar[Aggregator]

    def resolved(self) -> Resolved:
        """How it is run."""
        ...


AnyMethod: TypeAlias = Method | Composite


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


# What methods do alike.


def _solver(self: Any, learning_rate: Array | float) -> Solver:
    """Natural gradients, or descent in coordinates; by Adam where no optimiser is named."""
    if isinstance(self.optimizer, NaturalGradient):
        return self.optimizer
    return Descent(optax.adam(learning_rate) if self.optimizer is None else self.optimizer)


def as_asked(self: Any, guide: Any, model: Model) -> Any:
    """The one that is asked for."""
    del self, model
    return guide


def any_model(self: Any, space: LatentSpace, family: MeanField) -> None:
    """Refuses none."""
    objective.rule_for(self.expectation, space, family)


def remembers_nothing(self: Any, family: MeanField, q: Natural, num_factors: int) -> None:
    """Nothing."""
    del self, family, q, num_factors


def tells_nothing(self: Any, memory: PyTree, place: Array | int) -> None:
    """Nothing."""
    del self, memory, place


def takes_releases(
    self: Any, received: Received, releases: Natural, memory: None, places: Array
) -> tuple[Natural, None]:
    """The releases are the changes."""
    del self, received, places
    return releases, memory


def _ones(self: Any, num_shards: np.ndarray) -> np.ndarray:
    """All 1: what is released is the sum."""
    del self
    return np.ones(len(num_shards))


def _weights(self: Any, num_shards: np.ndarray) -> np.ndarray:
    """All 1 for a sum over shards; one over their number for a mean."""
    return 1 / num_shards if self.averages else np.ones(len(num_shards))


def _small_rate(self: Any, num_releases: int, damping: float) -> float:
    """One that goes no further than small clips let through."""
    del self, num_releases, damping
    return _SHARD_LEARNING_RATE


def _plan_of_gradients(self: Any, study: Study) -> PrivacyPlan:
    """Noisy sums of per-record gradients, one a step."""
    return plan.of_gradients(
        study.budgets,
        self.sampler,
        clip_norm=self.clip_norm,
        releases_per_visit=self.num_local_steps,
        num_visits=study.num_visits,
        client_sizes=study.client_sizes,
        num_shares=study.num_shares,
        before=study.before,
    )


def _planned_gradients(
    self: Any, client_sizes: Sequence[int], num_shares: int | None
) -> Sequence[Facts]:
    """What its plan says about each client, noise, budget and visits aside."""
    physical_size = self.sampler.physical_size(client_sizes)
    clip_norms = clip_norms_by_client(self, len(client_sizes))
    return [
        {
            "mechanism": GaussianSum.__name__,
            "num_shares": num_shares or 1,
            "num_records": size,
            "clip_norm": clip_norm,
            "physical_size": physical_size,
            "releases_per_visit": self.num_local_steps,
            "sampler": self.sampler.of_client(number),
        }
        for number, (size, clip_norm) in enumerate(zip(client_sizes, clip_norms, strict=True))
    ]


def _plan_of_changes(self: Any, study: Study) -> PrivacyPlan:
    """Noisy sums of changes, one a visit."""
    num_shards = shards_by_client(self, study.client_sizes)
    return plan.of_changes(
        study.budgets,
        clip_norm=self.clip_norm,
        num_shards=num_shards,
        averaged=self.averages,
        num_visits=study.num_visits,
        client_sizes=study.client_sizes,
        num_shares=study.num_shares,
        noise_law=self.noise,
        before=study.before,
    )


def _planned_changes(
    self: Any, client_sizes: Sequence[int], num_shares: int | None
) -> Sequence[Facts]:
    """What its plan says about each client, noise, budget and visits aside."""
    clip_norms = clip_norms_by_client(self, len(client_sizes))
    shards = shards_by_client(self, client_sizes)
    weights = plan.shard_weights(
        clip_norms, shards, averaged=self.averages, aggregated=num_shares is not None
    )
    return [
        {
            "mechanism": GaussianShardSum.__name__,
            "num_shares": num_shares or 1,
            "num_records": size,
            "clip_norm": clip_norm,
            "releases_per_visit": 1,
            "noise": self.noise,
            "num_shards": num_shards,
            "weight": weight,
        }
        for size, clip_norm, num_shards, weight in zip(
            client_sizes, clip_norms, shards, weights, strict=True
        )
    ]


def _check_shard_method(self: Any) -> None:
    _check_pieces(self.optimizer, self.expectation, natural=True)
    if not isinstance(self.noise, Noise):
        raise TypeError(
            "noise must be Gaussian() or DiscreteGaussian(), got "
            f"{_validate.shown(self.noise)}: write noise=DiscreteGaussian(), say."
        )
    _set_each(self, "clip_norm", _validate.positive)
    _set_steps(self)
    if hasattr(self, "num_shards"):
        _set_each(self, "num_shards", _validate.positive_int)


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
            :func:`noisy_learning_rate`, which suits any number of clients and rounds. Make it
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

    releases: ClassVar[Releases] = "gradients"
    aggregator: ClassVar[Aggregator] = "useless"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True

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

    guide, check, told = as_asked, any_model, tells_nothing
    solver, memory, take, weights = _solver, remembers_nothing, takes_releases, _ones
    plan, planned = _plan_of_gradients, _planned_gradients

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """See :func:`noisy_learning_rate`."""
        return noisy_learning_rate(num_releases, damping)

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One solve by noisy gradients."""
        return visits.by_noisy_gradients(visit, likelihood, self.sampler)


@dataclass(frozen=True)
class NonPrivate:
    """Partitioned variational inference without privacy (paper, Algorithm 1).

    Args:
        num_local_steps: Optimiser steps a visit, on all of the client's records.
        optimizer: Any optax optimiser, whose state starts afresh at every visit, or
            :class:`NaturalGradient`. ``None`` is Newton's steps, which know how latents depend on
            each other; Adam for other guides than independent normals and more than 256 latents.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.

    Raises:
        ValueError: If the number of steps is not a whole number of at least 1.
        TypeError: If the optimiser or expectation is none.
    """

    releases: ClassVar[Releases] = "nothing"
    aggregator: ClassVar[Aggregator] = "useless"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True

    num_local_steps: int = 50
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic()

    def __post_init__(self) -> None:
        _set_steps(self)
        _check_pieces(self.optimizer, self.expectation, natural=True)

    guide, check, told = as_asked, any_model, tells_nothing
    memory, take, weights = remembers_nothing, takes_releases, _ones

    def solver(self, learning_rate: Array | float) -> Solver:
        """Newton's steps where no optimiser is named."""
        if self.optimizer is not None:
            return _solver(self, learning_rate)
        # Where these cannot be taken, Adam's rate falls, so that draws' noise stays in no factor.
        rate = optax.cosine_decay_schedule(learning_rate, self.num_local_steps, alpha=0.02)
        return Newton(Descent(optax.adam(rate)))

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """One that suits exact gradients."""
        del num_releases, damping
        return _NOISELESS_LEARNING_RATE

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One exact solve."""
        if isinstance(visit.solver, Newton):
            solver = dataclasses.replace(visit.solver, draws=likelihood.draws)
            visit = visit._replace(solver=solver)
        return visits.without_noise(visit, likelihood)

    def plan(self, study: Study) -> PrivacyPlan:
        """Refuses: there is none."""
        del study
        raise ValueError(
            "NonPrivate() adds no noise, and no budget covers that: write "
            "method=DPOptimization() to keep to the budget, or leave budget out."
        )

    def planned(self, client_sizes: Sequence[int], num_shares: int | None) -> Sequence[Facts]:
        """Nothing."""
        del num_shares
        return [{} for _ in client_sizes]


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

    releases: ClassVar[Releases] = "changes"
    aggregator: ClassVar[Aggregator] = "useful"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    clip_norm: float | tuple[float, ...] = 0.002
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)

    guide, check, told = as_asked, any_model, tells_nothing
    solver, memory, take, weights = _solver, remembers_nothing, takes_releases, _weights
    learning_rate, plan, planned = _small_rate, _plan_of_changes, _planned_changes

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One solve; its change is clipped and gets noise."""
        return visits.by_perturbed_changes(visit, likelihood, exponent=1.0)


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

    releases: ClassVar[Releases] = "changes"
    aggregator: ClassVar[Aggregator] = "useful"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.2
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)

    guide, check, told = as_asked, any_model, tells_nothing
    solver, memory, take, weights = _solver, remembers_nothing, takes_releases, _weights
    learning_rate, plan, planned = _small_rate, _plan_of_changes, _planned_changes

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """A solve a shard, with a likelihood raised to the number of shards."""
        return visits.by_perturbed_changes(visit, likelihood, exponent=visit.params.num_shards)


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

    releases: ClassVar[Releases] = "changes"
    aggregator: ClassVar[Aggregator] = "useful"
    keeps_factors: ClassVar[bool] = True
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.005
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def __post_init__(self) -> None:
        _check_shard_method(self)

    guide, check, told = as_asked, any_model, tells_nothing
    solver, memory, take, weights = _solver, remembers_nothing, takes_releases, _weights
    learning_rate, plan, planned = _small_rate, _plan_of_changes, _planned_changes

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """A solve a shard, each with its own cavity."""
        return visits.by_perturbed_changes(visit, likelihood, exponent=1.0)


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

    releases: ClassVar[Releases] = "gradients"
    aggregator: ClassVar[Aggregator] = "useless"

    prior: Literal["same", "split"] = "same"
    local: DPOptimization = DPOptimization(num_local_steps=30)

    def __post_init__(self) -> None:
        _validate.choice("prior", self.prior, ("same", "split"))
        if not isinstance(self.local, DPOptimization):
            raise TypeError(
                f"local must be a DPOptimization, got {_validate.shown(self.local)}: write "
                "local=DPOptimization(num_local_steps=30), say."
            )

    def resolved(self) -> Resolved:
        """Clients alone, at the learning rate of a client that nobody helps."""
        local = self.local
        if local.optimizer is None:
            rate = local.learning_rate(local.num_local_steps, damping=1.0)
            local = dataclasses.replace(local, optimizer=_adam(rate))
        return Resolved(local, alone=True, splits_prior=self.prior == "split")


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

    releases: ClassVar[Releases] = "gradients"
    aggregator: ClassVar[Aggregator] = "needed"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = True
    damped: ClassVar[bool] = False
    num_local_steps: ClassVar[int] = 1

    clip_norm: float | tuple[float, ...] = 2.5
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = Automatic()

    def __post_init__(self) -> None:
        _set_each(self, "clip_norm", _validate.positive)
        _check_pieces(self.optimizer, self.expectation)
        sampling.check_kind(self.sampler)

    guide, check, told = as_asked, any_model, tells_nothing
    weights, plan, planned = _ones, _plan_of_gradients, _planned_gradients

    def solver(self, learning_rate: Array | float) -> Descent:
        """Whose optimiser takes the server's steps."""
        return Descent(optax.adam(learning_rate) if self.optimizer is None else self.optimizer)

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """One for gradients of all records together."""
        del num_releases, damping
        return _CENTRAL_LEARNING_RATE

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One noisy gradient, where q is."""
        at = visit.family.coordinates(visit.q)
        gradient = likelihood.released(self.sampler, (visit.rng_key, visit.secret_key), at)
        return Outcome(gradient, None, jnp.zeros((), bool))

    def memory(self, family: MeanField, q: Natural, num_factors: int) -> PyTree:
        """The optimiser's state, which its learning rate does not enter."""
        del num_factors  # one: only sums are known
        return self.solver(_CENTRAL_LEARNING_RATE).optimizer.init(family.coordinates(q))

    def take(
        self, received: Received, releases: Gradient, memory: PyTree, places: Array
    ) -> tuple[Natural, PyTree]:
        """One optimiser step, on the prior's gradient and the clients'."""
        del places
        family, here = received.family, received.family.coordinates(received.q)
        free = jax.grad(received.prior_loss, argnums=1)(received.rng_key, here)
        gradient = jax.tree.map(lambda mine, sums: mine + sums[0], free, releases)
        optimizer = self.solver(received.learning_rate).optimizer
        updates, memory = optimizer.update(gradient, memory, here)
        after = family.natural(optax.apply_updates(here, updates))
        change = factors.divide(after, received.q)
        return jax.tree.map(lambda leaf: leaf[None], change), memory


def check(method: Any) -> None:
    """Refuses what is not a method."""
    if isinstance(method, type) or not isinstance(method, Method | Composite):
        raise TypeError(
            "method must be one of DPOptimization, NonPrivate, ParameterPerturbation, "
            "LocalAveraging, VirtualClients, BayesianCommitteeMachine, GlobalVI, or one of your "
            f"own, got {_validate.shown(method)}: write method=DPOptimization(), say."
        )


def check_assembled(method: Any) -> None:
    """Refuses what ``pvi`` cannot run as it is: what is no method, and what is made of others."""
    check(method)
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be one that visits clients in rounds, got {_validate.shown(method)}: "
            f"write fit(..., method={type(method).__name__}()), which does the rest."
        )


def resolved(method: AnyMethod) -> Resolved:
    """How a method is run: most of them as they are."""
    return method.resolved() if isinstance(method, Composite) else Resolved(method)


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


def program_of(method: Any) -> Any:
    """The method without the numbers that are arguments of a compiled program.

    Methods that differ in nothing else share a compilation. What reads these numbers from a method
    inside a program would read stand-ins: they are in ``visits.ClientParams``.
    """
    if isinstance(method, type) or not dataclasses.is_dataclass(method):
        return method
    stand_ins: dict[str, Any] = {"clip_norm": 1.0, "num_shards": 1}
    sampler = getattr(method, "sampler", None)
    if isinstance(sampler, PoissonSampling):
        stand_ins["sampler"] = dataclasses.replace(sampler, sampling_prob=0.5)
    fields = {field.name for field in dataclasses.fields(method)}
    present = {name: value for name, value in stand_ins.items() if name in fields}
    same: Any = dataclasses.replace(method, **present)  # type: ignore[type-var]
    return same


@functools.cache
def _adam(learning_rate: float) -> optax.GradientTransformation:
    """One object a rate, so that equal methods share a compilation."""
    return optax.adam(learning_rate)


def noisy_learning_rate(num_releases: int, damping: float) -> float:
    """Adam's learning rate for gradients that are mostly noise.

    Adam turns a gradient that is all noise into steps of about the learning rate in random
    directions. Over all noisy steps of all clients they add up to a random walk of
    ``learning_rate * damping * sqrt(num_releases)``, which is held at a third. Many clients then
    take small steps and few clients large ones.

    Args:
        num_releases: Noisy gradients of all clients in the whole run; 0 without privacy.
        damping: The share of a change that is merged.

    Returns:
        The learning rate, in units of (location, log standard deviation).
    """
    if num_releases == 0:
        return _NOISELESS_LEARNING_RATE
    return _NOISE_TRAVEL / (damping * math.sqrt(num_releases))


def noisy_step(method: Any, learning_rate: float, like: Coordinates) -> float:
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
