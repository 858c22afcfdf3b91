"""The parts of gpu_smoke that need CUDA, on a CPU with stand-ins for what it lacks: that they run, and can fail."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl import platforms
from megarl.config.memory import trainer_memory
from megarl.models.layout import Layout
from megarl.models.read_config import load_info
from tests.support.checkout import ROOT


@pytest.fixture(scope="module", autouse=True)
def smoke() -> Iterator[None]:
    """The package `smoke` can be imported."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    importlib.import_module("smoke.rows")
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def tiny() -> Any:
    return sys.modules["smoke.rows"].Where(torch.device("cpu"), True)


# --- Transformer Engine's three classes, as plain torch


class DotProductAttention:
    """Causal attention of packed sequences."""

    causal = True

    def __init__(self, heads: int, channels: int, *, attn_mask_type: str, qkv_format: str) -> None:
        assert (attn_mask_type, qkv_format) == ("padding_causal", "thd")

    def __call__(
        self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
        max_seqlen_q: int, max_seqlen_kv: int,
    ) -> Tensor:  # fmt: skip
        bounds = cu_seqlens_q.tolist()
        assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_kv.tolist() == bounds and bounds[-1] == len(q_TND)
        assert max_seqlen_q == max_seqlen_kv == max(stop - start for start, stop in pairwise(bounds))
        parts = []
        for start, stop in pairwise(bounds):
            logits_NQK = torch.einsum("qnd,knd->nqk", q_TND[start:stop].float(), k_TND[start:stop].float())
            logits_NQK /= q_TND.shape[-1] ** 0.5
            if self.causal:
                logits_NQK += torch.full(logits_NQK.shape[1:], float("-inf")).triu(1)
            parts.append(torch.einsum("nqk,knd->qnd", logits_NQK.softmax(-1), v_TND[start:stop].float()))
        return torch.cat(parts).to(q_TND.dtype).flatten(1)


class GroupedLinear(torch.nn.Module):
    """A product per expert."""

    def __init__(
        self, experts: int, hidden: int, outputs: int, *, bias: bool, params_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        assert not bias
        for expert in range(experts):
            weight = torch.randn(outputs, hidden, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(weight))

    def forward(self, x_TH: Tensor, splits: list[int]) -> Tensor:
        parts = [x @ getattr(self, f"weight{i}").t() for i, x in enumerate(x_TH.split(splits))]
        return torch.cat(parts)


class Linear(torch.nn.Module):
    """A product whose backward pass adds the weight's gradient to `main_grad`."""

    adds = True

    def __init__(
        self, hidden: int, outputs: int, *, bias: bool, params_dtype: torch.dtype, device: torch.device,
        fuse_wgrad_accumulation: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        assert fuse_wgrad_accumulation and not bias
        self.weight: Any = torch.nn.Parameter(torch.randn(outputs, hidden, dtype=params_dtype, device=device))

    def forward(self, x_TH: Tensor) -> Tensor:
        output_TF = x_TH @ self.weight.detach().t()

        def accumulate(grad_TF: Tensor) -> None:
            product = grad_TF.float().t() @ x_TH.detach().float()
            self.weight.main_grad.copy_(product + self.weight.main_grad if self.adds else product)

        output_TF.register_hook(accumulate)
        return output_TF


class Wrong:
    """Classes that compute something else."""

    class NotCausal(DotProductAttention):
        causal = False

    class FirstExpertOnly(GroupedLinear):
        def forward(self, x_TH: Tensor, splits: list[int]) -> Tensor:
            return x_TH @ self.weight0.t()

    class Overwrites(Linear):
        adds = False


ATTENTION, GROUPED, _TIME, GRADIENT = range(4)
RIGHT = {"DotProductAttention": DotProductAttention, "GroupedLinear": GroupedLinear, "Linear": Linear}


@pytest.mark.parametrize(
    ("classes", "failed"),
    [
        ({}, []),
        ({"DotProductAttention": Wrong.NotCausal}, [ATTENTION]),
        ({"GroupedLinear": Wrong.FirstExpertOnly}, [GROUPED]),
        ({"Linear": Wrong.Overwrites}, [GRADIENT]),
    ],
    ids=["right", "attention", "grouped", "gradient"],
)
def test_the_parts_of_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, classes: dict[str, type], failed: list[int]
) -> None:
    stand_in = ModuleType("transformer_engine.pytorch")
    for name, each in {**RIGHT, **classes}.items():
        setattr(stand_in, name, each)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", stand_in)
    rows = importlib.import_module("smoke.te").measure(tiny())
    assert [number for number, row in enumerate(rows) if not row.ok] == failed


# --- memory


def test_the_peak_of_an_update_is_compared_with_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The plan's term for contexts does not count, because torch does not allocate them."""
    platforms.activate()  # before Megatron-Core is imported
    models, training = importlib.import_module("smoke.models"), importlib.import_module("smoke.training")
    models.write_config(tmp_path, models.SMALL)
    config = models.make_config(tmp_path, model={"path": tmp_path, "load_weights": False})
    info, layout = load_info(tmp_path), Layout()
    policy = SimpleNamespace(info=info, layout=layout)
    terms = trainer_memory(config, info, layout, cuda=True, fused=False, limit=None).terms
    contexts = sum(term.bytes for term in terms if "CUDA" in term.name)
    during = sum(term.bytes for term in terms if term.when in ("always", "update"))
    assert 0 < contexts < during
    planned = during - contexts
    for peak, ok in ((planned, True), (1.2 * planned, False)):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda peak=peak: peak)
        row = training._memory_row(config, policy)
        assert row.ok is ok and row.reference == planned / 2**30


def test_pinned_and_pageable_copies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def unpinned(*sizes: int, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    row = importlib.import_module("smoke.state")._pinned_row(tiny())
    assert pinned == [False, True, False] and row.measured > 0 and row.reference > 0
    assert row.details["gb_per_s"] == pytest.approx(2**20 / row.measured / 1e9)


# --- CUDA's streams and NCCL


class RecordingNCCL:
    """Records how it was made, and the blocking mode that the constructor has read."""

    made: list[tuple[float, str | None]]

    class Options:
        _timeout: Any = None

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        assert (rank, size) == (0, 1)
        self.made.append((options._timeout.total_seconds(), os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))

    def broadcast(self, tensors: list[Tensor], options: object) -> Any:
        return SimpleNamespace(wait=lambda: True)


def test_streams_of_cuda_are_used_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    for name, value in {
        "set_device": lambda device: calls.append(("device", device)),
        "_sleep": lambda cycles: calls.append(("sleep", cycles)),
        "synchronize": lambda: calls.append("synchronize"),
        "Stream": lambda: "new",
        "default_stream": lambda: "default",
        "stream": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(RecordingNCCL, "made", [], raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordingNCCL, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "before")
    device = torch.device("cpu")
    streams = importlib.import_module("smoke.streams").CudaStreams(device)
    assert calls == [("device", device), ("sleep", 10**8), "synchronize", ("sleep", 10**9), "synchronize"]
    calls.clear()
    streams._cycles_per_s = 2e9
    streams.occupy(0.5)
    streams.synchronize()
    assert calls == [("sleep", 10**9), "synchronize"]
    with streams.stream(own=True) as own, streams.stream(own=False) as shared:
        assert (own, shared) == ("new", "default")
    streams.group(timeout_s=2.0, blocking=True)
    streams.group(timeout_s=60.0, blocking=False)
    assert RecordingNCCL.made == [(2.0, "1"), (60.0, "0")]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "before"
    assert streams.tensor().device == device
