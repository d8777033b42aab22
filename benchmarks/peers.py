"""The same work as others do it, to be timed in turns with ours.

NumPyro's SVI without privacy; one model by hand in NumPy; and, where they are installed
(``pip install numpyro-dppvi[peers]``), per-record clipping by ``torch.func`` and by Opacus.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpyro.optim
from numpyro.infer import SVI, Trace_ELBO

DRAWS, CLIP = 10, 2.5
HIDDEN = 50

Run = Callable[[], Any]


def has_torch() -> bool:
    """Whether the peers that need PyTorch can be run."""
    return all(importlib.util.find_spec(name) for name in ("torch", "opacus"))


def _where() -> str:
    """PyTorch's name of what JAX runs on."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def one_by_one(runs: list[Run]) -> Run:
    """Client after client."""

    def run() -> Any:
        return [each() for each in runs]

    return run


def svi(model: Any, guide: Any, records: dict[str, Any], steps: int) -> Run:
    """Steps of NumPyro's SVI with ten particles, in one program: no clipping, no noise."""
    inference = SVI(model, guide(model), numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=DRAWS))
    first = inference.init(jax.random.key(0), **records)

    def several(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: inference.update(s, **records), state, length=steps)

    return functools.partial(jax.jit(several), first)


def by_hand(X: np.ndarray, y: np.ndarray, sizes: list[int], steps: int, prob: float) -> Run:
    """Steps of logistic regression on batches, in NumPy: ten draws, clipped by record."""

    def run() -> None:
        rng = np.random.default_rng(0)
        ends = np.cumsum(sizes)
        for rows, targets in zip(np.split(X, ends[:-1]), np.split(y, ends[:-1]), strict=True):
            _numpy_visit(rng, rows, targets, steps, prob)

    return run


def _numpy_visit(rng: Any, X: np.ndarray, y: np.ndarray, steps: int, prob: float) -> None:
    # One knows that a record's gradient is a residual times its row. Adam is left out.
    loc, scale = np.zeros(X.shape[1], np.float32), np.ones(X.shape[1], np.float32)
    for _ in range(steps):
        batch = rng.choice(len(X), round(prob * len(X)), replace=False)
        noise = rng.standard_normal((DRAWS, len(loc)), np.float32)
        residual = 1 / (1 + np.exp(-X[batch] @ (loc + scale * noise).T)) - y[batch, None]
        by_loc = X[batch] * residual.mean(axis=1, keepdims=True)
        by_scale = X[batch] * (residual @ noise) / DRAWS * scale
        norms = np.sqrt((by_loc**2).sum(axis=1) + (by_scale**2).sum(axis=1))
        weights = np.minimum(1, CLIP / norms)
        loc -= 1e-5 * (weights @ by_loc + rng.standard_normal(len(loc), np.float32))
        scale -= 1e-5 * (weights @ by_scale + rng.standard_normal(len(loc), np.float32))


def torch_func(kind: str, X: np.ndarray, y: np.ndarray, steps: int, prob: float = 1.0) -> Run:
    """Private variational steps: gradients of every record by ``torch.func.vmap(grad)``.

    Location and log standard deviation of all weights, ten draws that records share, one joint
    norm, 32-bit sums and noise.
    """
    import torch
    from torch.func import grad, vmap

    torch.set_default_device(_where())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows, targets = torch.tensor(X), torch.tensor(y, dtype=torch.float32)
    size = X.shape[1] if kind == "logistic" else X.shape[1] * HIDDEN + 2 * HIDDEN + 1

    def logit(w: Any, x: Any) -> Any:
        if kind == "logistic":
            return w @ x
        cut = X.shape[1] * HIDDEN
        first = w[:cut].reshape(HIDDEN, X.shape[1])
        return torch.relu(first @ x + w[cut : cut + HIDDEN]) @ w[cut + HIDDEN : -1] + w[-1]

    def loss(at: Any, noise: Any, x: Any, target: Any) -> Any:
        draws = at[0] + torch.exp(at[1]) * noise
        logits = vmap(logit, (0, None))(draws, x)
        return (torch.nn.functional.softplus(logits) - target * logits).mean()

    each = vmap(grad(loss), (None, None, 0, 0))

    def run() -> Any:
        at = torch.zeros(2, size)
        for _ in range(steps):
            batch = torch.rand(len(rows)) < prob
            gradients = []
            chosen = rows[batch].split(4096 if kind == "logistic" else 256)
            aims = targets[batch].split(len(chosen[0]))
            noise = torch.randn(DRAWS, size)
            for x, target in zip(chosen, aims, strict=True):
                of_rows = each(at, noise, x, target)
                norms = of_rows.flatten(1).norm(dim=1)
                gradients.append(torch.einsum("n,nij->ij", (CLIP / norms).clamp(max=1), of_rows))
            at = at - 1e-5 * (sum(gradients) + torch.randn(2, size))
        return at.cpu()  # waits for a GPU

    return run


def opacus(kind: str, X: np.ndarray, y: np.ndarray, steps: int) -> Run:
    """Steps of DP-SGD on a point, not a posterior: full batches, clipped and noised by Opacus."""
    import torch
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.set_default_device(_where())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows, targets = torch.tensor(X), torch.tensor(y, dtype=torch.float32)[:, None]
    network = torch.nn.Linear(X.shape[1], 1, bias=False)
    if kind == "network":
        layers = torch.nn.Linear(X.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        network = torch.nn.Sequential(*layers)
    private = GradSampleModule(network)
    optimizer = DPOptimizer(
        torch.optim.SGD(private.parameters(), 1e-5),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(rows),
    )

    def run() -> Any:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = private(rows)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, targets).backward()
            optimizer.step()
        return next(network.parameters()).cpu()  # waits for a GPU

    return run
