"""Tool agents that are stopped anywhere and go on from bytes: here, or in another process.

`python -m tests.support.frozen_agents RECORD...` continues a group from each file and prints what it came to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.group_progress import UnfinishedGroup
from megarl.rollout.group_runner import GroupRunner
from megarl.rollout.journal_records import decode_unfinished, encode_unfinished
from tests.support.configs import config as config_of
from tests.support.scripted_agents import (
    Counter,
    KeepingRewards,
    ScriptedBatcher,
    agent_runner,
    call_text,
    toolbox_of,
)

GROUP = 5
TURNS = [
    f"First.\n{call_text('add', a=1, b=1)}{call_text('book', a=7, b=0)}",
    call_text("add", a=2, b=2),
    f"{call_text('book', a=8, b=0)}<tool_call>\nnot JSON\n</tool_call>",
    "The answer is 4.",
]


class Stopped(BaseException):
    """Raised at the point where the process is killed."""


@dataclass
class Stop:
    """Counts the points at which something waits; at point `at` everything stops."""

    at: int = -1
    seen: int = 0
    record: bytes = b""
    phase: str = ""
    attempt: Any = None
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # that were made before, by tool

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        self.seen += 1
        if self.seen - 1 == self.at:
            progress = self.attempt.runner.progress[GROUP].begun()
            # Other tasks may run on for a moment before they are cancelled; in a killed process they do not.
            self.calls = {tool.name: list(tool.calls) for tool in (self.attempt.add, self.attempt.book)}
            self.record = encode_unfinished(GROUP, progress, "problem")
            self.phase = json.loads(progress.loops[0].state)["phase"] if progress.loops.get(0) else "generating"
            raise Stopped


@dataclass
class Attempt:
    """One attempt at the group of one sample: a process, as it were."""

    stop: Stop = field(default_factory=Stop)
    config: Config = field(default_factory=lambda: config_of("model", batch={"groups": 1, "samples_per_group": 2}))

    def __post_init__(self) -> None:
        self.add, self.book = Counter("add"), Counter("book", idempotent=False)
        for tool in (self.add, self.book):
            tool.hold = self.stop
        self.batcher, self.rewards = ScriptedBatcher(TURNS, pause=self.stop), KeepingRewards()
        self.runner: GroupRunner = agent_runner(
            self.config, ToolAgent(), toolbox_of(self.add, self.book), self.batcher, self.rewards, 1024
        )
        self.stop.attempt = self

    def run(self, kept: UnfinishedGroup | None = None) -> list[Trajectory]:
        """Return the trajectories; raises Stopped at the point of the stop."""
        return asyncio.run(self._run(kept))

    async def _run(self, kept: UnfinishedGroup | None) -> list[Trajectory]:
        task = asyncio.ensure_future(self.runner.run(GROUP, kept))
        await asyncio.wait({task})
        return task.result()


def outcome(rows: list[Trajectory], attempt: Attempt) -> dict[str, Any]:
    """The end of an attempt, as JSON content."""
    return {
        "rows": [asdict(row) for row in rows],
        "turns": [[asdict(turn) for turn in judged.turns] for judged in attempt.rewards.judged],
        "add": attempt.add.calls,
        "book": attempt.book.calls,
    }


def undisturbed() -> tuple[dict[str, Any], int]:
    """Return the outcome of a group that nothing stops, and the number of points at which it could be stopped."""
    attempt = Attempt()
    rows = attempt.run()
    return json.loads(json.dumps(outcome(rows, attempt))), attempt.stop.seen


def interrupted_books(record: bytes) -> int:
    """Count the calls of `book` whose intent is in a record, without an answer."""
    loops = decode_unfinished(record).loops.values()
    open_calls = [
        (json.loads(loop.state)["calls"], json.loads(loop.state)["answers"], loop)
        for loop in loops
        if any(call.text is None for call in loop.calls.values())
    ]
    return sum(calls[len(answers)]["name"] == "book" for calls, answers, _ in open_calls)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        attempt = Attempt()
        rows = attempt.run(decode_unfinished(Path(path).read_bytes()))
        print(json.dumps(outcome(rows, attempt)))
