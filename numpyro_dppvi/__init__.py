"""Differentially private partitioned variational inference for NumPyro models.

Run: ``fit`` and ``plan_privacy``, with a method, a budget and a schedule.
Assemble: ``pvi``, the algorithm as a NamedTuple ``init / step / posterior``.
Pieces: families, factors, the privacy package and the rest, as modules.
"""

import importlib.metadata

from numpyro_dppvi import families, privacy
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.analysis import (
    Citation,
    Comparison,
    Diagnostics,
    Selection,
    citation,
    compare,
    diagnose,
    plots,
    select,
)
from numpyro_dppvi.families import factors
from numpyro_dppvi.methods import (
    Automatic,
    BayesianCommitteeMachine,
    DPOptimization,
    FisherScoring,
    GaussHermite,
    GlobalVI,
    LocalAveraging,
    MonteCarlo,
    NaturalGradient,
    NonPrivate,
    ParameterPerturbation,
    SphericalCubature,
    VirtualClients,
)
from numpyro_dppvi.posterior import Posterior, Prior, load
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
from numpyro_dppvi.protocol import (
    Algorithm,
    Asynchronous,
    PVIState,
    RoundInfo,
    TrustedAggregator,
    plan_privacy,
    pvi,
    random_subset,
    sequential,
    synchronous,
)
from numpyro_dppvi.records import Partition, Shards, partition, split_evenly, stack, stack_clients
from numpyro_dppvi.run import FitResult, History, Outcome, Status, fit

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
    "FisherScoring",
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
    "plots",
    "privacy",
]
