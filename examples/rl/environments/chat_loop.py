"""A verifiers harness that runs inside the environment server: it chats and calls the task's tools.

verifiers' own harnesses are installed by uv on first run; this one needs only verifiers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf

Tool = Callable[..., object]


class ChatConfig(vf.HarnessConfig):
    """`most_turns`: the model's maximum number of answers per dialogue."""

    most_turns: int = 8


class ChatLoop(vf.Harness[ChatConfig]):
    """Asks the model until it stops calling tools. A subclass names its tools, with their schemas."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    tools: ClassVar[Mapping[str, Tool]] = {}
    schemas: ClassVar[list[dict[str, Any]]] = []

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **_: object,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        body = {"model": ctx.model, **({"tools": self.schemas} if self.schemas else {})}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as http:
            for _turn in range(self.config.most_turns):
                answer = await http.post(f"{endpoint}/chat/completions", json={**body, "messages": messages})
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]
                calls = said.get("tool_calls") or []
                messages.append(said)
                if not calls:
                    break
                messages += [self._answer(call) for call in calls]
        return vf.ProgramResult(0, "", "")

    def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool; for a mistake by the model, the answer is the error."""
        try:
            arguments = json.loads(call["function"]["arguments"])
            text = str(self.tools[call["function"]["name"]](**arguments))
        except (KeyError, TypeError, ValueError) as error:
            text = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


def last_answer(trace: vf.Trace) -> str:
    """The text of the model's last turn."""
    said = [node.message for node in trace.nodes if node.message.role == "assistant"]
    return str(said[-1].content or "") if said else ""
