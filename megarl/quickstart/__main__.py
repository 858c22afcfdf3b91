"""`python -m megarl.quickstart --out DIR` makes the quickstart's data, tokenizer and checkpoint, once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

# Progress bars and notices of the libraries would hide this program's own output. They read these at import.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from megarl.quickstart.build import build_assets
from megarl.quickstart.warm_start import WarmStart

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and make the assets; return the exit status, 2 for an error of the user."""
    parser = argparse.ArgumentParser(prog="python -m megarl.quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, initialisation and batches")
    parser.add_argument("--warm-start-steps", type=int, default=WarmStart.steps, help="steps of supervised training")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    try:
        made = build_assets(arguments.out, arguments.seed, replace(WarmStart(), steps=arguments.warm_start_steps))
    except ValueError as error:
        logger.error("quickstart: %s", error)
        return 2
    if made:
        logger.info("made %s in %.0f s", arguments.out, time.monotonic() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
