"""Empirical privacy audits: do releases reveal more than is claimed?

A mechanism is run many times on two neighbouring data sets, and each run is reduced to a score that
separates the two as well as possible. An (epsilon, delta) guarantee implies, for every threshold t,
P(score > t) - exp(epsilon) Q(score > t) <= delta. Counting runs gives a lower confidence bound on
the left side; a bound above delta refutes the claim. The test has most power at large deltas: noise
that is a fifth too small is detected within some thousand runs.

An audit can refute a claim but never prove one.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from numpyro_dppvi import _validate

Claim = Callable[[float], float]
"""The claimed epsilon as a function of delta."""

DELTAS = (0.02, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6)
"""The deltas at which a claim is tested by default."""


@dataclass(frozen=True, eq=False)
class Report:
    """The result of an audit; prints as a table.

    Attributes:
        epsilons: The claimed epsilons, shape ``(num_claims,)``.
        deltas: The delta claimed at each epsilon.
        shown: A lower confidence bound of the true delta at each epsilon.
        failure_prob: A true claim is refuted with at most this probability.
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
        """The largest ratio of a bound to its claimed delta; above 1, the claim is refuted."""
        return float(np.max(self.shown / self.deltas))

    def __str__(self) -> str:
        """One line for each epsilon."""
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
    """Tests a claimed privacy profile on scores of independent runs on two neighbouring data sets.

    Half of the runs choose a threshold for each epsilon and direction; the other half give the
    bound at that threshold (Clopper and Pearson 1934), with a Bonferroni correction.

    Args:
        claim: The claimed epsilon as a function of delta.
        scores: One score per run on the first data set, shape ``(num_runs,)``; these should tend
            to be larger than the others.
        other_scores: The same for the neighbouring data set.
        deltas: Where to test the claim.
        failure_prob: The probability with which a true claim may be refuted.

    Returns:
        The report.

    Raises:
        ValueError: If a score is not a number, or a data set has fewer than four.

    Example:
        >>> from numpyro_dppvi import privacy
        >>> rng = np.random.default_rng(0)
        >>> runs, others = rng.normal(1, 1, 20_000), rng.normal(-1, 1, 20_000)
        >>> def honest(delta):
        ...     return privacy.epsilon_from_noise(1.0, 1, delta=delta)
        >>> def false(delta):  # pretends there is twice the noise
        ...     return privacy.epsilon_from_noise(2.0, 1, delta=delta)
        >>> audit(honest, runs, others).holds, audit(false, runs, others).holds
        (True, False)
    """
    _validate.function("claim", claim, ("delta",), "budget_to_epsilon")
    one, other = (_checked(s) for s in (scores, other_scores))
    failure_prob = _validate.open_unit("failure_prob", failure_prob, "1e-3")
    each_delta = _validate.entries("deltas", deltas, "(0.1, 0.4)")
    if not each_delta:
        raise ValueError("deltas must not be empty, got no entries: write deltas=(0.1, 0.4).")
    deltas = tuple(_validate.open_unit("deltas", delta, "(0.1, 0.4)") for delta in each_delta)
    epsilons = np.array([_claimed(claim(delta)) for delta in deltas])
    # Bonferroni: one test for each delta and direction.
    each = failure_prob / (2 * len(deltas))
    shown = [
        # Both directions, P over Q and Q over P; swapping signs makes the second one of the first
        # kind.
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
    are_numbers = scores.dtype.kind in "biuf"
    if not are_numbers or scores.size < 4 or np.isnan(scores).any():
        lacking = f" with {int(np.isnan(scores).sum())} NaNs" if are_numbers else ""
        raise ValueError(
            f"scores must be at least four numbers per data set, got {_validate.shown(scores)}"
            f"{lacking}: give one score per run."
        )
    # What is too large for 64 bits is infinite, and still larger than any threshold.
    with np.errstate(over="ignore"):
        return scores.astype(np.float64).ravel()


def _shown(epsilon: float, one: np.ndarray, other: np.ndarray, failure_prob: float) -> float:
    """A lower confidence bound of P(score > t) - exp(epsilon) Q(score > t) for a good t."""
    # Even runs choose t and odd runs bound the probabilities, so that both are independent.
    threshold = _threshold(epsilon, one[::2], other[::2])
    hits, runs = int(np.sum(one[1::2] > threshold)), len(one[1::2])
    others, other_runs = int(np.sum(other[1::2] > threshold)), len(other[1::2])
    # Clopper-Pearson bounds of P from below and Q from above; each gets half the failure
    # probability.
    low = stats.beta.ppf(failure_prob / 2, hits, runs - hits + 1) if hits else 0.0
    up = stats.beta.isf(failure_prob / 2, others + 1, other_runs - others)
    up = up if others < other_runs else 1.0
    return float(low - np.exp(epsilon) * up)


def _threshold(epsilon: float, one: np.ndarray, other: np.ndarray) -> float:
    """The threshold at which these runs' empirical difference is largest."""
    values = np.sort(np.concatenate([one, other]))
    above = 1 - np.searchsorted(np.sort(one), values, "right") / len(one)
    other_above = 1 - np.searchsorted(np.sort(other), values, "right") / len(other)
    return float(values[np.argmax(above - np.exp(epsilon) * other_above)])
