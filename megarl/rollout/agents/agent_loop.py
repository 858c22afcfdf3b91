"""The protocols of an agent loop and of the context that it runs in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardOutcome, Turn
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateResult
from megarl.rollout.tasks.prompts import PromptTask
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.tools.tool import ToolAnswer

LoopState = TypeVar("LoopState")


class AgentContext(Protocol):
    """One sample of one prompt group, and the services that its loop may use."""

    group_id: int
    sample_index: int
    prompt: PromptTask

    @property
    def rng(self) -> random.Random:
        """Seeded by the run's seed, the group and the sample: a loop that draws from nothing else is reproducible."""
        ...

    @property
    def toolbox(self) -> Toolbox:
        """The tools, the dialogue and the bounds of the prompt's data set."""
        ...

    @property
    def deadline(self) -> GroupDeadline | None:
        """The time at which the responses of the group, and then its loops, have to end; None if there is none."""
        ...

    @property
    def trains(self) -> bool:
        """True for a sample of the run's groups, False for a response of an evaluation."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed of the first request of the sample; None for a greedy response."""
        ...

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> GenerateResult:
        """Sample the model's continuation of `token_ids` with the sampling of the prompt's set.

        A response goes on elsewhere if its replica is lost, and in a run that resumes from the tokens that it had. The
        turns of a sample stay on the replica that has their beginning in its cache.

        Raises TrajectoryFull if `token_ids` leave no room for a response, and beyond `agent.max_turns`; one that the
        loop does not catch fails its sample alone. Raises RequestFailed if an engine refuses the request, and
        RolloutError if no replica is left, none has room within `timeouts.generate_s`, or its group is failed at
        its deadline.
        """
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool; its answer, at most `agent.max_tool_output_chars` long, may be an error.

        So it is for a name that is none, beyond `agent.max_tool_calls` and `max_tool_seconds`, after `tool_timeout_s`,
        and for a call that must not be repeated and that an attempt before had begun. A call that was answered in an
        attempt before is not made again. Raises RolloutError if the tool itself fails, or its intent cannot be
        recorded.
        """
        ...

    def freeze(self, state: object) -> None:
        """Keep the loop's state: a dataclass that msgspec can write as JSON.

        A run that resumes begins the loop again, and `frozen` gives it this state; requests and calls are counted from
        here then. A loop that freezes nothing is run from its beginning: it gets the same responses and answers, as far
        as it asks for the same. Raises ValueError for a state of more than 8 MiB.
        """
        ...

    def frozen(self, kind: type[LoopState]) -> LoopState | None:
        """Return what the loop has frozen last in an attempt before; None in the first one."""
        ...

    def finished(self, turn: int) -> GenerateResult:
        """Return the result of request number `turn` of this sample, of this attempt or one before.

        Raises RolloutError if there is none that has ended.
        """
        ...

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardOutcome | None:
        """Score a response with the reward function; None if the response failed and is not scored.

        An evaluation scores such a response too, and counts it among the failed ones.

        `turns`: the whole trajectory, for functions that look at it. The response that is judged is `result` alone.
        """
        ...

    def note_end(self, turns: int, malformed: int = 0, overflow: bool = False) -> None:
        """Measure a loop that ends: its turns, the calls that could not be read, and an answer that did not fit."""
        ...


class AgentLoop(Protocol):
    """Turns a prompt into trajectories. One object runs all samples at once: keep a sample's state inside `run`."""

    async def run(self, ctx: AgentContext) -> Trajectory | Sequence[Trajectory]:
        """Generate, act and judge. The trajectory's token ids must be those that the engine received and produced.

        Several trajectories, such as the paths of a dialogue that branches, are parts of the one sample: they have
        equal rewards and statuses, and the sample's advantage. Each has a token that the model sampled.
        """
        ...
