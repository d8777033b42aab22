"""Error messages for models that cannot be traced, or cannot run on a single row."""

import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dppvi.latents.domains import name_of
from numpyro_dppvi.latents.fingerprint import constants
from numpyro_dppvi.latents.programs import operations

# What JAX raises when a traced function needs a concrete value.
CONCRETE_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

# JAX's message when a traced array is used as the index of a list.
_LIST_INDEX = "Only integer scalar arrays can be converted to a scalar index"

# JAX's message when an array is indexed with one of floats.
_FLOAT_INDEX = "Indexer must have integer or boolean type"

# Python's message when a traced array meets a list in a sum or a product.
_LIST = re.compile(r"unsupported operand type.*'\w*Tracer' and 'list'|'list' and '\w*Tracer'")

# JAX's message about an attribute that its arrays do not have.
_ATTRIBUTE = re.compile(r"Tracer'? .*has no attribute '?(\w+)")

# What a model may raise if it runs on a number of rows that it was not written for.
WRONG_NUMBER_ERRORS = (AssertionError, IndexError, KeyError, TypeError, ValueError)

# What to write where shapes do not fit.
_ROWS = (
    "make them of one size, which of records is X.shape[0]: numpyro.plate('records', X.shape[0])"
)
# What to write for entries that records lack.
IMPUTE = (
    "to impute missing entries of x, leave them NaN and write x = numpyro.sample('x', ..., obs=x, "
    "obs_mask=~jnp.isnan(x))"
)

# Modules to skip when looking for the user's line that caused an error.
_LIBRARIES = frozenset({"contextlib", "functools", "jax", "numpy", "numpyro", "numpyro_dppvi"})
# NumPy functions whose output shape depends on the input's values.
_COUNTS_VALUES = frozenset({"unique", "bincount", "union1d", "setdiff1d", "intersect1d"})
# What a line says that looks up where entries are missing.
_LOOKS_UP = ("isnan", "nonzero")


def _looks_at_values(error: BaseException) -> str:
    """A message about a model that needs concrete values."""
    if any(word in _line(error) for word in _LOOKS_UP):
        return (
            f"the model looks up which entries are NaN or not zero{_place(error)}, which depends "
            f"on the values of its data: {IMPUTE}; for a mask alone, write jnp.isnan, not np.isnan."
        )
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            f"the model indexes with booleans{_place(error)}, which depends on the values of its "
            "data: write g.astype(int) for groups, jnp.where(keep, a, b) or .mask(keep) for "
            f"records; {IMPUTE}."
        )
    if _by_numpy(error):
        return (
            f"the model calls NumPy on its arguments or latents{_place(error)}, which are traced "
            "by JAX: write jnp instead of np (import jax.numpy as jnp), and jnp.asarray(u)[g] to "
            "index an array or a list u."
        )
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return (
            f"the model decides by values of its data or latents{_place(error)} (an if, while, "
            "and, or, min or max on an array): write jnp.where(a > 0, b, c) in the place of an if, "
            "and pass what is public as a constant, such as model_kwargs={'is_linear': True}."
        )
    return (
        f"the model's shape depends on the values of its data{_place(error)} (an int(...) or "
        "len(np.unique(...))): pass it as a public constant, such as "
        "model_kwargs={'num_groups': 8}."
    )


def slip(error: BaseException) -> str | None:
    """A message about a slip that NumPyro or JAX report in words of their own; ``None`` if none."""
    text = str(error)
    if isinstance(error, CONCRETE_VALUE_ERRORS) or _LIST_INDEX in text:
        return _looks_at_values(error)
    if "control flow primitive under a `plate`" in text:
        return (
            f"a plate stands around scan{_place(error)}, which NumPyro cannot repeat: open the "
            "plate inside of the function that scan is given."
        )
    if "scan body function carry" in text:
        return (
            f"the function that scan is given returns a carry of another shape or type than it "
            f"takes{_place(error)}: begin with one value a record and of that type, "
            "jnp.zeros(len(y), int) and not 0, say."
        )
    if _FLOAT_INDEX in text:
        return (
            f"the model indexes with floats{_place(error)}, but only whole numbers are indices: "
            "write g.astype(int) in the place of g, in data or in the model."
        )
    if _LIST.search(text):
        return (
            f"the model computes with a list{_place(error)}: write jnp.array([1.0, 2.0]) in the "
            "place of [1.0, 2.0]."
        )
    missing = _ATTRIBUTE.search(text)
    if missing:
        return (
            f"the model uses .{missing.group(1)} of an argument, which only pandas tables have, "
            f"but arguments are arrays with one row per record: write X instead of "
            f"X.{missing.group(1)}, and pass columns as data={{'X': table.to_numpy()}}."
        )
    return None


def misfit(error: BaseException) -> str | None:
    """A message about a site that does not fit a plate around it; ``None`` if that is not it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # It is the plate that finds it out, while it looks at the site.
        plate, site = (frame.f_locals.get(name) for name in ("self", "msg"))
        if isinstance(plate, numpyro.plate) and isinstance(site, dict) and "fn" in site:
            return (
                f"{site['name']!r} has shape {site['fn'].batch_shape}, which does not fit the "
                f"plate {plate.name!r} of size {plate.size} around it: {_ROWS}."
            )
    return None


def misfit_outcome(name: str, fn: dist.Distribution, value: Any) -> str | None:
    """A message about an outcome that does not fit its distribution; ``None`` if it does."""
    shape = fn.batch_shape + fn.event_shape
    try:
        jnp.broadcast_shapes(shape, jnp.shape(value))
    except ValueError:
        instead = _ROWS if jnp.ndim(value) == len(shape) else "pass values of that shape"
        if jnp.ndim(value) > len(shape):
            instead += ", such as y.argmax(axis=1) in the place of a category's columns"
        return (
            f"the values of {name!r} have shape {jnp.shape(value)}, which does not fit the shape "
            f"{shape} of dist.{name_of(fn)} there: {instead}."
        )
    return None


def _by_numpy(error: BaseException) -> bool:
    """Whether NumPy or the indexing of a list needed the value, and not to count values."""
    # np.unique on a tracer asks for the values to count them: jnp would not help there.
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return not called & _COUNTS_VALUES
    return not isinstance(error, CONCRETE_VALUE_ERRORS)


def several_rows_only(error: BaseException) -> str:
    """A message about a model that does not run on a single row."""
    return (
        f"the model runs on several rows, but not on a single one{_place(error)}, although "
        "records are processed one at a time (a loop over rows or a lookup by row number needs the "
        "others): write the density of a row by itself, or make a whole series one record."
    )


def one_row_only(
    num_rows: int,
    sites: Sequence[Any],
    program: Any,
    model_kwargs: Mapping[str, Any],
    error: BaseException | None,
) -> str:
    """A message about a model that only runs on the number of rows of the data.

    ``program`` is the model's, traced on all rows, and ``error`` what it raised on one more row.
    """
    found = f"the model runs on {num_rows} rows only{_place(error)}, but must run on a single one"
    public = [np.shape(leaf) for leaf in jax.tree.leaves(model_kwargs)]
    closed = [np.shape(c) for c in constants(program) if is_as_long(c, num_rows)]
    # By shape alone: constants of the trace are other objects than what was passed.
    private = [shape for shape in closed if shape not in public]
    latents = [s for s in sites if not s.observed and num_rows in s.shapes[0]]
    if private:
        return (
            f"{found}, because it uses an array of shape {private[0]} that is not one of its "
            "arguments: add an argument for it and put it into data."
        )
    if latents:
        return (
            f"{found}, because latent {latents[0].name!r} has shape {latents[0].shapes[0]}, one "
            "value per record, which clients cannot share: sum or integrate it out, or draw one "
            "for each group of records."
        )
    if closed:
        return (
            f"{found}, because model_kwargs has an array with an entry per row: put it into data."
        )
    counts = (op for op in operations(program.jaxpr) if op.primitive.name == "iota")
    if any(num_rows in op.params["shape"] for op in counts):
        return (
            f"{found}, because it counts them, with jnp.arange({num_rows}), say: pass the time or "
            "the row number as an argument in data."
        )
    return (
        f"{found}: write X.shape[0] in place of a fixed number of rows, and pass arrays with an "
        "entry per row in data."
    )


def a_site_a_record(name: str) -> str:
    """A message about a loop over records."""
    return (
        f"the model has a sample statement for each record, such as {name!r}, although "
        "records are processed one at a time: write one statement for all rows instead of the "
        "loop, with numpyro.plate('records', len(y)): numpyro.sample('y', ..., obs=y)."
    )


def a_state_a_record(name: str) -> str:
    """A message about a chain of discrete latents from record to record."""
    return (
        f"the model goes from record to record and draws a state for each, such as {name!r}, "
        "although no client has all records: make a whole series one record, with its steps along "
        "the second axis of y."
    )


def is_as_long(constant: Any, num_rows: int) -> bool:
    """Whether an array of numbers has an entry per row; keys hold no records."""
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        return False
    return np.shape(constant)[:1] == (num_rows,)


def _place(error: BaseException | None) -> str:
    """The last line of the user's code that led to an error; empty if there is none."""
    function, _, number = _own_line(error)
    return f" (line {number} of {function})" if number else ""


def _line(error: BaseException) -> str:
    """The text of that line; empty if it is not known."""
    _, file, number = _own_line(error)
    return linecache.getline(file, number) if number else ""


def _own_line(error: BaseException | None) -> tuple[str, str, int]:
    """Function, file and number of that line; the number is 0 if there is none."""
    frames = traceback.walk_tb(error.__traceback__ if error is not None else None)
    # The user's own line, and not the library's that tripped over it.
    own = [
        (frame.f_code.co_name, frame.f_code.co_filename, line)
        for frame, line in frames
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES
    ]
    return own[-1] if own else ("", "", 0)
