"""The held-out sets of a run as they are evaluated: problems with token ids, and how each response is sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.chat.formats import Prompt
from megarl.evaluation.harness import Mode
from megarl.rewards.types import RewardInput
from megarl.rollout.engine.messages import SamplingSpec
from megarl.rollout.tasks.toolbox import Toolbox


@dataclass(frozen=True)
class EvalProblem:
    """One held-out problem, tokenized.

    `reward_input(text, token ids, finish reason)` makes the reward function's input.
    """

    prompt_ids: list[int]
    reward_input: Callable[[str, list[int], str], RewardInput]
    reference: str
    prompt: Prompt


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


@dataclass(frozen=True)
class EvalPlace:
    """The place of a response in an evaluation; `tag` makes its request ids unique."""

    index: int
    mode: Mode
    sample: int
    tag: str


@dataclass(frozen=True)
class EvalTask:
    """One response that an agent loop has to make, to a problem of a set. `priority`: of its requests."""

    chosen: EvalSet
    problem: EvalProblem
    place: EvalPlace
    priority: int = 0

    @property
    def sampling(self) -> SamplingSpec:
        """The sampling of the response."""
        return self.chosen.greedy if self.place.mode == "greedy" else self.chosen.sampled

    def sent(self) -> EvalTask:
        """Return the task as another process gets it, which has the tools of the set itself."""
        return replace(self, chosen=replace(self.chosen, problems=(), toolbox=None, records=[]))
