"""Methods whose clients release noisy sums of per-record gradients, and a committee of them."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Gradient, Natural, PyTree
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import values, visits
from numpyro_dppvi.methods.local_solve import NOISELESS_LEARNING_RATE, Descent
from numpyro_dppvi.methods.objective import Automatic, Expectation
from numpyro_dppvi.methods.values import Aggregator, Releases, Resolved, Study
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Received, Visit
from numpyro_dppvi.privacy import FullBatch, PrivacyPlan, Sampler, by_purpose, plan, sampling

# How far pure noise may carry a coordinate in a whole run, in units of the unconstrained latents,
# whose priors have a width of about one: see noisy_learning_rate.
_NOISE_TRAVEL = 1 / 3
# One object a rate, so that equal methods share a compilation.
_adam = functools.cache(optax.adam)
# The server's steps follow sums over all clients, whose noise is small beside a visit's.
_CENTRAL_LEARNING_RATE = 0.02


def plan_of_gradients(self: Any, study: Study) -> PrivacyPlan:
    """Noisy sums of per-record gradients, one per step."""
    return plan.of_gradients(
        sampler=self.sampler,
        clip_norm=self.clip_norm,
        releases_per_visit=self.num_local_steps,
        **study._asdict(),
    )


@dataclass(frozen=True)
class DPOptimization(values.Method):
    """Privacy by perturbing the local optimisation: DP-SGD at every client (paper, Theorem 1).

    In each local step the gradient of every sampled record's expected log likelihood is clipped,
    summed and noised; the cavity's and the entropy's gradients are functions of what was
    released before and are added exactly. The defaults are meant to be used untuned; most
    people change ``clip_norm`` if anything.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's gradient in (location, log standard
            deviation) of all latents; one number for all clients, or one per client.
        num_local_steps: Noisy gradients a visit; each is charged.
        optimizer: Any optax optimiser; its state starts afresh at every visit. ``None`` is Adam at
            :func:`noisy_learning_rate`, which suits any number of clients and rounds. Make it
            once and use it in every fit: to optax, ``adam(0.05)`` is another optimiser each time it
            is written, and each is compiled anew.
        sampler: ``FullBatch()``, ``PoissonSampling(sampling_prob)`` or
            ``FixedSizeSampling(batch_size)``.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.
        microbatch_size: The most records of a client that are computed at once, which bounds memory
            and changes no result. ``None`` for as many as stay in a core's cache.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is of another kind.
    """

    releases: ClassVar[Releases] = "gradients"
    aggregator: ClassVar[Aggregator] = "useless"

    clip_norm: float | tuple[float, ...] = 2.5
    num_local_steps: int = 3
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = Automatic()
    microbatch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        values.set_each(self, "clip_norm", _validate.positive)
        values.set_microbatch(self)
        values.set_steps(self)
        values.check_pieces(self.optimizer, self.expectation)
        sampling.check_kind(self.sampler)

    solver, plan = values.solver, plan_of_gradients

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """See :func:`noisy_learning_rate`."""
        return noisy_learning_rate(num_releases, damping)

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One solve by noisy gradients."""
        return visits.by_noisy_gradients(visit, likelihood, self.sampler)


@dataclass(frozen=True)
class BayesianCommitteeMachine(values.AnyMethod):
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
        example = "DPOptimization(num_local_steps=30)"
        _validate.instance("local", self.local, DPOptimization, example)

    def resolved(self) -> Resolved:
        """Clients alone, at the learning rate of a client that nobody helps."""
        local = self.local
        if local.optimizer is None:
            # The only visit there is: all noisy steps that will ever move this q are its own.
            rate = local.learning_rate(local.num_local_steps, damping=1.0)
            local = dataclasses.replace(local, optimizer=_adam(rate))
        return Resolved(local, alone=True, splits_prior=self.prior == "split")


@dataclass(frozen=True)
class GlobalVI(values.Method):
    """A baseline with one communication a step: central DP-VI under a trusted aggregator.

    Jälkö, Dikmen and Honkela (2017). In every round all clients send a clipped sum of gradients
    with their share of the noise, and the server takes one optimiser step.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's gradient.
        optimizer: Any optax optimiser; its state lives through all rounds. ``None`` is Adam.
        sampler: As of :class:`DPOptimization`, at every client; ``expectation`` and
            ``microbatch_size`` likewise.

    Raises:
        ValueError: If a number is outside its range.
        TypeError: If the optimiser, sampler or expectation is of another kind.
    """

    releases: ClassVar[Releases] = "gradients"
    aggregator: ClassVar[Aggregator] = "needed"
    central: ClassVar[bool] = True
    damped: ClassVar[bool] = False
    num_local_steps: ClassVar[int] = 1

    clip_norm: float | tuple[float, ...] = 2.5
    optimizer: optax.GradientTransformation | None = None
    sampler: Sampler = FullBatch()
    expectation: Expectation = Automatic()
    microbatch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        values.set_each(self, "clip_norm", _validate.positive)
        values.set_microbatch(self)
        values.check_pieces(self.optimizer, self.expectation)
        sampling.check_kind(self.sampler)

    plan = plan_of_gradients

    def solver(self, learning_rate: Array | float) -> Descent:
        """Whose optimiser takes the server's steps."""
        return Descent(optax.adam(learning_rate) if self.optimizer is None else self.optimizer)

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """One for gradients of all records together."""
        return _CENTRAL_LEARNING_RATE

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One noisy gradient, where q is."""
        # All clients draw alike (``central``): their sum is a gradient of all records at the same
        # draws.
        at = visit.family.coordinates(visit.q)
        gradient = likelihood.released(
            self.sampler, (visit.rng_key, by_purpose(visit.secret_key)), at
        )
        return Outcome(gradient, None, jnp.zeros((), bool))

    def memory(self, space: LatentSpace, family: MeanField, q: Natural, num_factors: int) -> PyTree:
        """The optimiser's state, which its learning rate does not enter."""
        # One state for all clients, because the server knows nothing but their sums.
        return self.solver(_CENTRAL_LEARNING_RATE).optimizer.init(family.coordinates(q))

    def take(
        self, received: Received, releases: Gradient, memory: PyTree, places: Array
    ) -> tuple[Natural, PyTree]:
        """One optimiser step, on the prior's gradient and the clients'."""
        family, here = received.family, received.family.coordinates(received.q)
        # The clients' gradients are those of E_q[-log p(x | theta)] alone. The rest of the loss,
        # which no record enters, is added here, once and without noise.
        free = jax.grad(received.prior_loss, argnums=1)(received.rng_key, here)
        gradient = jax.tree.map(lambda mine, sums: mine + sums[0], free, releases)
        optimizer = self.solver(received.learning_rate).optimizer
        updates, memory = optimizer.update(gradient, memory, here)
        after = family.natural(optax.apply_updates(here, updates))
        change = factors.divide(after, received.q)
        # A leading axis of the one factor that stands for all clients.
        return jax.tree.map(lambda leaf: leaf[None], change), memory


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
        return NOISELESS_LEARNING_RATE
    return _NOISE_TRAVEL / (damping * math.sqrt(num_releases))


def noisy_step(method: Any, learning_rate: float, family: MeanField) -> float:
    """How far the first step of a noisy solve takes a coordinate."""
    # Adam's first step is its rate, whatever the gradient. Others are tried on a gradient of ones.
    if method.optimizer is None:
        return learning_rate
    like = family.standard()
    slope = jax.tree.map(jnp.ones_like, like)
    step, _ = method.optimizer.update(slope, method.optimizer.init(like), like)
    return max(float(jnp.max(jnp.abs(x), initial=0.0)) for x in jax.tree.leaves(step))
