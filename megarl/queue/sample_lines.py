"""Lines of `samples.jsonl`: a few trajectories of every step as text, for people to read."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megarl.queue.trajectory import Trajectory, VersionSpan, key_order

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, including special tokens, which are part of the model's output."""


def choose_keys(keys: Sequence[str], count: int, seed: int, step: int) -> list[str]:
    """Draw `count` of a batch's sample keys, or all if there are fewer; return them in (group, sample, part) order.

    The draw depends only on seed, step and the set of keys, not on their order.
    """
    ordered = sorted(keys, key=key_order)
    if count >= len(ordered):
        return ordered
    picked = random.Random(f"{seed}:{step}").sample(range(len(ordered)), count)
    return [ordered[index] for index in sorted(picked)]


def sample_record(step: int, trajectory: Trajectory, decode: Decode, reference: str | None) -> dict[str, Any]:
    """Return one line of `samples.jsonl` as JSON content; a non-finite reward becomes None.

    `reference`: the problem's reference answer, None if unknown.
    """
    return {
        "step": step,
        **({"dataset": trajectory.dataset} if trajectory.dataset else {}),
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        **({"part": trajectory.part} if trajectory.part else {}),
        **({"demonstrated": True} if trajectory.demonstrated else {}),
        "prompt": decode(trajectory.prompt_ids),
        "response": decode(trajectory.response_ids),
        **({} if all(trajectory.response_mask) else {"parts": _parts(trajectory, decode)}),
        "reference": reference,
        "reward": _finite(trajectory.reward),
        "reward_components": {name: _finite(value) for name, value in trajectory.reward_components.items()},
        **({"turn_rewards": trajectory.turn_rewards} if trajectory.turn_rewards else {}),
        "finish_reason": trajectory.finish_reason,
        "response_tokens": len(trajectory.response_ids),
        "versions": [_span(span) for span in trajectory.versions],
        "status": trajectory.status,
        "failure": trajectory.failure,
        "reward_error": trajectory.reward_error,
    }


def _parts(trajectory: Trajectory, decode: Decode) -> list[dict[str, str]]:
    """Return the text of the sampled and the inserted parts, in order."""
    parts, start = [], 0
    for sampled, tokens in groupby(trajectory.response_mask):
        end = start + len(list(tokens))
        parts.append({"by": "model" if sampled else "environment", "text": decode(trajectory.response_ids[start:end])})
        start = end
    return parts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _span(span: VersionSpan) -> dict[str, int]:
    """Return a span, without `lost` and `epoch` if no updates were lost, and without an unknown `replica`."""
    left_out = set() if span.lost else {"lost", "epoch"}
    left_out |= set() if span.replica >= 0 else {"replica"}
    return {name: value for name, value in asdict(span).items() if name not in left_out}
