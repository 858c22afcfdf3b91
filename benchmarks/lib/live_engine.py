"""A real vLLM engine in this process's event loop thread, with the methods a sync calls."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from megarl.common.process import no_torchvision
from megarl.models.hf.model_files import raw_config
from megarl.rollout.engine.engine_args import RETURNS_EXPERTS, has_states
from megarl.rollout.engine.engine_requests import WeightState
from megarl.weights.receive import vllm_plugin

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine process runs the model itself
}
START_S = 600.0


class LiveReplica:
    """`ReplicaHandle` around an AsyncLLM (fp32). With `tensor_parallel` its workers are processes."""

    def __init__(
        self,
        model: Path,
        name: str = "replica 0",
        tensor_parallel: int = 1,
        *,
        experts: bool = False,
        **engine_args: Any,
    ) -> None:
        self.name = name
        self._experts = experts  # returned with the tokens
        self._workers = tensor_parallel
        self.failed: str | None = None
        self.weights = WeightState(has_weights=True)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        arguments = {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": tensor_parallel,
            "distributed_executor_backend": "uni" if tensor_parallel == 1 else "mp",
            "disable_log_stats": True,
            "attention_config": {"backend": "CPU_MLA"},  # as in rollout/engine/engine_args.py
        }
        environment = dict(ENVIRONMENT)
        if has_states(raw_config(model)):
            arguments["enable_prefix_caching"] = False
            environment[no_torchvision.DELTA_NET] = "1"
        self._engine: Any = self.run(self._start(arguments | engine_args, environment), START_S)

    async def _start(self, arguments: dict[str, Any], environment: dict[str, str]) -> Any:
        if self._workers > 1:  # vLLM cannot divide the cores of one NUMA node by itself
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self._workers))
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            vllm_plugin.register()  # vLLM calls it once per process, which may have had an engine of another model
            transfer = WeightTransferConfig(backend="megarl")
            own = RETURNS_EXPERTS if self._experts else {}
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **own, weight_transfer_config=transfer))
            if self._experts:
                await engine.collective_rpc("return_routed_experts")
            return engine
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def run(self, call: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self.run(getattr(self, f"_{method}")(*args), timeout_s)

    async def _world_size(self) -> int:
        return self._workers

    async def _init_weight_transfer(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def _pause(self, clear_cache: bool) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)

    async def _sleep(self) -> int:
        self.weights.sleep()
        await self._engine.sleep(level=2, mode="keep")
        self.weights.slept()
        return int(max(await self._engine.collective_rpc("held_bytes")))

    async def _wake(self, part: str) -> None:
        if self.weights.obstacle_to_wake(part) is not None:
            raise RuntimeError(f"{self.name} {self.weights.obstacle_to_wake(part)}")
        await self._engine.wake_up([part])
        self.weights.woke(part)

    async def _start_weight_update(self) -> None:
        self.weights.begin()
        await self._engine.start_weight_update()

    async def _update_weights(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.weights.receive()
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def _finish_weight_update(self, version: str) -> None:
        await self._engine.finish_weight_update(version)
        self.weights.finished()

    async def _resume(self) -> None:
        if self.weights.obstacle is not None:
            raise RuntimeError(f"{self.name} {self.weights.obstacle}")
        await self._engine.resume_generation()

    async def _fail(self, reason: str) -> None:
        self.failed = reason

    def shutdown(self) -> None:
        async def stop() -> None:
            self._engine.shutdown()

        self.run(stop(), 60)
        self._engine = None  # freed now: at the end of the process vLLM's modules are gone before it
        self._loop.call_soon_threadsafe(self._loop.stop)


class LivePool:
    def __init__(self, *replicas: Any) -> None:
        """`replicas`: of them some may be fakes."""
        self._replicas = replicas

    def replicas(self) -> tuple[Any, ...]:
        return self._replicas

    def names(self) -> list[str]:
        return [replica.name for replica in self._replicas]

    def restart(self, names: Any, timeout_s: float) -> None:
        raise RuntimeError("these engines are not restarted")

    def replace_later(self, names: Any, timeout_s: float) -> None:
        self._replicas = tuple(replica for replica in self._replicas if replica.name not in names)


class EngineWorker:
    """Methods that vLLM adds to its worker (`worker_extension_cls`): how weights are loaded."""

    model_runner: Any  # these attributes belong to vLLM's worker
    weight_transfer_engine: Any

    def loaded(self) -> str:
        """The way in which the last sync was loaded."""
        return str(self.weight_transfer_engine.loader.way)

    def unpack(self) -> None:
        """Switch off the packing of weights for CPU kernels, once. The next reload makes weights in vLLM's own layout.

        The parameters that packing has emptied or padded get their first shape back, without values.
        """
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        _custom_ops._supports_onednn = False
        if "process_weights_after_loading" in vars(CPUUnquantizedExperts):
            del CPUUnquantizedExperts.process_weights_after_loading
        CPUUnquantizedExperts.apply = plain_experts
        for layer in self.model_runner.get_model().modules():
            for name, built in get_layerwise_info(layer).restore_metadata[0].items():
                if getattr(layer, name).shape != built.shape:
                    parameter = materialize_meta_tensor(restore_layer_refs(built, layer))
                    parameter.weight_loader = _get_original_loader(parameter)
                    setattr(layer, name, parameter)


def plain_experts(
    self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: object, **__: object,
) -> None:  # fmt: skip
    """Compute gated SiLU experts from weights in vLLM's own layout: w1 [E, 2I, H], w2 [E, H, I]."""
    output.zero_()
    for token, (weights, experts) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (w1[expert] @ hidden_states[token]).chunk(2)
            output[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
