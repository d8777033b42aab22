"""Whether a model is what partitioned inference needs: a sum over records that it sees one by one.

Privacy does not rest on this. A record's contribution is the model's value on that row alone, so
one record cannot reach another's whatever the model does. But a model that standardises its
columns, say, would mean something else row by row than its author meant, without any notice.
Everything is read from the program and from made-up rows.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from numpyro_dppvi._typing import Array
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents.fingerprint import constants
from numpyro_dppvi.latents.integers import integers
from numpyro_dppvi.latents.reasons import a_site_a_record
from numpyro_dppvi.latents.space import NUM_TOGETHER, Latent, LatentSpace, several

# One made-up theta may hide a term that is large elsewhere.
_NUM_THETAS = 4
# Of the sum of absolute contributions; far above rounding, far below what mixing records does.
_TOLERANCE = 1e-3

_RANDOM = (
    "depends on random numbers that are no latent (dropout, say), and a record must count the same "
    "at every step: leave them out, or draw them with numpyro.sample."
)
_FACTOR = (
    "is multiplied by a number that depends on how many rows there are (N / len(y), say), and "
    "inference counts each record once by itself: leave that number out."
)
_MIXES = (
    "over several records is not the sum over each (a mean, a cumulative sum, a softmax, a row's "
    "number or a process over rows mixes them), and no client has all records: write what a row "
    "says by itself, with public constants (model_kwargs)."
)


def check_additive(space: LatentSpace, model_kwargs: Mapping[str, Any], num_records: int) -> None:
    """Refuses a model whose log likelihood is not a sum over the records that it is given.

    Args:
        space: What was read from the model.
        model_kwargs: The model's public arguments, which may be of any length.
        num_records: Number of all clients' records.

    Raises:
        UnsupportedModelError: Names the observed site, and what is the matter with it.
    """
    _refuse_closures(space, model_kwargs, num_records)
    name, why = _mixed(space)
    if name is None:
        return
    if why == _MIXES and _is_one_of_a_loop(name, space.client_side):
        raise UnsupportedModelError(a_site_a_record(name))
    raise UnsupportedModelError(f"the density of {name!r} {why}")


def _is_one_of_a_loop(name: str, others: Sequence[str]) -> bool:
    """Whether a site is one of ``y_0``, ``y_1`` and so on."""
    stem = name.rstrip("0123456789")
    return sum(other.rstrip("0123456789") == stem != other for other in others) > 1


def _refuse_closures(space: LatentSpace, model_kwargs: Mapping[str, Any], num_records: int) -> None:
    """Refuses arrays as long as the data that are no argument: they would be treated as public."""
    theta = {lt.name: lt.struct for lt in space.latents}
    program = jax.make_jaxpr(space.together)(theta, several(space.row, 1))
    public = [np.asarray(leaf) for leaf in jax.tree.leaves(model_kwargs) if np.ndim(leaf)]
    for array in constants(program):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or np.shape(array)[:1] != (
            num_records,
        ):
            continue
        if not any(_equal(array, known) for known in public):
            raise UnsupportedModelError(
                f"the model uses an array of shape {np.shape(array)} that is none of its "
                f"arguments, and there are {num_records} records: add an argument for it and put "
                "it into data, or into model_kwargs if it is public and as long by chance."
            )


def _equal(array: Any, known: np.ndarray) -> bool:
    return array.shape == known.shape and bool(np.all(np.asarray(array) == known))


# Compiled and compared once for each program.
@functools.lru_cache(maxsize=256)
def _mixed(space: LatentSpace) -> tuple[str | None, str]:
    """A site whose density is no sum over records, and what is the matter with it."""
    rng = np.random.default_rng(0)
    rows = {name: made_up(rng, s) for name, s in several(space.row, NUM_TOGETHER).items()}
    single = jax.tree.map(lambda leaf: leaf[:, None], rows)
    theta = {latent.name: _thetas(rng, latent) for latent in space.latents}

    def all_at_once(seed: int) -> dict[str, Array]:
        return jax.vmap(space.together, (0, None, None))(theta, rows, seed)

    def one_by_one(seed: int) -> dict[str, Array]:
        of_rows = jax.vmap(space.together, (None, 0, None))
        return jax.vmap(of_rows, (0, None, None))(theta, single, seed)

    # Another seed, so that a model which draws random numbers of its own differs, too.
    whole, alone = jax.tree.map(np.asarray, jax.jit(lambda: (all_at_once(0), one_by_one(1)))())
    for name, density in whole.items():
        total, size = alone[name].sum(axis=1), np.abs(alone[name]).sum(axis=1)
        if _agree(density, total, size):
            continue
        if not _agree(density, jax.jit(all_at_once)(1)[name], size):
            return name, _RANDOM
        return name, _FACTOR if _agree(NUM_TOGETHER * density, total, size) else _MIXES
    return None, ""


def _thetas(rng: np.random.Generator, latent: Latent) -> Array:
    """Values of a latent: any integers, or by the usual bijection from numbers in (-1, 1)."""
    values = integers(latent.support)
    if values is not None:
        drawn = rng.integers(values.start, values.stop, (_NUM_THETAS, *latent.shape))
        return jnp.asarray(drawn, latent.dtype)
    transform = biject_to(latent.support)
    shape = (_NUM_THETAS, *transform.inverse_shape(latent.shape))
    return transform(jnp.asarray(rng.uniform(-1, 1, shape), float))


def _agree(a: Any, b: Any, size: np.ndarray) -> bool:
    """Whether sums are equal to rounding, where made-up rows are possible at all."""
    a, b, size = np.broadcast_arrays(a, b, size)
    known = np.isfinite(a) & np.isfinite(b)
    return bool(np.all(np.abs(a[known] - b[known]) <= _TOLERANCE * (1 + size[known])))


def made_up(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> Array:
    """Values that most distributions and all indices allow: in (0, 1), or 0 and 1."""
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.asarray(rng.uniform(0.1, 0.9, shape.shape), shape.dtype)
    return jnp.asarray(rng.integers(0, 2, shape.shape), shape.dtype)
