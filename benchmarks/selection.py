"""How the defaults were chosen: on rows of the training half that no table reports.

    python -m benchmarks selection --seeds 6

Prints every configuration that was tried, in the order of the mean log-likelihood.
"""

import math

import optax

import numpyro_dppvi as dppvi
from benchmarks import adult

ROUNDS = 10
# Clip, local steps, how far noise may carry a coordinate, damping: the choice, and one of the
# four changed at a time; and the choice for the learning rate with other numbers of clients.
CHOICE = (2.5, 3, 1 / 3, 0.4)
CHANGES = ((1.5, 3.5), (1, 5, 10), (0.25, 0.5), (0.25, 0.6, 1.0))
CLIENTS = (1, 3, 50, 200)


def table(seeds: int) -> None:
    """Configurations over 10 rounds under (1, 1e-5)."""
    tried = [CHOICE]
    for place, values in enumerate(CHANGES):
        tried += [(*CHOICE[:place], value, *CHOICE[place + 1 :]) for value in values]
    _print("10 clients", [(10, *configuration) for configuration in tried], seeds)
    for clients in CLIENTS:
        travels = (0.25, 1 / 3, 0.5)
        _print(f"{clients} clients", [(clients, 2.5, 3, t, 0.4) for t in travels], seeds)


def _print(title: str, configurations: list[tuple], seeds: int) -> None:
    lines = []
    for clients, clip_norm, steps, travel, damping in configurations:
        rate = travel / (damping * math.sqrt(clients * ROUNDS * steps))
        scores = [
            adult.fit(
                adult.setting(adult.selection(), clients),
                seed,
                method=dppvi.DPOptimization(clip_norm, steps, optax.adam(rate)),
                budget=dppvi.PrivacyBudget(1.0, 1e-5),
                damping=damping,
                num_rounds=ROUNDS,
            )[1]
            for seed in range(seeds)
        ]
        name = f"clip {clip_norm:g}, {steps} steps, travel {travel:.2f}, damping {damping:g}"
        lines.append((adult.mean_and_error(scores)[0].log_likelihood, adult.row(name, scores)))
    print(f"\nSelection rows, {title}: {len(configurations)} configurations, {seeds} seeds each")
    print(adult.HEADER)
    for _, line in sorted(lines, reverse=True):
        print(line, flush=True)
