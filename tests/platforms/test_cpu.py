"""The emulation is complete, inactive on CUDA, and changes nothing but what would raise."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch

from megarl import platforms
from megarl.platforms import cpu
from tests.support.worlds.world import World


def test_the_table_is_complete() -> None:
    installers = [function for name, function in vars(cpu).items() if name.startswith("_install_")]
    assert sorted(installers, key=id) == sorted(cpu.EMULATIONS, key=id)


def test_not_installed_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is present"):
        cpu.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulation is for machines without CUDA")
class TestWithoutCuda:
    def test_the_platform(self) -> None:
        platform = platforms.activate()
        assert platform is platforms.current() is platforms.activate()
        assert (platform.device.type, platform.is_cuda, platform.backend) == ("cpu", False, "gloo")

    def test_factories_and_types(self) -> None:
        platforms.activate()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1], device=torch.cuda.current_device()).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.FloatTensor"  # only Megatron's optimizer sees a CUDA name
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        assert not torch.cuda.is_available()

    def test_device_contexts_still_work(self) -> None:
        """It runs in a new process, because the first use of a context decides which factories it knows."""
        program = """
import torch
from megarl.platforms import cpu
cpu._install_factories()
with torch.device("meta"):
    arguments = {"full": [(3,), 1], "empty_like": [torch.zeros(3)]}
    made = [getattr(torch, name)(*arguments.get(name, [3])) for name in cpu.FACTORIES]
assert [tensor.device.type for tensor in made] == ["meta"] * len(made), made
assert torch.zeros(2, device="cuda").device.type == "cpu"
"""
        result = _run(program)
        assert result.returncode == 0, result.stderr

    @pytest.mark.world
    def test_the_random_state_tracker(self, world: Callable[[int], World]) -> None:
        results = world(2).run("tests.support.ranks.models.megatron_defects:tracker_states")
        for plain, after, first, second in results:
            assert plain == after
            assert len({tuple(plain), tuple(first), tuple(second)}) == 3
        assert results[0][0] == results[1][0] and results[0][2] != results[1][2]  # per TP rank inside the fork

    @pytest.mark.world
    def test_uneven_collectives(self, world: Callable[[int], World]) -> None:
        for rank, (before, after) in enumerate(
            world(2).run("tests.support.ranks.models.megatron_defects:uneven_collectives")
        ):
            assert isinstance(before, str)  # gloo refuses
            assert after == ([1.0, 2.0, 2.0, 2.0], [2.0] if rank == 0 else [4.0] * 3)

    # Of the others: jit_fuser saves compile time, nvtx is for profiling, uneven_collectives for ETP > 1, synchronize
    # for PP > 1, tensor_cuda for tied embeddings under PP > 1.
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["current_device", "factories", "tensor_type", "rng", "streams"])
    def test_training_needs_it(self, name: str) -> None:
        assert _train_without(None).returncode == 0
        broken = _train_without(name)
        assert broken.returncode != 0 and "Traceback" in broken.stderr


@cache
def _train_without(name: str | None) -> subprocess.CompletedProcess[str]:
    """Two training steps of a one-rank MoE in a fresh process, with one emulation left out."""
    program = f"""
import os, torch
from megarl.platforms import cpu
cpu.EMULATIONS = tuple(each for each in cpu.EMULATIONS if each.__name__ != "_install_{name}")
from megarl import platforms
platforms.activate()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from dataclasses import replace
from tests.support.ranks.models import megatron_defects as model
from tests.support.ranks.models.layouts import make_layout, use_layout
model.INFO = replace(model.INFO, family="qwen3_moe", num_experts=4, topk=2, moe_ffn=8, moe_layers=(True,))
with use_layout(make_layout()) as layout:
    model.train(*model.build(layout), 2)
"""
    return _run(program)


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
