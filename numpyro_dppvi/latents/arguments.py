"""Checks that data and public arguments fit the model's signature."""

import inspect
from collections.abc import Mapping
from typing import Any

from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError, shown


def check_arguments(
    model: Model, records: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> None:
    """Refuses data that the model has no argument for, and arguments without a value."""
    parameters = _parameters(model)
    both = sorted(set(records) & set(model_kwargs))
    if both:
        raise UnsupportedModelError(
            f"{both[0]!r} is in both data and model_kwargs: keep it in data if it holds records, "
            "in model_kwargs if it is public."
        )
    unnamed = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise UnsupportedModelError(
            f"the model takes {unnamed[0]!r} by position only, but data is passed by name: remove "
            "the '/' from its signature."
        )
    # A model with **kwargs takes every name: nothing can be said of unknown or missing ones.
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
    for where, given in (("data", records), ("model_kwargs", model_kwargs)):
        unknown = [name for name in given if name not in parameters]
        if unknown:
            raise UnsupportedModelError(
                f"the model has no argument {unknown[0]!r}, which is in {where}; it takes "
                f"{', '.join(names)}: rename the entry of {where}."
            )
    missing = [
        name
        for name in names
        if parameters[name].default is inspect.Parameter.empty
        and name not in records
        and name not in model_kwargs
    ]
    if missing:
        raise UnsupportedModelError(
            f"the model needs the argument {missing[0]!r}, which is in neither data nor "
            f"model_kwargs: add data={{{missing[0]!r}: ...}} if it holds records, or "
            f"model_kwargs={{{missing[0]!r}: ...}} if it is public."
        )


def _parameters(model: Model) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        raise UnsupportedModelError(
            f"model must be a function with numpyro.sample statements, got {shown(model)}: pass "
            "the function itself."
        ) from None


def absent_arguments(model: Model, given: set[str]) -> tuple[str, ...]:
    """Arguments with the default ``None`` that were not given, perhaps a forgotten outcome."""
    parameters = _parameters(model)
    return tuple(name for name, p in parameters.items() if p.default is None and name not in given)
