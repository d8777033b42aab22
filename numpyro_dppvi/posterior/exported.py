"""The groups of an ArviZ export, computed from draws or from public data only."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_dppvi._typing import Array, Model, PRNGKey
from numpyro_dppvi.latents import LatentSpace, outputs
from numpyro_dppvi.latents.outputs import Derived
from numpyro_dppvi.posterior import predictions
from numpyro_dppvi.posterior.to_arviz import Variable

Group = dict[str, Variable]


def of_draws(space: LatentSpace, draws: Mapping[str, Array], derived: Derived) -> Group:
    """A group of draws: the latents and deterministic sites."""
    dims = {latent.name: latent.dims for latent in space.latents} | dict(derived.dims)
    values = dict(draws)
    if derived.dims:
        values |= jax.jit(jax.vmap(derived.of))(dict(draws))
    return {name: Variable(value, dims[name]) for name, value in values.items()}


def of_public_data(
    model: Model,
    space: LatentSpace,
    draws: Mapping[str, Array],
    rows: Mapping[str, Any],
    constants: Mapping[str, Any],
    given: Mapping[str, Any],
    rng_key: PRNGKey,
) -> dict[str, Group]:
    """The groups that are computed from data which the caller declares public: ``given``.

    These are ``posterior_predictive``; if there are outcomes, ``log_likelihood`` and
    ``observed_data``; if there are other arrays, ``constant_data``. Where records have discrete
    latents, these are summed out, and the log likelihood is of all outcomes of a record together:
    it bears the outcome's name if there is one, else ``outcomes``.
    """
    predictions.check_missing(space, model, draws, rows, constants)
    # One draw is enough to read names and shapes of outcomes.
    first = {name: value[0] for name, value in draws.items()}
    sites = outputs.outcomes(model, rows, constants, first)
    predicted = predictions.predict(model, draws, rows, constants, rng_key)
    groups: dict[str, Group] = {
        "posterior_predictive": {n: Variable(predicted[n], sites[n].dims) for n in sites}
    }
    values = {name: site.value for name, site in sites.items() if site.value is not None}
    seen = {name: sites[name] for name in values}
    num_rows = len(next(iter(rows.values()))) if rows else -1
    record = _record_dim(sites, num_rows)
    if seen and space.summation.summed:
        density = predictions.log_likelihood_of_records(model, draws, rows, constants)
        name = next(iter(seen)) if len(seen) == 1 else "outcomes"
        groups["log_likelihood"] = {name: Variable(density, [record] if record else [])}
    # NumPyro's own: every entry of every observed site by itself, as ArviZ wants it for LOO.
    elif seen:
        densities = predictions.log_likelihood(model, draws, rows, constants)
        groups["log_likelihood"] = {
            n: Variable(densities[n], site.batch_dims) for n, site in seen.items()
        }
    if seen:
        groups["observed_data"] = {n: Variable(values[n], site.dims) for n, site in seen.items()}
    # Arguments from which observed values are computed are outcomes; the rest is constant data.
    outcome = frozenset[str]().union(*(site.inputs for site in seen.values()))
    # What came as an array stays as it was; a table's column is what was made of it.
    rest = {
        n: np.asarray(x if _is_array(x) else rows[n])
        for n, x in given.items()
        if n not in outcome and (n in rows or _is_array(x))
    }
    if rest:
        groups["constant_data"] = {
            name: Variable(value, [record] if name in rows and record else [])
            for name, value in rest.items()
        }
    return groups


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, jax.Array)) and value.dtype.kind in "biufc"


def _record_dim(sites: Mapping[str, outputs.Outcome], num_rows: int) -> str | None:
    """The name of the plate over records, if all outcomes agree on one."""
    # A plate as long as the rows is taken for theirs; two such plates leave it open which is.
    names = {
        name
        for site in sites.values()
        for name, size in zip(site.dims, site.shape, strict=True)
        if name is not None and size == num_rows
    }
    return names.pop() if len(names) == 1 else None
