"""The posterior: a distribution over the latents that holds no record."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.infer import Predictive

from numpyro_dppvi import _validate, guides
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.reading import pushed
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.to_arviz import to_arviz

# Constrained means and standard deviations that have no closed form come from this many draws.
_MOMENT_DRAWS = 10_000


@dataclass(frozen=True, eq=False)
class Posterior:
    """The approximate posterior q.

    Attributes:
        natural: Natural parameters by latent, of unconstrained values.
        family: The family they belong to.
        space: The latents: names, shapes and bijections.
        model: The model, for predictions.
        model_kwargs: The model's public arguments.
        attrs: Strings and numbers about the fit, for export.
    """

    natural: Natural
    family: MeanField
    space: LatentSpace
    model: Model
    model_kwargs: Mapping[str, Any]
    attrs: Mapping[str, str | float]

    def sample(self, rng_key: PRNGKey, shape: Sequence[int] = ()) -> dict[str, Array]:
        """Independent draws of all latents, in their supports.

        Args:
            rng_key: A JAX key.
            shape: Leading axes, ``(1000,)`` say.

        Returns:
            Arrays by latent, shape ``(*shape, *latent shape)``.
        """
        key = _validate.rng_key(rng_key)
        coordinates = self.family.coordinates(self.natural)
        return self.space.constrain(self.family.sample(key, coordinates, tuple(shape)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the latents, in the model's order."""
        return tuple(latent.name for latent in self.space.latents)

    def distribution(self, latent: str) -> dist.Distribution:
        """One latent's distribution as a NumPyro distribution.

        Raises:
            KeyError: If the model has no such latent.
        """
        if latent not in self.names:
            raise KeyError(f"there is no latent {latent!r}; there are {', '.join(self.names)}.")
        base = self.family.distribution(self.family.coordinates(self.natural))[latent]
        return pushed(base, self._latent(latent).transform)

    def _latent(self, name: str) -> Any:
        return next(latent for latent in self.space.latents if latent.name == name)

    @property
    def mean(self) -> dict[str, Array]:
        """Posterior means by latent (by simulation with a fixed key where constrained)."""
        return {name: self._moment(name, "mean", jnp.mean) for name in self.names}

    @property
    def stddev(self) -> dict[str, Array]:
        """Posterior standard deviations by latent (by simulation where constrained)."""
        variances = {name: self._moment(name, "variance", jnp.var) for name in self.names}
        return {name: jnp.sqrt(value) for name, value in variances.items()}

    def _moment(self, name: str, attribute: str, of_draws: Callable[..., Array]) -> Array:
        distribution = self.distribution(name)
        if isinstance(distribution, dist.TransformedDistribution):
            draws = distribution.sample(jax.random.key(0), (_MOMENT_DRAWS,))
            return of_draws(draws, axis=0)
        return getattr(distribution, attribute)

    def predictive(
        self, rng_key: PRNGKey, num_samples: int = 1000, **model_args: Any
    ) -> dict[str, Array]:
        """Draws of everything that the model observes, at new arguments.

        Args:
            rng_key: A JAX key.
            num_samples: Draws of the latents; one prediction each.
            **model_args: The model's data arguments without the outcome, ``X=X_test`` say.

        Returns:
            Arrays by site, shape ``(num_samples, ...)``.

        Raises:
            TypeError: If an argument of the model is missing or unknown.
        """
        self._check(model_args)
        arguments = {**self.model_kwargs, **model_args}
        draw_key, site_key = jax.random.split(_validate.rng_key(rng_key))
        draws = self.sample(draw_key, (num_samples,))
        predict = Predictive(self.model, posterior_samples=draws)
        return dict(predict(site_key, **arguments))

    def _check(self, model_args: Mapping[str, Any]) -> None:
        """Refuses arguments that the model has no place for, and places that nothing fills."""
        parameters = inspect.signature(self.model).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [name for name in model_args if name not in parameters and not takes_any]
        if unknown:
            raise TypeError(
                f"predictive got {unknown[0]!r}, which is no argument of the model: it takes "
                f"{', '.join(parameters)}."
            )
        missing = [
            name
            for name, p in parameters.items()
            if p.default is p.empty
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            and name not in {*self.model_kwargs, *model_args}
        ]
        if missing:
            raise TypeError(
                f"predictive needs the model's argument {missing[0]!r}: write "
                f"predictive(key, {missing[0]}=...), or, if it is the outcome, give it the default "
                "None in the model."
            )

    def to_arviz(
        self,
        rng_key: PRNGKey | None = None,
        num_samples: int = 1000,
        *,
        dims: Mapping[str, Sequence[str]] | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
    ) -> Any:
        """Independent posterior draws for ArviZ, with the privacy facts as attributes.

        Args:
            rng_key: A JAX key; one fixed key if not given, because the draws depend on nothing
                but this posterior.
            num_samples: How many draws.
            dims: Names of a latent's dimensions; plates' names if not given.
            coords: Labels along dimensions, by name.

        Returns:
            ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (ArviZ 1.x). No record is in it.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        names = {latent.name: _dims(latent.name, latent.dims) for latent in self.space.latents}
        draws = self.sample(key, (num_samples,))
        return to_arviz(draws, {**names, **(dims or {})}, coords or {}, self.attrs)

    @property
    def params(self) -> dict[str, Array]:
        """Parameters for :meth:`guide`, named as NumPyro's automatic guides name them."""
        return guides.params(self.family, self.family.coordinates(self.natural))

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """A NumPyro guide that draws every latent from this posterior, whatever its arguments.

        Give it to ``numpyro.infer.Predictive`` with :attr:`params`.
        """
        del args, kwargs
        return guides.draw(self.space, self.family, self.params)


def _dims(latent: str, dims: Sequence[str | None]) -> list[str]:
    """Dimension names: the plate's where there is one, else the latent's own and a number."""
    return [name or f"{latent}_dim_{axis}" for axis, name in enumerate(dims)]
