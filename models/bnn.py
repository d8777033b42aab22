"""Bayesian neural networks: the paper's, by hand, and as modules of Flax with a prior."""

import functools
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.module import random_flax_module, random_nnx_module

__all__ = ["bnn", "linen_bnn", "nnx_bnn"]


def bnn(X: jax.Array, y: jax.Array | None = None, num_hidden: int = 50) -> None:
    """One hidden layer of ReLU units, standard normal weights and biases (paper, Sec. 6.2).

    Args:
        X: Features, shape `(num_records, num_features)`.
        y: Labels in {0, 1}, shape `(num_records,)`; left out, they are drawn.
        num_hidden: Hidden units.
    """
    shapes = {"w1": (X.shape[1], num_hidden), "b1": (num_hidden,), "w2": (num_hidden,), "b2": ()}
    weights = {
        name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
        for name, shape in shapes.items()
    }
    hidden = jax.nn.relu(X @ weights["w1"] + weights["b1"])
    with numpyro.plate("records", X.shape[0]):
        logits = hidden @ weights["w2"] + weights["b2"]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def linen_bnn(X: jax.Array, y: jax.Array | None = None, num_hidden: int = 50) -> None:
    """The same as a module of `flax.linen`. Needs Flax."""
    network = random_flax_module(
        "network", _linen_network(num_hidden), dist.Normal(0, 1), input_shape=(1, X.shape[1])
    )
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=network(X)[:, 0]), obs=y)


def nnx_bnn(X: jax.Array, y: jax.Array | None = None, num_hidden: int = 50) -> None:
    """The same as a module of `flax.nnx`. Needs Flax."""
    network = random_nnx_module("network", _nnx_network(X.shape[1], num_hidden), dist.Normal(0, 1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=network(X)[:, 0]), obs=y)


def _linen_network(num_hidden: int) -> Any:
    from flax import linen

    return linen.Sequential([linen.Dense(num_hidden), jax.nn.relu, linen.Dense(1)])


@functools.cache
def _nnx_network(num_features: int, num_hidden: int) -> Any:
    # Made once, outside of any trace: a module is mutable, and its first weights are not used.
    from flax import nnx

    with jax.ensure_compile_time_eval():
        rngs = nnx.Rngs(0)
        first = nnx.Linear(num_features, num_hidden, rngs=rngs)
        return nnx.Sequential(first, jax.nn.relu, nnx.Linear(num_hidden, 1, rngs=rngs))
