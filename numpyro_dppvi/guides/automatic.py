"""Guides that NumPyro makes from a model: which of them are an exponential family."""

import functools
import math
import warnings
from typing import Any

from numpyro.infer import autoguide
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import DiagonalNormal, FullNormal, MeanField, Part
from numpyro_dppvi.latents import LatentSpace

# NumPyro's name for the vector of all latents.
_ALL_LATENTS = "_auto_latent"

_FULL = "AutoMultivariateNormal(model)"
_WHY_NOT = {
    autoguide.AutoDelta: ("a point has no width that factors could add up to", "AutoNormal(model)"),
    autoguide.AutoLowRankMultivariateNormal: ("products of its factors are not of low rank", _FULL),
    autoguide.AutoLaplaceApproximation: (
        "it sits at the maximum of a posterior that no client sees whole",
        _FULL,
    ),
    autoguide.AutoGuideList: ("its parts are not read one by one", "a function, or " + _FULL),
}


def is_automatic(guide: Any) -> bool:
    """Whether a guide is not a function of the user's own: those are read elsewhere."""
    return not callable(guide) or isinstance(guide, type) or _inner(guide) is not None


def family_of(guide: Any, model: Model, space: LatentSpace) -> MeanField:
    """The family that ``None`` or an automatic guide describes.

    ``None``, ``AutoNormal(model)`` and ``AutoDiagonalNormal(model)`` are the same family: a normal
    distribution with diagonal covariance over the unconstrained latents.
    ``AutoMultivariateNormal(model)`` is one with full covariance over all of them together. Only
    the guide's kind is read, never its state: a guide that has been run holds the rows it was run
    on.

    Raises:
        UnsupportedModelError: For any other guide, or a guide of another model.
    """
    if guide is None:
        return _diagonal(space)
    inner = _inner(guide)
    if inner is None:
        reason = "call it with the model" if isinstance(guide, type) else "that is no guide"
        raise UnsupportedModelError(
            "guide must be None, AutoNormal(model), AutoMultivariateNormal(model) or a function "
            f"that draws every latent, got {shown(guide)}: {reason}."
        )
    if type(inner) not in (AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal):
        reason, instead = _why_not(inner)
        raise UnsupportedModelError(
            f"the guide {type(inner).__name__} cannot be used, because {reason}: write "
            f"guide={instead}."
        )
    if inner is not guide:
        raise UnsupportedModelError(
            f"the guide {type(inner).__name__} must be given as it is, got it inside "
            f"{shown(guide)}: write guide={type(inner).__name__}(model)."
        )
    if guide.model != model:  # not `is`: a bound method is a new object at every access
        raise UnsupportedModelError(
            "the guide was made for another model than the one given: write "
            f"{type(guide).__name__}(model) with the same model."
        )
    _warn_of_options(guide)
    return _full(space) if type(guide) is AutoMultivariateNormal else _diagonal(space)


def _warn_of_options(guide: AutoGuide) -> None:
    """Warns of options that only NumPyro's own inference looks at."""
    plain = type(guide)(guide.model)
    ignored = [
        option.lstrip("_")
        for option in ("prefix", "init_loc_fn", "_init_scale", "create_plates")
        if getattr(guide, option) != getattr(plain, option)
    ]
    if ignored:
        kind = type(guide).__name__
        warnings.warn(
            f"{' and '.join(ignored)} of {kind} is not looked at, because inference begins at the "
            f"prior and factors have names of their own: write {kind}(model), and "
            "fit(..., init_scale=0.1) for a narrow start.",
            UserWarning,
            stacklevel=2,
        )


def _refuse_discrete(space: LatentSpace) -> None:
    discrete = [latent.name for latent in space.latents if latent.is_discrete]
    if discrete:
        raise UnsupportedModelError(
            f"latent {discrete[0]!r} is discrete, and no automatic guide draws such a latent: "
            f"write a guide with numpyro.sample({discrete[0]!r}, dist.Bernoulli(...)) or "
            "dist.Categorical(...), or sum it out in the model (dist.MixtureSameFamily)."
        )


def _inner(guide: Any) -> AutoGuide | None:
    """The automatic guide that this is, or that it wraps: running one stores what it is run on."""
    while not isinstance(guide, AutoGuide):
        if isinstance(guide, functools.partial):
            guide = guide.func
        elif hasattr(guide, "fn"):  # one of NumPyro's handlers
            guide = guide.fn
        else:
            return None
    return guide


def _why_not(guide: AutoGuide) -> tuple[str, str]:
    for kind, answer in _WHY_NOT.items():
        if isinstance(guide, kind):
            return answer
    return "its densities are no exponential family, so factors do not multiply within it", _FULL


def _diagonal(space: LatentSpace) -> MeanField:
    _refuse_discrete(space)
    return MeanField(tuple((lt.name, DiagonalNormal(lt.base_shape)) for lt in space.latents))


def _full(space: LatentSpace) -> MeanField:
    _refuse_discrete(space)
    parts = tuple(Part(latent.name, latent.base_shape) for latent in space.latents)
    family = FullNormal((sum(math.prod(part.shape) for part in parts),))
    return MeanField(((_ALL_LATENTS, family),), ((_ALL_LATENTS, parts),))
