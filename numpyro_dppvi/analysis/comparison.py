"""Compares a posterior with non-private inference; for simulations only.

Everything computed here from records is without noise, and is named ``nonprivate_``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import biject_to
from numpyro.infer import MCMC, NUTS

from numpyro_dppvi import _html, _validate
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.latents import HANDLERS, LatentSpace
from numpyro_dppvi.methods import NonPrivate
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.protocol import checks
from numpyro_dppvi.records import Partition, Shards
from numpyro_dppvi.run.data import Data, lay_out
from numpyro_dppvi.run.fitting import FitResult, fit

THIS, NUTS_NAME, VI_NAME = "this posterior", "nonprivate_pooled_nuts", "nonprivate_pooled_vi"
STAMP = (
    "NOT PRIVATE: rows named nonprivate_ were computed from records without noise. For simulations "
    "with data that may be published; no budget covers this table."
)

# Of one client without noise: it decides how soon a fit settles, and not on what.
_DAMPING = 0.6
_MOST_DRAWS = 10**7


@dataclass(frozen=True, eq=False)
class Comparison:
    """Means and standard deviations by posterior and latent; prints as a table.

    Attributes:
        mean: Means by posterior (``"this posterior"``, ``"nonprivate_pooled_nuts"``,
            ``"nonprivate_pooled_vi"``, ``"nonprivate_client_0"``, ...) and latent.
        stddev: Standard deviations, likewise.
        stamp: A warning to show wherever the numbers are shown.
    """

    mean: Mapping[str, Mapping[str, np.ndarray]]
    stddev: Mapping[str, Mapping[str, np.ndarray]]
    stamp: str = STAMP

    def shift(self, name: str) -> float:
        """The RMS distance of a posterior's means from pooled NUTS, in sds of the latter."""
        _validate.choice("name", name, tuple(self.mean))
        # Distances are in NUTS's standard deviations and not in q's: a q that is too wide would
        # seem near to anything.
        exact, width = _flat(self.mean[NUTS_NAME]), _flat(self.stddev[NUTS_NAME])
        return float(np.sqrt(np.mean(((_flat(self.mean[name]) - exact) / width) ** 2)))

    def width(self, name: str) -> float:
        """A posterior's standard deviations relative to pooled NUTS (geometric mean)."""
        _validate.choice("name", name, tuple(self.mean))
        ratio = _flat(self.stddev[name]) / _flat(self.stddev[NUTS_NAME])
        # A geometric mean: twice as wide in one entry and half as wide in another is 1 on average.
        return float(np.exp(np.mean(np.log(ratio))))

    def __str__(self) -> str:
        """A table with one line per posterior."""
        lines = [f"{a:<24} {b:>12} {c:>8}" for a, b, c in self._rows()]
        lines[0] += "   (pooled NUTS: 0 sd, 1)"
        return "\n".join([self.stamp, *lines])

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return _html.paragraph(self.stamp) + _html.table(header, rows)

    def _rows(self) -> list[tuple[str, str, str]]:
        of_each = (
            (name, f"{self.shift(name):.2f} sd", f"{self.width(name):.2f}x") for name in self.mean
        )
        return [("", "mean off by", "sd is"), *of_each]


def compare(
    result: FitResult,
    data: Data,
    *,
    rng_key: PRNGKey | None = None,
    guide: Any = None,
    clients: Partition | int | None = None,
    max_clients: int = 10,
    num_warmup: int = 500,
    num_samples: int = 1000,
) -> Comparison:
    """Compares a fit with non-private inference on the same records; for simulations only.

    Args:
        result: The result of ``fit``.
        data: The fit's data.
        rng_key: The fit's key, which determines how records were split over clients.
        guide: The fit's guide; ``None`` is the one that its method took.
        clients: The fit's clients.
        max_clients: How many clients (the first ones) to fit alone; 0 for none.
        num_warmup: Warm-up draws of NUTS.
        num_samples: Draws of NUTS.

    Returns:
        Means and standard deviations of this posterior, of NUTS and variational inference on
        all records, and of variational inference on each client's records alone.

    Raises:
        ValueError: If clients have other numbers of records than in the fit (whether the records
            are the fit's is not checked), or a latent is discrete, which NUTS cannot draw.
        TypeError: If there is no ``rng_key``.
    """
    _validate.instance("result", result, FitResult, "fit(...)")
    key = _validate.rng_key(rng_key)
    max_clients = _validate.not_negative_int("max_clients", max_clients)
    num_warmup = _validate.not_negative_int("num_warmup", num_warmup, _MOST_DRAWS)
    num_samples = _validate.positive_int("num_samples", num_samples, _MOST_DRAWS)
    discrete = [latent.name for latent in result.posterior.space.latents if latent.is_discrete]
    if discrete:
        raise ValueError(
            f"compare needs continuous latents, which NUTS can draw, got the discrete latent "
            f"{discrete[0]!r}: compare with fit(..., method=NonPrivate()) on the same data instead."
        )
    posterior = result.posterior
    if posterior.prior is not None and posterior.prior.space.effects:
        name = next(iter(posterior.prior.space.effects))
        raise ValueError(
            f"compare needs priors with a density for each latent, got an earlier posterior that "
            f"knows {name!r} by what the model makes of it: write the model with effects "
            "a ~ Normal(mean, scale) in both studies."
        )
    # The same first key as fit's, so that rows are split as they were there.
    split_key, nuts_key = jax.random.split(key, 3)[0], jax.random.fold_in(key, 3)
    laid = lay_out(data, clients, split_key, posterior.model, posterior.model_kwargs)
    shards, sizes, names = laid.shards, laid.sizes, laid.names
    if sizes != result.client_sizes:
        raise ValueError(
            f"data must be the fit's, with {checks.few(result.client_sizes)} records per client, "
            f"got {checks.few(sizes)}: pass the fit's data, clients and rng_key."
        )
    # From the padded arrays and not from ``data``: these are the rows and dtypes of the fit.
    parts = [_records_of(shards, number) for number in range(len(sizes))]
    pooled = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    draws = _nuts(posterior, pooled, nuts_key, num_warmup, num_samples)
    mean = {
        THIS: _arrays(posterior.mean),
        NUTS_NAME: {name: np.mean(x, axis=0) for name, x in draws.items()},
    }
    stddev = {
        THIS: _arrays(posterior.stddev),
        NUTS_NAME: {name: np.std(x, axis=0, ddof=1) for name, x in draws.items()},
    }
    guide = result.run.local.guide(guide, posterior.model)  # alone as together
    called = names or tuple(f"client_{m}" for m in range(len(sizes)))
    alone = {f"nonprivate_{called[m]}": part for m, part in enumerate(parts[:max_clients])}
    # All with one key, so that they differ in their records alone.
    for name, records in {VI_NAME: pooled, **alone}.items():
        # Fixed settings and not the fit's: what variational inference can do here without noise.
        found = fit(
            posterior.model,
            guide,
            records,
            rng_key=key,
            method=NonPrivate(),
            damping=_DAMPING,
            model_kwargs=posterior.model_kwargs,
            prior=posterior.prior,
            progress_bar=False,
        ).posterior
        mean[name], stddev[name] = _arrays(found.mean), _arrays(found.stddev)
    return Comparison(mean, stddev)


def _nuts(
    posterior: Posterior,
    records: Mapping[str, np.ndarray],
    key: PRNGKey,
    num_warmup: int,
    num_samples: int,
) -> dict[str, np.ndarray]:
    rows = {name: jnp.asarray(value) for name, value in records.items()}
    earlier = posterior.prior

    def with_earlier_prior(**arguments: Array) -> None:
        """The model with the earlier posterior in place of its priors."""
        theta = {name: numpyro.sample(name, priors.distribution(name)) for name in priors.names}
        # Record by record, because the model itself would draw the latents from its own priors
        # again.
        terms = jax.vmap(lambda row: posterior.space.log_likelihood(theta, row))(rows)
        numpyro.factor("records", jnp.sum(terms))

    target, arguments = posterior.model, {**posterior.model_kwargs, **rows}
    if earlier is not None:
        # Only for its distributions by latent, which bring bijections with them.
        priors = Posterior(earlier.natural, earlier.family, earlier.space, target, {}, {})
        target = with_earlier_prior
    options = {"num_warmup": num_warmup, "num_samples": num_samples, "progress_bar": False}
    # NumPyro has one stack of handlers for all threads: see latents.trace.
    with HANDLERS:
        if earlier is None and posterior.space.summation.summed:
            draws = _nuts_of_density(posterior.space.plain, rows, key, options)
        else:
            sampler = MCMC(NUTS(target), **options)
            sampler.run(key, **arguments)
            draws = sampler.get_samples()
    return {name: np.asarray(draws[name]) for name in posterior.names}


def _nuts_of_density(
    space: LatentSpace, rows: Mapping[str, Array], key: PRNGKey, options: Mapping[str, Any]
) -> dict[str, Array]:
    """NUTS on a density whose records' discrete latents are summed out."""
    space = space.with_transforms({lt.name: biject_to(lt.support) for lt in space.latents})
    names = frozenset(latent.name for latent in space.latents)

    def potential(base: Mapping[str, Array]) -> Array:
        of_rows = jax.vmap(space.log_likelihood, (None, 0))
        return -space.log_prior(base, names) - jnp.sum(of_rows(space.constrain(base), rows))

    # The middle of each support; NUTS warms up from there.
    start = {latent.name: jnp.zeros(latent.base_shape) for latent in space.latents}
    sampler = MCMC(NUTS(potential_fn=potential), **options)
    sampler.run(key, init_params=start)
    return jax.jit(jax.vmap(space.constrain))(sampler.get_samples())


def _records_of(shards: Shards, number: int) -> dict[str, np.ndarray]:
    """One client's records, without padding."""
    records, num_records = shards.of_client(number)
    return {name: np.asarray(leaf)[: int(num_records)] for name, leaf in records.items()}


def _arrays(values: Mapping[str, Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in values.items()}


def _flat(values: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(values[name]) for name in sorted(values)])
