"""Reads a NumPyro model: the only place that runs it under ``numpyro.handlers``.

Structure is read from shapes and dtypes and from rows of zeros; no value of a record is looked at.
"""

from numpyro_dppvi.latents.additive import check_additive
from numpyro_dppvi.latents.plausible import check_priors, check_records, warn_of_scales
from numpyro_dppvi.latents.space import Latent, LatentSpace, from_model
from numpyro_dppvi.latents.trace import HANDLERS

__all__ = [
    "HANDLERS",
    "Latent",
    "LatentSpace",
    "check_additive",
    "check_priors",
    "check_records",
    "from_model",
    "warn_of_scales",
]
