"""Rounds that compute nothing, for tests of words, names and budgets.

Plan, ledger, schedule and checkpoint are what they are in any run. Only the compiled round is left
out, which takes a second or more to compile and changes nothing that such tests look at.
"""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from numpyro_dppvi.protocol import rounds


@contextlib.contextmanager
def dry_rounds() -> Iterator[None]:
    """Every round in this context ends where it began."""
    none = jnp.zeros((), jnp.int32)

    def run_round(problem, params, before, *rest):
        return before, rounds.RoundInfo(jnp.zeros(()), none, none, none)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", run_round)
        yield
