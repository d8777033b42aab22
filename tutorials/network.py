# %% [markdown]
# # A Bayesian neural network
#
# **Goals.** We fit a small network with a prior on its weights under privacy. Each client sees only
# a part of the plane. Unlike a plain network, draws from its posterior can disagree: we look at
# where they do.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_dppvi as dppvi

HIDDEN = 12

# %% [markdown]
# ## Data
#
# Two half moons. Each of four clients holds a quarter of the plane, and so sees only a part of the
# boundary.


# %%
def moons(rng, size):
    angle, y = rng.uniform(0, np.pi, size), rng.integers(0, 2, size)
    x = np.where(y, np.cos(angle), 1 - np.cos(angle)) - 0.5
    height = np.where(y, np.sin(angle), 0.5 - np.sin(angle)) - 0.25
    X = np.column_stack([x, height]) * 2 + rng.normal(0, 0.25, (size, 2))
    return X.astype(np.float32), y


# %% quick="num_points, num_rounds, num_draws = 800, 3, 50"
num_points, num_rounds, num_draws = 6000, 48, 400

# %%
rng = np.random.default_rng(0)
X, y = moons(rng, num_points)
quarter = (X[:, 0] > np.median(X[:, 0])) * 2 + (X[:, 1] > np.median(X[:, 1]))
data = [{"X": X[quarter == c], "y": y[quarter == c]} for c in range(4)]
X_test, y_test = moons(rng, 2000)
print("records of each client:", [len(part["y"]) for part in data])

# %% [markdown]
# ## Model
#
# One hidden layer. Any Flax or Haiku module works as well, if its weights are `numpyro.sample`
# statements.


# %%
def network(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, HIDDEN]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([HIDDEN + 1]).to_event(1))
    ones = jnp.ones((X.shape[0], 1))
    hidden = jnp.tanh(jnp.concatenate([X, ones], axis=1) @ w)
    with numpyro.plate("points", X.shape[0]):
        logits = jnp.concatenate([hidden, ones], axis=1) @ v
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


# %% [markdown]
# ## Inference
#
# A network has no linear predictor, so expectations are computed with random draws. The prior is a
# saddle point, where symmetry makes all gradients nearly zero. So we start elsewhere: `init_scale`
# starts at random weights from `rng_key`, about 0.3 prior standard deviations from zero and with
# that width, which depend on no records. We also take more and larger steps than the defaults, and
# more rounds.

# %%
method = dppvi.DPOptimization(
    clip_norm=1.0,
    num_local_steps=10,
    optimizer=optax.adam(0.03),
    expectation=dppvi.MonteCarlo(8),
)
budget = dppvi.PrivacyBudget(epsilon=4.0, delta=1e-5)
key = jax.random.key(0)
result = dppvi.fit(
    network,
    None,
    data,
    rng_key=key,
    method=method,
    budget=budget,
    num_rounds=num_rounds,
    init_scale=0.3,
)
print(result.status)

# %% [markdown]
# ## Diagnostics
#
# The status measures how far the last round moved weights. Where it says that these have not
# settled, nothing is reported of them. Predictions are another question: the posterior of every
# round was released, so each may be scored on public points.


# %%
def score(posterior):
    draws = posterior.predictive(jax.random.key(1), num_draws, X=X_test)["y"]
    risk = np.asarray(draws).mean(axis=0)
    return float(np.mean((risk > 0.5) == y_test))


rounds = np.linspace(1, num_rounds, 5).astype(int).tolist()
by_round = {r: score(result.posterior_at(r)) for r in rounds}
linear = np.column_stack([X, np.ones(len(X))])
weights = np.linalg.lstsq(linear, 2.0 * y - 1, rcond=None)[0]
line = float(np.mean((np.column_stack([X_test, np.ones(2000)]) @ weights > 0) == y_test))
for number, share in by_round.items():
    print(f"predicted correctly after round {number:>2}: {share:.3f}")
print(f"by a straight line:        {line:.3f}")

# %% [markdown]
# ## Prediction
#
# Predictions improve less in the last rounds than before. The probability of a class is the mean
# over draws of the network; where draws disagree, it is uncertain.

# %%
side = np.linspace(-3.2, 3.2, 60, dtype=np.float32)
grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
weights = result.posterior.sample(jax.random.key(2), (num_draws,))
ones = np.ones((len(grid), 1), np.float32)
hidden = jnp.tanh(jnp.einsum("np,sph->snh", np.concatenate([grid, ones], 1), weights["w"]))
logits = jnp.einsum("snh,sh->sn", hidden, weights["v"][:, :-1]) + weights["v"][:, -1:]
chances = np.asarray(jax.nn.sigmoid(logits))
shape = (len(side), len(side))
titles = ("probability of the circles", "disagreement of draws (sd)")
shown = (chances.mean(axis=0), chances.std(axis=0))

# %% alt=["Circles are probable above a wavy line", "Draws disagree along that line alone"]
for values, title, colors in zip(shown, titles, ("RdBu", "viridis"), strict=True):
    figure, axis = plt.subplots(figsize=(4, 3.4), layout="constrained")
    area = axis.contourf(side, side, values.reshape(60, 60), levels=10, cmap=colors, alpha=0.8)
    for label, color, marker in ((0, "C3", "^"), (1, "C0", "o")):
        points = X_test[:150][y_test[:150] == label]
        axis.scatter(*points.T, c=color, marker=marker, s=12, edgecolors="white", linewidths=0.4)
    ends = (side[0], side[-1])
    axis.set(title=title, xticks=[], yticks=[], aspect="equal", xlim=ends, ylim=ends)
    bar = figure.colorbar(area, ax=axis, shrink=0.85)

# %% tags=["remove-input"]
from IPython.display import Markdown

points = result.posterior.predictive(jax.random.key(3), num_draws, X=X_test)["y"]
risk = np.asarray(points).mean(axis=0)
sure, right = np.maximum(risk, 1 - risk), (risk > 0.5) == y_test
doubt = np.abs(chances.mean(axis=0) - 0.5)
boundary = doubt <= np.quantile(doubt, 0.1)
spread = chances.std(axis=0)
far = np.linalg.norm(grid[:, None] - X_test, axis=-1).min(axis=1) > 1
Markdown(
    f"At epsilon {result.ledger.spent().max():.2f} the network tells {right.mean():.1%} of the "
    f"public points right; a straight line tells {line:.1%}. Where it is wrong it gave its answer "
    f"a probability of {sure[~right].mean():.2f} on average, where it is right "
    f"{sure[right].mean():.2f}. In the tenth of the plane that is nearest to even odds draws "
    f"disagree by {spread[boundary].mean():.2f} (standard deviation of the probability), elsewhere "
    f"by {spread[~boundary].mean():.2f}, and by {spread[far].mean():.2f} where no point is nearer "
    "than one unit."
)

# %% [markdown]
# **What to keep in mind.** Permuting a network's hidden units does not change it, so means of
# single weights are meaningless, while predictions are not. Independent normals cover only one of
# many equivalent arrangements of weights, so small disagreement far from all points does not mean
# certainty.
#
# ## What to report

# %% tags=["remove-input"]
unsettled = result.status.outcome.name == "UNSETTLED"
weights_too = " Its weights had not settled and are not reported." if unsettled else ""
Markdown(
    f"> A neural network with one hidden layer of {HIDDEN} units and standard normal priors was "
    f"fitted to {len(y)} points of four clients by differentially private partitioned variational "
    f"inference (numpyro_dppvi {dppvi.__version__}, {type(result.method).__name__} with clip 1, "
    f"ten steps of Adam at 0.03, {num_rounds} rounds, started at random weights) at epsilon 4 and "
    f"delta 1e-5 for the replacement of one record. It predicts {right.mean():.1%} of "
    f"{len(y_test)} public points correctly, a linear classifier without privacy "
    f"{line:.1%}.{weights_too}"
)

# %% [markdown]
# ## References
#
# Heikkilä, Ashman, Swaroop, Turner and Honkela (2023), *Differentially private partitioned
# variational inference*, TMLR.
