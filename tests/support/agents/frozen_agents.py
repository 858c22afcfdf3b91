"""Tool agents that are stopped anywhere and go on from bytes: here, or in another process.

`python -m tests.support.agents.frozen_agents RECORD...` continues a group from each file and prints what it came to; an
empty file is that of a group of which nothing was kept.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.resume.journal_records import decode_unfinished, encode_unfinished
from tests.support.agents.scripted_agents import (
    Counter,
    KeepingRewards,
    ScriptedBatcher,
    agent_runner,
    call_text,
    toolbox_of,
)
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

GROUP = 5
JOURNAL_POINTS = 7  # between two writes of the journal, as `rollout.journal_s` seconds are in a run
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
    """Counts the points at which something waits; at point `at` everything stops.

    `record`: what the group had then. `journal`: what was written before: at every seventh point, and before each call
    of `book`, of which there were `intents`. `calls`: those that were made before, by tool.
    """

    at: int = -1
    seen: int = 0
    record: bytes = b""
    phase: str = ""
    attempt: Any = None
    calls: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    journal: list[bytes] = field(default_factory=list)
    intents: int = 0

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        self.seen += 1
        if self.seen - 1 == self.at:
            self.note()
            loop = self.attempt.runner.groups.progress[GROUP].begun().loops.get(0)
            self.phase = json.loads(loop.state)["phase"] if loop else "generating"
            raise Stopped
        if self.seen % JOURNAL_POINTS == 0 and not 0 <= self.at < self.seen:
            self.write()

    async def persist(self, group: int) -> None:
        """Write the journal before a call that must not be repeated, as `RolloutJournal.persist` does."""
        if not 0 <= self.at < self.seen:  # what runs on after the stop writes nothing
            self.intents += 1
            self.write()
        await self()

    def note(self) -> None:
        """Take what there is now. Other tasks may run on before they are cancelled; in a killed process they do not."""
        self.calls = {tool.name: list(tool.calls) for tool in (self.attempt.add, self.attempt.book)}
        self.record = self._encoded()

    def write(self) -> None:
        """Write the journal."""
        self.journal.append(self._encoded())

    def _encoded(self) -> bytes:
        return encode_unfinished(GROUP, self.attempt.runner.groups.progress[GROUP].begun(), "problem")

    @property
    def written(self) -> bytes:
        """The last record of the journal; b"" if there is none."""
        return self.journal[-1] if self.journal else b""

    @property
    def unmade(self) -> int:
        """Calls of `book` that were about to be made."""
        return self.intents - len(self.calls["book"])


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
        self.runner.groups.persist = self.stop.persist  # type: ignore[method-assign]

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


def interrupted_books(kept: UnfinishedGroup) -> int:
    """Count the calls of `book` whose intent is kept, without an answer."""
    loops = kept.loops.values()
    open_calls = [
        (json.loads(loop.state)["calls"], json.loads(loop.state)["answers"], loop)
        for loop in loops
        if any(call.text is None for call in loop.calls.values())
    ]
    return sum(calls[len(answers)]["name"] == "book" for calls, answers, _ in open_calls)


def at_freezes(then: Callable[[str, int], None]) -> Callable[[Any, Any], None]:
    """Return a `AgentContext.freeze` that calls `then` after each of the first sample: phase, how many before."""
    freeze, seen = AgentContext.freeze, dict[str, int]()

    def freeze_and_tell(self: Any, state: Any) -> None:
        freeze(self, state)
        if self.sample_index == 0:
            number = seen[state.phase] = seen.get(state.phase, -1) + 1
            then(state.phase, number)

    return freeze_and_tell


def stops_at_freezes() -> dict[tuple[str, int], Stop]:
    """The group after each freeze of its first sample; some states wait for nothing, so no point is in them."""
    attempt, stops = Attempt(), dict[tuple[str, int], Stop]()

    def keep(phase: str, number: int) -> None:
        now = attempt.stop
        now.note()
        stops[phase, number] = Stop(
            record=now.record, phase=phase, calls=now.calls, journal=list(now.journal), intents=now.intents
        )

    freeze = AgentContext.freeze
    AgentContext.freeze = at_freezes(keep)  # type: ignore[method-assign]
    try:
        attempt.run()
    finally:
        AgentContext.freeze = freeze  # type: ignore[method-assign]
    return stops


def go_on(path: Path) -> dict[str, Any]:
    """Continue the group from the record in a file; return what it comes to."""
    attempt, record = Attempt(), path.read_bytes()
    return outcome(attempt.run(decode_unfinished(record) if record else None), attempt)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(json.dumps(go_on(Path(path))))
