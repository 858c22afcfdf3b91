"""The plugin that vLLM loads from megarl in its front end, in EngineCore and in every worker."""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from megarl.common.process import no_torchvision

BACKEND = "megarl"


def register() -> None:
    """Register the weight-transfer backend, and let models see without torchvision. Idempotent.

    vLLM's own child processes also end with their parent, and unpickle no more than they need to.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megarl.weights.receive.engine", "MegarlWeightTransferEngine"
        )
    if {no_torchvision.VARIABLE, no_torchvision.DELTA_NET} & os.environ.keys():
        no_torchvision.apply()
    if no_torchvision.DELTA_NET in os.environ:
        from megarl.weights.receive import cpu_delta_net

        cpu_delta_net.install()
    if _is_vllm_child():
        from megarl.common.process.processes import die_with_parent
        from megarl.common.rundir.private_directory import name_shared_memory
        from megarl.common.trust.object_guard import guard_object_collectives
        from megarl.weights.receive.engine_guard import EngineUnpickler

        guard_object_collectives(EngineUnpickler)
        name_shared_memory()
        die_with_parent()
        _hold_outputs()
        if no_torchvision.DELTA_NET in os.environ:
            _leave_out_towers()
    _mend_rope_of_latent_attention()


def _leave_out_towers() -> None:
    """Let the text models of Qwen3.5 be read from files that also hold a vision tower."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLMBase

    Qwen3_5ForCausalLMBase.hf_to_vllm_mapper.orig_to_new_prefix["model.visual."] = None


def _mend_rope_of_latent_attention() -> None:
    """Rotate the queries of latent attention by their own positions on a CPU. Idempotent.

    vLLM 0.32's CPU kernel takes queries [tokens, heads, channels], as latent attention has them, for [batch, tokens,
    channels], and reads beyond the positions' end (rotary_embedding/base.py, `forward_cpu`). YaRN does not call it.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if kernel.__module__ == __name__:
        return

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = self.forward_native if query.dim() == 3 else kernel.__get__(self)
        return rotate(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


class GpuMemory:
    """What vLLM adds to its worker on a GPU (`worker_extension_cls`)."""

    model_runner: Any

    def zero_lost(self) -> None:
        """Zero what the engine has lost in its sleep and neither vLLM 0.32 nor a sync restores: what is no weight and
        no registered buffer, but was allocated with the weights.

        Qwen3-VL adds the first to text (models/qwen3_vl.py). The padding of a batch keeps the second, as positions of
        RoPE (v1/worker/gpu/mm/rope.py).
        """
        import torch

        lost = list(getattr(self.model_runner.get_model(), "deepstack_input_embeds", ()))
        rope = getattr(getattr(self.model_runner, "model_state", None), "rope_state", None)
        with torch.inference_mode():  # vLLM may have made them in it
            for tensor in lost if rope is None else [*lost, rope.positions]:
                tensor.zero_()

    def held_bytes(self) -> int:
        """Return the bytes of the worker's GPU that are in use, by whatever process."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free


def _hold_outputs() -> None:
    """Let this process send its tokens in larger pieces, if it is EngineCore and its front end is one of megarl's."""
    from megarl.common.process import held_outputs

    hold_s = os.environ.get(held_outputs.VARIABLE)
    if hold_s is not None and multiprocessing.current_process().name.startswith("EngineCore"):
        held_outputs.hold_outputs(float(hold_s))


def _is_vllm_child() -> bool:
    """Return whether this process is EngineCore or an engine worker, which multiprocessing starts under these names.

    Other processes that import vLLM (the actor, a test, a user's script) must not end with their parent.
    """
    if multiprocessing.parent_process() is None:
        return False
    name = multiprocessing.current_process().name
    return name.startswith(("EngineCore", "VllmWorker"))
