"""Regressions of many kinds: raw and standard units, curves, outcomes of every type."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential

from benchmarks.studies.study import (
    NUM_RECORDS,
    Array,
    Study,
    columns,
    generator,
    normal,
    normals,
    positive,
    sigmoid,
)

N = NUM_RECORDS


def child_scores(iq: Array, school: Array, score: Array) -> None:
    """Children's test scores on the mother's IQ and schooling, standardised in the data."""
    a, b = normal("a", scale=2), normals("b", 2)
    mean, spread = a + b[0] * iq + b[1] * school, positive("spread")
    with numpyro.plate("children", len(iq)):
        numpyro.sample("score", dist.Normal(mean, spread), obs=score)


def child_scores_raw(iq: Array, school: Array, score: Array) -> None:
    """The same in points, with an interaction and wide priors."""
    a, b = normal("a", 80, 30), normals("b", 3, jnp.array([2.0, 30.0, 2.0]))
    mean = a + b[0] * (iq - 100) + b[1] * school + b[2] * (iq - 100) * school
    spread = positive("spread", 30)
    with numpyro.plate("children", len(iq)):
        numpyro.sample("score", dist.Normal(mean, spread), obs=score)


def earnings(height: Array, male: Array, earn: Array) -> None:
    """Log-normal earnings on height and sex."""
    a, b = normal("a", 10, 2), normals("b", 2)
    spread = positive("spread")
    mean = a + b[0] * height + b[1] * male
    with numpyro.plate("people", len(earn)):
        numpyro.sample("earn", dist.LogNormal(mean, spread), obs=earn)


def wells(distance: Array, arsenic: Array, switched: Array) -> None:
    """Whether a household switches wells."""
    a, b = normal("a"), normals("b", 3)
    logits = a + b[0] * distance + b[1] * arsenic + b[2] * distance * arsenic
    with numpyro.plate("households", len(switched)):
        numpyro.sample("switched", dist.Bernoulli(logits=logits), obs=switched)


def vote_probit(X: Array, vote: Array) -> None:
    """A probit regression."""
    probs = jax.scipy.special.ndtr(X @ normals("b", X.shape[1]))
    numpyro.sample("vote", dist.Bernoulli(probs=probs), obs=vote)


def toxicity(dose: Array, dead: Array) -> None:
    """Complementary log-log link."""
    rate = jnp.exp(normal("a") + normal("b") * dose)
    numpyro.sample("dead", dist.Bernoulli(probs=-jnp.expm1(-rate)), obs=dead)


def putting(distance: Array, tries: Array, made: Array) -> None:
    """Golf: the angle of a putt must fall within the hole."""
    spread = positive("spread", 0.1)
    angle = jnp.arcsin(0.16 / distance)
    probs = 2 * jax.scipy.special.ndtr(angle / spread) - 1
    numpyro.sample("made", dist.Binomial(tries, jnp.clip(probs, 1e-6, 1 - 1e-6)), obs=made)


def bird_counts(year: Array, count: Array) -> None:
    """Counts on a cubic of time."""
    a, b = normal("a", 3, 1), normals("b", 3)
    rate = jnp.exp(a + b[0] * year + b[1] * year**2 + b[2] * year**3)
    with numpyro.plate("years", len(year)):
        numpyro.sample("count", dist.Poisson(rate), obs=count)


def roaches(X: Array, traps: Array, count: Array) -> None:
    """Overdispersed counts with an exposure."""
    a, b = normal("a"), normals("b", X.shape[1])
    shape = numpyro.sample("shape", dist.Gamma(2, 1))
    mean = traps * jnp.exp(a + X @ b)
    with numpyro.plate("flats", len(count)):
        numpyro.sample("count", dist.NegativeBinomial2(mean, shape), obs=count)


def doctor_visits(X: Array, visits: Array) -> None:
    """Counts with NumPyro's zero inflation."""
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    rate = jnp.exp(normal("a") + X @ normals("b", X.shape[1]))
    with numpyro.plate("people", len(visits)):
        numpyro.sample("visits", dist.ZeroInflatedPoisson(gate, rate), obs=visits)


def insurance_claims(X: Array, claim: Array) -> None:
    """A hurdle: whether there is a claim, and a gamma of its size."""
    happens = dist.Bernoulli(logits=normal("a") + X @ normals("b", X.shape[1]))
    shape, mean = positive("shape", 3), jnp.exp(normal("c"))
    with numpyro.plate("policies", len(claim)):
        numpyro.sample("any", happens, obs=(claim > 0).astype(int))
        with numpyro.handlers.mask(mask=claim > 0):
            size = dist.Gamma(shape, shape / mean)
            numpyro.sample("size", size, obs=jnp.where(claim > 0, claim, 1.0))


def proportions(X: Array, share: Array) -> None:
    """Beta regression."""
    mean = jax.nn.sigmoid(normal("a") + X @ normals("b", X.shape[1]))
    precision = numpyro.sample("precision", dist.Gamma(4, 0.2))
    numpyro.sample("share", dist.Beta(mean * precision, (1 - mean) * precision), obs=share)


def robust(X: Array, y: Array) -> None:
    """Student's t with unknown degrees of freedom."""
    freedom = numpyro.sample("freedom", dist.Gamma(2, 0.1))
    mean = X @ normals("b", X.shape[1])
    spread = positive("spread")
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(1 + freedom, mean, spread), obs=y)


def median(X: Array, y: Array) -> None:
    """Quantile regression at the upper quartile."""
    mean = normal("a") + X @ normals("b", X.shape[1])
    fn = dist.AsymmetricLaplaceQuantile(mean, positive("spread"), 0.75)
    numpyro.sample("y", fn, obs=y)


def satisfaction(X: Array, grade: Array) -> None:
    """Ordered logistic regression."""
    increasing = dist.transforms.OrderedTransform()
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), increasing),
    )
    numpyro.sample("grade", dist.OrderedLogistic(X @ normals("b", X.shape[1]), cuts), obs=grade)


def party(X: Array, choice: Array) -> None:
    """Multinomial logit, the first party the reference."""
    with numpyro.plate("parties", 2):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), X @ b.T], axis=1)
    with numpyro.plate("voters", X.shape[0]):
        numpyro.sample("choice", dist.Categorical(logits=logits), obs=choice)


def travel(options: Array, chosen: Array) -> None:
    """Conditional logit: a record is a choice among four options, each with covariates."""
    utility = options @ normals("taste", options.shape[-1])
    numpyro.sample("chosen", dist.Categorical(logits=utility), obs=chosen)


def sea_cows(age: Array, length: Array) -> None:
    """A growth curve that levels off."""
    top, drop = normal("top", 2.5, 1), positive("drop", 2)
    rate = numpyro.sample("rate", dist.Uniform(0.3, 1.0))
    spread = positive("spread")
    with numpyro.plate("animals", len(age)):
        numpyro.sample("length", dist.Normal(top - drop * rate**age, spread), obs=length)


def enzyme(substrate: Array, speed: Array) -> None:
    """Michaelis and Menten, log-normal errors."""
    fastest = numpyro.sample("fastest", dist.LogNormal(0, 1))
    half = numpyro.sample("half", dist.LogNormal(0, 1))
    mean = jnp.log(fastest * substrate / (half + substrate))
    numpyro.sample("speed", dist.LogNormal(mean, positive("spread")), obs=speed)


def dose_response(dose: Array, response: Array) -> None:
    """A four-parameter logistic curve."""
    bottom, height = normal("bottom"), positive("height", 3)
    middle, slope = normal("middle"), positive("slope", 2)
    mean = bottom + height * jax.nn.sigmoid(slope * (dose - middle))
    numpyro.sample("response", dist.Normal(mean, positive("spread")), obs=response)


def mesquite(size: Array, weight: Array) -> None:
    """Allometry: all on the log scale."""
    mean = normal("a") + jnp.log(size) @ normals("b", size.shape[1])
    numpyro.sample("weight", dist.LogNormal(mean, positive("spread")), obs=weight)


def warming(year: Array, degrees: Array) -> None:
    """A trend in raw degrees, years counted from the first in decades."""
    mean = normal("a", 10, 5) + normal("b") * (year - 1950) / 10
    numpyro.sample("degrees", dist.Normal(mean, positive("spread", 2)), obs=degrees)


def censored_income(X: Array, top: Array, income: Array) -> None:
    """Tobit: what is above the top code counts by its probability."""
    mean, spread = normal("a") + X @ normals("b", X.shape[1]), positive("spread")
    fn = dist.Normal(mean, spread)
    tail = jnp.log1p(-jnp.clip(fn.cdf(top), 0, 1 - 1e-6))
    numpyro.factor("income", jnp.where(income >= top, tail, fn.log_prob(income)))


def truncated(X: Array, y: Array) -> None:
    """Only what is above zero was sampled."""
    mean, spread = normal("a") + X @ normals("b", X.shape[1]), positive("spread")
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.TruncatedNormal(mean, spread, low=0.0), obs=y)


def weibull(X: Array, time: Array, died: Array) -> None:
    """Survival with censoring."""
    shape = numpyro.sample("shape", dist.Gamma(4, 3))
    scale = jnp.exp(normal("a") + X @ normals("b", X.shape[1]))
    hazard = jnp.log(shape / scale) + (shape - 1) * jnp.log(time / scale)
    numpyro.factor("time", died * hazard - (time / scale) ** shape)


def wind(speed: Array, direction: Array) -> None:
    """Directions on a circle."""
    mean = normal("a") + 2 * jnp.arctan(normal("b") * speed)
    sharpness = numpyro.sample("sharpness", dist.Gamma(3, 1))
    numpyro.sample("direction", dist.VonMises(mean, sharpness), obs=direction)


def horseshoe(X: Array, y: Array) -> None:
    """Many columns, few that matter."""
    overall = numpyro.sample("overall", dist.HalfCauchy(0.3))
    with numpyro.plate("columns", X.shape[1]):
        local = numpyro.sample("local", dist.HalfCauchy(1))
        b = numpyro.sample("b", dist.Normal(0, overall * local))
    numpyro.sample("y", dist.Normal(X @ b, 1), obs=y)


def weighted(X: Array, weight: Array, y: Array) -> None:
    """A survey's weights, one a row."""
    mean = normal("a") + X @ normals("b", X.shape[1])
    with numpyro.plate("people", len(y)), numpyro.handlers.scale(scale=weight):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def different_spreads(X: Array, y: Array) -> None:
    """The spread depends on a column, too."""
    mean, log_spread = X @ normals("b", X.shape[1]), normal("c") + normal("d") * X[:, 0]
    numpyro.sample("y", dist.Normal(mean, jnp.exp(log_spread)), obs=y)


def two_responses(X: Array, Y: Array) -> None:
    """Seemingly unrelated regressions with correlated errors."""
    with numpyro.plate("outcomes", 2):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    scale_tril = spread[:, None] * chol
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("Y", dist.MultivariateNormal(X @ b.T, scale_tril=scale_tril), obs=Y)


def smooth(x: Array, y: Array) -> None:
    """A Gaussian process by its basis functions."""
    length = numpyro.sample("length", dist.LogNormal(0, 0.5))
    f = hsgp_squared_exponential(x[:, None], 1.0, length, 2.0, 8, non_centered=True)
    numpyro.sample("y", dist.Normal(f, positive("spread")), obs=y)


def spline(basis: Array, y: Array) -> None:
    """A spline whose weights walk at random."""
    step = positive("step")
    steps = normals("steps", basis.shape[1])
    numpyro.sample("y", dist.Normal(basis @ jnp.cumsum(step * steps), 0.5), obs=y)


def neural(X: Array, y: Array) -> None:
    """One hidden layer of three units."""
    first = numpyro.sample("first", dist.Normal(0, 1).expand([X.shape[1], 3]).to_event(2))
    second = normals("second", 3)
    numpyro.sample("y", dist.Normal(jnp.tanh(X @ first) @ second, 0.5), obs=y)


def _with_outcome(seed: int, outcome: Any, number: int = 2, slope: Any = (1.0, -0.5)) -> Any:
    """Covariates, and an outcome drawn given a linear predictor."""
    X, rng = columns(seed, number), generator(seed + 1000)
    return X, outcome(rng, X @ np.resize(slope, number))


def _made_up() -> dict[str, Study]:
    rng = generator(0)
    iq, school = rng.normal(size=N), rng.integers(0, 2, N)
    score = 0.5 * iq + 0.3 * school + 0.8 * rng.normal(size=N)
    raw = {"iq": 100 + 15 * iq, "school": school, "score": 87 + 18 * score}
    height, male = rng.normal(size=N), rng.integers(0, 2, N)
    earn = np.exp(9.7 + 0.1 * height + 0.4 * male + 0.9 * rng.normal(size=N))
    distance, arsenic = rng.normal(size=N), rng.normal(size=N)
    switched = rng.random(N) < sigmoid(0.3 - 0.5 * distance + 0.6 * arsenic)
    votes = _with_outcome(2, lambda r, f: (f + r.normal(size=N) > 0).astype(int))
    dose = rng.normal(size=N)
    dead = rng.random(N) < 1 - np.exp(-np.exp(-0.5 + dose))
    far, tries = rng.uniform(2, 20, N), rng.integers(5, 30, N)
    angles = np.clip(2 * sigmoid(1.7 * np.arcsin(0.16 / far) / 0.03) - 1, 0.01, 0.99)
    year = np.linspace(-1, 1, N)
    birds = rng.poisson(np.exp(3 + 0.5 * year - 0.6 * year**2))
    traps = rng.uniform(0.5, 2, N)
    roach = _with_outcome(
        3, lambda r, f: r.negative_binomial(2, 2 / (2 + traps * np.exp(1 + 0.5 * f)))
    )
    visits = _with_outcome(4, lambda r, f: (r.random(N) > 0.3) * r.poisson(np.exp(0.5 * f + 0.5)))
    claims = _with_outcome(5, lambda r, f: (r.random(N) < sigmoid(f)) * r.gamma(2, 0.7, N))
    shares = _with_outcome(6, lambda r, f: r.beta(20 * sigmoid(f), 20 * sigmoid(-f)))
    shares = shares[0], np.clip(shares[1], 1e-3, 1 - 1e-3)
    heavy = _with_outcome(7, lambda r, f: f + 0.5 * r.standard_t(3, N))
    plain = _with_outcome(8, lambda r, f: f + r.normal(size=N))
    grades = _with_outcome(9, lambda r, f: np.digitize(f + r.logistic(size=N), [-1, 0.5, 2]))
    three = _with_outcome(
        10, lambda r, f: np.argmax(np.c_[0 * f, f, -f] + r.gumbel(size=(N, 3)), 1), 3
    )
    options = rng.normal(size=(N, 4, 2))
    chosen = np.argmax(options @ [1.0, -1.0] + rng.gumbel(size=(N, 4)), axis=1)
    age = rng.uniform(1, 15, N)
    substrate = rng.uniform(0.1, 5, N)
    size = np.exp(rng.normal(size=(N, 3)))
    years = 1950 + rng.integers(0, 60, N)
    incomes = _with_outcome(11, lambda r, f: np.minimum(f + r.normal(size=N), 1.0))
    cut = _with_outcome(12, lambda r, f: np.abs(f + 1.0 + r.normal(size=N)))
    life = _with_outcome(13, lambda r, f: np.exp(0.5 * f) * r.weibull(1.5, N) + 1e-3)
    speed = rng.normal(size=N)
    direction = np.angle(np.exp(1j * (0.5 + 2 * np.arctan(0.7 * speed) + rng.vonmises(0, 3, N))))
    many = _with_outcome(14, lambda r, f: f + r.normal(size=N), 8, (1.5, 0, 0, -1, 0, 0, 0, 0))
    pair = columns(15, 3)
    errors = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], N)
    x = rng.uniform(-1.5, 1.5, N)
    bumps = np.exp(-0.5 * ((x[:, None] - np.linspace(-1.5, 1.5, 6)) / 0.4) ** 2)
    return {
        "test scores": Study(child_scores, {"iq": iq, "school": school, "score": score}),
        "test scores in points": Study(child_scores_raw, raw),
        "earnings": Study(earnings, {"height": height, "male": male, "earn": earn}),
        "switching wells": Study(
            wells, {"distance": distance, "arsenic": arsenic, "switched": switched.astype(int)}
        ),
        "probit of a vote": Study(vote_probit, dict(zip(("X", "vote"), votes, strict=True))),
        "toxicity": Study(toxicity, {"dose": dose, "dead": dead.astype(int)}),
        "putting": Study(
            putting, {"distance": far, "tries": tries, "made": rng.binomial(tries, angles)}
        ),
        "bird counts": Study(bird_counts, {"year": year, "count": birds}),
        "roaches": Study(roaches, {"X": roach[0], "traps": traps, "count": roach[1]}),
        "doctor visits": Study(doctor_visits, dict(zip(("X", "visits"), visits, strict=True))),
        "insurance claims": Study(insurance_claims, dict(zip(("X", "claim"), claims, strict=True))),
        "proportions": Study(proportions, dict(zip(("X", "share"), shares, strict=True))),
        "robust regression": Study(robust, dict(zip(("X", "y"), heavy, strict=True))),
        "upper quartile": Study(median, dict(zip(("X", "y"), plain, strict=True))),
        "ordered grades": Study(satisfaction, dict(zip(("X", "grade"), grades, strict=True))),
        "choice of party": Study(party, dict(zip(("X", "choice"), three, strict=True))),
        "mode of travel": Study(travel, {"options": options, "chosen": chosen}),
        "sea cows": Study(
            sea_cows, {"age": age, "length": 2.6 - 0.97 * 0.87**age + 0.1 * rng.normal(size=N)}
        ),
        "enzyme": Study(
            enzyme,
            {
                "substrate": substrate,
                "speed": 2 * substrate / (1 + substrate) * np.exp(0.2 * rng.normal(size=N)),
            },
        ),
        "dose and response": Study(
            dose_response,
            {"dose": dose, "response": 3 * sigmoid(2 * dose) + 0.3 * rng.normal(size=N)},
        ),
        "mesquite": Study(
            mesquite,
            {
                "size": size,
                "weight": np.exp(1 + np.log(size) @ [0.5, 1, 0.2] + 0.3 * rng.normal(size=N)),
            },
        ),
        "warming": Study(
            warming,
            {"year": years, "degrees": 9 + 0.2 * (years - 1950) / 10 + rng.normal(size=N)},
        ),
        "top-coded income": Study(
            censored_income, {"X": incomes[0], "top": np.ones(N), "income": incomes[1]}
        ),
        "truncated sample": Study(truncated, dict(zip(("X", "y"), cut, strict=True))),
        "Weibull survival": Study(
            weibull,
            {
                "X": life[0],
                "time": np.minimum(life[1], 2.0),
                "died": (life[1] < 2.0).astype(int),
            },
        ),
        "wind": Study(wind, {"speed": speed, "direction": direction}),
        "horseshoe": Study(horseshoe, dict(zip(("X", "y"), many, strict=True))),
        "survey weights": Study(
            weighted, {"X": plain[0], "weight": rng.uniform(0.5, 2, N), "y": plain[1]}
        ),
        "unequal spreads": Study(different_spreads, dict(zip(("X", "y"), plain, strict=True))),
        "two correlated responses": Study(
            two_responses, {"X": pair, "Y": pair @ rng.normal(size=(3, 2)) + errors}
        ),
        "smooth curve": Study(smooth, {"x": x, "y": np.sin(2 * x) + 0.3 * rng.normal(size=N)}),
        "spline": Study(spline, {"basis": bumps, "y": np.sin(2 * x) + 0.5 * rng.normal(size=N)}),
        "neural network": Study(neural, dict(zip(("X", "y"), plain, strict=True))),
    }


STUDIES = _made_up()
