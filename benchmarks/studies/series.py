"""Records that are series, changes over time, and latents of other kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan

from benchmarks.studies.study import (
    NUM_RECORDS,
    Array,
    Study,
    columns,
    generator,
    normal,
    normals,
    positive,
)

N = NUM_RECORDS


def panel(y: Array) -> None:
    """A patient is an autoregression, by NumPyro's ``scan``."""
    a, b, spread = normal("a"), numpyro.sample("b", dist.Uniform(-1, 1)), positive("spread")

    def step(before: Array, now: Array) -> tuple[Array, None]:
        with numpyro.plate("patients", y.shape[0]):
            numpyro.sample("now", dist.Normal(a + b * before, spread), obs=now)
        return now, None

    scan(step, jnp.zeros(y.shape[0]), y.T)


def second_order(y: Array) -> None:
    """The same of second order, at once."""
    a, b = normal("a"), normals("b", 2, 0.5)
    mean = a + b[0] * y[:, 1:-1] + b[1] * y[:, :-2]
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y[:, 2:])


def growth(day: Array, size: Array) -> None:
    """Logistic growth of cultures, a series each, with log-normal errors."""
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    rate = numpyro.sample("rate", dist.LogNormal(0, 0.5))
    start, spread = normal("start", -2, 1), positive("spread")
    mean = jnp.log(top) + jax.nn.log_sigmoid(start + rate * day)
    with numpyro.plate("cultures", size.shape[0]):
        numpyro.sample("size", dist.LogNormal(mean, spread).to_event(1), obs=size)


def random_effects(day: Array, y: Array) -> None:
    """A patient's own intercept, integrated out into the covariance of a series."""
    line, between, within = normals("line", 2), positive("between"), positive("within")
    covariance = within**2 * jnp.eye(y.shape[1]) + between**2
    mean = line[0] + line[1] * day
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(mean, covariance), obs=y)


def own_process(t: Array, y: Array) -> None:
    """A Gaussian process a record, with shared width and length."""
    length, height = numpyro.sample("length", dist.LogNormal(0, 0.5)), positive("height")
    apart = (t[:, :, None] - t[:, None, :]) ** 2
    covariance = height**2 * jnp.exp(-0.5 * apart / length**2) + 0.1 * jnp.eye(t.shape[1])
    with numpyro.plate("curves", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(t.shape[1]), covariance), obs=y)


def avoidance(shocked: Array) -> None:
    """Dogs learn from shocks and from avoiding them: a record is a dog's trials."""
    a, b = normal("a", -0.3, 0.2), normal("b", -0.2, 0.2)
    before = jnp.cumsum(shocked, axis=1) - shocked
    trial = jnp.arange(shocked.shape[1])
    logits = 1.0 + a * (trial - before) + b * before
    with numpyro.plate("dogs", shocked.shape[0]):
        numpyro.sample("shocked", dist.Bernoulli(logits=logits).to_event(1), obs=shocked)


def prices(move: Array) -> None:
    """Changes over a week in four markets, heavy-tailed and correlated."""
    spread = numpyro.sample("spread", dist.HalfNormal(1).expand([4]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(4, 2.0))
    fn = dist.MultivariateStudentT(5.0, jnp.zeros(4), spread[:, None] * chol)
    with numpyro.plate("weeks", move.shape[0]):
        numpyro.sample("move", fn, obs=move)


def season(month: Array, cases: Array) -> None:
    """Counts with a season and a trend; time is a column."""
    a, b = normal("a"), normals("b", 3)
    turn = 2 * jnp.pi * month / 12
    rate = jnp.exp(a + b[0] * jnp.sin(turn) + b[1] * jnp.cos(turn) + b[2] * month / 120)
    with numpyro.plate("months", len(cases)):
        numpyro.sample("cases", dist.Poisson(rate), obs=cases)


def broken_line(x: Array, y: Array) -> None:
    """A line that bends at an unknown place."""
    bend = numpyro.sample("bend", dist.Uniform(-1.5, 1.5))
    a, b = normal("a"), normals("b", 2)
    mean = a + b[0] * x + b[1] * jax.nn.softplus(8 * (x - bend)) / 8
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(mean, 0.4), obs=y)


def disasters(year: Array, count: Array) -> None:
    """Coal mines: one of ten years in which the rate fell, for all records together."""
    rates = numpyro.sample("rates", dist.Gamma(2, 1).expand([2]).to_event(1))
    fell = numpyro.sample("fell", dist.Categorical(jnp.ones(10) / 10))
    with numpyro.plate("mines", len(count)):
        rate = jnp.where(year >= fell, rates[1], rates[0])
        numpyro.sample("count", dist.Poisson(rate), obs=count)


def disasters_guide(year: Array, count: Array) -> None:
    """Independent latents; the year is a class."""
    del year, count
    shape = numpyro.param("shape", 2 * jnp.ones(2), constraint=dist.constraints.positive)
    rate = numpyro.param("rate", jnp.ones(2), constraint=dist.constraints.positive)
    numpyro.sample("rates", dist.Gamma(shape, rate).to_event(1))
    numpyro.sample("fell", dist.Categorical(logits=numpyro.param("logits", jnp.zeros(10))))


def selection(X: Array, y: Array) -> None:
    """Which of four columns matter: indicators of all records together."""
    b = normals("b", 4)
    matters = numpyro.sample("matters", dist.Bernoulli(0.5 * jnp.ones(4)).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(X @ (b * matters), 1), obs=y)


def selection_guide(X: Array, y: Array) -> None:
    """Independent latents."""
    del X, y
    loc = numpyro.param("loc", jnp.zeros(4))
    numpyro.sample("b", dist.Normal(loc, 1).to_event(1))
    logits = numpyro.param("logits", jnp.zeros(4))
    numpyro.sample("matters", dist.Bernoulli(logits=logits).to_event(1))


def by_loop(y: Array) -> None:
    """A statement a record, in a Python loop."""
    mean, spread = normal("mean"), positive("spread")
    for number in range(len(y)):
        numpyro.sample(f"y_{number}", dist.Normal(mean, spread), obs=y[number])


def conjugate(y: Array) -> None:
    """No plate at all, and everything an event."""
    mean = normal("mean", scale=10)
    numpyro.sample("y", dist.Normal(mean * jnp.ones(len(y)), 1).to_event(1), obs=y)


def penalised(X: Array, y: Array) -> None:
    """A ridge by a factor, and last year's estimate as a pseudo-observation."""
    b = normals("b", X.shape[1], 5.0)
    numpyro.factor("ridge", -0.5 * jnp.sum(b**2))
    numpyro.sample("last_year", dist.Normal(b[0], 0.2), obs=0.9)
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(X @ b, 1), obs=y)


def _made_up() -> dict[str, Study]:
    rng = generator(300)
    walks = np.zeros((N, 6))
    for t in range(1, 6):
        walks[:, t] = 0.3 + 0.5 * walks[:, t - 1] + 0.5 * rng.normal(size=N)
    day = np.tile(np.linspace(0, 5, 6), (N, 1))
    size = np.exp(np.log(2) - np.log1p(np.exp(2 - 1.2 * day)) + 0.2 * rng.normal(size=(N, 6)))
    own = rng.normal(size=(N, 1))
    times = np.sort(rng.uniform(0, 3, (N, 5)), axis=1)
    curves = own * np.sin(times) + 0.3 * rng.normal(size=(N, 5))
    shocks = rng.random((N, 10)) < 1 / (1 + np.exp(-1 + 0.3 * np.arange(10)))
    month = np.arange(N)
    x, y = rng.uniform(-2, 2, N), rng.normal(size=N)
    year = rng.integers(0, 10, N)
    X = columns(301, 4)
    return {
        "panel of autoregressions": Study(panel, {"y": walks}),
        "panel of second order": Study(second_order, {"y": walks}),
        "growth of cultures": Study(growth, {"day": day, "size": size}),
        "patients' own intercepts": Study(
            random_effects, {"day": day, "y": own + 0.3 * day + 0.5 * rng.normal(size=(N, 6))}
        ),
        "a process a record": Study(own_process, {"t": times, "y": curves}),
        "avoidance learning": Study(avoidance, {"shocked": shocks.astype(int)}),
        "prices": Study(prices, {"move": rng.standard_t(5, (N, 4)) * [0.5, 1, 1, 0.7]}),
        "season": Study(
            season,
            {"month": month, "cases": rng.poisson(np.exp(1 + 0.5 * np.sin(month * np.pi / 6)))},
        ),
        "a line that bends": Study(
            broken_line, {"x": x, "y": x - 1.5 * np.maximum(x - 0.5, 0) + 0.4 * y}
        ),
        "mine disasters, a change point": Study(
            disasters,
            {"year": year, "count": rng.poisson(np.where(year >= 4, 1.0, 3.0))},
            guide=disasters_guide,
        ),
        "selection of columns": Study(
            selection,
            {"X": X, "y": X @ [1.0, 0.0, -0.7, 0.0] + y},
            guide=selection_guide,
        ),
        "a statement a record": Study(by_loop, {"y": 0.5 + y[:20]}),
        "all one event": Study(conjugate, {"y": 0.5 + y}),
        "a ridge and a pilot": Study(penalised, {"X": X, "y": X @ [1.0, 0, 0, 0] + y}),
    }


STUDIES = _made_up()
