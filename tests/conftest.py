"""One store of compiled programs for all tests, workers and child processes, and for the next run.

Most of a test's time is compilation. The store is keyed by program, compiler and options, so that
nothing old is ever run; `make clean` removes it.
"""

import os
from pathlib import Path

# Before JAX is imported, which reads them once.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
