"""Privacy on its own: clipping, sampling, mechanisms, accounting, calibration and the ledger.

This package imports nothing of the rest of the library but type aliases and validators, so that
it can be read and audited alone.
"""

from numpyro_dppvi.privacy.budget import PrivacyBudget, Relation, unit_sensitivity
from numpyro_dppvi.privacy.clipping import clipped, clipped_sum
from numpyro_dppvi.privacy.ledger import BudgetExceededError, Entry, Ledger
from numpyro_dppvi.privacy.ledger_file import LedgerFile
from numpyro_dppvi.privacy.mechanisms import GaussianShardSum, GaussianSum, Mechanism, add_noise
from numpyro_dppvi.privacy.noise import SecretKeys, by_purpose
from numpyro_dppvi.privacy.plan import ClientPlan, PrivacyPlan
from numpyro_dppvi.privacy.sampling import Batch, FullBatch, PoissonSampling, Sampler
from numpyro_dppvi.privacy.statement import PrivacyStatement

__all__ = [
    "Batch",
    "BudgetExceededError",
    "ClientPlan",
    "Entry",
    "FullBatch",
    "GaussianShardSum",
    "GaussianSum",
    "Ledger",
    "LedgerFile",
    "Mechanism",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyPlan",
    "PrivacyStatement",
    "Relation",
    "Sampler",
    "SecretKeys",
    "add_noise",
    "by_purpose",
    "clipped",
    "clipped_sum",
    "unit_sensitivity",
]
