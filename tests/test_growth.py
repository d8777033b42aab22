"""A visit of one client costs the server as much however many clients there are."""

import functools
import re

import jax
import numpy as np
import pytest

import numpyro_dppvi as dppvi
from models.logistic_regression import logistic_regression
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.protocol import rounds
from tests.grids import grid

# More than two blocks of clients whose factors are added up, in which the visited one's is anew.
FEW, MANY = 521, 1042
COLUMNS = 3
ENTRIES = COLUMNS + COLUMNS * (COLUMNS + 1) // 2  # of a factor


class StopError(Exception):
    """The round's arguments have been seen."""


@functools.cache
def lowered(num_clients, method):
    """A round in turn, as JAX hands it to the compiler."""
    caught = []

    def spy(*arguments):
        caught.extend(arguments)
        raise StopError

    x = np.random.default_rng(0).normal(size=(num_clients, COLUMNS))
    data = {"X": x.astype(np.float32), "y": (x[:, 0] > 0).astype(np.float32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", spy)
        with pytest.raises(StopError):
            dppvi.fit(
                logistic_regression,
                None,
                data,
                rng_key=jax.random.key(0),
                clients=num_clients,
                method=method,
                budget=dppvi.PrivacyBudget(1.0),
                num_rounds=2,
                progress_bar=False,
            )
    return in_own_precision(rounds.as_one.program.lower)(*caught, None)


def operations(num_clients, method):
    """The operations of a round, in which those of all visits count once."""
    return lowered(num_clients, method).cost_analysis()["flops"]


@grid("method", [dppvi.FisherScoring(), dppvi.DPOptimization()], quick=[], ids=str)
def test_a_visit_takes_no_more_operations_among_more_clients(method):
    """Once a round all factors are added up; a matrix a client and visit would be far more."""
    more = operations(MANY, method) - operations(FEW, method)
    # At each visit, the number of all records; at the round's beginning, end, and where q is made
    # of blocks, each entry of a factor.
    assert more <= (8 + 4 * ENTRIES) * (MANY - FEW)


@pytest.mark.slow
def test_what_is_remembered_of_clients_is_changed_in_place():
    """Arrays of all clients are copied before the first visit, and not at each of them."""
    program = lowered(FEW, dppvi.FisherScoring()).compile().as_text()
    inside, written, copied = False, 0, []
    for line in program.splitlines():
        if line.endswith("{") and " -> " in line:
            inside = not line.startswith("ENTRY")
        found = re.match(rf"\s+(ROOT )?\S+ = f64\[{FEW}[,\]]\S* ([a-z-]+)\(", line)
        if found and inside:
            written += found[2] == "dynamic-update-slice"
            if found[2] not in ("dynamic-update-slice", "fusion", "parameter", "get-tuple-element"):
                copied.append(line)
    assert written >= 7  # a factor's two arrays and what is remembered of a client
    assert not copied
