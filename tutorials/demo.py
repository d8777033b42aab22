"""Fits a private Bayesian logistic regression to Adult over ten clients, and shows the result.

    python -m tutorials.demo [FOLDER]

Ten clients hold 2 442 records each. Together they learn who earns more than 50 000 dollars, each
under its own (1, 1e-5) budget, with the library's defaults. The other half of Adult plays the
public: its rows score the posteriors that were released, one a round.
"""

import sys
import time
from pathlib import Path
from typing import Any

import arviz as az
import jax
import numpy as np

import numpyro_dppvi as dppvi
from models.evaluation import held_out
from models.logistic_regression import logistic_regression
from numpyro_dppvi import plots
from numpyro_dppvi.datasets import TabularData, load_adult

NUM_CLIENTS, CLIENT_SIZE, NUM_ROUNDS = 10, 2442, 10
# Heikkilä et al. (2023), Figure 2a: DP optimisation after 20 rounds, mean of 5 seeds.
PAPER = {"accuracy": 0.8382, "log-likelihood": -0.3494}


def scores(posterior: dppvi.posterior.Posterior, data: TabularData) -> tuple[float, float]:
    """Accuracy and mean log-likelihood on public rows, from 100 draws as in the paper."""
    draws = posterior.sample(jax.random.key(1), (100,))["w"]
    accuracy, log_likelihood = held_out(draws, data.X_test, data.y_test)
    return float(accuracy), float(log_likelihood)


def main(folder: Path) -> list[tuple[float, float]]:
    """Runs the demonstration and writes its files to ``folder``; returns each round's scores."""
    method = dppvi.DPOptimization()
    budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
    sizes = [CLIENT_SIZE] * NUM_CLIENTS
    print(dppvi.plan_privacy(method, budget, num_rounds=NUM_ROUNDS, client_sizes=sizes))

    print("\nReading Adult (48 842 rows; half for the clients, half public)", flush=True)
    data = load_adult()
    records = {"X": data.X_train, "y": data.y_train}
    clients = dppvi.partition(jax.random.key(0), data.y_train, NUM_CLIENTS)

    start = time.perf_counter()
    result = dppvi.fit(
        logistic_regression,
        None,
        records,
        rng_key=jax.random.key(0),
        clients=clients,
        method=method,
        budget=budget,
        num_rounds=NUM_ROUNDS,
    )
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s, compilation included. {result.status}")

    baseline = dppvi.fit(
        logistic_regression,
        None,
        records,
        rng_key=jax.random.key(0),
        clients=clients,
        method=dppvi.NonPrivate(),
        progress_bar=False,
    )
    rounds = [scores(result.posterior_at(r), data) for r in range(1, NUM_ROUNDS + 1)]
    non_private = dict(zip(PAPER, scores(baseline.posterior, data), strict=True))
    print_table(rounds, non_private, float(1 - data.y_test.mean()))
    print(f"\n{result.privacy_statement()}\n")
    write_files(folder, result, data, rounds, non_private)
    return rounds


def print_table(
    rounds: list[tuple[float, float]], non_private: dict[str, float], majority: float
) -> None:
    """The released posteriors' scores, and what to hold them against."""
    print(f"\n{'on public rows':<42} {'accuracy':>9} {'log-likelihood':>15}")
    for number, (accuracy, log_likelihood) in enumerate(rounds, start=1):
        print(f"{f'  released after round {number}':<42} {accuracy:>9.4f} {log_likelihood:>15.4f}")
    for name, row in (
        ("without privacy, same clients", non_private),
        ("the paper, 20 rounds, mean of 5 seeds", PAPER),
    ):
        print(f"{name:<42} {row['accuracy']:>9.4f} {row['log-likelihood']:>15.4f}")
    print(f"{'always the larger class':<42} {majority:>9.4f}")


def write_files(
    folder: Path,
    result: dppvi.run.FitResult,
    data: TabularData,
    rounds: list[tuple[float, float]],
    non_private: dict[str, float],
) -> None:
    """The posterior for ArviZ, and two pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(data.feature_names)
    exported = result.posterior.to_arviz(dims={"w": ["feature"]}, coords={"feature": names})
    exported.to_netcdf(str(folder / "posterior.nc"))

    references = {
        name: {"without privacy": non_private[name], "the paper, 20 rounds": PAPER[name]}
        for name in PAPER
    }
    by_round = dict(zip(PAPER, zip(*rounds, strict=True), strict=True))
    figure = plots.convergence(result, by_round, references)
    figure.savefig(folder / "convergence.png", dpi=150)

    mean = np.asarray(result.posterior.mean["w"])
    largest = [names[i] for i in np.argsort(-np.abs(mean))[:10]]
    save_forest(exported, largest, folder / "weights.png")
    print(f"Written: {folder}/posterior.nc (arviz.from_netcdf), convergence.png, weights.png")


def save_forest(exported: Any, features: list[str], path: Path) -> None:
    """ArviZ's forest plot of some weights, with either of ArviZ's plotting interfaces."""
    old = az.__version__.startswith("0.")
    options = {"combined": True} if old else {"combined": True, "labels": ["feature"]}
    forest = az.plot_forest(exported, var_names=["w"], coords={"feature": features}, **options)
    if not old:
        forest.savefig(path)
        return
    axis = forest[0]
    axis.set(
        title="the ten largest weights", xlabel="posterior median, quartiles and 94 % interval"
    )
    axis.set_yticklabels([text.get_text().strip("w[]") for text in axis.get_yticklabels()])
    axis.axvline(0, color="grey", linewidth=0.8, zorder=0)
    axis.figure.set_size_inches(7, 4)
    axis.figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("demo-output"))
