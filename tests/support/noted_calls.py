"""A tool agent whose tool must not be called twice: each call is a line in a file, `GROUP:SAMPLE:NUMBER`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.tools.tool import ToolAnswer
from tests.support.calling_model import PRINTED

_CALLER: ContextVar[Any] = ContextVar("caller")


class NotedToolAgent(ToolAgent):
    """The tool agent; a tool that it calls can tell for which sample."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """See `ToolAgent.run`. Each sample has a task, and so a context of variables, of its own."""
        _CALLER.set(ctx)
        return await super().run(ctx)


class NotedCalls:
    """Stands for the interpreter that `calling_model` teaches to call. A call writes its line, then takes a while."""

    name = "code_interpreter"
    description = "Run a program."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"code": {"type": "string"}}}
    idempotent = False

    def __init__(self, path: str, seconds: float) -> None:
        self.path, self.seconds = Path(path), seconds

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Return what the program would have printed."""
        ctx = _CALLER.get()
        with self.path.open("a") as file:
            file.write(f"{ctx.group_id}:{ctx.sample_index}:{ctx._calls}\n")
        await asyncio.sleep(self.seconds)
        return ToolAnswer(f"{PRINTED}\n")

    async def close(self) -> None:
        """Do nothing: it has no processes."""
