"""Scores of a model of binary outcomes on held-out rows, as the paper reports them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_dppvi.datasets import TabularData

__all__ = ["HeldOut", "held_out", "of_logits"]


class HeldOut(NamedTuple):
    """Scores of a posterior on rows that it has not seen.

    Attributes:
        accuracy: The fraction of rows whose label has a predictive probability above one half.
        mean_log_likelihood: The mean over rows of the log predictive probability of the label, in
            nats.
    """

    accuracy: jax.Array
    mean_log_likelihood: jax.Array


@jax.jit
def held_out(w: jax.Array, X: jax.Array, y: jax.Array) -> HeldOut:
    """Score draws of the weights of a logistic regression.

    Args:
        w: Draws from the posterior, shape `(num_draws, num_features)`.
        X: Features, shape `(num_rows, num_features)`.
        y: Labels in {0, 1}, shape `(num_rows,)`.

    Returns:
        Accuracy and mean log-likelihood, both scalars.
    """
    return of_logits(w @ X.T, y)


def of_logits(logits: jax.Array, y: jax.Array) -> HeldOut:
    """Score draws of the logits of binary outcomes.

    The predictive probability of a label is the mean over draws of its probability,
    p(y | x) = 1/K sum_k sigmoid(logit_k(x)) for y = 1, and the scores are those of this mixture
    (Heikkilä et al. 2023, last display of appendix "experimental details", with K = 100 draws from
    q).

    Args:
        logits: Shape `(num_draws, num_rows)`.
        y: Labels in {0, 1}, shape `(num_rows,)`.

    Returns:
        Accuracy and mean log-likelihood, both scalars.
    """
    # In logarithms throughout: in float32 a sigmoid is 1 from a logit of 17 on, and log(1 - 1) is
    # minus infinity.
    log_num_draws = jnp.log(logits.shape[0])
    log_one = logsumexp(jax.nn.log_sigmoid(logits), axis=0) - log_num_draws
    log_zero = logsumexp(jax.nn.log_sigmoid(-logits), axis=0) - log_num_draws
    return HeldOut(
        accuracy=jnp.mean((log_one > log_zero) == (y == 1)),
        mean_log_likelihood=jnp.mean(jnp.where(y == 1, log_one, log_zero)),
    )


def selection_split(data: TabularData) -> TabularData:
    """Split the training rows again, to choose hyperparameters without the rows that are reported.

    Args:
        data: Data whose training rows are in random order; its held-out rows are left out
            altogether.

    Returns:
        The first four fifths of the training rows as training rows, the last fifth as rows to
        score on.
    """
    num_train = len(data.y_train) * 4 // 5
    return data._replace(
        X_train=data.X_train[:num_train],
        y_train=data.y_train[:num_train],
        X_test=data.X_train[num_train:],
        y_test=data.y_train[num_train:],
    )
