"""Every method of the paper on its three splits of Adult, beside the paper's own values.

    python -m benchmarks methods --seeds 5

The methods' numbers were chosen on rows that are not reported: see docs/benchmarks.md.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

import numpyro_dppvi as dppvi
from benchmarks import adult


class Entry(NamedTuple):
    """A method, how it is run, and the paper's final values by split.

    Attributes:
        name: What the table calls it.
        method: The method, given the clients' sizes.
        arguments: The other arguments of ``fit``.
        paper: Accuracy and log-likelihood by split.
    """

    name: str
    method: Callable[[Sequence[int]], Any]
    arguments: dict[str, Any]
    paper: tuple[tuple[float, float], ...]


SUMMED = {"schedule": dppvi.synchronous, "trusted_aggregator": True}
"""With a trusted aggregator all clients send at once."""


def _shards(sizes: Sequence[int], rows: int) -> tuple[int, ...]:
    """As many shards of about ``rows`` records as a client can fill."""
    return tuple(max(1, size // rows) for size in sizes)


ENTRIES = (
    Entry(
        "DP optimisation, 10 rounds",
        lambda sizes: dppvi.DPOptimization(),
        {},
        ((0.8382, -0.3494), (0.8411, -0.3430), (0.8398, -0.3453)),
    ),
    Entry(
        "virtual clients, 8 rounds",
        lambda sizes: dppvi.VirtualClients(_shards(sizes, 6), 0.015, 20, optax.adam(0.05)),
        {"damping": 0.15, "num_rounds": 8},
        ((0.8402, -0.3526), (0.8385, -0.3506), (0.8386, -0.3481)),
    ),
    Entry(
        "virtual, trusted aggregator, 15 rounds",
        lambda sizes: dppvi.VirtualClients(_shards(sizes, 12), 0.0075, 20, optax.adam(0.02)),
        {**SUMMED, "damping": 0.3, "num_rounds": 15},
        ((0.8473, -0.3441), (0.8433, -0.3381), (0.8434, -0.3371)),
    ),
    Entry(
        "local averaging, 8 rounds",
        lambda sizes: dppvi.LocalAveraging(400, 1.4, 3, optax.sgd(2e-4)),
        {"schedule": dppvi.synchronous, "damping": 0.7, "num_rounds": 8},
        ((0.8368, -0.3563), (0.8383, -0.3662), (0.8163, -0.3824)),
    ),
    Entry(
        "local averaging, trusted aggregator, 15 rounds",
        lambda sizes: dppvi.LocalAveraging(400, 3.0, 3, optax.sgd(2e-4)),
        {**SUMMED, "damping": 0.5, "num_rounds": 15},
        ((0.8419, -0.3391), (0.8427, -0.3637), (0.8358, -0.3699)),
    ),
    Entry(
        "committee, same prior",
        lambda sizes: dppvi.BayesianCommitteeMachine("same"),
        {},
        ((0.8317, -0.4391), (0.8409, -0.4547), (0.8317, -0.4673)),
    ),
    Entry(
        "committee, split prior",
        lambda sizes: dppvi.BayesianCommitteeMachine("split"),
        {},
        ((0.8336, -0.3711), (0.8225, -0.4025), (0.8356, -0.3690)),
    ),
    Entry(
        "global VI, trusted aggregator, 200 steps",
        lambda sizes: dppvi.GlobalVI(),
        {"trusted_aggregator": True, "num_rounds": 200},
        ((0.8488, -0.3284), (0.8488, -0.3284), (0.8488, -0.3284)),
    ),
)


def table(seeds: int, selection: bool = False) -> None:
    """Accuracy and log-likelihood of each method on each split; (1, 1e-5), 10 clients."""
    data = adult.selection() if selection else adult.reported()
    for index, split in enumerate(adult.SPLITS):
        rows = "selection rows" if selection else "reported rows"
        print(f"\nAdult, 10 clients, (1, 1e-5), {split}, {seeds} seeds, {rows}")
        print(f"{adult.HEADER}   paper")
        where = adult.setting(data, 10, split)
        for entry in ENTRIES:
            scores = [_score(entry, where, seed) for seed in range(seeds)]
            accuracy, log_likelihood = entry.paper[index]
            print(adult.row(entry.name, scores, f"{accuracy:.4f} {log_likelihood:.4f}"), flush=True)


def _score(entry: Entry, where: adult.Setting, seed: int) -> adult.Score:
    method = entry.method(where.partition.sizes)
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    return adult.fit(where, seed, budget=budget, method=method, **entry.arguments)[1]
