"""The ledger: an immutable list of what was released, and what it cost each client."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import dp_accounting as dpa
import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget


class BudgetExceededError(RuntimeError):
    """A release was refused because it would cost more than the client's budget."""


class Entry(NamedTuple):
    """One client's releases in one round.

    Attributes:
        round: Number of the round, from 0.
        client: Number of the client, from 0.
        event: What each release is charged as.
        num_releases: How many such releases.
        run: The public name of the run that made them, where several share a ledger file.
    """

    round: int
    client: int
    event: dpa.DpEvent
    num_releases: int
    run: str = ""


@dataclass(frozen=True)
class Ledger:
    """What every client has released so far; append-only, and epsilon is a function of it.

    Clients hold disjoint people, so each client's cost is its own (parallel composition).

    Args:
        budgets: One a client; empty for a run without privacy.
        affordable: For each client a composition that fits its budget (the plan's): rounds that
            stay inside it need no accounting of their own.
        entries: What was charged.
        run: The public name that a run's entries carry where several share a ledger file.
        kept: The name of this run's newest result in the ledger file, for a run that a checkpoint
            keeps; empty for others.

    Example:
        >>> ledger = Ledger((PrivacyBudget(epsilon=1.0),))
        >>> release = Entry(round=0, client=0, event=dpa.GaussianDpEvent(25.0), num_releases=5)
        >>> ledger = ledger.charge([release])
        >>> ledger.spent().round(2).tolist(), ledger.spent(delta=1e-3).round(2).tolist()
        ([0.64], [0.4])
        >>> ledger.charge([release] * 5)
        Traceback (most recent call last):
        numpyro_dppvi.privacy.ledger.BudgetExceededError: client 0's budget is used up: ...
    """

    budgets: tuple[PrivacyBudget, ...] = ()
    affordable: tuple[Composition, ...] = ()
    entries: tuple[Entry, ...] = ()
    run: str = ""
    kept: str = ""

    def __post_init__(self) -> None:
        for name in ("budgets", "affordable", "entries"):
            _validate.instance(name, getattr(self, name), tuple, "()")
        for budget in self.budgets:
            _validate.instance("budgets", budget, PrivacyBudget, "(PrivacyBudget(epsilon=1.0),)")

    def charge(self, entries: Iterable[Entry]) -> "Ledger":
        """A ledger with more entries, made before the releases happen.

        Raises:
            BudgetExceededError: If a client's total would exceed its budget; names the client,
                the epsilon it would reach and its budget. Nothing is charged then.
            ValueError: If an entry has a client without a budget, or less than one release.
        """
        try:
            entries = tuple(entries)
        except TypeError:
            raise TypeError(
                f"entries must be a sequence of Entry, got {_validate.shown(entries)}: write "
                "entries=[Entry(round=0, client=0, event=event, num_releases=1)], say."
            ) from None
        for entry in entries:
            self._check_entry(entry)
        charged = replace(self, entries=self.entries + entries)
        # Counted on from here: a charge costs what it adds, however long the ledger is.
        charged.__dict__["_totals"] = _added(self._totals, entries)
        for client in sorted({entry.client for entry in entries}):
            charged.check(client)
        return charged

    def composition(self, client: int) -> Composition:
        """What one client has released."""
        _validate.not_negative_int("client", client)
        return self._totals.get(client, frozenset())

    @functools.cached_property
    def _totals(self) -> dict[int, Composition]:
        """What each client has released; a function of the entries, and nothing else."""
        return _added({}, self.entries)

    def spent(self, delta: float | None = None) -> np.ndarray:
        """Epsilon of each client.

        Args:
            delta: In (0, 1); each client's own delta if not given.

        Returns:
            Shape ``(num_clients,)``; empty for a run without privacy.
        """
        if delta is not None:
            delta = PrivacyBudget(1.0, delta).delta
        return np.array([self._epsilon(m, delta) for m in range(len(self.budgets))])

    def _epsilon(self, client: int, delta: float | None = None) -> float:
        budget = self.budgets[client]
        delta = budget.delta if delta is None else delta
        return accounting.epsilon(self.composition(client), delta, budget.relation)

    def _check_entry(self, entry: Entry) -> None:
        if not isinstance(entry, Entry):
            raise TypeError(
                f"entries must be a sequence of Entry, got {_validate.shown(entry)} among them: "
                "write entries=[Entry(round=0, client=0, event=event, num_releases=1)], say."
            )
        _validate.not_negative_int("round", entry.round)
        _validate.whole("client", entry.client)
        _validate.instance("event", entry.event, dpa.DpEvent, "dpa.GaussianDpEvent(25.0)")
        _validate.positive_int("num_releases", entry.num_releases)
        if not 0 <= entry.client < len(self.budgets):
            raise ValueError(
                f"client must be a client with a budget, got {entry.client}: this ledger has "
                f"{len(self.budgets)} budgets, for clients counted from 0."
            )

    def check(self, client: int) -> None:
        """Refuses a ledger in which a client's budget is exceeded.

        Raises:
            BudgetExceededError: Names the client, its epsilon and its budget.
        """
        budget, composition = self.budgets[client], self.composition(client)

        def cost(composition: Composition) -> float:
            return accounting.epsilon(composition, budget.delta, budget.relation)

        # The plan's cost is known already, so that most rounds need no accounting.
        planned = self.affordable[client] if self.affordable else frozenset()
        if _within(composition, planned) and cost(planned) <= budget.epsilon:
            return
        epsilon = cost(composition)
        if not epsilon <= budget.epsilon:
            raise BudgetExceededError(
                f"client {client}'s budget is used up: this round would bring it to "
                f"epsilon = {epsilon:.6g} of {budget.epsilon:g} at delta = {budget.delta:g}; "
                "nothing was computed. Plan for more rounds from the start (num_rounds=...)."
            )


def _added(totals: dict[int, Composition], entries: Iterable[Entry]) -> dict[int, Composition]:
    """Each client's composition with more entries."""
    more: dict[int, list[tuple[dpa.DpEvent, int]]] = {}
    for entry in entries:
        more.setdefault(entry.client, []).append((entry.event, entry.num_releases))
    return totals | {
        client: accounting.compose([*totals.get(client, ()), *events])
        for client, events in more.items()
    }


def _within(composition: Composition, bound: Composition) -> bool:
    """Whether a composition is part of another: the same events, no more often."""
    counts = dict(bound)
    return all(count <= counts.get(event, 0) for event, count in composition)
