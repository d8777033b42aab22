"""One store of compiled programs for all tests, workers and child processes, and for the next run.

Most of a test's time is compilation. The store is keyed by program, compiler and options, so that
nothing old is ever run; `make clean` removes it.

Most programs of tests run once, and are compiled as quickly as possible instead of being made
fast. Rounding differs in last bits. `XLA_FLAGS= make test` compiles as users do, and so do
`make slow`, `make mutants` and, in `make test`, what the Makefile names.
"""

import gc
import os
from pathlib import Path

# Before JAX is imported, which reads them once.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# A flag that XLA does not know ends the process; an extra option that it does not know is ignored.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def pytest_collection_finish() -> None:
    """Takes what was imported out of the collector's sight, and lets it look less often.

    Tracing makes many objects that live on, and looking through them takes a twentieth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
