"""Private Fisher scoring: clients release scores and information, and factors know their noise.

At a visit a client releases, in one noisy vector, the sum of its records' clipped scores G and the
sum of their clipped information A, at a point x that the server chose. Near the client's own
maximum, G = A (theta_m - x) + e with Gaussian noise e of known size, so G + A x is an observation
of theta_m. The client's factor is what all its observations say, and no more:

    theta_m | theta ~ N(theta, A^-1),   G + A x | theta ~ N(A theta, A + Sigma),
    precision of the factor A (A + Sigma)^-1 A.

Much noise (Sigma >> A) leaves the prior alone, little of it gives the usual factor. No rate, clip
or scale of columns is chosen by the user:

* *White coordinates.* Scores are clipped where the average record's information is the identity.
  The first visit releases histograms of the records' scales, one a coordinate; later ones refine
  the matrix. What noise would hide keeps the shape it had (Gavish and Donoho 2017, for the edge).
* *A clip that bends nothing under the model.* A clipped score has expectation zero if it is first
  centred: record by record, outcomes are drawn from the model at x, and the score of the outcome
  that was observed is clipped about a centre of all of them together. By symmetry among the
  observed and the drawn outcomes, the expectation at the true x is zero for any clip.
* *All rounds count.* Releases of a client are averaged, older ones for less the further x has
  moved since.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey, PyTree
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import FullNormal, MeanField
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods.local_solve import Descent
from numpyro_dppvi.methods.objective import Automatic
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Received, Visit
from numpyro_dppvi.privacy import FullBatch, GaussianSum, PrivacyPlan, plan

# Bins of the scale histograms: powers of two of a record's root information, in prior units.
_LOWEST, _BINS = -20, 44
# log2 |z| of a standard normal z by bins of one octave: what a column's histogram looks like.
_TEMPLATE = (0.05, 0.1, 0.18, 0.3, 0.28, 0.09)
_TEMPLATE_RMS = 4.0  # octaves from the template's first bin to the root mean square

# What was chosen by simulation (benchmarks/believe.py says on which studies).
_FLAGS_SHARE = 0.04  # of a visit's squared norm, for the two clipped fractions
_INFO_SHARES = (0.6, 0.8, 0.1)  # first, decay a visit, last
_TARGETS, _INFO_TARGETS = (0.01, 0.2), (0.01, 0.1)  # least and largest fractions to be clipped
_CLIPS, _INFO_CLIPS = (0.1, 3.0), (0.1, 5.0)  # of scores, times sqrt(d); of information
_TRUST = 2.0  # the longest step, in white length
_SHAPE_DRIFT = 0.3  # variance of an entry of the shape after a step of white length 1, times d
_CURVATURE, _UNSURE = 2.0, 0.1  # errors of the linear observation: of third and of second order


class Told(NamedTuple):
    """What the server tells a client; made of releases only.

    Attributes:
        loc: Where scores are taken: base values of all latents in one vector, shape ``(d,)``.
        white: Columns span white coordinates, shape ``(d, d)``.
        clip: Bound on the norm of a white score.
        info_clip: Bound on the Frobenius norm of a record's white information.
        shares: Shares of a release's squared norm: score, information, fractions, scales.
        prior_sd: Standard deviations of the prior, shape ``(d,)``.
    """

    loc: Array
    white: Array
    clip: Array
    info_clip: Array
    shares: Array
    prior_sd: Array


class Memory(NamedTuple):
    """What the server remembers; everything was released. Vectors are in prior units.

    Attributes:
        loc: Where scores are taken next, base values.
        prior_sd: Standard deviations of the prior.
        shape: Information of an average record up to ``level``, shape ``(d, d)``.
        seen: Weighted sum of the shapes that were released.
        weight: Their weights' sum: one over the variance of an entry, in white coordinates.
        level: How strongly clipped scores respond, in units of ``shape``.
        level_var: Variance of its error.
        clip: Bound on the norm of a white score.
        info_clip: Bound on a record's information in units of ``clip`` squared.
        counts: Noisy histograms of the records' scales, shape ``(d, bins)``.
        counts_var: Variance of their noise.
        counted: Records in them.
        visits: How often each client was visited, shape ``(num_factors,)``.
        sure: One over the variance of each client's mean score.
        score: Each client's mean of released scores over the level, shape ``(num_factors, d)``.
        at: The mean of where they were taken.
    """

    loc: Array
    prior_sd: Array
    shape: Array
    seen: Array
    weight: Array
    level: Array
    level_var: Array
    clip: Array
    info_clip: Array
    counts: Array
    counts_var: Array
    counted: Array
    visits: Array
    sure: Array
    score: Array
    at: Array


@dataclass(frozen=True)
class FisherScoring:
    """Private Fisher scoring with factors that know their noise; nothing to tune.

    For models whose latents are all continuous and whose outcomes can be drawn, with a posterior
    of full covariance (``guide=None`` or ``AutoMultivariateNormal(model)``), and at most a few
    dozen latents: see :func:`~numpyro_dppvi.recommend`. ``damping`` has no effect on it.

    Args:
        num_replicates: Outcomes that are drawn for each record and visit, to centre its score.

    Raises:
        ValueError: If it is no whole number of at least 1.
    """

    releases: ClassVar[Any] = "sums"
    aggregator: ClassVar[Any] = "useful"
    keeps_factors: ClassVar[bool] = False
    central: ClassVar[bool] = False
    damped: ClassVar[bool] = False
    num_local_steps: ClassVar[int] = 1
    expectation: ClassVar[Automatic] = Automatic()

    num_replicates: int = 8

    def __post_init__(self) -> None:
        number = _validate.positive_int("num_replicates", self.num_replicates, 1000)
        object.__setattr__(self, "num_replicates", number)

    def guide(self, guide: Any, model: Model) -> Any:
        """Full covariance over all latents, if nothing else is asked for."""
        return AutoMultivariateNormal(model) if guide is None else guide

    def check(self, space: LatentSpace, family: MeanField) -> None:
        """Refuses what has no joint normal posterior, and outcomes that cannot be drawn."""
        if len(family.members) != 1 or not isinstance(family.members[0][1], FullNormal):
            raise UnsupportedModelError(
                "guide must be None or AutoMultivariateNormal(model) for FisherScoring(), whose "
                "posterior is one normal distribution over all latents: leave guide out, or write "
                "method=DPOptimization()."
            )
        if not space.can_draw:
            raise UnsupportedModelError(
                "the model's outcomes cannot be drawn (a numpyro.factor that records enter, an "
                "observed value that latents enter, or a distribution without sample), which "
                "FisherScoring() needs to centre scores: write method=DPOptimization()."
            )

    def solver(self, learning_rate: Array | float) -> Descent:
        """None is needed: a visit takes no steps."""
        return Descent(optax.sgd(learning_rate))

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """None is needed."""
        del num_releases, damping
        return 0.0

    def weights(self, num_shards: np.ndarray) -> np.ndarray:
        """All 1: what is released is the sum."""
        return np.ones(len(num_shards))

    def plan(self, study: Any) -> PrivacyPlan:
        """One noisy vector a visit, to which a record contributes at most norm 1.

        Raises:
            ValueError: If there is nothing but first visits, which would leave the prior.
        """
        if sum(study.num_visits) < 2 * (study.num_shares or 1) or (
            study.num_shares is None and max(study.num_visits) < 2
        ):
            raise ValueError(
                "num_rounds must be at least 2 for FisherScoring(), whose first visits only find "
                "the scales of the records: write num_rounds=10, say."
            )
        return plan.of_gradients(
            study.budgets,
            FullBatch(),
            clip_norm=1.0,
            releases_per_visit=1,
            num_visits=study.num_visits,
            client_sizes=study.client_sizes,
            num_shares=study.num_shares,
            before=study.before,
        )

    def planned(
        self, client_sizes: Sequence[int], num_shares: int | None
    ) -> Sequence[Mapping[str, Any]]:
        """What its plan says about each client, noise, budget and visits aside."""
        sampler = FullBatch()
        return [
            {
                "mechanism": GaussianSum.__name__,
                "num_shares": num_shares or 1,
                "num_records": size,
                "clip_norm": 1.0,
                "physical_size": sampler.physical_size(client_sizes),
                "releases_per_visit": 1,
                "sampler": sampler,
            }
            for size in client_sizes
        ]

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One noisy vector: scores, information, fractions that were clipped, scales."""
        told: Told = visit.told

        def contribution(space: LatentSpace, row: Mapping[str, Array], key: PRNGKey) -> PyTree:
            latents = functools.partial(_latents, space, visit.family)

            def score(outcome: PyTree) -> Array:
                return jax.grad(lambda loc: space.log_likelihood_of(latents(loc), row, outcome))(
                    told.loc
                )

            theta = latents(told.loc)
            keys = jax.random.split(key, self.num_replicates)
            drawn = jax.vmap(lambda key: space.draw(theta, row, key))(keys)
            observed = jax.grad(lambda loc: space.log_likelihood(latents(loc), row))(told.loc)
            scores = jnp.concatenate([observed[None], jax.vmap(score)(drawn)])
            return _contribution(told, scores)

        floats = (self.num_replicates + 1) * told.loc.size + told.loc.size**2
        released = likelihood.released_sum(contribution, floats, visit.secret_key)
        return Outcome(released, None, jnp.zeros((), bool))

    def memory(self, family: MeanField, q: Natural, num_factors: int) -> Memory:
        """Nothing is known but the prior."""
        coordinates = family.coordinates(q)[family.members[0][0]]
        normal = family.members[0][1]
        size = normal.size
        sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(_precision(family, q))))
        zero, one = jnp.zeros(()), jnp.ones(())
        return Memory(
            loc=normal.location(coordinates),
            prior_sd=sd,
            shape=jnp.eye(size),
            seen=jnp.zeros((size, size)),
            weight=zero,
            level=0.6 * one,
            level_var=0.25 * one,
            clip=jnp.sqrt(size * one),
            info_clip=1.5 * one,
            counts=jnp.zeros((size, _BINS)),
            counts_var=zero,
            counted=zero,
            visits=jnp.zeros(num_factors),
            sure=jnp.zeros(num_factors),
            score=jnp.zeros((num_factors, size)),
            at=jnp.zeros((num_factors, size)),
        )

    def told(self, memory: Memory, place: Array | int) -> Told:
        """Where to take scores, in which coordinates, and how to share out the release."""
        visits = memory.visits[place]
        first = (visits == 0) & (memory.weight == 0)
        info = jnp.maximum(_INFO_SHARES[2], _INFO_SHARES[0] * _INFO_SHARES[1] ** visits)
        usual = jnp.array([1 - info - _FLAGS_SHARE, info, _FLAGS_SHARE, 0.0])
        return Told(
            loc=memory.loc,
            white=memory.prior_sd[:, None] * _white(memory.shape)[0],
            clip=memory.clip,
            info_clip=memory.info_clip * memory.clip**2,
            shares=jnp.where(first, jnp.array([0.0, 0.0, 0.0, 1.0]), usual),
            prior_sd=memory.prior_sd,
        )

    def take(
        self, received: Received, releases: PyTree, memory: Memory, places: Array
    ) -> tuple[Natural, Memory]:
        """What a group's releases say, in factors that know their noise."""
        return _take(self, received, releases, memory, places)


def _latents(space: LatentSpace, family: MeanField, loc: Array) -> Mapping[str, Array]:
    """Values of the latents from one vector of base values."""
    return space.constrain(family.by_latent({family.members[0][0]: loc}))


def _precision(family: MeanField, natural: Natural) -> Array:
    ((name, _),) = family.members
    return -2 * unpack(natural[name].quadratic)


def _norms(rows: Array) -> Array:
    return jnp.sqrt(jnp.sum(rows * rows, axis=-1))


def _shrink(norm: Array, bound: Array) -> Array:
    return jnp.minimum(1.0, bound / jnp.maximum(norm, 1e-30))


def _contribution(told: Told, scores: Array) -> PyTree:
    """What one record adds to a release, joint norm at most 1.

    Args:
        told: What the server said.
        scores: Of the observed outcome and, below it, of drawn ones, in base values.
    """
    white = scores @ told.white
    # The centre b with sum_k clip(z_k - b) = 0, by reweighted means. It is symmetric in the
    # observed and the drawn outcomes, and so is what is taken off below: the expectation of the
    # first row is that of any other, and all of them add up to zero.
    centre = jnp.mean(white, axis=0)
    for _ in range(4):
        weights = _shrink(_norms(white - centre), told.clip)
        centre = weights @ white / jnp.sum(weights)
    rest = white - centre
    norms = _norms(rest)
    clipped = rest * _shrink(norms, told.clip)[:, None]
    score = clipped[0] - jnp.mean(clipped, axis=0)
    score = score * _shrink(_norms(score), told.clip)
    # E[clip(z) z'] over drawn outcomes is what the expected score responds with.
    parts = _shrink(norms[1:], told.clip) / (len(scores) - 1)
    info = jnp.einsum("k,ki,kj", parts, rest[1:], rest[1:])
    size = jnp.sqrt(jnp.sum(info * info))
    info = info * _shrink(size, told.info_clip)
    flags = jnp.stack([norms[0] > told.clip, size > told.info_clip])
    scales = jnp.sqrt(jnp.mean(scores[1:] ** 2, axis=0)) * told.prior_sd
    octave = jnp.clip(jnp.floor(jnp.log2(scales)) - _LOWEST, 0, _BINS - 1)
    hit = (octave[:, None] == jnp.arange(_BINS)) & (scales > 0)[:, None]
    roots = jnp.sqrt(told.shares)
    return {
        "score": roots[0] / told.clip * score,
        "information": roots[1] / told.info_clip * pack(info),
        "clipped": roots[2] / np.sqrt(2) * (2.0 * flags - 1),
        "scales": roots[3] / np.sqrt(told.loc.size) * hit.astype(score.dtype),
    }


def _white(shape: Array) -> tuple[Array, Array]:
    """W with W' shape W = I, and its inverse; by the correlation matrix, which is well scaled."""
    root = jnp.sqrt(jnp.diagonal(shape))
    values, vectors = jnp.linalg.eigh(shape / (root[:, None] * root))
    values = jnp.sqrt(jnp.maximum(values, 1e-5))
    return vectors / values / root[:, None], (vectors * values).T * root


def _bulk(values: Array, edge: Array) -> Array:
    """The mean of eigenvalues without those that stand out of the noise."""
    middle = jnp.median(values)
    for _ in range(5):
        inside = jnp.abs(values - middle) <= edge
        mean = jnp.sum(jnp.where(inside, values, 0)) / jnp.maximum(1, jnp.sum(inside))
        middle = jnp.where(jnp.any(inside), mean, middle)
    return middle


def _scales_of(memory: Memory) -> Array:
    """The diagonal of the information, from noisy histograms, by a matched filter.

    A quantile of noisy counts would pick bins that hold nothing but noise.
    """
    template = jnp.array(_TEMPLATE, memory.counts.dtype)
    length = jnp.sqrt(jnp.sum(template**2))
    number = _BINS - len(_TEMPLATE) + 1
    windows = jnp.arange(number)[:, None] + jnp.arange(len(_TEMPLATE))
    fit = memory.counts[:, windows] @ template / length
    best = jnp.argmax(fit, axis=1)
    height = jnp.max(fit, axis=1)
    octave = _LOWEST + best + _TEMPLATE_RMS
    mass = jnp.clip(height / length / jnp.maximum(memory.counted, 1), 1e-6, 1)
    found = height > 4.5 * jnp.sqrt(memory.counts_var)
    log_scale = octave * np.log(2) + 0.5 * jnp.log(mass)
    # A column that noise hides is taken for an average one.
    usual = jnp.sum(jnp.where(found, log_scale, 0)) / jnp.maximum(1, jnp.sum(found))
    return jnp.exp(2 * jnp.where(found, log_scale, usual))


def _take(
    method: FisherScoring, received: Received, released: PyTree, memory: Memory, places: Array
) -> tuple[Natural, Memory]:
    told = jax.vmap(method.told, (None, 0))(memory, places)
    size = memory.loc.size
    std, num_records = received.noise_std, received.num_records
    total = received.total_records
    share = jnp.sum(num_records) / total
    roots = jnp.sqrt(told.shares)
    scored = told.shares[:, 0] > 0

    def over(sums: Array, part: int, scale: Array | float) -> tuple[Array, Array]:
        """A part of the releases in its own units, and its noise; nothing where it has no share."""
        by = jnp.where(
            roots[:, part] > 0, scale / jnp.where(roots[:, part] > 0, roots[:, part], 1), 0
        )
        return sums * by.reshape(-1, *[1] * (sums.ndim - 1)), std * by

    # Scales.
    counts, counts_std = over(released["scales"], 3, np.sqrt(size))
    memory = memory._replace(
        counts=memory.counts + jnp.sum(counts, axis=0),
        counts_var=memory.counts_var + jnp.sum(counts_std**2),
        counted=memory.counted + jnp.sum(jnp.where(scored, 0, num_records)),
    )
    unknown = memory.weight == 0
    memory = memory._replace(shape=jnp.where(unknown, jnp.diag(_scales_of(memory)), memory.shape))
    memory = memory._replace(
        visits=memory.visits.at[places].add(1.0),
    )
    after = _observe(received, released, memory, told, places, over, scored, share)
    memory = jax.tree.map(lambda new, old: jnp.where(jnp.any(scored), new, old), after, memory)
    naturals, loc = _factors(received, memory, places)
    loc = jnp.where(jnp.any(scored), loc, memory.loc)
    # The shape depends on where scores are taken: what was seen elsewhere counts for less.
    way = (loc - memory.loc) / memory.prior_sd
    moved = memory.level * jnp.einsum("i,ij,j", way, memory.shape, way)
    stays = 1 / (1 + memory.weight * _SHAPE_DRIFT * moved / size)
    return naturals, memory._replace(
        loc=loc, seen=memory.seen * stays, weight=memory.weight * stays
    )


def _observe(
    received: Received,
    released: PyTree,
    memory: Memory,
    told: Told,
    places: Array,
    over: Any,
    scored: Array,
    share: Array,
) -> Memory:
    """What scores, information and fractions say."""
    size, num_records = memory.loc.size, received.num_records
    # In prior units, the coordinates that clients were told of.
    white = told.white[0] / memory.prior_sd[:, None]
    back = jnp.linalg.inv(white)
    clip, info_clip = told.clip[0], told.info_clip[0]
    records = jnp.sum(jnp.where(scored, num_records, 0))
    records = jnp.maximum(records, 1)

    # Information of the group. An entry's noise is that of a packed one over sqrt(2).
    packed, packed_std = over(released["information"], 1, info_clip)
    now = unpack(jnp.sum(packed, axis=0)) / records
    entry = jnp.sqrt(jnp.sum(packed_std**2)) / records / np.sqrt(2)
    values = jnp.linalg.eigvalsh(now)
    seen_level = _bulk(values, 2 * entry * np.sqrt(size))
    # Level: a scalar Kalman filter, with drift because the clip and x move.
    drift = memory.level_var + share * (0.3 * memory.level) ** 2
    gain = drift / (drift + 2 * entry**2 / size)
    level = memory.level + gain * (seen_level - memory.level)
    level = jnp.clip(level, 0.2 * memory.level, 5.0 * memory.level)
    level_var = (1 - gain) * drift

    # Shape: the weighted mean of all that were released, of which noise hides the small deviations.
    own = 1 / jnp.maximum((entry / level) ** 2, 1e-12)
    seen = memory.seen + own * (back.T @ (now / level) @ back)
    weight = memory.weight + own
    spread = jnp.sqrt(size / weight)
    # The diagonal is known sqrt(d) times better than the spectrum: by James and Stein's rule.
    stray = jnp.diagonal(seen / weight) / jnp.diagonal(memory.shape) - 1
    worth = jnp.clip(1 - 2 * size / weight / jnp.maximum(jnp.sum(stray**2), 1e-12), 0, 1)
    rescaled = jnp.sqrt(jnp.clip(1 + worth * stray, 0.3, 3.0))
    old_shape = memory.shape * rescaled[:, None] * rescaled
    before, before_back = _white(old_shape)
    values, vectors = jnp.linalg.eigh(_symmetric(before.T @ (seen / weight) @ before))
    stray = values - 1
    kept = jnp.sign(stray) * jnp.sqrt(jnp.maximum(stray**2 - 4 * spread**2, 0))
    least = jnp.clip(2 * spread, 0.05, 1.0)  # what lies below the edge cannot be told from it
    values = jnp.maximum(1 + kept, least)
    shape = _symmetric(before_back.T @ (vectors * values) @ vectors.T @ before_back)
    # What was seen in other coordinates has another noise in the new ones.
    new, _ = _white(shape)
    mismatch = size * jnp.mean((new.T @ memory.shape @ new) ** 2)
    forget = 1 / jnp.maximum(mismatch, 1.0)

    # Clips follow the released fractions, slowly where these are noisy.
    flags, flags_std = over(released["clipped"], 2, np.sqrt(2))
    fractions = (jnp.sum(flags, axis=0) / records + 1) / 2
    trust = share / (1 + (jnp.sqrt(jnp.sum(flags_std**2)) / records / 2 / 0.1) ** 2)
    # A low clip costs information and leans on the model; a high one costs noise. Where noise is
    # small beside the records' own spread, hardly anything is clipped.
    noisy = jnp.mean(received.noise_std * clip / jnp.sqrt(num_records * size))
    target = jnp.clip(_TARGETS[1] * noisy, *_TARGETS)
    ratio = jnp.clip(fractions[0] / target, 0.3, 3.0)
    info_target = jnp.clip(entry * np.sqrt(size), *_INFO_TARGETS)
    stretch = jnp.exp(jnp.clip(3 * (fractions[1] - info_target), -0.7, 0.7))

    # Each client's own scores, averaged with what it had released before.
    sums, sums_std = over(released["score"], 0, clip)
    score = sums @ back / level
    fresh = jnp.where(scored, 1 / jnp.maximum((sums_std / level) ** 2, 1e-12), 0)
    here = memory.loc / memory.prior_sd
    old_at, old_score = memory.at[places], memory.score[places]
    stale = _bend(memory._replace(weight=weight), shape, here - old_at, num_records)
    old = memory.sure[places]
    old = old / (1 + old * stale)
    sure = old + fresh
    part = jnp.where(sure > 0, fresh / jnp.where(sure > 0, sure, 1), 0)[:, None]
    return memory._replace(
        shape=shape,
        seen=seen * forget,
        weight=weight * forget,
        level=level,
        level_var=level_var,
        # In white coordinates lengths are of the order of sqrt(d): a clip far from it is a mistake.
        clip=jnp.clip(
            memory.clip * ratio ** (0.6 * trust), *(math.sqrt(size) * bound for bound in _CLIPS)
        ),
        info_clip=jnp.clip(memory.info_clip * stretch**trust, *_INFO_CLIPS),
        sure=memory.sure.at[places].set(sure),
        score=memory.score.at[places].set(old_score + part * (score - old_score)),
        at=memory.at.at[places].set(old_at + part * (here - old_at)),
    )


def _bend(memory: Memory, shape: Array, way: Array, num_records: Array) -> Array:
    """Variance of a score's error by linear extrapolation over ``way``, in white units.

    All clients' errors are alike and do not average out: each counts as if it were theirs all.
    """
    squared = jnp.einsum("...i,ij,...j", way, shape, way)
    unsure = _UNSURE**2 + 1 / jnp.maximum(memory.weight, 1e-12)
    return memory.visits.size * num_records**2 * (_CURVATURE * squared**2 / 2 + unsure * squared)


def _factors(received: Received, memory: Memory, places: Array) -> tuple[Natural, Array]:
    """Changes of the visited clients' factors, and where scores are to be taken next."""
    family, num_records = received.family, received.num_records
    ((name, _),) = family.members
    size, sd = memory.loc.size, memory.prior_sd
    white, _ = _white(memory.shape)
    spread = jnp.sqrt(size / jnp.maximum(memory.weight, 1e-12))
    known = 1 / (1 + spread)
    at, sure = memory.at[places], memory.sure[places]
    slope = jnp.einsum("ij,kj,mk->mi", white, white, memory.score[places])
    own = at + slope / num_records[:, None]  # each client's own maximum

    def naturals(middle: Array) -> NormalNatural:
        """Factors, given about where the posterior's mean is."""
        noise = 1 / jnp.maximum(sure, 1e-30) + _bend(memory, memory.shape, middle - at, num_records)
        # n^2 / (n / level + noise) is A (A + Sigma)^-1 A in white coordinates.
        amount = known * num_records**2 / (num_records / memory.level + noise)
        amount = jnp.where(sure > 0, amount, 0)
        precision = amount[:, None, None] * (memory.shape / (sd[:, None] * sd))
        linear = jnp.einsum("mij,mj->mi", precision, own * sd)
        return NormalNatural(linear, pack(-0.5 * precision))

    def mean(found: NormalNatural) -> Array:
        change = jax.tree.map(lambda a, b: jnp.sum(a - b, axis=0), found, received.factor[name])
        q = jax.tree.map(jnp.add, received.q[name], change)
        precision = -2 * unpack(q.quadratic)
        root = jnp.sqrt(jnp.diagonal(precision))
        scaled = precision / (root[:, None] * root)
        return jnp.linalg.solve(scaled, q.linear / root) / root

    here = memory.loc / sd

    def step(found: NormalNatural) -> Array:
        way = mean(found) / sd - here
        length = jnp.sqrt(jnp.einsum("i,ij,j", way, memory.shape, way))
        way = way * known * jnp.minimum(1.0, _TRUST / jnp.maximum(length, 1e-12))
        return jnp.where(jnp.all(jnp.isfinite(way)), here + way, here)

    middle = here
    for _ in range(3):
        middle = step(naturals(middle))
    found = naturals(middle)
    change = jax.tree.map(jnp.subtract, found, received.factor[name])
    return Natural({name: change}), middle * sd


def _symmetric(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2
