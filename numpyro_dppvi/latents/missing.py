"""Which arguments of a model may hold NaN, because the model itself says what is then missing.

A model says so by ``jnp.isnan(x)``, or by a mask over the site that observes ``x``. That is read
off its traced program and tried on a made-up record: no record is looked at.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.extend.core import Jaxpr, Literal, Var, jaxprs_in_params
from numpyro.ops.provenance import eval_provenance

from numpyro_dppvi._typing import Array
from numpyro_dppvi.latents.additive import made_up
from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.space import Latent, LatentSpace, several
from numpyro_dppvi.latents.trace import HANDLERS

_Names: TypeAlias = frozenset[str]


class Missing(NamedTuple):
    """The arguments whose entries may be NaN, a fact of the model alone."""

    asked: frozenset[str]  # those of which the model asks whether they are NaN
    # Those of which a made-up record without them has a density, with gradients.
    allowed: frozenset[str]


# What may be written where the model is told that nothing is known. NaN is neither above nor below
# a number, so that what a comparison makes of it differs from one of these.
_FILLERS = (-1e9, 0.37, 1e9)
# What the other arguments say in the made-up records: numbers in (0, 1), or all of them 0 or 1. One
# of these is what a column "known" says of a missing entry.
_OTHERS = (None, 0, 1)


_UNASKED = (
    "and the model does not say what a missing entry is: drop or impute those records, or ask in "
    "the model, as in numpyro.sample('x', dist.Normal(m, s), obs=x, obs_mask=~jnp.isnan(x))."
)
_UNREAD = (
    "of which the model makes NaN, though it asks for them: put a number or a latent in their "
    "place before anything is computed, as in b * jnp.where(jnp.isnan(x), 0.0, x)."
)


def check_missing(
    space: LatentSpace, records: Mapping[str, Array], owners: np.ndarray, called: Sequence[str]
) -> None:
    """Refuses NaN in arrays of which the model does not say what it is then; shows no record.

    Records have two leading axes, and ``owners`` is the client of each, of a shape that fills these
    axes if it is repeated; ``called`` is what to call each client's records.
    """
    may = may_be_missing(space)
    for name, struct in space.row.items():
        if name in may.allowed or not np.issubdtype(struct.dtype, np.floating):
            continue
        array = np.asarray(records[name])
        found = np.any(np.isnan(array), axis=tuple(range(2, array.ndim)))
        if np.any(found):
            first = np.min(np.broadcast_to(owners, found.shape)[found])
            raise ValueError(
                f"{called[int(first)]}[{name!r}] must hold finite numbers, got NaN, "
                + (_UNREAD if name in may.asked else _UNASKED)
            )


@functools.lru_cache(maxsize=256)
def may_be_missing(space: LatentSpace) -> Missing:
    """The arguments whose entries may be NaN.

    An argument may if the model asks whether it is NaN, or masks the site that observes it, and if
    a made-up record with NaN in all its entries has a finite density with finite gradients.
    """
    # Most models name none, and compile nothing here.
    asked = _asked(space)
    allowed = frozenset(
        name
        for name in sorted(asked | _masked(space))
        if jnp.issubdtype(space.row[name].dtype, jnp.floating)
        and _is_read(space, name, name in asked)
    )
    return Missing(asked, allowed)


def _asked(space: LatentSpace) -> _Names:
    """The arguments of which the model asks whether they are NaN.

    A comparison with a number, an index or a cast makes something of NaN, too, and something wrong:
    a missing age is not below 50 because ``age > 50`` is false.
    """

    # A function of its own, because JAX remembers what it has traced.
    def densities(theta: Mapping[str, Array], rows: Mapping[str, Array]) -> dict[str, Array]:
        return space.together(theta, rows)

    # NumPyro's own checks of supports compare every outcome with itself. They are off here; the
    # switch is one for all threads, as its handlers are.
    with HANDLERS, numpyro.validation_enabled(False):
        program = jax.make_jaxpr(densities)(space.structs, several(space.row, 1))
    # A mapping's leaves come in the order of its sorted names. None stands for all latents.
    names = [*(None for _ in space.latents), *sorted(space.row)]
    causes = [frozenset({name}) for name in names]
    # Where latents take part, it is a library that keeps a number finite (logsumexp does).
    asked = (found for found in _compared(program.jaxpr, causes) if None not in found)
    return frozenset(name for found in asked for name in found if name is not None)


def _compared(
    jaxpr: Jaxpr, causes: Sequence[frozenset[str | None]]
) -> Iterator[frozenset[str | None]]:
    """Yields the causes of each value that a program compares with itself, as ``isnan`` does."""
    told: dict[Var, frozenset[str | None]] = dict(zip(jaxpr.invars, causes, strict=True))
    for eqn in jaxpr.eqns:
        each = [
            frozenset[str | None]() if isinstance(v, Literal) else told.get(v, frozenset())
            for v in eqn.invars
        ]
        together = frozenset[str | None]().union(*each)
        name, of = eqn.primitive.name, eqn.invars
        if name == "is_finite" or (name in ("ne", "eq") and of[0] is of[1]):
            yield together
        for inner in jaxprs_in_params(eqn.params):
            fits = len(inner.invars) == len(each)
            yield from _compared(inner, each if fits else [together] * len(inner.invars))
        told.update(dict.fromkeys(eqn.outvars, together))


def _masked(space: LatentSpace) -> _Names:
    """The arguments that a site observes under a mask which other arguments decide."""

    def values(**given: Any) -> dict[str, tuple[Array, list[Array]]]:
        trace = space.trace(given.pop(""), given)
        return {
            name: (jnp.asarray(trace[name]["value"]), list(_masks(trace[name]["fn"])))
            for name in space.client_side
        }

    # No argument has an empty name.
    found = eval_provenance(values, **{"": space.structs}, **space.row)
    return frozenset[str]().union(
        *(value for value, masks in found.values() if frozenset[str]().union(*masks) - {""})
    ) - {""}


def _masks(fn: Any) -> Iterator[Array]:
    while isinstance(fn, dist.MaskedDistribution):
        yield jnp.asarray(fn._mask)
        fn = fn.base_dist


def _is_read(space: LatentSpace, name: str, asked: bool) -> bool:
    """Whether a made-up record without an argument has a density, with gradients."""
    # If the model does not ask for NaN, it must be blind to what is written in its place, too.
    rng = np.random.default_rng(0)
    base = {latent.name: _some_base(rng, latent) for latent in space.latents}
    row = {key: made_up(rng, struct) for key, struct in space.row.items()}
    entries = [np.nan] if asked else [np.nan, *_FILLERS]
    others = [{k: x if y is None else jnp.full_like(x, y) for k, x in row.items()} for y in _OTHERS]
    rows = [{**row, name: jnp.full_like(row[name], e)} for row in others for e in entries]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    densities, good = (np.asarray(x) for x in _with_gradients(space, base, stacked))
    same = np.reshape(densities, (len(_OTHERS), -1))
    fine = np.reshape(good, same.shape)
    return bool(np.any(np.all(fine & np.isclose(same, same[:, :1], rtol=1e-5), axis=1)))


def _some_base(rng: np.random.Generator, latent: Latent) -> Array:
    values = integers(latent.support)
    if values is not None:
        return jnp.full(latent.shape, float(values.start))
    return jnp.asarray(rng.uniform(-1, 1, latent.base_shape), jnp.result_type(float))


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(
    space: LatentSpace, base: Mapping[str, Array], rows: Mapping[str, Array]
) -> tuple[Array, Array]:
    """Densities of records, and whether these and their gradients are finite."""

    def of_row(row: Mapping[str, Array]) -> tuple[Array, Array]:
        density, slopes = jax.value_and_grad(
            lambda base: space.log_likelihood(space.constrain(base), row)
        )(base)
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((density, slopes))]
        return density, jnp.all(jnp.stack(finite))

    return jax.vmap(of_row)(rows)
