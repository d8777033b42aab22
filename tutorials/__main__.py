"""Runs the tutorials in full and writes their pages.

python -m tutorials                  all of them
python -m tutorials hello network    some
"""

import argparse
import time
from pathlib import Path

from tutorials import TUTORIALS, rendering

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "tutorials"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tutorials", description=__doc__)
    parser.add_argument("names", nargs="*", default=TUTORIALS, metavar="|".join(TUTORIALS))
    for name in parser.parse_args().names:
        if name not in TUTORIALS:
            parser.error(f"there is no tutorial {name!r}; there are {', '.join(TUTORIALS)}")
        start = time.perf_counter()
        page = rendering.run(HERE / f"{name}.py", PAGES)
        (PAGES / f"{name}.md").write_text(page, encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
