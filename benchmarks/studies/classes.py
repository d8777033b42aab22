"""Records with discrete latents of their own, or missing entries, and the same summed by hand.

A function whose name ends in ``_summed`` is the twin of the one before it, for NumPyro's SVI.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.handlers import mask

from benchmarks.studies.study import (
    MARK,
    NUM_RECORDS,
    Array,
    Study,
    columns,
    generator,
    normal,
    normals,
    positive,
    sigmoid,
)

N = NUM_RECORDS
ORDERED = dist.transforms.OrderedTransform()


def _centres(number: int) -> Array:
    """Increasing centres, so that classes keep their names."""
    fn = dist.TransformedDistribution(dist.Normal(0, 1).expand([number]).to_event(1), ORDERED)
    return numpyro.sample("centres", fn)


def eruptions(y: Array) -> None:
    """A mixture of two normals."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    centres, spread = _centres(2), positive("spread")
    with numpyro.plate("eruptions", len(y)):
        kind = numpyro.sample("kind", dist.Categorical(shares), infer=MARK)
        numpyro.sample("y", dist.Normal(centres[kind], spread), obs=y)


def eruptions_summed(y: Array) -> None:
    """By NumPyro's own mixture."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    centres, spread = _centres(2), positive("spread")
    fn = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(centres, spread))
    with numpyro.plate("eruptions", len(y)):
        numpyro.sample("y", fn, obs=y)


def two_lines(x: Array, y: Array) -> None:
    """Records of two kinds, each with a line of its own."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    centres, slope, spread = _centres(2), normals("slope", 2), positive("spread")
    with numpyro.plate("records", len(y)):
        kind = numpyro.sample("kind", dist.Bernoulli(share), infer=MARK)
        mean = centres[kind] + slope[kind] * x
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


def two_lines_summed(x: Array, y: Array) -> None:
    """By a factor."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    centres, slope, spread = _centres(2), normals("slope", 2), positive("spread")
    terms = dist.Normal(centres + slope * x[:, None], spread).log_prob(y[:, None])
    logs = jnp.stack([jnp.log1p(-share), jnp.log(share)])
    numpyro.factor("y", jax.nn.logsumexp(terms + logs, axis=1))


def sticks(y: Array) -> None:
    """A Dirichlet process cut off at four classes."""
    with numpyro.plate("breaks", 3):
        broken = numpyro.sample("broken", dist.Beta(1, 1.5))
    rest = jnp.cumprod(1 - broken)
    shares = jnp.concatenate([broken, jnp.ones(1)]) * jnp.concatenate([jnp.ones(1), rest])
    centres = _centres(4)
    with numpyro.plate("records", len(y)):
        kind = numpyro.sample("kind", dist.Categorical(shares), infer=MARK)
        numpyro.sample("y", dist.Normal(centres[kind], 0.5), obs=y)


def sticks_summed(y: Array) -> None:
    """By NumPyro's own mixture."""
    with numpyro.plate("breaks", 3):
        broken = numpyro.sample("broken", dist.Beta(1, 1.5))
    rest = jnp.cumprod(1 - broken)
    shares = jnp.concatenate([broken, jnp.ones(1)]) * jnp.concatenate([jnp.ones(1), rest])
    fn = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(_centres(4), 0.5))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", fn, obs=y)


def latent_classes(answers: Array) -> None:
    """Latent class analysis: two classes behind five answers."""
    share = numpyro.sample("share", dist.Beta(5, 2))
    low = numpyro.sample("low", dist.Beta(1, 3).expand([5]).to_event(1))
    high = numpyro.sample("high", dist.Beta(3, 1).expand([5]).to_event(1))
    with numpyro.plate("people", answers.shape[0], dim=-2):
        kind = numpyro.sample("kind", dist.Bernoulli(share), infer=MARK)
        with numpyro.plate("items", 5, dim=-1):
            numpyro.sample("answers", dist.Bernoulli(jnp.where(kind, high, low)), obs=answers)


def latent_classes_summed(answers: Array) -> None:
    """By a factor."""
    share = numpyro.sample("share", dist.Beta(5, 2))
    low = numpyro.sample("low", dist.Beta(1, 3).expand([5]).to_event(1))
    high = numpyro.sample("high", dist.Beta(3, 1).expand([5]).to_event(1))
    each = [dist.Bernoulli(rate).to_event(1).log_prob(answers) for rate in (low, high)]
    both = jnp.logaddexp(each[0] + jnp.log1p(-share), each[1] + jnp.log(share))
    numpyro.factor("answers", both)


def annotation(labels: Array) -> None:
    """Dawid and Skene: true classes behind the labels of four annotators."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    prior = jnp.eye(3) * 4 + 1
    with numpyro.plate("annotators", 4, dim=-2), numpyro.plate("classes", 3, dim=-1):
        confusion = numpyro.sample("confusion", dist.Dirichlet(prior))
    with numpyro.plate("items", labels.shape[0], dim=-2):
        truth = numpyro.sample("truth", dist.Categorical(shares), infer=MARK)
        with numpyro.plate("annotators", 4, dim=-1):
            fn = dist.Categorical(confusion[jnp.arange(4), truth])
            numpyro.sample("labels", fn, obs=labels)


def annotation_summed(labels: Array) -> None:
    """By a factor."""
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    prior = jnp.eye(3) * 4 + 1
    with numpyro.plate("annotators", 4, dim=-2), numpyro.plate("classes", 3, dim=-1):
        confusion = numpyro.sample("confusion", dist.Dirichlet(prior))
    logs = jnp.log(confusion)[jnp.arange(4), :, labels].sum(axis=1)
    numpyro.factor("labels", jax.nn.logsumexp(logs + jnp.log(shares), axis=1))


def extra_zeros(X: Array, count: Array) -> None:
    """Zero inflation written out: whether a record can count at all."""
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    rate = jnp.exp(normal("a") + X @ normals("b", X.shape[1]))
    with numpyro.plate("records", len(count)):
        empty = numpyro.sample("empty", dist.Bernoulli(gate), infer=MARK)
        numpyro.sample("count", dist.Poisson(jnp.where(empty == 1, 1e-6, rate)), obs=count)


def extra_zeros_summed(X: Array, count: Array) -> None:
    """By NumPyro's own distribution."""
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    rate = jnp.exp(normal("a") + X @ normals("b", X.shape[1]))
    with numpyro.plate("records", len(count)):
        numpyro.sample("count", dist.ZeroInflatedPoisson(gate, rate), obs=count)


def occupancy(forest: Array, seen: Array) -> None:
    """Whether a species lives at a site that was visited five times."""
    a, b, found = normal("a"), normal("b"), numpyro.sample("found", dist.Beta(1, 1))
    with numpyro.plate("sites", len(seen)):
        lives = dist.Bernoulli(logits=a + b * forest)
        there = numpyro.sample("there", lives, infer=MARK)
        numpyro.sample("seen", dist.Binomial(5, there * found), obs=seen)


def occupancy_summed(forest: Array, seen: Array) -> None:
    """By a factor."""
    a, b, found = normal("a"), normal("b"), numpyro.sample("found", dist.Beta(1, 1))
    logit = a + b * forest
    there = jax.nn.log_sigmoid(logit) + dist.Binomial(5, found).log_prob(seen)
    absent = jnp.where(seen == 0, jax.nn.log_sigmoid(-logit), -1e9)
    numpyro.factor("seen", jnp.logaddexp(there, absent))


def abundance(counts: Array) -> None:
    """How many live at a site, from three counts; never fewer than were counted."""
    rate = numpyro.sample("rate", dist.Gamma(3, 1))
    found = numpyro.sample("found", dist.Beta(2, 2))
    with numpyro.plate("sites", counts.shape[0], dim=-2):
        shares = jax.nn.softmax(dist.Poisson(rate).log_prob(jnp.arange(16)))
        number = numpyro.sample("number", dist.Categorical(shares), infer=MARK)
        with numpyro.plate("visits", 3, dim=-1):
            numpyro.sample("counts", dist.Binomial(number, found), obs=counts)


def abundance_summed(counts: Array) -> None:
    """By a factor."""
    rate = numpyro.sample("rate", dist.Gamma(3, 1))
    found = numpyro.sample("found", dist.Beta(2, 2))
    n = jnp.arange(16)
    shares = jax.nn.log_softmax(dist.Poisson(rate).log_prob(n))
    possible = jnp.all(counts[:, :, None] <= n, axis=1)
    at_least = jnp.maximum(counts.max(axis=1)[:, None], n)  # keeps impossible numbers finite
    each = dist.Binomial(at_least[:, None, :], found).log_prob(counts[:, :, None]).sum(axis=1)
    numpyro.factor("counts", jax.nn.logsumexp(jnp.where(possible, each + shares, -1e9), axis=1))


def recapture(caught: Array) -> None:
    """Cormack, Jolly and Seber: alive or dead after the first capture, by a scan."""
    lives = numpyro.sample("lives", dist.Beta(2, 1))
    found = numpyro.sample("found", dist.Beta(1, 1))

    def step(alive: Array, now: Array) -> tuple[Array, None]:
        with numpyro.plate("animals", caught.shape[0]):
            alive = numpyro.sample("alive", dist.Bernoulli(alive * lives), infer=MARK)
            numpyro.sample("now", dist.Bernoulli(alive * found), obs=now)
        return alive, None

    scan(step, jnp.ones(caught.shape[0], int), caught.T)


def recapture_summed(caught: Array) -> None:
    """By the forward algorithm."""
    lives = numpyro.sample("lives", dist.Beta(2, 1))
    found = numpyro.sample("found", dist.Beta(1, 1))
    alive, dead = jnp.ones(caught.shape[0]), jnp.zeros(caught.shape[0])
    for now in caught.T:
        dead = (dead + alive * (1 - lives)) * (now == 0)
        alive = alive * lives * jnp.where(now == 1, found, 1 - found)
    numpyro.factor("caught", jnp.log(alive + dead))


def moods(symptom: Array) -> None:
    """A hidden Markov model along eight weeks of a patient, in a Python loop."""
    stay = numpyro.sample("stay", dist.Beta(4, 1).expand([2]).to_event(1))
    centres, state = _centres(2), 0
    with numpyro.plate("patients", symptom.shape[0]):
        for week in range(8):
            up = jnp.where(state == 1, stay[1], 1 - stay[0]) if week else 0.5
            state = numpyro.sample(f"state_{week}", dist.Bernoulli(up), infer=MARK)
            mean = centres[state]
            numpyro.sample(f"symptom_{week}", dist.Normal(mean, 1), obs=symptom[:, week])


def moods_summed(symptom: Array) -> None:
    """By the forward algorithm, in logarithms."""
    stay = numpyro.sample("stay", dist.Beta(4, 1).expand([2]).to_event(1))
    seen = dist.Normal(_centres(2), 1).log_prob(symptom[:, :, None])
    moves = jnp.log(jnp.array([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]]))
    forward = seen[:, 0] - jnp.log(2)
    for week in range(1, 8):
        forward = jax.nn.logsumexp(forward[:, :, None] + moves, axis=1) + seen[:, week]
    numpyro.factor("symptom", jax.nn.logsumexp(forward, axis=1))


def unknown_smokers(smokes: Array, known: Array, y: Array) -> None:
    """A category that is missing for some, imputed by ``obs_mask`` and summed out."""
    share, b = numpyro.sample("share", dist.Beta(1, 1)), normals("b", 2)
    with numpyro.plate("people", len(y)):
        fn = dist.Bernoulli(share)
        smoker = numpyro.sample("smokes", fn, obs=smokes, obs_mask=known, infer=MARK)
        numpyro.sample("y", dist.Normal(b[0] + b[1] * smoker, 1), obs=y)


def unknown_smokers_summed(smokes: Array, known: Array, y: Array) -> None:
    """By a factor."""
    share, b = numpyro.sample("share", dist.Beta(1, 1)), normals("b", 2)
    each = [
        dist.Normal(b[0] + b[1] * k, 1).log_prob(y) + dist.Bernoulli(share).log_prob(k)
        for k in (0, 1)
    ]
    unknown = jnp.logaddexp(*each)
    numpyro.factor("y", jnp.where(known, jnp.where(smokes == 1, each[1], each[0]), unknown))


def missing_outcomes(X: Array, answered: Array, y: Array) -> None:
    """Outcomes that some people did not give, by ``obs_mask``."""
    mean, spread = normal("a") + X @ normals("b", X.shape[1]), positive("spread")
    with numpyro.plate("people", len(y)):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y, obs_mask=answered)


def missing_outcomes_summed(X: Array, answered: Array, y: Array) -> None:
    """By a mask."""
    mean, spread = normal("a") + X @ normals("b", X.shape[1]), positive("spread")
    with numpyro.plate("people", len(y)), mask(mask=answered):
        numpyro.sample("y", dist.Normal(mean, spread), obs=y)


def unknown_ages(age: Array, known: Array, y: Array) -> None:
    """A normal column that is missing for some, imputed by ``obs_mask`` and integrated out."""
    mean, spread = normal("mean"), positive("spread")
    b = normals("b", 2)
    with numpyro.plate("people", len(y)):
        full = numpyro.sample("age", dist.Normal(mean, spread), obs=age, obs_mask=known)
        numpyro.sample("y", dist.Normal(b[0] + b[1] * full, 0.5), obs=y)


def unknown_ages_summed(age: Array, known: Array, y: Array) -> None:
    """By the normal of a sum."""
    mean, spread = normal("mean"), positive("spread")
    b = normals("b", 2)
    both = dist.Normal(mean, spread).log_prob(age) + dist.Normal(b[0] + b[1] * age, 0.5).log_prob(y)
    alone = dist.Normal(b[0] + b[1] * mean, jnp.sqrt(0.25 + (b[1] * spread) ** 2)).log_prob(y)
    numpyro.factor("y", jnp.where(known, both, alone))


def outliers(x: Array, y: Array) -> None:
    """A line, and records that are off it."""
    off, line = numpyro.sample("off", dist.Beta(1, 9)), normals("line", 2)
    with numpyro.plate("records", len(y)):
        is_off = numpyro.sample("is_off", dist.Bernoulli(off), infer=MARK)
        spread = jnp.where(is_off == 1, 5.0, 0.5)
        numpyro.sample("y", dist.Normal(line[0] + line[1] * x, spread), obs=y)


def outliers_summed(x: Array, y: Array) -> None:
    """By NumPyro's own mixture of any distributions."""
    off, line = numpyro.sample("off", dist.Beta(1, 9)), normals("line", 2)
    mean = (line[0] + line[1] * x)[:, None]
    inside = dist.Normal(mean, jnp.array([0.5, 5.0]))
    fn = dist.MixtureSameFamily(dist.Categorical(jnp.stack([1 - off, off])), inside)
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", fn, obs=y)


def _paths(rng: np.random.Generator, weeks: int) -> np.ndarray:
    """Hidden states that mostly stay."""
    moved = rng.random((N, weeks)) < 0.2
    return np.asarray((rng.integers(0, 2, (N, 1)) + np.cumsum(moved, axis=1)) % 2)


def _made_up() -> dict[str, Study]:
    rng = generator(200)
    kind = rng.random(N) < 0.35
    x = rng.normal(size=N)
    pairs = {"y": np.where(kind, 1.5, -1.5) + 0.6 * rng.normal(size=N)}
    lines = np.where(kind, 1.5 + x, -1.5 - 0.5 * x) + 0.4 * rng.normal(size=N)
    four = np.array([-3, -1, 1, 3.0])[rng.integers(0, 4, N)] + 0.5 * rng.normal(size=N)
    answers = rng.random((N, 5)) < np.where(kind[:, None], 0.8, 0.2)
    truth = rng.integers(0, 3, N)
    labels = np.where(rng.random((N, 4)) < 0.75, truth[:, None], rng.integers(0, 3, (N, 4)))
    X = columns(201, 2)
    counts = (rng.random(N) > 0.3) * rng.poisson(np.exp(1 + X @ [0.5, -0.3]))
    there = rng.random(N) < sigmoid(0.5 + x)
    animals = rng.poisson(3.0, N)
    alive = np.cumprod(rng.random((N, 6)) < 0.8, axis=1)
    states = _paths(rng, 8)
    smokes = (rng.random(N) < 0.3).astype(int)
    known = rng.random(N) < 0.7
    y = X @ [1.0, -0.5] + 0.7 * rng.normal(size=N)
    off = rng.random(N) < 0.1
    return {
        "eruptions, a mixture": Study(eruptions, pairs, twin=eruptions_summed),
        "mixture of two lines": Study(two_lines, {"x": x, "y": lines}, twin=two_lines_summed),
        "broken sticks": Study(sticks, {"y": four}, twin=sticks_summed),
        "latent classes": Study(
            latent_classes, {"answers": answers.astype(int)}, twin=latent_classes_summed
        ),
        "annotators": Study(annotation, {"labels": labels}, twin=annotation_summed),
        "zero inflation written out": Study(
            extra_zeros, {"X": X, "count": counts}, twin=extra_zeros_summed
        ),
        "occupancy": Study(
            occupancy,
            {"forest": x, "seen": rng.binomial(5, 0.4 * there)},
            twin=occupancy_summed,
        ),
        "abundance": Study(
            abundance,
            {"counts": rng.binomial(animals[:, None], 0.5, (N, 3))},
            twin=abundance_summed,
        ),
        "capture and recapture": Study(
            recapture,
            {"caught": (alive * (rng.random((N, 6)) < 0.5)).astype(int)},
            twin=recapture_summed,
        ),
        "moods, a hidden chain": Study(
            moods,
            {"symptom": np.where(states == 1, 1.5, -1.5) + rng.normal(size=(N, 8))},
            twin=moods_summed,
        ),
        "smoking not always known": Study(
            unknown_smokers,
            {
                "smokes": np.where(known, smokes, 0),
                "known": known,
                "y": 0.5 + 1.5 * smokes + rng.normal(size=N),
            },
            twin=unknown_smokers_summed,
        ),
        "outcomes not given": Study(
            missing_outcomes,
            {"X": X, "answered": known, "y": np.where(known, y, 0.0)},
            twin=missing_outcomes_summed,
        ),
        "age not always known": Study(
            unknown_ages,
            {"age": np.where(known, x, 0.0), "known": known, "y": 0.5 + x + 0.5 * pairs["y"] / 2},
            twin=unknown_ages_summed,
        ),
        "outliers": Study(
            outliers,
            {"x": x, "y": 1 + x + np.where(off, 5.0, 0.5) * rng.normal(size=N)},
            twin=outliers_summed,
        ),
    }


STUDIES = _made_up()
