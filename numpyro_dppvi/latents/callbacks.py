"""Refuses models that hand records to Python code while they are computed with.

``jax.debug.print`` in a model prints records, as they are, on a hospital's terminal or in its log;
a callback could write them anywhere. Nothing of that is clipped, noised or charged.
"""

import functools

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents.programs import operations
from numpyro_dppvi.latents.space import LatentSpace


def check_callbacks(space: LatentSpace) -> None:
    """Refuses a model whose log likelihood, or its gradient, calls Python code."""
    name = _callback(space)
    if name is not None:
        raise UnsupportedModelError(
            f"the model hands records to Python code ({name}), where they are neither clipped "
            "nor noised: leave out jax.debug.print and callbacks, and write what they compute "
            "with jax.numpy."
        )


# Cached, because it traces the model and its gradient: once for each program.
@functools.lru_cache(maxsize=256)
def _callback(space: LatentSpace) -> str | None:
    """The name of an operation that calls Python code; ``None`` if there is none."""

    # With its gradient, because rules of a model's own (jax.custom_vjp) run there alone.
    def differentiated(theta: dict[str, Array], row: dict[str, Array]) -> Array:
        value, gradient = jax.vjp(lambda each: space.log_likelihood(each, row), theta)
        gradient(jnp.ones_like(value))
        return value

    # Traced with shapes alone: nothing is printed or called here.
    program = jax.make_jaxpr(differentiated)(space.structs, dict(space.row))
    names = (each.primitive.name for each in operations(program.jaxpr))
    return next((name for name in names if "callback" in name or name == "debug_print"), None)
