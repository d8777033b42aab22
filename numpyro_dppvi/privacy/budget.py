"""What is promised: a privacy budget and the neighbouring relation it is meant for."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dp_accounting import NeighboringRelation

from numpyro_dppvi import _validate

Relation: TypeAlias = Literal["replace_one", "add_or_remove_one"]
"""Which data sets are neighbours: one record replaced, or one record more or less."""

_RELATIONS: tuple[str, ...] = get_args(Relation)


@dataclass(frozen=True)
class PrivacyBudget:
    """The most that a client's records may cost: an (epsilon, delta) guarantee.

    Args:
        epsilon: Above 0. ``math.inf`` asks for clipping without noise, which is no privacy.
        delta: Strictly between 0 and 1; well below one over the number of records.
        relation: ``"replace_one"`` (the paper's: a neighbour has one record replaced, and the
            number of records is public) or ``"add_or_remove_one"``.

    Raises:
        ValueError: If a number is outside its range or the relation is not one of the two.
    """

    epsilon: float
    delta: float = 1e-5
    relation: Relation = "replace_one"

    def __post_init__(self) -> None:
        epsilon = _validate.positive("epsilon", self.epsilon, infinite=True)
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "delta", _validate.open_unit("delta", self.delta, "1e-5"))
        _validate.choice("relation", self.relation, _RELATIONS)


def unit_sensitivity(relation: Relation) -> float:
    """How far a sum of vectors of norm <= 1 moves, at most, between neighbouring data sets.

    The only place where a sensitivity is written: replacing one record takes a vector out and
    puts another in (2); adding or removing one does half of that (1).
    """
    return 2.0 if relation == "replace_one" else 1.0


def neighboring_relation(relation: Relation) -> NeighboringRelation:
    """The same relation in ``dp_accounting``'s words."""
    if relation == "replace_one":
        return NeighboringRelation.REPLACE_ONE
    return NeighboringRelation.ADD_OR_REMOVE_ONE
