"""The local optimiser: any optax optimiser inside one scan."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from numpyro_dppvi._typing import Array, Coordinates
from numpyro_dppvi.families import factors

Gradient: TypeAlias = Callable[[Any, Coordinates], Coordinates]
"""A function of a step's keys and the coordinates to (an estimate of) the loss's gradient."""


def solve(
    keys: Any,
    start: Coordinates,
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
) -> Coordinates:
    """Runs one optimiser step a key from ``start``, with a fresh optimiser state.

    A step whose gradient is not finite is not taken, as in NumPyro's ``SVI`` with
    ``stable_update``: one draw from the tail of a wide q can overflow where the next ones do not.

    Args:
        keys: Keys, or a tree of them, with a leading axis of one entry a step; each step's entry
            is handed to ``gradient``.
        start: Where to start.
        gradient: The loss's gradient.
        optimizer: Any optax optimiser.

    Returns:
        The coordinates after the last step; NaN if that one was not taken, as after a solve that
        has diverged none is.
    """

    def step(
        carry: tuple[Coordinates, optax.OptState], key: Any
    ) -> tuple[tuple[Coordinates, optax.OptState], Array]:
        coordinates, state = carry
        slope = gradient(key, coordinates)
        updates, state = optimizer.update(slope, state, coordinates)
        after = optax.apply_updates(coordinates, updates), state
        finite = factors.is_finite((slope, after[0]))
        return factors.select(finite, after, carry), finite

    (end, _), finite = jax.lax.scan(step, (start, optimizer.init(start)), keys)
    return jax.tree.map(lambda leaf: jnp.where(finite[-1], leaf, jnp.nan), end)
