# %% [markdown]
# # Hello, world: three hospitals
#
# **Goals.** Three hospitals of unequal size ask the same question: does a treatment help, given a
# patient's age? None of them may share its records. We fit one Bayesian logistic regression to all
# of them, and compare it with what each hospital finds alone, and with NUTS on the pooled records,
# which nobody may compute in reality.

# %%
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi
from tutorials.notebook import Text, forest, pick

# %% [markdown]
# ## Data
#
# A record is a patient: a one for the intercept, age (standardised by public numbers), treated or
# not, and recovered or not. They are simulated, so we know the truth.


# %%
def hospital(rng, size, truth=(0.3, -0.8, 1.0)):
    X = np.column_stack([np.ones(size), rng.normal(size=size), rng.integers(0, 2, size)])
    return {"X": X, "y": rng.binomial(1, 1 / (1 + np.exp(-X @ truth)))}


rng, sizes = np.random.default_rng(0), (400, 2000, 8000)
data = [hospital(rng, size) for size in sizes]

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
# First the plan: what will be released, with how much noise and at what cost. It needs the sizes
# of the hospitals, but no records.

# %%
budget = dppvi.PrivacyBudget(epsilon=2.0, delta=1e-5)
print(dppvi.plan_privacy(dppvi.DPOptimization(), budget, num_rounds=20, client_sizes=sizes))

# %% [markdown]
# Then the fit, with defaults except for the number of rounds.

# %%
key = jax.random.key(0)
result = dppvi.fit(model, None, data, rng_key=key, budget=budget, num_rounds=20)

# %% [markdown]
# ## Diagnostics
#
# This plot needs the pooled records, so it is possible in simulations only. (In a real study, use
# `dppvi.diagnose(result)`, which needs released values only.)

# %%
comparison = dppvi.compare(result, data, rng_key=key, num_samples=pick(1000, 100))
labels = {f"nonprivate_client_{m}": f"hospital {m + 1} alone, {n}" for m, n in enumerate(sizes)}
labels |= {"this posterior": "together, ε = 2", "nonprivate_pooled_nuts": "NUTS on all records"}
of = {label: (comparison.mean[p]["w"], comparison.stddev[p]["w"]) for p, label in labels.items()}
rows = {label: list(zip(mean, sd, strict=True)) for label, (mean, sd) in of.items()}
forest(rows, ["intercept", "age", "treatment"])

# %% tags=["remove-input"]
smallest, ours = (rows[label][2] for label in (labels["nonprivate_client_0"], "together, ε = 2"))
exact, spent = rows["NUTS on all records"][2], result.ledger.spent().max()
first = result.posterior_at(1).stddev["w"][2]
Text(
    f"The treatment's effect is {ours[0]:.2f} ± {ours[1]:.2f} together, at epsilon {spent:.4f} for "
    f"every hospital; {smallest[0]:.2f} ± {smallest[1]:.2f} for the smallest hospital alone, and "
    f"{exact[0]:.2f} ± {exact[1]:.2f} with all records in one place. The price of privacy is "
    f"width: this posterior is {ours[1] / exact[1]:.1f} times as wide as the exact one "
    f"([why](../faq.md)); after the first round it was {first / exact[1]:.1f} times as wide. Its "
    f"mean is off by {abs(ours[0] - exact[0]):.2f}, which is "
    f"{abs(ours[0] - exact[0]) / ours[1]:.1f} of its own standard deviations."
)

# %% [markdown]
# ## Prediction
#
# Two patients of mean age, the second one treated: who will recover?

# %%
patients = np.array([[1, 0, 0], [1, 0, 1]])
chance = result.posterior.predictive(jax.random.key(1), 4000, X=patients)["y"].mean(axis=0)

# %% tags=["remove-input"]
true = 1 / (1 + np.exp(-patients @ np.array([0.3, -0.8, 1.0])))
Text(
    f"The posterior gives them {chance[0]:.0%} and {chance[1]:.0%}; the simulation's truth is "
    f"{true[0]:.0%} and {true[1]:.0%}."
)

# %% [markdown]
# ## The statement
#
# The privacy cost, for the report. Predictions and plots cost nothing more, because they are
# computed from what was released.

# %%
print(result.privacy_statement())

# %% [markdown]
# ## References
#
# Heikkilä, Ashman, Swaroop, Turner and Honkela (2023), *Differentially private partitioned
# variational inference*, TMLR; `dppvi.citation(result)` prints the rest. Next:
# [a hospital study](hospitals.md) on real records.
