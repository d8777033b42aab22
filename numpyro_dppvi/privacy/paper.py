"""The number that the paper states for its sampled batches. For reproduction only."""

import dp_accounting as dpa

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.budget import PrivacyBudget


def paper_epsilon(
    noise_multiplier: float, sampling_prob: float, num_releases: int, *, delta: float = 1e-5
) -> float:
    """What the paper's Fourier accountant gives. No guarantee for the paper's own batches.

    The paper says that it draws batches without replacement, its code cuts shuffled epochs into
    slices, and its accountant (``get_epsilon_S`` of ``fourier-accountant``; Koskela, Jälkö and
    Honkela 2020) composes the pair of distributions that belongs to Poisson sampling. The number
    is right for :class:`~numpyro_dppvi.privacy.sampling.PoissonSampling` under replace-one, and
    too small for the others: at noise 4, a tenth of the records and 1000 steps it is 7.489, where
    batches of fixed size are known to cost at least 8.279 and at most 9.522. Ledgers, plans and
    statements never use it.

    Args:
        noise_multiplier: Standard deviation of the noise over the clipping norm.
        sampling_prob: The share of the records that is in a batch, in (0, 1).
        num_releases: How many noisy sums.
        delta: In (0, 1).

    Returns:
        Epsilon under replace-one, as the paper would state it.

    Raises:
        ValueError: If a number is out of its range.
    """
    noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier, most=1e9)
    prob = _validate.open_unit("sampling_prob", sampling_prob, "0.1", 1e-8)
    num_releases = _validate.positive_int("num_releases", num_releases, 10**9)
    delta = PrivacyBudget(1.0, delta).delta
    event = dpa.PoissonSampledDpEvent(prob, dpa.GaussianDpEvent(noise_multiplier))
    return accounting.epsilon(accounting.compose([(event, num_releases)]), delta, "replace_one")
