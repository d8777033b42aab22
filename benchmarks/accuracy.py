"""Accuracy and held-out log-likelihood on Adult, private and not.

python -m benchmarks accuracy --seeds 5
"""

import jax
import numpy as np
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from benchmarks import adult
from models.logistic_regression import logistic_regression


def private(seeds: int) -> None:
    """Ten clients, (1, 1e-5), untuned defaults, against the paper."""
    where = adult.setting(adult.reported(), 10)
    budget = dppvi.PrivacyBudget(1.0, 1e-5)
    by_round: list[list[adult.Score]] = []
    for seed in range(seeds):
        result, _ = adult.fit(where, seed, budget=budget)
        posteriors = [result.posterior_at(r) for r in (5, 10)]
        key = jax.random.key(1000 + seed)
        by_round.append([adult.score(p.sample(key, (100,))["w"], where.data) for p in posteriors])
    epsilon = result.ledger.spent().max()
    print("\nAdult, 10 clients x 2442 rows, balanced, DPOptimization() with its defaults")
    print(adult.HEADER)
    for index, rounds in enumerate((5, 10)):
        scores = [row[index] for row in by_round]
        note = f"epsilon {epsilon:.4f} at 1e-5" if rounds == 10 else "of the same runs"
        print(adult.row(f"ours, {rounds} rounds, {seeds} seeds", scores, note))
    for name, value in adult.PAPER.items():
        print(f"{'paper, ' + name:<44} {value.accuracy:.4f}            {value.log_likelihood:.4f}")


def non_private(seeds: int) -> None:
    """Partitioned inference without privacy against pooled mean-field VI by NumPyro's SVI."""
    data = adult.reported()
    print("\nWithout privacy: partitioned against pooled mean-field VI")
    print(adult.HEADER)
    print(adult.row("pooled, numpyro SVI with AutoNormal", [pooled_svi(s) for s in range(seeds)]))
    for clients in (1, 10, 200):
        where = adult.setting(data, clients)
        scores = [
            adult.fit(where, s, method=dppvi.NonPrivate(), num_rounds=10)[1] for s in range(seeds)
        ]
        print(adult.row(f"NonPrivate(), {clients} clients, 10 rounds", scores))


def pooled_svi(seed: int) -> adult.Score:
    data = adult.reported()
    guide = AutoNormal(logistic_regression)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, 1500, alpha=0.01))
    svi = SVI(logistic_regression, guide, optimizer, Trace_ELBO(10, vectorize_particles=True))
    arguments = (np.asarray(data.X_train), np.asarray(data.y_train))
    result = svi.run(jax.random.key(seed), 1500, *arguments, progress_bar=False)
    draws = guide.sample_posterior(jax.random.key(1000 + seed), result.params, sample_shape=(100,))
    return adult.score(draws["w"], data)
