"""What the server of :class:`~numpyro_dppvi.FisherScoring` remembers, and what it tells clients."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.full_normal import unpack
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.methods import differences, pull, ratios, scales, search, secant, tails
from numpyro_dppvi.methods.differences import Differences
from numpyro_dppvi.methods.pull import Pull
from numpyro_dppvi.methods.ratios import BINS, Look, Ratios
from numpyro_dppvi.methods.scales import Scales
from numpyro_dppvi.methods.search import Search
from numpyro_dppvi.methods.tails import Tails
from numpyro_dppvi.methods.visits import ByClient, Received

# Chosen by simulation (docs/believe.md says on which studies).
_ROOM = 2.0  # by how much higher the first clip is where outcomes cannot be drawn


class Told(NamedTuple):
    """What the server tells a client; made of releases only.

    Attributes:
        loc: Where scores are taken: base values of all latents in one vector, shape ``(d,)``.
        white: Columns span white coordinates, shape ``(d, d)``.
        clip: Bound on the norm of a white score.
        info_clip: Bound on the Frobenius norm of a record's white information.
        shares: Shares of a release's squared norm: score, information, fractions, scales, votes.
        prior_sd: Standard deviations of the prior, shape ``(d,)``.
        look: Where to look for columns far from zero, at visits that do.
        along: How much of a clipped score is to answer in its own direction, where outcomes cannot
            be drawn: 1 as long as many are clipped, then 0.
        squared: The share of the square of its score in a record's information, where outcomes
            cannot be drawn.
        near: Where else the truth may be: ``loc + near @ z`` with standard normal z, shape
            ``(d, d)``.
    """

    loc: Array
    white: Array
    clip: Array
    info_clip: Array
    shares: Array
    prior_sd: Array
    look: Look
    along: Array
    squared: Array
    near: Array
    steps: Array


class Waiting(NamedTuple):
    """Sums over visits at one location since the server moved.

    Attributes:
        visits: How many.
        records: Records behind them.
        information: Released information in the coordinates that clients were told.
        information_var: Variance of its noise's entries.
        flags: What was clipped, shape ``(5,)``, in [-1, 1] a record: far and near scores that were
            observed, less drawn ones; their chance; drawn scores; information.
        flags_var: Variance of their noise, shape ``(5,)``.
        noise_var: Variance of the noise on releases of norm 1.
        noisy: A clip's noise beside the clients' own spread.
        score: Sum of scores in these coordinates, shape ``(d,)``.
        score_var: Variance of its noise's entries.
    """

    visits: Array
    records: Array
    information: Array
    information_var: Array
    flags: Array
    flags_var: Array
    noise_var: Array
    noisy: Array
    score: Array
    score_var: Array


class Own(NamedTuple):
    """What is remembered of each client, on a leading axis.

    Where it is kept, ``score`` and ``score_known`` are as of the client's last visit, in units of
    :class:`Moves`, so that a visit costs as much however many clients there are: see
    ``moving.kept``. Within ``take`` they are at ``Memory.loc``, and until ``moving.outside`` in
    the coordinates that clients were told; there ``score_known`` is that of each kind of client.

    Attributes:
        visits: How often it was visited.
        records: How many records it has, once it was visited.
        score: Sum of its scores over the level, shape ``(d,)``.
        score_known: The inverse of its covariance, packed (``full_normal.pack``).
        error: ``Moves.error`` at its last visit, packed.
    """

    visits: Array
    records: Array
    score: Array
    score_known: Array
    error: Array


class Moves(NamedTuple):
    """What has become of all clients' scores since the run began, in one sum for all.

    Attributes:
        unit: By what scores were multiplied, because the level that they are over has changed.
        way: By how much a record's score has fallen, in this unit, shape ``(d,)``.
        error: Covariance of its error, in this unit squared, shape ``(d, d)``.
        lately: The way of the last rounds, older ones for less, of latents that are ``curved``.
    """

    unit: Array
    way: Array
    error: Array
    lately: Array


class Memory(NamedTuple):
    """What the server remembers; everything was released. In prior units, but for ``loc``.

    Attributes:
        loc: Where scores are taken next, base values.
        prior_sd: Standard deviations of the prior.
        level: How strongly clipped scores respond, in units of ``shape``.
        level_var: Variance of its relative error.
        shape: Information of an average record up to ``level``, shape ``(d, d)``.
        added: What is in it for the sake of its coordinates alone (``shapes.apart``).
        seen: Mean of the shapes that were released.
        shape_known: N^-1, if the noise of ``seen`` is N^(1/2) e N^(1/2), e symmetric with standard
            normal entries.
        clip: Bound on the norm of a white score.
        info_clip: Bound on a record's information in units of ``clip`` squared.
        misfit: Fraction of observed scores that are far out, and of far ones less near ones, less
            that of drawn ones, shape ``(2,)``; below 0 where outcomes cannot be drawn.
        misfit_known: The inverse of its error's variance.
        tails: The same of the last rounds, each by itself.
        counts: Noisy histograms of the records' scales, shape ``(d, bins)``.
        counts_var: Variance of their noise.
        counted: Records in them.
        scales: What they say.
        ratios: What is known of columns far from zero.
        most_visits: How often the client was visited that was visited most.
        clients: What is remembered of each; in ``take``, of those who were visited alone.
        moves: What has become of all clients' scores.
        pull: Whether the last rounds' scores still point one way.
        rounds: Scores of the last rounds, each of all clients.
        waiting: Releases since the server moved.
        differences: By how much clients differ.
        near: A root of the posterior's covariance, short enough for an expansion about ``loc``.
        search: Where records would have the run begin.
        drawn: Whether outcomes can be drawn, 1 or 0.
        columns: 1 for latents that are multiplied by values of a record, shape ``(d,)``.
        curved: 1 for latents on whose values it depends how much a record tells, shape ``(d,)``.
    """

    loc: Array
    prior_sd: Array
    level: Array
    level_var: Array
    shape: Array
    added: Array
    seen: Array
    shape_known: Array
    clip: Array
    info_clip: Array
    misfit: Array
    misfit_known: Array
    tails: Tails
    counts: Array
    counts_var: Array
    counted: Array
    scales: Scales
    ratios: Ratios
    most_visits: Array
    clients: ByClient[Own]
    moves: Moves
    pull: Pull
    rounds: secant.Rounds
    waiting: Waiting
    differences: Differences
    near: Array
    search: Search
    drawn: Array
    columns: Array
    curved: Array

    @property
    def own(self) -> Own:
        """What is remembered of each client."""
        return self.clients.rows

    def with_own(self, **changes: Array) -> "Memory":
        """With something else remembered of them."""
        return self._replace(clients=ByClient(self.own._replace(**changes)))


@in_own_precision
def nothing(
    family: MeanField,
    q: Natural,
    num_factors: int,
    *,
    searches: bool,
    drawn: bool,
    columns: np.ndarray,
    curved: np.ndarray,
) -> Memory:
    """What is remembered before the first visit: the prior."""
    ((name, normal),) = family.members
    size = normal.size
    zero, one, square = jnp.zeros(()), jnp.ones(()), jnp.zeros((size, size))
    prior_sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(-2 * unpack(q[name].quadratic))))
    # Beside the prior's mean: where logits are all 0, densities made of |x| have no derivative.
    # By no more than that: of a wide prior in raw units, a thousandth is several logits.
    loc = normal.location(family.coordinates(q)[name]) + 1e-6 * prior_sd
    # What is clipped of scores about drawn outcomes bends nothing. Of others all is lost, and a
    # release of low clips has little noise: later ones would hardly count beside it.
    by = 1.0 if drawn else _ROOM
    return Memory(
        loc=loc,
        prior_sd=prior_sd,
        level=0.6 * one,
        level_var=zero,
        shape=jnp.eye(size),
        added=square,
        seen=square,
        shape_known=square,
        clip=by * jnp.sqrt(size * one),
        info_clip=1.5 / by * one,
        misfit=jnp.zeros(2),
        misfit_known=jnp.zeros(2),
        tails=tails.nothing(),
        counts=jnp.zeros((size, BINS)),
        counts_var=zero,
        counted=zero,
        scales=scales.nothing(size, drawn),
        ratios=ratios.nothing(size),
        most_visits=zero,
        clients=ByClient(
            Own(
                visits=jnp.zeros(num_factors),
                records=jnp.zeros(num_factors),
                score=jnp.zeros((num_factors, size)),
                score_known=jnp.zeros((num_factors, size * (size + 1) // 2)),
                error=jnp.zeros((num_factors, size * (size + 1) // 2)),
            )
        ),
        moves=Moves(one, jnp.zeros(size), square, jnp.zeros(size)),
        pull=pull.nothing(size),
        rounds=secant.nothing(size),
        waiting=nobody(size),
        differences=differences.nothing(),
        near=square,
        search=search.nothing(loc / prior_sd, searches),
        drawn=one if drawn else zero,
        columns=jnp.asarray(columns, float),
        curved=jnp.asarray(curved, float),
    )


def nobody(size: int) -> Waiting:
    """Nothing waits."""
    zero = jnp.zeros(())
    return Waiting(
        visits=zero,
        records=zero,
        information=jnp.zeros((size, size)),
        information_var=zero,
        flags=jnp.zeros(len(tails.ROOTS)),
        flags_var=jnp.zeros(len(tails.ROOTS)),
        noise_var=zero,
        noisy=zero,
        score=jnp.zeros(size),
        score_var=zero,
    )


def partial(received: Received) -> bool:
    """Whether not all clients are visited at once."""
    return received.num_records.size < received.num_factors


def begun(memory: Memory, visits: Array) -> Array:
    """How many visits there were since the run began where it did."""
    return jnp.maximum(visits - memory.search.repeated, 0)


def any_shape(memory: Memory) -> Array:
    """Whether any information was released."""
    return jnp.trace(memory.shape_known) > 0


def least(size: int, total_records: Array) -> Array:
    """What every learnt shape gets in prior units: over all records, as much as the prior knows."""
    # Of columns that repeat others nothing is left, or next to nothing: say that a column repeats
    # others, but not in one record of a thousand. Noise soon tells that most records say nothing of
    # it by itself, and clips hide what the few say. Coordinates would be stretched on and on, until
    # what is released in them is rounding, or a step that noise leads moves the few's predictions
    # by many units of a log rate. Factors claim nothing of what is added.
    return jnp.eye(size) / total_records
