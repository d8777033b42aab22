"""Matrices of clients who are alike are made once; what comes of it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi.families.full_normal import pack
from numpyro_dppvi.methods import kinds
from tests.grids import grid

SIZE = 3


def runs(lengths):
    """Rows of clients, so many alike next to one another, and a number that each has."""
    rng = np.random.default_rng(0)
    matrices = rng.normal(size=(len(lengths), SIZE, SIZE)) + 3 * np.eye(SIZE)
    return np.repeat(matrices, lengths, axis=0), np.repeat(
        np.arange(1.0, 1 + len(lengths)), lengths
    )


@grid(
    "lengths",
    [[1], [5, 3], [100], [64], [65], [60, 40, 1], [1] * 64, [1] * 130, [2] * 70, [128, 1]],
    quick=[0, 6, 7],
)
def test_what_is_made_once_a_kind_is_what_each_client_would_get(lengths):
    matrices, numbers = runs(lengths)
    vectors = np.random.default_rng(1).normal(size=(len(numbers), SIZE))

    @jax.jit
    def found(matrices, numbers, vectors):
        alike = kinds.of(matrices, numbers)
        first = alike.of_first(lambda a, n: n[:, None, None] * jnp.linalg.inv(a), matrices, numbers)
        whole = alike.of_each(lambda a: a @ a, first)
        total = alike.total(lambda a, n: jnp.tensordot(n, a, 1), whole, alike.sums(numbers))
        packed = alike.of_each(lambda a: pack(a + jnp.swapaxes(a, 1, 2)), whole)
        return alike.clients(whole), total, alike.times(packed, vectors)

    inverse = numbers[:, None, None] * np.linalg.inv(matrices)
    whole = inverse @ inverse
    each, total, products = found(matrices, numbers, vectors)
    np.testing.assert_allclose(each, whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, np.tensordot(numbers, whole, 1), rtol=1e-4, atol=1e-4)
    expected = np.einsum("mij,mj->mi", whole + np.swapaxes(whole, 1, 2), vectors)
    np.testing.assert_allclose(products, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_kind_is_clients_with_the_same_rows_side_by_side(monkeypatch):
    monkeypatch.setattr(kinds, "on_cpu", lambda: True)
    matrices, numbers = runs([70, 30])
    alike = kinds.of(matrices, numbers)
    assert alike.number == 2
    assert alike.first[:2].tolist() == [0, 70]
    # Any row that differs makes a kind of its own, and so does one that is not a number.
    numbers[10] += 1
    assert kinds.of(matrices, numbers).number == 4
    matrices[50] = np.nan
    assert kinds.of(matrices, numbers).number == 6


@pytest.mark.slow
@grid("method", [dppvi.FisherScoring(), dppvi.DPOptimization()], quick=[1], ids=str)
def test_all_clients_side_by_side_may_be_named_in_any_order(method):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(160, 2)).astype(np.float32)
    data = {"X": X, "y": (rng.random(160) < 0.5).astype(np.float32)}

    def backwards(round_number, num_clients):
        return np.arange(num_clients)[None, ::-1]

    def q(schedule):
        return dppvi.fit(
            logistic_regression,
            None,
            data,
            rng_key=jax.random.key(0),
            clients=4,
            method=method,
            budget=dppvi.PrivacyBudget(1.0),
            num_rounds=3,
            schedule=schedule,
            progress_bar=False,
            insecure_noise_seed=1,
        ).state.natural

    jax.tree.map(np.testing.assert_array_equal, q(dppvi.synchronous), q(backwards))
