"""What cannot be fitted by clients that share latents only, and what is said of it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

from benchmarks.studies.study import Array, Study, columns, generator, normal, normals, positive

N = 40


def schools(y: Array, error: Array) -> None:
    """A latent a record."""
    mean, between = normal("mean", scale=5), positive("between", 5)
    with numpyro.plate("schools", len(y)):
        theta = numpyro.sample("theta", dist.Normal(mean, between))
        numpyro.sample("y", dist.Normal(theta, error), obs=y)


def principal_components(Y: Array) -> None:
    """A latent a record, with its covariance a matrix of shared ones."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    with numpyro.plate("records", Y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("Y", dist.Normal(z @ w.T, 1).to_event(1), obs=Y)


def unmarked_mixture(y: Array) -> None:
    """Classes that are not marked."""
    centres = normals("centres", 2)
    with numpyro.plate("records", len(y)):
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(centres[kind], 1), obs=y)


def volatility(y: Array) -> None:
    """A random walk over the rows."""
    step = numpyro.sample("step", dist.Exponential(1.0))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(step, len(y)))
    numpyro.sample("y", dist.Normal(0, jnp.exp(walk)), obs=y)


def one_series(y: Array) -> None:
    """An autoregression along the rows."""
    b = normal("b")

    def step(before: Array, now: Array) -> tuple[Array, None]:
        numpyro.sample("y", dist.Normal(b * before, 1), obs=now)
        return now, None

    scan(step, jnp.zeros(()), y)


def lags(y: Array) -> None:
    """The same, written as a shifted column."""
    b = normal("b")
    numpyro.sample("y", dist.Normal(b * y[:-1], 1).to_event(1), obs=y[1:])


def process(x: Array, y: Array) -> None:
    """A Gaussian process over the rows."""
    length = numpyro.sample("length", dist.LogNormal(0, 1))
    cov = jnp.exp(-((x[:, None] - x) ** 2) / length**2) + 0.1 * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), cov), obs=y)


def partial_likelihood(X: Array, time: Array) -> None:
    """Cox: who dies next, of all rows."""
    risk = X @ normals("b", X.shape[1])
    later = jax.nn.logsumexp(jnp.where(time >= time[:, None], risk, -jnp.inf), axis=1)
    numpyro.factor("order", (risk - later).sum())


def standardised(X: Array, y: Array) -> None:
    """Columns standardised inside the model."""
    X = (X - X.mean(axis=0)) / (X.std(axis=0) + 1e-3)
    numpyro.sample("y", dist.Normal(X @ normals("b", X.shape[1]), 1), obs=y)


def minibatch(X: Array, y: Array) -> None:
    """A factor for minibatches, by hand."""
    with numpyro.handlers.scale(scale=1000 / len(y)):
        numpyro.sample("y", dist.Normal(X @ normals("b", X.shape[1]), 1), obs=y)


def as_in_stan(y: Array) -> None:
    """Prior and likelihood in one sum."""
    mean = numpyro.sample("mean", dist.Normal(0, 100))
    prior, density = dist.Normal(0, 1).log_prob(mean), dist.Normal(mean, 1).log_prob(y)
    numpyro.factor("target", prior + density.sum())


def flat(y: Array) -> None:
    """An improper prior on a scale."""
    spread = numpyro.sample("spread", dist.ImproperUniform(dist.constraints.positive, (), ()))
    numpyro.sample("y", dist.Normal(0, spread), obs=y)


def moving_end(y: Array) -> None:
    """Truncated at a latent."""
    high = normal("high", 3)
    fn = dist.RightTruncatedDistribution(dist.Normal(0, 1), high)
    numpyro.sample("y", fn, obs=y)


def negative_spread(y: Array) -> None:
    """A standard deviation that may be negative."""
    numpyro.sample("y", dist.Normal(0, normal("spread", scale=10)), obs=y)


def numpy_inside(X: Array, y: Array) -> None:
    """NumPy on a column."""
    numpyro.sample("y", dist.Normal(np.log(np.abs(X)) @ normals("b", 2), 1), obs=y)


def counts_groups(g: Array, y: Array) -> None:
    """How many groups there are, from the data."""
    effect = normals("effect", len(np.unique(g)))
    numpyro.sample("y", dist.Normal(effect[g], 1), obs=y)


def time_by_number(y: Array) -> None:
    """Time is the row's number."""
    numpyro.sample("y", dist.Normal(normal("trend") * jnp.arange(float(N)), 1), obs=y)


def column_imputed(age: Array, known: Array, y: Array) -> None:
    """A column that is not normal, with missing entries, on which the outcome depends."""
    b = normals("b", 2)
    with numpyro.plate("people", len(y)):
        full = numpyro.sample("age", dist.Gamma(3, 1), obs=age, obs_mask=known)
        numpyro.sample("y", dist.Normal(b[0] + b[1] * full, 1), obs=y)


def _made_up() -> dict[str, Study]:
    rng = generator(400)
    X, y = columns(401, 2, N), rng.normal(size=N)
    Y, g = columns(402, 3, N), np.arange(N) % 4
    mixes = "not the sum over each"
    return {
        "eight schools, centred": Study(
            schools, {"y": y, "error": np.ones(N)}, refused="integrate it out"
        ),
        "principal components": Study(principal_components, {"Y": Y}, refused="integrate it out"),
        "a mixture not marked": Study(
            unmarked_mixture, {"y": y}, refused="infer={'enumerate': 'parallel'}"
        ),
        "stochastic volatility": Study(volatility, {"y": y}, refused="one value per record"),
        "one series by a scan": Study(one_series, {"y": y}, refused=mixes),
        "one series by lags": Study(lags, {"y": y}, refused=mixes),
        "a process over records": Study(process, {"x": X[:, 0], "y": y}, refused=mixes),
        "partial likelihood": Study(
            partial_likelihood, {"X": X, "time": rng.exponential(size=N)}, refused=mixes
        ),
        "standardised inside": Study(standardised, {"X": X, "y": y}, refused=mixes),
        "a factor N / B": Study(minibatch, {"X": X, "y": y}, refused="how many rows there are"),
        "one sum as in Stan": Study(as_in_stan, {"y": y}, refused="counted once"),
        "an improper prior": Study(flat, {"y": y}, refused="dist.HalfNormal(1)"),
        "an end that moves": Study(
            moving_end, {"y": y}, refused="support of the outcome 'y' depends on latent 'high'"
        ),
        "a negative spread": Study(negative_spread, {"y": y}, refused="numbers above 0"),
        "NumPy on a column": Study(numpy_inside, {"X": X, "y": y}, refused="jnp instead of np"),
        "groups counted in the model": Study(
            counts_groups, {"g": g, "y": y}, refused="depends on the values of its data"
        ),
        "time by the row's number": Study(time_by_number, {"y": y}, refused="pass the time"),
        "a column imputed": Study(
            column_imputed,
            {"age": y**2, "known": y > 0, "y": X[:, 0]},
            refused="normal distribution",
        ),
    }


STUDIES = _made_up()
