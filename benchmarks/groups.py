"""Coverage and width of a hierarchy's parts in synthetic studies that no method was tuned on.

python -m benchmarks groups --seeds 16

Logistic regressions with an intercept for each group, eight in most studies, written centred:
effects a ~ Normal(mu, tau) under mu ~ Normal(0, 2) and tau ~ HalfNormal(1), and two weights. In
each study the effects are drawn around -.5 with spread .7. Mean, spread, effects and weights are
shown apart. In some studies the same is written as an intercept mu beside effects about zero, of
which no record tells one from the other; shown are then mu and each sum of it and an effect. In
others effects are drawn decentred, as mu + tau * z.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.stats import norm

import numpyro_dppvi as dppvi
from benchmarks.believe import DELTA, LEVELS

NUM_WEIGHTS = 2
MEAN, SPREAD = -0.5, 0.7
PARTS = ("mu", "tau", "effects", "w")


def hierarchy(x: jax.Array, group: jax.Array, y: jax.Array, num_groups: int) -> None:
    """A binary outcome, weights, and intercepts of groups."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_WEIGHTS]).to_event(1))
    with numpyro.plate("groups", num_groups):
        effects = numpyro.sample("effects", dist.Normal(mu, tau))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=effects[group] + x @ w), obs=y)


def intercept(x: jax.Array, group: jax.Array, y: jax.Array, num_groups: int) -> None:
    """The same, written as an intercept beside effects about zero."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_WEIGHTS]).to_event(1))
    with numpyro.plate("groups", num_groups):
        beside = numpyro.sample("beside", dist.Normal(0, tau))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=mu + beside[group] + x @ w), obs=y)


def decentred(x: jax.Array, group: jax.Array, y: jax.Array, num_groups: int) -> None:
    """The same, with effects drawn apart from their mean and spread."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([NUM_WEIGHTS]).to_event(1))
    with numpyro.plate("groups", num_groups):
        z = numpyro.sample("z", dist.Normal(0, 1))
    effects = mu + tau * z
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=effects[group] + x @ w), obs=y)


class Cell(NamedTuple):
    """A kind of study.

    Attributes:
        sizes: Records of each client.
        epsilon: The budget.
        apart: Whether each client is a group of its own; otherwise all clients have all groups.
        schedule: Who is visited when; ``None`` for the default, one client after the other.
        model: How it is written.
        num_groups: How many groups there are.
        uneven: Whether groups' sizes differ: they are in proportion to lognormal draws.
        between: Whether the second column is the same for all records of a group.
    """

    sizes: tuple[int, ...]
    epsilon: float
    apart: bool = False
    schedule: Callable[[int, int], np.ndarray] | None = None
    model: Callable[..., None] = hierarchy
    num_groups: int = 8
    uneven: bool = False
    between: bool = False


CELLS = (
    *(Cell((1000,) * 5, epsilon) for epsilon in (1.0, 3.0, 10.0, math.inf)),
    *(Cell((200,) * 5, epsilon) for epsilon in (3.0, math.inf)),
    Cell((400, 2000, 8000), 2.0),
    *(Cell((1000,) * 5, epsilon, model=intercept) for epsilon in (1.0, 3.0, 10.0, math.inf)),
    Cell((200,) * 5, 3.0, model=intercept),
    *(Cell((1000,) * 5, epsilon, model=decentred) for epsilon in (1.0, 3.0, 10.0, math.inf)),
    Cell((200,) * 5, 3.0, model=decentred),
    *(Cell((500,) * 8, epsilon, True) for epsilon in (1.0, 3.0, 10.0, math.inf)),
    Cell((200, 300, 400, 500, 600, 800, 1000, 1200), 3.0, True),
    *(Cell((500,) * 8, epsilon, True, dppvi.synchronous) for epsilon in (1.0, 3.0, math.inf)),
    *(
        Cell((1000,) * 5, epsilon, num_groups=num_groups)
        for num_groups in (30, 60)
        for epsilon in (1.0, 3.0, 10.0)
    ),
    *(Cell((1000,) * 5, epsilon, num_groups=30, uneven=True) for epsilon in (1.0, 3.0)),
    Cell((200,) * 5, 3.0, num_groups=30),
    Cell((1000,) * 5, 3.0, num_groups=30, model=decentred),
    *(Cell((1000,) * 5, epsilon, between=True) for epsilon in (3.0, 10.0, math.inf)),
    Cell((1000,) * 5, 3.0, num_groups=30, between=True),
)


class Study(NamedTuple):
    """One study's data, and by part its true base values and the deviations without privacy."""

    data: list[dict[str, np.ndarray]]
    truth: dict[str, np.ndarray]
    exact: dict[str, np.ndarray]


def study(cell: Cell, seed: int) -> Study:
    """Draws a study; the deviations without privacy are those of the information at the truth."""
    num_groups = cell.num_groups
    rng = np.random.default_rng([seed, len(cell.sizes), num_groups])
    num_records, client = sum(cell.sizes), np.repeat(np.arange(len(cell.sizes)), cell.sizes)
    x = rng.normal(size=(num_records, NUM_WEIGHTS))
    group = client if cell.apart else rng.integers(num_groups, size=num_records)
    if cell.uneven:
        sizes = rng.lognormal(size=num_groups)
        group = rng.choice(num_groups, size=num_records, p=sizes / sizes.sum())
    if cell.between:
        x[:, 1] = rng.normal(size=num_groups)[group]
    effects, w = MEAN + SPREAD * rng.normal(size=num_groups), 0.5 * rng.normal(size=NUM_WEIGHTS)
    chance = 1 / (1 + np.exp(-effects[group] - x @ w))
    y = rng.uniform(size=num_records) < chance
    # Rows: what records respond to, the effects and weights. The hierarchy's prior ties effects to
    # mu, and says of log tau what eight deviations and HalfNormal's density tell.
    rows = np.column_stack([np.eye(num_groups)[group], x])
    records = (rows.T * (chance * (1 - chance))) @ rows
    effect, weight = np.arange(num_groups), num_groups + np.arange(NUM_WEIGHTS)
    mu, tau = num_groups + NUM_WEIGHTS, num_groups + NUM_WEIGHTS + 1
    information = np.zeros((tau + 1, tau + 1))
    information[:mu, :mu] = records
    information[effect, effect] += SPREAD**-2
    information[weight, weight] += 1
    information[mu, effect] = information[effect, mu] = -(SPREAD**-2)
    information[mu, mu] = num_groups * SPREAD**-2 + 0.25
    information[tau, tau] = 2 * num_groups + 2 * SPREAD**2
    std = np.sqrt(np.diag(np.linalg.inv(information)))
    return Study(
        [
            {
                "x": x[client == number].astype(np.float32),
                "group": group[client == number].astype(np.int32),
                "y": y[client == number].astype(np.int32),
            }
            for number in range(len(cell.sizes))
        ],
        {
            "mu": np.array([MEAN]),
            "tau": np.array([math.log(SPREAD)]),
            "effects": effects,
            "w": w,
        },
        {"mu": std[[mu]], "tau": std[[tau]], "effects": std[effect], "w": std[weight]},
    )


def posterior(cell: Cell, made: Study, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Means and standard deviations of base values (log tau) by part, with all defaults."""
    result = dppvi.fit(
        cell.model,
        None,
        made.data,
        model_kwargs={"num_groups": cell.num_groups},
        rng_key=jax.random.key(seed),
        method=dppvi.FisherScoring(),
        schedule=cell.schedule,
        budget=dppvi.PrivacyBudget(cell.epsilon, DELTA),
        progress_bar=False,
        insecure_noise_seed=seed,
    )
    draws = dict(result.posterior.sample(jax.random.key(seed), (4000,)))
    if cell.model is intercept:
        draws["effects"] = draws["mu"][:, None] + draws["beside"]
    if cell.model is decentred:
        draws["effects"] = draws["mu"][:, None] + draws["tau"][:, None] * draws["z"]
    draws["tau"] = jnp.log(draws["tau"])
    found = {}
    for part in PARTS:
        table = np.asarray(draws[part], np.float64).reshape(4000, -1)
        found[part] = table.mean(axis=0), table.std(axis=0)
    return found


def rows(studies: int) -> Iterator[str]:
    """The table, line by line."""
    columns = " | ".join(f"{part}: 50/80/90/95 %, width" for part in PARTS)
    yield f"| clients | groups | epsilon | {columns} |"
    yield "| --- " * (3 + len(PARTS)) + "|"
    bounds = norm.ppf(0.5 + np.array(LEVELS) / 2)
    for cell in CELLS:
        errors: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        widths: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
        for seed in range(studies):
            made = study(cell, seed)
            for part, (mean, std) in posterior(cell, made, seed).items():
                errors[part].append((mean - made.truth[part]) / std)
                widths[part].append(std / made.exact[part])
        said = []
        for part in PARTS:
            shares = [np.mean(np.abs(errors[part]) < bound) for bound in bounds]
            covered = " ".join(f"{share:.2f}" for share in shares)
            said.append(f"{covered}, {np.median(widths[part]):.2f}")
        sizes = "+".join(map(str, cell.sizes))
        if len(set(cell.sizes)) == 1:
            sizes = f"{len(cell.sizes)} x {cell.sizes[0]}"
        groups = "one a client" if cell.apart else "in all clients"
        groups += f", {cell.num_groups} of them" if cell.num_groups != 8 else ""
        groups += ", of all sizes" if cell.uneven else ""
        groups += ", a column by group" if cell.between else ""
        groups += ", synchronous" if cell.schedule else ""
        groups += ", an intercept beside" if cell.model is intercept else ""
        groups += ", decentred" if cell.model is decentred else ""
        yield f"| {sizes} | {groups} | {cell.epsilon:g} | " + " | ".join(said) + " |"


def table(studies: int) -> None:
    """Prints the table."""
    print("\nCoverage and width in hierarchies")
    for line in rows(studies):
        print(line, flush=True)
