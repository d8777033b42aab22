"""Samplers: how a batch is drawn from a client's records, and what that means to the accountant.

A sampler is one value with both halves, ``draw`` and ``dp_event``, so that what runs and what is
accounted cannot differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import dp_accounting as dpa
import jax
import jax.numpy as jnp

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, PRNGKey

# The batch is padded to its expected size plus this many standard deviations, beyond which it
# would be cut; the accountant is told. Five cost next to nothing (docs/privacy.md).
_PADDING_DEVIATIONS = 5.0
# Small batches are skewed: as many more rows make the same quantile of a binomial distribution
# (Cornish and Fisher's correction, (z^2 - 1) / 6).
_PADDING_SKEW = 4.0
# Inclusion compares 30 random bits with a threshold: see PoissonSampling.draw.
_BITS = 30


class Batch(NamedTuple):
    """Rows of a client's padded records, and which of them count.

    Attributes:
        rows: Row numbers, shape ``(physical_size,)``; ``None`` means all rows in their order.
        mask: Booleans; false entries are padding.
    """

    rows: Array | None
    mask: Array


class Sampler(Protocol):
    """What every sampler offers; samplers are frozen and can be hashed."""

    def __hash__(self) -> int:
        """Equal samplers hash alike."""
        ...

    @property
    def sampling_prob(self) -> float:
        """The probability that a given record is in a batch."""
        ...

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """The fixed number of rows of a batch, one for all clients."""
        ...

    def draw(
        self, rng_key: PRNGKey, num_records: Array, capacity: int, physical_size: int
    ) -> Batch:
        """Draws a batch from the first ``num_records`` of ``capacity`` rows."""
        ...

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """The event of one noisy sum over such a batch, noise in units of the clipping norm."""
        ...


@dataclass(frozen=True)
class FullBatch:
    """Every record, every time: no subsampling and nothing to go wrong with it."""

    @property
    def sampling_prob(self) -> float:
        """Always 1."""
        return 1.0

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """The rows of the largest client."""
        return max(client_sizes)

    def draw(
        self, rng_key: PRNGKey, num_records: Array, capacity: int, physical_size: int
    ) -> Batch:
        """All rows, in their order."""
        del rng_key, physical_size
        return Batch(None, jnp.arange(capacity) < num_records)

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """A plain Gaussian event."""
        del num_records, physical_size
        return dpa.GaussianDpEvent(noise_multiplier)


@dataclass(frozen=True)
class PoissonSampling:
    """Every record is in the batch with probability ``sampling_prob``, by its own coin.

    The batch is padded to a fixed number of rows, so that one compiled program serves every
    draw. In the rare case that more records come up than fit, a uniformly random subset of them
    is kept, and the event says so (Ganesh, McMahan and Thakurta 2025, arXiv 2508.15089).

    Args:
        sampling_prob: In (0, 1).

    Raises:
        ValueError: If the probability is outside (0, 1).
    """

    sampling_prob: float

    def __post_init__(self) -> None:
        prob = _validate.open_unit("sampling_prob", self.sampling_prob, "0.1")
        object.__setattr__(self, "sampling_prob", prob)

    def physical_size(self, client_sizes: Sequence[int]) -> int:
        """Rows that the largest client's batch exceeds in one of three million draws at most."""
        n, q = max(client_sizes), self.sampling_prob
        deviation = math.sqrt(n * q * (1 - q))
        return min(n, math.ceil(n * q + _PADDING_DEVIATIONS * deviation + _PADDING_SKEW))

    def draw(
        self, rng_key: PRNGKey, num_records: Array, capacity: int, physical_size: int
    ) -> Batch:
        """Flips every record's coin and gathers the rows that came up.

        One random word a record serves twice: it is in the batch if its word is below the
        threshold, and if too many are, the smallest words stay, which is a uniformly random
        subset of those that came up. The threshold is rounded down, so the true probability is
        at most the accounted one.
        """
        words = jax.random.bits(rng_key, (capacity,), jnp.uint32) >> (32 - _BITS)
        threshold = math.floor(self.sampling_prob * 2**_BITS)
        words = jnp.where(jnp.arange(capacity) < num_records, words, jnp.uint32(2**_BITS))
        # Non-negative floats sort as their bit patterns do, and top_k is fast on floats. The
        # offset keeps the patterns clear of subnormal numbers, which a device may flush to zero.
        patterns = words + jnp.uint32(1 << 23)
        sortable = jax.lax.bitcast_convert_type(patterns, jnp.float32)
        _, rows = jax.lax.top_k(-sortable, physical_size)
        return Batch(rows, words[rows] < threshold)

    def dp_event(
        self, noise_multiplier: float, num_records: int, physical_size: int
    ) -> dpa.DpEvent:
        """A Poisson-sampled Gaussian event, truncated if the batch may be cut."""
        if physical_size >= num_records:
            gaussian = dpa.GaussianDpEvent(noise_multiplier)
            return dpa.PoissonSampledDpEvent(self.sampling_prob, gaussian)
        return dpa.TruncatedSubsampledGaussianDpEvent(
            dataset_size=num_records,
            sampling_probability=self.sampling_prob,
            truncated_batch_size=physical_size,
            noise_multiplier=noise_multiplier,
        )
