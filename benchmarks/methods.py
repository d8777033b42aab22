"""Every method of the paper on its three splits of Adult, beside the paper's own values.

    python -m benchmarks methods --seeds 5

The methods' numbers were chosen on rows that are not reported: see docs/benchmarks.md.
"""

from typing import Any, NamedTuple

import optax

import numpyro_dppvi as dppvi
from benchmarks import adult


class Entry(NamedTuple):
    """A method, how it is run, and the paper's final values by split."""

    name: str
    arguments: dict[str, Any]
    paper: tuple[tuple[float, float], ...]


def _summed(method: Any) -> dict[str, Any]:
    """With a trusted aggregator all clients send at once."""
    return {"method": method, "schedule": dppvi.synchronous, "trusted_aggregator": True}


ENTRIES = (
    Entry(
        "DP optimisation, 10 rounds",
        {"method": dppvi.DPOptimization()},
        ((0.8382, -0.3494), (0.8411, -0.3430), (0.8398, -0.3453)),
    ),
    Entry(
        "virtual clients, 15 rounds",
        {
            "method": dppvi.VirtualClients(400, 0.023, 10, optax.adam(0.05)),
            "damping": 0.1,
            "num_rounds": 15,
        },
        ((0.8402, -0.3526), (0.8385, -0.3506), (0.8386, -0.3481)),
    ),
    Entry(
        "virtual, trusted aggregator, 15 rounds",
        {
            **_summed(dppvi.VirtualClients(200, 0.0075, 20, optax.adam(0.02))),
            "damping": 0.3,
            "num_rounds": 15,
        },
        ((0.8473, -0.3441), (0.8433, -0.3381), (0.8434, -0.3371)),
    ),
    Entry(
        "local averaging, 15 rounds",
        {
            "method": dppvi.LocalAveraging(100, 1.0, 10, optax.adam(0.02)),
            "damping": 0.1,
            "num_rounds": 15,
        },
        ((0.8368, -0.3563), (0.8383, -0.3662), (0.8163, -0.3824)),
    ),
    Entry(
        "local averaging, trusted aggregator, 15 rounds",
        {
            **_summed(dppvi.LocalAveraging(100, 2.6, 3, optax.adam(0.05))),
            "damping": 0.1,
            "num_rounds": 15,
        },
        ((0.8419, -0.3391), (0.8427, -0.3637), (0.8358, -0.3699)),
    ),
    Entry(
        "committee, same prior",
        {"method": dppvi.BayesianCommitteeMachine("same")},
        ((0.8317, -0.4391), (0.8409, -0.4547), (0.8317, -0.4673)),
    ),
    Entry(
        "committee, split prior",
        {"method": dppvi.BayesianCommitteeMachine("split")},
        ((0.8336, -0.3711), (0.8225, -0.4025), (0.8356, -0.3690)),
    ),
    Entry(
        "global VI, trusted aggregator, 200 steps",
        {"method": dppvi.GlobalVI(), "trusted_aggregator": True, "num_rounds": 200},
        ((0.8488, -0.3284), (0.8488, -0.3284), (0.8488, -0.3284)),
    ),
)


def table(seeds: int) -> None:
    """Accuracy and log-likelihood of each method on each split; (1, 1e-5), 10 clients."""
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    for index, split in enumerate(adult.SPLITS):
        print(f"\nAdult, 10 clients, (1, 1e-5), {split}, {seeds} seeds")
        print(f"{adult.HEADER}   paper")
        where = adult.setting(adult.reported(), 10, split)
        for entry in ENTRIES:
            scores = [
                adult.fit(where, seed, budget=budget, **entry.arguments)[1] for seed in range(seeds)
            ]
            accuracy, log_likelihood = entry.paper[index]
            print(adult.row(entry.name, scores, f"{accuracy:.4f} {log_likelihood:.4f}"), flush=True)
