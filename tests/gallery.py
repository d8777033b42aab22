"""Studies of the gallery as models, and their records one by one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.studies import STUDIES
from numpyro_dppvi import latents


def read(name: str) -> tuple[latents.LatentSpace, Callable[[int], dict[str, jax.Array]]]:
    """A study's model, and a function that returns a record of a row's number."""
    study = STUDIES[name]
    shapes = {
        column: jax.ShapeDtypeStruct(np.shape(values), jnp.asarray(values).dtype)
        for column, values in study.records.items()
    }
    space = latents.from_model(study.model, shapes, model_kwargs=study.model_kwargs)

    def record(row: int) -> dict[str, jax.Array]:
        return {
            column: jnp.asarray(np.asarray(study.records[column])[row]).reshape(struct.shape)
            for column, struct in dict(space.row).items()
        }

    return space, record
