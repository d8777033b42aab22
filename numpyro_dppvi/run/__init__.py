"""A whole run: ``fit``, its loop over rounds, checkpoints, progress bar and history.

What talks to the user, the terminal and the disk while a run is under way. It may import
``protocol`` and below; ``analysis`` looks at what it returns.
"""

from numpyro_dppvi.run.fitting import FitResult, fit
from numpyro_dppvi.run.history import History, Outcome, Status

__all__ = ["FitResult", "History", "Outcome", "Status", "fit"]
