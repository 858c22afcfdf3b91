"""A taskset of verifiers whose program asks two questions in one dialogue."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import verifiers.v1 as vf
from chat_loop import ChatLoop

__all__ = ["AskedTwice", "AskedTwiceTaskset"]
AGAIN = "Once more?"


class AskedTwice(ChatLoop):
    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: vf.TaskData,
        **_: object,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": self.resolve_prompt(data)[1]}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as http:
            for _turn in range(2):
                body = {"model": ctx.model, "messages": messages}
                answer = await http.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": AGAIN}]
        return vf.ProgramResult(0, "", "")


class TwiceTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def done(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "assistant" for node in trace.nodes))


class AskedTwiceTaskset(vf.Taskset[TwiceTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TwiceTask]:
        for number in range(10):
            yield TwiceTask(vf.TaskData(prompt=f"Count to {number}."), self.config.task)
