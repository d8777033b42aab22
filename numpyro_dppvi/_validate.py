"""One validator a rule, one sentence each: what was wrong, what came, what to write instead."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive(name: str, value: float, *, infinite: bool = False) -> None:
    """Refuses a number that is not above zero (or is infinite, unless allowed)."""
    good = _is_real(value) and value > 0 and (infinite or math.isfinite(value))
    if not good:
        raise ValueError(f"{name} must be a number above 0, got {value!r}: write {name}=1.0, say.")


def open_unit(name: str, value: float) -> None:
    """Refuses a number outside the open interval (0, 1)."""
    if not (_is_real(value) and 0 < value < 1):
        raise ValueError(
            f"{name} must lie strictly between 0 and 1, got {value!r}: write {name}=1e-5, say."
        )


def half_open_unit(name: str, value: float) -> None:
    """Refuses a number outside (0, 1]."""
    if not (_is_real(value) and 0 < value <= 1):
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}: write {name}=0.5, say.")


def positive_int(name: str, value: int) -> None:
    """Refuses anything but a whole number of at least 1."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, got {value!r}: write {name}=10, say."
        )


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a word that is not in the list."""
    if value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be {words}, got {value!r}.")


def rng_key(value: Any) -> jax.Array:
    """Returns a typed JAX key, or refuses what is not one key."""
    if value is None or isinstance(value, (int, float)):
        raise TypeError(
            f"rng_key must be a JAX random key, got {value!r}: write rng_key=jax.random.key(0)."
        )
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"rng_key must be a JAX random key, got a {type(value).__name__}: "
            "write rng_key=jax.random.key(0)."
        )
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.wrap_key_data(value)  # NumPyro users also hold jax.random.PRNGKey(0)
    if value.shape != ():
        raise ValueError(
            f"rng_key must be a single key, got an array of keys of shape {value.shape}: "
            "pass one of them, rng_key=keys[0]."
        )
    return value


class UnsupportedModelError(ValueError):
    """The model, guide or data cannot be fitted; the message says why and what to write."""
