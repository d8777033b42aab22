"""A NumPyro model as partitioned inference sees it: latents, prior, one record's likelihood."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import IdentityTransform, Transform
from numpyro.ops.provenance import eval_provenance

from numpyro_dppvi._typing import Array, Model, PRNGKey, PyTree
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families import precision
from numpyro_dppvi.families.reading import same, split
from numpyro_dppvi.latents import domains
from numpyro_dppvi.latents.affine import Effect
from numpyro_dppvi.latents.arguments import asked_of, check_arguments
from numpyro_dppvi.latents.curvature import curved
from numpyro_dppvi.latents.fingerprint import evaluated, fingerprint
from numpyro_dppvi.latents.layers import FirstLayers, first_layers
from numpyro_dppvi.latents.meeting import meeting
from numpyro_dppvi.latents.predictor import Predictor, scalar_predictor
from numpyro_dppvi.latents.reasons import WRONG_NUMBER_ERRORS, several_rows_only
from numpyro_dppvi.latents.refusals import refuse_infinite, refuse_moving_support, refuse_sites
from numpyro_dppvi.latents.summation import (
    OneRow,
    Summation,
    Summed,
    imputed,
    log_sum,
    of_one,
    read_summation,
    read_summed,
    with_own_gradient,
)
from numpyro_dppvi.latents.trace import (
    Site,
    Structure,
    Trace,
    dims_of,
    log_prob,
    rescaled,
    run_model,
    structure,
)
from numpyro_dppvi.latents.unseen import unseen_directions

# The number of made-up records on which a model is run to see whether it mixes records.
NUM_TOGETHER = 3

# Of these, NumPyro draws outcomes as if nobody were censored.
_CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)
# What distributions call the ones that they are made of.
_INSIDE = "base_dist", "component_distribution", "component_distributions"
# The most values of an outcome that are listed in place of draws.
_FEW = 12


Fact = TypeVar("Fact")


@dataclass(frozen=True, eq=False)
class Latent:
    """One latent variable.

    Attributes:
        name: Its site name in the model.
        shape: Shape of a value, including plates.
        dims: Plate names of its dimensions; ``None`` for dimensions without a plate.
        support: Support of its prior.
        dtype: The dtype of a value.
        prior: Its prior, if that has no parents; else ``None``.
        transform: Bijection from the base space, in which factors live, to the support. The base
            space is unconstrained unless a guide has chosen another. For a discrete latent the
            two are the same.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    support: Constraint
    dtype: Any
    prior: dist.Distribution | None
    transform: Transform

    @property
    def is_discrete(self) -> bool:
        """Whether its values are integers."""
        return bool(self.support.is_discrete)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a value."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def constrain(self, base: Array) -> Array:
        """Transforms base values to values; leading axes are kept."""
        return base.astype(self.dtype) if self.is_discrete else self.transform(base)

    @property
    def base_shape(self) -> tuple[int, ...]:
        """Shape of a base value."""
        return self.transform.inverse_shape(self.shape)

    @property
    def base_prior(self) -> dist.Distribution | None:
        """The prior of the base value, if the prior is defined by that bijection; else ``None``.

        For example, ``LogNormal`` is defined as the exponential of a normal.
        """
        if self.prior is None:
            return None
        base, transforms = split(self.prior)
        if not same(transforms, [self.transform]):
            return None
        # split() takes off what only sets the shape (to_event, expand): here it is put back.
        return base.expand(self.base_shape[: len(self.base_shape) - base.event_dim])


@dataclass(frozen=True, eq=False)
class LatentSpace:
    """A model as log p(theta) + sum over records of log p(record | theta).

    Attributes:
        latents: The latents, in the model's order.
        log_likelihood_of: ``(theta, row, outcomes) -> scalar``: log density of one record, given
            values of the latents in their supports and arrays without the records' leading axis,
            with other values of the observed sites, by site.
        draw: ``(theta, row, rng_key) -> outcomes``: values of the observed sites, drawn from the
            model. Refuses densities that ``handlers.scale`` changes: nothing has them.
        together: ``(theta, rows, seed, z) -> {site: scalar}``: log likelihood of several records by
            observed site, from one run of the model on all of them. Inference never uses it; it
            should equal the sum over single records (:mod:`numpyro_dppvi.latents.additive`). If
            records have discrete latents, it is of these values ``z`` of them, and they are among
            the sites.
        trace: ``(theta, row, seed) -> sites``: NumPyro's trace of the model on one record;
            latents missing from ``theta`` are drawn from their priors.
        log_density: ``(theta, names) -> scalar``: log density of the named latents and of the
            observed sites that do not depend on records, given values of all latents.
        parents: For each latent, the latents that its prior depends on.
        pseudo_observations: Observed sites that do not depend on records (such as a
            ``numpyro.factor`` that penalises a parameter), with the latents they depend on.
        client_side: Observed sites that depend on records.
        summation: How the discrete latents of a record are summed out.
        row: Shapes and dtypes of one record.
        program: A digest of the computation. Spaces with equal digests are equal and share
            compiled programs.
        effects: Latents in whose places there are effects, those first that others depend on
            (:mod:`numpyro_dppvi.latents.effects`). ``trace`` and ``together`` take values as the
            model has them all the same.
        as_written: The space without effects, if there are any.
    """

    latents: tuple[Latent, ...]
    log_likelihood_of: Callable[..., Array]
    draw: Callable[..., dict[str, Array]]
    together: Callable[..., dict[str, Array]]
    trace: Callable[..., Trace]
    log_density: Callable[[Mapping[str, Array], frozenset[str]], Array]
    parents: Mapping[str, frozenset[str]]
    pseudo_observations: Mapping[str, frozenset[str]]
    client_side: tuple[str, ...]
    summation: Summation
    row: Mapping[str, jax.ShapeDtypeStruct]
    program: str
    effects: Mapping[str, Effect] = field(default_factory=dict)
    as_written: "LatentSpace | None" = None

    def __eq__(self, other: object) -> bool:
        """Whether inference would compute the same with both."""
        return isinstance(other, LatentSpace) and self.program == other.program

    def __hash__(self) -> int:
        """Equal spaces have equal hashes."""
        return hash(self.program)

    def log_likelihood(self, theta: Mapping[str, Array], row: Mapping[str, Array]) -> Array:
        """Log density of one record, with the outcomes that it has."""
        return self.log_likelihood_of(theta, row, {})

    def constrain(self, base: Mapping[str, Array]) -> dict[str, Array]:
        """Transforms base values of any latents to values in their supports."""
        return {lt.name: lt.constrain(base[lt.name]) for lt in self.latents if lt.name in base}

    @property
    def plain(self) -> "LatentSpace":
        """The space of the model's own latents."""
        return self if self.as_written is None else self.as_written

    def apart(self, theta: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """All values as the model has them, and of each effect the log determinant of its scale."""
        values, log_scales = dict(theta), {}
        for name, effect in self.effects.items():
            values[name], log_scales[name] = effect.apart(values, theta[name])
        return values, log_scales

    def together_again(
        self, values: Mapping[str, Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The inverse of :meth:`apart`: values with effects, and the same log determinants."""
        theta, log_scales = dict(values), {}
        for name, effect in self.effects.items():
            theta[name], log_scales[name] = effect.together(values, values[name])
        return theta, log_scales

    def each(
        self,
        function: Callable[[dict[str, Array]], tuple[dict[str, Array], dict[str, Array]]],
        values: Mapping[str, Array],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """One of these two functions of every value along leading axes."""
        if not self.effects:
            return dict(values), {}
        first = self.latents[0]
        axes = jnp.ndim(values[first.name]) - len(first.shape)
        for _ in range(axes):
            function = jax.vmap(function)
        return function(dict(values))

    @property
    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the latents' values."""
        return {latent.name: latent.struct for latent in self.latents}

    @property
    def size(self) -> int:
        """How many numbers a posterior is of."""
        return sum(math.prod(latent.base_shape) for latent in self.latents)

    def causes(self, read: Callable[[Trace], dict[str, Any]]) -> dict[str, Any]:
        """What depends on what: for each array that is read off a record's trace, the latents.

        Args:
            read: Reads arrays off a trace. ``"$data"`` stands for the record among their causes.
        """

        def read_off(theta: Mapping[str, Array], row: Mapping[str, Array]) -> dict[str, Any]:
            return read(self.trace(theta, row))

        return _causes(read_off, self.structs, dict(self.row))

    def facts(self, read: Callable[[Trace], Fact]) -> Fact:
        """What can be read off a record's trace without values, on shapes and dtypes alone."""
        found: list[Fact] = []

        def run(theta: Mapping[str, Array], row: Mapping[str, Array]) -> None:
            found.append(read(self.trace(theta, row)))

        jax.eval_shape(run, self.structs, dict(self.row))
        return found[0]

    # This and two more are not kept by the space itself: of equal spaces only the first is asked,
    # and the next fit of a model does not run it for them again.
    @property
    @functools.lru_cache(maxsize=256)  # noqa: B019
    def fixed_outcomes(self) -> tuple[str, ...]:
        """Those of ``client_side`` whose values are none of latents (as a residual is)."""

        def values(trace: Trace) -> dict[str, Array]:
            return {name: jnp.asarray(trace[name]["value"]) for name in self.client_side}

        found = self.causes(values)
        return tuple(name for name in self.client_side if not found[name] - {"$data"})

    @functools.cached_property
    def entering(self) -> frozenset[str]:
        """The latents that records enter; given these, records say nothing of the others.

        Perhaps more than these: of what is summed out, all that the model has counts.
        """
        # Asked for where factors have 64 bits, too: there jnp.zeros(()) would be of another type.
        with precision.program(self.precision):
            causes = _causes(self.log_likelihood, self.structs, dict(self.row))
        return causes & {latent.name for latent in self.latents}

    @property
    def precision(self) -> np.dtype:
        """The precision of the program in which the model was read."""
        real = (latent.dtype for latent in self.latents if not latent.is_discrete)
        return np.dtype(next(real, jnp.result_type(float)))

    @property
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def predictor(self) -> Predictor | None:
        """The scalar linear predictor of the likelihood, if there is one.

        It is a function of the continuous latents. Its functions take a pair in place of a row:
        values of the discrete latents, and a row.
        """
        return scalar_predictor(self._of_base, self.continuous, self._given)

    @property
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def first_layers(self) -> FirstLayers | None:
        """Products of a record's values with latents, if there are any; without discrete latents.

        Their functions take unconstrained latents and a row.
        """

        def of_base(base: Mapping[str, Array], row: Mapping[str, Array]) -> Array:
            return self.log_likelihood(self.constrain(base), row)

        if any(latent.is_discrete for latent in self.latents):
            return None
        # A server that computes in 64 bits may ask first.
        with precision.program(self.precision):
            return first_layers(of_base, self.continuous, dict(self.row))

    @property
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def unseen(self) -> np.ndarray:
        """Directions of the continuous latents' base values that no record sees, a basis.

        Shape ``(d, m)``; entries are in the order of the latents' names. See ``latents.unseen``.
        """
        return self._of_program(unseen_directions)

    @property
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def meeting(self) -> np.ndarray:
        """Which entries of the continuous latents' base values can matter to one record together.

        Truth values, shape ``(d, d)``; in the order of the latents' names. See ``latents.meeting``.
        """
        return self._of_program(meeting)

    @property
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def curved(self) -> np.ndarray:
        """Which entries of the continuous latents' base values change how much a record tells.

        Truth values, shape ``(d,)``; in the order of the latents' names. See ``latents.curvature``.
        """
        return self._of_program(curved)

    def _of_program(self, read: Callable[..., np.ndarray]) -> np.ndarray:
        """What is read off the program of a record's density, given its discrete latents."""
        with precision.program(self.precision):
            return read(self._of_base, self.continuous, self._given)

    def _of_base(self, base: Mapping[str, Array], given: Any) -> Array:
        """A record's density, of continuous base values; of discrete latents, values are given."""
        values, row = given
        return self.log_likelihood({**self.constrain(base), **values}, row)

    @property
    def _given(self) -> Any:
        """Shapes and dtypes of what is given."""
        discrete = {lt.name: lt.struct for lt in self.latents if lt.is_discrete}
        return discrete, dict(self.row)

    @property
    def continuous(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the base values of the continuous latents."""
        dtype = jnp.result_type(float)
        rest = [latent for latent in self.latents if not latent.is_discrete]
        return {lt.name: jax.ShapeDtypeStruct(lt.base_shape, dtype) for lt in rest}

    @functools.cached_property
    def can_draw(self) -> bool:
        """Whether all outcomes of records can be drawn.

        A ``numpyro.factor`` has none, and a density that ``handlers.scale`` changes is not that of
        what is drawn; nor is that of a censored outcome, for which NumPyro draws what would have
        been observed. And what is a function of latents (a residual, say) is no outcome: another
        value in its place would not move with them.
        """
        others: list[bool] = []

        def values(theta: Mapping[str, Array], row: Mapping[str, Array]) -> dict[str, Array]:
            trace = self.trace(theta, row)
            others.extend(_draws_something_else(trace[name]["fn"]) for name in self.client_side)
            self.draw(theta, row, jax.random.key(0))
            return {name: trace[name]["value"] for name in self.client_side}

        try:
            found = _causes(values, self.structs, dict(self.row))
        except (NotImplementedError, TypeError, AttributeError, ValueError):  # no such method
            return False
        return not any(others) and not any(names - {"$data"} for names in found.values())

    @functools.cached_property
    def few_outcomes(self) -> dict[str, np.ndarray] | None:
        """All values of a record's outcome, on a leading axis, where these are public and few.

        ``None`` for more than one outcome, and where its range depends on records or latents.
        """
        if not self.can_draw or len(self.client_side) != 1:
            return None
        (name,) = self.client_side

        def outcome(trace: Trace) -> tuple[range | None, tuple[int, ...], np.dtype]:
            value = jnp.asarray(trace[name]["value"])
            return domains.integers(trace[name]["fn"].support), value.shape, value.dtype

        try:
            values, shape, dtype = self.facts(outcome)
        except TypeError:  # bounds that are computed
            return None
        if values is None or not 1 < len(values) <= _FEW or math.prod(shape) != 1:
            return None
        return {name: np.reshape(values, (-1, *shape)).astype(dtype)}

    def seen_by(self, rest: frozenset[str]) -> frozenset[str]:
        """The latents that the priors of some, and observed sites without records, depend on."""
        parents = (self.parents[name] for name in rest)
        return rest.union(*parents, *self.pseudo_observations.values())

    def log_prior(self, base: Mapping[str, Array], names: frozenset[str]) -> Array:
        """Log density of the named latents' base values, and of observed sites without records.

        Args:
            base: Base values of all latents.
            names: The latents whose priors are included.
        """
        # The density of a base value is that of the value times the bijection's Jacobian.
        theta = self.constrain(base)
        jacobians = (
            jnp.sum(latent.transform.log_abs_det_jacobian(base[latent.name], theta[latent.name]))
            for latent in self.latents
            if latent.name in names and not latent.is_discrete
        )
        return self.log_density(theta, names) + _total(jacobians)

    def with_transforms(self, transforms: Mapping[str, Transform]) -> "LatentSpace":
        """The same model with other bijections, by latent."""
        latents = tuple(
            replace(latent, transform=transforms.get(latent.name, latent.transform))
            for latent in self.latents
        )
        return fingerprinted(replace(self, latents=latents))


def _draws_something_else(fn: Any) -> bool:
    """Whether draws of a site's distribution are not of its density."""
    # That of a censored outcome may be inside another one (``to_event``, ``mask``, a mixture).
    if isinstance(fn, (dist.Unit, *_CENSORED)):
        return True
    inside = (getattr(fn, name, None) for name in _INSIDE)
    parts = (each if isinstance(each, (list, tuple)) else [each] for each in inside)
    return any(_draws_something_else(each) for part in parts for each in part if each is not None)


def _causes(function: Callable[[Any, Any], PyTree], theta: Mapping[str, Any], record: Any) -> Any:
    """For each output of ``(theta, record) -> tree``, the latents' names that it depends on.

    The function is traced and not computed. The record is called ``"$data"`` among the names.
    """

    # "$data" cannot be the name of a latent or argument.
    def of(**given: Any) -> PyTree:
        record = given.pop("$data")
        return function(given, record)

    return eval_provenance(of, **theta, **{"$data": record})


def from_model(
    model: Model, records: Mapping[str, Any], model_kwargs: Mapping[str, Any] | None = None
) -> LatentSpace:
    """Reads a model's structure from shapes and dtypes; refuses what is not supported, by name.

    The likelihood runs the model on one row at a time, so a model that mixes rows cannot leak one
    record into another's contribution.
    """
    check_arguments(model, records, model_kwargs or {})
    abstract = shapes(records)
    kwargs = dict(model_kwargs or {})
    found = structure(model, abstract, kwargs)
    sites, plates = found.sites, found.plates
    refuse_sites(found, asked_of(model, {*abstract, *kwargs}).unset)

    def run_rows(values: Mapping[str, Array], rows: Mapping[str, Array], seed: Any = 0) -> Trace:
        theta = {name: x for name, x in values.items() if name not in integrated}
        distances = {name: x for name, x in values.items() if name in integrated}
        return run_model(model, rows, kwargs, theta, plates, seed, distances)

    def run(theta: Mapping[str, Array], row: Mapping[str, Array], seed: Any = 0) -> Trace:
        return run_rows(theta, {name: value[None] for name, value in row.items()}, seed)

    # A record that stands for any. Nothing in this function sees one of a client's.
    zeros = {n: jnp.asarray(np.zeros(s.shape[1:], s.dtype), s.dtype) for n, s in abstract.items()}
    # Latents of single records: summed out, or with an integral of one. They are none of q's.
    own = {site.name for site in (*found.summed, *found.unseen)}
    # run_rows reads this, too: until missing entries are known, none is given by its distance.
    integrated: frozenset[str] = frozenset()
    try:
        missing = imputed(run, zeros, found)
        integrated = frozenset(site.name for site in missing)
        summed = read_summed(run_rows, zeros, (*found.summed, *missing))
        latents, parents = _latents(
            run, zeros, [s for s in sites if not s.observed and s.name not in own], summed
        )
    except UnsupportedModelError:
        raise
    except WRONG_NUMBER_ERRORS as error:
        raise UnsupportedModelError(several_rows_only(error)) from error
    values: dict[str, Any] = {lt.name: np.zeros(lt.shape, lt.dtype) for lt in latents}
    client_side, server_side = _sides(run, values, zeros, found, summed)
    # How z is summed out depends on which densities z enters, and so comes last.
    summation = read_summation(run, values, zeros, client_side, plates, summed)

    def densities(trace: Trace, z: Mapping[str, Array]) -> dict[str, Array]:
        terms = {name: log_prob(trace[name], trace, plates) for name in client_side}
        # NumPyro's density outside of a support cannot be relied on; that of an outcome which this
        # z makes impossible must be zero in the sum over z.
        for name in summation.bounded:
            possible = domains.inside(trace[name]["fn"], jnp.asarray(trace[name]["value"]))
            terms[name] = jnp.where(jnp.all(possible), terms[name], -jnp.inf)
        return terms | {one.name: one.log_prob(trace[one.name], z.get(one.name)) for one in summed}

    def together(
        theta: Mapping[str, Array],
        rows: Mapping[str, Array],
        seed: Any = 0,
        z: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        trace = run_rows({**theta, **(z or {})}, rows, seed)
        if found.loop:  # several rows have more sites than one
            observed = (n for n, s in trace.items() if s["type"] == "sample" and s["is_observed"])
            mine = (log_prob(trace[n], trace, plates) for n in observed if n not in server_side)
            return {client_side[0]: _total(mine)}
        return densities(trace, z or {})

    def log_likelihood_of(
        theta: Mapping[str, Array], row: Mapping[str, Array], outcomes: Mapping[str, Array]
    ) -> Array:
        def at(z: Mapping[str, Array]) -> dict[str, Array]:
            trace = run({**theta, **z}, row)
            # Replaced after the run. If the model computes one outcome's mean from another's value,
            # the density is p(y2 | y1) at the observed y1, whose score has expectation zero all the
            # same.
            given = {name: {**trace[name], "value": value} for name, value in outcomes.items()}
            return densities({**trace, **given}, z)

        return log_sum(at, summation)

    if summed:
        log_likelihood_of = with_own_gradient(log_likelihood_of)

    def draw(
        theta: Mapping[str, Array], row: Mapping[str, Array], rng_key: PRNGKey
    ) -> dict[str, Array]:
        # A record's own discrete latents are drawn with its outcomes.
        trace = run(theta, row, jax.random.fold_in(rng_key, 1) if summed else 0)
        keys = jax.random.split(rng_key, len(client_side))
        drawn = {}
        for name, key in zip(client_side, keys, strict=True):
            if rescaled(trace[name], trace, plates):
                raise UnsupportedModelError(
                    f"handlers.scale changes the density of {name!r}, so that its outcomes are "
                    "drawn from another one: leave it out, or write method=DPOptimization()."
                )
            value = trace[name]["fn"].sample(key)
            # Whole numbers may be given where the model has a density, but not be made of draws.
            drawn[name] = value.astype(jnp.result_type(value.dtype, trace[name]["value"]))
        return drawn

    def log_density(theta: Mapping[str, Array], names: frozenset[str]) -> Array:
        # Priors and server-side sites depend on no record (_parents and _sides saw to that), so
        # that any row will do.
        trace = run(theta, zeros)
        # In the model's order: a set's own differs between processes, and with it the rounding.
        asked = (*(name for name in trace if name in names), *server_side)
        return _total(log_prob(trace[name], trace, plates) for name in asked)

    space = LatentSpace(
        latents=latents,
        log_likelihood_of=log_likelihood_of,
        draw=draw,
        together=together,
        trace=run,
        log_density=log_density,
        parents=parents,
        pseudo_observations=server_side,
        client_side=client_side,
        summation=summation,
        row={name: jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for name, s in abstract.items()},
        program="",
    )
    return fingerprinted(space)


def shapes(records: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of arrays, as JAX stores them (without x64, float64 becomes float32)."""
    canonicalize = jax.dtypes.canonicalize_dtype
    return {
        name: jax.ShapeDtypeStruct(jnp.shape(value), canonicalize(value.dtype))
        for name, value in records.items()
    }


def several(row: Mapping[str, jax.ShapeDtypeStruct], number: int) -> dict[str, Any]:
    """Shapes and dtypes of a number of records."""
    return {name: jax.ShapeDtypeStruct((number, *s.shape), s.dtype) for name, s in row.items()}


def fingerprinted(space: LatentSpace) -> LatentSpace:
    """The space with a digest of everything that inference computes with the model."""
    latents, row, theta, dtype = space.latents, space.row, space.structs, jnp.result_type(float)
    base = {lt.name: jax.ShapeDtypeStruct(lt.base_shape, dtype) for lt in latents}
    names = frozenset(base)
    # One row and several: a model may take different branches for them.
    rows = [several(row, number) for number in (1, NUM_TOGETHER)]
    # A program has no names in it: two models may compute the same for latents of other names.
    facts = [(latent.name, latent.shape, latent.base_shape, latent.dims) for latent in latents]
    is_sum = bool(space.summation.summed)
    sums = [jax.make_jaxpr(space.log_likelihood)(theta, dict(row))] if is_sum else []
    program = f"{facts} " + fingerprint(
        *(jax.make_jaxpr(space.together)(theta, each) for each in rows),
        *sums,
        jax.make_jaxpr(lambda theta: space.log_density(theta, names))(theta),
        jax.make_jaxpr(lambda b: [latent.transform(b[latent.name]) for latent in latents])(base),
    )
    return replace(space, program=program)


def _latents(
    run: OneRow, zeros: Mapping[str, Array], sites: Sequence[Site], summed: Sequence[Summed]
) -> tuple[tuple[Latent, ...], dict[str, frozenset[str]]]:
    """The latents, and the parents of each."""
    names = [site.name for site in sites]
    rescaled: set[str] = set()
    values: dict[str, np.ndarray] = {}

    def read() -> dict[str, PyTree]:
        trace = run({}, zeros)
        # handlers.scale changes a prior's density, so it is no longer the distribution's.
        rescaled.update(name for name in names if trace[name]["scale"] is not None)
        # Of a value, shape and dtype are all that matters. Returned, it would have to be drawn.
        values.update({n: np.zeros(jnp.shape(v := trace[n]["value"]), v.dtype) for n in names})
        return {n: (trace[n]["fn"], trace[n]["fn"].support) for n in names}

    # With numbers, not tracers: families look at a prior's parameters to say if it is theirs.
    facts = evaluated(read)
    parents = _parents(run, zeros, values, summed)
    latents = []
    for site in sites:
        (fn, support), value = facts[site.name], values[site.name]
        # Whether the prior is a distribution with known parameters, which could be a factor as it
        # is.
        readable = not parents[site.name] and site.name not in rescaled
        latents.append(
            Latent(
                name=site.name,
                shape=jnp.shape(value),
                dims=dims_of(site.plates, fn),
                support=support,
                dtype=value.dtype if site.discrete else jnp.result_type(float),
                prior=fn if readable else None,
                transform=IdentityTransform() if site.discrete else biject_to(support),
            )
        )
        refuse_infinite(site.name, support)
    return tuple(latents), parents


def _parents(
    run: OneRow,
    zeros: Mapping[str, Array],
    values: Mapping[str, np.ndarray],
    summed: Sequence[Summed],
) -> dict[str, frozenset[str]]:
    """The latents that each latent's prior depends on; refuses dependence on data."""

    # A record's own discrete latents are part of the record.
    def parameters(theta: Mapping[str, Array], record: Any) -> dict[str, PyTree]:
        row, z = record
        trace = run({**theta, **z}, row)
        return {
            name: (jax.tree.leaves(trace[name]["fn"]), jax.tree.leaves(trace[name]["fn"].support))
            for name in values
        }

    # Zeros as values: provenance follows operations, and does not look at numbers.
    found = _causes(parameters, values, (dict(zeros), of_one(summed)))
    parents = {}
    for name, (fn_leaves, support_leaves) in found.items():
        # The prior is evaluated by the server without privacy, so it must not depend on records.
        if any("$data" in leaf for leaf in fn_leaves):
            raise UnsupportedModelError(
                f"the prior of latent {name!r} depends on the data, which would reveal records "
                "unaccounted for: use public constants (model_kwargs) instead."
            )
        if any(leaf for leaf in support_leaves):
            raise UnsupportedModelError(
                f"the support of latent {name!r} depends on another latent, but the approximation "
                "needs a fixed support: draw it on a fixed support and rescale it."
            )
        parents[name] = frozenset().union(*fn_leaves)
    return parents


def _sides(
    run: OneRow,
    values: Mapping[str, np.ndarray],
    zeros: Mapping[str, Array],
    structure: Structure,
    summed: Sequence[Summed],
) -> tuple[tuple[str, ...], dict[str, frozenset[str]]]:
    """Splits observed sites into those that depend on records and those that act as priors."""
    observed = [site for site in structure.sites if site.observed]
    plates = structure.plates

    def log_probs(
        theta: Mapping[str, Array], record: Any
    ) -> tuple[dict[str, Array], dict[str, PyTree]]:
        row, z = record
        trace = run({**theta, **z}, row)
        density = {site.name: log_prob(trace[site.name], trace, plates) for site in observed}
        return density, {s.name: jax.tree.leaves(trace[s.name]["fn"].support) for s in observed}

    found, supports = _causes(log_probs, values, (dict(zeros), of_one(summed)))
    for name, leaves in supports.items():
        # Bounds from data are fine: Uniform(0, exposure) with the exposure a column.
        refuse_moving_support(name, frozenset().union(*leaves) - {"$data"})
    client_side, server_side = [], {}
    for site in observed:
        # A site in the plate over records belongs to the clients even if its value is a constant
        # of the model, because it occurs once per record.
        by_plate = any(plate.name in plates for plate in site.plates)
        if by_plate or "$data" in found[site.name]:
            client_side.append(site.name)
        else:
            server_side[site.name] = found[site.name]
    if not client_side:
        raise UnsupportedModelError(
            "no observed site of the model depends on data: pass the records to "
            "numpyro.sample('y', ..., obs=y)."
        )
    return tuple(client_side), server_side


def _total(terms: Iterable[Array]) -> Array:
    return sum(terms, start=jnp.zeros(()))
