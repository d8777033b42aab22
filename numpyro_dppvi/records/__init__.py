"""Which client holds which record, and records as padded arrays with a leading client axis.

A `Partition` is row numbers and nothing else. `split_evenly` and `Partition.from_labels` are for
everyday use; `partition` is the scheme of the paper (Heikkilä et al. 2023, appendix "experimental
details"), which makes clients unlike each other on purpose. `stack` and `stack_clients` turn host
arrays into `Shards`, the form that the compiled rounds work on.

Everything here runs on the host in NumPy, once, before any round; only the finished arrays go to
JAX.
"""

from numpyro_dppvi.records.clients import Partition, split_evenly
from numpyro_dppvi.records.shards import Shards, record_arrays, record_shapes, stack, stack_clients
from numpyro_dppvi.records.unequal import partition

__all__ = [
    "Partition",
    "Shards",
    "partition",
    "record_arrays",
    "record_shapes",
    "split_evenly",
    "stack",
    "stack_clients",
]
