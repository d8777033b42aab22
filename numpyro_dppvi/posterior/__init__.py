"""The posterior, a distribution over the latents that holds no records.

Sampling, marginals, predictions, export to ArviZ, files, and using a posterior as the next study's
prior. It may import ``guides``, ``latents`` and ``families``.
"""

from numpyro_dppvi.posterior.posterior import Posterior, load
from numpyro_dppvi.posterior.prior import Prior

__all__ = ["Posterior", "Prior", "load"]
