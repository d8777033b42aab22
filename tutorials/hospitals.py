# %% [markdown]
# # A hospital study: who dies in hospital?
#
# **Goals.** Four hospitals, each with its own budget, study which seriously ill patients die in
# hospital. One of them drops out halfway. We check the posterior on held-out patients, base a
# decision on it, and report what it cost.
#
# The records are SUPPORT2: seriously ill adults from five American hospitals, with what was known
# on the third day of the study. A fifth of them is held out and treated as public.

# %%
import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi
from models import support2
from tutorials.notebook import BLUE, GREY, RED, Text, panels, pick

# %% [markdown]
# ## Data
#
# The data set does not say which hospital a patient was in, so we assign rows at random: half of
# them to a university hospital, the others to three smaller ones. Nothing is standardised with the
# records' own means: `models/support2.py` scales by clinical constants, which cost no privacy.

# %%
data = support2.load()
order = np.random.default_rng(0).permutation(len(data.y_train))
order = order[: pick(len(order), 600)]
sizes = [int(share * len(order)) for share in (0.5, 0.25, 0.15, 0.1)]
rows = np.split(order, np.cumsum(sizes))[:4]
hospitals = [{"X": data.X_train[r], "y": data.y_train[r]} for r in rows]
names = list(data.feature_names)
print(f"{len(names)} features; patients by hospital: {sizes}; held out: {len(data.y_test)}")
print(f"of the held-out patients died: {data.y_test.mean():.1%}")

# %% [markdown]
# ## Model
#
# A logistic regression with standard normal priors on the clinical scale: a priori, a laboratory
# value one clinical unit higher changes the odds by a factor of more than e squared with
# probability 4.6 %.


# %%
def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# %% [markdown]
# ## Inference
#
# The ethics committees did not agree on one epsilon, and need not: each hospital's noise follows
# its own budget. The plan is made before any record is read.

# %%
epsilons = (2.0, 4.0, 4.0, 8.0)
budgets = [dppvi.PrivacyBudget(epsilon=e, delta=1e-5) for e in epsilons]
method, num_rounds = dppvi.DPOptimization(), pick(20, 6)
plan = dppvi.plan_privacy(method, budgets, num_rounds=num_rounds, client_sizes=sizes)
print(plan)

# %% [markdown]
# The third hospital will drop out halfway, which nobody knows yet. So we write our own loop: `pvi`
# gives `init / step / posterior`, and we say whom each round visits. What the hospital has sent by
# then stays in the posterior, as its factor, and in the ledger; the rest of its budget is not
# spent.


# %%
def until_one_drops_out(round_number, num_clients):
    present = [0, 1, 2, 3] if round_number < num_rounds // 2 else [0, 1, 3]
    return np.array(present)[:, None]


algorithm = dppvi.pvi(
    model,
    None,
    hospitals[0],  # for its shapes alone
    method=method,
    client_sizes=sizes,
    plan=plan,
    schedule=until_one_drops_out,
)
state, shards = algorithm.init(jax.random.key(0)), dppvi.records.stack_clients(hospitals)
movement = []
for _ in range(num_rounds):
    state, info = algorithm.step(jax.random.key(1), state, shards)
    movement.append(float(info.movement))
posterior = algorithm.posterior(state)
spent = state.ledger.spent()

# %% tags=["remove-input"]
Text(
    f"The hospital that dropped out spent {spent[2]:.2f} of its {epsilons[2]:g}; the others "
    f"{spent[0]:.2f}, {spent[1]:.2f} and {spent[3]:.2f}."
)

# %% [markdown]
# ## Diagnostics
#
# A hospital's contribution to the posterior's precision is the precision of its factor, which was
# released. It depends on both its patients and its budget.

# %%
figure, (left, right) = panels(2)
left.plot(range(1, num_rounds + 1), movement, color=BLUE, marker="o", markersize=4)
left.axvline(num_rounds // 2 + 0.5, color=RED, linestyle="--", label="one drops out")
left.set(title="movement of the posterior", xlabel="round", ylabel="Jeffreys divergence, nats")
left.set_xticks(range(2, num_rounds + 1, 2))
left.legend(frameon=False)
precision = -2 * np.asarray(state.factors["w"].quadratic).sum(axis=1)
places = np.arange(4)
right.bar(places - 0.2, precision / precision.sum(), 0.4, color=BLUE, label="posterior precision")
right.bar(places + 0.2, np.array(sizes) / sum(sizes), 0.4, color=GREY, label="patients")
right.set(title="share of each hospital", xticks=places)
right.set_xticklabels([f"{n}\nε = {e:g}" for n, e in zip("ABCD", epsilons, strict=True)])
right.legend(frameon=False)
figure

# %% tags=["remove-input"]
share = precision / precision.sum()
Text(
    f"The smallest hospital, with the largest budget, holds {sizes[3] / sum(sizes):.0%} of the "
    f"patients and adds {share[3]:.0%} of the precision; the one that left is still in the "
    f"posterior with {share[2]:.0%}."
)

# %% [markdown]
# ## Prediction
#
# The posterior goes to ArviZ with the held-out patients as public data: draws of their outcomes,
# and the log likelihood of what happened.

# %%
public = {"X": data.X_test, "y": data.y_test}
idata = posterior.to_arviz(
    num_samples=pick(1000, 100),
    public_data=public,
    dims={"w": ["feature"]},
    coords={"feature": names},
)
weights = idata["posterior"]["w"].mean(("chain", "draw")).to_series()
largest = weights.abs().sort_values(ascending=False).index[:8].tolist()
table = az.summary(idata, var_names=["w"], kind="stats")
print(table.loc[[f"w[{name}]" for name in largest]].to_string())

# %% [markdown]
# **A posterior predictive check.** If the model is right, a fraction p of the patients with
# predicted probability of death p will die. Dots are tenths of the held-out patients; bars are 90 %
# intervals of outcomes drawn from the posterior.

# %%
drawn = np.asarray(idata["posterior_predictive"]["y"])[0]
risk = drawn.mean(axis=0)
tenths = np.array_split(np.argsort(risk, kind="stable"), 10)
died = np.array([data.y_test[part].mean() for part in tenths])
expected = np.array([risk[part].mean() for part in tenths])
low, high = np.array([np.quantile(drawn[:, p].mean(axis=1), (0.05, 0.95)) for p in tenths]).T
covered = int(((low <= died) & (died <= high)).sum())
figure, (left, right) = panels(2)
left.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
left.vlines(expected, low, high, color=BLUE, linewidth=3, alpha=0.5, label="90 % of draws")
left.plot(expected, died, "o", color=RED, label="held-out patients")
left.set(title="deaths by predicted risk", xlabel="predicted", ylabel="died")
left.legend(frameon=False, loc="upper left")
rates = drawn.mean(axis=1)
right.hist(rates, bins=30, color=BLUE, alpha=0.6, label="draws from the posterior")
right.axvline(data.y_test.mean(), color=RED, label="held-out patients")
right.set(title="deaths in all", xlabel="share of patients", yticks=[])
right.legend(frameon=False, fontsize="small")
figure

# %% tags=["remove-input"]
log_likelihood = np.asarray(idata["log_likelihood"]["y"])[0]
elpd = float(np.mean(np.logaddexp.reduce(log_likelihood, axis=0) - np.log(len(log_likelihood))))
accuracy = float(np.mean((risk > 0.5) == data.y_test))
Text(
    f"{covered} of the ten tenths lie within their bars. Of the held-out patients "
    f"{accuracy:.1%} are predicted correctly, and the mean log predictive density is {elpd:.3f} "
    f"(a coin: {np.log(0.5):.3f})."
)

# %% [markdown]
# **A decision** (with made-up numbers). A place in intensive care costs one unit and prevents a
# third of the deaths, each of which costs `loss` units. A patient gets a place if the expected
# benefit exceeds the cost. The risk includes the posterior's uncertainty, because it is a mean over
# draws.

# %%
losses = np.array([4.0, 6.0, 10.0, 20.0])
decisions = {loss: risk * loss / 3 > 1 for loss in losses}
paid = {x: float(np.mean(np.where(d, 1.0, data.y_test * x / 3))) for x, d in decisions.items()}
nobody = {x: float(np.mean(data.y_test * x / 3)) for x in losses}
print("loss   places for   cost a patient   nobody gets one   all get one")
for x, d in decisions.items():
    print(f"{x:>4g} {d.mean():>12.1%} {paid[x]:>16.2f} {nobody[x]:>17.2f} {1.0:>13.2f}")

# %% tags=["remove-input"]
better = sum(paid[x] <= min(nobody[x], 1.0) for x in losses)
Text(
    f"With {better} of the {len(losses)} losses the posterior's decisions cost no more than the "
    "better of the two rules that look at nobody."
)

# %% [markdown]
# ## The statement
#
# `fit` returns a statement. With your own loop, make it from the plan and the ledger.

# %%
print(dppvi.PrivacyStatement("DPOptimization", plan, state.ledger, insecure_seed=False))

# %% [markdown]
# ## References
#
# F. Harrell, *SUPPORT2* (UCI Machine Learning Repository, 2023), CC BY 4.0. Heikkilä, Ashman,
# Swaroop, Turner and Honkela (2023), *Differentially private partitioned variational inference*,
# TMLR.
