"""Every example model: partitioned inference without privacy against SVI and NUTS.

    python -m benchmarks examples

For each model the posterior over 1, 5 and 50 clients is compared with the one of NumPyro's SVI
under the same guide (``AutoNormal``), latent by latent in unconstrained space: the largest shift of
a mean, in posterior standard deviations, and the largest ratio of standard deviations less one.
Against NUTS, which is no normal distribution, means of the latents in their supports are compared.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from models.examples import EXAMPLES, Example
from numpyro_dppvi.records import stack_clients

CLIENTS = (1, 5, 50)
DRAWS = 64

SLOW = ("decentred hierarchy", "horseshoe", "smooth curve")
"""Posteriors with ridges, along which mean-field factors move only a little in a round."""


class Phase(NamedTuple):
    """Rounds with one rate of Adam, which falls by half four times in every visit."""

    num_rounds: int
    num_local_steps: int
    learning_rate: float
    damping: float


PHASES = (Phase(30, 100, 0.05, 0.5), Phase(10, 100, 0.01, 0.5))
LONG = (Phase(600, 100, 0.02, 1.0), Phase(200, 200, 0.005, 1.0), Phase(100, 200, 0.001, 1.0))

Marginals = dict[str, tuple[np.ndarray, np.ndarray]]


def pvi(
    example: Example, clients: int, phases: Sequence[Phase] = PHASES
) -> dppvi.posterior.Posterior:
    """Partitioned inference without privacy; a phase goes on from the factors of the last one."""
    records = {name: np.asarray(jnp.asarray(rows)) for name, rows in example.records.items()}
    num_records = len(next(iter(records.values())))
    parts = np.array_split(np.arange(num_records), clients)
    shards = stack_clients([{n: rows[part] for n, rows in records.items()} for part in parts])
    key, state = jax.random.key(0), None
    for phase in phases:
        # The rate falls within a visit, so that the noise of the draws does not stay in factors.
        rate = optax.exponential_decay(phase.learning_rate, phase.num_local_steps // 4, 0.5)
        method = dppvi.NonPrivate(
            phase.num_local_steps, optax.adam(rate), dppvi.methods.Automatic(DRAWS)
        )
        algorithm = dppvi.pvi(
            example.model,
            None,
            records,
            method=method,
            client_sizes=[len(part) for part in parts],
            damping=phase.damping,
            model_kwargs=example.model_kwargs,
        )
        state = algorithm.init(key) if state is None else state
        for _ in range(phase.num_rounds):
            state, _ = algorithm.step(key, state, shards)
    return algorithm.posterior(state)


def svi(example: Example, num_steps: int = 8000, num_averaged: int = 2000) -> Marginals:
    """NumPyro's SVI with ``AutoNormal``: unconstrained means and standard deviations.

    Its last iterates are averaged: one of them is off by some hundredths of a standard deviation.
    """
    guide = AutoNormal(example.model, init_loc_fn=init_to_median, init_scale=0.1)
    falls = {3 * num_steps // 8: 0.2, 6 * num_steps // 8: 0.2}
    rate = optax.piecewise_constant_schedule(0.05, falls)
    inference = SVI(example.model, guide, optax.adam(rate), Trace_ELBO(num_particles=DRAWS))
    arguments = {**example.records, **example.model_kwargs}
    run = inference.run(jax.random.key(1), num_steps, **arguments, progress_bar=False)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state, _ = inference.update(state, **arguments)
        return state, inference.get_params(state)

    _, iterates = jax.jit(lambda s: jax.lax.scan(step, s, length=num_averaged))(run.state)
    params = jax.tree.map(lambda leaf: np.asarray(leaf).mean(axis=0), iterates)
    names = [name[: -len("_auto_loc")] for name in params if name.endswith("_auto_loc")]
    return {name: (params[f"{name}_auto_loc"], params[f"{name}_auto_scale"]) for name in names}


def nuts(example: Example) -> dict[str, np.ndarray]:
    """Draws from NUTS, by latent."""
    kernel = NUTS(example.model, init_strategy=init_to_median)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(2), **example.records, **example.model_kwargs)
    return {name: np.asarray(draws) for name, draws in mcmc.get_samples().items()}


def marginals(posterior: dppvi.posterior.Posterior) -> Marginals:
    """Unconstrained means and standard deviations by latent."""
    coordinates = posterior.family.coordinates(posterior.natural)
    return {
        name: (np.asarray(c.loc), np.asarray(jnp.exp(c.log_scale)))
        for name, c in coordinates.items()
    }


def difference(found: Marginals, reference: Marginals) -> tuple[float, float]:
    """The largest shift of a mean in posterior sds, and the largest change of an sd in percent."""
    shifts = [np.abs((found[n][0] - loc) / sd).max() for n, (loc, sd) in reference.items()]
    ratios = [np.abs(found[n][1] / sd - 1).max() for n, (_, sd) in reference.items()]
    return float(max(shifts)), 100 * float(max(ratios))


def from_nuts(posterior: dppvi.posterior.Posterior, draws: dict[str, np.ndarray]) -> float:
    """The largest shift of a latent's mean from NUTS, in NUTS's standard deviations."""
    mine = posterior.sample(jax.random.key(3), (4000,))
    shifts = [
        np.abs(np.mean(mine[name], axis=0) - draws[name].mean(axis=0))
        / np.maximum(draws[name].std(axis=0), 1e-9)
        for name in posterior.names
    ]
    return float(max(np.max(shift[np.isfinite(shift)]) for shift in shifts))


def table(names: tuple[str, ...] = tuple(EXAMPLES)) -> None:
    """One line a model."""
    numpyro.enable_x64(False)
    head = "".join(f"{f'{m} clients':>16}" for m in CLIENTS)
    print("\nLargest shift of a mean (sd) / change of an sd (%) against SVI; shift against NUTS")
    print(f"{'':<30}{head}{'NUTS':>10}")
    for name in names:
        example = EXAMPLES[name]
        reference = svi(example)
        phases = LONG if name in SLOW else PHASES
        posteriors = [pvi(example, clients, phases) for clients in CLIENTS]
        cells = [difference(marginals(p), reference) for p in posteriors]
        shown = "".join(f"{f'{shift:.3f} / {ratio:.1f}':>16}" for shift, ratio in cells)
        print(f"{name:<30}{shown}{from_nuts(posteriors[0], nuts(example)):>10.2f}", flush=True)
