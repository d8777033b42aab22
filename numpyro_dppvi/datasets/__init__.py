"""Public data sets that come with the package, for tutorials and benchmarks."""

from numpyro_dppvi.datasets.adult import load_adult
from numpyro_dppvi.datasets.support2 import load_support2
from numpyro_dppvi.datasets.tabular import TabularData

__all__ = ["TabularData", "load_adult", "load_support2"]
