"""Where secret randomness comes from: the operating system, unless a seed is given for a test."""

import functools
import hashlib
import secrets
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import PRNGKey
from numpyro_dppvi.privacy import chacha

Generator: TypeAlias = Literal["chacha20", "threefry2x32"]
"""What turns a key into random bits."""

_THREEFRY_BYTES = 8


class Purposes(NamedTuple):
    """The secret keys of one noisy sum, one a purpose.

    Attributes:
        noise: For the noise.
        batch: For the choice of records.
    """

    noise: PRNGKey
    batch: PRNGKey


def by_purpose(secret_key: PRNGKey) -> Purposes:
    """Splits the secret key of one noisy sum, which is good for nothing else afterwards."""
    return Purposes(*jax.random.split(secret_key))


@dataclass(frozen=True)
class SecretKeys:
    """Keys for the noise and for the choice of batches, one a round.

    Both must stay secret: noise that can be computed can be subtracted, and a batch that can be
    predicted amplifies nothing. They never come from ``rng_key``, which people publish.

    Args:
        insecure_seed: ``None`` draws every key from the operating system. An integer of any size
            makes the run reproducible for a test, and removable for whoever knows it.
        generator: ``"chacha20"``, a cipher with keys of 256 bits, or ``"threefry2x32"``, JAX's
            usual one with keys of 64 bits, which was not made to keep secrets. ``None`` is
            ChaCha20, or Threefry with a warning where this JAX takes no other.

    Raises:
        ValueError: If the seed is no whole number or there is no such generator.
        RuntimeError: If ChaCha20 is asked for and this JAX does not take it.
    """

    insecure_seed: int | None = None
    generator: Generator | None = None

    def __post_init__(self) -> None:
        if self.insecure_seed is not None:
            seed = _validate.whole("insecure_noise_seed", self.insecure_seed)
            object.__setattr__(self, "insecure_seed", seed)
        if self.generator is not None:
            _validate.choice("generator", self.generator, get_args(Generator))
        if self.generator == "chacha20":
            chacha.implementation()

    def round_key(self, round_number: int) -> PRNGKey:
        """The secret key of one round; a fresh one at every call unless a seed was given."""
        _validate.not_negative_int("round_number", round_number)
        generator = _best_generator() if self.generator is None else self.generator
        num_bytes = 4 * chacha.KEY_WORDS if generator == "chacha20" else _THREEFRY_BYTES
        if self.insecure_seed is None:
            return _key(secrets.token_bytes(num_bytes), generator)
        # Hashed, because jax.random.key keeps only 32 bits of an integer: 2**40 would become 0.
        text = f"numpyro_dppvi noise seed {self.insecure_seed} round {round_number}"
        return _key(hashlib.sha256(text.encode()).digest()[:num_bytes], generator)


def _key(data: bytes, generator: Generator) -> PRNGKey:
    impl = chacha.implementation() if generator == "chacha20" else generator
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(data, np.uint32)), impl=impl)


@functools.cache
def _best_generator() -> Generator:
    """ChaCha20 where it can be had."""
    try:
        chacha.implementation()
    except RuntimeError as error:
        warnings.warn(f"{error} This run uses Threefry.", RuntimeWarning, stacklevel=3)
        return "threefry2x32"
    return "chacha20"
