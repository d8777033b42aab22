"""The local free energy of a client, given its cavity (paper Eq. 5, Algorithm 1 step 3).

The local objective of PVI is E_q[log p(x_m | theta)] - KL(q || cavity). Written with an
unnormalised cavity it is E_q[log p(x_m | theta)] + <eta_cavity, E_q[T]> + H[q], which has the
same gradient and needs no proper cavity: noise may well make one improper. It splits into terms
that records do not enter and one term a record. Over discrete latents expectations are summed.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import MeanField, enumeration, factors
from numpyro_dppvi.latents import LatentSpace

PointRule: TypeAlias = Callable[[PRNGKey, MeanField, Coordinates], dict[str, Array]]
"""A rule that gives equally weighted points for an expectation under q, on a leading axis.

It is asked for the continuous latents alone, and not at all if there are none.
"""


_MOST_DRAWS = 10**6
# The weights of more nodes leave the range of 64-bit floats.
_NEGLIGIBLE = 1e-7  # a node's weight that is below rounding in 32 bits
_MOST_NODES = 300


@dataclass(frozen=True)
class MonteCarlo:
    """Antithetic draws from q, shared by all records of a batch.

    Args:
        num_draws: How many; an even number makes mirrored pairs.
    """

    num_draws: int = 10

    def __post_init__(self) -> None:
        _validate.set_field(self, "num_draws", _validate.positive_int, _MOST_DRAWS)

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
        return family.sigma_points(coordinates)


@dataclass(frozen=True)
class GaussHermite:
    """Gauss-Hermite quadrature over the one linear predictor that a record's likelihood sees.

    For most generalised linear models, whatever the number of latents: without noise, and at the
    cost of ``num_nodes`` evaluations of a function of one number. Which number that is is found
    by tracing the model (``latents.predictor``), not declared. Needs normal
    latents; with discrete ones, the predictor is one given these.

    Args:
        num_nodes: Exact for polynomials of degree up to ``2 * num_nodes - 1``.
    """

    num_nodes: int = 20

    def __post_init__(self) -> None:
        _validate.set_field(self, "num_nodes", _validate.positive_int, _MOST_NODES)

    @property
    def nodes_and_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes for a standard normal, and weights that sum to 1."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(self.num_nodes)
        return nodes, weights / weights.sum()


@dataclass(frozen=True)
class Automatic:
    """:class:`GaussHermite` where the model and the guide allow it, else :class:`MonteCarlo`.

    Args:
        num_draws: Draws where there must be draws.
    """

    num_draws: int = 10

    def __post_init__(self) -> None:
        _validate.set_field(self, "num_draws", _validate.positive_int, _MOST_DRAWS)


Expectation: TypeAlias = PointRule | GaussHermite | Automatic


def rule_for(
    expectation: Expectation, space: LatentSpace, family: MeanField
) -> PointRule | GaussHermite:
    """The rule that is used for a model and a family; refuses quadrature that cannot be had."""
    # Under a normal q a linear predictor is normal, too: one integral in one dimension is left.
    possible = space.predictor is not None and enumeration.continuous(family).is_normal
    if isinstance(expectation, Automatic):
        return GaussHermite() if possible else MonteCarlo(expectation.num_draws)
    if isinstance(expectation, GaussHermite) and not possible:
        raise UnsupportedModelError(
            "expectation must be a rule that this model and guide allow, got GaussHermite(): it "
            "needs a likelihood that sees normal latents through one linear predictor per record. "
            "Write expectation=MonteCarlo(10), or leave it out."
        )
    return expectation


def cavity_loss(family: MeanField, cavity: Natural, coordinates: Coordinates) -> Array:
    """-<eta_cavity, E_q[T]> - H[q], in nats: the part of the loss that no record enters."""
    expected = factors.inner(cavity, family.statistics(coordinates))
    return -expected - family.entropy(coordinates)


def record_loss(
    space: LatentSpace,
    family: MeanField,
    expectation: Expectation,
    rng_key: PRNGKey,
    coordinates: Coordinates,
    row: Mapping[str, Array],
) -> Array:
    """-E_q[log p(record | theta)] of one record, in nats; who shares the key shares draws."""
    rule = rule_for(expectation, space, family)
    rest = enumeration.continuous(family)
    if isinstance(rule, GaussHermite):
        predictor = space.predictor
        assert predictor is not None  # rule_for has seen to it

        def by_predictor(values: Mapping[str, Array]) -> Array:
            # The record sees nothing but a'theta + b, which is normal under q.
            seen, mean = (values, row), rest.location(coordinates)
            center, slope = jax.value_and_grad(predictor.value)(mean, seen)
            # The predictor is affine in theta: the slope is a itself, wherever q is.
            variance = rest.linear_variance(coordinates, jax.lax.stop_gradient(slope))
            # A record that sees no latent has no variance, where the root has no derivative.
            stddev = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
            return -_expected(predictor.log_likelihood, rule, center, stddev, seen)

        return enumeration.expectation(family, coordinates, by_predictor)
    # The same points for all values of discrete latents: what these values differ by in the sum
    # below is then free of the draws' noise.
    theta = space.constrain(_points(rule, rng_key, rest, coordinates))

    def given(values: Mapping[str, Array]) -> Array:
        def log_likelihood(theta: Mapping[str, Array]) -> Array:
            return space.log_likelihood({**theta, **space.constrain(values)}, row)

        return -_mean(log_likelihood, theta)

    return enumeration.expectation(family, coordinates, given)


def floats_per_record(
    space: LatentSpace,
    family: MeanField,
    expectation: Expectation,
    rng_key: PRNGKey,
    coordinates: Coordinates,
) -> int:
    """Size of what one record's gradient needs in memory: its gradient at every point."""
    rule, rest = rule_for(expectation, space, family), enumeration.continuous(family)
    if isinstance(rule, GaussHermite):
        floats = rule.num_nodes + sum(leaf.size for leaf in jax.tree.leaves(coordinates))
    else:
        points = jax.eval_shape(lambda c: _points(rule, rng_key, rest, c), coordinates)
        floats = sum(leaf.size for leaf in jax.tree.leaves(points))
    # Each joint value of discrete latents, of q's and of the record's own, needs as much again.
    return max(1, floats) * enumeration.num_joint_values(family) * space.summation.num_terms


def _points(
    rule: PointRule, rng_key: PRNGKey, family: MeanField, coordinates: Coordinates
) -> dict[str, Array]:
    """The rule's points of a family without discrete members."""
    # All latents may be discrete. A rule is not asked for points of nothing.
    return rule(rng_key, family, coordinates) if family.members else {}


def _mean(function: Callable[[dict[str, Array]], Array], points: dict[str, Array]) -> Array:
    """The mean over points on a leading axis; the value itself where nothing is continuous."""
    return jnp.mean(jax.vmap(function)(points)) if points else function({})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _expected(
    function: Callable[[Array, Any], Array],
    rule: GaussHermite,
    center: Array,
    stddev: Array,
    row: Any,
) -> Array:
    """E[f(center + stddev * Z, row)], Z standard normal."""
    nodes, weights = (jnp.asarray(each, stddev.dtype) for each in rule.nodes_and_weights)
    values = jax.vmap(function, (0, None))(center + stddev * nodes, row)
    return jnp.dot(weights, finite_at_nodes(values, weights))


@_expected.defjvp
def _expected_jvp(
    function: Callable[[Array, Any], Array], rule: GaussHermite, primals: Any, tangents: Any
) -> tuple[Array, Array]:
    # Written out, because a derivative of what finite_at_nodes leaves out would be 0 * inf.
    (center, stddev, row), (center_dot, stddev_dot, _) = primals, tangents
    nodes, weights = (jnp.asarray(each, stddev.dtype) for each in rule.nodes_and_weights)
    at = jax.vmap(jax.value_and_grad(function), (0, None))
    values, slopes = (finite_at_nodes(x, weights) for x in at(center + stddev * nodes, row))
    along, across = jnp.dot(weights, slopes), jnp.dot(weights * nodes, slopes)
    return jnp.dot(weights, values), along * center_dot + across * stddev_dot


def finite_at_nodes(values: Array, weights: Array) -> Array:
    """Values at a rule's nodes, with 0 for what is not finite where no author would look."""
    # The outermost nodes lie 6 to 8 standard deviations away, where log(1 - exp(-rate)) is minus
    # infinity in 32 bits, say. Their weights are below rounding, but times infinity are not.
    heavy = (weights > _NEGLIGIBLE).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(heavy | jnp.isfinite(values), values, 0)


def prior_loss(
    space: LatentSpace,
    family: MeanField,
    rule: PointRule,
    rng_key: PRNGKey,
    coordinates: Coordinates,
    names: frozenset[str],
) -> Array:
    """-E_q[log p(theta)] over the named latents, in nats.

    Latents that these priors do not depend on may be missing from the family.
    """
    points = _points(rule, rng_key, enumeration.continuous(family), coordinates)
    # The model is run with any value of these.
    others = {latent.name: jnp.zeros(latent.base_shape) for latent in space.latents}

    def given(values: Mapping[str, Array]) -> Array:
        return -_mean(lambda base: space.log_prior({**others, **base, **values}, names), points)

    return enumeration.expectation(family, coordinates, given)
