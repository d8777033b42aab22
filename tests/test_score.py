"""``score``: exact without noise, noise as planned, charged first, and no record moves it far."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import log_likelihood
from scipy import stats

import numpyro_dppvi as dppvi
from numpyro_dppvi.analysis import scoring
from tests.grids import grid

KEY = jax.random.key(0)
NO_NOISE = dppvi.PrivacyBudget(math.inf)
SIZES = (40, 25)
NUM_DRAWS = 50
# Right noise fails a test of its law on a fresh seed with this probability; seeds are fixed.
ALPHA = 1e-4


def classes(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=y)


def yes_or_no(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def sizes_of(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, spread), obs=y)


def counts(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def penalised(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("records", X.shape[0]):
        numpyro.factor("y", -((y - X @ w) ** 2))


def held_back(model):
    """Records of two clients; floats, so that hostile outcomes fit in."""
    rng = np.random.default_rng(1)
    parts = [{"X": rng.normal(size=(size, 2)).astype(np.float32)} for size in SIZES]
    for part in parts:
        y = part["X"] @ [1.0, -1.0]
        kinds = {
            classes: lambda y: np.clip(np.round(1 + y), 0, 2).astype(np.int32),
            yes_or_no: lambda y: rng.binomial(1, 1 / (1 + np.exp(-y))),
            counts: lambda y: rng.poisson(np.exp(y)),
        }
        part["y"] = kinds.get(model, lambda y: y)(y)
        if model is not classes:
            part["y"] = part["y"].astype(np.float32)
    return parts


def posterior_of(model):
    """The prior as posterior: wide, so that draws matter, and made of one cheap round."""
    data = held_back(model)
    state = dppvi.pvi(model, None, data[0], method=dppvi.NonPrivate(), client_sizes=SIZES)
    return state.posterior(state.init(KEY))


class Posteriors(dict):
    """By model, each made when it is first asked for."""

    def __missing__(self, model):
        self[model] = posterior_of(model)
        return self[model]


@pytest.fixture(scope="module")
def posteriors():
    return Posteriors()


def score(posterior, data, budget=NO_NOISE, **rest):
    return dppvi.score(posterior, data, budget=budget, rng_key=KEY, num_samples=NUM_DRAWS, **rest)


def exact(posterior, parts):
    """Each record's log predictive density, from NumPyro's log likelihoods."""
    draws = posterior.sample(jax.random.split(KEY, 3)[0], (NUM_DRAWS,))
    mean = jax.jit(
        lambda part: jax.nn.logsumexp(log_likelihood(posterior.model, draws, **part)["y"], axis=0)
    )
    return np.concatenate([mean(part) - math.log(NUM_DRAWS) for part in parts])


class TestWithoutNoise:
    @pytest.mark.slow
    @grid("model", [classes, yes_or_no, sizes_of, counts, penalised], quick=[1])
    def test_the_mean_is_that_of_numpyros_log_likelihood(self, posteriors, model):
        data, posterior = held_back(model), posteriors[model]
        each = exact(posterior, data)
        ends = (float(each.min()) - 1, float(each.max()) + 1)
        found = score(posterior, data, score_range=ends)
        assert found.log_density.value == pytest.approx(each.mean(), abs=1e-4)
        for mine, part in zip(found.by_client, np.split(each, [SIZES[0]]), strict=True):
            assert mine.value == pytest.approx(part.mean(), abs=1e-4)
        assert found.clipped.value == pytest.approx(0, abs=1e-4)
        assert {found.log_density.stderr, found.clipped.stderr} == {0.0}
        assert (found.accuracy is None) == (model not in (classes, yes_or_no))

    def test_what_is_clipped_is_counted(self, posteriors):
        data, posterior = held_back(sizes_of), posteriors[sizes_of]
        each = exact(posterior, data)
        low, high = np.quantile(each, [0.2, 0.9])
        found = score(posterior, data, score_range=(low, high))
        assert found.log_density.value == pytest.approx(np.clip(each, low, high).mean(), abs=1e-4)
        assert found.clipped.value == pytest.approx(np.mean((each < low) | (each > high)), abs=1e-4)
        assert "Many records were clipped" in " ".join(str(found).split())

    @pytest.mark.slow
    @grid("model", [classes, yes_or_no], quick=[1])
    def test_accuracy_is_that_of_the_likeliest_class(self, posteriors, model):
        data, posterior = held_back(model), posteriors[model]
        values = range(3) if model is classes else range(2)
        as_if = [[{**part, "y": np.full_like(part["y"], k)} for part in data] for k in values]
        likeliest = np.argmax([exact(posterior, parts) for parts in as_if], axis=0)
        observed = np.concatenate([part["y"] for part in data])
        found = score(posterior, data)
        assert found.accuracy.value == pytest.approx(np.mean(observed == likeliest), abs=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", [classes, yes_or_no, sizes_of, counts])
    def test_the_default_range_holds_what_the_posterior_expects(self, posteriors, model):
        found = score(posteriors[model], held_back(model))
        low, high = found.score_range
        assert 4 < high - low < 15
        assert high == 0 or model is sizes_of
        assert found.clipped.value < 0.1

    @pytest.mark.slow
    def test_records_spread_no_more_than_the_limit(self, posteriors):
        data = held_back(counts)
        each, found = exact(posteriors[counts], data), score(posteriors[counts], data)
        assert np.std(np.clip(each, *found.score_range)) / math.sqrt(len(each)) <= (
            found.sampling_stderr
        )


# ---------------------------------------------------------------------------------------------
# Noise.


def pieces(posterior, data, budget, ends=(-6.0, 0.0), num_shares=None):
    """Everything that a release is made of."""
    shards = dppvi.records.stack_clients(data)
    planned = dppvi.privacy.plan.of_gradients(
        dppvi.privacy.budget.budget_of_each(budget, len(SIZES)),
        dppvi.FullBatch(),
        clip_norm=scoring._longest(posterior.space),
        releases_per_visit=1,
        num_visits=[1] * len(SIZES),
        client_sizes=SIZES,
        num_shares=num_shares,
    )
    draws = posterior.sample(KEY, (NUM_DRAWS,))
    return posterior.space, draws, shards, ends, planned


def is_standard(errors):
    """Whether the errors' squares add up to what standard normal draws may give."""
    below = stats.chi2(len(errors)).cdf(np.sum(errors**2))
    return 2 * min(below, 1 - below) > ALPHA


@pytest.mark.parametrize("num_shares", [None, pytest.param(len(SIZES), marks=pytest.mark.slow)])
def test_noise_is_as_large_as_is_said(posteriors, num_shares):
    """Errors over their standard errors are standard normal, estimate by estimate."""
    budgets = [dppvi.PrivacyBudget(1.0), dppvi.PrivacyBudget(3.0, max_records_per_person=2)]
    arguments = pieces(posteriors[yes_or_no], held_back(yes_or_no), budgets, num_shares=num_shares)
    truth = scoring._released(*arguments[:4], without_noise(arguments[4]), jax.random.key(0))

    def packed(noisy):
        found = scoring._packed(noisy, *arguments[3:], None, is_sum=num_shares is not None)
        return [found.log_density, found.accuracy, found.clipped, *found.by_client]

    true = packed(truth)
    errors = []
    for seed in range(100):
        noisy = packed(scoring._released(*arguments, jax.random.key(seed)))
        errors.append(
            [(mine.value - t.value) / mine.stderr for mine, t in zip(noisy, true, strict=True)]
        )
    errors = np.array(errors)
    assert errors.shape[1] == (5 if num_shares is None else 3)
    for column in errors.T:
        below = stats.chi2(len(column)).cdf(np.sum(column**2))
        assert min(below, 1 - below) * 2 > ALPHA
    # Entries of one vector have noise of their own.
    assert abs(np.corrcoef(errors[:, :3].T)[np.triu_indices(3, 1)]).max() < 0.45


def without_noise(planned):
    """The same plan with noise multipliers of zero."""
    clients = tuple(
        dataclasses.replace(c, mechanism=dataclasses.replace(c.mechanism, noise_multiplier=0.0))
        for c in planned.clients
    )
    return dataclasses.replace(planned, clients=clients)


def test_clients_and_seeds_have_noise_of_their_own(posteriors):
    arguments = pieces(posteriors[yes_or_no], held_back(yes_or_no), dppvi.PrivacyBudget(1.0))
    exact_plan = without_noise(arguments[4])
    truth = scoring._released(*arguments[:4], exact_plan, jax.random.key(0))
    one, other = (scoring._released(*arguments, jax.random.key(s)) - truth for s in (0, 1))
    assert np.all(np.abs(one - other) > 1e-6)
    assert np.all(np.abs(np.diff(one, axis=0)) > 1e-6)


@pytest.mark.slow
def test_noise_is_secret_unless_a_seed_is_given(posteriors):
    data, posterior = held_back(counts), posteriors[counts]
    budget = dppvi.PrivacyBudget(1.0)
    drawn = [score(posterior, data, budget).log_density for _ in range(2)]
    seeded = [score(posterior, data, budget, insecure_noise_seed=1).log_density for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert seeded[0] == seeded[1]


@pytest.mark.slow
def test_an_aggregator_hides_clients_and_lowers_the_noise(posteriors):
    data, posterior = held_back(counts), posteriors[counts]
    alone = score(posterior, data, dppvi.PrivacyBudget(1.0))
    together = score(posterior, data, dppvi.PrivacyBudget(1.0), trusted_aggregator=True)
    assert together.by_client == ()
    assert len(alone.by_client) == 2
    # One sum with one noise in the place of one for each of two clients.
    ratio = alone.log_density.stderr / together.log_density.stderr
    assert ratio == pytest.approx(math.sqrt(2))


# ---------------------------------------------------------------------------------------------
# Costs.


@pytest.mark.slow
def test_the_cost_is_the_budget(posteriors):
    budgets = [dppvi.PrivacyBudget(0.5), dppvi.PrivacyBudget(2.0, 1e-6, "add_or_remove_one")]
    found = score(posteriors[counts], held_back(counts), budgets)
    assert np.all(found.ledger.spent() <= [0.5, 2.0])
    assert found.ledger.spent() == pytest.approx([0.5, 2.0], rel=1e-3)
    assert "epsilon = 2.0000 at delta = 1e-06 for one record of client 1" in str(found)


def test_a_ledger_file_is_charged_before_anything_is_computed(posteriors, tmp_path, monkeypatch):
    data, posterior, path = held_back(counts), posteriors[counts], tmp_path / "ledger"
    budget = dppvi.PrivacyBudget(1.0)
    spent = []

    def computes(*_):
        file = dppvi.privacy.LedgerFile(path)
        spent.append(file.open(dppvi.privacy.Ledger((budget,) * 2)).spent())
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "_vectors", computes)
        with pytest.raises(RuntimeError, match="killed"):
            score(posterior, data, budget, ledger_file=path)
    assert spent[0] == pytest.approx([1.0, 1.0], rel=1e-3)
    with pytest.raises(dppvi.BudgetExceededError, match="budget is used up"):
        score(posterior, data, budget, ledger_file=path)
    # With a larger budget the noise is that of what is left.
    more = score(posterior, data, dppvi.PrivacyBudget(2.0), ledger_file=path)
    fresh = score(posterior, data, dppvi.PrivacyBudget(2.0))
    assert more.ledger.spent() == pytest.approx([2.0, 2.0], rel=2e-3)
    assert more.log_density.stderr > fresh.log_density.stderr
    assert "Earlier runs on the same ledger file" in " ".join(str(more).split())


# ---------------------------------------------------------------------------------------------
# Hostile records.

MAX = float(np.finfo(np.float32).max)
HOSTILE = {
    "zero": ([0.0, 0.0], 0.0),
    "sure and right": ([1000.0, -1000.0], 1.0),
    "sure and wrong": ([1000.0, -1000.0], 0.0),
    "largest": ([MAX, -MAX], MAX),
    "denormal": ([1e-40, 1e-45], 1e-40),
    "impossible": ([1.0, 1.0], -1.0),
    "no class": ([1.0, 1.0], 0.5),
    "infinite": ([np.inf, 1.0], 1.0),
    "no number": ([np.nan, np.nan], np.nan),
    "infinite outcome": ([1.0, 1.0], np.inf),
}


@pytest.mark.slow
@pytest.mark.parametrize("most_records", [1, 3])
@pytest.mark.parametrize("model", [yes_or_no, counts, sizes_of])
def test_no_record_moves_a_release_by_more_than_its_sensitivity(posteriors, model, most_records):
    budget = dppvi.PrivacyBudget(1.0, max_records_per_person=most_records)
    arguments = pieces(posteriors[model], held_back(model), budget)
    space, draws, shards, ends, planned = arguments
    sums = {}
    for name, (features, outcome) in HOSTILE.items():
        where = slice(SIZES[1] - most_records, SIZES[1])  # the last records of the padded client
        X, y = (shards.records[n] for n in ("X", "y"))
        X, y = X.at[1, where].set(jnp.array(features, X.dtype)), y.at[1, where].set(outcome)
        hostile = shards._replace(records={"X": X, "y": y})
        exact_plan = without_noise(planned)
        sums[name] = scoring._released(space, draws, hostile, ends, exact_plan, KEY)
    bound = planned.clients[1].mechanism.sensitivity("replace_one")
    moved = [np.linalg.norm(a[1] - b[1]) for a, b in itertools.combinations(sums.values(), 2)]
    assert np.all(np.isfinite(moved))
    assert max(moved) <= bound * (1 + 1e-6)
    assert max(moved) > 0.4 * bound  # or it was no test
    assert all(np.array_equal(found[0], sums["zero"][0]) for found in sums.values())


def test_the_sensitivity_is_reached(posteriors):
    """By a record that is surely missed, in the place of one that is surely hit."""
    space, _, _, ends, planned = pieces(
        posteriors[yes_or_no], held_back(yes_or_no), dppvi.PrivacyBudget(1.0)
    )
    rows = {"X": jnp.ones((2, 2)), "y": jnp.array([0.0, 1.0])}
    missed, hit = np.asarray(
        scoring._vectors(space, {"w": jnp.full((NUM_DRAWS, 2), 10.0)}, rows, *ends)
    )
    bound = planned.clients[0].mechanism.sensitivity("replace_one")
    assert np.linalg.norm(hit - missed) == pytest.approx(bound, rel=1e-5)


@pytest.mark.slow
def test_padding_moves_nothing(posteriors):
    space, draws, shards, ends, planned = pieces(posteriors[counts], held_back(counts), NO_NOISE)
    before = scoring._released(space, draws, shards, ends, planned, KEY)
    records = {n: leaf.at[1, SIZES[1] :].set(np.nan) for n, leaf in shards.records.items()}
    after = scoring._released(space, draws, shards._replace(records=records), ends, planned, KEY)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("outcome", [np.nan, np.inf])
def test_what_has_no_density_counts_as_the_lowest(posteriors, outcome):
    space, draws, shards, ends, _ = pieces(posteriors[sizes_of], held_back(sizes_of), NO_NOISE)
    rows = {name: leaf[0] for name, leaf in shards.records.items()}
    rows["y"] = rows["y"].at[0].set(outcome)
    u, is_clipped = scoring._vectors(space, draws, rows, *ends)[0]
    assert (float(u), float(is_clipped)) == (-1.0, scoring._COUNT)


# ---------------------------------------------------------------------------------------------
# Refusals, each before anything is charged.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"score_range": (0.0, -1.0)}, "score_range must be a lower and a higher number"),
        ({"score_range": (-1.0, math.inf)}, "score_range must be a finite number"),
        ({"budget": dppvi.PrivacyBudget(1.0, unit="client")}, "budget must protect records"),
        (
            {"data": [{"X": np.ones((3, 2))}]},
            r"data must hold the arrays of the fit, .* y: float32",
        ),
        ({"data": [{"X": np.ones((3, 5)), "y": np.ones(3)}]}, "data must hold the arrays"),
        ({"data": [{"X": np.ones((3, 2)), "y": -np.ones(3)}]}, "data must hold outcomes in the"),
        ({"data": [{"X": np.full((3, 2), np.nan), "y": np.ones(3)}]}, "must hold finite numbers"),
        ({"posterior": 3}, "posterior must be"),
        ({"rng_key": None}, "rng_key"),
    ],
)
def test_what_is_refused(posteriors, tmp_path, changes, sentence):
    arguments = {
        "posterior": posteriors[counts],
        "data": held_back(counts),
        "budget": dppvi.PrivacyBudget(1.0),
        "rng_key": KEY,
        "num_samples": 10,
        "ledger_file": tmp_path / "ledger",
    }
    with pytest.raises((TypeError, ValueError), match=sentence):
        dppvi.score(**{**arguments, **changes})
    assert not (tmp_path / "ledger").exists()


@pytest.mark.slow
def test_numbers_of_another_kind_are_refused(posteriors):
    data = [{**part, "y": part["y"] + 0.5} for part in held_back(classes)]
    with pytest.raises(ValueError, match="data must hold the arrays of the fit"):
        score(posteriors[classes], data)


def test_outcomes_that_cannot_be_drawn_need_a_range(posteriors):
    with pytest.raises(ValueError, match="score_range must be given for a model whose outcomes"):
        score(posteriors[penalised], held_back(penalised))
