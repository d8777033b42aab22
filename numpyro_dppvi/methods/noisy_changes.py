"""Methods whose clients release the clipped, noisy change of natural parameters of whole solves."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.methods import values, visits
from numpyro_dppvi.methods.objective import Automatic, Expectation
from numpyro_dppvi.methods.values import Aggregator, Optimizer, Releases, Study
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Visit
from numpyro_dppvi.privacy import Gaussian, Noise, PrivacyPlan, plan

# Steps cost no privacy here, but what goes beyond the clip is cut off: twenty of these go about as
# far as the methods' small default clips let through.
_SHARD_LEARNING_RATE = 0.02


class _OfChanges(values.Method):
    """What these methods have in common: all but their shards and what they do with them."""

    releases: ClassVar[Releases] = "changes"
    aggregator: ClassVar[Aggregator] = "useful"
    averages: ClassVar[bool] = False

    def __post_init__(self: Any) -> None:
        values.check_pieces(self.optimizer, self.expectation, natural=True)
        _validate.instance("noise", self.noise, get_args(Noise), "privacy.DiscreteGaussian()")
        values.set_each(self, "clip_norm", _validate.positive)
        values.set_steps(self)
        # ParameterPerturbation has one shard, and no field that says so.
        if hasattr(self, "num_shards"):
            values.set_each(self, "num_shards", _validate.positive_int)

    solver = values.solver

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """One that goes no further than small clips let through."""
        return _SHARD_LEARNING_RATE

    def weights(self, num_shards: np.ndarray) -> np.ndarray:
        """All 1 for a sum over shards; one over their number for a mean."""
        return 1 / num_shards if self.averages else np.ones(len(num_shards))

    def plan(self: Any, study: Study) -> PrivacyPlan:
        """Noisy sums of changes, one per visit."""
        num_shards = values.shards_by_client(self, study.client_sizes)
        return plan.of_changes(
            clip_norm=self.clip_norm,
            num_shards=num_shards,
            averaged=self.averages,
            noise_law=self.noise,
            **study._asdict(),
        )

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """A solve a shard, each with its own cavity where shards keep factors."""
        return visits.by_perturbed_changes(visit, likelihood, exponent=1.0)


@dataclass(frozen=True)
class ParameterPerturbation(_OfChanges):
    """One local solve a visit; the change of natural parameters is clipped and noised (Sec. 4.2).

    The noise does not shrink with the number of records: a baseline, seldom of use. It is the
    limit of :class:`LocalAveraging` and :class:`VirtualClients` with one shard.

    Args:
        clip_norm: Bound on the L2 norm of the change of all natural parameters, one number or one
            per client; with :class:`NaturalGradient` in units of q's standard deviations.
        num_local_steps: Optimiser steps a visit; they cost no privacy.
        optimizer: Any optax optimiser, or :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else few draws, whose noise averages out over shards, steps and rounds.
        noise: ``Gaussian()``, or ``DiscreteGaussian()``: drawn exactly, on the host, by OpenDP.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is of another kind.
    """

    clip_norm: float | tuple[float, ...] = 0.002
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()


@dataclass(frozen=True)
class LocalAveraging(_OfChanges):
    """Clients average the changes of local models, one per shard of their records (Algorithm 2).

    Every shard starts from q, with the client's own cavity and a likelihood that is raised to the
    number of shards. The mean of the clipped changes is released with noise over the number of
    shards: more shards, less noise, but a noisier mean (Theorem 4).

    Arguments are those of :class:`VirtualClients`: ``num_shards``, ``clip_norm``, which is larger
    here because it is for a mean, ``num_local_steps``, ``optimizer``, ``expectation`` and
    ``noise``.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is of another kind.
    """

    averages: ClassVar[bool] = True

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.2
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """A solve a shard, with a likelihood raised to the number of shards."""
        # A shard stands for all N_m shards: with its likelihood to the power N_m, each solve aims
        # at the client's whole posterior, and the mean of the changes is one client's change. The
        # number is the plan's: what self has inside a program is a stand-in (values.program_of).
        return visits.by_perturbed_changes(visit, likelihood, exponent=visit.params.num_shards)


@dataclass(frozen=True)
class VirtualClients(_OfChanges):
    """Every shard of a client's records is a client of its own, with its own factor (Algorithm 3).

    The sum of the clipped changes is released with noise. The shards' factors stay at the client:
    they follow the clipped changes without noise, and never leave.

    Args:
        num_shards: One number for all clients, or one per client; at most a client's records.
        clip_norm: Bound on the L2 norm of one shard's change of all natural parameters; with
            :class:`NaturalGradient` in units of q's standard deviations. It wants choosing for a
            model, by simulation on public or made-up records. One number for all clients, or one
            per client.
        num_local_steps: Optimiser steps a visit; they cost no privacy.
        optimizer: Any optax optimiser, or :class:`NaturalGradient`. ``None`` is Adam.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else few draws, whose noise averages out over shards, steps and rounds.
        noise: ``Gaussian()``, or ``DiscreteGaussian()``: drawn exactly, on the host, by OpenDP.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, expectation or noise is of another kind.
    """

    keeps_factors: ClassVar[bool] = True

    num_shards: int | tuple[int, ...]
    clip_norm: float | tuple[float, ...] = 0.005
    num_local_steps: int = 20
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic(2)
    noise: Noise = Gaussian()
