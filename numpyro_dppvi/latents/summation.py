"""Sums out a record's own discrete latents z: p(record | theta) = sum_z p(record, z | theta).

They are those that NumPyro would enumerate, marked ``infer={"enumerate": "parallel"}``. A record is
one row, so that each of them is a few numbers, and all joint values of these are tried at once by
``vmap``. A site's density is a table over the latents that it depends on, no more; tables are
multiplied and summed latent by latent, the one that takes the smallest table first. A chain of T
states then costs T small tables, not one of all paths.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.ops.provenance import eval_provenance

from numpyro_dppvi._typing import Array, PyTree
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.latents import refusals
from numpyro_dppvi.latents.domains import integers
from numpyro_dppvi.latents.trace import Site, Structure, Trace, log_prob, normal_of, rescaled

OneRow: TypeAlias = Callable[[Mapping[str, Array], Mapping[str, Array]], Trace]
"""Runs the model with given latents on one row (arrays without the records' axis)."""

MAX_TERMS = 1024
"""The most entries of a table of joint values of a record's discrete latents."""


# Normal entries that are missing are integrated on a grid of this many points, from -6 to 6
# standard deviations. The rule is exact to rounding for what is wider than about a fifth of one.
_NUM_POINTS, _FARTHEST = 64, 6.0
_GRID = np.linspace(-_FARTHEST, _FARTHEST, _NUM_POINTS)


class Summed(NamedTuple):
    """A latent that each record has one of, with finitely many values or a grid of them.

    Attributes:
        name: Its site name in the model.
        entries: The values of an entry: integers, or distances from the mean of a normal in its
            standard deviations.
        shape: Shape of a value for one row.
        axis: The axis of a value that follows the rows.
        dtype: The dtype of a value.
    """

    name: str
    entries: np.ndarray
    shape: tuple[int, ...]
    axis: int
    dtype: Any

    @property
    def is_discrete(self) -> bool:
        """Whether its values are integers."""
        return not jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def num_values(self) -> int:
        """The number of joint values of its entries, for one row."""
        return int(len(self.entries) ** math.prod(self.shape))

    @property
    def values(self) -> np.ndarray:
        """All joint values of its entries, shape ``(num_values, *shape)``."""
        # Rows in the order of a raveled value: the last entry changes fastest.
        table = list(itertools.product(self.entries, repeat=math.prod(self.shape)))
        return np.reshape(np.array(table, self.dtype), (len(table), *self.shape))

    def log_prob(self, site: Mapping[str, Any], value: Array | None) -> Array:
        """The log probability of a value; of the one in a trace, if there is none.

        Where the site is masked (where ``obs_mask`` says that a value was observed, say), nothing
        is known of an entry that nothing depends on: all its values are equally likely, so that
        they sum to one.
        """
        if not self.is_discrete:
            # The weights of the grid: they sum to one, wherever the normal is.
            # The grid's points are distances d = (x - m) / s. The integral of f(x) N(x; m, s) dx is
            # that of f(m + s d) N(d; 0, 1) dd: the weights are the same for every record and theta.
            logs = -0.5 * jnp.asarray(0.0 if value is None else value) ** 2
            return jnp.sum(logs - np.log(np.sum(np.exp(-0.5 * _GRID**2))))
        fn, mask = site["fn"], jnp.asarray(True)
        while isinstance(fn, dist.MaskedDistribution):
            fn, mask = fn.base_dist, mask & jnp.asarray(fn._mask)
        per_entry = math.log(len(self.entries)) * math.prod(fn.event_shape)
        return jnp.sum(jnp.where(mask, fn.log_prob(site["value"]), -per_entry))

    def made_up(self, rng: np.random.Generator, num_rows: int) -> Array:
        """Values for several rows, which differ in every entry: ``(num_rows, *shape)``."""
        values = rng.choice(self.entries, (num_rows, *self.shape))
        values[0], values[1] = self.entries[0], self.entries[-1]
        return jnp.asarray(rng.permuted(values, axis=0), self.dtype)

    def joined(self, of_rows: Array) -> Array:
        """The value for several rows, from those for each: ``(num_rows, *shape)``."""
        return jnp.concatenate(list(of_rows), axis=self.axis)


class Summation(NamedTuple):
    """How the latents of a record are summed out.

    Attributes:
        summed: The latents.
        depends: Those that a site's density depends on, by site.
        bounded: Observed sites whose support depends on them, which some values make impossible.
        order: Names of the latents, the first to be summed out first.
        num_terms: The number of entries of the largest table; 1 if there is none.
    """

    summed: tuple[Summed, ...]
    depends: Mapping[str, frozenset[str]]
    bounded: frozenset[str]
    order: tuple[str, ...]
    num_terms: int


def read_summed(run: OneRow, row: Mapping[str, Array], sites: Sequence[Site]) -> tuple[Summed, ...]:
    """Reads the latents to be summed out from runs of the model."""
    if not sites:
        return ()
    names = [site.name for site in sites]

    def of_rows(number: int) -> dict[str, Any]:
        rows = {name: jnp.broadcast_to(x, (number, *x.shape)) for name, x in row.items()}
        trace = run({}, rows)
        return {name: (trace[name]["value"], trace[name]["fn"].support) for name in names}

    # The first run gives supports as numbers, the second only shapes.
    one, two = jax.jit(of_rows, static_argnums=0)(1), jax.eval_shape(lambda: of_rows(2))
    found = []
    for name in names:
        value, support = one[name]
        refusals.refuse_infinite(name, support)
        # A support is a range of integers, or that of a normal (see imputed).
        entries = np.asarray(integers(support)) if support.is_discrete else _GRID
        shapes = zip(value.shape, two[name][0].shape, strict=True)
        # One row more lengthens the rows' axis alone.
        (axis,) = (number for number, (a, b) in enumerate(shapes) if a != b)
        found.append(Summed(name, entries, value.shape, axis, value.dtype))
    return tuple(found)


def imputed(run: OneRow, row: Mapping[str, Array], structure: Structure) -> tuple[Site, ...]:
    """The entries that ``obs_mask`` leaves out and that something else depends on.

    The others integrate to one. These are integrated over if they are normal, and else refused.
    """
    unseen = {site.name: site for site in structure.unseen}
    if not unseen:
        return ()
    others = [site.name for site in structure.sites if site.name not in unseen]
    are_normal: dict[str, bool] = {}

    def log_probs(**values: Array) -> dict[str, Any]:
        trace = run(values, row)
        are_normal.update({name: normal_of(trace[name]["fn"]) is not None for name in unseen})
        # Both ways in which something may depend on a missing entry: through a density, and through
        # the distribution of another missing entry.
        of_others = {n: [trace[n]["fn"].log_prob(trace[n]["value"])] for n in others}
        return of_others | {n: jax.tree.leaves(trace[n]["fn"]) for n in unseen}

    values = jax.eval_shape(lambda: {name: run({}, row)[name]["value"] for name in unseen})
    found: dict[str, Site] = {}
    for name, leaves in eval_provenance(log_probs, **values).items():
        for cause in frozenset[str]().union(*leaves):
            if not are_normal[cause]:
                refusals.refuse_imputed(unseen[cause], name)
            found[cause] = unseen[cause]
    return tuple(found[name] for name in sorted(found))


def read_summation(
    run: OneRow,
    theta: Mapping[str, Array],
    row: Mapping[str, Array],
    client_side: Sequence[str],
    plates: frozenset[str],
    summed: tuple[Summed, ...],
) -> Summation:
    """Reads what depends on a record's own latents, and plans how they are summed out.

    Refuses ranges of integers that depend on records or latents, and densities that are rescaled.
    """
    names = (*client_side, *(one.name for one in summed))
    if not summed:
        return Summation((), dict.fromkeys(names, frozenset()), frozenset(), (), 1)
    weighted: set[str] = set()

    def log_probs(**given: Any) -> dict[str, Any]:
        row = given.pop("$data")
        trace = run(given, row)
        weighted.update(name for name in names if rescaled(trace[name], trace, plates))
        supports = {name: jax.tree.leaves(trace[name]["fn"].support) for name in names}
        return {n: (log_prob(trace[n], trace, plates), supports[n]) for n in names}

    found = eval_provenance(log_probs, **theta, **of_one(summed), **{"$data": dict(row)})
    mine = {one.name for one in summed}
    # What the ends of a support depend on: latents' names, z's names, or "$data".
    bounds = {name: frozenset[str]().union(*leaves) for name, (_, leaves) in found.items()}
    for one in summed:
        if bounds[one.name] and one.is_discrete:
            refusals.refuse_endless(one.name)
    # A density of x_1 given z_1 spans z_1 alone. This is what makes a chain cheap: with T states of
    # K values the tables have K^2 entries, T of them, and not K^T.
    depends = {name: density & mine for name, (density, _) in found.items()}
    for name in sorted(weighted):
        if depends[name]:
            refusals.refuse_weights(name, min(depends[name]))
    return plan(summed, depends, frozenset(name for name in client_side if bounds[name] & mine))


def of_one(summed: Sequence[Summed]) -> dict[str, Array]:
    """Some value of each, for one row."""
    return {one.name: jnp.full(one.shape, one.entries[0], one.dtype) for one in summed}


def plan(
    summed: Sequence[Summed],
    depends: Mapping[str, frozenset[str]],
    bounded: frozenset[str] = frozenset(),
) -> Summation:
    """An order of summation: the smallest table first; refused if a table has too many entries."""
    # Variable elimination: to sum a latent out, all tables that have it are multiplied into one,
    # which spans every latent of theirs and has the product of their numbers of entries. The best
    # order is hard to find; the cheapest next step finds it for chains and trees.
    sizes = {one.name: one.num_values for one in summed}
    tables = [names for names in depends.values() if names]
    found: list[str] = []
    largest = 1
    while len(found) < len(sizes):
        rest = [name for name in sizes if name not in found]
        joined = {name: _joined(tables, name) for name in rest}
        number = {name: math.prod(sizes[n] for n in joined[name]) for name in rest}
        best = min(rest, key=lambda name: number[name])
        if number[best] > MAX_TERMS:
            gaps = {one.name for one in summed if not one.is_discrete}
            raise UnsupportedModelError(_too_many(sorted(joined[best]), number[best], gaps))
        tables = [t for t in tables if best not in t] + [joined[best] - {best}]
        found.append(best)
        largest = max(largest, number[best])
    return Summation(tuple(summed), depends, bounded, tuple(found), largest)


def _joined(tables: Iterable[frozenset[str]], name: str) -> frozenset[str]:
    """The latents of the product of all tables with a latent."""
    return frozenset({name}).union(*(table for table in tables if name in table))


def _too_many(names: Sequence[str], number: int, gaps: set[str]) -> str:
    shown = f"{number:,}" if number < 10**9 else f"{number:.0e}"
    few = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
    if gaps & set(names):
        return (
            f"a record's missing entries ({few}) have {shown} joint values to sum over, and there "
            f"may be {MAX_TERMS} at most, which allows one normal column with missing entries: "
            "leave out records that lack another one, or put a number in its place, "
            "jnp.where(jnp.isnan(x), 0.0, x)."
        )
    return (
        f"a record's own latents ({few}) have {shown} joint values to sum over, and there may "
        f"be {MAX_TERMS} at most: write a chain as one sample statement per step, in a Python "
        "loop or a scan, or sum them out in the model (a logsumexp in a numpyro.factor)."
    )


def log_sum(
    log_densities: Callable[[Mapping[str, Array]], dict[str, Array]], summation: Summation
) -> Array:
    """The logarithm of sum_z exp(sum over sites of their log densities at z)."""
    depends, order = summation.depends, summation.order
    groups = _apart(summation.summed, depends)
    in_order = [one.name for group in groups for one in group]

    # One vmap a group, around each other. A site's density gets an axis for a group if it depends
    # on a latent of it, and none otherwise; the axes follow the order of the groups.
    def over(number: int, z: Mapping[str, Array]) -> dict[str, Array]:
        if number == len(groups):
            return log_densities(z)
        values = {one.name: jnp.asarray(one.values) for one in groups[number]}
        # out_axes=None is an error where the result does vary: a wrong ``depends`` cannot go
        # unseen.
        axes = {site: 0 if names & set(values) else None for site, names in depends.items()}
        return jax.vmap(lambda at: over(number + 1, {**z, **at}), out_axes=axes)(values)

    tables = [
        (tuple(name for name in in_order if name in depends[site]), table)
        for site, table in over(0, {}).items()
    ]
    # sum_z f(z, rest) g(rest) = g(rest) sum_z f(z, rest): only tables with the latent take part.
    for name in order:
        touched = [table for table in tables if name in table[0]]
        mine = tuple(n for n in in_order if any(n in axes for axes, _ in touched))
        total = sum((_aligned(t, axes, mine) for axes, t in touched), start=jnp.zeros(()))
        rest = tuple(n for n in mine if n != name)
        # log sum_z exp(...), stable however small the densities are.
        reduced = jax.nn.logsumexp(total, axis=mine.index(name))
        tables = [table for table in tables if name not in table[0]] + [(rest, reduced)]
    return sum((table for _, table in tables), start=jnp.zeros(()))


def _apart(summed: Sequence[Summed], depends: Mapping[str, frozenset[str]]) -> list[list[Summed]]:
    """The latents in groups of equally many values, of which no density depends on two."""
    # All of a group can be varied at once. A chain has two, its even and its odd states, so that it
    # costs as much to trace as it has steps, and not the square of that.
    met = {one.name: frozenset[str]() for one in summed}
    for names in depends.values():
        for name in names:
            met[name] |= names
    groups: list[list[Summed]] = []
    for one in summed:
        for group in groups:
            others = {other.name for other in group}
            if group[0].num_values == one.num_values and not others & met[one.name]:
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _aligned(table: Array, axes: Sequence[str], wanted: Sequence[str]) -> Array:
    """A table with an axis of length 1 for each latent that it lacks; both in one order."""
    return jnp.expand_dims(table, [i for i, name in enumerate(wanted) if name not in axes])


def with_own_gradient(density: Callable[..., Array]) -> Callable[..., Array]:
    """The function, with a gradient in its first argument that is taken one call at a time."""
    # Where a class makes a value impossible, NumPyro divides by the smallest number of 32 bits and
    # then multiplies by zero. That is zero for one record, but not for the sum over records of a
    # probability that they share: then it is infinity times zero.
    own = jax.custom_vjp(density)

    def forward(theta: PyTree, *others: PyTree) -> tuple[Array, PyTree]:
        # Taken now, while vmap still holds records apart, and only scaled on the way back.
        return jax.value_and_grad(density, allow_int=True)(theta, *others)

    def backward(gradient: PyTree, cotangent: Array) -> tuple[PyTree, ...]:
        def scaled(leaf: Any) -> Any:
            return leaf if leaf.dtype == jax.dtypes.float0 else cotangent * leaf

        return (jax.tree.map(scaled, gradient), None, None)

    own.defvjp(forward, backward)
    return own
