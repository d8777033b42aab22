"""The epsilon that the paper states for its sampled batches; for reproduction only."""

import dp_accounting as dpa

from numpyro_dppvi import _validate
from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.budget import PrivacyBudget


def paper_epsilon(
    noise_multiplier: float, sampling_prob: float, num_releases: int, *, delta: float = 1e-5
) -> float:
    """The epsilon of the paper's Fourier accountant; not a guarantee for the paper's batches.

    The paper describes batches drawn without replacement, its code slices shuffled epochs, and its
    accountant (``get_epsilon_S`` of ``fourier-accountant``; Koskela, Jälkö and Honkela 2020)
    composes the dominating pair of Poisson sampling. The result is correct for
    :class:`~numpyro_dppvi.privacy.sampling.PoissonSampling` under replace-one and too small for
    the other two: at noise 4, a tenth of the records and 1000 steps it is 7.489, where batches of
    fixed size cost between 8.279 and 9.522. Ledgers, plans and statements never use it.

    Args:
        noise_multiplier: The noise's standard deviation over the clipping norm.
        sampling_prob: The fraction of the records in a batch, in (0, 1).
        num_releases: How many noisy sums.
        delta: In (0, 1).

    Returns:
        Epsilon under replace-one, as the paper would state it.

    Raises:
        ValueError: If a number is out of range.
    """
    noise_multiplier = _validate.positive("noise_multiplier", noise_multiplier, most=1e9)
    prob = _validate.open_unit("sampling_prob", sampling_prob, "0.1", 1e-8)
    num_releases = _validate.positive_int("num_releases", num_releases, 10**9)
    delta = PrivacyBudget(1.0, delta).delta
    event = dpa.PoissonSampledDpEvent(prob, dpa.GaussianDpEvent(noise_multiplier))
    return accounting.epsilon(accounting.compose([(event, num_releases)]), delta, "replace_one")
