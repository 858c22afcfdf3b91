"""AgentWorker: an agent worker's process, an async Ray actor that the controller owns and that ends with it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.chat.images import PromptImages
from megarl.chat.tokenize import TokenDecoder, load_tokenizer, stop_token_ids
from megarl.common.process.memory_tuning import begin_start, collect_for_loops, exempt_present_objects
from megarl.common.process.output import redirect_output
from megarl.common.rundir.notices import write_notice
from megarl.config.checks.sections import max_sequence_tokens
from megarl.config.derived.datasets import HeldOutSet, TrainSet, held_out_sets, reward_functions, train_sets
from megarl.config.derived.teachers import teachers_by_set
from megarl.config.schema import Config
from megarl.config.schema.agent import SHIPPED_LOOPS
from megarl.models.hf.read_config import load_info
from megarl.rollout.agents.loop_host import LoopHost, find_loop, routes_spec
from megarl.rollout.engine.placement import ROLLOUT_RESOURCE
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.teachers.teacher_client import attach_teachers
from megarl.rollout.tasks.prompts import reward_pool
from megarl.rollout.tasks.toolbox import Toolbox, Toolboxes
from megarl.rollout.transport.link import Parcel
from megarl.rollout.workers.messages import ToController, ToWorker
from megarl.rollout.workers.worker_loops import WorkerLoops
from megarl.telemetry.trace import events
from megarl.telemetry.trace.lines import worker_process

if TYPE_CHECKING:
    from ray.actor import ActorHandle

CALLS = 16  # at once: one of each kind, and repeated ones


@dataclass(frozen=True)
class WorkerSpec:
    """The arguments of a worker. `cwd`: see RolloutController."""

    pool: ReplicaSpec
    index: int
    cwd: str = ""


@dataclass(frozen=True)
class _Texts:
    """The tools, the toolboxes of training and held-out sets by name, and the decoder of responses."""

    tools: Toolboxes
    training: Mapping[str, Toolbox]
    held_out: Mapping[str, Toolbox]
    decoder: TokenDecoder


def create_worker(spec: WorkerSpec, kind: type[AgentWorker]) -> ActorHandle:
    """Create, but do not start, the actor on a rollout node; workers are spread over the rollout nodes."""
    import ray

    options = {"resources": {ROLLOUT_RESOURCE: 1}, "num_cpus": 0, "max_concurrency": CALLS}
    return ray.remote(kind).options(scheduling_strategy="SPREAD", **options).remote(spec)


async def start_worker(spec: WorkerSpec, timeout_s: float, kind: type[AgentWorker]) -> ActorHandle:
    """Create a worker and wait until it has started. Raises what its start raises, and TimeoutError naming it."""
    import ray

    worker = create_worker(spec, kind)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await worker.start.remote()
    except BaseException as error:
        ray.kill(worker)
        if isinstance(error, TimeoutError) and limit.expired():
            raise TimeoutError(
                f"the controller waited {timeout_s:.0f} s (timeouts.engine_start_s) for agent worker {spec.index}; "
                f"see logs/worker-{spec.index}.log"
            ) from None
        raise getattr(error, "cause", None) or error from None
    return worker


class AgentWorker:
    """The actor that `create_worker` creates; see the module's docstring."""

    def __init__(self, spec: WorkerSpec) -> None:
        begin_start()
        self.spec = spec
        self.config = Config.model_validate_json(spec.pool.config_json)
        self.run_dir = Path(spec.pool.run_dir)
        redirect_output(self.run_dir / "logs" / f"worker-{spec.index}.log")
        events.open_events(self.config.telemetry.events_mib, self.run_dir, worker_process(spec.index))
        if spec.cwd:
            os.chdir(spec.cwd)
            sys.path.insert(0, spec.cwd)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in the controller
        spec.pool.watch_supervisor()

    async def start(self) -> None:
        """Load tokenizer, tools and loop, and start the reward processes."""
        config = self.config
        self._rewards = reward_pool(
            reward_functions(config), config.reward, config.timeouts.engine_start_s,
            partial(write_notice, self.run_dir), shares=config.rollout.agent_workers + 1,
        )  # fmt: skip
        loop, texts, _ = await asyncio.gather(
            asyncio.to_thread(find_loop, config.agent), asyncio.to_thread(self._texts), self._rewards.start()
        )
        self._tools = texts.tools
        host = LoopHost(
            loop, self._rewards, texts.decoder.texts, timeout_s=config.timeouts.rpc_s,
            toolboxes=texts.training, eval_toolboxes=texts.held_out,
            teachers=attach_teachers(
                teachers_by_set(config), self.spec.pool.namespace, config.timeouts.generate_s,
                by_group=config.run.deterministic,
            ),
            routes=routes_spec(config.trainer, config.model),
        )  # fmt: skip
        self._loops = WorkerLoops(host, self._rewards.waiting)
        self._passing = asyncio.create_task(self._loops.pass_on())
        exempt_present_objects()
        collect_for_loops(shipped=config.agent.loop in SHIPPED_LOOPS)

    def _texts(self) -> _Texts:
        model = self.config.model.path
        tokenizer = load_tokenizer(model)
        stops = tuple(stop_token_ids(model, tokenizer, self.config.sampling.stop_token_ids))
        run_dir = self.config.run_dir if self.config.gateway.enabled else None
        info = load_info(model)
        most, images = max_sequence_tokens(self.config, info), PromptImages.of(model, info, self.config.model.vision)
        made = Toolboxes(self.config.agent, tokenizer, stops, most, run_dir, images)

        def boxes(chosen: Sequence[TrainSet] | Sequence[HeldOutSet]) -> dict[str, Toolbox]:
            return {each.name: box for each in chosen if (box := made.of(each)) is not None}

        config = self.config
        return _Texts(made, boxes(train_sets(config)), boxes(held_out_sets(config)), TokenDecoder(tokenizer))

    async def give(self, number: int, messages: Sequence[ToWorker]) -> None:
        """See `LinkServer.give`."""
        await self._loops.link.give(number, messages)

    async def take(self, seen: int, wait_s: float) -> Parcel[ToController]:
        """See `LinkServer.take`. Raises the error of the task that sends the loops' records, if it failed."""
        if self._passing.done():
            self._passing.result()
        return await self._loops.link.take(seen, wait_s)

    async def drop(self) -> None:
        """See `WorkerLoops.drop`."""
        await self._loops.drop()
        gc.collect()  # while nothing waits

    async def shutdown(self) -> None:
        """End the groups, the tools and the reward processes."""
        self._passing.cancel()
        await self._loops.drop()
        try:
            await self._tools.close()
        finally:
            await asyncio.to_thread(self._rewards.close)
            await asyncio.to_thread(events.close_events)
