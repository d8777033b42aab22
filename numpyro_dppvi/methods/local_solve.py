"""The local optimiser: any optax optimiser inside one scan, and what it is asked by a visit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi._typing import Array, Coordinates, Gradient, Natural
from numpyro_dppvi.families import MeanField, factors
from numpyro_dppvi.methods import objective

# Adam's, for exact gradients, where the user names no optimiser.
NOISELESS_LEARNING_RATE = 0.05

GradientFn: TypeAlias = Callable[[Any, Coordinates], Gradient]
"""A function of a step's keys and the coordinates to (an estimate of) the loss's gradient."""


def solve(
    keys: Any, start: Coordinates, gradient: GradientFn, optimizer: optax.GradientTransformation
) -> Coordinates:
    """Runs one optimiser step a key from ``start``, with a fresh optimiser state.

    A step whose gradient is not finite is not taken, as in NumPyro's ``SVI`` with
    ``stable_update``: one draw from the tail of a wide q can overflow where the next ones do not.
    If the last step was not taken, the result is NaN, and so is that of a diverged solve.

    ``keys`` may be a tree of them; each step's entry on the leading axis is handed to ``gradient``.
    """

    def step(
        carry: tuple[Coordinates, optax.OptState], key: Any
    ) -> tuple[tuple[Coordinates, optax.OptState], Array]:
        coordinates, state = carry
        slope = gradient(key, coordinates)
        # Moments of a step that is not taken are dropped with it: one NaN would stay in them for
        # ever.
        updates, state = optimizer.update(slope, state, coordinates)
        after = optax.apply_updates(coordinates, updates), state
        finite = factors.is_finite((slope, after[0]))
        return factors.select(finite, after, carry), finite

    (end, _), finite = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    return jax.tree.map(lambda leaf: jnp.where(finite[-1], leaf, jnp.nan), end)


class Solver(Protocol):
    """How a local problem is solved, and in which units its solution is clipped and noised."""

    def change(
        self, family: MeanField, q: Natural, own: Natural, keys: Any, records_gradient: GradientFn
    ) -> Natural:
        """The change from ``q`` to the solution; NaN where the solve failed.

        Args:
            family: The family of q.
            q: The current approximation.
            own: What is divided out of q for the cavity.
            keys: Keys, or a tree of them, with a leading axis of one entry per step.
            records_gradient: The gradient of the record losses in q's coordinates.
        """

    def measured(self, family: MeanField, q: Natural, change: Natural) -> Natural:
        """A change in the units in which it is clipped and noised: a linear function of it."""

    def unmeasured(self, family: MeanField, q: Natural, measured: Natural) -> Natural:
        """Inverse of :meth:`measured`."""

    def repaired_whole(self, family: MeanField, refined: frozenset[str]) -> frozenset[str]:
        """Members whose entries lose their location where their precision had to be repaired."""


@dataclass(frozen=True)
class Descent:
    """Steps of an optax optimiser in coordinates; lengths are those of natural parameters.

    Args:
        optimizer: Any optax optimiser.
    """

    optimizer: optax.GradientTransformation

    def change(
        self, family: MeanField, q: Natural, own: Natural, keys: Any, records_gradient: GradientFn
    ) -> Natural:
        """As of :class:`Solver`; the cavity's and the entropy's gradients are exact."""
        cavity = factors.divide(q, own)

        def gradient(keys: Any, coordinates: Coordinates) -> Gradient:
            # No record enters these terms: they need no clip and get no noise.
            free = jax.grad(objective.cavity_loss, argnums=2)(family, cavity, coordinates)
            return jax.tree.map(jnp.add, free, records_gradient(keys, coordinates))

        end = solve(keys, family.coordinates(q), gradient, self.optimizer)
        # Factors multiply in natural parameters. Steps are taken in coordinates, where a precision
        # cannot become negative and Adam converges in reasonable time (docs/design.md).
        return factors.divide(family.natural(end), q)

    def measured(self, family: MeanField, q: Natural, change: Natural) -> Natural:
        """The change itself."""
        return change

    unmeasured = measured

    def repaired_whole(self, family: MeanField, refined: frozenset[str]) -> frozenset[str]:
        """Those of hierarchies, whose refined prior would follow (``server.merge``)."""
        return refined
