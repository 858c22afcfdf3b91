"""`python -m tools.images` draws docs/images again; with `--run RUN_DIR` from the numbers of that quickstart.

Without a run it draws from docs/images/quickstart_run.json, so the same files come out on every machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.images.drawings import IMAGES, NUMBERS, drawings
from tools.images.quickstart_run import reduced


def main(argv: list[str] | None = None) -> int:
    """Write the drawings; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    parser.add_argument("--run", type=Path, help="directory of a finished quickstart, such as runs/quickstart")
    options = parser.parse_args(argv)
    if options.run is not None:
        (IMAGES / NUMBERS).write_text(reduced(options.run).model_dump_json(indent=1) + "\n")
    for name, content in drawings().items():
        (IMAGES / name).write_text(content)
        sys.stdout.write(f"{IMAGES / name}: drawn\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
