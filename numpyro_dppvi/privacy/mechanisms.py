"""The mechanisms: noisy sums of clipped vectors, with their sensitivity and accounting event."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, PRNGKey, PyTree
from numpyro_dppvi.privacy import arithmetic, units
from numpyro_dppvi.privacy.budget import PrivacyBudget, Relation, unit_sensitivity
from numpyro_dppvi.privacy.noise_laws import (
    DiscreteGaussian,
    Gaussian,
    Noise,
    StepNoise,
    drawn,
    grid_step,
    std_in_steps,
)
from numpyro_dppvi.privacy.sampling import Sampler

# Close to the limits of 32-bit floats; devices may flush subnormal numbers to 0.
_LEAST_STD, _MOST_STD = 1e-35, 1e35


@dataclass(frozen=True)
class GaussianSum:
    """The release of one noisy sum over a sampled batch of clipped per-record vectors.

    Sampling, clipping, noise and the accounting event all come from this one value.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's vector.
        noise_multiplier: The noise's standard deviation divided by the norm that one unit of
            protection contributes: ``clip_norm`` times ``contributions``.
        sampler: How the batch is drawn.
        num_records: How many records the client holds (public).
        physical_size: The most rows that a batch can have.
        num_shares: How many clients' noise adds up to the noise of the released sum; 1 without a
            trusted aggregator.
        contributions: The most vectors that one unit of protection can change: a person's records.
    """

    clip_norm: float
    noise_multiplier: float
    sampler: Sampler
    num_records: int
    physical_size: int
    num_shares: int = 1
    contributions: int = 1

    def check(self, budget: PrivacyBudget) -> None:
        """Raises a ValueError if the budget's unit can change more than ``contributions`` vectors.

        The sampler must support the unit, too, and the noise be representable.
        """
        units.check_sampler(budget, self.sampler)
        _check_std(self.share_std)
        # A budget for persons of five records needs noise for five: a plan made for one is refused.
        _check_contributions(self.contributions, units.records_changed(budget), budget)

    def sensitivity(self, relation: Relation) -> float:
        """The most that the sum can move between neighbouring data sets, in L2 norm."""
        return unit_sensitivity(relation) * self.contributions * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on every entry of the released sum."""
        return self.noise_multiplier * self.contributions * self.clip_norm

    @property
    def share_std(self) -> float:
        """Standard deviation of the noise that this client adds."""
        # n independent shares of variance s^2 / n add up to noise of variance s^2.
        return self.noise_std / math.sqrt(self.num_shares)

    @property
    def dp_event(self) -> dpa.DpEvent:
        """The accounting event of one release, with noise in units of a contribution."""
        # Clip and contributions cancel: noise and sensitivity are both in units of what one unit
        # adds.
        return self.sampler.dp_event(self.noise_multiplier, self.num_records, self.physical_size)

    @property
    def num_shards(self) -> int:
        """Always 1, because the records are not divided into shards."""
        return 1

    @property
    def inclusion_prob(self) -> float:
        """The (public) probability that a record is in a batch."""
        return float(self.sampler.inclusion_prob(self.num_records))

    @property
    def name(self) -> str:
        """The mechanism in words."""
        return "Gaussian noise on a sum of clipped per-record gradients"

    @property
    def batch(self) -> str:
        """What enters one sum, in words."""
        return self.sampler.describe(self.num_records)


@dataclass(frozen=True)
class GaussianShardSum:
    """The release of one noisy, weighted sum of clipped changes, one per shard of the records.

    Replacing a record affects one shard, whose clipped change may become any other vector of norm
    at most C, so the sum moves by up to 2 C (paper, Theorems 2 and 3). Adding or removing a record
    has no such bound, because later records would move to other shards. A person with k records
    can affect k shards, a client all of them.

    Args:
        clip_norm: Bound on the joint L2 norm of one shard's change.
        noise_multiplier: The noise's standard deviation divided by the norm that one unit of
            protection contributes: ``clip_norm`` times ``contributions``, before the weight.
        num_shards: How many shards.
        num_records: How many records the client holds (public).
        weight: The factor of the sum and its noise: 1, or one over the number of shards.
        num_shares: How many clients' noise adds up to the noise of the released sum; 1 without a
            trusted aggregator.
        contributions: The most shards that one unit of protection can change.
        noise: The distribution of the noise.
    """

    clip_norm: float
    noise_multiplier: float
    num_shards: int
    num_records: int
    weight: float = 1.0
    num_shares: int = 1
    contributions: int = 1
    noise: Noise = Gaussian()

    def check(self, budget: PrivacyBudget) -> None:
        """Raises a ValueError if the budget's unit can change more than ``contributions`` shards.

        Discrete noise must not be shared between clients, nor too large to be exact.
        """
        if isinstance(self.noise, DiscreteGaussian):
            if self.num_shares > 1:
                raise ValueError(
                    f"noise must be Gaussian() where {self.num_shares} clients each add a share, "
                    "got DiscreteGaussian(), whose shares do not add up to a discrete Gaussian: "
                    "write noise=Gaussian(), or leave trusted_aggregator out."
                )
            std_in_steps(self.unweighted_std, self.clip_norm)
        _check_std(self.share_std)
        self.sensitivity(budget.relation)
        changed = units.shards_changed(budget, self.num_shards)
        _check_contributions(self.contributions, changed, budget)

    def sensitivity(self, relation: Relation) -> float:
        """The most that the weighted sum can move between neighbouring data sets, in L2 norm."""
        if relation != "replace_one":
            raise ValueError(
                "relation must be 'replace_one' for methods that divide records into shards, got "
                f"{relation!r}: write PrivacyBudget(relation='replace_one'), or "
                "method=DPOptimization(), because one record more or less would move others "
                "between shards."
            )
        return unit_sensitivity(relation) * self.contributions * self.clip_norm * self.weight

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on every entry of the released sum."""
        return self.unweighted_std * self.weight

    @property
    def unweighted_std(self) -> float:
        """Standard deviation of the noise on the sum before it is multiplied by the weight."""
        return self.noise_multiplier * self.contributions * self.clip_norm

    @property
    def share_std(self) -> float:
        """Standard deviation of the noise that this client adds."""
        return self.noise_std / math.sqrt(self.num_shares)

    @property
    def dp_event(self) -> dpa.DpEvent:
        """The accounting event of one release, with noise in units of a contribution."""
        # Weight, clipping norm and contributions cancel between noise and sensitivity. They are
        # left out because rounding them would give clients with equal budgets different events,
        # some slightly above the budget.
        return self.noise.dp_event(self.noise_multiplier)

    @property
    def inclusion_prob(self) -> float:
        """Always 1, because every shard enters every sum."""
        return 1.0

    @property
    def name(self) -> str:
        """The mechanism in words."""
        return f"{self.noise.name} on a sum of clipped changes of factors, one per shard"

    @property
    def batch(self) -> str:
        """What enters one sum, in words."""
        return "all records" if self.num_shards == 1 else f"{self.num_shards} shards"


Mechanism: TypeAlias = GaussianSum | GaussianShardSum
"""The mechanism of a client's releases, either sums of gradients or sums of shards' changes."""


def _check_std(noise_std: float) -> None:
    """Refuses noise outside the range of 32-bit floats."""
    if noise_std != 0 and not _LEAST_STD <= noise_std <= _MOST_STD:
        raise ValueError(
            f"noise must have a standard deviation between {_LEAST_STD:g} and {_MOST_STD:g}, "
            f"got {noise_std:g}: write a clip_norm nearer to 1, or a smaller "
            "max_records_per_person."
        )


def _check_contributions(accounted: int, changed: int, budget: PrivacyBudget) -> None:
    if changed > accounted:
        raise ValueError(
            f"contributions must be at least {changed} if a budget protects a "
            f"{units.in_words(budget)}, got {accounted}: make the plan with plan_privacy(...)."
        )


def add_noise(
    rng_key: PRNGKey,
    total: PyTree,
    noise_std: Array | float,
    like: PyTree | None = None,
    asked: PyTree | None = None,
) -> PyTree:
    """Releases a sum: adds independent Gaussian noise of one standard deviation to every entry.

    Noise is drawn and added in 64 bits. The noisy sum is rounded to a grid that depends on
    ``noise_std`` only and then cast to the result's dtypes.

    Args:
        rng_key: A secret key.
        total: A tree of sums.
        noise_std: Standard deviation, a scalar; 0 adds nothing.
        like: A tree with the dtypes of the result; those of ``total`` if not given.
        asked: A tree of public flags, or ``None`` for what is released always: where a flag is
            false, zeros are released that nothing entered, and no noise is made for them.

    Returns:
        The noisy sums.
    """
    leaves, treedef = jax.tree.flatten(total)
    flags = [None] * len(leaves)
    if asked is not None:
        flags = jax.tree.leaves(asked, is_leaf=lambda flag: flag is None)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(total if like is None else like)]
    # One draw of bits for all entries, so that none of them is used twice whatever the tree.
    words = arithmetic.random_words(rng_key, (sum(leaf.size for leaf in leaves),))
    # Every entry of every leaf has random words of its own.
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    each = jnp.split(words, ends, axis=1)
    always = [part for part, flag in zip(each, flags, strict=True) if flag is None]
    noisy, start = [], 0
    with jax.enable_x64(True):
        draws = arithmetic.normal(jnp.concatenate(always, axis=1))  # at once: compiled once
        for leaf, dtype, mine, flag in zip(leaves, dtypes, each, flags, strict=True):
            if flag is None:
                of_leaf = draws[start : start + leaf.size].reshape(leaf.shape)
                noisy.append(arithmetic.released(of_leaf, leaf, noise_std, dtype))
                start += leaf.size
            else:
                noisy.append(_released_if(flag, mine, leaf, noise_std, dtype))
    return jax.tree.unflatten(treedef, noisy)


def _released_if(
    asked: Array, words: Array, total: Array, noise_std: Array | float, dtype: np.dtype
) -> Array:
    """One leaf with noise, or zeros where it is not asked for, which is public."""

    def noisy() -> Array:
        draws = arithmetic.normal(words).reshape(total.shape)
        return arithmetic.released(draws, total, noise_std, dtype)

    nothing = jnp.zeros(total.shape, dtype)
    found = jax.lax.cond(arithmetic.anyone(asked), noisy, lambda: nothing)
    # Who was not asked releases the same zeros, whoever else was.
    return jnp.where(asked, found, nothing)


def draw_noise(mechanisms: Sequence[Mechanism], clients: np.ndarray, size: int) -> StepNoise:
    """Fresh discrete Gaussian noise for the visits of a round.

    OpenDP draws it on the host, before the compiled round runs.

    Args:
        mechanisms: One per client; all of them :class:`GaussianShardSum`.
        clients: The clients that are visited, an array of any shape.
        size: How many entries one visit releases.

    Returns:
        Noise in integer steps, with the leading shape of ``clients``.

    Raises:
        TypeError: If a mechanism is a :class:`GaussianSum`.
        ImportError: If OpenDP is not installed.
    """
    sums = [mechanism for mechanism in mechanisms if isinstance(mechanism, GaussianShardSum)]
    if len(sums) != len(mechanisms):  # indices into ``sums`` would belong to other clients
        raise TypeError(
            "mechanisms must all be GaussianShardSum, got a GaussianSum: write add_noise(...) for "
            "its noise."
        )
    scales = [std_in_steps(mine.unweighted_std, mine.clip_norm) for mine in sums]
    return drawn(scales, [grid_step(mine.clip_norm) for mine in sums], clients, size)
