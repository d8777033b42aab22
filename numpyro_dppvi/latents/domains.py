"""Checks of supports and parameter ranges that work inside compiled programs.

NumPyro's own checks are off by default and raise errors, which a traced program cannot do.
"""

import functools
import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint

from numpyro_dppvi._typing import Array

# Far above rounding errors: a softmax may give a probability of 1 + 1e-7.
_TOLERANCE = 1e-4

Check: TypeAlias = Callable[[Any, Array], Array]
"""``(constraint, value) -> bool``, reduced over event dimensions."""


def _support_itself(constraint: Any, value: Array) -> Array:
    return jnp.asarray(constraint(value))


def _never(constraint: Any, value: Array) -> Array:
    return jnp.zeros(jnp.shape(value)[: jnp.ndim(value) - constraint.event_dim], bool)


def ends(constraint: Any) -> tuple[Any, Any]:
    """The bounds of a range, which may be arrays; infinite where it has none."""
    lower = getattr(constraint, "lower_bound", -math.inf)
    return lower, getattr(constraint, "upper_bound", math.inf)


def _at_an_end(constraint: Any, value: Array) -> Array:
    lower, upper = ends(constraint)
    return (value == lower) | (value == upper)


def _beyond_an_end(constraint: Any, value: Array) -> Array:
    lower, upper = ends(constraint)
    return (value < lower - _slack(lower)) | (value > upper + _slack(upper))


def _slack(end: Any) -> Array:
    # Relative and absolute in one; none at an infinite end.
    return _TOLERANCE * jnp.where(jnp.isinf(end), 0, 1 + jnp.abs(end))


def _sums_to_one(constraint: Any, value: Array) -> Array:
    return jnp.all(value >= 0, -1) & (jnp.abs(jnp.sum(value, -1) - 1) < _TOLERANCE)


def _in_words(constraint: Any) -> str:
    """The bounds in words; only if they are constants, because others may depend on data."""
    lower, upper = ends(constraint)
    # A bound that is an array may be a column of data, and would be shown in a message.
    if not all(isinstance(end, numbers.Number) for end in (lower, upper)):
        return "the range given by its parameters"
    if constraint.is_discrete:
        if upper == math.inf:
            return f"the whole numbers from {lower}"
        return f"the whole numbers from {lower} to {upper}"
    if lower == -math.inf:
        return f"the numbers below {upper:g}"
    return f"the numbers above {lower:g}" if upper == math.inf else f"[{lower:g}, {upper:g}]"


_NORMAL = "dist.Normal(0, 10)"
_POSITIVE = "dist.HalfNormal(1) or dist.LogNormal(0, 1)"
_ORDERED = (
    "dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), "
    "dist.transforms.OrderedTransform())"
)


class Kind(NamedTuple):
    """How to check and describe one kind of constraint."""

    instead: str  # a prior with this support, for error messages
    # The constraint in words, which may follow from its bounds.
    words: Callable[[Any], str] | str = _in_words
    holds: Check = _support_itself  # whether a value satisfies it
    # Whether a value is on the boundary, where some densities are finite and some not.
    edge: Check = _never
    broken: Check = _never  # whether a parameter violates it by more than rounding
    link: str = ""  # a link function onto it, for error messages


_range = functools.partial(Kind, edge=_at_an_end, broken=_beyond_an_end)
_INTEGERS = Kind("dist.Categorical(jnp.ones(3) / 3)")
_KINDS: dict[type, Kind] = {
    type(constraints.real): Kind(_NORMAL, "the finite numbers"),
    type(constraints.boolean): Kind("dist.Bernoulli(0.5)", "{0, 1}"),
    constraints.integer_interval: _INTEGERS,
    constraints.integer_greater_than: _INTEGERS,
    type(constraints.positive_integer): _INTEGERS,
    type(constraints.nonnegative_integer): _INTEGERS,
    constraints.multinomial: Kind(_NORMAL, "counts that add up to its total"),
    type(constraints.positive): _range(_POSITIVE, link="jnp.exp(...)"),
    type(constraints.nonnegative): _range(_POSITIVE, link="jnp.exp(...)"),
    type(constraints.softplus_positive): _range(_POSITIVE, link="jnp.exp(...)"),
    constraints.greater_than: _range(f"{_POSITIVE}, moved to its bound"),
    constraints.greater_than_eq: _range(f"{_POSITIVE}, moved to its bound"),
    constraints.less_than: _range(f"{_POSITIVE}, turned around and moved to its bound"),
    constraints.less_than_eq: _range(f"{_POSITIVE}, turned around and moved to its bound"),
    type(constraints.unit_interval): _range("dist.Beta(1, 1)", link="jax.nn.sigmoid(...)"),
    constraints.interval: _range("dist.Uniform(low, high)"),
    constraints.open_interval: _range("dist.Uniform(low, high)"),
    type(constraints.ordered_vector): Kind(
        _ORDERED,
        "increasing numbers",
        broken=lambda _, x: jnp.any(jnp.diff(x) < -_TOLERANCE * (1 + jnp.abs(x[..., 1:])), -1),
    ),
    type(constraints.positive_ordered_vector): Kind(
        f"{_ORDERED}, with dist.transforms.ExpTransform() behind it", "increasing numbers above 0"
    ),
    type(constraints.simplex): Kind(
        "dist.Dirichlet(jnp.ones(3))",
        "numbers above 0 that add up to 1",
        holds=_sums_to_one,
        edge=lambda _, x: jnp.any(x == 0, -1),
        broken=lambda _, x: jnp.any(x < -_TOLERANCE, -1),
    ),
    type(constraints.corr_cholesky): Kind("dist.LKJCholesky(3)"),
    type(constraints.corr_matrix): Kind("dist.LKJ(3)"),
    # An angle is the same angle a turn on.
    type(constraints.circular): Kind("dist.VonMises(0, 1)", holds=lambda _, x: jnp.isfinite(x)),
}
# Matrices and the like: rounding alone may break their conditions.
_OTHER = Kind(_NORMAL, "its support", holds=lambda c, x: ~_never(c, x))


def kind(constraint: Constraint) -> Kind:
    """How to check and describe a constraint, or that of an array's entries."""
    constraint = plain(constraint)
    lower, _ = ends(constraint)
    above = isinstance(constraint, constraints.greater_than | constraints.greater_than_eq)
    # Some of NumPyro's distributions write so what others call positive.
    if above and isinstance(lower, int | float) and lower == 0:
        constraint = constraints.positive
    return _KINDS.get(type(constraint), _OTHER)


def plain(constraint: Any) -> Any:
    """The constraint of one entry."""
    while isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return constraint


def integers(support: Constraint) -> range | None:
    """The values of an entry; ``None`` unless all entries share one finite range of integers.

    ``support`` must have concrete bounds, not traced ones.
    """
    support = plain(support)
    if isinstance(support, type(constraints.boolean)):
        return range(2)
    if not support.is_discrete or support.event_dim:
        return None
    # Bounds may be arrays: entries with ranges of their own have no common table of values.
    bounds = [np.unique(getattr(support, f"{end}_bound", np.inf)) for end in ("lower", "upper")]
    if any(len(end) != 1 or not np.all(np.isfinite(end)) for end in bounds):
        return None
    lower, upper = (int(end[0]) for end in bounds)
    return range(lower, upper + 1)


def in_words(constraint: Constraint) -> str:
    """A constraint in words, without bounds that may depend on data."""
    words = kind(constraint).words
    return words(plain(constraint)) if callable(words) else words


def has_edge(constraint: Constraint) -> bool:
    """Whether a density may be infinite or zero on the boundary of a support."""
    return kind(constraint).edge is not _never


@functools.singledispatch
def inside(fn: Any, value: Array) -> Array:
    """Where values are in a distribution's support, or on its boundary with a finite density.

    Booleans without event dimensions; true where values are masked.
    """
    # The density decides on the boundary: Beta(2, 2) has none at 0, Beta(1, 1) has one.
    support, known = plain(fn.support), kind(fn.support)
    shape = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape + fn.event_shape)
    value = jnp.broadcast_to(value, shape)
    # A support may span fewer dimensions than an event (each entry by itself): reduce over the
    # rest.
    extra = tuple(range(support.event_dim - fn.event_dim, 0))
    if known.edge is _never:
        return jnp.all(known.holds(support, value), extra)
    edge = known.edge(support, value)
    holds = jnp.all(known.holds(support, value) | edge, extra)
    return holds & (~jnp.any(edge, extra) | jnp.isfinite(fn.log_prob(value)))


@inside.register
def _of_masked(fn: dist.MaskedDistribution, value: Array) -> Array:
    # What a mask leaves out has density 1, whatever it is (it often holds NaN or -1 for "missing").
    return inside(fn.base_dist, value) | ~jnp.asarray(fn._mask)


@inside.register
def _of_entries(fn: dist.Independent, value: Array) -> Array:
    axes = tuple(range(-fn.reinterpreted_batch_ndims, 0))
    return jnp.all(inside(fn.base_dist, value), axes)


@inside.register
def _of_copies(fn: dist.ExpandedDistribution, value: Array) -> Array:
    shape = jnp.broadcast_shapes(jnp.shape(value), fn.batch_shape + fn.event_shape)
    return inside(fn.base_dist, jnp.broadcast_to(value, shape))


def broken_arguments(fn: Any) -> Iterator[tuple[dist.Distribution, str, Constraint, Array]]:
    """Yields parameters with a restricted range, also of components, and where they violate it."""
    for name, constraint in fn.arg_constraints.items():
        value = vars(fn).get(name)  # parameters as passed; derived ones are computed properties
        known = kind(constraint)
        if value is not None and known.broken is not _never:
            yield fn, name, constraint, known.broken(plain(constraint), jnp.asarray(value))
    # Mixtures hold their parts in attributes, one distribution or a list of them.
    for value in vars(fn).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, dist.Distribution):
                yield from broken_arguments(part)


def name_of(fn: Any) -> str:
    """A distribution's name as users write it, without wrappers."""
    while isinstance(fn, dist.MaskedDistribution | dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return type(fn).__name__.removesuffix("Probs").removesuffix("Logits")
