"""How the prior becomes a factor: what of it lies in the family, and what has to be fitted."""

from typing import NamedTuple

from numpyro_dppvi._typing import Natural
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace


class PriorFactor(NamedTuple):
    """How the prior becomes a factor.

    Attributes:
        exact: The part of the prior that lies in the family; 1 for the other latents.
        rest: Latents whose prior does not lie in the family, and has to be approximated.
        refined: Members of the family whose part of the prior's factor is refined: those of
            ``rest``, of the parents of these, and of whatever pseudo-observations depend on.
    """

    exact: Natural
    rest: frozenset[str]
    refined: frozenset[str]


def prior_factor(family: MeanField, space: LatentSpace) -> PriorFactor:
    """Splits the prior into what lies in the family and what does not."""
    exact, rest = family.of_distributions({lt.name: lt.base_prior for lt in space.latents})
    latents = rest.union(
        *(space.parents[name] for name in rest), *space.pseudo_observations.values()
    )
    return PriorFactor(exact, rest, frozenset(family.member_of(name) for name in latents))
