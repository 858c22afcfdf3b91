"""Speed and memory of a step as declared metrics, from its token counts and phase times."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import psutil
import torch

from megarl import platforms
from megarl.common.values import GIB, KIB
from megarl.config.derived.logprob_passes import recomputes_old_logprobs
from megarl.config.memory_plan.parameters import model_parameters
from megarl.config.schema import Config
from megarl.models.architecture.architecture import ModelInfo

# Peak bf16 TFLOP/s for dense matrices, from the vendor's data sheets. No MFU is reported for other devices.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "H20": 148.0, "B200": 2250.0}


def peak_memory_gib(group: torch.distributed.ProcessGroup | None) -> float:
    """Return the highest memory of any rank so far in GiB: device memory, or resident memory on CPU. Collective."""
    peak_B = torch.tensor([_own_peak()], dtype=torch.int64)
    torch.distributed.all_reduce(peak_B, torch.distributed.ReduceOp.MAX, group=group)
    return int(peak_B.item()) / GIB


def _own_peak() -> int:
    """Return the highest memory of this rank so far, in bytes."""
    if platforms.current().is_cuda:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB  # Linux counts it in KiB


class Performance:
    """Computes speed metrics from the values of a step; built once per run."""

    def __init__(self, config: Config, info: ModelInfo) -> None:
        self._config = config
        _, self._active = model_parameters(info)
        self._attention = info.attention_layers * info.heads * (info.head_dim + info.value_dim) / 2
        self._trainer_gpus = config.trainer.gpus
        self._engine_gpus = config.rollout.tensor_parallel
        self._peak = self._peak_tflops()

    def flops_per_token(self, context: float) -> float:
        """Return the forward FLOPs of one token that attends to `context` tokens on average.

        They are 2 per active weight, and 4 per attended token and attention dimension.
        """
        return 2.0 * self._active + 4.0 * self._attention * context

    def of_step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the `perf/*` metrics that follow from the values of a step.

        A forward pass counts once, a backward pass twice. Recomputation is not counted (MFU, not HFU).
        """
        tokens = values["batch/trained_tokens"]
        seconds = values["time/logprobs"] + values["time/update"]
        step, engine = values["time/step"], values.get("rollout/engine_seconds", 0.0)
        # Lost ones keep their GPUs until they are replaced.
        replicas = sum(values.get(f"rollout/replicas_{state}", 0.0) for state in ("alive", "lost", "idle"))
        rollout_gpus = max(1.0, replicas) * self._engine_gpus
        result = {"perf/host_memory_gib": psutil.Process().memory_info().rss / GIB}
        if tokens and seconds:
            rate = tokens / seconds
            result["perf/trainer_tokens_per_second"] = rate
            result["perf/trainer_tokens_per_second_per_gpu"] = rate / self._trainer_gpus
            length = values.get("rollout/prompt_length_mean", 0) + values.get("rollout/response_length_mean", 0)
            passes = 3.0 + self._extra_passes()
            tflops = rate * passes * self.flops_per_token(length / 2) / self._trainer_gpus / 1e12
            result["perf/trainer_tflops_per_gpu"] = tflops
            if self._peak is not None:
                result["perf/trainer_mfu"] = tflops / self._peak
        if engine:
            generated = values["batch/response_tokens"] - values.get("batch/reused_tokens", 0.0)
            rate = (generated + values.get("rollout/replaced_tokens", 0.0)) / engine
            result["perf/rollout_tokens_per_second"] = rate
            result["perf/rollout_tokens_per_second_per_gpu"] = rate / rollout_gpus
        if step:
            result["perf/tokens_per_second"] = tokens / step
            result["perf/tokens_per_second_per_gpu"] = tokens / step / (self._trainer_gpus + rollout_gpus)
        return result

    def _extra_passes(self) -> float:
        """Return the number of forward passes in addition to the update's own."""
        return float(recomputes_old_logprobs(self._config)) + float(self._config.needs_reference)

    def _peak_tflops(self) -> float | None:
        """Return the device's peak; None if it is unknown or the precision is not bf16."""
        if not platforms.current().is_cuda or self._config.trainer.precision != "bf16":
            return None
        name = torch.cuda.get_device_name()
        return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
