"""Plants every mutant in a copy of the tree and runs its tests; what no test notices is printed.

python -m tests.mutants            all of them
python -m tests.mutants clip keys  those with one of these words in their names
"""

import collections
import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = "numpyro_dppvi"
AT_ONCE = 2
TIME_LIMIT = 900  # seconds, for one mutant's tests
LEFT_OUT = (".*", "__pycache__", "_build", "results", "demo-output", "build", "dist", "*.egg-info")
# Exit statuses of pytest; others say that it could not run the tests.
PASSED, FAILED = 0, 1
TIMED_OUT = -1
_COPIES: queue.Queue[Path] = queue.Queue()


class Outcome(NamedTuple):
    """What pytest said."""

    status: int
    said: str


def read_package(root: Path = ROOT) -> dict[str, str]:
    """The package's sources by their paths."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}


def planted(mutant: Mutant, sources: Mapping[str, str]) -> tuple[str, str]:
    """The path of the file that a mutant is for, and its source with the mutant in it.

    Raises:
        ValueError: If what it replaces does not stand exactly once in the package.
    """
    found = [path for path, source in sources.items() for _ in range(source.count(mutant.before))]
    if len(found) != 1:
        raise ValueError(
            f"{mutant.name!r} must replace what stands once in {PACKAGE}/, and its text stands "
            f"there {len(found)} times: write it anew.\n{mutant.before}"
        )
    return found[0], sources[found[0]].replace(mutant.before, mutant.after)


def run_tests(tests: Collection[str], root: Path) -> Outcome:
    """Runs some tests in a copy of the tree, but none that is marked slow."""
    store = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        # A mutant may be as long as what it replaces, and written in the same second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": store,
        # Compiled as users do (tests/conftest.py).
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    try:
        process = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(TIMED_OUT, f"took more than {TIME_LIMIT} seconds")
    return Outcome(process.returncode, process.stdout)


def run_with(mutant: Mutant, root: Path) -> Outcome:
    """Runs a mutant's tests with the mutant planted, and takes it out again."""
    sources = read_package(root)
    path, source = planted(mutant, sources)
    (root / path).write_text(source, "utf-8")
    try:
        return run_tests(mutant.tests, root)
    finally:
        (root / path).write_text(sources[path], "utf-8")


def in_a_copy(function: Callable[..., Outcome], argument: object) -> Outcome:
    """Calls a function with a copy of the tree that nobody else uses."""
    root = _COPIES.get()
    try:
        return function(argument, root)
    finally:
        _COPIES.put(root)


def failing_anyway(mutants: Collection[Mutant], pool: concurrent.futures.Executor) -> str:
    """What the tests say that fail without any mutant, and so would kill everything."""
    by_file: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for mutant in mutants:
        for test in mutant.tests:
            by_file[test.partition("::")[0]][test] = None
    outcomes = pool.map(lambda tests: in_a_copy(run_tests, tests), by_file.values())
    return "\n".join(outcome.said for outcome in outcomes if outcome.status != PASSED)


def how(outcome: Outcome) -> str:
    """The test that failed, and how, on a line."""
    lines = re.findall(r"^(?:FAILED|ERROR) (.*)", outcome.said, re.MULTILINE)
    return lines[0].split("/")[-1] if lines else outcome.said.strip().rpartition("\n")[2]


def main(words: Collection[str]) -> int:
    """Plants the mutants that have one of the words in their names, or all of them.

    Returns:
        0 if none survived and all could be run, else 1.
    """
    start = time.monotonic()
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    mutants = [m for m in chosen if not m.equivalent]
    by_verdict: dict[str, list[Mutant]] = collections.defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for number in range(AT_ONCE):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
            _COPIES.put(copy)
        said = failing_anyway(mutants, pool)
        if said:
            print(f"{said}\nThese tests fail without any mutant: mend them first.")
            return 1
        print(f"All tests pass without a mutant ({time.monotonic() - start:.0f} s).", flush=True)
        runs = {pool.submit(in_a_copy, run_with, mutant): mutant for mutant in mutants}
        for done in concurrent.futures.as_completed(runs):
            mutant, outcome = runs[done], done.result()
            verdict = {PASSED: "SURVIVED", FAILED: "killed"}.get(outcome.status, "BROKEN")
            by_verdict[verdict].append(mutant)
            told = "" if verdict == "SURVIVED" else f": {how(outcome)}"
            print(f"{verdict:<9} {mutant.name}{told}", flush=True)
    for mutant in chosen:
        if mutant.equivalent:
            print(f"harmless  {mutant.name}: {mutant.equivalent}")
    survived, broken = by_verdict["SURVIVED"], by_verdict["BROKEN"]
    print(
        f"{len(mutants)} mutants in {time.monotonic() - start:.0f} s: "
        f"{len(survived)} survived, {len(broken)} could not be run."
    )
    for mutant in survived + broken:
        print(f"  {planted(mutant, read_package())[0]}: {mutant.name}")
    return 1 if survived or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
