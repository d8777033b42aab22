"""From a guide to the exponential family that factors live in; refuses what is not mean-field."""

from typing import Any, NamedTuple

from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuide, AutoNormal

from numpyro_dppvi._typing import Model, Natural
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import DiagonalNormal, MeanField
from numpyro_dppvi.latents import LatentSpace


def family_of(guide: Any, model: Model, space: LatentSpace) -> MeanField:
    """The family that a guide describes.

    ``None``, ``AutoNormal(model)`` and ``AutoDiagonalNormal(model)`` are the same family: a
    normal distribution with diagonal covariance over the unconstrained latents. Only the guide's
    kind is read, never its state: a guide that has been run holds the rows it was run on. Its
    initial values are not used either, because inference starts from the prior.

    Raises:
        UnsupportedModelError: For any other guide, or a guide of another model.
    """
    if guide is not None:
        if type(guide) not in (AutoNormal, AutoDiagonalNormal):
            raise UnsupportedModelError(
                "guide must be None, AutoNormal(model) or AutoDiagonalNormal(model), got "
                f"{shown(guide)}: {_why_not(guide)}."
            )
        if guide.model != model:  # not `is`: a bound method is a new object at every access
            raise UnsupportedModelError(
                "the guide was made for another model than the one given: write "
                f"{type(guide).__name__}(model) with the same model."
            )
    return MeanField(tuple((lt.name, DiagonalNormal(lt.base_shape)) for lt in space.latents))


def _why_not(guide: Any) -> str:
    if isinstance(guide, AutoDelta):
        return "a point has no width that factors could add up to"
    if isinstance(guide, AutoGuide):
        return "its factors do not multiply within one mean-field family"
    if isinstance(guide, type):
        return "call it with the model"
    if callable(guide):
        return "guides written by hand are not read yet"
    return "that is no guide"


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
    refined = rest.union(
        *(space.parents[name] for name in rest), *space.pseudo_observations.values()
    )
    return PriorFactor(exact, rest, frozenset(family.member_of(name) for name in refined))
