"""Runs that were continued under a larger budget: their parts in a checkpoint, and their plan.

A part is the rounds that were planned together. The file says what a part was planned from, never
its noise: that is calibrated again, and must give what the run was charged.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpyro_dppvi.privacy import LedgerFile, PrivacyBudget, PrivacyPlan
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.ledger_file import composition_from_json, composition_to_json
from numpyro_dppvi.protocol import planning


class Part(NamedTuple):
    """What some rounds of a run were planned from."""

    num_rounds: int  # rounds of the run by the end of the part
    # One per client, or one if all are equal; empty without privacy.
    budgets: tuple[PrivacyBudget, ...]
    # What other runs had released when the part was planned, one per client; empty for nothing.
    before: tuple[Composition, ...]

    def spent(self, budgets: Sequence[PrivacyBudget]) -> Sequence[Composition]:
        """What other runs had released; nothing, where the clients are not the part's."""
        return self.before if len(self.before) == len(budgets) else ()

    @property
    def budget(self) -> PrivacyBudget | tuple[PrivacyBudget, ...]:
        """As ``fit`` takes it."""
        return self.budgets[0] if len(self.budgets) == 1 else self.budgets


class Past(NamedTuple):
    """What a checkpoint says of a run that was kept."""

    parts: tuple[Part, ...]  # first to last
    ended: bool  # whether more rounds may follow: all rounds ran, or none of them costs anything
    run_name: str | None  # what a ledger file calls the run; ``None`` without one
    method: str  # the run's method in words

    @property
    def num_rounds(self) -> int:
        """Rounds of all parts."""
        return self.parts[-1].num_rounds

    def is_continued_by(self, run: planning.RunSpec) -> bool:
        """Whether a run goes on beyond the end of this one."""
        # A run of another kind of method does not: it is refused as such, whatever its budget.
        # With the parenthesis, or one method's name could be the beginning of another's.
        same = self.method.startswith(f"{type(run.method).__name__}(")
        return self.ended and same and run.num_rounds > self.num_rounds

    def ended_before(self, run: planning.RunSpec) -> tuple[Part, ...]:
        """The parts whose rounds come before those that a run plans anew."""
        if self.is_continued_by(run):
            return self.parts
        # A resumed run plans its last part once more. One of any other number of rounds is another
        # run, which is refused by name later.
        return self.parts[:-1] if run.num_rounds == self.num_rounds else ()


def to_json(plan: PrivacyPlan | None, num_rounds: int) -> list[dict[str, Any]]:
    """The parts of a run's plan, as a checkpoint says them."""
    if plan is None:
        return [{"rounds": num_rounds, "budgets": [], "before": []}]
    ends = [*(part.first_round for part in plan.parts[1:]), num_rounds]
    return [_to_json(part, end) for part, end in zip(plan.parts, ends, strict=True)]


def _to_json(plan: PrivacyPlan, end: int) -> dict[str, Any]:
    budgets = [client.budget for client in plan.clients]
    before = [client.before for client in plan.clients]
    return {
        # One budget where all are equal, as most users have written it.
        "rounds": end,
        "budgets": [dict(vars(each)) for each in (budgets if len({*budgets}) > 1 else budgets[:1])],
        "before": [composition_to_json(mine) for mine in before] if any(before) else [],
    }


def from_json(parts: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    """The inverse of :func:`to_json`.

    Raises:
        AttributeError, LookupError, RecursionError, TypeError, ValueError: If these are no parts.
    """
    found = tuple(
        Part(
            part["rounds"],
            tuple(PrivacyBudget(**fields) for fields in part["budgets"]),
            tuple(composition_from_json(mine) for mine in part["before"]),
        )
        for part in parts
    )
    # The type itself, because True is an int, too.
    ends = [0, *(part.num_rounds for part in found)]
    if not found or any(type(b) is not int or not a < b for a, b in itertools.pairwise(ends)):
        raise ValueError("numbers of rounds that do not grow")
    return found


def plan_of(
    run: planning.RunSpec,
    budget: PrivacyBudget | Sequence[PrivacyBudget] | None,
    sizes: Sequence[int],
    names: tuple[str, ...],
    past: Past | None,
    ledger_file: LedgerFile | None,
) -> PrivacyPlan:
    """The plan of a run, whether new, resumed or continued."""
    spent: planning.Spent | None = None
    if ledger_file is not None:
        # Clients without names are those in the file, if they are as many.
        names = names or ledger_file.names(len(sizes))
    if past is None:
        if ledger_file is not None:
            spent = functools.partial(ledger_file.spent, names=names)
        return planning.plan_run(run, budget, sizes, spent, names)
    # Part after part as it was planned then: each one's noise was calibrated on top of those before
    # it, and must come out as it was charged.
    plan, first = None, 0
    for part in past.ended_before(run):
        # Parts of another run, which is refused by name where the run is described, may not fit.
        if len(part.budgets) not in (1, len(sizes)):
            break
        ended = run.until(part.num_rounds)
        plan = planning.plan_run(ended, part.budget, sizes, part.spent, names, plan, first)
        first = part.num_rounds
    if not past.is_continued_by(run):
        # Resumed: others may have been charged since, but this noise is settled. It is planned from
        # what they had released when the part began.
        spent = past.parts[-1].spent
    elif ledger_file is not None:
        # The run's own releases are in the ledger file, too, and count once, as of `plan`.
        spent = functools.partial(ledger_file.spent, besides=past.run_name)
    return planning.plan_run(run, budget, sizes, spent, names, plan, first)
