"""Runs the tutorials in full, and writes their pages and notebooks.

python -m tutorials                  all of them
python -m tutorials hello network    some
python -m tutorials --quick          with small settings, to see that they run; writes nothing
"""

import argparse
import tempfile
import time
from pathlib import Path

import nbformat

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
        folder = Path(elsewhere) if arguments.quick else PAGES
        for name in arguments.names:
            start = time.perf_counter()
            source = HERE / f"{name}.py"
            page = rendering.run(source, folder, quick=arguments.quick)
            (folder / f"{name}.md").write_text(page, encoding="utf-8")
            nbformat.write(rendering.notebook(source), folder / f"{name}.ipynb")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
