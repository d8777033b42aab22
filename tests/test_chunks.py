"""Sums over records are made chunk by chunk, which changes nothing but time and memory."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import record_gradients, visits
from numpyro_dppvi.protocol import algorithm, rounds
from numpyro_dppvi.protocol.problem import Problem
from numpyro_dppvi.run import description
from tests.grids import grid

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
    layout = visits.Layout(CAPACITY, 1, CAPACITY, rows_at_once=rows_at_once)
    rule = dppvi.methods.GaussHermite(4)

    # Compiled, and with everything an argument: constants would be rounded by the compiler.
    @jax.jit
    def release(rows, params, keys, at):
        likelihood = visits.OfRecords(space, family, rule, layout, rows, params.num_records, params)
        return likelihood.released(dppvi.FullBatch(), keys, at)

    keys = jax.random.key(0), dppvi.privacy.by_purpose(dppvi.privacy.SecretKeys(0).round_key(0))
    rows = {name: jnp.asarray(leaf) for name, leaf in rows.items()}
    return jax.tree.leaves(release(rows, params, keys, family.standard()))


@pytest.mark.slow
@grid("num_records", [1, 16, 17, 40], quick=[2])
def test_the_sum_is_the_same_in_chunks_whatever_is_behind_the_records(num_records):
    whole = released(num_records, None)
    for padding in (0.0, np.nan):
        for rows_at_once in (8, 24):
            for a, b in zip(released(num_records, rows_at_once, padding), whole, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
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


def linear(X, y):
    """With an unknown spread, so that a record sees its latents through two numbers."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, spread), obs=y)


def after_rounds(model, method):
    """Natural parameters after two rounds of two clients, which are not equally large."""
    data = [{name: leaf[:size] for name, leaf in ROWS.items()} for size in (CAPACITY, 30)]
    result = dppvi.fit(
        model,
        None,
        data,
        rng_key=jax.random.key(0),
        method=method,
        budget=None if method.releases == "nothing" else dppvi.PrivacyBudget(8.0),
        num_rounds=2,
        insecure_noise_seed=None if method.releases == "nothing" else 1,
        progress_bar=False,
    )
    return jax.tree.leaves(result.state.natural)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [
        (logistic_regression, dppvi.DPOptimization()),
        (linear, dppvi.DPOptimization()),
        (logistic_regression, dppvi.FisherScoring(2)),
    ],
)
def test_a_microbatch_size_changes_no_bit_of_a_run(model, method):
    """As users compile: in haste, the compiler rounds the steps that follow otherwise."""
    whole = after_rounds(model, method)
    for size in (3, 16):
        for a, b in zip(
            after_rounds(model, dataclasses.replace(method, microbatch_size=size)),
            whole,
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_sums_that_are_not_released_agree_up_to_rounding():
    method = dppvi.NonPrivate(num_local_steps=2)
    whole = after_rounds(logistic_regression, method)
    chunked = after_rounds(logistic_regression, dataclasses.replace(method, microbatch_size=8))
    for a, b in zip(chunked, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_no_more_rows_than_a_microbatch_are_computed_at_once(monkeypatch):
    seen, of_rows = [], record_gradients.of_rows

    def watched(*args):
        seen.append(len(args[-1]["y"]))
        return of_rows(*args)

    monkeypatch.setattr(record_gradients, "of_rows", watched)
    after_rounds(logistic_regression, dppvi.DPOptimization(num_local_steps=1, microbatch_size=16))
    assert set(seen) == {16}


def test_rounds_that_differ_in_nothing_but_the_microbatch_are_described_alike():
    """It is in no checkpoint: a run may go on where there is less memory."""
    small, whole = dppvi.DPOptimization(microbatch_size=8), dppvi.DPOptimization()
    words = [description._in_words(method, None) for method in (small, whole)]
    assert words[0] == words[1]
    assert repr(small) == repr(whole)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [([50] * 9, None), ([50, 55], None), ([20, 100], 32), ([1000, 1100, 5000], 128)],
)
def test_clients_that_differ_have_chunks_that_follow_their_mean_size(sizes, rows, monkeypatch):
    monkeypatch.setattr(algorithm, "on_cpu", lambda: True)
    assert algorithm._rows_at_once(sizes) == rows
    assert algorithm._rows_at_once(sizes, 30) == 30


def padding_computed(sizes):
    """The share of the rows that are computed which is padding, on a processor."""
    with mock.patch.object(algorithm, "on_cpu", return_value=True):
        capacity, at_once = max(sizes), algorithm._rows_at_once(sizes)
    chunk = capacity
    if at_once is not None and capacity > at_once:
        chunk = visits.chunk_size(capacity, at_once)
    computed = sum(min(-(-size // chunk) * chunk, capacity) for size in sizes)
    return 1 - sum(sizes) / computed


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=300))
def test_less_than_a_fifth_of_what_unequal_clients_compute_is_padding(sizes):
    at_least = 124 * len(sizes) - sum(sizes)  # a client with what is missing to 124 each
    if at_least > 0:
        sizes = [*sizes, at_least + 124]
    assert padding_computed(sizes) < 0.2


@pytest.mark.parametrize(("median", "spread"), [(100, 1.0), (100, 0.3), (500, 1.5), (3000, 1.0)])
def test_a_thousand_clients_of_log_normal_sizes_compute_little_padding(median, spread):
    drawn = np.random.default_rng(0).lognormal(np.log(median), spread, 1000)
    share = padding_computed(np.maximum(20, drawn).astype(int).tolist())
    assert share < (0.15 if median == 100 else 0.06)


@given(st.integers(2, 10**6), st.integers(8, 10**6))
def test_chunks_are_no_longer_than_allowed_and_not_one_more_than_needed(num_rows, largest):
    if num_rows <= largest:
        return
    chunk = visits.chunk_size(num_rows, largest)
    piece = 32 if largest >= 32 else 8
    assert chunk <= largest
    assert chunk % piece == 0
    assert -(-num_rows // chunk) <= -(-num_rows // (largest // piece * piece))


@pytest.mark.parametrize(
    ("rows", "shards", "sampled", "at_once"),
    [(50, 1, 0, 10), (3000, 1, 0, None), (3000, 1, 50, 10), (50, 1, 3000, None), (7, 400, 0, None)],
)
def test_large_clients_are_visited_one_after_the_other(rows, shards, sampled, at_once, monkeypatch):
    monkeypatch.setattr(rounds, "on_cpu", lambda: True)
    space = latents.from_model(logistic_regression, jax.eval_shape(lambda: ROWS))
    family = guides.family_of(None, logistic_regression, space)  # six coordinates
    layout = visits.Layout(sampled, shards, rows)
    problem = Problem(space, family, dppvi.DPOptimization(), layout)
    assert rounds.batch_size(problem, 10) == at_once
    assert rounds.batch_size(problem, 1) is None


def test_clients_who_share_a_batch_by_size_come_back_in_their_order(monkeypatch):
    """Twenty unequal clients, in batches of sixteen and four: as if no batch were sorted."""
    sizes = RNG.permutation(np.arange(1, 21) ** 2).tolist()
    data = [
        {"X": RNG.normal(size=(n, 2)).astype(np.float32), "y": RNG.integers(0, 2, n)} for n in sizes
    ]
    method = dppvi.DPOptimization(num_local_steps=1)

    def factors():
        public = {"client_sizes": sizes, "schedule": dppvi.synchronous}
        plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(8.0), num_rounds=1, **public)
        keys = dppvi.privacy.SecretKeys(3)
        one = dppvi.pvi(
            logistic_regression, None, data[0], method=method, plan=plan, secret_keys=keys, **public
        )
        state = one.init(jax.random.key(0))
        state, _ = one.step(jax.random.key(0), state, dppvi.records.stack_clients(data))
        return jax.tree.leaves(state.factors)

    sorted_by_size = factors()
    monkeypatch.setattr(algorithm, "_rows_at_once", lambda sizes, most: None)
    for a, b in zip(sorted_by_size, factors(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
