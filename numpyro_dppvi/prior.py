"""The posterior of one study as the prior of the next: the factor that replaces factor 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpyro_dppvi._typing import Natural
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.guides import PriorFactor, prior_factor
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.identity import difference, identities


@dataclass(frozen=True, eq=False)
class Prior:
    """A posterior that another study starts from; ``posterior.as_prior()`` makes one.

    It takes the place of all priors in the model, which the earlier study has used already.
    Holds released values only.

    Attributes:
        natural: Natural parameters by latent.
        family: The family they belong to.
        space: The latents.
        attrs: Facts about the study that it comes from.
    """

    natural: Natural
    family: MeanField
    space: LatentSpace
    attrs: Mapping[str, str | float]


def first_factor(prior: Any, family: MeanField, space: LatentSpace) -> PriorFactor:
    """The prior's factor of a fit: the model's own, or an earlier posterior.

    Args:
        prior: A :class:`Prior`, or ``None`` for the model's.
        family: The fit's family.
        space: The fit's latents.

    Raises:
        TypeError: If it is neither.
        UnsupportedModelError: If the earlier study had other latents or another guide.
    """
    if prior is None:
        return prior_factor(family, space)
    if not isinstance(prior, Prior):
        raise TypeError(
            f"prior must be an earlier posterior as a prior, got {shown(prior)}: write "
            "prior=earlier.posterior.as_prior()."
        )
    found = difference(identities(space), identities(prior.space))
    if found is not None:
        raise UnsupportedModelError(
            f"the prior comes from a study with {found}: fit both studies with the same latents."
        )
    if prior.family != family:
        raise UnsupportedModelError(
            "the prior comes from a study with another guide: fit both studies with the same kind "
            "of guide."
        )
    natural = {name: prior.natural[name] for name, _ in family.members}
    return PriorFactor(natural, frozenset(), frozenset())
