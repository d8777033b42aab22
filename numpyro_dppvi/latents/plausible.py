"""Checks that outcomes lie in the model's support and parameters in their ranges.

Outside of these, NumPyro's distributions silently compute meaningless numbers or NaN.
"""

import functools
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.families.compiled import Compiled, compiled
from numpyro_dppvi.latents import domains, indices
from numpyro_dppvi.latents.additive import made_up
from numpyro_dppvi.latents.space import Latent, LatentSpace, several
from numpyro_dppvi.latents.trace import Trace

_NUM_DRAWS, _NUM_POINTS, _NUM_ROWS = 256, 32, 3
# The first step from the prior uses about ten draws, and one without a density makes it NaN. So
# parameters may be out of range in at most this fraction of draws from the prior.
_SHARE = 0.05


def check_records(space: LatentSpace, records: Mapping[str, Array], mask: Array) -> None:
    """Refuses records that the model has no place for, of all clients, in blocks.

    These are outcomes outside its support, negative weights, and numbers of groups that there are
    not. Masked outcomes and those of weight zero may be anything. The check is pass or fail and
    happens before any release; its message is public and shows no record.
    """
    _check_places(space, records, mask)
    # What depends on a latent (a residual) has no value before inference, and is left out.
    names = space.fixed_outcomes
    if not names:
        return
    # One flag for all clients together, before anything is released: a refusal says that some
    # record does not fit the model, and not whose.
    supported, weighted = _supported(space, names, dict(records), mask)
    for name in names:
        if not weighted[name]:
            raise ValueError(
                f"weights of {name!r} (handlers.scale) must not be negative, got some below 0: "
                "write 0 to leave a record out."
            )
        if not supported[name]:
            fn, support = _described(space, name)
            raise ValueError(
                f"data must hold outcomes in the model's support, got values of {name!r} outside "
                f"of {support}: recode or drop such records, or observe them from a distribution "
                f"other than dist.{fn}."
            )


def _check_places(space: LatentSpace, records: Mapping[str, Array], mask: Array) -> None:
    """Refuses records that name places which there are not."""
    found = indices.lookups(space)
    if found is None:
        return
    outside = _outside(space, dict(records), mask)
    # The last is to blame: what it found wrong is wrong of those before it, too.
    for each, wrong in reversed(list(zip(found.found, outside, strict=True))):
        if wrong:
            names = " and ".join(map(repr, each.arguments))
            ends = " and ".join(f"0 to {size - 1}" for size in each.sizes)
            raise ValueError(
                f"data must hold indices within what the model looks up, got values of {names} "
                f"outside of {ends}: number groups from 0, and leave out records without one."
            )


@compiled("space")
def _outside(space: LatentSpace, records: Mapping[str, Array], mask: Array) -> tuple[Array, ...]:
    """Whether any record of any client rests on a place that is not there, by lookup."""
    theta = {latent.name: _some_value(latent) for latent in space.latents}
    found = indices.lookups(space)
    assert found is not None  # as it is not called without

    def of_block(block: tuple[Mapping[str, Array], Array]) -> Any:
        rows, is_record = block
        outside = jax.vmap(lambda row: found.outside(theta, row))(rows)
        return jax.tree.map(lambda each: jnp.any(each & is_record), outside)

    return jax.tree.map(jnp.any, jax.lax.map(of_block, (records, mask)))


@compiled("space", "names")
def _supported(
    space: LatentSpace, names: tuple[str, ...], records: Mapping[str, Array], mask: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Whether all records of all clients are in the support, and no weight is negative, by site."""
    theta = {latent.name: _some_value(latent) for latent in space.latents}

    # Where the support follows a discrete latent of the record, some of its values must allow it.
    bounded = space.summation.bounded.intersection(names)

    def of_row(row: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        trace = space.trace(theta, row)
        weighted = {name: _has_weight(trace[name]) for name in names}
        found = {name: _is_supported(trace[name]) for name in names if name not in bounded}
        if bounded:
            found |= dict.fromkeys(bounded, space.log_likelihood(theta, row) != -jnp.inf)
        return found, weighted

    def of_block(block: tuple[Mapping[str, Array], Array]) -> Any:
        rows, is_record = block
        return jax.tree.map(lambda good: jnp.all(good | ~is_record), jax.vmap(of_row)(rows))

    # A block at a time, because densities of all records at once could fill the memory.
    return jax.tree.map(jnp.all, jax.lax.map(of_block, (records, mask)))


def _is_supported(site: Mapping[str, Any]) -> Array:
    good = domains.inside(site["fn"], jnp.asarray(site["value"]))
    if site["scale"] is not None:  # outcomes of weight zero do not count
        good |= jnp.asarray(site["scale"]) == 0
    return jnp.all(good)


def _has_weight(site: Mapping[str, Any]) -> Array:
    return jnp.all(jnp.asarray(1.0 if site["scale"] is None else site["scale"]) >= 0)


def _some_value(latent: Latent) -> Array:
    """A value in the middle, at which densities on the boundary of a support are evaluated."""
    values = domains.integers(latent.support)
    if values is not None:
        return jnp.full(latent.shape, values.start, latent.dtype)
    return latent.transform(jnp.zeros(latent.base_shape))


def _described(space: LatentSpace, name: str) -> tuple[str, str]:
    """An observed site's distribution and its support in words, from an abstract run."""

    def read(trace: Trace) -> tuple[str, str]:
        fn = trace[name]["fn"]
        at_edge = " (or on its boundary, where the density is not finite)"
        support = domains.in_words(fn.support) + at_edge * domains.has_edge(fn.support)
        return domains.name_of(fn), support

    return space.facts(read)


def check_priors(space: LatentSpace) -> None:
    """Refuses priors under which parameters leave their range, such as a negative scale.

    Uses draws from the priors and made-up records only.
    """
    found = _broken(space)
    if found is not None:
        raise UnsupportedModelError(found)


def warn_of_scales(space: LatentSpace) -> None:
    """Warns of densities multiplied by a constant, perhaps the N / B of a minibatch."""
    found = _scaled(space)
    if found is not None:
        name, number = found
        warnings.warn(
            f"the density of {name!r} is multiplied by the constant {number}(handlers.scale), so "
            "a record counts more or less than once: leave it out if it is meant for minibatches, "
            "which inference rescales by itself.",
            UserWarning,
            stacklevel=2,
        )


@functools.lru_cache(maxsize=256)
def _scaled(space: LatentSpace) -> tuple[str, str] | None:
    """The first observed site with such a constant, and the constant if the program shows it."""
    shown: dict[str, str] = {}

    def scales(trace: Trace) -> dict[str, Array]:
        found = {}
        for name in space.client_side:
            # NumPyro keeps the factors of plates beside each other, and that of handlers.scale
            # under None.
            scale = trace[name].get("plate_to_scale", {}).get(None)  # excludes those of plates
            number = isinstance(scale, numbers.Number)
            if scale is not None and not (number and scale == 1):
                shown[name] = f"{scale:g} " if number else ""
                found[name] = jnp.asarray(scale)
        return found

    causes = space.causes(scales)
    constant = [name for name in shown if not causes[name]]
    return (constant[0], shown[constant[0]]) if constant else None


@functools.lru_cache(maxsize=256)
def _broken(space: LatentSpace) -> str | None:
    """A message about the first parameter that leaves its range, or ``None``."""
    about: dict[str, tuple[str, str, str]] = {}

    def of_row(theta: Mapping[str, Array], row: Mapping[str, Array], seed: Any) -> dict[str, Array]:
        broken: dict[str, Array] = {}
        for name, site in space.trace(theta, row, seed).items():
            if site["type"] != "sample":
                continue
            # Labels are counted within a record's run, so that every run has the same ones.
            for fn, parameter, constraint, flags in domains.broken_arguments(site["fn"]):
                label = f"{name} {len(broken)}"
                known = domains.kind(constraint)
                what = f"{parameter} of {name!r} (dist.{domains.name_of(fn)})"
                instead = f"give it a prior on that range, {known.instead} say"
                if known.link:
                    instead = f"if it is a latent, {instead}; if it is computed, write {known.link}"
                about[label] = what, domains.in_words(constraint), instead
                broken[label] = flags
        return broken

    def shares(theta: Mapping[str, Array], seeds: Array) -> dict[str, Array]:
        of_rows = jax.vmap(of_row, (None, 0, None))
        flags = jax.vmap(of_rows, (0, None, 0))(theta, _rows(space), seeds)
        # The share of thetas for which it is broken; the minimum over rows, because a made-up row
        # may be one that no client has, and the maximum over entries.
        return {k: jnp.max(jnp.min(jnp.mean(x, axis=0), axis=0)) for k, x in flags.items()}

    # Programs that draw from priors compile slowly. Most models pass this cheaper test first.
    points = {latent.name: _points(latent) for latent in space.latents}
    # Seeds are only there for models that draw numbers of their own.
    possible = Compiled(shares, quick=True)(points, jax.device_put(np.arange(_NUM_POINTS)))
    if not any(float(share) > 0 for share in possible.values()):
        return None
    keys = jax.random.split(jax.random.key(0), _NUM_DRAWS)
    for label, share in jax.tree.map(float, Compiled(shares, quick=True)({}, keys)).items():
        # A share of 1 is not the priors' doing: a parameter that is broken whatever the latents are
        # was made from a made-up row.
        if _SHARE <= share < 1:
            what, words, instead = about[label]
            return (
                f"the parameter {what} is outside of {words} for {share:.0%} of draws from the "
                f"priors, so records have no density there: {instead}."
            )
    return None


def _points(latent: Latent) -> Array:
    """Values spread over a latent's support, to detect parameters that ever leave their range."""
    rng = np.random.default_rng(sum(map(ord, latent.name)))  # latents differ from each other
    values = domains.integers(latent.support)
    if values is not None:
        drawn = rng.integers(values.start, values.stop, (_NUM_POINTS, *latent.shape))
        return jnp.asarray(drawn, latent.dtype)
    # Unconstrained values at several scales and of both signs: a parameter that leaves its range
    # anywhere, such as a scale that may be negative, does so at one of them.
    # Both signs of each point, so that what is odd in a latent is seen on both sides.
    half = rng.uniform(-1, 1, (_NUM_POINTS // 2, *latent.base_shape))
    half *= np.resize([1, 3, 10, 30], (_NUM_POINTS // 2, *[1] * len(latent.base_shape)))
    dtype = jnp.result_type(float)
    return latent.transform(jnp.asarray(np.concatenate([half, -half]).astype(dtype), dtype))


def _rows(space: LatentSpace) -> dict[str, Array]:
    """Made-up records, and the same with opposite signs."""
    rng = np.random.default_rng(0)
    rows = {name: made_up(rng, s) for name, s in several(space.row, _NUM_ROWS).items()}
    return {
        name: jnp.concatenate([x, -x if jnp.issubdtype(x.dtype, jnp.floating) else x])
        for name, x in rows.items()
    }
