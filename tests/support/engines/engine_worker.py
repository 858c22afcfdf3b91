"""Methods for tests in a real engine's worker (`worker_extension_cls`): how weights are loaded, and what is live."""

import ctypes
import hashlib
import multiprocessing

import torch

from benchmarks.lib import live_engine

PR_GET_PDEATHSIG = 2  # linux/prctl.h


class EngineWorker(live_engine.EngineWorker):
    """vLLM adds these methods to its worker."""

    def death_signal(self) -> tuple[str, int]:
        """The name of this process, and the signal that the kernel sends it when its parent ends; 0 for none."""
        number = ctypes.c_int()
        assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) == 0
        return multiprocessing.current_process().name, number.value

    def interrupted(self) -> tuple[bool, int, int]:
        """Return whether a sync was cut off here, and how many modules it has and has not loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        from megarl.weights.receive.loaders import ModelLoader

        engine = self.weight_transfer_engine
        assert isinstance(engine.loader, ModelLoader)
        modules = [module for module in self.model_runner.get_model().modules() if module._parameters]
        left = sum(get_layerwise_info(module).can_load() for module in modules)
        return engine._interrupted is not None, len(modules) - left, left

    def force_reload(self, on: bool) -> None:
        """Make every later sync a layer-wise reload, or leave the choice to the check."""
        from megarl.weights.receive import in_place, loaders

        check = (lambda *_: "a test asks for it") if on else in_place.in_place_obstacle
        loaders.in_place_obstacle = check  # type: ignore[assignment]

    def live_weights(self) -> dict[str, str]:
        """Return a digest of the bits of each parameter and buffer."""
        model = self.model_runner.get_model()
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in named}

    def set_workaround(self, on: bool) -> None:
        """Apply `prepack_updated_experts`, or undo it."""
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        from megarl.weights.receive.loaders import prepack_updated_experts

        if on:
            prepack_updated_experts()
        else:
            UnquantizedFusedMoEMethod._setup_kernel = UnquantizedFusedMoEMethod._setup_kernel.__wrapped__


def bits(tensor: torch.Tensor) -> bytes:
    """Return shape, dtype and content."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + content
