#!/usr/bin/env python3
"""Run the locked fla's Gated DeltaNet kernels on a CPU, in Triton's interpreter, and compare with megarl's rule.

    .venv/bin/python tools/interpret_fla_kernels.py .venv-kernels     # what `make nightly-kernels` runs

It runs the layer as on a GPU, in fp32, and compares outputs and gradients of packed sequences with fewer key heads than
value heads. This does not show how the kernels compile or perform on a GPU. The exit status is 1 if they differ.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megarl.models.architecture.architecture import DeltaNet

DELTA = DeltaNet((True,), key_heads=1, value_heads=2, key_dim=16, value_dim=16, conv=4)
BOUNDS, TOKENS = (0, 70, 71, 90), 95  # two chunks, one token, and tokens beyond the last sequence
BOUND = 1e-5  # on a difference, relative to the largest value


def prepare(site: Path, directory: Path) -> None:
    """Make `site`'s fla and Triton importable without a GPU. `directory`: for a patched copy."""
    shutil.copytree(site / "fla", directory / "fla")
    (directory / "triton").symlink_to(site / "triton")
    for path in (directory / "fla" / "ops").rglob("*.py"):
        # In the interpreter a loop counter is an int.
        path.write_text(path.read_text().replace("i_t.to(tl.int64)", "i_t"))
    sys.path.insert(0, str(directory))
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.runtime.jit import KernelInterface

    class FirstConfig(KernelInterface):  # type: ignore[misc]  # Triton has no types
        """A tuned kernel with its first config, because tuning needs a GPU."""

        def __init__(self, kernel: Any, configs: list[Any]) -> None:  # noqa: ANN401
            self.kernel, self.kwargs, self.arg_names = kernel, configs[0].kwargs, kernel.arg_names

        def run(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return self.kernel.run(*args, **kwargs, **self.kwargs)

    triton.autotune = lambda configs, **_: lambda kernel: FirstConfig(kernel, configs)
    import fla.utils

    fla.utils.custom_device_ctx = lambda index: contextlib.nullcontext()


def layer() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a DeltaNet layer without projections, and the projected tokens, decays and strengths."""
    from megarl.models.megatron.delta_net import GatedDeltaNet

    made: Any = GatedDeltaNet.__new__(GatedDeltaNet)
    torch.nn.Module.__init__(made)
    made.delta, made.sizes = DELTA, [DELTA.keys, DELTA.keys, DELTA.values]
    generator = torch.Generator().manual_seed(0)
    made.conv1d = torch.nn.Module()
    made.conv1d.weight = torch.nn.Parameter(torch.randn(sum(made.sizes), 1, DELTA.conv, generator=generator))
    qkv_TX = torch.randn(TOKENS, sum(made.sizes), generator=generator)
    g_TH, beta_TH = (torch.rand(TOKENS, DELTA.value_heads, generator=generator) for _ in range(2))
    return made, tuple(each.requires_grad_() for each in (qkv_TX, -3 * g_TH.detach(), beta_TH))


def results(rule: Any, leaves: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the sequences' outputs and the gradients of `leaves`."""
    out_THV = rule(*given, torch.tensor(BOUNDS, dtype=torch.int32))[: BOUNDS[-1]]
    return [out_THV, *torch.autograd.grad(out_THV.square().sum(), leaves)]


def main() -> int:
    [site] = Path(sys.argv[1]).glob("lib/python*/site-packages")
    with tempfile.TemporaryDirectory() as directory:
        prepare(site, Path(directory))
        made, given = layer()
        leaves = (*given, made.conv1d.weight)
        ours, theirs = (results(rule, leaves, given) for rule in (made._by_torch, made._by_kernels))
    worst = 0.0
    for name, a, b in zip(("outputs", "of q, k, v", "of g", "of beta", "of conv1d"), ours, theirs, strict=True):
        worst = max(worst, gap := float((a - b).abs().max() / a.abs().max()))
        sys.stdout.write(f"{name if name == 'outputs' else f'gradients {name}'}: {gap:.1e}\n")
    return 1 if worst > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
