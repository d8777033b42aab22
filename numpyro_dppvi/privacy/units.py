"""Units of protection: a record, a person with several records, or a client.

A release is a sum of clipped vectors. Its sensitivity is the number of vectors that one unit of
protection can change, computed here, times what one vector can move the sum, which is
:func:`~numpyro_dppvi.privacy.budget.unit_sensitivity` times the clipping norm.
"""

from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.sampling import FullBatch, Sampler


def in_words(budget: PrivacyBudget) -> str:
    """A noun phrase for the unit of protection, to follow "one" or "a"."""
    if budget.unit == "client":
        return "client with all its records"
    if budget.max_records_per_person > 1:
        return f"person with at most {budget.max_records_per_person} records of one client"
    return "record"


def check_sampler(budget: PrivacyBudget, sampler: Sampler) -> None:
    """Raises a ValueError for sampled batches with units other than a record."""
    # No dominating pair of distributions is proven for them.
    # Of a person's k records a batch holds any number from 0 to k. The proven pairs are of one
    # record that is in the batch or not.
    if isinstance(sampler, FullBatch) or in_words(budget) == "record":
        return
    raise ValueError(
        f"sampler must be FullBatch() if a budget protects a {in_words(budget)}, got "
        f"{type(sampler).__name__}: write sampler=FullBatch(), because sampled batches are "
        "accounted for single records only."
    )


def records_changed(budget: PrivacyBudget) -> int:
    """How many per-record vectors in a sum one unit of protection can change; refuses clients."""
    if budget.unit == "client":
        raise ValueError(
            "unit must be 'record' for methods that clip each record's gradient, got 'client': "
            "write method=VirtualClients(num_shards=10) or another method that clips what a "
            "client sends, or leave unit out."
        )
    return budget.max_records_per_person


def shards_changed(budget: PrivacyBudget, num_shards: int) -> int:
    """How many of a client's shards one unit of protection can change."""
    # A person's records may all lie in different shards; a client's are in all of them.
    if budget.unit == "client":
        return num_shards
    return min(budget.max_records_per_person, num_shards)
