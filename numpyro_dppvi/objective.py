"""The local free energy of a client, given its cavity (paper Eq. 5, Algorithm 1 step 3).

The local objective of PVI is E_q[log p(x_m | theta)] - KL(q || cavity). Written with an
unnormalised cavity it is E_q[log p(x_m | theta)] + <eta_cavity, E_q[T]> + H[q], which has the
same gradient and needs no proper cavity: noise may well make one improper. It splits into terms
that records do not enter and one term a record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from numpyro_dppvi import _validate, factors
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace

Expectation: TypeAlias = Callable[[PRNGKey, MeanField, Coordinates], dict[str, Array]]
"""A rule that gives equally weighted points for an expectation under q, on a leading axis."""


@dataclass(frozen=True)
class MonteCarlo:
    """Antithetic draws from q, shared by all records of a batch.

    Args:
        num_draws: How many; an even number makes mirrored pairs.
    """

    num_draws: int = 10

    def __post_init__(self) -> None:
        _validate.positive_int("num_draws", self.num_draws)

    def __call__(
        self, rng_key: PRNGKey, family: MeanField, coordinates: Coordinates
    ) -> dict[str, Array]:
        """Points of shape ``(num_draws, *shape)`` by latent."""
        return family.draws(rng_key, coordinates, self.num_draws)


@dataclass(frozen=True)
class SphericalCubature:
    """The third-degree rule of 2 d points at distance sqrt(d) from the mean, d joint dimensions.

    Exact, without any noise, for log likelihoods that are quadratic in the latents: conjugate
    normal models come out in closed form. For many latents the points lie far out; use draws.
    """

    def __call__(
        self, rng_key: PRNGKey, family: MeanField, coordinates: Coordinates
    ) -> dict[str, Array]:
        """Points of shape ``(2 * d, *shape)`` by latent."""
        del rng_key
        return family.sigma_points(coordinates)


def cavity_loss(family: MeanField, cavity: Natural, coordinates: Coordinates) -> Array:
    """-<eta_cavity, E_q[T]> - H[q], in nats: the part of the loss that no record enters."""
    expected = factors.inner(cavity, family.statistics(coordinates))
    return -expected - family.entropy(coordinates)


def record_loss(space: LatentSpace, points: Mapping[str, Array], row: Mapping[str, Array]) -> Array:
    """-E_q[log p(record | theta)] of one record, in nats, over points of q.

    Args:
        space: The model.
        points: Unconstrained points by latent, on a leading axis.
        row: One record: arrays without the records' axis.
    """
    theta = space.constrain(points)
    return -jnp.mean(jax.vmap(space.log_likelihood, (0, None))(theta, row))


def prior_loss(space: LatentSpace, points: Mapping[str, Array], names: frozenset[str]) -> Array:
    """-E_q[log p(theta)] over the named latents, in nats, over points of q."""
    return -jnp.mean(jax.vmap(lambda base: space.log_prior(base, names))(dict(points)))
