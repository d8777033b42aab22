"""Differentially private partitioned variational inference for NumPyro models.

The names here are those of a study: ``fit`` and ``plan_privacy``, with a method, a budget and a
schedule, and what is done with the result. ``pvi`` gives the algorithm as ``init / step /
posterior``. Its parts are in the packages ``analysis``, ``families``, ``methods``, ``privacy``,
``protocol``, ``records`` and ``run``.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

from numpyro_dppvi import families, privacy
from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.analysis import citation, compare, diagnose, plots, score, select
from numpyro_dppvi.methods import (
    BayesianCommitteeMachine,
    DPOptimization,
    FisherScoring,
    GlobalVI,
    LocalAveraging,
    MonteCarlo,
    NaturalGradient,
    NonPrivate,
    ParameterPerturbation,
    VirtualClients,
)
from numpyro_dppvi.posterior import Posterior, Prior, load
from numpyro_dppvi.privacy import (
    BudgetExceededError,
    DiscreteGaussian,
    FixedSizeSampling,
    FullBatch,
    LedgerFile,
    PoissonSampling,
    PrivacyBudget,
    PrivacyPlan,
    PrivacyStatement,
)
from numpyro_dppvi.protocol import (
    Asynchronous,
    TrustedAggregator,
    plan_privacy,
    pvi,
    random_subset,
    recommend,
    sequential,
    synchronous,
)
from numpyro_dppvi.records import Partition, partition
from numpyro_dppvi.run import FitResult, fit

__version__ = importlib.metadata.version("numpyro-dppvi")

__all__ = [
    # a study
    "citation",
    "compare",
    "diagnose",
    "fit",
    "load",
    "partition",
    "plan_privacy",
    "plots",
    "pvi",
    "recommend",
    "score",
    "select",
    # methods
    "BayesianCommitteeMachine",
    "DPOptimization",
    "FisherScoring",
    "GlobalVI",
    "LocalAveraging",
    "MonteCarlo",
    "NaturalGradient",
    "NonPrivate",
    "ParameterPerturbation",
    "VirtualClients",
    # schedules
    "Asynchronous",
    "TrustedAggregator",
    "random_subset",
    "sequential",
    "synchronous",
    # privacy
    "DiscreteGaussian",
    "FixedSizeSampling",
    "FullBatch",
    "LedgerFile",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyPlan",
    "PrivacyStatement",
    "privacy",
    # records, results and errors
    "BudgetExceededError",
    "FitResult",
    "Partition",
    "Posterior",
    "Prior",
    "UnsupportedModelError",
    "families",
]

# Names that stood here in 0.1, and the package that has them now.
_MOVED = {
    "Algorithm": "protocol",
    "Automatic": "methods",
    "Citation": "analysis",
    "Comparison": "analysis",
    "Diagnostics": "analysis",
    "GaussHermite": "methods",
    "History": "run",
    "Ledger": "privacy",
    "Outcome": "run",
    "PVIState": "protocol",
    "RoundInfo": "protocol",
    "SecretKeys": "privacy",
    "Selection": "analysis",
    "Shards": "records",
    "SphericalCubature": "methods",
    "Status": "run",
    "factors": "families",
    "split_evenly": "records",
    "stack": "records",
    "stack_clients": "records",
}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take any name at all for one of ours

    def __getattr__(name: str) -> Any:
        if name not in _MOVED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        place = f"{__name__}.{_MOVED[name]}"
        warnings.warn(
            f"numpyro_dppvi.{name} is deprecated: write {place}.{name}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(place), name)
