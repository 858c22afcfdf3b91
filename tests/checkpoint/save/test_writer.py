"""The way of a save off the device: pinned and unordered from a GPU, plainly from a CPU."""

from __future__ import annotations

import pytest
import torch

from megarl import platforms
from megarl.checkpoint.save.writer import copy_to_host
from megarl.platforms import Platform

CUDA = Platform(torch.device("cuda"), True, "nccl")
CPU = Platform(torch.device("cpu"), False, "gloo")


class Watched:
    """Stands for a tensor; it records how it is copied."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def to(self, device: str, non_blocking: bool) -> Watched:
        self.calls.append((device, non_blocking))
        return self


@pytest.mark.parametrize(("platform", "pinned"), [(CUDA, True), (CPU, False)])
def test_copies_from_a_gpu_are_pinned_and_awaited_together(
    monkeypatch: pytest.MonkeyPatch, platform: Platform, pinned: bool
) -> None:
    """torch pins the destination of a non-blocking copy from CUDA to the CPU; one synchronize follows all copies."""
    monkeypatch.setattr(platforms, "current", lambda: platform)
    synchronized: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: synchronized.append(True))
    tensors = [Watched(), Watched()]
    [(path, name, (texts, copied))] = copy_to_host([("f", "k", ([], [("a", tensors[0]), ("b", tensors[1])]))])
    assert [tensor.calls for tensor in tensors] == [[("cpu", pinned)]] * 2
    assert (path, name, texts, [item for item, _ in copied]) == ("f", "k", [], ["a", "b"])
    assert synchronized == [True] * pinned
