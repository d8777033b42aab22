"""Private Fisher scoring: limits, sensitivity, centred scores, calibration, what it refuses."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy.stats import norm

import numpyro_dppvi as dppvi
from numpyro_dppvi import latents
from numpyro_dppvi.families.full_normal import unpack
from numpyro_dppvi.methods import clips, fisher_scoring, ratios, tails, visits
from numpyro_dppvi.privacy import SecretKeys
from numpyro_dppvi.protocol import planning, rounds
from tests.grids import grid

SIZES = (300, 200, 500)


def logistic(x, y, width):
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def normal(x, y, width):
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def normal_by_factor(x, y, width):
    """The same posterior as :func:`normal`'s; its outcomes cannot be drawn."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.factor("y", -2 * (y - x @ w) ** 2)


def study(model, seed=0, units=1.0, sizes=SIZES):
    """Records of two columns, in units of one's own; and the truth."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), 2)) @ [[1.0, 0.5], [0.0, 1.0]]
    truth = rng.normal(size=2) * 0.7
    if model is logistic:
        y = (rng.uniform(size=len(x)) < 1 / (1 + np.exp(-x @ truth))).astype(np.int32)
    else:
        y = (x @ truth + 0.5 * rng.normal(size=len(x))).astype(np.float32)
    at = np.cumsum((0, *sizes))
    x = (x * units).astype(np.float32)
    data = [{"x": x[a:b], "y": y[a:b]} for a, b in itertools.pairwise(at)]
    return data, truth


def fitted(model, data, epsilon, units=1.0, **options):
    settings = {
        "rng_key": jax.random.key(0),
        "method": dppvi.FisherScoring(),
        "budget": dppvi.PrivacyBudget(epsilon, 1e-5),
        "model_kwargs": {"width": np.full(2, 3.0 / units, np.float32)},
        "progress_bar": False,
        "insecure_noise_seed": 3,
    }
    return dppvi.fit(model, None, data, **(settings | options))


def moments(result, number=-1):
    """Mean and covariance of the posterior, after a round if one is named."""
    natural = result.posterior.natural if number < 0 else result.posterior_at(number).natural
    (natural,) = natural.values()
    covariance = np.linalg.inv(-2 * np.asarray(unpack(natural.quadratic), np.float64))
    return covariance @ np.asarray(natural.linear, np.float64), covariance


def exact(data):
    """The posterior of the normal model, in closed form."""
    x = np.concatenate([client["x"] for client in data]).astype(np.float64)
    y = np.concatenate([client["y"] for client in data])
    covariance = np.linalg.inv(x.T @ x / 0.25 + np.eye(2) / 9)
    return covariance @ x.T @ y / 0.25, covariance


@pytest.mark.slow
@grid("model", [normal, normal_by_factor], quick=[0])
@grid("schedule", [dppvi.sequential, dppvi.synchronous], quick=[0])
@grid("seed", [0, 1, 3], quick=[0])
def test_with_hardly_any_noise_it_gives_the_exact_posterior(model, schedule, seed):
    data, _ = study(normal, seed)
    own = {"rng_key": jax.random.key(seed), "insecure_noise_seed": seed}
    mean, covariance = moments(fitted(model, data, 1000.0, schedule=schedule, **own))
    true_mean, true_covariance = exact(data)
    root = np.linalg.cholesky(np.linalg.inv(true_covariance))
    ratio = np.sqrt(np.linalg.eigvalsh(root.T @ covariance @ root))
    # Eight drawn outcomes cost a ninth of the information, and clipping a tenth. Noise changes
    # widths by two hundredths, by eight in the worst of 25 studies. Seeds 1 and 3 once had half of
    # the width.
    least, most = (0.98, 1.2) if model is normal else (0.95, 1.1)
    assert np.all((ratio > least) & (ratio < most)), ratio
    off = root.T @ (mean - true_mean)
    # By the drawn outcomes: their root mean square over sixteen seeds is .22, and this four times
    # as much.
    assert np.all(np.abs(off) < 0.88), off


def indicators():
    """All those of a category beside an intercept, and a slope; what is known well of each."""
    rng = np.random.default_rng(5)
    x = np.eye(3)[rng.integers(3, size=4000)]
    x = np.column_stack([np.ones(4000), x, rng.normal(size=4000)])
    known = np.array([[1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1.0]])
    return x, [0.3, -0.5, 0.2, 0.4, 0.7], known, (1000,) * 4


def twice():
    """A column and itself, of which the sum is known."""
    x = np.random.default_rng(5).normal(size=(sum(SIZES), 1)) @ [[1.0, 1.0]]
    return x, [0.3, 0.4], np.ones((1, 2)), SIZES


@pytest.mark.slow
@grid(
    ("columns", "epsilon"),
    [(twice, 100.0), (twice, 1000.0), (indicators, 30.0), (indicators, 1000.0)],
    quick=[0, 1],
)
def test_a_column_that_repeats_others_throws_no_run(columns, epsilon):
    """What is left of such a column is rounding.

    Coordinates once stretched it from visit to visit, until rounding was all that clients released.
    """
    x, weights, known, sizes = columns()
    x = x.astype(np.float32)
    y = (x @ weights + 0.5 * np.random.default_rng(6).normal(size=len(x))).astype(np.float32)
    ends = np.cumsum((0, *sizes))
    data = [{"x": x[a:b], "y": y[a:b]} for a, b in itertools.pairwise(ends)]
    width = np.full(x.shape[1], 3.0, np.float32)
    found = fitted(normal, data, epsilon, schedule=dppvi.sequential, model_kwargs={"width": width})
    assert found.status.outcome in (dppvi.run.Outcome.COMPLETED, dppvi.run.Outcome.PROJECTED)
    precision = x.T.astype(float) @ x / 0.25 + np.eye(x.shape[1]) / 9
    covariance = np.linalg.inv(precision)
    truth = covariance @ x.T.astype(float) @ y / 0.25
    mean, own = moments(found)
    # The prior knows one unit of each direction.
    least = np.linalg.eigvalsh(np.asarray(found.state.server.memory.shape))[0]
    assert least > 0.09 / len(x)
    widths = np.sqrt(np.diag(known @ own @ known.T))
    ratio = widths / np.sqrt(np.diag(known @ covariance @ known.T))
    # Of a column beside itself 1.45 to 1.48 over seeds, whatever the noise.
    assert np.all((ratio > 0.9) & (ratio < (1.5 if columns is indicators else 1.6))), ratio
    assert np.all(np.abs(known @ (mean - truth)) < 2 * widths)


def times_by_factor(x, y, width):
    """Weibull times, written so that they cannot be drawn."""
    w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
    log_shape = numpyro.sample("log_shape", dist.Normal(0, 3))
    with numpyro.plate("records", x.shape[0]):
        u = jnp.exp(log_shape) * (jnp.log(y) - x @ w)
        numpyro.factor("y", log_shape + u - jnp.exp(u))


def zero_inflated(x, y):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ w)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
def test_where_records_say_nothing_of_a_latent_steps_are_no_longer_than_its_prior(seed):
    """Where all counts are expected to be 0, zeros say nothing of a share of further ones.

    The share was thrown to 1 - 6e-8, and rates after it. Without privacy weights have standard
    deviations of .01.
    """
    rng, truth, number = np.random.default_rng(seed), np.array([1, 0.5, -0.4]), 4800
    x = np.column_stack([np.ones(number), rng.normal(size=(number, 2))]).astype(np.float32)
    y = (rng.poisson(np.exp(x @ truth)) * (rng.uniform(size=number) > 0.28)).astype(np.int32)
    own = {"model_kwargs": None, "rng_key": jax.random.key(seed), "insecure_noise_seed": seed}
    result = fitted(zero_inflated, {"x": x, "y": y}, 100.0, clients=5, **own)
    assert result.status.outcome is dppvi.run.Outcome.COMPLETED
    np.testing.assert_allclose(result.posterior.mean["w"], truth, atol=0.06)
    np.testing.assert_allclose(result.posterior.mean["gate"], 0.28, atol=0.03)


def one_way(batch, strength):
    between, within = (numpyro.sample(name, dist.HalfNormal(1)) for name in ("between", "within"))
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("batches", 8):
        level = numpyro.sample("level", dist.Normal(mean, between))
    with numpyro.plate("samples", len(strength)):
        numpyro.sample("strength", dist.Normal(level[batch], within), obs=strength)


@pytest.mark.slow
def test_a_step_is_not_taken_back_because_little_is_known_of_where_it_ends():
    """Levels went back and forth between their means and the prior's for as long as a run lasted.

    At the first of ten rounds as at the last, 65 of their deviations off and 35 times as wide.
    """
    rng, number = np.random.default_rng(0), 4000
    batch = np.arange(number) % 8
    strength = rng.normal(size=8)[batch] + 0.5 * rng.normal(size=number)
    data = {"batch": batch, "strength": strength.astype(np.float32)}
    posterior = fitted(one_way, data, np.inf, clients=5, model_kwargs=None).posterior
    level = np.asarray(posterior.sample(jax.random.key(1), (4000,))["level"])
    exact = 0.5 / np.sqrt(number / 8)
    means = np.array([strength[batch == one].mean() for one in range(8)])
    np.testing.assert_allclose(level.mean(axis=0), means, atol=2 * exact)
    np.testing.assert_allclose(level.std(axis=0), exact, rtol=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4, 19, 27, 34, 45])
def test_observed_information_does_not_throw_a_run_without_noise(seed):
    """Far from the mode such densities are all but linear or explode: Newton's steps go astray."""
    data, truth = study(normal, seed)
    rng = np.random.default_rng(seed)
    for client in data:
        client["y"] = np.exp(client["x"] @ truth) * rng.weibull(1.5, len(client["x"]))
        client["y"] = client["y"].astype(np.float32)
    mean, covariance = moments(fitted(times_by_factor, data, np.inf))
    std = np.sqrt(np.diag(covariance))
    # The logarithm of a shape has the information pi^2 / 6 + (1 - gamma)^2 a record.
    np.testing.assert_allclose(std[2] * np.sqrt(1.82 * sum(SIZES)), 1, atol=0.15)
    assert np.all(np.abs(mean - [*truth, np.log(1.5)]) < 3 * std), (mean, std)


def weighed(times, factor=1.5):
    """Ages and pressures as they are measured, and Weibull times; and the exact deviations.

    Of the level at the columns' means, the two slopes, and the logarithm of the shape.
    """
    rng = np.random.default_rng(times)
    means, spreads = np.array([[60.0, 120.0], [15.0, 20.0]])
    columns = means + spreads * rng.normal(size=(5000, 2))
    truth = np.array([0.3, *(np.array([0.5, -0.4]) / spreads)])
    x = np.column_stack([np.ones(5000), columns])
    eta = x @ truth - truth[1:] @ means
    y = np.exp(eta) * rng.weibull(factor, 5000)
    x, y = x.astype(np.float32), y.astype(np.float32)
    data = [{"x": x[a : a + 1000], "y": y[a : a + 1000]} for a in range(0, 5000, 1000)]
    # Beside the level, a shape's logarithm has the information pi^2 / 6 + (1 - gamma)^2.
    std = np.array([1 / factor, *(1 / factor / spreads), 1 / np.sqrt(1.82)]) / np.sqrt(5000)
    return data, np.array([*truth, np.log(factor)]), means, std


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_outcomes_that_cannot_be_drawn_in_raw_units(seed):
    """Their own scales scatter, and hid once that the columns are far from zero."""
    data, truth, means, exact = weighed(seed)
    width = np.array([30.0, 3.0, 3.0], np.float32)
    found = fitted(
        times_by_factor, data, 3.0, model_kwargs={"width": width}, insecure_noise_seed=seed
    )
    assert float(found.state.server.memory.ratios.stage) > 0  # it has looked for them
    mean, covariance = moments(found)
    centred = np.eye(4)
    centred[0, 1:3] = means
    off = centred @ mean - truth
    std = np.sqrt(np.diag(centred @ covariance @ centred.T))
    assert np.all(np.abs(off) < 4 * std), off / std
    assert np.all(std < 4 * exact), std / exact


def with_a_drug(x, drug, y):
    weights = numpyro.sample("weights", dist.Normal(0, 2.5).expand([3]).to_event(1))
    with numpyro.plate("n", len(y)):
        logits = weights[0] + weights[1] * x + weights[2] * drug
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


@pytest.mark.slow
def test_without_noise_no_score_is_clipped():
    """A twentieth of the records have a column, and all of them the outcome 1.

    A clip costs information where noise would cost more, and most of what rare records say. There
    is no noise here; the weight had been two deviations below what it is.
    """
    rng = np.random.default_rng(6)
    x, drug = rng.normal(size=3000), 1.0 * (rng.random(3000) < 0.05)
    y = np.where(drug == 1, 1, rng.random(3000) < 1 / (1 + np.exp(0.5 - 0.7 * x)))
    data = [{"x": x[i::4], "drug": drug[i::4], "y": y[i::4]} for i in range(4)]
    settings = {"method": dppvi.NonPrivate(), "budget": None, "insecure_noise_seed": None}
    best = fitted(with_a_drug, data, np.inf, model_kwargs=None, **settings).posterior
    found = fitted(with_a_drug, data, np.inf, model_kwargs=None).posterior
    width = best.stddev["weights"]
    assert np.all(np.abs(found.mean["weights"] - best.mean["weights"]) < 0.4 * width)
    np.testing.assert_allclose(found.stddev["weights"], width, rtol=0.15)


def a_mean(width, y):
    mean = numpyro.sample("mean", dist.Normal(3.0, width))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "kept"), [(np.inf, 0.8), (4.0, 0.65)])
@pytest.mark.parametrize("width", [2.0, 0.1, 0.02])
def test_what_records_say_is_kept_under_a_narrow_prior(width, epsilon, kept):
    """As in a second study under ``as_prior()``: of 2000 records, whose mean is known to .034.

    Of their precision .003 to .08 was kept under priors half as wide.
    """
    rng = np.random.default_rng(0)
    y = rng.normal(3.0, 1.5, 2000)
    result = fitted(a_mean, [{"y": y[::2]}, {"y": y[1::2]}], epsilon, model_kwargs={"width": width})
    _, covariance = moments(result)
    told = 1 / covariance[0, 0] - width**-2
    assert kept < told / (2000 / 1.5**2) < 1.1


@pytest.mark.slow
def test_a_squared_score_is_the_same_information_at_the_truth():
    """Of a Weibull time, at some places by ten times as much as the observed one or as little."""
    count, at = 20_000, np.array([0.4, 0.3])
    times = np.exp(at[0]) * np.random.default_rng(0).weibull(np.exp(at[1]), count)

    def average(squared, loc):
        told = some_told(1e6)._replace(
            loc=jnp.asarray(loc, jnp.float32),
            squared=jnp.asarray(squared),
            info_clip=jnp.asarray(1e9),
            white=jnp.eye(2),
        )

        def part(time):
            def density(theta):
                u = jnp.exp(theta[1]) * (jnp.log(time) - theta[0])
                return theta[1] + u - jnp.exp(u)

            return fisher_scoring._as_observed(told, jax.grad(density))["information"]

        parts = jax.jit(jax.vmap(part))(jnp.asarray(times, jnp.float32))
        return np.asarray(unpack(jnp.mean(parts, axis=0))) / np.sqrt(0.3) * 1e9

    observed, squared = average(0.0, at), average(1.0, at)
    # Means of twenty thousand squares, whose own deviations are about five times as large.
    np.testing.assert_allclose(squared, observed, atol=0.15 * np.max(observed))
    np.testing.assert_allclose(average(0.25, at), 0.75 * observed + 0.25 * squared, rtol=1e-3)
    # Where times are taken for much longer than they are, only squares tell.
    far = at + np.array([3.0, 0.0])
    assert average(0.0, far)[0, 0] < 0.1 * observed[0, 0] < 0.2 * average(1.0, far)[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_the_server_moves_once_a_tenth_of_the_records_was_asked(number):
    """Of twenty equal clients two are a tenth. What one says is remembered until then."""
    data, _ = study(logistic, sizes=(50,) * 20)

    def some(round_number, num_clients):
        return np.arange(num_clients if round_number < 2 else number)[None]

    found = fitted(logistic, data, 3.0, num_rounds=3, schedule=some).state.server.memory
    assert float(found.waiting.records) == (50 if number == 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [19, 20])
def test_the_server_waits_for_all_when_they_release_scores_for_the_first_time(number):
    """Whether clients differ is seen where all are asked at one location."""
    data, _ = study(logistic, sizes=(50,) * 20)

    def some(round_number, num_clients):
        return np.arange(num_clients if round_number == 0 else number)[:, None]

    found = fitted(logistic, data, 3.0, num_rounds=2, schedule=some).state.server.memory
    assert float(found.waiting.records) == (950 if number == 19 else 0)
    assert np.any(np.abs(found.loc) > 1e-3) == (number == 20), found.loc


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_small_clients_lead_no_run_astray(seed):
    """Fifty hospitals of a hundred patients; two of these six once ended nine deviations off."""
    data, truth, means, _ = weighed(seed)
    whole = {name: np.concatenate([client[name] for client in data]) for name in data[0]}
    small = [{name: rows[a : a + 100] for name, rows in whole.items()} for a in range(0, 5000, 100)]
    width = np.array([30.0, 3.0, 3.0], np.float32)
    mean, covariance = moments(
        fitted(times_by_factor, small, 3.0, model_kwargs={"width": width}, insecure_noise_seed=seed)
    )
    centred = np.eye(4)
    centred[0, 1:3] = means
    off = centred @ mean - truth
    std = np.sqrt(np.diag(centred @ covariance @ centred.T))
    assert np.all(np.abs(off) < 5 * std), off / std


UNAWARE = dppvi.FisherScoring(noise_aware=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic, normal])
def test_without_noise_both_kinds_of_factors_agree(model):
    """But for what factors that know their noise leave for older rounds' errors.

    Locations never come to rest, because outcomes are drawn anew at every visit, and those errors
    follow them: single rounds differ by up to a tenth.
    """
    data, _ = study(model)
    aware = fitted(model, data, np.inf, num_rounds=60)
    unaware = fitted(model, data, np.inf, num_rounds=60, method=UNAWARE)
    off, wider = [], []
    for number in range(21, 61):
        mean, covariance = moments(aware, number)
        other_mean, other_covariance = moments(unaware, number)
        variance = np.diag(covariance)
        off.append((other_mean - mean) / np.sqrt(variance))
        wider.append(np.diag(other_covariance) / variance - 1)
    np.testing.assert_allclose(np.mean(off, axis=0), 0, atol=0.03)
    assert np.sqrt(np.mean(np.square(off))) < 0.1
    np.testing.assert_allclose(np.median(wider, axis=0), 0, atol=0.03)


@pytest.mark.slow
def test_factors_that_do_not_know_their_noise_are_the_estimated_information():
    data, _ = study(logistic)
    result = fitted(logistic, data, 1.0, method=UNAWARE, schedule=dppvi.synchronous)
    memory, (natural,) = result.state.server.memory, result.posterior.natural.values()
    precision = -2 * np.asarray(unpack(natural.quadratic)) - np.eye(2) / 9
    memory = jax.device_get(memory)
    per_record = memory.level * memory.shape / np.outer(memory.prior_sd, memory.prior_sd)
    np.testing.assert_allclose(precision, sum(SIZES) * per_record, rtol=1e-4)
    # Noise is in the intervals of those that know it, which are wider in every direction.
    _, aware = moments(fitted(logistic, data, 1.0, schedule=dppvi.synchronous))
    assert np.all(np.linalg.eigvalsh(aware - np.linalg.inv(precision + np.eye(2) / 9)) > 0)


@pytest.mark.slow
def test_before_there_are_scores_no_factor_claims_anything():
    data, _ = study(logistic)
    result = fitted(logistic, data, 1.0, method=UNAWARE, num_rounds=2)
    (first,) = result.posterior_at(1).natural.values()
    precision = -2 * np.asarray(unpack(first.quadratic))
    np.testing.assert_allclose(precision, np.eye(2) / 9, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_units_of_the_columns_do_not_matter():
    plain, scaled = (
        moments(fitted(normal, study(normal, units=units)[0], 3.0, units))
        for units in (1.0, 1024.0)
    )
    np.testing.assert_allclose(scaled[0] * 1024, plain[0], rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(scaled[1] * 1024**2, plain[1], rtol=2e-2, atol=1e-5)


@pytest.mark.slow
def test_an_aggregator_helps_and_clients_of_all_kinds_of_schedules_work():
    data, _ = study(normal)
    alone = moments(fitted(normal, data, 1.0, schedule=dppvi.synchronous))[1]
    summed = fitted(normal, data, 1.0, schedule=dppvi.synchronous, trusted_aggregator=True)
    assert np.linalg.det(moments(summed)[1]) < np.linalg.det(alone)
    some = fitted(normal, data, 3.0, schedule=dppvi.random_subset(2, seed=0))
    assert np.all(np.isfinite(moments(some)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("model", [logistic, normal_by_factor])
def test_as_programs_in_turn_a_round_gives_the_numbers_of_one_program(model, monkeypatch):
    data, _ = study(model)
    in_turn = moments(fitted(model, data, 3.0))
    monkeypatch.setattr(rounds, "in_turn", lambda *_: pytest.fail("in turn"))
    monkeypatch.setattr(rounds, "_FEW_GROUPS", 2)  # of three clients
    for one, other in zip(in_turn, moments(fitted(model, data, 3.0)), strict=True):
        assert np.allclose(one, other, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_a_client_without_a_visit_has_no_factor():
    def first_two(round_number, num_clients):
        return np.array([[0, 1]])

    data, _ = study(normal)
    result = fitted(normal, data, 3.0, schedule=first_two)
    for leaf in jax.tree.leaves(result.state.factors):
        assert [bool(np.any(mine)) for mine in leaf] == [True, True, False]


@pytest.mark.slow
def test_tiny_budgets_leave_the_prior():
    data, _ = study(normal)
    mean, covariance = moments(fitted(normal, data, 1e-3))
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), 3.0, rtol=0.2)
    assert np.all(np.abs(mean) < 6)


@pytest.mark.slow
def test_the_status_says_how_much_noise_widens_intervals():
    """Of a normal model the width without privacy is known."""
    data, _ = study(normal)
    for epsilon in (1.0, 1000.0):
        result = fitted(normal, data, epsilon)
        widened = np.median(np.sqrt(np.diag(moments(result)[1]) / np.diag(exact(data)[1])))
        # The level and the shape are known as well as noise lets them.
        assert 0.6 < result.status.widened / widened < 1.5
        assert result.status.outcome is not dppvi.run.Outcome.NOISY
    # Twenty times as wide; how wide exactly, noise hides.
    status = fitted(normal, data, 0.15).status
    assert status.widened > 3
    assert "times as wide as they would be without privacy" in str(status)


@pytest.mark.slow
def test_the_status_says_that_outcomes_lie_further_out_than_the_model_says():
    """As errors of Student's t with 3 degrees of freedom do under a normal model.

    With 2, four of ten runs have not settled, and say that instead.
    """
    data, _ = study(normal)
    assert fitted(normal, data, 30.0).status.cut == 0
    rng = np.random.default_rng(0)
    far = [{**one, "y": one["y"] + rng.standard_t(3, len(one["y"])).astype("f")} for one in data]
    status = fitted(normal, far, 3.0).status
    assert status.cut > 0.01
    assert status.outcome is dppvi.run.Outcome.BENT


def unknown_spread(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([x.shape[1]]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, spread), obs=y)


@pytest.mark.slow
def test_a_spread_follows_where_many_weights_are_learnt():
    """Information on the weights grows thirtyfold on the way, and on the spread it stays.

    Where rounds were as short as the weights alone would have them, the spread ended 5 of its
    deviations too large, root mean square. Chance makes that 1, and more than 3 in one of 10^9.
    """
    rng, errors = np.random.default_rng(0), []
    for seed in range(8):
        w = 0.5 * rng.normal(size=25).astype("f")
        x = rng.normal(size=(5, 1000, 25)).astype("f")
        y = x @ w + 0.5 * rng.normal(size=(5, 1000)).astype("f")
        data = [{"x": rows, "y": outcomes} for rows, outcomes in zip(x, y, strict=True)]
        result = dppvi.fit(
            unknown_spread,
            None,
            data,
            rng_key=jax.random.key(seed),
            method=dppvi.FisherScoring(),
            budget=dppvi.PrivacyBudget(3.0, 1e-5),
            progress_bar=False,
            insecure_noise_seed=seed,
        )
        spread = np.log(result.posterior.sample(jax.random.key(0), (2000,))["spread"])
        errors.append((spread.mean() - np.log(0.5)) / spread.std())
    assert np.sqrt(np.mean(np.square(errors))) < 3


@pytest.mark.slow
def test_diagnose_and_citation_take_it():
    result = fitted(normal, study(normal)[0], 3.0)
    found = dppvi.diagnose(result)
    assert found.noise == {}
    assert "precision" in str(found)
    # Both say how far the last round moved the posterior, and damping takes no part in it.
    assert found.residual[-1] == pytest.approx(result.status.moved)
    assert str(result.status) in str(found)
    assert "FisherScoring" in str(result.privacy_statement())
    assert result.ledger.spent().max() <= 3.0


@pytest.mark.slow
def test_what_is_saved_without_a_guide_is_loaded_without_one(tmp_path):
    data, _ = study(logistic)
    result = fitted(logistic, data, 10.0, num_rounds=2)
    result.posterior.save(tmp_path / "saved")
    for guide in (None, AutoMultivariateNormal(logistic)):
        again = dppvi.load(tmp_path / "saved", logistic, guide)
        np.testing.assert_array_equal(again.mean["w"], result.posterior.mean["w"])
    with pytest.raises(ValueError, match="was fitted with another guide"):
        dppvi.load(tmp_path / "saved", logistic, AutoNormal(logistic))


# ---------------------------------------------------------------------------------------------
# Sensitivity.

SCORED = ("score", "information", "clipped")
HOSTILE = {
    "zero": ([0.0, 0.0], 0.0),
    "far": ([1000.0, -1000.0], 3.0),
    "huge": ([1e20, 1e20], 1.0),
    "largest": ([3e38, -3e38], 3e38),
    "tiny": ([1e-30, -1e-40], 1e-40),
    "infinite": ([np.inf, 1.0], 1.0),
    "no number": ([np.nan, np.nan], np.nan),
}


VISITS = ("scales", "ratios", "scores")


@functools.cache
def client(model=normal):
    """The pieces of a visit: a function of records and of what the visit is for."""
    data, _ = study(normal)
    mine = {name: jnp.asarray(leaf) for name, leaf in data[1].items()}
    method = dppvi.FisherScoring(num_replicates=3)
    space = latents.from_model(model, mine, {"width": np.full(2, 3.0, np.float32)})
    family = dppvi.protocol.algorithm.guides.family_of(AutoMultivariateNormal(model), model, space)
    size, std = SIZES[1], 7.0
    params = visits.ClientParams(*(jnp.asarray(x) for x in (std, 1, 1.0, 1.0, 1.0, size)))
    memory = method.memory(space, family, family.natural(family.standard()), 1)

    @functools.partial(jax.jit, static_argnames="kind")
    def release(records, secret_key, kind):
        known = memory
        if kind != "scales":
            known = memory.with_own(visits=jnp.ones(1))._replace(shape_known=jnp.eye(2))
        if kind == "ratios":
            ones = jnp.ones(2)
            look = ratios.Look(ones, ones, 0 * ones, 0.1 * ones)
            known = known._replace(ratios=known.ratios._replace(stage=jnp.ones(()), look=look))
        layout = visits.Layout(size, 1, size)
        likelihood = visits.OfRecords(
            space, family, method.expectation, layout, records, jnp.asarray(size), params
        )
        asked = visits.Visit(
            family=family,
            layout=layout,
            solver=method.solver(0.0),
            num_steps=1,
            q=family.natural(family.standard()),
            own=family.natural(family.standard()),
            params=params,
            rng_key=jax.random.key(0),
            secret_key=secret_key,
            drawn=None,
            told=method.told(known, 0),
        )
        return method.visit(asked, likelihood).release

    return mine, release


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
@grid(
    ("model", "kind"),
    [(model, kind) for model in (normal, normal_by_factor) for kind in VISITS],
    quick=[1, 2],
)
def test_no_record_moves_a_release_by_more_than_its_sensitivity(model, name, kind):
    mine, release = client(model)
    features, outcome = HOSTILE[name]
    other = {
        "x": mine["x"].at[17].set(jnp.asarray(features)),
        "y": mine["y"].at[17].set(outcome),
    }
    key = SecretKeys(0).round_key(0)
    both = [release(records, key, kind) for records in (mine, other)]
    moved = [
        np.ravel(a - b).astype(np.float64) for a, b in zip(*map(jax.tree.leaves, both), strict=True)
    ]
    everything = np.concatenate(moved)
    assert np.all(np.isfinite(everything))
    # Noise is the same in both, and each entry is rounded to a grid far below it.
    assert np.linalg.norm(everything) <= 2.0 + 1e-3


def test_noise_is_the_plans():
    """Scores have no share of a first visit: what is released of them is noise and nothing else.

    Nor have bins that no record is in, far below the scales that there are.
    """
    mine, release = client()
    found = [release(mine, SecretKeys(seed).round_key(0), "scales") for seed in range(300)]
    empty = np.concatenate([np.ravel(each["scales"][:, :4]) for each in found])
    parts = [np.concatenate([np.ravel(each[part]) for each in found]) for part in SCORED]
    for noise in (empty, np.concatenate(parts)):
        # Five standard errors: one failure in two million seeds.
        assert abs(np.std(noise) / 7.0 - 1) < 5 / np.sqrt(2 * noise.size)


@pytest.mark.slow
def test_what_was_not_asked_for_is_neither_released_nor_hidden():
    """Scales at later visits: they are zeros whatever the records are, and need no noise."""
    mine, release = client()
    found = [release(mine, SecretKeys(seed).round_key(0), "scores") for seed in range(2)]
    assert not np.any(found[0]["scales"])
    for part in SCORED:
        assert np.all(np.ravel(found[0][part] - found[1][part]) != 0)


# ---------------------------------------------------------------------------------------------
# Centred scores, and calibration.


@pytest.mark.slow
def test_a_clipped_score_has_no_expectation_under_the_model():
    """With a clip that bends nearly everything; without a centre it is off by 30 errors."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40_000, 2)) + np.array([2.0, 0.0])
    prob = 1 / (1 + np.exp(-x @ [-1.0, 0.5]))  # rare and skewed
    y = rng.uniform(size=(40_000, 9)) < prob[:, None]
    scores = (y - prob[:, None])[:, :, None] * x[:, None, :]
    told = fisher_scoring.Told(
        loc=jnp.zeros(2),
        white=2 * jnp.eye(2),
        clip=jnp.asarray(0.5),
        info_clip=jnp.asarray(0.5),
        shares=jnp.array([1.0, 0.0, 0.0, 0.0, 0.0]),
        prior_sd=jnp.ones(2),
        look=ratios.nothing(2).look,
        along=jnp.zeros(()),
        squared=jnp.zeros(()),
        near=jnp.zeros((2, 2)),
        steps=jnp.zeros(0),
    )
    even = jnp.full(8, 1 / 8)

    def release(scores):
        return fisher_scoring._centred(told, scores[0], scores[1:], even, scores[1:])["score"]

    each = jax.jit(jax.vmap(release))(jnp.asarray(scores, jnp.float32))
    each = np.asarray(each, np.float64)
    errors = each.mean(axis=0) / (each.std(axis=0) / np.sqrt(len(each)))
    assert np.all(np.abs(errors) < 4), errors  # one in 8000 by chance


@pytest.mark.slow
def test_columns_far_from_zero_need_no_repair():
    """In raw units the precision's eigenvalues span more than 32 bits resolve."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(1000, 3)) * [0.5, 1.4, 2.2] + [0.8, 61.7, 57.5]
    x = np.c_[np.ones(1000), x]
    y = x @ [100.0, 900.0, -3.0, 2.0] + 50 * rng.normal(size=1000)
    data = [{"x": a, "y": b} for a, b in zip(np.split(x, 5), np.split(y, 5), strict=True)]
    data = jax.tree.map(lambda leaf: leaf.astype(np.float32), data)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, jnp.array([5e3, 2e3, 700.0, 450.0])).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 50.0), obs=y)

    settings = {"method": dppvi.FisherScoring(), "num_rounds": 15, "progress_bar": False}
    budget = dppvi.PrivacyBudget(30.0, 1e-5)
    key = jax.random.key(0)
    result = dppvi.fit(
        model, None, data, budget=budget, rng_key=key, insecure_noise_seed=1, **settings
    )
    assert result.status.projected == 0
    off = x @ result.posterior.mean["w"] - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    assert np.sqrt(np.mean(off**2)) < 0.5 * 50, np.sqrt(np.mean(off**2))


def some_told(clip, along=0.0):
    return fisher_scoring.Told(
        loc=jnp.array([0.4, -0.2]),
        white=jnp.array([[2.0, 0.5], [0.0, 1.0]]),
        clip=jnp.asarray(clip),
        info_clip=jnp.asarray(100.0),
        shares=jnp.array([0.5, 0.3, 0.2, 0.0, 0.0]),
        prior_sd=jnp.ones(2),
        look=ratios.nothing(2).look,
        along=jnp.asarray(along),
        squared=jnp.zeros(()),
        near=jnp.zeros((2, 2)),
        steps=jnp.zeros(0),
    )


@pytest.mark.parametrize("clip", [0.3, 30.0])
def test_observed_information_is_how_clipped_scores_respond(clip):
    """Numerically; and by weights, which in the score's direction is more."""

    def score(theta):
        gone = jnp.exp(theta[1] * (1.3 - theta[0]))
        return jnp.array([0.5 - gone - 2 * theta[0], gone - 3 * theta[1] + theta[0]])

    @jax.jit
    def clipped(white_theta):
        white = score(told.loc + told.white @ white_theta) @ told.white
        return white * jnp.minimum(1, clip / jnp.sqrt(jnp.sum(white**2)))

    told = some_told(clip)
    with jax.enable_x64(True):
        observed = jax.jit(lambda told: fisher_scoring._as_observed(told, score))
        part = observed(told)["information"]
        found = np.asarray(unpack(part)) / np.sqrt(0.3) * 100
        steps = 1e-5 * np.eye(2)
        true = np.stack([(clipped(-h) - clipped(h)) / 2e-5 for h in steps], axis=1)
        np.testing.assert_allclose(found, (true + true.T) / 2, rtol=1e-4, atol=1e-6)
        by_weights = observed(some_told(clip, 1.0))["information"]
        along = np.asarray(clipped(np.zeros(2)))
        more = along @ (np.asarray(unpack(by_weights)) / np.sqrt(0.3) * 100 - found) @ along
        assert more > 0.01 if clip < 1 else abs(more) < 1e-5, more


def flags(scores, clip):
    told = some_told(clip)._replace(white=jnp.eye(2))
    scores = jnp.asarray(scores)
    even = jnp.full(len(scores) - 1, 1 / (len(scores) - 1))
    part = jax.jit(fisher_scoring._centred)(told, scores[0], scores[1:], even, scores[1:])[
        "clipped"
    ]
    far, near, *others = np.asarray(part) / np.sqrt(0.2) / tails.ROOTS
    return [far, near, *((np.array(others) + 1) / 2)]


@pytest.mark.slow
def test_flags_say_which_scores_were_clipped():
    """Far and near ones, less as many as all five have; their chance; drawn ones; information."""
    drawn = np.array([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.1], [0.0, -0.1]])
    found = flags([[9.0, 0.0], *drawn], 1.0)
    np.testing.assert_allclose(found, [0.8, 0, 0.16, 0, 0], atol=1e-6)
    found = flags([[0.7, 0.0], *drawn], 1.0)
    np.testing.assert_allclose(found, [0, 0.8, 0.16, 0, 0], atol=1e-6)
    far = drawn * [[1], [1], [40], [1]]
    found = flags([[0.0, 0.0], *far], 1.0)
    np.testing.assert_allclose(found[:4], [-0.2, 0, 0.16, 0.25], atol=1e-6)
    # The centre is a third of a clip along the second axis: such scores are clipped, but not far.
    clipped = drawn * [[1], [1], [14], [1]]
    found = flags([[0.0, 0.0], *clipped], 1.0)
    np.testing.assert_allclose(found[:4], [0, 0, 0, 0.25], atol=1e-6)


@pytest.mark.slow
def test_clips_of_all_clients_at_once_do_not_swing(monkeypatch):
    """Each round they were half or twice the last ones, and information as wrong by as much."""
    found_clips, whole = [], clips.after

    def seen(*args):
        found = whole(*args)
        jax.debug.callback(lambda clip: found_clips.append(float(clip)), found.clip)
        return found

    monkeypatch.setattr(clips, "after", seen)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 20)).astype(np.float32)
    y = (rng.uniform(size=4000) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32)
    data = [{"x": x[start::4], "y": y[start::4]} for start in range(4)]
    kwargs = {"width": np.full(20, 3.0, np.float32)}
    fitted(logistic, data, 30.0, model_kwargs=kwargs, schedule=dppvi.synchronous)
    jax.effects_barrier()
    steps = np.diff(np.log(found_clips[1:]))  # the first round finds scales and no clip
    assert len(steps) == 8
    assert steps.min() > -np.log(1.4), found_clips


def many_records(errors, num_clients=10, number=2250):
    """Clients whose errors are as large as the model says on average, and of another shape."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(num_clients):
        x = np.c_[np.ones(number), rng.normal(size=number)].astype(np.float32)
        data.append({"x": x, "y": (x @ [0.2, 0.3] + errors(rng, number)).astype(np.float32)})
    return data


def normal_errors(rng, number):
    return rng.normal(size=number)


def lognormal_errors(rng, number):
    return (np.exp(rng.normal(size=number)) - np.exp(0.5)) / np.sqrt(np.exp(2) - np.exp(1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_status_sees_far_outcomes_that_a_learnt_spread_makes_up_for(seed):
    """As many observed scores as drawn ones are clipped, and the spread is a third too small."""
    settings = {"model_kwargs": {}, "insecure_noise_seed": seed}
    result = fitted(unknown_spread, many_records(lognormal_errors), 1.0, **settings)
    assert result.posterior.mean["spread"] < 0.85
    assert "outcomes lie further out than the model says" in str(result.status)
    result = fitted(unknown_spread, many_records(normal_errors), 1.0, **settings)
    assert result.status.cut == 0
    assert abs(result.posterior.mean["spread"] - 1) < 0.05


@pytest.mark.slow
def test_far_outcomes_bend_no_more_than_noise():
    """Every twentieth outcome is off by ten standard deviations; without noise all that counts."""
    data, truth = study(normal)
    for each in data:
        number = len(each["x"])
        each["x"] = np.c_[each["x"][:, 0], np.ones(number)].astype(np.float32)
        errors = 0.5 * norm.rvs(size=number, random_state=5)
        each["y"] = (each["x"] @ truth + errors).astype(np.float32)
        each["y"][::20] += 5
    x, y = (np.concatenate([each[name] for each in data]).astype(float) for name in "xy")
    pooled, sd = np.linalg.lstsq(x, y, rcond=None)[0], 0.5 / np.sqrt(len(y))
    assert pooled[1] - truth[1] > 10 * sd
    off = {}
    for epsilon in (10.0, 1000.0):
        result = fitted(normal, data, epsilon, schedule=dppvi.synchronous)
        off[epsilon] = abs(result.posterior.mean["w"] - pooled)[1] / sd
    assert off[10.0] > 5  # noise is larger than what few far outcomes say
    assert off[1000.0] < 2


@pytest.mark.slow
def test_intervals_cover_what_they_say():
    """80 studies, two weights each: 90 % intervals, whose coverage has a standard error of .024."""
    hits, wide = [], []
    sizes = (400, 400, 400)
    for seed in range(80):
        data, truth = study(logistic, seed, sizes=sizes)
        mean, covariance = moments(
            fitted(logistic, data, 3.0, rng_key=jax.random.key(seed), insecure_noise_seed=seed)
        )
        spread = np.sqrt(np.diag(covariance))
        hits.append(np.abs(mean - truth) < norm.ppf(0.95) * spread)
        wide.append(spread)
    assert 0.82 <= np.mean(hits) <= 0.98
    assert np.median(wide) < 0.25  # without privacy .08


# ---------------------------------------------------------------------------------------------
# What it refuses.


def test_a_diagonal_posterior_is_refused():
    data, _ = study(normal)
    with pytest.raises(dppvi.UnsupportedModelError, match="one normal distribution over all"):
        dppvi.fit(
            normal,
            AutoNormal(normal),
            data,
            rng_key=jax.random.key(0),
            method=dppvi.FisherScoring(),
            budget=dppvi.PrivacyBudget(1.0),
            model_kwargs={"width": np.ones(2, np.float32)},
        )


def test_its_arguments_are_checked():
    with pytest.raises(ValueError, match="num_replicates must be"):
        dppvi.FisherScoring(num_replicates=0)
    with pytest.raises(TypeError, match="noise_aware must be"):
        dppvi.FisherScoring(noise_aware=1)


def refusal(model, data, **options):
    """What is said before anything is released."""
    given = {"method": dppvi.FisherScoring(), "budget": dppvi.PrivacyBudget(1.0)} | options
    with pytest.raises(ValueError, match=r"^[^\n]+\.$") as refused:
        dppvi.fit(model, None, data, rng_key=jax.random.key(0), **given)
    return str(refused.value)


ONE_NUMBER = [{"y": np.ones(20, np.float32)}]


def test_a_residual_is_no_outcome_that_could_be_drawn():
    """It would not move with the latents: all drawn scores would be zero."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y - mean)

    assert not latents.from_model(model, {"y": jnp.ones(20)}).can_draw


def right(time, died):
    return dist.RightCensoredDistribution(time, 1 - died)


def left(time, died):
    return dist.LeftCensoredDistribution(time, 1 - died)


def within(time, died):
    edges = jnp.zeros(died.shape, bool), jnp.zeros(died.shape, bool)
    return dist.IntervalCensoredDistribution(time, *edges)


@pytest.mark.parametrize(
    "censored",
    [
        right,
        left,
        within,
        lambda time, died: right(time, died).mask(died > -1),
        lambda time, died: right(time, died).expand_by([1]).to_event(1),
        lambda time, died: dist.MixtureGeneral(
            dist.Categorical(probs=jnp.ones((*died.shape, 2)) / 2), [right(time, died)] * 2
        ),
    ],
)
def test_outcomes_that_are_censored_are_not_drawn(censored):
    """NumPyro draws them as if nobody were: centred by such draws, posteriors were 20 sd off."""

    def model(y, died):
        rate = numpyro.sample("rate", dist.LogNormal(0, 1))
        with numpyro.plate("records", len(y)):
            time = dist.Exponential(rate * jnp.ones(len(y)))
            numpyro.sample("y", censored(time, died), obs=y)

    row = {"y": jnp.ones((20, 2) if censored is within else 20), "died": jnp.ones(20, int)}
    assert not latents.from_model(model, row).can_draw


def test_the_posterior_of_censored_times_is_the_gamma_density():
    """It is conjugate; three quarters of 2000 times are censored."""
    rng = np.random.default_rng(3)
    time, left_at = rng.exponential(size=2000), rng.exponential(1 / 3, size=2000)
    y, died = np.minimum(time, left_at), (time < left_at).astype(int)

    def model(y, died):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        with numpyro.plate("records", len(y)):
            numpyro.sample("y", right(dist.Exponential(rate * jnp.ones(len(y))), died), obs=y)

    data = [{"y": y[part::2].astype(np.float32), "died": died[part::2]} for part in (0, 1)]
    budget = dppvi.PrivacyBudget(float("inf"))
    settings = {"rng_key": jax.random.key(0), "insecure_noise_seed": 0, "progress_bar": False}
    result = dppvi.fit(model, None, data, method=dppvi.FisherScoring(), budget=budget, **settings)
    exact = (1 + died.sum()) / (1 + y.sum())
    np.testing.assert_allclose(result.posterior.mean["rate"], exact, rtol=0.01)
    np.testing.assert_allclose(
        result.posterior.stddev["rate"], exact / np.sqrt(1 + died.sum()), rtol=0.05
    )


def _outcome(fn):
    def model(x, y):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", fn(theta * x), obs=y)

    return model


def _of_so_many(x, y):
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Binomial(x.astype(int), logits=theta), obs=y)


def _twice(x, y):
    theta = numpyro.sample("theta", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=theta * x), obs=y)
        numpyro.sample("x", dist.Normal(theta, 1), obs=x)


FEW = {
    "binary": (_outcome(lambda m: dist.Bernoulli(logits=m)), [0, 1]),
    "ordered": (_outcome(lambda m: dist.OrderedLogistic(m, jnp.array([-1.0, 0.5]))), [0, 1, 2]),
    "counts": (_outcome(lambda m: dist.Poisson(jnp.exp(m))), None),
    "numbers": (_outcome(lambda m: dist.Normal(m, 1.0)), None),
    "many": (_outcome(lambda m: dist.Categorical(logits=m[:, None] * jnp.arange(40))), None),
    # Its range is the record's own, and with it what could be listed.
    "of so many": (_of_so_many, None),
    "two outcomes": (_twice, None),
}


@pytest.mark.parametrize("kind", FEW)
def test_outcomes_are_listed_where_they_are_public_and_few(kind):
    model, values = FEW[kind]
    space = latents.from_model(model, {"x": jnp.ones(5), "y": jnp.zeros(5, int)})
    found = space.few_outcomes
    assert (found is None) == (values is None)
    if values is not None:
        np.testing.assert_array_equal(np.ravel(found["y"]), values)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.3, 30.0])
def test_over_all_outcomes_scores_have_expectation_zero(clip):
    """With no clip in the way the information is p (1 - p) x x', to the digit."""
    told, p, x = some_told(clip), 0.07, np.array([3.0, -1.0])
    outcomes = np.array([-p, 1 - p])[:, None] * x
    weights = jnp.array([1 - p, p])
    with jax.enable_x64(True):

        @jax.jit
        def release(observed):
            return fisher_scoring._centred(told, observed, outcomes, weights)

        each = [release(jnp.asarray(outcome)) for outcome in outcomes]
        mean = (1 - p) * np.asarray(each[0]["score"]) + p * np.asarray(each[1]["score"])
        np.testing.assert_allclose(mean, 0, atol=1e-7)
        assert np.linalg.norm(each[1]["score"]) > 0.1
        if clip > 1:
            white = x @ np.asarray(told.white)
            info = np.asarray(unpack(each[0]["information"])) / np.sqrt(0.3) * 100
            np.testing.assert_allclose(info, p * (1 - p) * np.outer(white, white), rtol=1e-5)


@pytest.mark.slow
def test_probabilities_are_those_of_the_posterior_about_the_location():
    """A rare outcome is more probable there than at the location itself."""
    x, told = np.array([1.0, -0.5]), some_told(1.0)
    told = told._replace(loc=jnp.array([-3.0, 0.4]), near=jnp.array([[0.7, 0.0], [0.2, 0.4]]))

    def density(loc, outcome):
        return dist.Bernoulli(logits=loc @ x).log_prob(outcome)

    def probability(told, key):
        return fisher_scoring._probabilities(told, density, jnp.array([0, 1]), key)[1]

    at_loc = probability(told._replace(near=jnp.zeros((2, 2))), jax.random.key(0))
    np.testing.assert_allclose(at_loc, 1 / (1 + np.exp(3.2)), rtol=1e-5)
    signs = np.array(list(itertools.product([-1, 1], [-1, 1])))
    expected = np.mean(1 / (1 + np.exp(3.2 - signs @ np.asarray(told.near).T @ x)))
    assert expected > 1.15 * at_loc
    # All signs come up, whatever the key: the mean over keys is that of all of them.
    keys = jax.random.split(jax.random.key(1), 4000)
    found = jax.jit(jax.vmap(lambda key: probability(told, key)))(keys)
    np.testing.assert_allclose(found.mean(), expected, atol=4 * found.std() / np.sqrt(4000))


@pytest.mark.slow
def test_where_the_truth_may_be_is_the_posteriors_covariance():
    """Of a client's next visit; shortened where it is wider than an expansion reaches."""
    data, _ = study(logistic)
    result = fitted(logistic, data, 3.0, schedule=dppvi.synchronous)
    memory = result.state.server.memory
    near = np.asarray(memory.prior_sd)[:, None] * np.asarray(memory.near)
    np.testing.assert_allclose(near @ near.T, moments(result)[1], rtol=0.05)


def mean_and_log_spread(y):
    log_spread = numpyro.sample("a_log_spread", dist.Normal(0, 1))
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, jnp.exp(log_spread)), obs=y)


@functools.cache
def released_a_record(clip):
    """A function of records, a place and how far the truth may be: mean score and information."""
    method = dppvi.FisherScoring()
    space = latents.from_model(mean_and_log_spread, {"y": jnp.zeros(3)})
    guide = AutoMultivariateNormal(mean_and_log_spread)
    family = dppvi.protocol.algorithm.guides.family_of(guide, mean_and_log_spread, space)

    @jax.jit
    def released(y, loc, near):
        told = some_told(clip)._replace(loc=loc, white=jnp.eye(2), near=near)
        visit = SimpleNamespace(told=told, family=family, secret_key=None)
        caught = SimpleNamespace(space=space, released_sum=lambda contribution, *_: contribution)
        contribution = method.visit(visit, caught).release
        keys = jax.random.split(jax.random.key(2), len(y))
        each = jax.vmap(functools.partial(contribution, space))({"y": y[:, None]}, keys)
        information = unpack(jnp.mean(each["information"], axis=0)) / np.sqrt(0.3) * clip
        return jnp.mean(each["score"], axis=0) / np.sqrt(0.5) * clip, information

    return released


@pytest.mark.slow
def test_drawn_outcomes_take_off_what_the_location_is_off():
    """A mean that is off looks like more spread; the information stays that of the location."""
    records, near = 40_000, np.diag([0.1, 0.3]).astype(np.float32)
    truth = near @ np.random.default_rng(0).choice([-1.0, 1.0], (2, records))
    y = truth[1] + np.exp(truth[0]) * np.random.default_rng(1).normal(size=records)
    released = functools.partial(released_a_record(100.0), y.astype(np.float32), jnp.zeros(2))
    score, information = released(near)
    off, at_loc = released(np.zeros_like(near))
    assert off[0] > 0.08  # the mean's variance, .09, and a little of the spread's
    assert abs(score[0]) < 0.035, score  # four of its standard errors
    np.testing.assert_allclose(information, at_loc, rtol=0.06, atol=0.03)


@grid("log_spread", [-1.0, -3.0, -10.0], quick=[2])
def test_a_spread_that_is_too_small_is_told_to_grow_however_little_the_server_knows(log_spread):
    """It was told to shrink: outcomes drawn where the mean may be lay further out than any record.

    The server thought so little known of the mean because it had learnt the information where the
    spread was wide. The smaller the spread became, the more deviations that was, and the faster it
    fell: to a ten-millionth in ten rounds, in one of thirty runs on thirty columns.
    """
    y = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    loc = np.array([log_spread, 0], np.float32)
    near = np.diag([0.0, 3.0]).astype(np.float32)
    score, _ = released_a_record(4.0)(y, loc, near)
    assert score[0] > 1, score


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the density of 'y' is multiplied:UserWarning")
def test_densities_may_be_rescaled():
    """Weighted records: the exact posterior of the normal model, raised to a power."""
    data, _ = study(normal)

    def weighted(x, y, width):
        w = numpyro.sample("w", dist.Normal(0, width).to_event(1))
        with numpyro.plate("records", x.shape[0]), numpyro.handlers.scale(scale=0.25):
            numpyro.sample("y", dist.Normal(x @ w, 0.25), obs=y)

    # A quarter of the precision of an outcome of spread 1/4 is that of one of spread 1/2.
    mean, covariance = moments(fitted(weighted, data, 1000.0))
    true_mean, true_covariance = exact(data)
    root = np.linalg.cholesky(np.linalg.inv(true_covariance))
    ratio = np.sqrt(np.linalg.eigvalsh(root.T @ covariance @ root))
    assert np.all((ratio > 0.98) & (ratio < 1.3)), ratio
    assert np.all(np.abs(root.T @ (mean - true_mean)) < 0.6)


def test_plates_over_a_part_and_masks_are_not_taken_for_scales():
    def model(y, seen):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with (
            numpyro.plate("records", 70, subsample_size=y.shape[0]),
            numpyro.handlers.mask(mask=seen),
        ):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    row = {"y": jnp.ones(20), "seen": jnp.ones(20, bool)}
    assert latents.from_model(model, row).can_draw


@pytest.mark.parametrize("method", [dppvi.FisherScoring(), dppvi.GlobalVI()])
def test_a_run_that_is_not_damped_says_so(method):
    asked = {"num_clients": 2, "num_rounds": 4, "trusted_aggregator": True, "schedule": None}
    for damping in (None, 0.2):
        run = planning.resolve(method, damping=damping, init_scale=None, **asked)
        assert run.damping == 1


def test_one_round_is_refused_before_anything_is_spent():
    """It would release scales, and leave the prior."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    assert "num_rounds must be at least 2" in refusal(model, ONE_NUMBER, num_rounds=1)
    some = {"schedule": dppvi.random_subset(2), "client_sizes": [20] * 4}
    aggregator = dppvi.TrustedAggregator(max_dropouts=2)
    for number in range(1, 4):
        options = {"num_rounds": number, "trusted_aggregator": aggregator, **some}
        budget = dppvi.PrivacyBudget(1.0)
        if number == 1:
            with pytest.raises(ValueError, match="num_rounds must be at least 2"):
                dppvi.plan_privacy(dppvi.FisherScoring(), budget, **options)
        else:
            dppvi.plan_privacy(dppvi.FisherScoring(), budget, **options)


@pytest.mark.slow
def test_draws_are_the_models_where_outcomes_are_whole_numbers():
    """Cut off to whole numbers they would have another mean, and bias the posterior by it."""

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("records", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    space = latents.from_model(model, {"y": np.ones(20, np.int32)})
    keys = jax.random.split(jax.random.key(0), 2000)
    draw = jax.vmap(
        lambda key: space.draw({"mean": jnp.asarray(0.5)}, {"y": jnp.array(1)}, key)["y"]
    )
    drawn = np.asarray(jax.jit(draw)(keys))
    assert abs(drawn.mean() - 0.5) < 5 / np.sqrt(2000)  # cut off it is 0.3
    assert abs(drawn.std() - 1) < 5 / np.sqrt(4000)


# ---------------------------------------------------------------------------------------------
# Recommendations.


def one_mean(y):
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def noise_share(trusted=False, **budget):
    """What a recommendation takes for the noise's share of the variance."""
    asked = dppvi.PrivacyBudget(1.0, **budget)
    found = dppvi.recommend(one_mean, ONE_NUMBER[0], [900, 600], asked, trusted_aggregator=trusted)
    return found.worth.together**2 - 1


@pytest.mark.slow
def test_a_recommendation_counts_the_noise_that_a_plan_has():
    alone = noise_share()
    assert noise_share(max_records_per_person=3) == pytest.approx(9 * alone)
    assert noise_share(relation="add_or_remove_one") == pytest.approx(alone / 4, rel=1e-2)
    assert noise_share(True) == pytest.approx(alone / 2)
    assert noise_share(dppvi.TrustedAggregator(max_dropouts=1)) == pytest.approx(alone)


def test_what_fit_would_refuse_is_not_recommended():
    with pytest.raises(ValueError, match="unit must be 'record'"):
        noise_share(unit="client")
    with pytest.raises(ValueError, match="max_dropouts must be below"):
        noise_share(dppvi.TrustedAggregator(max_dropouts=2))
