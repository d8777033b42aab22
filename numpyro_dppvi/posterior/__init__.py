"""The posterior: a distribution that holds no record, and everything that is done with one.

Sampling, marginals, predictions, export to ArviZ, files, and the posterior as the next study's
prior. It may import ``guides``, ``latents`` and ``families``, and knows nothing of rounds.
"""

from numpyro_dppvi.posterior.posterior import Posterior, load
from numpyro_dppvi.posterior.prior import Prior

__all__ = ["Posterior", "Prior", "load"]
