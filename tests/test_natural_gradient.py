"""Natural-gradient steps: closed forms in one step, lengths, and what reaches a release."""

import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi import families
from numpyro_dppvi.families import factors
from tests.dry import dry_rounds
from tests.grids import grid

EXACT = dppvi.NaturalGradient(location_rate=1.0, ridge=0.0)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def normal_mean(y):
    mean = numpyro.sample("mean", dist.Normal(0.5, 2.0))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.5), obs=y)


def counts(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 3.0))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def gamma_guide(y):
    concentration = numpyro.param("a", 2.0, constraint=dist.constraints.positive)
    rate = numpyro.param("b", 2.0, constraint=dist.constraints.positive)
    numpyro.sample("rate", dist.Gamma(concentration, rate))


def clients(draw, sizes=(30, 70, 45)):
    rng = np.random.default_rng(3)
    return [{"y": draw(rng, size)} for size in sizes]


def posterior_of_mean(data):
    y = np.concatenate([client["y"] for client in data])
    precision = 1 / 4 + len(y) / 1.5**2
    return (0.5 / 4 + y.sum() / 1.5**2) / precision, precision**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("guide", [None, "full"])
def test_one_undamped_round_of_single_steps_is_the_closed_form(x64, guide):
    data = clients(lambda rng, size: rng.normal(2.0, 1.5, size))
    method = dppvi.NonPrivate(1, EXACT, dppvi.methods.SphericalCubature())
    autoguide = numpyro.infer.autoguide.AutoMultivariateNormal(normal_mean) if guide else None
    result = dppvi.fit(
        normal_mean,
        autoguide,
        data,
        rng_key=jax.random.key(0),
        method=method,
        num_rounds=1,
        damping=1.0,
        schedule=dppvi.synchronous,
    )
    mean, stddev = posterior_of_mean(data)
    np.testing.assert_allclose(result.posterior.mean["mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(result.posterior.stddev["mean"], stddev, rtol=1e-8)


@pytest.mark.slow
def test_a_gamma_that_is_conjugate_comes_out_whole_too(x64):
    """The log likelihood is linear in (log rate, rate): many mirrored draws do not matter."""
    data = clients(lambda rng, size: rng.poisson(1.7, size))
    result = dppvi.fit(
        counts,
        gamma_guide,
        data,
        rng_key=jax.random.key(0),
        method=dppvi.NonPrivate(1, EXACT, dppvi.MonteCarlo(2000)),
        num_rounds=1,
        damping=1.0,
        schedule=dppvi.synchronous,
    )
    total, number = sum(c["y"].sum() for c in data), sum(len(c["y"]) for c in data)
    # Implicit derivatives of gamma draws estimate the exact gradient: within four standard errors.
    np.testing.assert_allclose(result.posterior.mean["rate"], (2 + total) / (3 + number), rtol=0.05)


VIRTUAL = (dppvi.VirtualClients, 20.0)
AVERAGING = (dppvi.methods.LocalAveraging, (600.0, 1400.0, 900.0))


@pytest.mark.parametrize(
    ("trusted_aggregator", "method", "clip_norm"),
    [
        pytest.param(True, *VIRTUAL, id="True-virtual"),
        pytest.param(False, *AVERAGING, id="False-averaging", marks=pytest.mark.slow),
        pytest.param(False, *VIRTUAL, id="False-virtual", marks=pytest.mark.slow),
        pytest.param(True, *AVERAGING, id="True-averaging", marks=pytest.mark.slow),
    ],
)
def test_without_clip_shards_of_one_record_are_exact(x64, method, clip_norm, trusted_aggregator):
    """Without noise, too: the sum, or the mean, of what the shards say is the posterior."""
    data = clients(lambda rng, size: rng.normal(2.0, 1.5, size))
    sizes = tuple(len(client["y"]) for client in data)
    fitted = dppvi.fit(
        normal_mean,
        None,
        data,
        rng_key=jax.random.key(0),
        method=method(sizes, clip_norm, 1, EXACT, dppvi.methods.SphericalCubature()),
        budget=dppvi.PrivacyBudget(math.inf),
        num_rounds=1,
        damping=1.0,
        schedule=dppvi.synchronous,
        trusted_aggregator=trusted_aggregator,
    ).posterior
    mean, stddev = posterior_of_mean(data)
    np.testing.assert_allclose(fitted.mean["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(fitted.stddev["mean"], stddev, rtol=1e-4)


def test_lengths_are_those_of_moved_means(x64):
    """A change of the location alone by d has length sqrt(d' (precision + ridge) d)."""
    family = families.MeanField((("w", families.DiagonalNormal((2,))),))
    here = {"w": families.NormalCoordinates(jnp.array([0.3, -1.0]), jnp.log(jnp.array([0.1, 2.0])))}
    there = {"w": here["w"]._replace(loc=here["w"].loc + jnp.array([0.02, 0.5]))}
    q = family.natural(here)
    change = factors.divide(family.natural(there), q)
    rule = dppvi.NaturalGradient(ridge=20.0)
    found = rule.measured(family, q, change)
    expected = (1 / 0.1**2 + 20) * 0.02**2 + (1 / 2.0**2 + 20) * 0.5**2
    np.testing.assert_allclose(factors.inner(found, found), expected, rtol=1e-9)
    back = rule.unmeasured(family, q, found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), back, change)


@pytest.mark.slow
def test_what_is_released_moves_by_the_clip_at_most_in_those_units(x64):
    """Two data sets that differ in one record, no noise, one visit each."""
    common = np.random.default_rng(3).normal(2.0, 1.5, 29)
    rule = dppvi.NaturalGradient(location_rate=1.0, ridge=5.0, spread_weight=3.0)
    ends = []
    for last in (-1e3, 1e3):
        records = [{"y": np.append(common, last)}]
        result = dppvi.fit(
            normal_mean,
            None,
            records,
            rng_key=jax.random.key(0),
            method=dppvi.VirtualClients(30, 0.01, 1, rule, dppvi.methods.SphericalCubature()),
            budget=dppvi.PrivacyBudget(math.inf),
            num_rounds=1,
            damping=1.0,
        )
        ends.append(result.posterior.natural)
    family = result.posterior.family
    prior = family.natural({"mean": families.NormalCoordinates(jnp.array(0.5), jnp.log(2.0))})
    moved = rule.measured(family, prior, factors.divide(*ends))
    length = float(jnp.sqrt(factors.inner(moved, moved)))
    assert 0.015 < length <= 0.02  # from one side of the ball nearly to the other


@pytest.mark.slow
def test_diagnostics_replay_the_noise_in_the_same_units():
    """One latent far narrower than its prior: the replayed noise is of the size that was added."""
    data = clients(lambda rng, size: rng.normal(2.0, 1.5, size), sizes=(400, 400))
    rule = dppvi.NaturalGradient(location_rate=1.0, ridge=0.0)
    result = dppvi.fit(
        normal_mean,
        None,
        data,
        rng_key=jax.random.key(0),
        method=dppvi.VirtualClients((400, 400), 0.05, 1, rule, dppvi.methods.SphericalCubature()),
        budget=dppvi.PrivacyBudget(8.0),
        num_rounds=8,
        damping=0.5,
        schedule=dppvi.synchronous,
        insecure_noise_seed=0,
    )
    noise = float(dppvi.diagnose(result).noise["mean"])
    # Eight rounds of two clients' noise, in posterior standard deviations of the last round.
    added = result.plan.noise_std[0] * 0.5 * np.sqrt(2 * 8)
    assert 0.3 * added < noise < 3 * added


def test_noise_under_an_aggregator_covers_whoever_moves_the_mean_furthest():
    """Theorem 6 with a clip a client: 2 max(C_m / N_m), in equal shares."""
    plan = dppvi.plan_privacy(
        dppvi.methods.LocalAveraging((10, 40, 20), (0.1, 0.8, 0.2)),
        dppvi.PrivacyBudget(1.0),
        num_rounds=4,
        client_sizes=[10, 40, 20],
        schedule=dppvi.synchronous,
        trusted_aggregator=True,
    )
    for client in plan.clients:
        np.testing.assert_allclose(client.mechanism.sensitivity("replace_one"), 2 * 0.8 / 40)
        share = client.mechanism.noise_multiplier * 0.8 / 40 / np.sqrt(3)
        np.testing.assert_allclose(client.mechanism.share_std, share)


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (lambda: dppvi.NaturalGradient(0.0), "location_rate must lie above 0"),
        (lambda: dppvi.NaturalGradient(0.2, -1.0), "ridge must be a number between 0 and"),
        (lambda: dppvi.NaturalGradient(0.2, 1.0, 0.0), "spread_weight must be a number above 0"),
        (lambda: dppvi.DPOptimization(optimizer=EXACT), "optimizer must be an optax optimiser"),
        (lambda: dppvi.VirtualClients(3, optimizer=dppvi.NaturalGradient), "NaturalGradient"),
    ],
)
def test_refusals(made, error):
    with pytest.raises((ValueError, TypeError), match=error):
        made()


class TestUnsafe:
    """Without an aggregator, noise has thrown posteriors far off: docs/methods.md has the cases."""

    words = "^natural gradients without a trusted aggregator are unsafe: single rounds of noise"
    local = dppvi.VirtualClients((6, 6), 0.1, 1, dppvi.NaturalGradient())
    budget = dppvi.PrivacyBudget(1.0)

    def fit(self, method=local, budget=budget, **options):
        data = {"y": np.zeros(12)}
        key, settings = jax.random.key(0), {"num_rounds": 1, "clients": 2, **options}
        with warnings.catch_warnings(record=True) as told, dry_rounds():
            warnings.simplefilter("always")
            dppvi.fit(
                normal_mean, None, data, rng_key=key, method=method, budget=budget, **settings
            )
        return [str(warning.message) for warning in told]

    @pytest.mark.slow
    def test_fit_and_plan_say_so_once(self):
        (said,) = self.fit()
        assert re.match(self.words, said)
        with pytest.warns(UserWarning, match=self.words) as told:
            dppvi.plan_privacy(self.local, self.budget, num_rounds=1, client_sizes=[6, 6])
        assert len(told) == 1

    @pytest.mark.slow
    @grid(
        "method",
        [
            dppvi.methods.ParameterPerturbation(0.1, 1, dppvi.NaturalGradient()),
            dppvi.methods.LocalAveraging(6, 0.1, 1, dppvi.NaturalGradient()),
        ],
        quick=[0],
    )
    def test_of_every_method_that_takes_them(self, method):
        assert [said for said in self.fit(method) if re.match(self.words, said)]

    @grid(
        ("method", "budget", "options"),
        [
            (local, budget, {"trusted_aggregator": True, "schedule": dppvi.synchronous}),
            (local, dppvi.PrivacyBudget(math.inf), {}),
            (dppvi.VirtualClients((6, 6), 0.1, 1), budget, {}),
            (dppvi.NonPrivate(1, dppvi.NaturalGradient()), None, {}),
        ],
        ids=["with an aggregator", "without noise", "with Adam", "without privacy"],
        quick=[1, 2],
    )
    def test_of_nothing_else(self, method, budget, options):
        assert self.fit(method, budget, **options) == []

    def test_reproductions_silence_it_as_it_says(self):
        (said,) = self.fit()
        call = said[said.index("warnings.filterwarnings(") :].removesuffix(".")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            eval(call, {"warnings": warnings})
            dppvi.plan_privacy(self.local, self.budget, num_rounds=1, client_sizes=[6, 6])
        assert told == []
