"""From a method, a budget and a schedule to a privacy plan, before any data is read."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.methods import NaturalGradient, values
from numpyro_dppvi.methods.values import AnyMethod, Method
from numpyro_dppvi.privacy import LedgerFile, PrivacyBudget, PrivacyPlan, accounting, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import Budgets, budget_of_each
from numpyro_dppvi.privacy.plan import check_before, with_worth
from numpyro_dppvi.protocol import checks, initial, schedules, server
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records.clients import names_and_sizes


class RunSpec(NamedTuple):
    """How a run is run: what was asked for, and what its method fixes. Make one by ``resolve``.

    Attributes:
        method: The method as it was asked for.
        local: What a client does in a visit: the method itself, or a committee's ``local`` with
            the learning rate of a client that nobody helps.
        schedule: Which clients each round visits.
        num_rounds: Rounds of the run; at most so many where it ends when it has settled.
        until_settled: Whether it does.
        damping: The share of a change that is merged.
        trusted: The trusted aggregator, or ``None``.
        prior_left_out: The power of the prior that a client's cavity lacks.
        alone: Whether every client fits a posterior of its own, in one visit.
        init_scale: How narrow the start is, or ``None`` to begin at the prior.
        groups: The clients that each round visits: what the schedule said when it was asked.
        num_clients: How many clients there are.
    """

    method: AnyMethod
    local: Method
    schedule: schedules.Schedule
    num_rounds: int
    until_settled: bool
    damping: float
    trusted: TrustedAggregator | None
    prior_left_out: float
    alone: bool
    init_scale: float | None
    groups: tuple[np.ndarray, ...]
    num_clients: int

    @property
    def repeatable(self) -> bool:
        """Whether factors could stand in for records, to see what noise alone would do."""
        # A replay puts factors in the place of records. Central steps and sums over records
        # (scores, information) ask for more of a record than its share of a factor.
        return not self.local.central and self.local.releases != "sums"

    def until(self, num_rounds: int) -> "RunSpec":
        """The same run with its first rounds only."""
        return self._replace(num_rounds=num_rounds, groups=self.groups[:num_rounds])

    @property
    def asked(self) -> dict[str, Any]:
        """What ``algorithm.Setup`` says of the run, by field."""
        return {
            "method": self.local,
            # The groups that were planned and are charged, not those of a second asking.
            "schedule": schedules.Planned(self.schedule, self.groups),
            "damping": self.damping,
            "trusted": self.trusted,
            "init_scale": self.init_scale,
            "prior_left_out": self.prior_left_out,
            "alone": self.alone,
        }


@_validate.complete("plan_privacy(method, budget, num_rounds=10, client_sizes=[900, 600])")
def plan_privacy(
    method: AnyMethod,
    budget: Budgets | None,
    *,
    num_rounds: int,
    client_sizes: Sequence[int] | Mapping[str, int],
    schedule: schedules.Schedule | None = None,
    trusted_aggregator: bool | TrustedAggregator = False,
    ledger_file: LedgerFile | None = None,
    num_latents: int | None = None,
) -> PrivacyPlan:
    """Says what a run will release and cost, and calibrates its noise; reads no data.

    Args:
        method: A private method.
        budget: One budget for all clients, or one per client: a list, or a mapping by name.
        num_rounds: Rounds of the run.
        client_sizes: Number of records of each client, or a mapping of these by the clients'
            names; these are public. Without names, clients have those in the ledger file.
        schedule: Which clients each round visits; ``None`` as in ``fit``.
        trusted_aggregator: Whether only the sum of a round's messages is seen.
        ledger_file: What other runs have charged there is covered by the budget, too: noise is
            calibrated for what is left. Nothing is written.
        num_latents: Numbers that the posterior is of, such as the coefficients of a regression.
            With it, the plan says how wide intervals will be at the least, together and client by
            client, and for whom joining cannot pay. ``fit`` knows it from the model.

    Returns:
        The plan, which prints as a table. ``fit`` makes the same one from the same arguments.

    Raises:
        BudgetExceededError: If other runs on the ledger file have used up a budget.
        ValueError: If the method is not private, there is no budget or the numbers do not fit.

    Example:
        >>> from numpyro_dppvi import DPOptimization
        >>> budget = PrivacyBudget(epsilon=1.0, delta=1e-5)
        >>> plan = plan_privacy(DPOptimization(), budget, num_rounds=10, client_sizes=[900, 600])
        >>> [round(float(std), 1) for std in plan.noise_std], plan.clients[0].num_releases
        ([102.2, 102.2], 30)
        >>> plan = plan_privacy(
        ...     DPOptimization(), budget, num_rounds=10, client_sizes=[900, 600], num_latents=6
        ... )
        >>> round(plan.worth.together, 2), plan.worth.gainless
        (1.2, [])
    """
    values.check(method)
    num_rounds = _validate.positive_int("num_rounds", num_rounds, schedules.MOST_ROUNDS)
    names, sizes = names_and_sizes(client_sizes)
    if num_latents is not None:
        num_latents = _validate.positive_int("num_latents", num_latents)
    if ledger_file is not None:
        _validate.instance(
            "ledger_file", ledger_file, LedgerFile, "privacy.LedgerFile('ledger.jsonl')"
        )
    run = resolve(
        method,
        num_clients=len(sizes),
        schedule=schedule,
        num_rounds=num_rounds,
        trusted_aggregator=trusted_aggregator,
    )
    spent = None
    if ledger_file is not None:
        names = names or ledger_file.names(len(sizes))
        spent = functools.partial(ledger_file.spent, names=names)
    plan = plan_run(run, budget, sizes, spent, names)
    warn_of_unsafe(run, plan)
    return plan if num_latents is None else with_worth(plan, num_latents)


DEFAULT_DAMPING = 0.4
"""The share of a change that is merged where noise, or several clients at once, go too far."""

DEFAULT_ROUNDS = 10
"""Rounds of a private run where their number is not given."""

MOST_TO_SETTLE = 160
"""The limit of a run that ends when it has settled."""

Spent: TypeAlias = Callable[[Sequence[PrivacyBudget]], Sequence[Composition]]
"""What clients of these budgets have released before."""


def plan_run(
    run: RunSpec,
    budget: Budgets | None,
    sizes: Sequence[int],
    spent: Spent | None = None,
    names: tuple[str, ...] = (),
    continues: PrivacyPlan | None = None,
    first_round: int = 0,
) -> PrivacyPlan:
    """What :func:`plan_privacy` does, once it is settled how the method is run.

    Noise is calibrated so that other runs on the ledger file (``spent``), the rounds before those
    of this plan (``continues``) and the rounds to come, from ``first_round`` on, keep to the budget
    together. A budget that is used up is refused, and one smaller than that of the rounds before.
    """
    if run.local.releases == "nothing":
        raise ValueError(
            f"{type(run.method).__name__}() adds no noise, and no budget covers that: write "
            "method=DPOptimization() to keep to the budget, or leave budget out."
        )
    if budget is None:
        raise ValueError(
            "budget must be given for a private method, got None: write "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5), or method=NonPrivate()."
        )
    budgets = budget_of_each(budget, len(sizes), names)
    # First what other runs have released, then this run's own rounds on top: the sentence says
    # whose releases have used the budget up.
    others = () if spent is None else spent(budgets)
    others = others or [frozenset()] * len(sizes)
    visits = schedules.num_visits(run.groups[first_round:], len(sizes)).tolist()
    # Methods check this, too, but know no names to call a client by.
    check_before(budgets, visits, others, names)
    earlier: list[Composition] = [frozenset()] * len(sizes)
    if continues is not None:
        _check_raised(budgets, continues)
        earlier = [client.released for client in continues.clients]
    before = [accounting.compose([*a, *b]) for a, b in zip(others, earlier, strict=True)]
    check_before(budgets, visits, before, names, "what was released before, by this run too, has")
    num_shares = None if run.trusted is None else run.trusted.num_shares(len(sizes))
    study = values.Study(
        budgets=budgets, num_visits=visits, client_sizes=sizes, num_shares=num_shares, before=before
    )
    # Noise is calibrated for what is released in all, `before` included.
    plan = run.local.plan(study)
    clients = tuple(
        # Kept apart, because the statement of this run reports its own earlier rounds as its own.
        dataclasses.replace(client, before=theirs, earlier=own)
        for client, theirs, own in zip(plan.clients, others, earlier, strict=True)
    )
    return PrivacyPlan(clients, names, continues, first_round)


def _check_raised(budgets: Sequence[PrivacyBudget], continues: PrivacyPlan) -> None:
    """Refuses to go on under less, or another, protection than rounds were released with."""
    for m, (now, client) in enumerate(zip(budgets, continues.clients, strict=True)):
        was = client.budget
        # Epsilons under two relations, or of two units, do not add up to one of either.
        if (now.relation, now.unit, now.max_records_per_person) != (
            was.relation,
            was.unit,
            was.max_records_per_person,
        ):
            raise ValueError(
                "budget must protect the same unit under the same relation as in the rounds "
                f"before, got {now} for {words.client(m, continues.names)} after {was}: change "
                "epsilon only."
            )
        if now.epsilon < was.epsilon or now.delta < was.delta:
            raise ValueError(
                "budget must not be smaller than that of the rounds before, got epsilon = "
                f"{now.epsilon:g} at delta = {now.delta:g} for {words.client(m, continues.names)} "
                f"after {was.epsilon:g} at {was.delta:g}: write a larger epsilon, because what was "
                "released stays released."
            )


def warn_of_unsafe(run: RunSpec, plan: PrivacyPlan | None) -> None:
    """Warns of natural gradients under noise that is not shared: see ``docs/methods.md``."""
    noisy = plan is not None and bool(np.any(plan.noise_std > 0))
    natural = isinstance(getattr(run.local, "optimizer", None), NaturalGradient)
    if noisy and natural and run.trusted is None:
        warnings.warn(
            "natural gradients without a trusted aggregator are unsafe: single rounds of noise "
            "have thrown posteriors far off, although every merge was accepted, and intervals of "
            "95 % covered the truth in 10 to 27 % of simulated studies. Write "
            "trusted_aggregator=True, or method=None for what is recommended; to reproduce old "
            "results, warnings.filterwarnings('ignore', 'natural gradients without').",
            UserWarning,
            stacklevel=2,
        )


def resolve(
    method: AnyMethod,
    *,
    num_clients: int,
    schedule: schedules.Schedule | None,
    num_rounds: int | None,
    trusted_aggregator: bool | TrustedAggregator,
    damping: float | None = 1.0,
    init_scale: float | None = None,
) -> RunSpec:
    """Settles how a method is run; refuses what does not go together.

    Without a schedule, clients are visited in turn, or all at once under a trusted aggregator.

    Without a number of rounds, a private run has :data:`DEFAULT_ROUNDS`, and one that costs nothing
    ends when it has settled, after :data:`MOST_TO_SETTLE` at the latest. Without a damping, changes
    of Newton's steps are merged whole, if each is made after the one before.

    The schedule is asked for all rounds here and nowhere else: a bad one must not come to light
    when rounds have been spent.
    """
    trusted = server.aggregator(trusted_aggregator)
    checks.check_aggregator(method, trusted)
    damping = None if damping is None else _validate.damping(damping)
    init_scale = initial.check(init_scale)
    resolved = method.resolved()
    # An aggregator adds up all clients' releases, and so does each of a central method's steps.
    if resolved.local.central or (schedule is None and trusted is not None):
        schedule = schedules.synchronous
    elif schedule is None:
        schedule = schedules.sequential
    # A budget is shared out among all rounds beforehand, so that their number must be known.
    until_settled = num_rounds is None and resolved.local.releases == "nothing"
    if num_rounds is None:
        num_rounds = MOST_TO_SETTLE if until_settled else DEFAULT_ROUNDS
    # One visit from the prior: there is nothing to take turns for, nor a next round that would make
    # up for what damping leaves out.
    if resolved.alone:
        until_settled = False
        schedule, num_rounds, damping = schedules.synchronous, 1, 1.0
    # From here on these groups are the schedule: what is planned, charged and run is one and the
    # same, even if the function would answer otherwise the second time.
    groups = schedules.all_groups(schedule, num_rounds, num_clients)
    if trusted is not None:
        for of_round in groups:
            trusted.check(of_round, num_clients)
    if damping is None:
        # Changes that are made side by side each correct the same error in full, and together too
        # much; so do those of asynchronous clients, which start from an older q.
        in_turn = all(of_round.shape[1] == 1 for of_round in groups)
        local = resolved.local
        # A run without noise that names no optimiser takes Newton's steps.
        exact = local.releases == "nothing" and getattr(local, "optimizer", None) is None
        damped = not (exact and in_turn) or schedules.starts_from_pulled(schedule)
        damping = DEFAULT_DAMPING if damped else 1.0
    if not resolved.local.damped:
        damping = 1.0  # of what the server makes anew in every round, nothing is left out
    return RunSpec(
        method=method,
        local=resolved.local,
        schedule=schedule,
        num_rounds=num_rounds,
        until_settled=until_settled,
        damping=damping,
        trusted=trusted,
        # A client's own prior is p^(1/M), which is all of p but its power 1 - 1/M.
        prior_left_out=1 - 1 / num_clients if resolved.splits_prior else 0.0,
        alone=resolved.alone,
        init_scale=init_scale,
        groups=groups,
        num_clients=num_clients,
    )
