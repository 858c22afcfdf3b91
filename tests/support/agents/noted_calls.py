"""A tool agent whose tool must not be called twice: each call is a line in a file, `GROUP:SAMPLE:NUMBER`."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.tools.tool import ToolAnswer
from tests.support.models.calling_model import PRINTED


class _Telling:
    """A context that tells the tool for which sample it is called, and the how manieth call of it this is."""

    def __init__(self, ctx: AgentContext) -> None:
        self._ctx: Any = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        caller = f"{self._ctx.group_id}:{self._ctx.sample_index}:{self._ctx._calls + 1}"
        answer: ToolAnswer = await self._ctx.call(tool, {**arguments, "caller": caller})
        return answer


class NotedToolAgent(ToolAgent):
    """The tool agent; a tool that it calls can tell for which sample."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """See `ToolAgent.run`."""
        telling: Any = _Telling(ctx)
        return await super().run(telling)


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
        with self.path.open("a") as file:
            file.write(f"{arguments['caller']}\n")
        await asyncio.sleep(self.seconds)
        return ToolAnswer(f"{PRINTED}\n")

    async def close(self) -> None:
        """Do nothing: it has no processes."""
