"""Coverage and width of posteriors in synthetic studies that no method was tuned on.

python -m benchmarks believe --seeds 16
python -m benchmarks unseen --seeds 200
python -m benchmarks intercepts --seeds 16
python -m benchmarks columns --seeds 3

A cell is a model, clients, a budget and a design of columns. In each study the weights are drawn,
records are made, and every method fits them with its defaults. Printed are the share of studies in
which intervals of 50, 80, 90 and 95 % cover the truth, weights and the spread of outcomes apart;
the median width over that of the posterior of all records without privacy; and the limit: the width
if the whole budget went into one release at the mode, clipped at the average score's length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import norm

import numpyro_dppvi as dppvi
from models.evaluation import selection_split
from models.logistic_regression import logistic_regression
from numpyro_dppvi.datasets import TabularData, load_support2
from numpyro_dppvi.privacy import FullBatch
from numpyro_dppvi.privacy.calibrate import noise_multiplier

LEVELS = (0.5, 0.8, 0.9, 0.95)
DELTA = 1e-5
# Mean and spread of columns in clinical units: age, pressure, a score, rate, a share.
UNITS = ((60.0, 15.0), (120.0, 20.0), (0.0, 1.0), (20.0, 5.0), (0.5, 0.1))
METHODS: dict[str, Callable[[], Any]] = {
    "DPOptimization()": dppvi.DPOptimization,
    "FisherScoring()": dppvi.FisherScoring,
}
# Studies from this number on were never looked at while a method was made.
UNSEEN = 100


def logistic(x: jax.Array, y: jax.Array, width: jax.Array) -> None:
    """Weights, and a binary outcome."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def linear(x: jax.Array, y: jax.Array, width: jax.Array) -> None:
    """Weights, an unknown spread, and a continuous outcome."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 3))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, spread), obs=y)


def poisson(x: jax.Array, y: jax.Array, width: jax.Array) -> None:
    """Weights, and counts."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def survival(x: jax.Array, y: jax.Array, event: jax.Array, width: jax.Array) -> None:
    """Weights, an unknown shape, and times that may be censored; these cannot be drawn."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    shape = numpyro.sample("shape", dist.LogNormal(0, 3))
    with numpyro.plate("records", x.shape[0]):
        gone = jnp.exp(shape * (jnp.log(y) - x @ w))
        density = jnp.log(shape) - jnp.log(y) + jnp.log(gone)
        numpyro.factor("time", jnp.where(event, density, 0.0) - gone)


MODELS = {"logistic": logistic, "linear": linear, "poisson": poisson, "survival": survival}
# The latent beside the weights, and the logarithm of its true value.
OTHERS = {"linear": ("spread", math.log(0.5)), "survival": ("shape", math.log(1.5))}


class Cell(NamedTuple):
    """A kind of study.

    Attributes:
        model: Name of the model.
        sizes: Records of each client.
        epsilon: The budget.
        columns: ``"independent"``, ``"correlated"`` (.7), ``"raw units"``, ``"far"``: every second
            one lies 20 spreads off zero, ``"rare"``: every second one is 1 for a twentieth of the
            records, ``"amounts"``: every second one is nothing for most records and log-normal for
            one in twelve, standardised, ``"collinear"``: the second one repeats the first but for
            a tenth, or ``"rare outcomes"``: independent, and 2 to 3 % of the outcomes are 1.
        num_weights: Weights, the intercept among them.
        misspecified: Whether outcomes have heavier tails than the model: Student's t with 4 degrees
            of freedom, or rates that differ by a gamma factor of variance 1/2.
    """

    model: str
    sizes: tuple[int, ...]
    epsilon: float
    columns: str = "independent"
    num_weights: int = 6
    misspecified: bool = False


GLMS = ("logistic", "linear", "poisson")
CELLS = [
    *(Cell(model, (1000,) * 5, epsilon) for model in GLMS for epsilon in (1.0, 3.0, 10.0)),
    *(Cell(model, (200,) * 5, 3.0) for model in GLMS),
    *(Cell(model, (1000,) * 5, 3.0, "correlated") for model in GLMS),
    *(Cell(model, (1000,) * 5, 3.0, "raw units") for model in GLMS),
    *(Cell(model, (200,) * 5, 3.0, "raw units") for model in GLMS),
    *(Cell(model, (400, 2000, 8000), 2.0, num_weights=3) for model in GLMS),
    *(Cell("logistic", (200,) * 10, epsilon, "far", 15) for epsilon in (3.0, 10.0)),
    Cell("logistic", (1000,) * 10, 3.0, "far", 15),
    *(Cell(model, (1000,) * 5, 0.5) for model in GLMS),
    *(Cell(model, (50, 150, 300, 1000, 3500), 3.0) for model in GLMS),
    *(Cell(model, (1000,) * 5, 3.0, kind) for kind in ("rare", "collinear") for model in GLMS),
    *(Cell(model, (1000,) * 5, 3.0, "amounts") for model in ("logistic", "linear")),
    *(Cell(model, (1000,) * 5, 3.0, misspecified=True) for model in ("linear", "poisson")),
    *(Cell("logistic", (1000,) * 5, epsilon, "rare outcomes") for epsilon in (1.0, 3.0)),
    Cell("logistic", (200,) * 5, 3.0, "rare outcomes"),
    *(Cell("survival", (1000,) * 5, epsilon) for epsilon in (0.5, 1.0, 3.0, 10.0)),
    *(Cell("survival", (1000,) * 5, 3.0, kind) for kind in ("correlated", "rare", "raw units")),
    Cell("survival", (200,) * 5, 3.0),
    Cell("survival", (400, 2000, 8000), 2.0, num_weights=3),
    *(Cell(model, (1000,) * 5, math.inf) for model in MODELS),
    *(Cell(model, (1000,) * 5, math.inf, "raw units") for model in MODELS),
    *(Cell(model, (200,) * 5, math.inf) for model in MODELS),
]


class Study(NamedTuple):
    """One study's data, truth, prior widths and posterior without privacy."""

    data: list[dict[str, np.ndarray]]
    truth: np.ndarray
    widths: np.ndarray
    exact: np.ndarray


def study(cell: Cell, seed: int) -> Study:
    """Draws a study. The posterior without privacy is Laplace's, at its mode."""
    rng = np.random.default_rng([seed, len(cell.sizes), cell.num_weights])
    num_records, num_columns = sum(cell.sizes), cell.num_weights - 1
    correlation = 0.7 if cell.columns == "correlated" else 0.0
    shared = rng.normal(size=(num_records, 1))
    own = rng.normal(size=(num_records, num_columns))
    columns = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    if cell.columns == "rare":
        columns[:, ::2] = columns[:, ::2] > norm.ppf(0.95)
    if cell.columns == "amounts":
        amounts = np.where(columns > norm.ppf(0.92), np.exp(rng.normal(size=columns.shape)), 0.0)
        columns[:, ::2] = ((amounts - amounts.mean(axis=0)) / amounts.std(axis=0))[:, ::2]
    if cell.columns == "collinear":
        columns[:, 1] = columns[:, 0] + 0.1 * columns[:, 1]
    truth = 0.5 * rng.normal(size=cell.num_weights)
    widths = np.full(cell.num_weights, 3.0)
    if cell.columns == "rare outcomes":
        truth[0] = -4.0
    if cell.columns in ("raw units", "far"):
        far = [(20.0 * (column % 2), 1.0) for column in range(num_columns)]
        units = far if cell.columns == "far" else UNITS[:num_columns]
        means, spreads = np.array(units).T
        columns = means + spreads * columns
        truth[1:] /= spreads
        truth[0] -= truth[1:] @ means
        widths[0] = 30.0 if cell.columns == "raw units" else 150.0
    x = np.column_stack([np.ones(num_records), columns]).astype(np.float32)
    eta = x.astype(np.float64) @ truth
    if cell.model == "logistic":
        y = (rng.uniform(size=num_records) < 1 / (1 + np.exp(-eta))).astype(np.int32)
    elif cell.model == "poisson":
        factor = rng.gamma(2, 0.5, size=num_records) if cell.misspecified else 1
        y = rng.poisson(factor * np.exp(eta)).astype(np.int32)
    elif cell.model == "survival":
        # About a third are censored.
        died = np.exp(eta) * rng.weibull(1.5, size=num_records)
        left = 2 * np.exp(np.median(eta)) * rng.exponential(size=num_records)
        y, event = np.minimum(died, left).astype(np.float32), died < left
    else:
        # Of standard deviation 1 both, which is what the model takes for their spread.
        tails = rng.standard_t(4, size=num_records) / math.sqrt(2) if cell.misspecified else None
        y = eta + 0.5 * (rng.normal(size=num_records) if tails is None else tails)
        y = y.astype(np.float32)
    records = {"x": x, "y": y, **({"event": event} if cell.model == "survival" else {})}
    ends = np.cumsum(cell.sizes)
    data = [
        {name: rows[end - size : end] for name, rows in records.items()}
        for size, end in zip(cell.sizes, ends, strict=True)
    ]
    information = _information(cell, records, eta)
    if cell.model in OTHERS:
        truth = np.append(truth, OTHERS[cell.model][1])
    information[np.arange(len(widths)), np.arange(len(widths))] += widths**-2.0
    return Study(data, truth, widths, np.sqrt(np.diag(np.linalg.inv(information))))


def _information(cell: Cell, records: dict[str, np.ndarray], eta: np.ndarray) -> np.ndarray:
    """Expected information of all records at the truth; of censored times, the observed one."""
    x = records["x"].astype(np.float64)
    if cell.model == "survival":
        k = math.exp(OTHERS["survival"][1])
        u, event = k * (np.log(records["y"]) - eta), records["event"]
        # Second derivatives of event (log k + u) - exp(u), with u = k (log y - eta).
        gone = np.exp(u)
        weight, cross = k**2 * gone, k * (event - gone * (1 + u))
        other = -np.sum(u * event - u * gone * (1 + u))
    elif cell.model == "logistic":
        weight = 1 / (2 + np.exp(eta) + np.exp(-eta))
    elif cell.model == "poisson":
        weight = np.exp(eta)
    else:
        weight, cross, other = np.full(len(eta), 4.0), np.zeros(len(eta)), 2 * len(eta)
    found = (x.T * weight) @ x
    if cell.model not in OTHERS:
        return found
    return np.block([[found, (x.T @ cross)[:, None]], [x.T @ cross, np.array([[other]])]])


def posterior(cell: Cell, made: Study, method: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of all base values, weights first."""
    result = dppvi.fit(
        MODELS[cell.model],
        None,
        made.data,
        rng_key=jax.random.key(seed),
        method=method,
        budget=dppvi.PrivacyBudget(cell.epsilon, DELTA),
        model_kwargs={"width": made.widths.astype(np.float32)},
        progress_bar=False,
        insecure_noise_seed=seed,
    )
    family = result.posterior.family
    draws = family.sample(
        jax.random.key(seed), family.coordinates(result.posterior.natural), (4000,)
    )
    names = ["w", *OTHERS.get(cell.model, ())[:1]]
    table = np.column_stack([np.asarray(draws[name]).reshape(4000, -1) for name in names])
    return table.mean(axis=0), table.std(axis=0)


def limit(cell: Cell) -> float:
    """Width over the exact one if all budget went into one release at the mode."""
    size = cell.num_weights + (cell.model in OTHERS)
    total = sum(cell.sizes)
    noise = noise_multiplier(
        dppvi.PrivacyBudget(cell.epsilon, DELTA),
        num_releases=1,
        sampler=FullBatch(),
        num_records=total,
        physical_size=total,
    )
    return math.sqrt(1 + noise**2 * size * len(cell.sizes) / total)


def measured(cell: Cell, method: Any, studies: int, first: int = 0) -> dict[str, Any]:
    """Coverage of weights and of the spread or shape, and median width."""
    errors, widths = [], []
    for seed in range(first, first + studies):
        made = study(cell, seed)
        mean, std = posterior(cell, made, method, seed)
        errors.append((mean - made.truth) / std)
        widths.append(std / made.exact)
    errors, widths = np.array(errors), np.array(widths)
    bounds = norm.ppf(0.5 + np.array(LEVELS) / 2)
    weights = np.abs(errors[:, : cell.num_weights])
    spread = np.abs(errors[:, cell.num_weights :])
    return {
        "weights": [float(np.mean(weights < bound)) for bound in bounds],
        "spread": [float(np.mean(spread < bound)) for bound in bounds] if spread.size else [],
        "width": float(np.median(widths)),
        "worst width": float(np.max(np.median(widths, axis=1))),
    }


def rows(
    studies: int,
    first: int = 0,
    cells: Sequence[Cell] = CELLS,
    methods: Sequence[str] = tuple(METHODS),
) -> Iterator[str]:
    """The table, line by line."""
    yield (
        "| study | epsilon | columns | method | 50/80/90/95 % of weights | "
        "of the spread or shape | width, worst of a study | limit |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for cell in cells:
        for name in methods:
            found = measured(cell, METHODS[name](), studies, first)
            sizes = "+".join(map(str, cell.sizes))
            if len(set(cell.sizes)) == 1:
                sizes = f"{len(cell.sizes)} x {cell.sizes[0]}"
            model = cell.model + " with far outcomes" * cell.misspecified
            shares = [" ".join(f"{x:.2f}" for x in found[of]) for of in ("weights", "spread")]
            yield (
                f"| {model}, {sizes} | {cell.epsilon:g} | {cell.columns} | {name} | "
                f"{shares[0]} | {shares[1]} | {found['width']:.2f}, {found['worst width']:.1f} | "
                f"{limit(cell):.2f} |"
            )


def table(studies: int) -> None:
    """Prints the table."""
    print("\nCoverage and width in synthetic studies")
    for line in rows(studies):
        print(line, flush=True)


def unseen(studies: int) -> None:
    """Prints the table for studies that nobody looked at, of the method that ``fit`` takes."""
    # Equal clients with 1000 records each first.
    usual = [cell for cell in CELLS if cell.sizes == (1000,) * 5 and 1 <= cell.epsilon <= 10]
    plain = [cell for cell in usual if cell.columns == "independent" and not cell.misspecified]
    print(f"\nCoverage and width in studies {UNSEEN} to {UNSEEN + studies - 1}")
    cells = [*plain, *(cell for cell in CELLS if cell not in plain)]
    for line in rows(studies, UNSEEN, cells, ("FisherScoring()",)):
        print(line, flush=True)


def intercepts(studies: int) -> None:
    """Prints how well the intercept is covered by itself, which the other weights outnumber."""
    first = 400
    print(f"\nIntercepts and other weights, 5 x 1000, studies {first} to {first + studies - 1}")
    print("| model | epsilon | 90 %, error (sd), width of the intercept | of the others |")
    print("| --- | --- | --- | --- |")
    for model, epsilon in ((model, epsilon) for model in GLMS for epsilon in (1.0, 3.0)):
        cell, errors, widths = Cell(model, (1000,) * 5, epsilon), [], []
        for seed in range(first, first + studies):
            made = study(cell, seed)
            mean, std = posterior(cell, made, dppvi.FisherScoring(), seed)
            errors.append(((mean - made.truth) / std)[: cell.num_weights])
            widths.append((std / made.exact)[: cell.num_weights])
        parts = [(np.array(errors)[:, of], np.array(widths)[:, of]) for of in (0, slice(1, None))]
        shown = [
            f"{np.mean(np.abs(error) < norm.ppf(0.95)):.2f}, {np.sqrt(np.mean(error**2)):.1f}, "
            f"{np.median(width):.2f}"
            for error, width in parts
        ]
        print(f"| {model} | {epsilon:g} | {' | '.join(shown)} |", flush=True)


def columns(seeds: int) -> None:
    """Prints held-out log predictive density on random columns of SUPPORT2, ten clients."""
    whole = selection_split(load_support2())
    num_columns = whole.X_train.shape[1]
    draws = [np.random.default_rng(n).choice(num_columns - 1, 11, replace=False) for n in range(4)]
    kept = [np.append(0, 1 + drawn) for drawn in draws] + [np.arange(num_columns)]
    print("\nSUPPORT2, ten clients, mean held-out log predictive density")
    print("| columns | epsilon | " + " | ".join(METHODS) + " |\n| --- | --- | --- | --- |")
    for number, picked in enumerate(kept):
        data = whole._replace(X_train=whole.X_train[:, picked], X_test=whole.X_test[:, picked])
        name = f"draw {number}" if number < len(draws) else "all"
        for epsilon in (1.0, 3.0, 10.0):
            scores = [
                np.mean([_held_out(data, make(), epsilon, seed) for seed in range(seeds)])
                for make in METHODS.values()
            ]
            print(f"| {name} | {epsilon:g} | " + " | ".join(f"{x:.4f}" for x in scores) + " |")


def _held_out(data: TabularData, method: Any, epsilon: float, seed: int) -> float:
    result = dppvi.fit(
        logistic_regression,
        None,
        {"X": data.X_train, "y": data.y_train},
        clients=10,
        rng_key=jax.random.key(seed),
        method=method,
        budget=dppvi.PrivacyBudget(epsilon, DELTA),
        progress_bar=False,
        insecure_noise_seed=seed,
    )
    weights = np.asarray(result.posterior.sample(jax.random.key(1), (400,))["w"])
    prob = np.mean(1 / (1 + np.exp(-data.X_test @ weights.T)), axis=1)
    return float(np.mean(np.where(data.y_test == 1, np.log(prob), np.log1p(-prob))))
