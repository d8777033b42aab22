"""Runs a user's model: on abstract rows to read its structure, on one row to evaluate it."""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow.scan import scan_wrapper
from numpyro.ops.pytree import PytreeTrace
from numpyro.primitives import _PYRO_STACK, Messenger

from numpyro_dppvi._typing import Array, Model, Records
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families.reading import split
from numpyro_dppvi.latents import reasons
from numpyro_dppvi.latents.domains import kind

Trace = dict[str, Any]
"""A NumPyro trace: messages by site name."""

# NumPyro has one stack of handlers for all threads, so every run of a model or guide under handlers
# holds this lock. No other lock is taken while it is held, so it cannot deadlock.
HANDLERS = threading.RLock()

# What NumPyro calls the entries that ``obs_mask`` leaves out: the outcome's name and this.
UNSEEN = "_unobserved"


class Plate(NamedTuple):
    """A plate around a site: its size, the size of its subsample, and its dimension."""

    name: str
    size: int
    drawn: int
    dim: int


@dataclass(frozen=True)
class Site:
    """Static facts about a sample site; ``shapes`` are those of its value and distribution.

    ``marked`` is whether it is a discrete latent that says ``infer={"enumerate": "parallel"}``.
    """

    name: str
    observed: bool
    discrete: bool
    marked: bool
    plates: tuple[Plate, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


class Structure(NamedTuple):
    """The structure of a model."""

    sites: tuple[Site, ...]  # all sample sites
    plates: frozenset[str]  # names of the plates over records
    local: frozenset[str]  # latents with one entry per record
    # Whether each record has an observed site of its own, by a loop over rows. Then ``sites`` are
    # those of one row.
    loop: bool = False

    @property
    def summed(self) -> tuple[Site, ...]:
        """The discrete latents with one entry per record that are marked for enumeration."""
        return tuple(s for s in self.sites if s.name in self.local and s.marked)

    @property
    def unseen(self) -> tuple[Site, ...]:
        """The entries that ``obs_mask`` leaves out, unless they are summed out."""
        return tuple(
            s
            for s in self.sites
            if s.name in self.local and s.name.endswith(UNSEEN) and not s.marked
        )


class _ProperPriors(Messenger):
    """Refuses latents with improper priors, with masked ones, and with values of their own."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        # What was drawn inside a loop (``scan``) comes with its value.
        if msg["value"] is not None and not msg.get("_control_flow_done"):
            raise UnsupportedModelError(
                f"latent {msg['name']!r} has a value by handlers.substitute, under which it stays "
                f"a latent: write handlers.condition(model, {{{msg['name']!r}: ...}}), which fixes "
                "it."
            )
        fn = msg["fn"]
        # Independent, expanded, masked or transformed: the base decides whether it is proper.
        while hasattr(fn, "base_dist"):
            if isinstance(fn, dist.MaskedDistribution) and fn._mask is False:
                raise UnsupportedModelError(
                    f"latent {msg['name']!r} is under mask(False), and so has no prior, from which "
                    "a posterior could start: leave the mask out. Of missing entries no client can "
                    f"tell whose is whose: {reasons.IMPUTE}."
                )
            fn = fn.base_dist
        if isinstance(fn, dist.ImproperUniform):
            raise UnsupportedModelError(
                f"latent {msg['name']!r} has an improper prior, from which no posterior can "
                f"start: give it a proper one, such as {kind(msg['fn'].support).instead}."
            )


class _ForcedPlates(Messenger):
    """Makes the named plates yield the first ``num_rows`` indices, whatever their size.

    ``None`` stands for the plates that draw a subsample.
    """

    def __init__(self, fn: Model, names: frozenset[str] | None, num_rows: int) -> None:
        super().__init__(fn)
        self.names = names
        self.num_rows = num_rows

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        if msg["value"] is None if self.names is None else msg["name"] in self.names:
            # (size, size of the subsample). NumPyro takes the smaller one for a minibatch and
            # scales densities by size / num_rows, which log_prob below takes back.
            msg["args"] = (msg["args"][0], self.num_rows)
            msg["value"] = jnp.arange(self.num_rows)


def all_rows(model: Model, rows: Mapping[str, Any]) -> Model:
    """The model on all rows that it is given, in their order, where it would draw a subsample."""
    if not rows:
        return model
    # Only plates over records may be subsampled; latents.refusals sees to that.
    return _ForcedPlates(model, None, len(next(iter(rows.values()))))


class _ByNumber(Messenger):
    """Adds a step's number to the names of its sites."""

    def __init__(self, number: int) -> None:
        super().__init__(None)
        self.number = number

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] in ("sample", "deterministic"):
            msg["name"] = f"{msg['name']}[{self.number}]"


class _StepByStep(Messenger):
    """Turns a ``scan`` whose steps draw marked discrete latents into a loop of statements.

    So each state is a latent of its own, and a chain is summed out step by step. As one latent of
    all steps it would take a table of all paths.
    """

    def __init__(self, fn: Model, names: frozenset[str], num_rows: int) -> None:
        super().__init__(fn)
        self.forced = names, num_rows

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "control_flow" or msg["fn"] is not scan_wrapper:
            return
        step, carry, xs, length, _ = msg["args"]
        marked: list[str] = []

        # A mark may also come from a handler of the model's (``config_enumerate``), which the block
        # below would hide. Those that stand after this one are the model's.
        within = _PYRO_STACK[_PYRO_STACK.index(self) + 1 :]
        marks = [one for one in within if isinstance(one, handlers.infer_config)]

        def first(carry: Any, xs: Any) -> None:
            forced = _ForcedPlates(step, *self.forced)
            for one in marks:
                forced = handlers.infer_config(forced, one.config_fn)
            with handlers.block(), handlers.seed(rng_seed=0):
                trace = handlers.trace(forced).get_trace(carry, _at(xs, 0))
            marked.extend(name for name, site in trace.items() if _is_marked(site))

        if _num_steps(xs, length):
            jax.eval_shape(first, carry, xs)
        if marked:
            msg["fn"] = _loop


def _is_marked(site: dict[str, Any]) -> bool:
    """Whether a site is a discrete latent that is marked for enumeration."""
    if site["type"] != "sample" or site["is_observed"]:
        return False
    return bool(site["fn"].support.is_discrete) and site["infer"].get("enumerate") == "parallel"


def _loop(
    step: Any, carry: Any, xs: Any, length: int | None, reverse: bool, **_: Any
) -> tuple[Any, Any]:
    """What ``scan`` gives, by a loop of the language."""
    numbers = range(_num_steps(xs, length))
    found = []
    for number in reversed(numbers) if reverse else numbers:
        with _ByNumber(number):
            carry, y = step(carry, _at(xs, number))
        found.append(y)
    ordered = found[::-1] if reverse else found
    ys = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)
    # Sites have gone to the trace by themselves, so that none are left for ``scan`` to add.
    return (len(numbers), None, carry), (PytreeTrace({}), ys)


def _at(xs: Any, number: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], xs)


def _num_steps(xs: Any, length: int | None) -> int:
    return len(jax.tree.leaves(xs)[0]) if length is None else int(length)


class _AtDistances(Messenger):
    """Gives normal sites values at given distances from their means, in standard deviations."""

    def __init__(self, fn: Model, distances: Mapping[str, Array]) -> None:
        super().__init__(fn)
        self.distances = distances

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self.distances:
            # x = m + s d, so that densities that depend on x are functions of the fixed distance d.
            base, transforms = normal_of(msg["fn"])
            value = base.loc + base.scale * self.distances[msg["name"]]
            for transform in transforms:
                value = transform(value)
            msg["value"] = value


def normal_of(fn: Any) -> Any:
    """The normal distribution behind another, and the transforms to it; ``None`` if none is."""
    while isinstance(fn, dist.MaskedDistribution):
        fn = fn.base_dist
    base, transforms = split(fn)
    return (base, transforms) if isinstance(base, dist.Normal) else None


class _Public(np.ndarray):
    """A public array of NumPy's that a traced column may index, as in ``uranium[county]``."""

    def __getitem__(self, index: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(index)):
            return jnp.asarray(np.asarray(self))[index]
        return super().__getitem__(index)


def indexable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A model's public arguments: NumPy's arrays of numbers as ones that columns may index."""

    def of(value: Any) -> Any:
        # Not subclasses, and no arrays of strings or objects, which JAX does not have.
        is_plain = type(value) is np.ndarray and value.dtype.kind in "biuf"
        return value.view(_Public) if is_plain else value

    return {name: of(value) for name, value in arguments.items()}


def run_model(
    model: Model,
    rows: Records,
    kwargs: Mapping[str, Any],
    theta: Mapping[str, Array],
    plates: frozenset[str] = frozenset(),
    seed: Any = 0,
    distances: Mapping[str, Array] | None = None,
) -> Trace:
    """Runs the model on some rows with latents fixed to ``theta``.

    Those in ``distances`` are fixed that many standard deviations from their means.
    """
    # From the inside out: plates yield the rows, distances become values, latents are fixed, and
    # what is left is drawn from the seed (missing entries on which nothing depends, say).
    num_rows = next(iter(rows.values())).shape[0]
    forced = _ForcedPlates(_StepByStep(model, plates, num_rows), plates, num_rows)
    if distances:
        forced = _AtDistances(forced, distances)
    seeded = handlers.seed(handlers.substitute(forced, data=dict(theta)), rng_seed=seed)
    with HANDLERS, handlers.block():  # hides this run from handlers of the caller
        return handlers.trace(seeded).get_trace(**rows, **indexable(kwargs))


def static_facts(
    model: Model,
    shapes: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    forced: frozenset[str] = frozenset(),
) -> tuple[Site, ...]:
    """Static facts about every sample site, from a run on abstract rows.

    Forced plates yield as many indices as there are rows.
    """
    found: list[Site] = []

    def run(rows: Records) -> None:
        trace = run_model(_ProperPriors(model), rows, kwargs, {}, forced)
        for name, site in trace.items():
            if site["type"] == "mutable":
                raise UnsupportedModelError(
                    f"the model has mutable state {name!r} (running means of a batch "
                    "normalisation, say), which depends on records and has no prior: remove that "
                    "layer from the module."
                )
            if site["type"] == "param" and jax.tree.leaves(site["value"]):
                if name.endswith("$params"):
                    raise UnsupportedModelError(
                        f"the module {name.removesuffix('$params')!r} has parameters without a "
                        "prior: write prior=dist.Normal(0, 1), or name each of its parameters in "
                        "prior."
                    )
                if name.endswith("_centered"):
                    latent = name.removesuffix("_centered")
                    raise UnsupportedModelError(
                        f"LocScaleReparam() of {latent!r} learns how far it centers "
                        f"({name!r}), which has no prior: name a number, "
                        f"{{{latent!r}: LocScaleReparam(centered=0)}}."
                    )
                raise UnsupportedModelError(
                    f"the model calls numpyro.param({name!r}), which has no prior: write "
                    f"numpyro.sample({name!r}, ...) with a prior, or make it a public constant "
                    "(model_kwargs)."
                )
            if site["type"] == "sample":
                if site["is_observed"]:
                    _check_shape(site)
                found.append(_site(site, trace))

    try:
        # On shapes alone: no value of a record can end up in an error's message.
        jax.eval_shape(run, dict(shapes))
    except UnsupportedModelError as refusal:
        raise UnsupportedModelError(str(refusal)) from None  # drops JAX's notes
    except (IndexError, TypeError, NotImplementedError, AttributeError) as error:
        said = reasons.slip(error)
        if said is None:
            raise
        raise UnsupportedModelError(said) from error
    return tuple(found)


def _check_shape(site: dict[str, Any]) -> None:
    """Refuses values that do not fit their distribution, as if a plate has the wrong size."""
    try:
        site["fn"].log_prob(site["value"])
    except (TypeError, ValueError) as error:
        said = reasons.misfit_outcome(site["name"], site["fn"], site["value"])
        if said is None:
            raise
        raise UnsupportedModelError(said) from error


def _site(site: dict[str, Any], trace: Trace) -> Site:
    fn = site["fn"]
    # Plates inside a loop (``scan``) are missing from the trace; those are never subsampled.
    stated = {name: other["args"][0] for name, other in trace.items() if other["type"] == "plate"}
    plates = tuple(
        Plate(frame.name, stated.get(frame.name, frame.size), frame.size, frame.dim)
        for frame in site["cond_indep_stack"]
    )
    shapes = (jnp.shape(site["value"]), fn.batch_shape + fn.event_shape)
    discrete = bool(fn.support.is_discrete)
    return Site(site["name"], site["is_observed"], discrete, _is_marked(site), plates, shapes)


def structure(model: Model, shapes: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Structure:
    """Reads the sites, and which plates and latents follow the number of records.

    The model is run on the given rows and on one more; what changes, follows the records. If it
    has a fixed number of rows, plates of that size that hold an observed site are forced to yield
    one more, too.

    A model that does not run on another number of rows is refused.
    """
    try:
        # As it would be called, before anything is forced: errors here are the model's own.
        sites = static_facts(model, shapes, kwargs)
    except UnsupportedModelError:
        raise
    except Exception as error:  # an error in the user's code; its own message is the best
        said = reasons.misfit(error)
        if said is not None:
            raise UnsupportedModelError(said) from error
        given = ", ".join(f"{name} {s.shape}" for name, s in shapes.items())
        error.add_note(f"The model was run on arrays of these shapes: {given}.")
        raise
    num_rows = next(iter(shapes.values())).shape[0]
    longer = resized(shapes, num_rows + 1)
    # Candidates are tried until one makes an observed site grow with the rows. If none does but
    # some run, the first of these is taken: then outcomes may not be in a plate at all.
    first, wrong = None, None
    for forced in _stated_plates(sites, num_rows):
        try:
            grown = static_facts(model, longer, kwargs, forced)
        except reasons.WRONG_NUMBER_ERRORS as error:
            wrong = wrong or error
            continue
        first = first or (forced, grown)
        if any(site.observed for site in set(sites) - set(grown)):
            return _compare(sites, grown, forced)
    if first is None:
        traced = jax.make_jaxpr(lambda rows: _log_probs(model, rows, kwargs))
        program = traced(dict(shapes))
        raise UnsupportedModelError(reasons.one_row_only(num_rows, sites, program, kwargs, wrong))
    forced, grown = first
    if any(site.observed for site in _only_in(grown, sites)):
        return _of_a_loop(model, shapes, kwargs, sites, grown, forced)
    return _compare(sites, grown, forced)


def _log_probs(model: Model, rows: Records, kwargs: Mapping[str, Any]) -> list[Array]:
    trace = run_model(model, rows, kwargs, {})
    samples = [site for site in trace.values() if site["type"] == "sample"]
    return [site["fn"].log_prob(site["value"]) for site in samples]


def _only_in(sites: tuple[Site, ...], others: tuple[Site, ...]) -> list[Site]:
    """The sites whose names are not among others."""
    names = {site.name for site in others}
    return [site for site in sites if site.name not in names]


def _of_a_loop(
    model: Model,
    shapes: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    known: tuple[Site, ...],
    grown: tuple[Site, ...],
    forced: frozenset[str],
) -> Structure:
    """The structure of a model with a loop over records and a sample statement for each."""
    states = [s.name for s in _only_in(grown, known) if s.marked]
    said = (
        reasons.a_state_a_record(states[0])
        if states
        else reasons.a_site_a_record(min(s.name for s in grown if s.observed))
    )
    refusal = UnsupportedModelError(said)
    try:
        sites, of_two = (
            static_facts(model, resized(shapes, number), kwargs, forced) for number in (1, 2)
        )
    except reasons.WRONG_NUMBER_ERRORS:
        raise refusal from None
    # One row more must add observed sites and nothing else: a latent for each row would be local.
    new = _only_in(of_two, sites)
    # Two rows against one: exactly what a second record adds.
    if not new or not all(site.observed for site in new):
        raise refusal
    found = _compare(sites, of_two, forced)
    return Structure(sites, found.plates, found.local, loop=True)


def resized(shapes: Mapping[str, Any], num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the same arrays with another number of rows."""
    # As JAX would take them: 64 bits that are asked for where they are off make it warn.
    return {
        name: jax.ShapeDtypeStruct((num_rows, *s.shape[1:]), jax.dtypes.canonicalize_dtype(s.dtype))
        for name, s in shapes.items()
    }


def _stated_plates(sites: tuple[Site, ...], num_rows: int) -> list[frozenset[str]]:
    """Sets of plates that may be those over records, judging by size; the most likely first."""
    # A plate that also holds a latent is more likely one of groups, of which there happen to be as
    # many as rows.
    observed = {p.name for s in sites if s.observed for p in s.plates if p.size == num_rows}
    latents = [s for s in sites if not s.observed and not s.marked]
    with_latent = {p.name for s in latents for p in s.plates}
    return [
        frozenset(),
        frozenset(observed - with_latent),
        frozenset(observed),
        *(frozenset({name}) for name in sorted(observed)),
    ]


def _compare(sites: tuple[Site, ...], grown: tuple[Site, ...], forced: frozenset[str]) -> Structure:
    """The structure that two traces show, of which the second has one more row."""
    after = {site.name: site for site in grown}
    # Sites are compared whole: shapes, plates and sizes.
    changed = [site for site in sites if after.get(site.name) != site]
    grown_plates = {p.name for s in changed for p in set(s.plates) - set(after[s.name].plates)}
    plates = forced | grown_plates
    local = frozenset(
        s.name
        for s in sites
        if not s.observed
        and (s.shapes != after[s.name].shapes or any(plate.name in plates for plate in s.plates))
    )
    return Structure(sites, plates, local)


def dims_of(plates: Iterable[Any], fn: dist.Distribution) -> tuple[str | None, ...]:
    """Plate names of the dimensions of a distribution's value; ``None`` for those without one."""
    batch = len(fn.batch_shape)
    names: list[str | None] = [None] * (batch + fn.event_dim)
    for plate in plates:
        names[batch + plate.dim] = plate.name  # plates count dimensions from the right
    return tuple(names)


def log_prob(site: dict[str, Any], trace: Trace, plates: frozenset[str]) -> Array:
    """Log density of a site, without the scaling of a subsampling plate over records."""
    value = site["fn"].log_prob(site["value"])
    for scale in _scales(site, trace, plates):
        value = value * scale
    return jnp.sum(value)


def rescaled(site: dict[str, Any], trace: Trace, plates: frozenset[str]) -> bool:
    """Whether :func:`log_prob` differs from the distribution's own by more than masks."""
    scale = math.prod(_scales(site, trace, plates))
    # A number may be off by rounding; an array or tracer comes from records or latents.
    return not (isinstance(scale, int | float) and abs(scale - 1) < 1e-6)


def _scales(site: dict[str, Any], trace: Trace, plates: frozenset[str]) -> Iterator[Any]:
    """Yields what a site's log density is multiplied by."""
    # NumPyro's scale includes size / subsample of every plate around the site. For a plate over
    # records that factor is divided out, because the sum over records is taken elsewhere; scales
    # from handlers.scale and other plates stay.
    if site["scale"] is not None:
        yield site["scale"]
    for frame in site["cond_indep_stack"]:
        if frame.name in plates and frame.name in trace:
            size, num_rows = trace[frame.name]["args"]
            yield num_rows / size
