"""What is laid out otherwise on an accelerator gives the same: here, a processor plays one.

On a GPU these and all other tests can be run as they are.
"""

import contextlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_dppvi as dppvi
from models.bnn import bnn
from models.logistic_regression import logistic_regression
from numpyro_dppvi import _device, guides, latents
from numpyro_dppvi._typing import LayerProduct, LowerProduct, RowProduct
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods import kinds, visits
from numpyro_dppvi.privacy import chacha, clipped_sum
from numpyro_dppvi.protocol import algorithm, rounds
from numpyro_dppvi.protocol.problem import Problem
from tests.grids import grid

RNG = np.random.default_rng(5)


@contextlib.contextmanager
def accelerator(there=True):
    """Within it, programs are made as for an accelerator, and none that was made before is used."""
    modules = [m for name, m in sys.modules.items() if name.startswith("numpyro_dppvi.")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if "on_cpu" in vars(module):
                stack.enter_context(mock.patch.object(module, "on_cpu", return_value=not there))
        jax.clear_caches()
        yield
    jax.clear_caches()


def on_both(compute):
    """What is computed as on a processor, and as on an accelerator."""
    with accelerator(there=False):
        here = compute()
    with accelerator():
        return here, compute()


def floats(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_programs_run_where_they_are_told_to():
    cpu = jax.devices("cpu")[0]
    for device in (cpu, "cpu"):
        with jax.default_device(device):
            assert _device.on_cpu()
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        assert not _device.on_cpu()
        with jax.default_device(cpu):
            assert _device.on_cpu()


@pytest.mark.slow
def test_the_cipher_gives_the_same_words():
    keys = jnp.asarray(RNG.integers(0, 2**32, (3, 8)), jnp.uint32)
    counters, nonce = jnp.arange(19, dtype=jnp.uint32), jnp.array([1, 2, 3], jnp.uint32)
    here, there = on_both(lambda: jax.vmap(chacha.blocks, (0, None, None))(keys, counters, nonce))
    np.testing.assert_array_equal(here, there)


@pytest.mark.slow
def test_sums_are_the_same_to_the_last_bit():
    rows = RowProduct(floats(21), floats(21, 5))
    lower = LowerProduct(floats(21, 40), floats(21, 40))
    layer = LayerProduct(floats(21, 5), floats(21, 3, 4), floats(3, 5, 4))
    vectors = {"flat": floats(21, 2), "rows": rows, "lower": lower, "layer": layer}
    mask = jnp.arange(21) % 3 > 0
    here, there = on_both(lambda: jax.jit(clipped_sum)(vectors, mask, 2.5))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_same_records_are_sampled():
    sampler, key = dppvi.PoissonSampling(0.3), jax.random.key(1)

    def drawn():
        return jax.jit(lambda: sampler.draw(key, jnp.array(90), 0.3, 100, 30))()

    here, there = on_both(drawn)
    np.testing.assert_array_equal(here.mask, there.mask)
    np.testing.assert_array_equal(here.rows, there.rows)


def test_what_is_computed_at_once_is_bounded_by_memory_alone():
    shapes = {"X": jax.ShapeDtypeStruct((9, 3), jnp.float32), "y": jax.ShapeDtypeStruct((9,), int)}
    space = latents.from_model(logistic_regression, shapes)
    family = guides.family_of(None, logistic_regression, space)  # six coordinates

    def batch_size(rows):
        layout = visits.Layout(0, 1, rows)
        return rounds.batch_size(Problem(space, family, dppvi.DPOptimization(), layout), 10_000)

    with accelerator():
        assert batch_size(50) == 10_000
        assert 1 <= batch_size(10**6) * 10**6 * 6 <= 2**26
        assert batch_size(10**8) == 1
        # Small clients may be computed whole, and large ones in chunks that leave out padding.
        assert algorithm._rows_at_once([20, 100]) == 100
        assert algorithm._rows_at_once([100] * 99 + [10**6]) == 4096
        assert algorithm._rows_at_once([20, 100], 30) == 30
        assert kinds.of(jnp.repeat(jnp.arange(3), 300)).number is None
        assert kinds.of(jnp.repeat(jnp.arange(3), 400)).number == 3


def test_products_of_matrices_are_not_rounded_to_eleven_bits():
    """As a GPU's are by default. A user's own setting stays."""
    precisions = []

    @compiled()
    def product(matrix):
        found = jnp.dot(matrix, matrix)
        precisions.append(jax.config.jax_default_matmul_precision)
        return found

    with accelerator():
        product(floats(2, 2))
        with jax.default_matmul_precision("default"):
            product(floats(2, 2))
    product(floats(2, 2))
    assert precisions == ["highest", "default", None]


FITS = {
    "DP optimisation": (dppvi.DPOptimization(num_local_steps=2), {}),
    "sampled": (dppvi.DPOptimization(2, sampler=dppvi.PoissonSampling(0.3)), {}),
    "full covariance": (dppvi.DPOptimization(2), {"guide": AutoMultivariateNormal}),
    "network": (dppvi.DPOptimization(2, expectation=dppvi.MonteCarlo(4)), {"model": bnn}),
    "scores": (dppvi.FisherScoring(), {}),
    "scores in turn": (dppvi.FisherScoring(), {"schedule": dppvi.sequential}),
    "virtual clients": (dppvi.VirtualClients(8, 0.1), {}),
    "without privacy": (dppvi.NonPrivate(), {}),
}


@grid("name", list(FITS), quick=[])
def test_fits_are_the_same_but_for_rounding(name):
    method, given = FITS[name]
    sizes = [40, 12, 90]
    data = [
        {"X": np.asarray(floats(n, 3)), "y": RNG.integers(0, 2, n).astype(np.float32)}
        for n in sizes
    ]
    model, guide = given.get("model", logistic_regression), given.get("guide")
    private = {}
    if not isinstance(method, dppvi.NonPrivate):
        private = {"budget": dppvi.PrivacyBudget(8.0), "insecure_noise_seed": 3}

    def factors():
        return dppvi.fit(
            model,
            guide(model) if guide else None,
            data,
            rng_key=jax.random.key(0),
            method=method,
            num_rounds=2,
            schedule=given.get("schedule", dppvi.synchronous),
            progress_bar=False,
            **private,
        ).state.natural

    here, there = on_both(factors)
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(np.asarray(a)).max())
