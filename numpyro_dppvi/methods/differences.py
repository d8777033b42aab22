"""Whether clients differ by so much that the server should wait for all before it moves.

The server knows the average record's information J, and moves all clients' scores by it when the
location moves. The scores of a client m whose records have J + D_m are moved wrongly by D_m. These
errors add up to zero over clients that were asked at one location. They do not if clients were
asked one after the other while the location moved. Where D_m is as large as J, as where each client
is a group with an intercept of its own, they grow from visit to visit.

Each client releases its information, so D_m shows: by its squared length in white coordinates, the
excess over noise of the squared difference between a release and what was known before. As long
as the server moves after each visit, information that changes on the way (a dose's grows
thousandfold once it has an effect) looks the same. Once it waits, clients are asked at one place:
what they release there decides whether it goes on waiting.

Scores may differ where information does not: one client holds the cases and another the controls.
Asked in turn, each leads to where its own records are likely, which is so far away that what others
have said is forgotten on the way, and so on without end. On the way nobody can tell, because far
from where it was released a score says little. So the server waits for all when they release scores
for the first time, and goes on waiting if these differ.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_dppvi._typing import Array

_FADE = 0.7  # what older visits count for after a round
_SURE = 3.0  # standard deviations of noise by which differences have to exceed what is harmless
_MAYBE = (
    1.0  # the same, where clients were asked at one location: they wait unless it is surely less
)
_OPPOSED = 0.1  # squared length of scores' differences that is harmless, in deviations of a record
_HARMLESS = 2.0, 0.25  # squared lengths up to the first and the second for each latent


class Estimate(NamedTuple):
    """The mean squared length of D_m, or of a difference of scores, in white coordinates.

    Attributes:
        square: Its estimate; below 0 by noise.
        known: The inverse of its variance.
    """

    square: Array
    known: Array

    @property
    def error(self) -> Array:
        """Its standard error."""
        return 1 / jnp.sqrt(jnp.maximum(self.known, 1e-30))


class Differences(NamedTuple):
    """What is known of them.

    Attributes:
        moving: From information released at different locations, with what changes on the way.
        still: From information released at one location.
        scores: From scores released at one location, a record.
    """

    moving: Estimate
    still: Estimate
    scores: Estimate


def nothing() -> Differences:
    """Before any releases."""
    estimate = Estimate(jnp.zeros(()), jnp.zeros(()))
    return Differences(estimate, estimate, estimate)


def after(
    before: Estimate, seen: Array, known: Array, now: Array, error: Array, share: Array
) -> Estimate:
    """What is known after another client's release.

    Args:
        before: What was known of differences before.
        seen: The mean shape of others' releases, in coordinates in which the shape is about the
            identity, shape ``(d, d)``.
        known: N^-1, if its noise is N^(1/2) e N^(1/2), e symmetric with standard normal entries.
        now: The client's shape by the release.
        error: Noise on its entries.
        share: Of all records, those behind it.
    """
    p, turn = jnp.linalg.eigh(known)
    p = jnp.maximum(p, 1e-9)
    away = turn.T @ (now - seen) @ turn
    # In eigenvectors of what is known, entry (i, j) of the mean has the variance 1 / (p_i p_j), and
    # twice that on the diagonal.
    eye = jnp.eye(len(p))
    noise = (error**2 + 1 / (p[:, None] * p)) * (1 + eye)
    square = jnp.sum(away**2 - noise)
    # Entries off the diagonal count twice in the sum, as one normal number. Clients' lengths vary
    # by as much as would be harmless, so that no single one decides where there is no noise.
    spread = jnp.sum((2 - eye) * 2 * noise**2) + _harmless(len(p)) ** 2
    old = before.known * _FADE**share
    return Estimate((old * before.square + square / spread) / (old + 1 / spread), old + 1 / spread)


def after_scores(before: Estimate, away: Array, noise: Array, share: Array) -> Estimate:
    """What is known of differences of scores after another client's, in deviations of one record.

    Args:
        before: What was known of them before.
        away: The client's score a record, less that of others at this location, shape ``(d,)``.
        noise: Variance of what else each of its entries differs by: noise, and which records a
            client has by chance.
        share: Of all records, those behind it.
    """
    square = jnp.sum(away**2 - noise)
    spread = 2 * away.size * noise**2 + _OPPOSED**2
    old = before.known * _FADE**share
    return Estimate((old * before.square + square / spread) / (old + 1 / spread), old + 1 / spread)


def large(differences: Differences, size: int) -> Array:
    """Whether differences are too large to move after each visit, for ``size`` latents."""
    moving, still, scores = differences
    # Surely so by what came on the way, and perhaps by what came from one location.
    alarm = moving.square - _SURE * moving.error > _harmless(size)
    alarm = alarm & (still.square + _MAYBE * still.error > _harmless(size))
    return alarm | (scores.square - _SURE * scores.error > _OPPOSED)


def _harmless(size: int) -> float:
    # Matrices whose entries are all alike have a norm of 2 d^(-1/2) of their length, those of rank
    # one have all of it: differences are harmless where the norm is well below 1.
    return _HARMLESS[0] + _HARMLESS[1] * size
