"""Says so where a call lacks one of a model, a guide and data, or has them in another order."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from numpyro_dppvi import _validate
from numpyro_dppvi.latents.tables import is_records

_FIRST = ("model", "guide", "data")
# What is an argument of a budget, and not of a fit.
_OF_BUDGET = ("epsilon", "delta")
# What others call an argument, and what it is called here.
_CALLED = {
    **dict.fromkeys(("rounds", "num_steps", "num_iterations", "num_epochs"), "num_rounds"),
    **dict.fromkeys(("key", "seed", "random_state"), "rng_key"),
    **dict.fromkeys(("partition", "num_clients"), "clients"),
}


def _check(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Refuses such calls of ``(model, guide, data, *, ...)`` in a sentence."""
    # Python itself would say which argument is lacking, but not that None stands for a guide.
    name = function.__name__
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
    known = list(inspect.signature(function).parameters)
    for argument in given:
        like = difflib.get_close_matches(argument, known)
        instead = _CALLED.get(argument, like[0] if like else None)
        if argument not in known and instead is not None:
            raise TypeError(f"{name} has no argument {argument!r}: write {instead}= instead.")


in_order = _validate.called_by(_check)


def _is_data(value: Any) -> bool:
    """Whether this is one party's records, or a list of several parties'."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return is_records(one)
