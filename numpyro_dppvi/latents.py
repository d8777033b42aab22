"""What a NumPyro model means to partitioned inference: latents, prior, one record's likelihood.

The only module that runs a user's model under ``numpyro.handlers``. Structure is read from shapes
and dtypes and from rows of zeros; no value of a record is looked at.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform, Transform
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_dppvi._typing import Array, Model, PyTree, Records
from numpyro_dppvi._validate import UnsupportedModelError

_CONCRETE_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclass(frozen=True, eq=False)
class Latent:
    """One latent variable.

    Attributes:
        name: Its site name in the model.
        shape: Shape of a value, plates included.
        base_shape: Shape of its unconstrained counterpart.
        transform: Bijection from unconstrained values to the support of the prior.
        dims: Names of the leading dimensions that plates give; ``None`` for the others.
        base_prior: The prior of the unconstrained value where it is a distribution without
            parents that the bijection's definition shows directly (``Normal``, ``LogNormal``);
            else ``None``.
    """

    name: str
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    transform: Transform
    dims: tuple[str | None, ...]
    base_prior: dist.Distribution | None


@dataclass(frozen=True, eq=False)
class LatentSpace:
    """A model as log p(theta) + sum over records of log p(record | theta).

    Attributes:
        latents: The latents, in the model's order.
        log_likelihood: ``(theta, row) -> scalar``: log density of one record, given values of
            the latents in their supports and arrays without the records' leading axis.
        log_prior: ``(base, names) -> scalar``: log density of the named latents (and, always, of
            observed sites that no record enters), given unconstrained values of all latents.
        parents: For each latent, the latents that its prior depends on.
        pseudo_observations: Observed sites that no record enters (a ``numpyro.factor`` that
            penalises a parameter, say), with the latents that each depends on.
    """

    latents: tuple[Latent, ...]
    log_likelihood: Callable[[Mapping[str, Array], Mapping[str, Array]], Array]
    log_prior: Callable[[Mapping[str, Array], frozenset[str]], Array]
    parents: Mapping[str, frozenset[str]]
    pseudo_observations: Mapping[str, frozenset[str]]

    def constrain(self, base: Mapping[str, Array]) -> dict[str, Array]:
        """Unconstrained values to values in the supports; leading axes pass through."""
        return {latent.name: latent.transform(base[latent.name]) for latent in self.latents}


@dataclass(frozen=True)
class _Site:
    """Static facts of one sample site."""

    name: str
    observed: bool
    discrete: bool
    plates: tuple[tuple[str, int, int], ...]  # name, size, dim


class _ForcedPlates(Messenger):
    """Makes the named plates yield the first ``num_rows`` indices, whatever size they state."""

    def __init__(self, fn: Model, names: frozenset[str], num_rows: int) -> None:
        super().__init__(fn)
        self.names = names
        self.num_rows = num_rows

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.names:
            msg["args"] = (msg["args"][0], self.num_rows)
            msg["value"] = jnp.arange(self.num_rows)


def from_model(
    model: Model, records: Records, model_kwargs: Mapping[str, Any] | None = None
) -> LatentSpace:
    """Reads a model's structure.

    Args:
        model: A NumPyro model.
        records: Arrays or ``jax.ShapeDtypeStruct`` by argument name; only shapes and dtypes count.
        model_kwargs: The model's other, public arguments.

    Returns:
        The latent space. Its likelihood calls the model with one row at a time, so that a model
        that mixes rows cannot leak one record into another's contribution.

    Raises:
        UnsupportedModelError: Names the argument or latent that stands in the way.
    """
    kwargs = dict(model_kwargs or {})
    check_arguments(model, records, kwargs)
    shapes = {k: jax.ShapeDtypeStruct(jnp.shape(v), v.dtype) for k, v in records.items()}
    sites, plates = _data_plates(model, shapes, kwargs)
    _refuse_local_or_discrete(sites, plates)

    def run(theta: Mapping[str, Array], row: Mapping[str, Array]) -> dict[str, Any]:
        one_row = {name: value[None] for name, value in row.items()}
        return _trace(model, one_row, kwargs, theta, plates, num_rows=1)

    zeros = {name: jnp.zeros(s.shape[1:], s.dtype) for name, s in shapes.items()}
    latents, parents = _latents(run, zeros, [site for site in sites if not site.observed])
    client_side, server_side = _sides(run, latents, zeros, sites, plates)

    def log_likelihood(theta: Mapping[str, Array], row: Mapping[str, Array]) -> Array:
        trace = run(theta, row)
        return _total(_log_prob(trace[name], trace, plates) for name in client_side)

    def log_prior(base: Mapping[str, Array], names: frozenset[str]) -> Array:
        theta = {latent.name: latent.transform(base[latent.name]) for latent in latents}
        trace = run(theta, zeros)
        terms = [_log_prob(trace[name], trace, plates) for name in (*names, *server_side)]
        terms += [
            jnp.sum(latent.transform.log_abs_det_jacobian(base[latent.name], theta[latent.name]))
            for latent in latents
            if latent.name in names
        ]
        return _total(terms)

    return LatentSpace(latents, log_likelihood, log_prior, parents, server_side)


def check_arguments(model: Model, records: Records, model_kwargs: Mapping[str, Any]) -> None:
    """Refuses data that the model has no argument for, and arguments that nothing fills."""
    both = sorted(set(records) & set(model_kwargs))
    if both:
        raise UnsupportedModelError(
            f"{both[0]!r} is in both data and model_kwargs: keep it in data if it holds records, "
            "in model_kwargs if it is public."
        )
    parameters = inspect.signature(model).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
    for where, given in (("data", records), ("model_kwargs", model_kwargs)):
        unknown = [name for name in given if name not in parameters]
        if unknown:
            raise UnsupportedModelError(
                f"the model has no argument {unknown[0]!r}, which {where} holds; it takes "
                f"{', '.join(names)}: rename the entry of {where}."
            )
    missing = [
        name
        for name in names
        if parameters[name].default is inspect.Parameter.empty
        and name not in records
        and name not in model_kwargs
    ]
    if missing:
        raise UnsupportedModelError(
            f"the model needs the argument {missing[0]!r}, which neither data nor model_kwargs "
            f"holds: add data={{{missing[0]!r}: ...}} if it holds records, or "
            f"model_kwargs={{{missing[0]!r}: ...}} if it is public."
        )


def _trace(
    model: Model,
    rows: Records,
    kwargs: Mapping[str, Any],
    theta: Mapping[str, Array] | None,
    plates: frozenset[str],
    num_rows: int,
) -> dict[str, Any]:
    """Runs the model on some rows; ``theta`` fixes the latents."""
    forced = _ForcedPlates(model, plates, num_rows)
    seeded = handlers.seed(handlers.substitute(forced, data=dict(theta or {})), rng_seed=0)
    with handlers.block():  # a caller's own handlers must not see this run
        return handlers.trace(seeded).get_trace(**rows, **kwargs)


def _facts(model: Model, shapes: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[_Site]:
    """Static facts of every sample site, with abstract rows."""
    found: list[_Site] = []

    def run(rows: Records) -> None:
        trace = _trace(model, rows, kwargs, None, frozenset(), 1)
        for name, site in trace.items():
            if site["type"] == "param" and jax.tree.leaves(site["value"]):
                raise UnsupportedModelError(
                    f"the model calls numpyro.param({name!r}), which has no prior and so no "
                    "factor: give it a prior with numpyro.sample."
                )
            if site["type"] == "sample":
                frames = tuple((f.name, f.size, f.dim) for f in site["cond_indep_stack"])
                discrete = bool(site["fn"].support.is_discrete)
                found.append(_Site(name, site["is_observed"], discrete, frames))

    try:
        jax.eval_shape(run, dict(shapes))
    except _CONCRETE_VALUE_ERRORS as error:
        raise UnsupportedModelError(
            "the model's shape or control flow depends on the values of its data (an int(...), "
            "len(np.unique(...)), a boolean index or an if on an array): pass such a number as a "
            "public constant, model_kwargs={'num_groups': 8}."
        ) from error
    return found


def _data_plates(
    model: Model, shapes: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[list[_Site], frozenset[str]]:
    """Sites, and the plates whose length is the number of records.

    A plate is one of records if its size follows the number of rows, or if it has the size of
    the data and holds an observed site but no latent (a size written down as a number).
    """
    num_rows = next(iter(shapes.values())).shape[0]
    sites = _facts(model, shapes, kwargs)

    def longer(s: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows + 1, *s.shape[1:]), s.dtype)

    names: set[str] = set()
    with_latent = {name for s in sites if not s.observed for name, _, _ in s.plates}
    for site in sites:
        for name, size, _ in site.plates:
            if site.observed and size == num_rows and name not in with_latent:
                names.add(name)
    fixed = {(site.name, *plate) for site in sites for plate in site.plates}
    try:
        grown = _facts(model, {k: longer(s) for k, s in shapes.items()}, kwargs)
    except (TypeError, ValueError):  # a size written down as a number cannot grow
        return sites, frozenset(names)
    grown_plates = {(site.name, *plate) for site in grown for plate in site.plates}
    names |= {name for _, name, _, _ in fixed - grown_plates}
    return sites, frozenset(names)


def _refuse_local_or_discrete(sites: list[_Site], plates: frozenset[str]) -> None:
    latents = [site for site in sites if not site.observed]
    for site in latents:
        inside = [name for name, _, _ in site.plates if name in plates]
        if inside:
            raise UnsupportedModelError(
                f"latent {site.name!r} is inside the plate {inside[0]!r} of records: every record "
                "would have its own, which no client may share. If it is the outcome, observe it "
                f"with numpyro.sample({site.name!r}, ..., obs=...); else sum or integrate it out."
            )
        if site.discrete:
            raise UnsupportedModelError(
                f"latent {site.name!r} is discrete, and a continuous approximation cannot follow "
                "it: sum it out (dist.MixtureSameFamily), or observe it with obs=... if it is data."
            )
    if not latents:
        raise UnsupportedModelError(
            "the model has no latent: draw what is to be learnt with numpyro.sample and a prior."
        )
    if not any(site.observed for site in sites):
        raise UnsupportedModelError(
            "the model observes nothing: pass the outcome, numpyro.sample('y', ..., obs=y), and "
            "put it into data={'y': ...}."
        )


def _latents(
    run: Callable[..., dict[str, Any]], zeros: Mapping[str, Array], sites: list[_Site]
) -> tuple[tuple[Latent, ...], dict[str, frozenset[str]]]:
    """Shapes, bijections and, where they can be read off, unconstrained priors; and parents."""
    names = [site.name for site in sites]
    rescaled: set[str] = set()

    def read(_: int) -> dict[str, PyTree]:
        trace = run({}, zeros)
        # handlers.scale makes a prior something else than its distribution says
        rescaled.update(name for name in names if trace[name]["scale"] is not None)
        return {n: (trace[n]["fn"], trace[n]["value"], trace[n]["fn"].support) for n in names}

    try:
        # Compiled, because a model run one operation at a time compiles each of them alone.
        facts = jax.jit(read, static_argnums=0)(0)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            "a latent's prior cannot be sampled (an improper prior?): give it a proper one, such "
            "as Normal(0, 10)."
        ) from error
    parents = _parents(run, zeros, {n: facts[n][1] for n in names})
    latents = []
    for site in sites:
        fn, value, support = facts[site.name]
        transform = biject_to(support)
        shape = jnp.shape(value)
        readable = not parents[site.name] and site.name not in rescaled
        base_prior = _base_prior(fn, transform, shape) if readable else None
        latents.append(
            Latent(
                name=site.name,
                shape=shape,
                base_shape=transform.inverse_shape(shape),
                transform=transform,
                dims=_dims(site, fn),
                base_prior=base_prior,
            )
        )
    return tuple(latents), parents


def _dims(site: _Site, fn: dist.Distribution) -> tuple[str | None, ...]:
    """Plate names of the leading dimensions of a value."""
    batch = len(fn.batch_shape)
    names: list[str | None] = [None] * (batch + fn.event_dim)
    for name, _, dim in site.plates:
        names[batch + dim] = name
    return tuple(names)


def _parents(
    run: Callable[..., dict[str, Any]], zeros: Mapping[str, Array], values: Mapping[str, Array]
) -> dict[str, frozenset[str]]:
    """Which latents and data the parameters of each latent's prior depend on."""

    def parameters(**given: Any) -> dict[str, PyTree]:
        rows = given.pop("$data")
        trace = run(given, rows)
        return {
            name: (jax.tree.leaves(trace[name]["fn"]), jax.tree.leaves(trace[name]["fn"].support))
            for name in values
        }

    found = eval_provenance(parameters, **values, **{"$data": dict(zeros)})
    parents = {}
    for name, (fn_leaves, support_leaves) in found.items():
        if any("$data" in leaf for leaf in fn_leaves):
            raise UnsupportedModelError(
                f"the prior of latent {name!r} depends on the data, which would spend privacy "
                "outside the ledger: use public constants (model_kwargs) instead."
            )
        if any(leaf for leaf in support_leaves):
            raise UnsupportedModelError(
                f"the support of latent {name!r} depends on another latent, which an approximation "
                "on a fixed space cannot follow: draw it on a fixed support and rescale it."
            )
        parents[name] = frozenset().union(*fn_leaves)
    return parents


def _base_prior(
    fn: dist.Distribution, transform: Transform, shape: tuple[int, ...]
) -> dist.Distribution | None:
    """The prior of the unconstrained value, if its definition shows it."""
    while isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        fn = fn.base_dist
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    if isinstance(transform, IdentityTransform) and isinstance(fn, dist.Normal):
        base = fn
    elif isinstance(fn, dist.TransformedDistribution) and fn.transforms == [transform]:
        base = fn.base_dist
    else:
        return None
    while isinstance(base, (dist.Independent, dist.ExpandedDistribution)):
        base = base.base_dist
    return base.expand(shape)


def _sides(
    run: Callable[..., dict[str, Any]],
    latents: tuple[Latent, ...],
    zeros: Mapping[str, Array],
    sites: list[_Site],
    plates: frozenset[str],
) -> tuple[tuple[str, ...], dict[str, frozenset[str]]]:
    """Splits observed sites into those that records enter and those that belong to the prior."""
    observed = [site for site in sites if site.observed]

    def log_probs(**given: Any) -> dict[str, Array]:
        trace = run({latent.name: given[latent.name] for latent in latents}, given["$data"])
        return {site.name: _log_prob(trace[site.name], trace, plates) for site in observed}

    values = {latent.name: jnp.zeros(latent.shape) for latent in latents}
    found = eval_provenance(log_probs, **values, **{"$data": dict(zeros)})
    client_side, server_side = [], {}
    for site in observed:
        by_plate = any(name in plates for name, _, _ in site.plates)
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


def _log_prob(site: dict[str, Any], trace: dict[str, Any], plates: frozenset[str]) -> Array:
    """Log density of a site, without the factor that a plate of records gives a subsample."""
    log_prob = site["fn"].log_prob(site["value"])
    if site["scale"] is not None:
        log_prob = log_prob * site["scale"]
    for frame in site["cond_indep_stack"]:
        if frame.name in plates:
            size, num_rows = trace[frame.name]["args"]
            log_prob = log_prob * (num_rows / size)
    return jnp.sum(log_prob)


def _total(terms: Any) -> Array:
    return sum(terms, start=jnp.zeros(()))
