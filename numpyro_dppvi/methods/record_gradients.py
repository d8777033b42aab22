"""Gradients of many records' losses, record by record, in the form that takes the least work.

Each is the gradient of ``objective.record_loss`` in the coordinates of q, up to rounding. Under a
normal q = m + L z, a loss whose gradient in the latents is g has the gradient E[g] in m and
E[g z'] in L (Bonnet 1964). A record that sees nothing but a'x + b has g = f'(a'x + b) a, so that
all it takes is two products of its slope a, and what they are multiplied by.
"""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, Coordinates, Gradient, LowerProduct, PRNGKey, PyTree
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.predictor import Predictor
from numpyro_dppvi.methods import objective
from numpyro_dppvi.methods.objective import Expectation, GaussHermite, MonteCarlo

Rows: TypeAlias = Mapping[str, Array]
Draws: TypeAlias = tuple[Mapping[str, Array], PyTree]
"""Draws by latent, and their white noise by member."""

# Gradients at so many draws are added up by one fused loop over their entries, which reads and
# writes the sum once. With the default number, one by one took three to five times as long.
_DRAWS_AT_ONCE = 9


def of_rows(
    space: LatentSpace,
    family: MeanField,
    expectation: Expectation,
    rng_key: PRNGKey,
    coordinates: Coordinates,
    rows: Rows,
) -> Gradient:
    """The gradient of every record's loss in the coordinates of q.

    Args:
        space: The model.
        family: The family of q.
        expectation: The rule for the expectation.
        rng_key: Key for draws, which all records share.
        coordinates: Where q is.
        rows: Records, arrays with one leading axis.

    Returns:
        The coordinates' tree with the records' axis in front, and with products that are not laid
        out in the place of some arrays. No record enters another's gradient.
    """
    rule, predictor = objective.rule_for(expectation, space, family), space.predictor
    if family.is_normal and predictor is not None and isinstance(rule, GaussHermite):
        return _by_quadrature(predictor, family, rule, coordinates, rows)
    if family.is_normal and isinstance(rule, MonteCarlo):
        points = rule(rng_key, family, coordinates)
        noise = family.by_member(rule(rng_key, family, family.standard()))
        if predictor is None:
            return _draw_by_draw(space, family, coordinates, (points, noise), rows)
        return _by_draws(predictor, family, coordinates, (points, noise), rows)

    def of_row(row: Rows) -> Gradient:
        gradient = jax.grad(objective.record_loss, argnums=4)
        return gradient(space, family, expectation, rng_key, coordinates, row)

    return jax.vmap(of_row)(rows)


def _by_quadrature(
    predictor: Predictor, family: MeanField, rule: GaussHermite, at: Coordinates, rows: Rows
) -> Gradient:
    """From the derivatives of the predictor's losses at the nodes."""
    value_and_slope = jax.value_and_grad(predictor.value)
    centers, slopes = jax.vmap(value_and_slope, (None, 0))(family.location(at), rows)
    white = jax.vmap(family.white_slope, (None, 0))(at, slopes)
    variances = sum(map(_squared_norms, white.values()))
    stddevs = jnp.sqrt(variances)
    nodes, weights = (jnp.asarray(each, stddevs.dtype) for each in rule.nodes_and_weights)
    # Nodes come first and records last, so that a core's vector holds records.
    derivatives = _derivatives(predictor, centers + nodes[:, None] * stddevs, rows)
    along = weights @ derivatives
    # z is node * L'a / |L'a| + what is independent of a'x. Where L'a = 0, so is E[g z'].
    turned = (weights * nodes) @ derivatives / jnp.where(variances > 0, stddevs, 1)
    across = jax.tree.map(lambda leaf: jax.vmap(jnp.multiply)(turned, leaf), white)
    return Gradient(jax.vmap(family.linear_gradient, (None, 0, 0, 0))(at, slopes, along, across))


def _squared_norms(rows: Array) -> Array:
    """By a product, whose order of terms does not depend on how many rows there are."""
    squares = rows.reshape(rows.shape[0], -1) ** 2
    ones = jnp.ones(squares.shape[1], squares.dtype)
    return jnp.matmul(squares, ones, precision=jax.lax.Precision.HIGHEST)


def _by_draws(
    predictor: Predictor,
    family: MeanField,
    at: Coordinates,
    draws: Draws,
    rows: Rows,
) -> Gradient:
    """From the derivatives of the predictor's losses at draws, given with their white noise."""
    points, noise = draws
    values = jax.vmap(jax.vmap(predictor.value, (None, 0)), (0, None))(points, rows)
    slopes = jax.vmap(jax.grad(predictor.value), (None, 0))(family.location(at), rows)
    derivatives = _derivatives(predictor, values, rows) / len(values)
    across = jax.tree.map(lambda leaf: jnp.tensordot(derivatives, leaf, (0, 0)), noise)
    along = jnp.sum(derivatives, axis=0)
    return Gradient(jax.vmap(family.linear_gradient, (None, 0, 0, 0))(at, slopes, along, across))


def _derivatives(predictor: Predictor, values: Array, rows: Rows) -> Array:
    """Derivatives of the records' losses in their predictor; records are the last axis."""
    one_row = jax.grad(lambda value, row: -predictor.log_likelihood(value, row))
    return jax.vmap(jax.vmap(one_row), (0, None))(values, rows)


def _draw_by_draw(
    space: LatentSpace,
    family: MeanField,
    at: Coordinates,
    draws: Draws,
    rows: Rows,
) -> Gradient:
    """From gradients at draws, which are added up."""
    share = 1 / len(jax.tree.leaves(draws)[0])

    def loss(base: Mapping[str, Array], row: Rows) -> Array:
        return -space.log_likelihood(space.constrain(base), row)

    def of_draw(draw: Draws) -> Gradient:
        base, noise = draw
        gradients = jax.vmap(jax.grad(loss), (None, 0))(base, rows)
        across = jax.tree.map(lambda leaf: share * leaf, noise)
        gradient_of = jax.vmap(family.linear_gradient, (None, 0, None, None))
        return laid_out(Gradient(gradient_of(at, gradients, share, across)))

    def add(total: Gradient, draw: Draws) -> tuple[Gradient, None]:
        return jax.tree.map(jnp.add, total, of_draw(draw)), None

    first = jax.tree.map(lambda leaf: leaf[0], draws)
    rest = jax.tree.map(lambda leaf: leaf[1:], draws)
    return jax.lax.scan(add, of_draw(first), rest, unroll=_DRAWS_AT_ONCE)[0]


def laid_out(gradients: Gradient) -> Gradient:
    """Gradients as arrays alone, in the coordinates' tree."""

    def is_product(leaf: object) -> bool:
        return isinstance(leaf, LowerProduct)

    def as_array(leaf: Array | LowerProduct) -> Array:
        return leaf.laid_out() if isinstance(leaf, LowerProduct) else leaf

    return Gradient(jax.tree.map(as_array, gradients, is_leaf=is_product))


def floats_per_record(
    space: LatentSpace,
    family: MeanField,
    expectation: Expectation,
    rng_key: PRNGKey,
    coordinates: Coordinates,
) -> int:
    """Size of what one record's gradient needs in memory."""
    rule = objective.rule_for(expectation, space, family)
    size = sum(leaf.size for leaf in jax.tree.leaves(coordinates))
    if family.is_normal and isinstance(rule, GaussHermite):
        return rule.num_nodes + size
    if family.is_normal and isinstance(rule, MonteCarlo):
        return rule.num_draws + size if space.predictor is not None else 2 * size
    return objective.floats_per_record(space, family, expectation, rng_key, coordinates)
