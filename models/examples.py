"""Models of many kinds, written as NumPyro's own examples are, each with made-up records.

They are what "any NumPyro model" is tested on: `EXAMPLES` lists them, and
`python -m benchmarks examples` compares partitioned inference on each with NumPyro's SVI under the
same guide, and with NUTS. `GUIDED` lists those that need a guide of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential
from numpyro.handlers import mask, reparam
from numpyro.infer.reparam import LocScaleReparam

__all__ = ["EXAMPLES", "GUIDED", "Example"]

Records = Mapping[str, np.ndarray]


class Example(NamedTuple):
    """A model and records to fit it to.

    Attributes:
        model: The NumPyro model, called as `model(**records, **model_kwargs)`.
        records: Arrays with one row a record, in random order.
        model_kwargs: The model's public arguments.
        guide: The guide; `None` for one normal distribution a latent.
    """

    model: Callable[..., Any]
    records: Records
    model_kwargs: Mapping[str, Any] = {}
    guide: Callable[..., Any] | None = None


def coefficients(num_columns: int, name: str = "w") -> jax.Array:
    """Standard normal weights."""
    return numpyro.sample(name, dist.Normal(0, 1).expand([num_columns]).to_event(1))


def linear(X: jax.Array, y: jax.Array | None = None) -> None:
    """Linear regression with an unknown spread, without a plate."""
    w = coefficients(X.shape[1])
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(X @ w, spread).to_event(1), obs=y)


def robust(X: jax.Array, y: jax.Array | None = None) -> None:
    """Linear regression with Student-t errors."""
    w = coefficients(X.shape[1])
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, X @ w, spread), obs=y)


def logistic(X: jax.Array, y: jax.Array | None = None) -> None:
    """Logistic regression on a plate that takes all of its rows as a subsample."""
    w = coefficients(X.shape[1])
    with numpyro.plate("records", X.shape[0], subsample_size=X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def poisson(X: jax.Array, y: jax.Array | None = None) -> None:
    """Poisson regression with an intercept of its own."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    w = coefficients(X.shape[1])
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + X @ w)), obs=y)


def negative_binomial(X: jax.Array, y: jax.Array | None = None) -> None:
    """Counts with more spread than a Poisson has."""
    w = coefficients(X.shape[1])
    concentration = numpyro.sample("concentration", dist.Gamma(2, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), concentration), obs=y)


def gamma(X: jax.Array, y: jax.Array | None = None) -> None:
    """Positive outcomes, such as costs, with a logarithmic link."""
    w = coefficients(X.shape[1])
    concentration = numpyro.sample("concentration", dist.LogNormal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        rate = concentration * jnp.exp(-(X @ w))
        numpyro.sample("y", dist.Gamma(concentration, rate), obs=y)


def ordinal(X: jax.Array, y: jax.Array | None = None) -> None:
    """Ordered outcomes in four grades: cut points are an ordered latent."""
    w = coefficients(X.shape[1])
    prior = dist.TransformedDistribution(
        dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()
    )
    cutpoints = numpyro.sample("cutpoints", prior)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(X @ w, cutpoints), obs=y)


def multinomial(X: jax.Array, y: jax.Array | None = None) -> None:
    """Three unordered classes; the first one's weights are zero."""
    prior = dist.Normal(0, 1).expand([X.shape[1], 2]).to_event(2)
    w = numpyro.sample("w", prior)
    with numpyro.plate("records", X.shape[0]):
        logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), X @ w], axis=1)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def survival(X: jax.Array, time: jax.Array, observed: jax.Array) -> None:
    """Weibull survival: whoever was lost to follow-up has survived up to then."""
    w = coefficients(X.shape[1])
    concentration = numpyro.sample("concentration", dist.LogNormal(0, 0.5))
    with numpyro.plate("records", X.shape[0]):
        lifetime = dist.Weibull(jnp.exp(X @ w), concentration)
        with mask(mask=observed):
            numpyro.sample("death", lifetime, obs=time)
        log_survival = -((time / jnp.exp(X @ w)) ** concentration)
        numpyro.factor("lost", jnp.where(observed, 0.0, log_survival))


def zero_inflated(X: jax.Array, y: jax.Array | None = None) -> None:
    """Counts with surplus zeros; the share of those is a latent on the unit interval."""
    w = coefficients(X.shape[1])
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(X @ w)), obs=y)


def varying_intercepts(
    X: jax.Array, group: jax.Array, y: jax.Array | None = None, num_groups: int = 8
) -> None:
    """Logistic regression whose intercepts come from a common distribution."""
    spread = numpyro.sample("spread", dist.HalfCauchy(1))
    with numpyro.plate("groups", num_groups):
        intercept = numpyro.sample("intercept", dist.Normal(0, spread))
    w = coefficients(X.shape[1])
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept[group] + X @ w), obs=y)


def decentred(
    X: jax.Array, group: jax.Array, y: jax.Array | None = None, num_groups: int = 8
) -> None:
    """The same, linear, with its hierarchy reparametrised by a handler."""
    centre = numpyro.sample("centre", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with (
        numpyro.plate("groups", num_groups),
        reparam(config={"intercept": LocScaleReparam(0.0)}),
    ):
        intercept = numpyro.sample("intercept", dist.Normal(centre, spread))
    w = coefficients(X.shape[1])
    noise = numpyro.sample("noise", dist.Exponential(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(intercept[group] + X @ w, noise), obs=y)


def horseshoe(X: jax.Array, y: jax.Array | None = None) -> None:
    """Logistic regression with few weights that matter."""
    overall = numpyro.sample("overall", dist.HalfCauchy(0.5))
    width = numpyro.sample("width", dist.HalfCauchy(1).expand([X.shape[1]]).to_event(1))
    unscaled = numpyro.sample("unscaled", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    w = numpyro.deterministic("w", overall * width * unscaled)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def mixture(y: jax.Array) -> None:
    """Three normal clusters, the assignment summed out; ordered centres, weights on a simplex.

    Under a vague prior on the logarithms of the gaps the posterior has modes in which clusters
    merge, and every inference ends in one of its own; gaps of about 1.6 leave one mode.
    """
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(3, 2.0)))
    base = dist.Normal(jnp.array([-2.0, 0.5, 0.5]), jnp.array([1.0, 0.5, 0.5])).to_event(1)
    prior = dist.TransformedDistribution(base, dist.transforms.OrderedTransform())
    centres = numpyro.sample("centres", prior)
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("records", y.shape[0]):
        components = dist.Normal(centres, spread)
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(probs=weights), components), obs=y
        )


def two_outcomes(y: jax.Array) -> None:
    """Correlated outcomes: a lower Cholesky factor of a correlation is a latent."""
    centre = numpyro.sample("centre", dist.Normal(0, 1).expand([2]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1).expand([2]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("records", y.shape[0]):
        factor = spread[:, None] * correlation
        numpyro.sample("y", dist.MultivariateNormal(centre, scale_tril=factor), obs=y)


def panel(y: jax.Array) -> None:
    """A record is a short series: autoregression with a coefficient in (-1, 1)."""
    persistence = numpyro.sample("persistence", dist.Uniform(-1, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(persistence * y[:, :-1], noise).to_event(1), obs=y[:, 1:])


def smooth(x: jax.Array, y: jax.Array | None = None) -> None:
    """A smooth curve: a Gaussian process by basis functions (HSGP)."""
    height = numpyro.sample("height", dist.LogNormal(0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(-1, 0.5))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    curve = hsgp_squared_exponential(
        x, alpha=height, length=length, ell=1.5, m=8, non_centered=True
    )
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(curve, noise), obs=y)


def variable_selection(X: jax.Array, y: jax.Array | None = None) -> None:
    """Logistic regression that says of each column whether it matters: discrete latents."""
    included = numpyro.sample("included", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1))
    w = coefficients(X.shape[1])
    numpyro.deterministic("slopes", included * w)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ (included * w)), obs=y)


def selection_guide(X: jax.Array, y: jax.Array | None = None) -> None:
    """A probability for each column, and a normal distribution for each weight."""
    columns = [X.shape[1]]
    log_odds = numpyro.param("log_odds", jnp.zeros(columns))
    numpyro.sample(
        "included", dist.Bernoulli(logits=log_odds).to_event(1), infer={"enumerate": "parallel"}
    )
    numpyro.sample("w", dist.Normal(numpyro.param("loc", jnp.zeros(columns)), 1.0).to_event(1))


def _simulated() -> dict[str, Example]:
    """Records drawn from each model, with one seed."""
    rng = np.random.default_rng(7)
    n = 400
    X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
    eta = X @ np.array([0.3, 0.8, -0.5, 0.2])
    group = rng.integers(0, 8, n)
    effects = rng.normal(0, 0.8, 8)[group]
    logistic_noise = rng.logistic(size=n)
    lifetime = np.exp(eta) * rng.weibull(1.5, n)
    follow_up = rng.exponential(4.0, n)
    wide = rng.normal(size=(n, 10))
    labels = rng.choice(3, n, p=[0.3, 0.5, 0.2])
    series = np.zeros((n, 6))
    for step in range(1, 6):
        series[:, step] = 0.6 * series[:, step - 1] + rng.normal(0, 0.5, n)
    x = rng.uniform(-1, 1, n)
    shares = np.exp(X @ np.array([[0, 0.5, -0.3], [0, 1, 0], [0, 0, 1], [0, -0.5, 0.5]]))
    classes = (rng.uniform(size=n)[:, None] > np.cumsum(shares / shares.sum(1)[:, None], 1)).sum(1)
    normal = rng.normal(size=n)
    pair = np.array([0.5, -0.2]) + rng.normal(size=(n, 2)) @ np.array([[1.0, 0.5], [0.0, 0.6]])
    counts = rng.poisson(np.exp(eta))
    return {
        "linear regression": Example(linear, {"X": X, "y": eta + 0.7 * normal}),
        "robust regression": Example(robust, {"X": X, "y": eta + 0.5 * rng.standard_t(4, n)}),
        "logistic regression": Example(logistic, {"X": X, "y": (eta + logistic_noise > 0) * 1}),
        "Poisson regression": Example(poisson, {"X": X[:, 1:], "y": counts}),
        "negative binomial regression": Example(
            negative_binomial, {"X": X, "y": rng.poisson(np.exp(eta) * rng.gamma(2, 0.5, n))}
        ),
        "Gamma regression": Example(gamma, {"X": X, "y": np.exp(eta) * rng.gamma(2, 0.5, n)}),
        "ordinal regression": Example(
            ordinal, {"X": X[:, 1:], "y": np.digitize(eta + logistic_noise, [-1, 0.5, 2])}
        ),
        "multinomial regression": Example(multinomial, {"X": X, "y": classes}),
        "survival with censoring": Example(
            survival,
            {"X": X, "time": np.minimum(lifetime, follow_up), "observed": lifetime <= follow_up},
        ),
        "zero-inflated counts": Example(
            zero_inflated, {"X": X, "y": counts * (rng.uniform(size=n) > 0.3)}
        ),
        "varying intercepts": Example(
            varying_intercepts,
            {"X": X[:, 1:], "group": group, "y": (eta + effects + logistic_noise > 0) * 1},
            {"num_groups": 8},
        ),
        "decentred hierarchy": Example(
            decentred,
            {"X": X[:, 1:], "group": group, "y": eta + effects + 0.5 * normal},
            {"num_groups": 8},
        ),
        "horseshoe": Example(
            horseshoe,
            {"X": wide, "y": (wide @ np.eye(10)[0] * 2 + wide[:, 1] + logistic_noise > 0) * 1},
        ),
        "mixture": Example(mixture, {"y": np.array([-2.0, 0.0, 2.5])[labels] + 0.5 * normal}),
        "correlated outcomes": Example(two_outcomes, {"y": pair}),
        "panel of series": Example(panel, {"y": series}),
        "smooth curve": Example(smooth, {"x": x, "y": np.sin(3 * x) + 0.3 * normal}),
    }


def _selected() -> Example:
    """Two columns of four that matter."""
    rng = np.random.default_rng(8)
    X = rng.normal(size=(600, 4))
    y = (X @ np.array([1.5, 0.0, -1.0, 0.0]) + rng.logistic(size=600) > 0) * 1
    return Example(variable_selection, {"X": X, "y": y}, {}, selection_guide)


EXAMPLES = _simulated()
GUIDED = {"variable selection": _selected()}
