"""Lines of `samples.jsonl`: a few trajectories of every step as text, for people to read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megarl.queue.trajectory import Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens kept (they are what the model really wrote)."""


def choose_keys(keys: Sequence[str], count: int, seed: int, step: int) -> list[str]:
    """`count` of a batch's sample keys (all, if there are fewer), in (group, sample) order.

    A random draw that depends only on (seed, step, the keys), never on the order of arrival.
    """
    ordered = sorted(keys, key=lambda key: tuple(map(int, key.split(":"))))
    if count >= len(ordered):
        return ordered
    picked = random.Random(f"{seed}:{step}").sample(range(len(ordered)), count)
    return [ordered[index] for index in sorted(picked)]


def sample_record(step: int, trajectory: Trajectory, decode: Decode, reference: Any) -> dict[str, Any]:
    """One line of `samples.jsonl`, JSON-ready (a reward that is not finite becomes null).

    `reference` is the problem's reference answer, None where it is not known.
    """
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
