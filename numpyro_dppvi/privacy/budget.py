"""What is promised: a privacy budget and the neighbouring relation it is meant for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dp_accounting import NeighboringRelation

from numpyro_dppvi import _validate

Relation: TypeAlias = Literal["replace_one", "add_or_remove_one"]
"""Which data sets are neighbours, with one record replaced, or one record more or less."""

Unit: TypeAlias = Literal["record", "client"]
"""Whose data a neighbour has otherwise, one person's records of a client or all of a client's."""

_RELATIONS: tuple[str, ...] = get_args(Relation)
_UNITS: tuple[str, ...] = get_args(Unit)

# What accountants compute without losing all digits; a larger epsilon is no promise, and a smaller
# one is all but that of delta alone.
_MOST_EPSILON = 1e6
_LEAST_DELTA = 1e-100


@dataclass(frozen=True)
class PrivacyBudget:
    """The most that a client's records may cost: an (epsilon, delta) guarantee.

    Args:
        epsilon: Between 1e-6 and 1e6. ``math.inf`` asks for clipping without noise, which is no
            privacy.
        delta: Strictly between 0 and 1; well below one over the number of records.
        relation: ``"replace_one"`` (the paper's: a neighbour has one record replaced, and the
            number of records is public) or ``"add_or_remove_one"``: one record more or less,
            given the number of records, which is public all the same.
        unit: What is replaced, added or removed. ``"record"`` is the paper's. ``"client"`` is all
            records of a client at once, of which only the number stays the same; for methods
            that clip what a client sends.
        max_records_per_person: With unit ``"record"``, how many records of a client belong to
            one person at most. All of them together are protected then; whoever has more is not.

    Raises:
        ValueError: If a number is outside its range, a word is none of the two, or the words do
            not go together.

    Example:
        >>> PrivacyBudget(epsilon=1.0).delta
        1e-05
        >>> PrivacyBudget(epsilon=2.0, max_records_per_person=5).unit  # five visits of a patient
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
        epsilon = _validate.positive("epsilon", self.epsilon, infinite=True, most=_MOST_EPSILON)
        object.__setattr__(self, "epsilon", epsilon)
        delta = _validate.open_unit("delta", self.delta, "1e-5", _LEAST_DELTA)
        object.__setattr__(self, "delta", delta)
        _validate.choice("relation", self.relation, _RELATIONS)
        _validate.choice("unit", self.unit, _UNITS)
        most = _validate.positive_int("max_records_per_person", self.max_records_per_person)
        object.__setattr__(self, "max_records_per_person", most)
        if self.unit == "client":
            self._check_client()

    def _check_client(self) -> None:
        if self.relation != "replace_one":
            raise ValueError(
                "relation must be 'replace_one' with unit='client', got 'add_or_remove_one': who "
                "takes part in a run, and with how many records, is public."
            )
        if self.max_records_per_person != 1:
            raise ValueError(
                "max_records_per_person must be left out with unit='client', which protects all "
                f"records of a client, got {self.max_records_per_person}."
            )


def budget_of_each(
    budget: PrivacyBudget | Sequence[PrivacyBudget], num_clients: int
) -> tuple[PrivacyBudget, ...]:
    """One budget a client.

    Raises:
        TypeError: If it is no budget, nor a sequence of some.
        ValueError: If there is another number of budgets than of clients.
    """
    if isinstance(budget, PrivacyBudget):
        return (budget,) * num_clients
    budgets = _validate.listed(budget)
    wrong = [b for b in budgets or () if not isinstance(b, PrivacyBudget)]
    if budgets is None or wrong:
        received = _validate.shown(wrong[0] if wrong else budget)
        raise TypeError(
            f"budget must be a PrivacyBudget or a list of them, got {received}: "
            "write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    if len(budgets) != num_clients:
        raise ValueError(
            f"budget must be one for all clients or one a client, got {len(budgets)} budgets for "
            f"{num_clients} clients: write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    return tuple(budgets)


def unit_sensitivity(relation: Relation) -> float:
    """How far a sum of vectors of norm <= 1 moves, at most, between neighbouring data sets.

    The only place where a sensitivity is written: replacing one record takes a vector out and
    puts another in (2); adding or removing one does half of that (1).

    Raises:
        ValueError: If the relation is another.
    """
    _validate.choice("relation", relation, _RELATIONS)
    return 2.0 if relation == "replace_one" else 1.0


def neighboring_relation(relation: Relation) -> NeighboringRelation:
    """The same relation in ``dp_accounting``'s words."""
    if relation == "replace_one":
        return NeighboringRelation.REPLACE_ONE
    return NeighboringRelation.ADD_OR_REMOVE_ONE
