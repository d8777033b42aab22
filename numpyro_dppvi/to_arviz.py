"""Draws and names to ArviZ: ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (ArviZ 1.x).

Takes arrays, names and numbers; knows nothing of fits, so that nothing else can slip in.
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numpyro_dppvi._typing import Array


def to_arviz(
    draws: Mapping[str, Array],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Sequence[Any]],
    attrs: Mapping[str, str | float],
) -> Any:
    """Wraps independent posterior draws for ArviZ.

    Args:
        draws: Arrays by latent, shape ``(num_draws, *shape)``. They become one chain: they are
            independent, and convergence diagnostics of chains mean nothing for them.
        dims: Names of a latent's own dimensions.
        coords: Labels along named dimensions.
        attrs: Strings and numbers to store beside the draws.

    Returns:
        ``arviz.InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.
    """
    import arviz  # slow to import, and needed only here

    posterior = {name: np.asarray(value)[None] for name, value in draws.items()}
    dims = {name: list(names) for name, names in dims.items()}
    coords = {name: list(labels) for name, labels in coords.items()}
    if int(importlib.metadata.version("arviz").split(".")[0]) >= 1:
        groups = {"posterior": posterior}
        attributes = {"/": dict(attrs), "posterior": dict(attrs)}
        return arviz.from_dict(groups, dims=dims, coords=coords, attrs=attributes)
    return arviz.from_dict(
        posterior=posterior,
        dims=dims,
        coords=coords,
        attrs=dict(attrs),
        posterior_attrs=dict(attrs),
    )
