"""Shape and value aliases shared by every module."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
PyTree: TypeAlias = Any
"""Any nesting of dicts, tuples and arrays that JAX can flatten."""

Natural: TypeAlias = Any
"""Natural parameters of a distribution or factor, one entry per latent; may be improper."""

Coordinates: TypeAlias = Any
"""Unconstrained coordinates of a proper distribution, which optimisers move."""

Model: TypeAlias = Callable[..., Any]
"""A NumPyro model, called as ``model(**data, **model_kwargs)``."""

Records: TypeAlias = Mapping[str, Array]
"""Records by argument name; every array has one entry per record on its leading axis."""
