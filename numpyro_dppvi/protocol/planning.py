"""From a method, a budget and a schedule to a privacy plan, before any data is read."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.methods import values
from numpyro_dppvi.methods.values import AnyMethod, Method
from numpyro_dppvi.privacy import LedgerFile, PrivacyBudget, PrivacyPlan
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import budget_of_each
from numpyro_dppvi.privacy.plan import check_before
from numpyro_dppvi.protocol import checks, initial, schedules, server
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records.clients import client_names


class RunSpec(NamedTuple):
    """How a run is run: what was asked for, and what its method fixes. Make one by ``resolve``.

    Attributes:
        method: The method as it was asked for.
        local: What a client does in a visit: the method itself, or a committee's ``local`` with
            the learning rate of a client that nobody helps.
        schedule: Which clients each round visits.
        num_rounds: Rounds of the run.
        damping: The share of a change that is merged.
        trusted: The trusted aggregator, or ``None``.
        splits_prior: Whether each client gets the prior's M-th root for its own.
        alone: Whether every client fits a posterior of its own, in one visit.
        init_scale: How narrow the start is, or ``None`` to begin at the prior.
        groups: The clients that each round visits: what the schedule said when it was asked.
        num_clients: How many clients there are.
    """

    method: AnyMethod
    local: Method
    schedule: schedules.Schedule
    num_rounds: int
    damping: float
    trusted: TrustedAggregator | None
    splits_prior: bool
    alone: bool
    init_scale: float | None
    groups: tuple[np.ndarray, ...]
    num_clients: int

    @property
    def central(self) -> bool:
        """Whether the server takes the steps."""
        return self.local.central

    @property
    def repeatable(self) -> bool:
        """Whether factors could stand in for records, to see what noise alone would do."""
        return not self.central and self.local.releases != "sums"

    @property
    def prior_left_out(self) -> float:
        """The power of the prior that a client's cavity lacks."""
        return 1 - 1 / self.num_clients if self.splits_prior else 0.0


def plan_privacy(
    method: AnyMethod,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    *,
    num_rounds: int,
    client_sizes: Sequence[int] | Mapping[str, int],
    schedule: schedules.Schedule = schedules.sequential,
    trusted_aggregator: bool | TrustedAggregator = False,
    ledger_file: LedgerFile | None = None,
) -> PrivacyPlan:
    """Says what a run will release and cost, and calibrates its noise; reads no data.

    Args:
        method: A private method.
        budget: One budget for all clients, or one a client.
        num_rounds: Rounds of the run.
        client_sizes: Number of records of each client, or a mapping of these by the clients'
            names; these are public.
        schedule: Which clients each round visits.
        trusted_aggregator: Whether only the sum of a round's messages is seen.
        ledger_file: What other runs have charged there is covered by the budget, too: noise is
            calibrated for what is left. Nothing is written.

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
    """
    values.check(method)
    num_rounds = _validate.positive_int("num_rounds", num_rounds, schedules.MOST_ROUNDS)
    names: tuple[str, ...] = ()
    if isinstance(client_sizes, Mapping):
        names, client_sizes = client_names(list(client_sizes)), list(client_sizes.values())
    sizes = _validate.client_sizes(client_sizes)
    if ledger_file is not None:
        _validate.instance("ledger_file", ledger_file, LedgerFile, "LedgerFile('ledger.jsonl')")
    run = resolve(
        method,
        num_clients=len(sizes),
        schedule=schedule,
        num_rounds=num_rounds,
        trusted_aggregator=trusted_aggregator,
    )
    spent = None if ledger_file is None else ledger_file.spent
    return plan_run(run, budget, sizes, spent, names)


Spent: TypeAlias = Callable[[Sequence[PrivacyBudget]], Sequence[Composition]]
"""What clients of these budgets have released before."""


def plan_run(
    run: RunSpec,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    sizes: Sequence[int],
    spent: Spent | None = None,
    names: tuple[str, ...] = (),
) -> PrivacyPlan:
    """What :func:`plan_privacy` does, once it is settled how the method is run."""
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
    budgets = budget_of_each(budget, len(sizes))
    before = () if spent is None else spent(budgets)
    visits = schedules.num_visits(run.groups, len(sizes)).tolist()
    # Methods check this, too, and know no names.
    check_before(budgets, visits, before or [frozenset()] * len(sizes), names)
    num_shares = None if run.trusted is None else run.trusted.num_shares(len(sizes))
    study = values.Study(
        budgets=budgets,
        num_visits=visits,
        client_sizes=sizes,
        num_shares=num_shares,
        before=before,
    )
    return dataclasses.replace(run.local.plan(study), names=names)


def resolve(
    method: AnyMethod,
    *,
    num_clients: int,
    schedule: schedules.Schedule,
    num_rounds: int,
    trusted_aggregator: bool | TrustedAggregator,
    damping: float = 1.0,
    init_scale: float | None = None,
) -> RunSpec:
    """Settles how a method is run.

    The schedule is asked for all rounds here and nowhere else: a bad one must not come to light
    when rounds have been spent.

    Raises:
        ValueError: If a trusted aggregator is asked for with a method that cannot use one, or
            left out with one that needs it; if a number is outside its range; if a round visits
            clients that do not exist, or that the aggregator cannot sum.
        TypeError: If the schedule is no function.
    """
    trusted = server.aggregator(trusted_aggregator)
    checks.check_aggregator(method, trusted)
    damping, init_scale = _validate.damping(damping), initial.check(init_scale)
    resolved = values.resolved(method)
    if resolved.local.central:
        schedule = schedules.synchronous
    if resolved.alone:
        schedule, num_rounds, damping = schedules.synchronous, 1, 1.0
    groups = schedules.all_groups(schedule, num_rounds, num_clients)
    if trusted is not None:
        for of_round in groups:
            trusted.check(of_round, num_clients)
    return RunSpec(
        method=method,
        local=resolved.local,
        schedule=schedule,
        num_rounds=num_rounds,
        damping=damping,
        trusted=trusted,
        splits_prior=resolved.splits_prior,
        alone=resolved.alone,
        init_scale=init_scale,
        groups=groups,
        num_clients=num_clients,
    )
