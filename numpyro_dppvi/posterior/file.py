"""Saves posteriors as numbers and facts, from which they are rebuilt with the model's code.

So does pickle: a latent space is made of functions, which it cannot take. The space is read from
the model again, which must be one that pickle can: a function of a module, or of a notebook that is
still open.
"""

import contextlib
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_dppvi import _files, _validate, guides, latents
from numpyro_dppvi._typing import Model, Natural
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import MeanField, precision
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.arguments import asked_of
from numpyro_dppvi.latents.identity import Identity, difference, identities
from numpyro_dppvi.posterior.prior import Prior

_KIND = "posterior"
# The JSON types of the facts.
_FACTS = {
    "model": (str,),
    "family": (str,),
    "latents": (dict,),
    "records": (dict,),
    "model_kwargs": (dict,),
    "model_kwargs_left_out": (list,),
    "attrs": (dict,),
    "prior_attrs": (dict, type(None)),
    "versions": (dict,),
}
# Made-up records are allocated in the shapes that a file declares, so these are limited. A record
# of 400 x 400 x 400 numbers fits.
_MOST_OF_A_RECORD = 2**26
# What a model may raise on the shapes of a file that was made with another model.
_NOT_THIS_MODEL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Pieces(NamedTuple):
    """The fields of a ``Posterior`` other than the model."""

    natural: Natural
    family: MeanField
    space: LatentSpace
    model_kwargs: Mapping[str, Any]
    attrs: Mapping[str, str | float]
    records: Mapping[str, jax.ShapeDtypeStruct]
    prior: Prior | None


def write(path: Path, model: Model, pieces: Pieces) -> None:
    """Writes a posterior. The file holds the shapes of the data's arrays, but no records."""
    stored = {name: _plain(value) for name, value in pieces.model_kwargs.items()}
    # Each public argument goes to where it can be read without running code; what cannot is named,
    # and asked for again by load.
    plain = {name: value for name, value in stored.items() if isinstance(value, _JSON)}
    arrays = {name: value for name, value in stored.items() if isinstance(value, np.ndarray)}
    # The file does not hold the latents' bijections, which are code, but probes of them, so that
    # reading can check that the model given then has the same ones.
    found = identities(pieces.space)
    facts = {
        "model": getattr(model, "__name__", type(model).__name__),
        "family": repr(pieces.family),
        "latents": {name: [latent.shape, latent.base_shape] for name, latent in found.items()},
        "effects": [name for name, latent in found.items() if latent.as_effect],
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
    most, size = _files.MOST, sum(array.nbytes for array in numbers.values())
    words = len(json.dumps(facts, indent=1)) + 2**10  # some slack for the fixed part of a header
    # Refused when it is written: a file that nobody can read would be found out too late.
    if size > most.arrays or words > most.facts:
        raise ValueError(
            f"a saved posterior must have at most {most.arrays} bytes of arrays and {most.facts} "
            f"of facts, got {size} and {words}: write numpy.savez(path, **posterior.params)."
        )
    _files.write(path, _KIND, facts, numbers)


_JSON = (bool, int, float, str, type(None))


def _plain(value: Any) -> Any:
    """A public argument as a JSON value or NumPy array; unchanged if it is neither."""
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        return array if array.dtype.kind in "biufc" else value
    return value.item() if isinstance(value, np.generic) else value


def read(
    path: str | os.PathLike[str], model: Model, guide: Any, model_kwargs: Mapping[str, Any] | None
) -> Pieces:
    """Reads what :func:`write` wrote; refuses files of another model, guide or arguments."""
    path = _validate.path("path", path)
    facts, arrays = _files.read(path, _KIND, kinds=_FACTS)
    prefix = "model_kwargs/"
    kwargs = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
    # What the caller passes goes before what the file has.
    kwargs |= {**facts["model_kwargs"], **(model_kwargs or {})}
    missing = [str(name) for name in facts["model_kwargs_left_out"] if str(name) not in kwargs]
    if missing:
        raise ValueError(
            f"{path} lacks the public argument {missing[0]!r}, which is not a number, string or "
            f"array: write load(..., model_kwargs={{{missing[0]!r}: ...}})."
        )
    with _damages(path):
        records = {name: _struct(*fact) for name, fact in facts["records"].items()}
        theirs = {
            # Files of versions before have no such fact.
            name: _identity(
                shape, base_shape, arrays[f"probe/{name}"], name in facts.get("effects", ())
            )
            for name, (shape, base_shape) in facts["latents"].items()
        }
    # The latent space and family are rebuilt from the model, the guide and the shapes of the data.
    try:
        asked = asked_of(model, kwargs)
        unknown = [name for name in records if not (asked.anything or name in asked.names)]
        if unknown:
            raise UnsupportedModelError(
                f"this one has no argument {unknown[0]!r}. Pass the model that was fitted."
            )
        space = latents.from_model(model, records, kwargs)
        space, family = guides.approximation(guide, model, space, records, kwargs)
        if guide is None and repr(family) != facts["family"]:
            # Methods choose between two guides where none is given: the file says which it was.
            full = AutoMultivariateNormal(model)
            space, family = guides.approximation(full, model, space, records, kwargs)
        if any(latent.as_effect for latent in theirs.values()):
            space = latents.recentred(space)
    except UnsupportedModelError as error:
        raise ValueError(
            f"{path} was made with another model or guide than the one given: {error}"
        ) from error
    # The model is the caller's own code, on shapes that it may never have seen.
    except _NOT_THIS_MODEL as error:
        raise ValueError(
            f"{path} was made with another model, guide or public arguments than those given, "
            f"which raise a {type(error).__name__} on the shapes of its data: pass those that it "
            "was fitted with."
        ) from error
    # Before any number is believed: factors of other latents could have the same shapes.
    _check_latents(path, facts, theirs, space, family)
    # The model decides on names and shapes of arrays, and the file has to have these and no others.
    like = family.natural(family.standard())
    if any(array.dtype == np.float64 for array in _files.parts(arrays, "natural").values()):
        like = precision.widened(like)
    with _damages(path):
        natural = _files.unflatten(arrays, "natural", like)
        prior = None
        if facts["prior_attrs"] is not None:
            factor = _files.unflatten(arrays, "prior", like)
            prior = Prior(factor, family, space, facts["prior_attrs"])
    return Pieces(natural, family, space, kwargs, facts["attrs"], records, prior)


@contextlib.contextmanager
def _damages(path: Path) -> Iterator[None]:
    """Reports inconsistent contents as a damaged file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} is damaged, because it has no {error}: copy it again.") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged, because {error}: copy it again.") from error


def _struct(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an argument from a file's facts."""
    sizes = _sizes(shape)
    if not sizes or math.prod(sizes[1:]) > _MOST_OF_A_RECORD:
        raise ValueError(f"records of {shown(shape)} have no rows, or too large ones")
    found = np.dtype(dtype) if isinstance(dtype, str) else None
    if found is None or found.kind not in "biufc":
        raise ValueError(f"records hold {shown(dtype)}, which is not a dtype of numbers")
    return jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(found))


def _identity(shape: Any, base_shape: Any, probe: np.ndarray, as_effect: bool) -> Identity:
    """A latent's identity from a file's facts."""
    found = Identity(_sizes(shape), _sizes(base_shape), probe, as_effect)
    if probe.shape != found.shape or probe.dtype.kind != "f":
        raise ValueError("a latent's probe has another shape or kind than the latent")
    return found


def _sizes(shape: Any) -> tuple[int, ...]:
    # type() and not isinstance: JSON's true is a bool, and a bool is an int to isinstance.
    good = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**31 for n in shape)
    if not good or len(shape) > 32:
        raise ValueError("a shape is not a list of sizes")
    return tuple(shape)


def _check_latents(
    path: Path,
    facts: Mapping[str, Any],
    theirs: Mapping[str, Identity],
    space: LatentSpace,
    family: MeanField,
) -> None:
    found = difference(identities(space), theirs)
    if found is not None:
        raise ValueError(
            f"{path} holds a posterior of model {facts['model']!r} with {found}: pass the model "
            "that it was fitted with."
        )
    if repr(family) != facts["family"]:
        raise ValueError(
            f"{path} was fitted with another guide than the one given: pass the guide that it was "
            "fitted with."
        )


def pickled(pieces: Pieces) -> tuple[dict[str, Any], dict[str, Any], Mapping[str, Identity]]:
    """A posterior as pickle takes it; public facts and released values.

    These are the fields, but for the space, and of the prior its natural parameters and facts; the
    latents' bijections; and what the latents are, to be held against those of the model that is
    there later.
    """
    prior, fields = pieces.prior, pieces._asdict()
    del fields["space"]
    fields["natural"] = jax.device_get(pieces.natural)
    fields["prior"] = None if prior is None else (jax.device_get(prior.natural), dict(prior.attrs))
    # Bijections are values that pickle takes; the functions made of them are not.
    transforms = {latent.name: latent.transform for latent in pieces.space.latents}
    return fields, transforms, identities(pieces.space)


def unpickled(
    model: Model,
    fields: Mapping[str, Any],
    transforms: Mapping[str, Any],
    theirs: Mapping[str, Identity],
) -> Pieces:
    """The fields again, from what :func:`pickled` returned; refused if latents are others now."""
    # From shapes: unpickling reads a model and no data.
    space = latents.from_model(model, fields["records"], fields["model_kwargs"])
    # A guide of one's own may have chosen the bijections. Those of other latents fit nothing, and
    # the difference below says so.
    if {latent.name for latent in space.latents} == set(transforms):
        space = space.with_transforms(transforms)
    if any(latent.as_effect for latent in theirs.values()):
        space = latents.recentred(space)
    found = difference(identities(space), theirs)
    if found is not None:
        raise ValueError(
            f"the posterior was pickled with another model, which has {found}: restore that model."
        )
    prior = fields["prior"]
    if prior is not None:
        factor, attrs = prior
        prior = Prior(precision.arrays(factor), fields["family"], space, attrs)
    natural = precision.arrays(fields["natural"])
    return Pieces(**{**fields, "natural": natural, "space": space, "prior": prior})
