"""The method without privacy."""

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

import optax

from numpyro_dppvi._typing import Array
from numpyro_dppvi.methods import values, visits
from numpyro_dppvi.methods.local_solve import NOISELESS_LEARNING_RATE, Descent, Solver
from numpyro_dppvi.methods.newton import Newton
from numpyro_dppvi.methods.objective import Automatic, Expectation
from numpyro_dppvi.methods.values import Aggregator, Optimizer, Releases, Study
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Visit
from numpyro_dppvi.privacy import PrivacyPlan


@dataclass(frozen=True)
class NonPrivate(values.Method):
    """Partitioned variational inference without privacy (paper, Algorithm 1).

    Args:
        num_local_steps: Optimiser steps a visit, on all of the client's records. As many Newton's
            steps follow, up to 19 times, while a visit has far to go.
        optimizer: Any optax optimiser, whose state starts afresh at every visit, or
            :class:`NaturalGradient`. ``None`` is Newton's steps, which know how latents depend on
            each other; Adam for other guides than normals and for more than 256 latents.
        expectation: The rule for the expected log likelihood: quadrature where the model allows it,
            else 10 draws.
        microbatch_size: The most records of a client that are computed at once, which bounds memory
            and changes results by rounding alone. ``None`` for some ten million numbers' worth.

    Raises:
        ValueError: If a number of steps or records is not a whole number of at least 1.
        TypeError: If the optimiser or expectation is of another kind.
    """

    releases: ClassVar[Releases] = "nothing"
    aggregator: ClassVar[Aggregator] = "useless"

    num_local_steps: int = 50
    optimizer: Optimizer | None = None
    expectation: Expectation = Automatic()
    microbatch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        values.set_steps(self)
        values.set_microbatch(self)
        values.check_pieces(self.optimizer, self.expectation, natural=True)

    def solver(self, learning_rate: Array | float) -> Solver:
        """Newton's steps where no optimiser is named."""
        if self.optimizer is not None:
            return values.solver(self, learning_rate)
        # Where these cannot be taken, Adam's rate falls, so that draws' noise stays in no factor.
        rate = optax.cosine_decay_schedule(learning_rate, self.num_local_steps, alpha=0.02)
        return Newton(Descent(optax.adam(rate)))

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """One that suits exact gradients."""
        return NOISELESS_LEARNING_RATE

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One exact solve."""
        # Newton's control variate needs to know the draws: solvers see gradients alone.
        if isinstance(visit.solver, Newton):
            solver = dataclasses.replace(visit.solver, draws=likelihood.draws)
            visit = visit._replace(solver=solver)
        return visits.without_noise(visit, likelihood)

    def plan(self, study: Study) -> PrivacyPlan:
        """Refuses: without noise there is nothing to plan."""
        raise ValueError(
            "NonPrivate() adds no noise, and no budget covers that: write "
            "method=DPOptimization() to keep to the budget, or leave budget out."
        )
