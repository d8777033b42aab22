"""Natural gradients: steps in natural parameters, and the lengths that go with them.

In natural parameters the natural gradient of the local objective is a gradient in the expected
statistics, which no information matrix has to be inverted for: a full step sets a factor to
grad E_q[log p(x | theta)] (Khan and Lin, 2017, Eq. 7; Bui et al., 2018, for partitioned inference).
Over conjugate likelihoods that is the answer itself.

The change of a shard is then measured, clipped and noised in the white coordinates of q
(``families.whitening``), not in natural parameters, where noise that a precise latent does not
feel would drown one of which little is known. They are a function of q alone, which was released
before: to whom they are known, a change and its white coordinates say the same.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array, Coordinates, Natural
from numpyro_dppvi.families import MeanField, factors, whitening
from numpyro_dppvi.methods.local_solve import GradientFn


@dataclass(frozen=True)
class NaturalGradient:
    """Steps along the natural gradient, and clips in units of q's standard deviations.

    In the place of an optax optimiser, for methods that solve without noise. A step with no ridge
    and a rate of 1 is that of Khan and Lin (2017), Eq. 7; ridge and rate are ours. One step does
    (``num_local_steps=1``) and shards of one record are best: their changes are what the records
    say, and no shard's labels decide how much of it is clipped. The defaults weigh directions in
    which noise hurts against others; they were found on one data set (Adult, logistic regression).

    Args:
        location_rate: In (0, 1]; the share of the step that locations of normal latents take.
            Where many shards see the same correlated latents, all of them would make the same
            correction in full, and overshoot. About 3 over the number of latents that one record
            sees is safe in synchronous rounds; 1 is exact for a conjugate model of one latent.
        ridge: Not below 0; a precision that is added to q's. Latents of which less is known than
            that move less, and get less noise.
        spread_weight: What a change of a normal's spread counts beside one of its location.

    Raises:
        ValueError: If a number is outside its range.
    """

    location_rate: float = 0.2
    ridge: float = 20.0
    spread_weight: float = 7.0

    def __post_init__(self) -> None:
        _validate.set_field(self, "location_rate", _validate.half_open_unit)
        _validate.set_field(self, "ridge", _validate.not_negative)
        _validate.set_field(self, "spread_weight", _validate.positive, most=1e15)

    def change(
        self, family: MeanField, q: Natural, own: Natural, keys: Any, records_gradient: GradientFn
    ) -> Natural:
        """Natural-gradient steps of the local objective, starting from ``q``.

        Args:
            family: The family of q.
            q: The current approximation.
            own: What is divided out of q for the cavity.
            keys: Keys, or a tree of them, with a leading axis of one entry per step.
            records_gradient: The gradient of the record losses in q's coordinates.

        Returns:
            The change; NaN where the solve failed.
        """

        def step(before: Natural, key: Any) -> tuple[Natural, None]:
            # ``before`` is the change so far. It is carried in the place of q, of whose large
            # numbers small changes would lose digits.
            here = factors.multiply(q, before)
            coordinates = family.coordinates(here)

            def moved(white: Natural) -> Coordinates:
                step = whitening.unwhiten(family, coordinates, white)
                return family.coordinates(factors.multiply(here, step))

            # Along white axes the information matrix is the identity, so that the gradient in
            # them is the natural gradient: (J' F J)^-1 J' g = J' g, with J = d eta / d white.
            _, pull = jax.vjp(moved, factors.unit(q))
            (records,) = pull(records_gradient(key, coordinates))
            # Of -<eta_cavity, E[T]> - H the gradient in E[T] is eta_here - eta_cavity. With
            # here = q + before and cavity = q - own that is before + own: q does not enter, and
            # nothing cancels.
            rest = whitening.whiten(family, coordinates, factors.multiply(before, own))
            variances = whitening.axis_variances(family, coordinates)
            # The ridge adds to a precision of 1 / v: v^-1 / (v^-1 + ridge) of the step is left.
            share = {
                name: self.location_rate / (1 + self.ridge * v) for name, v in variances.items()
            }
            white = whitening.weighted(factors.multiply(records, rest), share, 1.0)
            # ``white`` is the loss's gradient: the step goes against it.
            return factors.divide(before, whitening.unwhiten(family, coordinates, white)), None

        return jax.lax.scan(step, factors.unit(q), keys)[0]

    def measured(self, family: MeanField, q: Natural, change: Natural) -> Natural:
        """A change in the units in which it is clipped and noised, a tree shaped as it."""
        coordinates = family.coordinates(q)
        white = whitening.whiten(family, coordinates, change)
        weights = _location_weights(self, family, coordinates)
        return whitening.weighted(white, weights, self.spread_weight)

    def unmeasured(self, family: MeanField, q: Natural, measured: Natural) -> Natural:
        """Inverse of :func:`measured`; linear."""
        coordinates = family.coordinates(q)
        weights = _location_weights(self, family, coordinates)
        inverse = {name: 1 / weight for name, weight in weights.items()}
        white = whitening.weighted(measured, inverse, 1 / self.spread_weight)
        return whitening.unwhiten(family, coordinates, white)

    def repaired_whole(self, family: MeanField, refined: frozenset[str]) -> frozenset[str]:
        """All members.

        Changes are centred at q: a precision below zero takes its location, times that, along.
        """
        return frozenset(name for name, _ in family.members)


def _location_weights(
    rule: NaturalGradient, family: MeanField, coordinates: Coordinates
) -> dict[str, Array]:
    """With them, a location's change d has length sqrt(d' (precision + ridge) d)."""
    variances = whitening.axis_variances(family, coordinates)
    return {name: jnp.sqrt(1 + rule.ridge * v) for name, v in variances.items()}
