"""Every kind of model that must just work: it is read, adds up over records, and has gradients.

What the fits end at is compared with NumPyro's SVI in `benchmarks/examples.py`, and here for models
that are marked slow. The kinds are those of docs/models.md, which names the test of each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.handlers import mask, scale

import numpyro_dppvi as dppvi
from benchmarks import examples as benchmark
from models.examples import EXAMPLES, GUIDED, Example
from numpyro_dppvi import families, guides, latents

N = 12
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
z = X @ [1.0, -1.0, 0.5] + rng.normal(size=N)


def weights(num_columns=3):
    return numpyro.sample("w", dist.Normal(0, 1).expand([num_columns]).to_event(1))


def truncated(X, y=None):
    """F4: an outcome that cannot be negative, and a plate of stated size."""
    w = weights()
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("records", N):
        numpyro.sample("y", dist.TruncatedNormal(X @ w, noise, low=0.0), obs=y)


def counted(y):
    """F4: a plate of stated size, whose statement has a row a record from the plate alone."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("records", N):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def exponential_noise(group, y, num_groups):
    """F5: a support that only begins above zero, and groups of a hierarchy."""
    spread = numpyro.sample("spread", dist.HalfCauchy(1))
    noise = numpyro.sample("noise", dist.Exponential(1.0))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    with numpyro.plate("records", group.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], noise), obs=y)


def missing_and_weighted(X, weight, seen, y):
    """F17: weights of rows, and outcomes that are missing and hold whatever was there."""
    w = weights()
    with numpyro.plate("records", X.shape[0]), scale(scale=weight), mask(mask=seen):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def missing_by_obs_mask(X, seen, y):
    """What is missing integrates to one; the outcome is imputed in predictions."""
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y, obs_mask=seen)


def penalised(X, y):
    """F18: a ridge and a pseudo-observation, both counted once."""
    w = weights()
    numpyro.factor("ridge", -0.5 * jnp.sum(w**2))
    numpyro.sample("pilot", dist.Normal(w[0], 0.1), obs=0.7)
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)


def series_by_scan(y):
    """A record is a series, and its likelihood a loop over time."""
    a = numpyro.sample("a", dist.Uniform(-1, 1))

    def step(before, now):
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("x", dist.Normal(a * before, 1), obs=now)
        return now, None

    scan(step, jnp.zeros(y.shape[0]), y.T)


def tables(X, Z):
    """F8: several outcomes a record, and a latent for each."""
    with numpyro.plate("outcomes", 2):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", X.shape[0], dim=-2), numpyro.plate("outcomes", 2, dim=-1):
        numpyro.sample("Z", dist.Normal(X @ b.T, 1), obs=Z)


def two_outcomes(X, y, count):
    """F13: two observed latents, of different kinds."""
    w = weights()
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(X @ w)), obs=count)


def finite_mixture(y):
    """The assignment is summed out by hand, in a factor."""
    centres = numpyro.sample("centres", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        log_probs = dist.Normal(centres, 1).log_prob(y[:, None]) - jnp.log(2)
        numpyro.factor("y", jax.nn.logsumexp(log_probs, axis=-1))


def one_site_a_record(X, y):
    """A loop with a sample statement for each row, and a pseudo-observation counted once."""
    w = weights()
    numpyro.sample("pilot", dist.Normal(w[0], 0.1), obs=0.7)
    for row in range(len(y)):
        numpyro.sample(f"y_{row}", dist.Normal(X[row] @ w, 1), obs=y[row])


MORE = {
    "truncated outcome": Example(truncated, {"X": X, "y": np.abs(z)}),
    "counts in a plate of stated size": Example(counted, {"y": rng.poisson(2.0, N)}),
    "hierarchy with a group a public number": Example(
        exponential_noise, {"group": rng.integers(0, 3, N), "y": z}, {"num_groups": 3}
    ),
    "missing and weighted": Example(
        missing_and_weighted,
        {"X": X, "weight": np.full(N, 0.5), "seen": z > 0, "y": np.where(z > 0, z, 0.0)},
    ),
    "missing by obs_mask": Example(
        missing_by_obs_mask, {"X": X, "seen": z > 0, "y": np.where(z > 0, z, 1e3)}
    ),
    "penalised": Example(penalised, {"X": X, "y": z}),
    "series by a loop": Example(series_by_scan, {"y": rng.normal(size=(N, 4))}),
    "several outcomes": Example(tables, {"X": X, "Z": rng.normal(size=(N, 2))}),
    "two kinds of outcome": Example(two_outcomes, {"X": X, "y": z, "count": rng.poisson(1, N)}),
    "a statement a record": Example(one_site_a_record, {"X": X, "y": z}),
    "mixture by a factor": Example(finite_mixture, {"y": z}),
}
ALL = {**EXAMPLES, **GUIDED, **MORE}


def shares(kind):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("kind", dist.Categorical(p), obs=kind)


def correlated(Z):
    root = numpyro.sample("root", dist.LKJCholesky(2))
    spread = numpyro.sample("spread", dist.HalfNormal(1).expand([2]).to_event(1))
    numpyro.sample("Z", dist.MultivariateNormal(0.0, scale_tril=spread[:, None] * root), obs=Z)


def monotone(X, kind, y):
    steps, w = numpyro.sample("steps", dist.Dirichlet(jnp.ones(3))), weights()
    numpyro.sample("y", dist.Normal(X @ w + jnp.cumsum(steps)[kind], 1), obs=y)


def some_rows(X, y):
    w = weights()
    with numpyro.plate("records", X.shape[0], subsample_size=5) as rows:
        numpyro.sample("y", dist.Normal(X[rows] @ w, 1), obs=y[rows])


def hinges(X, y):
    c, w = numpyro.sample("c", dist.Normal(0, 1)), weights()
    bent = jnp.maximum(jnp.arange(4.0) - c, 0)
    numpyro.sample("y", dist.Normal(X @ w + bent @ jnp.ones(4), 1), obs=y)


def product(X, y):
    a, b = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(a * b * X[:, 0], 1), obs=y)


def product_of_three(X, y):
    a, b, c = (numpyro.sample(name, dist.Normal(0, 1)) for name in "abc")
    numpyro.sample("y", dist.Normal(a * b * c * X[:, 0], 1), obs=y)


@pytest.mark.parametrize(
    "model", [shares, correlated, monotone, some_rows, hinges, product, product_of_three]
)
def test_all_is_read_that_a_fit_reads(model):
    """Not the density alone: once all models with a simplex were refused with an error of NumPy."""
    columns = {"X": X, "y": z, "kind": rng.integers(0, 3, N), "Z": rng.normal(size=(N, 2))}
    records = {name: columns[name] for name in model.__code__.co_varnames if name in columns}
    space = latents.recentred(latents.from_model(model, records))
    size = sum(int(np.prod(struct.shape)) for struct in space.continuous.values())
    assert space.curved.shape == (size,)
    assert space.meeting.shape == (size, size)
    assert space.unseen.shape[0] == size
    assert space.entering <= space.structs.keys()
    for read in (space.predictor, space.first_layers, space.few_outcomes):
        assert read is None or read


FIRST = (
    "hierarchy with a group a public number",
    "two kinds of outcome",
    "missing and weighted",
)


def first_rows(example, number=N):
    return {
        name: jnp.asarray(np.asarray(column)[:number]) for name, column in example.records.items()
    }


# The rest are fitted by `python -m benchmarks examples`; test_latents.py reads such statements.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)
def test_it_is_read_adds_up_and_has_gradients(name):
    example = ALL[name]
    records = first_rows(example)
    space = latents.from_model(example.model, records, example.model_kwargs)
    latents.check_additive(space, example.model_kwargs, N)
    latents.check_priors(space)
    of_one_client = {name: column[None] for name, column in first_rows(example, None).items()}
    num_records = len(next(iter(example.records.values())))
    latents.check_records(space, of_one_client, jnp.ones((1, num_records), bool))
    space, family = guides.approximation(
        example.guide, example.model, space, records, example.model_kwargs
    )
    base = {k: jnp.full(latent.base_shape, 0.3) for k, latent in by_name(space).items()}
    integers = {k: jnp.ones(x.shape, x.dtype) for k, x in by_name(space).items() if x.is_discrete}
    base = {k: value for k, value in base.items() if k not in integers}

    @jax.jit
    def of_rows(base):
        def log_likelihood(base, row):
            return space.log_likelihood(space.constrain({**base, **integers}), row)

        return jax.vmap(jax.value_and_grad(log_likelihood), (None, 0))(base, records)

    values, gradients = of_rows(base)
    assert values.shape == (N,)
    for leaf in jax.tree.leaves((values, gradients)):
        assert np.all(np.isfinite(leaf))
    parents = frozenset().union(*space.parents.values())
    for key, gradient in gradients.items():
        assert np.any(gradient != 0) or key in parents or key == "noise"
    assert isinstance(family, families.MeanField)
    assert latents.recentred(space).curved.ndim == 1


@pytest.mark.slow
def test_what_obs_mask_leaves_out_counts_for_nothing():
    records = first_rows(MORE["missing by obs_mask"])
    space = latents.from_model(missing_by_obs_mask, records)
    w = jnp.array([0.3, -0.2, 0.1])
    found = jax.vmap(space.log_likelihood, (None, 0))({"w": w}, records)
    density = dist.Normal(records["X"] @ w, 1).log_prob(records["y"])
    np.testing.assert_allclose(found, np.where(records["seen"], density, 0.0), rtol=1e-5)


def by_name(space):
    return {latent.name: latent for latent in space.latents}


def test_at_least_twelve_kinds_come_with_data():
    assert len(EXAMPLES) >= 12
    for example in EXAMPLES.values():
        assert len({len(column) for column in example.records.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["series by a loop", pytest.param("missing and weighted", marks=pytest.mark.slow)]
)
def test_it_can_be_fitted_in_private(name):
    example = MORE[name]
    result = dppvi.fit(
        example.model,
        None,
        example.records,
        rng_key=jax.random.key(0),
        clients=2,
        budget=dppvi.PrivacyBudget(1.0, 1e-3),
        num_rounds=1,
        model_kwargs=example.model_kwargs,
        progress_bar=False,
    )
    for leaf in jax.tree.leaves(result.posterior.natural):
        assert np.all(np.isfinite(leaf))


# SVI approximates what obs_mask leaves out as well, so that all it finds is too narrow.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name != "missing by obs_mask"])
def test_it_ends_where_svi_ends(name):
    """As `python -m benchmarks examples` shows for the models of `models/`."""
    posterior = benchmark.pvi(MORE[name], clients=3)
    shift, percent = benchmark.difference(benchmark.marginals(posterior), benchmark.svi(MORE[name]))
    assert shift < 0.05
    assert percent < 3
