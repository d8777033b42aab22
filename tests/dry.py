"""Rounds that compute nothing, for tests of words, names and budgets.

Plan, ledger, schedule and checkpoint are what they are in any run. Only the compiled round is left
out, which takes a second or more to compile and changes nothing that such tests look at.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from numpyro_dppvi.protocol import rounds


@contextlib.contextmanager
def dry_rounds() -> Iterator[None]:
    """Every round in this context ends where it began."""

    def run_round(problem, params, before, *rest):
        return before, _nothing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", run_round)
        yield


@contextlib.contextmanager
def traced_rounds() -> Iterator[None]:
    """Every round in this context is traced, but neither compiled nor run."""
    run_round = rounds.run_round

    def traced(problem, params, before, shards, groups, keys, drawn=None):
        def end(before, keys):
            return run_round(problem, params, before, shards, groups, keys, drawn)

        jax.eval_shape(end, before, keys)
        return before, _nothing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", traced)
        yield


def _nothing() -> rounds.RoundInfo:
    """What a round says in which nothing happened."""
    none = jnp.zeros((), jnp.int32)
    return rounds.RoundInfo(jnp.zeros(()), none, none, none)
