"""Runs a user's model: on abstract rows to see its structure, on one row to evaluate it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_dppvi._typing import Array, Model, Records
from numpyro_dppvi._validate import UnsupportedModelError

Trace = dict[str, Any]
"""A NumPyro trace: messages by site name."""

_CONCRETE_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclass(frozen=True)
class Site:
    """Static facts of one sample site."""

    name: str
    observed: bool
    discrete: bool
    plates: tuple[tuple[str, int, int], ...]  # name, size, dim


class _ForcedPlates(Messenger):
    """Makes the named plates yield the first ``num_rows`` indices, whatever size they state."""

    def __init__(self, fn: Model, names: frozenset[str], num_rows: int) -> None:
        super().__init__(fn)
        self.names = names
        self.num_rows = num_rows

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.names:
            msg["args"] = (msg["args"][0], self.num_rows)
            msg["value"] = jnp.arange(self.num_rows)


def run_model(
    model: Model,
    rows: Records,
    kwargs: Mapping[str, Any],
    theta: Mapping[str, Array] | None,
    plates: frozenset[str],
    num_rows: int,
) -> Trace:
    """Runs the model on some rows; ``theta`` fixes the latents."""
    forced = _ForcedPlates(model, plates, num_rows)
    seeded = handlers.seed(handlers.substitute(forced, data=dict(theta or {})), rng_seed=0)
    with handlers.block():  # a caller's own handlers must not see this run
        return handlers.trace(seeded).get_trace(**rows, **kwargs)


def static_facts(model: Model, shapes: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Site]:
    """Static facts of every sample site, with abstract rows."""
    found: list[Site] = []

    def run(rows: Records) -> None:
        trace = run_model(model, rows, kwargs, None, frozenset(), 1)
        for name, site in trace.items():
            if site["type"] == "param" and jax.tree.leaves(site["value"]):
                raise UnsupportedModelError(
                    f"the model calls numpyro.param({name!r}), which has no prior and so no "
                    "factor: give it a prior with numpyro.sample."
                )
            if site["type"] == "sample":
                frames = tuple((f.name, f.size, f.dim) for f in site["cond_indep_stack"])
                discrete = bool(site["fn"].support.is_discrete)
                found.append(Site(name, site["is_observed"], discrete, frames))

    try:
        jax.eval_shape(run, dict(shapes))
    except _CONCRETE_VALUE_ERRORS as error:
        raise UnsupportedModelError(
            "the model's shape or control flow depends on the values of its data (an int(...), "
            "len(np.unique(...)), a boolean index or an if on an array): pass such a number as a "
            "public constant, model_kwargs={'num_groups': 8}."
        ) from error
    return found


def data_plates(
    model: Model, shapes: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[list[Site], frozenset[str]]:
    """Sites, and the plates whose length is the number of records.

    A plate is one of records if its size follows the number of rows, or if it has the size of
    the data and holds an observed site but no latent (a size written down as a number).
    """
    num_rows = next(iter(shapes.values())).shape[0]
    sites = static_facts(model, shapes, kwargs)

    def longer(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows + 1, *s.shape[1:]), s.dtype)

    names: set[str] = set()
    with_latent = {name for s in sites if not s.observed for name, _, _ in s.plates}
    for site in sites:
        for name, size, _ in site.plates:
            if site.observed and size == num_rows and name not in with_latent:
                names.add(name)
    fixed = {(site.name, *plate) for site in sites for plate in site.plates}
    try:
        grown = static_facts(model, {k: longer(s) for k, s in shapes.items()}, kwargs)
    except (TypeError, ValueError):  # a size written down as a number cannot grow
        return sites, frozenset(names)
    grown_plates = {(site.name, *plate) for site in grown for plate in site.plates}
    names |= {name for _, name, _, _ in fixed - grown_plates}
    return sites, frozenset(names)


def log_prob(site: dict[str, Any], trace: Trace, plates: frozenset[str]) -> Array:
    """Log density of a site, without the factor that a plate of records gives a subsample."""
    value = site["fn"].log_prob(site["value"])
    if site["scale"] is not None:
        value = value * site["scale"]
    for frame in site["cond_indep_stack"]:
        if frame.name in plates:
            size, num_rows = trace[frame.name]["args"]
            value = value * (num_rows / size)
    return jnp.sum(value)
