"""What a method carries, what is asked of any of them, and what most of them do alike.

Methods are frozen values. A method says what it releases (``plan``), what a client computes when it
is visited (``visit``), how its local problem is solved (``solver``), and how the server takes what
is sent (``take``). Nothing outside asks which method it is.

What most of them do alike they inherit from ``Method``. What only several of them do is a function
here or beside them, which each of these takes into its class body under the method's name.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import optax

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Model, Natural, PyTree
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import objective
from numpyro_dppvi.methods.local_solve import Descent, Solver
from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.objective import Automatic, Expectation, GaussHermite
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Received, Visit
from numpyro_dppvi.privacy import DiscreteGaussian, PoissonSampling, PrivacyBudget, PrivacyPlan
from numpyro_dppvi.privacy.accounting import Composition

Optimizer: TypeAlias = optax.GradientTransformation | NaturalGradient

# Every step of a visit has keys of its own, which are made beforehand.
_MOST_STEPS = 10**6

Aggregator: TypeAlias = Literal["needed", "useful", "useless"]
"""What a trusted aggregator is to a method."""

Releases: TypeAlias = Literal["gradients", "changes", "sums", "nothing"]
"""What gets noise: gradients of a solve, shards' changes, or sums that the server reads."""


class Study(NamedTuple):
    """What a plan is made of; all of it is public.

    Attributes:
        budgets: One per client.
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


class AnyMethod(ABC):
    """A method, or one that has its clients run another one, in a way of its own."""

    releases: ClassVar[Releases]
    aggregator: ClassVar[Aggregator]

    @abstractmethod
    def resolved(self) -> Resolved:
        """How it is run."""


class Method(AnyMethod):
    """What ``pvi`` asks of a method. Methods are frozen, and equal ones share a compilation.

    What most methods are and do is inherited; a method says what is otherwise with it, and what has
    no default here: ``solver``, ``learning_rate``, ``visit`` and ``plan``.

    Attributes:
        releases: What gets noise and leaves a client, if anything.
        aggregator: What a trusted aggregator is to it.
        keeps_factors: Whether every shard has a factor of its own even if the server sees each
            client's changes.
        central: Whether the server takes the steps, prior and all, one per round of all clients:
            nothing is repaired or refined then, and all clients draw latents alike.
        damped: Whether a factor follows what is released by the damping's share of it.
        wide: Whether the server adds up factors in 64 bits, whatever the program's precision.
        matches: Whether the factor of a prior outside the family gives q the posterior's moments,
            where these can be had (``methods.hierarchies``), and not the projection's.
        num_local_steps: Steps of a visit.
        expectation: The rule for the expected log likelihood.
    """

    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = True
    wide: ClassVar[bool] = False
    matches: ClassVar[bool] = False

    if TYPE_CHECKING:  # fields of some methods, and constants of others

        @property
        def num_local_steps(self) -> int:
            """Steps of a visit."""

        @property
        def expectation(self) -> Expectation:
            """The rule for the expected log likelihood."""

    def resolved(self) -> Resolved:
        """As it is."""
        return Resolved(self)

    @abstractmethod
    def solver(self, learning_rate: Array | float) -> Solver:
        """How a local problem is solved; the learning rate is for Adam, where none is named."""

    @abstractmethod
    def learning_rate(self, num_releases: int, damping: float) -> float:
        """Adam's learning rate where the user names no optimiser.

        Args:
            num_releases: Noisy sums of all clients in the whole run; 0 without privacy.
            damping: The share of a change that is merged.
        """

    @abstractmethod
    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """What a client computes when it is visited; runs inside the compiled round."""

    @abstractmethod
    def plan(self, study: Study) -> PrivacyPlan:
        """What a run will release and cost.

        A run under a plan of other mechanisms, noise and budgets aside, or of other numbers of
        releases is refused.
        """

    def guide(self, guide: Any, model: Model) -> Any:
        """The guide that is used where this one is asked for (``None`` asks for none): it."""
        return guide

    def coordinates(self, space: LatentSpace) -> LatentSpace:
        """The model as it is best seen where no guide is asked for: as it is written."""
        return space

    def check(self, space: LatentSpace, family: MeanField) -> None:
        """Refuses a model or an approximation that it cannot work with.

        Here, no more than a rule for expectations that model or guide do not allow.
        """
        objective.rule_for(self.expectation, space, family)

    def memory(self, space: LatentSpace, family: MeanField, q: Natural, num_factors: int) -> PyTree:
        """What the server remembers of releases, before any: ``None``, for nothing."""

    def told(self, memory: PyTree, place: Array | int) -> PyTree:
        """What the server tells the client of a factor beside q: ``None``, for nothing."""

    def take(
        self, received: Received, releases: PyTree, memory: PyTree, places: Array
    ) -> tuple[Natural, PyTree]:
        """The changes of factors by a group's releases, and what the server remembers then.

        Here, the releases are the changes. Runs inside the compiled round. Releases and changes
        have a leading axis, and ``places`` are the factors'. What is remembered ``ByClient`` are
        the rows at these places. With a trusted aggregator there is one release, the sum of all
        clients', and the factor is the one of all together.
        """
        return releases, memory

    def said(
        self, space: LatentSpace, family: MeanField, q: Natural, memory: PyTree
    ) -> Mapping[str, float | None]:
        """What the memory says of a run that has ended, by the names of ``Status``'s fields.

        These are ``pull``, ``cut``, ``unseen`` and ``widened``; ``None``, or no entry, where nobody
        can tell.
        """
        return {}

    def weights(self, num_shards: np.ndarray) -> np.ndarray:
        """What each client's sum over shards is multiplied by, shape ``(num_clients,)``: 1."""
        return np.ones(len(num_shards))


def check(method: Any) -> None:
    """Refuses what is not a method."""
    if not isinstance(method, AnyMethod):
        raise TypeError(
            "method must be one of DPOptimization, NonPrivate, ParameterPerturbation, "
            "LocalAveraging, VirtualClients, FisherScoring, BayesianCommitteeMachine, GlobalVI, or "
            f"one of your own, got {_validate.shown(method)}: write method=FisherScoring(), say."
        )


def check_assembled(method: Any) -> None:
    """Refuses what ``pvi`` cannot run: what is not a method, or is made of others."""
    check(method)
    if not isinstance(method, Method):
        raise TypeError(
            f"method must be one that visits clients in rounds, got {_validate.shown(method)}: "
            f"write fit(..., method={type(method).__name__}()), which does the rest."
        )


def draws_exactly(method: Any) -> bool:
    """Whether noise is drawn on the host, before a round is computed."""
    # An exact sampler loops until it accepts and needs unbounded integers: XLA has neither.
    return isinstance(getattr(method, "noise", None), DiscreteGaussian)


def shards_by_client(method: Method, client_sizes: Sequence[int]) -> tuple[int, ...]:
    """How many shards each client cuts its records into; at most as many as it has records."""
    chosen = getattr(method, "num_shards", 1)
    num_shards = _validate.by_client("num_shards", chosen, len(client_sizes))
    for client, (shards, size) in enumerate(zip(num_shards, client_sizes, strict=True)):
        # A shard without records has nothing to say, and in a mean it would dilute the others.
        if shards > size:
            raise ValueError(
                f"num_shards must be at most a client's records, got {shards} shards for client "
                f"{client}'s {size} records: write num_shards={size}, or fewer."
            )
    return num_shards


def program_of(method: Any) -> Any:
    """The method without the numbers that are arguments of a compiled program."""
    # Methods that differ in nothing else share a compilation. What reads these numbers from a
    # method inside a program would read stand-ins: they are in ``visits.ClientParams`` and
    # ``Layout``.
    if isinstance(method, type) or not dataclasses.is_dataclass(method):
        return method
    # The method is part of a compiled program's key. What the plan hands to the program as an
    # argument must not be, or every budget and every clip would be compiled anew. Any valid value
    # will do; a program that read one would fail the tests that vary it.
    stand_ins: dict[str, Any] = {"clip_norm": 1.0, "num_shards": 1, "microbatch_size": None}
    sampler = getattr(method, "sampler", None)
    if isinstance(sampler, PoissonSampling):
        stand_ins["sampler"] = dataclasses.replace(sampler, sampling_prob=0.5)
    fields = {field.name for field in dataclasses.fields(method)}
    present = {name: value for name, value in stand_ins.items() if name in fields}
    same: Any = dataclasses.replace(method, **present)  # type: ignore[type-var]
    return same


# What the fields of methods are checked with. Equal methods have equal hashes then, and share a
# compilation.


def set_each(method: Any, name: str, check: Callable[[str, Any], Any]) -> None:
    """Checks a field that holds one number for all clients or one per client."""
    _validate.set_field(method, name, _validate.one_or_each, check)


def set_steps(method: Any) -> None:
    """Checks the number of local steps."""
    _validate.set_field(method, "num_local_steps", _validate.positive_int, _MOST_STEPS)


def set_microbatch(method: Any) -> None:
    """Checks how many records are computed at once."""
    if method.microbatch_size is not None:
        _validate.set_field(method, "microbatch_size", _validate.positive_int)


def check_pieces(optimizer: Any, expectation: Any, *, natural: bool = False) -> None:
    """Refuses an optimiser or an expectation of another kind.

    ``natural``: whether steps may be natural gradients, which noise on each of them forbids.
    """
    allowed = Optimizer if natural else optax.GradientTransformation
    if optimizer is not None and not isinstance(optimizer, allowed):
        raise TypeError(
            f"optimizer must be an optax optimiser, got {_validate.shown(optimizer)}: write "
            "optimizer=optax.adam(0.05), say."
        )
    # These two are turned into a function once the model is known: see objective.rule_for.
    named = isinstance(expectation, Automatic | GaussHermite)
    if not named and (isinstance(expectation, type) or not callable(expectation)):
        raise TypeError(
            "expectation must be MonteCarlo(...) or a function that returns points, got "
            f"{_validate.shown(expectation)}: write expectation=MonteCarlo(10), say."
        )


# For the class bodies of methods that have an optimizer.


def solver(self: Any, learning_rate: Array | float) -> Solver:
    """Natural gradients, or descent in coordinates; by Adam where no optimiser is named."""
    if isinstance(self.optimizer, NaturalGradient):
        return self.optimizer
    return Descent(optax.adam(learning_rate) if self.optimizer is None else self.optimizer)
