# %% [markdown]
# # Bring your own model: a hierarchy, and a guide by hand
#
# **Goals.** Eight wards in three hospitals count infections. We write a hierarchical model in plain
# NumPyro and a guide with a gamma distribution, and see what wards with few stays borrow from the
# others.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

import numpyro_dppvi as dppvi
from numpyro_dppvi import plots
from tutorials.notebook import BLUE, GREY, RED, Text, panels, pick

NUM_WARDS = 8

# %% [markdown]
# ## Data
#
# A record is a patient's stay: ward, age, and the number of infections. Each hospital has its own
# wards, of very different sizes. The wards' effects on the log rate were drawn from a normal
# distribution with standard deviation 0.6.

# %%
rng = np.random.default_rng(3)
effect = rng.normal(0, 0.6, NUM_WARDS)
stays = np.array([900, 300, 60, 1500, 120, 800, 60, 1200]) // pick(1, 5)
holders = [(0, 1, 2), (3, 4), (5, 6, 7)]


def hospital(wards):
    ward = np.repeat(wards, stays[list(wards)])
    age = rng.normal(size=len(ward))
    return {"age": age, "ward": ward, "y": rng.poisson(np.exp(-0.5 + effect[ward] + 0.3 * age))}


data = [hospital(wards) for wards in holders]

# %% [markdown]
# ## Model
#
# Nothing in it is about clients or privacy. Latents of single records are not supported; latents of
# groups are, and a group may be in one hospital or in several. Every array in `data` has one entry
# per record; the number of wards is public, and the model closes over it.


# %%
def model(age, ward, y=None):
    base = numpyro.sample("base", dist.Normal(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("wards", NUM_WARDS):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
    with numpyro.plate("stays", age.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(base + effect[ward] + slope * age)), obs=y)


# %% [markdown]
# ## Guide
#
# With the guide `None`, every latent is normal in unconstrained space, as in NumPyro's
# `AutoNormal`. Ours draws the spread from a gamma distribution instead. A guide has one
# `numpyro.sample` statement per latent, and no latent depends on another. Only the *types* of its
# distributions matter; the fit finds the values of parameters.


# %%
def guide(age, ward, y=None):
    for name in ("base", "slope"):
        loc = numpyro.param(f"{name}_loc", 0.0)
        width = numpyro.param(f"{name}_width", 1.0, constraint=constraints.positive)
        numpyro.sample(name, dist.Normal(loc, width))
    shape = numpyro.param("spread_shape", 2.0, constraint=constraints.positive)
    rate = numpyro.param("spread_rate", 2.0, constraint=constraints.positive)
    numpyro.sample("spread", dist.Gamma(shape, rate))
    with numpyro.plate("wards", NUM_WARDS):
        loc = numpyro.param("effect_loc", jnp.zeros(NUM_WARDS))
        width = numpyro.param("effect_width", jnp.ones(NUM_WARDS), constraint=constraints.positive)
        numpyro.sample("effect", dist.Normal(loc, width))


# %% [markdown]
# ## Inference
#
# The prior of a ward's effect depends on another latent, so it is not in the guide's family. The
# server refines a factor for the prior in every round, from released values only and at no cost.

# %%
budget = dppvi.PrivacyBudget(epsilon=4.0, delta=1e-5)
arguments = {"rng_key": jax.random.key(0), "budget": budget, "num_rounds": pick(20, 4)}
result = dppvi.fit(model, guide, data, **arguments)
print(result.status)
print(result.posterior.summary())

# %% [markdown]
# ## Diagnostics
#
# The parameters that moved farthest, and how far each round moved the posterior.

# %%
plots.convergence(result)

# %% [markdown]
# How much of the result is noise? These stays are simulated, so we may simply fit again. On real
# records that would cost the budget twice; `dppvi.diagnose(result)` estimates the noise from
# released values.

# %%
again = dppvi.fit(model, guide, data, **arguments).posterior.mean["effect"]

# %% tags=["remove-input"]
mean = np.asarray(result.posterior.mean["effect"])
width = np.asarray(result.posterior.stddev["effect"])
moved = np.abs(np.asarray(again) - mean) / width
Text(
    f"Other noise moved the wards' effects by {moved.mean():.1f} of their standard deviations on "
    f"average, and by {moved.max():.1f} at most. An interval does not widen for that "
    "([why](../faq.md)), so it can miss the truth more often than it says."
)

# %% [markdown]
# ## Prediction
#
# A hierarchy shrinks the estimates of small wards towards the mean of all wards. Beside it we plot
# each ward's own mean, without privacy.

# %%
raw = np.zeros(NUM_WARDS)
for part in data:
    for ward in np.unique(part["ward"]):
        mine = part["ward"] == ward
        # The log of its mean, less what the base rate and the ages add.
        raw[ward] = np.log(max(part["y"][mine].mean(), 0.05)) + 0.5 - 0.3**2 / 2
mean = np.asarray(result.posterior.mean["effect"])
width = np.asarray(result.posterior.stddev["effect"])
figure, (axis,) = panels(1, width=7.5)
places = np.arange(NUM_WARDS)
axis.errorbar(places, mean, 1.645 * width, fmt="o", color=BLUE, capsize=3, label="posterior, 90 %")
axis.plot(places + 0.15, effect, "D", color=RED, label="truth")
axis.plot(places - 0.15, raw, "x", color=GREY, label="a ward's own mean, not private")
axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
axis.set(title="what a ward adds to the log rate", xticks=places, xlabel="stays in the ward")
axis.set_xticklabels([str(n) for n in stays])
axis.legend(frameon=False, ncols=3, fontsize="small", loc="upper center")
axis.set_ylim(top=axis.get_ylim()[1] + 0.6)
figure

# %% tags=["remove-input"]
covered = int((np.abs(effect - mean) <= 1.645 * width).sum())
small, large = stays <= np.median(stays), stays > np.median(stays)
spread = result.posterior.mean["spread"], result.posterior.stddev["spread"]
pulled, own = np.abs(mean[small]).mean(), np.abs(raw[small]).mean()
Text(
    f"{covered} of the {NUM_WARDS} true effects lie in their 90 % intervals. The spread between "
    f"wards is {spread[0]:.2f} ± {spread[1]:.2f} (true: 0.6). Intervals of the smaller wards are "
    f"{width[small].mean() / width[large].mean():.1f} times as wide as those of the larger ones; "
    f"their means lie {pulled:.2f} from zero on average, their own means {own:.2f}."
)

# %% [markdown]
# ## What is refused
#
# Unsupported models are refused before anything is released, with a message that names the latent
# and says what to write instead.


# %%
def with_a_latent_for_every_stay(age, ward, y=None):
    with numpyro.plate("stays", age.shape[0]):
        frailty = numpyro.sample("frailty", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(frailty)), obs=y)


try:
    dppvi.fit(with_a_latent_for_every_stay, None, data, rng_key=jax.random.key(0), budget=budget)
except dppvi.UnsupportedModelError as error:
    print(error)

# %% [markdown]
# ## References
#
# Heikkilä, Ashman, Swaroop, Turner and Honkela (2023), *Differentially private partitioned
# variational inference*, TMLR. NumPyro's tutorials on [hierarchical
# models](https://num.pyro.ai/en/stable/tutorials/bayesian_hierarchical_linear_regression.html).
