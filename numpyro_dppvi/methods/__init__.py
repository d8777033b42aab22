"""Methods: frozen values that carry what they release, what it costs and what a client computes.

``values`` holds the methods, ``visits`` what a visit is made of, and the rest its pieces: the
objective, local optimisation, natural gradients. It may import ``latents``, ``families`` and
``privacy``.
"""

from numpyro_dppvi.methods.fisher_scoring import FisherScoring
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
    "FisherScoring",
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
