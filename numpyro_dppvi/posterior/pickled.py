"""What a pickled posterior holds: the fields, and the model by reference in the place of a space.

A latent space is made of functions, which pickle cannot take. It is read from the model again,
which must be one that pickle can: a function of a module, or of a notebook that is still open.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from numpyro_dppvi import latents
from numpyro_dppvi._typing import Model, Natural
from numpyro_dppvi.families import MeanField, precision
from numpyro_dppvi.latents.identity import Identity, difference, identities
from numpyro_dppvi.posterior.file import Pieces
from numpyro_dppvi.posterior.prior import Prior


class Pickled(NamedTuple):
    """The fields of a posterior as pickle takes them; public facts and released values.

    Attributes:
        natural: Natural parameters of q.
        family: The family of q.
        transforms: The latents' bijections.
        found: What the latents are, to be held against those of the model that is there later.
        model_kwargs: The model's public arguments.
        attrs: Facts about the fit.
        records: Shapes and dtypes of the data.
        prior: Natural parameters and facts of the study whose posterior was the prior, if one was.
    """

    natural: Natural
    family: MeanField
    transforms: Mapping[str, Any]
    found: Mapping[str, Identity]
    model_kwargs: Mapping[str, Any]
    attrs: Mapping[str, str | float]
    records: Mapping[str, jax.ShapeDtypeStruct]
    prior: tuple[Natural, Mapping[str, str | float]] | None


def pickled(pieces: Pieces) -> Pickled:
    """A posterior's fields for pickle."""
    prior = pieces.prior
    return Pickled(
        natural=jax.device_get(pieces.natural),
        family=pieces.family,
        # Bijections are values that pickle takes; the functions made of them are not.
        transforms={latent.name: latent.transform for latent in pieces.space.latents},
        found=identities(pieces.space),
        model_kwargs=dict(pieces.model_kwargs),
        attrs=dict(pieces.attrs),
        records=dict(pieces.records),
        prior=None if prior is None else (jax.device_get(prior.natural), dict(prior.attrs)),
    )


def unpickled(model: Model, kept: Pickled) -> Pieces:
    """The fields again.

    Raises:
        ValueError: If the model has other latents now.
        UnsupportedModelError: If it cannot be read any more.
    """
    # From shapes: unpickling reads a model and no data.
    space = latents.from_model(model, kept.records, kept.model_kwargs)
    # A guide of one's own may have chosen the bijections. Those of other latents fit nothing, and
    # the difference below says so.
    if {latent.name for latent in space.latents} == set(kept.transforms):
        space = space.with_transforms(kept.transforms)
    found = difference(identities(space), kept.found)
    if found is not None:
        raise ValueError(
            f"the posterior was pickled with another model, which has {found}: restore that model."
        )
    prior = None
    if kept.prior is not None:
        factor, attrs = kept.prior
        prior = Prior(precision.arrays(factor), kept.family, space, attrs)
    return Pieces(
        precision.arrays(kept.natural),
        kept.family,
        space,
        kept.model_kwargs,
        kept.attrs,
        kept.records,
        prior,
    )
