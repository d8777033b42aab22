# %% [markdown]
# # Choosing a method
#
# **Goals.** The library has three ways to make partitioned variational inference private, with or
# without a trusted aggregator, and baselines. We compare them on one data set with one budget:
# messages, accuracy, and a score that penalises overconfidence.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_dppvi as dppvi
from numpyro_dppvi.datasets import load_adult

# %% [markdown]
# ## Data
#
# UCI Adult: who earns more than 50 000 dollars? Ten clients have equal parts of one half of the
# rows; the other half is public and used for scoring. (Its numeric columns were standardised with
# pooled means, which no epsilon covers. This is the paper's preprocessing, for comparable numbers.)

# %% quick="records = {name: column[:2400] for name, column in records.items()}"
data = load_adult()
records = {"X": data.X_train, "y": data.y_train}

# %%
clients = dppvi.partition(jax.random.key(0), records["y"], 10)
budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
print(
    f"{len(records['y'])} rows, clients of {set(clients.sizes)}, {data.X_train.shape[1]} features"
)

# %% [markdown]
# ## Model
#
# Logistic regression with standard normal priors; the guide is the default.


# %%
def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# %% [markdown]
# ## Inference
#
# Which method would `fit` take by itself?

# %%
print(dppvi.recommend(model, records, clients.sizes, budget))

# %% [markdown]
# Every method is one value. The settings of the shard methods (number of shards, clip, steps) were
# chosen on other rows ([reproduction](../reproduction.md)); `DPOptimization()`, `FisherScoring()`
# and the baselines have their defaults. Virtual clients appear twice: with shards of six records
# and Adam, and, where only sums are seen, with one shard per record and
# [natural gradients](../methods.md), which are unsafe without an aggregator.

# %% quick="num_steps = 20"
num_steps = 200  # of the global baseline

# %%
sizes = clients.sizes
natural = dppvi.NaturalGradient()  # one step a shard, clipped in units of q's standard deviations
summed = {
    "schedule": dppvi.synchronous,
    "num_rounds": 15,
    "damping": 0.75,
    "trusted_aggregator": True,
}
methods = {
    "DP optimisation": (dppvi.DPOptimization(), {}),
    "Fisher scoring": (dppvi.FisherScoring(), {}),
    "virtual clients": (
        dppvi.VirtualClients(min(sizes) // 6, 0.015, 20, optax.adam(0.05)),
        {"num_rounds": 8, "damping": 0.15},
    ),
    "virtual clients, aggregator": (dppvi.VirtualClients(sizes, 0.015, 1, natural), summed),
    "committee, split prior": (dppvi.BayesianCommitteeMachine("split"), {}),
    "global VI, aggregator": (
        dppvi.GlobalVI(),
        {"num_rounds": num_steps, "trusted_aggregator": True},
    ),
}
runs = {
    name: dppvi.fit(
        model,
        None,
        records,
        rng_key=jax.random.key(1),
        clients=clients,
        method=method,
        budget=budget,
        **arguments,
    )
    for name, (method, arguments) in methods.items()
}
runs["without privacy"] = dppvi.fit(
    model,
    None,
    records,
    rng_key=jax.random.key(1),
    clients=clients,
    method=dppvi.NonPrivate(),
    num_rounds=10,
)

# %% [markdown]
# ## Diagnostics
#
# Each run reports how it ended. Fisher scoring has to release an information matrix. Here that has
# 109 rows, and most of it is noise: above, `recommend` said so before any record was read. Its
# intervals include this noise. Those of DP optimisation and of virtual clients do not, and their
# status says how much is missing.
#
# Without privacy nothing hides how small rounds are: a category's
# indicators add up to what the bias says, so that single weights are known far less well than
# their sums. Along these directions, which predictions do not see, q is still on its way.

# %%
for name, run in runs.items():
    print(f"{name}: {run.status}")

# %% [markdown]
# ## Prediction
#
# Scores of 100 draws on the public rows: the fraction predicted correctly, and the mean log
# probability of the outcomes, which penalises overconfidence.


# %%
def score(run):
    draws = run.posterior.sample(jax.random.key(2), (100,))["w"]
    signs = 2 * data.y_test - 1
    each = jax.nn.log_sigmoid(signs * (draws @ data.X_test.T))  # by draw and row
    log_probability = jax.scipy.special.logsumexp(each, axis=0) - jnp.log(len(draws))
    return float((log_probability > jnp.log(0.5)).mean()), float(log_probability.mean())


scores = {name: score(run) for name, run in runs.items()}
messages = {name: run.status.rounds for name, run in runs.items()}
worst = {name: run.ledger.spent().max() if run.plan else np.inf for name, run in runs.items()}
print(f"{'':<28} accuracy  log-likelihood  messages a client  epsilon")
for name, (accuracy, loglik) in scores.items():
    print(f"{name:<28} {accuracy:>8.4f} {loglik:>15.4f} {messages[name]:>18} {worst[name]:>8.4g}")

# %% alt="Log-likelihood on public rows by method; squares need a trusted aggregator"
figure, axis = plt.subplots(figsize=(4.8, 3.8), layout="constrained")
for height, (name, (_, loglik)) in enumerate(reversed(scores.items())):
    axis.plot(loglik, height, "C2s" if "aggregator" in name else "C0o")
axis.axvline(scores["without privacy"][1], color="grey", linewidth=0.8, linestyle=":")
axis.set(title="log-likelihood, ε = 1", yticks=range(len(scores)), yticklabels=reversed(scores))
axis.set_xlabel(
    "further right is better; green squares need a trusted aggregator", fontsize="small"
)
axis.locator_params(axis="x", nbins=4)
axis.grid(axis="y", color="#e5e5e5")

# %% tags=["remove-input"]
from IPython.display import Markdown

alone = {name: s[1] for name, s in scores.items() if "aggregator" not in name}
alone.pop("without privacy")
best = max(alone, key=alone.get)
trusted = {name: s[1] for name, s in scores.items() if "aggregator" in name}
lead = max(trusted, key=trusted.get)
Markdown(
    f"By log-likelihood and where nobody is trusted with sums, *{best}* came out first in this run "
    f"({scores[best][1]:.4f}, {messages[best]} messages a client). With an aggregator it was "
    f"*{lead}* ({scores[lead][1]:.4f}, {messages[lead]} messages); without privacy it is "
    f"{scores['without privacy'][1]:.4f}."
)

# %% [markdown]
# One run each: standard errors over seeds are in the [measurements](../benchmarks.md), and
# [how to choose](../methods.md) says why methods differ. A score says nothing about the width of
# intervals: only Fisher scoring's include the noise.
#
# ## What to report
#
# All these runs together cost their budgets' sum. So a study chooses its method beforehand, by
# `recommend` or on made-up records, and reports one run.

# %% tags=["remove-input"]
ours = runs["DP optimisation"]
Markdown(
    f"> {len(records['y'])} records of ten clients entered a Bayesian logistic regression on "
    f"{data.X_train.shape[1]} columns, fitted by differentially private partitioned variational "
    f"inference (numpyro_dppvi {dppvi.__version__}, DPOptimization with its defaults, "
    f"{ours.status.rounds} rounds) at epsilon 1 and delta 1e-5 for the replacement of one record "
    f"of any client. On {len(data.y_test)} public rows accuracy is "
    f"{scores['DP optimisation'][0]:.4f} and the mean log probability of the outcome is "
    f"{scores['DP optimisation'][1]:.4f}. Columns were standardised with pooled means, which this "
    "epsilon does not cover."
)

# %% [markdown]
# ## References
#
# Becker and Kohavi (1996), *Adult*, UCI Machine Learning Repository, CC BY 4.0. Heikkilä, Ashman,
# Swaroop, Turner and Honkela (2023), *Differentially private partitioned variational inference*,
# TMLR: Table 1 and Figure 2.
