"""Methods: what a client computes when it is visited, and the pieces that they are made of.

The methods are frozen values; objective, local optimisation and natural gradients are functions
over a model's latents and a family. It may import ``latents``, ``families`` and ``privacy``.
"""

from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.objective import Automatic, GaussHermite, MonteCarlo, SphericalCubature
from numpyro_dppvi.methods.values import (
    BayesianCommitteeMachine,
    DPOptimization,
    GlobalVI,
    LocalAveraging,
    NonPrivate,
    ParameterPerturbation,
    VirtualClients,
)

__all__ = [
    "Automatic",
    "BayesianCommitteeMachine",
    "DPOptimization",
    "GaussHermite",
    "GlobalVI",
    "LocalAveraging",
    "MonteCarlo",
    "NaturalGradient",
    "NonPrivate",
    "ParameterPerturbation",
    "SphericalCubature",
    "VirtualClients",
]
