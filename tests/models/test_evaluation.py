import numpy as np
from scipy.special import expit

from models.evaluation import held_out


def test_scores_the_mean_of_the_draws_probabilities():
    generator = np.random.default_rng(0)
    w, X = generator.normal(size=(100, 4)), generator.normal(size=(50, 4))
    y = generator.integers(0, 2, size=50)
    probability = expit(X @ w.T).mean(axis=1)
    likelihood = np.where(y == 1, probability, 1 - probability)
    scores = held_out(w, X, y)
    np.testing.assert_allclose(scores.accuracy, np.mean((probability > 0.5) == y), rtol=1e-6)
    np.testing.assert_allclose(scores.mean_log_likelihood, np.log(likelihood).mean(), rtol=1e-5)


def test_is_finite_where_a_sigmoid_rounds_to_one():
    scores = held_out(np.array([[100.0]]), np.array([[1.0], [-1.0]]), np.array([0, 0]))
    assert scores.accuracy == 0.5
    np.testing.assert_allclose(scores.mean_log_likelihood, -50.0, rtol=1e-6)
