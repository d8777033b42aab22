"""What a client computes when it is visited: solves, and what it releases of them.

Everything here sees records. What leaves is a release that a privacy mechanism has made, whose
events the ledger was charged with beforehand.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, Coordinates, Gradient, Hits, Natural, PRNGKey, PyTree
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods import objective, record_gradients
from numpyro_dppvi.methods.local_solve import GradientFn, Solver
from numpyro_dppvi.methods.objective import MonteCarlo
from numpyro_dppvi.privacy import (
    Sampler,
    add_noise,
    arithmetic,
    by_purpose,
    clipped,
    clipped_in_steps,
    clipped_sum,
    noise_laws,
)
from numpyro_dppvi.privacy.keys import Purposes

# Per-record gradients are made and clipped in chunks of rows that stay in a core's cache, with room
# for what is made of them on the way (2^17 floats are half a MiB). Gradients of many entries
# have chunks of up to four times the size, because a few rows at a time take longer than rows that
# leave the cache. It changes no result.
_FLOATS_PER_CHUNK = 2**17
_ROWS_WORTH_MORE = 64
# An accelerator has no such cache, and starts kernels for every chunk: there, memory is the bound.
_FLOATS_ON_ACCELERATOR = 2**26
# Gradients of plain sums are not laid out by record. They are made in chunks to bound memory.
_FLOATS_OF_SUM = 2**24
# Rows are cut into multiples of so many. With chunks of 16, 24, 40, 48 or 56 rows, a round of small
# clients took 1.3 to 1.4 times as long as with 32 (quadrature, 20 columns, one core with AVX-512).
ROWS_TOGETHER = 32


class ClientParams(NamedTuple):
    """The numbers of one client's mechanism, scalars; of all clients, on a leading axis. Public.

    Attributes:
        noise_std: Noise on every entry of a sum that this client releases.
        num_shards: How many shards the records are cut into.
        weight: What a sum over shards is multiplied by before noise.
        clip_norm: Bound on the norm of what enters a sum.
        inclusion_prob: The probability that a record is in a batch.
        num_records: How many records the client has.
    """

    noise_std: Array
    num_shards: Array
    weight: Array
    clip_norm: Array
    inclusion_prob: Array
    num_records: Array


class Layout(NamedTuple):
    """Sizes that are compiled in.

    Attributes:
        physical_size: Rows of a sampled batch.
        num_shards: Shards of the client that has most.
        shard_capacity: Rows of the largest shard.
        private: Whether every shard has a factor of its own that never leaves the client.
        rows_at_once: The most rows whose gradients are made at once; ``None`` for as many as stay
            in a core's cache. It changes no sum that is released.
    """

    physical_size: int
    num_shards: int
    shard_capacity: int
    private: bool = False
    rows_at_once: int | None = None


class Outcome(NamedTuple):
    """What a visit makes.

    Attributes:
        release: What leaves the client, made by the privacy mechanism: any tree of arrays. The
            method's ``take`` says what it changes a factor by.
        kept: The clipped changes without noise, one per shard, that the shards' private factors
            follow. They never leave. ``None`` if the client's factor is public.
        failed: Whether the solve did not end in finite numbers; a function of the released
            gradients. Always false for methods that add noise after the solve, which hides it.
    """

    release: PyTree
    kept: Natural | None
    failed: Array


_Rows = TypeVar("_Rows", bound=tuple[Any, ...])


class ByClient(NamedTuple, Generic[_Rows]):
    """What a method's server remembers of each client, marked as such.

    Of these parts of its memory, a method's ``take`` is given the rows of the clients who were
    visited, in their order, and returns what to put in their place: the others are neither read
    nor copied, so that a visit costs as much however many clients there are.

    Attributes:
        rows: Arrays on a leading axis, those of all clients or of a group.
    """

    rows: _Rows


class Received(NamedTuple):
    """What the server knows when it takes a release. No record is behind it but in releases.

    Attributes:
        space: The model's latents.
        family: The family of q.
        q: The current approximation.
        factor: The factors that are to change, on a leading axis.
        noise_std: Noise on every entry of each release.
        num_records: Records behind each release.
        total_records: All clients' records.
        num_factors: How many factors there are: the clients, or 1 with a trusted aggregator.
        learning_rate: For Adam, where the method names no optimiser.
        rng_key: Key for draws of the latents, no secret.
        prior_loss: The loss without any record, as a function of that key and the coordinates.
    """

    space: LatentSpace
    family: MeanField
    q: Natural
    factor: Natural
    noise_std: Array
    num_records: Array
    total_records: Array
    num_factors: int
    learning_rate: Array
    rng_key: PRNGKey
    prior_loss: Callable[[PRNGKey, Coordinates], Array]


class Likelihood(Protocol):
    """What stands behind a visit: a client's records or, in a replay, a factor."""

    @property
    def draws(self) -> MonteCarlo | None:
        """The draws of the latents that gradients are taken at; ``None`` where there are none."""

    def of_shard(self, number: Array) -> GradientFn:
        """The exact gradient of one shard's losses: a function of a step's key and coordinates."""

    def released(
        self, sampler: Sampler, keys: tuple[PRNGKey, Purposes], coordinates: Coordinates
    ) -> Gradient:
        """The gradient of all losses as it leaves the client.

        Args:
            sampler: How a batch is drawn.
            keys: A step's key for draws, and its secret keys.
            coordinates: Where q is.
        """

    def released_sum(
        self,
        contribution: Callable[..., PyTree],
        floats: int,
        secret_key: PRNGKey,
        asked: PyTree | None = None,
    ) -> PyTree:
        """The noisy sum over all records of what each contributes, clipped.

        Args:
            contribution: A function of the model, a row and a key of its own.
            floats: Size of what it needs in memory.
            secret_key: The visit's secret key.
            asked: Which parts of it are asked for, as of ``privacy.add_noise``.
        """


class Visit(NamedTuple):
    """A visit, but for the records.

    Attributes:
        family: The family of q.
        layout: Sizes.
        solver: How the local problem is solved.
        num_steps: Local steps.
        q: What the server sent: the current approximation.
        own: What to divide out of q for the cavity: the client's public factor t_m, or the private
            factors t_{m,k} of its shards on a leading axis.
        params: The numbers of the client's mechanism.
        rng_key: Key for draws of the latents, no secret.
        secret_key: Key for noise and batches.
        drawn: Noise that was drawn on the host, in the place of a key's.
        told: What the method's server tells its clients (``Method.told``).
    """

    family: MeanField
    layout: Layout
    solver: Solver
    num_steps: int
    q: Natural
    own: Natural
    params: ClientParams
    rng_key: PRNGKey
    secret_key: PRNGKey
    drawn: noise_laws.StepNoise | None
    told: Any = None

    @property
    def keys(self) -> PRNGKey:
        """A key for the draws of each step."""
        return jax.random.split(self.rng_key, self.num_steps)


def by_noisy_gradients(visit: Visit, likelihood: Likelihood, sampler: Sampler) -> Outcome:
    """One solve whose every gradient is released: what comes of it is post-processing."""
    # Secret keys for each step: the difference of two sums under the same noise would be exact.
    # All are made at once, because a call of the cipher takes as long for many blocks as for one.
    secret = jax.vmap(by_purpose)(jax.random.split(visit.secret_key, visit.num_steps))
    return _solved(visit, (visit.keys, secret), functools.partial(likelihood.released, sampler))


def without_noise(visit: Visit, likelihood: Likelihood) -> Outcome:
    """One solve over all records, exactly."""
    # Where records are not cut into shards, shard 0 is all of them.
    only = jnp.zeros((), visit.params.num_shards.dtype)
    return _solved(visit, visit.keys, likelihood.of_shard(only))


def _solved(visit: Visit, keys: Any, gradient: GradientFn) -> Outcome:
    change = visit.solver.change(visit.family, visit.q, visit.own, keys, gradient)
    # A solve that failed releases the factor 1, which changes nothing. That it failed may be told:
    # the solve is a function of gradients that were released, or nothing is private.
    finite = factors.is_finite(change)
    return Outcome(factors.select(finite, change, factors.unit(change)), None, ~finite)


def by_perturbed_changes(visit: Visit, likelihood: Likelihood, exponent: Array | float) -> Outcome:
    """Solves for every shard, clips the changes, and releases their noisy weighted sum.

    Noise is added once, to the sum. With natural gradients all of this happens in white coordinates
    of q, and what comes out is turned into natural parameters afterwards: a function of released
    values.

    Without noise a factor may serve only the shard that made it: were it shared by a client's
    shards, a record would move all their changes in the next round, and the sum by more than 2 C.

    Args:
        visit: The visit.
        likelihood: The client's.
        exponent: The power that a shard's likelihood is raised to.
    """
    family, layout, params, keys = visit.family, visit.layout, visit.params, visit.keys

    def change_of(number: Array, own: Natural) -> Natural:
        of_shard = likelihood.of_shard(number)

        def raised(key: PRNGKey, coordinates: Coordinates) -> Gradient:
            # The gradient of a log likelihood raised to a power is that many times its own.
            return factors.power(of_shard(key, coordinates), exponent)

        change = visit.solver.change(family, visit.q, own, keys, raised)
        return visit.solver.measured(family, visit.q, change)

    def in_natural(change: Natural) -> Natural:
        return visit.solver.unmeasured(family, visit.q, change)

    # Whether a shard's solve failed is a fact about its records that no noise covers. It is not
    # told: clipping makes such a change zero, and the noise is that of any other sum.
    hidden = jnp.zeros((), bool)
    numbers = jnp.arange(layout.num_shards)
    # Every shard has a factor of its own, or all of them the client's one, which is public.
    changes = jax.vmap(change_of, (0, 0 if layout.private else None))(numbers, visit.own)
    # Clients that are mapped over together all compute as many solves as the one with most shards;
    # those of shards that a client does not have count as zeros.
    present = numbers < params.num_shards
    if visit.drawn is not None:
        # The host drew integers (a discrete Gaussian), which are added to integers.
        steps = clipped_in_steps(changes, present, params.clip_norm, visit.drawn.step)
        released = noise_laws.released(steps, visit.drawn, params.weight, like=changes)
        each = noise_laws.from_steps(steps, visit.drawn.step, like=changes)
    else:
        each = clipped(changes, present, params.clip_norm)
        mean_or_sum = arithmetic.weighted_total(each, params.weight)
        noise_key = by_purpose(visit.secret_key).noise
        released = add_noise(noise_key, mean_or_sum, params.noise_std, like=each)
    # Clipped like what is released: shards' factors go where q goes, but for the noise.
    kept = jax.vmap(in_natural)(each) if layout.private else None
    return Outcome(in_natural(released), kept, hidden)


class OfRecords(NamedTuple):
    """The likelihood of a client's records, by argument, padded to ``(capacity, ...)``.

    ``num_records`` of the rows count; ``params`` are the numbers of the client's mechanism.
    """

    space: LatentSpace
    family: MeanField
    expectation: objective.Expectation
    layout: Layout
    records: Mapping[str, Array]
    num_records: Array
    params: ClientParams

    @property
    def draws(self) -> MonteCarlo | None:
        """As of :class:`Likelihood`."""
        rule = objective.rule_for(self.expectation, self.space, self.family)
        return rule if isinstance(rule, MonteCarlo) else None

    def of_shard(self, number: Array) -> GradientFn:
        """The gradient of the sum of a shard's record losses."""
        rows, present = self._shard(number)

        def gradient(key: PRNGKey, coordinates: Coordinates) -> Gradient:
            problem = self.space, self.family, self.expectation, key
            most = max(1, _FLOATS_OF_SUM // objective.floats_per_record(*problem, coordinates))
            at_once = min(most, self.layout.rows_at_once or most)

            def sum_of(rows: Mapping[str, Array], present: Array) -> Gradient:
                def loss(coordinates: Coordinates) -> Array:
                    of_row = functools.partial(objective.record_loss, *problem, coordinates)
                    # Rows that do not count must be possible records all the same: their gradients
                    # are zero times theirs.
                    return jnp.sum(jnp.where(present, jax.vmap(of_row)(dict(rows)), 0))

                return jax.grad(loss)(coordinates)

            # Those that are present come first; how many is public.
            total = _sum_in_chunks(sum_of, rows, present, at_once, jnp.sum(present))
            return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), total, coordinates)

        return gradient

    def released(
        self, sampler: Sampler, keys: tuple[PRNGKey, Purposes], coordinates: Coordinates
    ) -> Gradient:
        """DP estimate of all records' gradient: sample, clip each, sum, add noise, divide by q."""
        # The divisor is the probability that a record is in the batch, a public number; how many
        # were drawn is secret.
        (rng_key, secret), params = keys, self.params
        problem = self.space, self.family, self.expectation, rng_key, coordinates
        capacity = jax.tree.leaves(self.records)[0].shape[0]
        batch = sampler.draw(
            secret.batch,
            self.num_records,
            params.inclusion_prob,
            capacity,
            self.layout.physical_size,
        )
        rows = self.records
        if batch.rows is not None:
            rows = jax.tree.map(lambda leaf: leaf[batch.rows], self.records)

        def sum_of(rows: Mapping[str, Array], mask: Array) -> Gradient:
            gradients = record_gradients.of_rows(*problem, rows)
            # Rounding to a grid makes sums exact, which noise needs in order to protect records
            # (privacy.arithmetic). Without noise there is nothing to protect, and digits are kept.
            return clipped_sum(gradients, mask, params.clip_norm, rounded=params.noise_std > 0)

        floats = record_gradients.floats_per_record(*problem)
        # How many rows of a sampled batch count is secret, and all of them take their time.
        used = self.num_records if batch.rows is None else None
        total = _sum_in_chunks(sum_of, rows, batch.mask, self._rows_at_once(floats), used)
        noisy = add_noise(secret.noise, total, params.noise_std, like=coordinates)
        return jax.tree.map(lambda leaf: leaf / params.inclusion_prob.astype(leaf.dtype), noisy)

    def released_sum(
        self,
        contribution: Callable[..., PyTree],
        floats: int,
        secret_key: PRNGKey,
        asked: PyTree | None = None,
    ) -> PyTree:
        """The noisy sum of clipped contributions of all records, one key per record.

        The keys are secret, and drawn without regard to records. One record more or less may give
        others other keys, but that changes nothing in how their sum is distributed.
        """
        secret, params = by_purpose(secret_key), self.params
        capacity = jax.tree.leaves(self.records)[0].shape[0]
        seeds = jax.random.bits(secret.batch, (capacity, 2), jnp.uint32)
        mask = jnp.arange(capacity) < self.num_records

        def of_row(row: Mapping[str, Any]) -> PyTree:
            # Rows are cut into chunks as plain numbers, and two words are a key of Threefry,
            # whatever kind of key is JAX's default or the secret one.
            key = jax.random.wrap_key_data(row["seed"], impl="threefry2x32")
            return contribution(self.space, row["row"], key)

        def sum_of(rows: Mapping[str, Any], mask: Array) -> PyTree:
            each = jax.vmap(of_row)(rows)
            return clipped_sum(each, mask, params.clip_norm, rounded=params.noise_std > 0)

        rows = {"row": dict(self.records), "seed": seeds}
        at_once = self._rows_at_once(floats)
        total = _sum_in_chunks(sum_of, rows, mask, at_once, self.num_records)
        # Only for the shapes and dtypes that the noisy sum gets: those of one contribution.
        one = jax.tree.map(lambda leaf: leaf[0], rows)
        like = jax.tree.map(
            lambda part: part.weights if isinstance(part, Hits) else part,
            jax.eval_shape(of_row, one),
            is_leaf=lambda part: isinstance(part, Hits),
        )
        return add_noise(secret.noise, total, params.noise_std, like=like, asked=asked)

    def _shard(self, number: Array) -> tuple[Mapping[str, Array], Array]:
        """Rows ``number``, ``number + num_shards``, ... of the records, and which of them count."""
        # A record's shard is a function of its place alone: replacing a record changes one shard.
        # So rows that do not count repeat the shard's own first record. Were they taken from
        # elsewhere (a gather past the end gives the client's last record), 0 * inf would carry that
        # record into a gradient that it is not in; and zeros are impossible outcomes under some
        # models.
        num_shards = self.params.num_shards
        places = number + num_shards * jnp.arange(self.layout.shard_capacity)
        present = (places < self.num_records) & (number < num_shards)
        first = jnp.where(number < num_shards, number, 0)
        places = jnp.where(present, places, first)
        return jax.tree.map(lambda leaf: leaf[places], dict(self.records)), present

    def _rows_at_once(self, floats: int) -> int:
        """How many rows a chunk has at most, if a row takes so much memory."""
        few = min(_ROWS_WORTH_MORE, 4 * _FLOATS_PER_CHUNK // floats)
        at_once = _FLOATS_PER_CHUNK if on_cpu() else _FLOATS_ON_ACCELERATOR
        most = max(1, few, at_once // floats)
        return min(most, self.layout.rows_at_once or most)


def chunk_size(num_rows: int, largest: int) -> int:
    """The rows of each chunk: chunks of one length, as small as their number allows.

    So little of the last one, which ends where the rows end, is computed twice. There are more rows
    than ``largest``, the most of a chunk, as long as that is a whole block of rows that are added
    up in 32 bits.
    """
    piece = ROWS_TOGETHER if largest >= ROWS_TOGETHER else arithmetic.ROWS_PER_BLOCK
    num_chunks = math.ceil(num_rows / max(piece, largest // piece * piece))
    return min(num_rows, math.ceil(num_rows / num_chunks / piece) * piece)


def _sum_in_chunks(
    sum_of: Callable[[Any, Array], Any],
    rows: Mapping[str, Any],
    mask: Array,
    largest_chunk: int,
    used: Array | None,
) -> Gradient:
    """Adds up ``sum_of`` over equal chunks of rows, without rounding.

    ``used`` is how many rows at the front are not padding, a public number: chunks behind them are
    left out. ``None`` is for all.
    """
    num_rows = mask.shape[0]
    if num_rows <= largest_chunk:
        return sum_of(rows, mask)
    chunk = chunk_size(num_rows, largest_chunk)
    num_chunks = math.ceil(num_rows / chunk)

    @jax.jit  # traced once for both uses
    def sum_of_chunk(number: Array) -> Gradient:
        # The last chunk begins early and leaves out rows that others have, so that none is copied.
        first = number * chunk
        start = jnp.minimum(first, num_rows - chunk)
        mine, counts = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, chunk), (dict(rows), mask)
        )
        return sum_of(mine, counts & (start + jnp.arange(chunk) >= first))

    def add(number: Array, total: Gradient) -> Gradient:
        return arithmetic.add(total, sum_of_chunk(number))

    # In 64 bits, where sums of clipped and rounded gradients are exact: chunks change no release.
    zeros = arithmetic.zeros(jax.eval_shape(sum_of_chunk, 0))
    # -(-a // b) rounds up: a chunk with a single record is computed.
    last = num_chunks if used is None else jnp.minimum(num_chunks, -(-used // chunk))
    return jax.lax.fori_loop(0, last, add, zeros)
