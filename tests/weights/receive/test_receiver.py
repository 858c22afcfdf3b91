"""The receiver keeps a tensor that is larger than a bucket for no longer than it takes to load it."""

import weakref
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megarl.weights.plan.buckets import Bucket, TensorSpec, bucket_plan
from megarl.weights.receive.receiver import Receiver

ENTRIES = [TensorSpec(name, (rows, 64), "float32", 0) for name, rows in (("large", 64), ("a", 8), ("b", 8))]


class RecordingLoader:
    """Keeps no tensor that it loads alive."""

    way, obstacle = "test", None

    def __init__(self) -> None:
        self.large: weakref.ref[torch.Tensor] | None = None
        self.loaded: list[str] = []

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.loaded.append(name)
            if name == "large":
                self.large = weakref.ref(tensor)

    def detach(self, buffer_B: torch.Tensor) -> None:
        pass


def test_a_split_tensor_is_freed_before_the_next_bucket_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bucket_plan(ENTRIES, 8192)
    loader = RecordingLoader()
    receiver = Receiver(MagicMock(), plan, loader, torch.device("cpu"))
    alive: dict[int, bool] = {}

    def post(bucket: Bucket) -> tuple[torch.Tensor, Any]:
        pending = MagicMock()
        pending.wait = lambda: alive.__setitem__(bucket.index, loader.large is not None and loader.large() is not None)
        return receiver._buffers.take(), pending

    monkeypatch.setattr(receiver, "_post", post)
    monkeypatch.setattr(receiver, "_check", lambda *_: 0)
    receiver._receive_all(1)
    assert loader.loaded == ["large", "a", "b"] and len(plan.buckets) > 2
    assert alive == dict.fromkeys(range(len(plan.buckets)), False)
