"""Sums of two long numbers, as a verifiers taskset with a tool: the model may call `add`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import verifiers.v1 as vf
from chat_loop import ChatLoop, Tool, last_answer

__all__ = ["AddingChat", "SumsTaskset"]


def add(a: int, b: int) -> int:
    return int(a) + int(b)


class AddingChat(ChatLoop):
    tools: ClassVar[dict[str, Tool]] = {"add": add}
    schemas: ClassVar[list[dict[str, Any]]] = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Add two whole numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                },
            },
        }
    ]


class SumsConfig(vf.TasksetConfig):
    digits: int = 6
    seed: int = 0


class SumsData(vf.TaskData):
    total: int


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in last_answer(trace))

    @vf.metric
    async def tool_answers(self, trace: vf.Trace) -> float:
        return float(sum(node.message.role == "tool" for node in trace.nodes))


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    INFINITE = True

    def load(self) -> Iterator[SumsTask]:
        rng = random.Random(self.config.seed)
        while True:
            a, b = (rng.randrange(10 ** (self.config.digits - 1), 10**self.config.digits) for _ in range(2))
            yield SumsTask(SumsData(prompt=f"What is {a} + {b}?", total=a + b), self.config.task)
