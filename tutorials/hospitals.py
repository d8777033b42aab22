# %% [markdown]
# # A hospital study: who dies in hospital?
#
# **Goals.** Four hospitals, each with its own budget, study which seriously ill patients die in
# hospital. One of them takes part in half of the rounds only. We ask whether the posterior can be
# believed before we read anything in it, check it on held-out patients, base a decision on it, and
# report what it cost.
#
# The records are SUPPORT2: seriously ill adults from five American hospitals, with what was known
# on the third day of the study. A fifth of them is held out and treated as public.

# %%
import arviz as az
import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi
from numpyro_dppvi.datasets import load_support2

# %% [markdown]
# ## Data
#
# The data set does not say which hospital a patient was in, so we assign rows at random: half of
# them to a university hospital, the others to three smaller ones. Nothing is standardised with the
# records' own means: columns are scaled by clinical constants, which cost no privacy.
#
# Every weight costs noise, so columns are chosen before the budget is spent. We take age, the
# number of comorbidities and 15 measurements. Columns that nearly repeat each other, such as
# whether blood urea and urine were measured, we leave out: records say little about each of them
# alone, and noise says much.

# %% quick="hospitals = {n: {k: v[:150] for k, v in h.items()} for n, h in hospitals.items()}"
data = load_support2()
names = ["bias", "age", "num.co", "scoma", "meanbp", "hrt", "resp", "temp", "pafi", "alb"]
names += ["sod", "ph", "wblc", "bili", "crea", "glucose", "bun", "urine"]
columns = [data.feature_names.index(name) for name in names]
order = np.random.default_rng(0).permutation(len(data.y_train))
shares = {"University": 0.5, "North": 0.25, "East": 0.15, "South": 0.1}
ends = (np.cumsum(list(shares.values())) * len(order)).astype(int)
hospitals = {
    name: {"X": data.X_train[rows][:, columns], "y": data.y_train[rows]}
    for name, rows in zip(shares, np.split(order, ends), strict=False)
}

# %%
sizes = {name: len(records["y"]) for name, records in hospitals.items()}
public = {"X": data.X_test[:, columns], "y": data.y_test}
print(f"{len(names)} features; patients {sizes}; held out: {len(data.y_test)}")
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
# its own budget. All that is asked before any record is read.

# %%
epsilons = {"University": 2.0, "North": 4.0, "East": 4.0, "South": 8.0}
budgets = {name: dppvi.PrivacyBudget(epsilon, delta=1e-5) for name, epsilon in epsilons.items()}
print(dppvi.recommend(model, hospitals["South"], sizes, budgets))

# %% [markdown]
# East's approval ends after half of the rounds. A schedule says whom each round visits, in which
# order; the plan knows it, and spreads East's budget over the rounds that it takes part in. What
# East has sent by then stays in the posterior.
#
# Twenty rounds cost the same budget as ten, the default: each is noisier, but the last ones are
# nearer to where they lead. On these public data we tried eight draws of noise: after ten rounds
# one run of the eight had not settled, after twenty all had.

# %%
num_rounds = 20


def until_east_leaves(round_number, num_clients):
    present = [0, 1, 2, 3] if round_number < num_rounds // 2 else [0, 1, 3]
    return np.array(present)[:, None]


result = dppvi.fit(
    model,
    None,
    hospitals,
    rng_key=jax.random.key(0),
    budget=budgets,
    num_rounds=num_rounds,
    schedule=until_east_leaves,
)
print(result.plan)

# %% [markdown]
# ## Diagnostics
#
# Before a number is interpreted: did the run end well, and has the posterior settled? Both are
# said from released values, at no cost.

# %%
print(dppvi.diagnose(result))

# %% [markdown]
# The intervals of this method include the noise that it added, so what is left to see is whether
# rounds move the posterior less and less, until only noise moves it, a little in every round. (The
# first one measures scales, and moves nothing.)

# %% alt="How far each round moved the posterior: less and less, then about the same"
figure, axis = plt.subplots(figsize=(4.6, 3), layout="constrained")
rounds = np.arange(2, num_rounds + 1)
axis.semilogy(rounds, result.history.movement[1:], marker="o", markersize=4)
axis.axvline(num_rounds / 2 + 0.5, color="grey", linestyle=":", label="East leaves")
axis.set(title="movement of the posterior", xlabel="round", ylabel="nats", xticks=rounds[::3])
legend = axis.legend(frameon=False)

# %% tags=["remove-input"]
from IPython.display import Markdown

(shares,) = dppvi.diagnose(result).share.values()  # of all weights at once
share = shares.mean(axis=1)
patients = np.array(list(sizes.values())) / sum(sizes.values())
Markdown(
    f"The smallest hospital, with the largest budget, holds {patients[3]:.0%} of the patients and "
    f"adds {share[4]:.0%} of the precision. East holds {patients[2]:.0%} and adds {share[3]:.0%}."
)

# %% [markdown]
# ## Prediction
#
# The posterior goes to ArviZ with the held-out patients as public data: draws of their outcomes,
# and the log likelihood of what happened.

# %% quick="num_samples = 100"
num_samples = 1000

# %%
idata = result.posterior.to_arviz(
    num_samples=num_samples,
    public_data=public,
    dims={"w": ["feature"]},
    coords={"feature": names},
)

# %% [markdown]
# **A posterior predictive check.** If the model is right, a fraction p of the patients with
# predicted probability of death p will die. Dots are tenths of the held-out patients; bars are 90 %
# intervals of outcomes drawn from the posterior.

# %% alt="Share of deaths in tenths of held-out patients by predicted risk, with 90 % of draws"
drawn = np.asarray(idata["posterior_predictive"]["y"])[0]
risk = drawn.mean(axis=0)
tenths = np.array_split(np.argsort(risk, kind="stable"), 10)
died = np.array([data.y_test[part].mean() for part in tenths])
expected = np.array([risk[part].mean() for part in tenths])
low, high = np.array([np.quantile(drawn[:, p].mean(axis=1), (0.05, 0.95)) for p in tenths]).T
figure, axis = plt.subplots(figsize=(4.6, 3.4), layout="constrained")
axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
axis.vlines(expected, low, high, linewidth=3, alpha=0.5, label="90 % of draws")
axis.plot(expected, died, "o", color="C1", label="held-out patients")
axis.set(title="deaths by predicted risk", xlabel="predicted", ylabel="died")
legend = axis.legend(frameon=False, loc="upper left")

# %% tags=["remove-input"]
log_likelihood = np.asarray(idata["log_likelihood"]["y"])[0]
elpd = float(np.mean(np.logaddexp.reduce(log_likelihood, axis=0) - np.log(len(log_likelihood))))
accuracy = float(np.mean((risk > 0.5) == data.y_test))
covered = int(((low <= died) & (died <= high)).sum())
Markdown(
    f"{covered} of the ten tenths lie within their bars. Of the held-out patients "
    f"{accuracy:.1%} are predicted correctly, and the mean log predictive density is {elpd:.3f} "
    f"(a coin: {np.log(0.5):.3f})."
)

# %% [markdown]
# **What the weights say.** Only now do we read them: those farthest from zero in their own standard
# deviations, per clinical unit.

# %%
w = idata["posterior"]["w"]
certainty = abs(w.mean(("chain", "draw")) / w.std(("chain", "draw"))).to_series()
clearest = certainty.sort_values(ascending=False).index[:6].tolist()
table = az.summary(idata, var_names=["w"], kind="stats")
print(table.loc[[f"w[{name}]" for name in clearest]].iloc[:, :4].to_string())

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
    print(f"{x:>4g} {d.mean():>12.1%} {paid[x]:>16.3f} {nobody[x]:>17.3f} {1.0:>13.3f}")

# %% tags=["remove-input"]
better = sum(paid[x] <= min(nobody[x], 1.0) for x in losses)
Markdown(
    f"With {better} of the {len(losses)} losses the posterior's decisions cost no more than the "
    "better of the two rules that look at nobody."
)

# %% [markdown]
# ## The statement
#
# What each hospital spent.

# %%
print(result.privacy_statement())

# %% [markdown]
# ## What to report

# %% tags=["remove-input"]
spent = result.ledger.spent()
each = ", ".join(f"{e:.3g} ({name})" for name, e in zip(sizes, spent, strict=True))
Markdown(
    f"> {sum(sizes.values())} patients of four hospitals entered a Bayesian logistic regression of "
    f"death in hospital on {len(names) - 1} variables with standard normal priors, fitted by "
    f"differentially private partitioned variational inference (numpyro_dppvi {dppvi.__version__}, "
    f"{type(result.method).__name__}, {num_rounds} rounds, of which East took part in "
    f"{num_rounds // 2}). Replacing one patient's record is protected at delta 1e-5 and epsilon "
    f"{each}. On {len(data.y_test)} held-out patients the mean log predictive density is "
    f"{elpd:.3f}, and {covered} of ten tenths by predicted risk lie within the 90 % intervals of "
    "the posterior predictive. Posterior standard deviations include the noise for privacy."
)

# %% [markdown]
# The statement belongs into the supplement, and `print(dppvi.citation(result))` into the
# references.
#
# ## References
#
# F. Harrell, *SUPPORT2* (UCI Machine Learning Repository, 2023), CC BY 4.0. Heikkilä, Ashman,
# Swaroop, Turner and Honkela (2023), *Differentially private partitioned variational inference*,
# TMLR.
