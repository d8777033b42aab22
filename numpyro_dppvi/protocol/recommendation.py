"""Which method suits a study, and what its budget buys, from public facts alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _html, _validate, guides, latents
from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents.tables import Table, check_clients, of_one_client
from numpyro_dppvi.methods import DPOptimization, FisherScoring, VirtualClients
from numpyro_dppvi.methods.values import Method
from numpyro_dppvi.posterior.prior import Prior, first_factor, off_scale, widths_of
from numpyro_dppvi.privacy import Worth
from numpyro_dppvi.privacy.budget import Budgets, PrivacyBudget, budget_of_each
from numpyro_dppvi.privacy.worth import of_joining, of_widths, worth
from numpyro_dppvi.protocol import server
from numpyro_dppvi.protocol.server import TrustedAggregator
from numpyro_dppvi.records.clients import names_and_sizes
from numpyro_dppvi.records.shards import record_shapes

# Beyond these, FisherScoring's posteriors of binary outcomes were too narrow in simulations
# (benchmarks/believe.py).
_MOST_SPREAD, _MOST_NOISE, _MOST_LATENTS = 1.7, 2.5, 200
# Of more latents, the spread falls with their number's square: otherwise held-out records were
# predicted worse than by gradients (docs/battery.md, chosen half).
_FEW_LATENTS = 35
# Under a trusted aggregator, where what would be taken instead has noise that its intervals do not
# know of, so much is taken for many latents, too (chosen half, epsilon .1 to 3).
_MOST_SPREAD_SUMMED = 1.0
_NUM_DRAWS = 400  # of a prior, to see how wide it is
_SHARDS = 50  # virtual clients of each client, where there are as many records
# How much of the budget information gets, and how far its clip is from the average record's.
_INFO_SHARE, _INFO_CLIP = 0.2, 1.2


@dataclass(frozen=True)
class Recommendation:
    """A method, and why. Made of public facts.

    Attributes:
        method: The method to pass to ``fit``.
        reasons: Why, sentence by sentence.
        worth: What the budgets buy at best.
    """

    method: Method
    reasons: tuple[str, ...]
    worth: Worth

    def __str__(self) -> str:
        """The method, and the reasons below it."""
        return "\n".join([self._heading, *(f"  {reason}" for reason in self.reasons)])

    def _repr_html_(self) -> str:
        return _html.heading(self._heading) + _html.bullets(self.reasons)

    @property
    def _heading(self) -> str:
        return f"method={self.method!r}"


@_validate.complete("recommend(model, records, [900, 600], budget)")
def recommend(
    model: Model,
    records: Mapping[str, Any] | Sequence[Mapping[str, Any]] | Table,
    client_sizes: Sequence[int] | Mapping[str, int],
    budget: Budgets,
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
    multiplier z, M clients (1 with a trusted aggregator) and N records
    (:class:`~numpyro_dppvi.privacy.Worth`).

    Args:
        model: A NumPyro model.
        records: Arrays or ``jax.ShapeDtypeStruct`` by argument name, or a table; only shapes and
            dtypes count, so made-up records or one client's will do. Of several clients' records,
            as ``fit`` takes them, the first client's.
        client_sizes: Number of records of each client, or a mapping of these by the clients'
            names.
        budget: One budget for all clients, or one per client: a list, or a mapping by name.
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
        >>> found.method, round(found.worth.together, 2), [round(x, 2) for x in found.worth.alone]
        (FisherScoring(num_replicates=8, noise_aware=True), 1.04, [1.29, 1.58])
    """
    client_names, sizes = names_and_sizes(client_sizes)
    budgets = budget_of_each(budget, len(sizes), client_names)
    constants = _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}")
    check_clients(records, model, sizes, client_names)
    shapes = record_shapes(of_one_client(records, model, constants, "records"), "records")
    space = latents.from_model(model, shapes, constants)
    trusted = server.aggregator(trusted_aggregator)
    return of_space(
        space,
        model,
        shapes,
        constants,
        client_sizes=sizes,
        client_names=client_names,
        budgets=budgets,
        guide=guide,
        prior=prior,
        trusted=trusted,
    )


def of_space(
    space: latents.LatentSpace,
    model: Model,
    shapes: Mapping[str, Any],
    constants: Mapping[str, Any],
    *,
    client_sizes: Sequence[int],
    client_names: Sequence[str],
    budgets: Sequence[PrivacyBudget],
    guide: Any,
    prior: Prior | None,
    trusted: TrustedAggregator | None,
) -> Recommendation:
    """What :func:`recommend` recommends, once the model is read."""
    sizes, num_records = client_sizes, sum(client_sizes)
    num_shares = None if trusted is None else trusted.num_shares(len(sizes))
    bought = worth(space.size, budgets, sizes, num_shares=num_shares)
    # Noise over a posterior standard deviation is z sqrt(d M / N). The variance is that of noise on
    # an entry of a sum that is clipped at 1, from M clients: z^2 M.
    noise = math.sqrt(bought.together**2 - 1)
    variance = noise**2 * num_records / bought.num_latents
    # The sum of the records' information is about N times the identity. One record's has Frobenius
    # norm d on average; it is clipped at 1.2 d and gets a fifth of the budget. That makes noise of
    # standard deviation s = sqrt(variance / .2) * 1.2 d, and s / sqrt(2) off the diagonal, where a
    # packed matrix counts entries twice. A symmetric matrix of such noise has eigenvalues of about
    # s sqrt(d / 2), root mean square: over N, that is the information's relative error.
    spread = math.sqrt(variance / _INFO_SHARE / 2) * _INFO_CLIP
    spread *= bought.num_latents**1.5 / num_records
    most = _MOST_SPREAD * min(1.0, _FEW_LATENTS / bought.num_latents) ** 2
    if trusted is not None:
        most = max(most, _MOST_SPREAD_SUMMED)
    scoring, other = FisherScoring(), by_gradients(sizes, trusted is not None)

    def found(method: Method, why: str) -> Recommendation:
        joining = of_joining(bought, client_names)
        reasons = (why, of_widths(bought), *([joining] if joining else []))
        return Recommendation(method, reasons, bought)

    asked = scoring.guide(guide, model)
    # Reading the guide is part of trying: its refusal is a reason to take the other method.
    try:
        based, family = guides.approximation(asked, model, space, shapes, constants)
        scoring.check(based, family)
    except UnsupportedModelError as refusal:
        return found(other, f"FisherScoring() cannot be used, because {refusal}")
    if isinstance(prior, Prior):
        # A method goes on from a posterior only in the family that it was released in.
        if prior.family == family:
            why = "the prior is a posterior of FisherScoring(), which it must go on from."
            return found(scoring, why)
        return found(other, "the prior is a posterior of another guide than FisherScoring()'s.")
    num_latents = bought.num_latents
    if not (num_latents > _MOST_LATENTS or spread > most or noise > _MOST_NOISE):
        return found(
            scoring,
            f"the information matrix of {num_latents} latent{'s' * (num_latents > 1)} can be "
            f"released with an error of about {spread:.2g} of it, so that factors can know their "
            "noise.",
        )
    many = (
        f"{num_latents} latents are too many for this budget and these records to release their "
        f"information matrix: its error would be {spread:.2g} of it (at most {most:.2g}), noise "
        f"{noise:.2g} posterior standard deviations (at most {_MOST_NOISE:g})."
    )
    if num_latents > _MOST_LATENTS:
        return found(other, many)
    # With 12 to 40 weights and 250 to 5000 records at epsilon .1 to 1, a learnt spread was 2 to 33
    # posterior deviations off by other methods, and .3 to 3 by this one.
    if based.few_outcomes is None:
        return found(
            scoring,
            f"{many} But other methods clip at a fixed length, which bends what outcomes of any "
            "size say about rates and spreads. Intervals will be wide.",
        )
    # In the family of the other method, for which a fit compiles the same programs.
    family = guides.family_of(None, model, based)
    widths = widths_of(family, first_factor(None, family, based).exact)
    if any(np.isinf(width).any() for width in widths.values()):
        drawn = _drawn_widths(model, space, shapes, constants)
        widths |= {n: drawn[n] for n in widths if np.isinf(widths[n]).any()}
    strange = off_scale(widths)
    if strange is None:
        return found(other, many)
    return found(
        scoring,
        f"{many} But the prior of latent {strange[0]!r} has a standard deviation of "
        f"{strange[1]:.2g} on the unconstrained scale, and steps of other methods suit priors of "
        "one width, about 1. Intervals will be wide: scale the latent in the model.",
    )


def by_gradients(sizes: Sequence[int], trusted: bool) -> Method:
    """The method for models and budgets that FisherScoring is not for."""
    return VirtualClients(min(_SHARDS, *sizes)) if trusted else DPOptimization()


def _drawn_widths(
    model: Model,
    space: latents.LatentSpace,
    shapes: Mapping[str, Any],
    constants: Mapping[str, Any],
) -> dict[str, Any]:
    """Widths of latents' priors on the unconstrained scale by draws, in standard deviations."""
    # They are of use where a prior is no factor: that of effects around a mean that is learnt, say.
    continuous = [latent for latent in space.latents if not latent.is_discrete]
    names = [latent.name for latent in continuous]
    draws = latents.outputs.prior_draws(
        model, shapes, constants, names, jax.random.key(0), _NUM_DRAWS
    )
    each = ((one.name, one.transform.inv(draws[one.name])) for one in continuous)
    # By quantiles, because a prior's tails may be as long as a Cauchy's.
    ends = {name: jnp.quantile(base, jnp.array([0.16, 0.84]), axis=0) for name, base in each}
    return {name: (upper - lower) / 2 for name, (lower, upper) in ends.items()}
