"""Checks that a model's log likelihood is a sum over records.

Privacy does not depend on this check: a record's contribution is computed from that row alone, so
it cannot affect another's. But a model that standardises its columns, for example, would silently
mean something different row by row. The check uses the traced program and made-up rows only.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from numpyro_dppvi._typing import Array
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families.compiled import Compiled
from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.fingerprint import constants
from numpyro_dppvi.latents.reasons import IMPUTE, WRONG_NUMBER_ERRORS, a_site_a_record, is_as_long
from numpyro_dppvi.latents.space import NUM_TOGETHER, Latent, LatentSpace, several

# Several made-up values of the latents, because a term may vanish at one of them.
_NUM_THETAS = 4
# And several sets of rows, likewise; by the largest of their integers.
_LARGEST = (1, 1, 3, 3)
# Relative to the sum of absolute contributions: far above rounding errors. The larger one is for
# models in which rounding grows (a nearly singular matrix a record), and the other order of the
# same rows shows by how much: so many times that is rounding.
_TOLERANCE, _LARGE_TOLERANCE, _TIMES_MOVED = 1e-4, 1e-3, 30

_RANDOM = (
    "depends on random numbers other than the latents (dropout, say), but must be the same at "
    "every step: leave them out, or draw them with numpyro.sample."
)
_FACTOR = (
    "is multiplied by a number that depends on how many rows there are (N / len(y), say), but "
    "inference already counts each record once: leave that number out."
)
_PRIOR_TOO = (
    "has a part that is counted once, whatever the rows (priors in the same numpyro.factor, say), "
    "but each row counts it again: draw latents with numpyro.sample and their priors, or put that "
    "part into a factor of its own."
)
_MIXES = (
    "over several records is not the sum over each (a mean, a cumulative sum, a softmax, a row's "
    "number or a process over rows mixes them), and no client has all records: write the density "
    "of a row by itself, with public constants in model_kwargs."
)

_ONE_COLUMN = (
    "over several records is not the sum over each, because {name!r} is a table of one column, of "
    "shape (n, 1), and meets an array of shape (n,), so that each row meets all others: pass the "
    "column itself, table['y'] in the place of table[['y']], or an array's y[:, 0]."
)

_PLACES_MIX = (
    "over several records is not the sum over each (places of NaN or a cumulative sum mix them), "
    f"and no client has all records: write the density of a row by itself; {IMPUTE}."
)


def check_additive(
    space: LatentSpace,
    model_kwargs: Mapping[str, Any],
    num_records: int,
    missing: frozenset[str] = frozenset(),
) -> None:
    """Refuses a model whose log likelihood is not a sum over records: names the site, and why.

    ``num_records`` are all clients', and ``missing`` the arguments whose entries may be NaN.
    """
    _refuse_closures(space, model_kwargs, num_records)
    name, why = _mixed(space, missing)
    if name is None:
        return
    if why == _MIXES and _is_one_of_a_loop(name, space.client_side):
        raise UnsupportedModelError(a_site_a_record(name))
    # Latents may be put among the records' values, as one does that are missing.
    if why == _MIXES and (missing or len(space.fixed_outcomes) < len(space.client_side)):
        why = _PLACES_MIX
    raise UnsupportedModelError(f"the density of {name!r} {why}")


def _is_one_of_a_loop(name: str, others: Sequence[str]) -> bool:
    """Whether a site is one of a series ``y_0``, ``y_1``, ..."""
    # A site that stands alone is its own stem, and no series.
    stem = name.rstrip("0123456789")
    return sum(other.rstrip("0123456789") == stem != other for other in others) > 1


def _refuse_closures(space: LatentSpace, model_kwargs: Mapping[str, Any], num_records: int) -> None:
    """Refuses closed-over arrays as long as the data, which would be treated as public."""
    # Arrays that the model closes over appear as constants of its traced program.
    # On one row: an array that follows the rows would have length one here, so one of the data's
    # length was made outside.
    program = jax.make_jaxpr(space.together)(space.structs, several(space.row, 1))
    public = [np.asarray(leaf) for leaf in jax.tree.leaves(model_kwargs) if np.ndim(leaf)]
    for array in (each for each in constants(program) if is_as_long(each, num_records)):
        if not any(np.array_equal(array, known) for known in public):
            raise UnsupportedModelError(
                f"the model uses an array of shape {np.shape(array)} that is not one of its "
                f"arguments, and there are {num_records} records: add an argument for it and put "
                "it into data, or into model_kwargs if it is public and has that length by chance."
            )


# Cached, because it compiles the model: once for each program.
@functools.lru_cache(maxsize=256)
def _mixed(space: LatentSpace, missing: frozenset[str]) -> tuple[str | None, str]:
    """A site whose density is not a sum over records, and why; ``None`` if there is none."""
    rng = np.random.default_rng(0)
    # Zeros and ones are possible in most columns, and hide what is divided by the largest.
    sets = [_some_rows(rng, space.row, largest=largest) for largest in _LARGEST]
    theta = {latent.name: _thetas(rng, latent) for latent in space.latents}
    # Whatever a record's own discrete latents are: then the sum over them is over each record, too.
    summed = space.summation.summed
    z_of = {z.name: z.made_up(rng, NUM_TOGETHER) for z in summed}
    z_together = {z.name: z.joined(z_of[z.name]) for z in summed}

    def all_at_once(seed: int, rows: Mapping[str, Array]) -> dict[str, Array]:
        return jax.vmap(space.together, (0, None, None, None))(theta, rows, seed, z_together)

    def one_by_one(seed: int, rows: Mapping[str, Array]) -> dict[str, Array]:
        single = {name: leaf[:, None] for name, leaf in rows.items()}
        of_rows = jax.vmap(space.together, (None, 0, None, 0))
        return jax.vmap(of_rows, (0, None, None, None))(theta, single, seed, z_of)

    # Compare log p(rows) with the sum of log p(row), with different seeds for the two, so that a
    # model that draws random numbers of its own differs, too.
    both = Compiled(lambda rows: (all_at_once(0, rows), one_by_one(1, rows)), quick=True)
    for name, given, density, alone, moved in _densities(both, sets, missing):
        total, rounding = alone.sum(axis=1), _rounding(alone, moved)
        if _agree(density, total, rounding):
            continue
        rows = sets[0]
        if not _agree(density, Compiled(all_at_once, quick=True)(1, given)[name], rounding):
            return name, _RANDOM
        # With N / len(y) a model makes N / 3 sum_i l_i of three rows, and N l_i of each row alone.
        if _agree(NUM_TOGETHER * density, total, rounding):
            return name, _FACTOR
        # Tables of one column.
        for column in (n for n, s in space.row.items() if s.shape == (1,)):
            with contextlib.suppress(*WRONG_NUMBER_ERRORS):
                flat = {**rows, column: rows[column][:, 0]}
                whole, each = jax.tree.map(np.asarray, both(flat))
                if _agree(whole[name], each[name].sum(axis=1), _rounding(each[name])):
                    return name, _ONE_COLUMN.format(name=column)
        # What is left when the records are replaced by others depends on no record.
        finite = np.isfinite(density) & np.isfinite(total)
        found = [jax.tree.map(np.asarray, both(rows)) for rows in sets]
        with np.errstate(invalid="ignore"):
            others = [whole[name] - each[name].sum(axis=1) for whole, each in found]
        once = finite.any() and all(
            _agree((density - total)[finite], rest[finite], rounding[finite]) for rest in others
        )
        return name, _PRIOR_TOO if once else _MIXES
    return None, ""


def _some_rows(
    rng: np.random.Generator, row: Mapping[str, jax.ShapeDtypeStruct], *, largest: int
) -> dict[str, Array]:
    """Made-up rows that differ in every entry: where none differ, nothing shows that they mix."""
    rows = {name: made_up(rng, s) for name, s in several(row, NUM_TOGETHER).items()}
    for name, values in rows.items():
        if not jnp.issubdtype(values.dtype, jnp.floating):
            # The least and the largest at two places, which are drawn for each entry.
            whole = rng.integers(0, largest + 1, (NUM_TOGETHER, values.size // NUM_TOGETHER))
            whole[:2] = [[0], [largest]]
            whole = rng.permuted(whole, axis=0).reshape(values.shape)
            rows[name] = jnp.asarray(whole.astype(values.dtype), values.dtype)
    return rows


def _densities(
    both: Callable[[Mapping[str, Any]], Any],
    sets: Sequence[Mapping[str, Array]],
    missing: frozenset[str],
) -> Iterator[tuple[str, Mapping[str, Array], np.ndarray, np.ndarray, np.ndarray]]:
    """Yields sites and rows, which may lack a column, with densities of all rows and of each.

    The last is by how much the density of all moves where the rows come in another order.
    """
    # The known entry in the middle shows an imputation that counts the missing ones before it.
    some = np.arange(NUM_TOGETHER) != 1
    lacking = [
        {**rows, name: jnp.where(some.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)}
        for rows in sets
        for name, x in rows.items()
        if name in missing
    ]
    for given in (*sets, *lacking):
        whole, alone = jax.tree.map(np.asarray, both(given))
        # In NumPy: JAX would compile a program for each kind of column.
        order = {name: np.roll(np.asarray(x), 1, 0) for name, x in given.items()}
        turned, _ = jax.tree.map(np.asarray, both(order))
        for name, density in whole.items():
            with np.errstate(invalid="ignore"):  # rows may be impossible
                moved = np.abs(density - turned[name])
            yield name, given, density, alone[name], moved


def _thetas(rng: np.random.Generator, latent: Latent) -> Array:
    """Random values of a latent: integers, or unconstrained values in (-1, 1) transformed."""
    values = integers(latent.support)
    if values is not None:
        drawn = rng.integers(values.start, values.stop, (_NUM_THETAS, *latent.shape))
        return jnp.asarray(drawn, latent.dtype)
    transform = biject_to(latent.support)
    shape = (_NUM_THETAS, *transform.inverse_shape(latent.shape))
    dtype = jnp.result_type(float)
    return transform(jnp.asarray(rng.uniform(-1, 1, shape).astype(dtype), dtype))


def _rounding(alone: np.ndarray, moved: np.ndarray | float = np.inf) -> np.ndarray:
    """What may be rounding, in a sum of each row's densities.

    ``moved`` is what is rounding, or not known to be.
    """
    size = 1 + np.abs(alone).sum(axis=1)
    size = np.where(np.isfinite(size), size, 1)  # of rows that are impossible by themselves
    moved = np.where(np.isfinite(moved), moved, np.inf)
    return np.minimum(_LARGE_TOLERANCE * size, _TOLERANCE * size + _TIMES_MOVED * moved)


def _agree(a: Any, b: Any, rounding: np.ndarray) -> bool:
    """Whether sums are equal up to rounding, and finite at the same places."""
    a, b, rounding = np.broadcast_arrays(a, b, rounding)
    # A made-up row may be impossible under a made-up theta. Then all rows together are, too: a
    # column over its standard deviation is a number where there are several rows, and not of one.
    known = np.isfinite(a)
    if not np.array_equal(known, np.isfinite(b)):
        return False
    return bool(np.all(np.abs(a[known] - b[known]) <= rounding[known]))


def made_up(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> Array:
    """Random values that suit most distributions and any index: in (0, 1), or 0 and 1."""
    # 0 and 1 are valid classes and counts, and index every array of at least two entries.
    real = jnp.issubdtype(shape.dtype, jnp.floating)
    drawn = rng.uniform(0.1, 0.9, shape.shape) if real else rng.integers(0, 2, shape.shape)
    return jnp.asarray(drawn.astype(shape.dtype), shape.dtype)  # a cast by JAX is compiled
