"""The mean-field product of several families; itself an exponential family."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_dppvi._typing import (
    Array,
    Coordinates,
    MemberNatural,
    Natural,
    PRNGKey,
    PyTree,
    RowProduct,
)
from numpyro_dppvi.families import factors, full_normal
from numpyro_dppvi.families.base import LocatedFamily, NormalFamily
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.families.full_normal import FullNormal
from numpyro_dppvi.families.precision import in_own_precision, rounded
from numpyro_dppvi.families.reading import in_a_row


class Part(NamedTuple):
    """A latent that shares a member with others: its name and base shape."""

    latent: str
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """Where a latent is: its member, and its entries there if it shares that member."""

    latent: str
    member: str
    family: Any
    shape: tuple[int, ...]
    entries: range | None


@dataclass(frozen=True)
class MeanField:
    """A product of independent families; itself an exponential family.

    Natural parameters, coordinates and statistics are dicts by member. A member is a single latent
    with the same name, or shared by several latents. Draws, points and distributions are dicts by
    latent.

    Args:
        members: Pairs of member name and family (a tuple, so that the value is hashable).
        shared: Pairs of the name of a shared member, whose family is a ``FullNormal`` over one
            vector, and the latents whose flattened values are concatenated in that vector.
    """

    members: tuple[tuple[str, Any], ...]
    shared: tuple[tuple[str, tuple[Part, ...]], ...] = ()

    def standard(self) -> Coordinates:
        """Coordinates of every member's standard distribution."""
        return Coordinates({name: family.standard() for name, family in self.members})

    @in_own_precision
    def natural(self, coordinates: Coordinates) -> Natural:
        """Natural parameters by member."""
        return Natural({name: f.natural(coordinates[name]) for name, f in self.members})

    def coordinates(self, natural: Natural) -> Coordinates:
        """Coordinates by member, in the program's precision."""
        return rounded(self._coordinates(natural))

    @in_own_precision
    def _coordinates(self, natural: Natural) -> Coordinates:
        return Coordinates({name: f.coordinates(natural[name]) for name, f in self.members})

    @in_own_precision
    def statistics(self, coordinates: Coordinates) -> PyTree:
        """Expected statistics by member."""
        return {name: family.statistics(coordinates[name]) for name, family in self.members}

    def entropy(self, coordinates: Coordinates) -> Array:
        """The sum of the entropies."""
        return jnp.sum(jnp.stack([f.entropy(coordinates[name]) for name, f in self.members]))

    @in_own_precision
    def log_partition(self, natural: Natural) -> Array:
        """The sum of the log partitions."""
        return jnp.sum(jnp.stack([f.log_partition(natural[name]) for name, f in self.members]))

    def jeffreys(self, p: Natural, q: Natural) -> Array:
        """The Jeffreys divergence KL(p || q) + KL(q || p) in nats."""
        return rounded(self._jeffreys(p, q))

    @in_own_precision
    def _jeffreys(self, p: Natural, q: Natural) -> Array:
        # KL(p || q) = <eta_p - eta_q, E_p[T]> - A(eta_p) + A(eta_q). In the sum, the A cancel and
        # <eta_p - eta_q, E_p[T] - E_q[T]> is left.
        means = [self.statistics(self._coordinates(natural)) for natural in (p, q)]
        return factors.inner(factors.divide(p, q), factors.divide(*means))

    @in_own_precision
    def in_domain(self, natural: Natural) -> Array:
        """Whether every member's distribution is proper."""
        return jnp.all(jnp.stack([f.in_domain(natural[name]) for name, f in self.members]))

    @in_own_precision
    def project(self, natural: Natural, whole: frozenset[str] = frozenset()) -> Natural:
        """Projects each member; members in ``whole`` by ``project_whole`` if they have it."""
        return Natural(
            {
                name: family.project_whole(natural[name])
                if name in whole and isinstance(family, LocatedFamily)
                else family.project(natural[name])
                for name, family in self.members
            }
        )

    def draws(self, rng_key: PRNGKey, coordinates: Coordinates, num_draws: int) -> dict[str, Array]:
        """Draws by latent, for expectations."""
        each = self._with_keys(rng_key)
        found = {n: family.draws(key, coordinates[n], num_draws) for n, family, key in each}
        return self.by_latent(found)

    def sample(
        self, rng_key: PRNGKey, coordinates: Coordinates, shape: tuple[int, ...]
    ) -> dict[str, Array]:
        """Independent draws by latent, shape ``(*shape, *latent's base shape)``."""
        each = self._with_keys(rng_key)
        found = {n: f.distribution(coordinates[n]).sample(key, shape) for n, f, key in each}
        return self.by_latent(found)

    def _with_keys(self, rng_key: PRNGKey) -> list[tuple[str, Any, PRNGKey]]:
        keys = jax.random.split(rng_key, len(self.members))
        return [(*member, key) for member, key in zip(self.members, keys, strict=True)]

    def sigma_points(self, coordinates: Coordinates) -> dict[str, Array]:
        """The spherical cubature rule's points by latent, shape ``(2 * dimension, *shape)``.

        Raises:
            TypeError: If a member is not normal.
        """
        # In n dimensions, the 2 n points m +- sqrt(n) L e_i with equal weights integrate
        # polynomials of degree 3 exactly.
        for name, family in self.members:
            if not isinstance(family, NormalFamily):
                raise TypeError(
                    f"SphericalCubature integrates over normal distributions, and {name!r} has a "
                    f"{type(family).__name__}: write expectation=MonteCarlo(32), say."
                )
        sizes = [family.size for _, family in self.members]
        points = {}
        # All members together span the joint vector; each fills in its own axes.
        offset = 0
        for size, (name, family) in zip(sizes, self.members, strict=True):
            points[name] = family.sigma_points(coordinates[name], offset, sum(sizes))
            offset += size
        return self.by_latent(points)

    @property
    def is_normal(self) -> bool:
        """Whether all members are normal, and so all linear functions of the latents."""
        return all(isinstance(family, NormalFamily) for _, family in self.members)

    def location(self, coordinates: Coordinates) -> dict[str, Array]:
        """Means by latent; for normal families."""
        means = {name: family.location(coordinates[name]) for name, family in self.members}
        return self.by_latent(means)

    def linear_variance(self, coordinates: Coordinates, slope: Mapping[str, Array]) -> Array:
        """Variance of <slope, x>, a scalar, with the slope by latent; for normal families."""
        # Members are independent, so their variances add up.
        white = self.white_slope(coordinates, slope)
        return jnp.sum(jnp.stack([jnp.sum(leaf**2) for leaf in white.values()]))

    def white_slope(self, coordinates: Coordinates, slope: Mapping[str, Array]) -> dict[str, Array]:
        """L' slope by member, with the slope by latent, if members are x = m + L z."""
        slopes = self.by_member(slope)
        return {name: f.white_slope(coordinates[name], slopes[name]) for name, f in self.members}

    def from_white(self, coordinates: Coordinates, white: Mapping[str, Array]) -> dict[str, Array]:
        """Points m + L z by latent, of white noise z by member; for normal families."""
        found = {n: family.from_white(coordinates[n], white[n]) for n, family in self.members}
        return self.by_latent(found)

    def linear_gradient(
        self,
        coordinates: Coordinates,
        slope: Mapping[str, Array],
        along: Array,
        across: Mapping[str, RowProduct],
    ) -> Coordinates:
        """The gradient that is ``along * slope`` in m and slope across' in L; see base.

        Args:
            coordinates: The coordinates of q.
            slope: By latent.
            along: A scalar.
            across: By member.
        """
        slopes = self.by_member(slope)
        return Coordinates(
            {
                name: f.linear_gradient(coordinates[name], slopes[name], along, across[name])
                for name, f in self.members
            }
        )

    def distribution(self, coordinates: Coordinates) -> Mapping[str, dist.Distribution]:
        """NumPyro distributions by latent in the base space; marginals for shared members."""
        return {
            place.latent: place.family.distribution(coordinates[place.member])
            if place.entries is None
            else full_normal.marginal(coordinates[place.member], place.entries, place.shape)
            for place in self._places()
        }

    def log_dependence(self, coordinates: Coordinates, base: Mapping[str, Array]) -> Array:
        """Log density of base values by latent, less the sum of their marginals' log densities.

        It is 0 where no member is shared.
        """
        marginals, of = self.distribution(coordinates), self.by_member(base)
        terms = [
            family.distribution(coordinates[name]).log_prob(of[name])
            - sum(marginals[part.latent].log_prob(base[part.latent]) for part in parts)
            for name, family in self.members
            if (parts := dict(self.shared).get(name))
        ]
        return sum(terms, start=jnp.zeros(()))

    def member_of(self, latent: str) -> str:
        """The member that a latent belongs to."""
        return next(place.member for place in self._places() if place.latent == latent)

    def of_distributions(
        self, distributions: Mapping[str, dist.Distribution | None]
    ) -> tuple[Natural, frozenset[str]]:
        """The product of distributions by latent, and the latents whose are not in the family."""
        found = {
            place.latent: _alone(place).of_distribution(
                distributions[place.latent]
                if place.entries is None
                else in_a_row(distributions[place.latent], place.shape)
            )
            for place in self._places()
        }
        rest = frozenset(latent for latent, natural in found.items() if natural is None)
        return _product(self, {name: of for name, of in found.items() if name not in rest}), rest

    def standard_of(self, latents: frozenset[str]) -> Natural:
        """The standard distribution of the named latents, and the factor 1 for all others."""
        return _product(
            self,
            {
                place.latent: _alone(place).natural(_alone(place).standard())
                for place in self._places()
                if place.latent in latents
            },
        )

    def within(self, latents: frozenset[str]) -> "MeanField":
        """The family of marginals in which shared members have no more than the named latents.

        Members with none of these stay as they are.
        """
        shared, members = dict(self.shared), dict(self.members)
        for name, parts in self.shared:
            kept = tuple(part for part in parts if part.latent in latents)
            if kept and kept != parts:
                shared[name] = kept
                members[name] = FullNormal((sum(math.prod(part.shape) for part in kept),))
        return MeanField(tuple(members.items()), tuple(shared.items()))

    def marginal(self, natural: Natural, part: "MeanField") -> Natural:
        """The marginal of a distribution in a family that :meth:`within` has made of this one."""
        at = self._coordinates(natural) if self._entries_of(part) else {}
        return self._cut(natural, part, lambda n, _, rows: full_normal.marginal_of(at[n], rows))

    def block(self, factor: Natural, part: "MeanField") -> Natural:
        """A factor that says nothing about the other latents, in such a family."""
        return self._cut(factor, part, lambda _, leaf, rows: full_normal.block(leaf, rows))

    def embedded(self, factor: Natural, part: "MeanField") -> Natural:
        """Inverse of :meth:`block`."""
        whole, embedded = dict(self.members), full_normal.embedded
        return self._cut(factor, part, lambda n, leaf, rows: embedded(leaf, rows, whole[n]))

    def _cut(
        self, tree: Natural, part: "MeanField", of: Callable[[str, Any, list[int]], Any]
    ) -> Natural:
        """By member, what a function makes of those of which such a family has not kept all."""
        cut = self._entries_of(part)
        return Natural({n: of(n, leaf, cut[n]) if n in cut else leaf for n, leaf in tree.items()})

    def _entries_of(self, part: "MeanField") -> dict[str, list[int]]:
        """By member, the entries that such a family has kept, where it has not kept all."""
        kept = {place.latent for place in part._places()}
        entries: dict[str, list[int]] = {}
        for place in self._places():
            if place.entries is not None and place.latent in kept:
                entries.setdefault(place.member, []).extend(place.entries)
        return {n: e for n, e in entries.items() if len(e) < dict(self.members)[n].size}

    def by_latent(self, by_member: Mapping[str, Array]) -> dict[str, Array]:
        """Draws by latent from draws by member: splits shared members into their latents."""
        found = {}
        for place in self._places():
            drawn = by_member[place.member]
            if place.entries is not None:
                mine = drawn[..., place.entries.start : place.entries.stop]
                drawn = mine.reshape(*drawn.shape[:-1], *place.shape)
            found[place.latent] = drawn
        return found

    def by_member(self, by_latent: Mapping[str, Array]) -> dict[str, Array]:
        """Inverse of :meth:`by_latent`, for arrays with the same leading axes."""
        found: dict[str, list[Array]] = {}
        for place in self._places():
            mine = by_latent[place.latent]
            if place.entries is not None:
                lead = mine.shape[: mine.ndim - len(place.shape)]
                mine = mine.reshape(*lead, len(place.entries))
            # _places yields the latents of a member in the order of the vector.
            found.setdefault(place.member, []).append(mine)
        shared = dict(self.shared)
        return {
            name: jnp.concatenate(parts, axis=-1) if name in shared else parts[0]
            for name, parts in found.items()
        }

    def _places(self) -> Iterator[_Place]:
        for name, family in self.members:
            parts = dict(self.shared).get(name)
            if parts is None:
                yield _Place(name, name, family, family.shape, None)
                continue
            end = 0
            for latent, shape in parts:
                begin, end = end, end + math.prod(shape)
                yield _Place(latent, name, family, shape, range(begin, end))


@compiled("family", quick=True)
def _product(family: MeanField, by_latent: Mapping[str, MemberNatural]) -> Natural:
    """Natural parameters by member from those of some latents; 1 for the others."""
    # Start from the unit factor in every member and multiply the latents' factors in. A latent of a
    # shared member fills its block of the joint vector.
    whole = factors.unit(jax.eval_shape(lambda: family.natural(family.standard())))
    for place in family._places():
        natural = by_latent.get(place.latent)
        if natural is not None and place.entries is not None:
            natural = full_normal.embedded(natural, place.entries, place.family)
        if natural is not None:
            whole[place.member] = factors.multiply(whole[place.member], natural)
    return whole


def _alone(place: _Place) -> Any:
    """The family of a latent on its own."""
    return place.family if place.entries is None else FullNormal((len(place.entries),))
