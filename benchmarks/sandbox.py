#!/usr/bin/env python3
"""Programs per second in the sandbox, each in a fresh process, against the bound of 50 on two cores.

    python benchmarks/sandbox.py --json sandbox.json

The sandbox runs as many programs at once as it has places, one for each core; `--slots` gives another number. The rate
of plain interpreters, started in the same way without a sandbox, is there for comparison. All programs print a number.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import Ratio, add_options, finish

from megarl.sandbox.availability import sandbox_problem
from megarl.sandbox.bounds import Limits, RunResult
from megarl.sandbox.guard import marked
from megarl.sandbox.installation import this_installation
from megarl.sandbox.runner import Sandbox

BOUND = 50.0  # programs per second on two cores
PROGRAM = "print(6 * 7)"


async def sandboxed(sandbox: Sandbox, count: int) -> tuple[float, list[float]]:
    """Run `count` programs; return programs per second and the seconds of each, without its wait for a place."""
    began = time.perf_counter()
    results: list[RunResult] = await asyncio.gather(*(sandbox.run(PROGRAM) for _ in range(count)))
    rate = count / (time.perf_counter() - began)
    wrong = [result for result in results if result.stdout != "42\n"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {count} programs did not print 42, the first one: {wrong[0]}")
    return rate, sorted(result.seconds for result in results)


def plain(slots: int, count: int) -> float:
    """Return interpreters per second without a sandbox."""
    line = [this_installation().python, "-I", "-S", "-B", "-c", PROGRAM]
    with ThreadPoolExecutor(slots) as threads:
        began = time.perf_counter()
        list(threads.map(lambda _: subprocess.run(line, capture_output=True, check=True), range(count)))
        return count / (time.perf_counter() - began)


def measure(slots: int, count: int) -> list[Ratio]:
    """Return the rows of the report."""
    sandbox = Sandbox(Limits(timeout_s=60.0), slots=slots, queue_s=600.0)
    asyncio.run(sandboxed(sandbox, min(count, 8)))  # what is made once
    rate, seconds = asyncio.run(sandboxed(sandbox, count))
    sandbox.close()
    left = len(marked(f"megarl-{os.getpid()}-"))
    details = {
        "programs_per_second": round(rate, 1),
        "median_ms": round(1e3 * seconds[len(seconds) // 2], 1),
        "slowest_ms": round(1e3 * seconds[-1], 1),
        "plain_per_second": round(plain(slots, count), 1),
        "programs": count,
        "slots": slots,
        "cores": len(os.sched_getaffinity(0)),
    }
    return [
        Ratio("sandboxed programs per second / 50", rate / BOUND, 1.0, at_least=True, details=details),
        Ratio("processes left behind", float(left), 0.0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=len(os.sched_getaffinity(0)), help="programs at once")
    parser.add_argument("--programs", type=int, default=500, help="programs that are measured")
    add_options(parser)
    options = parser.parse_args()
    if (problem := sandbox_problem()) is not None:
        sys.stderr.write(f"sandbox: {problem}\n")
        return 2
    return finish(measure(options.slots, 10 if options.quick else options.programs), options)


if __name__ == "__main__":
    sys.exit(main())
