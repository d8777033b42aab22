"""Studies in the units that their authors measure in: days, euros, millimetres of mercury."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr
from numpyro import handlers
from numpyro.distributions import constraints

from benchmarks.studies.study import NUM_RECORDS, Array, Study, generator, normal, normals, positive

N = NUM_RECORDS
HOSPITALS, TAXA, SPECIES = 8, 4, 9
NEAREST, FURTHEST = 1.5, 40.0  # what an assay can tell
WIDTH = 100.0  # metres on either side of a line


def rent_share(age: Array, income: Array, share: Array) -> None:
    """The share of income that goes to rent: none, all of it, or a beta in between."""
    none = jax.nn.sigmoid(normal("a", -2, 1.5) + normal("a_age", 0, 0.05) * (age - 45))
    everything = numpyro.sample("everything", dist.Beta(1, 9))
    mean = jax.nn.sigmoid(normal("b") + normal("b_income") * jnp.log(income / 2000))
    precision = numpyro.sample("precision", dist.Gamma(2, 0.2))
    inside = dist.Beta(mean * precision, (1 - mean) * precision)
    some = jnp.log1p(-none) + jnp.where(
        share == 1,
        jnp.log(everything),
        jnp.log1p(-everything) + inside.log_prob(jnp.clip(share, 1e-4, 1 - 1e-4)),
    )
    with numpyro.plate("tenants", len(share)):
        numpyro.factor("share", jnp.where(share == 0, jnp.log(none), some))


class PoissonFromOne(dist.Distribution):
    """A Poisson number that is not zero, as an author writes a distribution."""

    arg_constraints: ClassVar = {"rate": constraints.positive}
    support = constraints.positive_integer

    def __init__(self, rate: Array, *, validate_args: bool | None = None) -> None:
        self.rate = rate
        super().__init__(batch_shape=jnp.shape(rate), validate_args=validate_args)

    def log_prob(self, value: Any) -> Array:
        """The Poisson's, over its chance of not being zero."""
        return dist.Poisson(self.rate).log_prob(value) - jnp.log(-jnp.expm1(-self.rate))


def stays(hospital: Array, age: Array, days: Array) -> None:
    """Days in hospital, of which there is at least one."""
    mean, spread = normal("mean", 0, 2), positive("spread")
    with numpyro.plate("hospitals", HOSPITALS):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
    rate = jnp.exp(effect[hospital] + normal("by_age", 0, 0.1) * (age - 50))
    with numpyro.plate("patients", len(days)):
        numpyro.sample("days", PoissonFromOne(rate), obs=days)


def competing(age: Array, treated: Array, days: Array, cause: Array) -> None:
    """Whichever of two events comes first, or none before the end of the study."""
    with numpyro.plate("causes", 2):
        shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
        a, b = normal("a", 7, 2), normal("b", 0, 0.1)
        effect = normal("effect")
    scale = a + b * (age[:, None] - 65) + effect * treated[:, None]
    log_cumulative = shape * (jnp.log(days)[:, None] - scale)
    log_hazard = jnp.log(shape) + log_cumulative - jnp.log(days)[:, None]
    came = cause[:, None] == jnp.arange(1, 3)
    with numpyro.plate("patients", len(days)):
        each = jnp.where(came, log_hazard, 0.0) - jnp.exp(log_cumulative)
        numpyro.factor("time", each.sum(-1))


def mortality(entered: Array, left: Array, smokes: Array, died: Array) -> None:
    """Gompertz's law by age, of people who enter late and mostly leave alive."""
    level = normal("level", -4, 2) + normal("smoking") * smokes
    slope = numpyro.sample("slope", dist.LogNormal(-2.3, 0.5))
    until = jnp.exp(slope * (left - 65)) - jnp.exp(slope * (entered - 65))
    with numpyro.plate("people", len(died)):
        log_hazard = level + slope * (left - 65)
        numpyro.factor("age", died * log_hazard - jnp.exp(level) / slope * until)


def arsenic(depth: Array, measured: Array) -> None:
    """Concentrations that an assay cuts off at both ends."""
    mean = normal("a", 0, 2) + normal("b", 0, 0.1) * depth
    spread = positive("spread", 2)
    below, above = measured <= NEAREST, measured >= FURTHEST
    z = (jnp.log(measured) - mean) / spread
    with numpyro.plate("wells", len(measured)):
        with handlers.mask(mask=~(below | above)):
            numpyro.sample("measured", dist.LogNormal(mean, spread), obs=measured)
        numpyro.factor("below", jnp.where(below, log_ndtr(z), 0.0))
        numpyro.factor("above", jnp.where(above, log_ndtr(-z), 0.0))


def microbiome(bmi: Array, counts: Array) -> None:
    """Counts of taxa that vary more than multinomial ones, each record with a total of its own."""
    concentration = jnp.exp(normals("a", TAXA, 2) + normals("b", TAXA, 0.2) * (bmi[:, None] - 25))
    with numpyro.plate("samples", len(bmi)):
        whole = dist.DirichletMultinomial(concentration, total_count=counts.sum(-1))
        numpyro.sample("counts", whole, obs=counts)


def response_times(task: Array, ms: Array) -> None:
    """Milliseconds, as the sum of a normal and an exponential number."""
    mean = numpyro.sample("mean", dist.Normal(500, 200).expand([3]).to_event(1))[task]
    spread, tail = positive("spread", 100), positive("tail", 300)
    z = (ms - mean) / spread - spread / tail
    with numpyro.plate("trials", len(ms)):
        late = (mean - ms) / tail + spread**2 / (2 * tail**2)
        numpyro.factor("ms", late + log_ndtr(z) - jnp.log(tail))


def transects(forest: Array, distance: Array) -> None:
    """Distance sampling: the further off the line an animal is, the less often it is seen."""
    reach = jnp.exp(normal("a", 4, 1) + normal("b") * forest)
    with numpyro.plate("sightings", len(distance)):
        seen = dist.TwoSidedTruncatedDistribution(dist.Normal(0.0, reach), low=0.0, high=WIDTH)
        numpyro.sample("distance", seen, obs=distance)


def antibodies(age: Array, positive_test: Array) -> None:
    """A force of infection, by a test that errs both ways."""
    force = numpyro.sample("force", dist.Exponential(50.0))
    sensitivity = numpyro.sample("sensitivity", dist.Beta(92, 8))
    specificity = numpyro.sample("specificity", dist.Beta(97, 3))
    had_it = -jnp.expm1(-force * age)
    probs = had_it * sensitivity + (1 - had_it) * (1 - specificity)
    with numpyro.plate("people", len(age)):
        numpyro.sample("positive_test", dist.Bernoulli(probs=probs), obs=positive_test)


def metabolism(species: Array, grams: Array, log_rate: Array, shared: np.ndarray) -> None:
    """Species that inherit from common ancestors; ``shared`` is their time together."""
    a, b, spread = normal("a", 0, 5), normal("b"), positive("spread")
    drift = positive("drift", 2)
    cov = drift**2 * jnp.asarray(shared)
    effect = numpyro.sample("effect", dist.MultivariateNormal(jnp.zeros(SPECIES), cov))
    with numpyro.plate("animals", len(grams)):
        mean = a + b * jnp.log(grams) + effect[species]
        numpyro.sample("log_rate", dist.Normal(mean, spread), obs=log_rate)


def _not_zero(rng: np.random.Generator, rate: np.ndarray) -> np.ndarray:
    found = rng.poisson(rate)
    while (found == 0).any():
        found = np.where(found == 0, rng.poisson(rate), found)
    return found


def _made_up() -> dict[str, Study]:
    rng = generator(31)
    age, income = rng.integers(18, 80, N).astype(float), np.round(rng.lognormal(7.6, 0.5, N))
    mean = 1 / (1 + np.exp(0.3 + 0.6 * np.log(income / 2000)))
    share = np.clip(rng.beta(9 * mean, 9 * (1 - mean)), 0.001, 0.999)
    kind = rng.random(N)
    share = np.select([kind < 0.15, kind > 0.92], [0.0, 1.0], share)

    hospital = rng.integers(0, HOSPITALS, N)
    effects = 0.6 + 0.3 * rng.normal(size=HOSPITALS)
    days = _not_zero(rng, np.exp(effects[hospital] + 0.012 * (age - 50)))

    old, treated = rng.integers(40, 90, N).astype(float), rng.integers(0, 2, N).astype(float)
    times = np.stack(
        [
            1500 * np.exp(0.4 * treated - 0.04 * (old - 65)) * rng.weibull(1.3, N),
            3000 * np.exp(-0.07 * (old - 65)) * rng.weibull(1.8, N),
            rng.uniform(200, 2500, N),
        ]
    )
    cause = np.array([1, 2, 0])[times.argmin(0)]

    entered, smokes = rng.uniform(50, 75, N), rng.integers(0, 2, N).astype(float)
    level = np.exp(0.6 * smokes - 4)
    died_at = 65 + np.log(
        np.exp(0.09 * (entered - 65)) + 0.09 * rng.exponential(size=N) / level
    ) / (0.09)
    left = np.minimum(died_at, entered + 12)

    depth = rng.uniform(0, 60, N)
    measured = np.exp(1.2 + 0.02 * depth + 0.9 * rng.normal(size=N))

    bmi = rng.normal(26, 4, N)
    mix = np.exp([1.0, 0.5, 0, -0.5] + (bmi[:, None] - 25) * [0.0, 0.05, -0.05, 0.02])
    totals = rng.integers(200, 3000, N)
    counts = np.stack(
        [rng.multinomial(n, rng.dirichlet(a)) for n, a in zip(totals, mix, strict=True)]
    )

    task = rng.integers(0, 3, N)
    ms = 420 + 40 * task + 45 * rng.normal(size=N) + rng.exponential(130, N)

    forest = rng.integers(0, 2, N).astype(float)
    far = np.abs(rng.normal(size=(50, N))) * np.exp(3.5 - 0.4 * forest)
    distance = far[(far < WIDTH).argmax(0), np.arange(N)]

    had_it = 1 - np.exp(-0.008 * age)
    tested = rng.random(N) < 0.92 * had_it + 0.03 * (1 - had_it)

    species, grams = rng.integers(0, SPECIES, N), rng.lognormal(3, 1, N)
    shared = 0.2 + 0.3 * np.eye(SPECIES) + 0.5 * np.kron(np.eye(3), np.ones((3, 3)))
    inherited = np.linalg.cholesky(shared) @ rng.normal(size=SPECIES)
    log_rate = 1.5 + 0.72 * np.log(grams) + inherited[species] + 0.4 * rng.normal(size=N)

    return {
        "rent": Study(rent_share, {"age": age, "income": income, "share": share}),
        "days in hospital": Study(stays, {"hospital": hospital, "age": age, "days": days}),
        "competing risks": Study(
            competing, {"age": old, "treated": treated, "days": times.min(0), "cause": cause}
        ),
        "mortality by age": Study(
            mortality,
            {
                "entered": entered,
                "left": left,
                "smokes": smokes,
                "died": (died_at <= entered + 12).astype(float),
            },
        ),
        "limits of an assay": Study(
            arsenic, {"depth": depth, "measured": np.clip(measured, NEAREST, FURTHEST)}
        ),
        "microbiome": Study(microbiome, {"bmi": bmi, "counts": counts}),
        "response times": Study(response_times, {"task": task, "ms": ms}),
        "distance sampling": Study(transects, {"forest": forest, "distance": distance}),
        "antibodies": Study(antibodies, {"age": age, "positive_test": tested.astype(int)}),
        "metabolism of species": Study(
            metabolism,
            {"species": species, "grams": grams, "log_rate": log_rate},
            {"shared": shared},
        ),
    }


STUDIES = _made_up()
