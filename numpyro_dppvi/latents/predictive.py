"""Log predictive densities of single records, and the range in which they should lie."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.families.reading import plain
from numpyro_dppvi.latents.additive import made_up
from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.space import LatentSpace, several

_ROWS_AT_A_TIME = 64
_MADE_UP_ROWS, _OUTCOMES_A_ROW = 32, 16
# A record that is e^5 = 150 times less likely than a typical one still counts in full; a normal
# outcome is so at 3.2 standard deviations.
_BELOW_TYPICAL = 5.0
# Room for records whose outcome is known better than that of any made-up one.
_ABOVE_HIGHEST = 1.0


class Scores(NamedTuple):
    """Scores of records, each computed from its own row alone."""

    log_density: Array  # log predictive density; may be anything for records that break a model
    # Whether the class that the posterior finds most likely is the one observed; ``None`` unless
    # the outcome is one class a record.
    is_hit: Array | None


def scores(space: LatentSpace, draws: Mapping[str, Array], rows: Mapping[str, Array]) -> Scores:
    """Scores of records under draws of the latents in their supports, both on a leading axis."""
    values = classes(space)

    def of_row(row: Mapping[str, Array]) -> Scores:
        density = _averaged(jax.vmap(space.log_likelihood, (0, None))(draws, row))
        if values is None:
            return Scores(density, None)
        name = space.client_side[0]
        first = {latent: drawn[0] for latent, drawn in draws.items()}
        observed = space.trace(first, row)[name]["value"]

        def of_class(number: Array) -> Array:
            given = {name: jnp.full_like(observed, number)}
            return _averaged(jax.vmap(space.log_likelihood_of, (0, None, None))(draws, row, given))

        # The class with the highest predictive probability: the mean over draws comes before the
        # choice.
        likeliest = jnp.argmax(jax.vmap(of_class)(jnp.asarray(values))) + values.start
        return Scores(density, jnp.all(observed == likeliest))

    return jax.lax.map(of_row, dict(rows), batch_size=_ROWS_AT_A_TIME)


def usual_range(
    space: LatentSpace, draws: Mapping[str, Array], rng_key: PRNGKey
) -> tuple[float, float]:
    """A range for log predictive densities, from outcomes drawn by the model at made-up rows.

    It ends 5 below the median. The upper end is 0 for discrete outcomes, whose probabilities are at
    most 1, and else 1 above the highest. Both are infinite if the model gives no density there.
    """
    # Nothing here depends on a record, or the range would have to be released privately itself.
    rng = np.random.default_rng(0)
    rows = {name: made_up(rng, s) for name, s in several(space.row, _MADE_UP_ROWS).items()}
    num_draws = len(next(iter(draws.values())))

    def of_outcome(row: Mapping[str, Array], key: PRNGKey) -> Array:
        which_key, key = jax.random.split(key)
        which = jax.random.randint(which_key, (), 0, num_draws)
        drawn = space.draw({name: values[which] for name, values in draws.items()}, row, key)
        return _averaged(jax.vmap(space.log_likelihood_of, (0, None, None))(draws, row, drawn))

    def of_row(given: tuple[Mapping[str, Array], Array]) -> Array:
        return jax.vmap(of_outcome, (None, 0))(*given)

    # Outcomes are drawn under a random draw of theta and scored under all of them, as held-back
    # records will be.
    keys = jax.random.split(rng_key, (_MADE_UP_ROWS, _OUTCOMES_A_ROW))
    found = np.asarray(jax.jit(lambda: jax.lax.map(of_row, (rows, keys)))())
    found = found[np.isfinite(found)]
    if not found.size:
        return -np.inf, np.inf
    is_discrete = all(site["fn"].support.is_discrete for site in _sites(space))
    high = 0.0 if is_discrete else float(found.max()) + _ABOVE_HIGHEST
    return float(np.median(found)) - _BELOW_TYPICAL, high


def _averaged(log_likelihoods: Array) -> Array:
    """The log of the mean over draws; a draw that gives NaN counts as 0."""
    # log p(y) = log (1/S sum_s p(y | theta_s)).
    known = jnp.where(jnp.isnan(log_likelihoods), -jnp.inf, log_likelihoods)
    return logsumexp(known) - jnp.log(len(known))


def _sites(space: LatentSpace) -> list[Mapping[str, Any]]:
    """The observed sites that depend on records, from an abstract run on one."""
    return space.facts(lambda trace: [trace[name] for name in space.client_side])


def classes(space: LatentSpace) -> range | None:
    """The classes of a record's outcome; ``None`` unless there is one outcome with few classes."""
    first, *others = _sites(space)
    # The type itself: values of a subclass, or of what wraps one, may mean something else.
    is_class = type(plain(first["fn"])) in _OF_CLASSES
    if others or not is_class or first["scale"] is not None or jnp.size(first["value"]) != 1:
        return None
    return integers(first["fn"].support)


_OF_CLASSES = (
    dist.BernoulliLogits,
    dist.BernoulliProbs,
    dist.CategoricalLogits,
    dist.CategoricalProbs,
)
