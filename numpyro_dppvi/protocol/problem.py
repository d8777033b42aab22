"""What a round is compiled from, and the numbers that its program is handed."""

from typing import NamedTuple

import numpy as np

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.guides import PriorFactor
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods.values import Method
from numpyro_dppvi.methods.visits import ClientParams, Layout


class Problem(NamedTuple):
    """What is compiled in: equal problems share one compiled program. All of it is public.

    Attributes:
        space: The model.
        family: The family of q.
        method: What a client does, as of ``values.program_of``.
        layout: Sizes.
        rest: Latents whose prior does not lie in the family.
        refined: Members of the family whose part of the prior's factor is refined.
        aggregated: Whether the server sees only the sum of what clients release.
        starts_ahead: Whether solves begin at the public start, and not at q.
    """

    space: LatentSpace
    family: MeanField
    method: Method
    layout: Layout
    rest: frozenset[str] = frozenset()
    refined: frozenset[str] = frozenset()
    aggregated: bool = False
    starts_ahead: bool = False


class RoundParams(NamedTuple):
    """What is handed to the compiled program. All of it is public.

    Attributes:
        exact_prior: The part of the prior that lies in the family.
        clients: The numbers of each client's mechanism, clients on the leading axis.
        damping: The share of a change that is merged.
        learning_rate: For Adam, where the method names no optimiser.
        prior_left_out: The power of the prior that a client's cavity leaves out, 0 but for a
            committee machine with a split prior.
    """

    exact_prior: Natural
    clients: ClientParams
    damping: Array
    learning_rate: Array
    prior_left_out: Array

    @property
    def precision(self) -> np.dtype:
        """The program's: that of models, records and all that is sent to clients."""
        return np.dtype(self.damping.dtype)

    def prior_of(self, problem: Problem) -> PriorFactor:
        """The prior, by what of it lies in the family."""
        return PriorFactor(self.exact_prior, problem.rest, problem.refined)
