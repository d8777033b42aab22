"""From guide and prior to the exponential family of q, and from a fitted q back to a guide.

It may import ``latents`` and ``families``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpyro_dppvi._typing import Model, Natural
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.guides.automatic import family_of, is_automatic
from numpyro_dppvi.guides.fitted import draw, params
from numpyro_dppvi.guides.written import read
from numpyro_dppvi.latents import LatentSpace

__all__ = ["PriorFactor", "approximation", "draw", "family_of", "params", "prior_factor"]


def approximation(
    guide: Any,
    model: Model,
    space: LatentSpace,
    records: Mapping[str, Any],
    model_kwargs: Mapping[str, Any] | None = None,
) -> tuple[LatentSpace, MeanField]:
    """The family that a guide describes, and the base values that it is over.

    A guide is ``None``, one of NumPyro's automatic normal guides, or a function that draws each
    latent independently; others are refused. Only its structure matters, which is read from shapes
    and made-up rows. Values of its parameters are not used, because inference starts from the
    prior.

    Returns the model over the base values that the guide draws, and the family of q over these.
    """
    if is_automatic(guide):
        return space, family_of(guide, model, space)
    # LogNormal in a guide is Normal through exp, so factors live over the logarithm: the space gets
    # the guide's bijections in place of those to its supports.
    transforms, family = read(guide, space, records, model_kwargs or {})
    return space.with_transforms(transforms), family


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
