"""Plants every mutant in a copy of the tree and runs its tests; what no test notices is printed.

python -m tests.mutants            all of them
python -m tests.mutants clip white those with one of these words in their names
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
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = "numpyro_dppvi"
AT_ONCE = 2
TIME_LIMIT = 600
LEFT_OUT = (".*", "__pycache__", "_build", "results", "demo-output", "build", "dist", "*.egg-info")
PASSED, FAILED = 0, 1  # exit statuses of pytest; others say that it could not run the tests


class Outcome(NamedTuple):
    """What pytest said."""

    status: int
    said: str


def file_of(mutant: Mutant, root: Path = ROOT) -> Path:
    """The one file of the package in which the mutant's text stands once.

    Raises:
        ValueError: If there is none, or the text stands in more places than one.
    """
    sources = {path: path.read_text("utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))}
    found = [path for path, source in sources.items() for _ in range(source.count(mutant.before))]
    if len(found) != 1:
        raise ValueError(
            f"{mutant.name!r}: its text must stand once in {PACKAGE}/, and stands {len(found)} "
            f"times: write anew what it replaces.\n{mutant.before}"
        )
    return found[0]


def planted(mutant: Mutant, root: Path = ROOT) -> str:
    """The file's source with the mutant in it."""
    return file_of(mutant, root).read_text("utf-8").replace(mutant.before, mutant.after)


def run_tests(tests: Iterable[str], root: Path) -> Outcome:
    """Runs some tests in a copy of the tree, slow ones too."""
    store = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        # A mutant may be as long as what it replaces, and written in the same second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": store,
    }
    options = ["-x", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
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
    return Outcome(process.returncode, process.stdout)


def run_with(mutant: Mutant, root: Path) -> Outcome:
    """Runs a mutant's tests with the mutant planted, and takes it out again."""
    path = file_of(mutant, root)
    source = path.read_text("utf-8")
    path.write_text(planted(mutant, root), "utf-8")
    try:
        return run_tests(mutant.tests, root)
    finally:
        path.write_text(source, "utf-8")


def reason(outcome: Outcome) -> str:
    """The test that failed, and how."""
    lines = re.findall(r"^(?:FAILED|ERROR) (.*)", outcome.said, re.MULTILINE)
    return lines[0].split("/")[-1] if lines else outcome.said.strip().rpartition("\n")[2]


def unfit(mutants: Iterable[Mutant], pool: concurrent.futures.Executor, copies: queue.Queue) -> str:
    """What the tests say that fail without any mutant, and so would kill everything."""
    by_file = collections.defaultdict(dict)
    for mutant in mutants:
        for test in mutant.tests:
            by_file[test.partition("::")[0]][test] = None
    outcomes = pool.map(lambda tests: with_copy(copies, run_tests, tests), by_file.values())
    return "\n".join(outcome.said for outcome in outcomes if outcome.status != PASSED)


def with_copy(copies: queue.Queue, function: object, argument: object) -> Outcome:
    """Calls a function with a copy of the tree that nobody else uses."""
    root = copies.get()
    try:
        return function(argument, root)
    finally:
        copies.put(root)


def main(words: list[str]) -> int:
    """Runs the mutants whose names have one of the words in them, or all."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    mutants = [m for m in chosen if not m.equivalent]
    start, survivors, broken = time.monotonic(), [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        copies: queue.Queue = queue.Queue()
        for number in range(AT_ONCE):
            copy = Path(folder) / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
            copies.put(copy)
        said = unfit(mutants, pool, copies)
        if said:
            print(f"{said}\nThese fail without any mutant: mend them first.")
            return 1
        print(f"All tests pass without a mutant ({time.monotonic() - start:.0f} s).", flush=True)
        runs = {pool.submit(with_copy, copies, run_with, mutant): mutant for mutant in mutants}
        for done in concurrent.futures.as_completed(runs):
            mutant, outcome = runs[done], done.result()
            verdict = {PASSED: "SURVIVED", FAILED: "killed"}.get(outcome.status, "BROKEN")
            survivors += [mutant] if verdict == "SURVIVED" else []
            broken += [mutant] if verdict == "BROKEN" else []
            how = "" if verdict == "SURVIVED" else f": {reason(outcome)}"
            print(f"{verdict:<9} {mutant.name}{how}", flush=True)
    for mutant in chosen:
        if mutant.equivalent:
            print(f"harmless  {mutant.name}: {mutant.equivalent}")
    print(
        f"{len(mutants)} mutants in {time.monotonic() - start:.0f} s: "
        f"{len(survivors)} survived, {len(broken)} could not be run."
    )
    for mutant in survivors:
        print(f"  survived: {mutant.name} ({file_of(mutant).relative_to(ROOT)})")
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
