"""White coordinates: lengths against the information, and inverses, for every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from numpyro_dppvi import families
from numpyro_dppvi.families import factors, whitening
from tests.grids import grid

FAMILIES = {
    "normal": families.DiagonalNormal((3,)),
    "normal, no axis": families.DiagonalNormal(()),
    "full": families.FullNormal((3,)),
    "stacked full": families.FullNormal((2, 3)),
    "gamma": families.Gamma((2,)),
    "beta": families.Beta(()),
    "Dirichlet": families.Dirichlet((2, 3)),
    "exponential": families.Exponential((2,)),
    "half normal": families.HalfNormal((2,)),
    "Bernoulli": families.Bernoulli((2,)),
    "categorical": families.Categorical((2,), 3),
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


whiten = jax.jit(whitening.whiten, static_argnums=0)
unwhiten = jax.jit(whitening.unwhiten, static_argnums=0)
every_family = pytest.mark.parametrize(
    "member",
    [
        pytest.param(member, marks=pytest.mark.slow if name == "stacked full" else (), id=name)
        for name, member in FAMILIES.items()
    ],
)


def placed(member: object, seed: int = 0) -> tuple[families.MeanField, dict, dict]:
    """A family of one member, coordinates off its standard ones, and a change."""
    family = families.MeanField((("z", member),))
    rng = np.random.default_rng(seed)

    def drawn(tree: dict, scale: float) -> dict:
        return jax.tree.map(lambda x: x + scale * rng.standard_normal(jnp.shape(x)), tree)

    coordinates = drawn(family.standard(), 0.4)
    return family, coordinates, drawn(factors.unit(family.natural(coordinates)), 1.0)


@every_family
@pytest.mark.usefixtures("x64")
def test_the_squared_length_is_that_of_the_information(member: object) -> None:
    """Against the Hessian of the log partition over all natural parameters at once."""
    family, coordinates, change = placed(member)
    flat, unravel = ravel_pytree(family.natural(coordinates))
    information = jax.jit(jax.hessian(lambda x: family.log_partition(unravel(x))))(flat)
    vector = ravel_pytree(change)[0]
    white = ravel_pytree(whiten(family, coordinates, change))[0]
    np.testing.assert_allclose(white @ white, vector @ information @ vector, rtol=1e-9)


@every_family
@pytest.mark.usefixtures("x64")
def test_unwhiten_inverts(member: object) -> None:
    family, coordinates, change = placed(member)
    white = whiten(family, coordinates, change)
    back = unwhiten(family, coordinates, white)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), back, change)


@pytest.mark.usefixtures("x64")
def test_units_of_a_latent_do_not_matter() -> None:
    """A latent in other units, with its prior and its factors, has the same white coordinates."""
    family, coordinates, change = placed(families.DiagonalNormal((3,)))
    loc, log_scale = coordinates["z"]
    linear, quadratic = change["z"]
    rescaled = {"z": families.NormalCoordinates(100 * loc, log_scale + np.log(100))}
    other = {"z": families.NormalNatural(linear / 100, quadratic / 100**2)}
    here = whiten(family, coordinates, change)
    there = whiten(family, rescaled, other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), here, there)


@pytest.mark.usefixtures("x64")
def test_weights_touch_normals_alone() -> None:
    family = families.MeanField(
        (("w", families.DiagonalNormal((2,))), ("rate", families.Gamma(())))
    )
    white = jax.tree.map(lambda leaf: leaf + 1.0, factors.unit(family.natural(family.standard())))
    found = whitening.weighted(white, {"w": jnp.array([0.5, 2.0])}, 3.0)
    assert [leaf.tolist() for leaf in found["w"]] == [[0.5, 2.0], [3.0, 3.0]]
    assert [leaf.tolist() for leaf in found["rate"]] == [1.0, 1.0]


@grid("name", ["normal", "full", "stacked full"], quick=[0, 1])
@pytest.mark.usefixtures("x64")
def test_variances_along_white_axes(name: str) -> None:
    """A step of one along a white axis moves the mean by that axis' standard deviation."""
    family, coordinates, _ = placed(FAMILIES[name])
    natural = family.natural(coordinates)
    variances = whitening.axis_variances(family, coordinates)["z"]
    unit = factors.unit(natural)
    for index in np.ndindex(*variances.shape):
        step = {"z": unit["z"]._replace(linear=unit["z"].linear.at[index].set(1.0))}
        moved = factors.multiply(natural, unwhiten(family, coordinates, step))
        shift = family.coordinates(moved)["z"].loc - coordinates["z"].loc
        np.testing.assert_allclose(jnp.sum(shift**2), variances[index], rtol=1e-9)
