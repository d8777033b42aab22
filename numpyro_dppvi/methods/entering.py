"""The latents that records enter, and what a factor of these alone says of all latents.

A hierarchy's hyperparameters are in no record's likelihood, given the effects that they are priors
of. Records' scores of them are zero. Releasing these would be noise, and not knowing that they are
zero, a server would take them for evidence that all is well where it is.

A factor of some entries theta_a alone, times q, has the marginal q(theta_a) times that factor. So
what such factors do to theta_a can be computed from q(theta_a), and the rest follows theta_a.
"""

import math
from collections.abc import Iterable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import Array, Natural
from numpyro_dppvi.families import FullNormal, MeanField, factors
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.families.full_normal import pack, unpack
from numpyro_dppvi.families.precision import in_own_precision
from numpyro_dppvi.latents import LatentSpace
from numpyro_dppvi.methods.lookups import FEW, Lookups
from numpyro_dppvi.methods.visits import Received


def of(space: LatentSpace, family: MeanField) -> np.ndarray:
    """The entries of a joint normal's vector that records enter, shape ``(k,)``."""
    return np.sort(_places(family, space.entering))


def columns(space: LatentSpace, family: MeanField) -> np.ndarray:
    """Which of these entries are multiplied by values of a record, shape ``(k,)``."""
    # As the weights of a matrix are. Of others a record's information is no column's.
    layers = space.first_layers
    return np.isin(of(space, family), _places(family, layers.names if layers else frozenset()))


def curved(space: LatentSpace, family: MeanField) -> np.ndarray:
    """Which of these entries change how much a record tells, shape ``(k,)``."""
    found = np.ones(family.members[0][1].size, bool)
    found[_places(family, sorted(space.continuous))] = space.curved
    return found[of(space, family)]


def unseen(space: LatentSpace, family: MeanField) -> np.ndarray:
    """A basis of the directions of these entries along which no record tells, shape ``(k, m)``."""
    basis = np.zeros_like(space.unseen)
    basis[_places(family, sorted(space.continuous))] = space.unseen
    return basis[of(space, family)]


def lookups(space: LatentSpace, family: MeanField) -> Lookups | None:
    """What lookups tell of these entries; ``None`` if all of them can matter to one record."""
    places, entries = _places(family, sorted(space.continuous)), of(space, family)
    whole = np.ones(space.meeting.shape, bool)
    whole[np.ix_(places, places)] = space.meeting
    meeting = whole[np.ix_(entries, entries)]
    if meeting.all():
        return None
    sets = [
        np.isin(entries, one)
        for name in sorted(space.entering)
        for one in _alike(_places(family, [name]).reshape(space.continuous[name].shape), whole)
        if one.size >= FEW
    ]
    return Lookups(meeting, np.array(sets, bool).reshape(-1, len(entries)))


def _alike(places: np.ndarray, meeting: np.ndarray) -> Iterable[np.ndarray]:
    """Sets of a latent's entries that differ only by the place of a lookup."""
    axes = range(places.ndim)
    lines = [np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis]) for axis in axes]
    looked_up = [
        axis
        for axis, each in zip(axes, lines, strict=True)
        if not np.any(
            meeting[each[:, :, None], each[:, None, :]] & ~np.eye(each.shape[1], dtype=bool)
        )
    ]
    if not looked_up:
        return []
    others = [axis for axis in axes if axis not in looked_up]
    return places.transpose(*others, *looked_up).reshape(
        math.prod(places.shape[n] for n in others), -1
    )


def _places(family: MeanField, latents: Iterable[str]) -> np.ndarray:
    """Where some latents are in the joint normal's vector."""
    ((name, normal),) = family.members
    # Of NumPy, which stays concrete where this is traced.
    by_latent = family.by_latent({name: cast(Array, np.arange(normal.size)[None])})
    return np.concatenate([np.zeros(0, int), *(np.ravel(by_latent[one]) for one in latents)])


def alone(family: MeanField, entries: np.ndarray) -> MeanField:
    """The family of these entries."""
    ((name, _),) = family.members
    return MeanField(((name, FullNormal(entries.shape)),))


@in_own_precision
def marginal(family: MeanField, natural: Natural, entries: np.ndarray) -> Natural:
    """The distribution of these entries, where that of all is this one."""
    ((name, normal),) = family.members
    rest = np.setdiff1d(np.arange(normal.size), entries)
    if not rest.size:
        return natural
    linear, precision = natural[name].linear, -2 * unpack(natural[name].quadratic)
    across = precision[entries][:, rest]
    # The Schur complement P_aa - P_ar P_rr^-1 P_ra, and h_a - P_ar P_rr^-1 h_r.
    gain = jnp.linalg.solve(precision[rest][:, rest], across.T).T
    known = precision[entries][:, entries] - gain @ across.T
    linear = linear[entries] - gain @ linear[rest]
    return Natural({name: NormalNatural(linear, pack(-0.25 * (known + known.T)))})


@in_own_precision
def whole(family: MeanField, natural: Natural, entries: np.ndarray) -> Natural:
    """Factors of these entries, on a leading axis, as factors of all."""
    ((name, normal),) = family.members
    found = natural[name]
    square = unpack(found.quadratic)
    linear = jnp.zeros((len(square), normal.size), square.dtype).at[:, entries].set(found.linear)
    full = jnp.zeros((*linear.shape, normal.size), square.dtype)
    full = full.at[:, entries[:, None], entries].set(square)
    return Natural({name: NormalNatural(linear, pack(full))})


@in_own_precision
def received(received: Received, entries: np.ndarray) -> Received:
    """What came with releases, as if there were no other latents and the factors were still 1."""
    before = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), received.factor)
    cavity = factors.divide(received.q, before)
    q = marginal(received.family, cavity, entries)
    return received._replace(
        family=alone(received.family, entries),
        q=q,
        factor=factors.unit(q, len(received.num_records)),
    )
