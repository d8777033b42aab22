"""Splits the prior into a part that is a factor and a part that has to be approximated."""

from typing import NamedTuple

from numpyro_dppvi._typing import Natural
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace


class PriorFactor(NamedTuple):
    """The prior as a factor.

    Attributes:
        exact: The part of the prior that is in the family; 1 for the other latents.
        rest: Latents whose prior is not in the family and has to be approximated.
        refined: Members of the family whose part of the prior's factor is refined during
            inference: those of ``rest``, their parents, and latents that pseudo-observations
            depend on.
    """

    exact: Natural
    rest: frozenset[str]
    refined: frozenset[str]


def prior_factor(family: MeanField, space: LatentSpace) -> PriorFactor:
    """Splits the prior into the part in the family and the rest."""
    # Not traced: a family may look at a prior's numbers to say whether it is one of its own.
    # A normal prior under normal factors is exact, once and for all. HalfCauchy, seen on log s, is
    # no normal: its factor begins at the standard distribution and is refined by the server.
    exact, rest = family.of_distributions({lt.name: lt.base_prior for lt in space.latents})
    # Refining the factor of such a prior also moves its parents' factors, because the objective
    # E_q[log p(latent | parents)] depends on both.
    latents = space.seen_by(rest)
    return PriorFactor(exact, rest, frozenset(family.member_of(name) for name in latents))
