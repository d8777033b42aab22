"""Predictions and log likelihoods at draws of the latents, in batches of rows."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import Predictive
from numpyro.infer import log_likelihood as numpyro_log_likelihood

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Model, PRNGKey
from numpyro_dppvi.latents import HANDLERS, LatentSpace, from_model
from numpyro_dppvi.latents.arguments import asked_of
from numpyro_dppvi.latents.missing import may_be_missing
from numpyro_dppvi.latents.outputs import Unconditioned, observed_covariates, outcomes
from numpyro_dppvi.latents.reasons import misfit, slip
from numpyro_dppvi.latents.trace import all_rows, indexable, resized

# The most predictions in a batch (256 MiB of 32-bit floats).
_VALUES_PER_BATCH = 2**26

_OTHER_SIZE_ERRORS = (AssertionError, IndexError, TypeError, ValueError)


def predict(
    model: Model,
    draws: Mapping[str, Array],
    rows: Mapping[str, Any],
    constants: Mapping[str, Any],
    rng_key: PRNGKey,
    batch_size: int | None = None,
) -> dict[str, Array]:
    """Draws everything that the model observes or computes, once per draw of the latents.

    Observed values stay as they are where draws of other sites depend on them. Rows are processed
    in batches, by default of as many as fit 256 MiB of predictions. Arrays have the draws on their
    leading axis; they are NumPy's if there was more than one batch.
    """
    kept = observed_covariates(model, rows, constants, {n: x[0] for n, x in draws.items()})

    def call(key: PRNGKey, rows: Mapping[str, Any]) -> dict[str, Array]:
        with HANDLERS:
            # With its observations, the model would give back an outcome that was passed as its own
            # prediction.
            sites = Predictive(Unconditioned(all_rows(model, rows), kept), dict(draws))
            found = sites(key, **indexable({**constants, **rows}))
        return {name: value for name, value in found.items() if value.size}  # drops factors

    return _in_batches(call, rows, draws, rng_key, batch_size)


def log_likelihood(
    model: Model, draws: Mapping[str, Array], rows: Mapping[str, Any], constants: Mapping[str, Any]
) -> dict[str, Array]:
    """Log density of every observed entry at every draw; arguments as for :func:`predict`."""

    def call(key: PRNGKey, rows: Mapping[str, Any]) -> dict[str, Array]:
        with HANDLERS:
            whole, given = all_rows(model, rows), indexable({**constants, **rows})
            return dict(numpyro_log_likelihood(whole, dict(draws), **given))

    return _in_batches(call, rows, draws, jax.random.key(0))


def log_likelihood_of_records(
    model: Model, draws: Mapping[str, Array], rows: Mapping[str, Any], constants: Mapping[str, Any]
) -> Array:
    """Log density of every record, all of its outcomes together, its discrete latents summed out.

    Arguments as for :func:`predict`; the shape is ``(num_draws, num_rows)``.
    """
    # Of the public rows: their number may differ from the fit's.
    space = from_model(model, rows, constants)

    def call(key: PRNGKey, rows: Mapping[str, Any]) -> dict[str, Array]:
        of_rows = jax.vmap(space.log_likelihood, (None, 0))
        # Draw after draw: sums over discrete latents take tables for every row already.
        return {"records": jax.lax.map(lambda theta: of_rows(theta, dict(rows)), dict(draws))}

    return _in_batches(jax.jit(call), rows, draws, jax.random.key(0))["records"]


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Says in a sentence what NumPyro and JAX say of arguments that do not fit the model."""
    try:
        yield
    except (IndexError, TypeError, ValueError) as error:
        said = slip(error) or misfit(error)
        if said is None:
            raise
        raise ValueError(said) from error


def _in_batches(
    call: Callable[[PRNGKey, Mapping[str, Any]], dict[str, Array]],
    rows: Mapping[str, Any],
    draws: Mapping[str, Array],
    rng_key: PRNGKey,
    batch_size: int | None = None,
) -> dict[str, Array]:
    """Calls a function on batches of rows and concatenates the results on the host."""
    # Predictions take draws * rows numbers per site, which may not fit a device.
    num_rows = len(next(iter(rows.values()))) if rows else 0
    if batch_size is None:
        # Counted as one number for each draw and row.
        batch_size = max(1, _VALUES_PER_BATCH // len(next(iter(draws.values()))))
    if num_rows <= batch_size:
        return call(rng_key, rows)
    # Which axis of a result are its rows is not said anywhere: it is the one that shrinks with
    # them.
    axes = _row_axes(call, rng_key, rows, num_rows)
    if axes is None:
        return call(rng_key, rows)
    compiled = jax.jit(call)
    starts = range(0, num_rows, batch_size)
    pieces: dict[str, list[np.ndarray]] = {}
    for number, start in enumerate(starts):
        # The last batch includes rows of the one before it, so that all batches have one shape and
        # nothing is recompiled.
        first = min(start, num_rows - batch_size)
        batch = {name: leaf[first : first + batch_size] for name, leaf in rows.items()}
        # A key for each batch: under one, the first rows of all batches would get the same draws.
        for name, value in compiled(jax.random.fold_in(rng_key, number), batch).items():
            axis = axes[name]
            # A result without rows (a global quantity) is the same for every draw in all batches.
            if axis is None and number:
                continue
            kept = np.asarray(value)  # on the host: all batches together may not fit the device
            if axis is not None:
                # Only the rows that no batch before it had.
                kept = np.take(kept, np.arange(start - first, batch_size), axis=axis)
            pieces.setdefault(name, []).append(kept)
    return {name: _joined(parts, axes[name]) for name, parts in pieces.items()}


def _joined(parts: list[np.ndarray], axis: int | None) -> Any:
    return parts[0] if axis is None else np.concatenate(parts, axis=axis)


def _row_axes(
    call: Callable[..., dict[str, Array]], rng_key: PRNGKey, rows: Mapping[str, Any], num_rows: int
) -> dict[str, int | None] | None:
    """The axis of each result that follows the number of rows; ``None`` if it is not clear."""

    def shapes(size: int) -> dict[str, tuple[int, ...]]:
        found = jax.eval_shape(call, rng_key, resized(rows, size))
        return {name: s.shape for name, s in found.items()}

    # Compare abstract shapes with those of one row less. A model that only runs on its own number
    # of rows raises, and is then called on all rows at once.
    try:
        whole, less = shapes(num_rows), shapes(num_rows - 1)
    except _OTHER_SIZE_ERRORS:
        return None
    axes: dict[str, int | None] = {}
    for name, shape in whole.items():
        differing = [i for i, (a, b) in enumerate(zip(shape, less[name], strict=True)) if a != b]
        # As where a model returns a matrix of rows by rows: no batch has all of its entries.
        if len(differing) > 1:
            return None
        axes[name] = differing[0] if differing else None
    return axes


def check_arguments(
    model: Model,
    given: Mapping[str, Any],
    remembered: Mapping[str, Any],
    records: Mapping[str, jax.ShapeDtypeStruct],
    caller: str,
    example: str,
) -> dict[str, Any]:
    """Checks arguments against the model's signature and the shapes in the fit."""
    _check_names(model, given, remembered, caller, example)
    arrays = {
        name: _validated(name, given[name], records[name]) for name in given if name in records
    }
    lengths = {name: len(array) for name, array in arrays.items()}
    if 0 in lengths.values():
        raise ValueError(
            f"arrays of {caller} must have at least one row, got lengths {lengths}: pass rows to "
            "predict for."
        )
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"arrays of {caller} must have one entry per record, got unequal lengths {lengths}: "
            "give them all the same number of rows."
        )
    return {**given, **arrays}


def _validated(name: str, value: Any, like: jax.ShapeDtypeStruct) -> np.ndarray | Array:
    is_traced = isinstance(value, jax.core.Tracer)
    array = value if is_traced else held(name, value)
    wanted = like.shape[1:]
    if array.ndim == 0 or array.shape[1:] != wanted or not is_number(array.dtype):
        columns = ", ".join(map(str, wanted))
        raise ValueError(
            f"{name} must be numbers of shape (rows{', ' if columns else ''}{columns}) as in the "
            f"fit, got {_validate.shown(array)}: give it the columns that the model was fitted to."
        )
    return array


def check_missing(
    space: LatentSpace,
    model: Model,
    draws: Mapping[str, Array],
    rows: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> None:
    """Refuses NaN in what is predicted from: a draw at log odds of NaN is 0, and looks like one."""
    found = {name for name, array in rows.items() if _has_nan(array)}
    if not found:
        return
    first = {name: value[0] for name, value in draws.items()}
    # NumPyro's own checks would speak of a parameter that is invalid, and not of the argument.
    with HANDLERS, numpyro.validation_enabled(False):
        kept = observed_covariates(model, rows, constants, first)
        sites = outcomes(model, rows, constants, first)
    # An outcome that is passed is not read.
    unread = may_be_missing(space).allowed.union(*(sites[n].inputs for n in sites if n not in kept))
    for name in sorted(found - unread):
        raise ValueError(
            f"{name} must hold finite numbers, got NaN, and the model does not say what a missing "
            "entry is: leave out such rows, or put numbers in their place."
        )


def _has_nan(array: Any) -> bool:
    is_real = not isinstance(array, jax.core.Tracer) and jnp.issubdtype(array.dtype, jnp.floating)
    return is_real and bool(jnp.any(jnp.isnan(array)))


def is_number(dtype: Any) -> bool:
    """Whether a dtype is one of numbers (and not, for example, of JAX keys)."""
    return bool(dtype == jnp.bfloat16) or getattr(dtype, "kind", "none") in "biuf"


def held(name: str, value: Any) -> np.ndarray | Array:
    """An argument as an array that JAX can hold; NaN and infinities are allowed.

    Numbers that a cast would change, such as 1e39 in 32 bits, are refused.
    """
    if isinstance(value, jax.Array):
        return value
    array = _validate.host_array(name, value)
    # JAX has no name for numbers of 80 or 128 bits.
    if array.dtype == np.longdouble and array.dtype != np.float64:
        with np.errstate(over="ignore"):
            array = array.astype(np.float64)
    if not is_number(array.dtype):
        return array
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    with np.errstate(over="ignore", under="ignore"):
        cast = array.astype(held)
    # Floats may lose digits, as everywhere in 32 bits, but not become infinite; whole numbers would
    # wrap around, and must stay what they are.
    if array.dtype.kind == "f":
        kept = np.array_equal(np.isfinite(array), np.isfinite(cast))
    else:
        kept = np.array_equal(array, cast)
    if not kept:
        raise ValueError(
            f"{name} must fit JAX's {held}, got larger numbers: rescale them as in the fit."
        )
    return cast


def _check_names(
    model: Model, given: Mapping[str, Any], remembered: Mapping[str, Any], caller: str, example: str
) -> None:
    # What was public in the fit is remembered, and need not be passed again.
    asked = asked_of(model, {*remembered, *given})
    unknown = [name for name in given if name not in asked.names and not asked.anything]
    if unknown:
        raise TypeError(
            f"{caller} got {unknown[0]!r}, which is not an argument of the model: write one of "
            f"{', '.join(asked.names)}."
        )
    if asked.needed:
        missing = asked.needed[0]
        raise TypeError(
            f"{caller} needs the model's argument {missing!r}: write {example.format(missing)}, "
            "with made-up values if it is the outcome, or give that the default None in the model."
        )
