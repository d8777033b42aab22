"""ChaCha20 is the cipher of the RFC, and a generator that JAX takes in every transformation."""

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_dppvi.privacy import SecretKeys, chacha, keys
from tests.grids import grid

# RFC 8439, section 2.3.2 and appendix A.1, vectors 1, 2 and 4: key, nonce, counter, block.
VECTORS = [
    (
        bytes(range(32)),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32),
        "000000000000000000000000",
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        bytes(32),
        "000000000000000000000000",
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        bytes([0, 255]) + bytes(30),
        "000000000000000000000000",
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]


def as_words(data):
    return jnp.asarray(np.frombuffer(data, "<u4").astype(np.uint32))


def key_of(data=bytes(range(32))):
    return jax.random.wrap_key_data(as_words(data), impl=chacha.implementation())


def words(keys):
    return {tuple(row) for row in np.asarray(jax.random.key_data(keys)).reshape(-1, 8).tolist()}


@pytest.mark.parametrize(("key", "nonce", "counter", "block"), VECTORS)
def test_it_is_the_cipher_of_the_rfc(key, nonce, counter, block):
    counters = jnp.array([counter, counter + 1], jnp.uint32)
    made = np.asarray(chacha.blocks(as_words(key), counters, as_words(bytes.fromhex(nonce))))
    assert made.shape == (2, 16)
    assert made[0].astype("<u4").tobytes() == bytes.fromhex(block)
    assert not np.any(made[0] == made[1])


class TestGenerator:
    def test_bits_are_the_key_stream(self):
        bits = np.asarray(jax.random.bits(key_of(), (3, 20), jnp.uint32))
        nonce = jnp.array([1, 0, 0], jnp.uint32)
        stream = chacha.blocks(as_words(bytes(range(32))), jnp.arange(4, dtype=jnp.uint32), nonce)
        np.testing.assert_array_equal(bits.ravel(), np.asarray(stream).ravel()[:60])

    @grid("width", [8, 16, 32, 64], quick=[0, 3])
    def test_bits_of_every_width_are_uniform(self, width):
        with jax.enable_x64(True):
            bits = np.asarray(jax.random.bits(key_of(), (5, 999), jnp.dtype(f"uint{width}")))
        assert bits.dtype == np.dtype(f"uint{width}")
        assert bits.shape == (5, 999)
        for shift in (0, width - 8):
            counts = np.bincount((bits.ravel() >> np.array(shift, bits.dtype)) & 255, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-6

    def test_draws_have_their_law(self):
        assert stats.kstest(jax.random.uniform(key_of(), (20_000,)), "uniform").pvalue > 1e-6
        assert stats.kstest(jax.random.normal(key_of(), (20_000,)), "norm").pvalue > 1e-6

    def test_keys_of_different_uses_and_numbers_are_different(self):
        key = key_of()
        derived = [
            jax.random.split(key, 40),
            jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(40)),
        ]
        assert len(words(key) | words(derived[0]) | words(derived[1])) == 81
        bits = np.asarray(jax.random.bits(key, (40, 16), jnp.uint32))[:, :8]
        assert not {tuple(row) for row in bits.tolist()} & (words(derived[0]) | words(derived[1]))

    def test_split_keys_have_the_shape_asked_for(self):
        assert jax.random.split(key_of(), (2, 3)).shape == (2, 3)
        assert words(jax.random.split(key_of(), (2, 3))) == words(jax.random.split(key_of(), 6))

    def test_all_bits_of_the_key_count(self):
        keys = [bytearray(bytes(range(32))) for _ in range(256)]
        for bit, key in enumerate(keys):
            key[bit // 8] ^= 1 << bit % 8
        bits = {int(jax.random.bits(key_of(bytes(key)), (), jnp.uint32)) for key in keys}
        assert len(bits) == 256  # a collision has probability 10^-5

    def test_every_transformation_gives_the_same_bits(self):
        keys = jax.random.split(key_of(), 6)

        def draw(key):
            inner = jax.random.fold_in(key, 3)
            return jax.random.bits(jax.random.split(inner)[1], (37,), jnp.uint32)

        expected = np.stack([draw(key) for key in keys])
        for mapped in (
            jax.vmap(draw),
            lambda keys: jax.lax.map(draw, keys),
            lambda keys: jax.lax.map(draw, keys, batch_size=4),
            lambda keys: jax.lax.scan(lambda c, k: (c, draw(k)), 0, keys)[1],
            lambda keys: jax.vmap(jax.vmap(draw))(keys.reshape(2, 3)).reshape(6, -1),
        ):
            np.testing.assert_array_equal(jax.jit(mapped)(keys), expected)
        with jax.enable_x64(True):
            np.testing.assert_array_equal(jax.jit(jax.vmap(draw))(keys), expected)

    def test_takes_no_seed(self):
        with pytest.raises(TypeError, match=r"too few bits for a secret key: write SecretKeys\(\)"):
            jax.random.key(0, impl=chacha.implementation())

    def test_nothing_at_all_can_be_drawn(self):
        assert jax.random.bits(key_of(), (0, 3), jnp.uint32).shape == (0, 3)


class TestWithoutIt:
    """``jax.extend`` is only half public: what happens when it changes."""

    @pytest.fixture(autouse=True)
    def _no_generators(self, monkeypatch):
        def gone(**arguments):
            raise TypeError("define_prng_impl() got an unexpected keyword argument")

        monkeypatch.setattr(jax.extend.random, "define_prng_impl", gone)
        caches = (chacha.implementation, keys._best_generator)
        for cache in caches:
            cache.cache_clear()
        yield
        for cache in caches:
            cache.cache_clear()

    def test_asking_for_it_is_refused_in_a_sentence(self):
        with pytest.raises(
            RuntimeError, match=r"JAX \S+ does not accept .* write SecretKeys\(gener"
        ):
            SecretKeys(generator="chacha20")

    def test_the_default_is_jaxs_own_and_says_so(self):
        keys = SecretKeys()
        with pytest.warns(RuntimeWarning, match="This run uses Threefry"):
            key = keys.round_key(0)
        assert jax.random.key_impl(key) == "threefry2x32"

    def test_jaxs_own_can_be_asked_for_in_silence(self):
        assert SecretKeys(generator="threefry2x32").round_key(0).shape == ()
