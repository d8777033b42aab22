"""Scores of held-out records, and what methods are compared with: Laplace's approximation without
privacy, and one party's private gradient descent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import log_likelihood
from numpyro.infer.util import potential_energy
from optax.contrib import differentially_private_aggregate
from scipy.optimize import minimize
from scipy.special import logsumexp

import numpyro_dppvi as dppvi
from benchmarks.battery.designs import Problem
from numpyro_dppvi.privacy import FullBatch
from numpyro_dppvi.privacy.calibrate import noise_multiplier

NUM_DRAWS = 400
NUM_NOISES = 20  # releases over which the limit is a mean
DELTA = 1e-5
# Central private gradient descent: full batches, gradients of records clipped at the root of the
# number of latents, plain steps, the mean of the last half of the iterates. Of six settings (clips
# of 1 and of that root, three rates each) this was the best over the chosen half.
CENTRAL_STEPS, CENTRAL_RATE = 100, 0.2
# Where searches begin: at logits of exactly 0, NumPyro's Bernoulli has a wrong gradient.
_START = 1e-3
# Held-out records that are scored at a time.
_ROWS = 4096

Records = Mapping[str, Any]


def held_out(task: Problem, draws: Records) -> float:
    """Mean log predictive density of the held-out records, in standardised units.

    Args:
        task: The set.
        draws: Values of the latents, with a leading axis.
    """
    total = float(np.sum(task.constant))
    for start in range(0, len(task.constant), _ROWS):
        part = {name: found[start : start + _ROWS] for name, found in task.held_out.items()}
        sites = log_likelihood(task.model, dict(draws), **part, **task.kwargs)
        density = np.sum([np.asarray(site, np.float64) for site in sites.values()], axis=0)
        # At a draw whose rate overflows, a count's density is inf - inf: it is impossible there.
        density = np.where(np.isnan(density), -np.inf, density)
        total += float(np.sum(logsumexp(density, axis=0) - np.log(len(density))))
    return total / len(task.constant)


def fitted(
    task: Problem, clients: list[Records], epsilon: float, seed: int, arguments: Mapping[str, Any]
) -> tuple[float, str]:
    """Fits with the library.

    Args:
        task: The set.
        clients: Their records.
        epsilon: The budget's.
        seed: Of the run and of its noise.
        arguments: Others of ``fit``.

    Returns:
        The score, and how the run ended.
    """
    result = dppvi.fit(
        task.model,
        None,
        clients,
        rng_key=jax.random.key(seed),
        budget=dppvi.PrivacyBudget(epsilon, DELTA),
        model_kwargs=task.kwargs,
        progress_bar=False,
        insecure_noise_seed=seed,
        **arguments,
    )
    draws = result.posterior.sample(jax.random.key(1), (NUM_DRAWS,))
    return held_out(task, draws), str(result.status)


class _Flat(NamedTuple):
    """A model of one vector: its latents without constraints, side by side.

    Attributes:
        loss: Negative log joint density of the vector and records.
        record_loss: Negative log likelihood of the vector on records.
        latents: Values of the latents.
        zero: The vector of zeros.
    """

    loss: Callable[[jax.Array, Records], jax.Array]
    record_loss: Callable[[jax.Array, Records], jax.Array]
    latents: Callable[[jax.Array], dict[str, jax.Array]]
    zero: jax.Array


def _flat(task: Problem) -> _Flat:
    one = {name: rows[:1] for name, rows in task.train.items()}
    trace = handlers.trace(handlers.seed(task.model, 0)).get_trace(**one, **task.kwargs)
    sites = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    bijections = {name: biject_to(site["fn"].support) for name, site in sites.items()}
    zero, unravel = ravel_pytree(
        {name: jnp.zeros(np.shape(s["value"])) for name, s in sites.items()}
    )

    def latents(vector: jax.Array) -> dict[str, jax.Array]:
        return {name: bijections[name](value) for name, value in unravel(vector).items()}

    def loss(vector: jax.Array, records: Records) -> jax.Array:
        return potential_energy(task.model, (), {**records, **task.kwargs}, unravel(vector))

    def record_loss(vector: jax.Array, records: Records) -> jax.Array:
        found = log_likelihood(task.model, latents(vector), batch_ndims=0, **records, **task.kwargs)
        return -sum((jnp.sum(site) for site in found.values()), start=jnp.zeros(()))

    return _Flat(loss, record_loss, latents, zero)


def _mode(flat: _Flat, records: Records) -> tuple[np.ndarray, np.ndarray]:
    """The most probable vector, and the precision there.

    Raises:
        ArithmeticError: If it was not found.
    """
    value = jax.jit(jax.value_and_grad(lambda vector: flat.loss(vector, records)))
    hessian = jax.jit(jax.hessian(lambda vector: flat.loss(vector, records)))
    found = minimize(
        lambda vector: tuple(np.asarray(part) for part in value(vector)),
        np.asarray(flat.zero) + _START,
        jac=True,
        hess=lambda vector: np.asarray(hessian(vector)),
        method="trust-exact",
        options={"gtol": 1e-4, "maxiter": 500},
    )
    precision = np.asarray(hessian(found.x))
    gap = found.jac @ np.linalg.solve(precision, found.jac) / 2
    if not gap < 1e-4:
        raise ArithmeticError(f"the mode was not found: {found.message} {gap:.3g} nats away.")
    return found.x, precision


def _in_double(records: Records) -> Records:
    return {
        name: rows.astype(np.float64) if rows.dtype == np.float32 else rows
        for name, rows in records.items()
    }


def laplace(task: Problem, records: Records, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws from Laplace's approximation at the mode, in double precision and without privacy."""
    with jax.enable_x64(True):
        records = _in_double(records)
        flat = _flat(task)
        mode, precision = _mode(flat, records)
        normal = np.random.default_rng(seed).normal(size=(len(mode), NUM_DRAWS))
        vectors = mode + np.linalg.solve(np.linalg.cholesky(precision).T, normal).T
        draws = jax.vmap(flat.latents)(jnp.asarray(vectors))
    return {name: np.asarray(values, np.float32) for name, values in draws.items()}


def _central_clip(num_latents: int) -> float:
    return num_latents**0.5


def limit(task: Problem, split: Sequence[float], epsilon: float) -> float:
    """The score that a budget allows at best, mean over noise.

    Every client releases, with its whole budget and once, the sum of its records' scores at the
    mode of all records without privacy, clipped at the average score's length d^(1/2) in
    coordinates in which the average record's information is the identity; all of it is known
    beforehand and nothing is bent. Then noise has r^2 = z^2 d M / N times the variance of the
    location without privacy, with noise multiplier z, M clients and N records, and what it leaves
    of the information J is J / (1 + r^2). No method that does not know the mode can count on it.

    Args:
        task: The set.
        split: The clients' shares of the records.
        epsilon: Their budget.
    """
    num_records = len(task.train["x"])
    noise = noise_multiplier(
        dppvi.PrivacyBudget(epsilon, DELTA),
        num_releases=1,
        sampler=FullBatch(),
        num_records=num_records,
        physical_size=num_records,
    )
    with jax.enable_x64(True):
        records = _in_double(task.train)
        flat = _flat(task)
        mode, precision = _mode(flat, records)
        gradient = jax.grad(lambda vector: flat.record_loss(vector, records))
        info = np.asarray(jax.jit(jax.jacfwd(gradient))(mode))
        pull = np.asarray(jax.jit(gradient)(mode))
        left = 1 / (1 + noise**2 * len(mode) * len(split) / num_records)
        # At the mode the prior's gradient is minus the records', of which noise leaves a part.
        covariance = np.linalg.inv(precision - (1 - left) * info)
        root, spread = np.linalg.cholesky(covariance), np.sqrt(1 / left - 1)
        # Noise of covariance r^2 J^-1 on the mode of the records' likelihood: J r J^(-1/2) e.
        values, vectors = np.linalg.eigh(info)  # columns may repeat others
        noisy = left * spread * vectors * np.sqrt(np.maximum(values, 0))
        rng, found = np.random.default_rng(0), []
        latents = jax.jit(jax.vmap(flat.latents))
        for _ in range(NUM_NOISES):
            mean = mode + covariance @ ((1 - left) * pull + noisy @ rng.normal(size=len(mode)))
            draws = mean + rng.normal(size=(NUM_DRAWS, len(mode))) @ root.T
            found.append(held_out(task, jax.tree.map(np.asarray, latents(draws))))
    return float(np.mean(found))


def central(task: Problem, epsilon: float, seed: int) -> dict[str, jax.Array]:
    """The mode by private gradient descent on pooled records: one draw, without spread."""
    flat = _flat(task)
    zero = flat.zero
    num_records, clip = len(task.train["x"]), _central_clip(len(zero))
    noise = noise_multiplier(
        dppvi.PrivacyBudget(epsilon, DELTA),
        num_releases=CENTRAL_STEPS,
        sampler=FullBatch(),
        num_records=num_records,
        physical_size=num_records,
    )
    rows = {name: jnp.asarray(found)[:, None] for name, found in task.train.items()}
    by_record = jax.vmap(jax.grad(flat.record_loss), (None, 0))
    first = {name: found[:1] for name, found in task.train.items()}

    def prior_loss(vector: jax.Array) -> jax.Array:
        return flat.loss(vector, first) - flat.record_loss(vector, first)

    @jax.jit
    def run(noise: jax.Array, key: jax.Array, rows: Records) -> jax.Array:
        private = differentially_private_aggregate(clip, noise, key)
        descent = optax.sgd(CENTRAL_RATE)

        def step(carry: Any, _: None) -> Any:
            vector, states = carry
            mean, noisy = private.update(by_record(vector, rows), states[0])
            gradient = mean + jax.grad(prior_loss)(vector) / num_records
            update, plain = descent.update(gradient, states[1])
            vector = vector + update
            return (vector, (noisy, plain)), vector

        start = (zero + _START, (private.init(zero), descent.init(zero)))
        return jax.lax.scan(step, start, length=CENTRAL_STEPS)[1]

    path = run(jnp.float32(noise), jax.random.key(seed), rows)
    return jax.tree.map(lambda leaf: leaf[None], flat.latents(path[CENTRAL_STEPS // 2 :].mean(0)))
