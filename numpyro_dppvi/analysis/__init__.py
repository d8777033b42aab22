"""What can be said about a fit: diagnostics, scores, comparisons, selection, plots, citations.

Diagnostics and plots use released values only and cost no privacy; scores and selections are
charged. It may import all other packages, and none of them imports it.
"""

from numpyro_dppvi.analysis.citations import Citation, citation
from numpyro_dppvi.analysis.comparison import Comparison, compare
from numpyro_dppvi.analysis.diagnostics import Diagnostics, diagnose
from numpyro_dppvi.analysis.scoring import Estimate, PrivateScore, score
from numpyro_dppvi.analysis.selection import Selection, select

__all__ = [
    "Citation",
    "Comparison",
    "Diagnostics",
    "Estimate",
    "PrivateScore",
    "Selection",
    "citation",
    "compare",
    "diagnose",
    "score",
    "select",
]
