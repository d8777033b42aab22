"""Validators of arguments.

Every message is one sentence: what the argument must be, what was received, what to write instead.
"""

import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
P = ParamSpec("P")

# Numbers enter compiled programs as 32-bit floats. Within these limits, products with factors such
# as 2^-20 are representable, too; beyond them some would silently become 0 or infinite.
LEAST, MOST = 1e-30, 1e30
# JAX counts in 32 bits.
MOST_INT = 2**31 - 1


def shown(value: Any) -> str:
    """A value for an error message: itself if it is a short string or number, else its type."""
    # An argument passed by mistake may be data, and a message must not reveal records.
    if value is None or isinstance(value, (str, numbers.Number)):
        try:
            text = repr(value.item() if isinstance(value, np.generic) else value)
        except ValueError:  # Python limits the digits of integers it converts to text
            text = ""
        return text if 0 < len(text) <= 40 else f"a long {type(value).__name__}"
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"an array of {value.dtype} of shape {value.shape}"
    if callable(value):
        kind = "the class" if isinstance(value, type) else _article(type(value).__name__)
        return f"{kind} {value.__name__}" if hasattr(value, "__name__") else kind
    return _article(type(value).__name__)


def wrong(
    name: str, must: str, value: Any, example: object, kind: type[Exception] = ValueError
) -> Exception:
    """The error about an argument: what it must be, what was received, what to write instead."""
    return kind(f"{name} must {must}, got {shown(value)}: write {name}={example}, say.")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


def set_field(value: Any, name: str, check: Callable[..., Any], *limits: Any, **more: Any) -> None:
    """Puts what a check makes of a frozen value's field in its place."""
    # So a list becomes a tuple, and a NumPy integer an ``int``: equal values have equal hashes.
    object.__setattr__(value, name, check(name, getattr(value, name), *limits, **more))


def _real(value: Any) -> float:
    """A number as a float; NaN, which is in no range, for anything else."""
    # True is a number to Python, but to a person who wrote epsilon=True it is a mistake.
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer or fraction that is finite but larger than any float
        return math.nan


def positive(name: str, value: float, *, infinite: bool = False, most: float = MOST) -> float:
    """Returns a number in [1 / most, most] as a float; refuses others."""
    number = _real(value)
    if infinite and number == math.inf:
        return number
    if not 0 < number < math.inf:
        raise wrong(name, "be a number above 0", value, "1.0")
    # Symmetric, because reciprocals of what is passed have to be representable, too.
    if not 1 / most <= number <= most:
        raise wrong(name, f"lie between {1 / most:g} and {most:g}", value, "1.0")
    return number


def not_negative(name: str, value: float) -> float:
    """Returns a number in [0, MOST] as a float; refuses others."""
    number = _real(value)
    if not 0 <= number <= MOST:
        raise wrong(name, f"be a number between 0 and {MOST:g}", value, "0.0")
    return number


def open_unit(name: str, value: float, example: str, least: float = LEAST) -> float:
    """Returns a number in [least, 1) as a float; refuses others."""
    number = _real(value)
    if not 0 < number < 1:
        raise wrong(name, "lie strictly between 0 and 1", value, example)
    if number < least:
        raise wrong(name, f"be at least {least:g}", value, example)
    return number


def half_open_unit(name: str, value: float, least: float = LEAST) -> float:
    """Returns a number in [least, 1] as a float; refuses others."""
    number = _real(value)
    if not 0 < number <= 1:
        raise wrong(name, "lie above 0 and be at most 1", value, "0.5")
    if number < least:
        raise wrong(name, f"be at least {least:g}", value, "0.5")
    return number


def finite(name: str, value: float, example: str) -> float:
    """Returns a finite number as a float; refuses others."""
    number = _real(value)
    if not math.isfinite(number):
        raise wrong(name, "be a finite number", value, example)
    return number


def positive_int(name: str, value: int, most: int = MOST_INT) -> int:
    """Returns a whole number in [1, most] as an ``int``; refuses others."""
    # A NumPy integer could overflow later: 10 times an ``int8`` of 100 is -24.
    return _count(name, value, 1, most, 10)


def not_negative_int(name: str, value: int, most: int = MOST_INT) -> int:
    """Returns a whole number in [0, most] as an ``int``; refuses others."""
    return _count(name, value, 0, most, 0)


def damping(value: float) -> float:
    """Returns a damping factor in [1e-6, 1] as a float; refuses others."""
    return half_open_unit("damping", value, 1e-6)


def whole(name: str, value: int) -> int:
    """Returns any whole number as an ``int``; refuses everything else."""
    if not _is_whole(value):
        raise wrong(name, "be a whole number", value, "0")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _count(name: str, value: int, least: int, most: int, example: int) -> int:
    if not _is_whole(value) or value < least:
        raise wrong(name, f"be a whole number of at least {least}", value, example)
    if value > most:
        raise wrong(name, f"be at most {most:,}", value, example)
    return int(value)


def flag(name: str, value: bool) -> bool:
    """Returns a Boolean as a ``bool``; refuses everything else, such as "no" and 1."""
    if not isinstance(value, (bool, np.bool_)):
        raise wrong(name, "be True or False", value, "True", TypeError)
    return bool(value)


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a string that is not one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        words = " or ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} must be {words}, got {shown(value)}.")


def mapping(name: str, value: Any, example: str) -> dict[str, Any]:
    """Returns a mapping with strings as keys as a ``dict``; ``None`` becomes an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, "be a mapping from names", value, example, TypeError)
    for key in value:
        if not isinstance(key, str):
            raise TypeError(
                f"{name} must be a mapping from names, got the key {shown(key)}: write "
                f"{name}={example}, say."
            )
    return dict(value)


def called_by(
    check: Callable[[Callable[..., Any], dict[str, Any]], None],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: has ``check`` look at the function and its arguments, by name, at every call."""

    def checked(function: Callable[P, T]) -> Callable[P, T]:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            check(function, {**dict(zip(names, args, strict=False)), **kwargs})
            return function(*args, **kwargs)

        return called

    return checked


def complete(example: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Refuses calls that lack an argument in a sentence that shows a whole call."""

    # Python would name the last argument that is lacking, also where another one was forgotten.
    def check(function: Callable[..., Any], given: dict[str, Any]) -> None:
        parameters = inspect.signature(function).parameters
        needed = [p.name for p in parameters.values() if p.default is p.empty]
        lacking = [name for name in needed if name not in given]
        if lacking and set(given) <= set(parameters):
            have = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
            raise TypeError(
                f"{function.__name__} needs {', '.join(needed)}, got {have or 'none of them'}, "
                f"and no {lacking[0]}: write {example}."
            )

    return called_by(check)


def listed(value: Any) -> list[Any] | None:
    """The entries of a sequence or one-dimensional array; ``None`` for anything else."""
    # Strings and bytes do not count as sequences.
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, (np.ndarray, jax.Array)):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        has_fields = not is_key and getattr(value.dtype, "names", None) is not None
        one_axis = value.ndim == 1 and not is_key and not has_fields
        return list(np.asarray(value).tolist()) if one_axis else None
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return list(value)
    return None


def entries(name: str, value: Any, example: str) -> list[Any]:
    """The entries of a sequence or one-dimensional array; refuses everything else."""
    found = listed(value)
    if found is None:
        raise wrong(name, "be a list", value, example, TypeError)
    return found


def as_array(value: Any) -> np.ndarray:
    """``np.asarray``; numbers of a table of numbers and booleans, of which pandas makes objects."""
    array = np.asarray(value)
    if array.dtype == object and hasattr(value, "columns"):
        return np.stack([np.asarray(value[name]) for name in value.columns], axis=1)
    return array


def host_array(name: str, value: Any) -> np.ndarray:
    """A NumPy array of any dtype; refuses masked entries and what cannot be converted."""
    masked = isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))
    is_tracer = isinstance(value, jax.core.Tracer)
    try:
        array = None if masked or is_tracer else as_array(value)
    except (TypeError, ValueError):
        array = None
    if array is None:
        kind = "a masked array" if masked else shown(value)
        raise ValueError(
            f"{name} must be an array without missing entries, got {kind}: write a "
            "one-dimensional NumPy array."
        )
    return array


def client_sizes(value: Any, name: str = "client_sizes") -> tuple[int, ...]:
    """The number of records of each client; refuses anything but a list of whole numbers."""
    sizes = entries(name, value, "[1000, 500]")
    if not sizes:
        raise ValueError(
            f"{name} must hold one number per client, got an empty list: write "
            f"{name}=[1000, 500], say."
        )
    return tuple(positive_int(f"{name}[{number}]", size) for number, size in enumerate(sizes))


def shape(name: str, value: Any) -> tuple[int, ...]:
    """A shape; refuses anything but a list of whole numbers, and too many entries for JAX."""
    axes = entries(name, value, f"({value},)" if _is_whole(value) else "(1000,)")
    axes = [not_negative_int(name, axis) for axis in axes]
    if math.prod(axes) > MOST_INT:
        raise wrong(name, f"have at most {MOST_INT} entries", math.prod(axes), "(1000,)")
    return tuple(axes)


def one_or_each(name: str, value: Any, check: Callable[[str, Any], T]) -> T | tuple[T, ...]:
    """Checks one value for all clients, or each of a sequence with one per client."""
    each = listed(value)
    if each is None:
        return check(name, value)
    if not each:
        raise ValueError(
            f"{name} must be one number or one per client, got an empty {type(value).__name__}: "
            "write one number."
        )
    return tuple(check(name, one) for one in each)


def by_client(name: str, value: T | tuple[T, ...], num_clients: int) -> tuple[T, ...]:
    """One value per client; refuses a wrong number of them."""
    if not isinstance(value, tuple):
        return (value,) * num_clients
    if len(value) != num_clients:
        raise ValueError(
            f"{name} must be one number or one per client, got {len(value)} numbers for "
            f"{num_clients} clients: write {name}={shown(value[0])}, or {num_clients} numbers."
        )
    return value


def function(name: str, value: Any, parameters: tuple[str, ...], example: str) -> None:
    """Refuses classes and whatever cannot be called with these positional arguments."""
    fits = callable(value) and not isinstance(value, type)
    if fits:
        try:
            # Bound and not called: what it does is not known.
            inspect.signature(value).bind(*parameters)
        except TypeError:
            fits = False
        except ValueError:  # some functions written in C have no signature
            pass
    if not fits:
        raise wrong(name, f"be a function of ({', '.join(parameters)})", value, example, TypeError)


def instance(name: str, value: Any, kind: type | tuple[type, ...], example: str) -> None:
    """Refuses a value that is not an instance of the given types."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(one.__name__ for one in kinds)
        raise wrong(name, f"be {_article(names)}", value, example, TypeError)


def path(name: str, value: Any) -> Path:
    """Returns a file's path; refuses other types, empty strings and NUL characters."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise wrong(name, "be the path of a file", value, "'run.npz'", TypeError)
    try:
        can_be_written = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        can_be_written = False
    if not can_be_written:
        raise wrong(name, "be the path of a file", text, "'run.npz'")
    return Path(text)


def rng_key(value: Any) -> jax.Array:
    """Returns a typed JAX key; refuses anything but a single key."""
    key = _as_key(value)
    if key is None:
        raise TypeError(
            f"rng_key must be a JAX random key, got {shown(value)}: "
            "write rng_key=jax.random.key(0)."
        )
    if key.shape != ():
        raise ValueError(
            f"rng_key must be a single key, got an array of keys of shape {key.shape}: "
            "write rng_key=keys[0]."
        )
    return key


def _as_key(value: Any) -> jax.Array | None:
    """A typed key or array of keys; ``None`` for anything else."""
    if not isinstance(value, jax.Array):
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    try:
        return jax.random.wrap_key_data(value)  # old-style keys: jax.random.PRNGKey(0)
    except TypeError:
        return None


def outside_transformations(caller: str, *arguments: Any) -> None:
    """Refuses to run under a JAX transformation.

    A function under ``jit``, ``vmap`` or ``scan`` is called once and run many times: it would draw
    one secret key and be charged once for all runs. Tracing shows in traced arguments, or in an
    array operation that returns a tracer.
    """
    # Iterators count as leaves: flattening a generator passed by mistake would exhaust it.
    try:
        leaves = jax.tree.leaves(arguments, is_leaf=lambda node: isinstance(node, Iterator))
    except ValueError:  # a mapping whose keys JAX cannot sort, which it cannot have traced either
        leaves = []
    # The second test finds jit around closures: inside a trace even a constant becomes a tracer.
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if traced or isinstance(jnp.zeros(()), jax.core.Tracer):
        raise TypeError(
            f"{caller} must not be called inside a JAX transformation (jit, vmap, scan, grad), "
            "where all runs would add the same noise and be charged as one: call it in a plain "
            "Python loop; each round is compiled anyway."
        )


class UnsupportedModelError(ValueError):
    """The model, guide or data cannot be fitted; the message says why and what to write."""
