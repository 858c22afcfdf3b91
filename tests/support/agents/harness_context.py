"""A sample as the group runner gives it to a harness, and the files by which a run's gateway is found."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config.schema.agent import AgentConfig
from megarl.gateway.token_file import write_gateway_file, write_token
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateResult, SamplingSpec
from tests.support.gateway.gateway_stand_in import TOKEN, StandInGateway

SAMPLING = SamplingSpec(max_tokens=5, temperature=0.7, stop_token_ids=(2,))
ROW: dict[str, Any] = {"question": "why?"}


class Context:
    """One sample of group 3, as the group runner gives it; `judged`: what was to be scored."""

    group_id, sample_index, trains, seed = 3, 1, True, 77

    def __init__(self, run_dir: Path, deadline: GroupDeadline | None = None, row: dict[str, Any] = ROW) -> None:
        def judge(text: str, ids: list[int], reason: str) -> RewardInput:
            return RewardInput("", text, ids, reason, row=row)

        dialogue = SimpleNamespace(text=lambda ids: f"{len(ids)} tokens")
        self.toolbox: Any = SimpleNamespace(run_dir=run_dir, dialogue=dialogue, bounds=AgentConfig())
        self.prompt: Any = SimpleNamespace(sampling=SAMPLING, reward_input=judge)
        self.deadline = deadline
        self.judged: list[tuple[GenerateResult, Any]] = []
        self.ended: list[int] = []
        self.overflows = 0

    async def judge(self, result: GenerateResult, turns: Any = ()) -> RewardResult:
        self.judged.append((result, turns))
        return RewardResult(0.25, {"correct": 0.25})

    def note_end(self, turns: int, malformed: int = 0, overflow: bool = False) -> None:
        self.ended.append(turns)
        self.overflows += overflow


def announce(gateway: StandInGateway, run_dir: Path) -> None:
    write_gateway_file(run_dir, gateway.url, write_token(run_dir, TOKEN))
