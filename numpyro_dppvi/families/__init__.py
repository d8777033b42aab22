"""Exponential families that factors live in."""

from numpyro_dppvi.families.base import ExponentialFamily, MeanField
from numpyro_dppvi.families.diagonal_normal import (
    DiagonalNormal,
    NormalCoordinates,
    NormalNatural,
)

__all__ = [
    "DiagonalNormal",
    "ExponentialFamily",
    "MeanField",
    "NormalCoordinates",
    "NormalNatural",
]
