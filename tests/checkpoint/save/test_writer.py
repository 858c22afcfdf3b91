"""The way of a save off the device (pinned and unordered from a GPU, plainly from a CPU), a plan that fails, and the
threads that write.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.storage import WriteResult

from megarl import platforms
from megarl.checkpoint.format.manifest import FileEntry
from megarl.checkpoint.save.writer import FILES_PER_RANK, BackgroundWrite, _PlanOnly, copy_to_host, plan_save
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


def test_a_save_that_cannot_be_planned_is_an_ordinary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own is no Exception, so that a rank would end without a report."""

    def fail(*args: object) -> None:
        raise CheckpointException("plan", {rank: _wrap_exception(ValueError(f"{rank} fails")) for rank in (3, 1)})

    monkeypatch.setattr(_PlanOnly, "async_save", fail)
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: SimpleNamespace(size=lambda: 1))
    with pytest.raises(RuntimeError, match="the save to step-7 cannot be planned: rank 1: 1 fails"):
        plan_save({}, Path("step-7"))


def test_every_thread_that_writes_leaves_crcs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch keeps the option for each thread; CRCs take more processor time than all the rest of a save."""
    seen: list[bool] = []

    def write(self: BackgroundWrite, index: int) -> tuple[str, FileEntry, list[WriteResult]]:
        seen.append(torch.serialization.get_crc32_options())
        return str(index), FileEntry(0, ""), []

    monkeypatch.setattr(BackgroundWrite, "_write_file", write)
    save = BackgroundWrite.__new__(BackgroundWrite)
    save.directory, save._buckets = tmp_path, [("path", "name", ([], []))] * FILES_PER_RANK
    before = torch.serialization.get_crc32_options()
    written = save._write_all()
    assert written.error is None and sorted(written.files) == ["0", "1"]
    assert seen == [False] * FILES_PER_RANK
    assert torch.serialization.get_crc32_options() is before, "the caller's own saves have changed"
