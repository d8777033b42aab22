"""Partitioned inference against exact answers: closed forms, NumPyro's SVI, q as a product."""

import ast
import functools
import logging
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from numpyro_dppvi.families import factors
from numpyro_dppvi.privacy import accounting
from tests.dry import dry_rounds
from tests.grids import grid
from tests.programs import forget_programs, round_programs

NOISE = 1.7
PRIOR_LOC, PRIOR_SCALE = jnp.array([0.5, -1.0]), jnp.array([2.0, 0.7])


def normal_means(y):
    """Conjugate: the posterior is a diagonal normal in closed form."""
    mu = numpyro.sample("mu", dist.Normal(PRIOR_LOC, PRIOR_SCALE).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def closed_form(y):
    precision = 1 / PRIOR_SCALE**2 + len(y) / NOISE**2
    mean = (PRIOR_LOC / PRIOR_SCALE**2 + y.sum(0) / NOISE**2) / precision
    return np.asarray(mean), np.asarray(precision**-0.5)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


@functools.cache
def logistic_data(num_rows=240, num_columns=3):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, num_columns))
    logits = X @ np.linspace(-1, 1.5, num_columns)
    return X, (rng.uniform(size=num_rows) < 1 / (1 + np.exp(-logits))).astype(int)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# Converges to rounding error on a smooth, noise-free objective.
PRECISE = dppvi.NonPrivate(
    num_local_steps=3000,
    optimizer=optax.adam(optax.exponential_decay(0.1, 100, 0.7)),
    expectation=dppvi.methods.SphericalCubature(),
)


@grid("schedule", [dppvi.sequential, dppvi.synchronous], quick=[0])
@pytest.mark.parametrize(
    "sizes",
    [
        (23,),
        (1, 2, 20),
        *(pytest.param(s, marks=pytest.mark.slow) for s in ((20, 2, 1), (6, 6, 6, 5))),
    ],
)
def test_a_conjugate_model_gives_the_closed_form(x64, sizes, schedule):
    y = np.random.default_rng(1).normal(1.0, 2.0, size=(23, 2))
    data = [{"y": part} for part in np.split(y, np.cumsum(sizes)[:-1])]
    result = dppvi.fit(
        normal_means,
        None,
        data,
        rng_key=jax.random.key(0),
        method=PRECISE,
        schedule=schedule,
        num_rounds=1,
        damping=1.0,
        progress_bar=False,
    )
    mean, stddev = closed_form(y)
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.slow
def test_damped_rounds_approach_the_closed_form_geometrically(x64):
    y = np.random.default_rng(1).normal(1.0, 2.0, size=(12, 2))
    data = [{"y": y[:5]}, {"y": y[5:]}]
    result = dppvi.fit(
        normal_means,
        None,
        data,
        rng_key=jax.random.key(0),
        method=PRECISE,
        schedule=dppvi.synchronous,
        num_rounds=6,
        damping=0.5,
        progress_bar=False,
    )
    mean, stddev = closed_form(y)
    exact = mean / stddev**2
    prior = np.asarray(PRIOR_LOC / PRIOR_SCALE**2)
    linear = result.history.natural["mu"].linear
    for number, found in enumerate(linear, start=1):
        np.testing.assert_allclose(found, exact + (prior - exact) * 0.5**number, rtol=1e-6)


# Closed forms find sooner what is wrong.
@pytest.mark.slow
def test_one_client_without_privacy_is_numpyro_svi():
    X, y = logistic_data()
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 2000, alpha=0.01))
    svi = SVI(
        logistic,
        AutoNormal(logistic),
        optimizer,
        Trace_ELBO(num_particles=32, vectorize_particles=True),
    )
    svi_params = svi.run(jax.random.key(0), 2000, X, y, progress_bar=False).params
    result = dppvi.fit(
        logistic,
        AutoNormal(logistic),
        {"X": X, "y": y},
        rng_key=jax.random.key(1),
        method=dppvi.NonPrivate(2000, optimizer, dppvi.MonteCarlo(32)),
        num_rounds=1,
        damping=1.0,
        progress_bar=False,
    )
    scale = svi_params["w_auto_scale"]
    shift = (result.posterior.mean["w"] - svi_params["w_auto_loc"]) / scale
    # Both carry Monte Carlo noise of about .01 posterior sd.
    np.testing.assert_allclose(shift, 0, atol=0.05)
    np.testing.assert_allclose(result.posterior.stddev["w"] / scale, 1, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_clients", "schedule", "damping"),
    [
        (4, dppvi.sequential, 0.4),
        pytest.param(12, dppvi.sequential, 0.4, marks=pytest.mark.slow),
        pytest.param(4, dppvi.synchronous, 0.25, marks=pytest.mark.slow),
    ],
)
def test_many_clients_end_where_one_does(x64, num_clients, schedule, damping):
    """A fixed point of partitioned inference is one of global inference (Ashman et al. 2022)."""
    X, y = logistic_data()
    fit = functools.partial(
        dppvi.fit, logistic, None, {"X": X, "y": y}, rng_key=jax.random.key(0), progress_bar=False
    )
    local = optax.adam(optax.cosine_decay_schedule(0.05, 200, alpha=0.01))
    one = fit(method=PRECISE, damping=1.0, num_rounds=1)
    many = fit(
        clients=num_clients,
        method=dppvi.NonPrivate(200, local, dppvi.methods.SphericalCubature()),
        schedule=schedule,
        damping=damping,
        num_rounds=50,
    )
    np.testing.assert_allclose(many.posterior.mean["w"], one.posterior.mean["w"], atol=1e-5)
    np.testing.assert_allclose(many.posterior.stddev["w"], one.posterior.stddev["w"], rtol=1e-5)


def two_groups(round_number, num_clients):
    """A schedule of one's own: pairs of clients, in an order that changes with the round."""
    ids = np.roll(np.arange(num_clients), round_number)
    return ids[: 2 * (num_clients // 2)].reshape(-1, 2)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    schedule=st.sampled_from([dppvi.sequential, dppvi.synchronous, two_groups]),
    damping=st.floats(0.05, 1.0),
    epsilon=st.sampled_from([0.1, 1.0, 100.0, float("inf")]),
    num_rounds=st.integers(1, 3),
)
def test_q_is_the_product_of_the_factors(schedule, damping, epsilon, num_rounds):
    X, y = logistic_data(60)
    result = dppvi.fit(
        logistic,
        None,
        {"X": X, "y": y},
        rng_key=jax.random.key(3),
        clients=5,
        method=dppvi.DPOptimization(num_local_steps=2),
        budget=dppvi.PrivacyBudget(epsilon),
        schedule=schedule,
        damping=damping,
        num_rounds=num_rounds,
        progress_bar=False,
        insecure_noise_seed=0,
    )
    state = result.state
    product = factors.multiply(
        state.prior, *(jax.tree.map(lambda leaf, m=m: leaf[m], state.factors) for m in range(5))
    )
    found = result.posterior.natural
    assert jax.tree.structure(found) == jax.tree.structure(product)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(product), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)
    assert all(np.all(s > 0) and np.all(np.isfinite(s)) for s in result.posterior.stddev.values())


@pytest.mark.slow
def test_all_rounds_share_one_compilation():
    X, y = logistic_data()
    fit = functools.partial(
        dppvi.fit,
        data={"X": X, "y": y},
        guide=None,
        clients=4,
        budget=dppvi.PrivacyBudget(1.0),
        progress_bar=False,
    )

    def model(X, y):
        logistic(X, y)

    def compiled():
        return sum(each.program._cache_size() for each in round_programs())

    forget_programs()  # or programs of other tests are forgotten in between
    fit(model, rng_key=jax.random.key(0), num_rounds=2)
    before = compiled()
    # More rounds, other seeds, budgets or damping, and a model typed again: nothing compiles.
    fit(model, rng_key=jax.random.key(1), num_rounds=5, damping=0.2)
    fit(logistic, rng_key=jax.random.key(2), num_rounds=3, budget=dppvi.PrivacyBudget(3.0))
    assert compiled() == before
    # The counter does count.
    fit(model, rng_key=jax.random.key(1), method=dppvi.DPOptimization(num_local_steps=11))
    assert compiled() == before + 1


FIRST_FIT = """
import logging, re
import jax, numpy as np, numpyro, numpyro.distributions as dist
import numpyro_dppvi as dppvi

def model(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

found = []
class Count(logging.Handler):
    def emit(self, record):
        names = re.findall(r"Finished XLA compilation of (jit[^ ]+)", record.getMessage())
        found.extend((name, record.threadName == "MainThread") for name in names)

logging.getLogger("jax").addHandler(Count())
data = {"X": np.ones((20, 3), np.float32), "y": np.arange(20) % 2}
jax.config.update("jax_log_compiles", True)  # in all threads
dppvi.fit(model, None, data, rng_key=jax.random.key(0), clients=2, METHOD
          budget=dppvi.PrivacyBudget(1.0), num_rounds=2, progress_bar=False)
print(repr(found))
"""


def compiled_by_a_first_fit(method=""):
    """Names of programs, and whether each was compiled on the main thread."""
    script = FIRST_FIT.replace("METHOD", method)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return ast.literal_eval(done.stdout.splitlines()[-1].decode())


@pytest.mark.slow
def test_the_first_fit_of_a_process_compiles_few_programs():
    """Each takes 10 to 40 ms, however small it is; there were 47."""
    assert 5 < len(compiled_by_a_first_fit()) <= 20


@pytest.mark.slow
def test_the_largest_programs_are_compiled_at_once_and_once():
    found = compiled_by_a_first_fit("method=dppvi.FisherScoring(),")
    largest = [(name, main) for name, main in found if name in ("jit(_taken)", "jit(_visited)")]
    assert sorted(largest) == [("jit(_taken)", False), ("jit(_visited)", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        dppvi.DPOptimization(sampler=dppvi.PoissonSampling(0.3), num_local_steps=2),
        dppvi.methods.LocalAveraging(num_shards=2, num_local_steps=2),
    ],
    ids=["sampled", "sharded"],
)
def test_nothing_is_compiled_for_a_second_fit(method, caplog):
    """Of the same shapes; the model has a prior that takes a computation, and is typed anew."""
    y = np.random.default_rng(0).normal(size=(20, 3))

    def programs(seed, **changed):
        def model(y):
            spread = numpyro.sample("spread", dist.Gamma(2.0, 2.0))
            mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.5))
            with numpyro.plate("records", y.shape[0]):
                numpyro.sample("y", dist.Normal(mu, spread).to_event(1), obs=y)

        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
            dppvi.fit(
                model,
                None,
                {"y": y + seed},
                rng_key=jax.random.key(seed),
                clients=2,
                method=method,
                budget=dppvi.PrivacyBudget(1.0),
                progress_bar=False,
                **{"num_rounds": 2} | changed,
            )
        found = (
            re.match(r"Finished XLA compilation of jit\((.*)\) in", m) for m in caplog.messages
        )
        return [match[1] for match in found if match]

    first = programs(0)
    assert first.count("as_one") == 1
    assert len(first) < 100
    assert programs(1) == []
    assert programs(2, num_rounds=3, damping=0.2) == []


@grid("method", [dppvi.FisherScoring(), dppvi.VirtualClients(2)], quick=[1])
def test_what_a_run_begins_with_is_typed_as_what_rounds_return(method):
    """A weak type is a strong one after the first round, and the round is compiled again."""
    X, y = logistic_data(20)
    setting = {"method": method, "client_sizes": [10, 10]}
    plan = dppvi.plan_privacy(budget=dppvi.PrivacyBudget(1.0), num_rounds=10, **setting)
    state = dppvi.pvi(logistic, None, {"X": X, "y": y}, plan=plan, **setting).init(
        jax.random.key(0)
    )
    leaves = jax.tree.leaves((state.server, state.clients))
    assert not [leaf for leaf in leaves if jax.typeof(leaf).weak_type]


@pytest.mark.slow
def test_a_model_that_reads_something_changeable_is_read_again():
    y = np.random.default_rng(0).normal(size=(12, 2))
    settings = {"scale": 1.0, "offset": np.zeros(2)}

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(2), 10.0).to_event(1))
        with numpyro.plate("records", y.shape[0]):
            shifted = dist.Normal(mu + settings["offset"], settings["scale"])
            numpyro.sample("y", shifted.to_event(1), obs=y)

    fit = functools.partial(
        dppvi.fit,
        model,
        None,
        {"y": y},
        rng_key=jax.random.key(0),
        progress_bar=False,
        method=dppvi.NonPrivate(),
    )
    first = fit()
    settings.update(scale=0.1, offset=np.full(2, 5.0))
    second = fit()
    assert second.posterior.stddev["mu"][0] < 0.3 * first.posterior.stddev["mu"][0]
    assert second.posterior.mean["mu"][0] < first.posterior.mean["mu"][0] - 3


def test_without_noise_or_clipping_the_private_method_is_the_non_private_one():
    X, y = logistic_data()
    optimizer = optax.adam(0.05)
    fit = functools.partial(
        dppvi.fit,
        logistic,
        None,
        {"X": X, "y": y},
        rng_key=jax.random.key(0),
        clients=3,
        num_rounds=2,
        damping=0.4,
        progress_bar=False,
    )
    exact = fit(method=dppvi.NonPrivate(5, optimizer))
    limit = fit(
        method=dppvi.DPOptimization(clip_norm=1e6, num_local_steps=5, optimizer=optimizer),
        budget=dppvi.PrivacyBudget(math.inf),
    )
    np.testing.assert_allclose(
        limit.posterior.natural["w"].linear, exact.posterior.natural["w"].linear, rtol=1e-3
    )
    assert limit.ledger.spent().tolist() == [float("inf")] * 3


# tests/privacy/test_hostile.py holds every method to it, with worse records.
@pytest.mark.slow
def test_the_released_change_does_not_depend_on_one_record_more_than_the_clip_allows():
    """A record of any size moves one noise-free gradient step by no more than the clip."""
    X, y = logistic_data(50)
    moved = []
    for value in (0.0, 1.0, 1e3, 1e30, 3e38):
        X_other = X.copy()
        X_other[7] = value
        result = dppvi.fit(
            logistic,
            None,
            {"X": X_other.astype(np.float32), "y": y},
            rng_key=jax.random.key(0),
            method=dppvi.DPOptimization(clip_norm=0.5, num_local_steps=1, optimizer=optax.sgd(1.0)),
            budget=dppvi.PrivacyBudget(math.inf),
            num_rounds=1,
            damping=1.0,
            progress_bar=False,
        )
        coordinates = result.posterior.family.coordinates(result.posterior.natural)["w"]
        moved.append(np.concatenate([coordinates.loc, coordinates.log_scale]))
    for other in moved[1:]:
        assert np.linalg.norm(other - moved[0]) <= 2 * 0.5 * (1 + 1e-5)
    assert np.linalg.norm(moved[2] - moved[0]) > 0.3  # it does move


@pytest.mark.slow
def test_a_seeded_run_is_reproducible_and_an_unseeded_one_is_not():
    X, y = logistic_data(60)
    fit = functools.partial(
        dppvi.fit,
        logistic,
        None,
        {"X": X, "y": y},
        rng_key=jax.random.key(0),
        clients=2,
        method=dppvi.DPOptimization(num_local_steps=2),
        budget=dppvi.PrivacyBudget(1.0),
        num_rounds=1,
        progress_bar=False,
    )
    first, second, other = (fit(insecure_noise_seed=s) for s in (5, 5, 6))
    np.testing.assert_array_equal(first.posterior.mean["w"], second.posterior.mean["w"])
    assert not np.array_equal(first.posterior.mean["w"], other.posterior.mean["w"])
    assert not np.array_equal(fit().posterior.mean["w"], fit().posterior.mean["w"])


@grid(
    "sampler",
    [dppvi.FullBatch(), dppvi.PoissonSampling(0.25), dppvi.FixedSizeSampling(2)],
    ids=["full", "poisson", "fixed size"],
    quick=[0],
)
def test_the_noise_that_is_drawn_is_the_noise_that_is_accounted(sampler):
    """With nothing to learn and one plain gradient step, q moves by the noise alone."""
    dimension, size = 2000, 8
    records = {"X": np.zeros((size, dimension), np.float32), "y": np.zeros(size, np.int32)}
    rate = 1e-3
    method = dppvi.DPOptimization(2.0, 1, optax.sgd(rate), sampler)
    result = dppvi.fit(
        logistic,
        None,
        records,
        rng_key=jax.random.key(0),
        method=method,
        budget=dppvi.PrivacyBudget(1.0),
        num_rounds=1,
        damping=1.0,
        insecure_noise_seed=4,
        progress_bar=False,
    )
    moved = result.params["w_auto_loc"] / rate * sampler.inclusion_prob(size)
    mechanism = result.plan.clients[0].mechanism
    # 2000 draws: five standard errors of their standard deviation are 8 %.
    np.testing.assert_allclose(np.std(moved), mechanism.noise_std, rtol=0.08)
    assert abs(np.mean(moved)) < 5 * mechanism.noise_std / np.sqrt(dimension)
    cost = accounting.compose([(mechanism.dp_event, 1)])
    assert accounting.epsilon(cost, 1e-5, "replace_one") <= 1.0
    assert sum(n for _, n in result.ledger.composition(0)) == 1


@pytest.mark.slow
def test_batches_of_fixed_size_serve_clients_of_all_sizes():
    """Each client's sum is divided by its own share of records, and so is an unbiased gradient."""
    sizes, rate = (4, 12, 40), 1e-4
    records = [
        {"X": np.eye(3, dtype=np.float32)[[client] * size], "y": np.ones(size, np.int32)}
        for client, size in enumerate(sizes)
    ]
    result = dppvi.fit(
        logistic,
        None,
        records,
        rng_key=jax.random.key(0),
        method=dppvi.DPOptimization(10.0, 1, optax.sgd(rate), dppvi.FixedSizeSampling(4)),
        budget=dppvi.PrivacyBudget(math.inf),
        num_rounds=1,
        damping=1.0,
        progress_bar=False,
    )
    # Equal records: a client's estimate is its full gradient, whichever records were drawn. At
    # q = N(0, 1) one record's is E[1 - sigmoid(w)] = 1/2, as that of mirrored draws.
    moved = result.params["w_auto_loc"] / rate
    np.testing.assert_allclose(moved / np.array(sizes), 0.5, rtol=0.02)
    # With a budget, each client's noise fits its share of records, and is charged as such.
    plan = dppvi.plan_privacy(
        result.method, dppvi.PrivacyBudget(1.0), num_rounds=9, client_sizes=sizes
    )
    noises = [client.mechanism.noise_multiplier for client in plan.clients]
    assert noises == sorted(noises, reverse=True)
    for client, size in zip(plan.clients, sizes, strict=True):
        event = client.mechanism.dp_event
        assert (event.source_dataset_size, event.sample_size) == (size, 4)
        assert 0.995 <= client.epsilon <= 1
    assert "4 of 12 rows, fixed size" in str(plan)


def test_clients_and_rounds_get_noise_of_their_own():
    """With nothing to learn the changes are pure noise: no two of them may be alike."""
    sizes, rounds, dimension = (1, 1, 1), 3, 400
    records = {"X": np.zeros((3, dimension), np.float32), "y": np.zeros(3, np.int32)}
    method = dppvi.DPOptimization(clip_norm=1.0, num_local_steps=2, optimizer=optax.sgd(0.01))
    plan = dppvi.plan_privacy(
        method,
        dppvi.PrivacyBudget(1.0),
        num_rounds=rounds,
        client_sizes=sizes,
        schedule=dppvi.synchronous,
    )
    pvi = dppvi.pvi(
        logistic,
        None,
        records,
        method=method,
        client_sizes=sizes,
        plan=plan,
        schedule=dppvi.synchronous,
        damping=1e-4,
        secret_keys=dppvi.privacy.SecretKeys(1),
    )
    shards = dppvi.records.stack(records, dppvi.Partition(([0], [1], [2])))
    state = pvi.init(jax.random.key(0))
    noise = []
    for _ in range(rounds):
        before = state.factors["w"].linear
        state, _ = pvi.step(jax.random.key(0), state, shards)
        noise += list(np.asarray(state.factors["w"].linear - before))
    correlation = np.corrcoef(noise)
    off_diagonal = correlation[~np.eye(len(noise), dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.25  # five standard errors of 1 / sqrt(400)


@pytest.mark.slow
def test_a_share_is_a_part_of_the_damping():
    X, y = logistic_data(60)
    records = [{"X": X[:30], "y": y[:30]}, {"X": X[30:], "y": y[30:]}]
    shards, key, ends = dppvi.records.stack_clients(records), jax.random.key(0), []
    for damping, share in ((0.8, 0.5), (0.4, 1.0)):
        pvi = dppvi.pvi(
            logistic,
            None,
            records[0],
            method=dppvi.NonPrivate(2),
            client_sizes=[30, 30],
            damping=damping,
        )
        state, _ = pvi.step(key, pvi.init(key), shards, share)
        ends.append(state.natural["w"])
    np.testing.assert_allclose(ends[0].linear, ends[1].linear, rtol=1e-6)
    np.testing.assert_allclose(ends[0].quadratic, ends[1].quadratic, rtol=1e-6)


def test_a_share_out_of_range_costs_nothing(tmp_path):
    X, y = logistic_data(60)
    method, path = dppvi.DPOptimization(), tmp_path / "ledger.jsonl"
    plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(1.0), num_rounds=2, client_sizes=[30, 30])
    pvi = dppvi.pvi(
        logistic,
        None,
        {"X": X, "y": y},
        method=method,
        client_sizes=[30, 30],
        plan=plan,
        ledger_file=dppvi.privacy.LedgerFile(path),
    )
    shards = dppvi.records.stack_clients([{"X": X[:30], "y": y[:30]}, {"X": X[30:], "y": y[30:]}])
    state = pvi.init(jax.random.key(0))
    before = path.read_bytes() if path.exists() else b""
    with pytest.raises(ValueError, match="share must lie above 0"):
        pvi.step(jax.random.key(0), state, shards, 1.5)
    assert (path.read_bytes() if path.exists() else b"") == before


def test_a_step_outside_the_budget_is_refused_and_changes_nothing():
    X, y = logistic_data(60)
    method = dppvi.DPOptimization()
    plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(1.0), num_rounds=2, client_sizes=[30, 30])
    pvi = dppvi.pvi(
        logistic, None, {"X": X, "y": y}, method=method, client_sizes=[30, 30], plan=plan
    )
    shards = dppvi.records.stack_clients([{"X": X[:30], "y": y[:30]}, {"X": X[30:], "y": y[30:]}])
    state = pvi.init(jax.random.key(0))
    with dry_rounds():
        for _ in range(2):
            state, _ = pvi.step(jax.random.key(0), state, shards)
    with pytest.raises(dppvi.BudgetExceededError, match="client 0's budget is used up"):
        pvi.step(jax.random.key(0), state, shards)
    np.testing.assert_allclose(state.ledger.spent(), plan.epsilons)


GRADIENTS = dppvi.DPOptimization(1.0, 3)
SHARDED = dppvi.methods.LocalAveraging(4, 1.0)
PLANNED = {"method": GRADIENTS, "client_sizes": [30, 30], "trusted_aggregator": False}


@pytest.mark.parametrize(
    ("planned", "run", "fact"),
    [
        ({}, {"method": dppvi.DPOptimization(2.0, 3)}, "clip_norm is 1.0"),
        ({}, {"method": dppvi.DPOptimization(1.0, 4)}, "releases_per_visit is 3"),
        (
            {},
            {"method": dppvi.DPOptimization(1.0, 3, sampler=dppvi.PoissonSampling(0.5))},
            "sampler is FullBatch()",
        ),
        ({}, {"client_sizes": [30, 20]}, "num_records is 30 for client 1"),
        ({}, {"method": SHARDED}, "mechanism is Gaussian"),
        ({"method": SHARDED}, {}, "mechanism is Gaussian"),
        ({"method": SHARDED}, {"method": dppvi.methods.LocalAveraging(5, 1.0)}, "num_shards is 4"),
        ({"method": SHARDED}, {"method": dppvi.VirtualClients(4, 1.0)}, "weight is 0.25"),
        (
            {"method": SHARDED, "trusted_aggregator": True},
            {"method": SHARDED},
            "num_shares is 2",
        ),
        (
            {"method": SHARDED, "trusted_aggregator": True},
            {"method": SHARDED, "trusted_aggregator": dppvi.TrustedAggregator(1)},
            "num_shares is 2 for client 0 in the plan and 1 in the run",
        ),
    ],
)
def test_a_plan_of_another_run_is_refused(planned, run, fact):
    """Noise and accounting come from the plan: it must be the plan of what is released."""
    X, y = logistic_data(60)
    setting = {"schedule": dppvi.synchronous}
    plan = dppvi.plan_privacy(
        **{"budget": dppvi.PrivacyBudget(1.0), "num_rounds": 2, **PLANNED, **setting, **planned}
    )
    with pytest.raises(ValueError, match=r"the plan does not describe this run: ") as caught:
        dppvi.pvi(logistic, None, {"X": X, "y": y}, plan=plan, **{**PLANNED, **setting, **run})
    assert re.search(fact.replace("(", r"\(").replace(")", r"\)"), str(caught.value))


def test_records_of_other_clients_than_planned_are_refused():
    X, y = logistic_data(60)
    method = dppvi.NonPrivate(5)
    pvi = dppvi.pvi(logistic, None, {"X": X, "y": y}, method=method, client_sizes=[30, 30])
    shards = dppvi.records.stack_clients([{"X": X[:20], "y": y[:20]}, {"X": X[20:], "y": y[20:]}])
    with pytest.raises(ValueError, match=r"got 20, 40 records and client_sizes of 30, 30"):
        pvi.step(jax.random.key(0), pvi.init(jax.random.key(0)), shards)


def test_fit_is_the_algorithm_in_a_loop():
    X, y = logistic_data(60)
    data = [{"X": X[:30], "y": y[:30]}, {"X": X[30:], "y": y[30:]}]
    method = dppvi.NonPrivate(5)
    result = dppvi.fit(
        logistic,
        None,
        data,
        rng_key=jax.random.key(0),
        method=method,
        num_rounds=2,
        damping=0.4,
        progress_bar=False,
    )
    _, init_key, round_key = jax.random.split(jax.random.key(0), 3)
    pvi = dppvi.pvi(logistic, None, {"X": X, "y": y}, method=method, client_sizes=[30, 30])
    state = pvi.init(init_key)
    for _ in range(2):
        state, _ = pvi.step(round_key, state, dppvi.records.stack_clients(data))
    np.testing.assert_array_equal(pvi.posterior(state).mean["w"], result.posterior.mean["w"])


@pytest.mark.slow
def test_a_prior_outside_the_family_is_refined_to_where_svi_ends():
    """HalfNormal and a hierarchy under a normal guide: the prior is a factor like any other."""

    def model(y, group, num_groups):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(mu, tau))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)

    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(6), 12)
    y = rng.normal(1.0, 1.5, 6)[group] + rng.normal(size=72)
    elbo = Trace_ELBO(num_particles=64, vectorize_particles=True)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 3000, alpha=0.01))
    svi = SVI(model, AutoNormal(model), optimizer, elbo)
    params = svi.run(jax.random.key(0), 3000, y, group, 6, progress_bar=False).params
    local = optax.adam(optax.cosine_decay_schedule(0.05, 200, alpha=0.01))
    result = dppvi.fit(
        model,
        None,
        {"y": y, "group": group},
        rng_key=jax.random.key(1),
        clients=3,
        method=dppvi.NonPrivate(200, local, dppvi.MonteCarlo(32)),
        model_kwargs={"num_groups": 6},
        num_rounds=25,
        progress_bar=False,
    )
    found = result.params
    for name in ("mu", "tau", "effect"):
        scale = params[f"{name}_auto_scale"]
        shift = (found[f"{name}_auto_loc"] - params[f"{name}_auto_loc"]) / scale
        np.testing.assert_allclose(shift, 0, atol=0.1, err_msg=name)
        np.testing.assert_allclose(found[f"{name}_auto_scale"] / scale, 1, atol=0.06, err_msg=name)
