"""Coordinates in which the information of an average record is the identity."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_dppvi._typing import Array


class White(NamedTuple):
    """Coordinates z of changes in prior units: ``change = white @ z``, ``z = back @ change``."""

    white: Array
    back: Array

    def known(self, matrix: Array) -> Array:
        """An inverse covariance in these coordinates; of many, on leading axes."""
        return symmetric(turned(self.back, matrix))

    def unknown(self, matrix: Array) -> Array:
        """The same, back in prior units."""
        return symmetric(turned(self.white, matrix))

    def information(self, matrix: Array) -> Array:
        """An information matrix in these coordinates."""
        return symmetric(turned(self.white.T, matrix))

    def outside(self, matrix: Array) -> Array:
        """The same, back in prior units."""
        return symmetric(turned(self.back.T, matrix))


def coordinates(shape: Array) -> White:
    """Coordinates in which the shape is the identity, one column after the other."""
    # By Cholesky's factors: an axis is what a column has beside those before it, so that columns
    # keep apart. Eigenvectors of the shape would mix what noise cannot tell from one another.
    root = jnp.sqrt(jnp.diagonal(shape))
    order = order_of(shape)
    alike = shape / (root[:, None] * root)
    # What is added is more than rounding, which makes no direction's information negative.
    rounding = 3 * len(root) * float(np.finfo(shape.dtype).eps)
    eye = jnp.eye(len(root))
    tril = jnp.linalg.cholesky(alike[order][:, order] + rounding * eye)
    white = jnp.zeros_like(shape).at[order].set(solve_triangular(tril, eye, lower=True).T)
    back = jnp.zeros_like(shape).at[:, order].set(tril.T)
    return White(white / root[:, None], back * root)


def order_of(shape: Array) -> Array:
    """Latents in the order in which coordinates take them."""
    # First come columns that have most in common, the intercept and those far from zero: what
    # little they have of their own would drown in the noise of others that were taken off them.
    root = jnp.sqrt(jnp.diagonal(shape))
    alike = shape / (root[:, None] * root)  # correlations, which are well scaled
    # The diagonal of the fourth power weighs eigenvectors by their eigenvalues' fourth powers.
    common = jnp.sum((alike @ alike) ** 2, axis=1)
    # Columns with as much in common keep the model's order. Were it a matter of the last digits, so
    # would be which noise falls on which of them, and two machines had different runs.
    return jnp.argsort(-jnp.round(common, 5))


def turned(by: Array, matrix: Array) -> Array:
    """``by @ matrix @ by.T``; of many matrices, without moving their axes, which takes longer."""
    if matrix.ndim == 2:
        return by @ matrix @ by.T
    rows = (matrix.reshape(-1, matrix.shape[-1]) @ by.T).reshape(matrix.shape)
    return jnp.broadcast_to(by, matrix.shape) @ rows


def symmetric(matrix: Array) -> Array:
    """Its symmetric part; of many, on leading axes."""
    return (matrix + jnp.swapaxes(matrix, -1, -2)) / 2


def seen(axes: White, unseen: Array) -> Array:
    """The projection, in ``axes``, that takes off a vector what no record sees."""
    basis, _ = jnp.linalg.qr(axes.back @ unseen)
    return jnp.eye(len(unseen)) - basis @ basis.T
