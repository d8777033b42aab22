"""Hospitals that keep their records: a gateway at each, a server, and messages between them.

Any engine that carries bytes can be the courier between the two sides. It may import ``run`` and
below.
"""

from numpyro_dppvi.silo.consortium import Deliver, run_study, statements
from numpyro_dppvi.silo.gateway import Gateway, open_gateway
from numpyro_dppvi.silo.sockets import send
from numpyro_dppvi.silo.study import PinnedStudy, Study, digest_of, load_prior, load_study

__all__ = [
    "Deliver",
    "Gateway",
    "PinnedStudy",
    "Study",
    "digest_of",
    "load_prior",
    "load_study",
    "open_gateway",
    "run_study",
    "send",
    "statements",
]
