"""A model's signature: which arguments it asks for, and whether data and public arguments fit."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError, shown

# So many names are listed in a message.
_SHOWN = 4


class Asked(NamedTuple):
    """The arguments that a model asks for."""

    names: tuple[str, ...]  # in order
    needed: tuple[str, ...]  # those without a default that it does not have yet
    unset: tuple[str, ...]  # those left at their default ``None``, such as a forgotten outcome
    anything: bool  # whether it takes arguments of any name


def asked_of(model: Model, known: Collection[str] = ()) -> Asked:
    """Reads the arguments of a model, and nothing else of it."""
    try:
        parameters = inspect.signature(model).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        raise UnsupportedModelError(
            f"model must be a function with numpyro.sample statements, got {shown(model)}: pass "
            "the function itself."
        ) from None
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY:
            raise UnsupportedModelError(
                f"the model takes {p.name!r} by position only, but data is passed by name: remove "
                "the '/' from its signature."
            )
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    left = [p for p in named if p.name not in known]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not named and not anything:
        raise UnsupportedModelError(
            "the model takes no argument by name, but data is passed by name: write a name for "
            "each array into its signature, as in def model(X, y=None)."
        )
    return Asked(
        names=tuple(p.name for p in named),
        needed=tuple(p.name for p in left if p.default is p.empty),
        unset=tuple(p.name for p in left if p.default is None),
        anything=anything,
    )


def check_arguments(
    model: Model, records: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> None:
    """Refuses data that the model has no argument for, and arguments without a value."""
    both = sorted(set(records) & set(model_kwargs))
    if both:
        raise UnsupportedModelError(
            f"{both[0]!r} is in both data and model_kwargs: keep it in data if it holds records, "
            "in model_kwargs if it is public."
        )
    asked = asked_of(model, {*records, *model_kwargs})
    # A model with **kwargs takes every name: nothing can be said of unknown or missing ones.
    if asked.anything:
        return
    for where, given in (("data", records), ("model_kwargs", model_kwargs)):
        unknown = [name for name in given if name not in asked.names]
        if unknown:
            raise UnsupportedModelError(
                f"the model has no argument {unknown[0]!r}, which is in {where}; it takes "
                f"{', '.join(asked.names)}: {_instead(unknown, where, given, asked)}."
            )
    if asked.needed:
        missing = asked.needed[0]
        raise UnsupportedModelError(
            f"the model needs the argument {missing!r}, which is in neither data nor "
            f"model_kwargs: add data={{{missing!r}: ...}} if it holds records, or "
            f"model_kwargs={{{missing!r}: ...}} if it is public."
        )


def _instead(unknown: list[str], where: str, given: Collection[str], asked: Asked) -> str:
    """What to write where the model has no arguments of these names."""
    others = [name for name in asked.names if name not in asked.needed]
    # One argument that lacks and several arrays without one: it is to be a mapping of them.
    if len(asked.needed) == 1 < len(unknown) and set(others) <= set(given):
        nested = ", ".join(f"{name!r}: {name}" for name in unknown[:_SHOWN])
        passed = "".join(f", {name}={name}" for name in others)
        return (
            f"if {asked.needed[0]!r} is a mapping of these, fit a model that nests them, such as "
            f"def flat({', '.join([*unknown[:_SHOWN], *others])}): model({{{nested}}}{passed})"
        )
    return f"rename the entry of {where}, or leave it out"
