"""Methods for tests in a real engine's worker (`worker_extension_cls`): how weights are loaded, and what is live."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
from typing import Any

import torch

PR_GET_PDEATHSIG = 2  # linux/prctl.h


class EngineWorker:
    """vLLM adds these methods to its worker."""

    model_runner: Any  # these attributes belong to vLLM's worker
    weight_transfer_engine: Any

    def death_signal(self) -> tuple[str, int]:
        """The name of this process, and the signal that the kernel sends it when its parent ends; 0 for none."""
        number = ctypes.c_int()
        assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
        return multiprocessing.current_process().name, number.value

    def loaded(self) -> str:
        """The way in which the last sync was loaded."""
        return str(self.weight_transfer_engine.loader.way)

    def interrupted(self) -> tuple[bool, int, int]:
        """Tell whether a sync was cut off here, and how many modules it has and has not loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        from megarl.weights.loaders import ModelLoader

        engine = self.weight_transfer_engine
        assert isinstance(engine.loader, ModelLoader)
        modules = [module for module in self.model_runner.get_model().modules() if module._parameters]
        left = sum(get_layerwise_info(module).can_load() for module in modules)
        return engine._interrupted is not None, len(modules) - left, left

    def force_reload(self, on: bool) -> None:
        """Make every later sync a layer-wise reload, or leave the choice to the check."""
        from megarl.weights import in_place, loaders

        check = (lambda *_: "a test asks for it") if on else in_place.in_place_obstacle
        loaders.in_place_obstacle = check  # type: ignore[assignment]

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

    def live_weights(self) -> dict[str, str]:
        """Return a digest of the bits of each parameter and buffer."""
        model = self.model_runner.get_model()
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in named}

    def set_workaround(self, on: bool) -> None:
        """Apply `prepack_updated_experts`, or undo it."""
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        from megarl.weights.loaders import prepack_updated_experts

        if on:
            prepack_updated_experts()
        else:
            UnquantizedFusedMoEMethod._setup_kernel = UnquantizedFusedMoEMethod._setup_kernel.__wrapped__


def bits(tensor: torch.Tensor) -> bytes:
    """Return shape, dtype and content."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + content


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
