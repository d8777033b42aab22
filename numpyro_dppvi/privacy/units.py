"""What a promise protects: one record, one person with several, or one client; and what it moves.

A release is a sum of clipped vectors. How far it moves between neighbours is the number of vectors
that one unit of protection can change, times what one vector can move. The number comes from
here, the rest from :func:`~numpyro_dppvi.privacy.budget.unit_sensitivity`.
"""

from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.sampling import FullBatch, Sampler


def in_words(budget: PrivacyBudget) -> str:
    """A noun phrase for the unit of protection, without its article."""
    if budget.unit == "client":
        return "client with all its records"
    if budget.max_records_per_person > 1:
        return f"person with at most {budget.max_records_per_person} records of one client"
    return "record"


def check_sampler(budget: PrivacyBudget, sampler: Sampler) -> None:
    """Refuses sampled batches for all units but one record: no pair of distributions is proven.

    Raises:
        ValueError: In that case.
    """
    if isinstance(sampler, FullBatch) or in_words(budget) == "record":
        return
    raise ValueError(
        f"sampler must be FullBatch() where a budget protects a {in_words(budget)}, got "
        f"{type(sampler).__name__}, because sampled batches are accounted for single records: "
        "write sampler=FullBatch()."
    )


def records_changed(budget: PrivacyBudget) -> int:
    """How many per-record contributions to one sum change with one unit of protection.

    Raises:
        ValueError: If the unit is a client: the sum over its records has no useful bound.
    """
    if budget.unit == "client":
        raise ValueError(
            "unit must be 'record' for methods that clip each record's gradient, got 'client': "
            "write method=LocalAveraging(num_shards=10), or another method that clips what a "
            "client sends, or leave unit out."
        )
    return budget.max_records_per_person


def shards_changed(budget: PrivacyBudget, num_shards: int) -> int:
    """How many of a client's shards change with one unit of protection.

    A person's records may lie in as many shards as there are records. A client's are all shards.
    """
    if budget.unit == "client":
        return num_shards
    return min(budget.max_records_per_person, num_shards)
