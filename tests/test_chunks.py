"""Sums over records are made chunk by chunk, which changes nothing but time and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import record_gradients, visits
from numpyro_dppvi.protocol import algorithm

CAPACITY, CLIP = 40, 0.5
RNG = np.random.default_rng(0)
ROWS = {
    "X": RNG.normal(size=(CAPACITY, 3)).astype(np.float32),
    "y": RNG.integers(0, 2, CAPACITY).astype(np.float32),
}


def released(num_records, rows_at_once, padding=0.0):
    """What a client with noise next to none releases of its first records."""
    rows = {name: leaf.copy() for name, leaf in ROWS.items()}
    for leaf in rows.values():
        leaf[num_records:] = padding
    space = latents.from_model(logistic_regression, jax.eval_shape(lambda: rows))
    family = guides.family_of(None, logistic_regression, space)
    numbers = (1e-9, 1, 1.0, CLIP, 1.0, num_records)
    params = visits.ClientParams(*(jnp.asarray(number) for number in numbers))
    likelihood = visits.OfRecords(
        space,
        family,
        dppvi.methods.GaussHermite(4),
        visits.Layout(CAPACITY, 1, CAPACITY, rows_at_once=rows_at_once),
        {name: jnp.asarray(leaf) for name, leaf in rows.items()},
        jnp.asarray(num_records),
        params,
    )
    keys = jax.random.key(0), dppvi.privacy.SecretKeys(0).round_key(0)
    return jax.tree.leaves(likelihood.released(dppvi.FullBatch(), keys, family.standard()))


@pytest.mark.parametrize("num_records", [1, 16, 17, 40])
def test_the_sum_is_the_same_in_chunks_whatever_is_behind_the_records(num_records):
    whole = released(num_records, None)
    for padding in (0.0, np.nan):
        for a, b in zip(released(num_records, 8, padding), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6 * CLIP)


@pytest.mark.parametrize(("num_records", "chunks"), [(1, 1), (16, 2), (17, 3), (40, 5)])
def test_chunks_without_a_record_are_left_out(num_records, chunks, monkeypatch):
    count, of_rows = [], record_gradients.of_rows

    def counted(*args):
        jax.debug.callback(lambda: count.append(1))
        return of_rows(*args)

    monkeypatch.setattr(record_gradients, "of_rows", counted)
    released(num_records, 8)
    jax.effects_barrier()
    assert len(count) == chunks


@pytest.mark.parametrize(
    ("sizes", "rows"), [([50] * 9, None), ([50, 55], None), ([20, 100], 64), ([100, 5000], 638)]
)
def test_clients_that_differ_have_chunks_that_follow_their_mean_size(sizes, rows):
    assert algorithm._rows_at_once(sizes) == rows
