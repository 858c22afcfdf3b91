"""GSM8K as a verifiers taskset: the reward is 1 if the answer's last number is right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from chat_loop import ChatLoop, last_answer

__all__ = ["ChatLoop", "Gsm8kTaskset"]


class Gsm8kConfig(vf.TasksetConfig):
    """`file`: JSONL with `question` and `answer`, whose last line is `#### NUMBER`. Only the exporter reads it."""

    file: Path = Path("gsm8k.jsonl")


class Gsm8kData(vf.TaskData):
    answer: str


class Gsm8kTask(vf.Task[Gsm8kData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d[\d,]*\.?\d*", last_answer(trace))
        return float(bool(numbers) and _number(numbers[-1]) == _number(self.data.answer))


class Gsm8kTaskset(vf.Taskset[Gsm8kTask, Gsm8kConfig]):
    def load(self) -> Iterator[Gsm8kTask]:
        for line in self.config.file.read_text().splitlines():
            row = json.loads(line)
            answer = row["answer"].rpartition("####")[2].strip()
            yield Gsm8kTask(Gsm8kData(prompt=row["question"], answer=answer), self.config.task)


def _number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))
