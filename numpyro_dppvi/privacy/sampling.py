"""Samplers: how a batch is drawn from a client's records, and how that is accounted.

A sampler has both ``draw`` and ``dp_event``, so what runs and what is accounted cannot differ.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import dp_accounting as dpa
import jax
import jax.numpy as jnp

from numpyro_dppvi import _validate
from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.privacy import loss_distributions
from numpyro_dppvi.privacy.budget import Relation

# A Poisson batch is padded to its expected size plus this many standard deviations. Larger batches
# are truncated, which the event accounts for; at five, this costs almost nothing (docs/privacy.md).
_PADDING_DEVIATIONS = 5.0
# Small binomial distributions are skewed. The Cornish-Fisher correction of a quantile z by
# (z^2 - 1) / 6, times a skewness of at most 1 standard deviation, is 4 rows at z = 5.
_PADDING_SKEW = 4.0
# Inclusion compares 30 random bits with a threshold; see PoissonSampling.draw.
_BITS = 30
# Much smaller probabilities would round to 0 in 30 bits.
_LEAST_PROB = 1e-8
# No more than this many records share one word, except in one of 10^40 draws of 10^4 records.
_MOST_EQUALS = 8


class Batch(NamedTuple):
    """A batch: rows of a client's padded records, and which of them are part of it.

    Attributes:
        rows: Row numbers, shape ``(physical_size,)``; ``None`` means all rows in order.
        mask: Booleans; false entries are padding.
    """

    rows: Array | None
    mask: Array


def check_kind(sampler: "Sampler") -> None:
    """Refuses anything but a sampler."""
    if isinstance(sampler, type) or not hasattr(sampler, "dp_event"):
        raise TypeError(
            "sampler must be FullBatch(), PoissonSampling(...) or FixedSizeSampling(...), got "
            f"{_validate.shown(sampler)}: write sampler=PoissonSampling(0.1), say."
        )


class Sampler(Protocol):
    """The protocol of samplers, which are frozen and hashable values."""

    def __hash__(self) -> int:
        """Equal samplers have equal hashes."""

    def check(self, client_sizes: Sequence[int], relation: Relation) -> None:
        """Refuses client sizes and relations that the sampler does not support."""

    def of_client(self, client: int) -> "Sampler":
        """One client's sampler; the methods other than ``check`` and ``physical_size`` need it."""

    def inclusion_prob(self, num_records: Array | int) -> Array | float:
        """The (public) probability that a record is in a batch."""

    def describe(self, num_records: int) -> str:
        """A client's batch in words."""

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """The number of rows of a padded batch, the same for all clients."""

    def draw(
        self,
        rng_key: PRNGKey,
        num_records: Array,
        inclusion_prob: Array | float,
        capacity: int,
        physical_size: int,
    ) -> Batch:
        """Draws a batch from the first ``num_records`` of ``capacity`` rows.

        ``inclusion_prob`` is the result of :meth:`inclusion_prob`, passed as a runtime argument.
        """

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """The event of one noisy sum over a batch, with noise in units of the clipping norm."""


@dataclass(frozen=True)
class FullBatch:
    """Every record in every batch: no sampling."""

    def check(self, client_sizes: Sequence[int], relation: Relation) -> None:
        """Accepts all clients and relations."""

    def of_client(self, client: int) -> "FullBatch":
        """The same for every client."""
        return self

    def inclusion_prob(self, num_records: Array | int) -> float:
        """Always 1."""
        return 1.0

    def describe(self, num_records: int) -> str:
        """A client's batch in words."""
        return "full batch"

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """The rows of the largest client."""
        return max(client_sizes)

    def draw(
        self,
        rng_key: PRNGKey,
        num_records: Array,
        inclusion_prob: Array | float,
        capacity: int,
        physical_size: int,
    ) -> Batch:
        """All rows, in order."""
        return Batch(None, jnp.arange(capacity) < num_records)

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """A plain Gaussian event."""
        return _gaussian(noise_multiplier)


@functools.lru_cache(maxsize=1024)
def _gaussian(noise_multiplier: float) -> dpa.DpEvent:
    # Ledgers keep one a client and round, and Python's garbage collector goes through them all.
    return dpa.GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class PoissonSampling:
    """Each record is in the batch with probability ``sampling_prob``, independently of the others.

    The batch is padded to a fixed number of rows, so that one compiled program serves all draws.
    In the rare case that more records are drawn than fit, a uniformly random subset of them is
    kept, which the event accounts for (Ganesh, McMahan and Thakurta 2025, arXiv 2508.15089).

    Args:
        sampling_prob: At least 1e-8 and below 1; one number for all clients, or one per client.

    Raises:
        ValueError: If a probability is outside (0, 1).
    """

    sampling_prob: float | tuple[float, ...]

    def __post_init__(self) -> None:
        checked = functools.partial(_validate.open_unit, example="0.1", least=_LEAST_PROB)
        _validate.set_field(self, "sampling_prob", _validate.one_or_each, checked)

    def check(self, client_sizes: Sequence[int], relation: Relation) -> None:
        """Raises a ValueError if there is a wrong number of probabilities."""
        _validate.by_client("sampling_prob", self.sampling_prob, len(client_sizes))

    def of_client(self, client: int) -> "PoissonSampling":
        """The sampler with a client's own probability."""
        if isinstance(self.sampling_prob, float):
            return self
        return dataclasses.replace(self, sampling_prob=self.sampling_prob[client])

    def inclusion_prob(self, num_records: Array | int) -> float:
        """The same for clients of all sizes."""
        if isinstance(self.sampling_prob, float):
            return self.sampling_prob
        raise ValueError(
            f"sampling_prob must be one number here, got {len(self.sampling_prob)}: write "
            "sampler.of_client(0), say."
        )

    def describe(self, num_records: int) -> str:
        """A client's batch in words."""
        prob = self.inclusion_prob(num_records)
        return f"Poisson q={prob:g} (~{prob * num_records:.0f} rows)"

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """A number of rows that a client's batch exceeds in at most one of three million draws."""
        probs = _validate.by_client("sampling_prob", self.sampling_prob, len(client_sizes))
        return max(_padded_size(n, q) for n, q in zip(client_sizes, probs, strict=True))

    def draw(
        self,
        rng_key: PRNGKey,
        num_records: Array,
        inclusion_prob: Array | float,
        capacity: int,
        physical_size: int,
    ) -> Batch:
        """Draws each record independently and gathers the rows that were drawn."""
        # A record is drawn if its random word is below q 2^30. The threshold is rounded down,
        # starting from the float just below q, so that the true probability never exceeds the
        # accounted one.
        words = _words(rng_key, num_records, capacity)
        below = jnp.nextafter(jnp.asarray(inclusion_prob), 0)
        threshold = jnp.floor(below * 2**_BITS).astype(jnp.uint32)
        # How many of the rows so far are drawn: where that first reaches k, the k-th of them is.
        drawn = jnp.cumsum(words < threshold, dtype=jnp.int32)
        ranks = jnp.arange(1, physical_size + 1, dtype=jnp.int32)
        rows = jnp.searchsorted(drawn, ranks, method="scan" if on_cpu() else "scan_unrolled")
        # searchsorted gives ``capacity`` for what was not drawn: those places are padding, and
        # masked.
        rows = jnp.minimum(rows, capacity - 1)  # padding

        # The rows with the smallest words are a uniformly random subset of those that were drawn.
        # To find them takes a sort. A loop, unlike a condition, skips it under vmap, too, if its
        # body depends on what the loop changes: else the compiler takes the sort out of the loop.
        def subset(found: tuple[Array, Array]) -> tuple[Array, Array]:
            _, too_many = found
            mine = jnp.where(too_many, words, 0)
            return _smallest(mine, physical_size), jnp.zeros_like(too_many)

        too_many = drawn[-1] > physical_size
        rows, _ = jax.lax.while_loop(lambda found: found[1], subset, (rows, too_many))
        return Batch(rows, jnp.arange(physical_size) < drawn[-1])

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """A Poisson-sampled Gaussian event; a truncated one if batches can overflow."""
        prob = self.inclusion_prob(num_records)
        # Then even all records fit: nothing can be cut off.
        if physical_size >= num_records:
            return dpa.PoissonSampledDpEvent(prob, dpa.GaussianDpEvent(noise_multiplier))
        return dpa.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_records,
            sampling_probability=prob,
            truncated_batch_size=physical_size,
            noise_multiplier=noise_multiplier,
        )


@dataclass(frozen=True)
class FixedSizeSampling:
    """A uniformly random batch of ``batch_size`` distinct records, drawn independently each step.

    It wastes no rows on padding, but needs more noise than :class:`PoissonSampling` with the same
    expected size: 3 % more at epsilon 1 if a tenth of the records is drawn, and a quarter more or
    beyond at low noise.

    Args:
        batch_size: At most the records of the smallest client.

    Raises:
        ValueError: If the size is not a whole number of at least 1.
    """

    batch_size: int

    def __post_init__(self) -> None:
        _validate.set_field(self, "batch_size", _validate.positive_int)

    def check(self, client_sizes: Sequence[int], relation: Relation) -> None:
        """Raises a ValueError for clients smaller than a batch and for ``add_or_remove_one``."""
        for client, size in enumerate(client_sizes):
            self._check_size(client, size)
        loss_distributions.check_relation(
            self.dp_event(1.0, self.batch_size, self.batch_size), relation
        )

    def of_client(self, client: int) -> "FixedSizeSampling":
        """The same for every client."""
        return self

    def _check_size(self, client: int, num_records: int) -> None:
        if num_records < self.batch_size:
            raise ValueError(
                f"batch_size must be at most a client's records, got {self.batch_size} for "
                f"client {client}'s {num_records} records: write "
                f"sampler=FixedSizeSampling({num_records}), or less."
            )

    def inclusion_prob(self, num_records: Array | int) -> Array | float:
        """The fraction of a client's records that is in a batch."""
        return self.batch_size / num_records

    def describe(self, num_records: int) -> str:
        """A client's batch in words."""
        return f"{self.batch_size} of {num_records} rows, fixed size"

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """The size of a batch."""
        return self.batch_size

    def draw(
        self,
        rng_key: PRNGKey,
        num_records: Array,
        inclusion_prob: Array | float,
        capacity: int,
        physical_size: int,
    ) -> Batch:
        """Takes the rows with the smallest random words."""
        # Two rows share the last word taken in about num_records of 10^9 draws. Second words break
        # such ties, because top_k would prefer the lower row number.
        first_key, second_key = jax.random.split(rng_key)
        words = _words(first_key, num_records, capacity)
        near = _smallest(words, min(capacity, self.batch_size + _MOST_EQUALS))
        others = jax.random.bits(second_key, near.shape, jnp.uint32)
        _, _, ranked = jax.lax.sort((words[near], others, near), num_keys=2)
        rows = ranked[: self.batch_size]
        return Batch(rows, rows < num_records)

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """A Gaussian event on a sample without replacement."""
        self._check_size(0, num_records)
        gaussian = dpa.GaussianDpEvent(noise_multiplier)
        return dpa.SampledWithoutReplacementDpEvent(num_records, self.batch_size, gaussian)


def _padded_size(num_records: int, prob: float) -> int:
    # The number drawn is binomial, with this standard deviation.
    deviation = math.sqrt(num_records * prob * (1 - prob))
    rows = num_records * prob + _PADDING_DEVIATIONS * deviation + _PADDING_SKEW
    return min(num_records, math.ceil(rows))


def _words(rng_key: PRNGKey, num_records: Array, capacity: int) -> Array:
    """A random word of 30 bits for every record, and a larger number for padding."""
    words = jax.random.bits(rng_key, (capacity,), jnp.uint32) >> (32 - _BITS)
    return jnp.where(jnp.arange(capacity) < num_records, words, jnp.uint32(2**_BITS))


def _smallest(words: Array, count: int) -> Array:
    """Indices of the smallest words, in ascending order."""
    # Non-negative floats sort like their bit patterns, and top_k is fast on floats. The offset
    # keeps the patterns clear of subnormal numbers, which devices may flush to zero.
    patterns = words + jnp.uint32(1 << 23)
    sortable = jax.lax.bitcast_convert_type(patterns, jnp.float32)
    return jax.lax.top_k(-sortable, count)[1]
