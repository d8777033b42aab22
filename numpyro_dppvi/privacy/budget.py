"""Privacy budgets, neighbouring relations and the sensitivity that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from numpyro_dppvi import _validate

Relation: TypeAlias = Literal["replace_one", "add_or_remove_one"]
"""Whether neighbouring data sets differ by replacing a record, or by adding or removing one."""

Unit: TypeAlias = Literal["record", "client"]
"""Whether neighbours differ in one person's records at a client, or in all its records."""

_RELATIONS: tuple[str, ...] = get_args(Relation)
_UNITS: tuple[str, ...] = get_args(Unit)

# Beyond these, accountants lose all digits. A larger epsilon would promise nothing anyway.
_MOST_EPSILON = 1e6
_LEAST_DELTA = 1e-100
# So many names are listed in a message.
_SHOWN = 8


@dataclass(frozen=True)
class PrivacyBudget:
    """The (epsilon, delta) guarantee that a client's releases must satisfy.

    Args:
        epsilon: Between 1e-6 and 1e6. ``math.inf`` asks for clipping without noise, which gives
            no privacy.
        delta: Between 0 and 1; choose it well below one over the number of records.
        relation: ``"replace_one"`` (as in the paper: neighbours differ in one record, and the
            number of records is public) or ``"add_or_remove_one"`` (one has a record more; the
            number of records is still published).
        unit: What is replaced, added or removed: ``"record"`` (as in the paper) or ``"client"``,
            all records of a client at once, whose number stays the same. The latter is for methods
            that clip what a client sends.
        max_records_per_person: With unit ``"record"``, the most records of a client that belong to
            one person. They are protected together; a person with more records is not.

    Raises:
        ValueError: If a number is out of range, a word is unknown, or relation, unit and
            ``max_records_per_person`` cannot be combined.

    Example:
        >>> PrivacyBudget(epsilon=1.0).delta
        1e-05
        >>> PrivacyBudget(epsilon=2.0, max_records_per_person=5).unit  # a patient's five visits
        'record'
        >>> PrivacyBudget(epsilon=-1.0)
        Traceback (most recent call last):
        ValueError: epsilon must be a number above 0, got -1.0: write epsilon=1.0, say.
    """

    epsilon: float
    delta: float = 1e-5
    relation: Relation = "replace_one"
    unit: Unit = "record"
    max_records_per_person: int = 1

    def __post_init__(self) -> None:
        _validate.set_field(self, "epsilon", _validate.positive, infinite=True, most=_MOST_EPSILON)
        _validate.set_field(self, "delta", _validate.open_unit, "1e-5", _LEAST_DELTA)
        _validate.choice("relation", self.relation, _RELATIONS)
        _validate.choice("unit", self.unit, _UNITS)
        _validate.set_field(self, "max_records_per_person", _validate.positive_int)
        if self.unit == "client" and self.relation != "replace_one":
            raise ValueError(
                "relation must be 'replace_one' with unit='client', got 'add_or_remove_one': "
                "write relation='replace_one', because who takes part, and with how many records, "
                "is public."
            )
        if self.unit == "client" and self.max_records_per_person != 1:
            raise ValueError(
                "max_records_per_person must be left out with unit='client', got "
                f"{self.max_records_per_person}: all records of a client are protected."
            )


Budgets: TypeAlias = PrivacyBudget | Sequence[PrivacyBudget] | Mapping[str, PrivacyBudget]
"""One budget for all clients, one per client in their order, or one per client by its name."""


def budget_of_each(
    budget: Budgets, num_clients: int, names: Sequence[str] = ()
) -> tuple[PrivacyBudget, ...]:
    """One budget per client; refuses other values, and budgets of other clients."""
    if isinstance(budget, PrivacyBudget):
        return (budget,) * num_clients
    budgets = _validate.listed(list(budget.values()) if isinstance(budget, Mapping) else budget)
    wrong = [b for b in budgets or () if not isinstance(b, PrivacyBudget)]
    if budgets is None or wrong:
        # A budget is public, so that its numbers may be shown.
        raise TypeError(
            "budget must be a PrivacyBudget, a list of them or a mapping of them by the clients' "
            f"names, got {_received(budget, wrong)}: write "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    if isinstance(budget, Mapping):
        return _in_order(budget, names)
    # In this order, because a list of the wrong kind of thing is the more telling mistake.
    if len(budgets) != num_clients:
        raise ValueError(
            f"budget must be one for all clients or one per client, got {len(budgets)} budgets for "
            f"{num_clients} clients: write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    return tuple(budgets)


def _received(budget: object, wrong: Sequence[object]) -> str:
    """What stands where a budget belongs."""
    if isinstance(budget, Mapping) and set(budget) <= {one.name for one in fields(PrivacyBudget)}:
        return f"a mapping of a budget's own arguments ({', '.join(map(str, budget))})"
    if isinstance(budget, Mapping) and wrong:
        return f"a mapping that holds {_validate.shown(wrong[0])}"
    if wrong and all(isinstance(one, int | float) for one in wrong):
        return f"{_validate.shown(budget)} of numbers"
    return _validate.shown(wrong[0] if wrong else budget)


def _in_order(
    budget: Mapping[str, PrivacyBudget], names: Sequence[str]
) -> tuple[PrivacyBudget, ...]:
    """Budgets by name in the order of the clients, whatever order they were written in."""
    if not names:
        raise ValueError(
            f"budget must be a list where clients have no names, got budgets by name "
            f"({_validate.shown(next(iter(budget), None))} and so on): name the clients in data or "
            "client_sizes, {'Helsinki': ..., 'Turku': ...}, or write a list."
        )
    called = {str(name): each for name, each in budget.items()}  # names may be years, say
    lacking = [name for name in names if name not in called]
    if lacking or len(called) != len(names):
        wrong = lacking or [name for name in called if name not in names]
        raise ValueError(
            f"budget must hold one budget for each client, got "
            f"{'none for' if lacking else 'one for'} {_validate.shown(wrong[0])}"
            f"{'' if lacking else ', which is not a client'}: the clients are "
            f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}."
        )
    return tuple(called[name] for name in names)


def unit_sensitivity(relation: Relation) -> float:
    """The most that a sum of vectors of norm <= 1 can move between neighbouring data sets.

    All sensitivities in the library come from this function.

    Raises:
        ValueError: If the relation is unknown.
    """
    _validate.choice("relation", relation, _RELATIONS)
    # Replacing a record removes one vector and adds another, |-a + b| <= 2; adding or removing a
    # record does one of the two.
    return 2.0 if relation == "replace_one" else 1.0
