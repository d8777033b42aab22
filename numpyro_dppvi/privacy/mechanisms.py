"""The Gaussian mechanism on sums of clipped contributions; its sensitivity and its event."""

from dataclasses import dataclass

import dp_accounting as dpa
import jax
import jax.numpy as jnp

from numpyro_dppvi._typing import Array, PRNGKey, PyTree
from numpyro_dppvi.privacy.budget import Relation, unit_sensitivity
from numpyro_dppvi.privacy.sampling import Sampler


@dataclass(frozen=True)
class GaussianSum:
    """The release of one noisy sum of clipped contributions of a sampled batch.

    Sampling, clipping, noise and the accounting event come from this one value.

    Args:
        clip_norm: Bound on the joint L2 norm of one record's contribution.
        noise_multiplier: Standard deviation of the noise divided by ``clip_norm``.
        sampler: How the batch is drawn.
        num_records: How many records the client holds (public).
        physical_size: How many rows a batch has at most.
    """

    clip_norm: float
    noise_multiplier: float
    sampler: Sampler
    num_records: int
    physical_size: int

    def sensitivity(self, relation: Relation) -> float:
        """The most that the sum can move between neighbouring data sets, in L2 norm."""
        return unit_sensitivity(relation) * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on every entry of the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def dp_event(self) -> dpa.DpEvent:
        """The event that one release is charged as (noise in units of ``clip_norm``)."""
        return self.sampler.dp_event(self.noise_multiplier, self.num_records, self.physical_size)


def add_noise(rng_key: PRNGKey, total: PyTree, noise_std: Array | float) -> PyTree:
    """Adds independent Gaussian noise of one standard deviation to every entry of a tree."""
    leaves, treedef = jax.tree.flatten(total)
    keys = jax.random.split(rng_key, len(leaves))
    noisy = [
        leaf + jnp.asarray(noise_std, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)
