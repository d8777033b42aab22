"""What a posterior is on disk: numbers and facts, from which a model rebuilds it anywhere."""

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dppvi import _files, guides, latents
from numpyro_dppvi._typing import Model, Natural
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.identity import Identity, difference, identities
from numpyro_dppvi.prior import Prior

_KIND = "posterior"


class Pieces(NamedTuple):
    """What a posterior is made of, its model aside; see ``Posterior``."""

    natural: Natural
    family: MeanField
    space: LatentSpace
    model_kwargs: Mapping[str, Any]
    attrs: Mapping[str, str | float]
    records: Mapping[str, jax.ShapeDtypeStruct]
    prior: Prior | None


def write(path: str | os.PathLike[str], model: Model, pieces: Pieces) -> None:
    """Writes a posterior. No record is in it; the shapes of the data's arrays are.

    Raises:
        ValueError: If the posterior does not know the shapes of its data.
    """
    if not pieces.records:
        raise ValueError(
            "this posterior does not know the shapes of its data, which rebuild its latents: save "
            "one that fit(...) or pvi(...).posterior(...) returned."
        )
    stored = {name: _plain(value) for name, value in pieces.model_kwargs.items()}
    plain = {name: value for name, value in stored.items() if isinstance(value, _JSON)}
    arrays = {name: value for name, value in stored.items() if isinstance(value, np.ndarray)}
    found = identities(pieces.space)
    facts = {
        "model": getattr(model, "__name__", type(model).__name__),
        "family": repr(pieces.family),
        "latents": {name: [latent.shape, latent.base_shape] for name, latent in found.items()},
        "records": {name: [s.shape, str(s.dtype)] for name, s in pieces.records.items()},
        "model_kwargs": plain,
        "model_kwargs_left_out": sorted(set(stored) - set(plain) - set(arrays)),
        "attrs": dict(pieces.attrs),
        "prior_attrs": None if pieces.prior is None else dict(pieces.prior.attrs),
        "versions": {name: importlib.metadata.version(name) for name in ("numpyro", "jax")},
    }
    numbers = _files.flatten(pieces.natural, "natural")
    if pieces.prior is not None:
        numbers |= _files.flatten(pieces.prior.natural, "prior")
    numbers |= {f"probe/{name}": latent.probe for name, latent in found.items()}
    numbers |= {f"model_kwargs/{name}": value for name, value in arrays.items()}
    _files.write(path, _KIND, facts, numbers)


_JSON = (bool, int, float, str, type(None))


def _plain(value: Any) -> Any:
    """A public argument as JSON or NumPy holds it; itself if neither does."""
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        return array if array.dtype.kind in "biufc" else value
    return value.item() if isinstance(value, np.generic) else value


def read(
    path: str | os.PathLike[str],
    model: Model,
    guide: Any,
    model_kwargs: Mapping[str, Any] | None,
) -> Pieces:
    """Rebuilds what :func:`write` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read, or model, guide or arguments are not the ones it
            was made with.
    """
    facts, arrays = _files.read(path, _KIND)
    prefix = "model_kwargs/"
    kwargs = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    kwargs |= {**facts["model_kwargs"], **(model_kwargs or {})}
    missing = [name for name in facts["model_kwargs_left_out"] if name not in kwargs]
    if missing:
        raise ValueError(
            f"{path} does not hold the public argument {missing[0]!r}, which no open format can "
            f"store: write load(..., model_kwargs={{{missing[0]!r}: ...}})."
        )
    records = {
        name: jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))
        for name, (shape, dtype) in facts["records"].items()
    }
    try:
        space = latents.from_model(model, records, kwargs)
        space, family = guides.approximation(guide, model, space, records, kwargs)
    except UnsupportedModelError as error:
        raise ValueError(
            f"{path} was made with another model or guide than the one given: {error}"
        ) from error
    _check_latents(path, facts, arrays, space, family)
    like = family.natural(family.standard())
    try:
        natural = _files.unflatten(arrays, "natural", like)
        prior = None
        if facts["prior_attrs"] is not None:
            factor = _files.unflatten(arrays, "prior", like)
            prior = Prior(factor, family, space, facts["prior_attrs"])
    except ValueError as error:
        raise ValueError(f"{path} is damaged, because {error}: copy it again.") from error
    return Pieces(natural, family, space, kwargs, facts["attrs"], records, prior)


def _check_latents(
    path: str | os.PathLike[str],
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    space: LatentSpace,
    family: MeanField,
) -> None:
    theirs = {
        name: Identity(tuple(shape), tuple(base_shape), arrays[f"probe/{name}"])
        for name, (shape, base_shape) in facts["latents"].items()
    }
    found = difference(identities(space), theirs)
    if found is not None:
        raise ValueError(
            f"{path} holds the posterior of model {facts['model']!r} with {found}: pass the model "
            "that it was fitted with."
        )
    if repr(family) != facts["family"]:
        raise ValueError(
            f"{path} was fitted with another guide than the one given: pass the guide that it was "
            "fitted with."
        )
