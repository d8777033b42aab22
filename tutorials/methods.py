# %% [markdown]
# # Choosing a method
#
# **Goals.** The library has three ways to make partitioned variational inference private, with or
# without a trusted aggregator, and baselines. We compare them on one data set with one budget:
# messages, accuracy, and a score that penalises overconfidence.

# %%
import jax
import numpy as np
import optax

import numpyro_dppvi as dppvi
from models import adult
from models.evaluation import held_out
from models.logistic_regression import logistic_regression
from tutorials.notebook import BLUE, GREEN, GREY, RED, Text, panels, pick

# %% [markdown]
# ## Data
#
# UCI Adult: who earns more than 50 000 dollars? Ten clients have equal parts of one half of the
# rows; the other half is public and used for scoring. (Its numeric columns were standardised with
# pooled means, which no epsilon covers. This is the paper's preprocessing, for comparable numbers.)

# %%
data = adult.load()
train = slice(0, pick(24_421, 2_400))
records = {"X": data.X_train[train], "y": data.y_train[train]}
clients = dppvi.partition(jax.random.key(0), records["y"], 10)
budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
print(
    f"{len(records['y'])} rows, clients of {set(clients.sizes)}, {data.X_train.shape[1]} features"
)

# %% [markdown]
# ## Model
#
# Logistic regression with standard normal priors; the guide is the default.
#
# ## Inference
#
# Every method is one value. The settings of the shard methods (number of shards, clip, steps) were
# chosen on other rows ([reproduction](../reproduction.md)); `DPOptimization()` and the baselines
# have their defaults. Virtual clients appear twice: with shards of six records and Adam, and, where
# only sums are seen, with one shard per record and [natural gradients](../methods.md), which are
# unsafe without an aggregator.

# %%
sizes, scale = clients.sizes, pick(1, 10)
natural = dppvi.NaturalGradient()  # one step a shard, clipped in units of q's standard deviations
summed = {
    "schedule": dppvi.synchronous,
    "num_rounds": 15,
    "damping": 0.75,
    "trusted_aggregator": True,
}
methods = {
    "DP optimisation": (dppvi.DPOptimization(), {"num_rounds": 10}),
    "virtual clients": (
        dppvi.VirtualClients(min(sizes) // 6, 0.015, 20, optax.adam(0.05)),
        {"num_rounds": 8, "damping": 0.15},
    ),
    "virtual clients, aggregator": (dppvi.VirtualClients(sizes, 0.015, 1, natural), summed),
    "committee, split prior": (dppvi.BayesianCommitteeMachine("split"), {}),
    "global VI, aggregator": (
        dppvi.GlobalVI(),
        {"num_rounds": 200 // scale, "trusted_aggregator": True},
    ),
}
runs = {
    name: dppvi.fit(
        logistic_regression,
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
    logistic_regression,
    None,
    records,
    rng_key=jax.random.key(1),
    clients=clients,
    method=dppvi.NonPrivate(),
    num_rounds=pick(10, 2),
)

# %% [markdown]
# ## Diagnostics
#
# Each run reports how it ended. A warning is not a failure: it says where effects of noise had to
# be corrected.

# %%
for name, run in runs.items():
    print(f"{name:<28} {run.status.outcome.value:<10} {run.status.rounds:>4} rounds")

# %% [markdown]
# ## Prediction
#
# Scores of 100 draws on the public rows: the fraction predicted correctly, and the mean log
# probability of the outcomes, which penalises overconfidence.


# %%
def score(run):
    draws = run.posterior.sample(jax.random.key(2), (100,))["w"]
    return [float(x) for x in held_out(draws, data.X_test, data.y_test)]


scores = {name: score(run) for name, run in runs.items()}
messages = {name: run.status.rounds for name, run in runs.items()}
worst = {name: run.ledger.spent().max() if run.plan else np.inf for name, run in runs.items()}
print(f"{'':<28} accuracy  log-likelihood  messages a client  epsilon")
for name, (accuracy, loglik) in scores.items():
    print(f"{name:<28} {accuracy:>8.4f} {loglik:>15.4f} {messages[name]:>18} {worst[name]:>8.4g}")

# %%
figure, axes = panels(2, 4.8, 3.6)
for axis, place, title in zip(axes, (0, 1), ("accuracy", "log-likelihood"), strict=True):
    for height, name in enumerate(reversed(list(scores))):
        summed_here = "aggregator" in name
        color = GREY if name == "without privacy" else GREEN if summed_here else BLUE
        axis.plot(scores[name][place], height, "s" if summed_here else "o", color=color)
    axis.axvline(scores["without privacy"][place], color=RED, linewidth=0.8, linestyle=":")
    axis.set(title=f"{title}, ε = 1", yticks=range(len(scores)))
    axis.set_yticklabels(list(reversed(list(scores))) if place == 0 else [])
    axis.grid(axis="y", color="#e5e5e5")
    axis.set_axisbelow(True)
    axis.locator_params(axis="x", nbins=5)
figure.supxlabel("further right is better; green squares need a trusted aggregator", fontsize=10)
figure

# %% tags=["remove-input"]
alone = {name: s[1] for name, s in scores.items() if "aggregator" not in name}
alone.pop("without privacy")
best = max(alone, key=alone.get)
trusted = {name: s[1] for name, s in scores.items() if "aggregator" in name}
lead = max(trusted, key=trusted.get)
Text(
    f"By log-likelihood and where nobody is trusted with sums, *{best}* came out first in this run "
    f"({scores[best][1]:.4f}, {messages[best]} messages a client). With an aggregator it was "
    f"*{lead}* ({scores[lead][1]:.4f}, {messages[lead]} messages); without privacy it is "
    f"{scores['without privacy'][1]:.4f}. One run each: standard errors over seeds are in the "
    "[measurements](../benchmarks.md), and [how to choose](../methods.md) says why methods differ."
)

# %% [markdown]
# ## References
#
# Becker and Kohavi (1996), *Adult*, UCI Machine Learning Repository, CC BY 4.0. Heikkilä, Ashman,
# Swaroop, Turner and Honkela (2023), *Differentially private partitioned variational inference*,
# TMLR: Table 1 and Figure 2.
