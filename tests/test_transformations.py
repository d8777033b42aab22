"""A round inside a JAX transformation would have one noise and one charge for all its runs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi

SIZES = [12, 12]


def normal_mean(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def data():
    return [{"y": np.linspace(-1, 1, size)} for size in SIZES]


@pytest.fixture(scope="module", params=["pvi", "global"])
def parts(request):
    """A step, a state to step from and records, whoever takes the steps."""
    of_all = request.param == "global"
    method = dppvi.GlobalVI() if of_all else dppvi.DPOptimization()
    setting = {"client_sizes": SIZES, "trusted_aggregator": of_all}
    plan = dppvi.plan_privacy(
        method, dppvi.PrivacyBudget(1.0), num_rounds=10, schedule=dppvi.synchronous, **setting
    )
    algorithm = dppvi.pvi(
        normal_mean,
        None,
        data()[0],
        method=method,
        plan=plan,
        schedule=dppvi.synchronous,
        **setting,
    )
    return algorithm.step, algorithm.init(jax.random.key(0)), dppvi.records.stack_clients(data())


REFUSED = r"step must not be called inside a JAX transformation .*: call it in a plain Python loop"
KEYS = jax.random.split(jax.random.key(1), 3)


def natural(step, key, state, shards):
    return step(key, state, shards)[0].natural


TRANSFORMED = {
    "jit": lambda step, state, shards: jax.jit(lambda key: natural(step, key, state, shards))(
        KEYS[0]
    ),
    "jit of nothing": lambda step, state, shards: jax.jit(
        lambda: natural(step, KEYS[0], state, shards)
    )(),
    "scan": lambda step, state, shards: jax.lax.scan(
        lambda carry, key: (carry, natural(step, key, state, shards)), 0, KEYS
    ),
    "scan of nothing": lambda step, state, shards: jax.lax.scan(
        lambda carry, _: (carry, natural(step, KEYS[0], state, shards)), 0, length=3
    ),
    "fori_loop": lambda step, state, shards: jax.lax.fori_loop(
        0, 3, lambda i, n: natural(step, KEYS[0], state, shards), state.natural
    ),
    "vmap": lambda step, state, shards: jax.vmap(lambda key: natural(step, key, state, shards))(
        KEYS
    ),
    "vmap over records": lambda step, state, shards: jax.vmap(
        lambda y: natural(step, KEYS[0], state, shards._replace(records={"y": y}))
    )(jnp.zeros((3, *shards.records["y"].shape))),
    "grad": lambda step, state, shards: jax.grad(
        lambda y: jnp.sum(
            natural(step, KEYS[0], state, shards._replace(records={"y": y}))["mean"].linear
        )
    )(shards.records["y"]),
    "eval_shape": lambda step, state, shards: jax.eval_shape(
        lambda key: natural(step, key, state, shards), KEYS[0]
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_step_is_refused_before_it_is_charged(name, parts, monkeypatch):
    step, state, shards = parts
    charges = []
    charge = dppvi.privacy.Ledger.charge
    monkeypatch.setattr(dppvi.privacy.Ledger, "charge", lambda *a: charges.append(a) or charge(*a))
    with pytest.raises(TypeError, match=REFUSED):
        TRANSFORMED[name](step, state, shards)
    assert charges == []
    assert state.ledger.entries == ()


@pytest.mark.slow
def test_a_plain_loop_is_not(parts):
    step, state, shards = parts
    ends = []
    for key in KEYS[:2]:
        state, _ = step(key, state, shards)
        ends.append(float(jnp.sum(state.natural["mean"].linear)))
    assert state.round == 2
    assert len(state.ledger.entries) == 4
    assert len(set(ends)) == 2


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_fit_is_refused_too(transform, tmp_path):
    def run(seed):
        return dppvi.fit(
            normal_mean,
            None,
            data(),
            rng_key=jax.random.key(seed),
            budget=dppvi.PrivacyBudget(1.0),
            ledger_file=tmp_path / "ledger",
        ).posterior.natural

    with pytest.raises(TypeError, match="fit must not be called inside a JAX transformation"):
        transform(run)(jnp.arange(3) if transform is jax.vmap else 3)
    assert not (tmp_path / "ledger").exists()


@pytest.mark.slow
def test_a_change_of_zero_is_no_failure():
    """Records that say nothing: a column of zeros under a likelihood that sees nothing else."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x * w), obs=y)

    nothing = [{"x": np.zeros(6), "y": np.ones(6)}] * 2
    result = dppvi.fit(
        model,
        None,
        nothing,
        rng_key=jax.random.key(0),
        method=dppvi.NonPrivate(3),
        num_rounds=2,
        progress_bar=False,
    )
    assert result.history.failed.sum() == 0
    assert "finite" not in str(result.status)
    assert float(result.posterior.stddev["w"]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_a_solve_without_finite_numbers_is_one():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(x * w)), obs=y)

    data = [{"x": np.full(6, 1e4), "y": np.ones(6)}] * 2
    result = dppvi.fit(
        model,
        None,
        data,
        rng_key=jax.random.key(0),
        method=dppvi.NonPrivate(3),
        num_rounds=2,
        progress_bar=False,
    )
    assert result.history.failed.tolist() == [2, 2]
    assert "ended in no finite numbers" in str(result.status)
