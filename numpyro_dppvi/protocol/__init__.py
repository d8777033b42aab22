"""The protocol between clients and server: who computes what from what, and what is charged.

A round and its server, schedules, what is planned and recommended beforehand, and the algorithm as
``init / step / posterior``. It may import ``methods``, ``posterior``, ``records`` and below.
"""

from numpyro_dppvi.protocol.algorithm import Algorithm, PVIState, pvi
from numpyro_dppvi.protocol.planning import plan_privacy
from numpyro_dppvi.protocol.recommendation import Recommendation, recommend
from numpyro_dppvi.protocol.rounds import RoundInfo
from numpyro_dppvi.protocol.schedules import Asynchronous, random_subset, sequential, synchronous
from numpyro_dppvi.protocol.server import TrustedAggregator

__all__ = [
    "Algorithm",
    "Asynchronous",
    "PVIState",
    "Recommendation",
    "RoundInfo",
    "TrustedAggregator",
    "plan_privacy",
    "pvi",
    "random_subset",
    "recommend",
    "sequential",
    "synchronous",
]
