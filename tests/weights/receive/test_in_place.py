"""A step that is not known to be the same in place as by a reload is an obstacle."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megarl.weights.receive.in_place import expert_backend, in_place_obstacle
from tests.support.engines.vllm_model import vllm_model
from tests.support.models.tiny import make_tiny_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[torch.nn.Module, Any]]:
    """A mixture of experts whose first layer is dense, and its ModelConfig."""
    directory = tmp_path_factory.mktemp("model")
    with vllm_model(make_tiny_model(directory, "qwen3_moe", moe_intermediate_size=64, mlp_only_layers=[0])) as both:
        yield both


@pytest.fixture
def model(vllm: tuple[torch.nn.Module, Any]) -> torch.nn.Module:
    return vllm[0]


def parts(model: torch.nn.Module) -> tuple[Any, Any, Any]:
    """Return the first fused linear layer, the experts and the first attention layer."""
    modules = dict(model.named_modules())
    (experts,) = [module for module in modules.values() if hasattr(module, "w13_weight")]
    return modules["model.layers.0.mlp.gate_up_proj"], experts, modules["model.layers.0.self_attn.attn"]


def test_weights_in_their_first_layout_are_loaded_in_place(model: torch.nn.Module) -> None:
    assert in_place_obstacle(model, "cpu") is None


@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON"])
def test_experts_of_the_triton_backends_are_loaded_in_place(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The backends of a GPU: on a CPU vLLM chooses another."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    method = parts(model)[1].quant_method
    assert expert_backend(model) == "CPU"
    monkeypatch.setattr(method, "unquantized_backend", UnquantizedMoeBackend[backend])
    assert expert_backend(model) == backend
    assert in_place_obstacle(model, "cpu") is None


class FlashInferImpl:
    """Stands in for vLLM's class of this name, which needs a GPU to be made: it converts attention sinks."""

    def __init__(self, sinks: torch.Tensor | None) -> None:
        self._sinks_source = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("sinks", "obstacle"), [(None, None), (torch.zeros(4), "FlashInferImpl may compute tensors from loaded weights")]
)
def test_attention_of_flashinfer_is_loaded_in_place_unless_it_has_sinks(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None, obstacle: str | None
) -> None:
    monkeypatch.setattr(parts(model)[2], "impl", FlashInferImpl(sinks))
    found = in_place_obstacle(model, "cpu")
    assert found is None if obstacle is None else str(found).endswith(obstacle)


def replace_weight(patch: pytest.MonkeyPatch, linear: Any, data: torch.Tensor) -> torch.nn.Parameter:
    """Give a layer another weight, with the loader of its own one."""
    changed = torch.nn.Parameter(data, requires_grad=False)
    changed.weight_loader = linear.weight.weight_loader  # type: ignore[attr-defined]
    patch.setitem(linear._parameters, "weight", changed)
    return changed


def shapes_differ(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    replace_weight(patch, linear, linear.weight.data.t())


def strides_differ(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    replace_weight(patch, linear, linear.weight.data.t().contiguous().t())


def dtypes_differ(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    replace_weight(patch, linear, linear.weight.data.bfloat16())


def the_loader_is_lost(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    patch.setitem(linear._parameters, "weight", torch.nn.Parameter(linear.weight.data, requires_grad=False))


def the_memory_is_freed(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    replace_weight(patch, linear, linear.weight.data.clone()).untyped_storage().resize_(0)


def a_parameter_is_new(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    patch.setitem(linear._parameters, "weight_scale", torch.nn.Parameter(torch.ones(1), requires_grad=False))


def the_weights_are_quantised(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class OtherMethod(UnquantizedLinearMethod):
        """A subclass may override anything."""

    patch.setattr(linear, "quant_method", OtherMethod())


def the_kernel_has_a_packed_copy(patch: pytest.MonkeyPatch, linear: Any, *_: Any) -> None:
    packed = linear.weight.clone()
    patch.setattr(linear, "cpu_linear", lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias))


def the_experts_are_shuffled(patch: pytest.MonkeyPatch, _: Any, experts: Any, __: Any) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    patch.setattr(experts.quant_method, "unquantized_backend", UnquantizedMoeBackend.FLASHINFER_CUTLASS)


def the_kernel_processes_the_experts(patch: pytest.MonkeyPatch, _: Any, experts: Any, __: Any) -> None:
    kernel = type(experts.quant_method.moe_kernel.fused_experts)
    patch.setattr(kernel, "process_weights_after_loading", lambda self, layer: None)


def experts_move(patch: pytest.MonkeyPatch, _: Any, experts: Any, __: Any) -> None:
    patch.setattr(experts.quant_method.moe.moe_parallel_config, "enable_eplb", True)


def attention_computes_from_weights(patch: pytest.MonkeyPatch, _: Any, __: Any, attention: Any) -> None:
    patch.setattr(type(attention.impl), "process_weights_after_loading", lambda self, dtype: None)


def the_cache_is_quantised(patch: pytest.MonkeyPatch, _: Any, __: Any, attention: Any) -> None:
    patch.setattr(attention, "kv_cache_dtype", "fp8")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shapes_differ, r"gate_up_proj .*weight was built in another form"),
        (strides_differ, r"gate_up_proj .*weight was built in another form"),
        (dtypes_differ, r"gate_up_proj .*weight was built in another form"),
        (the_loader_is_lost, r"gate_up_proj .*weight was built in another form"),
        (the_memory_is_freed, "weight has no memory"),
        (a_parameter_is_new, "built with other parameters: weight_scale"),
        (the_weights_are_quantised, "OtherMethod may change the weights"),
        (the_kernel_has_a_packed_copy, "packed copy"),
        (the_experts_are_shuffled, "backend changes the layout"),
        (the_kernel_processes_the_experts, "CPUUnquantizedExperts changes the layout"),
        (experts_move, "load balancing"),
        (attention_computes_from_weights, "may compute tensors from loaded weights"),
        (the_cache_is_quantised, "KV cache of fp8"),
    ],
)
def test_what_is_not_known_to_be_safe_is_an_obstacle(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None], reason: str
) -> None:
    with monkeypatch.context() as patch:
        change(patch, *parts(model))
        obstacle = in_place_obstacle(model, "cpu")
    assert obstacle is not None
    assert re.search(reason, obstacle)
    assert in_place_obstacle(model, "cpu") is None, "the test has undone its change"


def test_other_devices_and_hooks_of_the_model_are_obstacles(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not verified on xpu" in str(in_place_obstacle(model, "xpu"))
    assert "is not on the engine's device" in str(in_place_obstacle(model, "cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "process_weights_after_loading", lambda self: None, raising=False)
        assert "processes its weights" in str(in_place_obstacle(model, "cpu"))


def test_a_reload_in_progress_is_an_obstacle_and_leaves_none(vllm: tuple[torch.nn.Module, Any]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = vllm
    initialize_layerwise_reload(model)
    assert "reload is in progress" in str(in_place_obstacle(model, "cpu"))
    finalize_layerwise_reload(model, config)
    assert in_place_obstacle(model, "cpu") is None
