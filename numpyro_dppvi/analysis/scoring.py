"""``score``: how well a posterior predicts clients' held-back records, as a private release."""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _validate, latents
from numpyro_dppvi._typing import Array, PRNGKey
from numpyro_dppvi.latents import LatentSpace, predictive
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.privacy import (
    FullBatch,
    GaussianSum,
    Ledger,
    LedgerFile,
    PrivacyBudget,
    PrivacyPlan,
    SecretKeys,
    add_noise,
    clipped_sum,
    plan,
    words,
)
from numpyro_dppvi.privacy.budget import Budgets, budget_of_each
from numpyro_dppvi.protocol import algorithm, server
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import Shards
from numpyro_dppvi.run.data import Data, lay_out

# Length of the entries that count hits and clipped records, where the score's is 1: each adds 3 %
# to the noise of the score.
_COUNT = 0.25
_MOST_DRAWS = 10**6
# If surely more than this share of the records was clipped, the text says so.
_FEW_CLIPPED = 0.005


class Estimate(NamedTuple):
    """A released number.

    Attributes:
        value: The number. Noise may take it where no exact number could be.
        stderr: The standard deviation of the noise on it.
    """

    value: float
    stderr: float

    def __str__(self) -> str:
        """The number and its noise."""
        return f"{self.value:.4f} +/- {self.stderr:.4f}"


@dataclass(frozen=True, eq=False)
class PrivateScore:
    """How well a posterior predicts held-back records; all of it was released with noise.

    Attributes:
        log_density: Mean log predictive density a record, each clipped to ``score_range``.
        accuracy: The share of records whose likeliest class was observed; ``None`` unless the
            outcome is Bernoulli or categorical.
        clipped: The share of records that were clipped.
        by_client: ``log_density`` of each client; empty with a trusted aggregator.
        score_range: Lower and upper end of a record's log density.
        plan: What each client released.
        ledger: What each client has spent.
    """

    log_density: Estimate
    accuracy: Estimate | None
    clipped: Estimate
    by_client: tuple[Estimate, ...]
    score_range: tuple[float, float]
    plan: PrivacyPlan
    ledger: Ledger

    @property
    def num_records(self) -> int:
        """How many records were scored."""
        return sum(client.mechanism.num_records for client in self.plan.clients)

    @property
    def sampling_stderr(self) -> float:
        """An upper limit of the mean's standard error from records' own spread, not released.

        Numbers between ``low`` and ``high`` with mean m have a standard deviation of at most
        ``sqrt((high - m) (m - low))``.
        """
        low, high = self.score_range
        # Noise may have taken the released mean out of the range.
        mean = min(max(self.log_density.value, low), high)
        return math.sqrt((high - mean) * (mean - low) / self.num_records)

    def __str__(self) -> str:
        """The scores, what they leave out and what they cost."""
        low, high = self.score_range
        clients = self.plan.clients
        # A record is at one client alone, and costs what that client has spent.
        worst = max(clients, key=lambda client: client.epsilon)
        lines = [
            f"Score of {self.num_records} held-back records of {len(clients)} client"
            f"{'s' * (len(clients) > 1)}",
            f"  log density  {self.log_density} a record",
        ]
        if self.accuracy is not None:
            lines.append(f"  accuracy     {self.accuracy}")
        lines += [
            f"  clipped      {self.clipped} of records, to [{low:.2f}, {high:.2f}]",
            f"  cost         epsilon = {words.rounded_up(worst.epsilon)} at delta = "
            f"{worst.budget.delta:.10g} for {self.plan.unit} of "
            + words.client(clients.index(worst), self.plan.names)
            + ", the most of all" * (len(clients) > 1),
        ]
        said = (
            "+/- is the standard deviation of the noise. It leaves out that other records would "
            "score differently: that standard error is not released, and at most about "
            f"{self.sampling_stderr:.2g} for the log density."
        )
        if self.clipped.value - 2 * self.clipped.stderr > _FEW_CLIPPED:
            said += (
                " Many records were clipped; those below the range count as more likely than they "
                f"are: write score_range=({low - (high - low):.3g}, {high:.3g}), say."
            )
        return "\n".join([*lines, *words.paragraph(f"{said} {self.plan.before_in_words}")])


def score(
    posterior: Posterior,
    data: Data,
    *,
    budget: Budgets,
    rng_key: PRNGKey | None = None,
    score_range: tuple[float, float] | None = None,
    num_samples: int = 1000,
    trusted_aggregator: bool | TrustedAggregator = False,
    ledger_file: str | os.PathLike[str] | None = None,
    insecure_noise_seed: int | None = None,
) -> PrivateScore:
    """Releases how well a posterior predicts records that clients held back.

    A record's score is its log predictive density, the log of the mean over draws of the latents
    of its likelihood, clipped to a public range. Each client releases the sum of its scores, and
    with it how many were clipped and, for Bernoulli and categorical outcomes, how many records had
    the class that was found likeliest: one noisy vector, charged before any of it is computed.

    Args:
        posterior: The posterior.
        data: The held-back records: one mapping per client, or one mapping for a single client.
        budget: A ``PrivacyBudget``, or one per client, with unit ``"record"``.
        rng_key: A JAX key for draws of the latents, never for the noise.
        score_range: Lower and upper end of a record's score, such as ``(-6.0, 0.0)``. Chosen
            without looking at records. By default it comes from outcomes that the posterior itself
            draws at made-up rows: from 5 below their median, so that a record that is 150 times
            less likely than a typical one still counts in full, to 0 for discrete outcomes and 1
            above the highest for others. A wider range is less biased, and noisier in proportion.
        num_samples: Draws of the latents.
        trusted_aggregator: Whether only the sum over clients is seen, as in :func:`fit`.
        ledger_file: Where the releases are charged, on disk, as in :func:`fit`: the budget covers
            what the file has already.
        insecure_noise_seed: For tests only: makes the noise reproducible, and removable.

    Returns:
        The scores with their noise.

    Raises:
        BudgetExceededError: If other runs on the ledger file have used up a budget.
        ValueError: If data is not like the fit's, a number is out of range, a budget protects whole
            clients, or there is no default for ``score_range``.
        TypeError: If an argument is of another kind, a missing ``rng_key`` among them.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> rng, key = np.random.default_rng(0), jax.random.key(0)
        >>> data, held_back = ([{"y": rng.normal(size=n)}] * 2 for n in (400, 1000))
        >>> budget = dppvi.PrivacyBudget(epsilon=1.0)
        >>> result = dppvi.fit(model, None, data, rng_key=key, budget=budget)
        >>> found = dppvi.score(result.posterior, held_back, budget=budget, rng_key=key)
        >>> abs(found.log_density.value + 1.42) < 0.2, found.ledger.spent().round(2).tolist()
        (True, [1.0, 1.0])
    """
    _validate.outside_transformations("score", rng_key, data)
    _validate.instance("posterior", posterior, Posterior, "fit(...).posterior")
    draw_key, range_key, split_key = jax.random.split(_validate.rng_key(rng_key), 3)
    num_samples = _validate.positive_int("num_samples", num_samples, _MOST_DRAWS)
    keys = SecretKeys(insecure_noise_seed)
    file = None if ledger_file is None else LedgerFile(_validate.path("ledger_file", ledger_file))
    laid = lay_out(data, None, split_key, posterior.model, posterior.model_kwargs)
    shards, sizes, names = laid.shards, laid.sizes, laid.names
    # Whole numbers may have been floats in the fit: scored as those, or they would be another
    # model's records.
    shards = shards._replace(records=_like_fit(posterior.space.plain, shards))
    budgets = budget_of_each(budget, len(sizes), names)
    _check_units(budgets)
    trusted = server.aggregator(trusted_aggregator)
    draws = posterior.sample(draw_key, (num_samples,))
    ends = _ends(score_range, posterior.space.plain, draws, range_key)
    # The last check that looks at records comes before the charge: what is refused here costs
    # nothing.
    latents.check_missing(posterior.space.plain, shards.records, shards.owners, laid.called)
    latents.check_records(posterior.space.plain, shards.records, shards.mask)
    planned = plan.of_gradients(
        budgets,
        FullBatch(),
        clip_norm=_longest(posterior.space.plain),
        releases_per_visit=1,
        num_visits=[1] * len(sizes),
        client_sizes=sizes,
        num_shares=None if trusted is None else trusted.num_shares(len(sizes)),
        before=() if file is None else file.spent(budgets),
        names=names,
    )
    ledger = algorithm.first_ledger(planned, file)
    # Charged before anything is computed: a process that dies in between has spent, and not
    # released.
    ledger = algorithm.charged(ledger, planned, 0, np.arange(len(sizes)), file)
    # The only use of these secret keys: a second one would release the same noise twice.
    noisy = _released(posterior.space.plain, draws, shards, ends, planned, keys.round_key(0))
    return _packed(noisy, ends, planned, ledger, is_sum=trusted is not None)


def release(rng_key: PRNGKey, vectors: Array, mask: Array, mechanism: GaussianSum) -> np.ndarray:
    """One client's noisy sum of clipped vectors, one per record, under a secret key of its own."""
    exact = clipped_sum(vectors, mask, mechanism.clip_norm)
    return np.asarray(add_noise(rng_key, exact, mechanism.share_std))


def _like_fit(space: LatentSpace, shards: Shards) -> dict[str, Array]:
    """The records with the fit's dtypes; refuses other names, shapes and kinds of numbers."""
    mine = {
        name: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype)
        for name, leaf in shards.records.items()
    }
    # Rounding within a kind is fine (64 to 32 bits); floats that become integers are not.
    if mine.keys() != space.row.keys() or not all(
        mine[name].shape == row.shape and np.can_cast(mine[name].dtype, row.dtype, "same_kind")
        for name, row in space.row.items()
    ):
        raise ValueError(
            f"data must hold the arrays of the fit, for each record {_in_words(space.row)}, "
            f"got {_in_words(mine)}: write the same columns for the held-back records."
        )
    return {name: shards.records[name].astype(row.dtype) for name, row in space.row.items()}


def _in_words(row: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{name}: {one.dtype}{list(one.shape)}" for name, one in row.items())


def _check_units(budgets: Sequence[PrivacyBudget]) -> None:
    if any(budget.unit == "client" for budget in budgets):
        raise ValueError(
            "budget must protect records for a score, got unit='client', for which a sum over "
            "records has no useful bound: write budget=PrivacyBudget(epsilon=1.0), say."
        )


def _ends(
    given: Any, space: LatentSpace, draws: Mapping[str, Array], rng_key: PRNGKey
) -> tuple[float, float]:
    """The range of a record's score, which depends on no record."""
    example = "(-6.0, 0.0)"
    if given is not None:
        each = _validate.entries("score_range", given, example)
        ends = [_validate.finite("score_range", end, example) for end in each]
        if len(ends) != 2 or not ends[0] < ends[1]:
            raise _validate.wrong("score_range", "be a lower and a higher number", given, example)
        return ends[0], ends[1]
    # From draws and made-up rows. A range that was read off the records would be a release itself.
    ends = [-math.inf, math.inf]
    if space.can_draw:
        ends = list(predictive.usual_range(space, draws, rng_key))
    if not all(map(math.isfinite, ends)):
        raise ValueError(
            "score_range must be given for a model whose outcomes cannot be drawn, got None: write "
            f"score_range={example}, say, the range of a record's log density."
        )
    return ends[0], ends[1]


def _longest(space: LatentSpace) -> float:
    """The length of the longest vector of a record."""
    # A record's vector is (u, w c) or (u, w c, w h): u in [-1, 1] is the clipped score, moved and
    # divided by half of the range, c and h are +-1. Its length is at most sqrt(1 + k w^2) =: C;
    # replacing a record moves the sum by at most 2 C, and all signs may change, so it is no less.
    num_counts = 1 if predictive.classes(space) is None else 2
    return math.sqrt(1 + num_counts * _COUNT**2)


@functools.partial(jax.jit, static_argnums=0)
def _vectors(
    space: LatentSpace,
    draws: Mapping[str, Array],
    rows: Mapping[str, Array],
    low: Array,
    high: Array,
) -> Array:
    """What each record of a client adds to the sum, shape ``(num_rows, 2 or 3)``."""
    # Row by row: a record's vector depends on no other record, which the sensitivity rests on.
    found = predictive.scores(space, draws, rows)
    # +inf and NaN count as the lowest: a record that breaks the model must not pull the score up.
    known = jnp.where(jnp.isfinite(found.log_density), found.log_density, -jnp.inf)
    is_clipped = (known < low) | (known > high)
    entries = [
        (jnp.clip(known, low, high) - (low + high) / 2) / ((high - low) / 2),
        jnp.where(is_clipped, _COUNT, -_COUNT),
    ]
    if found.is_hit is not None:
        entries.append(jnp.where(found.is_hit, _COUNT, -_COUNT))
    return jnp.stack(entries, axis=1)


def _released(
    space: LatentSpace,
    draws: Mapping[str, Array],
    shards: Shards,
    ends: tuple[float, float],
    planned: PrivacyPlan,
    secret_key: PRNGKey,
) -> np.ndarray:
    """Every client's noisy sum, shape ``(num_clients, 2 or 3)``."""
    noisy = []
    for number, client in enumerate(planned.clients):
        rows, num_records = shards.of_client(number)
        vectors = _vectors(space, draws, rows, *ends)
        # One secret key for this call, one fold for each client: no two sums share noise.
        key = jax.random.fold_in(secret_key, number)
        assert isinstance(client.mechanism, GaussianSum)
        mask = jnp.asarray(np.arange(shards.capacity) < int(num_records))
        noisy.append(release(key, vectors, mask, client.mechanism))
    return np.stack(noisy).astype(float)


def _packed(
    noisy: np.ndarray,
    ends: tuple[float, float],
    planned: PrivacyPlan,
    ledger: Ledger,
    *,
    is_sum: bool,
) -> PrivateScore:
    """What was released, as means and shares."""
    sizes = np.array([client.mechanism.num_records for client in planned.clients])
    stds, (low, high) = planned.noise_std, ends

    def mean(total: float, std: float, size: int) -> Estimate:
        # A record's entry is (score - middle) / half, see _vectors: this is solved for the score.
        half = (high - low) / 2
        return Estimate(float((low + high) / 2 + half * total / size), float(half * std / size))

    def share(total: float) -> Estimate:
        """The sum of +-w over N records is w (2 count - N)."""
        scale = 2 * _COUNT * sizes.sum()
        return Estimate(float(total / scale + 0.5), float(std / scale))

    # Clients' noises are independent, so that variances add up; with shares of one noise, to that
    # of the sum.
    total, std = noisy.sum(axis=0), float(np.sqrt(np.sum(stds**2)))
    # With an aggregator a client's own sum has a share of the noise alone: it must not be shown.
    each = () if is_sum else map(mean, noisy[:, 0], stds, sizes)
    return PrivateScore(
        log_density=mean(total[0], std, sizes.sum()),
        accuracy=share(total[2]) if len(total) > 2 else None,
        clipped=share(total[1]),
        by_client=tuple(each),
        score_range=ends,
        plan=planned,
        ledger=ledger,
    )
