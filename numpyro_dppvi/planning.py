"""From a method, a budget and a schedule to a privacy plan, before any data is read."""

from collections.abc import Sequence

from numpyro_dppvi import _validate, schedules
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
    _validate.positive_int("num_rounds", num_rounds)
    if isinstance(method, NonPrivate):
        raise ValueError(
            "NonPrivate() releases exact changes, which no budget covers: pass a private method "
            "such as DPOptimization(), or no budget."
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
            "this method is private and needs a budget, got None: write "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5), or method=NonPrivate()."
        )
    budgets = (budget,) * num_clients if isinstance(budget, PrivacyBudget) else tuple(budget)
    wrong = next((b for b in budgets if not isinstance(b, PrivacyBudget)), None)
    if wrong is not None:
        raise TypeError(
            f"budget must be a PrivacyBudget or one a client, got {wrong!r}: write "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    if len(budgets) != num_clients:
        raise ValueError(
            f"there are {len(budgets)} budgets for {num_clients} clients: give one for all, or one "
            "a client."
        )
    return budgets
