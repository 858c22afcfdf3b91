"""`samples.jsonl`: a few trajectories of every step as text, for people to read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.queue.schema import Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens kept (they are what the model really wrote)."""


class SampleLog:
    """Appends `per_step` trajectories of each step to a JSONL file; 0 writes nothing.

    The choice is random but depends only on (seed, step, the keys of the batch), not on the order of arrival.
    """

    def __init__(self, path: Path, decode: Decode, *, per_step: int, seed: int = 0) -> None:
        self.path = path
        self.per_step = per_step
        self._decode = decode
        self._seed = seed

    def write(self, step: int, trajectories: Sequence[Trajectory], references: dict[int, Any]) -> int:
        """Write one step's share, whole lines in one append; returns how many.

        `references` maps a group id to its reference answer; a group that is not in it gets null.
        """
        chosen = choose(trajectories, self.per_step, self._seed, step)
        lines = [sample_record(step, each, self._decode, references.get(each.group_id)) for each in chosen]
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        return len(lines)


def choose(trajectories: Sequence[Trajectory], count: int, seed: int, step: int) -> list[Trajectory]:
    """`count` of the trajectories (all, if there are fewer), by a seeded draw, in (group, sample) order."""
    ordered = sorted(trajectories, key=lambda each: (each.group_id, each.sample_index))
    if count >= len(ordered):
        return ordered
    picked = random.Random(f"{seed}:{step}").sample(range(len(ordered)), count)
    return [ordered[index] for index in sorted(picked)]


def sample_record(step: int, trajectory: Trajectory, decode: Decode, reference: Any) -> dict[str, Any]:
    """One line of `samples.jsonl`; JSON-ready (a reward that is not finite becomes null)."""
    return {
        "step": step,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "prompt": decode(trajectory.prompt_ids),
        "response": decode(trajectory.response_ids),
        "reference": reference,
        "reward": _finite(trajectory.reward),
        "reward_components": {name: _finite(value) for name, value in trajectory.reward_components.items()},
        "finish_reason": trajectory.finish_reason,
        "response_tokens": len(trajectory.response_ids),
        "versions": [asdict(span) for span in trajectory.versions],
        "status": trajectory.status,
        "failure": trajectory.failure,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
