"""Finds the latents on whose values it depends how much a record tells.

A record tells as much of a mean wherever that is: its log density is a parabola. Of a logit it
tells next to nothing far out. As with ``latents.unseen``, users declare nothing: degrees are
followed through the traced program.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.predictor import LogLikelihood

# An array's degree as a polynomial of each of some variables.
Degrees: TypeAlias = np.ndarray

_MOST = 2
_NONE = 1000  # of what is no polynomial, and of so high a degree


def curved(log_likelihood: LogLikelihood, base: Mapping[str, Any], row: PyTree) -> np.ndarray:
    """Which entries of the latents bend a record's log density by more than a parabola.

    Truth values, shape ``(d,)``, of the entries of all latents in the order of their names; true
    where it is not known.
    """
    num_entries, program, units = programs.entries(log_likelihood, base, row)
    if program is None:
        return np.ones(num_entries, bool)
    within = {v: np.any(unit.reshape(-1, num_entries), axis=0) for v, unit in units.items()}
    straight = _of_density(program, within) <= _MOST
    # Each factor of a product of latents is straight by itself.
    some = {var: np.array([np.any(entries & straight)]) for var, entries in within.items()}
    together = _of_density(program, some) <= _MOST
    return ~straight if together.all() else np.ones(num_entries, bool)


def _of_density(program: ClosedJaxpr, within: Mapping[Any, np.ndarray]) -> Degrees:
    """The density's degree, if each variable is in some of the program's inputs, or is not."""
    found = {var: entries.astype(int) for var, entries in within.items()}
    none = np.zeros_like(next(iter(found.values())))
    (density,) = program.jaxpr.outvars

    def degree(value: Any) -> Degrees:
        return none if isinstance(value, Literal) else found.get(value, none)

    for eqn in program.jaxpr.eqns:
        rule = _RULES.get(eqn.primitive.name, _no_polynomial)
        # What has no inputs, such as a range of numbers, is a constant.
        ins = [degree(value) for value in eqn.invars] or [none]
        out = np.minimum(rule(eqn, ins), _NONE)
        found.update(dict.fromkeys(eqn.outvars, out))
    return degree(density)


def _no_polynomial(eqn: JaxprEqn, ins: list[Degrees]) -> Degrees:
    return _NONE * np.any(ins, axis=0)


def _sum(eqn: JaxprEqn, ins: list[Degrees]) -> Degrees:
    return np.asarray(np.max(ins, axis=0))


def _power(eqn: JaxprEqn, ins: list[Degrees]) -> Degrees:
    power = eqn.params["y"]
    return power * ins[0] if power > 0 else _no_polynomial(eqn, ins)


def _quotient(eqn: JaxprEqn, ins: list[Degrees]) -> Degrees:
    return ins[0] + _no_polynomial(eqn, ins[1:])


def _first(eqn: JaxprEqn, ins: list[Degrees]) -> Degrees:
    """Laid out anew, by what must be no latent."""
    return _quotient(eqn, ins) if len(ins) > 1 else ins[0]


_Rule: TypeAlias = Callable[[JaxprEqn, list[Degrees]], Degrees]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("add", "add_any", "sub", "neg", "concatenate", "stack"), _sum),
    **dict.fromkeys(("reduce_sum", "cumsum", "convert_element_type", "copy", "rev"), _first),
    **dict.fromkeys(("gather", "dynamic_slice", *programs.LAYOUTS), _first),
    **dict.fromkeys(("mul", "dot_general"), lambda eqn, ins: ins[0] + ins[1]),
    "select_n": lambda eqn, ins: _no_polynomial(eqn, ins[:1]) + _sum(eqn, ins[1:]),
    "integer_pow": _power,
    "square": lambda eqn, ins: 2 * ins[0],
    "div": _quotient,
    "triangular_solve": lambda eqn, ins: _quotient(eqn, ins[::-1]),
}
