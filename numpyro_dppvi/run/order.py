"""Says so where a call lacks one of a model, a guide and data, or has them in another order."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numpyro_dppvi import _validate
from numpyro_dppvi.latents.tables import is_records

P = ParamSpec("P")
T = TypeVar("T")

_FIRST = ("model", "guide", "data")
# What is an argument of a budget, and not of a fit.
_OF_BUDGET = ("epsilon", "delta")


def in_order(function: Callable[P, T]) -> Callable[P, T]:
    """The function of ``(model, guide, data, *, ...)``, which refuses such calls in a sentence.

    Python itself would say which argument is lacking, but not that None stands for a guide.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        _check(function.__name__, args, kwargs)
        return function(*args, **kwargs)

    return called


def _check(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**dict(zip(_FIRST, args, strict=False)), **kwargs}
    lacking = [argument for argument in _FIRST if argument not in given]
    right = f"write {name}(model, None, data, ...), where None lets the library choose the guide."
    if lacking:
        have = " and ".join(argument for argument in _FIRST if argument in given) or "none of them"
        # The second of two is called the guide, whatever it is.
        if "guide" in given and _is_data(given["guide"]):
            have = f"{_validate.shown(given['guide'])} in the place of the guide"
        raise TypeError(
            f"{name} must be given a model, a guide and data, in this order, got {have}: {right}"
        )
    if _is_data(given["guide"]) and not _is_data(given["data"]):
        raise TypeError(
            f"guide must be None or a guide, got {_validate.shown(given['guide'])}, which comes "
            f"third: {right}"
        )
    for argument in _OF_BUDGET:
        if argument in given:
            raise TypeError(
                f"{argument} must be a part of the budget, got {argument}= as an argument of its "
                "own: write budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
            )


def _is_data(value: Any) -> bool:
    """Whether this is one party's records, or a list of several parties'."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return is_records(one)
