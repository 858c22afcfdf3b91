"""Loads received tensors into vLLM's model: in place where that gives the same bits, else by vLLM's layer-wise reload.

The reload calls each weight loader twice (once on meta tensors, to count elements), keeps all tensors of incomplete
layers, and needs memory for a second copy of the layer. `in_place.py` says when it can be avoided, for the model or
for its embeddings alone, and `recorded_copies.py` then spares the loaders too.

vLLM cannot end an incomplete reload. A reload (vLLM 0.32, model_executor/model_loader/reload/layerwise.py) sets each
module's live tensors aside and puts meta tensors in their place, whose loaders keep what they get. When a module has
all its tensors, vLLM processes them, copies them into the live ones, and puts these back. So after an interruption
between two loader calls, a module either has its live tensors with the new weights, or they are set aside with the old
ones. `undo_reload` puts the latter back, as vLLM does for a module that got no tensor, and drops what was kept. The
weights are then of two versions, and a later reload overwrites every module.

Shapes: B bytes of a flat uint8 buffer; tensors without a suffix may have any shape.
"""

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from megarl.common.errors import WeightSyncError
from megarl.common.process.memory_tuning import MMAP_OTHERWISE, map_blocks_from
from megarl.weights.receive.coverage import LoadCoverage, missing_message
from megarl.weights.receive.in_place import embeddings_in_place, expert_backend, in_place_obstacle
from megarl.weights.receive.recorded_copies import RecordedCopies

logger = logging.getLogger(__name__)
MMAP_DURING_SYNC = 2**20
# Its identity, address, shape and strides, which CUDA graphs and kernels may have kept.
LiveTensor: TypeAlias = tuple[int, int, torch.Size, tuple[int, ...]]


class ModelLoader:
    """Loads the tensors of one engine worker. One sync is `start`, `load` for every bucket, `finish`.

    If one of them raises, the model is partly loaded and unusable. If buckets are missing, `abandon` ends the sync, and
    a later sync that brings every weight makes the model usable again.
    """

    def __init__(
        self, model: torch.nn.Module, model_config: ModelConfig, device: torch.device, *, read_at_start: bool = False
    ) -> None:
        """`read_at_start`: the engine has read the model's files, so what no sync brings has a value from there."""
        self._model: Any = model  # torch declares no type for `load_weights`
        self._model_config, self._device = model_config, device
        self._copies = RecordedCopies(self._load)
        self.obstacle: str | None = "no sync has started"
        self._read_at_start = read_at_start
        self._check_next = True
        self._coverage: LoadCoverage | None = None
        self._before: dict[str, LiveTensor] = {}  # of a reload that has begun

    @property
    def report(self) -> str:
        """How this sync loads tensors, and the backend of the experts, for the run's log."""
        backend = expert_backend(self._model)
        return self.way if backend is None else f"{self.way}; experts computed by {backend}"

    @property
    def way(self) -> str:
        """How this sync loads tensors."""
        if self.obstacle is not None:
            return f"layer-wise reload: {self.obstacle}"
        if self._copies.obstacle is not None:
            return f"in place by vLLM's loaders: {self._copies.obstacle}"
        return "in place by recorded copies" if self._copies.repeated else "in place, recording copies"

    def check(self) -> str | None:
        """Return why the model must be reloaded layer by layer, or None if it can be loaded in place."""
        return in_place_obstacle(self._model, self._device.type)

    def check_next_sync(self) -> None:
        """Make the next sync check that it brings every weight.

        It is the first of a group, whose tensors may differ, or the first after a sleep, which lost every weight and
        its padding.
        """
        self._check_next = True

    def start(self) -> None:
        """Choose the way, and prepare the model for vLLM's layer-wise reload if that is chosen."""
        self.obstacle = self.check()
        self._coverage = LoadCoverage(self._model) if self._check_next else None
        if self.obstacle is None:
            if self._check_next:
                self._copies.forget()  # a repetition omits the padding, which was written by then
            self._copies.start(self._model)
        else:
            self._before = live_tensors(self._model)
            in_place = embeddings_in_place(self._model, self._device.type)
            initialize_layerwise_reload(self._model)
            for module in in_place:
                put_back(module)
            if self._coverage is not None:
                self._coverage.follow_reload()
        if self._device.type == "cpu":
            # Loading allocates and frees tensors of many sizes in different orders.
            map_blocks_from(MMAP_DURING_SYNC)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors. A reload refers to them until their module is complete."""
        with torch.no_grad():
            if self.obstacle is None:
                self._copies.load(tensors, self._coverage)
            else:
                with contextlib.nullcontext() if self._coverage is None else self._coverage.watch():
                    self._load(tensors)

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Call vLLM's loaders."""
        with disable_mtp_completeness_check():
            self._model.load_weights(tensors)

    def detach(self, buffer_B: torch.Tensor) -> None:
        """Replace what a reload keeps of the buffer by copies."""
        if self.obstacle is None:
            return
        storage = buffer_B.untyped_storage().data_ptr()
        for module in self._model.modules():
            for _, bound in get_layerwise_info(module).loaded_weights:
                for key, value in bound.arguments.items():
                    if not isinstance(value, torch.Tensor) or value.is_meta:
                        continue
                    if value.untyped_storage().data_ptr() == storage:
                        bound.arguments[key] = value.clone()

    def finish(self) -> None:
        """Complete the new weights.

        Raises WeightSyncError if this first sync of a group has not brought every weight, which dummy weights need.
        """
        self._check_coverage()
        if self.obstacle is None:
            self._copies.finish()
        else:
            finalize_layerwise_reload(self._model, self._model_config)
            self._before = {}
        if self._device.type == "cpu":
            if self.obstacle is not None:
                prepack_embeddings(self._model)
            map_blocks_from(MMAP_OTHERWISE)

    def abandon(self) -> None:
        """End a sync that will not be completed. The weights are of two versions until the end of the next sync.

        That one is checked to bring every weight. Raises WeightSyncError if the model cannot be loaded again.
        """
        if self.obstacle is not None:
            undo_reload(self._model, self._before)
        self._copies.forget()
        self._before, self._coverage, self._check_next = {}, None, True
        if self._device.type == "cpu":
            map_blocks_from(MMAP_OTHERWISE)

    def _check_coverage(self) -> None:
        if self._coverage is None:
            return
        missing, self._coverage, self._check_next = self._coverage.missing(), None, False
        if missing and self._read_at_start:
            logger.warning("%s; they keep the values that the engine read", missing_message(missing))
        elif missing:
            raise WeightSyncError(
                f"{missing_message(missing)}; the engine started with random weights and has no others for them (if "
                f"the trainer does not hold them, set rollout.load_weights: true, so that engines read the files)"
            )


def live_tensors(model: torch.nn.Module) -> dict[str, LiveTensor]:
    """Return what identifies the tensors with which a model computes, by name. Call it before a reload begins."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in named}


@torch.no_grad()
def undo_reload(model: Any, before: dict[str, LiveTensor]) -> None:  # noqa: ANN401  # its attributes are vLLM's
    """Put back the live tensors of all modules that a reload has not completed. `before`: those of the whole model.

    Do not call it after an exception of a loader or of a module's processing.

    Raises:
        WeightSyncError: the model does not compute with the same tensors as before. It must not be used any more.
    """
    for module in model.modules():
        if get_layerwise_info(module).can_load():
            put_back(module)
    LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):  # vLLM sets it when a reload begins
        model._do_torchao_reload = model._original_do_torchao_reload
    now = live_tensors(model)
    wrong = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    wrong += [name for name, module in model.named_modules() if get_layerwise_info(module).can_load()]
    if wrong:
        raise WeightSyncError(
            f"an interrupted reload left tensors or modules that the engine cannot use, so it must be replaced: "
            f"{len(wrong)}, such as {wrong[:10]}"
        )


def put_back(module: torch.nn.Module) -> None:
    """Give a module of a reload that has begun its live tensors and their loaders again: it no longer takes part."""
    info = get_layerwise_info(module)
    for tensor in get_layer_tensors(module).values():
        if not tensor.is_meta:  # a reload leaves some where they are, such as a bias, and changes their loader only
            tensor.weight_loader = _get_original_loader(tensor)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(module, info)
    info.reset()


def prepack_updated_experts() -> None:
    """Patch vLLM 0.32 so that a weight update pads and packs the experts' weights. CPU only. Idempotent.

    `UnquantizedFusedMoEMethod._setup_kernel` processes the experts' weights at the first load only. On CPU that step
    changes the weights, so after an update without it the MoE layers compute wrong results without an error.
    """
    original = UnquantizedFusedMoEMethod._setup_kernel
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def setup_kernel(
        self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def prepack_embeddings(model: torch.nn.Module) -> None:
    """Pack the weights of embeddings and output heads again after an update. CPU only.

    Those that were loaded in place still have packed copies of the old weights. vLLM 0.32 omits this for a tied head
    too: its layer-wise reload gives the shared weight to the embedding alone. Without it the logits do not follow the
    weights. https://github.com/vllm-project/vllm, model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            del module.cpu_linear  # with the packed copy of the old weights, before another one is made
            module.quant_method.process_weights_after_loading(module)
