"""Means, standard deviations and quantiles of one latent's distribution.

They are exact for distributions with closed forms and on integers, by Gauss-Hermite quadrature for
elementwise bijections of a normal, and by simulation with a fixed key for the rest (a simplex, for
example).
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions.transforms import ComposeTransform

from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import MeanField
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.reading import split

NUM_DRAWS = 10_000
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)


class Drawn(dist.Distribution):
    """The distribution of some draws, entry by entry."""

    support = dist.constraints.real
    pytree_data_fields = ("values",)

    def __init__(self, values: Array) -> None:
        self.values = values
        super().__init__(batch_shape=jnp.shape(values)[1:])

    def sample(self, key: PRNGKey, sample_shape: tuple[int, ...] = ()) -> Array:
        """Some of the draws again."""
        return self.values[jax.random.randint(key, sample_shape, 0, len(self.values))]

    def log_prob(self, value: Array) -> Array:
        """Refused: draws have none."""
        raise NotImplementedError(
            "this latent's posterior is known by draws, which have no density: write "
            "posterior.log_density(values) for that of all latents together."
        )

    def icdf(self, q: Array) -> Array:
        """Quantiles, on a leading axis."""
        return jnp.quantile(self.values, jnp.ravel(q), axis=0)

    @property
    def mean(self) -> Array:
        """Of every entry."""
        return jnp.mean(self.values, axis=0)

    @property
    def variance(self) -> Array:
        """Of every entry."""
        return jnp.var(self.values, axis=0)


def mean(distribution: dist.Distribution) -> Array:
    """The mean of every entry; for discrete latents the mean of the integer."""
    return _moments(_on_device(distribution))[0]


def stddev(distribution: dist.Distribution) -> Array:
    """The standard deviation of every entry."""
    return _moments(_on_device(distribution))[1]


def _mean_and_stddev(distribution: dist.Distribution) -> tuple[Array, Array]:
    if _is_discrete(distribution):
        return _weighted(*_integers(distribution))
    if isinstance(distribution, dist.TransformedDistribution):
        return _expectation(distribution)
    return distribution.mean, jnp.sqrt(distribution.variance)


# One program, not one for each of its dozens of operations, which take a second the first time.
_moments = compiled(quick=True)(_mean_and_stddev)


def _on_device(distribution: dist.Distribution) -> dist.Distribution:
    """With JAX's arrays as parameters, so that NumPy's of 64 bits ask for no precision."""
    return jax.tree.map(jnp.asarray, distribution)


@compiled("family", quick=True)
def moments(family: MeanField, natural: Natural) -> tuple[dict[str, Array], dict[str, Array]]:
    """Means and standard deviations of unconstrained latents, by latent."""
    found = family.distribution(family.coordinates(natural))
    pairs = {name: _mean_and_stddev(distribution) for name, distribution in found.items()}
    return {n: mean for n, (mean, _) in pairs.items()}, {n: sd for n, (_, sd) in pairs.items()}


def quantiles(distribution: dist.Distribution, probs: Sequence[float]) -> Array:
    """Quantiles of every entry, shape ``(len(probs), *shape)``."""
    return _quantiles(_on_device(distribution), jnp.asarray(probs))


@compiled(quick=True)
def _quantiles(distribution: dist.Distribution, levels: Array) -> Array:
    if _is_discrete(distribution):
        return _least(distribution, levels)
    base, through = _parts(distribution)
    if not all(map(_is_elementwise, through.parts)):
        return jnp.quantile(_draws(distribution), levels, axis=0)
    shape = through.inverse_shape(distribution.shape())

    # A monotone bijection maps quantiles to quantiles, in reverse order if it is decreasing.
    def at(levels: Array) -> Array:
        values = base.icdf(levels.reshape(-1, *[1] * len(shape)))
        return through(jnp.broadcast_to(values, (len(levels), *shape)))

    try:
        lower, upper = at(jnp.array([0.25, 0.75]))
    except (ImportError, NotImplementedError):  # some inverses need TensorFlow Probability
        return jnp.quantile(_draws(distribution), levels, axis=0)
    # Which way it goes is read off two quantiles, entry by entry.
    return jnp.where(upper >= lower, at(levels), at(1 - levels))


def table(
    distributions: Mapping[str, dist.Distribution], max_lines: int = 40
) -> tuple[list[list[str]], int]:
    """Mean, standard deviation and 90 % interval of every entry: a header, and a row for each.

    Beside these, the number of entries that are not shown.
    """
    rows = [["", "mean", "sd", "5 %", "50 %", "95 %"]]
    num_entries = 0
    for name, distribution in distributions.items():
        columns = [
            np.asarray(column)
            for column in (
                *_moments(_on_device(distribution)),
                *quantiles(distribution, (0.05, 0.5, 0.95)),
            )
        ]
        for index in np.ndindex(distribution.shape()):
            num_entries += 1
            if num_entries <= max_lines:
                label = f"{name}[{', '.join(map(str, index))}]" if index else name
                rows.append([label, *(f"{float(column[index]):.4g}" for column in columns)])
    return rows, max(0, num_entries - max_lines)


def _expectation(distribution: dist.TransformedDistribution) -> tuple[Array, Array]:
    """Mean and standard deviation of a transformed distribution."""
    base, through = _parts(distribution)
    if isinstance(base, dist.Normal) and all(map(_is_elementwise, through.parts)):
        # E[f(m + s Z)] = sum of w_i f(m + s z_i), with the nodes z_i and (normalised) weights w_i
        # of the rule for the weight function exp(-z^2 / 2).
        shape = through.inverse_shape(distribution.shape())
        nodes = jnp.asarray(_NODES, float).reshape(-1, *[1] * len(shape))
        loc, scale = (jnp.broadcast_to(x, shape) for x in (base.loc, base.scale))
        values = through(loc + scale * nodes)
        weights = jnp.asarray(_WEIGHTS, float).reshape(-1, *[1] * (values.ndim - 1))
        weights = weights / jnp.sum(weights)
    else:
        values = _draws(distribution)
        weights = jnp.full((len(values), *[1] * (values.ndim - 1)), 1 / len(values))
    return _weighted(values, weights)


def _weighted(values: Array, weights: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of values on a leading axis, with weights that sum to 1."""
    # E[(x - m)^2] and not E[x^2] - m^2, which would lose all digits near probabilities of 0 and 1.
    centre = jnp.sum(weights * values, axis=0)
    return centre, jnp.sqrt(jnp.sum(weights * (values - centre) ** 2, axis=0))


def _is_discrete(distribution: dist.Distribution) -> bool:
    return bool(distribution.support.is_discrete)


def _integers(distribution: dist.Distribution) -> tuple[Array, Array]:
    """All values of every entry, and their probabilities, on a leading axis."""
    base, _ = _parts(distribution)
    values = base.enumerate_support(expand=True)
    return values, jnp.exp(base.log_prob(values))


def _least(distribution: dist.Distribution, levels: Array) -> Array:
    """Quantiles of a discrete distribution: the least x with P(X <= x) >= level."""
    values, probs = _integers(distribution)
    below = jnp.cumsum(probs, axis=0)[:-1]
    # As many values as have P(X <= x) below the level are passed over. The last one is left out of
    # the count: rounding may leave its probability short of a level of 1.
    counts = jnp.sum(below < levels.reshape(-1, *[1] * below.ndim), axis=1)
    return values[0] + counts


def _draws(distribution: dist.Distribution) -> Array:
    # A fixed key, so that a mean is the same number every time it is asked for.
    return distribution.sample(jax.random.key(0), (NUM_DRAWS,))


def _parts(distribution: dist.Distribution) -> tuple[dist.Distribution, ComposeTransform]:
    """The base distribution, of which the entries' marginals count, and what it is put through."""
    base, transforms = split(distribution)
    if isinstance(base, dist.MultivariateNormal):
        base = dist.Normal(base.mean, jnp.sqrt(base.variance))
    return base, ComposeTransform(transforms)


def _is_elementwise(transform: dist.transforms.Transform) -> bool:
    """Whether a bijection acts on every entry separately, apart from a change of shape."""
    while isinstance(transform, dist.transforms.IndependentTransform):
        transform = transform.base_transform
    if isinstance(transform, dist.transforms.ReshapeTransform):
        return True
    return transform.domain.event_dim == transform.codomain.event_dim == 0
