"""Reads guides written as functions: a family and a bijection for each latent."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import ComposeTransform, IdentityTransform, Transform
from numpyro.ops.provenance import eval_provenance

from numpyro_dppvi import families
from numpyro_dppvi._typing import Model
from numpyro_dppvi._validate import UnsupportedModelError, shown
from numpyro_dppvi.families import MAX_JOINT_VALUES, MeanField, enumeration
from numpyro_dppvi.families.reading import split
from numpyro_dppvi.latents import Latent, LatentSpace
from numpyro_dppvi.latents.domains import ends, integers, plain
from numpyro_dppvi.latents.fingerprint import evaluated
from numpyro_dppvi.latents.reasons import CONCRETE_VALUE_ERRORS
from numpyro_dppvi.latents.space import shapes
from numpyro_dppvi.latents.trace import Trace, run_model

Run: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Trace]
"""Runs a guide on some rows, with given latents and parameters."""

_EXAMPLE = "numpyro.sample({!r}, dist.Normal(loc, scale))"


class _Drawn(NamedTuple):
    """The distribution from which a guide draws a latent."""

    shape: tuple[int, ...]
    base: type[dist.Distribution]
    transforms: tuple[Transform, ...]
    support: Constraint


def read(
    guide: Model, space: LatentSpace, records: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Transform], MeanField]:
    """Bijections by latent, and the family of their base values."""
    # The guide is run on rows of zeros. Values of its parameters do not matter, only the types of
    # its distributions and what they depend on.
    rows = shapes(records)

    def run(rows: Mapping[str, Any], fixed: Mapping[str, Any]) -> Trace:
        return run_model(guide, rows, model_kwargs, fixed)

    name = getattr(guide, "__name__", shown(guide))
    drawn, params = _structure(name, run, rows, tuple(latent.name for latent in space.latents))
    # A guide's distribution is a base distribution pushed through bijections, for example LogNormal
    # is Normal through exp. Factors live over the base values, where q is an exponential family.
    transforms, members = {}, {}
    for latent in space.latents:
        mine = drawn[latent.name]
        transforms[latent.name] = _composed(mine.transforms)
        members[latent.name] = _family(latent, mine, transforms[latent.name])
    # After the latents' own faults, which explain more than "depends on".
    _refuse_dependence(run, rows, space.latents, params)
    family = MeanField(tuple(members.items()))
    _refuse_too_many(family, space)
    return transforms, family


def _refuse_too_many(family: MeanField, space: LatentSpace) -> None:
    """Refuses discrete latents with too many joint values to sum over at every step."""
    number = enumeration.num_joint_values(family)
    if number <= MAX_JOINT_VALUES:
        return
    shown = f"{number:,}" if number < 10**9 else f"{number:.0e}"
    names = ", ".join(latent.name for latent in space.latents if latent.is_discrete)
    raise UnsupportedModelError(
        f"the discrete latents ({names}) have {shown} joint values, over which every step sums, "
        f"and there may be {MAX_JOINT_VALUES} at most: draw fewer, or sum them out in the model "
        "(dist.MixtureSameFamily, or a logsumexp in a numpyro.factor)."
    )


def _structure(
    name: str, run: Run, rows: Mapping[str, Any], latents: tuple[str, ...]
) -> tuple[dict[str, _Drawn], dict[str, Any]]:
    """The distributions that the guide draws from, and shapes of its parameters."""
    params: dict[str, Any] = {}
    kinds: dict[str, Any] = {}

    def static() -> dict[str, Any]:
        trace = run({key: jnp.zeros(s.shape, s.dtype) for key, s in rows.items()}, {})
        _refuse_sites(name, trace, latents)
        for key, site in trace.items():
            if site["type"] == "param":
                # Shapes alone: whatever value a guide's parameter has, inference starts from the
                # prior.
                params[key] = jax.eval_shape(lambda x: x, site["value"])
        fns = {key: trace[key]["fn"] for key in latents}
        parts = {key: split(fn) for key, fn in fns.items()}
        kinds.update({k: (jnp.shape(trace[k]["value"]), type(parts[k][0])) for k in latents})
        return {key: (parts[key][1], fn.support) for key, fn in fns.items()}

    try:
        found = evaluated(static)  # computes only the parameters of bijections and supports
    except UnsupportedModelError as refusal:
        raise UnsupportedModelError(str(refusal)) from None  # drops JAX's notes
    except CONCRETE_VALUE_ERRORS as error:
        raise UnsupportedModelError(
            f"the guide {name} depends on values of its arguments: give each latent its own "
            "parameters, such as numpyro.param('w_loc', jnp.zeros(3))."
        ) from error
    # The guide is the user's code, and may raise anything; nothing of it has seen a record.
    except Exception as error:
        raise UnsupportedModelError(
            f"the guide {name} raised {type(error).__name__} when it was called with the model's "
            "arguments: write it as a function of the same arguments."
        ) from error
    return {key: _Drawn(*kinds[key], *found[key]) for key in latents}, params


def _refuse_sites(name: str, trace: Trace, latents: tuple[str, ...]) -> None:
    """Refuses a guide that does not draw exactly the model's latents."""
    for key, site in trace.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise UnsupportedModelError(
                f"the plate {key!r} of the guide {name} draws a subsample, but a factor needs all "
                "of a latent: leave out subsample_size."
            )
        if site["type"] != "sample":
            continue
        if site["is_observed"]:
            raise UnsupportedModelError(
                f"the guide {name} observes {key!r}, but a guide may only draw latents: remove "
                "that statement."
            )
        if key not in latents:
            raise UnsupportedModelError(
                f"the guide {name} draws {key!r}, which is not a latent of the model: draw "
                f"{', '.join(latents)} and nothing else."
            )
        # handlers.scale in a guide would scale its entropy, which here has a closed form.
        if site["scale"] is not None:
            raise UnsupportedModelError(
                f"the guide {name} rescales the density of latent {key!r}, which is then not a "
                "density: leave out handlers.scale."
            )
    missing = [key for key in latents if key not in trace]
    if missing:
        raise UnsupportedModelError(
            f"the guide {name} does not draw the latent {missing[0]!r}: add "
            f"{_EXAMPLE.format(missing[0])} or another distribution on its support."
        )


def _composed(transforms: tuple[Transform, ...]) -> Transform:
    if not transforms:
        return IdentityTransform()
    return transforms[0] if len(transforms) == 1 else ComposeTransform(list(transforms))


def _family(latent: Latent, drawn: _Drawn, transform: Transform) -> Any:
    if drawn.shape != latent.shape:
        raise UnsupportedModelError(
            f"latent {latent.name!r} has shape {latent.shape} in the model and {drawn.shape} in "
            f"the guide: write .expand({list(latent.shape)}) there, or the model's plates."
        )
    table = [  # read here, because users may put rows into it
        (kind, make)
        for kind, make in families.BY_DISTRIBUTION
        if bool(getattr(kind.support, "is_discrete", False)) == latent.is_discrete
    ]
    # The first row that fits, so that a row in front goes before ours. A subclass of a known
    # distribution is one.
    make = next((make for kind, make in table if issubclass(drawn.base, kind)), None)
    if make is None:
        raise UnsupportedModelError(
            f"the guide draws latent {latent.name!r} from {_name(drawn.base)}, but "
            f"{_why_not(latent, drawn)}: write {_instead(latent, [kind for kind, _ in table])}."
        )
    if not _same_support(drawn.support, latent.support):
        other = "" if latent.is_discrete else ", or from a TransformedDistribution"
        raise UnsupportedModelError(
            f"latent {latent.name!r} has support {_words(latent.support)} in the model and "
            f"{_words(drawn.support)} in the guide: draw it from a distribution on its support"
            f"{other}."
        )
    values = integers(drawn.support)
    if values is None or isinstance(plain(drawn.support), type(constraints.boolean)):
        # Bernoulli takes a shape alone, because its number of values is known.
        return make(transform.inverse_shape(latent.shape))
    return make(latent.shape, len(values))


def _why_not(latent: Latent, drawn: _Drawn) -> str:
    """Why a latent cannot be drawn from the guide's distribution."""
    if issubclass(drawn.base, dist.Delta):
        return "a point mass is not a product of factors"
    if latent.is_discrete and not drawn.support.is_discrete:
        return "that is continuous and the latent is discrete"
    if drawn.support.is_discrete and not latent.is_discrete:
        return "that is discrete and the latent is continuous"
    return "products of its densities are of another kind"


def _instead(latent: Latent, kinds: Sequence[type[dist.Distribution]]) -> str:
    """The distributions from which a latent can be drawn."""
    names = list(dict.fromkeys(map(_name, kinds)))
    if latent.is_discrete:
        return f"{' or '.join(names)}, or sum it out in the model"
    others = "LogNormal, InverseGamma or another TransformedDistribution of these"
    return ", ".join([*names, others])


def _name(kind: type[dist.Distribution]) -> str:
    """A distribution's name as users write it."""
    return kind.__name__.removesuffix("Probs").removesuffix("Logits")


def _same_support(a: Constraint, b: Constraint) -> bool:
    if integers(a) is not None:
        return integers(a) == integers(b)
    a, b = plain(a), plain(b)
    if _has_bounds(a) and _has_bounds(b):
        # By their ends, because Interval(0, inf) and Positive are the same set in two classes.
        both = zip(ends(a), ends(b), strict=True)
        return all(bool(np.all(np.asarray(x) == np.asarray(y))) for x, y in both)
    return bool(a == b)


def _has_bounds(constraint: Constraint) -> bool:
    return hasattr(constraint, "lower_bound") or hasattr(constraint, "upper_bound")


def _words(constraint: Constraint) -> str:
    values = integers(constraint)
    if values is not None:
        shown = [*values] if len(values) <= 3 else [*values[:2], "...", values[-1]]
        return f"{{{', '.join(map(str, shown))}}}"
    constraint = plain(constraint)
    if _has_bounds(constraint) and all(np.ndim(end) == 0 for end in ends(constraint)):
        return "({:g}, {:g})".format(*map(float, ends(constraint)))
    return type(constraint).__name__.strip("_").lower()


def _refuse_dependence(
    run: Run, rows: Mapping[str, Any], latents: tuple[Latent, ...], params: Mapping[str, Any]
) -> None:
    """Refuses parameters of a latent that depend on data or on another latent."""

    # As for the model's priors: eval_provenance tells which inputs each parameter depends on. The
    # guide's own parameters are allowed.
    def parameters(**given: Any) -> dict[str, Any]:
        rows, params = given.pop("$data"), given.pop("$params")
        trace = run(rows, {**given, **params})
        return {latent.name: jax.tree.leaves(trace[latent.name]["fn"]) for latent in latents}

    values = {latent.name: latent.struct for latent in latents}
    found = eval_provenance(parameters, **values, **{"$data": dict(rows), "$params": dict(params)})
    for name, leaves in found.items():
        causes = frozenset().union(*leaves) - {"$params"}
        if "$data" in causes:
            raise UnsupportedModelError(
                f"the guide's parameters of latent {name!r} depend on the data, which would reveal "
                "records unaccounted for: give it its own parameters, such as "
                f"numpyro.param({name + '_loc'!r}, ...)."
            )
        if causes:
            raise UnsupportedModelError(
                f"the guide's parameters of latent {name!r} depend on latent {min(causes)!r}, but "
                "latents must be independent under a mean-field guide: give it its own parameters, "
                "or write AutoMultivariateNormal(model)."
            )
