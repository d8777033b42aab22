"""From a method, a budget and a schedule to a privacy plan, before any data is read."""

from collections.abc import Sequence

from numpyro_dppvi import _validate, methods, schedules
from numpyro_dppvi.methods import DPOptimization, Method, NonPrivate
from numpyro_dppvi.privacy import PrivacyBudget, PrivacyPlan, plan


def plan_privacy(
    method: Method,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    *,
    num_rounds: int,
    client_sizes: Sequence[int],
    schedule: schedules.Schedule = schedules.sequential,
) -> PrivacyPlan:
    """Says what a run will release and cost, and calibrates its noise; reads no data.

    Args:
        method: A private method.
        budget: One budget for all clients, or one a client.
        num_rounds: Rounds of the run.
        client_sizes: Number of records of each client; these are public.
        schedule: Which clients each round visits.

    Returns:
        The plan, which prints as a table. ``fit`` makes the same one from the same arguments.

    Raises:
        ValueError: If the method is not private, there is no budget or the numbers do not fit.
    """
    methods.check(method)
    _validate.positive_int("num_rounds", num_rounds)
    if isinstance(method, NonPrivate):
        raise ValueError(
            "NonPrivate() adds no noise, and no budget covers that: write "
            "method=DPOptimization() to keep to the budget, or leave budget out."
        )
    sizes = [int(size) for size in client_sizes]
    for number, size in enumerate(sizes):
        _validate.positive_int(f"client_sizes[{number}]", size)
    budgets = _one_each(budget, len(sizes))
    return _plan(method, budgets, num_rounds, sizes, schedule)


def _plan(
    method: DPOptimization,
    budgets: Sequence[PrivacyBudget],
    num_rounds: int,
    sizes: Sequence[int],
    schedule: schedules.Schedule,
) -> PrivacyPlan:
    visits = schedules.num_visits(schedule, num_rounds, len(sizes))
    return plan.make(
        budgets,
        method.sampler,
        method.clip_norm,
        method.num_local_steps,
        [int(v) for v in visits],
        sizes,
    )


def _one_each(
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None, num_clients: int
) -> tuple[PrivacyBudget, ...]:
    if budget is None:
        raise ValueError(
            "budget must be given for a private method, got None: write "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5), or method=NonPrivate()."
        )
    if isinstance(budget, PrivacyBudget):
        return (budget,) * num_clients
    budgets = tuple(budget) if isinstance(budget, Sequence) else (budget,)
    wrong = [b for b in budgets if not isinstance(b, PrivacyBudget)]
    if wrong:
        raise TypeError(
            f"budget must be a PrivacyBudget or a list of them, got {_validate.shown(wrong[0])}: "
            "write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    if len(budgets) != num_clients:
        raise ValueError(
            f"budget must be one for all clients or one a client, got {len(budgets)} budgets for "
            f"{num_clients} clients: write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    return budgets
