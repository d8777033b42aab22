"""Diagnostics of a fit: has it converged, whose data shaped it, how much of it is noise.

Everything is computed from released values and public facts and costs no privacy.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _html, _validate
from numpyro_dppvi._typing import Array, MemberNatural, Natural, PRNGKey
from numpyro_dppvi.analysis import replay
from numpyro_dppvi.families import DiagonalNormal, MeanField, enumeration
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.posterior import marginals
from numpyro_dppvi.posterior.posterior import Posterior
from numpyro_dppvi.run import settling
from numpyro_dppvi.run.fitting import FitResult
from numpyro_dppvi.run.history import Status, times

# A run is still moving if its last step is more than this many times the effect of noise alone.
_SETTLED = 2.0
# From this ratio of the likelihoods' precision to the factors', q is reported as too wide.
_SHARPER = 2.0
_NAMED = 5
_TITLE = "Diagnostics (from released values only)"
_MOST_REPLAYS = 10**5
_CURVATURE_DRAWS = 256


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """Facts about a fit; prints as text. Parameters are the entries of unconstrained latents.

    Attributes:
        status: How the run ended.
        movement: Jeffreys divergence between q before and after each round, in nats.
        residual: How far each round would have moved a parameter without damping, in posterior
            standard deviations (root mean square): the distance from a fixed point.
        noise_residual: The residual that noise alone causes in the last round; ``None`` if unknown.
        sharpness: An estimate of how many times the precision in the clients' factors their
            records would give after enough rounds: q is too wide by up to its square root. It is 1
            at a fixed point, and may be so where clips slow or widen q. ``None`` if unknown.
        contributors: ``"prior"`` and the clients, in the order of ``share``'s leading axis.
        share: By latent, each contributor's share of the posterior precision, shape
            ``(num_contributors, *base shape)``. Shares sum to 1; noise makes some negative. Empty
            if factors are unknown; without discrete latents, which have no precision.
        noise: By latent, the standard deviation of the posterior mean due to noise, over the
            posterior standard deviation. Above 1, another draw of the noise would move the
            parameter by more than the posterior's width. Empty without privacy or if factors are
            unknown.
    """

    status: Status
    movement: np.ndarray
    residual: np.ndarray
    noise_residual: float | None
    sharpness: float | None
    contributors: tuple[str, ...]
    share: Mapping[str, np.ndarray]
    noise: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        """The facts as sentences."""
        return "\n".join([_TITLE, *(f"  {name:<10} {fact}" for name, fact in self._facts())])

    def _repr_html_(self) -> str:
        return _html.heading(_TITLE) + _html.facts(self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("status", str(self.status)), ("movement", self._settled())]
        # Less does not say that q is narrow enough: replays know nothing of what clips cut off.
        if self.sharpness is not None and self.sharpness >= _SHARPER:
            facts.append(("width", self._width(self.sharpness)))
        if self.status.widened is not None and not self.status.noiseless:
            facts.append(("privacy", self._widened(self.status.widened)))
        if self.share:
            facts.append(("precision", self._shares()))
        if self.noise:
            facts.append(("noise", self._noise()))
        return facts

    def _settled(self) -> str:
        if not len(self.residual):
            return "no round ran"
        last = (
            f"the last round moved q by {self.movement[-1]:.3g} nats; before damping, its step "
            f"was {self.residual[-1]:.2g} posterior sd of a parameter"
        )
        if self.noise_residual is None:
            return last
        small = self.residual[-1] <= _SETTLED * self.noise_residual
        verdict = "that may be all of it" if small else "it is still moving"
        return f"{last}; noise alone does {self.noise_residual:.2g}: {verdict}"

    def _width(self, sharpness: float) -> str:
        more = "rounds or steps" if self.status.noiseless else "rounds, steps or budget"
        return (
            f"the records would give about {sharpness:.2g} times the precision that "
            f"the factors hold: q is up to {math.sqrt(sharpness):.2g} times too wide, and more "
            f"{more} would narrow it"
        )

    def _widened(self, widened: float) -> str:
        least = self.status.least
        # The median over latents is one of groups' effects, if these are most, and tells little.
        if least is not None and least > widened:
            return f"makes intervals at least {times(least)} as wide as they would be without it"
        of = "" if least is None else f"; the budget allows {times(least)}"
        return f"makes intervals about {times(widened)} as wide as they would be without it{of}"

    def _shares(self) -> str:
        """Shares of the precision, averaged over parameters."""
        flat = np.concatenate(
            [x.reshape(len(self.contributors), -1) for x in self.share.values()], 1
        )
        prior, *means = flat.mean(axis=1).tolist()
        largest = sorted(range(len(means)), key=lambda m: -means[m])[:_NAMED]
        named = ", ".join(f"{self.contributors[m + 1]} {means[m]:.0%}" for m in largest)
        rest = len(means) - len(largest)
        return f"prior {prior:.0%}, {named}" + (f", {rest} more" if rest else "")

    def _noise(self) -> str:
        names = labels(self.noise)
        # In the order of labels().
        values = np.concatenate([x.ravel() for x in self.noise.values()])
        noisy = [i for i in np.argsort(-values) if values[i] > 1]
        median = f"moves a parameter by {np.median(values):.2g} posterior sd (median)"
        if not noisy:
            return f"{median}, and none by more than 1"
        named = ", ".join(f"{names[i]} ({values[i]:.2g})" for i in noisy[:_NAMED])
        more = ", ..." if len(noisy) > _NAMED else ""
        return f"{median}; {len(noisy)} of {len(values)} are mostly noise: {named}{more}"


def diagnose(
    result: FitResult, rng_key: PRNGKey | None = None, num_replays: int = 64
) -> Diagnostics:
    """Diagnoses a fit from released values.

    The effect of noise is measured by replaying the fit with fresh noise, with powers of the
    released factors in place of the clients' likelihoods (see ``replay``). The power is the one at
    which replays reproduce the posterior's width, because factors of a short run have not reached
    the likelihoods' precision.

    Args:
        result: The result of ``fit``.
        rng_key: A JAX key for the replays; a fixed one by default.
        num_replays: How many replays n; the relative error of ``noise`` is 1 / sqrt(2 n).

    Returns:
        The diagnostics.
    """
    _validate.instance("result", result, FitResult, "fit(...)")
    key = jax.random.key(0) if rng_key is None else _validate.rng_key(rng_key)
    num_replays = _validate.positive_int("num_replays", num_replays, _MOST_REPLAYS)
    family, natural = result.posterior.family, result.posterior.natural
    size = result.posterior.space.size
    damping = result.run.damping
    merged: float | np.ndarray = damping
    if result.plan is None and not result.run.alone:
        merged = settling.shares(result.history, family, damping)
    contributors, share = _shares(result)
    noise_residual, sharpness, noise = None, None, {}
    # A run that no replay can stand for, or that added no noise, has no effect of noise to measure;
    # how wide its records would make q can be measured without noise, too.
    if result.run.repeatable and result.plan is not None and result.state.round:
        replayed = replay.replay_of(result, key)
        found, sharpness = _replayed(replayed, natural, key, num_replays)
        if not result.status.noiseless:
            noise = _spread(result.posterior, jax.tree.map(lambda leaf: leaf[-1], found))
            noise_residual = _last_residual(family, found, size, damping)
    return Diagnostics(
        status=result.status,
        movement=result.history.movement,
        # Between normals of equal widths s_i, whose means differ by d_i, the Jeffreys divergence is
        # the sum of (d_i / s_i)^2: the root of its mean is the root mean square of d_i / s_i. A
        # round moves q by the share of a step that is merged.
        residual=np.sqrt(result.history.movement / size) / merged,
        noise_residual=noise_residual,
        sharpness=sharpness,
        contributors=contributors,
        share=share,
        noise=noise,
    )


def _replayed(
    replayed: replay.Replay, natural: Natural, key: PRNGKey, number: int
) -> tuple[Natural, float | None]:
    """Replays at the power of the factors that reproduces the width of q, and that power."""
    run = functools.partial(replay.replays, replayed)
    if replayed.problem.method.releases != "gradients":
        return run(key, 1.0, number), None  # the noise does not depend on what the solve does

    @jax.jit
    def entropy(natural: Natural) -> Array:
        family = replayed.problem.family
        return family.entropy(family.coordinates(natural))

    # Entropy stands for width: of a normal it is the sum of the log standard deviations, and a
    # constant.
    goal = float(entropy(natural))

    def is_wider(power: float) -> bool:
        # Few replays will do, and always the same ones, so that what is bisected does not jump.
        # Those that ended improper have no entropy (NaN), and are left out.
        last = jax.tree.map(lambda leaf: leaf[-1], run(key, power, min(number, 8)))
        return float(jnp.nanmean(jax.vmap(entropy)(last))) > goal

    low, high = 0.0, 9.0  # logarithms of the power; a larger power makes q narrower
    # Where replays come out narrower with the factors themselves, these have reached the
    # likelihoods' precision, or noise has made them sharper: the power is 1.
    if is_wider(1.0):
        # Eight halvings of 9 leave the logarithm within .04: the power is 4 per cent off at most.
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if is_wider(math.exp(middle)) else (low, middle)
    return run(key, math.exp(low), number), math.exp(low)


def _spread(posterior: Posterior, last: Natural) -> dict[str, np.ndarray]:
    """Standard deviation of posterior means over replays, in posterior standard deviations."""
    means, _ = jax.vmap(functools.partial(marginals.moments, posterior.family))(last)
    _, width = marginals.moments(posterior.family, posterior.natural)
    spread = {name: np.asarray(jnp.std(values, axis=0, ddof=1)) for name, values in means.items()}
    # A discrete latent with probability 1 has no width. If noise does not change it either, the
    # ratio is 0 / 1.
    return {name: x / np.where(x > 0, np.asarray(width[name]), 1) for name, x in spread.items()}


def _last_residual(family: MeanField, found: Natural, size: int, damping: float) -> float | None:
    """The part of the last residual that differs between replays."""
    # The mean divergence of the last two rounds is that of the averages, which is the movement all
    # replays share, plus a part due to noise.
    if jax.tree.leaves(found)[0].shape[0] < 2:
        return None
    before, last = (jax.tree.map(lambda leaf, r=r: leaf[r], found) for r in (-2, -1))
    moved = jnp.nanmean(jax.vmap(family.jeffreys)(before, last))
    centres = [jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree) for tree in (before, last)]
    shared = family.jeffreys(*centres)
    return float(jnp.sqrt(jnp.maximum(moved - shared, 0) / size) / damping)


def _shares(result: FitResult) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Each contributor's share of the posterior precision."""
    if result.run.local.central:
        return (), {}
    num_factors = jax.tree.leaves(result.state.factors)[0].shape[0]
    clients = list(result.client_names) or [f"client {m}" for m in range(num_factors)]
    if result.run.trusted is not None:
        clients = ["all clients"]
    stacked = jax.tree.map(
        lambda prior, leaf: jnp.concatenate([prior[None], leaf]),
        result.state.prior,
        result.state.factors,
    )
    share = {}
    for name, member in enumeration.continuous(result.posterior.family).members:
        q = result.posterior.natural[name]
        # q is the product of all factors, and curvatures of logarithms add up: shares sum to 1.
        whole = precision(member, q, q)
        parts = jax.vmap(lambda t, m=member, q=q: precision(m, q, t))(stacked[name])
        share[name] = np.asarray(parts / whole)
    return ("prior", *clients), share


@in_own_precision
def precision(member: Any, q: MemberNatural, factor: MemberNatural) -> Array:
    """What a factor, proper or not, contributes to the precision of each entry, on average under q.

    This is the expected negative second derivative of its logarithm, which adds up over factors.
    For a normal factor it is the factor's precision.
    """
    if isinstance(member, DiagonalNormal):
        return -2 * factor.quadratic
    return curvature(member, q, factor)


def curvature(member: Any, q: MemberNatural, factor: MemberNatural) -> Array:
    """:func:`precision` for families without a closed form, from draws with a fixed key."""
    # The expectation is under q, where the posterior is; a fixed key makes it the same every time.
    draws = member.distribution(member.coordinates(q)).sample(
        jax.random.key(0), (_CURVATURE_DRAWS,)
    )

    def log_factor(x: Array) -> Array:
        """<factor, T(x)> up to a constant."""

        # log p(x) = <eta, T(x)> - A(eta) is affine in eta up to A, so its derivative in the
        # direction of the factor is <factor, T(x)> minus a constant.
        def log_density(natural: MemberNatural) -> Array:
            return member.distribution(member.coordinates(natural)).log_prob(x)

        return jax.jvp(log_density, (q,), (factor,))[1]

    def second(x: Array) -> Array:
        flat = jax.hessian(lambda v: log_factor(v.reshape(x.shape)))(x.ravel())
        return -jnp.diagonal(flat).reshape(x.shape)

    return jnp.mean(jax.lax.map(second, draws), axis=0)


def labels(values: Mapping[str, np.ndarray]) -> list[str]:
    """Names of all entries."""
    return [
        f"{name}[{', '.join(map(str, index))}]" if index else name
        for name, value in values.items()
        for index in np.ndindex(value.shape)
    ]
