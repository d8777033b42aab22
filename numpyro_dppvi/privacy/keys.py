"""Secret random keys, from the operating system or, for tests, from a seed."""

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
"""The algorithm that turns a key into random bits."""

_THREEFRY_BYTES = 8


class Purposes(NamedTuple):
    """The secret keys of one noisy sum.

    Attributes:
        noise: For the noise.
        batch: For sampling records.
    """

    noise: PRNGKey
    batch: PRNGKey


def by_purpose(secret_key: PRNGKey) -> Purposes:
    """Splits the secret key of one noisy sum, which must not be used again."""
    return Purposes(*jax.random.split(secret_key))


@dataclass(frozen=True)
class SecretKeys:
    """Secret keys for noise and for sampling batches, one per round.

    These keys never come from ``rng_key``, which people publish. Anyone who knows them can subtract
    the noise and tell which records were sampled.

    Args:
        insecure_seed: ``None`` draws every key from the operating system. An integer makes a run
            reproducible for a test; anyone who knows it can remove the noise.
        generator: ``"chacha20"``, a cipher with 256-bit keys, or ``"threefry2x32"``, JAX's default
            generator with 64-bit keys, which is not cryptographic. ``None`` means ChaCha20, or
            Threefry with a warning if this JAX version does not accept custom generators.

    Raises:
        ValueError: If the seed is not a whole number or the generator is unknown.
        RuntimeError: If this JAX version does not accept ChaCha20.
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
        """The secret key of a round; a fresh one at every call unless a seed was given."""
        _validate.not_negative_int("round_number", round_number)
        generator = _best_generator() if self.generator is None else self.generator
        num_bytes = 4 * chacha.KEY_WORDS if generator == "chacha20" else _THREEFRY_BYTES
        if self.insecure_seed is None:
            # From the operating system at every call. A key that was derived from an earlier one
            # would make a resumed run repeat noise: two releases with equal noise, whose difference
            # has none.
            return _key(secrets.token_bytes(num_bytes), generator)
        # Hashed, because jax.random.key keeps only the low 32 bits: a seed of 2**40 would be 0.
        text = f"numpyro_dppvi noise seed {self.insecure_seed} round {round_number}"
        return _key(hashlib.sha256(text.encode()).digest()[:num_bytes], generator)


def _key(data: bytes, generator: Generator) -> PRNGKey:
    impl = chacha.implementation() if generator == "chacha20" else generator
    return jax.random.wrap_key_data(
        jnp.asarray(np.frombuffer(data, np.uint32), jnp.uint32), impl=impl
    )


@functools.cache
def _best_generator() -> Generator:
    """ChaCha20 if this JAX accepts it, else Threefry with a warning."""
    try:
        chacha.implementation()
    except RuntimeError as error:
        warnings.warn(f"{error} This run uses Threefry.", RuntimeWarning, stacklevel=3)
        return "threefry2x32"
    return "chacha20"
