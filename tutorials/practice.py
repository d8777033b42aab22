# %% [markdown]
# # Privacy in practice: plan, ledger, audit, selection
#
# **Goals.** We answer what a data protection officer will ask. What does an epsilon mean? How much
# noise will there be, and is the study worth it? Who keeps track of the cost, and what if the
# computer crashes? Is the code correct? And may we try several settings?

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_dppvi as dppvi
from numpyro_dppvi import privacy
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.audit import audit

# %% [markdown]
# ## Data
#
# Two clinics measure blood pressure, in (public) standard deviations of a healthy population.

# %%
rng = np.random.default_rng(0)
sizes = {"North": 600, "South": 1500}
data = {name: {"y": rng.normal(0.4, 0.8, size)} for name, size in sizes.items()}

# %% [markdown]
# ## Model
#
# A normal distribution, both of whose parameters are unknown.


# %%
def model(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("patients", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


# %% [markdown]
# ## What an epsilon means
#
# Suppose an attacker knows every other record, sees everything that is released, and has to say
# which of two records a client holds. How often is the attacker right?

# %% alt="How often the best attacker is right, by epsilon"
method = dppvi.FisherScoring()
epsilons = np.array([0.1, 0.25, 0.5, 1, 2, 4, 8])
right = []
for epsilon in epsilons:
    budget = dppvi.PrivacyBudget(epsilon=float(epsilon), delta=1e-5)
    plan = dppvi.plan_privacy(method, budget, num_rounds=10, client_sizes=sizes)
    right.append((1 + plan.clients[0].attack.advantage) / 2)
figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
axis.semilogx(epsilons, 100 * np.array(right), marker="o")
axis.axhline(50, color="grey", linestyle=":")
axis.text(8, 50.8, "guessing", color="grey", ha="right")
axis.set(
    title="an attacker is right in at most", xlabel="epsilon (delta = 1e-5)", ylabel="% of cases"
)
axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
axis.minorticks_off()

# %% tags=["remove-input"]
from IPython.display import Markdown

by = dict(zip(epsilons.tolist(), right, strict=True))
one, eight = (np.ceil(1000 * by[epsilon]) / 10 for epsilon in (1.0, 8.0))  # rounded up
Markdown(f"At epsilon 1 that is {one:.1f} % of cases, at epsilon 8 {eight:.1f} %.")

# %% [markdown]
# ## The plan
#
# Any two of noise, number of releases and epsilon determine the third, without any data.

# %%
budget = dppvi.PrivacyBudget(epsilon=1.0, delta=1e-5)
noise = privacy.noise_from_epsilon(budget, 30)
print(f"30 releases at epsilon 1: noise of {noise:.2f} clipping norms")
print(f"60 releases at that noise: epsilon {privacy.epsilon_from_noise(noise, 60):.2f}")
plan = dppvi.plan_privacy(method, budget, num_rounds=10, client_sizes=sizes)
print(plan)

# %% [markdown]
# ## Inference, with a ledger
#
# Every release is charged before it is computed; with `ledger_file=` the charge is on disk first.
# All runs on the same file share one budget. Here a first study spends it, and a second one is
# refused before anything is computed from records.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "ledger.jsonl"
    arguments = {"budget": budget, "ledger_file": file}
    result = dppvi.fit(model, None, data, rng_key=jax.random.key(0), **arguments)
    print("lines in the file:", len(file.read_text().splitlines()))
    try:
        dppvi.fit(model, None, data, rng_key=jax.random.key(1), **arguments)
    except dppvi.BudgetExceededError as error:
        print("\nrefused:", error)
print("\nspent:", result.ledger.spent().round(4))

# %% [markdown]
# ## Diagnostics
#
# Has the posterior settled, and whose records is it made of? This is computed from released values
# and costs no privacy. How much of it is noise need not be asked of this method, whose intervals
# include the noise.

# %%
print(dppvi.diagnose(result))

# %% [markdown]
# ## Prediction
#
# Anything computed from released values costs nothing more. How many of the next patients will have
# a pressure of more than one standard deviation above the healthy mean?

# %%
draws = result.posterior.sample(jax.random.key(2), (4000,))
raised = float((1 - dist.Normal(draws["mean"], draws["spread"]).cdf(1.0)).mean())

# %% tags=["remove-input"]
true = float(1 - dist.Normal(0.4, 0.8).cdf(1.0))
Markdown(
    f"The posterior says {raised:.0%}; in the simulation it is {true:.0%}. Each clinic has spent "
    f"epsilon {result.ledger.spent().max():.4f}, as before the question."
)

# %% [markdown]
# ## An audit
#
# A proof is about the mathematics; an audit is about the running program. A mechanism is run many
# times on two neighbouring data sets. If some event is more frequent on one of them than the claim
# allows, the claim is false. We audit the library's mechanism on a sum that one record moves as far
# as clipping allows, and a faulty one with a fifth too little noise, which the audit must detect.

# %% quick="num_runs = 4_000"
num_runs = 20_000

# %%
claimed = accounting.compose([(privacy.GaussianSum(1.0, 1.0, dppvi.FullBatch(), 1, 1).dp_event, 1)])


def claim(delta):
    return accounting.epsilon(claimed, delta, "replace_one")


def released(seed, total, noise_std):
    keys = jax.random.split(dppvi.privacy.SecretKeys(seed).round_key(0), num_runs)
    add = jax.vmap(lambda key: privacy.add_noise(key, jnp.asarray(total), noise_std))
    return np.asarray(add(keys))


reports = {
    name: audit(claim, released(0, 1.0, noise_std), released(1, -1.0, noise_std))
    for name, noise_std in (("as claimed", 1.0), ("a fifth too little noise", 0.8))
}
for name, report in reports.items():
    print(f"{name}\n{report}\n")
assert reports["as claimed"].holds
assert not reports["a fifth too little noise"].holds

# %% alt="Deltas that an audit shows at each epsilon, beside the claim; points above it refute it"
figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
honest = reports["as claimed"]
axis.plot(honest.epsilons, honest.deltas, color="grey", label="the claim")
for (name, report), color, marker in zip(reports.items(), ("C0", "C3"), ("o", "^"), strict=True):
    axis.plot(report.epsilons, np.maximum(report.shown, 0), marker, color=color, label=name)
axis.set(title="shown by an audit: above the line refutes", xlabel="epsilon", ylabel="delta")
legend = axis.legend(frameon=False)

# %% [markdown]
# ## Selection
#
# The recommended method has nothing to choose; `DPOptimization` has a clip. Trying settings on the
# private data and showing the best costs more than one run, even if the others are discarded.
# `select` runs a random, secret number of settings, compares noisy scores, and accounts for all of
# it. (Gradients of a normal outcome with unknown spread are long, so one of the clips is above
# the default of 2.5.)

# %% quick="settings = settings[:2]"
settings = [0.5, 2.5, 10.0]

# %%
total = dppvi.PrivacyBudget(epsilon=4.0, delta=1e-5)
selection_plan = privacy.plan_selection(
    total, privacy.NegativeBinomialRuns(5.0), client_sizes=list(sizes.values()), score_bound=4.0
)


def fit_one(setting, budgets, rng_key):
    method = dppvi.DPOptimization(clip_norm=setting)
    return dppvi.fit(
        model, None, data, rng_key=rng_key, method=method, budget=budgets, num_rounds=5
    )


def score(run):
    mean, spread = run.posterior.mean["mean"], run.posterior.mean["spread"]
    return [np.asarray(dist.Normal(mean, spread).log_prob(part["y"])) for part in data.values()]


chosen = dppvi.select(settings, fit_one, score, plan=selection_plan)
print(f"chosen clip: {chosen.setting}\n")
print(chosen.privacy_statement())

# %% tags=["remove-input"]
one = selection_plan.run_budgets[0].epsilon
Markdown(
    f"Of epsilon {total.epsilon:g} in all, each single fit could use {one:.2f}. That is the price "
    "of choosing on private records; choosing on public or made-up ones is free."
)

# %% [markdown]
# ## What to report
#
# Of the fit, in the paper; the statement below goes into the supplement, and the ledger file stays
# with the clinics.

# %% tags=["remove-input"]
mean, spread = (
    f"{result.posterior.mean[name]:.2f} ± {result.posterior.stddev[name]:.2f}"
    for name in ("mean", "spread")
)
Markdown(
    f"> Blood pressure of {sum(sizes.values())} patients of two clinics was modelled as normal and "
    "fitted by differentially private partitioned variational inference (numpyro_dppvi "
    f"{dppvi.__version__}, {type(result.method).__name__}, {result.status.rounds} rounds) at "
    f"epsilon 1 and delta 1e-5 for the replacement of one record. Its mean is {mean} and its "
    f"standard deviation {spread}, in standard deviations of a healthy population; noise for "
    "privacy is included. No setting was chosen on these records."
)

# %%
print(result.privacy_statement())

# %% [markdown]
# ## References
#
# The cost of selection: Papernot and Steinke (2022), *Hyperparameter tuning with Rényi
# differential privacy*, ICLR. The epsilon of Gaussian noise: Balle and Wang (2018), ICML. The page
# [What is promised](../privacy.md) says what is covered and what is not.
