"""Which client holds which record, and records in one array an argument.

A `Partition` holds row numbers only. `split_evenly` and `Partition.from_labels` are for everyday
use; `partition` simulates the unequal clients of the paper (Heikkilä et al. 2023, appendix
"experimental details"). `stack` and `stack_clients` turn host arrays into `Shards`, on which the
compiled rounds work. Everything runs in NumPy, once, before the first round. `spread` puts them on
several devices.
"""

from numpyro_dppvi.records.clients import Partition, split_evenly
from numpyro_dppvi.records.placement import SpreadShards, spread
from numpyro_dppvi.records.shards import Shards, stack, stack_clients
from numpyro_dppvi.records.unequal import partition

__all__ = [
    "Partition",
    "Shards",
    "SpreadShards",
    "partition",
    "split_evenly",
    "spread",
    "stack",
    "stack_clients",
]
