"""Records of unequal clients lie end to end: less memory, and nobody's reach anybody else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi.records import Shards, placement, stack_clients
from numpyro_dppvi.records.shards import end_to_end
from tests.grids import grid

RNG = np.random.default_rng(0)
SIZES = (5, 40, 9, 3, 17, 4)


def made_up(sizes):
    return [
        {
            "X": RNG.normal(size=(size, 3)).astype(np.float32),
            "y": RNG.integers(0, 2, size),
            "seen": np.ones((size, 1), bool),
        }
        for size in sizes
    ]


def in_own_blocks(shards):
    """The same records, each client's in a block of its own."""
    each = [shards.of_client(number) for number in range(len(shards.num_records))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return Shards(*stacked)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(0, 9))
def test_a_block_fits_behind_every_first_row_and_no_two_clients_share_a_row(sizes, more):
    capacity = max(sizes) + more
    num_blocks, starts = end_to_end(np.array(sizes), capacity)
    rows = np.concatenate([start + np.arange(n) for start, n in zip(starts, sizes, strict=True)])
    assert sorted(rows) == list(range(sum(sizes)))
    assert starts.max() + capacity <= num_blocks * capacity < sum(sizes) + 2 * capacity


@pytest.mark.parametrize("sizes", [SIZES, (1, 1, 40), (7, 40, 40, 7), (3,), (4, 4)])
def test_every_client_has_its_own_records_and_zeros(sizes):
    data = made_up(sizes)
    for mine in data:
        mine["X"][0] = np.nan  # of what stands next door, 0 times this would not be 0
    shards = stack_clients(data, missing=("X",))
    get = jax.jit(Shards.of_client)
    mask, held = np.asarray(shards.mask), jax.tree.map(np.asarray, shards.records)
    owners = np.broadcast_to(shards.owners, mask.shape)
    for number, mine in enumerate(data):
        rows, num_records = get(shards, number)
        assert num_records == sizes[number] == np.sum(owners[mask] == number)
        for name, array in mine.items():
            found = np.asarray(rows[name])
            assert found.dtype == held[name].dtype
            assert len(found) == max(sizes)
            np.testing.assert_array_equal(found[: len(array)], array)
            assert not np.any(found[len(array) :])
            np.testing.assert_array_equal(held[name][mask & (owners == number)], array)
    assert not any(np.any(leaf[~mask]) for leaf in held.values())


def test_a_thousand_clients_of_log_normal_sizes_take_little_more_than_their_records():
    """A fifth more would be allowed; in blocks of their own they took fourteen times as much."""
    drawn = np.random.default_rng(0).lognormal(np.log(100), 1, 1000)
    data = made_up(np.maximum(20, drawn).astype(int))
    shards = stack_clients(data)
    held = sum(leaf.nbytes for leaf in shards.records.values())
    needed = sum(
        mine[name].astype(leaf.dtype).nbytes
        for mine in data
        for name, leaf in shards.records.items()
    )
    assert needed <= held < 1.02 * needed
    assert held < 0.08 * len(data) * shards.capacity * needed / sum(len(c["y"]) for c in data)


def test_clients_of_about_one_size_have_blocks_of_their_own():
    assert stack_clients(made_up((10, 9, 8, 10))).starts is None


def test_programs_follow_sizes_only_by_the_largest_and_the_blocks():
    one, other = (stack_clients(made_up(sizes)) for sizes in (SIZES, (40, 3, 11, 8, 2, 10)))
    shapes = [jax.tree.map(jnp.shape, shards) for shards in (one, other)]
    assert shapes[0] == shapes[1]


BATCHES = dppvi.DPOptimization(num_local_steps=3, sampler=dppvi.PoissonSampling(0.3))


@grid(
    ("method", "schedule"),
    [
        (dppvi.DPOptimization(num_local_steps=2), dppvi.sequential),
        (BATCHES, dppvi.sequential),
        (dppvi.NonPrivate(num_local_steps=2), dppvi.synchronous),
    ],
    quick=[],
)
def test_a_run_is_the_same_to_the_bit_as_with_blocks_of_their_own(method, schedule):
    """Of every method, in one round for all: tests/privacy/test_hostile.py."""
    data = [{name: client[name] for name in ("X", "y")} for client in made_up(SIZES)]
    public = {"client_sizes": SIZES, "schedule": schedule}
    plan = None
    if method.releases != "nothing":
        plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(8.0), num_rounds=2, **public)
    steps = dppvi.pvi(
        logistic_regression,
        None,
        data[0],
        method=method,
        plan=plan,
        secret_keys=dppvi.privacy.SecretKeys(0),
        **public,
    )
    shards = stack_clients(data)
    assert shards.starts is not None
    ends = []
    for each in (shards, in_own_blocks(shards)):
        state = steps.init(jax.random.key(0))
        for _ in range(2):
            state, _ = steps.step(jax.random.key(1), state, each)
        ends.append((state.server, state.clients))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(a, b)


@grid("num_devices", [2, 3, 4], quick=[2])
def test_each_device_gets_its_own_clients_records(num_devices):
    shards = stack_clients(made_up(SIZES))
    apart = placement._apart(shards, num_devices)
    each = -(-len(SIZES) // num_devices)
    blocks = len(apart.records["y"]) // num_devices
    for device in range(num_devices):
        mine = slice(device * each, (device + 1) * each)
        there = Shards(
            {
                name: jnp.asarray(leaf[device * blocks : (device + 1) * blocks])
                for name, leaf in apart.records.items()
            },
            jnp.asarray(apart.num_records[mine]),
            jnp.asarray(apart.starts[mine]),
        )
        for place in range(each):
            number = device * each + place
            found, num_records = there.of_client(place)
            if number >= len(SIZES):
                assert num_records == 0
                assert not any(np.any(leaf) for leaf in found.values())
                continue
            wanted, size = shards.of_client(number)
            assert num_records == size
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
