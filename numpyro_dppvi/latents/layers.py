"""Finds latents that a record meets in one product with its own values, as a first layer's weights.

If the likelihood sees a matrix W of latents through x'W alone, x a record's values, then the
gradient in W is x times the gradient in x'W: an outer product, of which the record's values are one
side at whatever W. As with ``latents.predictor``, users declare nothing: it is read off the traced
program.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.latents import programs
from numpyro_dppvi.latents.predictor import LogLikelihood


@dataclass(frozen=True, eq=False)
class FirstLayers:
    """A record's log likelihood, split behind its products with latents.

    Attributes:
        names: Those latents, of shape ``(n,)`` or ``(n, k)``.
        inputs: ``row -> {name: array}``: the record's side x of each product, shape ``(n,)``.
        products: ``(base, row) -> {name: array}``: the products x'W, of shape ``()`` or ``(k,)``.
        log_likelihood: ``(products, rest, row) -> scalar``, of the products and the other latents.
    """

    names: frozenset[str]
    inputs: Callable[[Mapping[str, Array]], dict[str, Array]]
    products: Callable[[Mapping[str, Array], Mapping[str, Array]], dict[str, Array]]
    log_likelihood: Callable[[Mapping[str, Array], Mapping[str, Array], Mapping[str, Array]], Array]


def first_layers(
    log_likelihood: LogLikelihood, base: Mapping[str, Any], row: PyTree
) -> FirstLayers | None:
    """Splits a log likelihood behind products of its record's values with latents, if it can."""
    program = programs.traced(log_likelihood, base, row)
    if program is None:
        return None
    names = sorted(base)  # as JAX orders the leaves of a dictionary
    latents = dict(zip(names, program.jaxpr.invars, strict=False))
    knowing = programs.dependent(program, list(latents.values()))
    layers = {
        name: eqn
        for name, latent in latents.items()
        if (eqn := _only_use(program, latent)) is not None and _is_layer(eqn, latent, knowing)
    }
    return _split(program, names, layers) if layers else None


def _only_use(program: ClosedJaxpr, latent: Var) -> JaxprEqn | None:
    """The one operation that a latent enters, if there is one."""
    uses = [eqn for eqn in program.jaxpr.eqns if any(v is latent for v in eqn.invars)]
    return uses[0] if len(uses) == 1 else None


def _is_layer(eqn: JaxprEqn, latent: Var, knowing: set[Any]) -> bool:
    """Whether an operation is the product of a record's n values with a latent of n rows."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batched = eqn.params["dimension_numbers"]
    side = _side(eqn, latent)
    shape, other = latent.aval.shape, eqn.invars[1 - side]  # type: ignore[attr-defined]
    return (
        len(shape) in (1, 2)
        and tuple(contracted[side]) == (0,)
        and not any(map(len, batched))
        and not programs.among(other, knowing)
        and other.aval.size == shape[0]  # type: ignore[attr-defined]
        and eqn.outvars[0].aval.dtype == latent.aval.dtype  # type: ignore[attr-defined]
    )


def _side(eqn: JaxprEqn, latent: Var) -> int:
    """Which of a product's two inputs a latent is."""
    return 0 if eqn.invars[0] is latent else 1


def _split(
    program: ClosedJaxpr, names: Sequence[str], layers: Mapping[str, JaxprEqn]
) -> FirstLayers:
    latents = dict(zip(names, program.jaxpr.invars, strict=False))
    of_row = program.jaxpr.invars[len(names) :]
    rest = [name for name in names if name not in layers]
    outs = [eqn.outvars[0] for eqn in layers.values()]
    sides = {
        name: programs.part(program, of_row, eqn.invars[1 - _side(eqn, latents[name])])
        for name, eqn in layers.items()
    }
    through = {
        name: programs.part(program, [latents[name], *of_row], eqn.outvars[0])
        for name, eqn in layers.items()
    }
    behind = programs.part(
        program, [*outs, *(latents[name] for name in rest), *of_row], program.jaxpr.outvars[0]
    )

    # The axes of a product, and of a record's side, have length 1 but for those of the latent.
    def inputs(row: Mapping[str, Array]) -> dict[str, Array]:
        leaves = jax.tree.leaves(row)
        return {name: jnp.ravel(run(*leaves)[0]) for name, run in sides.items()}

    def products(base: Mapping[str, Array], row: Mapping[str, Array]) -> dict[str, Array]:
        leaves = jax.tree.leaves(row)
        return {
            name: run(base[name], *leaves)[0].reshape(jnp.shape(base[name])[1:])
            for name, run in through.items()
        }

    def log_likelihood(
        products: Mapping[str, Array], base: Mapping[str, Array], row: Mapping[str, Array]
    ) -> Array:
        shaped = [
            products[name].reshape(out.aval.shape)  # type: ignore[attr-defined]
            for name, out in zip(layers, outs, strict=True)
        ]
        (density,) = behind(*shaped, *(base[name] for name in rest), *jax.tree.leaves(row))
        return density

    return FirstLayers(frozenset(layers), inputs, products, log_likelihood)
