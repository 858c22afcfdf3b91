"""Programs per second in the sandbox, each in a fresh process, against the bound of 50 on two cores.

    python -m benchmarks.sandbox --json sandbox.json

The sandbox runs as many programs at once as it has places, one for each core; `--slots` gives another number. The rate
of plain interpreters, started in the same way without a sandbox, is there for comparison. All programs print a number.

Then programs are killed that would run on, each with a process in a session of its own: by their time limit, by the
end of the sandbox, and with the process that runs them. What is left of them after 10 s is counted; if anything is, the
exit status is 1, of a quick run too. It takes about two minutes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.lib.report import ROOT, Ratio, finish, new_parser
from megarl.sandbox.availability import sandbox_problem
from megarl.sandbox.guard import marked
from megarl.sandbox.installation import this_installation
from megarl.sandbox.limits import Limits, RunResult, SandboxError
from megarl.sandbox.runner import Sandbox

BOUND = 50.0  # programs per second on two cores
PROGRAM = "print(6 * 7)"
START_S, LIMIT_S, GONE_S = 120.0, 5.0, 10.0
# `@name@`: what the kernel calls its two processes, of which the second one leaves the session of the first.
STAYING = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"@name@", 0, 0, 0)
if os.fork() == 0:
    os.setsid()
else:
    print("running", flush=True)
time.sleep(1000)
"""
# Runs as many of them as it is told to, until it is killed. Arguments: the number and the name.
OWNER = """
import sys, threading
from benchmarks.sandbox import keep_running
for _ in range(int(sys.argv[1])):
    threading.Thread(target=keep_running, args=(sys.argv[2],)).start()
"""


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


def named(name: str) -> list[int]:
    """Return the pids of the processes on this host that have a name and have not ended."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit() and f"({name})" in (stat := (each / "stat").read_text()):
                state = stat.rpartition(")")[2].split()[0]
                found += [int(each.name)] if state not in "ZX" else []
    return found


def keep_running(name: str, sandbox: Sandbox | None = None, timeout_s: float = 1000.0) -> bool:
    """Run one program that stays, until it is killed; return whether it ran until its limit."""
    try:
        result = (sandbox or Sandbox(slots=1)).run_now(STAYING.replace("@name@", name), timeout_s=timeout_s)
    except SandboxError:  # the sandbox was closed meanwhile
        return False
    return result.stdout == "running\n" and result.limit == "time"


def await_running(name: str, count: int) -> None:
    """Wait until that many processes have the name; raises RuntimeError, so that nothing is counted that never ran."""
    until = time.monotonic() + START_S
    while (found := len(named(name))) < count:
        if time.monotonic() > until:
            raise RuntimeError(f"{found} of {count} processes ran after {START_S:g} s, so that there is little to kill")
        time.sleep(0.02)


def left_over(name: str, owner: int) -> int:
    """Return how many processes of killed programs there are: as soon as there are none, after 10 s at the latest."""
    until = time.monotonic() + GONE_S
    while (left := len(named(name)) + len(marked(f"megarl-{owner}-"))) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def left_after_limit(slots: int) -> int:
    """Have programs killed at their time limit; return how many processes are left."""
    name, sandbox = f"m{uuid.uuid4().hex[:12]}", Sandbox(slots=slots)
    with ThreadPoolExecutor(slots) as threads:
        killed = list(threads.map(lambda _: keep_running(name, sandbox, LIMIT_S), range(slots)))
    if not all(killed):
        raise RuntimeError(f"{killed.count(False)} of {slots} programs did not run until their limit of {LIMIT_S:g} s")
    left = left_over(name, os.getpid())
    sandbox.close()
    return left


def left_after_close(slots: int) -> int:
    """Close the sandbox of programs that run; return how many processes are left."""
    name, sandbox = f"m{uuid.uuid4().hex[:12]}", Sandbox(slots=slots)
    for _ in range(slots):
        threading.Thread(target=keep_running, args=(name, sandbox)).start()
    await_running(name, 2 * slots)
    sandbox.close()
    return left_over(name, os.getpid())


def left_after_owner(slots: int) -> int:
    """Kill the process that runs programs; return how many processes are left."""
    name = f"m{uuid.uuid4().hex[:12]}"
    line = [sys.executable, "-c", OWNER, str(slots), name]
    owner = subprocess.Popen(line, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        await_running(name, 2 * slots)
    finally:
        owner.kill()
        owner.wait()
    return left_over(name, owner.pid)


def measure(slots: int | None, count: int, rounds: int) -> list[Ratio]:
    """Return the rows of the report. `slots` None: the sandbox's default; `rounds`: of kills in each way."""
    sandbox = Sandbox(Limits(timeout_s=60.0), slots=slots, queue_s=600.0)
    slots = sandbox.slots
    asyncio.run(sandboxed(sandbox, min(count, 8)))  # what is made once
    rate, seconds = asyncio.run(sandboxed(sandbox, count))
    sandbox.close()
    details = {
        "programs_per_second": round(rate, 1),
        "median_ms": round(1e3 * seconds[len(seconds) // 2], 1),
        "slowest_ms": round(1e3 * seconds[-1], 1),
        "plain_per_second": round(plain(slots, count), 1),
        "programs": count,
        "slots": slots,
        "cores": len(os.sched_getaffinity(0)),
    }
    ways = {"time_limit": left_after_limit, "end_of_sandbox": left_after_close, "kill_of_owner": left_after_owner}
    left = {way: sum(kills(slots) for _ in range(rounds)) for way, kills in ways.items()}
    return rows_of(rate, details, left, len(ways) * rounds * slots)


def rows_of(rate: float, details: dict[str, Any], left: dict[str, int], programs: int) -> list[Ratio]:
    """Return the rows of the report. `left`: processes by the way in which `programs` programs were killed."""
    kills = {**left, "programs": programs, "processes_each": 2}
    return [
        Ratio("sandboxed programs per second / 50", rate / BOUND, 1.0, at_least=True, details=details),
        Ratio("processes left after kills", float(sum(left.values())), 0.0, details=kills),
    ]


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--slots", type=int, help="programs at once (default: that of the sandbox, one for each core)")
    parser.add_argument("--programs", type=int, default=500, help="programs that are measured")
    parser.add_argument("--kills", type=int, default=10, help="how often programs are killed in each way, one per slot")
    options = parser.parse_args()
    if (problem := sandbox_problem()) is not None:
        sys.stderr.write(f"sandbox: {problem}\n")
        return 2
    sizes = (10, 1) if options.quick else (options.programs, options.kills)
    rate, left = measure(options.slots, *sizes)
    status = finish([rate, left], options)
    return status if left.ok else 1


if __name__ == "__main__":
    sys.exit(main())
