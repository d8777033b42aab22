"""Which method suits a study, and what its budget buys, from public facts alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from numpyro_dppvi import _validate, guides, latents
from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.methods import DPOptimization, FisherScoring
from numpyro_dppvi.methods.values import Method
from numpyro_dppvi.posterior.prior import Prior
from numpyro_dppvi.privacy import FullBatch, PrivacyBudget, units
from numpyro_dppvi.privacy.budget import budget_of_each
from numpyro_dppvi.privacy.calibrate import noise_multiplier
from numpyro_dppvi.protocol import server
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records import record_shapes

# Beyond these, FisherScoring's posteriors were too narrow in simulations (benchmarks/believe.py).
_MOST_SPREAD, _MOST_NOISE, _MOST_LATENTS = 1.7, 2.5, 200
# How much of the budget information gets, and how far its clip is from the average record's.
_INFO_SHARE, _INFO_CLIP = 0.2, 1.2


@dataclass(frozen=True)
class Recommendation:
    """A method, and why. Made of public facts.

    Attributes:
        method: The method to pass to ``fit``.
        reasons: Why, sentence by sentence.
        width_together: Posterior standard deviations are at least so many times as large as those
            of all records without privacy.
        width_alone: Those of each client by itself and without privacy, on the same scale, if all
            clients' records are alike; shape ``(num_clients,)``.
    """

    method: Method
    reasons: tuple[str, ...]
    width_together: float
    width_alone: np.ndarray

    def __str__(self) -> str:
        """The method, and the reasons below it."""
        return "\n".join([f"method={self.method!r}", *(f"  {reason}" for reason in self.reasons)])


def recommend(
    model: Model,
    records: Mapping[str, Any],
    client_sizes: Sequence[int],
    budget: PrivacyBudget | Sequence[PrivacyBudget],
    *,
    guide: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
    prior: Prior | None = None,
    trusted_aggregator: bool | TrustedAggregator = False,
) -> Recommendation:
    """Recommends a method from the model, the clients' sizes and the budget; reads no record.

    The lower limit of the width is that of one release with the whole budget, at the posterior's
    mode, of scores that are clipped at the average score's length in coordinates in which the
    average record's information is the identity. There a score has squared length d, the number of
    latents, so that noise over a posterior standard deviation is ``z sqrt(d M / N)``, with noise
    multiplier z, M clients (1 with a trusted aggregator) and N records.

    Args:
        model: A NumPyro model.
        records: Arrays or ``jax.ShapeDtypeStruct`` by argument name; only shapes and dtypes count.
        client_sizes: Number of records of each client.
        budget: One budget for all clients, or one a client.
        guide: The guide that is to be used.
        model_kwargs: The model's public arguments.
        prior: The posterior of an earlier study, if it is to be the prior.
        trusted_aggregator: Whether the server sees sums only.

    Returns:
        The recommendation, which prints as the method with its reasons.

    Raises:
        UnsupportedModelError: If the model cannot be fitted.
        ValueError: If a budget protects whole clients, or more of them may drop out than there are.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> shapes = {"y": jax.ShapeDtypeStruct((1500,), float)}
        >>> budget = dppvi.PrivacyBudget(epsilon=1.0)
        >>> found = dppvi.recommend(model, shapes, [900, 600], budget)
        >>> found.method, round(found.width_together, 2), found.width_alone.round(2).tolist()
        (FisherScoring(num_replicates=8), 1.04, [1.29, 1.58])
    """
    sizes = _validate.client_sizes(client_sizes)
    budgets = budget_of_each(budget, len(sizes))
    constants = _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}")
    space = latents.from_model(model, record_shapes(records, "records"), constants)
    num_latents = sum(math.prod(latent.base_shape) for latent in space.latents)
    num_records, trusted = sum(sizes), server.aggregator(trusted_aggregator)
    # Variance of the noise on the sum of all clients' sums, clipped at norm 1.
    variances = [_noise(each, size) ** 2 for each, size in zip(budgets, sizes, strict=True)]
    variance = sum(variances)
    if trusted is not None:  # a share of the noise comes from everyone, whoever may drop out
        variance = max(variances) * len(sizes) / trusted.num_shares(len(sizes))
    noise = math.sqrt(variance * num_latents / num_records)
    spread = math.sqrt(variance / _INFO_SHARE / 2) * _INFO_CLIP * num_latents**1.5 / num_records
    together = math.sqrt(1 + noise**2)
    alone = np.sqrt(num_records / np.asarray(sizes, float))
    method, why = _method(guide, model, space, prior, num_latents, noise, spread)
    reasons = [why, _together(together, num_records)]
    gainless = [m for m, width in enumerate(alone) if width <= together]
    if gainless:
        named = ", ".join(map(str, gainless[:5])) + (", ..." if len(gainless) > 5 else "")
        reasons.append(
            f"joining cannot pay for client{'s' * (len(gainless) > 1)} {named}: alone and without "
            "privacy their intervals would be no wider."
        )
    return Recommendation(method, tuple(reasons), together, alone)


def _noise(budget: PrivacyBudget, size: int) -> float:
    """Noise on one release with all of a budget, of records that are clipped at norm 1."""
    multiplier = noise_multiplier(
        budget, num_releases=1, sampler=FullBatch(), num_records=size, physical_size=size
    )
    return multiplier * units.records_changed(budget)


def _method(
    guide: Any,
    model: Model,
    space: Any,
    prior: Prior | None,
    num_latents: int,
    noise: float,
    spread: float,
) -> tuple[Method, str]:
    """The method, and the reason for it."""
    scoring = FisherScoring()
    try:
        asked = guides.approximation(scoring.guide(guide, model), model, space, {})
        scoring.check(asked.space, asked.family)
    except UnsupportedModelError as refusal:
        return DPOptimization(), f"FisherScoring() cannot be used, because {refusal}"
    if isinstance(prior, Prior):
        if prior.family == asked.family:
            return scoring, "the prior is a posterior of FisherScoring(), which it must go on from."
        return (
            DPOptimization(),
            "the prior is a posterior of another guide than FisherScoring()'s.",
        )
    if num_latents > _MOST_LATENTS or spread > _MOST_SPREAD or noise > _MOST_NOISE:
        return DPOptimization(), (
            f"{num_latents} latents are too many for this budget and these records to release "
            "their information matrix: its error would be "
            f"{spread:.2g} of it (at most {_MOST_SPREAD:g}), noise {noise:.2g} posterior standard "
            f"deviations (at most {_MOST_NOISE:g})."
        )
    return scoring, (
        f"the information matrix of {num_latents} latent{'s' * (num_latents > 1)} can be "
        f"released with an error of about {spread:.2g} of it, so that factors can know their noise."
    )


def _together(width: float, num_records: int) -> str:
    return (
        f"intervals will be at least {width:.3g} times as wide as those of all {num_records} "
        "records without privacy."
    )
