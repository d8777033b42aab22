"""Differentially private partitioned variational inference for NumPyro models.

The names here are those of a study: ``fit`` and ``plan_privacy``, with a method, a budget and a
schedule, and what is done with the result. ``pvi`` gives the algorithm as ``init / step /
posterior``. Types of results and what few studies need are in the packages ``analysis``,
``families``, ``methods``, ``posterior``, ``privacy``, ``protocol``, ``records`` and ``run``.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

from numpyro_dppvi._validate import UnsupportedModelError
from numpyro_dppvi.analysis import citation, compare, diagnose, plots, score, select
from numpyro_dppvi.methods import (
    BayesianCommitteeMachine,
    DPOptimization,
    FisherScoring,
    GlobalVI,
    MonteCarlo,
    NaturalGradient,
    NonPrivate,
    VirtualClients,
)
from numpyro_dppvi.posterior import load
from numpyro_dppvi.privacy import (
    BudgetExceededError,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyBudget,
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
from numpyro_dppvi.run import fit

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
    "MonteCarlo",
    "NaturalGradient",
    "NonPrivate",
    "VirtualClients",
    # schedules
    "Asynchronous",
    "TrustedAggregator",
    "random_subset",
    "sequential",
    "synchronous",
    # privacy
    "FixedSizeSampling",
    "FullBatch",
    "PoissonSampling",
    "PrivacyBudget",
    # records and errors
    "BudgetExceededError",
    "Partition",
    "UnsupportedModelError",
]

_PACKAGES = (
    *("analysis", "families", "methods", "posterior"),
    *("privacy", "protocol", "records", "run"),
)

# Names that stood here in 0.1, and the package that has them now.
_MOVED = {
    name: package
    for package, names in {
        "analysis": ("Citation", "Comparison", "Diagnostics", "Selection"),
        "families": ("factors",),
        "methods": (
            *("Automatic", "GaussHermite", "LocalAveraging", "ParameterPerturbation"),
            "SphericalCubature",
        ),
        "posterior": ("Posterior", "Prior"),
        "privacy": (
            *("DiscreteGaussian", "Ledger", "LedgerFile", "PrivacyPlan", "PrivacyStatement"),
            "SecretKeys",
        ),
        "protocol": ("Algorithm", "PVIState", "RoundInfo"),
        "records": ("Shards", "split_evenly", "stack", "stack_clients"),
        "run": ("FitResult", "History", "Outcome", "Status"),
    }.items()
    for name in names
}


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]


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
