"""Finds whether an engine's live weights can be overwritten tensor by tensor, without vLLM's layer-wise reload.

The reload (vLLM 0.32, model_executor/model_loader/reload/layerwise.py) calls the weight loaders on tensors in the
layout that they had when the model was built. Then it lets each module's quant method, and each attention layer,
process the loaded weights, and copies the result into the live tensors. So calling the loaders on the live tensors
gives the same bits if and only if these still have that layout and the processing changes nothing. This module checks
both, module by module, against the layout that vLLM recorded and a list of processing steps from vLLM's source.
Anything that is not known to be safe is an obstacle.

Tensors may have any shape.
"""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _get_weight_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.v1.attention.backend import AttentionImplBase


def in_place_obstacle(model: nn.Module, device_type: str) -> str | None:
    """Return why the model's weights must be reloaded layer by layer, or None if they can be loaded in place.

    `model` must be complete: built, loaded and processed by vLLM. `device_type`: `cpu`, `cuda`, ... of its weights.
    """
    if device_type not in ("cpu", "cuda") or torch.version.hip is not None:
        return f"loading in place is not verified on {device_type}"
    if getattr(model, "_do_torchao_reload", False):
        return "torchao quantises the weights again at each load"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} processes its weights after the first load"
    for name, module in model.named_modules():
        obstacle = _processing(module, device_type) or next(_layout(module, device_type), None)
        if obstacle is not None:
            return f"{name or 'model'} ({type(module).__name__}): {obstacle}"
    return None


def expert_backend(model: nn.Module) -> str | None:
    """Return vLLM's name of the backend that computes the model's experts, None if there are none or it has no name."""
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    backends = (getattr(method, "unquantized_backend", None) for method in methods)
    return next((str(backend.value) for backend in backends if backend is not None), None)


def embeddings_in_place(model: nn.Module, device_type: str) -> list[nn.Module]:
    """Return the embeddings and output heads that can be loaded in place although other modules must be reloaded.

    A reload would hold two more copies of each of them, and it is the largest tensor of many models. Call it before the
    reload begins. A CPU kernel's packed copy of them has to be made again after the load (`loaders.py`).
    """

    def fits(module: nn.Module) -> bool:
        plain = type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod
        return plain and next(_layout(module, device_type), None) is None

    if device_type not in ("cpu", "cuda") or torch.version.hip is not None:
        return []
    sharing: dict[int, list[nn.Module]] = {}  # by the tensor: a tied weight is loaded in one way
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                sharing.setdefault(id(tensor), []).append(module)
    spoiled = {module for modules in sharing.values() if not all(map(fits, modules)) for module in modules}
    return [module for module in model.modules() if module not in spoiled and fits(module)]


def _processing(module: nn.Module, device_type: str) -> str | None:
    """Return what a reload would do with the module's loaded weights, or None if nothing."""
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        method = None
    if type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        # On CUDA their processing is empty. On CPU it chooses `cpu_linear`, a function of (input, weight, bias).
        if device_type == "cpu" and _is_packed(module):
            return "its CPU kernel computes with a packed copy of the weight"
    elif method is not None:
        return _expert_processing(method)
    if is_deferred_attention_layer(module):
        return _attention_processing(module)
    return None


def _is_packed(module: nn.Module) -> bool:
    """Return whether a CPU kernel computes with a packed copy of the module's weight."""
    if getattr(module.weight, "ndim", 2) == 3:  # a convolution, packed in bf16 alone
        return hasattr(module, "_cpu_unpacked_conv_weight")
    function = getattr(module, "cpu_linear", None)
    # A function of vLLM's may keep a packed weight in a closure.
    plain = isinstance(function, FunctionType) and function.__closure__ is None
    return function is not nn.functional.linear and not plain


def _expert_processing(method: Any) -> str | None:  # noqa: ANN401  # one of several classes of vLLM
    """Return what the quant method of an expert layer, or an unknown one, would do with loaded weights."""
    if type(method) is not UnquantizedFusedMoEMethod:
        return f"{type(method).__name__} may change the weights after they are loaded"
    if method.moe.moe_parallel_config.enable_eplb:
        return "load balancing moves experts between the ranks"
    # Of these, `convert_to_unquantized_kernel_format` returns the weights as they are.
    kept = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU)
    if method.unquantized_backend not in kept:
        return f"the {method.unquantized_backend.value} backend changes the layout of the experts' weights"
    if method.moe_kernel is None:
        return "its kernel is not set up"
    experts = type(method.moe_kernel.fused_experts)
    if experts.process_weights_after_loading is not modular_kernel.FusedMoEExperts.process_weights_after_loading:
        return f"{experts.__name__} changes the layout of the experts' weights"
    return None


def _attention_processing(module: nn.Module) -> str | None:
    """Return what an attention layer would do after a load, or None: only default scales of the KV cache are set."""
    if type(module) is not Attention:
        return "it may compute tensors from loaded weights"
    if module.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
        return f"a KV cache of {module.kv_cache_dtype} may need new scales"
    impl: Any = module.impl  # a class of the attention backend
    process = type(impl).process_weights_after_loading
    if process is AttentionImplBase.process_weights_after_loading:
        return None
    if process.__qualname__ == "FlashInferImpl.process_weights_after_loading" and impl._sinks_source is None:
        return None  # it converts attention sinks only
    return f"{type(impl).__name__} may compute tensors from loaded weights"


def _layout(module: nn.Module, device_type: str) -> Iterator[str]:
    """Yield how the module's tensors differ from those that it was built with."""
    info = get_layerwise_info(module)
    if info.can_load():
        yield "a layer-wise reload is in progress"
    built, built_buffers = info.restore_metadata
    live = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    changed = (built.keys() ^ live.keys()) - SKIP_TENSORS
    if changed:
        yield f"it was built with other parameters: {', '.join(sorted(changed))}"
    for name, tensor in live.items():
        yield from _unusable(name, tensor, device_type)
        if name in built and _form(tensor) != _form(built[name]):
            yield f"{name} was built in another form: {_form(built[name])}, which is {_form(tensor)} by now"
    for name in sorted(built_buffers.keys() - module._non_persistent_buffers_set):
        buffer = module._buffers.get(name)
        if buffer is None or _form(buffer) != _form(built_buffers[name]):
            yield f"buffer {name} was built in another form"


def _unusable(name: str, tensor: torch.Tensor, device_type: str) -> Iterator[str]:
    """Yield why a loader that is called now would not write into the memory that the engine computes with."""
    if tensor.device.type != device_type or getattr(tensor, "_vllm_is_uva_offloaded", False):
        yield f"{name} is not on the engine's device"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        yield f"{name} has no memory"
    if _get_weight_loader(tensor) is not _get_original_loader(tensor):
        yield f"the loader of {name} is that of a reload, which ignores tensors outside of one"


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what a weight loader sees of a tensor apart from its content: shape, strides, dtype and the loader."""
    loader = _get_original_loader(tensor)  # a reload leaves its own loaders, which call this one, in its records
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, getattr(loader, "__func__", loader).__qualname__
