"""NumPyro's automatic guides, and the exponential families that some of them describe."""

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

# NumPyro's site name for the vector of all latents.
_ALL_LATENTS = "_auto_latent"

_FULL = "AutoMultivariateNormal(model)"
_WHY_NOT = {
    autoguide.AutoDelta: ("a point mass is not a product of factors", "AutoNormal(model)"),
    autoguide.AutoLowRankMultivariateNormal: ("products of its factors are not of low rank", _FULL),
    autoguide.AutoLaplaceApproximation: (
        "it needs the maximum of the whole posterior, which no client sees",
        _FULL,
    ),
    autoguide.AutoGuideList: ("combined guides are not supported", _FULL),
}


def is_automatic(guide: Any) -> bool:
    """Whether a guide is not a user's function."""
    return not callable(guide) or isinstance(guide, type) or _inner(guide) is not None


def family_of(guide: Any, model: Model, space: LatentSpace) -> MeanField:
    """The family that ``None`` or an automatic guide of this model describes; refuses others.

    ``None``, ``AutoNormal(model)`` and ``AutoDiagonalNormal(model)`` are the same family: normal
    with diagonal covariance over the unconstrained latents. ``AutoMultivariateNormal(model)`` has a
    full covariance over all of them. Only the guide's type is used, never its state, because a
    guide that has been run stores the rows it was run on.
    """
    if guide is not None:
        _check(guide, model)
    discrete = [latent.name for latent in space.latents if latent.is_discrete]
    if discrete:
        raise UnsupportedModelError(
            f"latent {discrete[0]!r} is discrete, which automatic guides do not support: "
            f"write a guide with numpyro.sample({discrete[0]!r}, dist.Bernoulli(...)) or "
            "dist.Categorical(...), or sum it out in the model (dist.MixtureSameFamily)."
        )
    # The order of the model's latents. It is part of the family, and so of every file that holds
    # factors.
    parts = tuple(Part(latent.name, latent.base_shape) for latent in space.latents)
    if type(guide) is not AutoMultivariateNormal:
        return MeanField(tuple((name, DiagonalNormal(shape)) for name, shape in parts))
    family = FullNormal((sum(math.prod(part.shape) for part in parts),))
    return MeanField(((_ALL_LATENTS, family),), ((_ALL_LATENTS, parts),))


def _check(guide: Any, model: Model) -> None:
    """Refuses all but the guides that describe one of these families, and warns of options."""
    inner = _inner(guide)
    if inner is None:
        reason = "call it with the model" if isinstance(guide, type) else "pass one of these"
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
            f"the guide {type(inner).__name__} must not be wrapped, got it inside "
            f"{shown(guide)}: write guide={type(inner).__name__}(model)."
        )
    if guide.model != model:  # not `is`: a bound method is a new object at every access
        raise UnsupportedModelError(
            "the guide must be made for the given model, got one for another model: write "
            f"guide={type(guide).__name__}(model)."
        )
    _warn_of_options(guide)


def _warn_of_options(guide: AutoGuide) -> None:
    """Warns of options that only NumPyro's own inference uses."""
    # Beside a new one of the same type, so that NumPyro's own defaults are asked and not copied
    # here.
    plain = type(guide)(guide.model)
    ignored = [
        option.lstrip("_")
        for option in ("prefix", "init_loc_fn", "_init_scale", "create_plates")
        if getattr(guide, option) != getattr(plain, option)
    ]
    if ignored:
        kind, verb = type(guide).__name__, "is" if len(ignored) == 1 else "are"
        warnings.warn(
            f"{' and '.join(ignored)} of {kind} {verb} ignored, because inference starts from the "
            f"prior: write {kind}(model), and fit(..., init_scale=0.1) for a narrow start.",
            UserWarning,
            stacklevel=2,
        )


def _inner(guide: Any) -> AutoGuide | None:
    """The automatic guide that this is or wraps, if any; it must not be run (it stores rows)."""
    # handlers.scale(AutoNormal(model), ...) and the like: recognised, to be refused by name.
    while not isinstance(guide, AutoGuide):
        if isinstance(guide, functools.partial):
            guide = guide.func
        elif hasattr(guide, "fn"):  # one of NumPyro's handlers
            guide = guide.fn
        else:
            return None
    return guide


def _why_not(guide: AutoGuide) -> tuple[str, str]:
    # A subclass cannot be used for its parent's reason.
    for kind, answer in _WHY_NOT.items():
        if isinstance(guide, kind):
            return answer
    return "its densities are not an exponential family, so products of factors leave it", _FULL
