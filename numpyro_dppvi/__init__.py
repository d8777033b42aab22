"""Differentially private partitioned variational inference for NumPyro models.

Run: ``fit`` and ``plan_privacy``, with a method, a budget and a schedule.
Assemble: ``pvi``, the algorithm as a NamedTuple ``init / step / posterior``.
Pieces: families, factors, the privacy package and the rest, as modules.
"""

import importlib.metadata

from numpyro_dppvi import factors, families, privacy
from numpyro_dppvi._result import History, Outcome, Status
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.algorithm import Algorithm, PVIState, pvi
from numpyro_dppvi.citation import Citation, citation
from numpyro_dppvi.compare import Comparison, compare
from numpyro_dppvi.diagnostics import Diagnostics, diagnose
from numpyro_dppvi.fit import FitResult, fit
from numpyro_dppvi.methods import (
    BayesianCommitteeMachine,
    DPOptimization,
    GlobalVI,
    LocalAveraging,
    NonPrivate,
    ParameterPerturbation,
    VirtualClients,
)
from numpyro_dppvi.natural_gradient import NaturalGradient
from numpyro_dppvi.objective import Automatic, GaussHermite, MonteCarlo, SphericalCubature
from numpyro_dppvi.partition import Partition, Shards, partition, split_evenly, stack, stack_clients
from numpyro_dppvi.planning import plan_privacy
from numpyro_dppvi.posterior import Posterior, load
from numpyro_dppvi.prior import Prior
from numpyro_dppvi.privacy import (
    BudgetExceededError,
    DiscreteGaussian,
    FixedSizeSampling,
    FullBatch,
    Ledger,
    LedgerFile,
    PoissonSampling,
    PrivacyBudget,
    PrivacyPlan,
    PrivacyStatement,
    SecretKeys,
)
from numpyro_dppvi.rounds import RoundInfo
from numpyro_dppvi.schedules import Asynchronous, random_subset, sequential, synchronous
from numpyro_dppvi.selection import Selection, select
from numpyro_dppvi.server import TrustedAggregator

__version__ = importlib.metadata.version("numpyro-dppvi")

__all__ = [
    # run
    "Asynchronous",
    "Automatic",
    "BayesianCommitteeMachine",
    "GlobalVI",
    "LocalAveraging",
    "ParameterPerturbation",
    "TrustedAggregator",
    "VirtualClients",
    "random_subset",
    "Citation",
    "Comparison",
    "DPOptimization",
    "Diagnostics",
    "DiscreteGaussian",
    "FitResult",
    "FixedSizeSampling",
    "FullBatch",
    "GaussHermite",
    "History",
    "MonteCarlo",
    "NaturalGradient",
    "NonPrivate",
    "Outcome",
    "Partition",
    "PoissonSampling",
    "Posterior",
    "Prior",
    "PrivacyBudget",
    "PrivacyPlan",
    "PrivacyStatement",
    "Selection",
    "SphericalCubature",
    "Status",
    "UnsupportedModelError",
    "BudgetExceededError",
    "citation",
    "compare",
    "diagnose",
    "fit",
    "load",
    "partition",
    "plan_privacy",
    "select",
    "sequential",
    "synchronous",
    # assemble
    "Algorithm",
    "PVIState",
    "RoundInfo",
    "SecretKeys",
    "pvi",
    "split_evenly",
    "stack",
    "stack_clients",
    # pieces
    "Ledger",
    "LedgerFile",
    "Shards",
    "factors",
    "families",
    "privacy",
]
