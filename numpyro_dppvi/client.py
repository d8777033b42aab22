"""What a client does when it is visited: a local solve, and the change it sends back.

Everything here sees records. What leaves is the change of natural parameters, made by a privacy
mechanism whose events the ledger was charged with beforehand.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi import factors, local, objective
from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import DPOptimization, Method, NonPrivate
from numpyro_dppvi.privacy import add_noise, clipped_sum

# Per-record gradients are made and clipped in chunks of rows that stay in a core's cache
# (2^18 floats are 1 MiB). It changes no result.
_FLOATS_PER_CHUNK = 2**18


class Shard(NamedTuple):
    """One client's records, padded.

    Attributes:
        records: Arrays by argument name, shape ``(capacity, ...)``.
        num_records: How many rows count, a scalar.
        noise_std: Noise on every entry of a sum this client releases, a scalar.
    """

    records: Mapping[str, Array]
    num_records: Array
    noise_std: Array


def visit(
    space: LatentSpace,
    family: MeanField,
    method: Method,
    physical_size: int,
    q: Natural,
    factor: Natural,
    shard: Shard,
    learning_rate: Array,
    rng_key: PRNGKey,
    secret_key: PRNGKey,
) -> Natural:
    """One local solve from ``q`` with cavity q / factor; returns the change eta* - eta_q.

    Args:
        space: The model.
        family: The family of q.
        method: What to do; its numbers are compiled in.
        physical_size: Rows of a sampled batch.
        q: The current approximation.
        factor: The client's factor t_m.
        shard: The client's records.
        learning_rate: For Adam, where the method names no optimiser.
        rng_key: Key for draws of the latents, no secret.
        secret_key: Key for noise and batches.

    Returns:
        The change; zero where the solve failed, so that a failure shows nothing.
    """
    gradient = _gradient(space, family, method, physical_size, factors.divide(q, factor), shard)
    steps = method.num_local_steps
    keys = (jax.random.split(rng_key, steps), jax.random.split(secret_key, steps))
    optimizer = optax.adam(learning_rate) if method.optimizer is None else method.optimizer
    end = local.solve(keys, family.coordinates(q), gradient, optimizer)
    change = factors.divide(family.natural(end), q)
    return factors.select(factors.is_finite(change), change, factors.unit(change))


def _gradient(
    space: LatentSpace,
    family: MeanField,
    method: Method,
    physical_size: int,
    cavity: Natural,
    shard: Shard,
) -> local.Gradient:
    """The loss's gradient: the cavity's part exactly, the records' part as the method says."""

    def records_part(keys: tuple[PRNGKey, PRNGKey], coordinates: Coordinates) -> Coordinates:
        if isinstance(method, NonPrivate):
            return _exact_sum(space, family, method, shard, keys[0], coordinates)
        return _noisy_sum(space, family, method, physical_size, shard, keys, coordinates)

    def gradient(keys: tuple[PRNGKey, PRNGKey], coordinates: Coordinates) -> Coordinates:
        free = jax.grad(objective.cavity_loss, argnums=2)(family, cavity, coordinates)
        return jax.tree.map(jnp.add, free, records_part(keys, coordinates))

    return gradient


def _exact_sum(
    space: LatentSpace,
    family: MeanField,
    method: NonPrivate,
    shard: Shard,
    rng_key: PRNGKey,
    coordinates: Coordinates,
) -> Coordinates:
    """Gradient of the sum of all record losses."""

    def loss(coordinates: Coordinates) -> Array:
        points = method.expectation(rng_key, family, coordinates)
        losses = jax.vmap(objective.record_loss, (None, None, 0))(space, points, shard.records)
        present = jnp.arange(losses.shape[0]) < shard.num_records
        return jnp.sum(jnp.where(present, losses, 0))

    return jax.grad(loss)(coordinates)


def _noisy_sum(
    space: LatentSpace,
    family: MeanField,
    method: DPOptimization,
    physical_size: int,
    shard: Shard,
    keys: tuple[PRNGKey, PRNGKey],
    coordinates: Coordinates,
) -> Coordinates:
    """DP estimate of the same gradient: sample, clip each record's, sum, add noise, divide by q.

    The divisor is the sampling probability, a public constant; the size of the batch that was
    drawn is secret.
    """
    rng_key, secret_key = keys
    batch_key, noise_key = jax.random.split(secret_key)
    capacity = jax.tree.leaves(shard.records)[0].shape[0]
    batch = method.sampler.draw(batch_key, shard.num_records, capacity, physical_size)
    rows = shard.records
    if batch.rows is not None:
        rows = jax.tree.map(lambda leaf: leaf[batch.rows], shard.records)

    def gradient_of(row: Mapping[str, Array]) -> Coordinates:
        def loss(coordinates: Coordinates) -> Array:
            points = method.expectation(rng_key, family, coordinates)
            return objective.record_loss(space, points, row)

        return jax.grad(loss)(coordinates)

    def clipped(rows: Mapping[str, Array], mask: Array) -> Coordinates:
        return clipped_sum(jax.vmap(gradient_of)(rows), mask, method.clip_norm)

    floats_per_row = _floats_per_row(family, method, rng_key, coordinates)
    total = _sum_in_chunks(clipped, rows, batch.mask, _FLOATS_PER_CHUNK // floats_per_row)
    noisy = add_noise(noise_key, total, shard.noise_std)
    return jax.tree.map(lambda leaf: leaf / method.sampler.sampling_prob, noisy)


def _floats_per_row(
    family: MeanField, method: DPOptimization, rng_key: PRNGKey, coordinates: Coordinates
) -> int:
    """Size of what one record's gradient needs in memory: its gradient at every point."""
    points = jax.eval_shape(lambda c: method.expectation(rng_key, family, c), coordinates)
    return max(1, sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(points)))


def _sum_in_chunks(
    clipped: Callable[[Mapping[str, Array], Array], Coordinates],
    rows: Mapping[str, Array],
    mask: Array,
    largest_chunk: int,
) -> Coordinates:
    """Adds up ``clipped`` over equal chunks of rows."""
    num_rows = mask.shape[0]
    num_chunks = math.ceil(num_rows / max(1, largest_chunk))
    if num_chunks == 1:
        return clipped(rows, mask)
    chunk = math.ceil(num_rows / num_chunks)

    def chunked(leaf: Array) -> Array:
        padding = [(0, num_chunks * chunk - num_rows)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, chunk, *leaf.shape[1:])

    chunks = jax.tree.map(chunked, (dict(rows), mask))
    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(clipped, *jax.tree.map(lambda leaf: leaf[0], chunks)),
    )

    def add(total: Coordinates, piece: Any) -> tuple[Coordinates, None]:
        return jax.tree.map(jnp.add, total, clipped(*piece)), None

    return jax.lax.scan(add, zero, chunks)[0]
