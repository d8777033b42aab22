"""The posterior of one study as the prior of the next: the factor that replaces factor 0."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import MeanField, WhiteFamily, factors
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
        UnsupportedModelError: If the earlier study had other latents or another guide, or the
            model's prior is too narrow or too wide for numbers of this many bits.
    """
    if prior is None:
        parts = prior_factor(family, space)
        check_proper(family, parts.exact, leave_out=parts.refined)
        return parts
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
    natural = Natural({name: prior.natural[name] for name, _ in family.members})
    return PriorFactor(natural, frozenset(), frozenset())


# Of a step's length: below that, noise ends ten and more standard deviations of the prior off.
_NARROWEST = 0.1


def check_proper(
    family: MeanField, natural: Natural, leave_out: frozenset[str] = frozenset()
) -> None:
    """Refuses a prior whose natural parameters, or widths, are 0, infinite or no numbers.

    Args:
        family: The family of q.
        natural: The prior's factor.
        leave_out: Members that are not proper yet, because they are fitted.

    Raises:
        UnsupportedModelError: Names the latent.
    """
    for name, (good, _) in _widths(family, natural).items():
        if name not in leave_out and not good:
            raise UnsupportedModelError(
                f"the prior of latent {_latents_of(family, name)} is too narrow or too wide for "
                f"{jnp.result_type(float)}, in which its precision is 0 or infinite: draw it from "
                "dist.Normal(0, 1), say, and scale it in the model."
            )


def check_width(family: MeanField, parts: PriorFactor, step: float) -> None:
    """Refuses a normal prior that is far narrower than the steps of a noisy solve.

    Where a gradient is all noise, an optimiser such as Adam steps as far as ever, and what
    that adds up to is many standard deviations of such a prior.

    Args:
        family: The family of q.
        parts: The prior.
        step: How far one step goes.

    Raises:
        UnsupportedModelError: Names the latent.
    """
    for name, (_, narrowest) in _widths(family, parts.exact).items():
        if name not in parts.refined and narrowest < _NARROWEST * step:
            raise UnsupportedModelError(
                f"the prior of latent {_latents_of(family, name)} has a standard deviation of "
                f"{narrowest:.1g} before its bijection, and noisy steps of the optimiser are "
                f"{step:.1g} long, which would take it far out of its prior: draw it from "
                "dist.Normal(0, 1), say, and scale it in the model."
            )


@functools.partial(jax.jit, static_argnums=0)
def _widths(family: MeanField, natural: Natural) -> dict[str, tuple[Array, Array]]:
    """Whether a member is proper, and its smallest standard deviation if it is normal."""
    found = {}
    for name, member in family.members:
        coordinates = member.coordinates(natural[name])
        good = member.in_domain(natural[name]) & factors.is_finite(coordinates)
        narrowest = jnp.asarray(jnp.inf)
        if isinstance(member, WhiteFamily):
            variances = member.axis_variances(coordinates)
            good &= jnp.all((variances > 0) & jnp.isfinite(variances))
            narrowest = jnp.sqrt(jnp.min(variances, initial=jnp.inf))
        found[name] = good, narrowest
    return found


def _latents_of(family: MeanField, member: str) -> str:
    parts = dict(family.shared).get(member)
    return repr(member) if parts is None else ", ".join(repr(part.latent) for part in parts)
