"""A real vLLM engine in this process's event loop thread, with the methods a sync calls; and its reference."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.rollout.weight_state import WeightState

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


@dataclass(frozen=True)
class Response:
    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[str, int, int]]


class LiveReplica:
    """`ReplicaHandle` around an AsyncLLM (fp32). With `tensor_parallel` its workers are processes."""

    def __init__(self, model: Path, name: str = "replica 0", tensor_parallel: int = 1, **engine_args: Any) -> None:
        self.name = name
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
        }
        self._engine: Any = self.run(self._start(arguments | engine_args), START_S)

    async def _start(self, arguments: dict[str, Any]) -> Any:
        environment = dict(ENVIRONMENT)
        if self._workers > 1:  # vLLM cannot divide the cores of one NUMA node by itself
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self._workers))
        before = {key: os.environ.get(key) for key in environment}
        os.environ.update(environment)
        try:
            from vllm.config import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            transfer = WeightTransferConfig(backend="megarl")
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, weight_transfer_config=transfer))
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

    async def _start_weight_update(self) -> None:
        self.weights.begin()
        await self._engine.start_weight_update()

    async def _update_weights(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self.weights.receive()
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def _abandon_weight_update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        assert self.weights.in_session
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._engine.finish_weight_update(None)
        self.weights.abandoned()

    async def _finish_weight_update(self, version: str) -> None:
        await self._engine.finish_weight_update(version)
        self.weights.finished()

    async def _resume(self) -> None:
        if self.weights.obstacle is not None:
            raise RuntimeError(f"{self.name} {self.weights.obstacle}")
        await self._engine.resume_generation()

    async def _fail(self, reason: str) -> None:
        self.failed = reason

    def ask_workers(self, method: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Return what a method of `worker_extension_cls` returns in each worker."""
        return list(self.run(self._engine.collective_rpc(method, args=args), timeout_s))

    def version(self) -> str:
        return str(self.run(self._engine.get_weight_version(), 30))

    def generate(self, prompt: list[int], request_id: str, max_tokens: int = 24, seed: int | None = None) -> Any:
        """A future of a Response: greedy, or sampled with `seed`."""
        call = self._generate(prompt, request_id, max_tokens, seed)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    async def _generate(self, prompt: list[int], request_id: str, max_tokens: int, seed: int | None) -> Response:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
        final = None
        async for output in self._engine.generate({"prompt_token_ids": prompt}, parameters, request_id):
            final = output
        assert final is not None
        (result,) = final.outputs
        ids = list(result.token_ids)
        logprobs = [row[token].logprob for row, token in zip(result.logprobs, ids, strict=True)]
        return Response(ids, logprobs, [(s.version, s.start, s.end) for s in result.weight_versions])

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
        raise RuntimeError("this test's engines are not restarted")

    def replace_later(self, names: Any, timeout_s: float) -> None:
        self._replicas = tuple(replica for replica in self._replicas if replica.name not in names)


def reference(
    model: Path, prompt: list[int], response: list[int], old: Path | None = None, cached: int = 0
) -> tuple[list[int], torch.Tensor]:
    """(greedy tokens, log-probs of the response's tokens) of `transformers`, teacher-forced.

    `old`: the model whose KV cache of the prompt and the first `cached` tokens the other tokens follow; the results
    for these `cached` tokens are the old model's.
    """
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        if old is None:
            logits = policy(torch.tensor([prompt + response])).logits[0].float()
        else:
            before = AutoModelForCausalLM.from_pretrained(old, dtype=torch.float32).eval()
            known = before(torch.tensor([prompt + response[:cached]]), use_cache=True)
            rest = policy(torch.tensor([response[cached:]]), past_key_values=known.past_key_values)
            logits = torch.cat([known.logits[0], rest.logits[0]]).float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.argmax(-1).tolist(), logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]
