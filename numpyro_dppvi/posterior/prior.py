"""The prior's factor: the model's prior, or the posterior of an earlier study."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import MeanField, WhiteFamily, factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.guides import PriorFactor, prior_factor
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.identity import difference, identities
from numpyro_dppvi.posterior import marginals


@dataclass(frozen=True, eq=False)
class Prior:
    """The posterior of an earlier study as a prior, made by ``posterior.as_prior()``.

    It replaces all priors in the model, which the earlier study already included. It holds
    released values only.

    Attributes:
        natural: Natural parameters by latent.
        family: The family of the earlier posterior.
        space: Its latents.
        attrs: Facts about the earlier study.
    """

    natural: Natural
    family: MeanField
    space: LatentSpace
    attrs: Mapping[str, str | float]

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses to be pickled: a posterior knows its model, and this does not."""
        raise TypeError(
            "a Prior cannot be pickled: pickle the posterior or write posterior.save(path), and "
            "posterior.as_prior() when it is back."
        )

    def __copy__(self) -> "Prior":
        # copy would go by __reduce__, which refuses.
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Prior":
        return replace(self, attrs=dict(self.attrs))


def listed(attrs: Mapping[str, str | float], name: str) -> list[str]:
    """A list of names among a posterior's attributes; files from elsewhere may hold anything."""
    try:
        names = json.loads(str(attrs.get(name, "[]")))
    except (RecursionError, ValueError):
        return []
    is_list = isinstance(names, list) and all(isinstance(each, str) for each in names)
    return names if is_list else []


def first_factor(prior: Any, family: MeanField, space: LatentSpace) -> PriorFactor:
    """The prior's factor of a fit: the model's own prior or an earlier posterior.

    Refused are posteriors of other latents or under another guide, and priors of the model that are
    too narrow or too wide for the floating-point precision.
    """
    if prior is None:
        parts = prior_factor(family, space)
        check_proper(family, parts.exact, leave_out=parts.refined)
        return parts
    _validate.instance("prior", prior, Prior, "earlier.posterior.as_prior()")
    # Names, shapes and supports, and not priors: the new model's own are replaced anyway.
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
    # All of it is in the family, so nothing is left to refine.
    natural = Natural({name: prior.natural[name] for name, _ in family.members})
    return PriorFactor(natural, frozenset(), frozenset())


# A prior's standard deviation must be at least this fraction of a step's length. Below that, noisy
# steps end ten or more of its standard deviations away.
_NARROWEST = 0.1
# Priors of these standard deviations are a hundred times too narrow or too wide for such steps,
# give or take.
_NARROW, _WIDEST = 0.05, 50.0
# Or so much narrower than the median prior, as of a column in other units than the others.
_BESIDE = 0.2


def check_proper(
    family: MeanField, natural: Natural, leave_out: frozenset[str] = frozenset()
) -> None:
    """Refuses a prior whose precision or width is 0, infinite or NaN in this precision."""
    for name, (good, _) in _widths(family, natural).items():
        if name not in leave_out and not good:
            raise UnsupportedModelError(
                f"the prior of latent {_latents_of(family, name)} is too narrow or too wide for "
                f"{jnp.result_type(float)}, where its precision is 0 or infinite: draw the latent "
                "from dist.Normal(0, 1), say, and scale it in the model."
            )


def check_width(family: MeanField, parts: PriorFactor, step: float) -> None:
    """Refuses a normal prior that is far narrower than the optimiser's noisy steps."""
    # An optimiser such as Adam takes steps of a fixed length even if gradients are pure noise.
    # These would end many standard deviations away from such a prior.
    for name, (_, narrowest) in _widths(family, parts.exact).items():
        if name not in parts.refined and float(narrowest) < _NARROWEST * step:
            raise UnsupportedModelError(
                f"the prior of latent {_latents_of(family, name)} has a standard deviation of "
                f"{narrowest:.1g} on the unconstrained scale, but the optimiser's noisy steps are "
                f"{step:.1g} long and would leave it: draw the latent from dist.Normal(0, 1), say, "
                "and scale it in the model."
            )


def widths_of(family: MeanField, natural: Natural) -> dict[str, Array]:
    """Standard deviations of unconstrained latents; infinite where nothing is known of a prior."""
    return marginals.moments(family, natural)[1]


def off_scale(widths: Mapping[str, Any]) -> tuple[str, float] | None:
    """A latent whose prior does not suit steps of one length, and the prior's standard deviation.

    That is the one with the widest prior, or else the narrowest; ``None`` if all of them suit.
    """
    each = ((float(end), name) for name, width in widths.items() for end in np.ravel(width))
    # Of a prior that is to be refined nothing is known yet: its precision is 0 here.
    ends = [(end, name) for end, name in each if end < math.inf]
    if not ends:
        return None
    (widest, wide), (narrowest, narrow) = max(ends), min(ends)
    if widest > _WIDEST:
        return wide, widest
    least = max(_NARROW, _BESIDE * float(np.median([end for end, _ in ends])))
    return (narrow, narrowest) if narrowest < least else None


def caution_of_width(family: MeanField, natural: Natural, method: str) -> str:
    """A sentence on the widest prior, if steps of one length cannot come from it; else empty."""
    name, width = off_scale(widths_of(family, natural)) or ("", 0.0)
    if width < _WIDEST:  # what is too narrow is refused, by the steps' own length
        return ""
    return (
        f"Caution: the prior of latent {name!r} has a standard deviation of {width:.3g} on the "
        f"unconstrained scale, and the steps of {method}() suit priors of about 1: it does not get "
        "from there to what the records say, at any epsilon. Draw the latent from "
        "dist.Normal(0, 1), say, and scale it in the model; or write method=FisherScoring(), whose "
        "steps have no such scale."
    )


@compiled("family", quick=True)
def _widths(family: MeanField, natural: Natural) -> dict[str, tuple[Array, Array]]:
    """Whether a member is proper, and its smallest standard deviation if it is normal."""
    found = {}
    for name, member in family.members:
        coordinates = member.coordinates(natural[name])
        finite = [jnp.isfinite(leaf) for leaf in jax.tree.leaves(coordinates)]
        narrowest = jnp.asarray(jnp.inf)
        if isinstance(member, WhiteFamily):
            # An extreme but finite precision can still have a variance of 0 or infinity in 32 bits.
            variances = member.axis_variances(coordinates)
            finite.append((variances > 0) & jnp.isfinite(variances))
            narrowest = jnp.sqrt(jnp.min(variances, initial=jnp.inf))
        good = member.in_domain(natural[name]) & factors.all_of(*finite)
        found[name] = good, narrowest
    return found


def _latents_of(family: MeanField, member: str) -> str:
    parts = dict(family.shared).get(member)
    return repr(member) if parts is None else ", ".join(repr(part.latent) for part in parts)
