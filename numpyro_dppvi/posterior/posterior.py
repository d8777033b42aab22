"""The posterior: a distribution over the latents that holds no record."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi import _validate, guides
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.reading import pushed
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.latents.outputs import prior_draws
from numpyro_dppvi.posterior import exported, file, marginals, predictions
from numpyro_dppvi.posterior.prior import Prior
from numpyro_dppvi.posterior.to_arviz import to_arviz

_MOST_SAMPLES = 10**8

_NOTE = (
    "These are the approximation's own numbers. Its draws are independent: R-hat and effective\n"
    "sample size do not apply, and say nothing about how far it is from the true posterior."
)


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
        records: Shapes and dtypes of the arrays that the model was fitted to, which are public.
        prior: The earlier posterior that was the prior; ``None`` for the model's own prior.

    Example:
        >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
        >>> import numpyro_dppvi as dppvi
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", y.shape[0]):
        ...         numpyro.sample("y", dist.Normal(mean, 1), obs=y)
        >>> data, key = [{"y": np.zeros(200)}, {"y": np.ones(300)}], jax.random.key(0)
        >>> result = dppvi.fit(model, None, data, rng_key=key, method=dppvi.NonPrivate())
        >>> posterior = result.posterior
        >>> f"{posterior.mean['mean']:.1f}", posterior.sample(key, (1000,))["mean"].shape
        ('0.6', (1000,))
        >>> posterior.predictive(key, 1000, y=np.zeros(1))["y"].shape
        (1000, 1)
        >>> posterior.to_arviz()["posterior"]["mean"].dims
        ('chain', 'draw')
    """

    natural: Natural
    family: MeanField
    space: LatentSpace
    model: Model
    model_kwargs: Mapping[str, Any]
    attrs: Mapping[str, str | float]
    records: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    prior: Prior | None = None

    def sample(self, rng_key: PRNGKey, shape: Sequence[int] = ()) -> dict[str, Array]:
        """Independent draws of all latents, in their supports.

        Args:
            rng_key: A JAX key.
            shape: Leading axes, ``(1000,)`` say.

        Returns:
            Arrays by latent, shape ``(*shape, *latent shape)``.
        """
        key = _validate.rng_key(rng_key)
        shape = _validate.shape("shape", shape)
        coordinates = self.family.coordinates(self.natural)
        return self.space.constrain(self.family.sample(key, coordinates, shape))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the latents, in the model's order."""
        return tuple(latent.name for latent in self.space.latents)

    def distribution(self, latent: str) -> dist.Distribution:
        """One latent's distribution as a NumPyro distribution.

        Raises:
            KeyError: If the model has no such latent.
        """
        if not isinstance(latent, str) or latent not in self.names:
            raise KeyError(
                f"there is no latent {_validate.shown(latent)}; there are {', '.join(self.names)}."
            )
        base = self.family.distribution(self.family.coordinates(self.natural))[latent]
        return pushed(base, self._latent(latent).transform)

    def _latent(self, name: str) -> Any:
        return next(latent for latent in self.space.latents if latent.name == name)

    @property
    def mean(self) -> dict[str, Array]:
        """Posterior means by latent (by quadrature or simulation where constrained)."""
        return {name: marginals.mean(self.distribution(name)) for name in self.names}

    @property
    def stddev(self) -> dict[str, Array]:
        """Posterior standard deviations by latent (by quadrature or simulation likewise)."""
        return {name: marginals.stddev(self.distribution(name)) for name in self.names}

    def quantiles(self, probs: Sequence[float] = (0.05, 0.5, 0.95)) -> dict[str, Array]:
        """Quantiles of every entry by itself.

        Args:
            probs: Numbers strictly between 0 and 1.

        Returns:
            Arrays by latent, shape ``(len(probs), *latent shape)``.

        Raises:
            ValueError: If a number is not between 0 and 1.
        """
        each = _validate.entries("probs", probs, "(0.05, 0.95)")
        levels = [_validate.open_unit("probs", prob, "(0.05, 0.95)", 1e-30) for prob in each]
        if not levels:
            raise ValueError("probs must hold a number, got none: write probs=(0.05, 0.95), say.")
        return {name: marginals.quantiles(self.distribution(name), levels) for name in self.names}

    def log_density(self, values: Mapping[str, Array]) -> Array:
        """Log density of q at values of all latents in their supports.

        Args:
            values: What :meth:`sample` returns: arrays of shape ``(*shape, *latent shape)``.

        Returns:
            Shape ``(*shape)``.

        Raises:
            ValueError: If a latent is missing, unknown or of another shape.
        """
        values = _validate.mapping("values", values, "posterior.sample(rng_key)")
        if set(values) != set(self.names):
            raise ValueError(
                f"values must hold every latent and nothing else, got {sorted(values)}: write "
                f"values for {', '.join(self.names)}."
            )
        terms = []
        for name in self.names:
            value, shape = _number(f"values[{name!r}]", values[name]), self._latent(name).shape
            if value.shape[value.ndim - len(shape) :] != shape or value.ndim < len(shape):
                raise ValueError(
                    f"values[{name!r}] must end in the latent's shape {shape}, got shape "
                    f"{value.shape}: write values as sample(...) returns them."
                )
            terms.append(self.distribution(name).log_prob(value))
        return sum(terms, start=jnp.zeros(()))

    def summary(self) -> str:
        """A table of every entry's mean, standard deviation and 90 % interval."""
        lines = marginals.table({name: self.distribution(name) for name in self.names})
        return f"{lines}\n{_NOTE}"

    def predictive(
        self,
        rng_key: PRNGKey,
        num_samples: int = 1000,
        *,
        batch_size: int | None = None,
        **model_args: Any,
    ) -> dict[str, Array]:
        """Draws of everything that the model observes, at new arguments.

        NumPyro's :class:`~numpyro.infer.util.Predictive` runs underneath. Outcomes that are passed
        are not looked at.

        Args:
            rng_key: A JAX key.
            num_samples: Draws of the latents; one prediction each.
            batch_size: Rows at a time; as many as fit 256 MiB of predictions if not given. Results
                that took more than one batch are NumPy arrays.
            **model_args: The model's data arguments, ``X=X_test`` say.

        Returns:
            Arrays by site, shape ``(num_samples, ...)``.

        Raises:
            TypeError: If an argument of the model is missing or unknown.
            ValueError: If an array has other columns than in the fit, or too few or many rows.
        """
        draw_key, site_key = jax.random.split(_validate.rng_key(rng_key))
        num_samples = _validate.positive_int("num_samples", num_samples, _MOST_SAMPLES)
        rows, constants = self._arguments(model_args, "predictive", "predictive(key, {}=...)")
        if batch_size is not None:
            batch_size = _validate.positive_int("batch_size", batch_size)
        draws = self.sample(draw_key, (num_samples,))
        return predictions.predict(self.model, draws, rows, constants, site_key, batch_size)

    def _arguments(
        self, given: Mapping[str, Any], caller: str, example: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's arguments: those with an entry a record, and the others."""
        checked = predictions.check_arguments(
            self.model, given, self.model_kwargs, self.records, caller, example
        )
        rows = {name: value for name, value in checked.items() if name in self.records}
        others = {name: value for name, value in checked.items() if name not in self.records}
        return rows, {**self.model_kwargs, **others}

    def to_arviz(
        self,
        rng_key: PRNGKey | None = None,
        num_samples: int = 1000,
        *,
        public_data: Mapping[str, Any] | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
    ) -> Any:
        """Independent draws for ArviZ, with the privacy facts as attributes.

        Groups ``posterior`` (latents, and ``numpyro.deterministic`` sites that follow from them)
        and ``prior`` need no data, and none is in them. All else comes from ``public_data`` alone.

        Args:
            rng_key: A JAX key; one fixed key if not given, because the draws depend on nothing
                but this posterior.
            num_samples: How many draws.
            public_data: The model's data arguments for rows that may be shown: a public test set,
                say. Adds ``posterior_predictive``; with the outcome among them also
                ``log_likelihood`` and ``observed_data``; and the rest as ``constant_data``. What is
                passed here is written to the export as it is, and no budget covers it.
            dims: Names of a variable's dimensions; plates' names if not given.
            coords: Labels along dimensions, by name.

        Returns:
            :class:`~arviz.InferenceData` (ArviZ 0.x) or ``DataTree`` (ArviZ 1.x).

        Raises:
            ValueError: If names or labels do not fit the dimensions, or arrays the model.
            TypeError: If an argument of the model is missing or unknown.
        """
        key = jax.random.key(0) if rng_key is None else _validate.rng_key(rng_key)
        num_samples = _validate.positive_int("num_samples", num_samples, _MOST_SAMPLES)
        dims = _validate.mapping("dims", dims, "{'w': ['column']}")
        coords = _validate.mapping("coords", coords, "{'column': ['a', 'b']}")
        rows: Mapping[str, Any] = {}
        constants: Mapping[str, Any] = {}
        if public_data is not None:
            public_data = _validate.mapping("public_data", public_data, "{'X': X_test}")
        if public_data is not None:
            rows, constants = self._arguments(
                public_data, "public_data", 'public_data={{"{}": ...}}'
            )
        draws = self.sample(key, (num_samples,))
        prior_key, site_key = jax.random.split(jax.random.fold_in(key, 1))
        derived = exported.deterministics(self.model, self.model_kwargs, self.records, self.space)
        groups = {
            "posterior": exported.of_draws(self.space, draws, derived),
            "prior": exported.of_draws(
                self.space, self._prior_draws(prior_key, num_samples), derived
            ),
        }
        if public_data is not None:
            groups |= exported.of_public_data(
                self.model, draws, rows, constants, public_data, site_key
            )
        return to_arviz(groups, dims, coords, self.attrs)

    def _prior_draws(self, rng_key: PRNGKey, num_draws: int) -> dict[str, Array]:
        """Draws from the prior: the model's, or the earlier posterior that was the prior."""
        if self.prior is not None:
            return replace(self, natural=self.prior.natural).sample(rng_key, (num_draws,))
        return prior_draws(
            self.model, self.records, self.model_kwargs, self.names, rng_key, num_draws
        )

    def as_prior(self) -> Prior:
        """This posterior as the prior of the next study: ``fit(..., prior=earlier.as_prior())``.

        It is factor 0 of that fit, in the place of the model's own priors, which it has in it. New
        clients and new records of old clients can join. Where a person's records are in both
        studies, the two epsilons add up.
        """
        return Prior(self.natural, self.family, self.space, self.attrs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior to one file: JSON and ``.npy`` arrays in a zip, nothing pickled.

        :func:`load` opens it, also where the data has never been. The file holds released values
        and public facts alone: natural parameters, names, the shapes of the data's arrays,
        ``model_kwargs`` and ``attrs``. Model and guide are code, and are not in it.

        Args:
            path: Where to. A file that is there is replaced, whole or not at all.

        Raises:
            FileNotFoundError: If the folder is missing.
            TypeError: If the path is none.
            ValueError: If this posterior does not know the shapes of its data, or takes more than
                4 GiB.
        """
        file.write(path, self.model, self._pieces())

    def _pieces(self) -> file.Pieces:
        return file.Pieces(*(getattr(self, name) for name in file.Pieces._fields))

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


def load(
    path: str | os.PathLike[str],
    model: Model,
    guide: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Posterior:
    """Opens a posterior that :meth:`Posterior.save` wrote; needs no data.

    Args:
        path: The file.
        model: The model that it was fitted with.
        guide: The guide that it was fitted with.
        model_kwargs: Public arguments of the model, over those in the file; needed for those that
            are neither numbers, strings nor arrays, which the file does not hold.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If the path is none.
        ValueError: If the file is damaged, larger than 4 GiB, of another program or of a newer
            version, or the model or guide is another.
    """
    constants = _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}")
    pieces = file.read(path, model, guide, constants)
    return Posterior(model=model, **pieces._asdict())


def _number(name: str, value: Any) -> Array:
    """A value of a latent as an array."""
    array = value if isinstance(value, jax.Array) else predictions.held(name, value)
    if not predictions.is_number(array.dtype):
        raise ValueError(
            f"{name} must be numbers, got {_validate.shown(value)}: write values as sample(...) "
            "returns them."
        )
    return jnp.asarray(array)


def shapes(records: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of records, as JAX holds them: what a posterior may know of its data."""
    canonicalize = jax.dtypes.canonicalize_dtype
    return {
        name: jax.ShapeDtypeStruct(jnp.shape(x), canonicalize(x.dtype))
        for name, x in records.items()
    }
