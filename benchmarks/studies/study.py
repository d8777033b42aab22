"""What a study of the gallery is, and shorthands that its models share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

Array = jax.Array
NUM_RECORDS = 240
MARK = {"enumerate": "parallel"}


class Study(NamedTuple):
    """A model as its author would write it, and made-up records.

    Attributes:
        model: The NumPyro model.
        records: Arrays with one row a record.
        model_kwargs: Public arguments.
        twin: The same density without discrete or missing entries, which NumPyro's SVI can take;
            ``None`` for the model itself.
        refused: Words of the sentence with which the model is refused; none if it is fitted.
        guide: A guide, where the automatic one does not do; then there is no comparison.
    """

    model: Callable[..., Any]
    records: Mapping[str, Any]
    model_kwargs: Mapping[str, Any] = {}
    twin: Callable[..., Any] | None = None
    refused: str = ""
    guide: Callable[..., Any] | None = None


def normal(name: str, loc: float = 0.0, scale: float = 1.0) -> Array:
    """One normal latent."""
    return numpyro.sample(name, dist.Normal(loc, scale))


def normals(name: str, number: int, scale: Any = 1.0) -> Array:
    """A vector of normal latents around zero."""
    return numpyro.sample(name, dist.Normal(0, scale).expand([number]).to_event(1))


def positive(name: str, scale: float = 1.0) -> Array:
    """A half-normal latent."""
    return numpyro.sample(name, dist.HalfNormal(scale))


def generator(seed: int) -> np.random.Generator:
    """Random numbers for one study."""
    return np.random.default_rng(seed)


def columns(seed: int, number: int, rows: int = NUM_RECORDS) -> np.ndarray:
    """Standard normal covariates."""
    return generator(seed).normal(size=(rows, number))


def sigmoid(x: Any) -> np.ndarray:
    """The logistic function, for made-up records."""
    return 1 / (1 + np.exp(-np.asarray(x)))


def row(x: Array) -> Array:
    """Numbers along the last of two axes."""
    return jnp.asarray(x)[None, :]
