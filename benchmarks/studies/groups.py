"""Hierarchies: records in groups whose effects all clients share, and items that people answer."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

from benchmarks.studies.study import (
    NUM_RECORDS,
    Array,
    Study,
    generator,
    normal,
    normals,
    positive,
    sigmoid,
)

N = NUM_RECORDS


def radon_pooled(floor: Array, radon: Array) -> None:
    """One line for all counties."""
    mean, spread = normal("a") + normal("b") * floor, positive("spread")
    with numpyro.plate("houses", len(radon)):
        numpyro.sample("radon", dist.Normal(mean, spread), obs=radon)


def radon_intercepts(county: Array, floor: Array, radon: Array, num_counties: int) -> None:
    """An intercept a county, centred."""
    a, between, b = normal("a"), positive("between"), normal("b")
    with numpyro.plate("counties", num_counties):
        effect = numpyro.sample("effect", dist.Normal(a, between))
    spread = positive("spread")
    with numpyro.plate("houses", len(radon)):
        mean = effect[county] + b * floor
        numpyro.sample("radon", dist.Normal(mean, spread), obs=radon)


def radon_slopes(county: Array, floor: Array, radon: Array, num_counties: int) -> None:
    """Intercepts and slopes, decentred by NumPyro's reparameterisation."""
    a, b = normal("a"), normal("b")
    between, tilt = positive("between"), positive("tilt")
    centred = {"effect": LocScaleReparam(0), "slope": LocScaleReparam(0)}
    with numpyro.plate("counties", num_counties), reparam(config=centred):
        effect = numpyro.sample("effect", dist.Normal(a, between))
        slope = numpyro.sample("slope", dist.Normal(b, tilt))
    spread = positive("spread")
    with numpyro.plate("houses", len(radon)):
        mean = effect[county] + slope[county] * floor
        numpyro.sample("radon", dist.Normal(mean, spread), obs=radon)


def radon_uranium(county: Array, floor: Array, radon: Array, uranium: np.ndarray) -> None:
    """A county's uranium, a public array of NumPy that is indexed by a column."""
    a, b, g = normal("a"), normal("b"), normal("g")
    spread = positive("spread")
    with numpyro.plate("houses", len(radon)):
        mean = a + b * floor + g * uranium[county]
        numpyro.sample("radon", dist.Normal(mean, spread), obs=radon)


def rats(rat: Array, day: Array, weight: Array) -> None:
    """A line a rat, with a correlation of intercepts and slopes."""
    centre = normals("centre", 2)
    sds = numpyro.sample("sds", dist.HalfNormal(1).expand([2]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("rats", 12):
        line = numpyro.sample(
            "line", dist.MultivariateNormal(centre, scale_tril=sds[:, None] * chol)
        )
    spread = positive("spread")
    with numpyro.plate("weighings", len(weight)):
        mean = line[rat, 0] + line[rat, 1] * day
        numpyro.sample("weight", dist.Normal(mean, spread), obs=weight)


def seeds(plate_number: Array, seed: Array, extract: Array, germinated: Array) -> None:
    """Plates of seeds, a random effect each."""
    b, between = normals("b", 3), positive("between")
    with numpyro.plate("plates", 21):
        effect = numpyro.sample("effect", dist.Normal(0, between))
    logits = b[0] + b[1] * seed + b[2] * extract + effect[plate_number]
    with numpyro.plate("seeds", len(germinated)):
        numpyro.sample("germinated", dist.Bernoulli(logits=logits), obs=germinated)


def surgery(hospital: Array, died: Array) -> None:
    """Mortality in twelve hospitals."""
    mean, between = normal("mean", -1, 1), positive("between")
    with numpyro.plate("hospitals", 12):
        logit = numpyro.sample("logit", dist.Normal(mean, between))
    with numpyro.plate("operations", len(died)):
        numpyro.sample("died", dist.Bernoulli(logits=logit[hospital]), obs=died)


def pumps(hours: Array, failures: Array) -> None:
    """Pump failures whose rates are integrated out, a gamma-Poisson."""
    shape = numpyro.sample("shape", dist.Exponential(1.0))
    rate = numpyro.sample("rate", dist.Gamma(1, 1))
    with numpyro.plate("pumps", len(hours)):
        numpyro.sample("failures", dist.GammaPoisson(shape, rate / hours), obs=failures)


def meta_analysis(effect: Array, error: Array) -> None:
    """Schools, or trials: what each is itself is integrated out."""
    mean, between = normal("mean", scale=5), positive("between", 5)
    spread = jnp.sqrt(between**2 + error**2)
    with numpyro.plate("trials", len(effect)):
        numpyro.sample("effect", dist.Normal(mean, spread), obs=effect)


def batches(batch: Array, strength: Array) -> None:
    """Components of variance: within and between batches."""
    mean, between, within = normal("mean"), positive("between"), positive("within")
    with numpyro.plate("batches", 15):
        level = numpyro.sample("level", dist.Normal(mean, between))
    with numpyro.plate("samples", len(strength)):
        numpyro.sample("strength", dist.Normal(level[batch], within), obs=strength)


def rasch(person: Array, item: Array, right: Array) -> None:
    """Item response with one parameter an item."""
    with numpyro.plate("people", 30):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    with numpyro.plate("items", 8):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 2))
    with numpyro.plate("answers", len(right)):
        logits = ability[person] - difficulty[item]
        numpyro.sample("right", dist.Bernoulli(logits=logits), obs=right)


def discrimination(person: Array, item: Array, right: Array) -> None:
    """Item response with two parameters an item."""
    with numpyro.plate("people", 30):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    with numpyro.plate("items", 8):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.3))
    logits = slope[item] * (ability[person] - difficulty[item])
    numpyro.sample("right", dist.Bernoulli(logits=logits), obs=right)


def football(home: Array, away: Array, goals: Array) -> None:
    """Goals at home and away, from attacks and defences of teams."""
    with numpyro.plate("teams", 10):
        attack = numpyro.sample("attack", dist.Normal(0, 0.5))
        defence = numpyro.sample("defence", dist.Normal(0, 0.5))
    at_home = normal("at_home", 0.2, 0.3)
    rates = jnp.stack(
        [attack[home] - defence[away] + at_home, attack[away] - defence[home]], axis=-1
    )
    with numpyro.plate("matches", len(home), dim=-2), numpyro.plate("sides", 2, dim=-1):
        numpyro.sample("goals", dist.Poisson(jnp.exp(rates)), obs=goals)


def tournaments(winner: Array, loser: Array) -> None:
    """Bradley and Terry: who beats whom, in a factor."""
    with numpyro.plate("players", 10):
        skill = numpyro.sample("skill", dist.Normal(0, 1))
    numpyro.factor("won", jax.nn.log_sigmoid(skill[winner] - skill[loser]))


def election(state: Array, female: Array, age: Array, vote: Array) -> None:
    """Multilevel regression for poststratification."""
    b, between, aging = normals("b", 2), positive("between"), positive("aging")
    with numpyro.plate("states", 16):
        effect = numpyro.sample("effect", dist.Normal(0, between))
    with numpyro.plate("ages", 4):
        step = numpyro.sample("step", dist.Normal(0, aging))
    with numpyro.plate("voters", len(vote)):
        logits = b[0] + b[1] * female + effect[state] + step[age]
        numpyro.sample("vote", dist.Bernoulli(logits=logits), obs=vote)


def two_ways(state: Array, year: Array, treated: Array, y: Array) -> None:
    """Differences in differences: effects of states and years."""
    effect = normal("effect")
    with numpyro.plate("states", 8):
        of_state = numpyro.sample("of_state", dist.Normal(0, 1))
    with numpyro.plate("years", 5):
        of_year = numpyro.sample("of_year", dist.Normal(0, 1))
    mean = of_state[state] + of_year[year] + effect * treated
    numpyro.sample("y", dist.Normal(mean, positive("spread")), obs=y)


def conversions(arm: Array, bought: Array) -> None:
    """An A/B test with a prior on each arm."""
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1, 9))
    with numpyro.plate("visits", len(bought)):
        numpyro.sample("bought", dist.Bernoulli(rate[arm]), obs=bought)


def word_counts(counts: Array) -> None:
    """Documents with more spread than a multinomial's."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(counts.shape[1])))
    strength = numpyro.sample("strength", dist.Gamma(4, 0.2))
    fn = dist.DirichletMultinomial(share * strength, total_count=counts.sum(axis=-1))
    with numpyro.plate("documents", counts.shape[0]):
        numpyro.sample("counts", fn, obs=counts)


def common_factor(Y: Array) -> None:
    """One factor behind five scores, integrated out into their covariance."""
    loading = numpyro.sample("loading", dist.HalfNormal(1).expand([5]).to_event(1))
    rest = numpyro.sample("rest", dist.HalfNormal(1).expand([5]).to_event(1))
    fn = dist.LowRankMultivariateNormal(jnp.zeros(5), loading[:, None], rest**2)
    with numpyro.plate("people", Y.shape[0]):
        numpyro.sample("Y", fn, obs=Y)


def error_in_a_column(w: Array, y: Array) -> None:
    """A column measured with a known error; the true one is integrated out."""
    a, b, spread = normal("a"), normal("b"), positive("spread")
    true = numpyro.sample("true", dist.HalfNormal(1))
    kept = true**2 / (true**2 + 0.25)
    mean = jnp.stack([jnp.zeros_like(w), a + jnp.zeros_like(w)], axis=-1)
    cov = jnp.array([[true**2 + 0.25, b * true**2], [b * true**2, b**2 * true**2 + spread**2]])
    numpyro.deterministic("attenuation", kept)
    pair = jnp.stack([w, y], axis=-1)
    numpyro.sample("pair", dist.MultivariateNormal(mean, cov), obs=pair)


def rankings(order: Array) -> None:
    """Plackett and Luce: a record ranks four brands, the best first."""
    worth = normals("worth", 4)[order]
    rest = jax.lax.cumlogsumexp(worth, axis=1, reverse=True)
    numpyro.factor("order", (worth - rest).sum(axis=-1))


def _made_up() -> dict[str, Study]:
    rng = generator(100)
    county, floor = rng.integers(0, 10, N), rng.integers(0, 2, N)
    uranium = rng.normal(size=10)
    effect = 0.4 * uranium + 0.3 * rng.normal(size=10)
    radon = 1 + effect[county] - 0.6 * floor + 0.7 * rng.normal(size=N)
    houses = {"county": county, "floor": floor, "radon": radon}
    rat, day = rng.integers(0, 12, N), rng.uniform(-1, 1, N)
    weight = rng.normal(size=12)[rat] + (1 + 0.3 * rng.normal(size=12))[rat] * day
    dish, kinds = rng.integers(0, 21, N), rng.integers(0, 2, (2, 21))
    germinated = rng.random(N) < sigmoid(
        0.5 * kinds[0][dish] - 0.5 + 0.4 * rng.normal(size=21)[dish]
    )
    hospital = rng.integers(0, 12, N)
    died = rng.random(N) < sigmoid(-1 + 0.6 * rng.normal(size=12)[hospital])
    hours = rng.uniform(0.5, 10, N)
    error = rng.uniform(0.5, 3, N)
    person, item = np.divmod(np.arange(N), 8)
    right = rng.random(N) < sigmoid(rng.normal(size=30)[person] - rng.normal(size=8)[item])
    answers = {"person": person, "item": item, "right": right.astype(int)}
    home = rng.integers(0, 10, N)
    away = (home + rng.integers(1, 10, N)) % 10
    skill = rng.normal(size=10)
    wins = rng.random(N) < sigmoid(skill[home] - skill[away])
    state, year = rng.integers(0, 8, N), rng.integers(0, 5, N)
    treated = (state > 3) & (year > 2)
    voters = {"state": rng.integers(0, 16, N), "female": rng.integers(0, 2, N)}
    arm = rng.integers(0, 2, N)
    shares = rng.dirichlet([4, 3, 2, 1], N)
    counts = np.stack([rng.multinomial(20, share) for share in shares])
    factor = rng.normal(size=N)
    scores = factor[:, None] * [1, 0.8, 0.6, 0.4, 0.9] + 0.7 * rng.normal(size=(N, 5))
    true = rng.normal(size=N)
    worth = np.array([1.0, 0.5, 0.0, -1.0])
    order = np.argsort(-(worth + rng.gumbel(size=(N, 4))), axis=1)
    return {
        "radon, pooled": Study(radon_pooled, {"floor": floor, "radon": radon}),
        "radon, intercepts": Study(radon_intercepts, houses, {"num_counties": 10}),
        "radon, slopes decentred": Study(radon_slopes, houses, {"num_counties": 10}),
        "radon, uranium by NumPy": Study(radon_uranium, houses, {"uranium": uranium}),
        "rats": Study(rats, {"rat": rat, "day": day, "weight": weight + 0.3 * rng.normal(size=N)}),
        "seeds": Study(
            seeds,
            {
                "plate_number": dish,
                "seed": kinds[0][dish],
                "extract": kinds[1][dish],
                "germinated": germinated.astype(int),
            },
        ),
        "surgery": Study(surgery, {"hospital": hospital, "died": died.astype(int)}),
        "pumps": Study(
            pumps, {"hours": hours, "failures": rng.poisson(hours * rng.gamma(1.5, 0.5, N))}
        ),
        "meta-analysis": Study(
            meta_analysis,
            {"effect": 1 + rng.normal(size=N) + error * rng.normal(size=N), "error": error},
        ),
        "batches": Study(
            batches,
            {
                "batch": np.arange(N) % 15,
                "strength": rng.normal(size=15)[np.arange(N) % 15] + 0.5 * rng.normal(size=N),
            },
        ),
        "item response": Study(rasch, answers),
        "item response, slopes": Study(discrimination, answers),
        "football": Study(
            football,
            {
                "home": home,
                "away": away,
                "goals": rng.poisson(
                    np.exp(0.3 * np.c_[skill[home] - skill[away], skill[away] - skill[home]])
                ),
            },
        ),
        "tournaments": Study(
            tournaments,
            {"winner": np.where(wins, home, away), "loser": np.where(wins, away, home)},
        ),
        "election": Study(
            election,
            {**voters, "age": rng.integers(0, 4, N), "vote": (rng.random(N) < 0.5).astype(int)},
        ),
        "differences in differences": Study(
            two_ways,
            {
                "state": state,
                "year": year,
                "treated": treated.astype(int),
                "y": rng.normal(size=8)[state] + 0.5 * treated + 0.5 * rng.normal(size=N),
            },
        ),
        "conversions": Study(
            conversions,
            {"arm": arm, "bought": (rng.random(N) < 0.1 + 0.05 * arm).astype(int)},
        ),
        "word counts": Study(word_counts, {"counts": counts}),
        "common factor": Study(common_factor, {"Y": scores}),
        "a column with error": Study(
            error_in_a_column,
            {
                "w": true + 0.5 * rng.normal(size=N),
                "y": 0.5 + true + 0.5 * rng.normal(size=N),
            },
        ),
        "rankings": Study(rankings, {"order": order}),
    }


STUDIES = _made_up()
