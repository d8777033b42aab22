"""Numbers and facts in words; what a run costs is never rounded down."""

import math
import textwrap
from collections.abc import Iterable
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from numpyro_dppvi.privacy.budget import PrivacyBudget
from numpyro_dppvi.privacy.meaning import Attack

_EXACT = Context(prec=400)  # holds every float


def rounded_up(value: float, decimals: int = 4) -> str:
    """A number that is not below zero, never rounded down.

    Args:
        value: The number.
        decimals: How many; more where the number would lose its first four digits.
    """
    if not math.isfinite(value):
        return str(value)
    exact = Decimal(value)
    decimals = max(decimals, 3 - exact.adjusted() if value else 0)
    unit = Decimal(1).scaleb(-decimals)
    return f"{exact.quantize(unit, rounding=ROUND_CEILING, context=_EXACT):f}"


def percent(share: float) -> str:
    """A share in per cent, rounded up to one decimal."""
    exact = Decimal(share) * 100
    return f"{exact.quantize(Decimal('0.1'), rounding=ROUND_CEILING, context=_EXACT):f} %"


def finite(value: Any) -> Any:
    """The same with infinite numbers as the word "infinity", for JSON."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return "infinity" if value == math.inf else value


def in_other_words(client: int, budget: PrivacyBudget, attack: Attack) -> str:
    """A sentence that says what a client's releases give away at most."""
    known, question = _known_and_asked(client, budget)
    # Whoever knows all others and how many there are knows the answer without any release.
    aside = "" if budget.relation == "replace_one" else ", the public number of records aside"
    return (
        f"In other words{aside}: whoever knows {known}, sees everything that is released and has "
        f"to say {question}, is right in at most "
        f"{percent((1 + attack.advantage) / 2)} of cases (guessing: 50 %); at "
        f"{100 * attack.false_positive_rate:g} % false alarms it detects at most "
        f"{percent(attack.true_positive_rate)}."
    )


def _known_and_asked(client: int, budget: PrivacyBudget) -> tuple[str, str]:
    if budget.unit == "client":
        known = f"everything but the records of client {client}"
        return known, "which of two sets of records it holds"
    if budget.max_records_per_person > 1:
        known = f"all records of client {client} but one person's"
        alternatives = "which of two persons they are of", "whether it holds that person's"
    else:
        known = f"all other records of client {client}"
        alternatives = "which of two records it holds", "whether it holds a certain record"
    return known, alternatives[budget.relation != "replace_one"]


GIVEN = "the number of records of each client, which is public"
"""What no promise covers, under either relation; ``add_or_remove_one`` alone would suggest it."""


def neighbours(relations: Iterable[str]) -> str:
    """Which data sets are neighbours, and what they have in common."""
    names = sorted(set(relations))
    given = f", given {GIVEN}" if "add_or_remove_one" in names else ""
    return f"neighbours by {', '.join(names)}{given}"


def to_participants(unit: str, num_shares: int, epsilon: float, delta: float) -> str:
    """A sentence that says what clients may learn who add noise to the same sums.

    Args:
        unit: What is protected, in words.
        num_shares: The least number of clients whose noise makes up that of a sum.
        epsilon: What it costs against one of them.
        delta: Delta of it.
    """
    return (
        f"The noise of a sum is put together by at least {num_shares} clients, and each of them "
        f"knows its own share: against one of the others, {unit} is protected by epsilon = "
        f"{rounded_up(epsilon)} at delta = {delta:.10g}. Several who tell each other their shares "
        "face less noise still."
    )


def paragraph(text: str) -> list[str]:
    """Lines of a text, indented by two."""
    return textwrap.wrap(text, width=100, initial_indent="  ", subsequent_indent="  ")
