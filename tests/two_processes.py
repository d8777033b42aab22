"""One process of a run of two on loopback: python -m tests.two_processes ADDRESS NUMBER SEED.

Writes a line of JSON with what the run came to, and on how many devices it was.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import jax
import numpy as np

import numpyro_dppvi as dppvi

ADDRESS, NUMBER, SEED = sys.argv[1:]
if ADDRESS != "alone":  # before anything is computed, keys included
    jax.distributed.initialize(ADDRESS, num_processes=2, process_id=int(NUMBER))

from tests import test_client  # noqa: E402


def came_to(noise_seed, **settings):
    """Expected statistics after a fit."""
    result = dppvi.fit(
        test_client.logistic,
        None,
        test_client.data(),
        rng_key=test_client.KEY,
        method=dppvi.VirtualClients(3, 0.1, num_local_steps=2),
        budget=dppvi.PrivacyBudget(4.0),
        num_rounds=2,
        insecure_noise_seed=noise_seed,
        progress_bar=False,
        **settings,
    )
    leaves = jax.tree.leaves(result.state.natural)
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).tolist()


def refused(**settings):
    """What is said to a run that two processes cannot share."""
    try:
        came_to(0, **settings)
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    seed = None if SEED == "none" else int(SEED)
    found = {
        "processes": jax.process_count(),
        "devices": len(jax.devices()),
        "synchronous": came_to(seed, schedule=dppvi.synchronous),
        "sequential": came_to(seed),
        "checkpoint": refused(checkpoint="run.npz") if ADDRESS != "alone" else None,
    }
    sys.stdout.write(json.dumps(found))
