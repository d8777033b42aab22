"""What a client does when it is visited: a local solve, and the change it sends back.

Everything here sees records. What leaves is the change of natural parameters, made by a privacy
mechanism whose events the ledger was charged with beforehand.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi._typing import Array, Coordinates, Natural, PRNGKey
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import local_solve, natural_gradient, objective
from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.values import (
    DPOptimization,
    GlobalVI,
    LocalAveraging,
    Method,
    NonPrivate,
    ShardMethod,
)
from numpyro_dppvi.privacy import (
    add_noise,
    arithmetic,
    by_purpose,
    clipped,
    clipped_in_steps,
    clipped_sum,
    noise_laws,
)

# Per-record gradients are made and clipped in chunks of rows that stay in a core's cache
# (2^18 floats are 1 MiB). It changes no result.
_FLOATS_PER_CHUNK = 2**18


class LocalData(NamedTuple):
    """One client's records, padded, and its own numbers.

    Attributes:
        records: Arrays by argument name, shape ``(capacity, ...)``.
        num_records: How many rows count, a scalar.
        num_shards: How many shards the records are cut into, a scalar.
        noise_std: Noise on every entry of a sum that this client releases, a scalar.
        weight: What a sum over shards is multiplied by before noise, a scalar.
        clip_norm: Bound on the norm of what enters a sum, a scalar.
        inclusion_prob: The probability that a record is in a batch, a scalar; public.
    """

    records: Mapping[str, Array]
    num_records: Array
    num_shards: Array
    noise_std: Array
    weight: Array
    clip_norm: Array
    inclusion_prob: Array


class Layout(NamedTuple):
    """Sizes that are compiled in.

    Attributes:
        physical_size: Rows of a sampled batch.
        num_shards: Shards of the client that has most.
        shard_capacity: Rows of the largest shard.
        private: Whether every shard has a factor of its own that never leaves the client.
    """

    physical_size: int
    num_shards: int
    shard_capacity: int
    private: bool = False


class Message(NamedTuple):
    """What a visit makes.

    Attributes:
        change: What leaves the client: eta* - eta_q after the privacy mechanism.
        kept: The clipped changes without noise, one a shard, that the shards' private factors
            follow. They never leave. ``None`` if the client's factor is public.
        failed: Whether the solve did not end in finite numbers; a function of the released
            gradients. Always false for methods that add noise after the solve, which hides it.
    """

    change: Natural
    kept: Natural | None
    failed: Array


def visit(
    space: LatentSpace,
    family: MeanField,
    method: Method,
    layout: Layout,
    q: Natural,
    own: Natural,
    data: LocalData,
    learning_rate: Array,
    rng_key: PRNGKey,
    secret_key: PRNGKey,
    drawn: noise_laws.StepNoise | None = None,
) -> Message:
    """Solves the client's local problem, or one a shard, starting from ``q``.

    Args:
        space: The model.
        family: The family of q.
        method: What to do; numbers that clients may differ in are in ``data``.
        layout: Sizes.
        q: The current approximation.
        own: What to divide out of q for the cavity: the client's public factor t_m, or the private
            factors t_{m,k} of its shards on a leading axis.
        data: The client's records.
        learning_rate: For Adam, where the method names no optimiser.
        rng_key: Key for draws of the latents, no secret.
        secret_key: Key for noise and batches.
        drawn: Noise that was drawn on the host, in the place of a key's.

    Returns:
        The message; its change is zero (before noise) where a solve failed, so that a failure
        shows nothing.
    """
    optimizer = optax.adam(learning_rate) if method.optimizer is None else method.optimizer

    def solve(own: Natural, records_part: local_solve.Gradient, keys: Any) -> Natural:
        if isinstance(optimizer, NaturalGradient):
            return natural_gradient.change(optimizer, family, q, own, keys, records_part)
        cavity = factors.divide(q, own)

        def gradient(keys: Any, coordinates: Coordinates) -> Coordinates:
            free = jax.grad(objective.cavity_loss, argnums=2)(family, cavity, coordinates)
            return jax.tree.map(jnp.add, free, records_part(keys, coordinates))

        end = local_solve.solve(keys, family.coordinates(q), gradient, optimizer)
        return factors.divide(family.natural(end), q)

    keys = jax.random.split(rng_key, method.num_local_steps)
    if isinstance(method, DPOptimization | NonPrivate):
        secret_keys = jax.random.split(secret_key, method.num_local_steps)
        part = _records_part(space, family, method, layout, data)
        change = solve(own, part, (keys, secret_keys))
        finite = factors.is_finite(change)
        return Message(factors.select(finite, change, factors.unit(change)), None, ~finite)
    return _perturbed(space, family, method, layout, q, own, data, solve, keys, secret_key, drawn)


def _perturbed(
    space: LatentSpace,
    family: MeanField,
    method: ShardMethod,
    layout: Layout,
    q: Natural,
    own: Natural,
    data: LocalData,
    solve: Callable[[Natural, local_solve.Gradient, Any], Natural],
    keys: PRNGKey,
    secret_key: PRNGKey,
    drawn: noise_laws.StepNoise | None,
) -> Message:
    """Solves for every shard, clips the changes, and releases their noisy weighted sum.

    Parameter perturbation is one shard; local averaging raises the likelihood to the number of
    shards and takes the mean; virtual clients take the sum. Noise is added once, to the sum.

    With natural gradients all of this happens in white coordinates of q, and what comes out is
    turned into natural parameters afterwards: a function of released values.

    Without noise a factor may serve only the shard that made it: were it shared by a client's
    shards, a record would move all their changes in the next round, and the sum by more than 2 C.
    """
    exponent = data.num_shards if isinstance(method, LocalAveraging) else 1.0
    rule = method.optimizer if isinstance(method.optimizer, NaturalGradient) else None

    def change_of(number: Array, own: Natural) -> Natural:
        rows, present = _shard(data, layout, number)

        def records_part(key: PRNGKey, coordinates: Coordinates) -> Coordinates:
            gradient = _exact_sum(space, family, method, rows, present, key, coordinates)
            return factors.power(gradient, exponent)

        change = solve(own, records_part, keys)
        return natural_gradient.measured(rule, family, q, change) if rule else change

    def in_natural(change: Natural) -> Natural:
        return natural_gradient.unmeasured(rule, family, q, change) if rule else change

    hidden = jnp.zeros((), bool)
    numbers = jnp.arange(layout.num_shards)
    changes = jax.vmap(change_of, (0, 0 if layout.private else None))(numbers, own)
    present = numbers < data.num_shards
    if drawn is not None:
        steps = clipped_in_steps(changes, present, data.clip_norm, drawn.step)
        released = noise_laws.released(steps, drawn, data.weight, like=changes)
        each = noise_laws.from_steps(steps, drawn.step, like=changes)
    else:
        each = clipped(changes, present, data.clip_norm)
        mean_or_sum = arithmetic.weighted_total(each, data.weight)
        noise_key = by_purpose(secret_key).noise
        released = add_noise(noise_key, mean_or_sum, data.noise_std, like=each)
    kept = jax.vmap(in_natural)(each) if layout.private else None
    return Message(in_natural(released), kept, hidden)


def _shard(data: LocalData, layout: Layout, number: Array) -> tuple[Mapping[str, Array], Array]:
    """Rows ``number``, ``number + num_shards``, ... of the records, and which of them count.

    A record's shard is a function of its place alone: replacing a record changes one shard. So
    rows that do not count repeat the shard's own first record. Were they taken from elsewhere (a
    gather past the end gives the client's last record), 0 * inf would carry that record into a
    gradient that it is not in; and zeros are impossible outcomes under some models.
    """
    places = number + data.num_shards * jnp.arange(layout.shard_capacity)
    present = (places < data.num_records) & (number < data.num_shards)
    first = jnp.where(number < data.num_shards, number, 0)
    places = jnp.where(present, places, first)
    return jax.tree.map(lambda leaf: leaf[places], dict(data.records)), present


def _records_part(
    space: LatentSpace,
    family: MeanField,
    method: DPOptimization | NonPrivate,
    layout: Layout,
    data: LocalData,
) -> local_solve.Gradient:
    """The gradient of the client's record losses, exactly or by a privacy mechanism."""
    if isinstance(method, DPOptimization):
        return functools.partial(noisy_gradient, space, family, method, layout, data)

    rows, present = _shard(data, layout, jnp.zeros((), data.num_shards.dtype))  # the only one

    def exact(keys: tuple[PRNGKey, PRNGKey], coordinates: Coordinates) -> Coordinates:
        return _exact_sum(space, family, method, rows, present, keys[0], coordinates)

    return exact


def _exact_sum(
    space: LatentSpace,
    family: MeanField,
    method: NonPrivate | ShardMethod,
    rows: Mapping[str, Array],
    present: Array,
    rng_key: PRNGKey,
    coordinates: Coordinates,
) -> Coordinates:
    """Gradient of the sum of the record losses of the rows that are present.

    Rows that are not must be possible records all the same: their gradients are zero times theirs.
    """

    def loss(coordinates: Coordinates) -> Array:
        def of_row(row: Mapping[str, Array]) -> Array:
            return objective.record_loss(
                space, family, method.expectation, rng_key, coordinates, row
            )

        return jnp.sum(jnp.where(present, jax.vmap(of_row)(dict(rows)), 0))

    return jax.grad(loss)(coordinates)


def noisy_gradient(
    space: LatentSpace,
    family: MeanField,
    method: DPOptimization | GlobalVI,
    layout: Layout,
    data: LocalData,
    keys: tuple[PRNGKey, PRNGKey],
    coordinates: Coordinates,
) -> Coordinates:
    """DP estimate of the same gradient: sample, clip each record's, sum, add noise, divide by q.

    The divisor is the probability that a record is in the batch, a public number; how many were
    drawn is secret.
    """
    rng_key, secret_key = keys
    secret = by_purpose(secret_key)
    capacity = jax.tree.leaves(data.records)[0].shape[0]
    batch = method.sampler.draw(
        secret.batch, data.num_records, data.inclusion_prob, capacity, layout.physical_size
    )
    rows = data.records
    if batch.rows is not None:
        rows = jax.tree.map(lambda leaf: leaf[batch.rows], data.records)

    def gradient_of(row: Mapping[str, Array]) -> Coordinates:
        return jax.grad(objective.record_loss, argnums=4)(
            space, family, method.expectation, rng_key, coordinates, row
        )

    def sum_of(rows: Mapping[str, Array], mask: Array) -> Coordinates:
        gradients = jax.vmap(gradient_of)(rows)
        return clipped_sum(gradients, mask, data.clip_norm, rounded=data.noise_std > 0)

    floats = objective.floats_per_record(space, family, method.expectation, rng_key, coordinates)
    total = _sum_in_chunks(sum_of, rows, batch.mask, _FLOATS_PER_CHUNK // floats)
    noisy = add_noise(secret.noise, total, data.noise_std, like=coordinates)
    return jax.tree.map(lambda leaf: leaf / data.inclusion_prob.astype(leaf.dtype), noisy)


def _sum_in_chunks(
    sum_of: Callable[[Mapping[str, Array], Array], Coordinates],
    rows: Mapping[str, Array],
    mask: Array,
    largest_chunk: int,
) -> Coordinates:
    """Adds up ``sum_of`` over equal chunks of rows, without rounding."""
    num_rows = mask.shape[0]
    num_chunks = math.ceil(num_rows / max(1, largest_chunk))
    if num_chunks == 1:
        return sum_of(rows, mask)
    blocks = math.ceil(num_rows / num_chunks / arithmetic.ROWS_PER_BLOCK)
    chunk = blocks * arithmetic.ROWS_PER_BLOCK
    num_chunks = math.ceil(num_rows / chunk)

    def chunked(leaf: Array) -> Array:
        padding = [(0, num_chunks * chunk - num_rows)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, padding).reshape(num_chunks, chunk, *leaf.shape[1:])

    chunks = jax.tree.map(chunked, (dict(rows), mask))
    shapes = jax.eval_shape(sum_of, *jax.tree.map(lambda leaf: leaf[0], chunks))

    def add(total: Coordinates, piece: Any) -> tuple[Coordinates, None]:
        return arithmetic.add(total, sum_of(*piece)), None

    return jax.lax.scan(add, arithmetic.zeros(shapes), chunks)[0]
