"""Methods: frozen values that carry what they release, what it costs and what a client computes.

``values`` says what a method carries. The methods are in ``noisy_gradients``, ``noisy_changes``,
``fisher_scoring`` and ``non_private``; ``visits`` holds what a visit is made of, and the rest its
pieces: the objective, local optimisation, natural gradients. The room may import ``latents``,
``families`` and ``privacy``.
"""

from numpyro_dppvi.methods.fisher_scoring import FisherScoring
from numpyro_dppvi.methods.natural_gradient import NaturalGradient
from numpyro_dppvi.methods.noisy_changes import (
    LocalAveraging,
    ParameterPerturbation,
    VirtualClients,
)
from numpyro_dppvi.methods.noisy_gradients import BayesianCommitteeMachine, DPOptimization, GlobalVI
from numpyro_dppvi.methods.non_private import NonPrivate
from numpyro_dppvi.methods.objective import Automatic, GaussHermite, MonteCarlo, SphericalCubature

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
