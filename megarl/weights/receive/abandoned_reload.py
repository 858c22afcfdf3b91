"""Ends a layer-wise reload of vLLM's that did not get all tensors, so that another one can begin.

vLLM has no call for this. A reload (vLLM 0.32, model_executor/model_loader/reload/layerwise.py) sets each module's live
tensors aside, puts tensors on the meta device in their place, and gives these loaders that keep what they are given. As
soon as a module has all of its tensors, they are processed and copied into the live ones, which are put back. So after
an interruption between two calls of the loaders a module either has its live tensors, with the new weights, or they are
set aside with the old ones. Here the latter are put back as vLLM does it for a module that got no tensor, and what was
kept for the module is dropped. The weights are then a mixture, of which a later reload overwrites every module.

Tensors may have any shape.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn

from megarl.common.errors import WeightSyncError

# With address, shape and strides, which CUDA graphs and kernels may have kept.
LiveTensor: TypeAlias = tuple[torch.Tensor, int, torch.Size, tuple[int, ...]]
LiveTensors: TypeAlias = dict[str, LiveTensor]  # by name


def live_tensors(model: nn.Module) -> LiveTensors:
    """Return the tensors with which a model computes. Call it before a reload begins."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tensor, tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in named}


@torch.no_grad()
def undo_reload(model: nn.Module, before: LiveTensors) -> None:
    """Put back the live tensors of all modules that a reload has not completed. `before`: those of the whole model.

    It must not be called after an exception of a loader, or of a module's processing.

    Raises:
        WeightSyncError: the model does not compute with the same tensors as before. It must not be used any more.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, get_layerwise_info

    for module in model.modules():
        if get_layerwise_info(module).can_load():
            put_back(module)
    LOADING_LAYERS.clear()
    described: Any = model  # attributes that vLLM sets when a reload begins
    if hasattr(model, "_original_do_torchao_reload"):
        described._do_torchao_reload = described._original_do_torchao_reload
    _check(model, before)


def put_back(module: nn.Module) -> None:
    """Give a module of a reload that has begun its live tensors and their loaders again: it takes no part any more."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        _place_kernel_tensors,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

    info = get_layerwise_info(module)
    for tensor in get_layer_tensors(module).values():
        if not tensor.is_meta:  # a reload leaves some where they are, such as a bias, and changes their loader only
            tensor.weight_loader = _get_original_loader(tensor)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(module, info)
    info.reset()


def _check(model: nn.Module, before: LiveTensors) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    now = live_tensors(model)
    wrong = sorted(before.keys() ^ now.keys())
    wrong += [name for name in before.keys() & now.keys() if not _same(before[name], now[name])]
    wrong += [name for name, module in model.named_modules() if get_layerwise_info(module).can_load()]
    if wrong:
        raise WeightSyncError(
            f"an interrupted reload left {len(wrong)} tensors or modules that the engine cannot use: {wrong[:10]}"
        )


def _same(before: LiveTensor, now: LiveTensor) -> bool:
    return before[0] is now[0] and before[1:] == now[1:]
