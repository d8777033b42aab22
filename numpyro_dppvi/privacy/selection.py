"""The privacy cost of choosing the best of several private runs.

Trying settings on the data and keeping the best reveals something about every try. But if the
number of runs is random and secret, and only the best run is shown, the cost is only a few times
that of one run, however many settings there are (Liu and Talwar 2019; Papernot and Steinke 2022,
arXiv 2110.03620).

The reason: let Q be the distribution of one run with a random setting, ordered by score, and f the
probability generating function of the number of runs. Then output y is shown with probability
f(Q(<= y)) - f(Q(< y)), so a small change of Q changes it little if f' varies slowly, as it does
for the distribution offered here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import dp_accounting as dpa
from dp_accounting import rdp

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import units
from numpyro_dppvi.privacy.budget import Budgets, PrivacyBudget, budget_of_each, unit_sensitivity
from numpyro_dppvi.privacy.mechanisms import GaussianSum
from numpyro_dppvi.privacy.sampling import FullBatch

# Orders of the Rényi divergence; the accountant's default orders start too far from 1.
_ORDERS = tuple(1 + 2.0 ** (e / 8) for e in range(-32, 113))
# Calibration stops when at least this share of the budget is spent.
_ENOUGH = 0.999
# The relative tolerance for a run's distance, whose calibration is accurate to about 1e-12.
_ROUNDING = 1e-9
# More runs would be impractical; even drawing their number takes long.
_MOST_RUNS = 1e5
# exp() of more than this would overflow.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class NegativeBinomialRuns:
    """A negative binomial number of runs, truncated to at least 1.

    Args:
        mean: Above 1.
        shape: At least 0; 1 is the geometric distribution, 0 the logarithmic. Smaller shapes cost
            less and give a single run, or very many, more often.

    Raises:
        ValueError: If a number is out of range.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        _validate.set_field(self, "mean", _validate.positive, most=_MOST_RUNS)
        _validate.set_field(self, "shape", _validate.not_negative)
        if self.mean <= 1:
            raise ValueError(f"mean must be above 1, got {self.mean:g}: write mean=10.0, say.")
        if not self._first():
            raise ValueError(
                "mean and shape must give a single run positive probability, got "
                f"mean={self.mean:g} and shape={self.shape:g}: write NegativeBinomialRuns(10.0), "
                "say."
            )

    @property
    def name(self) -> str:
        """The distribution in words."""
        return f"truncated negative binomial with mean {self.mean:g} and shape {self.shape:g}"

    def dp_event(self, run: dpa.DpEvent) -> dpa.DpEvent:
        """The event of showing the best of that many runs."""
        return dpa.dp_event.RepeatAndSelectDpEvent(run, self.mean, self.shape)

    def count(self, uniform: float) -> int:
        """The number of runs, as the quantile at a uniform random number in [0, 1)."""
        gamma = self._gamma()
        k, prob = 1, self._first()
        total = prob
        # Where adding up is at the end of its digits, the last number stands for all larger ones.
        while uniform >= total and not (prob < 1e-18 and total > 0.5):
            # P(k) is proportional to (1 - gamma)^k Gamma(k + shape) / (Gamma(shape) k!), so the
            # ratio P(k + 1) / P(k) is (1 - gamma) (k + shape) / (k + 1).
            k, prob = k + 1, prob * (1 - gamma) * (k + self.shape) / (k + 1)
            total += prob
        return k

    def _first(self) -> float:
        """The probability of a single run."""
        gamma, shape = self._gamma(), self.shape
        if gamma == 1:  # for large shapes, gamma rounds to 1
            return 0.0
        if shape == 0:
            return -1 / math.log(gamma) * (1 - gamma)
        # P(1) = shape (1 - gamma) / (gamma^-shape - 1), with its limit at shape 0 above.
        exponent = -shape * math.log(gamma)
        return 0.0 if exponent > _LARGEST_EXPONENT else shape / math.expm1(exponent) * (1 - gamma)

    def _gamma(self) -> float:
        """The success probability at which the distribution has the given mean, by bisection."""

        def mean(gamma: float) -> float:
            if self.shape == 0:
                return (1 / gamma - 1) / -math.log(gamma)
            return self.shape * (1 / gamma - 1) / -math.expm1(self.shape * math.log(gamma))

        low, high = 1e-300, 1.0
        while True:
            # The geometric mean: gamma may be of any order of magnitude.
            middle = math.sqrt(low * high)
            if not low < middle < high:
                return low
            low, high = (middle, high) if mean(middle) > self.mean else (low, middle)


def selection_epsilon(mu: float, runs: NegativeBinomialRuns, delta: float) -> float:
    """The epsilon of showing the best of several Gaussian runs (Papernot and Steinke 2022).

    An upper bound, by their Theorem 2. ``mu`` is the distance between neighbours, in standard
    deviations, of everything that one run releases, including its score.
    """
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return math.inf
    # The RDP accountant takes noise in units of the sensitivity, whatever the relation.
    accountant = rdp.RdpAccountant(orders=_ORDERS)
    accountant.compose(runs.dp_event(dpa.GaussianDpEvent(1 / mu)))
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class SelectionPlan:
    """The cost of a selection and of each of its runs; made by :func:`plan_selection`.

    Attributes:
        budgets: The budget of the whole selection, one per client.
        run_budgets: The budget of one fit, one per client.
        mechanisms: How each client releases the score of a run.
        runs: The distribution of the number of runs.
        mus: Each client's distance between neighbours for one run in total, in standard deviations.
        fit_mus: The same for the fit alone.
    """

    budgets: tuple[PrivacyBudget, ...]
    run_budgets: tuple[PrivacyBudget, ...]
    mechanisms: tuple[GaussianSum, ...]
    runs: NegativeBinomialRuns
    mus: tuple[float, ...]
    fit_mus: tuple[float, ...]

    @property
    def epsilons(self) -> tuple[float, ...]:
        """Each client's epsilon of the whole selection, at the client's delta."""
        return tuple(
            selection_epsilon(mu, self.runs, budget.delta)
            for mu, budget in zip(self.mus, self.budgets, strict=True)
        )


def plan_selection(
    budget: Budgets,
    runs: NegativeBinomialRuns,
    *,
    client_sizes: Sequence[int],
    score_bound: float,
    score_share: float = 0.1,
) -> SelectionPlan:
    """Divides a budget among the runs of a selection; reads no data.

    Args:
        budget: The budget of the whole selection: one for all clients, or one per client.
        runs: How many there are, ``NegativeBinomialRuns(mean)``.
        client_sizes: The (public) number of scored records of each client.
        score_bound: Each record's score is clipped to plus or minus this.
        score_share: In (0, 1): the part of a run's squared distance that its score takes.

    Returns:
        The plan.

    Raises:
        ValueError: If a number is out of range, or a budget protects whole clients, for which a
            sum of scores has no useful bound.

    Example:
        >>> plan = plan_selection(
        ...     PrivacyBudget(epsilon=1.0),
        ...     NegativeBinomialRuns(10.0),
        ...     client_sizes=[900, 600],
        ...     score_bound=4.0,
        ... )
        >>> round(plan.run_budgets[0].epsilon, 2)  # each of ten runs on average, of 1 in total
        0.38
    """
    _validate.instance("runs", runs, NegativeBinomialRuns, "NegativeBinomialRuns(10.0)")
    sizes = _validate.client_sizes(client_sizes)
    bound = _validate.positive("score_bound", score_bound)
    share = _validate.open_unit("score_share", score_share, "0.1")
    budgets = budget_of_each(budget, len(sizes))
    mus = [_largest_mu(mine, runs) for mine in budgets]
    # Squared distances of the fit and its score add up to that of the run.
    fit_mus = [math.sqrt(1 - share) * mu for mu in mus]
    return SelectionPlan(
        budgets,
        tuple(_run_budget(b, mu) for b, mu in zip(budgets, fit_mus, strict=True)),
        tuple(
            _score_mechanism(mine, math.sqrt(share) * mu, bound, size)
            for mine, mu, size in zip(budgets, mus, sizes, strict=True)
        ),
        runs,
        tuple(mus),
        tuple(fit_mus),
    )


def _largest_mu(budget: PrivacyBudget, runs: NegativeBinomialRuns) -> float:
    """The largest distance of one run for which the selection is within its budget."""
    if math.isinf(budget.epsilon):
        return math.inf
    # A selection costs at least what one run does, so its distance is an upper end.
    low, high = 0.0, 1 / dpa.get_sigma_gaussian(budget.epsilon, budget.delta)
    if selection_epsilon(high, runs, budget.delta) <= budget.epsilon:
        return high  # almost always a single run
    while True:
        middle = (low + high) / 2
        epsilon = selection_epsilon(middle, runs, budget.delta)
        if _ENOUGH * budget.epsilon <= epsilon <= budget.epsilon or middle < 1e-9 * high:
            return middle
        low, high = (middle, high) if epsilon <= budget.epsilon else (low, middle)


def _run_budget(budget: PrivacyBudget, mu: float) -> PrivacyBudget:
    """The budget that a Gaussian at this distance spends at the same delta."""
    epsilon = math.inf if mu == math.inf else dpa.get_epsilon_gaussian(1 / mu, budget.delta)
    return replace(budget, epsilon=epsilon)


def _score_mechanism(
    budget: PrivacyBudget, mu: float, bound: float, num_records: int
) -> GaussianSum:
    # A score in [-bound, bound] is a vector of norm <= bound, so noise in units of the bound is the
    # unit sensitivity over the distance.
    noise = 0.0 if mu == math.inf else unit_sensitivity(budget.relation) / mu
    contributions = units.records_changed(budget)
    return GaussianSum(
        bound, noise, FullBatch(), num_records, num_records, contributions=contributions
    )


def check_run(plan: SelectionPlan, mus: Sequence[float | None]) -> None:
    """Raises a ValueError if a run released more than the plan allows, or batches were sampled."""
    if len(mus) != len(plan.fit_mus):
        raise ValueError(
            f"fit_one must fit the {len(plan.fit_mus)} clients of the plan, got {len(mus)}: pass "
            "the same data in every call of fit."
        )
    for client, (mu, allowed) in enumerate(zip(mus, plan.fit_mus, strict=True)):
        if mu is None:
            raise ValueError(
                f"sampler must be FullBatch() in a selection, got sampled batches of client "
                f"{client}: write sampler=FullBatch() in fit_one."
            )
        # Distances and not epsilons, because the theorem needs the whole curve of a run and not one
        # point.
        if not mu <= allowed * (1 + _ROUNDING):
            raise ValueError(
                f"fit_one must keep to the budgets it is given, got a run that released more for "
                f"client {client}: write budget=budgets in its call of fit."
            )
