"""Kinds of clients: of those who are alike in all that a matrix is made of, it is made once.

How much is known of a client's scores is a function of its records' number, of its noise and of its
visits. Among ten thousand clients of one or two sizes, visited side by side, solving for each by
itself took more than half of the server's time. Where all differ nothing is saved, and little lost.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_dppvi._device import on_cpu
from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi.families.full_normal import unpack

# Kinds at a time. So few clients are not compared: each is a kind. On an accelerator more of them
# take hardly longer.
_AT_ONCE, _ON_ACCELERATOR = 64, 1024


class Kinds(NamedTuple):
    """Kinds of clients who are alike and next to one another."""

    # The first client of each kind, behind which come others until a multiple of those at a time is
    # full.
    first: Array
    of_client: Array  # each client's kind
    number: Array | None  # how many kinds there are; ``None`` where each client is one

    def of_first(self, function: Callable[..., Array], *rows: Array) -> Array:
        """A function of rows of clients, for the first of each kind; zeros where none is."""

        def some(turn: Array) -> Array:
            (places,) = _some(turn, self.first)
            return function(*[leaf[places] for leaf in rows])

        return function(*rows) if self.number is None else self._in_turn(some, self.number)

    def of_each(self, function: Callable[..., Array], *rows: Array) -> Array:
        """A function of what :meth:`of_first` found; arguments as there, but rows of kinds."""
        if self.number is None:
            return function(*rows)
        return self._in_turn(lambda turn: function(*_some(turn, *rows)), self.number)

    def _in_turn(self, some: Callable[[Array], Array], number: Array) -> Array:
        """What ``some`` returns for so many kinds at each turn, for as many turns as there are."""
        like = jax.eval_shape(some, jnp.zeros((), int))
        nothing = jnp.zeros((self.first.size, *like.shape[1:]), like.dtype)

        def more(turn: Array, found: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(found, some(turn), turn * _at_once(), 0)

        return jax.lax.fori_loop(0, -(-number // _at_once()), more, nothing)

    def total(self, function: Callable[..., PyTree], *rows: Array) -> PyTree:
        """The sum over kinds of a function that adds up those it is given; arguments as there.

        Rows behind the last kind are taken, too: they have to add nothing.
        """
        if self.number is None:
            return function(*rows)

        def some(turn: Array) -> PyTree:
            return function(*_some(turn, *rows))

        like = jax.eval_shape(some, jnp.zeros((), int))
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        return jax.lax.fori_loop(
            0,
            -(-self.number // _at_once()),
            lambda turn, found: jax.tree.map(jnp.add, found, some(turn)),
            nothing,
        )

    def times(self, packed: Array, vectors: Array) -> Array:
        """Of each client its kind's matrix, which is symmetric and packed, times its own vector."""

        def product(kind: Array, vector: Array) -> Array:
            return unpack(packed[kind]) @ vector

        if self.number is None:
            return jax.vmap(product)(self.of_client, vectors)
        # A matrix for each client at a time would be more memory than all that is remembered.
        return jax.lax.map(
            lambda pair: product(*pair), (self.of_client, vectors), batch_size=_at_once()
        )

    def sums(self, rows: Array) -> Array:
        """Sums of clients' rows by kind."""
        if self.number is None:
            return rows
        return jax.ops.segment_sum(rows, self.of_client, self.first.size, indices_are_sorted=True)

    def clients(self, rows: Array) -> Array:
        """Of each client what was found of its kind."""
        return rows if self.number is None else rows[self.of_client]


def of(*rows: Array) -> Kinds:
    """Kinds of clients whose rows are the same to the last bit."""
    # Only neighbours are compared: who cuts records into parts of two sizes has them in two rows.
    everyone = jnp.arange(rows[0].shape[0])
    if everyone.size <= _at_once():
        return Kinds(everyone, everyone, None)
    begins = jnp.zeros(everyone.size - 1, bool)
    for leaf in rows:
        begins |= jnp.any(leaf[1:] != leaf[:-1], axis=tuple(range(1, leaf.ndim)))
    of_client = jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(begins)])
    places = jnp.arange(everyone.size + -everyone.size % _at_once())
    first = jnp.minimum(jnp.searchsorted(of_client, places), everyone.size - 1)
    return Kinds(first, of_client, of_client[-1] + 1)


def _some(turn: Array, *rows: Array) -> list[Array]:
    at_once = _at_once()
    return [jax.lax.dynamic_slice_in_dim(leaf, turn * at_once, at_once) for leaf in rows]


def _at_once() -> int:
    return _AT_ONCE if on_cpu() else _ON_ACCELERATOR
