"""One store of compiled programs for all tests, workers and child processes, and for the next run.

Most of a test's time is compilation. The store is keyed by program, compiler and options, so that
nothing old is ever run; `make clean` removes it.

Most programs of tests run once, and are compiled as quickly as possible instead of being made
fast. Rounding differs in last bits. `XLA_FLAGS= make test` compiles as users do, and so do
`make slow`, `make mutants` and, in `make test`, what the Makefile names.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest

LINUX = sys.platform == "linux"
GIB = 2**30
MOST_MEMORY = 8 * GIB  # of one worker, whose programs take up a few thousand maps of memory a GiB
LEAST_FREE = 3 * GIB  # or compiled programs are forgotten, where there are enough of them

# Before JAX is imported, which reads them once.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Workers fill the cores; threads that wait for matrices of NumPy's in a loop take time from them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# A flag that XLA does not know ends the process; an extra option that it does not know is ignored.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    # A small program cut into pieces takes a tenth longer.
    " --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)

# Other processes may have the cores: no example fails because it took long.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


def pytest_collection() -> None:
    """Imports make no garbage to speak of, and to look for it takes a fifth of their time."""
    gc.disable()
    _import_arviz()


def _import_arviz() -> None:
    """ArviZ 0.x notes down that it has warned today, and of two workers at once one finds no file.

    So the first run of a day, or on a new machine, failed now and then.
    """
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            importlib.import_module("arviz")
            return


def pytest_collection_finish() -> None:
    """Takes what was imported out of the collector's sight, and lets it look less often.

    Tracing makes many objects that live on, and looking through them takes a twentieth of the time.
    """
    _share_contexts()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


def _share_contexts() -> None:
    """Programs are written down in one of MLIR's contexts after another, not each in its own.

    A context loads all dialects, which takes three milliseconds and a megabyte: a fifth of what
    a small program costs. What is written into it stays, so it is left after a hundred programs.
    """
    if "jax" not in sys.modules:
        return
    try:
        from jax._src.interpreters import mlir
        from jaxlib.mlir import ir

        make = mlir.make_ir_context
    except (ImportError, AttributeError):  # JAX calls it otherwise: then it only takes longer
        return
    places, kept = itertools.count(1), [make()]  # never empty: programs are made in threads, too

    def shared() -> Any:
        # A program that is asked for while another one is written would be written into that.
        if ir.Context.current is not None:
            return make()
        if next(places) % 100 == 0:
            kept[0] = make()
        return kept[0]

    mlir.make_ir_context = shared
    # Two programs that share a context may not be compiled at once; nor is any core idle.
    from numpyro_dppvi.protocol import rounds

    rounds._compiled_beside = lambda *_: contextlib.nullcontext()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core that this process may use, but no more than are worth their start-up.

    ``-n auto`` and ``-n logical`` would count all cores of the machine.
    """
    return min(4, len(os.sched_getaffinity(0)) if LINUX else os.cpu_count() or 1)


def _memory() -> tuple[int, int]:
    """What this process takes up, and what is free on the machine or in its container; in bytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append(limit - used)
    return pages * os.sysconf("SC_PAGE_SIZE"), min(free)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forgets compiled programs after a file where memory runs short: they live on."""
    if LINUX and nextitem is not None and nextitem.path != item.path:
        mine, free = _memory()
        if mine > MOST_MEMORY or (mine > 2 * GIB and free < LEAST_FREE):
            import jax

            jax.clear_caches()
            library = ctypes.CDLL(None)
            if hasattr(library, "malloc_trim"):  # without it, glibc keeps what was freed
                library.malloc_trim(0)
