"""A fitted distribution as a NumPyro guide, with the parameter names of NumPyro's own guides."""

from collections.abc import Mapping
from typing import Any

import numpyro
import numpyro.distributions as dist
from numpyro.distributions.util import sum_rightmost

from numpyro_dppvi._typing import Array, Coordinates
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.reading import plain, pushed
from numpyro_dppvi.latents import LatentSpace

# A MultivariateNormal has three parameters for its covariance; NumPyro's guides use scale_tril.
_LEFT_OUT = ("covariance_matrix", "precision_matrix")


def params(family: MeanField, coordinates: Coordinates) -> dict[str, Array]:
    """Parameters of all members, named as ``AutoNormal`` and ``AutoMultivariateNormal`` do.

    That is ``w_auto_loc``, ``tau_auto_concentration`` and so on; ``auto_loc`` and
    ``auto_scale_tril`` of a vector of all latents.
    """
    return {
        _param(family, name, argument): getattr(base, argument)
        for name, base in _bases(family, coordinates).items()
        for argument in _arguments(base)
    }


def draw(space: LatentSpace, family: MeanField, values: Mapping[str, Array]) -> dict[str, Array]:
    """Draws every latent with ``numpyro.sample``, from parameters by ``numpyro.param``."""
    by_latent: dict[str, Any] = {}
    # Of the standard distribution only types and shapes matter: its parameters are replaced by
    # values.
    for name, base in _bases(family, family.standard()).items():
        arguments = {
            argument: numpyro.param(
                _param(family, name, argument),
                values[_param(family, name, argument)],
                constraint=base.arg_constraints[argument],
            )
            for argument in _arguments(base)
        }
        distribution = type(base)(**arguments)
        distribution = distribution.to_event(len(distribution.batch_shape))
        if name in dict(family.shared):
            # Without the mark, NumPyro would complain of a site that the model does not have.
            vector = numpyro.sample(name, distribution, infer={"is_auxiliary": True})
            by_latent |= family.by_latent({name: vector})
        else:
            by_latent[name] = distribution
    drawn, densities = {}, {}
    for latent in space.latents:
        found = by_latent[latent.name]
        if isinstance(found, dist.Distribution):
            drawn[latent.name] = numpyro.sample(latent.name, pushed(found, latent.transform))
            continue
        # A part of a vector that was drawn jointly. As in NumPyro's automatic guides, the latent
        # gets a Delta with the log density of the change of variables; the vector itself is an
        # auxiliary site.
        value = drawn[latent.name] = latent.transform(found)
        jacobian = latent.transform.log_abs_det_jacobian(found, value)
        densities[latent.name] = -sum_rightmost(jacobian, jacobian.ndim)
    # Where effects were drawn, the latents that the model draws follow from them.
    drawn, log_scales = space.apart(drawn)
    for name, density in densities.items():
        value, more = drawn[name], log_scales.get(name, 0.0)
        delta = dist.Delta(value, density + more, event_dim=value.ndim)
        drawn[name] = numpyro.sample(name, delta)
    return drawn


def _bases(family: MeanField, coordinates: Coordinates) -> dict[str, dist.Distribution]:
    return {name: plain(f.distribution(coordinates[name])) for name, f in family.members}


def _arguments(base: dist.Distribution) -> list[str]:
    # NumPyro's list of the parameters through which a draw can be differentiated.
    named = base.reparametrized_params or base.arg_constraints  # distributions of integers
    return [name for name in named if name not in _LEFT_OUT]


def _param(family: MeanField, member: str, argument: str) -> str:
    return f"auto_{argument}" if member in dict(family.shared) else f"{member}_auto_{argument}"
