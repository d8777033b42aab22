"""The paper's theorems and limits for the methods that perturb changes, and for the baselines."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import guides, latents
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods import visits
from numpyro_dppvi.protocol import client, planning
from numpyro_dppvi.protocol.messages import Request
from numpyro_dppvi.protocol.problem import Problem
from tests.grids import grid

PRIOR_LOC, PRIOR_SCALE, NOISE = jnp.array([0.5, -1.0]), jnp.array([2.0, 0.7]), 1.7
NO_NOISE = dppvi.PrivacyBudget(math.inf)
UNBOUNDED = 1e9
SHARDED = [
    dppvi.methods.ParameterPerturbation(),
    dppvi.methods.LocalAveraging(4),
    dppvi.VirtualClients(4),
]
NATURAL = dppvi.VirtualClients(4, num_local_steps=1, optimizer=dppvi.NaturalGradient())
# Converges to rounding error on a smooth, noise-free objective.
PRECISE = {
    "num_local_steps": 3000,
    "optimizer": optax.adam(optax.exponential_decay(0.1, 100, 0.7)),
    "expectation": dppvi.methods.SphericalCubature(),
}


def normal_means(y):
    """Conjugate: the posterior is a diagonal normal in closed form."""
    mu = numpyro.sample("mu", dist.Normal(PRIOR_LOC, PRIOR_SCALE).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, NOISE).to_event(1), obs=y)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def logistic_data(num_rows=120, num_columns=3):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, num_columns))
    y = rng.uniform(size=num_rows) < 1 / (1 + np.exp(-X @ np.linspace(-1, 1.5, num_columns)))
    return X, y.astype(int)


def closed_form(y):
    precision = 1 / PRIOR_SCALE**2 + len(y) / NOISE**2
    mean = (PRIOR_LOC / PRIOR_SCALE**2 + y.sum(0) / NOISE**2) / precision
    return np.asarray(mean), np.asarray(precision**-0.5)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def normal_data():
    return np.random.default_rng(1).normal(1.0, 2.0, size=(24, 2))


fit = functools.partial(dppvi.fit, rng_key=jax.random.key(0), progress_bar=False)


@functools.cache
def compiled_visit(method, num_rows, num_columns, num_shards):
    """One visit of one client that starts from the prior, as a function of data and noise."""
    shapes = {
        "X": jax.ShapeDtypeStruct((num_rows, num_columns), jnp.float32),
        "y": jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    }
    space = latents.from_model(logistic, shapes)
    family = guides.family_of(None, logistic, space)
    prior = guides.prior_factor(family, space).exact
    layout = visits.Layout(0, num_shards, -(-num_rows // num_shards))
    virtual = isinstance(method, dppvi.VirtualClients)
    layout = layout._replace(private=virtual)
    own = factors.unit(prior, num_shards) if virtual else factors.unit(prior)
    weight = 1 / num_shards if isinstance(method, dppvi.methods.LocalAveraging) else 1.0
    problem = Problem(space, family, method, layout)

    @jax.jit
    def run(X, y, noise_std, secret_key):
        numbers = (noise_std, num_shards, weight, method.clip_norm, 1.0, 1.0)
        params = visits.ClientParams(*(jnp.asarray(x) for x in numbers))
        request = Request(prior, own, jax.random.key(0), jnp.asarray(0.05))
        records, count = {"X": X, "y": y}, jnp.asarray(num_rows)
        return client.respond(
            problem, params, client.ClientState(), request, records, count, secret_key
        )

    return run, family, prior


def message(method, X, y, num_shards, noise_std=0.0, seed=0):
    run, *_ = compiled_visit(method, *X.shape, num_shards)
    return run(jnp.asarray(X, jnp.float32), jnp.asarray(y), noise_std, jax.random.key(seed))


def length(method, family, q, moved):
    """The norm in the units in which the method clips."""
    if isinstance(method.optimizer, dppvi.NaturalGradient):
        moved = method.optimizer.measured(family, q, moved)
    return np.linalg.norm(flat(moved))


def flat(natural):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(natural)]).astype(float)


@pytest.mark.slow
@grid("method", [*SHARDED, NATURAL], quick=[3])
def test_replacing_a_record_moves_the_sum_by_no_more_than_the_sensitivity(method):
    """Theorems 2 and 3: 2 C for the sum, over the number of shards for the mean."""
    clip = 0.3
    num_shards = getattr(method, "num_shards", 1)
    method = type(method)(**{**vars(method), "clip_norm": clip})
    X, y = logistic_data(24)
    base = message(method, X, y, num_shards)
    _, family, prior = compiled_visit(method, *X.shape, num_shards)
    weight = 1 / num_shards if isinstance(method, dppvi.methods.LocalAveraging) else 1.0
    worst = 0.0
    rng = np.random.default_rng(2)
    for trial in range(40):
        X_other, y_other = X.copy(), y.copy()
        row = rng.integers(len(X))
        X_other[row] = rng.normal(size=3) * 10.0 ** rng.integers(-1, 5)
        y_other[row] = rng.integers(2)
        if trial == 0:
            X_other[row] = np.inf  # a solve that fails is a zero change
        other = message(method, X_other, y_other, num_shards)
        moved = factors.divide(other.release, base.release)
        worst = max(worst, length(method, family, prior, moved))
        if isinstance(method, dppvi.VirtualClients):  # the other shards saw nothing
            untouched = np.arange(num_shards) != row % num_shards
            for a, b in zip(jax.tree.leaves(other.kept), jax.tree.leaves(base.kept), strict=True):
                np.testing.assert_array_equal(a[untouched], b[untouched])
    assert worst <= 2 * clip * weight * (1 + 1e-5)
    assert worst > 0.8 * clip * weight  # the search does reach far


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [pytest.param(False, marks=pytest.mark.slow), True])
@grid("method", [*SHARDED, NATURAL], quick=[1, 3])
def test_later_rounds_keep_a_record_within_its_shard(method, trusted):
    """Given what was released before, round two moves by no more than the sensitivity, either.

    What clients keep to themselves goes into their next changes: a record may have touched the
    private factor of its own shard and of no other.
    """
    clip, damping, row = 0.3, 0.5, 5
    method = type(method)(**{**vars(method), "clip_norm": clip})
    num_shards = getattr(method, "num_shards", 1)
    weight = 1 / num_shards if isinstance(method, dppvi.methods.LocalAveraging) else 1.0
    X, y = logistic_data(24)
    setting = {
        "client_sizes": [12, 12],
        "schedule": dppvi.synchronous,
        "trusted_aggregator": trusted,
    }
    plan = dppvi.plan_privacy(method, NO_NOISE, num_rounds=2, **setting)
    algorithm = dppvi.pvi(
        logistic, None, {"X": X, "y": y}, method=method, plan=plan, damping=damping, **setting
    )

    def clients(X, y):
        return dppvi.records.stack_clients([{"X": X[:12], "y": y[:12]}, {"X": X[12:], "y": y[12:]}])

    def rounds(released=None):
        state, _ = algorithm.step(jax.random.key(1), algorithm.init(jax.random.key(0)), data)
        if released is not None:
            state = state._replace(server=state.server._replace(factors=released))
        return state, algorithm.step(jax.random.key(1), state, data)[0]

    data = clients(X, y)
    first, second = rounds()
    rng = np.random.default_rng(3)
    worst = 0.0
    for _ in range(15):
        X_other, y_other = X.copy(), y.copy()
        X_other[row] = rng.normal(size=3) * 10.0 ** rng.integers(-1, 5)
        y_other[row] = rng.integers(2)
        data = clients(X_other, y_other)
        kept, other = rounds(first.factors)
        moved = factors.divide(factors.total(other.factors), factors.total(second.factors))
        family = algorithm.posterior(first).family
        worst = max(worst, length(method, family, first.natural, moved) / damping)
        if first.clients.private is not None:
            untouched = np.ones((2, num_shards), bool)
            untouched[0, row % num_shards] = False
            both = (kept.clients.private, first.clients.private)
            for a, b in zip(*map(jax.tree.leaves, both), strict=True):
                np.testing.assert_array_equal(a[untouched], b[untouched])
    assert worst <= 2 * clip * weight * (1 + 1e-4)
    assert worst > 0.5 * clip * weight  # the search does reach far


@pytest.mark.slow
@pytest.mark.parametrize(
    "k", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 4, 6, 24))]
)
@pytest.mark.parametrize("method", SHARDED)
def test_replacing_all_records_of_a_person_moves_the_sum_by_the_sensitivity(method, k):
    """k extreme records against k others just as extreme; with k = 24, all that the client has."""
    clip, num_shards = 0.3, getattr(method, "num_shards", 1)
    method = type(method)(**{**vars(method), "clip_norm": clip})
    X, y = np.zeros((24, 3)), np.ones(24, int)  # the others' records say nothing
    X[:k, 0] = 1e3
    y_other = y.copy()
    y_other[:k] = 0
    one, other = (message(method, X, labels, num_shards).release for labels in (y, y_other))
    moved = np.linalg.norm(flat(one) - flat(other))
    budgets = [dppvi.PrivacyBudget(1.0, max_records_per_person=k)]
    budgets += [dppvi.PrivacyBudget(1.0, unit="client")] if k == 24 else []
    for budget in budgets:
        plan = dppvi.plan_privacy(method, budget, num_rounds=1, client_sizes=[24])
        sensitivity = plan.clients[0].mechanism.sensitivity("replace_one")
        assert 0.8 * sensitivity < moved <= sensitivity
    if k > 1 and num_shards > 1:  # and further than a single record's sensitivity
        plan = dppvi.plan_privacy(method, dppvi.PrivacyBudget(1.0), num_rounds=1, client_sizes=[24])
        assert moved > plan.clients[0].mechanism.sensitivity("replace_one")


@pytest.mark.slow
def test_an_unclipped_sum_would_fail_that_test():
    X, y = logistic_data(24)
    X_other = X.copy()
    X_other[5] = 1e3
    method = dppvi.VirtualClients(4, clip_norm=UNBOUNDED)
    moved = flat(message(method, X_other, y, 4).release) - flat(message(method, X, y, 4).release)
    assert np.linalg.norm(moved) > 2 * 0.3


@pytest.mark.slow
def test_the_cavity_is_added_exactly_however_small_the_clip(x64, normal_data):
    """It holds no record of the client: clipped along, it would pull too little, and be noised."""
    records, sizes = [{"y": normal_data}], [len(normal_data)]
    learned = dppvi.pvi(
        normal_means,
        None,
        records[0],
        method=dppvi.NonPrivate(**PRECISE),
        client_sizes=sizes,
        damping=1.0,
    )
    shards = dppvi.records.stack_clients(records)
    state, _ = learned.step(jax.random.key(0), learned.init(jax.random.key(0)), shards)
    assert np.linalg.norm(flat(state.factors)) > 1
    # Records that count for nothing: what is left is the cavity, and the factor goes away.
    method = dppvi.DPOptimization(1e-9, **PRECISE)
    plan = dppvi.plan_privacy(method, NO_NOISE, num_rounds=1, client_sizes=sizes)
    forgets = dppvi.pvi(
        normal_means,
        None,
        records[0],
        method=method,
        client_sizes=sizes,
        plan=plan,
        damping=1.0,
    )
    state = state._replace(ledger=plan.ledger())
    after, _ = forgets.step(jax.random.key(0), state, shards)
    np.testing.assert_allclose(flat(after.factors), 0, atol=1e-5)


@pytest.mark.slow
def test_the_noise_of_a_local_average_falls_with_the_number_of_shards():
    """Theorem 4, in the plan and in what is drawn."""
    budget = dppvi.PrivacyBudget(1.0)
    stds = {}
    X, y = logistic_data(96, 200)
    for num_shards in (1, 4, 16):
        method = dppvi.methods.LocalAveraging(num_shards, clip_norm=0.1)
        plan = dppvi.plan_privacy(method, budget, num_rounds=5, client_sizes=[96])
        stds[num_shards] = plan.noise_std[0]
        quiet = flat(message(method, X, y, num_shards).release)
        noisy = [
            flat(message(method, X, y, num_shards, plan.noise_std[0], s).release) - quiet
            for s in range(5)
        ]
        # 2000 draws: five standard errors of their standard deviation are 8 %.
        np.testing.assert_allclose(np.std(noisy), plan.noise_std[0], rtol=0.08)
        np.testing.assert_allclose(plan.epsilons, 1.0, rtol=1e-6)
    np.testing.assert_allclose([stds[1] / stds[4], stds[1] / stds[16]], [4, 16], rtol=1e-6)


@pytest.mark.parametrize(
    "num_shards", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)), (2, 5)]
)
@grid("kind", [dppvi.methods.LocalAveraging, dppvi.VirtualClients], quick=[1])
def test_in_a_conjugate_family_the_number_of_shards_does_not_matter(
    x64, normal_data, kind, num_shards
):
    """Theorem 5 (and the same for virtual clients)."""
    result = fit(
        normal_means,
        None,
        [{"y": normal_data[:9]}, {"y": normal_data[9:]}],
        method=kind(num_shards, UNBOUNDED, **PRECISE),
        budget=NO_NOISE,
        num_rounds=1,
        damping=1.0,
    )
    mean, stddev = closed_form(normal_data)
    # The margin below the clip costs nothing here: nothing is near the bound.
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.parametrize("method", SHARDED)
def test_with_an_aggregator_each_share_falls_and_the_sum_stays(method):
    """Theorems 6 and 8."""
    budget = dppvi.PrivacyBudget(1.0)

    def plan(num_clients, trusted):
        return dppvi.plan_privacy(
            method,
            budget,
            num_rounds=5,
            client_sizes=[40] * num_clients,
            schedule=dppvi.synchronous,
            trusted_aggregator=trusted,
        )

    alone = plan(1, trusted=False).noise_std[0]
    for num_clients in (1, 4, 25):
        shares = plan(num_clients, trusted=True).noise_std
        np.testing.assert_allclose(shares, alone / math.sqrt(num_clients), rtol=1e-6)
        np.testing.assert_allclose(np.sqrt((shares**2).sum()), alone, rtol=1e-6)
    # Two of four may be missing: what two bring is enough.
    shares = plan(4, trusted=dppvi.TrustedAggregator(max_dropouts=2)).noise_std
    np.testing.assert_allclose(np.sqrt((shares[:2] ** 2).sum()), alone, rtol=1e-6)


def test_unequal_shards_under_an_aggregator_are_covered_by_the_largest_weight():
    method = dppvi.methods.LocalAveraging((2, 8), clip_norm=1.0)
    plan = dppvi.plan_privacy(
        method,
        dppvi.PrivacyBudget(1.0),
        num_rounds=3,
        client_sizes=[40, 40],
        schedule=dppvi.synchronous,
        trusted_aggregator=True,
    )
    alone = dppvi.plan_privacy(
        dppvi.methods.LocalAveraging(2, clip_norm=1.0),
        dppvi.PrivacyBudget(1.0),
        num_rounds=3,
        client_sizes=[40],
    )
    total = np.sqrt((plan.noise_std**2).sum())
    np.testing.assert_allclose(total, alone.noise_std[0], rtol=1e-6)


@pytest.mark.slow
def test_a_fixed_point_of_local_averaging_is_one_of_global_inference(x64):
    """Property 2.2: where every shard's optimum is q, q is the global optimum."""
    X, y = logistic_data(20)
    # Rows are dealt to shards in turn: repeating each gives every shard the same records.
    data = [{"X": np.repeat(X, 3, axis=0), "y": np.repeat(y, 3)}]
    averaged = fit(
        logistic,
        None,
        data,
        method=dppvi.methods.LocalAveraging(3, UNBOUNDED, **PRECISE),
        budget=NO_NOISE,
        num_rounds=2,
        damping=1.0,
    )
    direct = fit(
        logistic, None, data, method=dppvi.NonPrivate(**PRECISE), num_rounds=1, damping=1.0
    )
    np.testing.assert_allclose(averaged.posterior.mean["w"], direct.posterior.mean["w"], atol=1e-6)
    np.testing.assert_allclose(
        averaged.posterior.stddev["w"], direct.posterior.stddev["w"], atol=1e-6
    )


def test_virtual_clients_without_privacy_are_so_many_synchronous_clients(x64):
    X, y = logistic_data(24)
    local = {
        "num_local_steps": 40,
        "optimizer": optax.adam(0.05),
        "expectation": dppvi.methods.SphericalCubature(),
    }
    virtual = fit(
        logistic,
        None,
        [{"X": X[:10], "y": y[:10]}, {"X": X[10:], "y": y[10:]}],
        method=dppvi.VirtualClients((2, 3), UNBOUNDED, **local),
        budget=NO_NOISE,
        schedule=dppvi.synchronous,
        num_rounds=4,
        damping=0.2,
    )
    parts = [np.arange(k, 10, 2) for k in range(2)] + [np.arange(10 + k, 24, 3) for k in range(3)]
    real = fit(
        logistic,
        None,
        [{"X": X[rows], "y": y[rows]} for rows in parts],
        method=dppvi.NonPrivate(**local),
        schedule=dppvi.synchronous,
        num_rounds=4,
        damping=0.2,
    )
    for a, b in zip(
        jax.tree.leaves(virtual.posterior.natural),
        jax.tree.leaves(real.posterior.natural),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dppvi.methods.LocalAveraging, dppvi.VirtualClients])
def test_one_shard_is_parameter_perturbation(kind):
    """In the first round exactly, noise included; later too where the client's factor is public."""
    X, y = logistic_data(40)
    rounds = 3 if kind is dppvi.methods.LocalAveraging else 1
    run = functools.partial(
        fit,
        logistic,
        None,
        {"X": X, "y": y},
        clients=2,
        budget=dppvi.PrivacyBudget(5.0),
        num_rounds=rounds,
        insecure_noise_seed=3,
        schedule=dppvi.synchronous,
    )
    sharded, plain = run(method=kind(1, 0.2)), run(method=dppvi.methods.ParameterPerturbation(0.2))
    for a, b in zip(
        jax.tree.leaves(sharded.posterior.natural),
        jax.tree.leaves(plain.posterior.natural),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("method", SHARDED)
@grid("trusted", [False, True], quick=[1])
def test_q_is_a_product_of_released_factors_and_a_result_keeps_no_private_one(method, trusted):
    X, y = logistic_data(60)
    result = fit(
        logistic,
        None,
        {"X": X, "y": y},
        clients=3,
        method=method,
        budget=dppvi.PrivacyBudget(1.0),
        schedule=dppvi.synchronous,
        num_rounds=3,
        trusted_aggregator=trusted,
    )
    state = result.state
    assert state.clients.private is None
    released = factors.multiply(state.prior, factors.total(state.factors))
    np.testing.assert_allclose(flat(released), flat(result.posterior.natural), rtol=1e-5)
    num_factors = jax.tree.leaves(state.factors)[0].shape[0]
    assert num_factors == (1 if trusted else 3)
    assert result.ledger.spent().max() <= 1.0
    assert all(np.all(np.isfinite(s)) for s in result.posterior.stddev.values())


def test_an_aggregator_is_refused_where_it_cannot_work():
    X, y = logistic_data(30)
    run = functools.partial(
        fit, logistic, None, {"X": X, "y": y}, clients=3, budget=dppvi.PrivacyBudget(1.0)
    )
    with pytest.raises(ValueError, match=r"DPOptimization\(\) gains nothing from a trusted"):
        run(method=dppvi.DPOptimization(), trusted_aggregator=True)
    with pytest.raises(ValueError, match="one group of at least 3 of the 3 clients"):
        run(method=dppvi.VirtualClients(2), schedule=dppvi.sequential, trusted_aggregator=True)
    with pytest.raises(ValueError, match="one group of at least 3 of the 3 clients, got 1 groups"):
        run(
            method=dppvi.VirtualClients(2),
            schedule=dppvi.random_subset(2),
            trusted_aggregator=True,
        )
    with pytest.raises(ValueError, match=r"GlobalVI\(\) needs a trusted aggregator"):
        run(method=dppvi.GlobalVI())
    with pytest.raises(ValueError, match="got 40 shards for client 0's 10 records"):
        run(method=dppvi.VirtualClients(40))


def test_an_aggregator_adds_up_all_clients_if_no_schedule_is_given():
    run = planning.resolve(
        dppvi.VirtualClients(2),
        num_clients=3,
        schedule=None,
        num_rounds=2,
        trusted_aggregator=True,
    )
    assert run.schedule is dppvi.synchronous
    assert [group.shape for group in run.groups] == [(1, 3)] * 2


@pytest.mark.slow
def test_those_who_drop_out_are_charged_only_for_what_they_released():
    X, y = logistic_data(30)
    result = fit(
        logistic,
        None,
        {"X": X, "y": y},
        clients=3,
        method=dppvi.methods.LocalAveraging(2),
        budget=dppvi.PrivacyBudget(1.0),
        schedule=dppvi.random_subset(2, seed=1),
        trusted_aggregator=dppvi.TrustedAggregator(max_dropouts=1),
        num_rounds=4,
    )
    visits = np.zeros(3, int)
    for r in range(4):
        visits[dppvi.random_subset(2, seed=1)(r, 3).ravel()] += 1
    charged = [sum(n for _, n in result.ledger.composition(m)) for m in range(3)]
    assert charged == visits.tolist()
    assert len(set(visits.tolist())) > 1
    assert (result.ledger.spent() <= 1.0).all()


@pytest.mark.slow
def test_asynchronous_clients_send_at_their_own_pace():
    schedule = dppvi.Asynchronous((1.0, 2.0, 4.0))
    order = np.concatenate([schedule(r, 3).ravel() for r in range(7)])
    visits = np.bincount(order, minlength=3)
    assert visits.tolist() == [12, 6, 3]  # in proportion to their speed
    X, y = logistic_data(60)
    result = fit(
        logistic,
        None,
        {"X": X, "y": y},
        clients=3,
        method=dppvi.NonPrivate(),
        schedule=schedule,
        num_rounds=25,
    )
    pooled = fit(logistic, None, {"X": X, "y": y}, method=dppvi.NonPrivate(), num_rounds=25)
    shift = (result.posterior.mean["w"] - pooled.posterior.mean["w"]) / pooled.posterior.stddev["w"]
    np.testing.assert_allclose(shift, 0, atol=0.15)


@pytest.mark.slow
def test_a_stale_start_is_what_tells_asynchronous_from_sequential():
    X, y = logistic_data(60)
    run = functools.partial(
        fit, logistic, None, {"X": X, "y": y}, clients=3, method=dppvi.NonPrivate(5), num_rounds=1
    )
    stale = run(schedule=dppvi.Asynchronous((1.0, 1.0, 1.0)))
    synchronous = run(schedule=dppvi.synchronous)
    sequential = run(schedule=dppvi.sequential)
    # In the first round everybody starts from the prior, as synchronous clients do (draws differ).
    distance = np.linalg.norm(flat(stale.posterior.natural) - flat(synchronous.posterior.natural))
    further = np.linalg.norm(flat(stale.posterior.natural) - flat(sequential.posterior.natural))
    assert distance < 0.5 * further


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["same", "split"])
def test_a_committee_is_exact_in_a_conjugate_family(x64, normal_data, prior):
    local = dppvi.DPOptimization(clip_norm=UNBOUNDED, **PRECISE)
    result = fit(
        normal_means,
        None,
        [{"y": normal_data[:5]}, {"y": normal_data[5:9]}, {"y": normal_data[9:]}],
        method=dppvi.BayesianCommitteeMachine(prior, local),
        budget=NO_NOISE,
    )
    mean, stddev = closed_form(normal_data)
    assert len(result.history.movement) == 1  # one communication
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)


@pytest.mark.slow
def test_global_inference_reaches_the_closed_form(x64, normal_data):
    result = fit(
        normal_means,
        None,
        [{"y": normal_data[:5]}, {"y": normal_data[5:]}],
        method=dppvi.GlobalVI(
            UNBOUNDED,
            optax.adam(optax.exponential_decay(0.1, 100, 0.7)),
            expectation=dppvi.methods.SphericalCubature(),
        ),
        budget=NO_NOISE,
        trusted_aggregator=True,
        num_rounds=2500,
    )
    mean, stddev = closed_form(normal_data)
    np.testing.assert_allclose(result.posterior.mean["mu"], mean, atol=1e-6)
    np.testing.assert_allclose(result.posterior.stddev["mu"], stddev, atol=1e-6)
