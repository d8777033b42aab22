# %% [markdown]
# # Bring your own model: a hierarchy, and a guide by hand
#
# **Goals.** Eight wards in three hospitals count infections. We write a hierarchical model in plain
# NumPyro, see what wards with few stays borrow from the others, and then write a guide with a gamma
# distribution by hand, to see when that is a good idea.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

import numpyro_dppvi as dppvi
from numpyro_dppvi import plots

NUM_WARDS = 8

# %% [markdown]
# ## Data
#
# A record is a patient's stay: ward, age, and the number of infections. Each hospital has its own
# wards, of very different sizes. The wards' log rates were drawn from a normal distribution with
# mean -0.5 and standard deviation 0.6.

# %% quick="stays = stays // 5"
rng = np.random.default_rng(3)
log_rate = rng.normal(-0.5, 0.6, NUM_WARDS)
stays = np.array([900, 300, 60, 1500, 120, 800, 60, 1200])
holders = {"Kuopio": (0, 1, 2), "Tampere": (3, 4), "Helsinki": (5, 6, 7)}


# %%
def hospital(wards):
    ward = np.repeat(wards, stays[list(wards)])
    age = rng.normal(size=len(ward))
    return {"age": age, "ward": ward, "y": rng.poisson(np.exp(log_rate[ward] + 0.3 * age))}


data = {name: hospital(wards) for name, wards in holders.items()}

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
        log_rate = numpyro.sample("log_rate", dist.Normal(base, spread))
    with numpyro.plate("stays", age.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(log_rate[ward] + slope * age)), obs=y)


# %% [markdown]
# ## Inference
#
# With the guide `None` the posterior is one normal distribution over all unconstrained latents.
# The prior of a ward's log rate depends on another latent, so it is not in that family: the server
# refines a factor for the prior in every round, from released values only and at no cost.

# %% quick="num_rounds = 4"
num_rounds = 20

# %%
budget, key = dppvi.PrivacyBudget(epsilon=4.0, delta=1e-5), jax.random.key(0)
result = dppvi.fit(model, None, data, rng_key=key, budget=budget, num_rounds=num_rounds)
print(result.posterior.summary())

# %% [markdown]
# ## Diagnostics
#
# Has the posterior settled? The parameters that lie farthest from zero in their standard
# deviations, and how far each round moved the whole posterior.

# %%
print(dppvi.diagnose(result))

# %% alt="The parameters farthest from zero, and how far each round moved the posterior"
figure, axes = plt.subplots(2, figsize=(4.6, 6.4), layout="constrained")
axes = plots.convergence(result, ax=axes)

# %% [markdown]
# ## Prediction
#
# A hierarchy shrinks the estimates of small wards towards the mean of all wards. Beside it we plot
# each ward's own mean, without privacy.

# %% alt="Each ward's log rate: posterior with 90 % interval, truth, and the ward's own mean"
raw = np.zeros(NUM_WARDS)
for part in data.values():
    for ward in np.unique(part["ward"]):
        mine = part["ward"] == ward
        # The log of its mean, less what the ages add.
        raw[ward] = np.log(max(part["y"][mine].mean(), 0.05)) - 0.3**2 / 2
mean = np.asarray(result.posterior.mean["log_rate"])
width = np.asarray(result.posterior.stddev["log_rate"])
centre = float(result.posterior.mean["base"])
figure, axis = plt.subplots(figsize=(4.8, 4), layout="constrained")
places = np.arange(NUM_WARDS)
axis.errorbar(places, mean, 1.645 * width, fmt="o", capsize=3, label="posterior, 90 %")
axis.plot(places + 0.2, log_rate, "D", markersize=4, label="truth")
axis.plot(places - 0.2, raw, "x", color="grey", label="a ward's own mean, not private")
axis.axhline(centre, color="grey", linewidth=0.8, zorder=0)
axis.set(title="the log rate of each ward", xticks=places, xlabel="stays in the ward")
axis.set_xticklabels([str(n) for n in stays])
axis.set_ylim(top=axis.get_ylim()[1] + 1.4)
legend = axis.legend(frameon=False, fontsize="small", loc="upper left")

# %% tags=["remove-input"]
from IPython.display import Markdown


def covered(mean, width):
    return int((np.abs(log_rate - mean) <= 1.645 * width).sum())


small, large = stays <= np.median(stays), stays > np.median(stays)
spread = result.posterior.mean["spread"], result.posterior.stddev["spread"]
pulled, own = np.abs(mean - centre)[small].mean(), np.abs(raw - centre)[small].mean()
Markdown(
    f"{covered(mean, width)} of the {NUM_WARDS} true log rates lie in their 90 % intervals. The "
    f"spread between wards is {spread[0]:.2f} ± {spread[1]:.2f} (true: 0.6). Intervals of the "
    f"smaller wards are {width[small].mean() / width[large].mean():.1f} times as wide as those of "
    f"the larger ones; their means lie {pulled:.2f} from that of all wards on average, their "
    f"own means {own:.2f}."
)

# %% [markdown]
# ## A guide by hand
#
# A guide is a function with one `numpyro.sample` statement per latent, none of which depends on
# another. Only the *types* of its distributions matter; the fit finds the values of parameters.
# This one draws the spread from a gamma distribution.


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
        loc = numpyro.param("ward_loc", jnp.zeros(NUM_WARDS))
        width = numpyro.param("ward_width", jnp.ones(NUM_WARDS), constraint=constraints.positive)
        numpyro.sample("log_rate", dist.Normal(loc, width))


# %% [markdown]
# It has no room for covariances, which the method above needs. So `fit` takes another, and
# `recommend` says why. These stays are simulated, so we may fit again, which real records would pay
# for with a second budget.

# %%
sizes = {name: len(part["y"]) for name, part in data.items()}
print(dppvi.recommend(model, data["Kuopio"], sizes, budget, guide=guide))
by_hand = dppvi.fit(model, guide, data, rng_key=key, budget=budget, num_rounds=num_rounds)
print(dppvi.diagnose(by_hand))

# %%
hand_mean = by_hand.posterior.mean["log_rate"]
hand_width = by_hand.posterior.stddev["log_rate"]
print("stays   truth      guide None     guide by hand")
for ward in range(NUM_WARDS):
    default = f"{mean[ward]:.2f} ± {width[ward]:.2f}"
    written = f"{hand_mean[ward]:.2f} ± {hand_width[ward]:.2f}"
    print(f"{stays[ward]:>5} {log_rate[ward]:>7.2f} {default:>15} {written:>17}")

# %% tags=["remove-input"]
Markdown(
    f"With this guide {covered(hand_mean, hand_width)} of {NUM_WARDS} true log rates lie in their "
    "90 % intervals. This method's intervals leave out the noise for privacy, which the line "
    "*noise* above estimates. Do not report them where the status says that the posterior has not "
    "settled."
)

# %% [markdown]
# Noise is not all. Latents of such a guide are independent, so write the model so that records say
# something about each of them. Here they tell each ward's log rate. Had we written
# `base + effect[ward]`, as one often does, they would tell only the sums: a larger base with
# smaller effects explains them as well. Independent latents do not know that. Even without noise,
# this guide's intervals of the effects would then be a tenth as wide as they should be, and 2 of 8
# would hold the truth; of the log rates 8 of 8 do. The normal of `None` has covariances, and holds
# the truth either way.
#
# So write a guide by hand where a family other than the normal is the point, such as a conjugate
# part or a probability near zero. For intervals, leave it to `None`.
#
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
    dppvi.fit(with_a_latent_for_every_stay, None, data, rng_key=key, budget=budget)
except dppvi.UnsupportedModelError as error:
    print(error)

# %% [markdown]
# ## What to report

# %% tags=["remove-input"]
wards = ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(mean, width, strict=True))
Markdown(
    f"> Infections in {stays.sum()} stays on {NUM_WARDS} wards of three hospitals were modelled as "
    "Poisson counts with log rates of wards from a common normal distribution, and fitted by "
    f"differentially private partitioned variational inference (numpyro_dppvi {dppvi.__version__}, "
    f"{type(result.method).__name__}, {num_rounds} rounds). Each hospital's releases are "
    "(4, 1e-5)-differentially private with respect to the replacement of one stay. The spread "
    f"between wards on the log scale is {spread[0]:.2f} ± {spread[1]:.2f}; the wards' log rates "
    f"are {wards} (posterior means and standard deviations, noise for privacy included)."
)

# %% [markdown]
# ## References
#
# Heikkilä, Ashman, Swaroop, Turner and Honkela (2023), *Differentially private partitioned
# variational inference*, TMLR. NumPyro's tutorials on [hierarchical
# models](https://num.pyro.ai/en/stable/tutorials/bayesian_hierarchical_linear_regression.html).
