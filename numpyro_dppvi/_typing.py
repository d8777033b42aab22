"""Shape and value aliases shared by every module, and shapes that arrays do not have."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NewType, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
PyTree: TypeAlias = Any
"""Any nesting of dicts, tuples and arrays that JAX can flatten."""

# Trees of the same shape that mean different things: NewType keeps them apart, for mypy alone.
Natural = NewType("Natural", dict[str, Any])
"""Natural parameters of a distribution or factor, by member; may be improper."""

Coordinates = NewType("Coordinates", dict[str, Any])
"""Unconstrained coordinates of a proper distribution, by member: what an optimiser moves."""

Gradient = NewType("Gradient", dict[str, Any])
"""The gradient of a loss in coordinates, by member."""

MemberNatural: TypeAlias = Any
"""One member's natural parameters: a type of its family's own."""

MemberCoordinates: TypeAlias = Any
"""One member's coordinates: a type of its family's own."""

# Arithmetic on factors takes and returns one of these, never a mixture.
Parameters = TypeVar("Parameters", Natural, Coordinates, Gradient)
Tree = TypeVar("Tree")

Model: TypeAlias = Callable[..., Any]
"""A NumPyro model, called as ``model(**data, **model_kwargs)``."""

Records: TypeAlias = Mapping[str, Array]
"""Records by argument name; every array has one entry per record on its leading axis."""


class LowerProduct(NamedTuple):
    """Entries below the diagonal of ``left right'``, row by row, which need not be laid out."""

    left: Array  # of shape ``(..., n)``
    right: Array  # of the same shape

    def laid_out(self) -> Array:
        """The entries, shape ``(..., n (n - 1) / 2)``."""
        rows, columns = np.tril_indices(self.left.shape[-1], -1)
        return self.left[..., rows] * self.right[..., columns]


class RowProduct(NamedTuple):
    """A row for each leading entry, multiplied by a number, which need not be laid out.

    Attributes:
        weights: Of shape ``(...)``.
        rows: Of shape ``(..., *shape)``.
    """

    weights: Array
    rows: Array

    def laid_out(self) -> Array:
        """The entries, in the shape of the rows."""
        missing = self.rows.ndim - jnp.ndim(self.weights)
        return jnp.expand_dims(self.weights, tuple(range(-missing, 0))) * self.rows


class LayerProduct(NamedTuple):
    """Entries ``left_i (sum over m of weights_mij right_mj)``, which need not be laid out."""

    left: Array  # of shape ``(..., n)``
    right: Array  # of shape ``(..., m, k)``
    # Of shape ``(m, n, k)``, the same for all leading axes; ``None`` for ones, with m=1.
    weights: Array | None

    def laid_out(self) -> Array:
        """The entries, shape ``(..., n, k)``."""
        if self.weights is None:
            return self.left[..., :, None] * self.right
        sums = jnp.sum(self.weights * self.right[..., :, None, :], axis=-3)
        return self.left[..., :, None] * sums


class Hits(NamedTuple):
    """Rows that are zero but for one entry at the most, which need not be laid out."""

    weights: Array  # the entries, shape ``(...)``
    places: Array  # where they are, shape ``(..., k)``; what is in no bin is nowhere
    bins: Array  # the numbers from 0 to n - 1, shape ``(..., n)``
    asked: Array  # 1 if there are any, or 0: public, and then nothing is added up

    def laid_out(self) -> Array:
        """The entries, shape ``(..., k, n)``."""
        hit = self.places[..., :, None] == self.bins[..., None, :]
        hit = hit & (self.asked > 0)[..., None, None]
        return jnp.where(hit, self.weights[..., None, None], 0)


Product: TypeAlias = RowProduct | LowerProduct | LayerProduct | Hits
"""What stands in the place of an array that need not be laid out."""


def is_product(leaf: Any) -> bool:
    """Whether a leaf of a tree stands in the place of an array."""
    return isinstance(leaf, Product)


def laid_out(tree: PyTree) -> Any:
    """A tree with arrays in the place of products."""
    return jax.tree.map(
        lambda leaf: leaf.laid_out() if is_product(leaf) else leaf, tree, is_leaf=is_product
    )
