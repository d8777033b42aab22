"""The local optimiser: any optax optimiser inside one scan."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from numpyro_dppvi._typing import Coordinates

Gradient: TypeAlias = Callable[[Any, Coordinates], Coordinates]
"""A function of a step's keys and the coordinates to (an estimate of) the loss's gradient."""


def solve(
    keys: Any,
    start: Coordinates,
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
) -> Coordinates:
    """Runs one optimiser step a key from ``start``, with a fresh optimiser state.

    Args:
        keys: Keys, or a tree of them, with a leading axis of one entry a step; each step's entry
            is handed to ``gradient``.
        start: Where to start.
        gradient: The loss's gradient.
        optimizer: Any optax optimiser.

    Returns:
        The coordinates after the last step.
    """

    def step(
        carry: tuple[Coordinates, optax.OptState], key: Any
    ) -> tuple[tuple[Coordinates, optax.OptState], None]:
        coordinates, state = carry
        updates, state = optimizer.update(gradient(key, coordinates), state, coordinates)
        return (optax.apply_updates(coordinates, updates), state), None

    (end, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    return end
