"""Finds a scalar linear predictor in a model's traced program, if there is one.

In most generalised linear models log p(record | theta) = g(a'theta + b, record), where a and b
depend on the record. If q is normal, then so is the predictor a'theta + b, and expectations of g
are one-dimensional integrals. Users need not declare this: it is read off the traced program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.latents import programs

# Primitives that are linear jointly in all inputs; in the first input, if the others do not depend
# on latents; and in either of two inputs, if the other does not depend on latents.
_LINEAR = frozenset(
    {
        *("add", "add_any", "sub", "neg", "concatenate", "broadcast_in_dim", "reshape", "squeeze"),
        *("transpose", "slice", "rev", "reduce_sum", "cumsum", "copy", "copy_p", "expand_dims"),
    }
)
_LINEAR_IN_FIRST = frozenset({"div", "gather", "dynamic_slice", "pad"})
_LINEAR_IN_EITHER = frozenset({"mul", "dot_general"})

LogLikelihood: TypeAlias = Callable[[Mapping[str, Array], Mapping[str, Array]], Array]
"""``(base, row) -> scalar``, of unconstrained latents and one record; read from shapes alone."""


@dataclass(frozen=True, eq=False)
class Predictor:
    """A record's log likelihood, split at the linear predictor.

    Attributes:
        value: ``(base, row) -> scalar``: the predictor, affine in the unconstrained latents.
        log_likelihood: ``(value, row) -> scalar``: the record's log density given the predictor.
    """

    value: Callable[[Mapping[str, Array], Mapping[str, Array]], Array]
    log_likelihood: Callable[[Array, Mapping[str, Array]], Array]


def scalar_predictor(
    log_likelihood: LogLikelihood, base: Mapping[str, Any], row: PyTree
) -> Predictor | None:
    """Splits a log likelihood at its scalar linear predictor.

    ``None`` if it depends on the latents through more than one number, or not affinely.
    """
    # A cut at variable v is valid if v is an affine scalar function of the latents and nothing
    # after it depends on the latents except through v. The first such v is taken.
    program = programs.traced(log_likelihood, base, row)
    if program is None:  # draws serve there
        return None
    num_latents = len(jax.tree.leaves(base))
    latents = program.jaxpr.invars[:num_latents]
    for cut in _affine_scalars(program, latents):
        if not _depends(program, latents, cut):
            return _split(program, num_latents, cut)
    return None


def _affine_scalars(program: ClosedJaxpr, latents: Sequence[Var]) -> list[Var]:
    """Scalar variables that are affine in the latents, in the program's order."""
    # Every variable that depends on the latents is in one of two sets. An operation keeps its
    # output affine if no input is nonlinear and it is linear in its affine inputs.
    affine = set(latents)
    nonlinear: set[Any] = set()
    found = []
    for eqn in program.jaxpr.eqns:
        knowing = [programs.among(v, affine) or programs.among(v, nonlinear) for v in eqn.invars]
        if not any(knowing):
            continue
        if any(programs.among(v, nonlinear) for v in eqn.invars) or not _is_linear(eqn, knowing):
            nonlinear.update(eqn.outvars)
            continue
        affine.update(eqn.outvars)
        found += [v for v in eqn.outvars if v.aval.size == 1]
    return found


def _is_linear(eqn: JaxprEqn, knowing: Sequence[bool]) -> bool:
    """Whether an operation is linear in those of its inputs that depend on the latents."""
    name = eqn.primitive.name
    # To an integer it rounds, which is not linear.
    if name == "convert_element_type":
        return bool(jnp.issubdtype(eqn.params["new_dtype"], jnp.floating))
    # where(c, a, b) is affine if a and b are, and the record alone decides c.
    if name == "select_n":  # the first input is the condition
        return not knowing[0]
    if name in _LINEAR_IN_FIRST:
        return not any(knowing[1:])
    # A product is linear if one of the two does not know the latents; X * w, but not w * w.
    return name in _LINEAR or (name in _LINEAR_IN_EITHER and sum(knowing) == 1)


def _depends(program: ClosedJaxpr, latents: Sequence[Var], cut: Var) -> bool:
    """Whether the result depends on the latents other than through ``cut``."""
    # If the result can still be reached with that path closed, ``cut`` does not split it.
    knowing = programs.dependent(program, latents, but=cut)
    return any(programs.among(v, knowing) for v in program.jaxpr.outvars)


def _split(program: ClosedJaxpr, num_latents: int, cut: Var) -> Predictor:
    shape = cut.aval.shape  # type: ignore[attr-defined]
    inputs = program.jaxpr.invars
    first = programs.part(program, inputs, cut)
    second = programs.part(program, [cut, *inputs[num_latents:]], program.jaxpr.outvars[0])

    def value(base: Mapping[str, Array], row: Mapping[str, Array]) -> Array:
        # Leaves in the order in which the program was traced: base, then row.
        (number,) = first(*jax.tree.leaves(base), *jax.tree.leaves(row))
        return jnp.reshape(number, ())

    def log_likelihood(value: Array, row: Mapping[str, Array]) -> Array:
        (density,) = second(jnp.reshape(value, shape), *jax.tree.leaves(row))
        return density

    return Predictor(value, log_likelihood)
