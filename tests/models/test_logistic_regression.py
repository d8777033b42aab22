import jax
import numpy as np
import pytest
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy.stats import norm

from models.logistic_regression import logistic_regression


def test_log_density_is_the_prior_plus_one_term_per_record():
    generator = np.random.default_rng(0)
    X, w = generator.normal(size=(7, 3)), generator.normal(size=3)
    y = np.array([0, 1, 1, 0, 1, 0, 0])
    logits = X @ w
    expected = norm.logpdf(w).sum() + (y * logits - np.logaddexp(0, logits)).sum()
    actual, _ = log_density(logistic_regression, (), {"X": X, "y": y}, {"w": w})
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.slow
def test_draws_labels_where_none_are_given():
    draws = Predictive(logistic_regression, num_samples=5)(jax.random.key(0), X=np.ones((4, 2)))
    assert draws["w"].shape == (5, 2)
    assert draws["y"].shape == (5, 4)
    assert set(np.unique(draws["y"])) <= {0, 1}
