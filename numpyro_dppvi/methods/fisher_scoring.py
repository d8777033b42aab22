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
  The first visit releases histograms of the records' scales, one a coordinate; the second and
  third ones, where columns lie far from zero, histograms of ratios
  (:mod:`numpyro_dppvi.methods.ratios`). Where noise hides columns in them, they are asked for once
  more. All later ones refine the matrix. What noise would hide keeps the shape it had.
* *Where to begin.* Under wide priors in raw units, records can be all but impossible at the prior's
  mean. First visits also release votes for other places (:mod:`numpyro_dppvi.methods.search`).
* *A clip that bends nothing under the model.* A clipped score has expectation zero if it is first
  centred: record by record, outcomes are drawn from the model at x, and the score of the outcome
  that was observed is clipped about a centre of all of them together. By symmetry among the
  observed and the drawn outcomes, the expectation at the true x is zero for any clip. Where the
  model does not fit, observed scores are clipped more often than drawn ones: that difference is
  released, and the clip rises until what exceeds it is less than the noise. Where outcomes cannot
  be drawn (a ``numpyro.factor``), scores are clipped about zero, and a high clip bends little.
* *Where the truth may be.* x is off by its noise, and scores answer to that in second order, too: a
  learnt spread would look larger than it is. So outcomes are drawn about x as the posterior is.
* *All rounds count.* Releases of a client are averaged, older ones for less the further x has
  moved since.
* *Clients may differ.* When they release scores for the first time, x stays until all were asked.
  So it does later where their scores or information differ by more than noise
  (:mod:`numpyro_dppvi.methods.differences`).

What the server makes of releases is in :mod:`numpyro_dppvi.methods.noisy_scores`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Hits, Model, Natural, PRNGKey, PyTree
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import FullNormal, MeanField, factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.latents import LatentSpace, recentred
from numpyro_dppvi.methods import entering, noisy_scores, ratios, remembered, search, tails, values
from numpyro_dppvi.methods.local_solve import Descent
from numpyro_dppvi.methods.noisy_gradients import plan_of_gradients
from numpyro_dppvi.methods.objective import Automatic
from numpyro_dppvi.methods.remembered import Memory, Told
from numpyro_dppvi.methods.scales import BINS, LOWEST
from numpyro_dppvi.methods.values import Aggregator, Releases, Study
from numpyro_dppvi.methods.visits import Likelihood, Outcome, Received, Visit
from numpyro_dppvi.methods.white import coordinates, seen
from numpyro_dppvi.privacy import FullBatch, PrivacyPlan, arithmetic

# Pairs of places about the posterior's mean in which a record's outcomes have probabilities: each
# record has its own, and their sum over records is what counts.
_PAIRS = 1
# Where else the truth is looked for: no further than so many deviations of one record. Where
# outcomes are drawn, early posteriors, which are wider than their means are off, took off too much.
# There the second is that of so many latents: the noise of more moves their mean further.
_LISTED_REACH, _DRAWN_REACH = 1.5, (0.3, 7)
_OWN_REACH = 0.6  # of the record's own deviations, where outcomes are drawn
_NEAR = 3.0  # scores beyond the clip over this are counted, where outcomes cannot be drawn


@dataclass(frozen=True)
class FisherScoring(values.Method):
    """Private Fisher scoring with factors that know their noise; nothing to tune.

    For models whose latents are all continuous, with a posterior of full covariance (``guide=None``
    or ``AutoMultivariateNormal(model)``), and at most a few dozen latents: see
    :func:`~numpyro_dppvi.recommend`. ``damping`` has no effect on it. Where outcomes cannot be
    drawn (a ``numpyro.factor``, say for censored times), clipping bends a little, and intervals are
    somewhat too narrow. Under a hierarchy of normal effects q has the posterior's means and
    covariance, given clients' factors, where other methods project.

    Args:
        num_replicates: Outcomes that are drawn for each record and visit, to centre its score. None
            are drawn where a record has one outcome of at most twelve values, such as a binary or
            an ordered one: these are all counted, by their probabilities under the posterior.
        noise_aware: Whether factors know their noise. If not, a factor is what is estimated of the
            records' information, A in place of A (A + Sigma)^-1 A: q as the paper defines it, for
            reproduction. Its intervals leave the noise out, and are too narrow under privacy;
            without noise both agree.
        microbatch_size: The most records of a client that are computed at once, which bounds memory
            and changes no result. ``None`` for as many as stay in a core's cache.

    Raises:
        ValueError: If a number is not a whole number of at least 1.
        TypeError: If ``noise_aware`` is not True or False.
    """

    releases: ClassVar[Releases] = "sums"
    aggregator: ClassVar[Aggregator] = "useful"
    damped: ClassVar[bool] = False
    wide: ClassVar[bool] = True
    matches: ClassVar[bool] = True
    num_local_steps: ClassVar[int] = 1
    expectation: ClassVar[Automatic] = Automatic()
    # A release is planned and charged as one clipped gradient: a record's part of it has norm 1 at
    # the most, by construction (see _contribution).
    sampler: ClassVar[FullBatch] = FullBatch()
    clip_norm: ClassVar[float] = 1.0

    num_replicates: int = 8
    noise_aware: bool = True
    microbatch_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _validate.set_field(self, "noise_aware", _validate.flag)
        _validate.set_field(self, "num_replicates", _validate.positive_int, 1000)
        values.set_microbatch(self)

    def guide(self, guide: Any, model: Model) -> Any:
        """Full covariance over all latents, if nothing else is asked for."""
        return AutoMultivariateNormal(model) if guide is None else guide

    def coordinates(self, space: LatentSpace) -> LatentSpace:
        """With effects in the places of latents that the model draws apart from them."""
        return recentred(space)

    def check(self, space: LatentSpace, family: MeanField) -> None:
        """Refuses what has no joint normal posterior."""
        if len(family.members) != 1 or not isinstance(family.members[0][1], FullNormal):
            raise UnsupportedModelError(
                "guide must be None or AutoMultivariateNormal(model) for FisherScoring(), whose "
                "posterior is one normal distribution over all latents: leave guide out, or write "
                "method=DPOptimization()."
            )

    def solver(self, learning_rate: Array | float) -> Descent:
        """None is needed: a visit takes no steps."""
        return Descent(optax.sgd(learning_rate))

    def learning_rate(self, num_releases: int, damping: float) -> float:
        """None is needed."""
        return 0.0

    def plan(self, study: Study) -> PrivacyPlan:
        """One noisy vector a visit, to which a record contributes at most norm 1.

        Raises:
            ValueError: If there is nothing but first visits, which would leave the prior.
        """
        # What finds scales is each client's first visit or, with an aggregator, the first sum of
        # all.
        if sum(study.num_visits) < 2 * (study.num_shares or 1) or (
            study.num_shares is None and max(study.num_visits) < 2
        ):
            raise ValueError(
                "num_rounds must be at least 2 for FisherScoring(), whose first visits only find "
                "the scales of the records: write num_rounds=10, say."
            )
        return plan_of_gradients(self, study)

    def visit(self, visit: Visit, likelihood: Likelihood) -> Outcome:
        """One noisy vector: scores, information, fractions that were clipped, scales."""
        told: Told = visit.told
        searches = told.steps.size > 0
        family = visit.family

        def contribution(space: LatentSpace, row: Mapping[str, Array], key: PRNGKey) -> PyTree:
            latents = functools.partial(_latents, space, family, entering.of(space, family))

            def density(loc: Array, outcomes: PyTree) -> Array:
                return space.log_likelihood_of(latents(loc), row, outcomes)

            score = jax.grad(density)
            far = _votes(told, lambda loc: density(loc, {})) if searches else {}
            if not space.can_draw:
                return {**far, **_as_observed(told, lambda loc: score(loc, {}))}
            # Of the model at the very point where scores are taken: if the model is right there,
            # the observed outcome is one more like them.
            observed = score(told.loc, {})
            if space.few_outcomes is not None:
                # Not as NumPy's: JAX takes none for a batched argument of a custom derivative.
                outcomes = jax.tree.map(jnp.asarray, space.few_outcomes)
                listed = jax.vmap(score, (None, 0))(told.loc, outcomes)
                weights = _probabilities(told, density, outcomes, key)
                return _centred(told, observed, listed, weights)

            def draw(loc: Array, key: PRNGKey) -> Array:
                return score(told.loc, space.draw(latents(loc), row, key))

            number = self.num_replicates
            # A multiple of sixteen, the first of which are the same: loops over nine are unrolled
            # into so much code that the whole visit takes a quarter longer to compile.
            enough = number + 1 + -(number + 1) % 16
            key, *keys = jax.random.split(key, enough)[: number + 1]
            # By the same keys about ``loc`` and at it, so that they differ by the place alone.
            here = jax.vmap(draw, (None, 0))(told.loc, jnp.stack(keys))
            places = _about(told, -(-number // 2), key, here)[:number]
            there = jax.vmap(draw)(places, jnp.stack(keys))
            weights = jnp.full(number, 1 / number, there.dtype)
            return {**far, **_centred(told, observed, there, weights, here)}

        # The scores of all outcomes, and an information matrix.
        floats = (2 * self.num_replicates + 1) * told.loc.size + told.loc.size**2
        # Histograms are asked for at a client's first visits alone, and take most of the time.
        asked = {"score": None, "information": None, "clipped": None, "scales": told.shares[3] > 0}
        if searches:
            asked["votes"] = told.shares[4] > 0
        released = likelihood.released_sum(contribution, floats, visit.secret_key, asked)
        return Outcome(released, None, jnp.zeros((), bool))

    def memory(self, space: LatentSpace, family: MeanField, q: Natural, num_factors: int) -> Memory:
        """Nothing is known but the prior."""
        entries = entering.of(space, family)
        return remembered.nothing(
            entering.alone(family, entries),
            entering.marginal(family, q, entries),
            num_factors,
            # Where outcomes are few, as binary ones, a record is never all but impossible.
            searches=space.few_outcomes is None,
            drawn=space.can_draw,
            columns=entering.columns(space, family),
            curved=entering.curved(space, family),
        )

    def told(self, memory: Memory, place: Array | int) -> Told:
        """Where to take scores, in which coordinates, and how to share out the release."""
        return noisy_scores.told(memory, place)

    def take(
        self, received: Received, releases: PyTree, memory: Memory, places: Array
    ) -> tuple[Natural, Memory]:
        """What a group's releases say, in factors that know their noise."""
        entries = entering.of(received.space, received.family)
        all_enter = len(entries) == received.family.members[0][1].size
        space, number = received.space, self.num_replicates
        found, memory = noisy_scores.take(
            received if all_enter else entering.received(received, entries),
            releases,
            memory,
            centred=1 / (number + 1) if _are_drawn(space) else 0.0,
            reach=_reach(space, memory.loc.size),
            unseen=entering.unseen(space, received.family),
            lookups=entering.lookups(space, received.family),
            noise_aware=self.noise_aware,
        )
        if all_enter:
            return found, memory
        whole = entering.whole(received.family, found, entries)
        return factors.divide(whole, received.factor), memory

    def said(
        self, space: LatentSpace, family: MeanField, q: Natural, memory: Memory
    ) -> dict[str, float | None]:
        """How strongly the last scores point one way, what was clipped, and how wide q is."""
        return {
            "pull": float(memory.pull.strength),
            # Where outcomes cannot be drawn, nobody knows how many scores the model would clip: 0.
            "cut": tails.cut(memory.tails),
            # By the noise on what is counted; outcomes that are few do not lie far out.
            "unseen": tails.unseen(memory.tails) if _are_drawn(space) else None,
            "widened": float(_widened(space, family, q, memory)),
        }


# Step by step it would be a program for each of thirty operations.
@compiled("space", "family", quick=True)
def _widened(space: LatentSpace, family: MeanField, q: Natural, memory: Memory) -> Array:
    """By the information that was learnt: the median over the latents that records enter."""
    # Without noise the precision in prior units would be about 1 + N level J.
    ((_, natural),) = entering.marginal(family, q, entering.of(space, family)).items()
    shape, unseen = memory.shape, entering.unseen(space, family)
    if unseen.shape[1]:
        axes = coordinates(shape)
        shape = axes.outside(seen(axes, jnp.asarray(unseen) / memory.prior_sd[:, None]))
    precision = jnp.eye(memory.loc.size) + jnp.sum(memory.own.records) * memory.level * shape
    without = memory.prior_sd**2 * jnp.diagonal(jnp.linalg.inv(precision))
    variances = jnp.diagonal(jnp.linalg.inv(-2 * unpack(natural.quadratic)))
    return jnp.median(jnp.sqrt(variances / without))


def _are_drawn(space: LatentSpace) -> bool:
    """Whether outcomes are drawn, rather than listed or taken as observed."""
    return space.can_draw and space.few_outcomes is None


def _reach(space: LatentSpace, size: int) -> float:
    """How far from ``loc`` outcomes are looked for, in deviations of one record."""
    if space.few_outcomes is not None:
        return _LISTED_REACH
    reach, number = _DRAWN_REACH
    return reach * math.sqrt(max(1.0, size / number))


def _votes(told: Told, density: Callable[[Array], Array]) -> PyTree:
    """What one record adds to a first release: votes for places where it is likely."""
    share = told.shares[4]
    places = search.places(told.loc, told.prior_sd, told.steps)
    found = jax.lax.cond(
        arithmetic.anyone(share > 0),
        lambda: search.votes(jax.vmap(density)(places)),
        lambda: jnp.zeros(len(places), places.dtype),
    )
    return {"votes": jnp.sqrt(share) * found}


def _latents(
    space: LatentSpace, family: MeanField, entries: np.ndarray, loc: Array
) -> Mapping[str, Array]:
    """Values of the latents from base values of those that records enter."""
    ((name, normal),) = family.members
    if len(entries) < normal.size:
        # The others are at zero: nothing depends on where they are.
        loc = jnp.zeros(normal.size, loc.dtype).at[entries].set(loc)
    return space.constrain(family.by_latent({name: loc}))


def _about(told: Told, pairs: int, key: PRNGKey, scores: Array | None = None) -> Array:
    """Places about ``loc`` as the posterior is, shape ``(2 * pairs, d)``.

    In pairs, whose first derivatives cancel. Signs have the variance of normal numbers, which is
    all that counts for second derivatives, and come 32 from a word.

    By the record's scores of outcomes drawn at ``loc``, if they are given, no place is further away
    than ``_OWN_REACH`` deviations of the record. The server may believe less information than there
    is: predictions about ``loc`` then scatter more than any record does, which would seem to say
    that a learnt spread is too large, the more so the smaller it gets.
    """
    size = told.loc.size
    words = jax.random.bits(key, (-(-pairs * size // 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)) & 1
    signs = 2.0 * bits.ravel()[: pairs * size].reshape(pairs, size).astype(told.loc.dtype) - 1
    steps = signs @ told.near.T
    if scores is not None:
        lengths = jnp.sqrt(jnp.mean((steps @ scores.T) ** 2, axis=1))
        steps = steps * _shrink(lengths, jnp.asarray(_OWN_REACH, lengths.dtype))[:, None]
    return told.loc + jnp.concatenate([steps, -steps])


def _probabilities(
    told: Told, density: Callable[[Array, PyTree], Array], outcomes: PyTree, key: PRNGKey
) -> Array:
    """Those of a record's outcomes, where the truth is about ``loc`` as the posterior is."""
    # At ``loc`` itself they would be off by half their second derivative times the posterior's
    # covariance, all one way: where outcomes are rare, the intercept lagged by 1.6 of its
    # deviations.
    places = _about(told, _PAIRS, key)
    densities = jax.vmap(jax.vmap(density, (None, 0)), (0, None))(places, outcomes)
    return jnp.mean(jax.nn.softmax(densities), axis=0)


def _norms(rows: Array) -> Array:
    return jnp.sqrt(jnp.sum(rows * rows, axis=-1))


def _shrink(norm: Array, bound: Array) -> Array:
    # The least norm keeps a zero vector from being 0 / 0.
    return jnp.minimum(1.0, bound / jnp.maximum(norm, 1e-30))


def _centred(
    told: Told, observed: Array, others: Array, weights: Array, here: Array | None = None
) -> PyTree:
    """What one record adds to a release whose outcomes can be drawn or listed.

    Args:
        told: What the server said.
        observed: Score of the observed outcome, in base values.
        others: Scores of outcomes of the model where the truth may be.
        weights: Their probabilities, which add up to 1.
        here: Scores of outcomes drawn at ``loc``; ``None`` if ``others`` are all that there are.
    """
    drawn = here is not None
    if here is None:
        here = others
    white = jnp.concatenate([observed[None], others]) @ told.white
    # The centre b with E clip(z - b) = 0, by reweighted means. Over all outcomes that there are,
    # the expectation of what is observed is that of the others, which is taken off below. Drawn
    # ones need the observed one among them: then centre and mean are symmetric in all of them, the
    # expectation of the first row is that of any other, and they add up to zero.
    own = 1 / len(white) if drawn else 0.0
    shares = jnp.concatenate([jnp.full(1, own), (1 - own) * weights])
    centre = shares @ white
    for _ in range(4):
        by = shares * _shrink(_norms(white - centre), told.clip)
        centre = by @ white / jnp.sum(by)
    norms = _norms(white - centre)
    clipped = (white - centre) * _shrink(norms, told.clip)[:, None]
    score = clipped[0] - shares @ clipped
    # How the expected score answers to the true parameter: the derivative of a density is the
    # density times its score z, so that d E[clip(z)] = E[clip(z) z'], over outcomes of the model at
    # ``loc``. Those drawn elsewhere vary more, and would seem to say more.
    rest = here @ told.white - centre
    info = jnp.einsum("k,ki,kj", weights * _shrink(_norms(rest), told.clip), rest, rest)
    excess, chance = tails.counted(norms / told.clip, shares)
    drawn_over = weights @ (1.0 * (norms[1:] > told.clip))
    scores = here * told.prior_sd
    return _contribution(
        told,
        score=score,
        info=info,
        over=(*excess, 2 * chance - 1, 2 * drawn_over - 1),
        scales=jnp.sqrt(weights @ scores**2),
        scores=scores,
    )


def _as_observed(told: Told, score: Callable[[Array], Array]) -> PyTree:
    """What one record adds to a release whose outcomes cannot be drawn."""
    # Its score is clipped about 0. Its information is the observed one, at first with a share of
    # the score's square: both have the same mean at the truth, but far from it the former can
    # vanish, where Newton's steps by it would be thrown, and the latter cannot. Nothing says how
    # many scores would be clipped under the model, so the clip follows those that come near it: if
    # tails are like an exponential density's, a fraction p beyond a third of the clip is p^3 beyond
    # it.
    observed = score(told.loc)
    slope = jax.jacrev(score)(told.loc)  # a sum over discrete latents has no forward rule
    white = observed @ told.white
    norm = _norms(white)
    shrink = _shrink(norm, told.clip)
    # Beyond the clip C only a score's direction still answers to where it is taken:
    # d (C z / |z|) = C / |z| (1 - z z' / |z|^2) dz. Newton's steps by that go too far while many
    # are clipped; by weights alone, C / |z| dz, they do not (reweighted least squares).
    unit = white / jnp.maximum(norm, 1e-30)
    answer = -told.white.T @ slope @ told.white
    lost = jnp.where(norm > told.clip, 1 - told.along, 0) * jnp.outer(unit, unit @ answer)
    clipped = shrink * white
    # Of the square, too, what responds: E[clip(z) z'] is the derivative of E[clip(z)].
    info = (1 - told.squared) * shrink * (answer - lost) + told.squared * jnp.outer(clipped, white)
    near = 1.0 * (norm > told.clip / _NEAR)
    return _contribution(
        told,
        score=clipped,
        info=(info + info.T) / 2,
        over=(-near, jnp.zeros_like(near), -jnp.ones_like(near), 2 * near - 1),
        scales=jnp.sqrt(jnp.abs(jnp.diagonal(slope))) * told.prior_sd,
        scores=observed[None] * told.prior_sd,
    )


def _contribution(
    told: Told, *, score: Array, info: Array, over: tuple[Array, ...], scales: Array, scores: Array
) -> PyTree:
    """What one record adds to a release, joint norm at most 1.

    Args:
        told: What the server said.
        score: In white coordinates, clipped.
        info: How it responds, in white coordinates.
        over: Far and near scores that were observed, less drawn ones, norm at most 1 together;
            their chance, and how many of the drawn ones are clipped, in [-1, 1].
        scales: Roots of the record's information on each latent, in units of the prior.
        scores: Of some outcomes, in units of the prior.
    """
    # A difference of clipped scores may be longer than the clip: the promise of norm 1 is about
    # what is released.
    score = score * _shrink(_norms(score), told.clip)
    size = jnp.sqrt(jnp.sum(info * info))
    info = info * _shrink(size, told.info_clip)
    flags = jnp.stack([*over, 2.0 * (size > told.info_clip) - 1])
    # Each part has norm at most sqrt(share), and the shares add up to 1: so does the squared norm
    # of all together. (So it is with the flags: the first two have norm at most 1 together, each
    # other one is in [-1, 1], and the squares of their roots add up to 1.)
    roots = jnp.sqrt(told.shares)
    return {
        "score": roots[0] / told.clip * score,
        "information": roots[1] / told.info_clip * pack(info),
        "clipped": roots[2] * tails.ROOTS.astype(flags.dtype) * flags,
        "scales": _hits(told, scales, scores),
    }


def _hits(told: Told, scales: Array, scores: Array) -> Hits:
    """A record's entries in histograms of scales or of ratios, joint norm at most the share's root.

    Scales are roots of its information on each latent, and scores are of some outcomes, both in
    units of the prior.
    """
    octave = jnp.clip(jnp.floor(jnp.log2(scales)) - LOWEST, 0, BINS - 1)
    # -1 is in no bin: a record without a scale (zero, or NaN) is in no histogram.
    octave = jnp.where(scales > 0, octave, -1)
    looking, share = jnp.any(told.look.step > 0), told.shares[3]
    # Sorted only at visits that look: it takes a quarter of all that a record's part does.
    place: Array = jax.lax.cond(
        arithmetic.anyone(looking),
        lambda: ratios.place(told.look, scores),
        lambda: octave.astype(scores.dtype),
    )
    place = jnp.where(looking, place, octave)
    # A record is in at most one bin of each of ``number`` histograms: so many ones, of norm
    # sqrt(number).
    number = jnp.where(looking, jnp.sum(told.look.step > 0), scales.size)
    weight = jnp.sqrt(share) / jnp.sqrt(jnp.maximum(number, 1))
    return Hits(
        weight.astype(place.dtype),
        place,
        jnp.arange(BINS, dtype=place.dtype),
        jnp.where(share > 0, 1.0, 0.0).astype(place.dtype),
    )
