"""Reads NumPyro models; the only place that runs them under ``numpyro.handlers``.

A model's structure is read from shapes, dtypes and made-up rows; no record is looked at, except to
check that outcomes lie in the model's support. It may import ``families``.
"""

from numpyro_dppvi.latents.additive import check_additive
from numpyro_dppvi.latents.callbacks import check_callbacks
from numpyro_dppvi.latents.effects import recentred
from numpyro_dppvi.latents.missing import check_missing, may_be_missing
from numpyro_dppvi.latents.plausible import check_priors, check_records, warn_of_scales
from numpyro_dppvi.latents.space import Latent, LatentSpace, from_model
from numpyro_dppvi.latents.trace import HANDLERS

__all__ = [
    "HANDLERS",
    "Latent",
    "LatentSpace",
    "check_additive",
    "check_callbacks",
    "check_missing",
    "check_priors",
    "check_records",
    "from_model",
    "may_be_missing",
    "recentred",
    "warn_of_scales",
]
