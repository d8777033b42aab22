# %% [markdown]
# # A gallery of models
#
# **Goals.** Ten kinds of study, each with its model, the call and a picture in about twenty lines.
# All records are made up, so the truth is known; three clients have a thousand records each, and
# each has a budget of epsilon 2. Every fit takes the method that `recommend` recommends, and 20
# rounds: after 10, the default, some of these runs end unsettled. Crosses and dotted lines in the
# pictures are the truth.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi

# %% quick="n, num_rounds = 300, 10"
n, num_rounds = 3000, 20

# %%
rng = np.random.default_rng(0)
budget = dppvi.PrivacyBudget(epsilon=2.0, delta=1e-5)


def fit(model, records):
    """The call: one table of records, dealt to three clients."""
    key = jax.random.key(0)
    result = dppvi.fit(
        model, None, records, rng_key=key, clients=3, budget=budget, num_rounds=num_rounds
    )
    print(f"{type(result.method).__name__}: {result.status}")
    return result.posterior


def forest(posterior, names, truth, title):
    """Entries of latents with 90 % intervals, and their true values as crosses."""
    mean = np.concatenate([np.ravel(posterior.mean[name]) for name in names])
    sd = np.concatenate([np.ravel(posterior.stddev[name]) for name in names])
    labels = [
        name if np.ndim(posterior.mean[name]) == 0 else f"{name}[{index}]"
        for name in names
        for index in range(np.size(posterior.mean[name]))
    ]
    _, axis = plt.subplots(figsize=(3.6, 0.8 + 0.28 * len(mean)), layout="constrained")
    places = -np.arange(len(mean))
    axis.errorbar(mean, places, xerr=1.645 * sd, fmt="o", capsize=3)
    axis.plot(np.concatenate([np.ravel(value) for value in truth]), places, "x", color="C3")
    axis.set(title=title, yticks=places, yticklabels=labels, ylim=(0.5 - len(mean), 0.5))


def curve(posterior, columns, x, y, title):
    """A predicted mean with 90 % of the posterior's draws, and the truth dotted."""
    drawn = np.asarray(posterior.predictive(jax.random.key(1), 2000, **columns)["mean"])
    low, middle, high = np.quantile(drawn, (0.05, 0.5, 0.95), axis=0)
    _, axis = plt.subplots(figsize=(3.6, 2.6), layout="constrained")
    axis.fill_between(x, low, high, alpha=0.3)
    axis.plot(x, middle)
    axis.plot(x, y, ":", color="C3")
    axis.set(title=title)


# %% [markdown]
# ## A linear regression in raw units
#
# Blood pressure by age in years, with an unknown spread. Priors are in mmHg.


# %%
def pressure(age, y=None):
    base = numpyro.sample("base", dist.Normal(100, 50))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    spread = numpyro.sample("spread", dist.HalfNormal(30))
    mean = numpyro.deterministic("mean", base + slope * age)
    with numpyro.plate("people", age.shape[0]):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


age = rng.normal(55, 12, n)
posterior = fit(pressure, {"age": age, "y": 90 + 0.7 * age + rng.normal(0, 15, n)})

# %% alt="Mean pressure by age, with 90 % interval and truth"
grid = np.linspace(30, 80, 50)
curve(posterior, {"age": grid}, grid, 90 + 0.7 * grid, "pressure by age, mmHg")

# %% [markdown]
# ## Who falls ill: a logistic regression


# %%
def illness(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([4]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


truth = np.array([-1.0, 0.8, -0.5, 0.0])
X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
posterior = fit(illness, {"X": X, "y": rng.binomial(1, 1 / (1 + np.exp(-X @ truth)))})

# %% alt="Log odds ratios with 90 % intervals and truth"
forest(posterior, ["w"], [truth], "log odds ratios")

# %% [markdown]
# ## Rates: counts with an exposure


# %%
def accidents(X, years, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("drivers", X.shape[0]):
        numpyro.sample("y", dist.Poisson(years * jnp.exp(X @ w)), obs=y)


truth = np.array([-1.0, 0.4, -0.3])
X, years = np.column_stack([np.ones(n), rng.normal(size=(n, 2))]), rng.uniform(0.5, 3, n)
y = rng.poisson(years * np.exp(X @ truth))
posterior = fit(accidents, {"X": X, "years": years, "y": y})

# %% alt="Log rate ratios with 90 % intervals and truth"
forest(posterior, ["w"], [truth], "log rate ratios")

# %% [markdown]
# ## Groups: varying intercepts


# %%
def schools(school, y=None):
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("schools", 6):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    with numpyro.plate("pupils", school.shape[0]):
        numpyro.sample("y", dist.Normal(centre + effect[school], 1.0), obs=y)


truth, school = rng.normal(0, 0.5, 6), rng.integers(0, 6, n)
posterior = fit(schools, {"school": school, "y": truth[school] + rng.normal(0, 1, n)})

# %% alt="Effects of schools with 90 % intervals and truth"
forest(posterior, ["effect"], [truth], "effects of schools")

# %% [markdown]
# ## Grades: an ordinal regression


# %%
def satisfaction(wait, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    gaps = dist.Normal(0, 1).expand([3]).to_event(1)
    ordered = dist.TransformedDistribution(gaps, dist.transforms.OrderedTransform())
    cuts = numpyro.sample("cuts", ordered)
    with numpyro.plate("patients", wait.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(slope * wait, cuts), obs=y)


wait, cuts = rng.normal(size=n), np.array([-1.5, 0.0, 1.5])
y = np.digitize(-0.7 * wait + rng.logistic(size=n), cuts)
posterior = fit(satisfaction, {"wait": wait, "y": y})

# %% alt="Slope and cut points with 90 % intervals and truth"
forest(posterior, ["slope", "cuts"], [-0.7, cuts], "slope and cut points")

# %% [markdown]
# ## Survival with censoring
#
# Whoever was lost to follow-up has survived up to then: that goes into a `factor`. Its outcomes
# cannot be drawn from the model, which costs `FisherScoring()` some width.


# %%
def survival(treated, time, died):
    scale = numpyro.sample("scale", dist.Normal(0, 2))
    effect = numpyro.sample("effect", dist.Normal(0, 2))
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    with numpyro.plate("patients", time.shape[0]):
        hazard = (time / jnp.exp(scale + effect * treated)) ** shape
        density = jnp.log(shape) + jnp.log(hazard) - jnp.log(time)
        numpyro.factor("seen", jnp.where(died, density, 0.0) - hazard)


treated = rng.integers(0, 2, n)
lifetime, followed = np.exp(1 + 0.5 * treated) * rng.weibull(1.5, n), rng.exponential(5, n)
records = {"treated": treated, "time": np.minimum(lifetime, followed), "died": lifetime < followed}
posterior = fit(survival, records)

# %% alt="Parameters of the survival model with 90 % intervals and truth"
forest(posterior, ["scale", "effect", "shape"], [1.0, 0.5, 1.5], "log time and shape")

# %% [markdown]
# ## Two kinds of people: a mixture


# %%
def mixture(y):
    share = numpyro.sample("share", dist.Beta(2, 2))
    low = numpyro.sample("low", dist.Normal(-1, 1))
    gap = numpyro.sample("gap", dist.LogNormal(0.7, 0.5))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    kinds = dist.Categorical(probs=jnp.stack([share, 1 - share]))
    parts = dist.Normal(jnp.stack([low, low + gap]), spread)
    with numpyro.plate("people", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(kinds, parts), obs=y)


y = np.where(rng.random(n) < 0.3, -1.0, 1.5) + rng.normal(0, 0.6, n)
posterior = fit(mixture, {"y": y})

# %% alt="Share, centres and spread with 90 % intervals and truth"
forest(posterior, ["share", "low", "gap", "spread"], [0.3, -1.0, 2.5, 0.6], "two kinds of people")

# %% [markdown]
# ## A record is a short series: a panel


# %%
def panel(y):
    level = numpyro.sample("level", dist.Normal(0, 1))
    keeps = numpyro.sample("keeps", dist.Uniform(-1, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("people", y.shape[0]):
        mean = level + keeps * (y[:, :-1] - level)
        numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y[:, 1:])


y = np.full((n, 6), 0.5)
for step in range(1, 6):
    y[:, step] = 0.5 + 0.6 * (y[:, step - 1] - 0.5) + rng.normal(0, 0.5, n)
posterior = fit(panel, {"y": y})

# %% alt="Level, persistence and noise with 90 % intervals and truth"
forest(posterior, ["level", "keeps", "noise"], [0.5, 0.6, 0.5], "an autoregression")

# %% [markdown]
# ## Surplus zeros


# %%
def visits(x, y=None):
    never = numpyro.sample("never", dist.Beta(1, 1))
    w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        rate = jnp.exp(w[0] + w[1] * x)
        numpyro.sample("y", dist.ZeroInflatedPoisson(never, rate), obs=y)


x = rng.normal(size=n)
y = rng.poisson(np.exp(0.8 + 0.4 * x)) * (rng.random(n) > 0.25)
posterior = fit(visits, {"x": x, "y": y})

# %% alt="Share of people who never come, and log rates, with 90 % intervals and truth"
forest(posterior, ["never", "w"], [0.25, [0.8, 0.4]], "visits to a doctor")

# %% [markdown]
# ## A smooth curve
#
# Six bumps with public places and widths, whose heights are latents.


# %%
def bumps(x):
    return np.exp(-0.5 * ((x[:, None] - np.linspace(-1, 1, 6)) / 0.4) ** 2)


def smooth(B, y=None):
    heights = numpyro.sample("heights", dist.Normal(0, 1).expand([6]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(0.5))
    mean = numpyro.deterministic("mean", B @ heights)
    with numpyro.plate("records", B.shape[0]):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


x = rng.uniform(-1, 1, n)
posterior = fit(smooth, {"B": bumps(x), "y": np.sin(3 * x) + rng.normal(0, 0.3, n)})

# %% alt="The curve with 90 % interval and truth"
grid = np.linspace(-1, 1, 60)
curve(posterior, {"B": bumps(grid)}, grid, np.sin(3 * grid), "a smooth curve")

# %% [markdown]
# At both ends the curve misses the truth, and without privacy it does so, too: six bumps do not
# bend enough there. Intervals do not know what a model leaves out.
#
# **What to report.** Of each of these, what a [complete study](hospitals.md) reports:
#
# > *Records* of *clients* entered *the model* with *its priors*, fitted by differentially private
# > partitioned variational inference (numpyro_dppvi *version*, *method*, *number* of rounds) at
# > epsilon *...* and delta *...* for the replacement of one record. *What was asked* is *mean*
# > (90 % interval *low* to *high*, which includes the noise for privacy).
#
# A run whose status says that it has not settled is not reported. It gets more rounds or a larger
# budget first.
#
# More models, with what is refused and why, are on the page
# [Which models](../models.md).
