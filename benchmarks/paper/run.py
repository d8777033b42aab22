"""Runs one method on one split with one seed, and scores it after every round."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np
from dp_accounting import DpEvent

import numpyro_dppvi as dppvi
from benchmarks.paper.results import Line
from benchmarks.paper.studies import Settings, Study
from models.evaluation import of_logits
from numpyro_dppvi import privacy
from numpyro_dppvi.datasets import TabularData

NUM_DRAWS = 100
"""Draws for the posterior predictive, as in the paper."""

MOST_SCORES = 40
"""Longer runs are scored at so many rounds, spaced evenly on a logarithmic scale."""

DELTA = 1e-5


class Runner:
    """A study with its rows on the device: data are laid out once a split.

    Args:
        key: The study's key.
        study: The study.
        data: Its rows, or other rows of the same kind to choose settings on.
    """

    def __init__(self, key: str, study: Study, data: TabularData) -> None:
        self.key, self._study, self._data = key, study, data
        self._partition = functools.cache(self._partitioned)
        self._scores = jax.jit(self._scored)

    def _partitioned(self, split: str) -> dppvi.Partition:
        factors = self._study.splits[split]
        key = jax.random.key(0)
        return dppvi.partition(key, self._data.y_train, self._study.num_clients, *factors)

    def _scored(self, draws: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return of_logits(self._study.logits(draws, self._data.X_test), self._data.y_test)

    def run(self, settings: Settings, split: str, seed: int) -> list[Line]:
        """Fits, and returns a line a round.

        Args:
            settings: The method and its numbers.
            split: The split's name.
            seed: For the posterior's draws; noise comes from the operating system.
        """
        start = time.perf_counter()
        partition = self._partition(split)
        method = settings.method(partition.sizes)
        with warnings.catch_warnings():  # what is reproduced includes methods that are unsafe
            warnings.filterwarnings("ignore", "natural gradients without a trusted aggregator")
            result = dppvi.fit(
                self._study.model,
                None,
                {"X": self._data.X_train, "y": self._data.y_train},
                rng_key=jax.random.key(seed),
                clients=partition,
                method=method,
                budget=dppvi.PrivacyBudget(self._study.epsilon, DELTA),
                progress_bar=False,
                **settings.arguments(),
            )
        seconds = time.perf_counter() - start
        spent = _epsilons(result)
        total = len(result.history.movement)
        return [
            Line(
                self.key,
                settings.name,
                split,
                seed,
                number,
                *self._score(result, number, seed),
                spent(number),
                result.plan.clients[0].mechanism.noise_multiplier,
                seconds * number / total,
                str(settings),
            )
            for number in _scored_rounds(total)
        ]

    def _score(self, result: dppvi.run.FitResult, number: int, seed: int) -> tuple[float, float]:
        key = jax.random.fold_in(jax.random.key(1000 + seed), number)
        draws = result.posterior_at(number).sample(key, (NUM_DRAWS,))
        accuracy, log_likelihood = (float(x) for x in self._scores(draws))
        return accuracy, log_likelihood


def _scored_rounds(total: int) -> Iterator[int]:
    """All rounds of a short run, and some of a long one."""
    if total <= MOST_SCORES:
        return iter(range(1, total + 1))
    spaced = np.unique(np.geomspace(1, total, MOST_SCORES).round().astype(int))
    return iter(spaced.tolist())


def _epsilons(result: dppvi.run.FitResult) -> Callable[[int], float]:
    """The largest epsilon of all clients after a number of rounds."""
    client = result.plan.clients[0]
    per_round = client.num_releases / len(result.history.movement)
    return lambda rounds: _spent(client.mechanism.dp_event, round(per_round * rounds))


@functools.cache
def _spent(event: DpEvent, num_releases: int) -> float:
    """Runs of other seeds spend the same, and sampled batches take seconds to account for."""
    releases = privacy.accounting.compose([(event, num_releases)])
    return privacy.accounting.epsilon(releases, DELTA, "replace_one")
