"""The smallest environment: the reward is the share of digits in the model's answer."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from chat_loop import ChatLoop, last_answer

__all__ = ["ChatLoop", "DigitsTaskset"]


class DigitsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        said = last_answer(trace)
        return sum(letter.isdigit() for letter in said) / max(1, len(said))


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for number in range(1000):
            yield DigitsTask(vf.TaskData(prompt=f"Count to {number}."), self.config.task)
