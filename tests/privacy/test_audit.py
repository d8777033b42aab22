"""What is released gives away no more than the ledger claims, and a mistake would show.

Every method and sampler is run some thousand times on two neighbouring data sets (see
`benchmarks/audit.py`), and its whole privacy profile is held against what can be told from the
outcomes. A right mechanism is refuted with probability 10^-3 on fresh seeds; these are fixed.
"""

import dataclasses
from dataclasses import dataclass

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dppvi as dppvi
from benchmarks import audit as audits
from numpyro_dppvi import guides, latents
from numpyro_dppvi.methods import visits
from numpyro_dppvi.privacy import PoissonSampling, SecretKeys, accounting, by_purpose, keys
from numpyro_dppvi.privacy.audit import Report, audit
from numpyro_dppvi.privacy.sampling import Batch
from tests.programs import forget_programs

RUNS = 8000
CASES = dict(audits.cases())
POISSON = PoissonSampling(0.2)
UNEQUAL = "the second of clients that differ, q=.2, 20 steps"
# A sampled sum of gradients and a joint sum over shards; the sums of the others are bounded exactly
# in test_sabotage.py and test_unequal_clients.py.
FIRST = ("virtual clients, 2 rounds, joint noise",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in CASES]
)
def test_no_release_shows_more_than_is_claimed(name):
    found = audits.report(CASES[name](), RUNS)
    assert found.holds, found
    # The audit looks closely: most of what is claimed is shown.
    assert found.ratio > 0.6, found


# ---------------------------------------------------------------------------------------------
# Planted mistakes that the same audits must refute.


@pytest.fixture
def planted(monkeypatch):
    """Plants mistakes in programs that are traced anew, now and afterwards."""
    forget_programs()
    yield monkeypatch.setattr
    forget_programs()


def refuted(case, at_least=1.0):
    found = audits.report(case, RUNS)
    assert not found.holds, found
    assert found.ratio > at_least


@pytest.mark.slow
def test_a_fifth_too_little_noise_is_found(planted):
    add_noise = visits.add_noise

    def weak(rng_key, total, noise_std, like=None):
        return add_noise(rng_key, total, 0.8 * noise_std, like)

    planted(visits, "add_noise", weak)
    refuted(audits.gradients(POISSON, num_steps=20), 1.15)


@pytest.mark.slow
def test_the_sensitivity_of_the_other_relation_is_found():
    claimed = audits.gradients(relation="add_or_remove_one")
    refuted(claimed._replace(worlds=audits.gradients().worlds), 3)


@pytest.mark.slow
def test_noise_from_a_constant_key_is_found(planted):
    same = SecretKeys(0).round_key(0)
    planted(visits, "by_purpose", lambda key: keys.Purposes(same, key))
    refuted(audits.gradients(num_steps=1), 10)


# tests/privacy/test_clipping.py finds it at once.
@pytest.mark.slow
def test_a_parameter_that_is_left_out_of_the_norm_is_found(planted):
    clipped_sum = visits.clipped_sum

    def careless(gradients, mask, clip_norm, *, rounded):
        rest = {k: g._replace(loc=0 * g.loc) for k, g in gradients.items()}
        total = clipped_sum(rest, mask, clip_norm, rounded=rounded)
        free = clipped_sum(gradients, mask, 100.0, rounded=rounded)
        return {k: t._replace(loc=free[k].loc) for k, t in total.items()}

    planted(visits, "clipped_sum", careless)
    refuted(audits.gradients(), 10)


@dataclass(frozen=True)
class FixedSizeAsPoisson(PoissonSampling):
    """Draws batches of half of the records, and is accounted as Poisson sampling."""

    def draw(self, rng_key, num_records, inclusion_prob, capacity, physical_size):
        rows = jax.random.permutation(rng_key, capacity)[:physical_size]
        return Batch(rows, jnp.arange(physical_size) < capacity // 2)


@pytest.mark.slow
def test_another_clients_numbers_are_found(planted):
    # The first client clips at 4 and draws with probability .5, the audited one 1 and .2.
    case, clipped_sum, draw = CASES[UNEQUAL], visits.clipped_sum, PoissonSampling.draw

    def clipped_as_the_first(contributions, mask, clip_norm, *, rounded=True):
        return clipped_sum(contributions, mask, 4.0, rounded=rounded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "clipped_sum", clipped_as_the_first)
        refuted(case(), 2)
    forget_programs()
    planted(PoissonSampling, "draw", lambda s, k, n, prob, *sizes: draw(s, k, n, 0.5, *sizes))
    refuted(case(), 1.5)


@pytest.mark.slow
def test_fixed_size_batches_accounted_as_poisson_are_found():
    # The record that takes the canary's place when it is not drawn pulls the other way.
    refuted(audits.gradients(FixedSizeAsPoisson(0.5), num_steps=3, others=-1.0), 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [False, True])
def test_a_record_that_reaches_another_shards_factor_is_found(trusted, planted):
    """What clients keep to themselves in one round shows in the next if shards share it."""
    visit = dppvi.VirtualClients.visit

    def sharing(*arguments):
        message = visit(*arguments)
        return message._replace(
            kept=jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), message.kept)
        )

    planted(dppvi.VirtualClients, "visit", sharing)
    method = dppvi.VirtualClients(20, 5.0, **audits.LOCAL)
    refuted(audits.changes(method, trusted), 1.05)


# ---------------------------------------------------------------------------------------------
# What no audit of outcomes sees.


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("records", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def test_the_size_of_a_batch_enters_nothing_but_the_sum():
    """Dividing by it would lose the Poisson bound, and is too little to be seen from outside.

    Equal records without noise: what is released is proportional to how many were drawn.
    """
    records = {"y": jnp.full(10, 1e4)}
    space = latents.from_model(normal_mean, records)
    family = guides.family_of(None, normal_mean, space)
    method = dppvi.DPOptimization(2.0, sampler=POISSON, expectation=dppvi.MonteCarlo(2))
    layout = visits.Layout(POISSON.physical_size([10]), 1, 10)
    params = visits.ClientParams(*(jnp.asarray(x) for x in (0.0, 1, 1.0, 2.0, 0.2, 1)))

    def gradient(secret_key):
        keys = (jax.random.key(0), by_purpose(secret_key))
        likelihood = visits.OfRecords(
            space, family, method.expectation, layout, records, jnp.asarray(10), params
        )
        return likelihood.released(method.sampler, keys, family.standard())["mu"].loc

    keys = jax.random.split(SecretKeys(1).round_key(0), 300)
    counts = -np.asarray(jax.jit(jax.vmap(gradient))(keys)) * 0.2 / 2.0
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-3)
    assert set(np.round(counts)) >= {0, 1, 2, 3, 4}
    assert abs(np.mean(counts) - 2) < 5 * (10 * 0.2 * 0.8 / 300) ** 0.5


# ---------------------------------------------------------------------------------------------
# The audit itself, on Gaussians whose profile is known.


def gaussian_claim(mu):
    cost = accounting.compose([(dpa.GaussianDpEvent(2 / mu), 1)])
    return lambda delta: accounting.epsilon(cost, delta, "replace_one")


def gaussian_scores(mu, runs=20_000, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=runs) + mu / 2, rng.normal(size=runs) - mu / 2


class TestAudit:
    @pytest.mark.parametrize("mu", [0.2, 1.0, 2.0, 3.0])
    def test_a_true_claim_holds_and_is_nearly_shown(self, mu):
        found = audit(gaussian_claim(mu), *gaussian_scores(mu))
        assert found.holds
        assert found.ratio > (0.8 if mu >= 1 else 0)

    @pytest.mark.parametrize("mu", [1.0, 2.0, 3.0])
    def test_a_claim_that_is_a_fifth_too_low_is_refuted(self, mu):
        assert not audit(gaussian_claim(0.8 * mu), *gaussian_scores(mu)).holds

    @pytest.mark.slow
    def test_a_true_claim_is_refuted_as_rarely_as_asked(self):
        # At failure_prob = .5 half of the audits of a sharp claim may fail; far fewer do.
        claim = gaussian_claim(1.5)
        failed = [
            not audit(claim, *gaussian_scores(1.5, 400, seed), failure_prob=0.5).holds
            for seed in range(60)
        ]
        assert np.mean(failed) < 0.5

    def test_both_directions_are_looked_at(self):
        # A rare outcome on one side only: visible from that side alone.
        rng = np.random.default_rng(0)
        one = np.zeros(8000)
        other = np.where(rng.uniform(size=8000) < 1 / 8, -1.0, 0.0)
        claim = {0.05: 1.0, 0.3: 1.0}.__getitem__
        for scores in ((one, other), (-other, -one)):
            found = audit(claim, *scores, deltas=(0.05,))
            assert found.shown[0] == pytest.approx(1 / 8, abs=0.04)
            assert not found.holds
            assert audit(claim, *scores, deltas=(0.3,)).holds

    def test_nothing_is_shown_by_scores_that_say_nothing(self):
        found = audit(gaussian_claim(1.0), np.zeros(1000), np.zeros(1000))
        assert found.holds
        assert np.all(found.shown < 0.01)

    def test_certainty_is_shown(self):
        found = audit(lambda delta: 1.0, np.ones(2000), np.zeros(2000))
        assert found.shown == pytest.approx(0.98, abs=0.02)
        assert str(found).splitlines()[0].endswith("REFUTED")

    @pytest.mark.parametrize("bad", [[1.0, 2.0, 3.0], [1.0, np.nan, 2.0, 3.0, 4.0]])
    def test_refuses_what_cannot_be_counted(self, bad):
        with pytest.raises(ValueError, match="scores must be at least four numbers per data set"):
            audit(gaussian_claim(1.0), np.array(bad), np.zeros(10))

    def test_prints_a_line_for_each_claim(self):
        text = str(audit(gaussian_claim(1.0), *gaussian_scores(1.0)))
        assert len(text.splitlines()) == 8
        assert "not refuted" in text
        assert dataclasses.is_dataclass(Report)
