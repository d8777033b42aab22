"""The programs of a round, to be counted or compiled anew."""

from typing import Any

from numpyro_dppvi.families.compiled import Compiled
from numpyro_dppvi.protocol import rounds


def round_programs() -> tuple[Compiled[Any, Any], ...]:
    """All that a round calls."""
    return (
        *(rounds.as_one, rounds._refined, rounds._keys, rounds._started),
        *(rounds._asked, rounds._visited, rounds._taken, rounds._ended),
    )


def forget_programs() -> None:
    """Forgets what was compiled."""
    for each in round_programs():
        each.program.clear_cache()
        each.inner.clear_cache()
    rounds._seen.clear()
