"""Audits: does what is released give away more than was claimed?

A mechanism is run many times on two neighbouring data sets, and each run is turned into a score
that tells the two apart as well as it can. For an (epsilon, delta) guarantee and any threshold t,
P(score > t) - exp(epsilon) Q(score > t) <= delta. Counting runs bounds the left side from below,
with confidence; a bound above delta refutes the claim. Bounds are sharp where delta is large, so
claims are held there: noise that is a fifth too small shows after some thousand runs.

An audit can refute a claim and never prove one.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from numpyro_dppvi import _validate

Claim = Callable[[float], float]
"""From a delta to the epsilon that is claimed at it."""

DELTAS = (0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6)
"""Where claims are held, unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Report:
    """What an audit found; prints as a table.

    Attributes:
        epsilons: Of the claim, shape ``(num_claims,)``.
        deltas: What is claimed at these.
        shown: What was shown at these: lower confidence bounds of the true delta.
        failure_prob: With at most this probability a true claim is refuted.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    shown: np.ndarray
    failure_prob: float

    @property
    def holds(self) -> bool:
        """Whether no claim was refuted."""
        return bool(np.all(self.shown <= self.deltas))

    @property
    def ratio(self) -> float:
        """The largest share of a claimed delta that was shown; above 1 it is refuted."""
        return float(np.max(self.shown / self.deltas))

    def __str__(self) -> str:
        """A line for each epsilon."""
        rows = zip(self.epsilons, self.deltas, self.shown, strict=True)
        verdict = "not refuted" if self.holds else "REFUTED"
        return "\n".join(
            [
                f"{'epsilon':>10} {'claimed':>10} {'shown':>10}   {verdict}",
                *(f"{e:>10.4f} {d:>10.4f} {s:>10.4f}" for e, d, s in rows),
            ]
        )


def audit(
    claim: Claim,
    scores: np.ndarray,
    other_scores: np.ndarray,
    deltas: tuple[float, ...] = DELTAS,
    failure_prob: float = 1e-3,
) -> Report:
    """Holds a privacy profile against scores of independent runs on two neighbouring data sets.

    Half of the runs choose a threshold for each epsilon, in each direction; the other half bounds
    what it shows (Clopper and Pearson 1934; Bonferroni over directions and epsilons).

    Args:
        claim: From a delta to the epsilon that is claimed at it.
        scores: One a run on the one data set, shape ``(num_runs,)``; they should be the larger.
        other_scores: The same on its neighbour.
        deltas: Where to hold the claim.
        failure_prob: The probability with which a true claim may be refuted.

    Returns:
        The report.

    Raises:
        ValueError: If a score is no number, or there are fewer than four a data set.

    Example:
        >>> from numpyro_dppvi import privacy
        >>> rng = np.random.default_rng(0)
        >>> runs, others = rng.normal(1, 1, 20_000), rng.normal(-1, 1, 20_000)
        >>> def honest(delta):
        ...     return privacy.epsilon_from_noise(1.0, 1, delta=delta)
        >>> def false(delta):  # as if there were twice the noise
        ...     return privacy.epsilon_from_noise(2.0, 1, delta=delta)
        >>> audit(honest, runs, others).holds, audit(false, runs, others).holds
        (True, False)
    """
    _validate.function("claim", claim, ("delta",), "budget_to_epsilon")
    one, other = (_checked(s) for s in (scores, other_scores))
    failure_prob = _validate.open_unit("failure_prob", failure_prob, "1e-3")
    each_delta = _validate.entries("deltas", deltas, "(0.1, 0.4)")
    if not each_delta:
        raise ValueError("deltas must hold at least one delta, got none: write deltas=(0.1, 0.4).")
    deltas = tuple(_validate.open_unit("deltas", delta, "(0.1, 0.4)") for delta in each_delta)
    epsilons = np.array([_claimed(claim(delta)) for delta in deltas])
    each = failure_prob / (2 * len(deltas))
    shown = [
        max(_shown(epsilon, one, other, each), _shown(epsilon, -other, -one, each))
        for epsilon in epsilons
    ]
    return Report(epsilons, np.array(deltas), np.array(shown), failure_prob)


def _claimed(epsilon: float) -> float:
    if not isinstance(epsilon, numbers.Real) or not epsilon >= 0:
        raise ValueError(
            f"claim must return an epsilon of at least 0, got {_validate.shown(epsilon)}: write "
            "claim=lambda delta: epsilon_from_noise(noise, num_releases, delta=delta)."
        )
    return float(epsilon)


def _checked(scores: np.ndarray) -> np.ndarray:
    scores = _validate.host_array("scores", scores)
    if scores.dtype.kind not in "biuf":
        raise ValueError(
            f"scores must be at least four numbers a data set, got dtype {scores.dtype}: give one "
            "score a run."
        )
    with np.errstate(over="ignore"):
        scores = scores.astype(np.float64).ravel()
    if len(scores) < 4 or np.isnan(scores).any():
        raise ValueError(
            f"scores must be at least four numbers a data set, got {_validate.shown(scores)} with "
            f"{int(np.isnan(scores).sum())} NaNs: give one score a run."
        )
    return scores


def _shown(epsilon: float, one: np.ndarray, other: np.ndarray, failure_prob: float) -> float:
    """A lower bound of P(score > t) - exp(epsilon) Q(score > t) for a good t."""
    threshold = _threshold(epsilon, one[::2], other[::2])
    hits, runs = int(np.sum(one[1::2] > threshold)), len(one[1::2])
    others, other_runs = int(np.sum(other[1::2] > threshold)), len(other[1::2])
    # Each of the two bounds may fail with half the probability.
    low = stats.beta.ppf(failure_prob / 2, hits, runs - hits + 1) if hits else 0.0
    up = stats.beta.isf(failure_prob / 2, others + 1, other_runs - others)
    up = up if others < other_runs else 1.0
    return float(low - np.exp(epsilon) * up)


def _threshold(epsilon: float, one: np.ndarray, other: np.ndarray) -> float:
    """The threshold that separates best, by the counts of these runs."""
    values = np.sort(np.concatenate([one, other]))
    above = 1 - np.searchsorted(np.sort(one), values, "right") / len(one)
    other_above = 1 - np.searchsorted(np.sort(other), values, "right") / len(other)
    return float(values[np.argmax(above - np.exp(epsilon) * other_above)])
