"""Grids of which the default suite runs what is told apart, and `make slow` the rest."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def grid(
    names: str | tuple[str, ...], values: Iterable[Any], *, quick: Container[int], ids: Any = None
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, where all values but some are slow.

    Args:
        names: One argument's name, or those of several, whose values are tuples then.
        values: What the arguments are in turn.
        quick: The places, from 0, of the values that the default suite takes.
        ids: What to call the values.
    """
    parameters = [
        pytest.param(
            *((value,) if isinstance(names, str) else value),
            marks=() if place in quick else pytest.mark.slow,
        )
        for place, value in enumerate(values)
    ]
    return pytest.mark.parametrize(names, parameters, ids=ids)
