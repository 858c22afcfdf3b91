"""The stand-ins of benchmarks/agent_loops.py: replicas that call a tool and then answer, the tool, and event loops that
are watched.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from control_plane_parts import Response, TimedReplica

from megarl.rollout.controller import RolloutController
from megarl.rollout.requests import GenerateRequest
from megarl.rollout.workers.agent_worker import AgentWorker
from megarl.tools.tool import ToolAnswer

SHORTEST_TURN, LONGEST_TURN = 128, 250  # tokens
TOOL_S = 0.05
TURNS = "turns"  # the folder of what the watches have seen, in the run directory
TICK_S = 0.01
LINE_S = 0.5


class TurnReplica(TimedReplica):
    """Answers the first request of a sample by a call of the tool, and the second one by a solution.

    `responses`: those of the first turn, then as many of the second one.
    """

    def __init__(self, index: int, seconds_per_token: float, responses: list[Response]) -> None:
        super().__init__(index, seconds_per_token, responses)
        half = len(responses) // 2
        self._turns, self._draws = (responses[:half], responses[half:]), random.Random(index)

    def _respond(self, request: GenerateRequest) -> list[int]:
        turn = int(request.request_id.rsplit("-", 1)[1].partition(".")[0])
        return self._draws.choice(self._turns[turn]).of_length(self._draws.randint(SHORTEST_TURN, LONGEST_TURN))


class Slow:
    """A tool that takes TOOL_S."""

    name = "slow"
    description = "Wait."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
    }
    idempotent = True

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Answer after a while."""
        await asyncio.sleep(TOOL_S)
        return ToolAnswer(f"the number is {arguments.get('number')}")

    async def close(self) -> None:
        """Nothing has to be closed."""


@dataclass(frozen=True)
class LongestTurn:
    """The longest turn of an event loop that ended before `at` (monotonic clock), since the one before it in the file.

    `wall_s`: how late a timer was that was due in it; `ready_s`: the part of it in which the loop's thread could run,
    but other threads and processes had the cores; `cpu_s`: the most that the thread has computed in any turn.
    """

    at: float
    wall_s: float
    cpu_s: float
    ready_s: float = 0.0


def seconds_ready() -> Callable[[], float]:
    """Return a function that tells for how many seconds this thread has waited for a core, since it began.

    Source: the second number of /proc/thread-self/schedstat, in ns. Always 0 where the kernel has no such file.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except FileNotFoundError:
        return lambda: 0.0
    return lambda: int(os.pread(file, 100, 0).split()[1]) / 1e9


class LoopWatch:
    """Measures the turns of the present event loop, and writes the longest ones to RUN_DIR/turns/NAME.jsonl."""

    def __init__(self, run_dir: Path, name: str) -> None:
        folder = run_dir / TURNS
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{name}.jsonl"
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        wall_s = cpu_s = ready_s = 0.0
        waited_s = seconds_ready()
        line_at = time.monotonic() + LINE_S
        while True:
            wall, cpu, ready = time.monotonic(), time.thread_time(), waited_s()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - wall - TICK_S
            if late_s > wall_s:
                wall_s, ready_s = late_s, min(late_s, waited_s() - ready)
            cpu_s = max(cpu_s, time.thread_time() - cpu)
            if now >= line_at:
                with self._path.open("a") as file:
                    file.write(json.dumps(vars(LongestTurn(now, wall_s, cpu_s, ready_s))) + "\n")
                wall_s, cpu_s, ready_s, line_at = 0.0, 0.0, 0.0, now + LINE_S


def longest_turns(run_dir: Path, begin: float, end: float, names: Iterable[str]) -> dict[str, LongestTurn]:
    """Return the longest turns of watched loops between two times (monotonic clock), by the name of the watch.

    Raises FileNotFoundError for a loop that nobody has watched. One that has written nothing between these times was
    blocked all the time.
    """
    return {name: _longest(_lines(run_dir / TURNS / f"{name}.jsonl"), begin, end) for name in names}


def _lines(path: Path) -> Iterable[LongestTurn]:
    return [LongestTurn(**json.loads(line)) for line in path.read_text().splitlines()]


def _longest(turns: Iterable[LongestTurn], begin: float, end: float) -> LongestTurn:
    within = [each for each in turns if begin <= each.at <= end]
    if not within:
        return LongestTurn(end, end - begin, 0.0)
    longest = max(within, key=lambda each: each.wall_s)
    return LongestTurn(end, longest.wall_s, max(each.cpu_s for each in within), longest.ready_s)


class WatchedWorker(AgentWorker):
    """An agent worker whose event loop is watched."""

    async def start(self) -> None:
        await super().start()
        self._watch = LoopWatch(self.run_dir, f"worker-{self.spec.index}")


class WatchedController(RolloutController):
    """The controller, with its event loop and those of its workers watched."""

    worker_kind = WatchedWorker

    async def start(self) -> dict[str, float]:
        result = await super().start()
        self._watch = LoopWatch(self.run_dir, "controller")
        return result
