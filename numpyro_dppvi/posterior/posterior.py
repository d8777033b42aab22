"""The posterior: a distribution over the latents that holds no records."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi import _html, _validate, guides
from numpyro_dppvi._typing import Array, Model, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.reading import pushed
from numpyro_dppvi.latents import LatentSpace, outputs
from numpyro_dppvi.latents.arguments import asked_of
from numpyro_dppvi.latents.tables import Table, by_argument, is_records
from numpyro_dppvi.posterior import exported, file, marginals, predictions
from numpyro_dppvi.posterior.prior import Prior, listed
from numpyro_dppvi.posterior.to_arviz import to_arviz

_MOST_SAMPLES = 10**8
# What a plate of clients may be called for their names to be its labels.
_CLIENT_DIMS = ("client", "clients")

# What others call it, and what it is called here.
_DRAWS = "sample(jax.random.key(1), (1000,))"
_CALLED = {
    **dict.fromkeys(("samples", "draws", "get_samples", "sample_posterior"), _DRAWS),
    **dict.fromkeys(("print_summary", "describe"), "summary()"),
    **dict.fromkeys(("means", "loc"), "mean"),
    **dict.fromkeys(("std", "sd", "stdev", "stds", "scale"), "stddev"),
    **dict.fromkeys(("median", "quantile", "hpdi", "interval"), "quantiles((0.05, 0.5, 0.95))"),
    **dict.fromkeys(
        ("predict", "posterior_predictive", "sample_posterior_predictive"),
        "predictive(jax.random.key(1), X=X_test)",
    ),
    **dict.fromkeys(("to_inference_data", "to_inferencedata", "inference_data"), "to_arviz()"),
    "log_prob": "log_density(values)",
}

_NOTE = (
    "These numbers describe the approximation. Its draws are independent, so R-hat and effective\n"
    "sample size do not apply and say nothing about its distance from the true posterior."
)


@dataclass(frozen=True, eq=False)
class Posterior:
    """The approximate posterior q.

    Attributes:
        natural: Natural parameters by latent, in the base space.
        family: The family of q.
        space: The latents: names, shapes and bijections.
        model: The model, for predictions.
        model_kwargs: The model's public arguments.
        attrs: Strings and numbers about the fit, for export.
        records: The (public) shapes and dtypes of the arrays that the model was fitted to.
        prior: The earlier posterior that served as prior; ``None`` for the model's own.

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

    if not TYPE_CHECKING:  # a type checker would take any name at all for one of ours

        def __getattr__(self, name: str) -> Any:
            said, instead = f"Posterior has no attribute {name!r}", _CALLED.get(name)
            if instead is not None:
                raise AttributeError(f"{said}: write posterior.{instead}.")
            raise AttributeError(f"{said}.", name=name, obj=self)

    def sample(self, rng_key: PRNGKey, shape: Sequence[int] = ()) -> dict[str, Array]:
        """Independent draws of all latents, in their supports.

        Args:
            rng_key: A JAX key.
            shape: Leading axes, such as ``(1000,)``.

        Returns:
            Arrays by latent, shape ``(*shape, *latent shape)``.
        """
        key = _validate.rng_key(rng_key)
        shape = _validate.shape("shape", shape)
        coordinates = self.family.coordinates(self.natural)
        # q lives on base values; the bijections carry draws to the supports.
        theta = self.space.constrain(self.family.sample(key, coordinates, shape))
        return _apart(self.space, theta) if self.space.effects else theta

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the latents, in the model's order."""
        return tuple(latent.name for latent in self.space.latents)

    def distribution(self, latent: str) -> dist.Distribution:
        """One latent's distribution as a NumPyro distribution.

        Of a latent z that enters as ``mean + scale * z``, ``FisherScoring`` knows that sum, and not
        z by itself: this is the distribution of ten thousand draws then, and has no density.

        Raises:
            KeyError: If the model has no such latent.
        """
        if not isinstance(latent, str) or latent not in self.names:
            raise KeyError(
                f"latent must be one of {', '.join(self.names)}, got {_validate.shown(latent)}."
            )
        if latent in self.space.effects:
            return marginals.Drawn(self.sample(jax.random.key(0), (marginals.NUM_DRAWS,))[latent])
        return self._of_base(latent)

    def _of_base(self, latent: str) -> dist.Distribution:
        base = self.family.distribution(self.family.coordinates(self.natural))[latent]
        return pushed(base, self.space.latents[self.names.index(latent)].transform)

    @property
    def mean(self) -> dict[str, Array]:
        """Posterior means by latent; by quadrature or simulation for constrained latents."""
        return {name: marginals.mean(self.distribution(name)) for name in self.names}

    @property
    def stddev(self) -> dict[str, Array]:
        """Posterior standard deviations by latent, computed like :attr:`mean`."""
        return {name: marginals.stddev(self.distribution(name)) for name in self.names}

    def quantiles(self, probs: Sequence[float] = (0.05, 0.5, 0.95)) -> dict[str, Array]:
        """Marginal quantiles of every entry.

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
            raise ValueError(
                "probs must not be empty, got no entries: write probs=(0.05, 0.95), say."
            )
        return {name: marginals.quantiles(self.distribution(name), levels) for name in self.names}

    def log_density(self, values: Mapping[str, Array]) -> Array:
        """Log density of q at values of all latents in their supports.

        Args:
            values: Arrays of shape ``(*shape, *latent shape)``, as from :meth:`sample`.

        Returns:
            Shape ``(*shape)``.

        Raises:
            ValueError: If a latent is missing or unknown or has another shape.
        """
        values = _validate.mapping("values", values, "posterior.sample(rng_key)")
        if set(values) != set(self.names):
            raise ValueError(
                f"values must hold exactly the latents, got {sorted(values)}: write "
                f"values for {', '.join(self.names)}."
            )
        given: dict[str, Array] = {}
        leading: dict[str, tuple[int, ...]] = {}
        for latent in self.space.latents:
            name, shape = latent.name, latent.shape
            value = _number(f"values[{name!r}]", values[name])
            axes = value.ndim - len(shape)
            if axes < 0 or value.shape[axes:] != shape:
                raise ValueError(
                    f"values[{name!r}] must end in the latent's shape {shape}, got shape "
                    f"{value.shape}: write values in the shapes that sample(...) returns."
                )
            given[name], leading[name] = value, value.shape[:axes]
        try:
            jnp.broadcast_shapes(*leading.values())
        except ValueError:
            raise ValueError(
                f"values must agree in the axes before the latents' own, got {leading}: write "
                "values in the shapes that sample(...) returns."
            ) from None
        given, log_scales = self.space.each(self.space.together_again, given)
        terms, base = [], {}
        for latent in self.space.latents:
            name, value = latent.name, given[latent.name]
            terms.append(self._of_base(name).log_prob(value))
            base[name] = value if latent.is_discrete else latent.transform.inv(value)
        # The product of the marginals, and what latents of one member know of each other: Jacobians
        # of the bijections are in both, and cancel.
        dependence = self.family.log_dependence(self.family.coordinates(self.natural), base)
        # A latent's density is that of its effect, times the scale.
        return sum((*terms, *log_scales.values()), start=dependence)

    def summary(self) -> str:
        """A table of every entry's mean, standard deviation and 90 % interval."""
        rows, said = self._table()
        lines = [f"{row[0]:<24} {' '.join(f'{cell:>10}' for cell in row[1:])}" for row in rows]
        return _html.Text("\n".join([*lines, *said]))

    def __repr__(self) -> str:
        """The latents with their shapes; ``summary()`` has the numbers."""
        shapes = (f"{latent.name} {latent.shape}" for latent in self.space.latents)
        return f"<Posterior of {', '.join(shapes)}>"

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def _repr_html_(self) -> str:
        rows, said = self._table()
        return _html.table(rows[0], rows[1:]) + "".join(map(_html.paragraph, said))

    def _table(self) -> tuple[list[list[str]], list[str]]:
        """The summary's rows, and what is said below them."""
        rows, left_out = marginals.table({name: self.distribution(name) for name in self.names})
        return rows, [*[f"... and {left_out} more entries"] * bool(left_out), _NOTE]

    def predictive(
        self,
        rng_key: PRNGKey,
        num_samples: int = 1000,
        *,
        batch_size: int | None = None,
        **model_args: Any,
    ) -> dict[str, Array]:
        """Posterior predictive draws at new arguments of the model.

        It uses NumPyro's :class:`~numpyro.infer.util.Predictive`. Outcomes that are passed are
        ignored. A column that the model observes and computes outcomes from (as with ``obs_mask``,
        or an earlier outcome) stays as it is passed; missing entries of it are drawn, and so is all
        of it if the argument is left at ``None``.

        Args:
            rng_key: A JAX key.
            num_samples: How many draws of the latents, with one prediction each.
            batch_size: Rows at a time; by default as many as fit 256 MiB of predictions. With more
                than one batch, results are NumPy arrays.
            **model_args: The model's data arguments, such as ``X=X_test``.

        Returns:
            Arrays by site, shape ``(num_samples, ...)``.

        Raises:
            TypeError: If an argument of the model is missing or unknown.
            ValueError: If an array has other columns than in the fit, or arrays differ in length;
                if an entry is NaN, and the model does not say what a missing one is; if the model
                does not run on the arguments, as with floats for indices.
        """
        draw_key, site_key = jax.random.split(_validate.rng_key(rng_key))
        if is_records(num_samples):
            names = list(asked_of(self.model, self.model_kwargs).needed)
            raise TypeError(
                f"num_samples must be a whole number, got {_validate.shown(num_samples)}: write "
                f"predictive(key, **table[{names}]) for predictions at a table's rows."
            )
        num_samples = _validate.positive_int("num_samples", num_samples, _MOST_SAMPLES)
        rows, constants = self._arguments(model_args, "predictive", "predictive(key, {}=...)")
        if batch_size is not None:
            batch_size = _validate.positive_int("batch_size", batch_size)
        draws = self.sample(draw_key, (num_samples,))
        with predictions.in_words():
            predictions.check_missing(self.space.plain, self.model, draws, rows, constants)
            return predictions.predict(self.model, draws, rows, constants, site_key, batch_size)

    def _arguments(
        self, given: Mapping[str, Any], caller: str, example: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's arguments, split into those with an entry per record and the others."""
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
        public_data: Mapping[str, Any] | Table | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
        coords: Mapping[str, Sequence[Any]] | None = None,
    ) -> Any:
        """Independent draws for ArviZ, with facts about privacy as attributes.

        The groups ``posterior`` (latents and ``numpyro.deterministic`` sites that depend on them
        only) and ``prior`` need no data. All other groups are computed from ``public_data``.

        Args:
            rng_key: A JAX key; a fixed one by default.
            num_samples: How many draws.
            public_data: The model's data arguments, or a table with such columns, for rows that may
                be published, such as a public test set. Adds ``posterior_predictive``; if the
                outcome is included, ``log_likelihood`` and ``observed_data``; and the rest as
                ``constant_data``. The export contains these data as they are; no budget covers
                them.
            dims: Names of a variable's dimensions; names of plates by default.
            coords: Labels along dimensions, by name. Clients' names are those of a dimension (a
                plate) called ``client`` or ``clients``, in the order of the fit's data. Where data
                had a table for an argument, ``X`` say, its columns are those of a dimension of
                that name: ``dims={"w": ["X"]}``.

        Returns:
            :class:`~arviz.InferenceData` (ArviZ 0.x) or ``DataTree`` (ArviZ 1.x).

        Raises:
            ValueError: If names or labels do not fit the dimensions, or arrays the model.
            TypeError: If an argument of the model is missing or unknown.
        """
        # No secret: draws of a released distribution reveal nothing that it does not.
        key = jax.random.key(0) if rng_key is None else _validate.rng_key(rng_key)
        num_samples = _validate.positive_int("num_samples", num_samples, _MOST_SAMPLES)
        dims = _validate.mapping("dims", dims, "{'w': ['column']}")
        coords = _validate.mapping("coords", coords, "{'column': ['a', 'b']}")
        rows: Mapping[str, Any] = {}
        constants: Mapping[str, Any] = {}
        if public_data is not None:
            public_data = by_argument(public_data, self.model, self.model_kwargs, "public_data")
            public_data = _validate.mapping("public_data", public_data, "{'X': X_test}")
            rows, constants = self._arguments(
                public_data, "public_data", 'public_data={{"{}": ...}}'
            )
        # The draws are those of sample(key), whatever other groups there are.
        draws = self.sample(key, (num_samples,))
        prior_key, site_key = jax.random.split(jax.random.fold_in(key, 1))
        derived = outputs.derived(self.model, self.records, self.model_kwargs, self.space.structs)
        each = {"posterior": draws, "prior": self._prior_draws(prior_key, num_samples)}
        groups = {name: exported.of_draws(self.space, x, derived) for name, x in each.items()}
        if public_data is not None:
            with predictions.in_words():
                groups |= exported.of_public_data(
                    self.model, self.space.plain, draws, rows, constants, public_data, site_key
                )
        # What fit wrote into the attributes, as JSON: names of clients, and of tables' columns.
        known = dict.fromkeys(_CLIENT_DIMS, listed(self.attrs, "clients"))
        known |= {name: listed(self.attrs, f"columns_{name}") for name in self.records}
        return to_arviz(groups, dims, coords, self.attrs, known)

    def _prior_draws(self, rng_key: PRNGKey, num_draws: int) -> dict[str, Array]:
        """Draws from the prior: the model's, or the earlier posterior that served as prior."""
        # The model's own priors were replaced by it.
        if self.prior is not None:
            return replace(self, natural=self.prior.natural).sample(rng_key, (num_draws,))
        return outputs.prior_draws(
            self.model, self.records, self.model_kwargs, self.names, rng_key, num_draws
        )

    def as_prior(self) -> Prior:
        """This posterior as the prior of another study: ``fit(..., prior=earlier.as_prior())``.

        It replaces the model's own priors, which it already includes. The new study may have new
        clients, and new records of old ones, but not the same records again, which would count
        twice. For a person with records in both studies, the two epsilons add up.
        """
        return Prior(self.natural, self.family, self.space, self.attrs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the posterior to a zip of JSON and ``.npy`` arrays; nothing is pickled.

        :func:`load` opens it, on any machine and without the data. The file holds released values
        and public facts only: natural parameters, names, the shapes of the data's arrays,
        ``model_kwargs`` and ``attrs``, but not the code of model and guide.

        Args:
            path: Where to save it. An existing file is replaced atomically.

        Raises:
            FileNotFoundError: If the folder is missing.
            TypeError: If the path is not a path.
            ValueError: If this posterior lacks the shapes of its data, or takes more than 4 GiB.
        """
        file.write(_validate.path("path", path), self.model, self._pieces())

    def _pieces(self) -> file.Pieces:
        # The model is read again from the shapes of its data.
        if not self.records:
            raise ValueError(
                "records must hold the shapes of the data, got an empty mapping: save or pickle a "
                "posterior returned by fit(...) or pvi(...).posterior(...)."
            )
        return file.Pieces(*(getattr(self, name) for name in file.Pieces._fields))

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which takes the model by its name; :meth:`save` needs no pickle."""
        return _unpickled, (self.model, *file.pickled(self._pieces()))

    def __copy__(self) -> "Posterior":
        # copy would go by __reduce__, and read the model anew.
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Posterior":
        """With mappings of its own; arrays, model and space cannot change."""
        constants = copy.deepcopy(dict(self.model_kwargs), memo)
        return replace(self, model_kwargs=constants, attrs=dict(self.attrs))

    @property
    def params(self) -> dict[str, Array]:
        """Parameters for :meth:`guide`, with the names of NumPyro's automatic guides."""
        return guides.params(self.family, self.family.coordinates(self.natural))

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """A NumPyro guide that draws every latent from this posterior; ignores its arguments.

        Pass it to ``numpyro.infer.Predictive`` with :attr:`params`.
        """
        return guides.draw(self.space, self.family, self.params)


@compiled("space", quick=True)
def _apart(space: LatentSpace, theta: Mapping[str, Array]) -> dict[str, Array]:
    return space.each(space.apart, theta)[0]


def called_here(name: str) -> str | None:
    """What a posterior calls what has this name here or elsewhere; ``None`` for other names."""
    if not name.startswith("_") and hasattr(Posterior, name):
        return f"{name}(...)" if callable(getattr(Posterior, name)) else name
    return _CALLED.get(name)


def load(
    path: str | os.PathLike[str],
    model: Model,
    guide: Any = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Posterior:
    """Loads a posterior saved by :meth:`Posterior.save`; needs no data.

    Args:
        path: The file.
        model: The model that it was fitted with.
        guide: The guide that it was fitted with; ``None`` if ``fit`` was given none.
        model_kwargs: Public arguments of the model, which override those in the file. Arguments
            other than numbers, strings and arrays are not in the file and must be passed.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If the path is not a path.
        ValueError: If the file is damaged, larger than 4 GiB, or from another program or a newer
            version, or was made with another model or guide.
    """
    constants = _validate.mapping("model_kwargs", model_kwargs, "{'num_groups': 3}")
    pieces = file.read(path, model, guide, constants)
    return Posterior(model=model, **pieces._asdict())


def _unpickled(model: Model, *kept: Any) -> Posterior:
    """What pickle calls."""
    return Posterior(model=model, **file.unpickled(model, *kept)._asdict())


def _number(name: str, value: Any) -> Array:
    """A value of a latent as an array."""
    array = value if isinstance(value, jax.Array) else predictions.held(name, value)
    if not predictions.is_number(array.dtype):
        raise ValueError(
            f"{name} must be numbers, got {_validate.shown(value)}: write values in the shapes "
            "that sample(...) returns."
        )
    return jnp.asarray(array)
