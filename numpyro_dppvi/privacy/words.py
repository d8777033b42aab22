"""Formats numbers and sentences for plans and statements; costs are never rounded down."""

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.meaning import Attack

_NAMED = 3
_EXACT = Context(prec=400)  # enough digits for any float


def rounded_up(value: float) -> str:
    """A non-negative number rounded up to four decimals, or more where it has fewer digits."""
    if not math.isfinite(value):
        return str(value)
    # Decimal(value) is the float to its last digit, so that rounding up is up indeed.
    exact = Decimal(value)
    decimals = max(4, 3 - exact.adjusted() if value else 0)
    unit = Decimal(1).scaleb(-decimals)
    return f"{exact.quantize(unit, rounding=ROUND_CEILING, context=_EXACT):f}"


def percent(share: float) -> str:
    """A fraction in per cent, rounded up to one decimal."""
    exact = Decimal(share) * 100
    return f"{exact.quantize(Decimal('0.1'), rounding=ROUND_CEILING, context=_EXACT):f} %"


def finite(value: Any) -> Any:
    """The same value with infinite numbers replaced by the string "infinity", for JSON."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return "infinity" if value == math.inf else value


def client(number: int, names: Sequence[str] = ()) -> str:
    """What to call a client in a sentence: by its name, or by its number."""
    return names[number] if names else f"client {number}"


def clients(first: int, last: int, names: Sequence[str] = ()) -> str:
    """What to call consecutive clients in a table."""
    if not names:
        return str(first) if first == last else f"{first}-{last}"
    named, more = names[first : last + 1][:_NAMED], last + 1 - first - _NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def alike(each: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """First and last number of every group of consecutive equal entries, one line of a table."""
    # Equal clients share a line, or the table of a large consortium would fill pages.
    first = 0
    for _, group in itertools.groupby(each):
        last = first + len(list(group)) - 1
        yield first, last
        first = last + 1


def listed(numbers: Sequence[int], names: Sequence[str] = ()) -> str:
    """What to call some clients in a sentence."""
    called = [client(number, names) for number in numbers[:_NAMED]]
    more = [f"{len(numbers) - _NAMED} more"] if len(numbers) > _NAMED else []
    *first, last = called + more
    return f"{', '.join(first)} and {last}" if first else last


def sentence(text: str) -> str:
    """A text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def of_delta(who: str, delta: float, num_records: int) -> str:
    """A sentence on a delta that is not below one over the number of records."""
    return (
        f"Caution: delta is too large for {who}. With {num_records} records and delta = "
        f"{delta:.10g}, publishing every record with probability delta, {delta * num_records:.3g} "
        "of them on average, would be as private. Choose a delta far below 1 / "
        f"{num_records}."
    )


def of_epsilon(who: str, epsilon: float) -> str:
    """A sentence on an epsilon that promises next to nothing."""
    if math.isinf(epsilon):
        return f"Caution: epsilon is infinite for {who}, which promises nothing."
    return (
        f"Caution: epsilon = {rounded_up(epsilon)} is above 10 for {who}. By itself it promises "
        f"next to nothing: what somebody believes about a record may change by a factor of "
        f"e^{epsilon:.3g} in odds."
    )


def in_other_words(client: str, budget: PrivacyBudget, attack: Attack) -> str:
    """A sentence on how much a client's releases reveal at most."""
    known, question = _known_and_asked(client, budget)
    # With the public number of records and all other records, the answer would be known anyway.
    aside = "" if budget.relation == "replace_one" else ", leaving the public counts aside"
    return (
        f"In other words{aside}: an attacker who knows {known}, sees everything that is released "
        f"and has to say {question} is right in at most "
        f"{percent((1 + attack.advantage) / 2)} of cases (guessing: 50 %); at a false-positive "
        f"rate of {100 * attack.false_positive_rate:g} %, the true-positive rate is at most "
        f"{percent(attack.true_positive_rate)}."
    )


def _known_and_asked(client: str, budget: PrivacyBudget) -> tuple[str, str]:
    if budget.unit == "client":
        known = f"everything but the records of {client}"
        return known, "which of two sets of records it holds"
    if budget.max_records_per_person > 1:
        known = f"all records of {client} but one person's"
        alternatives = "which of two persons they are of", "whether it holds that person's"
    else:
        known = f"all other records of {client}"
        alternatives = "which of two records it holds", "whether it holds a certain record"
    return known, alternatives[budget.relation != "replace_one"]


GIVEN = "the number of records of each client, which is public"
"""What is public under either relation, although ``add_or_remove_one`` might suggest otherwise."""


def neighbours(relations: Iterable[str]) -> str:
    """The neighbouring relation, and what neighbours have in common."""
    names = sorted(set(relations))
    given = f", given {GIVEN}" if "add_or_remove_one" in names else ""
    return f"neighbours by {', '.join(names)}{given}"


def to_participants(unit: str, num_shares: int, epsilon: float, delta: float) -> str:
    """A sentence on the protection against clients who contribute to the noise of the same sums."""
    return (
        f"At least {num_shares} clients each add a share of a sum's noise and know their own "
        f"share: against one of the others, {unit} is protected by epsilon = "
        f"{rounded_up(epsilon)} at delta = {delta:.10g}. Clients that collude face even less noise."
    )


def paragraph(text: str) -> list[str]:
    """A text as lines of at most 100 characters, indented by two."""
    return textwrap.wrap(text, width=100, initial_indent="  ", subsequent_indent="  ")
