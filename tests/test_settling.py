"""Runs without privacy end when they have settled, or say that they have not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_dppvi as dppvi
from numpyro_dppvi._typing import Natural
from numpyro_dppvi.families import Bernoulli, DiagonalNormal, MeanField
from numpyro_dppvi.families.diagonal_normal import NormalNatural
from numpyro_dppvi.protocol.planning import MOST_TO_SETTLE
from numpyro_dppvi.run import settling
from numpyro_dppvi.run.history import History, Outcome, Status, status_of
from tests.dry import dry_rounds

FAMILY = MeanField((("x", DiagonalNormal((2,))),))
COURSE = settling.Course(FAMILY, 1.0, until_settled=True)


def history(means, log_sds=0.0):
    """The history of a q with these means; shape (rounds, 2)."""
    means = np.asarray(means, np.float32)
    precision = np.exp(-2 * np.broadcast_to(np.asarray(log_sds, np.float32), means.shape))
    zeros = np.zeros(len(means))
    natural = Natural({"x": NormalNatural(means * precision, -0.5 * precision)})
    return History(natural, zeros, zeros, zeros, zeros)


class TestTheWay:
    @pytest.mark.parametrize("ratio", [0.9, 0.97])
    def test_of_a_path_that_falls_by_one_ratio_it_is_the_sum_of_the_series(self, ratio):
        rounds = np.arange(60)
        far = 3.0 / ratio**59
        means = np.stack([far * ratio**rounds, 0 * rounds], 1)
        found = settling.way(history(means), FAMILY, 1.0)
        # Blocks are ten rounds long, and the last one's mean is before its end.
        left = 3.0 * ratio ** -np.arange(10.0).mean()
        assert found.left == pytest.approx(left, rel=0.4)
        assert found.left > 3.0

    def test_a_path_that_goes_on_at_one_speed_is_never_near_its_end(self):
        means = np.stack([0.05 * np.arange(40), np.zeros(40)], 1)
        assert settling.way(history(means), FAMILY, 1.0).left > 5
        assert not COURSE.look(history(means))

    def test_standard_deviations_count(self):
        log_sds = np.stack([-0.05 * np.arange(40), np.zeros(40)], 1)
        assert settling.way(history(np.zeros((40, 2)), log_sds), FAMILY, 1.0).left > 2

    def test_means_count_in_standard_deviations(self):
        means = np.stack([0.95 ** np.arange(40), np.zeros(40)], 1)
        left = settling.way(history(means), FAMILY, 1.0).left
        narrow = settling.way(history(means, np.log(0.1)), FAMILY, 1.0).left
        assert narrow == pytest.approx(10 * left, rel=1e-3)

    @pytest.mark.slow
    def test_noise_alone_settles_and_is_told(self):
        """Fixed seed; about one such path in a hundred goes on to round 100."""
        rng = np.random.default_rng(0)
        late = 0
        for _ in range(30):
            means = 0.1 * rng.normal(size=(100, 2))
            ends = [n for n in range(101) if COURSE.look(history(means[:n]))]
            late += not ends
            assert settling.way(history(means), FAMILY, 1.0).noise == pytest.approx(0.1, rel=0.6)
        assert late <= 1

    @pytest.mark.slow
    def test_noise_does_not_hide_a_path(self):
        """Fixed seed; none of twenty runs ends half a standard deviation and more too early."""
        rng = np.random.default_rng(1)
        early = 0
        for _ in range(20):
            means = 4 * 0.96 ** np.arange(160)[:, None] + 0.1 * rng.normal(size=(160, 2))
            ends = [n for n in range(161) if COURSE.look(history(means[:n]))]
            early += 4 * 0.96 ** (ends[0] if ends else 160) > 0.5
        assert not early

    @pytest.mark.slow
    @pytest.mark.parametrize(("slow", "most"), [(0.995, 6), (0.99, 1)])
    def test_a_creep_that_draws_make_a_walk_of_is_seen(self, slow, most):
        """Fixed seed; of their last halves alone, 19 and 10 of 20 such paths seemed to arrive."""
        rng, early = np.random.default_rng(3), 0
        for _ in range(20):
            x, path = 3.0, []
            for _ in range(160):
                x = slow * x + 0.02 * rng.normal()
                path.append((x, 0.0))
            early += any(COURSE.look(history(path[:n])) for n in range(15, 161, 5))
        assert early <= most

    def test_few_rounds_and_broken_ones_say_nothing(self):
        assert settling.way(history(np.zeros((5, 2))), FAMILY, 1.0) is None
        assert settling.way(history(np.full((20, 2), np.nan)), FAMILY, 1.0) is None
        assert not COURSE.look(history(np.full((20, 2), np.nan)))


class TestDraws:
    @pytest.mark.slow
    def test_rounds_are_averaged_where_draws_move_q(self):
        """Fixed seed; draws scatter this q by .09, and rounds remember each other."""
        rng, start, slow = np.random.default_rng(2), 3.0, 0.75
        ends = []
        for _ in range(40):
            course, arrival = COURSE, None
            x, path = np.array([start, start]), []
            while len(path) < 160 and not (arrival and arrival.ends(len(path))):
                share = 1.0 if arrival is None else arrival.share(len(path))
                x = x + share * ((slow - 1) * x + 0.06 * rng.normal(size=2))
                path.append(x)
                arrival = arrival or course.look(history(path))
            assert arrival is not None
            ends.append(x)
        assert np.std(ends) < 0.7 * settling.CLOSE
        assert np.quantile(np.abs(ends), 0.95) < 1.3 * settling.CLOSE

    def test_without_draws_every_change_counts_in_full(self):
        means = np.stack([3 * 0.5 ** np.arange(40), np.zeros(40)], 1)
        arrival = COURSE.arrival(history(means))
        assert arrival.ends(arrival.round)
        assert arrival.share(arrival.round) == arrival.share(39) == 1.0
        np.testing.assert_array_equal(settling.shares(history(means), FAMILY, 0.4), 0.4)

    def test_what_draws_leave_falls_with_every_round(self):
        way = settling.Way(left=0.0, noise=0.1, hidden=0.1, lasting=0.3)
        arrival = settling.Arrival(60, way, damping=1.0, until_settled=True)
        left = [arrival.noise(rounds) for rounds in range(60, 160)]
        assert left[0] == 0.3
        assert np.all(np.diff(left) < 0)
        assert left[-1] < settling.CLOSE

    @pytest.mark.slow
    def test_of_one_draw_a_step_the_mean_is_exact_nearly(self):
        y = np.random.default_rng(0).normal(3, 1, 90)
        one = dppvi.NonPrivate(expectation=dppvi.methods.MonteCarlo(1))
        result = run(one_mean, {"y": y}, clients=3, method=one)
        precision = 90 + 1 / 100
        off = (result.posterior.mean["mu"] - y.sum() / precision) * precision**0.5
        assert abs(off) < settling.CLOSE
        assert result.status.rounds > 60
        # Steps before damping, of which the last ones are merged in small parts.
        residual = dppvi.diagnose(result).residual
        assert residual[-20:].mean() > 0.3 * residual[40:60].mean()

    @pytest.mark.slow
    def test_draws_that_still_matter_at_the_end_are_said(self):
        y = np.random.default_rng(0).normal(3, 1, 90)
        one = dppvi.NonPrivate(expectation=dppvi.methods.MonteCarlo(1))
        result = run(one_mean, {"y": y}, clients=3, method=one, num_rounds=61)
        assert result.status.noise > 0.1
        assert result.status.outcome is dppvi.run.Outcome.UNSETTLED
        assert "expectation=MonteCarlo(100)), and leave num_rounds out." in str(result.status)


def one_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def far_from_zero(x, y):
    """An intercept and a slope that depend on each other closely."""
    b = numpyro.sample("b", dist.Normal(0, 100).expand([2]).to_event(1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, 1), obs=y)


def columns(shift, spread=1.0):
    rng = np.random.default_rng(0)
    x = shift + spread * rng.normal(size=200)
    return {"x": x, "y": 2 - 0.5 * x + rng.normal(size=200)}


def emax(dose, y):
    """Doses far above the ED50: what is known is e0 + emax, and hardly either of them alone."""
    ed50 = numpyro.sample("ed50", dist.LogNormal(3, 1))
    e0 = numpyro.sample("e0", dist.Normal(0, 10))
    largest = numpyro.sample("emax", dist.Normal(0, 20))
    spread = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(e0 + largest * dose / (ed50 + dose), spread), obs=y)


def exact_line(data):
    X = np.stack([np.ones(200), data["x"]], 1)
    precision = X.T @ X + np.eye(2) / 1e4
    return np.linalg.solve(precision, X.T @ data["y"]), np.diag(precision) ** -0.5


def run(model, data, **changes):
    arguments = {"clients": 2, "method": dppvi.NonPrivate(), "progress_bar": False, **changes}
    return dppvi.fit(model, None, data, rng_key=jax.random.key(0), **arguments)


class TestRuns:
    @pytest.mark.slow
    def test_a_conjugate_model_settles_at_once(self):
        y = np.random.default_rng(0).normal(3, 1, 90)
        result = run(one_mean, {"y": y}, clients=3)
        assert result.status.rounds == 15
        assert result.status.num_rounds == MOST_TO_SETTLE
        assert str(result.status) == (
            "The posterior has settled after 15 rounds and every merge was accepted."
        )
        precision = 90 + 1 / 100
        assert result.posterior.mean["mu"] == pytest.approx(y.sum() / precision, abs=1e-4)
        assert result.posterior.stddev["mu"] == pytest.approx(precision**-0.5, rel=1e-3)

    @pytest.mark.slow
    def test_scales_that_differ_by_orders_of_magnitude_do_not_matter(self):
        data = columns(0.0, 1e4)
        result = run(far_from_zero, data)
        mean, sd = exact_line(data)
        off = np.abs(np.asarray(result.posterior.mean["b"], float) - mean) / sd
        assert result.status.outcome is dppvi.run.Outcome.COMPLETED
        assert off.max() < settling.CLOSE
        np.testing.assert_allclose(result.posterior.stddev["b"], sd, rtol=0.01)

    @pytest.mark.slow
    def test_small_rounds_go_on_until_they_have_arrived(self):
        data = columns(5.0)
        result = run(far_from_zero, data)
        mean, sd = exact_line(data)
        off = np.abs(np.asarray(result.posterior.mean["b"], float) - mean) / sd
        assert result.status.rounds > 30
        assert off.max() < settling.CLOSE

    @pytest.mark.slow
    def test_a_run_that_does_not_arrive_says_how_far_it_is(self):
        data = columns(30.0)
        result = run(far_from_zero, data)
        mean, sd = exact_line(data)
        off = np.abs(np.asarray(result.posterior.mean["b"], float) - mean) / sd
        assert result.status.outcome is dppvi.run.Outcome.UNSETTLED
        assert result.status.left > 0.3 * off.max() > 0.3
        assert str(result.status).startswith(
            "All 160 rounds ran, but the posterior has not settled: rounds are small and many"
        )
        assert "guide=AutoMultivariateNormal(model)" in str(result.status)
        assert "or center the data's columns" in str(result.status)
        assert str(result.status).endswith("or write num_rounds=640.")

    @pytest.mark.slow
    def test_the_ridge_of_a_dose_response_model_is_no_end(self):
        """From the last half alone it was declared settled after 36 rounds, .13 off."""
        rng = np.random.default_rng(19)
        dose = 1000 * rng.choice([0.03, 0.1, 0.3, 1], 1000)
        data = {"dose": dose, "y": 2 + 10 * dose / (5 + dose) + 4 * rng.normal(size=1000)}
        result = dppvi.fit(
            emax, None, data, rng_key=jax.random.key(19), clients=5, method=dppvi.NonPrivate(),
            progress_bar=False,
        )  # fmt: skip
        # The optimum for independent normals: BFGS in 64 bits, at 1024 quasi-random draws.
        mean, sd = 10.0024, 0.1260
        # It creeps along the ridge: at the limit of 160 rounds it is there, and not sure of it.
        assert result.status.rounds > 60
        assert abs(result.posterior.mean["e0"] - mean) < 0.1 * sd

    @pytest.mark.slow
    def test_a_number_of_rounds_is_exact(self):
        data = columns(5.0)
        short = run(far_from_zero, data, num_rounds=20)
        assert short.status.rounds == 20
        assert short.status.outcome is dppvi.run.Outcome.UNSETTLED
        assert "Leave num_rounds out" in str(short.status)
        free = run(far_from_zero, data)
        again = run(far_from_zero, data, num_rounds=free.status.rounds)
        np.testing.assert_array_equal(again.posterior.mean["b"], free.posterior.mean["b"])

    @pytest.mark.slow
    def test_a_private_run_has_ten(self):
        y = np.zeros(60)
        budget = dppvi.PrivacyBudget(1.0)
        with dry_rounds():
            result = run(one_mean, {"y": y}, method=dppvi.DPOptimization(), budget=budget)
        assert result.status.rounds == result.status.num_rounds == 10
        assert result.status.left is None

    @pytest.mark.slow
    def test_changes_are_damped_where_several_are_made_at_once(self):
        data = {"y": np.zeros(20)}
        arguments = {"num_rounds": 1, "method": dppvi.NonPrivate(1)}
        assert run(one_mean, data, **arguments).run.damping == 1
        assert run(one_mean, data, **arguments, schedule=dppvi.synchronous).run.damping == 0.4
        late = dppvi.Asynchronous((1.0, 2.0))
        assert run(one_mean, data, **arguments, schedule=late).run.damping == 0.4


class TestCheckpoints:
    @pytest.mark.slow
    def test_a_resumed_run_ends_where_an_uninterrupted_one_ends(self, tmp_path, monkeypatch):
        data = columns(5.0)
        whole = run(far_from_zero, data)
        path = tmp_path / "run.npz"
        looks = settling.Course.look

        def dies(course, history):
            if len(history.movement) == 22:
                raise RuntimeError("killed")
            return looks(course, history)

        with monkeypatch.context() as patch:
            patch.setattr(settling.Course, "look", dies)
            with pytest.raises(RuntimeError, match="killed"):
                run(far_from_zero, data, checkpoint=path)
        resumed = run(far_from_zero, data, checkpoint=path)
        assert resumed.status == whole.status
        np.testing.assert_array_equal(resumed.history.movement, whole.history.movement)
        # A run that has ended runs nothing more.
        again = run(far_from_zero, data, checkpoint=path)
        assert again.status.rounds == whole.status.rounds

    @pytest.mark.slow
    def test_without_privacy_more_rounds_may_follow_at_any_time(self, tmp_path):
        data, path = columns(0.0), tmp_path / "run.npz"
        first = run(far_from_zero, data, checkpoint=path)
        assert first.status.rounds < MOST_TO_SETTLE
        more = run(far_from_zero, data, checkpoint=path, num_rounds=MOST_TO_SETTLE + 1)
        assert more.status.rounds == MOST_TO_SETTLE + 1
        np.testing.assert_array_equal(
            more.history.movement[: first.status.rounds], first.history.movement
        )


def test_nothing_is_compiled_for_another_number_of_rounds():
    data = columns(5.0)
    with jax.log_compiles(False):
        run(far_from_zero, data)
    before = settling._moments._cache_size()
    run(far_from_zero, data, num_rounds=41)
    assert settling._moments._cache_size() == before


@pytest.mark.slow
def test_an_optimizer_that_is_named_is_used():
    data = columns(0.0)
    newton = run(far_from_zero, data, num_rounds=1, damping=0.4)
    adam = dppvi.NonPrivate(optimizer=optax.adam(0.05))
    slow = run(far_from_zero, data, num_rounds=1, damping=0.4, method=adam)
    assert jnp.abs(newton.posterior.mean["b"] - slow.posterior.mean["b"]).max() > 1e-3


def test_a_discrete_latent_that_is_certain_does_not_move():
    family = MeanField((("z", Bernoulli(())),))
    log_odds = np.linspace(8, 30, 60, dtype=np.float32)
    zeros = np.zeros(60)
    natural = Natural({"z": Bernoulli(()).natural(log_odds)})
    found = settling.way(History(natural, zeros, zeros, zeros, zeros), family, 1.0)
    assert found.left < settling.CLOSE


def test_draws_that_keep_moving_q_are_told_from_a_path():
    zeros = np.zeros(20, int)
    moved = History(Natural({}), np.full(20, 0.04), zeros, zeros, zeros)
    status = status_of(moved, 20, False, False, left=0.0)
    assert status.outcome is dppvi.run.Outcome.UNSETTLED
    assert str(status).startswith(
        "20 rounds ran, and draws of the latents still move the posterior"
    )
    assert "by 0.2 of its standard deviations" in str(status)
    assert "expectation=MonteCarlo(100)), and leave num_rounds out." in str(status)


@pytest.mark.parametrize(("last", "outcome"), [(3, "COMPLETED"), (12, "DIVERGED")])
def test_a_visit_that_fails_before_the_path_arrives_is_forgiven(last, outcome):
    zeros = np.zeros(20, int)
    failed = np.where(np.arange(20) == last, 2, 0)
    happened = History(Natural({}), np.full(20, 1e-6), zeros, zeros, failed)
    status = status_of(
        happened, 160, False, False, left=0.0, noise=0.0, arrived_since=11, until_settled=True
    )
    assert status.outcome is dppvi.run.Outcome[outcome]
    if outcome == "COMPLETED":
        assert str(status) == (
            "The posterior has settled after 20 rounds. In early rounds 2 visits failed; the "
            "posterior has recovered since."
        )
    else:
        assert str(status).startswith("The run ended after 20 rounds. 2 visits ended in no finite")


@pytest.mark.parametrize(
    ("rounds", "noise", "told"), [(160, 0.036, True), (160, 0.02, False), (120, 0.036, False)]
)
def test_the_status_says_what_draws_leave_where_the_limit_ends_a_run(rounds, noise, told):
    status = Status(
        Outcome.COMPLETED, rounds, 160, 0, 0, 0, False, until_settled=True, noise=noise, left=0.01
    )
    assert str(status).startswith(f"The posterior has settled after {rounds} rounds")
    assert ("an error of about 0.04 of a standard deviation" in str(status)) == told
    assert ("num_rounds=320" in str(status)) == told
