"""From a method, a budget and a schedule to a privacy plan, before any data is read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.methods import values
from numpyro_dppvi.methods.values import (
    AnyMethod,
)
from numpyro_dppvi.privacy import LedgerFile, PrivacyBudget, PrivacyPlan
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import budget_of_each
from numpyro_dppvi.protocol import checks, initial, schedules, server
from numpyro_dppvi.protocol.server import TrustedAggregator


class Wiring(NamedTuple):
    """How a method is run: some methods fix what others leave to the caller.

    Attributes:
        method: The method as it was asked for.
        local: What a client does in a visit: the method itself, or a committee's ``local`` with
            the learning rate of a client that nobody helps.
        schedule: Which clients each round visits.
        num_rounds: Rounds of the run.
        damping: The share of a change that is merged; ``None`` leaves it to the caller.
        trusted: The trusted aggregator, or ``None``.
        splits_prior: Whether each client gets the prior's M-th root for its own.
        alone: Whether every client fits a posterior of its own, in one visit.
        init_scale: How narrow the start is, or ``None`` to begin at the prior.
        groups: The clients that each round visits: what the schedule said when it was asked.
        central: Whether the server takes the steps.
    """

    method: AnyMethod
    local: Any
    schedule: schedules.Schedule
    num_rounds: int
    damping: float | None
    trusted: TrustedAggregator | None
    splits_prior: bool
    alone: bool = False
    init_scale: float | None = None
    groups: tuple[np.ndarray, ...] = ()
    central: bool = False


def plan_privacy(
    method: AnyMethod,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    *,
    num_rounds: int,
    client_sizes: Sequence[int],
    schedule: schedules.Schedule = schedules.sequential,
    trusted_aggregator: bool | TrustedAggregator = False,
    ledger_file: LedgerFile | None = None,
) -> PrivacyPlan:
    """Says what a run will release and cost, and calibrates its noise; reads no data.

    Args:
        method: A private method.
        budget: One budget for all clients, or one a client.
        num_rounds: Rounds of the run.
        client_sizes: Number of records of each client; these are public.
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
    sizes = _validate.client_sizes(client_sizes)
    if ledger_file is not None:
        _validate.instance("ledger_file", ledger_file, LedgerFile, "LedgerFile('ledger.jsonl')")
    run = asked(wiring(method, schedule, num_rounds, trusted_aggregator), len(sizes))
    return plan_wired(run, budget, sizes, None if ledger_file is None else ledger_file.spent)


Spent: TypeAlias = Callable[[Sequence[PrivacyBudget]], Sequence[Composition]]
"""What clients of these budgets have released before."""


def asked(run: Wiring, num_clients: int) -> Wiring:
    """The same with all rounds' groups, for which the schedule is asked here and nowhere else.

    A bad schedule must not come to light when rounds have been spent.

    Raises:
        ValueError: If a round visits clients that do not exist, or that the aggregator cannot sum.
        TypeError: If the schedule is no function.
    """
    groups = schedules.all_groups(run.schedule, run.num_rounds, num_clients)
    if run.trusted is not None:
        for of_round in groups:
            run.trusted.check(of_round, num_clients)
    return run._replace(groups=groups)


def plan_wired(
    run: Wiring,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    sizes: Sequence[int],
    spent: Spent | None = None,
) -> PrivacyPlan:
    """What :func:`plan_privacy` does, once it is settled how the method is run.

    Raises:
        ValueError: If the schedule has not been asked: a plan for no visits would be one for one.
    """
    if not run.groups:
        raise ValueError(
            "run must hold its rounds' groups: write plan_wired(asked(run, ...), ...)."
        )
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
    num_shares = None if run.trusted is None else run.trusted.num_shares(len(sizes))
    return run.local.plan(values.Study(budgets, visits, sizes, num_shares, before))


def wiring(
    method: AnyMethod,
    schedule: schedules.Schedule,
    num_rounds: int,
    trusted_aggregator: bool | TrustedAggregator,
) -> Wiring:
    """Settles how a method is run.

    Raises:
        ValueError: If a trusted aggregator is asked for with a method that cannot use one, or
            left out with one that needs it.
    """
    trusted = server.aggregator(trusted_aggregator)
    checks.check_noise(method, trusted)
    name = type(method).__name__
    if method.aggregator == "needed" and trusted is None:
        raise ValueError(
            f"{name}() needs a trusted aggregator, because every step adds up all clients' "
            "gradients: write trusted_aggregator=True."
        )
    if method.aggregator == "useless" and trusted is not None:
        raise ValueError(
            f"{name}() gains nothing from a trusted aggregator, because each client's noise "
            "protects its own steps: leave trusted_aggregator out, or write "
            "method=VirtualClients(num_shards=50)."
        )
    wired = method.wired()
    if wired.central:
        schedule = schedules.synchronous
    if wired.alone:
        schedule, num_rounds = schedules.synchronous, 1
    return Wiring(
        method,
        wired.local,
        schedule,
        num_rounds,
        1.0 if wired.alone else None,
        trusted,
        wired.splits_prior,
        wired.alone,
        central=wired.central,
    )


def settled(run: Wiring, damping: float, init_scale: float | None) -> Wiring:
    """The same with what was left to the caller.

    Raises:
        ValueError: If ``damping`` or ``init_scale`` is outside [1e-6, 1].
    """
    damping = _validate.damping(damping)
    return run._replace(
        damping=damping if run.damping is None else run.damping,
        init_scale=initial.check(init_scale),
    )


def prior_left_out(run: Wiring, num_clients: int) -> float:
    """The power of the prior that a client's cavity lacks."""
    return 1 - 1 / num_clients if run.splits_prior else 0.0
