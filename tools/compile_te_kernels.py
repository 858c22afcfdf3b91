#!/usr/bin/env python3
"""Compile Transformer Engine's Triton MoE kernels for Hopper (sm_90), on a machine without a GPU.

    .venv-kernels/bin/python tools/compile_te_kernels.py     # what `make nightly-kernels` runs

It shows that the locked Transformer Engine and Triton are compatible. An import cannot show this, because Triton
compiles a kernel at its first call, on a GPU. The kernels are those behind `moe_permute_fusion`, with the arguments
that transformer_engine/pytorch/triton/permutation.py passes for Qwen3-30B-A3B, in every tuned block size. Nothing runs,
so results are not checked. The exit status is 1 if a kernel does not compile or is not listed here.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
EXPERTS, HIDDEN, BLOCK = 128, 2048, 1024
SIZES = {"num_experts": EXPERTS, "num_splits": EXPERTS, "hidden_size": HIDDEN, "BLOCK_SIZE": BLOCK,
         "LOAD_SIZE": EXPERTS, "PROBS_LOAD_WIDTH": EXPERTS, "IDX_LOAD_WIDTH": EXPERTS,
         "WORKSPACE_LOAD_WIDTH": 4 * EXPERTS}  # fmt: skip
NO_PADDING = {"FUSION_PAD": False, "FUSION_UNPAD": False, "PERMUTE_SCALE": False}
# The flags of each call, by kernel.
CALLS: dict[str, list[dict[str, bool]]] = {
    "_row_id_map_pass_1_kernel": [{}],
    "_row_id_map_pass_2_kernel": [{}],
    "_row_id_map_pass_3_kernel": [{}],
    "_permute_kernel": [{"PERMUTE_PROBS": True}, {"PERMUTE_PROBS": False}],
    "_unpermute_kernel": [
        {"WITH_MERGING_PROBS": merged, "PERMUTE_PROBS": permuted}
        for merged, permuted in ((False, False), (True, False), (False, True))
    ],
    "_unpermute_bwd_with_merging_probs_kernel": [{}],
    "_make_chunk_sort_map_kernel": [{}],
    "_sort_chunks_by_map_kernel": [
        {"PERMUTE_PROBS": permuted, "FORWARD": forward} for permuted in (True, False) for forward in (True, False)
    ],
}
# Pointer types by part of the name; all others point to bf16.
POINTERS = {"routing_map": "*i1", "row_id_map": "*i32", "workspace": "*i32", "split_sizes": "*i32",
            "sorted_indices": "*i32", "dst_rows": "*i32", "probs": "*fp32"}  # fmt: skip


def kernels() -> ModuleType:
    """Return the kernels' module without its package, which would load CUDA libraries."""
    path = Path(sysconfig.get_paths()["purelib"]) / "transformer_engine" / "common" / "triton" / "permutation.py"
    spec = importlib.util.spec_from_file_location("permutation", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(kernel: Any, flags: dict[str, bool], block: int) -> ASTSource:  # noqa: ANN401  # Triton's JITFunction
    """Return a kernel with its argument types; arguments unused under `flags` are None, as in the real call."""
    given: dict[str, Any] = {**SIZES, **NO_PADDING, **flags, "BLOCK_SIZE": block}
    unused = {"scale", "pad_offsets"}
    unused |= {"permuted_probs"} if not given.get("PERMUTE_PROBS", True) else set()
    unused |= {"merging_probs"} if not given.get("WITH_MERGING_PROBS", True) else set()
    signature, constants = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        if parameter.is_constexpr:
            constants[name] = given[name]
        elif any(part in name for part in unused) and name != "scale_hidden_dim":
            constants[name] = None
        elif name.endswith("_ptr"):
            signature[name] = next((kind for part, kind in POINTERS.items() if part in name), "*bf16")
        else:
            signature[name] = "i32"
    signature |= dict.fromkeys(constants, "constexpr")
    return ASTSource(kernel, {parameter.name: signature[parameter.name] for parameter in kernel.params}, constants)


def main() -> int:
    found = {name: each for name, each in vars(kernels()).items() if name.endswith("_kernel")}
    if found.keys() != CALLS.keys():
        sys.stderr.write(f"CALLS and the module differ in kernels: {', '.join(sorted(found.keys() ^ CALLS.keys()))}\n")
        return 1
    failed = 0
    for name, found_as in found.items():
        configs = getattr(found_as, "configs", None)  # a tuned kernel wraps the kernel itself
        blocks = [config.kwargs["BLOCK_SIZE"] for config in configs] if configs else [BLOCK]
        sizes = []
        for flags, block in itertools.product(CALLS[name], blocks):
            try:
                binary = triton.compile(source(found_as.fn if configs else found_as, flags, block), target=HOPPER)
                sizes.append(len(binary.asm["cubin"]))
            except Exception as error:  # any compiler error is a finding
                failed += 1
                sys.stdout.write(f"{name} {flags} in blocks of {block}: {type(error).__name__}: {error}\n")
        if sizes:
            sys.stdout.write(f"{name}: {len(sizes)} compiled, of {min(sizes):,} to {max(sizes):,} bytes\n")
    sys.stdout.write(f"triton {triton.__version__}: {'all compiled' if not failed else f'{failed} failed'}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
