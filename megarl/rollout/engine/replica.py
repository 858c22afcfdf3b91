"""EngineReplica: one vLLM engine in an async Ray actor. Token ids in; token ids, log-probs and versions out.

It knows nothing about text, groups or rewards. Every engine failure raises `ReplicaFailed` with this replica's index.
If the engine died or did not start, or `fail` was called, the replica refuses every later call. So an engine with
partly updated weights never serves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.common.errors import EngineMayRun, ReplicaFailed, RequestFailed
from megarl.common.process.held_outputs import hold_within
from megarl.common.process.memory_tuning import begin_start, collect_rarely, exempt_present_objects
from megarl.common.process.output import redirect_output
from megarl.common.process.processes import ProcessId, die_with, own_children, sweep
from megarl.common.rundir.private_directory import name_shared_memory
from megarl.config.schema import Config
from megarl.models.hf.model_files import raw_config
from megarl.models.hf.read_config import load_info, sees
from megarl.rollout.engine.engine_args import (
    RETURNS_EXPERTS,
    engine_args,
    engine_environment,
    reads_weights,
    start_engines_fast,
)
from megarl.rollout.engine.engine_errors import ending, innermost, root_cause
from megarl.rollout.engine.engine_load import EngineMonitor, ReplicaActivity, build_monitored
from megarl.rollout.engine.engine_requests import EngineRequests, WeightState
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.placement import HeldDevices, held_devices, starting_alone
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart, report_size
from megarl.rollout.transport.link import Parcel
from megarl.rollout.transport.rpc import AnsweredCalls, Call, Reply, RpcServer
from megarl.telemetry.trace import events
from megarl.telemetry.trace.lines import replica_process

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from megarl.rollout.engine.image_inputs import ImageInputs

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaSpec:
    """The arguments of a run's replicas and controller.

    `supervisor` runs on `host`; None if the supervisor did not start the Ray cluster.
    """

    config_json: str
    run_dir: str
    namespace: str
    cuda: bool
    max_model_len: int | None
    supervisor: ProcessId | None
    host: str = ""

    def watch_supervisor(self) -> None:
        """End this process with a supervisor on this host; on other nodes the agent does so."""
        if self.supervisor is not None and self.host == platform.node():
            die_with(self.supervisor, "supervisor")


@dataclass(frozen=True)
class ReplicaStatus:
    """A replica's devices, the version it serves (None: none yet), and its running and waiting requests."""

    held: HeldDevices
    version: str | None
    running: int
    waiting: int


DEATH_CHECK_S = 0.5  # between checks of the engine while a call to it runs


class EngineReplica:
    """The actor created by `replica_start.create_replica`; see the module's docstring.

    An engine that did not load the model's weights starts with random ones and refuses to generate until the first
    complete weight sync.
    """

    def __init__(self, spec: ReplicaSpec, index: int) -> None:
        begin_start()
        self.index = index
        self.config = Config.model_validate_json(spec.config_json)
        self.cuda = spec.cuda
        self.max_model_len = spec.max_model_len
        self._engine: AsyncLLM | None = None
        self._starting = asyncio.Lock()
        self._processes: set[ProcessId] = set()  # of the engine; workers may outlive their parent process
        self._calls = AnsweredCalls()
        self._calls_of_link = RpcServer(lambda method, args: getattr(self, method)(*args), size_of=_size_of).link
        self._requests: EngineRequests
        self._failed: str | None = None
        self._weights = WeightState(reads_weights(self.config.rollout, self.config.model.path))
        self._version: str | None = None  # the label of new tokens
        self._activity = ReplicaActivity(index)
        self._monitor = EngineMonitor(heard=self._activity.step)
        self._log_file = Path(spec.run_dir) / "logs" / f"replica-{index}.log"
        self._log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        redirect_output(self._log_file)
        events.open_events(self.config.telemetry.events_mib, Path(spec.run_dir), replica_process(index))
        self._returns_experts = self.config.trainer.router_replay == "r3"
        self._sees = sees(raw_config(self.config.model.path))
        self._tower_sent = False  # or a part of it, in the last sync
        os.environ.update(engine_environment(self.config.rollout, cuda=spec.cuda, model=self.config.model.path))
        name_shared_memory()
        spec.watch_supervisor()

    async def answer(self, key: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401  # of any method
        """Call a method once, even if a trainer resends the same `key` after a lost connection."""
        return await self._calls.answer(key, lambda: getattr(self, method)(*args, **kwargs))

    async def give(self, number: int, calls: Sequence[Call], link: str) -> None:
        """Start calls to this replica's methods; see `LinkServer.give`."""
        await self._calls_of_link.give(number, calls, link)

    async def take(self, seen: int, wait_s: float, link: str) -> Parcel[Reply]:
        """Return the answers that have arrived; see `LinkServer.take`."""
        return await self._calls_of_link.take(seen, wait_s, link)

    async def start(self) -> dict[str, float]:
        """Build the engine and generate one token; return how many seconds each took.

        Raises ReplicaFailed with the engine's reason.
        """
        async with self._starting:
            if self._failed is not None:  # it was ended before: its memory is no longer its own
                raise ReplicaFailed(self.index, self._failed)
            return await self._start()

    async def _start(self) -> dict[str, float]:
        started = time.monotonic()
        try:
            async with starting_alone(f"replica {self.index}", self.config.timeouts.engine_start_s, cuda=self.cuda):
                self._engine = self._build()
            self._processes = own_children()
            images, bound_s = self._image_inputs(), self.config.timeouts.rpc_s
            if self._returns_experts and not self.cuda:
                await self._engine.collective_rpc("return_routed_experts")
            routed = load_info(self.config.model.path).moe_layers if self._returns_experts else None
            self._requests = EngineRequests(self._engine, self.index, self._monitor, bound_s, images, routed)
            self._requests.times.listen(self._engine)
            built = time.monotonic()
            await self._probe(self._engine)
            if self.config.rollout.share_gpus:
                await self._sleep()
            exempt_present_objects()
            collect_rarely()
        except Exception as error:
            self._fail(f"failed to start: {root_cause(self._log_file, self._log_start) or innermost(error)}")
        return {"build_s": built - started, "probe_s": time.monotonic() - built}

    def _build(self) -> AsyncLLM:
        # Built in the event loop's thread, which lives as long as the actor, because the engine process dies with the
        # thread that forked it (PR_SET_PDEATHSIG).
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        arguments = engine_args(self.config, cuda=self.cuda, max_model_len=self.max_model_len)
        start_engines_fast()
        hold_s = hold_within(self.config.rollout.report_interval_s)
        if self._returns_experts:
            arguments |= {"enable_return_routed_experts": True} if self.cuda else RETURNS_EXPERTS
        transfer = WeightTransferConfig(backend="megarl")
        return build_monitored(AsyncEngineArgs(**arguments, weight_transfer_config=transfer), self._monitor, hold_s)

    def _image_inputs(self) -> ImageInputs | None:
        """Return what builds inputs with images; None if the model has no vision."""
        if not self._sees:
            return None
        from megarl.models.hf.image_patches import ImageProcessor
        from megarl.rollout.engine.image_inputs import ImageInputs

        return ImageInputs(ImageProcessor(self.config.model.path, self.config.model.vision.max_pixels))

    async def _probe(self, engine: AsyncLLM) -> None:
        """Generate one token."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": [0]}, parameters, request_id="probe"):
            pass

    async def generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        """Start requests and `report` on them. They wait while the engine sleeps.

        Raises ReplicaFailed if the engine died or has no weights yet, and RequestFailed if it refused a request.
        """
        self._check()
        if not (self._weights.has_weights or self._weights.asleep):
            raise ReplicaFailed(
                self.index,
                f"replica {self.index} has no weights yet: no weight sync has been completed since its engine started",
            )
        self._requests.start(requests)
        return await self.report({request.request_id: 0 for request in requests}, wait_s)

    async def report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        """Return the new tokens of requests once all have ended, or after `wait_s`.

        `reported`: how many tokens the caller has, by request id. Raises the same errors as `generate`.
        """
        return await self._reported(self._check(), self._requests.report(reported, wait_s))

    async def end(self, reported: dict[str, int]) -> EngineReport:
        """Stop requests; return their last tokens, with finish reason `abort` if unfinished."""
        return await self._reported(self._check(), self._requests.end(reported))

    async def _reported(self, engine: AsyncLLM, call: Awaitable[dict[str, ResponsePart]]) -> EngineReport:
        try:
            parts = await call
        except (ReplicaFailed, RequestFailed):
            raise
        except Exception as error:
            failure = self._failure(f"generation failed: {innermost(error)}", error)
            if engine.errored:
                raise failure from error
            raise RequestFailed(f"replica {self.index} refused a request: {innermost(error)}") from error
        return parts, self._monitor.take()

    async def pause(self, clear_cache: bool = True) -> None:
        """Pause generation and keep requests in flight. `clear_cache`: recompute their KV cache after `resume`.

        Otherwise they continue with their KV values, which no later request uses.
        """
        engine = self._check()
        self._activity.pause()
        self._monitor.hold("pause")
        if not clear_cache:
            self._requests.keep_cache()
        await self._guard(engine.pause_generation(mode="keep", clear_cache=clear_cache), "pause")

    async def resume(self) -> None:
        """Resume generation after `pause`. Raises ReplicaFailed if the weights are not from one version.

        A sleeping engine resumes when its last part wakes.
        """
        engine = self._check_weights()
        if self._weights.asleep:
            return
        await self._guard(engine.resume_generation(), "resume")
        self._monitor.release("pause")
        self._activity.resume(self._version)

    async def sleep(self) -> int:
        """Free the memory of weights and KV cache, and keep the requests. The weights are lost.

        A starting engine sleeps when its start is complete. Returns the bytes still held: in use on the fullest worker
        GPU, or on a CPU by the worker's process.
        """
        async with self._starting:
            return await self._sleep()

    async def _sleep(self) -> int:
        engine = self._check()
        if self._weights.sleeps:
            return await self._held(engine)
        self._weights.sleep()
        self._activity.pause()
        self._monitor.hold("sleep")
        await self._guard(engine.sleep(level=2, mode="keep"), "sleep")
        self._weights.slept()
        return await self._held(engine)

    async def _held(self, engine: AsyncLLM) -> int:
        return int(max(await self._guard(engine.collective_rpc("held_bytes"), "held_bytes")))

    async def wake(self, part: str) -> int:
        """Reallocate a part's memory, the weights or the cache; once the cache wakes, the engine generates.

        Returns the bytes held afterwards, as `sleep` does. Raises ReplicaFailed if the cache is to wake before a sync
        has loaded all weights since the sleep. It also does so if the weights are to wake but the engine has not slept:
        then it holds memory assumed free.
        """
        engine = self._check()
        if (obstacle := self._weights.obstacle_to_wake(part)) is not None:
            raise ReplicaFailed(self.index, f"replica {self.index} {obstacle}")
        if part not in self._weights.asleep:
            return await self._held(engine)
        await self._guard(engine.wake_up([part]), f"wake {part}")
        if part == "weights" and self.cuda:  # without a GPU the worker loses weights and cache only
            await self._guard(engine.collective_rpc("zero_lost"), "zero_lost")
        self._weights.woke(part)
        if not self._weights.asleep:
            self._monitor.release("sleep")
            self._activity.resume(self._version)
        return await self._held(engine)

    async def reset(self) -> None:
        """Drop every request and get ready to serve. Raises ReplicaFailed if a weight sync was interrupted."""
        engine = self._check_weights()
        self._requests.drop()
        await self._guard(engine.pause_generation(mode="abort", clear_cache=True), "reset")
        await self.resume()

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Have the engine's workers join the weight-sync group. `init_info`: fields of `MegarlInitInfo`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        engine = self._check()
        self._weights.join()
        self._monitor.hold("join")  # the engine's main loop waits for the other members
        request = WeightTransferInitRequest(init_info=init_info)
        with events.span("join_group"):
            await self._guard(engine.init_weight_transfer_engine(request), "init_weight_transfer")
        self._weights.joined()
        self._monitor.release("join")

    async def start_weight_update(self) -> None:
        """Prepare the engine's model for new weights. Raises ReplicaFailed if there is no memory for them."""
        engine = self._check()
        if "weights" in self._weights.asleep:
            raise ReplicaFailed(self.index, f"replica {self.index} sleeps, and has no memory for new weights")
        self._activity.begin_weights()
        self._weights.begin()
        await self._guard(engine.start_weight_update(), "start_weight_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load all buckets of one sync. `update_info`: fields of `MegarlUpdateInfo`.

        If another member fails, this returns early without an error, and the sync must be abandoned.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._check()
        self._weights.receive()
        self._tower_sent = self.config.model.vision.train != "none" or not update_info.get("left_out")
        request = WeightTransferUpdateRequest(update_info=update_info)
        await self._guard(engine.update_weights(request), "update_weights")

    async def finish_weight_update(self, version: str) -> None:
        """Finish the update and label later tokens with `version`."""
        engine = self._check()
        await self._guard(engine.finish_weight_update(version), "finish_weight_update")
        if self._sees and self._tower_sent:
            # vLLM 0.32 keeps image embeddings if it is paused without clearing its caches.
            await self._guard(engine.reset_encoder_cache(), "reset_encoder_cache")
        self._weights.finished()
        self._version = version
        self._activity.end_weights(version)

    async def abandon_weight_update(self, update_info: dict[str, Any]) -> None:
        """Abandon an unfinished sync, keep the requests, and stay paused until a later one completes.

        `update_info`: the message that makes the engine do so. Raises ReplicaFailed if the engine cannot be reloaded
        and must be replaced.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._check()
        if not self._weights.in_session:
            return
        request = WeightTransferUpdateRequest(update_info=update_info)
        await self._guard(engine.update_weights(request), "abandon_weight_update")
        await self._guard(engine.finish_weight_update(None), "abandon_weight_update")
        self._weights.abandoned()

    async def set_weight_version(self, version: str) -> None:
        """Label later tokens with `version` without changing the weights."""
        engine = self._check()
        await self._guard(engine.update_weight_version(version), "set_weight_version")
        self._version = version

    async def world_size(self) -> int:
        """Return this replica's number of engine workers (its TP size)."""
        return self.config.rollout.tensor_parallel

    async def devices(self) -> HeldDevices:
        """Return the devices this replica holds."""
        return held_devices(f"replica {self.index}", self.cuda)

    async def status(self) -> ReplicaStatus:
        """Return this replica's status, even if its engine has failed."""
        now = self._monitor.latest
        return ReplicaStatus(await self.devices(), self._version, now.running, now.waiting)

    async def fail(self, reason: str) -> None:
        """Refuse every later call, for example after a failed weight sync."""
        self._failed = f"replica {self.index} {reason}"

    async def shutdown(self) -> None:
        """Stop the engine's processes. Raises EngineMayRun if one survives half of `timeouts.rpc_s`."""
        if self._engine is not None:
            # The engine process has nothing to save, and does not exit on SIGTERM within the default timeout (5 s).
            self._engine.shutdown(timeout=0.5)
            self._engine = None
        elif not self._processes:
            self._failed = self._failed or f"replica {self.index} was ended before its engine started"
        left = await asyncio.to_thread(sweep, self._processes, 0.0, self.config.timeouts.rpc_s / 2)
        self._activity.end()
        events.close_events()
        if left:
            pids = ", ".join(str(each.pid) for each in left)
            raise EngineMayRun(self.index, f"replica {self.index}: processes {pids} of its engine do not end")

    def _check(self) -> AsyncLLM:
        """Return the engine. Raises ReplicaFailed if it failed or has not started."""
        if self._failed is not None:
            raise ReplicaFailed(self.index, self._failed)
        if self._engine is None:
            raise ReplicaFailed(
                self.index, f"replica {self.index} has no engine: start() was not called or has not returned"
            )
        return self._engine

    def _check_weights(self) -> AsyncLLM:
        """Return the engine if its weights are from one version. Raises ReplicaFailed otherwise."""
        engine = self._check()
        if (obstacle := self._weights.obstacle) is not None:
            raise ReplicaFailed(self.index, f"replica {self.index} {obstacle}")
        return engine

    async def _guard(self, call: Awaitable[T], what: str) -> T:
        """Await an engine call; raise ReplicaFailed if it fails or the engine dies.

        vLLM 0.32 never answers a weight sync call if the engine's process dies.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=DEATH_CHECK_S))[0]:
                if self._engine is not None and self._engine.errored:
                    self._failed = (
                        f"replica {self.index} is dead: its engine's process ended in {what}{ending(self._engine)}"
                    )
                    raise ReplicaFailed(self.index, self._failed)
            return task.result()
        except ReplicaFailed:
            raise
        except Exception as error:
            raise self._failure(f"{what} failed: {innermost(error)}", error) from error
        finally:
            task.cancel()

    def _failure(self, message: str, cause: Exception) -> ReplicaFailed:
        """Return the error to raise, and refuse every later call if the engine is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(cause, EngineDeadError):
            message += ending(self._engine)
            self._failed = f"replica {self.index} is dead: {message}"
        return ReplicaFailed(self.index, f"replica {self.index}: {message}")

    def _fail(self, message: str) -> None:
        """Log the active exception, refuse every later call and raise ReplicaFailed."""
        logger.exception("replica %d %s", self.index, message)
        self._failed = f"replica {self.index} {message}"
        raise ReplicaFailed(self.index, self._failed)


def _size_of(method: str, result: Any) -> int:  # noqa: ANN401  # of any method
    return report_size(result) if method in ("generate", "report", "end") else 1
