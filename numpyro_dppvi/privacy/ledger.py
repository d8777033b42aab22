"""The ledger: an immutable record of all releases, from which each client's epsilon follows."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import dp_accounting as dpa
import numpy as np

from numpyro_dppvi import _html, _validate
from numpyro_dppvi.privacy import accounting, words
from numpyro_dppvi.privacy.accounting import Composition
from numpyro_dppvi.privacy.budget import PrivacyBudget

_LONGEST_NAME = 100
_EXAMPLE = "[Entry(round=0, client=0, event=event, num_releases=1)]"


class BudgetExceededError(RuntimeError):
    """A release was refused because it would exceed a client's budget."""


class Entry(NamedTuple):
    """One client's releases in one round.

    Attributes:
        round: Number of the round, from 0.
        client: Number of the client, from 0.
        event: The accounting event of each release.
        num_releases: How many such releases.
        run: The public name of the run, for ledger files that several runs share.
    """

    round: int
    client: int
    event: dpa.DpEvent
    num_releases: int
    run: str = ""


@dataclass(frozen=True, repr=False)
class Ledger:
    """Everything that each client has released; append-only.

    Clients hold disjoint sets of people, so each client's epsilon counts only its own releases
    (parallel composition).

    Args:
        budgets: One per client; empty for a run without privacy.
        affordable: For each client a composition known to fit its budget (the plan's). Rounds
            within it are not accounted again.
        entries: What was charged.
        run: The public name of this run, for ledger files that several runs share.
        kept: The name of this run's newest checkpoint in the ledger file; empty without one.
        client_names: The clients' names; empty if they have none. Ledgers that differ in these
            alone are equal.

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
    client_names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("budgets", "affordable", "entries", "client_names"):
            _validate.instance(name, getattr(self, name), tuple, "()")
        for budget in self.budgets:
            _validate.instance("budgets", budget, PrivacyBudget, "(PrivacyBudget(epsilon=1.0),)")
        if self.client_names:
            check_names(self.client_names, len(self.budgets))

    def charge(self, entries: Iterable[Entry]) -> "Ledger":
        """Returns a ledger with more entries; called before the releases happen.

        Raises:
            BudgetExceededError: If a client's total would exceed its budget. Nothing is charged
                then.
            ValueError: If an entry names a client without a budget or has no releases.
        """
        try:
            entries = tuple(entries)
        except TypeError:
            raise TypeError(
                f"entries must be a sequence of Entry, got {_validate.shown(entries)}: write "
                f"entries={_EXAMPLE}, say."
            ) from None
        for entry in entries:
            self._check_entry(entry)
        # A value of its own: where the check below refuses, this ledger is what it was.
        charged = replace(self, entries=self.entries + entries)
        # Fills the cached property, so that a charge takes the same time however long the ledger.
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
        """The composition of each client's entries."""
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
        budgets = self.budgets if delta is None else [replace(b, delta=delta) for b in self.budgets]
        return np.array([_cost(self.composition(m), b) for m, b in enumerate(budgets)])

    def __repr__(self) -> str:
        """A line, which accounts for nothing; ``print`` shows what each client has spent."""
        clients, entries = len(self.budgets), len(self.entries)
        return f"Ledger(clients={clients}, entries={entries}, run={self.run!r})"

    def __str__(self) -> str:
        """What each client has released and spent, as text."""
        rows = self._table()
        width = max(len(name) for name, *_ in rows)
        lines = (
            f"  {name:<{width}} " + " ".join(f"{cell:>9}" for cell in cells)
            for name, *cells in rows
        )
        return "\n".join(["Ledger", *lines])

    def _repr_html_(self) -> str:
        header, *rows = self._table()
        return _html.heading("Ledger") + _html.table(header, rows)

    def _table(self) -> list[list[str]]:
        """A header, and a row a client."""
        rows = [["client", "rounds", "releases", "epsilon", "of budget", "delta"]]
        for client, (budget, spent) in enumerate(zip(self.budgets, self.spent(), strict=True)):
            mine = [entry for entry in self.entries if entry.client == client]
            rounds = len({(entry.run, entry.round) for entry in mine})
            releases = sum(entry.num_releases for entry in mine)
            name = words.clients(client, client, self.client_names)
            costs = words.rounded_up(spent), f"{budget.epsilon:g}", f"{budget.delta:g}"
            rows.append([name, str(rounds), str(releases), *costs])
        return rows

    def _check_entry(self, entry: Entry) -> None:
        _validate.instance("entries", entry, Entry, _EXAMPLE)
        _validate.not_negative_int("round", entry.round)
        _validate.whole("client", entry.client)
        _validate.instance("event", entry.event, dpa.DpEvent, "dpa.GaussianDpEvent(25.0)")
        _validate.positive_int("num_releases", entry.num_releases)
        if not 0 <= entry.client < len(self.budgets):
            raise ValueError(
                f"client must be a number from 0 to {len(self.budgets) - 1}, got {entry.client}: "
                f"write an entry for one of this ledger's {len(self.budgets)} clients."
            )

    def check(self, client: int) -> None:
        """Raises :class:`BudgetExceededError` if a client's budget is exceeded."""
        budget, composition = self.budgets[client], self.composition(client)
        planned = self.affordable[client] if self.affordable else frozenset()
        if _is_planned(composition, planned, budget):
            return
        epsilon = _cost(composition, budget)
        # Written so that NaN refuses, too.
        if not epsilon <= budget.epsilon:
            who = words.client(client, self.client_names)
            raise BudgetExceededError(
                f"{who}'s budget is used up: this round would bring it to "
                f"epsilon = {epsilon:.6g} of {budget.epsilon:g} at delta = {budget.delta:g}; "
                "nothing was computed. Write a larger num_rounds when the run is first planned."
            )


def check_names(names: tuple[Any, ...], num_clients: int) -> tuple[str, ...]:
    """Returns clients' names as they were, or refuses what a ledger file could not keep."""
    # Names stand in lines of JSON that auditors read, and in messages.
    texts = all(type(n) is str and n.isprintable() and 0 < len(n) <= _LONGEST_NAME for n in names)
    if not texts or not len(names) == len(set(names)) == num_clients:
        raise ValueError(
            f"client_names must be one name for each of {num_clients} clients, all different, of "
            f"1 to {_LONGEST_NAME} printable characters, got {_validate.shown(names)}: write "
            "client_names=('Helsinki', 'Turku'), or leave it out."
        )
    return names


def _added(totals: dict[int, Composition], entries: Iterable[Entry]) -> dict[int, Composition]:
    """Each client's composition with more entries."""
    more: dict[int, list[tuple[dpa.DpEvent, int]]] = {}
    for entry in entries:
        more.setdefault(entry.client, []).append((entry.event, entry.num_releases))
    # Of thousands of clients many are alike: they share one value, of which Python keeps the hash.
    found: dict[tuple[object, ...], Composition] = {}
    new = {}
    for client, events in more.items():
        before = totals.get(client, frozenset())
        key = before, *events
        if key not in found:
            found[key] = accounting.compose([*before, *events])
        new[client] = found[key]
    return totals | new


@functools.lru_cache(maxsize=1024)
def _is_planned(composition: Composition, planned: Composition, budget: PrivacyBudget) -> bool:
    """Whether a composition is part of a planned one, and that within its budget."""
    # Part of a composition costs no more than the whole. The plan's epsilon was computed when noise
    # was calibrated, and is cached: a round within it needs no accountant, which takes seconds for
    # sampled batches.
    counts = dict(planned)
    within = all(count <= counts.get(event, 0) for event, count in composition)
    return within and _cost(planned, budget) <= budget.epsilon


def _cost(composition: Composition, budget: PrivacyBudget) -> float:
    return accounting.epsilon(composition, budget.delta, budget.relation)
