"""A reasoning-gym data set as a verifiers taskset; reasoning-gym scores the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import reasoning_gym
import verifiers.v1 as vf
from chat_loop import ChatLoop, last_answer
from pydantic import Field

__all__ = ["ChatLoop", "GymTaskset"]


class GymConfig(vf.TasksetConfig):
    """`dataset`: its name in reasoning-gym; `options`: the data set's."""

    dataset: str = "chain_sum"
    seed: int = 0
    size: int = 1000
    options: dict[str, Any] = Field(default_factory=dict)


class GymData(vf.TaskData):
    dataset: str
    entry: dict[str, Any]


class GymTask(vf.Task[GymData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        judge = reasoning_gym.get_score_answer_fn(self.data.dataset)
        return float(judge(last_answer(trace).strip(), self.data.entry))


class GymTaskset(vf.Taskset[GymTask, GymConfig]):
    def load(self) -> Iterator[GymTask]:
        config = self.config
        made = reasoning_gym.create_dataset(config.dataset, seed=config.seed, size=config.size, **config.options)
        for entry in made:
            data = GymData(prompt=entry["question"], dataset=config.dataset, entry=entry)
            yield GymTask(data, config.task)
