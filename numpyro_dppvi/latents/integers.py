"""Finite ranges of integers: the supports of discrete latents that can be enumerated."""

import numpy as np
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint

from numpyro_dppvi.latents.domains import plain


def integers(support: Constraint) -> range | None:
    """The values of an entry; ``None`` unless all entries share one finite range of integers.

    ``support`` must have concrete bounds, not traced ones.
    """
    support = plain(support)
    if isinstance(support, type(constraints.boolean)):
        return range(2)
    if not support.is_discrete or support.event_dim:
        return None
    # Bounds may be arrays: entries with ranges of their own have no common table of values.
    ends = [np.unique(getattr(support, f"{end}_bound", np.inf)) for end in ("lower", "upper")]
    if any(len(end) != 1 or not np.all(np.isfinite(end)) for end in ends):
        return None
    lower, upper = (int(end[0]) for end in ends)
    return range(lower, upper + 1)
