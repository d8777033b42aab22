"""One validator a rule, one sentence each: what was wrong, what came, what to write instead."""

import math
import numbers
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def shown(value: Any) -> str:
    """A value as a sentence shows it: itself if it is one short word or number, else its kind.

    Whatever was passed by mistake may be data, and a sentence must not show a record.
    """
    if value is None or isinstance(value, (str, numbers.Number)):
        text = repr(value.item() if isinstance(value, np.generic) else value)
        return text if len(text) <= 40 else f"a long {type(value).__name__}"
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"an array of {value.dtype} of shape {value.shape}"
    if callable(value):
        kind = "the class" if isinstance(value, type) else _article(type(value).__name__)
        return f"{kind} {value.__name__}" if hasattr(value, "__name__") else kind
    return _article(type(value).__name__)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive(name: str, value: float, *, infinite: bool = False) -> float:
    """Returns a number as a float; refuses one not above zero (or infinite, unless allowed)."""
    good = _is_real(value) and value > 0 and (infinite or math.isfinite(value))
    if not good:
        raise ValueError(
            f"{name} must be a number above 0, got {shown(value)}: write {name}=1.0, say."
        )
    return float(value)


def not_negative(name: str, value: float) -> None:
    """Refuses a number below 0, or infinite."""
    if not (_is_real(value) and 0 <= value < math.inf):
        raise ValueError(
            f"{name} must be a number not below 0, got {shown(value)}: write {name}=0.0, say."
        )


def open_unit(name: str, value: float, example: str) -> float:
    """Returns a number as a float; refuses one outside the open interval (0, 1)."""
    if not (_is_real(value) and 0 < value < 1):
        raise ValueError(
            f"{name} must lie strictly between 0 and 1, got {shown(value)}: "
            f"write {name}={example}, say."
        )
    return float(value)


def one_or_each(value: Any, check: Callable[[Any], T]) -> T | tuple[T, ...]:
    """Checks a value that is one for all clients, or a sequence with one a client."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(check(one) for one in value)
    return check(value)


def by_client(name: str, value: T | tuple[T, ...], num_clients: int) -> tuple[T, ...]:
    """One value a client; refuses a wrong number of them."""
    if not isinstance(value, tuple):
        return (value,) * num_clients
    if len(value) != num_clients:
        raise ValueError(
            f"{name} must be one number or one a client, got {len(value)} numbers for "
            f"{num_clients} clients: write {name}={shown(value[0])}, or {num_clients} numbers."
        )
    return value


def half_open_unit(name: str, value: float) -> None:
    """Refuses a number outside (0, 1]."""
    if not (_is_real(value) and 0 < value <= 1):
        raise ValueError(
            f"{name} must lie above 0 and be at most 1, got {shown(value)}: write {name}=0.5, say."
        )


def positive_int(name: str, value: int) -> None:
    """Refuses anything but a whole number of at least 1."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, got {shown(value)}: "
            f"write {name}=10, say."
        )


def whole(name: str, value: int) -> None:
    """Refuses anything but a whole number."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {shown(value)}: write {name}=0, say.")


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a word that is not in the list."""
    if value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be {words}, got {shown(value)}.")


def path(name: str, value: Any) -> Path:
    """Returns a path, or refuses what is none: numbers, bytes, nothing, no characters at all."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(
            f"{name} must be a file's path, got {shown(value)}: write {name}='run.npz', say."
        )
    try:
        can_be_written = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        can_be_written = False
    if not can_be_written:
        raise ValueError(
            f"{name} must be a file's path, got {shown(text)}: write {name}='run.npz', say."
        )
    return Path(text)


def rng_key(value: Any) -> jax.Array:
    """Returns a typed JAX key, or refuses what is not one key."""
    key = _as_key(value)
    if key is None:
        raise TypeError(
            f"rng_key must be a JAX random key, got {shown(value)}: "
            "write rng_key=jax.random.key(0)."
        )
    if key.shape != ():
        raise ValueError(
            f"rng_key must be a single key, got an array of keys of shape {key.shape}: "
            "pass one of them, rng_key=keys[0]."
        )
    return key


def _as_key(value: Any) -> jax.Array | None:
    """A typed key, or several; ``None`` if it is no such thing."""
    if not isinstance(value, jax.Array):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    try:
        return jax.random.wrap_key_data(value)  # NumPyro users also hold jax.random.PRNGKey(0)
    except TypeError:
        return None


def outside_transformations(caller: str, *arguments: Any) -> None:
    """Refuses to be traced by JAX: a traced release would have one noise for all its runs.

    What is mapped, scanned or compiled runs many times, but it is called once: it would draw one
    secret key and be charged once. Arguments that are traced give it away, and so does an
    operation that is recorded and not run.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
    if traced or isinstance(jnp.zeros(()), jax.core.Tracer):
        raise TypeError(
            f"{caller} must not be called inside a JAX transformation (jit, vmap, scan, grad), "
            "where every run of it would add the same noise and all of them be charged as one: "
            "call it in a plain Python loop; each round is compiled as it is."
        )


class UnsupportedModelError(ValueError):
    """The model, guide or data cannot be fitted; the message says why and what to write."""
