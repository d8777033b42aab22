"""White coordinates: natural parameters in units in which the Fisher information is the identity.

Let F be the Fisher information of the natural parameters at q, that is, the covariance of the
statistics, and F = L L'. The white coordinates of a change d are L' d. Their squared length is
d' F d, to second order twice the Kullback-Leibler divergence between q and q times the change. So
they are dimensionless: a change of length 0.1 moves q by a tenth of a standard deviation, whatever
the scale of a latent and the precision of q.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import solve_triangular

from numpyro_dppvi._typing import Array, Coordinates, MemberCoordinates, MemberNatural, Natural
from numpyro_dppvi.families.base import WhiteFamily
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.dirichlet import Dirichlet
from numpyro_dppvi.families.mean_field import MeanField

Weights: TypeAlias = Mapping[str, Array]


def whiten(family: MeanField, coordinates: Coordinates, change: Natural) -> Natural:
    """The white coordinates of a change.

    Args:
        family: The family of q.
        coordinates: The coordinates of q.
        change: Natural parameters of any factor, proper or not.

    Returns:
        A tree in the shapes of the change. Its squared norm is the variance under q of the
        logarithm of the factor.
    """

    def of(member: Any, at: MemberCoordinates, change: MemberNatural) -> MemberNatural:
        if isinstance(member, WhiteFamily):
            return member.whitened(at, change)
        return _by_entry(member, at, change, lambda root, d: root.T @ d)

    return Natural({n: of(member, coordinates[n], change[n]) for n, member in family.members})


def unwhiten(family: MeanField, coordinates: Coordinates, white: Natural) -> Natural:
    """Inverse of :func:`whiten`; linear in ``white``."""

    def of(member: Any, at: MemberCoordinates, white: MemberNatural) -> MemberNatural:
        if isinstance(member, WhiteFamily):
            return member.unwhitened(at, white)
        # white = L' d
        return _by_entry(member, at, white, lambda r, w: solve_triangular(r, w, 1, lower=True))

    return Natural({n: of(member, coordinates[n], white[n]) for n, member in family.members})


def weighted(white: Natural, location: Weights, spread: float) -> Natural:
    """Weights the parts of white coordinates that move a normal's location and its spread."""
    # Coordinates of other families do not separate this way and are kept.
    return Natural(
        {
            name: NormalNatural(location[name] * part.linear, spread * part.quadratic)
            if name in location
            else part
            for name, part in white.items()
        }
    )


def axis_variances(family: MeanField, coordinates: Coordinates) -> Weights:
    """The variance of q along the axis of each white location coordinate, by normal member."""
    return {
        name: member.axis_variances(coordinates[name])
        for name, member in family.members
        if isinstance(member, WhiteFamily)
    }


def _by_entry(
    member: Any,
    coordinates: MemberCoordinates,
    change: MemberNatural,
    apply: Callable[[Array, Array], Array],
) -> MemberNatural:
    """Applies a function of the information's Cholesky factor and a change to every entry."""
    # Entries are independent, so F is block diagonal with a small block per entry: the Hessian of
    # the log partition.
    # A Dirichlet's entry is a whole simplex; all other families' entries are numbers.
    event = 1 if isinstance(member, Dirichlet) else 0
    batch = member.shape[: len(member.shape) - event]
    one = dataclasses.replace(member, shape=member.shape[len(batch) :])

    def of_entry(natural: MemberNatural, change: MemberNatural) -> MemberNatural:
        # The Hessian of A is the covariance of the statistics. It is at most two by two, or of the
        # size of a simplex.
        flat, unravel = ravel_pytree(natural)
        information = jax.hessian(lambda x: one.log_partition(unravel(x)))(flat)
        return unravel(apply(jnp.linalg.cholesky(information), ravel_pytree(change)[0]))

    def entries(tree: MemberNatural) -> MemberNatural:
        number = math.prod(batch)
        return jax.tree.map(lambda leaf: leaf.reshape(number, *leaf.shape[len(batch) :]), tree)

    found = jax.vmap(of_entry)(entries(member.natural(coordinates)), entries(change))
    return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), found, change)
