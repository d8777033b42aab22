"""Gradients of many records' losses, record by record, in the form that takes the least work.

Each is the gradient of ``objective.record_loss`` in the coordinates of q, up to rounding. Under a
normal q = m + L z, a loss whose gradient in the latents is g has the gradient E[g] in m and
E[g z'] in L (Bonnet 1964). A record that sees nothing but a'x + b has g = f'(a'x + b) a, so that
all it takes is two products of its slope a, and what they are multiplied by.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import (
    Array,
    Coordinates,
    Gradient,
    LayerProduct,
    PRNGKey,
    PyTree,
    RowProduct,
    laid_out,
)
from numpyro_dppvi.families import DiagonalNormal, MeanField, NormalCoordinates
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.layers import FirstLayers
from numpyro_dppvi.latents.predictor import Predictor
from numpyro_dppvi.methods import objective
from numpyro_dppvi.methods.objective import Expectation, GaussHermite, MonteCarlo

Rows: TypeAlias = Mapping[str, Array]
Draws: TypeAlias = tuple[Mapping[str, Array], PyTree]
"""Draws by latent, and their white noise by member."""

# Gradients at so many draws are added up by one fused loop over their entries, which reads and
# writes the sum once. With the default number, one by one took three to five times as long.
_DRAWS_AT_ONCE = 9
# Beside first layers, gradients at up to so many draws are made at once, and paired by a product of
# matrices, whose work grows with the square of their number. A record's gradients in all other
# latents must stay in a core's cache: with 26 000 floats a step took 1.1 times as long.
_MOST_PAIRED = 16
_MOST_FLOATS_AT_ONCE = 2**13


def of_rows(
    space: LatentSpace,
    family: MeanField,
    expectation: Expectation,
    rng_key: PRNGKey,
    coordinates: Coordinates,
    rows: Rows,
) -> Gradient:
    """The gradient of every record's loss in the coordinates of q, by draws that records share.

    The records' axis is in front, and products that are not laid out stand in the place of some
    arrays. No record enters another's gradient.
    """
    rule, predictor = objective.rule_for(expectation, space, family), space.predictor
    if family.is_normal and predictor is not None and isinstance(rule, GaussHermite):
        return _by_quadrature(predictor, family, rule, coordinates, rows)
    if family.is_normal and isinstance(rule, MonteCarlo):
        # Drawn once, as the white noise z of the points m + L z.
        noise = family.by_member(rule(rng_key, family, family.standard()))
        points = family.from_white(coordinates, noise)
        if predictor is None:
            layers = _layers(space, family)
            return _draw_by_draw(layers, family, coordinates, (points, noise), rows)
        return _by_draws(predictor, family, coordinates, (points, noise), rows)

    def of_row(row: Rows) -> Gradient:
        # Any other family or rule: the gradient is taken of the whole expectation, row by row.
        gradient = jax.grad(objective.record_loss, argnums=4)
        return gradient(space, family, expectation, rng_key, coordinates, row)

    return jax.vmap(of_row)(rows)


def _by_quadrature(
    predictor: Predictor, family: MeanField, rule: GaussHermite, at: Coordinates, rows: Rows
) -> Gradient:
    """From the derivatives of the predictor's losses at the nodes."""
    value_and_slope = jax.value_and_grad(predictor.value)
    centers, slopes = jax.vmap(value_and_slope, (None, 0))(family.location(at), rows)
    # Under q, a'x + b is normal with mean a'm + b and standard deviation |L'a|.
    white = jax.vmap(family.white_slope, (None, 0))(at, slopes)
    variances = sum(map(_squared_norms, white.values()))
    stddevs = jnp.sqrt(variances)
    nodes, weights = (jnp.asarray(each, stddevs.dtype) for each in rule.nodes_and_weights)
    # Nodes come first and records last, so that a core's vector holds records.
    derivatives = _derivatives(predictor, centers + nodes[:, None] * stddevs, rows)
    derivatives = objective.finite_at_nodes(derivatives, weights)
    along = weights @ derivatives
    # z is node * L'a / |L'a| + what is independent of a'x. Where L'a = 0, so is E[g z'].
    turned = (weights * nodes) @ derivatives / jnp.where(variances > 0, stddevs, 1)
    across = {name: RowProduct(turned, leaf) for name, leaf in white.items()}
    return Gradient(jax.vmap(family.linear_gradient, (None, 0, 0, 0))(at, slopes, along, across))


def _squared_norms(rows: Array) -> Array:
    """By a product, whose order of terms does not depend on how many rows there are."""
    squares = rows.reshape(rows.shape[0], -1) ** 2
    ones = jnp.ones(squares.shape[1], squares.dtype)
    return jnp.matmul(squares, ones, precision=jax.lax.Precision.HIGHEST)


def _by_draws(
    predictor: Predictor, family: MeanField, at: Coordinates, draws: Draws, rows: Rows
) -> Gradient:
    """From the derivatives of the predictor's losses at draws, given with their white noise."""
    points, noise = draws
    values = jax.vmap(jax.vmap(predictor.value, (None, 0)), (0, None))(points, rows)
    slopes = jax.vmap(jax.grad(predictor.value), (None, 0))(family.location(at), rows)
    # At draw k, g is f'_k a. So E[g] is a times the mean of f'_k, which is ``along``, and E[g z']
    # is a times the mean of f'_k z_k', which is ``across``.
    derivatives = _derivatives(predictor, values, rows) / len(values)
    along = jnp.sum(derivatives, axis=0)
    ones = jnp.ones_like(along)
    across = {
        name: RowProduct(ones, jnp.tensordot(derivatives, leaf, (0, 0)))
        for name, leaf in noise.items()
    }
    return Gradient(jax.vmap(family.linear_gradient, (None, 0, 0, 0))(at, slopes, along, across))


def _derivatives(predictor: Predictor, values: Array, rows: Rows) -> Array:
    """Derivatives of the records' losses in their predictor; records are the last axis."""
    one_row = jax.grad(lambda value, row: -predictor.log_likelihood(value, row))
    return jax.vmap(jax.vmap(one_row), (0, None))(values, rows)


def _draw_by_draw(
    layers: FirstLayers, family: MeanField, at: Coordinates, draws: Draws, rows: Rows
) -> Gradient:
    """Adds up gradients at draws; those in first layers' weights are products: see _of_layer."""
    some = jax.tree.leaves(draws)[0]
    share = jnp.asarray(1 / len(some), some.dtype)
    rest = MeanField(
        tuple(member for member in family.members if member[0] not in layers.names), family.shared
    )
    if _all_at_once(layers, rest, len(some)):
        return _in_pairs(layers, family, at, draws, rows)

    def of_draw(draw: Draws, products: Rows) -> tuple[Gradient, Rows]:
        base, noise = draw
        gradient = jax.vmap(_behind(layers), (0, None, 0))
        behind, gradients = gradient(products, _without(layers.names, base), rows)
        if not rest.members:
            return Gradient({}), behind
        own = _without(layers.names, noise)
        across = {name: RowProduct(share, leaf) for name, leaf in own.items()}
        gradient_of = jax.vmap(rest.linear_gradient, (None, 0, None, None))
        return Gradient(laid_out(gradient_of(at, gradients, share, across))), behind

    def add(total: Gradient, draw: tuple[Draws, Rows]) -> tuple[Gradient, Rows]:
        mine, behind = of_draw(*draw)
        return jax.tree.map(jnp.add, total, mine), behind

    # Products with all draws' weights are one product of matrices.
    products = jax.vmap(jax.vmap(layers.products, (None, 0)), (0, None))(draws[0], rows)
    each = draws, products
    # The sum begins with the first draw, whose shapes and dtypes are those of the others.
    first = of_draw(*jax.tree.map(lambda leaf: leaf[0], each))
    others = jax.tree.map(lambda leaf: leaf[1:], each)
    # Beside first layers little is left to be added up, and an unrolled loop compiles for seconds.
    unroll = 1 if layers.names and on_cpu() else _DRAWS_AT_ONCE
    total, behind = jax.lax.scan(add, first[0], others, unroll=unroll)
    behind = jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), first[1], behind)
    inputs = jax.vmap(layers.inputs)(rows)
    of_layers = {
        name: _of_layer(
            at[name], inputs[name], *_paired(jnp.moveaxis(behind[name], 0, 1)), draws[1][name]
        )
        for name in layers.names
    }
    return Gradient({name: {**total, **of_layers}[name] for name, _ in family.members})


def _all_at_once(layers: FirstLayers, rest: MeanField, num_draws: int) -> bool:
    """Whether gradients at all draws are made before any are added up."""
    independent = all(isinstance(of, DiagonalNormal) for _, of in rest.members)
    floats = num_draws * sum(of.size for _, of in rest.members)
    few = num_draws <= _MOST_PAIRED and floats <= _MOST_FLOATS_AT_ONCE
    return bool(layers.names) and independent and not rest.shared and few


def _in_pairs(
    layers: FirstLayers, family: MeanField, at: Coordinates, draws: Draws, rows: Rows
) -> Gradient:
    """As :func:`_draw_by_draw`, of independent latents and of all draws at once."""
    points, noise = draws
    # Draws come behind a weight's first axis, so that products with all of them are one product of
    # matrices. Behind the barrier, or the compiler would lay it out anew for every chunk of rows.
    weights = {name: jnp.moveaxis(points[name], 0, 1) for name in layers.names}
    weights = jax.lax.optimization_barrier(weights)
    products = jax.vmap(jax.vmap(layers.products, (1, None)), (None, 0))(weights, rows)
    # Records first and draws second, as these products are: loops over their entries are fast.
    gradient = jax.vmap(jax.vmap(_behind(layers), (0, 0, None)), (0, None, 0))
    behind, gradients = gradient(products, _without(layers.names, points), rows)
    inputs = jax.vmap(layers.inputs)(rows)

    def of_member(name: str) -> NormalCoordinates:
        if name in layers.names:
            return _of_layer(at[name], inputs[name], *_paired(behind[name]), noise[name])
        pairs, along = _paired(gradients[name])
        return NormalCoordinates(along, _added_up(pairs, _pairs_of_noise(at[name], noise[name])))

    return Gradient({name: of_member(name) for name, _ in family.members})


def _behind(layers: FirstLayers) -> Callable[..., Any]:
    """Gradients of a record's loss in first layers' products and in the other latents."""
    return jax.grad(lambda *at: -layers.log_likelihood(*at), argnums=(0, 1))


def _paired(gradients: Array) -> tuple[Array, Array]:
    """Differences between gradients at a draw and at its mirror image, and the mean of all.

    By record and draw; every second draw is the one before it, mirrored, and the last of an odd
    number has no mirror image. With white noise, z d + (-z) d' = z (d - d'): half as many products.
    """
    num_draws = gradients.shape[1]
    if num_draws > _MOST_PAIRED:
        missing = [(0, 0), (0, num_draws % 2), *[(0, 0)] * (gradients.ndim - 2)]
        mirrored = jnp.pad(gradients[:, 1::2], missing)
        return gradients[:, ::2] - mirrored, jnp.mean(gradients, axis=1)
    # By a product of matrices for each record: then gradients are made once, and not again for
    # each of the sums that they enter. In differences it rounds no more than a subtraction does.
    # Where a record's gradient is not finite at some draw, none of these are: it is left out.
    draws, mix = np.arange(num_draws), np.zeros((-(-num_draws // 2) + 1, num_draws))
    mix[draws // 2, draws] = 1.0 - 2 * (draws % 2)
    mix[-1] = 1 / num_draws
    each = jnp.broadcast_to(jnp.asarray(mix, gradients.dtype), (len(gradients), *mix.shape))
    flat = gradients.reshape(*gradients.shape[:2], -1)
    mixed = jnp.matmul(each, flat, precision=jax.lax.Precision.HIGHEST)
    mixed = mixed.reshape(*mixed.shape[:2], *gradients.shape[2:])
    return mixed[:, :-1], mixed[:, -1]


def _added_up(pairs: Array, weights: Array) -> Array:
    """The sums of records' differences of pairs, by their weights."""
    if len(weights) == 1:
        return pairs[:, 0] * weights[0]

    # By a loop, which writes them down: were they made anew for a record's norm and for the sum,
    # they could be rounded otherwise, by far more than the clip's margin where terms cancel.
    def add(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        return total + pair[0] * pair[1], None

    each = jnp.moveaxis(pairs, 1, 0), weights
    return jax.lax.scan(add, jnp.zeros_like(pairs[:, 0]), each, unroll=not on_cpu())[0]


def _pairs_of_noise(at: NormalCoordinates, noise: Array) -> Array:
    """What differences of pairs are multiplied by for the mean gradient in log s."""
    return jnp.exp(at.log_scale) * noise[::2] / len(noise)


def _of_layer(
    at: NormalCoordinates, inputs: Array, pairs: Array, along: Array, noise: Array
) -> NormalCoordinates:
    """Gradients in weights W = m + s z that records meet in a product x'W with their values x.

    With d_k the gradient in the product at draw k, they are x times the mean of d_k in m, and s x
    times the mean of z_k d_k in log s.

    Args:
        at: The weights' coordinates.
        inputs: The records' values.
        pairs: Differences of gradients in the products at pairs of draws, records first.
        along: The mean of these gradients over draws.
        noise: The draws' white noise; every second one is the one before it, mirrored.
    """
    weights = _pairs_of_noise(at, noise)
    # W is a vector, and x'W one number per record: what multiplies x is a number, too.
    if pairs.ndim == 2:
        across = jnp.einsum("rm,mi->ri", pairs, weights, precision=jax.lax.Precision.HIGHEST)
        in_a_vector: Any = RowProduct(along, inputs)
        return NormalCoordinates(in_a_vector, inputs * across)
    loc: Any = LayerProduct(inputs, along[:, None], None)
    log_scale: Any = LayerProduct(inputs, pairs, weights)
    return NormalCoordinates(loc, log_scale)


def _without(names: frozenset[str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: leaf for name, leaf in leaves.items() if name not in names}


def _layers(space: LatentSpace, family: MeanField) -> FirstLayers:
    """What of a model's first layers has latents that are independent normal."""
    own = {name for name, of in family.members if isinstance(of, DiagonalNormal)}
    found = space.first_layers
    if found is not None and found.names <= own:
        return found
    # None that can be split off: no products, and all latents are among the others.
    return FirstLayers(
        frozenset(),
        lambda row: {},
        lambda base, row: {},
        lambda products, base, row: space.log_likelihood(space.constrain(base), row),
    )


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
        if space.predictor is not None:
            return rule.num_draws + size
        return _floats_of_draws(_layers(space, family), rule.num_draws, coordinates)
    return objective.floats_per_record(space, family, expectation, rng_key, coordinates)


def _floats_of_draws(layers: FirstLayers, num_draws: int, coordinates: Coordinates) -> int:
    """Size of what :func:`_draw_by_draw` makes of a record."""
    rest = sum(leaf.size for leaf in jax.tree.leaves(_without(layers.names, coordinates)))
    shapes = [coordinates[name].loc.shape for name in layers.names]
    # Gradients and their sum; of a layer, its input and products at every draw, pairs and squares.
    return 2 * rest + sum(shape[0] + 4 * num_draws * sum(shape[1:]) for shape in shapes)
