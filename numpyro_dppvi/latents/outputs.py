"""Runs a model at given latents for predictions, observed values and derived quantities."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.ops.provenance import eval_provenance

from numpyro_dppvi._typing import Array, Model, PRNGKey
from numpyro_dppvi.latents.trace import HANDLERS, all_rows, dims_of, indexable, resized

Dims = tuple[str | None, ...]


class Outcome(NamedTuple):
    """A site that is not a latent: observed, or drawn because no outcome was passed."""

    value: Array | None  # the observed value; ``None`` if it is not observed
    shape: tuple[int, ...]  # shape of a value
    dims: Dims  # plate names of its dimensions; ``None`` for dimensions without a plate
    batch_dims: Dims  # the same without event dimensions, as for the log likelihood
    inputs: frozenset[str]  # names of the rows' arguments that the value depends on


class Unconditioned(handlers.uncondition):
    """A model without its observations but those kept, so that it draws its outcomes."""

    def __init__(self, fn: Model, kept: frozenset[str]) -> None:
        super().__init__(fn)
        self.kept = kept

    def process_message(self, msg: dict[str, Any]) -> None:
        """Removes an observation, as for all sites but those that are kept."""
        if msg.get("name") not in self.kept:
            super().process_message(msg)


def observed_covariates(
    model: Model, rows: Mapping[str, Any], constants: Mapping[str, Any], theta: Mapping[str, Array]
) -> frozenset[str]:
    """The observed sites on whose values draws of other sites depend; arguments as a call's."""
    model = all_rows(model, rows)

    def trace(given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        arguments = {**constants, **rows}
        return _outcomes(_trace(model, arguments, {**theta, **given}, jax.random.key(0)), theta)

    def values() -> dict[str, Array]:
        return {n: jnp.asarray(s["value"]) for n, s in trace({}) if s["is_observed"]}

    # Draws and not densities: a mask makes no difference to what is drawn.
    def draws(**given: Any) -> dict[str, Array]:
        return {name: site["fn"].sample(jax.random.key(0)) for name, site in trace(given)}

    observed = jax.eval_shape(values)
    if not observed:
        return frozenset()
    causes = eval_provenance(draws, **observed)
    return frozenset(n for n in observed if any(n in c for name, c in causes.items() if name != n))


def outcomes(
    model: Model, rows: Mapping[str, Any], constants: Mapping[str, Any], theta: Mapping[str, Array]
) -> dict[str, Outcome]:
    """The sites that are not latents when the model is called with these arguments."""
    model = all_rows(model, rows)

    def observed(**given: Any) -> dict[str, Array]:
        trace = _trace(model, {**constants, **given}, theta, jax.random.key(0))
        return {n: jnp.asarray(s["value"]) for n, s in _outcomes(trace, theta) if s["is_observed"]}

    # Which arguments each observed value is computed from, to tell outcomes from covariates.
    inputs = eval_provenance(observed, **rows)
    found = {}
    for name, site in _outcomes(
        _trace(model, {**constants, **rows}, theta, jax.random.key(0)), theta
    ):
        fn = site["fn"]
        dims, shape = dims_of(site["cond_indep_stack"], fn), fn.batch_shape + fn.event_shape
        value = jnp.broadcast_to(site["value"], shape) if site["is_observed"] else None
        batch_dims = dims[: len(fn.batch_shape)]
        found[name] = Outcome(value, shape, dims, batch_dims, inputs.get(name, frozenset()))
    return found


def _outcomes(
    trace: Mapping[str, Any], theta: Mapping[str, Array]
) -> list[tuple[str, dict[str, Any]]]:
    """Sample sites that are neither latents nor ``numpyro.factor`` statements."""
    return [
        (name, site)
        for name, site in trace.items()
        if site["type"] == "sample" and name not in theta and not isinstance(site["fn"], dist.Unit)
    ]


def prior_draws(
    model: Model,
    shapes: Mapping[str, Any],
    constants: Mapping[str, Any],
    names: Sequence[str],
    rng_key: PRNGKey,
    num_draws: int,
) -> dict[str, Array]:
    """Draws of the latents from their priors, shape ``(num_draws, *shape)``."""

    def one(key: PRNGKey) -> dict[str, Array]:
        trace = _trace(model, {**constants, **_zeros(shapes)}, {}, key)
        return {name: trace[name]["value"] for name in names}

    # Zeros for records: priors depend on none (latents.space refuses those that do).
    return jax.jit(jax.vmap(one))(jax.random.split(rng_key, num_draws))


class Derived(NamedTuple):
    """The deterministic sites that depend on the latents only."""

    # Computes them from a value of every latent.
    of: Callable[[Mapping[str, Array]], dict[str, Array]]
    dims: Mapping[str, Dims]  # plate names of their dimensions


def derived(
    model: Model, shapes: Mapping[str, Any], constants: Mapping[str, Any], theta: Mapping[str, Any]
) -> Derived:
    """Finds the ``numpyro.deterministic`` sites that do not depend on records."""
    facts: dict[str, tuple[tuple[int, ...], Dims]] = {}

    def sites(rows: Mapping[str, Array], theta: Mapping[str, Array]) -> dict[str, Array]:
        trace = _trace(model, {**constants, **rows}, theta, jax.random.key(0))
        found = {n: s for n, s in trace.items() if s["type"] == "deterministic"}
        facts.update({n: (jnp.shape(s["value"]), _plates(s)) for n, s in found.items()})
        return {n: jnp.asarray(s["value"]) for n, s in found.items()}

    # A site that is computed from records has no value without them.
    # One name for all rows and one for all latents: which of them it is does not matter.
    inputs = eval_provenance(sites, rows=dict(shapes), theta=dict(theta))
    before = dict(facts)
    longer = resized(shapes, 1 + next(iter(shapes.values())).shape[0])
    # A site whose shape follows the number of rows depends on records, too. A model that only runs
    # on its own number of rows raises; then there is nothing to compare.
    with contextlib.suppress(AssertionError, IndexError, TypeError, ValueError):
        jax.eval_shape(sites, longer, dict(theta))
    names = [n for n in inputs if "rows" not in inputs[n] and facts[n][0] == before[n][0]]

    def of(theta: Mapping[str, Array]) -> dict[str, Array]:
        found = sites(_zeros(shapes), theta)
        return {name: found[name] for name in names}

    return Derived(of, {name: facts[name][1] for name in names})


def _zeros(shapes: Mapping[str, Any]) -> dict[str, Array]:
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}


def _plates(site: Mapping[str, Any]) -> Dims:
    """Plate names of a deterministic site's dimensions, where its shape agrees with the plates."""
    shape = jnp.shape(site["value"])
    names: list[str | None] = [None] * len(shape)
    for frame in site["cond_indep_stack"]:
        if -frame.dim <= len(shape) and shape[frame.dim] == frame.size:
            # A deterministic value need not have a dimension for each plate around it (a sum over
            # one).
            names[frame.dim] = frame.name
    return tuple(names)


def _trace(
    model: Model, arguments: Mapping[str, Any], theta: Mapping[str, Array], rng_key: PRNGKey
) -> dict[str, Any]:
    fixed = handlers.substitute(model, data=dict(theta))
    with HANDLERS, handlers.block():  # hides this run from handlers of the caller
        return handlers.trace(handlers.seed(fixed, rng_key)).get_trace(**indexable(arguments))
