"""Runs a group of agent loops, of which one forks: `python -m tests.support.forking_loop HOW`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.single_turn import SingleTurn
from megarl.rollout.group_runner import GroupRunner
from tests.support.configs import config
from tests.support.fake_rollout import FakeBatcher, FakeRewards, FakeSource


class Forks(SingleTurn):
    """A loop whose first sample forks after it has its response."""

    async def run(self, ctx: AgentContext) -> Any:
        row = await super().run(ctx)
        if ctx.sample_index == 0 and os.fork() == 0:
            if sys.argv[1] == "raises":
                raise LookupError("in the child")
            if sys.argv[1] == "waits":
                await asyncio.sleep(0.01)
        return row


async def main() -> None:
    """Run one group."""
    source: Any = FakeSource()
    rewards: Any = FakeRewards()
    runner = GroupRunner(config("model"), Forks(), source, FakeBatcher(), rewards, partition="p")
    rows = await runner.run(0)
    os.write(1, f"rows {len(rows)}\n".encode())


if __name__ == "__main__":
    asyncio.run(main())
