"""Models, guides and outcomes that look harmless and are not: each is told for its true reason."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents, predictions

N = 12
generator = np.random.default_rng(3)
X = generator.uniform(-1.0, 1.0, (N, 2)).astype(np.float32)
Z = (X @ [1.0, -1.0] + generator.normal(size=N)).astype(np.float32)


def fit(model, data, **changes):
    arguments = {
        "guide": None,
        "rng_key": jax.random.key(0),
        "clients": 2,
        "budget": dppvi.PrivacyBudget(1.0, 1e-3),
        "num_rounds": 1,
        "insecure_noise_seed": 0,
        "progress_bar": False,
    }
    return dppvi.fit(model, data=data, **{**arguments, **changes})


def refusal(model, data, **changes):
    with pytest.raises(ValueError, match=r"\.$") as caught:
        fit(model, data, **changes)
    return str(caught.value)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))


# ---------------------------------------------------------------------------------------------
# Threads.


def shifted(number):
    """Models of different latents, so that a trace that saw another's sites would show it."""

    def model(X, y):
        w = numpyro.sample(f"w{number}", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate(f"records{number}", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w + number, 1), obs=y)

    return model


def in_threads(call, number):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(number)))


def test_models_that_are_read_in_threads_do_not_see_each_other():
    """NumPyro's stack of handlers is one for all threads: 67 of 100 fits failed."""

    def read(number):
        space = latents.from_model(shifted(number), {"X": X, "y": Z})
        draws = {f"w{number}": jnp.ones((3, 2))}
        rows = {"X": jnp.asarray(X), "y": jnp.asarray(Z)}
        densities = predictions.log_likelihood(shifted(number), draws, rows, {})
        return space.program, np.asarray(densities["y"])

    for number, (program, densities) in enumerate(in_threads(read, 12)):
        alone = read(number)
        assert program == alone[0]
        np.testing.assert_array_equal(densities, alone[1])


@pytest.mark.slow
def test_fits_in_threads_are_what_they_are_alone():
    def everything(number):
        result = fit(shifted(number), {"X": X, "y": Z}, rng_key=jax.random.key(number))
        key = jax.random.key(number)
        predicted = result.posterior.predictive(key, 4, X=X, y=Z)
        exported = result.posterior.to_arviz(key, 4, public_data={"X": X, "y": Z})
        prior = exported["prior"][f"w{number}"].values
        return jax.tree.map(np.asarray, (result.posterior.natural, predicted, prior))

    for number, found in enumerate(in_threads(everything, 8)):
        jax.tree.map(np.testing.assert_array_equal, found, everything(number))
