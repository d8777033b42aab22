# %% [markdown]
# # Hello, world: three hospitals
#
# **Goals.** Three hospitals ask the same question: given a patient's age, does a treatment help?
# None of them may share its records. We fit one Bayesian logistic regression to all of them, and
# hold it against what each hospital finds alone. For whom does joining pay, and for whom not?

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi

# %% [markdown]
# ## Data
#
# A record is a patient: a one for the intercept, age (standardised by public numbers), treated or
# not, and recovered or not. They are simulated, so we know the truth.


# %%
def hospital(rng, size, truth=(0.3, -0.8, 1.0)):
    X = np.column_stack([np.ones(size), rng.normal(size=size), rng.integers(0, 2, size)])
    return {"X": X, "y": rng.binomial(1, 1 / (1 + np.exp(-X @ truth)))}


rng, sizes = np.random.default_rng(0), {"Kuopio": 400, "Tampere": 1200, "Helsinki": 6000}
data = {name: hospital(rng, size) for name, size in sizes.items()}

# %% [markdown]
# ## Model
#
# Ordinary NumPyro; nothing in it is about hospitals.


# %%
def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# %% [markdown]
# ## Inference
#
# Is the study worth it? That is answered before any record is read: which method suits the budget,
# how wide intervals will be at the least, and who cannot gain.

# %%
budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
print(dppvi.recommend(model, data["Kuopio"], sizes, budget))

# %% [markdown]
# Then the fit, with the defaults. It takes the recommended method.

# %%
key = jax.random.key(0)
result = dppvi.fit(model, None, data, rng_key=key, budget=budget)
print(result.status)

# %% [markdown]
# ## Diagnostics
#
# From released values alone: has the posterior settled, and whose records is it made of?

# %%
print(dppvi.diagnose(result))

# %% [markdown]
# These hospitals are simulated, so we may also look at what nobody could compute in reality: each
# hospital alone and without privacy, and NUTS on all records in one place.

# %% quick="comparison = dppvi.compare(result, data, rng_key=key, num_samples=50, num_warmup=50)"
comparison = dppvi.compare(result, data, rng_key=key)

# %% alt="Mean and 90 % interval of the treatment's effect: each hospital alone, together, exact"
labels = {f"nonprivate_{name}": f"{name} alone ({size})" for name, size in sizes.items()}
labels |= {"this posterior": "together, ε = 1", "nonprivate_pooled_nuts": "all in one place"}
figure, axis = plt.subplots(figsize=(4.6, 2.6), layout="constrained")
axis.axvline(1.0, color="grey", linestyle=":", zorder=0)
axis.set(yticks=range(0, -5, -1), yticklabels=labels.values(), title="effect of the treatment")
for row, name in enumerate(labels):
    mean, sd = comparison.mean[name]["w"][2], comparison.stddev[name]["w"][2]
    axis.errorbar(mean, -row, xerr=1.645 * sd, fmt="o", capsize=3)

# %% tags=["remove-input"]
from IPython.display import Markdown

sd = {posterior: comparison.stddev[posterior]["w"][2] for posterior in labels}
together, pooled = sd["this posterior"], sd["nonprivate_pooled_nuts"]
gain = {name: sd[f"nonprivate_{name}"] / together for name in sizes}
told = ", ".join(f"{times:.1f} for {name}" for name, times in gain.items())
Markdown(
    "The dotted line is the truth. Alone, intervals are so many times as wide as together: "
    f"{told}. The price of privacy is that the joint posterior is {together / pooled:.1f} times as "
    "wide as it would be with all records in one place."
)

# %% [markdown]
# **When joining pays.** Where that number is above one. A hospital with few records gains most; one
# that holds most of the records gains nothing for itself, because privacy costs it more than the
# others' records bring. `recommend` gives a limit that no method reaches: where it says that
# joining can pay, it need not. A larger epsilon or more partners move the line. So try it with
# made-up records, as here, before anybody spends a budget.
#
# ## Prediction
#
# Two patients of mean age, the second one treated: who will recover?

# %%
patients = np.array([[1, 0, 0], [1, 0, 1]])
chance = result.posterior.predictive(jax.random.key(1), 4000, X=patients)["y"].mean(axis=0)

# %% tags=["remove-input"]
true = 1 / (1 + np.exp(-patients @ np.array([0.3, -0.8, 1.0])))
Markdown(
    f"The posterior gives them {chance[0]:.0%} and {chance[1]:.0%}; the simulation's truth is "
    f"{true[0]:.0%} and {true[1]:.0%}."
)

# %% [markdown]
# ## The statement
#
# The privacy cost. Predictions and plots cost nothing more, because they are computed from what was
# released.

# %%
print(result.privacy_statement())

# %% [markdown]
# ## What to report

# %% tags=["remove-input"]
mean, sd = result.posterior.mean["w"][2], result.posterior.stddev["w"][2]
low, high = np.exp([mean - 1.645 * sd, mean + 1.645 * sd])
Markdown(
    "> We fitted a Bayesian logistic regression with standard normal priors to "
    f"{sum(sizes.values())} patients of three hospitals by differentially private partitioned "
    f"variational inference (numpyro_dppvi {dppvi.__version__}, {type(result.method).__name__}, "
    f"{result.status.rounds} rounds). Every hospital's releases are (1, 1e-5)-differentially "
    "private with respect to the replacement of one patient's record. Treatment multiplied the "
    f"odds of recovery by {np.exp(mean):.2f} (90 % interval {low:.2f} to {high:.2f}, which "
    "includes the noise for privacy)."
)

# %% [markdown]
# Add the statement above as a supplement.
#
# ## References
#
# Heikkilä, Ashman, Swaroop, Turner and Honkela (2023), *Differentially private partitioned
# variational inference*, TMLR; `dppvi.citation(result)` prints the rest. Next:
# [a hospital study](hospitals.md) on real records.
