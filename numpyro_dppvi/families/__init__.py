"""Exponential families, factors in them, and their arithmetic.

``BY_DISTRIBUTION`` lists the families. They know nothing of models, clients or privacy, and import
none of the other packages.
"""

from typing import Any

import numpyro.distributions as dist

from numpyro_dppvi.families.base import (
    DiscreteFamily,
    ExponentialFamily,
    LocationScaleFamily,
    NormalFamily,
    WhiteFamily,
)
from numpyro_dppvi.families.bernoulli import Bernoulli
from numpyro_dppvi.families.beta import Beta, BetaCoordinates, BetaNatural
from numpyro_dppvi.families.categorical import Categorical
from numpyro_dppvi.families.diagonal_normal import DiagonalNormal, NormalCoordinates, NormalNatural
from numpyro_dppvi.families.dirichlet import Dirichlet, DirichletCoordinates
from numpyro_dppvi.families.enumeration import MAX_JOINT_VALUES
from numpyro_dppvi.families.exponential import Exponential
from numpyro_dppvi.families.full_normal import FullNormal, FullNormalCoordinates
from numpyro_dppvi.families.gamma import Gamma, GammaCoordinates, GammaNatural
from numpyro_dppvi.families.half_normal import HalfNormal
from numpyro_dppvi.families.mean_field import MeanField, Part

BY_DISTRIBUTION: tuple[tuple[type[dist.Distribution], Any], ...] = (
    (dist.Normal, DiagonalNormal),
    (dist.MultivariateNormal, FullNormal),
    (dist.Gamma, Gamma),
    (dist.Beta, Beta),
    (dist.Dirichlet, Dirichlet),
    (dist.Exponential, Exponential),
    (dist.HalfNormal, HalfNormal),
    # NumPyro has a class for each way to write the parameters of these. ``dist.Bernoulli(0.3)``
    # makes one of them.
    (dist.BernoulliProbs, Bernoulli),
    (dist.BernoulliLogits, Bernoulli),
    (dist.CategoricalProbs, Categorical),
    (dist.CategoricalLogits, Categorical),
)
"""The family of each distribution that a guide may draw from.

A family is constructed from a shape; a family of integers also from its number of values.
"""

__all__ = [
    "BY_DISTRIBUTION",
    "MAX_JOINT_VALUES",
    "Bernoulli",
    "Beta",
    "BetaCoordinates",
    "BetaNatural",
    "Categorical",
    "DiagonalNormal",
    "Dirichlet",
    "DirichletCoordinates",
    "DiscreteFamily",
    "Exponential",
    "ExponentialFamily",
    "FullNormal",
    "FullNormalCoordinates",
    "Gamma",
    "GammaCoordinates",
    "GammaNatural",
    "HalfNormal",
    "LocationScaleFamily",
    "MeanField",
    "NormalCoordinates",
    "NormalFamily",
    "NormalNatural",
    "Part",
    "WhiteFamily",
]
