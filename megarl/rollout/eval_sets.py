"""The held-out sets of a run as they are evaluated: problems with token ids, and how responses to them are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.formats import Prompt
from megarl.rewards.types import RewardInput
from megarl.rollout.requests import SamplingSpec
from megarl.rollout.toolbox import Toolbox


@dataclass(frozen=True)
class EvalProblem:
    """One held-out problem, tokenized.

    `reward_input(text, token ids, finish reason)` makes the reward function's input.
    """

    prompt_ids: list[int]
    reward_input: Callable[[str, list[int], str], RewardInput]
    reference: str
    prompt: Prompt | None = None


@dataclass
class EvalSet:
    """A held-out set and how its responses are sampled.

    Each problem gets one greedy response and `samples` sampled ones. `records`: one JSON object per response; `reward`:
    the number of the reward function in the pool. `toolbox`: of agents.
    """

    name: str
    problems: Sequence[EvalProblem]
    greedy: SamplingSpec
    sampled: SamplingSpec
    samples: int
    seed: int = 0
    reward: int = 0
    toolbox: Toolbox | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
