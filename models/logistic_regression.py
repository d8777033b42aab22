"""Bayesian logistic regression, the model of the paper's experiments on Adult."""

import jax
import numpyro
import numpyro.distributions as dist

__all__ = ["logistic_regression"]


def logistic_regression(X: jax.Array, y: jax.Array | None = None) -> None:
    """Logistic regression with a standard normal prior on every weight.

    Args:
        X: Features, shape `(num_records, num_features)`, a column of ones for the bias among them.
        y: Labels in {0, 1}, shape `(num_records,)`; left out, they are drawn.
    """
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
