"""Privacy on its own: clipping, sampling, mechanisms, accounting, calibration and the ledger.

It imports nothing from the rest of the library except type aliases, validators and file helpers,
so it can be read and audited on its own.
"""

from numpyro_dppvi.privacy.budget import PrivacyBudget, Relation, Unit, unit_sensitivity
from numpyro_dppvi.privacy.clipping import clipped, clipped_in_steps, clipped_sum
from numpyro_dppvi.privacy.inverse import (
    epsilon_from_noise,
    noise_from_epsilon,
    paper_epsilon,
    rounds_from_epsilon,
)
from numpyro_dppvi.privacy.keys import SecretKeys, by_purpose
from numpyro_dppvi.privacy.ledger import BudgetExceededError, Entry, Ledger
from numpyro_dppvi.privacy.ledger_file import LedgerFile
from numpyro_dppvi.privacy.meaning import Attack, best_attack
from numpyro_dppvi.privacy.mechanisms import (
    GaussianShardSum,
    GaussianSum,
    Mechanism,
    add_noise,
    draw_noise,
)
from numpyro_dppvi.privacy.noise_laws import DiscreteGaussian, Gaussian, Noise
from numpyro_dppvi.privacy.plan import ClientPlan, PrivacyPlan
from numpyro_dppvi.privacy.sampling import (
    Batch,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    Sampler,
)
from numpyro_dppvi.privacy.selection import NegativeBinomialRuns, SelectionPlan, plan_selection
from numpyro_dppvi.privacy.statement import PrivacyStatement, statement_schema
from numpyro_dppvi.privacy.worth import Worth

__all__ = [
    "Attack",
    "Batch",
    "BudgetExceededError",
    "ClientPlan",
    "DiscreteGaussian",
    "Entry",
    "FixedSizeSampling",
    "FullBatch",
    "Gaussian",
    "GaussianShardSum",
    "GaussianSum",
    "Ledger",
    "LedgerFile",
    "Mechanism",
    "NegativeBinomialRuns",
    "Noise",
    "PoissonSampling",
    "PrivacyBudget",
    "PrivacyPlan",
    "PrivacyStatement",
    "Relation",
    "Sampler",
    "SecretKeys",
    "SelectionPlan",
    "Unit",
    "Worth",
    "add_noise",
    "best_attack",
    "by_purpose",
    "clipped",
    "clipped_in_steps",
    "clipped_sum",
    "draw_noise",
    "epsilon_from_noise",
    "noise_from_epsilon",
    "paper_epsilon",
    "plan_selection",
    "rounds_from_epsilon",
    "statement_schema",
    "unit_sensitivity",
]
