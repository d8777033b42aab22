"""How the defaults were chosen: on rows of the training half that no table reports.

    python -m benchmarks selection --seeds 6

Prints every configuration that was tried, best mean log-likelihood first.
"""

import itertools

import optax

import numpyro_dppvi as dppvi
from benchmarks import adult

CLIP_NORMS = (1.5, 2.5, 3.5)
STEPS_AND_RATES = ((1, 0.1), (3, 0.03), (3, 0.05), (3, 0.08), (5, 0.05), (10, 0.02))
DAMPINGS = (0.25, 0.4, 0.6)


def table(seeds: int) -> None:
    """The grid of clip, local steps with learning rate, and damping; 10 rounds, (1, 1e-5)."""
    where = adult.setting(adult.selection(), 10)
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    grid = list(itertools.product(CLIP_NORMS, STEPS_AND_RATES, DAMPINGS))
    lines = []
    for clip_norm, (steps, rate), damping in grid:
        method = dppvi.DPOptimization(clip_norm, steps, optax.adam(rate))
        scores = [
            adult.fit(where, s, method=method, budget=budget, damping=damping)[1]
            for s in range(seeds)
        ]
        name = f"clip {clip_norm}, {steps} steps, Adam {rate}, damping {damping}"
        lines.append((adult.mean_and_error(scores)[0].log_likelihood, adult.row(name, scores)))
    print(f"\nSelection rows: {len(grid)} configurations, {seeds} seeds each")
    print(adult.HEADER)
    for _, line in sorted(lines, reverse=True):
        print(line)
