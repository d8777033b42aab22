"""How long calibration takes: the first time, once more, and the other way round.

Each setting is one a process sees for the first time; the accountant's caches are emptied before.
Times are of the processor, so that other programs hardly matter.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from numpyro_dppvi.privacy import (
    FixedSizeSampling,
    PoissonSampling,
    PrivacyBudget,
    Sampler,
    accounting,
    calibrate,
    epsilon_from_noise,
    noise_from_epsilon,
    rounds_from_epsilon,
)


def settings() -> Iterator[tuple[Sampler, int, int, float]]:
    """Samplers, records, releases and epsilons, from the everyday to the extreme."""
    for epsilon in (0.1, 1.0, 8.0):
        yield PoissonSampling(0.1), 1000, 1000, epsilon
        yield FixedSizeSampling(100), 1000, 1000, epsilon
        yield PoissonSampling(0.01), 100_000, 10_000, epsilon
        yield FixedSizeSampling(1000), 100_000, 10_000, epsilon
        yield PoissonSampling(1e-4), 1_000_000, 1000, epsilon
        yield FixedSizeSampling(1), 1_000_000, 1000, epsilon


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    start = time.process_time()
    found = call()
    return found, time.process_time() - start


def forget() -> None:
    """Empties the caches."""
    noises = (calibrate.noise_multiplier, calibrate._rough_noise)
    for cached in (*noises, accounting.epsilon, accounting._bound):
        cached.cache_clear()


def table() -> None:
    """Noise, the share of the budget that it spends, and seconds."""
    print("\nCalibration at delta 1e-5, replace-one: seconds of the processor")
    names = ("noise", "spent", "cold", "cached", "rounds", "cold")
    print(f"{'':<66} " + " ".join(f"{name:>8}" for name in names))
    for sampler, records, releases, epsilon in settings():
        forget()
        arguments: dict[str, Any] = {"sampler": sampler, "num_records": records}
        budget = PrivacyBudget(epsilon)

        calibrated = functools.partial(noise_from_epsilon, budget, releases, **arguments)
        noise, cold = timed(calibrated)
        _, cached = timed(calibrated)
        spent = epsilon_from_noise(noise, releases, **arguments) / epsilon
        forget()

        lasting = functools.partial(rounds_from_epsilon, budget, noise, **arguments)
        rounds, seconds = timed(lasting)
        name = f"{sampler.describe(records)}, {records} rows, {releases} x, epsilon {epsilon:g}"
        numbers = f"{noise:8.3f} {spent:8.4f} {cold:8.1f} {cached:8.3f} {rounds:8d} {seconds:8.1f}"
        print(f"{name:<66} {numbers}", flush=True)
