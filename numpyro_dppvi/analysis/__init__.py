"""What released values say: diagnostics, comparisons, selection, plots, citations.

Everything here is computed from a fit's result, and costs no privacy beyond what a selection
charges. It may import every other room, and no room imports it.
"""

from numpyro_dppvi.analysis.citations import Citation, citation
from numpyro_dppvi.analysis.comparison import Comparison, compare
from numpyro_dppvi.analysis.diagnostics import Diagnostics, diagnose
from numpyro_dppvi.analysis.selection import Selection, select

__all__ = [
    "Citation",
    "Comparison",
    "Diagnostics",
    "Selection",
    "citation",
    "compare",
    "diagnose",
    "select",
]
