"""Where secret randomness comes from: the operating system, unless a seed is given for a test."""

import hashlib
import secrets
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import PRNGKey

_KEY_BYTES = 8


def _key(data: bytes) -> PRNGKey:
    return jax.random.wrap_key_data(
        jnp.asarray(np.frombuffer(data, np.uint32)), impl="threefry2x32"
    )


@dataclass(frozen=True)
class SecretKeys:
    """Keys for the noise and for the choice of batches, one a round.

    Both must stay secret: noise that can be computed can be subtracted, and a batch that can be
    predicted amplifies nothing. They never come from ``rng_key``, which people publish.

    Args:
        insecure_seed: ``None`` draws every key from the operating system. An integer of any size
            makes the run reproducible for a test, and removable for whoever knows it.
    """

    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        if self.insecure_seed is not None:
            _validate.whole("insecure_noise_seed", self.insecure_seed)

    def round_key(self, round_number: int) -> PRNGKey:
        """The secret key of one round; a fresh one at every call unless a seed was given."""
        if self.insecure_seed is None:
            return _key(secrets.token_bytes(_KEY_BYTES))
        # Hashed, because jax.random.key keeps only 32 bits of an integer: 2**40 would become 0.
        text = f"numpyro_dppvi noise seed {self.insecure_seed} round {round_number}"
        return _key(hashlib.sha256(text.encode()).digest()[:_KEY_BYTES])
