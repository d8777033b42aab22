"""What a pickled posterior holds: the fields, and the model by reference in the place of a space.

A latent space is made of functions, which pickle cannot take. It is read from the model again,
which must be one that pickle can: a function of a module, or of a notebook that is still open.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from numpyro_dppvi import latents
from numpyro_dppvi._typing import Model
from numpyro_dppvi.families import precision
from numpyro_dppvi.latents.identity import Identity, difference, identities
from numpyro_dppvi.posterior.file import Pieces
from numpyro_dppvi.posterior.prior import Prior


class Pickled(NamedTuple):
    """The fields of a posterior as pickle takes them; public facts and released values.

    Attributes:
        fields: Those of :class:`~numpyro_dppvi.posterior.file.Pieces`, but for the space; of the
            prior, its natural parameters and facts.
        transforms: The latents' bijections.
        found: What the latents are, to be held against those of the model that is there later.
    """

    fields: Mapping[str, Any]
    transforms: Mapping[str, Any]
    found: Mapping[str, Identity]


def pickled(pieces: Pieces) -> Pickled:
    """A posterior's fields for pickle."""
    prior, fields = pieces.prior, pieces._asdict()
    del fields["space"]
    fields["natural"] = jax.device_get(pieces.natural)
    fields["prior"] = None if prior is None else (jax.device_get(prior.natural), dict(prior.attrs))
    # Bijections are values that pickle takes; the functions made of them are not.
    transforms = {latent.name: latent.transform for latent in pieces.space.latents}
    return Pickled(fields, transforms, identities(pieces.space))


def unpickled(model: Model, kept: Pickled) -> Pieces:
    """The fields again.

    Raises:
        ValueError: If the model has other latents now.
        UnsupportedModelError: If it cannot be read any more.
    """
    fields = dict(kept.fields)
    # From shapes: unpickling reads a model and no data.
    space = latents.from_model(model, fields["records"], fields["model_kwargs"])
    # A guide of one's own may have chosen the bijections. Those of other latents fit nothing, and
    # the difference below says so.
    if {latent.name for latent in space.latents} == set(kept.transforms):
        space = space.with_transforms(kept.transforms)
    found = difference(identities(space), kept.found)
    if found is not None:
        raise ValueError(
            f"the posterior was pickled with another model, which has {found}: restore that model."
        )
    if fields["prior"] is not None:
        factor, attrs = fields["prior"]
        fields["prior"] = Prior(precision.arrays(factor), fields["family"], space, attrs)
    return Pieces(**{**fields, "natural": precision.arrays(fields["natural"]), "space": space})
