"""`python -m examples.quickstart --out DIR` makes the data, tokenizer and checkpoint of a task, once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

# Progress bars and notices of the libraries would hide this program's own output. They read these at import.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from examples.quickstart.additions_task import AdditionsTask
from examples.quickstart.bars_task import BarsTask
from examples.quickstart.build import build_assets
from examples.quickstart.demonstrations import StarterTask
from examples.quickstart.products_task import ProductsTask
from examples.quickstart.warm_start import WarmStart

logger = logging.getLogger(__name__)

TASKS: dict[str, StarterTask] = {task.name: task for task in (AdditionsTask(), ProductsTask(), BarsTask())}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and make the assets; return the exit status, 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument(
        "--task", choices=TASKS, default=AdditionsTask.name,
        help="additions: two-digit sums; calculator: products for which the model must call a tool; bars: pictures "
        "in which it must name the longest bar (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of problems, initialisation and batches")
    parser.add_argument("--warm-start-steps", type=int, help="steps of supervised training; default: the task's")
    arguments = parser.parse_args(argv)
    task = TASKS[arguments.task]
    size = WarmStart(steps=arguments.warm_start_steps or task.steps)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.monotonic()
    try:
        made = build_assets(arguments.out, arguments.seed, size, task)
    except ValueError as error:
        logger.error("quickstart: %s", error)
        return 2
    if made:
        logger.info("made %s in %.0f s", arguments.out, time.monotonic() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
