"""Runs over several devices beside the same on one: python -m tests.forced_devices 2 virtual ...

For tests, in a process of its own, because the number of devices is fixed when JAX starts. Writes
a line of JSON: by run, the largest difference of each array relative to its largest entry, and on
how many devices clients' private factors are.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={sys.argv[1]}"
)

import jax
import numpy as np

import numpyro_dppvi as dppvi
from numpyro_dppvi.records import shards as layout
from numpyro_dppvi.run import fitting, loop
from tests import test_client

END_TO_END = ", end to end"


def in_pairs(round_number, num_clients):
    """Two groups of two of the three clients, who are not on one device."""
    del num_clients
    return np.array([[2, 0], [1, 2]]) if round_number % 2 else np.array([[0, 1], [2, 1]])


def compared(name):
    """The most by which a run on all devices differs from one on the first.

    The latter's records are in blocks; the former's in blocks and end to end, or only so.
    """
    end_to_end = name.endswith(END_TO_END)
    run = dict(test_client.RUNS[name.removesuffix(END_TO_END)])
    run["schedule"] = dppvi.synchronous if run.get("trusted_aggregator") else in_pairs
    _, steps = test_client.prepared(**run)
    one = dppvi.records.stack_clients(test_client.data())
    with mock.patch.object(layout, "_WORTH_CLOSING_UP", 2):  # end to end, which saves nothing here
        close = dppvi.records.stack_clients(test_client.data())
    assert one.starts is None
    assert close.starts is not None
    ends = []
    layouts = (close,) if end_to_end else (one, close)
    for shards in (one, *map(dppvi.records.spread, layouts)):
        state, infos = steps.init(test_client.KEY), []
        for _ in range(test_client.NUM_ROUNDS):
            state, info = steps.step(test_client.KEY, state, shards)
            infos.append(info)
        ends.append((state.server, state.clients, infos))
    private = jax.tree.leaves(ends[1][1].private)
    used = len(private[0].sharding.device_set) if private else 0
    alone, *spread = map(jax.tree.leaves, ends)
    return max(max(map(difference, alone, end)) for end in spread), used


def resumed(path):
    """By how much a run that goes on from a checkpoint on one device differs from one on several.

    The checkpoint is of a run over all devices that was broken off in its second round.
    """
    settings = {
        "rng_key": test_client.KEY,
        "method": dppvi.VirtualClients(3, 0.1, num_local_steps=2),
        "budget": dppvi.PrivacyBudget(4.0),
        "schedule": dppvi.synchronous,
        "num_rounds": 3,
        "insecure_noise_seed": 7,
        "progress_bar": False,
    }

    def fitted(least, **more):
        with mock.patch.object(fitting, "_WORTH_SPREADING", least):
            result = dppvi.fit(test_client.logistic, None, test_client.data(), **settings, **more)
        return jax.tree.leaves(result.state.natural)

    rows = [mock.DEFAULT, RuntimeError("broken off")]
    broken = mock.patch.object(loop, "row", wraps=loop.row, side_effect=rows)
    with broken, contextlib.suppress(RuntimeError):
        fitted(0, checkpoint=path)
    return max(map(difference, fitted(0), fitted(10**12, checkpoint=path))), Path(path).is_file()


def difference(one, other):
    """Relative to the largest entry; what stands after the last client is left out."""
    one, other = np.asarray(one), np.asarray(other)
    other = other[: len(one)] if one.ndim else other
    equal = one == other  # some numbers are infinite
    apart = np.abs(np.where(equal, 0, one) - np.where(equal, 0, other))
    largest = np.max(np.abs(one[np.isfinite(one)]), initial=1e-30)
    return float(np.max(apart, initial=0) / largest)


if __name__ == "__main__":
    with jax.enable_x64(True), tempfile.TemporaryDirectory() as folder:
        found = {
            name: resumed(f"{folder}/run.npz") if name == "resumed" else compared(name)
            for name in sys.argv[2:]
        }
    sys.stdout.write(json.dumps(found))
