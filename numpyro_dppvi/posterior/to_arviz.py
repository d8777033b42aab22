"""Converts named arrays to ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (ArviZ 1.x).

It takes arrays, names and numbers only, so nothing else of a fit can get into an export.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import Array

_SAMPLE_DIMS = ("chain", "draw")
# Groups that hold data instead of draws.
_DATA_GROUPS = frozenset({"observed_data", "constant_data"})
# Groups whose dimensions are the model's own, and not those of rows somebody passes.
_LATENT_GROUPS = frozenset({"posterior", "prior"})
# netCDF limits attributes to 64 KiB.
_MAX_ATTRIBUTE = 30_000


class Variable(NamedTuple):
    """One array of a group."""

    values: Array | np.ndarray  # the array; in a group of draws, the draws are the leading axis
    # Names of the other dimensions; ``None`` for those without a name.
    dims: Sequence[str | None] = ()


Groups = Mapping[str, Mapping[str, Variable]]


def to_arviz(
    groups: Groups,
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Sequence[Any]],
    attrs: Mapping[str, str | float],
    known: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Wraps groups of variables for ArviZ: ``InferenceData`` in 0.x, ``xarray.DataTree`` in 1.x.

    Draws become one chain; they are independent, so convergence diagnostics of chains do not apply.
    ``dims`` replace the names that a variable's dimensions have, and ``attrs`` are stored with
    every group. ``known`` are labels along dimensions of draws that have such a name and are as
    long, unless ``coords`` has others.
    """
    import arviz  # slow to import, and needed only here
    import xarray

    _check_names(groups, dims)
    labels = {
        name: _validate.entries(f"coords[{name!r}]", values, "['a', 'b']")
        for name, values in coords.items()
    }
    # netCDF limits attributes, and a statement of a thousand clients has a thousand lines.
    attrs = {name: _short(x) if isinstance(x, str) else x for name, x in attrs.items()}
    datasets, used = {}, set()
    for group, variables in groups.items():
        arrays = {name: _named(group, name, v, dims) for name, v in variables.items()}
        sizes = dict(_sizes(arrays, labels))
        used |= set(sizes)
        # Rows that the caller passes may happen to be as many as there are clients: these get no
        # names.
        theirs = (known or {}) if group in _LATENT_GROUPS else {}
        fitting = {n: each for n, each in theirs.items() if each and sizes.get(n) == len(each)}
        index = {n: labels.get(n, fitting.get(n, range(size))) for n, size in sizes.items()}
        datasets[group] = xarray.Dataset(arrays, {n: list(v) for n, v in index.items()}, attrs)
    unused = sorted(set(labels) - used)
    if unused:
        raise ValueError(
            f"coords must name dimensions of variables ({_listed(used - {*_SAMPLE_DIMS})}), got "
            f"{unused[0]!r}: name it in dims, or leave it out of coords."
        )
    # ArviZ 0.x shows InferenceData, 1.x the DataTree of xarray; the groups in them are the same.
    if int(importlib.metadata.version("arviz").split(".")[0]) >= 1:
        return xarray.DataTree.from_dict({"/": xarray.Dataset(attrs=attrs), **datasets})
    data: Any = arviz.InferenceData
    return data(attrs=attrs, **datasets)


def _check_names(groups: Groups, dims: Mapping[str, Sequence[str]]) -> None:
    known = {name for variables in groups.values() for name in variables}
    for name, names in dims.items():
        if name not in known:
            raise ValueError(
                f"dims must name variables, got {name!r}: write one of {_listed(known)}."
            )
        if isinstance(names, str):
            raise ValueError(
                f"dims[{name!r}] must be a list of names, got {names!r}: write "
                f"dims={{{name!r}: [{names!r}]}}."
            )
        own = _validate.entries(f"dims[{name!r}]", names, "['row']")
        for one in own:
            if not isinstance(one, str):
                raise ValueError(
                    f"dims[{name!r}] must be a list of names, got {_validate.shown(one)} among "
                    f"them: write dims={{{name!r}: ['row']}}."
                )
        wrong = [d for d in own if d in _SAMPLE_DIMS or d == name or own.count(d) > 1]
        if wrong:
            raise ValueError(
                f"dims[{name!r}] must be distinct names other than the variable's, 'chain' and "
                f"'draw', got {wrong[0]!r}: choose another name."
            )


def _named(
    group: str, name: str, variable: Variable, dims: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], np.ndarray]:
    """A variable with a name for every dimension, and a leading chain axis if it holds draws."""
    values = np.asarray(variable.values)
    lead = () if group in _DATA_GROUPS else _SAMPLE_DIMS
    # Draws have one leading axis here; the chain's is added at the end.
    num_own = values.ndim - len(lead[1:])
    own: list[str | None] = [*variable.dims, *[None] * (num_own - len(variable.dims))]
    if name in dims:
        given = dims[name]
        # Log likelihoods lack event dimensions, so names for the whole variable may be longer.
        if len(given) != num_own and not (group == "log_likelihood" and len(given) > num_own):
            raise ValueError(
                f"dims[{name!r}] must name {num_own} dimensions, got {len(given)} names: write one "
                f"for each axis of the shape {values.shape[len(lead[1:]) :]}."
            )
        own = [*given[:num_own]]
    # ArviZ's own names for dimensions that have none.
    names = [dim or f"{name}_dim_{axis}" for axis, dim in enumerate(own)]
    # Independent draws are one chain.
    return (*lead, *names), values[None] if lead else values


def _sizes(
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray]], labels: Mapping[str, list[Any]]
) -> Iterator[tuple[str, int]]:
    """Yields every dimension of a group with its size."""
    found: dict[str, tuple[str, int]] = {}
    for variable, (names, values) in arrays.items():
        for name, size in zip(names, values.shape, strict=True):
            if name in labels and len(labels[name]) != size:
                raise ValueError(
                    f"coords[{name!r}] must hold {size} labels for {variable!r}, got "
                    f"{len(labels[name])}: write one label per entry."
                )
            # The first variable with a dimension decides on its length, and is named where another
            # one differs.
            other, known = found.setdefault(name, (variable, size))
            if known != size:
                raise ValueError(
                    f"the dimension {name!r} has {known} entries in {other!r} and {size} in "
                    f"{variable!r}: give one of them another name in dims."
                )
            yield name, size


def _short(text: str) -> str:
    """A text that fits an attribute, with lines in the middle left out if necessary."""
    if len(text) <= _MAX_ATTRIBUTE:
        return text
    lines = text.splitlines()
    # As many lines from either end as fit even if all are as long as the longest.
    kept = _MAX_ATTRIBUTE // (2 * max(map(len, lines)))
    left_out = f"  ... ({len(lines) - 2 * kept} lines left out)"
    return "\n".join([*lines[:kept], left_out, *lines[len(lines) - kept :]])


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
