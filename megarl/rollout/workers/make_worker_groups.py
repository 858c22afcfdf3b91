"""The groups of a controller's agent workers: how a worker of them is started and ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.rundir.notices import write_notice
from megarl.config.schema import Config
from megarl.queue.transfer import QueueWriter
from megarl.rollout.agents.running_groups import RunningGroups
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.request_context import Generate
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.workers.agent_worker import AgentWorker, WorkerSpec, start_worker
from megarl.rollout.workers.worker_groups import WorkerGroups

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def make_worker_groups(
    config: Config,
    source: PromptSource,
    generate: Generate,
    running: RunningGroups,
    writer: QueueWriter,
    *,
    pool: ReplicaSpec,
    partition: str,
    cwd: str,
    kind: type[AgentWorker],
) -> WorkerGroups:
    """Return the groups of workers that are not started. `kind`: the class of a worker; the rest is in `WorkerSpec`."""
    import ray

    bound_s = config.timeouts.engine_start_s

    async def start(index: int) -> ActorHandle:
        return await start_worker(WorkerSpec(pool, partition, index, cwd), bound_s, kind)

    notify = partial(write_notice, Path(pool.run_dir))
    return WorkerGroups(config, source, generate, running, writer, start=start, end=ray.kill, notify=notify)
