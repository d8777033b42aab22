"""Runs the tutorials in full and writes their pages.

python -m tutorials                  all of them
python -m tutorials hello network    some
python -m tutorials --quick          with small settings, to see that they run; writes nothing
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from tutorials import TUTORIALS, rendering

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "tutorials"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", default=TUTORIALS, metavar="|".join(TUTORIALS))
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in TUTORIALS:
            parser.error(f"there is no tutorial {name!r}; there are {', '.join(TUTORIALS)}")
    with tempfile.TemporaryDirectory() as elsewhere:
        folder = PAGES
        if arguments.quick:
            os.environ["QUICK_TUTORIALS"] = "1"
            folder = Path(elsewhere)
        for name in arguments.names:
            start = time.perf_counter()
            page = rendering.run(HERE / f"{name}.py", folder)
            (folder / f"{name}.md").write_text(page, encoding="utf-8")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
