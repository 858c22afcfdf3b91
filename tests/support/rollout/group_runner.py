"""Runs prompt groups in the test's process, as the controller without agent workers does, on stand-ins."""

from collections.abc import Mapping
from typing import Any

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.loop_host import LoopHost
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.tasks.toolbox import Toolbox


class GroupRunner:
    """A `LoopHost`, and the groups that it runs. `generate` may be replaced."""

    def __init__(
        self, config: Config, loop: AgentLoop, source: Any, generate: Any, rewards: Any, partition: str = "p",
        toolboxes: Mapping[str, Toolbox] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.generate, self.rewards = source, generate, rewards
        boxes = toolboxes or {}
        timeout_s = config.timeouts.rpc_s
        self.host = LoopHost(
            loop, rewards, source.decode_all, timeout_s=timeout_s, toolboxes=boxes, eval_toolboxes=boxes
        )
        workers = bool(config.rollout.agent_workers)
        self.groups = RunningGroups(config, source, self._generate, partition, in_workers=workers)

    async def _generate(self, *args: Any) -> Any:
        return await self.generate(*args)

    async def run(self, group_id: int, kept: UnfinishedGroup | None = None) -> list[Trajectory]:
        return await self.groups.run(group_id, kept, self.host.run_group)
