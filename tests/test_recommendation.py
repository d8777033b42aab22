"""What is recommended, from public facts; and the limit of what a budget buys."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_dppvi as dppvi
from tests.dry import dry_rounds
from tests.grids import grid


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def by_factor(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.factor("y", -((y - x @ w) ** 2))


def recommended(num_latents, sizes, epsilon, model=logistic, **options):
    num_records = sum(sizes)
    shapes = {
        "x": jax.ShapeDtypeStruct((num_records, num_latents), jnp.float32),
        "y": jax.ShapeDtypeStruct((num_records,), jnp.float32),
    }
    return dppvi.recommend(model, shapes, sizes, dppvi.PrivacyBudget(epsilon, 1e-5), **options)


def test_few_latents_and_many_records_get_fisher_scoring():
    found = recommended(6, [1000] * 5, 1.0)
    assert found.method == dppvi.FisherScoring()
    said = "method=FisherScoring(num_replicates=8, noise_aware=True)\n  the information matrix"
    assert str(found).startswith(said)


@grid(
    ("num_latents", "sizes", "epsilon"),
    [(109, [2442] * 10, 1.0), (6, [40] * 5, 1.0), (6, [1000] * 5, 0.05)],
    quick=[2],
)
def test_many_latents_few_records_or_little_budget_get_gradients(num_latents, sizes, epsilon):
    found = recommended(num_latents, sizes, epsilon)
    assert found.method == dppvi.DPOptimization()
    assert "too many for this budget and these records" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("num_latents", "epsilon"), [(109, 1.0), (65, 0.3)])
def test_sums_of_many_latents_get_fisher_scoring(num_latents, epsilon):
    """What is taken instead has noise of which its intervals say nothing."""
    sizes = [2442] * 10
    summed = recommended(num_latents, sizes, epsilon, trusted_aggregator=True)
    assert summed.method == dppvi.FisherScoring()
    assert recommended(num_latents, sizes, epsilon).method == dppvi.DPOptimization()


def test_sums_of_too_many_latents_get_virtual_clients():
    found = recommended(109, [100] * 10, 1.0, trusted_aggregator=True)
    assert found.method == dppvi.VirtualClients(50)
    assert "too many for this budget and these records" in str(found)


def counts(x, y):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


@pytest.mark.parametrize("model", [counts, by_factor])
def test_outcomes_of_any_size_get_no_fixed_clip(model):
    """Which would bend them, however few the records are."""
    found = recommended(6, [40] * 5, 1.0, model=model)
    assert found.method == dppvi.FisherScoring()
    assert "too many for this budget" in str(found)
    assert "clip at a fixed length" in str(found)
    assert recommended(201, [40] * 5, 1.0, model=model).method == dppvi.DPOptimization()


def test_what_fisher_scoring_refuses_gets_gradients():
    diagonal = recommended(6, [1000] * 5, 1.0, guide=AutoNormal(logistic))
    assert diagonal.method == dppvi.DPOptimization()
    assert "one normal distribution over all latents" in str(diagonal)


# The last is of a column of ages beside indicators: all steps went along it, and the status said
# nothing (health insurance, fifty clients, epsilon 1: -.9 where no information scores -.49).
@pytest.mark.parametrize("width", [1e-3, 1e3, [0.09] + 29 * [1.0]])
def test_priors_off_scale_get_steps_without_a_scale(width):
    """``DPOptimization`` would refuse the narrow one, and not get anywhere from the wide one."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, jnp.broadcast_to(jnp.array(width), 30)).to_event(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    found = recommended(30, [40] * 5, 1.0, model=model)
    assert found.method == dppvi.FisherScoring()
    assert "too many for this budget" in str(found)
    off = np.ravel(width)[0]
    assert f"the prior of latent 'w' has a standard deviation of {off:.2g}" in str(found)


@grid(
    "prior",
    [
        lambda d: dist.Normal(0, 1e3).expand([d]).to_event(1),
        # In the family of FisherScoring alone, not in that of steps of one length.
        lambda d: dist.MultivariateNormal(jnp.zeros(d), 1e6 * jnp.eye(d)),
    ],
    ids=["in the family", "outside"],
    quick=[0],
)
def test_a_wide_prior_is_seen_beside_one_that_is_refined(prior):
    """Of a prior outside the family no factor tells its width; it hides no other."""

    def model(x, y):
        w = numpyro.sample("w", prior(x.shape[1]))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, spread), obs=y)

    assert recommended(30, [40] * 5, 1.0, model=model).method == dppvi.FisherScoring()


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "shards"), [([400] * 10, 50), ([3, 17, 20], 3)])
def test_under_an_aggregator_gradients_are_those_of_virtual_clients(sizes, shards):
    """From which other gradients gain nothing, so that ``fit`` would refuse them."""
    found = recommended(150, sizes, 1.0, trusted_aggregator=True)
    assert found.method == dppvi.VirtualClients(shards)


def test_outcomes_need_not_be_drawn():
    assert recommended(6, [1000] * 5, 1.0, model=by_factor).method == dppvi.FisherScoring()


def by_hand(x, y):
    loc = numpyro.param("loc", jnp.zeros(x.shape[1]))
    numpyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


def test_a_written_guide_is_refused_for_what_it_is():
    found = recommended(6, [1000] * 5, 1.0, guide=by_hand)
    assert found.method == dppvi.DPOptimization()
    assert "one normal distribution over all latents" in str(found)


def test_the_limit_is_that_of_one_release():
    """Five clients of 1000, six latents, epsilon 1: r = 2 sqrt(d M / N) / mu with mu = .2679."""
    found = recommended(6, [1000] * 5, 1.0)
    noise = 2 * np.sqrt(6 * 5 / 5000) / 0.2679
    np.testing.assert_allclose(found.worth.together, np.sqrt(1 + noise**2), rtol=2e-3)
    np.testing.assert_allclose(found.worth.alone, np.sqrt(5.0), rtol=1e-6)
    summed = recommended(6, [1000] * 5, 1.0, trusted_aggregator=True)
    np.testing.assert_allclose(summed.worth.together, np.sqrt(1 + noise**2 / 5), rtol=2e-3)


@pytest.mark.slow
def test_a_client_that_gains_nothing_is_told():
    found = recommended(6, [100, 200, 8000], 0.5)
    assert "joining cannot pay for client 2:" in str(found)
    assert "joining cannot pay" not in str(recommended(6, [1000] * 5, 3.0))


@pytest.mark.slow
def test_no_record_is_read():
    shapes = {"x": jax.ShapeDtypeStruct((300, 2), jnp.float32)}
    shapes["y"] = jax.ShapeDtypeStruct((300,), jnp.float32)
    arrays = {name: np.full(s.shape, np.nan, np.float32) for name, s in shapes.items()}
    budget = dppvi.PrivacyBudget(1.0)
    both = [dppvi.recommend(logistic, data, [100, 200], budget) for data in (shapes, arrays)]
    assert str(both[0]) == str(both[1])


def test_clients_are_called_by_their_names():
    shapes = {"x": jax.ShapeDtypeStruct((8300, 6), jnp.float32)}
    shapes["y"] = jax.ShapeDtypeStruct((8300,), jnp.float32)
    sizes = {"Turku": 100, "Oulu": 200, "Helsinki": 8000}
    found = dppvi.recommend(logistic, shapes, sizes, dppvi.PrivacyBudget(0.5))
    assert "joining cannot pay for Helsinki:" in str(found)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"Turku": 9, "Tampere": 9}, "got 'Tampere' in client_sizes alone: write it alike in both"),
        ({"Turku": 9}, "got 'Oulu' in records alone"),
        ([9, 9, 9], "got 3 sizes and records of 2 clients: write one size for each"),
    ],
)
def test_sizes_of_other_clients_are_refused(sizes, words):
    data = {"x": np.ones((9, 2), np.float32), "y": np.ones(9, np.float32)}
    records = {"Turku": data, "Oulu": data} if isinstance(sizes, dict) else [data, data]
    with pytest.raises(ValueError, match=words):
        dppvi.recommend(logistic, records, sizes, dppvi.PrivacyBudget(1.0))


def test_a_forgotten_argument_is_named():
    data, budget = {"x": np.ones((9, 2)), "y": np.ones(9)}, dppvi.PrivacyBudget(1.0)
    words = r"client_sizes=a PrivacyBudget, and no budget: write recommend\(model, records, \["
    with pytest.raises(TypeError, match=words):
        dppvi.recommend(logistic, data, budget)
    words = r"method=a PrivacyBudget, .*, and no budget: write plan_privacy\(method, budget, num"
    with pytest.raises(TypeError, match=words):
        dppvi.plan_privacy(budget, num_rounds=2, client_sizes=[9])


@pytest.mark.slow
def test_a_fits_plan_says_the_same():
    data = {"x": np.ones((40, 2), np.float32), "y": np.ones(40, np.float32)}
    budget = dppvi.PrivacyBudget(1.0)
    method = dppvi.FisherScoring(1)
    with dry_rounds():
        result = dppvi.fit(
            logistic, None, [data] * 2, rng_key=jax.random.key(0), budget=budget, method=method
        )
    assert result.plan.worth == dppvi.recommend(logistic, data, [40, 40], budget).worth
